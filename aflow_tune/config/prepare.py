"""From settings as written to settings that can be used: `prepare`, for one `Purpose`.

In this order: choose the engine, check the rules for the purpose, fill in what was left out, run
Trinity's validators (for the local engine without those about GPUs, Ray clusters and verl), and
record the differences. No run is started here.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity.common import config_validator as upstream
from trinity.common.config import Config, InferenceModelConfig, OperatorConfig
from trinity.common.constants import StorageType, SyncMethod, SyncStyle

from aflow_tune.config import on_processors
from aflow_tune.config.changes import differences
from aflow_tune.config.engine import choose_engine, give_engine_settings
from aflow_tune.config.names import BATCH_FILES, by_anchors, spell_out
from aflow_tune.config.rules import ADAPTER, MONITOR, RUNS, Case, Purpose, check_settings
from aflow_tune.config.settings import AflowConfig, Change, logical_gpus
from aflow_tune.config.stages import chain_folder
from aflow_tune.config.tasksets import (
    WITHOUT_TASKS,
    fill_held_out,
    settle_paths,
    total_steps,
    user_tasksets,
)
from aflow_tune.engines.local.models import BUNDLED, is_cached, resolve_model
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import find_ray, greet, handlers_kept

__all__ = ["Purpose", "prepare"]

RUN_FILTER = "aflow_tune.engines.trinity.rollout.operators.RunFilter"
ANCHOR_RATE = "aflow_tune.engines.trinity.rollout.operators.AnchorRate"
SAMPLE_STRATEGY = "aflow_tune.engines.trinity.rollout.operators.WholeStepSampleStrategy"
COUNTING_STRATEGIES = ("default", "warmup")
"""Trinity's strategies that take a fixed number of model calls, which varies by rollout here."""


def prepare(
    config: AflowConfig,
    purpose: Purpose = Purpose.RUN,
    *,
    workflow: Callable[..., Any] | None = None,
    judge: Callable[..., Any] | None = None,
    local_model: bool = True,
    faults: Sequence[Fault] = (),
) -> list[Change]:
    """Prepare `config` for a purpose, in place. Idempotent: a second call changes nothing.

    Args:
        purpose: CHECK and ESTIMATE leave nothing on the disk, ask no cluster and fetch nothing.
        workflow, judge: the functions, if known: their source bounds the calls of a rollout, and
            shows which fields of a row they read.
        local_model: False if the policy is behind an endpoint and will not be loaded.
        faults: faults found before, to be reported with those found here.

    Returns:
        Every setting that now differs from what the user wrote.

    Raises:
        BadInput: with every fault found. Warnings are added to `config.warnings`.
    """
    kept = config.prepared
    if kept.changes is not None:
        return kept.changes
    _take_out(config, purpose)
    before = config.flatten()
    why = ""
    if purpose in RUNS:
        config.engine, why = choose_engine(config)
    found = check_settings(Case(config, purpose, workflow, judge, local_model), faults)
    config.warnings.extend(found.warnings)
    if found.faults:
        train = "train" if purpose in RUNS else "be used for this"
        raise BadInput(f"These settings cannot {train}.", found.faults)
    if config.mode == "pairs" and purpose in RUNS:
        _evaluate_training_tasks(config)
    adapt(config)
    if purpose is Purpose.SEARCH:
        give_executor(config)
        set_namespace(config)  # of the Ray that its trials run on
    dry = purpose in (Purpose.CHECK, Purpose.ESTIMATE)
    with _leaving_no_trace(config) if dry else contextlib.nullcontext():
        if purpose in RUNS and config.engine == "local":
            adapt_local(config)
        elif purpose in RUNS:
            adapt_cluster(config, fetch=not dry)
        # Trinity does not know these modes: show its validators `bench`, which runs a workflow too.
        own = config.mode if config.mode in ("harvest", "pairs") else None
        config.mode = "bench" if own else config.mode
        try:
            for validator in _validators(config, purpose, dry):
                _run_validator(validator, config)
        finally:
            config.mode = own or config.mode
    for _, taskset, held_out in user_tasksets(config):
        # Trinity leaves the held-out task sets of `train` unread.
        if purpose not in RUNS or (config.mode == "train" and held_out):
            fill_held_out(config, taskset)
    if purpose in RUNS:
        kept.engine = (config.engine, why)
    else:
        give_engine_settings(config)
    kept.changes = differences(before, config.flatten(), {"engine": why})
    return kept.changes


_EXAMPLES = "buffer.trainer_input.experience_buffer"


def _take_out(config: AflowConfig, purpose: Purpose) -> None:
    """Remove what this purpose and mode do not read, which a stage may inherit; spell out names."""
    spell_out(config)
    inputs = config.buffer.explorer_input
    if purpose in (Purpose.EVALUATE, Purpose.ASK):
        config.mode = "bench"
        inputs.taskset, inputs.tasksets = None, []
    if purpose is Purpose.ASK:
        inputs.eval_tasksets, config.stages = [], []
    if purpose is Purpose.HARVEST:
        config.mode = "harvest"
    if purpose is Purpose.SEARCH:
        config.mode, config.stages = "bench", []
    if purpose not in RUNS:
        return
    if config.mode in ("serve", "pairs"):
        inputs.eval_tasksets = []
    if config.mode in WITHOUT_TASKS:
        inputs.taskset, inputs.tasksets, config.mix = None, [], {}
    buffer = config.buffer.trainer_input.experience_buffer
    if config.mode == "train" and buffer is not None and buffer.path:
        if not config.positions.given(f"{_EXAMPLES}.storage_type"):
            buffer.storage_type = StorageType.FILE.value
        if buffer.storage_type == BATCH_FILES:  # a file is a batch, of any size
            config.buffer.train_batch_size = config.buffer.train_batch_size or 1
        if not config.positions.given(f"{_EXAMPLES}.format.enable_concatenated_multi_turn"):
            buffer.format.enable_concatenated_multi_turn = True
        buffer.name = buffer.name or "experiences"


def _evaluate_training_tasks(config: AflowConfig) -> None:
    """Make the training tasks of `mode: pairs` the ones that are evaluated, each several times."""
    inputs, explorer = config.buffer.explorer_input, config.explorer
    chosen = [*([inputs.taskset] if inputs.taskset else []), *inputs.tasksets]
    for taskset in chosen:
        taskset.name = taskset.name or "train"
        taskset.repeat_times = config.algorithm.repeat_times
    inputs.eval_tasksets, inputs.taskset, inputs.tasksets, config.mix = chosen, None, [], {}
    explorer.eval_on_startup, explorer.bench_on_latest_checkpoint = True, False


def adapt(config: AflowConfig) -> None:
    """Apply settings that every workflow function needs on either engine. A key that the user set
    is changed only if its value cannot work here.

    Raises BadInput: temperatures of training task sets differ from `model.temperature`."""
    given, model = config.positions.given, config.explorer.rollout_model
    model.enable_history = True
    model.enable_openai_api = True
    if not given("explorer.rollout_model.enable_auto_tool_choice"):
        model.enable_auto_tool_choice = True
    if model.enable_auto_tool_choice and not model.tool_call_parser:
        model.tool_call_parser = "hermes"
    inputs = config.buffer.explorer_input
    inputs.default_workflow_type = inputs.default_eval_workflow_type = ADAPTER
    taken: set[str] = set()
    for number, (_, taskset, held_out) in enumerate(user_tasksets(config)):
        taskset.default_workflow_type = ADAPTER
        taskset.name = taskset.name or ("held_out" if held_out else "train")
        taskset.name += f"_{number}" if taskset.name in taken else ""
        taken.add(taskset.name)
    root = config.checkpoint_root_dir or "checkpoints"
    config.checkpoint_root_dir = os.path.abspath(os.path.expanduser(root))
    algorithm, operators = config.algorithm, config.data_processor.experience_pipeline.operators
    if not any(operator.name == RUN_FILTER for operator in operators):
        arguments = {"max_failed_fraction": config.rollout.max_failed_fraction}
        operators.insert(0, OperatorConfig(name=RUN_FILTER, args=arguments))
    names = [operator.name for operator in operators]
    if by_anchors(algorithm) and ANCHOR_RATE not in names:
        operators.insert(names.index(RUN_FILTER) + 1, OperatorConfig(name=ANCHOR_RATE))
    if config.monitor.monitor_type == "tensorboard":
        config.monitor.monitor_type = MONITOR
    if algorithm.algorithm_type == "raft" and algorithm.advantage_fn is None:
        # raft needs none; Trinity 0.6 would fill in ppo's, which its own pipeline then refuses.
        algorithm.advantage_fn = "reinforce"
    _settle_temperature(config)
    # Our timeout must end a rollout before Trinity's timeout drops its whole task.
    rollout, explorer = config.rollout, config.explorer
    if given("explorer.max_timeout") and not given("rollout.run_timeout"):
        rollout.run_timeout = min(rollout.run_timeout, float(explorer.max_timeout))
    explorer.max_timeout = max(explorer.max_timeout, math.ceil(rollout.run_timeout) + 60)
    settle_paths(config)


def give_executor(config: AflowConfig) -> None:
    """Make the untrained model, answering greedily, the executor of a search that names none."""
    if config.search.executor is None:
        model = config.model
        config.search.executor = "executor"
        config.explorer.auxiliary_models.append(
            InferenceModelConfig(
                name="executor",
                model_path=model.model_path,
                temperature=0.0,
                max_model_len=model.max_model_len,
                max_prompt_tokens=model.max_prompt_tokens,
                max_response_tokens=model.max_response_tokens,
                chat_template=model.custom_chat_template,
                enable_thinking=config.explorer.rollout_model.enable_thinking,
            )
        )


def _settle_temperature(config: AflowConfig) -> None:
    """Make `model.temperature`, by which the trainer divides logits, the sampling temperature."""
    found = {
        taskset.rollout_args.temperature: f"{key}.rollout_args.temperature"
        for key, taskset, held_out in user_tasksets(config)
        if not held_out and taskset.rollout_args.temperature is not None
    }
    if not config.positions.given("model.temperature") and len(found) == 1:
        config.model.temperature = next(iter(found))
    expected = f"{config.model.temperature}, as model.temperature, by which the trainer divides"
    fix = "give the temperature once, as model.temperature"
    others = [found[value] for value in found if value != config.model.temperature]
    if others:
        faults = [config.wrong(key, expected, fix) for key in others]
        raise BadInput("Sampling and training would use different temperatures.", faults)


def adapt_local(config: AflowConfig) -> None:
    """Apply settings of the local engine: synchronous steps, one sampler, checkpoints."""
    given, explorer, synchronizer = config.positions.given, config.explorer, config.synchronizer
    synchronizer.sync_method = SyncMethod.MEMORY
    synchronizer.sync_style = SyncStyle.FIXED
    synchronizer.sync_interval = 1
    synchronizer.explorer_sync_interval = synchronizer.trainer_sync_interval = None
    synchronizer.sync_offset = 0
    if not given("explorer.concurrent_mode"):
        explorer.concurrent_mode = "asynchronous"
    if not given("explorer.runner_per_model"):
        # Fewer for a large batch: else rollouts would time out while they wait for the sampler.
        most, repeats = config.local.max_batch, config.algorithm.repeat_times
        crowded = config.buffer.batch_size * repeats > 2 * most
        explorer.runner_per_model = math.ceil(most / repeats) if crowded else most
    for model in (explorer.rollout_model, *explorer.auxiliary_models):
        model.engine_num = model.tensor_parallel_size = 1
        model.data_parallel_size = model.pipeline_parallel_size = 1
    if config.mode == "both" and config.algorithm.sample_strategy is None:
        from trinity.algorithm import ALGORITHM_TYPE

        own = ALGORITHM_TYPE.get(config.algorithm.algorithm_type).default_config()
        if own.get("sample_strategy", "warmup") in COUNTING_STRATEGIES:
            config.algorithm.sample_strategy = SAMPLE_STRATEGY
    pipeline = config.data_processor.experience_pipeline
    if not given("data_processor.experience_pipeline.save_input"):
        pipeline.save_input = pipeline.input_save_path is not None
    if config.deterministic and config.local.dtype == "auto":
        config.local.dtype = "fp32"
    steps = total_steps(config)
    if not given("trainer.save_interval"):
        config.trainer.save_interval = max(1, (steps or 100) // 10)
    if config.model.lora_configs is None and not given("trainer.max_checkpoints_to_keep"):
        config.trainer.max_checkpoints_to_keep = 2
    interval = "explorer.eval_interval"
    if steps and (not given(interval) or config.positions.inherited(interval)):
        explorer.eval_interval = min(explorer.eval_interval, steps)


def adapt_cluster(config: AflowConfig, *, fetch: bool) -> None:
    """Apply settings of vLLM and verl with one workable value. `fetch`: may download models."""
    if config.model.tinker.enable:
        return
    for model in (config.model, *config.explorer.auxiliary_models):
        if model.model_path in BUNDLED and (fetch or is_cached(model.model_path)):
            model.model_path = str(resolve_model(model.model_path))
    critic = config.model.critic_model_path
    if critic in BUNDLED and (fetch or is_cached(critic)):
        config.model.critic_model_path = str(resolve_model(critic))
    synchronizer, trainer = config.synchronizer, config.trainer
    if config.model.lora_configs is not None and synchronizer.sync_method != SyncMethod.CHECKPOINT:
        # vLLM reads the adapter from the checkpoint; Trinity would set `memory` to colocate.
        synchronizer.sync_method = SyncMethod.CHECKPOINT
    for lora in config.model.lora_configs or []:
        lora.name = lora.name or "adapter"  # vLLM asks for one; Trinity sends it None
    if not trainer.use_remove_padding:
        overrides = trainer.trainer_config if isinstance(trainer.trainer_config, dict) else {}
        trainer.trainer_config = _attending_without_flash_attn(overrides)


def _attending_without_flash_attn(overrides: dict[str, Any]) -> dict[str, Any]:
    """verl's settings with PyTorch's SDPA attention, unless they name another; in verl's flat
    layout or its older one below `actor_rollout_ref`, whose `model` wins."""
    older = overrides.get("actor_rollout_ref")
    if isinstance(older, dict) and ("model" in older or "model" not in overrides):
        return {**overrides, "actor_rollout_ref": _attending_without_flash_attn(older)}
    model = {**(overrides.get("model") or {})}
    chosen = {"attn_implementation": "sdpa", **(model.get("override_config") or {})}
    return {**overrides, "model": {**model, "override_config": chosen}}


class LocalExplorerValidator(upstream.ExplorerConfigValidator):
    """Trinity's, without writing a dummy adapter, which loads the whole model, and without its
    limit of one runner per task of a batch: its runners are processes, ours are slots."""

    def validate(self, config: Config) -> None:
        runners = config.explorer.runner_per_model
        super().validate(config)
        config.explorer.runner_per_model = runners

    def _validate_lora(self, config: Config) -> None:
        config.explorer.rollout_model.enable_lora = config.model.lora_configs is not None


class ModeKeepingValidator(upstream.RayClusterConfigValidator):
    """Trinity's sets `colocate` on a single GPU, even for modes that do not share it."""

    def _set_cluster_info(self, config: Config) -> None:
        mode, cluster = config.mode, config.cluster
        found = find_ray(config) if isinstance(config, AflowConfig) else None
        if found is None:  # we will start one here: there is nothing to ask yet
            import torch

            cluster.node_num = cluster.node_num or 1
            here = logical_gpus(config) if on_processors() else torch.cuda.device_count()
            cluster.gpu_per_node = cluster.gpu_per_node or here
            if (cluster.node_num, cluster.gpu_per_node) == (1, 1):
                config.mode = "colocate"
        else:
            greet(found)
            cluster.ray_address = found.address
            with handlers_kept():
                super()._set_cluster_info(config)
        if mode in ("train", "bench", "serve"):
            config.mode = mode


class OfflineModelValidator(upstream.ModelConfigValidator):
    """Trinity's, without asking Tinker's service for its models, which takes a key."""

    def _check_tinker(self, config: Config) -> None:
        from trinity.algorithm import ALGORITHM_TYPE

        if ALGORITHM_TYPE.get(config.algorithm.algorithm_type).use_critic:
            raise ValueError("Critic model is not supported when using tinker!")
        for model in (config.explorer.rollout_model, *config.explorer.auxiliary_models):
            model.engine_type = "tinker"
        config.trainer.trainer_type = "tinker"
        if config.synchronizer.sync_method == SyncMethod.NCCL:
            config.synchronizer.sync_method = SyncMethod.CHECKPOINT


def set_namespace(config: Config) -> None:
    """Set the Ray namespace of a run as Trinity does."""
    if not config.ray_namespace:
        config.ray_namespace = "/".join(
            part for part in (config.project, config.group, config.name) if part
        )


def _local_cluster(config: Config) -> None:
    """The local engine needs no cluster, no GPU and no verl configuration."""
    set_namespace(config)
    config.trainer.trust_remote_code = config.model.trust_remote_code
    for model in (config.explorer.rollout_model, *config.explorer.auxiliary_models):
        model.gpu_per_engine, model.nnodes = 0, 1
    cluster = config.cluster
    cluster.node_num, cluster.gpu_per_node, cluster.total_gpu_num = 1, 0, 0
    cluster.rollout_gpu_num = cluster.auxiliary_model_gpu_num = cluster.explorer_gpu_num = 0


def _run_monitor(config: Config) -> None:
    """Skip importing the monitors of services, which takes most of a second."""
    config.monitor.monitor_args = config.monitor.monitor_args or {}
    config.monitor.cache_dir = os.path.join(config.checkpoint_job_dir, "monitor")


def _validators(
    config: AflowConfig, purpose: Purpose, dry: bool
) -> list[Callable[[AflowConfig], None]]:
    """Trinity's validators, some of them replaced by ours."""
    if purpose not in RUNS:
        return [upstream.ModelConfigValidator().validate, LocalExplorerValidator().validate]
    ours: dict[type, Callable[[AflowConfig], None]] = {}
    if dry and config.monitor.monitor_type == MONITOR:
        ours[upstream.MonitorConfigValidator] = _run_monitor
    local = config.engine == "local"
    if local or dry or not sys.stdin.isatty():
        # It asks a question on the terminal, and would wait for ever without a user.
        ours[upstream.GPUMemoryValidator] = set_namespace
    if local or dry:
        ours[upstream.ExplorerConfigValidator] = LocalExplorerValidator().validate
    if local:
        ours[upstream.RayClusterConfigValidator] = _local_cluster
        ours[upstream.TrainerConfigValidator] = set_namespace
    else:
        sized = bool(config.cluster.node_num and config.cluster.gpu_per_node)
        ours[upstream.RayClusterConfigValidator] = ModeKeepingValidator().validate
        if dry:
            ours[upstream.ModelConfigValidator] = OfflineModelValidator().validate
        if dry and not sized:  # there is no cluster yet to ask
            ours[upstream.RayClusterConfigValidator] = set_namespace
            if not config.model.tinker.enable:
                ours[upstream.TrainerConfigValidator] = set_namespace
    return [ours.get(type(known), known.validate) for known in upstream.validators]


def _run_validator(validator: Callable[[AflowConfig], None], config: AflowConfig) -> None:
    """Run a validator of Trinity; what it refuses becomes a `BadInput`."""
    try:
        validator(config)
    except (ValueError, AssertionError, RuntimeError, ImportError, OSError) as error:
        if isinstance(error, BadInput):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        named = re.search(r"(?:[a-z_]+\.)+[a-z_]+", message)
        key, root = named[0] if named else "", config.checkpoint_root_dir
        if root and str(getattr(error, "filename", None) or "").startswith(root):
            key = "checkpoint_root_dir"
        where = config.positions.where(key) if key in config.flatten() else "configuration"
        expected, title = "settings that fit together", "Trinity refuses this configuration."
        raise BadInput.of(title, where, expected, message, "correct the setting named") from error


@contextlib.contextmanager
def _leaving_no_trace(config: AflowConfig) -> Iterator[None]:
    """Remove the folders that Trinity's validators make, and keep them from importing Trinity's
    selectors, which takes a second: a rule has already checked the names."""
    folder, name = chain_folder(config), "trinity.buffer.selector"
    own = [folder / "monitor", folder / "buffer", folder, *folder.parents]
    there = [path for path in own if path.exists()]
    stand_in = types.ModuleType(name)
    vars(stand_in)["SELECTORS"] = {"sequential": object}
    made = sys.modules.setdefault(name, stand_in) is stand_in
    try:
        yield
    finally:
        if made:
            del sys.modules[name]
        run = Path(config.checkpoint_job_dir or folder)  # a validator may have renamed it
        for path in [run / "monitor", run / "buffer", run, *own]:
            if path not in there:
                with contextlib.suppress(OSError):  # never made, or not empty
                    path.rmdir()
