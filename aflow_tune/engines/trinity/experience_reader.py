"""The data set of `mode: train`, read by Trinity's own reader and formatters.

What is added to Trinity's reader, on either engine before anything is trained: every row is
formatted once, so that one the chat template cannot render is named with its place; and on the
local engine rows longer than `model.max_model_len` are left out, counted and named. Trinity
itself neither cuts nor refuses them. Cutting would teach the model answers without an end.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetsError
from trinity.buffer.reader.file_reader import ExperienceFileReader, _HFBatchReader
from trinity.common.config import StorageConfig
from trinity.common.experience import Experience

from aflow_tune.config.load import AflowConfig
from aflow_tune.config.tasksets import (
    experience_buffer,
    link_files,
    locate,
    on_cluster,
)
from aflow_tune.data.rows import read_table
from aflow_tune.engines.local.models import resolve_model
from aflow_tune.errors import BadInput, Fault, RunFailed

_NAMED = 5


def materialise_experiences(config: AflowConfig) -> None:
    """Link the data set into `<run folder>/data/experiences`, where Trinity's reader finds it."""
    buffer = experience_buffer(config)
    if buffer is None or not buffer.path or not Path(buffer.path).is_file():
        return
    folder = Path(config.checkpoint_job_dir) / "data" / "experiences"
    shutil.rmtree(folder, ignore_errors=True)  # links of an earlier start
    link_files([Path(buffer.path)], folder, copied=on_cluster(config))
    buffer.path, buffer.split, buffer.subset_name = str(folder), "train", None


class Experiences(ExperienceFileReader):
    """The rows that fit, in Trinity's batches; `left_out` holds the places of those that do not.

    Args:
        config: Trinity's storage configuration; its `tokenizer_path` is a folder.
        places: `file:line` of each row, where they are known.
        longest: tokens of prompt and response together that still fit; None for no limit.

    Raises:
        BadInput: rows that the formatter refuses, or no rows that fit.
    """

    def __init__(self, config: StorageConfig, places: list[str], longest: int | None) -> None:
        self.left_out: list[str] = []
        self._places = places
        self._longest = longest
        super().__init__(config)

    def _init_formatter_and_dataset(self, config: StorageConfig) -> tuple[Any, Any]:
        formatter, batches = super()._init_formatter_and_dataset(config)
        rows = batches.dataset
        kept = self._fitting(formatter, rows)
        if len(kept) == len(rows):
            return formatter, batches
        return formatter, _HFBatchReader(
            rows.select(kept),
            name=config.name,
            default_batch_size=self.read_batch_size,
            total_epochs=config.total_epochs,
            drop_last=True,
            total_steps=config.total_steps,
            enable_progress_bar=config.enable_progress_bar,
        )

    def _fitting(self, formatter: Any, rows: Any) -> list[int]:
        kept, faults = [], []
        named = self._places if len(self._places) == len(rows) else None
        for number in range(len(rows)):
            place = named[number] if named else f"{self.name} row {number}"
            try:
                length, learned = _lengths(formatter.format(rows[number]))
            except Exception as error:
                # Templates and tokenizers raise what they like; each time it is this row's fault.
                found = f"{type(error).__name__}: {error}"
                cure = "correct or remove this row"
                faults.append(Fault(place, "a row that the chat template renders", found, cure))
                continue
            if not learned:
                cure = "write the answer, or remove this row"
                faults.append(Fault(place, "an answer to learn", "none", cure))
            elif self._longest is not None and length > self._longest:
                self.left_out.append(f"{place} ({length} tokens)")
            else:
                kept.append(number)
        if faults:
            raise BadInput("The data set cannot be learned from.", faults[:_NAMED])
        if not kept:
            raise BadInput(
                "The data set cannot be learned from.",
                [
                    Fault(
                        "model.max_model_len",
                        f"rows of at most {self._longest} tokens",
                        f"{len(rows)} rows, all of them longer: {self.left_out[0]}",
                        "raise model.max_model_len",
                    )
                ],
            )
        return kept


def _lengths(experience: Experience) -> tuple[int, bool]:
    """Tokens of the longest sequence, and whether every one of them has something to learn."""
    if experience.experience_type == "dpo":
        answers = [len(experience.chosen), len(experience.rejected)]
        return experience.prompt_length + max(answers), min(answers) > 0
    return len(experience.tokens), len(experience.tokens) > experience.prompt_length


def open_experiences(config: AflowConfig) -> Experiences:
    """The reader of a prepared configuration's data set, at its first row.

    Raises:
        BadInput: rows that cannot be learned from.
        RunFailed: Hugging Face `datasets` cannot read the files.
    """
    buffer = experience_buffer(config)
    if buffer is None:
        raise ValueError("only `mode: train` reads a data set")
    located = locate(config, buffer)
    files = [file.resolve() for file in located.files]  # not the links, which are ours
    table = read_table(str(buffer.path), files, whole=True) if files else None
    storage = replace(
        buffer.to_storage_config(), tokenizer_path=str(resolve_model(config.model.model_path))
    )
    longest = config.model.max_model_len if config.engine == "local" else None
    try:
        return Experiences(storage, table.places if table else [], longest)
    except (OSError, ValueError, DatasetsError) as error:
        if isinstance(error, BadInput):
            raise
        raise RunFailed(f"the data set {buffer.path} cannot be read: {error}") from error


def left_out_warning(reader: Experiences, config: AflowConfig) -> str | None:
    """What to say about the rows that did not fit."""
    if not reader.left_out:
        return None
    shown = ", ".join(reader.left_out[:_NAMED])
    more = len(reader.left_out) - _NAMED
    rows = len(reader.left_out) + len(reader)
    return (
        f"{len(reader.left_out)} of {rows} rows are longer than model.max_model_len "
        f"({config.model.max_model_len}) and are left out: {shown}"
        + (f" and {more} more" if more > 0 else "")
    )
