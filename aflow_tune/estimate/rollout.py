"""The rollout engines on GPUs: vLLM, for each GPU.

vLLM takes `gpu_memory_utilization` of every GPU whatever the model is; what weights, the largest
forward pass and its own overhead leave becomes blocks of keys and values. So the question is not
how much it takes but whether the blocks are enough. Sources, by vLLM's own files:

- vllm/v1/worker/gpu_worker.py `determine_available_memory`: utilization x total - peak of a
  profiling run (weights, activations, what is not torch's).
- vllm/v1/kv_cache_interface.py `AttentionSpec.page_size_bytes`: a block of one layer holds
  2 x block_size x kv_heads x head_size elements. Layers with a sliding window need no more than
  window - 1 + the tokens of a forward pass, and one block (`SlidingWindowSpec`).
- vllm/config/cache.py: block_size 16; vllm/config/scheduler.py: 2,048 tokens a forward pass and
  128 sequences where, as in Trinity's engine, the usage context names no others.
- Kwon et al., PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aflow_tune.estimate.shapes import Lora, ModelShape
from aflow_tune.estimate.types import GIB, Need, Part

BLOCK_SIZE = 16
FORWARD_TOKENS = 2048
SEQUENCES = 128
VLLM_OVERHEAD = 1.5 * GIB
"""Allowance: CUDA, NCCL, captured graphs and the sampler's buffers of one GPU."""
_WEIGHT_BYTES = {None: 2.0, "fp8": 1.0, "bitsandbytes": 0.5 + 4 / 64}
"""Bytes of a linear layer's weight: bf16; one byte; 4-bit NF4 with an fp32 scale of every 64
(arXiv:2305.14314)."""


@dataclass(frozen=True)
class EngineSettings:
    """One kind of rollout engine. Replicas of data parallelism count as engines."""

    role: str
    engines: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    utilization: float = 0.9
    max_length: int = 4096
    itemsize: int = 2
    kv_itemsize: int = 2
    quantization: str | None = None
    lora: Lora | None = None
    max_loras: int = 1
    block_size: int = BLOCK_SIZE
    forward_tokens: int = FORWARD_TOKENS
    sequences: int = SEQUENCES
    wanted: int = 1
    """Sequences that the run would like to decode at once on each engine."""

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.engines * self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True)
class CacheRoom:
    """What an engine's cache holds: blocks, tokens, and sequences of full length."""

    blocks: int
    tokens: int
    sequences: float


def weight_bytes(shape: ModelShape, e: EngineSettings) -> float:
    """Bytes of the weights over all GPUs of an engine."""
    held = _WEIGHT_BYTES[e.quantization] if e.quantization else float(e.itemsize)
    experts = sum(block.experts * block.expert for block in shape.blocks)
    quantised = shape.linear_parameters + experts
    return quantised * held + (shape.parameters - quantised) * e.itemsize


def kv_bytes_per_token(shape: ModelShape, e: EngineSettings) -> float:
    """Bytes of one token's keys and values on one GPU.

    Tensor parallelism divides the heads of keys and values; below one head a GPU they are
    replicated (vllm/model_executor/models/llama.py). Pipeline parallelism divides the layers.
    """
    heads = max(1.0, shape.kv_heads / e.tensor_parallel)
    layers = shape.layers / e.pipeline_parallel
    return 2 * heads * shape.head_dim * layers * e.kv_itemsize


def sequence_bytes(shape: ModelShape, e: EngineSettings) -> float:
    """Bytes of one sequence of full length in whole blocks, on one GPU."""
    page = kv_bytes_per_token(shape, e) / shape.layers * e.block_size
    total = 0.0
    for block in shape.blocks:
        tokens = e.max_length
        extra = 0
        if block.window is not None and block.window - 1 + e.forward_tokens < tokens:
            tokens, extra = block.window - 1 + e.forward_tokens, 1
        total += (math.ceil(tokens / e.block_size) + extra) * page
    return total


def forward_bytes(shape: ModelShape, e: EngineSettings) -> float:
    """Peak of the profiling run: the widest layer's rows, and the logits of every sequence.

    A token holds the residual stream twice, and the larger of the attention's and the MLP's
    inner rows; the sampler holds the logits in the model's type and twice in fp32.
    """
    mlp = max(block.mlp * max(1, block.active) for block in shape.blocks)
    inner = max((shape.heads + 2 * shape.kv_heads) * shape.head_dim, 3 * mlp) / e.tensor_parallel
    rows = e.forward_tokens * e.itemsize * (2 * shape.hidden + inner)
    logits = e.sequences * shape.vocabulary * (e.itemsize + 2 * 4)
    return rows + logits


def cache_room(shape: ModelShape, e: EngineSettings, limit: float) -> CacheRoom:
    """The cache of one engine whose GPUs have `limit` bytes each."""
    free = e.utilization * limit - sum(part.size for part in _fixed(shape, e))
    block = e.block_size * kv_bytes_per_token(shape, e)
    blocks = max(0, math.floor(free / block))
    return CacheRoom(blocks, blocks * e.block_size, max(0.0, free) / sequence_bytes(shape, e))


def engine_need(shape: ModelShape, e: EngineSettings, limit: float | None) -> Need:
    """The need of one GPU of an engine. Without `limit` the cache is the least that works: one
    sequence of full length."""
    fixed = _fixed(shape, e)
    token = kv_bytes_per_token(shape, e)
    if limit is None:
        one = Part("keys and values", sequence_bytes(shape, e), "one sequence of full length")
        return Need(e.role, "GPU", (*fixed, one), count=e.gpus)
    room = cache_room(shape, e, limit)
    refusal = None
    if room.sequences < 1:
        refusal = (
            f"vLLM would not start: {room.tokens:,} tokens of cache are fewer than one sequence "
            f"of {e.max_length:,}"
        )
    kv = Part("keys and values", room.tokens * token, f"{room.blocks:,} blocks of {e.block_size}")
    notes = [
        f"{token / 1024:,.0f} KiB a token: {room.tokens:,} tokens, or {room.sequences:.1f} "
        f"sequences of {e.max_length:,}"
    ]
    if 1 <= room.sequences < min(e.wanted, e.sequences):
        notes.append(
            f"fewer than the {min(e.wanted, e.sequences)} that run at once: some wait or are "
            "computed again if all grow to full length"
        )
    return Need(
        e.role,
        "GPU",
        (*fixed, kv),
        count=e.gpus,
        limit=limit,
        # vLLM fills its share exactly; graphs and other processes live in the rest.
        share=max(e.utilization, 0.0),
        refusal=refusal,
        notes=tuple(notes),
    )


def _fixed(shape: ModelShape, e: EngineSettings) -> tuple[Part, ...]:
    split = e.tensor_parallel * e.pipeline_parallel
    parts = [
        Part("weights", weight_bytes(shape, e) / split, e.quantization or ""),
        Part("forward pass", forward_bytes(shape, e), f"{e.forward_tokens} tokens"),
        Part("CUDA and vLLM", VLLM_OVERHEAD, "allowance", allowance=True),
    ]
    if e.lora is not None:
        size = e.max_loras * e.lora.parameters(shape) * e.itemsize / split
        parts.insert(1, Part("adapter", size, f"rank {e.lora.rank}"))
    return tuple(parts)
