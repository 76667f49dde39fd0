"""The rows of `mode: train` as the trainer will be given them, to estimate by.

Trinity's reader and formatters make the samples of the first steps with the model's own tokenizer.
Nothing is trained, and nothing is fetched: what is not on this machine is not read.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from pathlib import Path

from trinity.common.experience import Experience

from aflow_tune.config.file_rules import awaited
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.tasksets import experience_buffer, locate
from aflow_tune.engines.local.packing import Sample
from aflow_tune.engines.trinity.readers import (
    Experiences,
    materialise_experiences,
    open_experiences,
)
from aflow_tune.engines.trinity.training.algorithm import _grouped, to_sample

STEPS = 8
"""Steps whose rows are read; the largest counts."""

Groups = list[list[Sample]]


def rows_of_a_step(config: AflowConfig, folder: Path | None) -> Groups | str:
    """The samples of the largest of the first steps, by row (or pair); or why they are not known.

    Args:
        config: a prepared `mode: train`.
        folder: with the model's tokenizer; None where it is not on this machine.
    """
    buffer = experience_buffer(config)
    if buffer is None or awaited(config):
        return "an earlier stage is still to write them"
    if folder is None:
        return "the model's tokenizer is not on this machine"
    if not locate(config, buffer).files:
        return "they are not on this machine"
    copied = copy.deepcopy(config)
    copied.model.model_path = str(folder)
    try:
        with tempfile.TemporaryDirectory(prefix="aflow-rows-") as place:
            copied.checkpoint_job_dir = place
            materialise_experiences(copied)
            steps = asyncio.run(_read(open_experiences(copied)))
        found = [[[to_sample(row) for row in group] for group in _grouped(step)] for step in steps]
    except Exception as error:
        # Whatever a reader or a template raises here costs knowledge, not the estimate.
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return max(found, key=_tokens) if found else "they are fewer than one step takes"


async def _read(reader: Experiences) -> list[list[Experience]]:
    steps: list[list[Experience]] = []
    while len(steps) < STEPS:
        try:
            steps.append(await reader.read())
        except StopAsyncIteration:
            break
    return steps


def _tokens(groups: Groups) -> int:
    return sum(len(sample.tokens_T) for group in groups for sample in group)
