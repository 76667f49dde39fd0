"""`engine: trinity`: verl's trainer and vLLM's engines, for each GPU.

The trainer is verl 0.8.0's FSDP engine as Trinity 0.6.0 configures it. Sources:

- trinity/trainer/verl/config.py `_build_fsdp_engine_config`: `model_dtype` fp32, `fsdp_size` -1
  (all trainer GPUs), `reshard_after_forward`, gradient checkpointing, no fused kernels.
- verl/workers/engine/fsdp/transformer_impl.py: parameters are held in `model_dtype` and computed
  in bf16; a reference policy's shards stay in the machine's memory (CPUOffloadPolicy).
- trinity/trainer/verl/workers.py `_maybe_patch_lora_fsdp2`: under fsdp2 adapters are bf16.
- verl/workers/engine/base.py `BaseEngineCtx`: `param_offload` and `optimizer_offload` save nothing
  at the peak of a train step.
- Rajbhandari et al., ZeRO (arXiv:1910.02054): what each GPU keeps of the states.
- trinity/common/config_validator.py `GPUMemoryValidator._calc_fsdp_activation_memory`, whose
  coefficients its authors fitted with torch's profiler: logits and backward buffers.

vLLM takes `gpu_memory_utilization` of every GPU whatever the model is; what weights, the largest
forward pass and its own overhead leave becomes blocks of keys and values. So the question is
whether the blocks are enough:

- vllm/v1/worker/gpu_worker.py `determine_available_memory`: utilization x total - peak of a
  profiling run (weights, activations, what is not torch's).
- vllm/v1/kv_cache_interface.py: a block of one layer holds 2 x block_size x kv_heads x head_size
  elements; a layer with a sliding window needs window - 1 + the tokens of a forward pass, and one
  block (`SlidingWindowSpec`). Kwon et al., PagedAttention (arXiv:2309.06180).
- vllm/config/cache.py: block_size 16; vllm/config/scheduler.py: 2,048 tokens a forward pass and
  128 sequences where, as in Trinity's engine, the usage context names no others.

Which GPUs serve what follows Trinity's allocation (`RayClusterConfigValidator.
_set_gpu_allocation_info`): each engine gets tensor x pipeline x data parallel GPUs, the trainer all
that is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trinity.algorithm import ALGORITHM_TYPE

from aflow_tune.errors import BadInput, Fault
from aflow_tune.estimate.local import lora_of
from aflow_tune.estimate.needs import GIB, Need, Part
from aflow_tune.estimate.quantities import Known, Lengths, limits_of, worst
from aflow_tune.estimate.shapes import Lora, ModelShape, NamedModel, kept_per_token, widest_mlp

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

CUDA_CONTEXT = 1.0 * GIB
"""Allowance: CUDA's and NCCL's own memory in one process."""
PROCESS = 4.0 * GIB
"""Allowance: machine's memory of one process with CUDA, PyTorch and verl or vLLM loaded."""
VLLM_OVERHEAD = 1.5 * GIB
"""Allowance: CUDA, NCCL, captured graphs and the sampler's buffers of one GPU."""
USABLE = 0.9
"""Share of a GPU that an allocator that fragments can use; Trinity's own check takes 0.8, or 0.9
with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (`GPUMemoryValidator`)."""
_BF16, _FP32 = 2, 4
_DTYPES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4}
_QUANTISED = {"fp8": 1.0, "bitsandbytes": 0.5 + 4 / 64}
"""Bytes of a linear layer's weight: one; 4-bit NF4 with an fp32 scale of every 64
(arXiv:2305.14314)."""


def gpus_of(config: AflowConfig, gpus: int | None) -> tuple[int, int] | None:
    """The GPUs that the run would have, in all and on a node: as said, else as configured."""
    cluster = config.cluster
    if gpus is not None:
        return gpus, min(gpus, cluster.gpu_per_node or gpus)
    if cluster.node_num and cluster.gpu_per_node:
        return cluster.node_num * cluster.gpu_per_node, cluster.gpu_per_node
    return None


def gpu_needs(
    config: AflowConfig,
    models: Sequence[NamedModel],
    lengths: Lengths,
    gpus: tuple[int, int] | None,
    limit: float | None,
    host: float | None,
) -> tuple[list[Need], int]:
    """The needs of trainer and engines, and the GPUs that are paid for.

    Args:
        models: the policy and the auxiliary models.
        gpus: as `gpus_of` has it; None: one for the trainer beside those of the engines.
        limit: bytes of a GPU; None if not known.
        host: bytes of a machine's memory; None if not known.

    Raises:
        BadInput: a strategy, a quantisation or an engine type that is not counted.
    """
    engines = _engines(config, models, limit)
    taken = sum(need.count for need in engines)
    all_gpus, per_node = gpus or (taken + 1, taken + 1)
    needs = []
    if config.mode in ("both", "train", "colocate"):
        own = 1 if config.mode == "colocate" else all_gpus - taken
        needs += _trainer(config, models[0].shape, lengths, own, per_node, limit, host)
    needs += engines
    if config.mode == "colocate":  # engine and trainer share one GPU, so their needs add up
        on_gpu = [need for need in needs if need.place == "GPU"]
        both = Need(
            "rollout and trainer, colocated",
            "GPU",
            tuple(part for need in on_gpu for part in need.parts),
            limit=limit,
            refusal=next((need.refusal for need in on_gpu if need.refusal), None),
            notes=tuple(note for need in on_gpu for note in need.notes),
        )
        needs = [both, *(need for need in needs if need.place != "GPU")]
    return needs, all_gpus


# -- the trainer ---------------------------------------------------------------------------


def _trainer(
    config: AflowConfig,
    shape: ModelShape,
    lengths: Lengths,
    gpus: int,
    per_node: int,
    limit: float | None,
    host: float | None,
) -> list[Need]:
    """The needs of one of its `gpus`, which share one set of shards, and of a node's memory."""
    where, trainer = config.positions.where, config.trainer
    lora, faults = lora_of(config), []
    if not trainer.trainer_strategy.startswith("fsdp"):
        cure = "trainer_strategy: fsdp2, or measure a short run"
        place = where("trainer.trainer_strategy")
        faults.append(Fault(place, "fsdp or fsdp2", trainer.trainer_strategy, cure))
    if lora is not None and any(block.experts for block in shape.blocks):
        # PEFT adapts the fused tensors of experts, in ways that depend on its version.
        cure = "train the full weights, or estimate with a dense model"
        place = where("model.lora_configs")
        faults.append(Fault(place, "no adapter on a mixture of experts", "one", cure))
    if gpus < 1:
        cure = "more --gpus, or fewer explorer.rollout_model.engine_num"
        place = where("explorer.rollout_model.engine_num")
        faults.append(Fault(place, "a GPU for the trainer", "all are for the engines", cure))
    if faults:
        raise BadInput("This trainer cannot be estimated.", faults)
    fsdp = _verl_settings(trainer.trainer_config, "actor", "fsdp_config")
    model = _verl_settings(trainer.trainer_config, "model")
    fsdp2 = trainer.trainer_strategy == "fsdp2"
    offload = fsdp2 and bool(fsdp.get("offload_policy", trainer.offload_policy))
    held = _DTYPES.get(str(fsdp.get("model_dtype", "fp32")), _FP32)
    algorithm = ALGORITHM_TYPE.get(config.algorithm.algorithm_type)
    # Trinity loads one by the algorithm alone (trinity/trainer/verl/trainer.py).
    reference = bool(algorithm.use_reference) and lora is None
    tokens, notes = _tokens_at_once(config, lengths)

    weights = shape.parameters * held
    trained, base = weights, 0
    if lora is not None:
        trained, base = lora.parameters(shape) * (_BF16 if fsdp2 else held), weights
    states = {"weights": base + trained, "gradients": trained, "optimizer": 2 * trained}
    shard = "" if gpus == 1 else f"1/{gpus} of it"
    parts = [
        Part(f"{role} {name}", size / gpus, shard)
        for role in (("policy", "critic") if algorithm.use_critic else ("policy",))
        for name, size in states.items()
        if size and not offload
    ]
    # Layers gathered in bf16: the one at work and the next, and the root's embedding and head.
    # Their gradients exist once in bf16 and once in fp32, in which they are reduced
    # (MixedPrecisionPolicy: param_dtype bf16, reduce_dtype fp32), unless they are frozen.
    layer = max(block.parameters for block in shape.blocks)
    root = shape.parameters - shape.block_parameters
    reduced = 0 if lora else (_BF16 + _FP32) * max(layer, root)
    gathered = _BF16 * (2 * layer + root) + reduced
    kept = [kept_per_token(shape, block, _BF16, lora) for block in shape.blocks]
    activations, note = sum(kept), "all layers"
    if model.get("enable_gradient_checkpointing", True):
        activations = _BF16 * shape.hidden * shape.layers + max(kept)
        note = "checkpointed: layer inputs and one layer"
    # Logits in bf16 with what cross entropy makes of them, or the buffers of the backward
    # pass: 10 N V, and 4 V H + 80 N H (Trinity's `GPUMemoryValidator`, bf16).
    logits = 10 * tokens * shape.vocabulary
    backward = 4 * shape.vocabulary * shape.hidden + 80 * tokens * shape.hidden
    parts += [
        Part("gathered layers", gathered, "bf16 copies of the layers at work"),
        Part("activations", tokens * activations, f"{tokens} tokens, {note}"),
        Part("logits and backward buffers", max(logits, backward), f"{tokens} tokens"),
        Part("CUDA and NCCL", CUDA_CONTEXT, "allowance", allowance=True),
    ]
    # Every process imports PyTorch and verl. The model is read in `model_dtype` before it is
    # sharded: by every process of a node where embedding and head are tied, else by the first
    # alone (verl/utils/fsdp_utils.py `get_init_weight_context_manager`).
    processes = min(gpus, per_node)
    on_host = [
        Part("processes", processes * PROCESS, f"{processes}, allowance", allowance=True),
        Part("weights while loading", (processes if shape.tied else 1) * weights),
    ]
    if offload:
        on_host.append(Part("offloaded states", sum(states.values()) * processes / gpus))
    if reference:
        on_host.append(Part("reference policy", weights * processes / gpus))
        notes.append("the reference policy's shards are kept in the machine's memory")
    return [
        Need("trainer", "GPU", tuple(parts), gpus, limit, USABLE, notes=tuple(notes)),
        Need("trainer", "memory", tuple(on_host), math.ceil(gpus / per_node), host),
    ]


def _tokens_at_once(config: AflowConfig, lengths: Lengths) -> tuple[int, list[str]]:
    """Tokens that one GPU of the trainer computes at once, padding included, and what to note."""
    trainer, longest = config.trainer, limits_of(config)[2]
    parallel = max(1, trainer.ulysses_sequence_parallel_size)
    tokens = trainer.max_token_len_per_gpu or math.ceil(2 * longest / parallel)
    if trainer.use_remove_padding:
        return tokens, []
    # verl fills a micro-batch by the tokens that count (verl/utils/seqlen_balancing.py
    # `rearrange_micro_batches`); Trinity then pads each of its T / mean rows to the longest
    # (trinity/trainer/verl/monkey_patch.py `prepare_model_inputs`).
    mean = min(longest, lengths.prompt.ceiling() + lengths.response.ceiling())
    padding = max(1.0, min(longest, lengths.longest_prompt + lengths.longest_response) / mean)
    known = worst(lengths.prompt, lengths.response) in (Known.MEASURED, Known.COUNTED)
    note = (
        "use_remove_padding: false pads rows to the longest of their micro-batch: "
        f"{'' if known else 'at least '}{padding:.1f} tokens computed for each that counts"
    )
    return math.ceil(tokens * padding), [note]


def _verl_settings(settings: Any, *path: str) -> Mapping[str, Any]:
    """A section of `trainer.trainer_config`, in verl's flat form or below actor_rollout_ref."""
    at: Any = settings if isinstance(settings, dict) else {}
    at = {**at, **(at.get("actor_rollout_ref") or {})}
    for name in path:
        at = at.get(name) or {}
    return at


# -- the engines ---------------------------------------------------------------------------


def _engines(config: AflowConfig, models: Sequence[NamedModel], limit: float | None) -> list[Need]:
    """The needs of the rollout engines, and of those of each auxiliary model."""
    explorer, where = config.explorer, config.positions.where
    if config.mode not in ("both", "explore", "bench", "serve", "colocate"):
        return []
    named = [("explorer.rollout_model", explorer.rollout_model, "rollout")]
    for number, model in enumerate(explorer.auxiliary_models):
        role = model.name or f"auxiliary model {number}"
        named.append((f"explorer.auxiliary_models.{number}", model, role))
    found: list[Need] = []
    faults: list[Fault] = []
    for at, (key, model, role) in enumerate(named):
        quantization = (model.extra_engine_args or {}).get("quantization")
        if at == 0 and model.engine_type == "external":
            continue
        if not model.engine_type.startswith("vllm"):
            cure = "remove engine_type, or measure a short run"
            faults.append(Fault(where(f"{key}.engine_type"), "vllm", model.engine_type, cure))
        elif quantization is not None and quantization not in _QUANTISED:
            place = where(f"{key}.extra_engine_args.quantization")
            expected = "none, " + " or ".join(_QUANTISED)
            faults.append(Fault(place, expected, repr(quantization), "measure a short run instead"))
        else:
            lora = lora_of(config) if at == 0 else None
            longest = int(model.max_model_len or limits_of(config)[2])
            found.append(engine_need(role, models[at].shape, model, lora, longest, limit))
    if faults:
        raise BadInput("These engines cannot be estimated.", faults)
    return found


def engine_need(
    role: str, shape: ModelShape, model: Any, lora: Lora | None, longest: int, limit: float | None
) -> Need:
    """The need of one GPU of an engine of vLLM, whose share is filled with keys and values.
    Without `limit` the cache is the least that works: one sequence of full length.

    Args:
        model: Trinity's settings of it.
        longest: tokens of a sequence of full length.
    """
    extra = dict(model.extra_engine_args or {})
    split, itemsize = model.tensor_parallel_size, _DTYPES.get(str(model.dtype), 2)
    each = split * model.pipeline_parallel_size
    block_size = int(extra.get("block_size") or 16)
    forward = int(extra.get("max_num_batched_tokens") or 2048)
    sequences = int(extra.get("max_num_seqs") or 128)
    # Embeddings are never quantised.
    quantization = extra.get("quantization")
    held = _QUANTISED[quantization] if quantization else float(itemsize)
    quantised = shape.linear_parameters + sum(b.experts * b.expert for b in shape.blocks)
    weights = quantised * held + (shape.parameters - quantised) * itemsize
    fixed = [Part("weights", weights / each, quantization or "")]
    if lora is not None:
        size = lora.parameters(shape) * itemsize / each
        fixed.append(Part("adapter", size, f"rank {lora.rank}"))
    # The peak of the profiling run. A token holds the residual stream twice, and the larger of
    # the attention's and the MLP's inner rows; the sampler holds the logits of every sequence
    # in the model's type and twice in fp32.
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    rows = forward * itemsize * (2 * shape.hidden + max(attention, 3 * widest_mlp(shape)) / split)
    logits = sequences * shape.vocabulary * (itemsize + 2 * _FP32)
    fixed.append(Part("forward pass", rows + logits, f"{forward} tokens"))
    fixed.append(Part("CUDA and vLLM", VLLM_OVERHEAD, "allowance", allowance=True))
    # Tensor parallelism divides the heads of keys and values; below one head a GPU they are
    # replicated (vllm/model_executor/models/llama.py). Pipeline parallelism divides the layers.
    short = str(extra.get("kv_cache_dtype", "auto")).startswith(("fp8", "int8"))
    heads = max(1.0, shape.kv_heads / split)
    layers = shape.layers / model.pipeline_parallel_size
    token = 2 * heads * shape.head_dim * layers * (1 if short else itemsize)
    one = 0  # blocks of one sequence, over all layers
    for layer in shape.blocks:
        seen = math.inf if layer.window is None else layer.window - 1 + forward
        one += math.ceil(min(seen, longest) / block_size) + (1 if seen < longest else 0)
    sequence = one * token / shape.layers * block_size
    gpus = model.engine_num * model.data_parallel_size * each
    if limit is None:
        kv = Part("keys and values", sequence, "one sequence of full length")
        return Need(role, "GPU", (*fixed, kv), gpus)
    # vLLM fills its share exactly; graphs and other processes live in the rest.
    share = float(model.gpu_memory_utilization)
    free = max(0.0, share * limit - sum(part.size for part in fixed))
    blocks = math.floor(free / (block_size * token))
    tokens, refusal = blocks * block_size, None
    if free < sequence:
        refusal = (
            f"vLLM would not start: {tokens:,} tokens of cache are fewer than one sequence of "
            f"{longest:,}"
        )
    note = (
        f"{token / 1024:,.0f} KiB a token: {tokens:,} tokens, or {free / sequence:.1f} sequences "
        f"of {longest:,}"
    )
    kv = Part("keys and values", tokens * token, f"{blocks:,} blocks of {block_size}")
    return Need(role, "GPU", (*fixed, kv), gpus, limit, share, refusal, (note,))
