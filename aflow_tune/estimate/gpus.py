"""Memory of `engine: trinity`: verl's trainer and vLLM's engines, for each GPU.

The trainer is verl 0.8.0's FSDP engine as Trinity 0.6.0 configures it (trinity/trainer/verl/
config.py, workers.py): parameters in fp32 on all trainer GPUs (ZeRO, arXiv:1910.02054), computed in
bf16, with gradient checkpointing; adapters in bf16 under fsdp2. `param_offload` and
`optimizer_offload` save nothing at the peak of a train step.

vLLM takes `gpu_memory_utilization` of every GPU; what remains after weights, the largest forward
pass and its own overhead becomes the KV cache (gpu_worker.py `determine_available_memory`;
arXiv:2309.06180). By default a block has 16 tokens, a forward pass 2,048 tokens and 128 sequences.

GPUs are allocated as Trinity does (`_set_gpu_allocation_info`): each engine gets tensor x pipeline
x data parallel GPUs, the trainer all that is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trinity.algorithm import ALGORITHM_TYPE

from aflow_tune.config.critic import uses_critic, verl_settings
from aflow_tune.errors import BadInput, Fault
from aflow_tune.estimate.local import lora_of
from aflow_tune.estimate.needs import GIB, Need, Part
from aflow_tune.estimate.quantities import Lengths, limits_of
from aflow_tune.estimate.shapes import Lora, ModelShape, NamedModel, kept_per_token

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

CUDA_CONTEXT = 1.0 * GIB
"""Allowance: CUDA's and NCCL's own memory in one process."""
PROCESS = 4.0 * GIB
"""Allowance: host memory of one process with CUDA, PyTorch and verl or vLLM loaded."""
VLLM_OVERHEAD = 1.5 * GIB
"""Allowance: CUDA, NCCL, captured graphs and the sampler's buffers of one GPU."""
USABLE = 0.9
"""Share of a GPU that is usable despite fragmentation (`GPUMemoryValidator`: 0.8 to 0.9)."""
_BF16, _FP32 = 2, 4
_DTYPES = {"bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4}
_QUANTISED = {"fp8": 1.0, "bitsandbytes": 0.5 + 4 / 64}
"""Bytes of a linear layer's weight. bitsandbytes: 4-bit NF4 with an fp32 scale for every 64 weights
(arXiv:2305.14314)."""


def gpus_of(config: AflowConfig, gpus: int | None) -> tuple[int, int] | None:
    """GPUs of the run (in all, on a node): `gpus` if given, else as configured, else None."""
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
    """The needs of trainer and engines, and the number of GPUs of the run.

    Args:
        models: the policy and the auxiliary models; last the critic, if there is one.
        gpus: from `gpus_of`; None: one for the trainer beside those of the engines.
        limit, host: bytes of a GPU, and of a machine's memory; None if not known.

    Raises:
        BadInput: no formula for a strategy, quantisation or engine; or no GPU for the trainer.
    """
    engines = _engines(config, models, limit)
    taken = sum(need.count for need in engines)
    all_gpus, per_node = gpus or (taken + 1, taken + 1)
    if config.mode not in ("both", "train", "colocate"):
        return engines, all_gpus
    own = 1 if config.mode == "colocate" else all_gpus - taken
    critic = models[-1].shape.parameters if uses_critic(config) else 0
    on_gpu, on_host = _trainer(config, models[0].shape, critic, lengths, own, per_node)
    trainer = Need("trainer", "GPU", on_gpu, own, limit, USABLE)
    memory = Need("trainer", "memory", on_host, math.ceil(own / per_node), host)
    if config.mode != "colocate":
        return [trainer, memory, *engines], all_gpus
    # Engine and trainer share one GPU, so their needs add up.
    parts = (*on_gpu, *(part for need in engines for part in need.parts))
    refusal = next((need.refusal for need in engines if need.refusal), None)
    notes = tuple(note for need in engines for note in need.notes)
    role = "rollout and trainer, colocated"
    return [Need(role, "GPU", parts, 1, limit, refusal=refusal, notes=notes), memory], all_gpus


# -- the trainer ---------------------------------------------------------------------------


def _trainer(
    config: AflowConfig,
    shape: ModelShape,
    critic: int,
    lengths: Lengths,
    gpus: int,
    per_node: int,
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Parts on one of its `gpus`, over which the states are sharded, and in a node's memory.
    `critic`: parameters of PPO's second model, which has no adapter (trinity/trainer/verl/
    trainer.py `_init_workers`); 0 for none."""
    where, trainer = config.positions.where, config.trainer
    lora, strategy = lora_of(config), trainer.trainer_strategy
    checks = (
        ("trainer.trainer_strategy", not strategy.startswith("fsdp"), "fsdp or fsdp2", strategy),
        ("explorer.rollout_model.engine_num", gpus < 1, "a GPU for the trainer", "none is left"),
    )
    cure = "change it, give more --gpus, or measure a short run instead"
    faults = [
        Fault(where(key), expected, found, cure) for key, wrong, expected, found in checks if wrong
    ]
    if faults:
        raise BadInput("This trainer cannot be estimated.", faults)
    fsdp = verl_settings(trainer.trainer_config, "actor", "fsdp_config")
    model = verl_settings(trainer.trainer_config, "model")
    fsdp2 = strategy == "fsdp2"
    offload = fsdp2 and bool(fsdp.get("offload_policy", trainer.offload_policy))
    held = _DTYPES.get(str(fsdp.get("model_dtype", "fp32")), _FP32)
    algorithm = ALGORITHM_TYPE.get(config.algorithm.algorithm_type)

    weights = shape.parameters * held
    trained, base = weights, 0
    if lora is not None:
        trained, base = lora.parameters(shape) * (_BF16 if fsdp2 else held), weights
    states = {
        f"{role} {name}": size
        for role, (frozen, own) in {"policy": (base, trained), "critic": (0, critic * held)}.items()
        for name, size in (("weights", frozen + own), ("gradients", own), ("optimizer", 2 * own))
        if frozen + own
    }
    note = "" if gpus == 1 else f"1/{gpus} of it"
    on_gpu = [Part(name, size / gpus, note) for name, size in states.items() if not offload]
    # Layers gathered in bf16: the current one, the next one, and the root's embedding and head.
    # Their gradients exist once in bf16 and once in fp32, in which they are reduced
    # (MixedPrecisionPolicy: param_dtype bf16, reduce_dtype fp32), unless they are frozen.
    root = shape.parameters - shape.layer_parameters
    reduced = 0 if lora else (_BF16 + _FP32) * max(shape.layer, root)
    gathered = _BF16 * (2 * shape.layer + root) + reduced
    tokens, kept = _tokens_at_once(config, lengths), kept_per_token(shape, _BF16, lora)
    activations = shape.layers * kept
    if model.get("enable_gradient_checkpointing", True):
        activations = _BF16 * shape.hidden * shape.layers + kept
    # The larger of logits in bf16 with the intermediates of cross entropy (10 N V) and the
    # buffers of the backward pass (4 V H + 80 N H) (Trinity's `GPUMemoryValidator`, bf16).
    logits = 10 * tokens * shape.vocabulary
    backward = 4 * shape.vocabulary * shape.hidden + 80 * tokens * shape.hidden
    on_gpu += [
        Part("gathered layers", gathered, "bf16 copies of the layers at work"),
        Part("activations", tokens * activations, f"{tokens} tokens"),
        Part("logits and backward buffers", max(logits, backward), f"{tokens} tokens"),
        Part("CUDA and NCCL", CUDA_CONTEXT, "allowance", allowance=True),
    ]
    # The model is read in `model_dtype` before it is sharded: by every process of a node where
    # embedding and head are tied, else by the first alone (verl/utils/fsdp_utils.py
    # `get_init_weight_context_manager`).
    processes = min(gpus, per_node)
    on_host = [
        Part("processes", processes * PROCESS, f"{processes}, allowance", allowance=True),
        Part("weights while loading", (processes if shape.tied else 1) * weights),
    ]
    if offload:
        on_host.append(Part("offloaded states", sum(states.values()) * processes / gpus))
    if algorithm.use_reference and lora is None:  # the algorithm alone decides (trainer.py)
        on_host.append(Part("reference policy", weights * processes / gpus))
    return tuple(on_gpu), tuple(on_host)


def _tokens_at_once(config: AflowConfig, lengths: Lengths) -> int:
    """Tokens that one GPU of the trainer computes at once, padding included.

    Without `use_remove_padding` verl fills a micro-batch by tokens without padding (verl/utils/
    seqlen_balancing.py), and Trinity pads each of its rows to the longest (trinity/trainer/verl/
    monkey_patch.py `prepare_model_inputs`).
    """
    trainer, longest = config.trainer, limits_of(config)[2]
    parallel = max(1, trainer.ulysses_sequence_parallel_size)
    tokens = trainer.max_token_len_per_gpu or math.ceil(2 * longest / parallel)
    if trainer.use_remove_padding:
        return tokens
    mean = min(longest, lengths.prompt.ceiling() + lengths.response.ceiling())
    most = min(longest, lengths.longest_prompt + lengths.longest_response)
    return math.ceil(tokens * max(1.0, most / mean))


# -- the engines ---------------------------------------------------------------------------


def _engines(config: AflowConfig, models: Sequence[NamedModel], limit: float | None) -> list[Need]:
    """The needs of the rollout engines and of each auxiliary model's engines."""
    explorer, where = config.explorer, config.positions.where
    if config.mode not in ("both", "explore", "bench", "pairs", "serve", "colocate"):
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
    """The need of one GPU of a vLLM engine, whose share of memory is filled with the KV cache.
    Without `limit` the cache is the smallest that works: one sequence of `longest` tokens.

    Args:
        model: Trinity's settings of the engine.
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
    quantised = shape.linear_parameters
    weights = quantised * held + (shape.parameters - quantised) * itemsize
    fixed = [Part("weights", weights / each, quantization or "")]
    if lora is not None:
        size = lora.parameters(shape) * itemsize / each
        fixed.append(Part("adapter", size, f"rank {lora.rank}"))
    # The peak of the profiling run. A token holds the residual stream twice, and the larger of
    # the attention's and the MLP's inner rows; the sampler holds the logits of every sequence
    # in the model's type and twice in fp32.
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    rows = forward * itemsize * (2 * shape.hidden + max(attention, 3 * shape.mlp) / split)
    logits = sequences * shape.vocabulary * (itemsize + 2 * _FP32)
    fixed.append(Part("forward pass", rows + logits, f"{forward} tokens"))
    fixed.append(Part("CUDA and vLLM", VLLM_OVERHEAD, "allowance", allowance=True))
    # Tensor parallelism divides the heads of keys and values; below one head a GPU they are
    # replicated (vllm/model_executor/models/llama.py). Pipeline parallelism divides the layers.
    short = str(extra.get("kv_cache_dtype", "auto")).startswith(("fp8", "int8"))
    heads = max(1.0, shape.kv_heads / split)
    layers = shape.layers / model.pipeline_parallel_size
    token = 2 * heads * shape.head_dim * layers * (1 if short else itemsize)
    sequence = math.ceil(longest / block_size) * block_size * token
    gpus = model.engine_num * model.data_parallel_size * each
    if limit is None:
        kv = Part("keys and values", sequence, "one sequence of full length")
        return Need(role, "GPU", (*fixed, kv), gpus)
    # vLLM fills its share exactly; CUDA graphs and other processes use the rest.
    share = float(model.gpu_memory_utilization)
    free = max(0.0, share * limit - sum(part.size for part in fixed))
    blocks = math.floor(free / (block_size * token))
    tokens = blocks * block_size
    refusal = f"vLLM would not start: {tokens:,} tokens of cache, a sequence has {longest:,}"
    note = f"{tokens:,} tokens, or {free / sequence:.1f} sequences of {longest:,}"
    kv = Part("keys and values", tokens * token, f"{blocks:,} blocks of {block_size}")
    parts, starts = (*fixed, kv), free >= sequence
    return Need(role, "GPU", parts, gpus, limit, share, None if starts else refusal, (note,))
