"""What the local engine cannot do, and what it leaves unread.

Asked only when the local engine was chosen. A setting that would silently change what is
learned is a fault; one that only concerns GPUs is named in a warning.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aflow_tune.config.rules.refusals_cluster import quantising
from aflow_tune.config.tasksets import user_tasksets
from aflow_tune.data.checks import Findings
from aflow_tune.errors import Fault
from aflow_tune.sections import display

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

_MODES = ("both", "train", "bench", "harvest")
_NEEDS_MORE = {
    "mix": "expert data beside the rollouts",
    "mix_chord": "expert data beside the rollouts",
    "on_policy_distill": "a teacher's log-probabilities in every experience",
    "jsd": "a teacher's log-probabilities in every experience",
}
"""Algorithms that read what rollouts of a workflow function do not bring."""
_OPTIMIZERS = ("adam", "adamw")

# (key, what is refused, expected, cure): settings that the local engine would have to ignore.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "synchronizer.sync_style",
        lambda v: v.value == "fully_async",
        "taking turns: the engines share the machine",
        "sync_style: fixed",
    ),
    (
        "explorer.concurrent_mode",
        lambda v: v == "multi-threading",
        "asynchronous or sequential: workflow functions are coroutines",
        "concurrent_mode: asynchronous",
    ),
    (
        "explorer.over_rollout.ratio",
        lambda v: v != 0,
        "0: whole batches only",
        "over_rollout: {ratio: 0.0}",
    ),
    (
        "explorer.over_rollout.return_partial_tasks",
        bool,
        "false: whole groups only",
        "return_partial_tasks: false",
    ),
    (
        "explorer.rollout_model.engine_type",
        lambda v: not v.startswith("vllm"),
        "the default: the local sampler takes its place",
        "remove engine_type",
    ),
    (
        "model.repetition_penalty",
        lambda v: v != 1,
        "1.0: log-probabilities must be those that are trained",
        "repetition_penalty: 1.0",
    ),
    (
        "model.rope_scaling",
        lambda v: v is not None,
        "null: set it in the model's config.json",
        "rope_scaling: null",
    ),
    (
        "model.rope_theta",
        lambda v: v is not None,
        "null: set it in the model's config.json",
        "rope_theta: null",
    ),
    (
        "data_processor.task_pipeline",
        lambda v: v is not None,
        "prepared data: there is no Data-Juicer service",
        "remove task_pipeline",
    ),
    ("algorithm.enable_router_replay", bool, "false", "enable_router_replay: false"),
    (
        "algorithm.rollout_correction",
        lambda v: v is not None,
        "null: sampler and trainer agree in their log-probabilities",
        "rollout_correction: null",
    ),
    (
        "algorithm.optimizer.optimizer_type",
        lambda v: v not in _OPTIMIZERS,
        "one of " + ", ".join(_OPTIMIZERS),
        "optimizer_type: adam",
    ),
)

IGNORED = (
    "cluster.node_num",
    "cluster.gpu_per_node",
    "explorer.rollout_model.*_parallel_size",
    "explorer.rollout_model.gpu_memory_utilization",
    "explorer.rollout_model.enforce_eager",
    "explorer.rollout_model.enable_prefix_caching",
    "explorer.rollout_model.enable_chunked_prefill",
    "explorer.rollout_model.use_v1",
    "explorer.rollout_model.dtype",
    "explorer.rollout_model.seed",
    "explorer.rollout_model.reasoning_parser",
    "explorer.rollout_model.extra_engine_args*",
    "algorithm.optimizer.clip_grad",
    "model.fully_sharded_loras",
    "model.max_cpu_loras",
    "trainer.trainer_type",
    "trainer.trainer_strategy",
    "trainer.use_dynamic_bsz",
    "trainer.use_remove_padding",
    "trainer.balance_batch",
    "trainer.critic_warmup",
    "trainer.max_token_len_per_gpu",
    "trainer.ulysses_sequence_parallel_size",
    "trainer.fix_actor_microbatch_loss_scale",
    "trainer.*offload*",
    "trainer.megatron*",
    "trainer.trainer_config*",
    "trainer.save_strategy",
    "synchronizer.sync_timeout",
)
"""Key patterns that only concern GPUs; the local engine does not read them."""


def check_local(config: AflowConfig) -> Findings:
    """The local engine's refusals and warnings."""
    found = Findings()
    for rule in _RULES:
        found.faults += rule(config)
    found.warnings += _warnings(config)
    return found


def _algorithm(config: AflowConfig) -> Iterable[Fault]:
    from trinity.algorithm import ALGORITHM_TYPE

    kind, where = config.algorithm.algorithm_type, config.positions.where
    if config.mode not in _MODES:
        yield Fault(
            where("mode"),
            f"one of {', '.join(_MODES)} (engine: local)",
            repr(config.mode),
            "mode: both, or engine: trinity",
        )
        return
    if config.mode != "both":
        return
    if kind in _NEEDS_MORE:
        yield Fault(
            where("algorithm.algorithm_type"),
            "an algorithm that needs nothing but rollouts of the workflow",
            f"{kind!r}, which needs {_NEEDS_MORE[kind]}",
            "algorithm_type: multi_step_grpo, or engine: trinity",
        )
        return
    known = kind in ALGORITHM_TYPE._default_mapping or kind in ALGORITHM_TYPE.modules
    if known and ALGORITHM_TYPE.get(kind).use_critic:
        given = config.positions.given("algorithm.algorithm_type")
        yield Fault(
            where("algorithm.algorithm_type"),
            "an algorithm without a critic",
            repr(kind) + ("" if given else " (the default)"),
            "algorithm_type: multi_step_grpo",
        )


def _settings(config: AflowConfig) -> Iterable[Fault]:
    from aflow_tune.config.rules.refusals import value_of

    for key, refused, expected, cure in _REFUSED:
        value = value_of(config, key)
        if refused(value):
            shown = str(getattr(value, "value", value))
            yield Fault(config.positions.where(key), f"{expected} (engine: local)", shown, cure)
    buffer = config.buffer.trainer_input.experience_buffer
    if buffer is not None and buffer.replay_buffer and buffer.replay_buffer.enable:
        key = "buffer.trainer_input.experience_buffer.replay_buffer.enable"
        expected = "false: every step trains on its own rollouts (engine: local)"
        yield Fault(config.positions.where(key), expected, "true", "enable: false")


def _adapters(config: AflowConfig) -> Iterable[Fault]:
    adapters, where = config.model.lora_configs, config.positions.where
    if adapters is None:
        return
    if len(adapters) != 1:
        yield Fault(
            where("model.lora_configs"),
            "one adapter, or no lora_configs to train the full weights",
            f"{len(adapters)} adapters",
            "lora_configs: [{lora_rank: 16, lora_alpha: 32}]",
        )
        return
    adapter, key = adapters[0], "model.lora_configs.0"
    for name in ("lora_rank", "lora_alpha"):
        if getattr(adapter, name) < 1:
            found = str(getattr(adapter, name))
            yield Fault(where(f"{key}.{name}"), "1 or more", found, f"{name}: 16")
    for name, cure in (
        ("path", "merge the adapter into the model and train a new one"),
        ("exclude_modules", "name the modules to adapt in target_modules"),
    ):
        if getattr(adapter, name) and not adapter.is_dummy:
            expected = "nothing: the local engine begins with a new adapter"
            yield Fault(where(f"{key}.{name}"), expected, repr(getattr(adapter, name)), cure)


def _sampling(config: AflowConfig) -> Iterable[Fault]:
    """Training rollouts must be drawn from the distribution whose gradient is taken."""
    why = "the trained log-probabilities are those of the whole distribution"
    for key, taskset, held_out in user_tasksets(config):
        if held_out:
            continue
        rollout, model = taskset.rollout_args, config.model
        own_top_k = config.positions.given(f"{key}.rollout_args.top_k")
        cases = (
            ("top_p", rollout.top_p, model.top_p, lambda v: v == 1, "1.0"),
            (
                "top_k",
                rollout.top_k if own_top_k else None,
                model.top_k,
                lambda v: v <= 0,
                "-1",
            ),
        )
        for name, own, general, whole, default in cases:
            value = general if own is None else own
            if not whole(value):
                place = f"model.{name}" if own is None else f"{key}.rollout_args.{name}"
                yield Fault(
                    config.positions.where(place),
                    f"{default} for training: {why}",
                    str(value),
                    f"{name}: {default} (a held-out task set may have its own rollout_args)",
                )


def _answer_lengths(config: AflowConfig) -> Iterable[Fault]:
    whole = config.model.max_model_len
    for key, taskset, _ in user_tasksets(config):
        limit, place = taskset.rollout_args.max_tokens, f"{key}.rollout_args.max_tokens"
        if limit is not None and (limit < 1 or (whole is not None and limit >= whole)):
            expected = f"from 1 to less than max_model_len ({whole})"
            cure = "remove it: model.max_response_tokens is used"
            yield Fault(config.positions.where(place), expected, str(limit), cure)


def _deterministic(config: AflowConfig) -> Iterable[Fault]:
    if not config.deterministic:
        return
    key = "explorer.max_repeat_times_per_runner"
    if config.explorer.max_repeat_times_per_runner is not None:
        expected = "null with `deterministic: true`: it splits groups by who is free"
        found = str(config.explorer.max_repeat_times_per_runner)
        yield Fault(config.positions.where(key), expected, found, f"{key.split('.')[1]}: null")
    if config.local.dtype in ("bf16", "bfloat16"):
        yield Fault(
            config.positions.where("local.dtype"),
            "fp32 with `deterministic: true`",
            config.local.dtype,
            "dtype: fp32, or deterministic: false",
        )


def _device(config: AflowConfig) -> Iterable[Fault]:
    import torch

    device = config.local.device
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device, True):
        where = config.positions.where("local.device")
        yield Fault(where, f"a machine with {device}", "none here", "device: auto")


def _quantised(config: AflowConfig) -> Iterable[Fault]:
    """Weights asked for in 8 or 4 bits; without this they would be in 16 or 32."""
    arguments = config.explorer.rollout_model.extra_engine_args or {}
    asked = [
        ("explorer.rollout_model.extra_engine_args.quantization", arguments.get("quantization"))
    ]
    asked += quantising(config.trainer.trainer_config, "trainer.trainer_config")
    for key, value in asked:
        if value is not None:
            yield Fault(
                config.positions.where(key),
                "nothing: the layers of the local engine are plain ones (engine: local)",
                f"{key.rpartition('.')[2]}: {value}",
                "remove it; local.dtype: bf16 halves fp32, or engine: trinity (docs/recipes.md)",
            )


_RULES = (
    _algorithm,
    _settings,
    _adapters,
    _sampling,
    _answer_lengths,
    _deterministic,
    _device,
    _quantised,
)


def _warnings(config: AflowConfig) -> Iterable[str]:
    positions = config.positions
    places = {**positions.lines, **positions.overrides, **positions.arguments}
    unread = sorted(
        key
        for key in places
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in IGNORED)
        and not any(other.startswith(key + ".") for other in places)
    )
    if unread:
        names = ", ".join(display(key) for key in unread)
        yield f"not read by the local engine: {names}"
    if (
        config.mode == "both"
        and config.algorithm.sample_strategy is None
        and config.buffer.train_batch_size
    ):
        yield (
            f"{positions.where('buffer.train_batch_size')}: not used by the local engine, which "
            "trains on whole steps however many calls their runs made"
        )
