"""A prepared `engine: trinity` configuration as the numbers that `estimate/` takes.

Which GPUs serve what follows Trinity's own allocation (`RayClusterConfigValidator.
_set_gpu_allocation_info`): the engines get tensor x pipeline x data parallel GPUs each, the trainer
all that is left. What the trainer does is decided by `build_verl_config`, whose defaults and
frozen keys are read here rather than repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trinity.algorithm import ALGORITHM_TYPE

from aflow_tune.errors import BadInput, Fault
from aflow_tune.estimate.estimate_lengths import limits_of, whole
from aflow_tune.estimate.estimate_local import lora_of
from aflow_tune.estimate.estimate_models import NamedModel
from aflow_tune.estimate.rollout import FORWARD_TOKENS, SEQUENCES, EngineSettings
from aflow_tune.estimate.shapes import ModelShape
from aflow_tune.estimate.step import Lengths, worst
from aflow_tune.estimate.training import TrainerSettings
from aflow_tune.estimate.types import Known

if TYPE_CHECKING:
    from trinity.common.config import InferenceModelConfig

    from aflow_tune.config.load import AflowConfig

_TRAINS = ("both", "train", "colocate")
_ROLLS_OUT = ("both", "explore", "bench", "serve", "colocate")
_QUANTISED = ("fp8", "bitsandbytes")
_DTYPES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4}


@dataclass(frozen=True)
class Cluster:
    """GPUs of a run. `per_node` None where only the number of all is known."""

    gpus: int
    per_node: int


def cluster_of(config: AflowConfig, gpus: int | None) -> Cluster | None:
    """The GPUs that the run would have: as said, as configured, or None where nobody says."""
    cluster = config.cluster
    if gpus is not None:
        return Cluster(gpus, min(gpus, cluster.gpu_per_node or gpus))
    if cluster.node_num and cluster.gpu_per_node:
        return Cluster(cluster.node_num * cluster.gpu_per_node, cluster.gpu_per_node)
    return None


def engines_of(config: AflowConfig) -> list[tuple[str, EngineSettings]]:
    """(model_path, settings) of the rollout engines and of each auxiliary model.

    Raises:
        BadInput: a quantisation or an engine type that is not counted.
    """
    if config.mode not in _ROLLS_OUT:
        return []
    faults: list[Fault] = []
    rollout = config.explorer.rollout_model
    lora = lora_of(config)
    found = []
    runs = config.buffer.batch_size * config.algorithm.repeat_times
    at_once = math.ceil(runs / max(1, rollout.engine_num))
    key = "explorer.rollout_model"
    if rollout.engine_type != "external":
        policy = _engine(config, rollout, key, "rollout", faults)
        found.append((config.model.model_path, EngineSettings(**policy, lora=lora, wanted=at_once)))
    for number, model in enumerate(config.explorer.auxiliary_models):
        key = f"explorer.auxiliary_models.{number}"
        role = model.name or f"auxiliary model {number}"
        settings = EngineSettings(**_engine(config, model, key, role, faults), wanted=at_once)
        found.append((str(model.model_path), settings))
    if faults:
        raise BadInput("These engines cannot be estimated.", faults)
    return found


def _engine(
    config: AflowConfig,
    model: InferenceModelConfig,
    key: str,
    role: str,
    faults: list[Fault],
) -> dict[str, Any]:
    where = config.positions.where
    extra = dict(model.extra_engine_args or {})
    quantization = extra.get("quantization")
    if not model.engine_type.startswith("vllm"):
        cure = "remove engine_type, or measure a short run"
        faults.append(Fault(where(f"{key}.engine_type"), "vllm", model.engine_type, cure))
    if quantization is not None and quantization not in _QUANTISED:
        expected = "none, " + " or ".join(_QUANTISED)
        place = where(f"{key}.extra_engine_args.quantization")
        faults.append(Fault(place, expected, repr(quantization), "measure a short run instead"))
        quantization = None
    itemsize = _DTYPES.get(str(model.dtype), 2)
    kv = str(extra.get("kv_cache_dtype", "auto"))
    return {
        "role": role,
        "engines": model.engine_num * model.data_parallel_size,
        "tensor_parallel": model.tensor_parallel_size,
        "pipeline_parallel": model.pipeline_parallel_size,
        "utilization": float(model.gpu_memory_utilization),
        "max_length": int(model.max_model_len or limits_of(config)[2]),
        "itemsize": itemsize,
        "kv_itemsize": 1 if kv.startswith(("fp8", "int8")) else itemsize,
        "quantization": quantization,
        "block_size": int(extra.get("block_size") or 16),
        "forward_tokens": int(extra.get("max_num_batched_tokens") or FORWARD_TOKENS),
        "sequences": int(extra.get("max_num_seqs") or SEQUENCES),
    }


def trainer_of(
    config: AflowConfig,
    model: NamedModel,
    cluster: Cluster,
    rollout_gpus: int,
    lengths: Lengths,
) -> TrainerSettings | None:
    """The trainer's settings; None where the mode trains nothing.

    Raises:
        BadInput: a strategy that is not counted, or GPUs that do not go round.
    """
    if config.mode not in _TRAINS:
        return None
    where = config.positions.where
    trainer, algorithm = config.trainer, ALGORITHM_TYPE.get(config.algorithm.algorithm_type)
    faults = []
    if not trainer.trainer_strategy.startswith("fsdp"):
        cure = "trainer_strategy: fsdp2, or measure a short run"
        place = where("trainer.trainer_strategy")
        faults.append(Fault(place, "fsdp or fsdp2", trainer.trainer_strategy, cure))
    lora = lora_of(config)
    if lora is not None and any(block.experts for block in model.shape.blocks):
        # PEFT adapts the fused tensors of experts, in ways that depend on its version.
        cure = "train the full weights, or estimate with a dense model"
        place = where("model.lora_configs")
        faults.append(Fault(place, "no adapter on a mixture of experts", "one", cure))
    gpus = 1 if config.mode == "colocate" else cluster.gpus - rollout_gpus
    if gpus < 1:
        cure = f"--gpus {rollout_gpus + 1}, or fewer explorer.rollout_model.engine_num"
        found = f"{cluster.gpus} in all, {rollout_gpus} of them for the engines"
        place = where("explorer.rollout_model.engine_num")
        faults.append(Fault(place, "at least one GPU for the trainer", found, cure))
    if faults:
        raise BadInput("This trainer cannot be estimated.", faults)
    engine = _overrides(trainer.trainer_config, "actor", "fsdp_config")
    hf_model = _overrides(trainer.trainer_config, "model")
    tokens = trainer.max_token_len_per_gpu or math.ceil(
        2 * limits_of(config)[2] / max(1, trainer.ulysses_sequence_parallel_size)
    )
    padding = padding_of(config, lengths)
    notes = []
    if not trainer.use_remove_padding:
        known = worst(lengths.prompt, lengths.response)
        least = "" if known in (Known.MEASURED, Known.COUNTED) else "at least "
        notes.append(
            "use_remove_padding: false pads rows to the longest of their micro-batch: "
            f"{least}{padding:.1f} tokens computed for each that counts"
        )
    return TrainerSettings(
        gpus=gpus,
        gpus_per_node=cluster.per_node,
        tokens=math.ceil(tokens * padding),
        lora=lora,
        strategy=trainer.trainer_strategy,
        offload=bool(engine.get("offload_policy", trainer.offload_policy)),
        checkpointing=bool(hf_model.get("enable_gradient_checkpointing", True)),
        model_bytes=_DTYPES.get(str(engine.get("model_dtype", "fp32")), 4),
        fused_logits=bool(hf_model.get("use_fused_kernels", False)),
        # Trinity loads one by the algorithm alone (trinity/trainer/verl/trainer.py).
        reference=bool(algorithm.use_reference) and lora is None,
        critic=bool(algorithm.use_critic),
        notes=tuple(notes),
    )


def padding_of(config: AflowConfig, lengths: Lengths) -> float:
    """Tokens that the trainer computes for each that counts: the longest sequence by the mean.

    verl fills a micro-batch by the tokens that count (verl/utils/seqlen_balancing.py
    `rearrange_micro_batches`); without `trainer.use_remove_padding` Trinity then pads each of its
    T / mean rows to the longest (trinity/trainer/verl/monkey_patch.py `prepare_model_inputs`).
    """
    if config.trainer.use_remove_padding:
        return 1.0
    limit = limits_of(config)[2]
    prompt, response = whole(lengths.prompt), whole(lengths.response)
    longest = max(prompt, lengths.longest_prompt) + max(response, lengths.longest_response)
    return max(1.0, min(limit, longest) / min(limit, prompt + response))


def _overrides(settings: Any, *path: str) -> dict[str, Any]:
    """A section of `trainer.trainer_config`, in verl's flat form or below actor_rollout_ref."""
    if not isinstance(settings, dict):
        return {}
    at: Any = settings
    if (
        isinstance(settings.get("actor_rollout_ref"), dict)
        and path[0] in (settings["actor_rollout_ref"])
    ):
        at = settings["actor_rollout_ref"]
    for name in path:
        at = at.get(name) if isinstance(at, dict) else None
    return dict(at) if isinstance(at, dict) else {}


def parameters_text(shape: ModelShape) -> str:
    """`7.62 B parameters`, with the active ones of a mixture."""
    billions = f"{shape.parameters / 1e9:.2f} B parameters"
    if shape.active_parameters != shape.parameters:
        billions += f", {shape.active_parameters / 1e9:.2f} B of them for each token"
    return billions
