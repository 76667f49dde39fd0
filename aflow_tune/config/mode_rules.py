"""What each `mode` reads of a configuration.

`both` rolls out a workflow and trains on it; `train` learns from a data set alone; `bench`
evaluates; `harvest` writes a data set for a later `train`; `serve` answers whoever asks, until it
is stopped. A section that a mode does not read is
taken out before anything is checked, so that a stage may inherit it from the top level.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity.common.constants import StorageType

from aflow_tune.errors import Fault

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

FROM_DATA = ("sft", "dpo", "cpt")
"""Algorithms that learn from a data set alone, which `mode: train` reads."""
WITHOUT_TASKS = ("train", "bench", "serve")
"""Modes that read no training task set."""
TRAINING = ("both", "train")
"""Modes of the local engine that leave a trained model behind."""


def needs_workflow(config: AflowConfig) -> bool:
    """Whether a run of this mode calls the workflow function."""
    if config.mode == "serve":
        return False
    return config.mode != "train" or bool(config.buffer.explorer_input.eval_tasksets)


def settle_mode(config: AflowConfig) -> None:
    """Take out what this mode does not read, and fill in what it alone needs."""
    inputs = config.buffer.explorer_input
    if config.mode == "serve":
        inputs.eval_tasksets = []
    if config.mode in WITHOUT_TASKS and (inputs.taskset or inputs.tasksets or config.mix):
        inputs.taskset, inputs.tasksets, config.mix = None, [], {}
    key = "buffer.trainer_input.experience_buffer"
    buffer = config.buffer.trainer_input.experience_buffer
    if config.mode == "train" and buffer is not None and buffer.path:
        if not config.positions.given(f"{key}.storage_type"):
            buffer.storage_type = StorageType.FILE.value
        buffer.name = buffer.name or "experiences"


def check_mode(config: AflowConfig) -> list[Fault]:
    """An algorithm that does not fit the mode, or a mode without what it reads."""
    where, kind = config.positions.where, config.algorithm.algorithm_type
    if config.mode in ("both", "explore", "colocate") and kind in FROM_DATA:
        return [
            Fault(
                where("algorithm.algorithm_type"),
                f"an algorithm that learns from rollouts (mode: {config.mode})",
                f"{kind!r}, which learns from a data set alone",
                "mode: train, or algorithm_type: multi_step_grpo",
            )
        ]
    if config.mode == "train" and kind not in FROM_DATA and config.engine == "local":
        return [
            Fault(
                where("algorithm.algorithm_type"),
                f"one of {', '.join(FROM_DATA)}: `mode: train` learns from a data set alone",
                repr(kind),
                "algorithm_type: sft, or mode: both to learn from rollouts",
            )
        ]
    if config.mode == "bench" and not config.buffer.explorer_input.eval_tasksets:
        cure = "buffer: {explorer_input: {eval_tasksets: [{name: held_out, path: test.jsonl}]}}"
        key = "buffer.explorer_input.eval_tasksets"
        return [Fault(where(key), "at least one held-out task set to evaluate on", "none", cure)]
    return []
