"""The local engines: sampler and trainer of `engines/local`, in one process or behind Ray.

What each part holds is read off our own code; the docstrings name the places. The phases of a step
are added up instead of taking turns: the allocator keeps what one thread freed for that thread, so
that sampler and trainer each hold on to their largest moment (glibc: M_MMAP_THRESHOLD, mallopt(3)).
What it wastes between its pieces is the allowance `WASTE`. Where the C library has malloc_trim the
freed memory goes back after each train step (`engines/local/models.py`), so that the export at the
end counts only beyond what a step takes.

All allowances are as `benchmarks/estimate_memory.py` measured them, which runs real configurations
and prints estimate and measurement: docs/estimate.md says how far they are apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    from aflow_tune.engines.trinity.training.algorithm import TrinityLoss

_FP32 = 4
_MB = 1e6
PROCESS = 640 * _MB
"""Allowance: Python with PyTorch, transformers, PEFT, Trinity and Ray imported and at work."""
RUN = 5 * _MB
"""Allowance: a run of a workflow under way: its thread, event loop, client and answers."""
VOCABULARY_ENTRY = 900.0
"""Allowance: bytes of a tokenizer for each entry of its vocabulary."""
RAY = 2550 * _MB
"""Allowance: Ray's own processes and the workers of Trinity's split, without weights."""
WASTE = 1.15
"""Allowance: what the allocator takes on a CPU for each byte of a step's tensors."""
CUDA_CONTEXT = 600 * _MB
"""Allowance: CUDA's own memory in one process."""


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
class Sampler:
    """What one sampler decodes.

    rows: sequences at once. prompt, length: tokens of a prompt, and of the longest sequence.
    total: tokens of all different sequences between two weight updates, which prefixes are kept
    of. distinct: prompts of one wave that differ. updated: new weights come in.
    """

    model: NamedModel
    itemsize: int
    rows: int
    prompt: int
    length: int
    total: int
    distinct: int
    temperature: float = 1.0
    name: str = "sampler"
    updated: bool = True


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
    fixed = "float32" if config.deterministic else config.local.dtype
    planned = device == "cuda" and fixed == "auto"
    # Every GPU that this is asked about computes in bf16.
    itemsize = (torch.bfloat16 if planned else pick_dtype(fixed, place)).itemsize
    runs = max(config.buffer.batch_size * config.algorithm.repeat_times, _evaluated(config))
    # A run asks for one sequence at a time; evaluations keep every slot busy.
    rows = min(config.local.max_batch, runs)
    samplers = []
    rolls_out = config.mode != "train" or bool(config.buffer.explorer_input.eval_tasksets)
    if rolls_out and config.mode != "harvest":
        prompt, response = math.ceil(lengths.longest_prompt), math.ceil(lengths.longest_response)
        length = min(limits_of(config)[2], prompt + response)
        samplers.append(
            Sampler(
                policy,
                itemsize,
                rows,
                min(prompt, length),
                length,
                total=runs * lengths.calls.ceiling() * length,
                distinct=min(rows, max(config.buffer.batch_size, _evaluated(config))),
                temperature=config.model.temperature,
            )
        )
    for number, model in enumerate(auxiliary if rolls_out else []):
        settings = config.explorer.auxiliary_models[number]
        length = settings.max_model_len or limits_of(config)[2]
        response = settings.max_response_tokens or length
        prompt = min(settings.max_prompt_tokens or length, max(1, length - response))
        name = settings.name or f"auxiliary model {number}"
        total = rows * length
        samplers.append(
            Sampler(model, itemsize, rows, prompt, length, total, rows, name=name, updated=False)
        )
    trainer, micro = None, largest_micro_batch(config, lengths)
    if micro is not None:
        loss = _loss(config)
        trainer = Trainer(
            policy,
            itemsize,
            lora_of(config),
            micro,
            entropy=loss.needs_entropy,
            reference=_reads_reference(config, loss),
            exports=config.trainer.save_hf_checkpoint != "never",
        )
    # Only training on rollouts is split over Ray's processes (`run.Run._local`).
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


def _loss(config: AflowConfig) -> TrinityLoss:
    from aflow_tune.engines.trinity.training.algorithm import TrinityLoss

    return TrinityLoss(config.algorithm)


def _reads_reference(config: AflowConfig, loss: TrinityLoss) -> bool:
    """Whether a step asks for the reference policy's log-probabilities, as `TrainStep` decides."""
    from trinity.algorithm import ALGORITHM_TYPE, KL_FN
    from trinity.algorithm.kl_fn.kl_fn import DummyKLFn

    algorithm = config.algorithm
    in_trainer = ALGORITHM_TYPE.get(algorithm.algorithm_type).compute_advantage_in_trainer
    if loss.needs_reference or not in_trainer:
        return loss.needs_reference
    penalty = KL_FN.get(algorithm.kl_penalty_fn)(**(algorithm.kl_penalty_fn_args or {}))
    return not isinstance(penalty, DummyKLFn) and penalty.kl_coef != 0


def largest_micro_batch(config: AflowConfig, lengths: Lengths) -> MicroBatch | None:
    """The largest micro-batch of a step, as `packing.micro_batches` fills it; None where the mode
    trains nothing.

    Where it was not seen what prompts share, runs of a task share that of their first call, and
    later calls have prompts of their own. A run stays in one micro-batch; one whole task does where
    the loss needs its group. A row of `mode: train` is a sample, or a pair.
    """
    if config.mode not in ("both", "train"):
        return None
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
    if _loss(config).per_group:
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
    held = [*_weights(run)]
    for sampler in run.samplers:
        held += _sampler(run, sampler)
    if run.trainer is not None:
        held += _trainer(run, run.trainer)
    held = [part for part in held if part.size]
    process = _process(run)
    if run.device == "cpu":
        return [Need("sampler and trainer", "memory", (*process, *held), limit=memory)]
    context = Part("CUDA", CUDA_CONTEXT * (1 if run.inline else 2), "allowance", allowance=True)
    return [
        Need("sampler and trainer", "GPU", (*held, context), limit=gpu, share=0.9),
        Need("processes", "memory", process, limit=memory),
    ]


def _process(run: LocalRun) -> tuple[Part, ...]:
    models = [item.model for item in (*run.samplers, run.trainer) if item is not None]
    vocabulary = max((model.shape.vocabulary for model in models), default=0)
    base = PROCESS + VOCABULARY_ENTRY * vocabulary
    parts = [Part("Python, PyTorch, Trinity", base, "allowance", allowance=True)]
    runs = max((sampler.rows for sampler in run.samplers), default=0)
    if runs:
        parts.append(Part("runs at once", RUN * runs, f"{runs}, allowance", allowance=True))
    if not run.inline:
        parts.append(Part("Ray and its workers", RAY, "allowance", allowance=True))
    return tuple(parts)


def _weights(run: LocalRun) -> Iterator[Part]:
    """Base weights of every engine, as `models.load_model` loads them.

    On a CPU a file in the run's own number format is mapped: its pages count once for all that
    read it, in one process or in several, and what is trained in place becomes a copy of its own.
    """
    mapped: set[str] = set()

    def size(model: NamedModel, itemsize: int, written: bool) -> float:
        if run.device == "cpu" and itemsize == model.stored_itemsize and not written:
            if model.name in mapped:
                return 0.0
            mapped.add(model.name)
        return float(model.shape.parameters * itemsize)

    trainer = run.trainer
    full = trainer is not None and trainer.lora is None
    for item in run.samplers:
        yield Part(f"{item.name} weights", size(item.model, item.itemsize, item.updated and full))
    if trainer is not None:
        yield Part("trainer weights", size(trainer.model, trainer.itemsize, full))
        if trainer.reference and full:
            yield Part("reference policy", size(trainer.model, trainer.itemsize, False))


def _sampler(run: LocalRun, s: Sampler) -> Iterator[Part]:
    packed, repacked = packed_bytes(s, run)
    yield Part(f"{s.name} packed weights", packed + repacked, "old and new at an update")
    cache, growth = cache_bytes(s)
    yield Part(f"{s.name} keys and values", cache, f"{s.rows} sequences")
    yield Part(f"{s.name} cache while growing", growth)
    waste = WASTE if run.device == "cpu" else 1.0
    if s.model.lean:
        kept = min(s.total, llama._STORED_TOKENS)
        stored = kept * s.model.shape.kv_elements_per_token() * s.itemsize
        yield Part(f"{s.name} stored prefixes", stored * waste, f"{kept} tokens")
    yield Part(f"{s.name} forward pass", _forward(s) * waste)


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
    copied = sum(
        linear.inputs * linear.outputs
        for path, linear in shape.modules()
        if path.endswith(("q_proj", "k_proj", "v_proj")) or (lora is not None and lora.adapts(path))
    )
    return float(copied * s.itemsize), float(copied * s.itemsize) if again else 0.0


def cache_bytes(s: Sampler) -> tuple[float, float]:
    """Keys and values of the sequences being decoded, and the old storage while it grows.

    `kv_cache.KVCache.reserve`: rows grow by 16 or to twice as many. Sequences that join one by one
    leave the rows up to 16 above what is used; half of that is counted.
    """
    token = s.model.shape.kv_elements_per_token() * s.itemsize
    if not s.model.lean:  # a DynamicCache is made anew at every token
        return float(s.rows * s.length * token), float(s.rows * s.length * token)
    columns, before = cache_columns(s.prompt, s.length)
    rows = s.rows + (8 if s.rows > 16 else 0)
    return float(rows * columns * token), float(rows * before * token)


def cache_columns(prompt: int, length: int) -> tuple[int, int]:
    """Columns of the cache at last, and before it grew the last time (0: it never did): what the
    prompt needs, then half as many again, in steps of 64 (`kv_cache.KVCache.reserve`)."""
    step = kv_cache._COLUMN_STEP
    columns, before = -(-(prompt + 1) // step) * step, 0
    while columns < length:
        before = columns
        columns = -(-max(columns + 1, columns * 3 // 2) // step) * step
    return columns, before


def _forward(s: Sampler) -> float:
    """The larger of a prefill and a decode step, and the logits of every sequence.

    A token of a prefill holds two rows of the residual stream, the joined query, key and value,
    and two rows of the MLP; `sampling.draw` holds logits, probabilities and, with a temperature,
    the divided logits in fp32, and the sums of its search.
    """
    shape = s.model.shape
    width = 2 * shape.hidden + (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    width += 2 * max(block.mlp for block in shape.blocks)
    tokens = s.distinct * s.prompt
    if s.model.lean:
        tokens = min(llama._PREFILL_TOKENS, max(tokens, s.rows))
    logits = s.itemsize + _FP32 * (2 if s.temperature == 1.0 else 3)
    return float(tokens * width * s.itemsize + s.rows * shape.vocabulary * logits)


def _trainer(run: LocalRun, t: Trainer) -> list[Part]:
    waste = WASTE if run.device == "cpu" else 1.0
    micro, shape = t.micro, t.model.shape
    # The gradients of the MLP's product, gate and up projections and of the activation between
    # them, and two rows of the residual stream; of an attention block, scores, probabilities and
    # their gradient (`trie_attention._BlockAttention.backward`).
    working = micro.tokens * t.itemsize * (4 * widest_mlp(shape) + 2 * shape.hidden)
    scores = 3.0 * micro.pairs * shape.heads * t.itemsize
    step = [
        Part("activations", micro_batch_bytes(t) * waste, f"{micro.tokens:.0f} tokens at once"),
        Part("backward pass", (working + scores) * waste),
        Part("logits", _head(t) * waste, f"{micro.scored:.0f} scored tokens"),
    ]
    parts = [*trained_states(t), *step]
    if t.exports and run.device == "cpu":
        beyond = max(0.0, export_bytes(t) - sum(part.size for part in step))
        parts.append(Part("export", beyond, "at the end, beyond what a step takes"))
    return parts


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
    count, mixed = t.model.shape.parameters, t.itemsize != _FP32
    return [
        Part("fp32 masters", float(count * _FP32 if mixed else 0)),
        Part("gradients", float(count * (_FP32 + (t.itemsize if mixed else 0)))),
        Part("optimizer", 2.0 * count * _FP32, "two moments, fp32"),
        Part("weights for the sampler", float(count * t.itemsize), "a copy at every step"),
    ]


def export_bytes(t: Trainer) -> float:
    """What `export.write_merged` adds: the model once more in its file's number format, of which
    what it writes into becomes a copy. Pages that the run has mapped itself are counted there."""
    shape, stored = t.model.shape, t.model.stored_itemsize
    written = shape.linear_parameters if t.lora else shape.parameters
    mapped = 0 if t.itemsize == stored and t.lora else shape.parameters
    return float((written + mapped) * stored)


def micro_batch_bytes(t: Trainer) -> float:
    """What all layers keep for the backward pass. Attention repeats shared prompts, so its keys
    are counted by rows; every layer makes its mask anew, a byte for each pair."""
    micro, shape = t.micro, t.model.shape
    keys = micro.keys / micro.tokens
    token = sum(
        kept_per_token(shape, block, t.itemsize, t.lora, keys=keys, gathered=True)
        for block in shape.blocks
    )
    return micro.tokens * token + micro.pairs * shape.layers


def _head(t: Trainer) -> float:
    """`token_scores`: a chunk's logits and its probabilities, the hidden rows, their mean under W
    and their gradient; a trained head adds its gradient in fp32."""
    shape, scored = t.model.shape, t.micro.scored
    chunk = min(CHUNK_ELEMENTS, scored * shape.vocabulary)
    logits = _FP32 * (3 if t.entropy else 2) + (t.itemsize if t.itemsize != _FP32 else 0)
    rows = scored * shape.hidden * (t.itemsize * 2 + _FP32)
    head = shape.embedding * _FP32 if t.lora is None else 0
    return float(chunk * logits + rows + head)
