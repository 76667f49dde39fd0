"""The local engines: sampler and trainer of `engines/local`, in one process or behind Ray.

What each part holds is read off our own code; the docstrings name the places. The phases of a step
are added up: the allocator keeps what one thread freed for that thread, so that sampler and trainer
each hold on to their largest moment (glibc: M_MMAP_THRESHOLD, mallopt(3)). Freed memory goes back
after each train step (malloc_trim), so the export at the end counts only beyond what a step takes.

The allowances are as `benchmarks/estimate_memory.py` measured them (docs/estimate.md: the margin).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch

from aflow_tune.config.tasksets import read_taskset
from aflow_tune.engines.local import llama
from aflow_tune.engines.local.models import pick_device, pick_dtype
from aflow_tune.engines.local.packed_model import CHUNK_ELEMENTS
from aflow_tune.estimate.needs import Need, Part
from aflow_tune.estimate.quantities import Lengths, limits_of
from aflow_tune.estimate.shapes import Lora, ModelShape, NamedModel, kept_per_token, widest_mlp

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

_FP32 = 4
_MB = 1e6
PROCESS = 640 * _MB
"""Allowance: Python with PyTorch, transformers, PEFT, Trinity and Ray imported and at work."""
RUN = 5 * _MB
"""Allowance: one rollout under way: its thread, event loop, client and answers."""
VOCABULARY_ENTRY = 900.0
"""Allowance: bytes of a tokenizer for each entry of its vocabulary."""
RAY = 2550 * _MB
"""Allowance: Ray's own processes and the workers of Trinity's split, without weights."""
WASTE = 1.15
"""Allowance: what the allocator takes on a CPU for each byte of a step's tensors."""
CUDA_CONTEXT = 600 * _MB
"""Allowance: CUDA's own memory in one process."""


class Engine(NamedTuple):
    """What all tensors of a run are in."""

    itemsize: int
    on_cpu: bool = True

    @property
    def waste(self) -> float:
        """Bytes taken for each byte of a step's tensors."""
        return WASTE if self.on_cpu else 1.0


class Sampler(NamedTuple):
    """What one sampler decodes.

    rows: sequences at once. prompt, length: tokens of a prompt, and of the longest sequence.
    total: tokens of all different sequences between two weight updates, which prefixes are kept
    of. distinct: different prompts that are decoded at once. updated: new weights come in.
    """

    name: str
    model: NamedModel
    rows: int
    prompt: int
    length: int
    total: int
    distinct: int
    updated: bool


class MicroBatch(NamedTuple):
    """What the trainer computes at once.

    tokens: of all samples, shared prompts once. keys: rows that attention sees, shared prompts
    repeated. pairs: of queries and keys. scored: tokens whose log-probability counts.
    """

    tokens: float
    keys: float
    pairs: float
    scored: float


def lora_of(config: AflowConfig) -> Lora | None:
    """The adapter that is trained; None for full weights."""
    if not config.model.lora_configs:
        return None
    first = config.model.lora_configs[0]
    return Lora(first.lora_rank, first.target_modules, first.exclude_modules)


def local_needs(
    config: AflowConfig,
    models: Sequence[NamedModel],
    lengths: Lengths,
    device: str | None,
    memory: float | None,
    gpu: float | None,
) -> tuple[list[Need], int]:
    """The need of the machine's memory (the whole process tree) and of the GPU if there is one, and
    the GPUs that are paid for.

    Args:
        models: the policy and the auxiliary models of a prepared configuration.
        device: 'cuda' for a machine with a GPU that is not this one; None: this machine.
        memory: bytes of this machine's memory; None if not known.
        gpu: bytes of the GPU; None if not known.
    """
    from aflow_tune.engines.trinity.training.algorithm import TrainStep

    place = pick_device(config.local.device) if device is None else torch.device(device)
    dtype = "float32" if config.deterministic else config.local.dtype
    if device == "cuda" and dtype == "auto":
        dtype = "bf16"
    engine = Engine(pick_dtype(dtype, place).itemsize, place.type == "cpu")
    policy, lora, trains = models[0], lora_of(config), config.mode in ("both", "train")
    samplers = [*_samplers(config, models, lengths)]
    weights = [(f"{s.name} weights", s.model, s.updated and not lora) for s in samplers]
    held: list[Part] = []
    for sampler in samplers:
        held += _sampler(engine, sampler, lora)
    if trains:
        step = TrainStep(config, SimpleNamespace(keep_reference=lambda: None))  # type: ignore[arg-type]
        full = lora is None
        weights.append(("trainer weights", policy, full))
        if step.needs_reference and full:
            weights.append(("reference policy", policy, False))
        micro = _largest_micro_batch(config, lengths, per_group=step.loss.per_group)
        held += trained_states(policy.shape, engine.itemsize, lora)
        at_once = _step(engine, policy, lora, micro, entropy=step.loss.needs_entropy)
        held += at_once
        if config.trainer.save_hf_checkpoint != "never" and engine.on_cpu:
            beyond = _export(policy, engine.itemsize, lora) - sum(part.size for part in at_once)
            held.append(Part("export", max(0.0, beyond), "at the end, beyond what a step takes"))
    held = [part for part in [*_weights(engine, weights), *held] if part.size]
    # Only training on rollouts is split over Ray's processes.
    inline = config.inline or config.mode != "both"
    vocabulary = max((model.shape.vocabulary for _, model, _ in weights), default=0)
    allowances = {
        "Python, PyTorch, Trinity": PROCESS + VOCABULARY_ENTRY * vocabulary,
        "runs at once": RUN * max((sampler.rows for sampler in samplers), default=0),
        "Ray and its workers": 0 if inline else RAY,
    }
    process = [Part(name, size, "allowance", True) for name, size in allowances.items() if size]
    if engine.on_cpu:
        return [Need("sampler and trainer", "memory", (*process, *held), limit=memory)], 0
    context = Part("CUDA", CUDA_CONTEXT * (1 if inline else 2), "allowance", allowance=True)
    return [
        Need("sampler and trainer", "GPU", (*held, context), limit=gpu, share=0.9),
        Need("processes", "memory", tuple(process), limit=memory),
    ], 1


def _samplers(
    config: AflowConfig, models: Sequence[NamedModel], lengths: Lengths
) -> Iterator[Sampler]:
    """What the policy's sampler and those of auxiliary models decode."""
    held_out = config.buffer.explorer_input.eval_tasksets
    if config.mode == "harvest" or (config.mode == "train" and not held_out):
        return
    # A rollout asks for one sequence at a time; evaluations keep every slot busy.
    longest, evaluated = limits_of(config)[2], _evaluated(config)
    runs = max(config.buffer.batch_size * config.algorithm.repeat_times, evaluated)
    rows = min(config.local.max_batch, runs)
    prompt = math.ceil(lengths.longest_prompt)
    length = min(longest, prompt + math.ceil(lengths.longest_response))
    total = runs * lengths.calls.ceiling() * length
    distinct = min(rows, max(config.buffer.batch_size, evaluated))
    updated = config.mode in ("both", "train")
    yield Sampler("sampler", models[0], rows, min(prompt, length), length, total, distinct, updated)
    for number, model in enumerate(models[1:]):
        settings = config.explorer.auxiliary_models[number]
        length = settings.max_model_len or longest
        response = settings.max_response_tokens or length
        prompt = min(settings.max_prompt_tokens or length, max(1, length - response))
        name = settings.name or f"auxiliary model {number}"
        yield Sampler(name, model, rows, prompt, length, rows * length, rows, False)


def _evaluated(config: AflowConfig) -> int:
    """Runs of the largest held-out task set; as many as fit at once where its size is unknown."""
    most = 0
    for taskset in config.buffer.explorer_input.eval_tasksets:
        table = read_taskset(config, taskset)
        count = config.local.max_batch if table is None else table.total * taskset.repeat_times
        most = max(most, count)
    return most if config.quick_eval is None else min(most, config.quick_eval)


def _largest_micro_batch(config: AflowConfig, lengths: Lengths, *, per_group: bool) -> MicroBatch:
    """The largest micro-batch of a step, as `packing.micro_batches` fills it.

    Where it was not seen what prompts share, runs of a task share that of their first call, and
    later calls have prompts of their own. A run stays in one micro-batch; one whole task does where
    the loss needs its group. A row of `mode: train` is a sample, or a pair.
    """
    tasks, repeats = config.buffer.batch_size, config.algorithm.repeat_times
    calls, prompt, most = lengths.calls.ceiling(), lengths.prompt.ceiling(), limits_of(config)[2]
    if config.mode == "train":
        tasks, calls = config.buffer.train_batch_size, 1
        repeats = 2 if config.algorithm.algorithm_type == "dpo" else 1
    response = min(lengths.response.ceiling(), max(1, most - prompt))
    length, later = prompt + response, repeats * (calls - 1)
    prompts = prompt * (1.0 + later) if lengths.unshared is None else repeats * lengths.unshared
    task = prompts + repeats * calls * response
    run = calls * min(most, lengths.longest_prompt + lengths.longest_response)
    tokens = min(tasks * task, max(config.local.micro_batch_tokens, run))
    if per_group:
        tokens = task
    share = tokens / task
    return MicroBatch(
        tokens,
        keys=share * (prompt + (repeats + later) * length),
        pairs=share * (prompt**2 + repeats * response * length + later * length**2),
        scored=share * repeats * calls * response,
    )


# -- what it holds -------------------------------------------------------------------------


def _weights(engine: Engine, holders: Sequence[tuple[str, NamedModel, bool]]) -> Iterator[Part]:
    """Base weights of (name, model, whether they are trained in place), as `models.load_model`
    loads them.

    On a CPU a file in the run's own number format is mapped: its pages count once for all that
    read it, in one process or in several, and what is trained in place becomes a copy of its own.
    """
    mapped: set[str] = set()
    for name, model, written in holders:
        if engine.on_cpu and engine.itemsize == model.stored_itemsize and not written:
            if model.name in mapped:
                continue
            mapped.add(model.name)
        yield Part(name, float(model.shape.parameters * engine.itemsize))


def _sampler(engine: Engine, s: Sampler, lora: Lora | None) -> Iterator[Part]:
    shape, size = s.model.shape, engine.itemsize
    packed = sum(packed_bytes(engine, s.model, lora, updated=s.updated))
    yield Part(f"{s.name} packed weights", packed, "old and new at an update")
    # Rows grow by 16 or to twice as many; sequences that join one by one leave half of that spare.
    # A model that the lean decoder does not take has a DynamicCache, made anew at every token.
    rows, columns, before = s.rows, s.length, s.length
    if s.model.lean:
        rows += 8 if rows > 16 else 0
        columns, before = cache_columns(s.prompt, s.length)
    token = shape.kv_elements_per_token() * size
    yield Part(f"{s.name} keys and values", float(rows * columns * token), f"{s.rows} sequences")
    yield Part(f"{s.name} cache while growing", float(rows * before * token))
    prefilled = s.distinct * s.prompt
    if s.model.lean:
        prefilled = min(llama._PREFILL_TOKENS, max(prefilled, s.rows))
        kept = min(s.total, llama._STORED_TOKENS)
        yield Part(f"{s.name} stored prefixes", kept * token * engine.waste, f"{kept} tokens")
    # A token of a prefill holds two rows of the residual stream, the joined query, key and value,
    # and two rows of the MLP; `sampling.draw` logits, probabilities and their sums in fp32.
    width = 2 * shape.hidden + (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    width += 2 * max(block.mlp for block in shape.blocks)
    forward = prefilled * width * size + s.rows * shape.vocabulary * (size + 3 * _FP32)
    yield Part(f"{s.name} forward pass", forward * engine.waste)


def packed_bytes(
    engine: Engine, model: NamedModel, lora: Lora | None, *, updated: bool
) -> tuple[float, float]:
    """The lean decoder's own copies of the weights, and the second set during an update.

    `llama.LlamaDecoder._pack`: every linear layer and the output head, laid out for the CPU's
    kernels; the new set of layers is whole before the old one is dropped. On a GPU layers are
    used as they are, but query, key and value are joined, and adapted weights are merged copies
    (`weights.Weights.effective`).
    """
    if not model.lean:
        return 0.0, 0.0
    shape = model.shape
    if engine.on_cpu:
        layers = float(shape.linear_parameters * engine.itemsize)
        return layers + shape.embedding * engine.itemsize, layers if updated else 0.0
    copied = float(engine.itemsize) * sum(
        linear.inputs * linear.outputs
        for linear in shape.linears
        if linear.path.endswith(("q_proj", "k_proj", "v_proj"))
        or (updated and lora is not None and lora.adapts(linear.path))
    )
    return copied, copied if updated else 0.0


def cache_columns(prompt: int, length: int) -> tuple[int, int]:
    """Columns of the cache at last, and before it grew the last time (0: it never did): what the
    prompt needs, then half as many again, in steps of 64 (`llama.KVCache.reserve`)."""
    step = llama._COLUMN_STEP
    columns, before = -(-(prompt + 1) // step) * step, 0
    while columns < length:
        before = columns
        columns = -(-max(columns + 1, columns * 3 // 2) // step) * step
    return columns, before


def trained_states(shape: ModelShape, itemsize: int, lora: Lora | None) -> list[Part]:
    """What `trainer.LocalTrainer` keeps for an update, and the copies that a sync makes.

    Adapters are fp32: value, gradient and two moments; the sampler holds the last state while
    the next is made. Full weights in bf16 have fp32 masters; their gradients exist in bf16 for
    one micro-batch and in fp32.
    """
    if lora is not None:
        size = lora.parameters(shape) * _FP32
        return [
            Part("adapter, gradient, optimizer", 4.0 * size, f"rank {lora.rank}, fp32"),
            Part("adapter copies", 2.0 * size, "for the sampler"),
        ]
    count, mixed = float(shape.parameters), itemsize != _FP32
    return [
        Part("fp32 masters", count * _FP32 * mixed),
        Part("gradients", count * (_FP32 + itemsize * mixed)),
        Part("optimizer", 2 * count * _FP32, "two moments, fp32"),
        Part("weights for the sampler", count * itemsize, "a copy at every step"),
    ]


def _step(
    engine: Engine, model: NamedModel, lora: Lora | None, micro: MicroBatch, *, entropy: bool
) -> list[Part]:
    """Activations, buffers of the backward pass, and logits.

    Attention repeats shared prompts, so its keys count by rows; every layer makes its mask anew, a
    byte for each pair. Working buffers: the gradients of the MLP's product, gate and up projections
    and of the activation between them, two rows of the residual stream; of an attention block
    scores, probabilities and their gradient (`trie_attention._BlockAttention.backward`). Logits
    (`token_scores`): a chunk's and its probabilities, the hidden rows, their mean under W and their
    gradient; a trained head adds its gradient in fp32.
    """
    shape, size = model.shape, engine.itemsize
    keys = micro.keys / micro.tokens
    token = sum(
        kept_per_token(shape, block, size, lora, keys=keys, gathered=True) for block in shape.blocks
    )
    working = micro.tokens * size * (4 * widest_mlp(shape) + 2 * shape.hidden)
    working += 3.0 * micro.pairs * shape.heads * size
    chunk = min(CHUNK_ELEMENTS, micro.scored * shape.vocabulary)
    logits = chunk * (_FP32 * (3 if entropy else 2) + (size if size != _FP32 else 0))
    logits += micro.scored * shape.hidden * (size * 2 + _FP32)
    logits += 0 if lora else shape.embedding * _FP32
    activations = micro.tokens * token + micro.pairs * shape.layers
    return [
        Part("activations", activations * engine.waste, f"{micro.tokens:.0f} tokens at once"),
        Part("backward pass", working * engine.waste),
        Part("logits", logits * engine.waste, f"{micro.scored:.0f} scored tokens"),
    ]


def _export(model: NamedModel, itemsize: int, lora: Lora | None) -> float:
    """What `export.write_merged` adds: the model once more in its file's number format, of which
    what it writes into becomes a copy. Pages that the run has mapped itself are counted there."""
    shape, stored = model.shape, model.stored_itemsize
    written = shape.linear_parameters if lora else shape.parameters
    mapped = 0 if itemsize == stored and lora else shape.parameters
    return float((written + mapped) * stored)
