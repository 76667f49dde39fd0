"""Our readers behind Trinity's interface, named in `storage_type` by their dotted paths.

`RowsReader` reads local files row by row, as they are: Trinity's own goes through a table with
one type a column, which rows of several sources do not fit into. `MixReader` reads batches of
several task sets by exact shares. `FixedSample` is a data selector for evaluations on a part of
a task set. Trinity's schedulers, selectors, formatter and saved state work with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from trinity.buffer import get_buffer_reader
from trinity.buffer.reader.file_reader import FileReader, TaskFileReader, _HFBatchReader
from trinity.buffer.schema import FORMATTER
from trinity.buffer.selector import BaseSelector
from trinity.common.config import DataSelectorConfig, StorageConfig, TasksetConfig
from trinity.common.workflows import Task

from aflow_tune.data.checks import source_of
from aflow_tune.data.mix import Mix, sample
from aflow_tune.data.rows import read_table, with_source
from aflow_tune.errors import BadInput


async def read_all(taskset: TasksetConfig) -> list[Task]:
    """Every task of a task set, by whichever reader it names."""
    reader = get_buffer_reader(taskset)
    tasks: list[Task] = []
    while True:
        try:
            tasks += await reader.read()
        except StopAsyncIteration:
            return tasks


class RowsReader(FileReader):
    """Trinity's file reader on rows that are read as they are.

    `path` is a file, or a folder all of whose files belong to the task set.
    """

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
    """Batches of a mix. `path` is a file that `mixes.merge_mix` wrote.

    Its state is the number of tasks that it has handed out. It ends after `total_steps` batches,
    or after as many as the rows of all task sets together make in `total_epochs`.
    """

    def __init__(self, config: StorageConfig) -> None:
        content = json.loads(Path(str(config.path)).read_text(encoding="utf-8"))
        self._shares = {name: Fraction(share) for name, share in content["shares"].items()}
        self._benchmarks: dict[str, str] = content["benchmarks"]
        self._tasksets = [
            _rows_of(replace(config, index=0, data_selector=None, **taskset))
            for taskset in content["tasksets"]
        ]
        self._places = _places(content["tasksets"], self._tasksets, self._shares)
        rows = {name: len(places) for name, places in self._places.items()}
        self._size = sum(rows.values())
        self._batch_size = config.batch_size
        self._mix = Mix(self._shares, rows, config.batch_size, content["seed"])
        self._numbers = {name: number for number, name in enumerate(self._shares)}
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
        """The shares are fixed: nothing is learned from rewards."""

    def _read_sync(self, batch_size: int | None = None, **kwargs: Any) -> list[Task]:
        number = self._taken // self._batch_size
        if batch_size not in (None, self._batch_size):
            raise ValueError(f"a mix is read in batches of {self._batch_size}, not {batch_size}")
        if number >= self._batches:
            raise StopIteration
        tasks = [self._task(source, row) for source, row in self._mix.batch(number)]
        self._taken += self._batch_size
        return tasks

    def _task(self, source: str, row: int) -> Task:
        taskset, at = self._places[source][row]
        content = with_source(self._tasksets[taskset][at], source, self._benchmarks.get(source))
        task: Task = self._formatter.format(content)
        task.index.update(index=at, taskset_id=self._numbers[source])
        return task


class FixedSample(BaseSelector):
    """A fixed part of a held-out task set, in the order of its rows, each source by its share.

    `kwargs.size` is how many rows are drawn; `seed` which ones.
    """

    def __init__(self, data_source: Any, config: DataSelectorConfig) -> None:
        super().__init__(data_source, config)
        labels = [source_of(row) for row in data_source.dataset]
        self._left = sample(labels, int(config.kwargs["size"]), config.seed)

    def get_indices(self, batch_size: int, return_extra_info: bool = False) -> list[int]:
        if not self._left:
            raise StopIteration  # which Trinity's reader passes on as the end of the task set
        taken, self._left = self._left[:batch_size], self._left[batch_size:]
        return taken

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """An evaluation always starts at its first row."""


def _rows_of(config: StorageConfig) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = get_buffer_reader(config).reader.dataset.dataset
    return rows


def _places(
    configs: Sequence[Mapping[str, Any]],
    tasksets: Sequence[Sequence[Mapping[str, Any]]],
    shares: Mapping[str, Fraction],
) -> dict[str, list[tuple[int, int]]]:
    """(task set, row) of every row of each source.

    Raises:
        ValueError: a row belongs to no source of the mix.
    """
    places: dict[str, list[tuple[int, int]]] = {name: [] for name in shares}
    for number, (config, rows) in enumerate(zip(configs, tasksets, strict=True)):
        own = config["name"] if config["name"] in shares else None
        names = [own] * len(rows) if own else [row.get("source") for row in rows]
        for at, name in enumerate(names):
            if name not in places:
                raise ValueError(f"row {at} of {config['path']}: {name!r} is no source of the mix")
            places[name].append((number, at))
    return places
