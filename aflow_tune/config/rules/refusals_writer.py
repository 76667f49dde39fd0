"""What the section `writer:` asks of the rest of the configuration and of the data.

The section itself, with `models:` and the auxiliary models, is checked in `writer/settings.py`,
which knows no configuration; this file holds what only a whole one can tell.

An executor of `explorer.auxiliary_models` is a sampler of its own that loads `model_path` once;
weights of a step are handed to the rollout model's sampler alone, inline and through Ray. So it
stays frozen although it may begin as the very model that is tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aflow_tune.data.checks import Findings
from aflow_tune.data.rows import Table
from aflow_tune.errors import Fault
from aflow_tune.sections import WriterSection
from aflow_tune.writer.types import PROBLEM_TYPES

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.writer.workflow import AuxiliaryModel

OVER_TURNS = ("multi_step_grpo", "gigpo")
"""Algorithms whose advantage compares runs of several calls."""
CHARS_A_TOKEN = 4
"""Of English and code, about; only for a warning."""
_SHOWN = 3


def auxiliary_models(config: AflowConfig) -> dict[str, AuxiliaryModel]:
    """The auxiliary models by name, with the lengths that they inherit where they name none."""
    from aflow_tune.writer.workflow import AuxiliaryModel

    found = {}
    for auxiliary in config.explorer.auxiliary_models:
        if not auxiliary.name:
            continue
        answer = auxiliary.max_response_tokens or config.model.max_response_tokens
        prompt = auxiliary.max_prompt_tokens or config.model.max_prompt_tokens
        whole = auxiliary.max_model_len or config.model.max_model_len
        if prompt is None and whole is not None:
            prompt = max(1, whole - (answer or whole // 2))
        found[auxiliary.name] = AuxiliaryModel(answer_tokens=answer, prompt_tokens=prompt)
    return found


def check_writer(config: AflowConfig, workflow: Callable[..., Any] | None = None) -> Findings:
    """Keys that nothing reads, an algorithm that does not fit the turns, limits that contradict."""
    found = Findings()
    positions, section = config.positions, config.writer
    if not section.executor:
        if section != WriterSection():
            expected = "a role that runs the workflows: without it the section is not read"
            cure = "writer: {executor: executor}, or remove the section"
            where = positions.where("writer.executor")
            found.faults.append(Fault(where, expected, "nothing", cure))
        return found
    kind = config.algorithm.algorithm_type
    if section.turns > 1 and config.mode == "both" and kind not in OVER_TURNS:
        found.warnings.append(
            f"{positions.where('writer.turns')}: {kind} takes each turn for a run of its own; "
            f"use {' or '.join(OVER_TURNS)}"
        )
    if section.turns == 1 and config.mode == "both" and kind == "gigpo":
        found.warnings.append(
            f"{positions.where('algorithm.algorithm_type')}: with one turn all calls of a task are "
            "made in one state, and gigpo adds nothing: set writer.turns, or use multi_step_grpo"
        )
    room = config.model.max_prompt_tokens or config.model.max_model_len
    messages = getattr(workflow, "messages", None)
    if messages is not None and room is not None:
        asked = messages("", section.problem_type or PROBLEM_TYPES[0])
        tokens = len(asked[0]["content"]) // CHARS_A_TOKEN
        if tokens > room:
            found.warnings.append(
                f"{positions.where('model.max_prompt_tokens')}: the policy's prompt alone has "
                f"about {tokens} tokens, the model takes {room}: allow fewer operators "
                "(writer.operators), shorten writer.prompt, or raise it"
            )
    needed, limit = section.turns * section.timeout, config.rollout.run_timeout
    if needed > limit:
        found.warnings.append(
            f"{positions.where('rollout.run_timeout')}: a run is given up after {limit:g} s, but "
            f"writer.turns x writer.timeout is {needed:g} s: raise it, or lower writer.timeout"
        )
    return found


def check_writer_rows(
    workflow: Callable[..., Any] | None, table: Table, given: Collection[str] = ()
) -> Iterable[Fault]:
    """Rows that a writer cannot ask about or score: the first few, with their places.

    Args:
        given: fields that every row gets later, from a mix.
    """
    row_faults = getattr(workflow, "row_faults", None)
    if row_faults is None:
        return
    shown = 0
    for row, place in zip(table.rows, table.places, strict=True):
        if "benchmark" in given and not row.get("benchmark"):
            continue
        for fault in row_faults(row):
            yield replace(fault, where=f"{place}: {fault.where}")
            shown += 1
        if shown >= _SHOWN:
            return
