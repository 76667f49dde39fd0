"""Memory of `engine: local`: sampler and trainer of `engines/local`, in one process or behind Ray.

The phases of a step add up: the allocator keeps what was freed (glibc: mallopt(3)), all of it for
another process, much of it for the one thread of a run in one process. Freed memory is returned
after each train step (malloc_trim), so the export counts only what it takes beyond a step. The
allowances were measured with `benchmarks/estimate_memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from aflow_tune.config.tasksets import read_taskset
from aflow_tune.engines.local import llama
from aflow_tune.engines.local.models import pick_device, pick_dtype
from aflow_tune.engines.local.packed_model import CHUNK_ELEMENTS
from aflow_tune.engines.local.quantised import BYTES
from aflow_tune.estimate.needs import Need, Part
from aflow_tune.estimate.quantities import Lengths, limits_of
from aflow_tune.estimate.shapes import Lora, ModelShape, NamedModel, kept_per_token

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

_FP32 = 4
_MB = 1e6
PROCESS = 640 * _MB
"""Allowance: Python with PyTorch, transformers, PEFT, Trinity and Ray imported and in use."""
RUN = 5 * _MB
"""Allowance: one rollout in progress: its thread, event loop, client and answers."""
VOCABULARY_ENTRY = 900.0
"""Allowance: bytes of a tokenizer per entry of its vocabulary."""
RAY = 2550 * _MB
"""Allowance: Ray's own processes and the explorer's and trainer's workers, without weights."""
WASTE = 1.15
"""Allowance: bytes that the allocator takes on a CPU for each byte of a step's tensors."""
CUDA_CONTEXT = 600 * _MB
"""Allowance: CUDA's own memory in one process."""


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
    the number of GPUs.

    Args:
        models: the policy and the auxiliary models of a prepared configuration.
        device: 'cuda' to plan for another machine with a GPU; None: this machine.
        memory, gpu: bytes of this machine's memory and of the GPU; None if not known.
    """
    from aflow_tune.engines.trinity.training.algorithm import TrainStep

    place = pick_device(config.local.device) if device is None else torch.device(device)
    dtype = "float32" if config.deterministic else config.local.dtype
    if device == "cuda" and dtype == "auto":
        dtype = "bf16"
    itemsize, on_cpu = pick_dtype(dtype, place).itemsize, place.type == "cpu"
    policy, lora = models[0], lora_of(config)
    load_in = config.local.load_in if lora is not None else None
    mapped: set[str] = set()
    held: list[Part] = []

    def weights(name: str, model: NamedModel, written: bool) -> None:
        if load_in is not None and model is policy:
            size = quantised_bytes(policy.shape, itemsize, load_in)
            held.append(Part(f"{name} weights", size, f"layers in {load_in}"))
            return
        # On a CPU a file in the run's dtype is memory-mapped: its pages count once for all readers,
        # and weights that are trained in place become a copy of their own.
        shared = on_cpu and itemsize == model.stored_itemsize and not written
        if not (shared and model.name in mapped):
            held.append(Part(f"{name} weights", float(model.shape.parameters * itemsize)))
        if shared:
            mapped.add(model.name)

    held_out = config.buffer.explorer_input.eval_tasksets
    samples = config.mode != "harvest" and (config.mode != "train" or bool(held_out))
    tasks, evaluated = config.buffer.batch_size, _evaluated(config)
    runs = max(tasks * config.algorithm.repeat_times, evaluated)
    rows = min(config.local.max_batch, runs) if samples else 0
    updated, longest = config.mode in ("both", "train"), limits_of(config)[2]
    if samples:
        prompt = math.ceil(lengths.longest_prompt)
        length = min(longest, prompt + math.ceil(lengths.longest_response))
        total = runs * lengths.calls.ceiling() * length
        first = min(rows, max(tasks, evaluated)) * min(prompt, length)
        weights("sampler", policy, updated and not lora)
        work = (rows, length, total, first)
        kinds: dict[str, Any] = {"updated": updated, "load_in": load_in}
        held += _sampler("sampler", policy, work, itemsize, on_cpu, lora, **kinds)
        for number, settings in enumerate(config.explorer.auxiliary_models):
            model, name = models[number + 1], settings.name or f"auxiliary model {number}"
            length = settings.max_model_len or longest
            weights(name, model, False)
            work = (rows, length, rows * length, rows * length)
            held += _sampler(name, model, work, itemsize, on_cpu, None, updated=False)
    if config.mode in ("both", "train"):
        step = TrainStep(config, SimpleNamespace(keep_reference=lambda: None))  # type: ignore[arg-type]
        weights("trainer", policy, lora is None)
        if step.uses_critic:
            tokens = runs * lengths.calls.ceiling() * lengths.response.ceiling()
            size = 2.0 * tokens * policy.shape.hidden * _FP32
            held.append(Part("hidden states for the value head", size, f"{tokens:.0f} tokens"))
        if step.needs_reference and lora is None:
            weights("reference policy", policy, False)
        held += trained_states(policy.shape, itemsize, lora)
        at_once = [*_step(config, policy.shape, lengths, step.loss, lora, itemsize, on_cpu)]
        held += at_once
        if config.trainer.save_hf_checkpoint != "never" and on_cpu:
            again = itemsize != policy.stored_itemsize or load_in is not None
            beyond = _export(policy, again, lora) - sum(part.size for part in at_once)
            held.append(Part("export", max(0.0, beyond), "at the end, beyond what a step takes"))
    held = [part for part in held if part.size]
    # Only training on rollouts runs on Ray.
    inline = config.inline or config.mode != "both"
    vocabulary = max(model.shape.vocabulary for model in models)
    process = [
        Part(
            "Python, PyTorch, Trinity", PROCESS + VOCABULARY_ENTRY * vocabulary, "allowance", True
        ),
        Part("runs at once", RUN * rows, "allowance", True),
        *[Part("Ray and its workers", RAY, "allowance", True)] * (not inline),
    ]
    if on_cpu:
        return [Need("sampler and trainer", "memory", (*process, *held), limit=memory)], 0
    context = Part("CUDA", CUDA_CONTEXT * (1 if inline else 2), "allowance", allowance=True)
    return [
        Need("sampler and trainer", "GPU", (*held, context), limit=gpu, share=0.9),
        Need("processes", "memory", tuple(process), limit=memory),
    ], 1


def _evaluated(config: AflowConfig) -> int:
    """Rollouts of the largest held-out task set; `max_batch` where its size is unknown."""
    most = 0
    for taskset in config.buffer.explorer_input.eval_tasksets:
        table = read_taskset(config, taskset)
        count = config.local.max_batch if table is None else table.total * taskset.repeat_times
        most = max(most, count)
    return most if config.quick_eval is None else min(most, config.quick_eval)


def _sampler(
    name: str,
    model: NamedModel,
    work: tuple[int, int, int, int],
    itemsize: int,
    on_cpu: bool,
    lora: Lora | None,
    *,
    updated: bool,
    load_in: str | None = None,
) -> Iterator[Part]:
    """What one sampler holds beside its weights. `work`: sequences at once, tokens of the longest
    one, of all distinct ones between two updates, and of all prompts prefilled at once."""
    rows, length, total, prefilled = work
    shape, waste = model.shape, WASTE if on_cpu else 1.0
    token = shape.kv_elements_per_token * itemsize
    packed = packed_bytes(model, lora, itemsize, on_cpu, updated=updated, load_in=load_in)
    yield Part(f"{name} packed weights", packed, "old and new at an update")
    # While the cache grows, the old one exists beside the new one.
    cache = 2.0 * rows * length * token
    yield Part(f"{name} keys and values", cache, f"{rows} sequences, old and new as they grow")
    if shape.lean:
        prefilled = min(llama._PREFILL_TOKENS, max(prefilled, rows))
        kept = min(total, llama._STORED_TOKENS)
        yield Part(f"{name} stored prefixes", kept * token * waste, f"{kept} tokens")
    # A token of a prefill holds two rows of the residual stream, the joined query, key and value,
    # and two rows of the MLP; `sampling.draw` holds logits, probabilities and their sums in fp32.
    width = 2 * (shape.hidden + shape.mlp) + (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    forward = prefilled * width * itemsize + rows * shape.vocabulary * (itemsize + 3 * _FP32)
    yield Part(f"{name} forward pass", forward * waste)


def quantised_bytes(shape: ModelShape, itemsize: int, load_in: str) -> float:
    """Bytes of the weights of a base in 4 or 8 bits (`engines/local/quantised.py`), with the weight
    that one product at a time is computed with."""
    count, largest = shape.linear_parameters, max(x.inputs * x.outputs for x in shape.linears)
    scales = _FP32 * sum(x.outputs for x in shape.linears) if load_in == "8bit" else 0
    return count * BYTES[load_in] + scales + (shape.parameters - count + largest) * itemsize


def packed_bytes(
    model: NamedModel,
    lora: Lora | None,
    itemsize: int,
    on_cpu: bool,
    *,
    updated: bool,
    load_in: str | None = None,
) -> float:
    """Bytes of the lean decoder's own copies of weights (`llama._pack`). On a CPU: of the head, and
    of every linear layer, twice during an update. On a GPU: of joined q, k, v; merged adapters.
    Quantised layers are not copied."""
    shape, joined = model.shape, ("q_proj", "k_proj", "v_proj")
    if not shape.lean:
        return 0.0
    copied = sum(
        linear.inputs * linear.outputs
        for linear in (() if load_in else shape.linears)
        if on_cpu
        or linear.path.endswith(joined)
        or (updated and lora is not None and lora.adapts(linear.path))
    )
    head = shape.vocabulary * shape.hidden if on_cpu else 0
    return float(itemsize * (copied * (2 if updated else 1) + head))


def trained_states(shape: ModelShape, itemsize: int, lora: Lora | None) -> list[Part]:
    """What `trainer.LocalTrainer` keeps for an update, and what a sync copies. LoRA: adapters in
    fp32, gradient and two moments, the sampler's current state and the next. Full weights in bf16:
    fp32 masters, two moments, and gradients in bf16 for one micro-batch and in fp32."""
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
    config: AflowConfig,
    shape: ModelShape,
    lengths: Lengths,
    loss: Any,
    lora: Lora | None,
    itemsize: int,
    on_cpu: bool,
) -> Iterator[Part]:
    """Activations, buffers of the backward pass, and logits of the largest micro-batch.

    The micro-batch is filled as `packing.micro_batches` does: rollouts of a task share the prompt
    of their first call, later calls have prompts of their own, unless a rehearsal showed what is
    shared. A rollout stays in one micro-batch. A
    row of `mode: train` is a sample or a pair.

    Attention repeats shared prompts, so its keys count by rows; each layer builds its mask, one
    byte per pair. Working buffers: the gradients of the MLP's product, gate and up projections and
    of the activation between them, two rows of the residual stream; in attention the scores, the
    probabilities and their gradient. Logits: those of a chunk, their probabilities (and entropy),
    the hidden rows, their mean under W and their gradient; a trained head's gradient in fp32.
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
    share = tokens / task
    keys = (prompt + (repeats + later) * length) / task
    pairs = share * (prompt**2 + repeats * response * length + later * length**2)
    scored = share * repeats * calls * response

    waste = WASTE if on_cpu else 1.0
    token = kept_per_token(shape, itemsize, lora, keys=keys, gathered=True, fused_norms=on_cpu)
    activations = shape.layers * (tokens * token + pairs)
    working = tokens * itemsize * (4 * shape.mlp + 2 * shape.hidden)
    working += 3.0 * pairs * shape.heads * itemsize
    chunk = min(CHUNK_ELEMENTS, scored * shape.vocabulary)
    logits = chunk * (
        _FP32 * (3 if loss.needs_entropy else 2) + (itemsize if itemsize < _FP32 else 0)
    )
    logits += scored * shape.hidden * (itemsize * 2 + _FP32)
    logits += 0 if lora else shape.vocabulary * shape.hidden * _FP32
    yield Part("activations", activations * waste, f"{tokens:.0f} tokens at once")
    yield Part("backward pass", working * waste)
    yield Part("logits", logits * waste, f"{scored:.0f} scored tokens")


def _export(model: NamedModel, again: bool, lora: Lora | None) -> float:
    """What `checkpoint.write_merged` adds: the model once more in its file's dtype, plus a copy of
    the weights that it overwrites. Pages that the run has mapped already do not count `again`."""
    shape, stored = model.shape, model.stored_itemsize
    written = shape.linear_parameters if lora else shape.parameters
    mapped = shape.parameters if again or lora is None else 0
    return float((written + mapped) * stored)
