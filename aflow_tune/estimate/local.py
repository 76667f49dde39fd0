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
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from aflow_tune.config.tasksets import read_taskset
from aflow_tune.engines.local import kv_cache, llama
from aflow_tune.engines.local.models import pick_device, pick_dtype
from aflow_tune.engines.local.packed_model import CHUNK_ELEMENTS
from aflow_tune.estimate.needs import Need, Part
from aflow_tune.estimate.quantities import Lengths, limits_of
from aflow_tune.estimate.shapes import Lora, NamedModel, kept_per_token, widest_mlp

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


@dataclass(frozen=True)
class Sampler:
    """What one sampler decodes.

    rows: sequences at once. prompt, length: tokens of a prompt, and of the longest sequence.
    total: tokens of all different sequences between two weight updates, which prefixes are kept
    of. distinct: different prompts that are decoded at once. updated: new weights come in.
    """

    model: NamedModel
    itemsize: int
    rows: int
    prompt: int
    length: int
    total: int
    distinct: int
    name: str = "sampler"
    updated: bool = True


@dataclass(frozen=True)
class MicroBatch:
    """What the trainer computes at once.

    tokens: of all samples, shared prompts once. keys: rows that attention sees, shared prompts
    repeated. pairs: of queries and keys. scored: tokens whose log-probability counts.
    """

    tokens: float = 0.0
    keys: float = 0.0
    pairs: float = 0.0
    scored: float = 0.0


@dataclass(frozen=True)
class Trainer:
    """What the trainer computes. `lora` None trains the full weights."""

    model: NamedModel
    itemsize: int
    lora: Lora | None
    micro: MicroBatch
    entropy: bool = False
    reference: bool = False
    exports: bool = True


@dataclass(frozen=True)
class LocalRun:
    """One run on the local engines; `inline`: in one process."""

    samplers: tuple[Sampler, ...]
    trainer: Trainer | None
    inline: bool
    device: str = "cpu"

    @property
    def waste(self) -> float:
        """Bytes taken for each byte of a step's tensors."""
        return WASTE if self.device == "cpu" else 1.0


# -- what a configuration asks for ---------------------------------------------------------


def lora_of(config: AflowConfig) -> Lora | None:
    """The adapter that is trained; None for full weights."""
    if not config.model.lora_configs:
        return None
    first = config.model.lora_configs[0]
    return Lora(first.lora_rank, first.target_modules, first.exclude_modules)


def local_run(
    config: AflowConfig,
    policy: NamedModel,
    auxiliary: Sequence[NamedModel],
    lengths: Lengths,
    device: str | None = None,
) -> LocalRun:
    """What the sampler, the trainer and the auxiliary models of a prepared configuration hold.

    Args:
        device: 'cuda' for a machine with a GPU that is not this one; None: this machine.
    """
    place = pick_device(config.local.device) if device is None else torch.device(device)
    dtype = "float32" if config.deterministic else config.local.dtype
    if device == "cuda" and dtype == "auto":
        dtype = "bf16"
    itemsize, longest = pick_dtype(dtype, place).itemsize, limits_of(config)[2]
    # A rollout asks for one sequence at a time; evaluations keep every slot busy.
    evaluated = _evaluated(config)
    runs = max(config.buffer.batch_size * config.algorithm.repeat_times, evaluated)
    rows = min(config.local.max_batch, runs)
    samplers = []
    rolls_out = config.mode != "train" or bool(config.buffer.explorer_input.eval_tasksets)
    if rolls_out and config.mode != "harvest":
        prompt, response = math.ceil(lengths.longest_prompt), math.ceil(lengths.longest_response)
        length = min(longest, prompt + response)
        total = runs * lengths.calls.ceiling() * length
        distinct = min(rows, max(config.buffer.batch_size, evaluated))
        samplers.append(
            Sampler(policy, itemsize, rows, min(prompt, length), length, total, distinct)
        )
    for number, model in enumerate(auxiliary if rolls_out else []):
        settings = config.explorer.auxiliary_models[number]
        length = settings.max_model_len or longest
        response = settings.max_response_tokens or length
        prompt = min(settings.max_prompt_tokens or length, max(1, length - response))
        name = settings.name or f"auxiliary model {number}"
        total = rows * length
        samplers.append(Sampler(model, itemsize, rows, prompt, length, total, rows, name, False))
    trainer = None
    if config.mode in ("both", "train"):
        step, exports = _train_step(config), config.trainer.save_hf_checkpoint != "never"
        micro = _largest_micro_batch(config, lengths, per_group=step.loss.per_group)
        needed = (step.loss.needs_entropy, step.needs_reference, exports)
        trainer = Trainer(policy, itemsize, lora_of(config), micro, *needed)
    # Only training on rollouts is split over Ray's processes.
    inline = config.inline or config.mode != "both"
    return LocalRun(tuple(samplers), trainer, inline, place.type)


def _evaluated(config: AflowConfig) -> int:
    """Runs of the largest held-out task set; as many as fit at once where its size is unknown."""
    most = 0
    for taskset in config.buffer.explorer_input.eval_tasksets:
        table = read_taskset(config, taskset)
        count = config.local.max_batch if table is None else table.total * taskset.repeat_times
        most = max(most, count)
    return most if config.quick_eval is None else min(most, config.quick_eval)


def _train_step(config: AflowConfig) -> Any:
    from aflow_tune.engines.trinity.training.algorithm import TrainStep

    return TrainStep(config, SimpleNamespace(keep_reference=lambda: None))  # type: ignore[arg-type]


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


def local_needs(run: LocalRun, memory: float | None, gpu: float | None) -> list[Need]:
    """The need of the machine's memory (the whole process tree), and of the GPU if there is one.

    Args:
        memory: bytes of this machine's memory; None if not known.
        gpu: bytes of the GPU; None if not known.
    """
    held = [*_weights(run), *(part for sampler in run.samplers for part in _sampler(run, sampler))]
    if run.trainer is not None:
        held += [*trained_states(run.trainer), *_step(run, run.trainer)]
    held = [part for part in held if part.size]
    models = [item.model for item in (*run.samplers, run.trainer) if item is not None]
    vocabulary = max((model.shape.vocabulary for model in models), default=0)
    rows = max((sampler.rows for sampler in run.samplers), default=0)
    allowances = {
        "Python, PyTorch, Trinity": PROCESS + VOCABULARY_ENTRY * vocabulary,
        "runs at once": RUN * rows,
        "Ray and its workers": 0 if run.inline else RAY,
    }
    process = [Part(name, size, "allowance", True) for name, size in allowances.items() if size]
    if run.device == "cpu":
        return [Need("sampler and trainer", "memory", (*process, *held), limit=memory)]
    context = Part("CUDA", CUDA_CONTEXT * (1 if run.inline else 2), "allowance", allowance=True)
    return [
        Need("sampler and trainer", "GPU", (*held, context), limit=gpu, share=0.9),
        Need("processes", "memory", tuple(process), limit=memory),
    ]


def _weights(run: LocalRun) -> Iterator[Part]:
    """Base weights of every engine, as `models.load_model` loads them.

    On a CPU a file in the run's own number format is mapped: its pages count once for all that
    read it, in one process or in several, and what is trained in place becomes a copy of its own.
    """
    trainer = run.trainer
    full = trainer is not None and trainer.lora is None
    holders: list[tuple[str, Sampler | Trainer, bool]] = [
        (item.name + " weights", item, item.updated and full) for item in run.samplers
    ]
    if trainer is not None:
        holders.append(("trainer weights", trainer, full))
        if trainer.reference and full:
            holders.append(("reference policy", trainer, False))
    mapped: set[str] = set()
    for name, item, written in holders:
        model = item.model
        if run.device == "cpu" and item.itemsize == model.stored_itemsize and not written:
            if model.name in mapped:
                continue
            mapped.add(model.name)
        yield Part(name, float(model.shape.parameters * item.itemsize))


def _sampler(run: LocalRun, s: Sampler) -> Iterator[Part]:
    shape = s.model.shape
    yield Part(f"{s.name} packed weights", sum(packed_bytes(s, run)), "old and new at an update")
    # Rows grow by 16 or to twice as many; sequences that join one by one leave half of that spare.
    # A model that the lean decoder does not take has a DynamicCache, made anew at every token.
    rows, columns, before = s.rows, s.length, s.length
    if s.model.lean:
        rows += 8 if rows > 16 else 0
        columns, before = cache_columns(s.prompt, s.length)
    token = shape.kv_elements_per_token() * s.itemsize
    yield Part(f"{s.name} keys and values", float(rows * columns * token), f"{s.rows} sequences")
    yield Part(f"{s.name} cache while growing", float(rows * before * token))
    prefilled = s.distinct * s.prompt
    if s.model.lean:
        prefilled = min(llama._PREFILL_TOKENS, max(prefilled, s.rows))
        kept = min(s.total, llama._STORED_TOKENS)
        yield Part(f"{s.name} stored prefixes", kept * token * run.waste, f"{kept} tokens")
    # A token of a prefill holds two rows of the residual stream, the joined query, key and value,
    # and two rows of the MLP; `sampling.draw` logits, probabilities and their sums in fp32.
    width = 2 * shape.hidden + (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    width += 2 * max(block.mlp for block in shape.blocks)
    forward = prefilled * width * s.itemsize + s.rows * shape.vocabulary * (s.itemsize + 3 * _FP32)
    yield Part(f"{s.name} forward pass", forward * run.waste)


def packed_bytes(s: Sampler, run: LocalRun) -> tuple[float, float]:
    """The lean decoder's own copies of the weights, and the second set during an update.

    `llama.LlamaDecoder._pack`: every linear layer and the output head, laid out for the CPU's
    kernels; the new set of layers is whole before the old one is dropped. On a GPU layers are
    used as they are, but query, key and value are joined, and adapted weights are merged copies
    (`weights.Weights.effective`).
    """
    if not s.model.lean:
        return 0.0, 0.0
    shape, again = s.model.shape, s.updated and run.trainer is not None
    if run.device == "cpu":
        linears = float(shape.linear_parameters * s.itemsize)
        return linears + shape.embedding * s.itemsize, linears if again else 0.0
    lora = run.trainer.lora if run.trainer is not None and again else None
    copied = s.itemsize * sum(
        linear.inputs * linear.outputs
        for path, linear in shape.modules()
        if path.endswith(("q_proj", "k_proj", "v_proj")) or (lora is not None and lora.adapts(path))
    )
    return float(copied), float(copied) if again else 0.0


def cache_columns(prompt: int, length: int) -> tuple[int, int]:
    """Columns of the cache at last, and before it grew the last time (0: it never did): what the
    prompt needs, then half as many again, in steps of 64 (`kv_cache.KVCache.reserve`)."""
    step = kv_cache._COLUMN_STEP
    columns, before = -(-(prompt + 1) // step) * step, 0
    while columns < length:
        before = columns
        columns = -(-max(columns + 1, columns * 3 // 2) // step) * step
    return columns, before


def trained_states(t: Trainer) -> list[Part]:
    """What `trainer.LocalTrainer` keeps for an update, and the copies that a sync makes.

    Adapters are fp32: value, gradient and two moments; the sampler holds the last state while
    the next is made. Full weights in bf16 have fp32 masters; their gradients exist in bf16 for
    one micro-batch and in fp32.
    """
    if t.lora is not None:
        size = t.lora.parameters(t.model.shape) * _FP32
        return [
            Part("adapter, gradient, optimizer", 4.0 * size, f"rank {t.lora.rank}, fp32"),
            Part("adapter copies", 2.0 * size, "for the sampler"),
        ]
    count, mixed = float(t.model.shape.parameters), t.itemsize != _FP32
    return [
        Part("fp32 masters", count * _FP32 * mixed),
        Part("gradients", count * (_FP32 + t.itemsize * mixed)),
        Part("optimizer", 2 * count * _FP32, "two moments, fp32"),
        Part("weights for the sampler", count * t.itemsize, "a copy at every step"),
    ]


def _step(run: LocalRun, t: Trainer) -> list[Part]:
    """Activations, buffers of the backward pass, logits, and the export at the end.

    Attention repeats shared prompts, so its keys count by rows; every layer makes its mask anew, a
    byte for each pair. Working buffers: the gradients of the MLP's product, gate and up projections
    and of the activation between them, two rows of the residual stream; of an attention block
    scores, probabilities and their gradient (`trie_attention._BlockAttention.backward`). Logits
    (`token_scores`): a chunk's and its probabilities, the hidden rows, their mean under W and their
    gradient; a trained head adds its gradient in fp32.
    """
    micro, shape, size = t.micro, t.model.shape, t.itemsize
    keys = micro.keys / micro.tokens
    token = sum(
        kept_per_token(shape, block, size, t.lora, keys=keys, gathered=True)
        for block in shape.blocks
    )
    working = micro.tokens * size * (4 * widest_mlp(shape) + 2 * shape.hidden)
    working += 3.0 * micro.pairs * shape.heads * size
    chunk = min(CHUNK_ELEMENTS, micro.scored * shape.vocabulary)
    logits = chunk * (_FP32 * (3 if t.entropy else 2) + (size if size != _FP32 else 0))
    logits += micro.scored * shape.hidden * (size * 2 + _FP32)
    logits += 0 if t.lora else shape.embedding * _FP32
    activations = micro.tokens * token + micro.pairs * shape.layers
    parts = [
        Part("activations", activations * run.waste, f"{micro.tokens:.0f} tokens at once"),
        Part("backward pass", working * run.waste),
        Part("logits", logits * run.waste, f"{micro.scored:.0f} scored tokens"),
    ]
    if t.exports and run.device == "cpu":
        beyond = max(0.0, export_bytes(t) - sum(part.size for part in parts))
        parts.append(Part("export", beyond, "at the end, beyond what a step takes"))
    return parts


def export_bytes(t: Trainer) -> float:
    """What `export.write_merged` adds: the model once more in its file's number format, of which
    what it writes into becomes a copy. Pages that the run has mapped itself are counted there."""
    shape, stored = t.model.shape, t.model.stored_itemsize
    written = shape.linear_parameters if t.lora else shape.parameters
    mapped = 0 if t.itemsize == stored and t.lora else shape.parameters
    return float((written + mapped) * stored)
