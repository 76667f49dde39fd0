"""The trainer on GPUs: verl 0.8.0's FSDP engine, as Trinity 0.6.0 configures it, for each GPU.

Sources, by file of the installed packages:

- trinity/trainer/verl/config.py `_build_fsdp_engine_config`: `model_dtype` fp32, `fsdp_size` -1
  (all trainer GPUs), `reshard_after_forward` true, gradient checkpointing on, no fused kernels.
- verl/workers/engine/fsdp/transformer_impl.py: parameters are held in `model_dtype` and computed
  in bf16; a reference policy is `forward_only`, its shards stay in the machine's memory
  (CPUOffloadPolicy); a base model under an adapter is sharded in fp32 like a trained one.
- trinity/trainer/verl/workers.py `_maybe_patch_lora_fsdp2`: under fsdp2 adapters are bf16.
- verl/workers/engine/base.py `BaseEngineCtx`: `param_offload` and `optimizer_offload` bring
  shards back for the whole of a train step, so they save nothing at its peak.
- Rajbhandari et al., ZeRO (arXiv:1910.02054): what each GPU keeps of the states.
- trinity/common/config_validator.py `GPUMemoryValidator._calc_fsdp_activation_memory`, whose
  coefficients its authors fitted with torch's profiler: logits and backward buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aflow_tune.estimate.activations import kept_per_token
from aflow_tune.estimate.shapes import Lora, ModelShape
from aflow_tune.estimate.types import GIB, Need, Part

BF16, FP32 = 2, 4
CUDA_CONTEXT = 1.0 * GIB
"""Allowance: CUDA's and NCCL's own memory in one process."""
USABLE = 0.9
"""Share of a GPU that an allocator that fragments can use; Trinity's own check takes 0.8, or 0.9
with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (`GPUMemoryValidator`)."""


@dataclass(frozen=True)
class TrainerSettings:
    """What decides a GPU trainer's memory. `gpus` of all nodes share one set of shards."""

    gpus: int
    gpus_per_node: int
    tokens: int
    """Tokens that one GPU computes at once, padding included."""
    lora: Lora | None = None
    strategy: str = "fsdp2"
    offload: bool = False
    """trainer.offload_policy with fsdp2: states live in the machine's memory."""
    checkpointing: bool = True
    model_bytes: int = FP32
    """Bytes of a parameter as it is held (model_dtype)."""
    fused_logits: bool = False
    reference: bool = False
    """A reference policy of its own is loaded (KL with full weights)."""
    critic: bool = False
    notes: tuple[str, ...] = ()
    """What to say of these settings."""


def trainer_needs(
    shape: ModelShape, settings: TrainerSettings, limit: float | None, host: float | None
) -> list[Need]:
    """The needs of one trainer GPU, and of the machine's memory on one trainer node.

    Args:
        limit: bytes of one GPU; None if not known.
        host: bytes of one machine's memory; None if not known.
    """
    s = settings
    parts = [*_states(shape, s, "policy"), *_working(shape, s)]
    if s.critic:
        parts += _states(shape, s, "critic")
    notes = [*s.notes]
    if s.reference:
        notes.append("the reference policy's shards are kept in the machine's memory")
    parts += [
        Part("activations", s.tokens * _checkpointed(shape, s), _checkpoint_note(s)),
        Part("logits and backward buffers", _head(shape, s), f"{s.tokens} tokens"),
        Part("CUDA and NCCL", CUDA_CONTEXT, "allowance", allowance=True),
    ]
    gpu = Need(
        "trainer",
        "GPU",
        tuple(part for part in parts if part.size),
        count=s.gpus,
        limit=limit,
        share=USABLE,
        notes=tuple(notes),
    )
    return [gpu, _host(shape, s, host)]


def states(shape: ModelShape, settings: TrainerSettings) -> tuple[float, float, float]:
    """Bytes of weights, gradients and Adam's two moments over all GPUs together."""
    held = settings.model_bytes
    if settings.lora is None:
        trained = shape.parameters
        return trained * held, trained * held, 2 * trained * held
    adapter = settings.lora.parameters(shape)
    each = BF16 if settings.strategy == "fsdp2" else held
    return shape.parameters * held + adapter * each, adapter * each, 2 * adapter * each


def _states(shape: ModelShape, s: TrainerSettings, role: str) -> list[Part]:
    if s.offload and s.strategy == "fsdp2":
        return []
    weights, gradients, moments = (size / s.gpus for size in states(shape, s))
    shard = "" if s.gpus == 1 else f"1/{s.gpus} of it"
    return [
        Part(f"{role} weights", weights, shard),
        Part(f"{role} gradients", gradients, shard),
        Part(f"{role} optimizer", moments, shard),
    ]


def _working(shape: ModelShape, s: TrainerSettings) -> list[Part]:
    """Layers gathered in bf16: the one at work and the next, and the root's embedding and head.

    Their gradients exist once in bf16 and once in fp32, in which they are reduced
    (MixedPrecisionPolicy: param_dtype bf16, reduce_dtype fp32), unless they are frozen.
    """
    widest = max(block.parameters for block in shape.blocks)
    root = shape.parameters - shape.block_parameters
    gathered = BF16 * (2 * widest + root)
    reduced = 0 if s.lora else (BF16 + FP32) * max(widest, root)
    return [Part("gathered layers", gathered + reduced, "bf16 copies of the layers at work")]


def _checkpointed(shape: ModelShape, s: TrainerSettings) -> float:
    """Bytes a token: with checkpointing the input of every layer and all that one keeps."""
    layer = max(_kept(shape, s, number) for number in range(shape.layers))
    if s.checkpointing:
        return BF16 * shape.hidden * shape.layers + layer
    return sum(_kept(shape, s, number) for number in range(shape.layers))


def _kept(shape: ModelShape, s: TrainerSettings, number: int) -> float:
    rows = 0.0
    if s.lora is not None:
        rows = s.lora.rank * len(s.lora.adapted(shape)) / shape.layers
    return kept_per_token(shape, shape.blocks[number], BF16, full=s.lora is None, rank_rows=rows)


def _checkpoint_note(s: TrainerSettings) -> str:
    kept = "checkpointed: layer inputs and one layer" if s.checkpointing else "all layers"
    return f"{s.tokens} tokens, {kept}"


def _head(shape: ModelShape, s: TrainerSettings) -> float:
    """Logits in bf16 with what cross entropy makes of them, or the buffers of the backward pass,
    whichever is larger: 10 N V, and 4 V H + 80 N H (Trinity's `GPUMemoryValidator`, bf16)."""
    n, v, h = s.tokens, shape.vocabulary, shape.hidden
    logits = 20480 * v if s.fused_logits else 10 * n * v
    return max(logits, 4 * v * h + 80 * n * h)


def _host(shape: ModelShape, s: TrainerSettings, limit: float | None) -> Need:
    """The machine's memory on one trainer node.

    Every process imports PyTorch and verl. The model is read in `model_dtype` before it is
    sharded: by every process of a node where embedding and head are tied, else by the first
    alone (verl/utils/fsdp_utils.py `get_init_weight_context_manager`).
    """
    processes = min(s.gpus, s.gpus_per_node)
    readers = processes if shape.tied else 1
    parts = [
        Part("processes", processes * PROCESS, f"{processes}, allowance", allowance=True),
        Part("weights while loading", readers * shape.parameters * s.model_bytes),
    ]
    on_node = processes / s.gpus
    if s.offload and s.strategy == "fsdp2":
        parts.append(Part("offloaded states", sum(states(shape, s)) * on_node))
    if s.reference:
        parts.append(Part("reference policy", shape.parameters * s.model_bytes * on_node))
    return Need(
        "trainer",
        "memory",
        tuple(parts),
        count=math.ceil(s.gpus / s.gpus_per_node),
        limit=limit,
    )


PROCESS = 4.0 * GIB
"""Allowance: machine's memory of one process with CUDA, PyTorch and verl or vLLM loaded."""
