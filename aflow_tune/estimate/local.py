"""The local engines: sampler and trainer of `engines/local`, in one process or behind Ray.

What each part holds is read off our own code; the docstrings name the places. Two things make
the sum of a process larger than the largest of its phases, and both are counted:

- A model whose file has the number format it runs in is mapped, not read: its pages are shared by
  every copy of it, in one process or in several, and are counted once.
- On a CPU, tensors below 32 MB come from malloc's arenas, one a thread, which keep what they
  freed (glibc: M_MMAP_THRESHOLD rises up to 32 MB, mallopt(3)). The sampler's thread and the
  trainer's thread each keep their own largest moment, so phases add up instead of taking turns.
  What an arena wastes between its pieces is `FRAGMENTATION`, a measured allowance. After each
  train step freed memory goes back (`engines/local/models.py`, where the C library has
  malloc_trim; macOS and musl have not): sampling and training still add up within a step, but
  what comes after the last step, the export and the next stage of a chain, finds the trainer's
  part free again (`LocalRun.gives_back`).

`benchmarks/estimate_memory.py` measures whole runs and prints estimate and measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aflow_tune.estimate.activations import kept_per_token, layer_working_set
from aflow_tune.estimate.shapes import Lora, ModelShape
from aflow_tune.estimate.types import Need, Part

_FP32 = 4
_MB = 1e6

PROCESS = 640 * _MB
"""Allowance: Python with PyTorch, transformers, PEFT, Trinity and Ray imported and at work. All
allowances are as benchmarks/estimate_memory.py measured them."""
RUN = 5 * _MB
"""Allowance: a run of a workflow under way: its thread, event loop, client and answers."""
VOCABULARY_ENTRY = 900.0
"""Allowance: bytes of a tokenizer for each entry of its vocabulary."""
RAY = 2550 * _MB
"""Allowance: Ray's own processes and the workers of Trinity's split, without weights."""
FRAGMENTATION = 1.15
"""Allowance: what malloc's arenas take for each byte that tensors below 32 MB hold at most."""
SEVERAL = 1.1
"""Allowance: that times more where a step has several micro-batches, of which none fits exactly
into what the one before has left."""
CUDA_CONTEXT = 600 * _MB
"""Allowance: CUDA's own memory in one process."""


@dataclass(frozen=True)
class EngineLimits:
    """Constants of `engines/local`, handed in so that they are written once.

    prefill_tokens: prompt tokens of one forward pass (`llama._PREFILL_TOKENS`).
    stored_tokens: tokens of finished sequences kept as prefixes (`llama._STORED_TOKENS`).
    column_step: columns that the cache grows by (`kv_cache._COLUMN_STEP`).
    chunk_elements: logits that exist at once in training (`packed_model.CHUNK_ELEMENTS`).
    """

    prefill_tokens: int
    stored_tokens: int
    column_step: int
    chunk_elements: int


@dataclass(frozen=True)
class MicroBatch:
    """The largest packed row that the trainer computes at once (`packing.PackedRow`).

    tokens: nodes of the trie. queries, keys: rows of all attention blocks together, padding and
    repeated prefixes included. masks: mask elements of all blocks. scores: elements of the
    largest block's scores for one head. scored: tokens whose log-probability counts. several: it
    is one of several of a step.
    """

    tokens: int
    queries: int
    keys: int
    masks: int
    scores: int
    scored: int
    several: bool = False


@dataclass(frozen=True)
class SamplerLoad:
    """What one sampler decodes.

    rows: sequences at once. prompt, length: tokens of a prompt, and of the longest sequence.
    total: tokens of all different sequences between two weight updates, which prefixes are kept
    of. distinct: prompts of one wave that differ.
    """

    shape: ModelShape
    itemsize: int
    stored_itemsize: int
    lean: bool
    rows: int
    prompt: int
    length: int
    total: int
    distinct: int
    temperature: float = 1.0
    name: str = "sampler"
    source: str = ""
    """The model's folder or name: equal sources share their mapped pages."""
    updated: bool = True
    """Whether new weights come in; the auxiliary models' stay as they are."""


@dataclass(frozen=True)
class TrainerLoad:
    """What the trainer computes. `lora` None trains the full weights."""

    shape: ModelShape
    itemsize: int
    stored_itemsize: int
    lora: Lora | None
    micro: MicroBatch
    entropy: bool = False
    reference: bool = False
    exports: bool = True
    source: str = ""


@dataclass(frozen=True)
class LocalRun:
    """One run on the local engines."""

    samplers: tuple[SamplerLoad, ...]
    trainer: TrainerLoad | None
    limits: EngineLimits
    inline: bool
    device: str = "cpu"
    notes: tuple[str, ...] = field(default=())
    gives_back: bool = False
    """Whether freed memory goes back to the system after each train step."""


def local_needs(run: LocalRun, memory: float | None, gpu: float | None) -> list[Need]:
    """The need of the machine's memory (the whole process tree), and of the GPU if there is one.

    Args:
        memory: bytes of this machine's memory; None if not known.
        gpu: bytes of the GPU; None if not known.
    """
    held = _held(run)
    process = _process(run)
    if run.device == "cpu":
        return [
            Need("sampler and trainer", "memory", (*process, *held), limit=memory, notes=run.notes)
        ]
    context = Part("CUDA", CUDA_CONTEXT * (1 if run.inline else 2), "allowance", allowance=True)
    return [
        Need("sampler and trainer", "GPU", (*held, context), limit=gpu, share=0.9),
        Need("processes", "memory", process, limit=memory, notes=run.notes),
    ]


def _process(run: LocalRun) -> tuple[Part, ...]:
    shapes = [load.shape for load in run.samplers]
    if run.trainer:
        shapes.append(run.trainer.shape)
    vocabulary = max((shape.vocabulary for shape in shapes), default=0)
    base = PROCESS + VOCABULARY_ENTRY * vocabulary
    parts = [Part("Python, PyTorch, Trinity", base, "allowance", allowance=True)]
    runs = max((load.rows for load in run.samplers), default=0)
    if runs:
        parts.append(Part("runs at once", RUN * runs, f"{runs}, allowance", allowance=True))
    if not run.inline:
        parts.append(Part("Ray and its workers", RAY, "allowance", allowance=True))
    return tuple(parts)


def _held(run: LocalRun) -> tuple[Part, ...]:
    parts = [*_weights(run)]
    for load in run.samplers:
        parts += _sampler(run, load)
    if run.trainer is not None:
        parts += _trainer(run, run.trainer)
    return tuple(part for part in parts if part.size)


def _weights(run: LocalRun) -> list[Part]:
    """Base weights of every engine, as `models.load_model` loads them.

    On a CPU a file in the run's own number format is mapped: its pages count once for all that
    read it, and what is trained in place becomes a copy of its own.
    """
    parts = []
    mapped: set[str] = set()

    def load(shape: ModelShape, itemsize: int, stored: int, source: str, written: bool) -> float:
        size = float(shape.parameters * itemsize)
        if run.device != "cpu" or itemsize != stored or written:
            return size
        known = source in mapped
        mapped.add(source)
        return 0.0 if known else size

    for item in run.samplers:
        written = item.updated and run.trainer is not None and run.trainer.lora is None
        size = load(item.shape, item.itemsize, item.stored_itemsize, item.source, written)
        parts.append(Part(f"{item.name} weights", size))
    t = run.trainer
    if t is not None:
        size = load(t.shape, t.itemsize, t.stored_itemsize, t.source, t.lora is None)
        parts.append(Part("trainer weights", size, "" if size else "mapped, counted above"))
        if t.reference and t.lora is None:
            size = load(t.shape, t.itemsize, t.stored_itemsize, t.source, False)
            parts.append(Part("reference policy", size))
    return parts


def _sampler(run: LocalRun, load: SamplerLoad) -> list[Part]:
    parts = []
    packed, repacked = packed_bytes(load, run)
    parts.append(Part(f"{load.name} packed weights", packed + repacked, "old and new at an update"))
    cache, growth = cache_bytes(load, run.limits)
    parts.append(Part(f"{load.name} keys and values", cache, f"{load.rows} sequences"))
    parts.append(Part(f"{load.name} cache while growing", growth))
    if load.lean:
        kept = min(load.total, run.limits.stored_tokens)
        token = load.shape.kv_elements_per_token() * load.itemsize
        size = kept * token * _waste(run)
        parts.append(Part(f"{load.name} stored prefixes", size, f"{kept} tokens"))
    parts.append(Part(f"{load.name} forward pass", _forward(run, load) * _waste(run)))
    return parts


def packed_bytes(load: SamplerLoad, run: LocalRun) -> tuple[float, float]:
    """The lean decoder's own copies of the weights, and the second set during an update.

    `llama.LlamaDecoder._pack`: every linear layer and the output head, laid out for the CPU's
    kernels; the new set of layers is whole before the old one is dropped. On a GPU layers are
    used as they are, but query, key and value are joined, and adapted weights are merged copies
    (`weights.Weights.effective`).
    """
    if not load.lean:
        return 0.0, 0.0
    shape, size = load.shape, load.itemsize
    linears = float(shape.linear_parameters * size)
    if run.device == "cpu":
        again = linears if load.updated and run.trainer is not None else 0.0
        return linears + shape.embedding * size, again
    lora = run.trainer.lora if run.trainer is not None and load.updated else None
    copied = sum(
        linear.inputs * linear.outputs
        for path, linear in shape.modules()
        if path.endswith(("q_proj", "k_proj", "v_proj")) or (lora is not None and lora.adapts(path))
    )
    again = load.updated and run.trainer is not None
    return float(copied * size), float(copied * size) if again else 0.0


def cache_bytes(load: SamplerLoad, limits: EngineLimits) -> tuple[float, float]:
    """Keys and values of the sequences being decoded, and the old storage while it grows.

    `kv_cache.KVCache.reserve`: columns are what the prompt needs, then half as many again, in
    steps of 64; rows grow by 16 or to twice as many. Sequences that join one by one leave the
    rows up to 16 above what is used; half of that is counted.
    """
    columns, before = cache_columns(load.prompt, load.length, limits.column_step)
    rows = load.rows + (8 if load.rows > 16 else 0)
    token = load.shape.kv_elements_per_token() * load.itemsize
    if not load.lean:  # a DynamicCache is made anew at every token
        return float(load.rows * load.length * token), float(load.rows * load.length * token)
    return float(rows * columns * token), float(rows * before * token)


def cache_columns(prompt: int, length: int, step: int) -> tuple[int, int]:
    """Columns of the cache at last, and before it grew the last time (0: it never did)."""
    columns, before = -(-(prompt + 1) // step) * step, 0
    while columns < length:
        before = columns
        columns = -(-max(columns + 1, columns * 3 // 2) // step) * step
    return columns, before


def _forward(run: LocalRun, load: SamplerLoad) -> float:
    """The larger of a prefill and a decode step, and the logits of every sequence.

    A token of a prefill holds two rows of the residual stream, the joined query, key and value,
    and two rows of the MLP; `sampling.draw` holds logits, probabilities and, with a temperature,
    the divided logits in fp32, and the sums of its search.
    """
    shape = load.shape
    width = 2 * shape.hidden + (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    width += 2 * max(block.mlp for block in shape.blocks)
    tokens = min(run.limits.prefill_tokens, max(load.distinct * load.prompt, load.rows))
    if not load.lean:
        tokens = load.distinct * load.prompt
    logits = load.itemsize + _FP32 * (2 if load.temperature == 1.0 else 3)
    return float(tokens * width * load.itemsize + load.rows * shape.vocabulary * logits)


def _trainer(run: LocalRun, t: TrainerLoad) -> list[Part]:
    parts = trained_states(t)
    micro = t.micro
    waste = _waste(run, several=micro.several)
    kept = micro_batch_bytes(t)
    parts.append(Part("activations", kept * waste, f"{micro.tokens} tokens at once"))
    working = micro.tokens * layer_working_set(t.shape, t.itemsize)
    # `trie_attention._BlockAttention.backward`: scores, probabilities and their gradient.
    scores = 3.0 * micro.scores * t.shape.heads * t.itemsize
    parts.append(Part("backward pass", (working + scores) * waste))
    parts.append(Part("logits", _head(run, t) * waste, f"{micro.scored} scored tokens"))
    if t.exports and run.device == "cpu":
        size, note = export_bytes(t), "once, at the end"
        if run.gives_back:  # it takes the place of what the last step gave back
            size = max(0.0, size - _sum(parts, _OF_TRAINER))
            note = "at the end, beyond what a step takes"
        parts.append(Part("export", size, note))
    return parts


def trained_states(t: TrainerLoad) -> list[Part]:
    """What `trainer.LocalTrainer` keeps for an update, and the copies that a sync makes.

    Adapters are fp32: value, gradient and two moments; the sampler holds the last state while
    the next is made. Full weights in bf16 have fp32 masters; their gradients exist in bf16 for
    one micro-batch and in fp32.
    """
    if t.lora is not None:
        size = t.lora.parameters(t.shape) * _FP32
        return [
            Part("adapter, gradient, optimizer", 4.0 * size, f"rank {t.lora.rank}, fp32"),
            Part("adapter copies", 2.0 * size, "for the sampler"),
        ]
    count = t.shape.parameters
    masters = 0 if t.itemsize == _FP32 else count * _FP32
    gradients = count * (_FP32 + (0 if t.itemsize == _FP32 else t.itemsize))
    return [
        Part("fp32 masters", float(masters)),
        Part("gradients", float(gradients)),
        Part("optimizer", 2.0 * count * _FP32, "two moments, fp32"),
        Part("weights for the sampler", float(count * t.itemsize), "a copy at every step"),
    ]


def export_bytes(t: TrainerLoad) -> float:
    """What `export.write_merged` adds: the model once more in its file's number format, of which
    what it writes into becomes a copy. Pages that the run has mapped itself are counted there."""
    written = t.shape.linear_parameters if t.lora else t.shape.parameters
    mapped = 0 if t.itemsize == t.stored_itemsize and t.lora else t.shape.parameters
    return float((written + mapped) * t.stored_itemsize)


def micro_batch_bytes(t: TrainerLoad) -> float:
    """What all layers keep of the largest packed row for the backward pass.

    Attention blocks pad paths and repeat shared prefixes, so queries and keys are counted by the
    blocks' rows; every layer makes its mask anew.
    """
    micro = t.micro
    if not micro.tokens:
        return 0.0
    rows = 0.0
    if t.lora is not None:
        rows = t.lora.rank * len(t.lora.adapted(t.shape)) / t.shape.layers
    token = sum(
        kept_per_token(
            t.shape,
            block,
            t.itemsize,
            full=t.lora is None,
            rank_rows=rows,
            queries=micro.queries / micro.tokens,
            keys=micro.keys / micro.tokens,
            gathered=True,
        )
        for block in t.shape.blocks
    )
    return micro.tokens * token + micro.masks * t.shape.layers


def _head(run: LocalRun, t: TrainerLoad) -> float:
    """`token_scores`: a chunk's logits and its probabilities, the hidden rows, their mean under W
    and their gradient; a trained head adds its gradient in fp32."""
    chunk = min(run.limits.chunk_elements, t.micro.scored * t.shape.vocabulary)
    logits = chunk * (_FP32 * 2 + (t.itemsize if t.itemsize != _FP32 else 0))
    logits += chunk * _FP32 if t.entropy else 0
    rows = t.micro.scored * t.shape.hidden * (t.itemsize * 2 + _FP32)
    head = t.shape.embedding * _FP32 if t.lora is None else 0
    return float(logits + rows + head)


def _waste(run: LocalRun, *, several: bool = False) -> float:
    if run.device != "cpu":
        return 1.0
    return FRAGMENTATION * (SEVERAL if several else 1.0)


_OF_TRAINER = ("activations", "backward pass", "logits")
_OF_SAMPLER = ("forward pass", "stored prefixes")


def _sum(parts: Iterable[Part], names: tuple[str, ...]) -> float:
    return sum(part.size for part in parts if part.name.endswith(names))


def leftovers(stages: Sequence[Sequence[Need]], gives_back: bool) -> float:
    """Bytes that malloc's arenas hold of the runs that one process has done before.

    Each arena keeps its largest moment. With `gives_back` every train step returns all of it, what
    earlier runs left included; only what the sampler does after the last step, the evaluation, is
    kept, and what runs without a trainer did.

    Args:
        stages: the needs of each run, in their order.
    """
    kept = 0.0
    for needs in stages:
        parts = [part for need in needs if need.place == "memory" for part in need.parts]
        trained = _sum(parts, _OF_TRAINER)
        if gives_back and trained:
            kept, trained = 0.0, 0.0
        kept = max(kept, trained + _sum(parts, _OF_SAMPLER))
    return kept
