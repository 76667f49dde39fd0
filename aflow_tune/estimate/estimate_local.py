"""A prepared configuration of the local engines as the numbers that `estimate/local.py` takes.

What the trainer packs into one micro-batch is not guessed: samples of the lengths that are
known go through the trainer's own packing.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from aflow_tune.config.tasksets import read_taskset
from aflow_tune.engines.local import kv_cache, llama, packed_model
from aflow_tune.engines.local.models import can_give_back, pick_device, pick_dtype
from aflow_tune.engines.local.packing import Sample, micro_batches, pack
from aflow_tune.estimate.estimate_lengths import limits_of, whole
from aflow_tune.estimate.estimate_models import NamedModel
from aflow_tune.estimate.local import (
    EngineLimits,
    LocalRun,
    MicroBatch,
    SamplerLoad,
    TrainerLoad,
)
from aflow_tune.estimate.rehearsal import Rehearsal, step_groups
from aflow_tune.estimate.shapes import Lora
from aflow_tune.estimate.step import Lengths

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.engines.trinity.training.algorithm import TrinityLoss

LIMITS = EngineLimits(
    prefill_tokens=llama._PREFILL_TOKENS,
    stored_tokens=llama._STORED_TOKENS,
    column_step=kv_cache._COLUMN_STEP,
    chunk_elements=packed_model.CHUNK_ELEMENTS,
)
_ENOUGH = 4
"""Micro-batches' worth of samples that are packed to find the largest."""
_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5)
"""Of the response's length, at which a step is packed. Where answers end early another task may fit
into a micro-batch, which then holds more than one that full answers leave half empty."""


@dataclass(frozen=True)
class LocalModels:
    """The tuned model and the auxiliary ones."""

    policy: NamedModel
    auxiliary: tuple[NamedModel, ...] = ()


def lora_of(config: AflowConfig) -> Lora | None:
    """The adapter that is trained; None for full weights."""
    if not config.model.lora_configs:
        return None
    first = config.model.lora_configs[0]
    return Lora(first.lora_rank, first.target_modules, first.exclude_modules)


def local_run(
    config: AflowConfig,
    models: LocalModels,
    lengths: Lengths,
    rehearsal: Rehearsal | None,
    *,
    rows: list[list[Sample]] | None = None,
    device: str | None = None,
) -> LocalRun:
    """What the sampler, the trainer and the auxiliary models hold.

    Args:
        rows: what a step of `mode: train` is given, where that is known.
        device: 'cuda' for a machine with a GPU that is not this one; None: this machine.
    """
    place = pick_device(config.local.device) if device is None else torch.device(device)
    fixed = "float32" if config.deterministic else config.local.dtype
    planned = device == "cuda" and fixed == "auto"
    # Every GPU that this is asked about computes in bf16.
    dtype = torch.bfloat16 if planned else pick_dtype(fixed, place)
    trains = config.mode in ("both", "train")
    rolls_out = config.mode != "train" or bool(config.buffer.explorer_input.eval_tasksets)
    samplers = []
    if rolls_out and config.mode != "harvest":
        samplers.append(_policy_load(config, models.policy, dtype, lengths))
    if rolls_out:
        for number, (auxiliary, model) in enumerate(
            zip(config.explorer.auxiliary_models, models.auxiliary, strict=True)
        ):
            name = auxiliary.name or f"auxiliary model {number}"
            length = auxiliary.max_model_len or limits_of(config)[2]
            response = auxiliary.max_response_tokens or length
            prompt = min(auxiliary.max_prompt_tokens or length, max(1, length - response))
            samplers.append(
                SamplerLoad(
                    model.shape,
                    dtype.itemsize,
                    model.stored_itemsize,
                    model.lean,
                    rows=_rows(config),
                    prompt=prompt,
                    length=length,
                    total=_rows(config) * length,
                    distinct=_rows(config),
                    name=name,
                    source=model.name,
                    updated=False,
                )
            )
    trainer = None
    if trains:
        steps = _steps(config, lengths, rehearsal) if rows is None else [rows]
        trainer = _trainer_load(config, models.policy, dtype, steps)
    return LocalRun(
        tuple(samplers),
        trainer,
        LIMITS,
        _inline(config),
        place.type,
        gives_back=can_give_back(),
    )


def _inline(config: AflowConfig) -> bool:
    """Only training on rollouts is split over Ray's processes (`run.Run._engine`)."""
    return config.inline or config.mode != "both"


def _rows(config: AflowConfig) -> int:
    """Sequences that one sampler decodes at once: a run asks for one at a time, and evaluations
    keep every slot busy if there are that many tasks."""
    runs = max(config.buffer.batch_size * config.algorithm.repeat_times, _evaluated(config))
    return min(config.local.max_batch, runs)


def _evaluated(config: AflowConfig) -> int:
    """Runs of the largest held-out task set; as many as fit at once where its size is unknown."""
    most = 0
    for taskset in config.buffer.explorer_input.eval_tasksets:
        table = read_taskset(config, taskset)
        count = config.local.max_batch if table is None else table.total * taskset.repeat_times
        most = max(most, count)
    return most if config.quick_eval is None else min(most, config.quick_eval)


def _policy_load(
    config: AflowConfig, model: NamedModel, dtype: torch.dtype, lengths: Lengths
) -> SamplerLoad:
    prompt = math.ceil(lengths.longest_prompt) or whole(lengths.prompt)
    response = math.ceil(lengths.longest_response) or whole(lengths.response)
    runs = max(config.buffer.batch_size * config.algorithm.repeat_times, _evaluated(config))
    length = min(limits_of(config)[2], prompt + response)
    return SamplerLoad(
        model.shape,
        dtype.itemsize,
        model.stored_itemsize,
        model.lean,
        rows=_rows(config),
        prompt=min(prompt, length),
        length=length,
        total=runs * whole(lengths.calls) * length,
        distinct=min(_rows(config), max(config.buffer.batch_size, _evaluated(config))),
        temperature=config.model.temperature,
        source=model.name,
    )


def _trainer_load(
    config: AflowConfig,
    model: NamedModel,
    dtype: torch.dtype,
    steps: Iterable[list[list[Sample]]],
) -> TrainerLoad:
    from aflow_tune.engines.trinity.training.algorithm import TrinityLoss

    loss = TrinityLoss(config.algorithm)
    return TrainerLoad(
        model.shape,
        dtype.itemsize,
        model.stored_itemsize,
        lora_of(config),
        micro_batch(config, steps, whole_groups=loss.per_group),
        entropy=loss.needs_entropy,
        reference=_reads_reference(config, loss),
        exports=config.trainer.save_hf_checkpoint != "never",
        source=model.name,
    )


def _reads_reference(config: AflowConfig, loss: TrinityLoss) -> bool:
    """Whether a step asks for the reference policy's log-probabilities, as `TrainStep` decides."""
    from trinity.algorithm import ALGORITHM_TYPE, KL_FN
    from trinity.algorithm.kl_fn.kl_fn import DummyKLFn

    algorithm = config.algorithm
    if (
        loss.needs_reference
        or not ALGORITHM_TYPE.get(algorithm.algorithm_type).compute_advantage_in_trainer
    ):
        return loss.needs_reference
    penalty = KL_FN.get(algorithm.kl_penalty_fn)(**(algorithm.kl_penalty_fn_args or {}))
    return not isinstance(penalty, DummyKLFn) and penalty.kl_coef != 0


def _steps(
    config: AflowConfig, lengths: Lengths, rehearsal: Rehearsal | None
) -> Iterator[list[list[Sample]]]:
    """The samples of a step by task, with shorter and shorter responses: rehearsed ones, or some
    of the known lengths."""
    full = whole(lengths.response)
    for response in sorted({math.ceil(full * share) for share in _SHARES}, reverse=True):
        if rehearsal is None:
            yield _groups(config, lengths, response)
        else:
            yield step_groups(config, rehearsal, response)


_known: dict[str, MicroBatch] = {}
"""By `_digest`: what makes a run fit is looked for by estimating again, mostly the same step."""


def micro_batch(
    config: AflowConfig, steps: Iterable[list[list[Sample]]], *, whole_groups: bool = False
) -> MicroBatch:
    """The largest packed row of what a step may be, found by packing its samples.

    Args:
        steps: samples by task, the longest first: one that goes into one micro-batch is the last
            that is looked at.
        whole_groups: each task is a micro-batch, so that the longest samples make the largest.
    """
    limit = config.local.micro_batch_tokens
    found = []
    for groups in steps:
        key = _digest(groups, limit, whole_groups)
        if key not in _known:
            _known[key] = _largest(groups, limit, whole_groups)
        found.append(_known[key])
        if whole_groups or not _known[key].several:
            break
    return max(found, key=lambda row: row.tokens)


def _digest(groups: list[list[Sample]], limit: int, whole_groups: bool) -> str:
    """What a micro-batch depends on, shortened."""
    found = hashlib.sha256(f"{limit} {whole_groups}".encode())
    for number, group in enumerate(groups):
        for sample in group:
            mask = sample.action_mask_R.numpy().tobytes()
            told = (number, sample.run, sample.prompt_length, mask)
            found.update(repr(told).encode())
            found.update(sample.tokens_T.numpy().tobytes())
    return found.hexdigest()


def _largest(groups: list[list[Sample]], limit: int, whole_groups: bool) -> MicroBatch:
    samples = [sample for group in groups for sample in group]
    indices, start = [], 0
    for group in groups:
        indices.append(list(range(start, start + len(group))))
        start += len(group)
    parts = indices if whole_groups else micro_batches(samples, indices, limit)
    rows = [pack([samples[i] for i in part]) for part in parts]
    largest = max(
        (row for row in rows if row is not None), key=lambda row: len(row.tokens_N), default=None
    )
    if largest is None:
        return MicroBatch(0, 0, 0, 0, 0, 0)
    shapes = [(*block.queries_SQ.shape, block.keys_SK.shape[1]) for block in largest.blocks]
    return MicroBatch(
        tokens=len(largest.tokens_N),
        queries=sum(s * q for s, q, _ in shapes),
        keys=sum(s * k for s, _, k in shapes),
        masks=sum(s * q * k for s, q, k in shapes),
        scores=max(s * q * k for s, q, k in shapes),
        scored=len(largest.scored_U),
        several=len(rows) > 1,
    )


def _groups(config: AflowConfig, lengths: Lengths, response: int) -> list[list[Sample]]:
    """Samples of the known prompts: runs of a task share the prompt of their first call, later
    calls of a run have prompts of their own."""
    draw = random.Random(0)
    prompt = whole(lengths.prompt)
    response = min(response, max(1, limits_of(config)[2] - prompt))
    trains_rows = config.mode == "train"
    calls = 1 if trains_rows else whole(lengths.calls)
    tasks = config.buffer.train_batch_size if trains_rows else config.buffer.batch_size
    repeats = config.algorithm.repeat_times
    if trains_rows:  # a row is a sample, or a pair
        repeats = 2 if config.algorithm.algorithm_type == "dpo" else 1
    enough = _ENOUGH * config.local.micro_batch_tokens
    groups: list[list[Sample]] = []
    made = 0

    def ids(count: int) -> list[int]:
        return [draw.getrandbits(30) for _ in range(count)]

    for _ in range(tasks):
        first = ids(prompt)
        group = []
        for run in range(repeats):
            for call in range(calls):
                start = first if call == 0 else ids(prompt)
                group.append(sample_of(start, ids(response), run))
                made += response + (0 if call == 0 and run else prompt)
        groups.append(group)
        if made > enough:
            break
    return groups


def sample_of(prompt: list[int], response: list[int], run: object) -> Sample:
    """A sample in which every token of the response counts."""
    return Sample(
        torch.tensor(prompt + response),
        len(prompt),
        torch.ones(len(response), dtype=torch.bool),
        run=run,
    )
