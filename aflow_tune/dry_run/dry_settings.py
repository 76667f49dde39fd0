"""A configuration made small enough for a dry run: the same work, a tiny model, nothing kept.

What decides what a run does stays: rows, workflow, judge, rewards, batch, group, algorithm,
advantage, operators, lengths, adapter. What is replaced: the model, the place where anything is
written, whatever reports elsewhere, held-out evaluation, the number of steps. For a configuration
of `engine: trinity` also what only Trinity's own engines can do; each such setting is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity.common.constants import SyncStyle

from aflow_tune.config.prepare import COUNTING_STRATEGIES
from aflow_tune.config.tasksets import user_tasksets
from aflow_tune.engines.local.scripted import PROJECTIONS
from aflow_tune.find_ray import use_own
from aflow_tune.models.prices import price_of
from aflow_tune.models.types import Usage
from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

LONGEST_RUN = 60.0
"""Seconds that a run of the workflow may take where every model answers at once."""
WIDER = 8
"""By how much lengths grow where another tokenizer than the model's counts them. A token of a
trained tokenizer is rarely longer than so many bytes, each of which another one may count."""

# (key, value): what only Trinity's own engines have, and what takes its place.
_ELSEWHERE: tuple[tuple[str, Any], ...] = (
    ("explorer.concurrent_mode", "asynchronous"),
    ("explorer.over_rollout.ratio", 0.0),
    ("explorer.over_rollout.return_partial_tasks", False),
    ("explorer.rollout_model.engine_type", "vllm"),
    ("explorer.rollout_model.extra_engine_args", {}),
    ("explorer.rollout_model.tool_call_parser", "hermes"),
    ("model.repetition_penalty", 1.0),
    ("model.top_p", 1.0),
    ("model.top_k", -1),
    ("model.rope_scaling", None),
    ("model.rope_theta", None),
    ("data_processor.task_pipeline", None),
    ("algorithm.enable_router_replay", False),
    ("algorithm.rollout_correction", None),
    ("algorithm.optimizer.optimizer_type", "adam"),
)
_LAYERS = ("self_attn",) * 4 + ("mlp",) * 3
_SHORT = 1000


@dataclass(frozen=True)
class Small:
    """What a dry run puts in the place of things. `model` is the folder of the tiny one."""

    folder: Path
    model: Path
    tasks: int
    own_tokens: bool
    call_apis: bool
    inline: bool


def shrink(config: AflowConfig, small: Small, *, trinity: bool) -> list[str]:
    """Change a configuration in place, before it is prepared.

    Args:
        trinity: whether Trinity's own engines were to run it.

    Returns:
        The settings that are left out, in words.
    """
    left_out = _engines(config) if trinity else []
    left_out += _writes_nothing(config, small.folder)
    config.engine, config.mode = "local", "both"
    config.local.device, config.local.dtype = "cpu", "fp32"
    config.inline = config.inline or small.inline
    # The run folder is a temporary one of this machine, and so are the servers that stand in for
    # APIs: the nodes of a cluster would see neither.
    use_own(config)
    model, buffer, explorer = config.model, config.buffer, config.explorer
    model.model_path, model.trust_remote_code = str(small.model), False
    explorer.rollout_model.model_path = None  # it gets that of `model`
    for auxiliary in explorer.auxiliary_models:
        auxiliary.model_path, auxiliary.trust_remote_code = str(small.model), False
    models = [model, explorer.rollout_model, *explorer.auxiliary_models]
    for lengths in models if not small.own_tokens else []:
        for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens"):
            value = getattr(lengths, name)
            if value is not None:
                setattr(lengths, name, value * WIDER)
    for _, taskset, _ in user_tasksets(config) if not small.own_tokens else []:
        if taskset.rollout_args.max_tokens is not None:
            taskset.rollout_args.max_tokens *= WIDER
    if model.lora_configs and not adapts(model.lora_configs[0].target_modules):
        left_out.append(f"target_modules: {model.lora_configs[0].target_modules}")
        model.lora_configs[0].target_modules = "all-linear"
    buffer.batch_size, buffer.train_batch_size = small.tasks, 0
    buffer.total_steps, config.trainer.total_steps = 1, None
    if config.algorithm.sample_strategy in COUNTING_STRATEGIES:
        config.algorithm.sample_strategy = config.algorithm.sample_strategy_args = None
    explorer.eval_on_startup, explorer.eval_interval = False, 1
    explorer.max_repeat_times_per_runner = None
    buffer.explorer_input.eval_tasksets, config.quick_eval = [], None
    if not small.call_apis:
        config.budget = BudgetSection()
        config.rollout.run_timeout = min(config.rollout.run_timeout, LONGEST_RUN)
    return left_out


def _writes_nothing(config: AflowConfig, folder: Path) -> list[str]:
    """Let everything that is written go below `folder`; what reports elsewhere is left out."""
    left_out = []
    config.checkpoint_root_dir = str(folder / "runs")
    config.continue_from_checkpoint = True
    config.prepared.account_folder = None
    config.physical_gpus = None
    config.trainer.save_hf_checkpoint = "never"
    monitor, pipeline = config.monitor, config.data_processor.experience_pipeline
    if monitor.monitor_type != "tensorboard":
        left_out.append(f"monitor {monitor.monitor_type}")
    monitor.monitor_type, monitor.monitor_args = "tensorboard", None
    monitor.enable_ray_timeline = False
    pipeline.save_input, pipeline.input_save_path = False, None
    if config.buffer.trainer_input.experience_buffer is not None:
        left_out.append(
            "buffer.trainer_input.experience_buffer (a queue in memory takes its place)"
        )
        config.buffer.trainer_input.experience_buffer = None
    return left_out


def _engines(config: AflowConfig) -> list[str]:
    """Take out what only Trinity's vLLM and verl have."""
    left_out = []
    for key, value in _ELSEWHERE:
        parent, _, name = key.rpartition(".")
        owner: Any = config
        for part in parent.split("."):
            owner = getattr(owner, part)
        found = getattr(owner, name)
        if found != value:
            if config.positions.given(key):
                left_out.append(f"{key}: {found}")
            setattr(owner, name, value)
    inputs = config.buffer.explorer_input
    for taskset in [inputs.taskset, *inputs.tasksets]:
        if taskset is not None:
            taskset.rollout_args.top_p, taskset.rollout_args.top_k = None, -1
    if config.synchronizer.sync_style != SyncStyle.FIXED:
        left_out.append(f"synchronizer.sync_style: {config.synchronizer.sync_style.value}")
        config.synchronizer.sync_style = SyncStyle.FIXED
    config.model.tinker.enable = config.model.external_model.enable = False
    for auxiliary in config.explorer.auxiliary_models:
        auxiliary.engine_type, auxiliary.tool_call_parser = "vllm", "hermes"
        auxiliary.extra_engine_args = {}
    for adapter in config.model.lora_configs or []:
        adapter.path = adapter.exclude_modules = None
    return left_out


def adapts(target_modules: str | list[str] | tuple[str, ...]) -> bool:
    """Whether `target_modules` names a layer of the tiny model, as PEFT reads it."""
    if target_modules == "all-linear":
        return True
    names = [f"model.layers.0.{at}.{name}" for at, name in zip(_LAYERS, PROJECTIONS, strict=True)]
    if not isinstance(target_modules, str):
        return any(name.endswith(f".{target}") for name in names for target in target_modules)
    try:
        by_pattern = any(re.fullmatch(target_modules, name) for name in names)
    except re.error:
        by_pattern = False
    return by_pattern or any(name.endswith(f".{target_modules}") for name in names)


def behind_apis(config: AflowConfig) -> dict[str, ModelSettings]:
    """The models of `models:` that are called over an API, by role."""
    return {role: model for role, model in config.models.items() if model.model is not None}


def api_stand_ins(
    models: Mapping[str, ModelSettings], serve: Callable[[str], str]
) -> dict[str, ModelSettings]:
    """The same models at an address of this machine, with their own prices and without keys.

    Args:
        serve: starts a server for a model of that name, and returns its address.
    """
    found = dict(models)
    for role, model in models.items():
        if model.model is None:
            continue
        found[role] = replace(
            model,
            provider="openai",
            base_url=serve(model.model),
            api_key_env=None,
            headers_env={},
            prices=_prices(model),
        )
    return found


def _prices(model: ModelSettings) -> PriceSettings | None:
    if model.prices is not None:
        return model.prices
    price = price_of(model.provider, model.base_url, model.model or "")
    if price is None:
        return None
    # Listed prices may rise with the length of a prompt: those of a short one are taken.
    return PriceSettings(
        price.cost(Usage(_SHORT, 0)) * 1_000_000 / _SHORT,
        price.cost(Usage(0, _SHORT)) * 1_000_000 / _SHORT,
    )
