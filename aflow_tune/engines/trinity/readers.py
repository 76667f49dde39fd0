"""Our readers behind Trinity's interface, named in `storage_type` by their dotted paths.

`RowsReader` reads rows unchanged (Trinity's own table has one type per column), `MixReader` batches
of several task sets with exact shares; `FixedSample` selects part of a task set for evaluations.

`Experiences` reads the data set of `mode: train` with Trinity's reader and formatters. Rows that
the chat template refuses are reported before training starts; on the local engine rows longer than
`model.max_model_len` are left out and reported (truncation would train answers without an end).
Recorded rollouts are read by `training.off_policy.BatchFiles`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from datasets.exceptions import DatasetsError
from trinity.buffer import get_buffer_reader
from trinity.buffer.reader.file_reader import (
    ExperienceFileReader,
    FileReader,
    TaskFileReader,
    _HFBatchReader,
)
from trinity.buffer.schema import FORMATTER
from trinity.buffer.selector import BaseSelector
from trinity.common.config import DataSelectorConfig, StorageConfig, TasksetConfig
from trinity.common.workflows import Task

from aflow_tune.config.load import AflowConfig
from aflow_tune.config.names import BATCH_FILES
from aflow_tune.config.tasksets import experience_buffer, link_files, locate, on_cluster
from aflow_tune.data.checks import source_of
from aflow_tune.data.mix import Mix, sample
from aflow_tune.data.rows import Table, read_table, with_source
from aflow_tune.engines.local.models import resolve_model
from aflow_tune.engines.trinity.training.off_policy import BatchFiles
from aflow_tune.errors import BadInput, Fault, RunFailed

_NAMED = 5


async def read_all(taskset: TasksetConfig) -> list[Task]:
    """Every task of a task set, by the reader that it names."""
    reader = get_buffer_reader(taskset)
    tasks: list[Task] = []
    while True:
        try:
            tasks += await reader.read()
        except StopAsyncIteration:
            return tasks


class RowsReader(FileReader):
    """Tasks from a file or all files of a folder (`path`). Raises BadInput: a file has faults."""

    def __init__(self, config: StorageConfig) -> None:
        self.reader = _PlainRows(config)


class _PlainRows(TaskFileReader):
    def _init_formatter_and_dataset(self, config: StorageConfig) -> tuple[Any, Any]:
        path = Path(str(config.path))
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        table = read_table(str(path), files, whole=True)
        if table.faults:
            raise BadInput(f"{config.path} cannot be read.", table.faults)
        batches = _HFBatchReader(
            table.rows,
            name=config.name,
            default_batch_size=self.read_batch_size,
            total_epochs=1 if config.is_eval else config.total_epochs,
            offset=config.index,
            drop_last=not config.is_eval,
            total_steps=None if config.is_eval else config.total_steps,
            enable_progress_bar=config.enable_progress_bar,
        )
        return FORMATTER.get("task")(config), batches


class MixReader(FileReader):
    """Batches of a mix (`data.mix.Mix`); `path` is a file that `tasksets.merge_mix` wrote. Ends
    after `total_steps` batches, else after as many as all rows make in `total_epochs`. Raises
    ValueError: a row belongs to no source of the mix."""

    def __init__(self, config: StorageConfig) -> None:
        content = json.loads(Path(str(config.path)).read_text(encoding="utf-8"))
        shares = {name: Fraction(share) for name, share in content["shares"].items()}
        self._benchmarks: dict[str, str] = content["benchmarks"]
        self._tasksets: list[Sequence[Mapping[str, Any]]] = []
        self._places: dict[str, list[tuple[int, int]]] = {name: [] for name in shares}
        """(task set, row) of every row of each source."""
        for number, taskset in enumerate(content["tasksets"]):
            of_set = replace(config, index=0, data_selector=None, **taskset)
            rows = get_buffer_reader(of_set).reader.dataset.dataset
            self._tasksets.append(rows)
            own = taskset["name"] if taskset["name"] in shares else None
            for at, row in enumerate(rows):
                name = own or row.get("source")
                if name not in self._places:
                    where = f"row {at} of {taskset['path']}"
                    raise ValueError(f"{where}: {name!r} is no source of the mix")
                self._places[name].append((number, at))
        sizes = {name: len(places) for name, places in self._places.items()}
        self._size = sum(sizes.values())
        self._batch_size = config.batch_size
        self._mix = Mix(shares, sizes, config.batch_size, content["seed"])
        self._numbers = {name: number for number, name in enumerate(shares)}
        epochs = self._size * config.total_epochs // config.batch_size
        self._batches = epochs if config.total_steps is None else config.total_steps
        self._formatter = FORMATTER.get("task")(config)
        self._taken = config.index

    def __len__(self) -> int:
        return self._size

    def state_dict(self) -> dict[str, int]:
        return {"current_index": self._taken}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self._taken = state_dict["current_index"]

    def feedback(self, **pipeline_metrics: Any) -> None:
        """Does nothing: the shares are fixed and do not depend on rewards."""

    def _read_sync(self, batch_size: int | None = None, **kwargs: Any) -> list[Task]:
        number = self._taken // self._batch_size
        if number >= self._batches:
            raise StopIteration
        tasks: list[Task] = []
        for source, row in self._mix.batch(number):
            taskset, at = self._places[source][row]
            content = with_source(self._tasksets[taskset][at], source, self._benchmarks.get(source))
            tasks.append(self._formatter.format(content))
            tasks[-1].index.update(index=at, taskset_id=self._numbers[source])
        self._taken += self._batch_size
        return tasks


class FixedSample(BaseSelector):
    """`kwargs.size` rows of a held-out task set, stratified by source and fixed by `seed`."""

    def __init__(self, data_source: Any, config: DataSelectorConfig) -> None:
        super().__init__(data_source, config)
        labels = [source_of(row) for row in data_source.dataset]
        self._left = sample(labels, int(config.kwargs["size"]), config.seed)

    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> list[int]:
        if not self._left:
            raise StopIteration  # for Trinity's reader: the end of the task set
        taken, self._left = self._left[:batch_size], self._left[batch_size:]
        return taken

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Does nothing: an evaluation always starts at its first row."""


def materialise_experiences(config: AflowConfig) -> None:
    """Link a data set of one file, or the files of `BatchFiles` with the function for their
    advantages, into `<run folder>/data/experiences`, for the reader."""
    buffer = experience_buffer(config)
    folder = Path(config.checkpoint_job_dir) / "data" / "experiences"
    if buffer is None or not buffer.path or buffer.path == str(folder):
        return
    path = config.positions.beside(buffer.path).absolute()
    files = sorted(path.glob("*.jsonl")) if buffer.storage_type == BATCH_FILES else [path]
    if not all(file.is_file() for file in files):
        return
    if buffer.storage_type == BATCH_FILES:
        names = ("advantage_fn", "advantage_fn_args")
        buffer.data_selector.kwargs = {name: getattr(config.algorithm, name) for name in names}
    shutil.rmtree(folder, ignore_errors=True)  # links of an earlier start
    link_files(files, folder, copied=on_cluster(config))
    buffer.path, buffer.split, buffer.subset_name = str(folder), "train", None


class Experiences(ExperienceFileReader):
    """The rows of at most `longest` tokens (None: any length), in Trinity's batches; `left_out` has
    the `places` of the others. Raises BadInput: the formatter refuses a row, a row has no response,
    or no row fits. `memory.py` changes which rows are read."""

    table: Table | None = None
    """The whole data set as it stands in its files; None if these are not on this machine."""

    def __init__(self, config: StorageConfig, places: list[str], longest: int | None) -> None:
        self.left_out: list[str] = []
        self.numbers: list[int] = []
        """Where in the data set each row that is read stands."""
        self._places = places
        self._longest = longest
        super().__init__(config)

    def _init_formatter_and_dataset(self, config: StorageConfig) -> tuple[Any, Any]:
        formatter, batches = super()._init_formatter_and_dataset(config)
        rows = batches.dataset
        kept, faults = [], []
        for number in range(len(rows)):
            same = len(self._places) == len(rows)
            place, fix = f"{self.name} row {number}", "correct or remove this row"
            if same:
                place = self._places[number]
            try:
                experience = formatter.format(rows[number])
            except Exception as error:
                # Templates and tokenizers raise arbitrary errors; each is a fault of this row.
                found = f"{type(error).__name__}: {error}"
                faults.append(Fault(place, "a row that the chat template renders", found, fix))
                continue
            answers = [len(experience.tokens) - experience.prompt_length]
            if experience.experience_type == "dpo":
                answers = [len(experience.chosen), len(experience.rejected)]
            length = experience.prompt_length + max(answers)
            if min(answers) < 1:
                faults.append(Fault(place, "an answer to learn", "none", fix))
            elif self._longest is not None and length > self._longest:
                self.left_out.append(f"{place} ({length} tokens)")
            else:
                kept.append(number)
        if not faults and not kept:
            expected = f"rows of at most {self._longest} tokens"
            found = f"{len(rows)} rows, all of them longer: {self.left_out[0]}"
            fix = "raise model.max_model_len"
            faults = [Fault("model.max_model_len", expected, found, fix)]
        if faults:
            raise BadInput("The data set cannot be learned from.", faults[:_NAMED])
        self.numbers = kept
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


def open_experiences(config: AflowConfig) -> Experiences | BatchFiles:
    """The reader of a prepared configuration's data set, at its first row. Raises BadInput as
    the reader; RunFailed: Hugging Face `datasets` cannot read the files."""
    buffer = experience_buffer(config)
    assert buffer is not None
    if buffer.storage_type == BATCH_FILES:
        return BatchFiles(buffer.to_storage_config())
    files = [file.resolve() for file in locate(config, buffer).files]  # not the links
    table = read_table(str(buffer.path), files, whole=True) if files else None
    model = str(resolve_model(config.model.model_path))
    storage = replace(buffer.to_storage_config(), tokenizer_path=model)
    longest = config.model.max_model_len if config.engine == "local" else None
    try:
        reader = Experiences(storage, table.places if table else [], longest)
        reader.table = table
        return reader
    except BadInput:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        raise RunFailed(f"the data set {buffer.path} cannot be read: {error}") from error


def left_out_warning(reader: Experiences | BatchFiles, config: AflowConfig) -> str | None:
    """A warning about the rows that were left out as too long, None without any."""
    if isinstance(reader, BatchFiles) or not (count := len(reader.left_out)):
        return None
    return (
        f"{count} of {count + len(reader)} rows are longer than model.max_model_len "
        f"({config.model.max_model_len}) and are left out: {', '.join(reader.left_out[:_NAMED])}"
    )
