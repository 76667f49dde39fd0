"""What is filled in before Trinity's validators run, so that a short YAML is enough.

`adapt` sets what workflow functions need on either engine, `adapt_local` what the local engine
needs, `adapt_cluster` what Trinity's own engines need. A key that the user set is changed only if
it cannot mean anything here; every change shows in the table, with the reason given here where the
table's own would not fit.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from trinity.common.config import OperatorConfig
from trinity.common.constants import SyncMethod, SyncStyle

from aflow_tune.config.rules.refusals import ADAPTER
from aflow_tune.config.rules.refusals_together import MONITOR
from aflow_tune.config.tasksets import settle_paths, total_steps, user_tasksets
from aflow_tune.engines.local.models import BUNDLED, is_cached, resolve_model
from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

RUN_FILTER = "aflow_tune.engines.trinity.rollout.operators.RunFilter"
ANCHOR_RATE = "aflow_tune.engines.trinity.rollout.operators.AnchorRate"
SAMPLE_STRATEGY = "aflow_tune.engines.trinity.rollout.operators.WholeStepSampleStrategy"
GIGPO = "gigpo"
COUNTING_STRATEGIES = ("default", "warmup")
"""Trinity's strategies that take a number of calls, which a workflow does not fix."""

TOOL_CALL_PARSER = "hermes"
SAVES_A_RUN = 10
"""Checkpoints of a run whose `trainer.save_interval` was left out."""
KEPT_FULL_CHECKPOINTS = 2
_SPARE_SECONDS = 60


def adapt(config: AflowConfig, reasons: dict[str, str]) -> None:
    """Settings that every workflow function needs.

    Raises:
        BadInput: temperatures of training task sets contradict each other.
    """
    given, model = config.positions.given, config.explorer.rollout_model
    model.enable_history = True
    model.enable_openai_api = True
    if not given("explorer.rollout_model.enable_auto_tool_choice"):
        model.enable_auto_tool_choice = True
    if model.enable_auto_tool_choice and not model.tool_call_parser:
        model.tool_call_parser = TOOL_CALL_PARSER
    inputs = config.buffer.explorer_input
    inputs.default_workflow_type = ADAPTER
    inputs.default_eval_workflow_type = ADAPTER
    for number, (_, taskset, held_out) in enumerate(user_tasksets(config)):
        taskset.default_workflow_type = ADAPTER
        taskset.name = taskset.name or ("held_out" if held_out else "train")
        taken = [other.name for _, other, _ in user_tasksets(config)[:number]]
        if taskset.name in taken:
            taskset.name = f"{taskset.name}_{number}"
    if not config.checkpoint_root_dir:
        config.checkpoint_root_dir = "checkpoints"
        reasons["checkpoint_root_dir"] = "where run folders go; made absolute"
    config.checkpoint_root_dir = os.path.abspath(os.path.expanduser(config.checkpoint_root_dir))
    operators = config.data_processor.experience_pipeline.operators
    if not any(operator.name == RUN_FILTER for operator in operators):
        arguments = {"max_failed_fraction": config.rollout.max_failed_fraction}
        operators.insert(0, OperatorConfig(name=RUN_FILTER, args=arguments))
    names = [operator.name for operator in operators]
    if _compares_states(config) and ANCHOR_RATE not in names:
        place = names.index(RUN_FILTER) + 1
        operators.insert(place, OperatorConfig(name=ANCHOR_RATE))
        key = f"data_processor.experience_pipeline.operators.{place}"
        reasons[key] = "measures how often GiGPO has something to compare"
    if config.monitor.monitor_type == "tensorboard":
        config.monitor.monitor_type = MONITOR
    if config.algorithm.algorithm_type == "raft" and config.algorithm.advantage_fn is None:
        # Trinity 0.6 would fill in ppo's, which its own pipeline then refuses.
        config.algorithm.advantage_fn = "reinforce"
        reasons["algorithm.advantage_fn"] = "raft reads no advantage; this one changes nothing"
    _settle_temperature(config)
    _settle_timeouts(config)
    settle_paths(config)


def adapt_local(config: AflowConfig, reasons: dict[str, str]) -> None:
    """Settings of the local engine: turns, memory, one sampler, whole steps."""
    given, explorer, synchronizer = config.positions.given, config.explorer, config.synchronizer
    synchronizer.sync_method = SyncMethod.MEMORY
    synchronizer.sync_style = SyncStyle.FIXED
    synchronizer.sync_interval = 1
    synchronizer.explorer_sync_interval = synchronizer.trainer_sync_interval = None
    synchronizer.sync_offset = 0
    if not given("explorer.concurrent_mode"):
        explorer.concurrent_mode = "asynchronous"
    _settle_runners(config, reasons)
    model = explorer.rollout_model
    model.engine_num = model.tensor_parallel_size = 1
    model.data_parallel_size = model.pipeline_parallel_size = 1
    for auxiliary in explorer.auxiliary_models:
        auxiliary.engine_num = auxiliary.tensor_parallel_size = 1
        auxiliary.data_parallel_size = auxiliary.pipeline_parallel_size = 1
    trains_on_rollouts = config.mode == "both"
    if config.mode == "train":
        for name in ("sync_method", "sync_interval", "sync_style"):
            reasons[f"synchronizer.{name}"] = "Trinity's for a data set; nothing is synchronised"
    if trains_on_rollouts and config.algorithm.sample_strategy is None and _counts_calls(config):
        config.algorithm.sample_strategy = SAMPLE_STRATEGY
    pipeline = config.data_processor.experience_pipeline
    if not given("data_processor.experience_pipeline.save_input"):
        pipeline.save_input = pipeline.input_save_path is not None
    if config.deterministic and config.local.dtype == "auto":
        config.local.dtype = "fp32"
    steps = total_steps(config)
    if not given("trainer.save_interval"):
        config.trainer.save_interval = max(1, (steps or SAVES_A_RUN**2) // SAVES_A_RUN)
    if config.model.lora_configs is None and not given("trainer.max_checkpoints_to_keep"):
        config.trainer.max_checkpoints_to_keep = KEPT_FULL_CHECKPOINTS
    interval = "explorer.eval_interval"
    if steps and (not given(interval) or config.positions.inherited(interval)):
        config.explorer.eval_interval = min(config.explorer.eval_interval, steps)
        reasons[interval] = "would never be reached in this run"


def adapt_cluster(config: AflowConfig, reasons: dict[str, str], *, fetch: bool) -> None:
    """Settings of Trinity's vLLM and verl that only have one value that works.

    Args:
        fetch: a model with a name of ours may be fetched now, if this machine has it not.
    """
    if config.model.tinker.enable:
        return
    for model in (config.model, *config.explorer.auxiliary_models):
        if model.model_path in BUNDLED and (fetch or is_cached(model.model_path)):
            model.model_path = str(resolve_model(model.model_path))
            reasons["model.model_path"] = "the folder of this model, which vLLM and verl load"
    synchronizer, trainer = config.synchronizer, config.trainer
    if config.model.lora_configs is not None and synchronizer.sync_method != SyncMethod.CHECKPOINT:
        # Trinity would set `memory` in colocate mode: then no adapter is written, and vLLM, which
        # reads it from the checkpoint, finds none.
        synchronizer.sync_method = SyncMethod.CHECKPOINT
        reasons["synchronizer.sync_method"] = "vLLM reads the adapter from the checkpoint"
    for lora in config.model.lora_configs or []:
        lora.name = lora.name or "adapter"  # vLLM asks for one; Trinity sends it None
    if not trainer.use_remove_padding:
        overrides = trainer.trainer_config if isinstance(trainer.trainer_config, dict) else {}
        trainer.trainer_config = _attending_without_flash_attn(overrides)


def _attending_without_flash_attn(overrides: dict[str, Any]) -> dict[str, Any]:
    """verl's settings with PyTorch's own attention, unless they name another.

    In the layout that they use: verl's flat one, or its older one below `actor_rollout_ref`, where
    a `model` wins (trinity/trainer/verl/config.py `_normalize_trainer_config`).
    """
    older = overrides.get("actor_rollout_ref")
    if isinstance(older, dict) and ("model" in older or "model" not in overrides):
        return {**overrides, "actor_rollout_ref": _attending_without_flash_attn(older)}
    model = {**(overrides.get("model") or {})}
    chosen = {"attn_implementation": "sdpa", **(model.get("override_config") or {})}
    return {**overrides, "model": {**model, "override_config": chosen}}


def _settle_runners(config: AflowConfig, reasons: dict[str, str]) -> None:
    """Decide how many tasks the local engine works on at once.

    Runners are slots of one process, and evaluations have more tasks than a batch. A large
    batch gets fewer slots, so that runs do not spend their time-out waiting for the sampler.
    """
    if config.positions.given("explorer.runner_per_model"):
        return
    most, repeats = config.local.max_batch, config.algorithm.repeat_times
    crowded = config.buffer.batch_size * repeats > 2 * most
    config.explorer.runner_per_model = math.ceil(most / repeats) if crowded else most
    reasons["explorer.runner_per_model"] = "tasks at once: slots of one process"


def _counts_calls(config: AflowConfig) -> bool:
    from trinity.algorithm import ALGORITHM_TYPE

    own = ALGORITHM_TYPE.get(config.algorithm.algorithm_type).default_config()
    return own.get("sample_strategy", "warmup") in COUNTING_STRATEGIES


def _compares_states(config: AflowConfig) -> bool:
    """Whether GiGPO computes the advantages, as the algorithm or by name."""
    algorithm = config.algorithm
    return (algorithm.advantage_fn or algorithm.algorithm_type) == GIGPO


def _settle_temperature(config: AflowConfig) -> None:
    """The trainer divides by `model.temperature`; make it the one that is sampled with."""
    found: dict[float, str] = {}
    for key, taskset, held_out in user_tasksets(config):
        own = taskset.rollout_args.temperature
        if not held_out and own is not None:
            found.setdefault(own, f"{key}.rollout_args.temperature")
    if not config.positions.given("model.temperature") and len(found) == 1:
        config.model.temperature = next(iter(found))
    faults = [
        Fault(
            config.positions.where(place),
            f"{config.model.temperature}, as model.temperature, by which the trainer divides",
            str(value),
            "give the temperature once, as model.temperature",
        )
        for value, place in found.items()
        if value != config.model.temperature
    ]
    if faults:
        raise BadInput("Sampling and training would use different temperatures.", faults)


def _settle_timeouts(config: AflowConfig) -> None:
    """Our limit of a run must end it before Trinity's drops its whole task."""
    given = config.positions.given
    if given("explorer.max_timeout") and not given("rollout.run_timeout"):
        config.rollout.run_timeout = min(
            config.rollout.run_timeout, float(config.explorer.max_timeout)
        )
    needed = math.ceil(config.rollout.run_timeout) + _SPARE_SECONDS
    config.explorer.max_timeout = max(config.explorer.max_timeout, needed)
