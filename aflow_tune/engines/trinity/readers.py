"""Our readers behind Trinity's interface, named in `storage_type` by their dotted paths.

`RowsReader` reads rows unchanged (Trinity's own table has one type per column), `MixReader` batches
of several task sets with exact shares; `FixedSample` selects part of a task set for evaluations.

`Experiences` reads the data set of `mode: train`. Rows that the chat template refuses are reported
before training starts; rows with broken JSON or calls of tools that they do not offer, and on the
local engine rows longer than `model.max_model_len`, are left out and reported (truncation would
train answers without an end).
Recorded rollouts are read by `training.off_policy.BatchFiles`.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from datasets.exceptions import DatasetsError
from trinity.buffer import get_buffer_reader
from trinity.buffer.reader.file_reader import (
    FileReader,
    TaskFileReader,
    _DatasetFileReader,
    _HFBatchReader,
)
from trinity.buffer.schema import FORMATTER
from trinity.buffer.selector import BaseSelector
from trinity.common.config import DataSelectorConfig, StorageConfig, TasksetConfig
from trinity.common.constants import PromptType
from trinity.common.experience import Experience
from trinity.common.workflows import Task

from aflow_tune.config.load import AflowConfig
from aflow_tune.config.names import BATCH_FILES
from aflow_tune.config.tasksets import (
    catalogue_of,
    experience_buffer,
    link_files,
    locate,
    on_cluster,
)
from aflow_tune.data.catalogue import Tool
from aflow_tune.data.checks import source_of
from aflow_tune.data.dialogues import Unfit, as_dialogue, as_pair, of_split, with_answers
from aflow_tune.data.mix import Mix, exact_shares, sample
from aflow_tune.data.rows import Table, read_table, with_source
from aflow_tune.engines.local.chat import Renderer
from aflow_tune.engines.local.models import end_tokens, load_tokenizer, resolve_model
from aflow_tune.engines.trinity.training.off_policy import BatchFiles
from aflow_tune.errors import BadInput, Fault, RunFailed
from aflow_tune.files import write_whole
from aflow_tune.sections import DialoguesSection

_NAMED = 5
_RENDERED_FILE = "rendered.jsonl"


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


class _Made(_DatasetFileReader):
    """Batches of experiences that are made already."""

    dataset: Any

    def _batches(self, made: list[Experience], config: StorageConfig) -> _HFBatchReader:
        return _HFBatchReader(
            made,
            name=config.name,
            default_batch_size=self.read_batch_size,
            total_epochs=config.total_epochs,
            drop_last=True,
            total_steps=config.total_steps,
            enable_progress_bar=config.enable_progress_bar,
        )

    def _convert_batch(self, samples: list[Experience], indices: list[int]) -> list[Experience]:
        return [copy(experience) for experience in samples]


class Experiences(_Made):
    """The rows of a data set as experiences, in Trinity's batches or by `task_weights`. `left_out`
    names the rows that cannot be learned from, with the reason.

    Dialogues (`data.dialogues`) are rendered as the server renders them (`engines.local.chat`).
    Raises BadInput: a row is of no known form or has no answer, the chat template refuses it, or no
    row fits. `memory.py` changes which rows are read.
    """

    def __init__(
        self,
        config: StorageConfig,
        table: Table,
        longest: int | None,
        dialogues: DialoguesSection,
        catalogue: Mapping[str, Tool],
        seed: int = 0,
    ) -> None:
        self.left_out: list[str] = list(table.left_out)
        self.table = table
        """The whole data set as it stands in its files."""
        self.numbers: list[int] = []
        """Where in `table` the row of each experience stands."""
        self._longest = longest
        self._dialogues, self._seed = dialogues, seed
        self._catalogue = catalogue
        super().__init__(config)

    def _init_formatter_and_dataset(self, config: StorageConfig) -> tuple[Any, Any]:
        form, kind = config.format, str(config.schema_type)
        make = {"sft": self._answers, "dpo": self._pair, "cpt": self._text}[kind]
        tokenizer = load_tokenizer(Path(str(config.tokenizer_path)))
        if form.chat_template:
            tokenizer.chat_template = form.chat_template
        self._renderer = Renderer(tokenizer, end_tokens(Path(str(config.tokenizer_path))))
        self._form = form
        think = form.enable_thinking
        self._options = {} if think is None else {"enable_thinking": think}
        found: list[Experience] = []
        faults: list[Fault] = []
        self._types: list[str] = []
        """The type of task of each experience."""
        fix = "correct or remove this row"
        for number, (row, place) in enumerate(zip(self.table.rows, self.table.places, strict=True)):
            try:
                made, task_type = make(row)
            except Unfit as error:
                self.left_out.append(f"{place}: {error}")
                continue
            except (BadInput, ValueError, KeyError, TypeError) as error:
                told = f"no key {error}" if isinstance(error, KeyError) else str(error)
                expected = "a row that the chat template renders"
                faults.append(Fault(place, expected, told, fix))
                continue
            answers = [length for exp in made for length in _answer_lengths(exp)]
            length = max((exp.prompt_length + max(_answer_lengths(exp)) for exp in made), default=0)
            if not made or min(answers) < 1:
                faults.append(Fault(place, "an answer to learn", "none", fix))
            elif self._longest is not None and length > self._longest:
                told = f"{length} tokens, more than model.max_model_len ({self._longest})"
                self.left_out.append(f"{place}: {told}")
            else:
                found += made
                self.numbers += [number] * len(made)
                self._types += [task_type] * len(made)
        if not faults and not found:
            expected = f"rows of at most {self._longest} tokens that can be learned from"
            told = f"{len(self.left_out)} rows, none of them so: {self.left_out[0]}"
            fix = "raise model.max_model_len, or correct the rows"
            faults = [Fault("model.max_model_len", expected, told, fix)]
        if faults:
            raise BadInput("The data set cannot be learned from.", faults[:_NAMED])
        return None, self._batches(found, config)

    def _init_selector(self, config: StorageConfig) -> None:
        super()._init_selector(config)
        self._by_type: dict[str, list[int]] = {}
        for at, task_type in enumerate(self._types):
            self._by_type.setdefault(task_type, []).append(at)
        self._mix = self._weighted(config.batch_size)

    def keep(self, chosen: Sequence[int]) -> None:
        """Read these of the experiences only, by their places; before the first is read."""
        made = self.dataset.dataset
        self.numbers = [self.numbers[at] for at in chosen]
        self._types = [self._types[at] for at in chosen]
        self.dataset = self._batches([made[at] for at in chosen], self.config)
        self._init_selector(self.config)

    def _weighted(self, batch_size: int) -> Mix | None:
        """The mix of the types of tasks. Raises BadInput: a type with a weight has no rows."""
        if not (weights := self._dialogues.task_weights):
            return None
        shares = exact_shares({kind: weight for kind, weight in weights.items() if weight})
        sizes = {kind: len(rows) for kind, rows in self._by_type.items()}
        if missing := [kind for kind in shares if not sizes.get(kind)]:
            where, found = f"dialogues.task_weights.{missing[0]}", f"none; there are {sizes}"
            title, fix = "A type of task has no rows.", "leave its weight out, or add rows"
            raise BadInput.of(title, where, f"rows of the type {missing[0]}", found, fix)
        return Mix(shares, sizes, batch_size, self._seed)

    @property
    def weighted(self) -> bool:
        """Whether batches have shares by type of task."""
        return self._mix is not None

    def _read_samples(self, batch_size: int) -> tuple[list[Any], list[int]]:
        if self._mix is None:
            return super()._read_samples(batch_size)
        drawn: list[tuple[str, int]] = []
        while len(drawn) < batch_size:  # also batches of another size: the mix is one sequence
            at = self.dataset.current_offset + len(drawn)
            number, within = divmod(at, self.read_batch_size)
            drawn += self._mix.batch(number)[within : within + batch_size - len(drawn)]
        indices = [self._by_type[kind][at] for kind, at in drawn]
        return self.dataset.select_batch(indices), indices

    def state_dict(self) -> Any:
        if self._mix is None:
            return super().state_dict()
        return {"current_index": self.dataset.current_offset}

    def load_state_dict(self, state_dict: Any) -> None:
        if self._mix is None:
            super().load_state_dict(state_dict)
        else:
            self.dataset.current_offset = state_dict["current_index"]

    def in_order(self, steps: int) -> Iterator[dict[str, Any]]:
        """What `Rendered` reads: each experience once or, by weights, as `steps` batches draw."""
        indices: Iterable[int] = range(len(self.dataset.dataset))
        if self._mix is not None:
            drawn = itertools.chain.from_iterable(map(self._mix.batch, range(steps)))
            indices = (self._by_type[kind][at] for kind, at in drawn)
        for index in indices:
            it = self.dataset.dataset[index]
            tensors = {name: getattr(it, name) for name in _RENDERED}
            row = {name: t.tolist() for name, t in tensors.items() if t is not None}
            yield {**row, "prompt_length": it.prompt_length}

    def _answers(self, row: Mapping[str, Any]) -> tuple[list[Experience], str]:
        if self._form.prompt_type is PromptType.PLAINTEXT:
            messages = self._prompt(row)
            messages.append({"role": "assistant", "content": row[self._form.response_key]})
            row = {"messages": messages}
        dialogue = as_dialogue(
            row,
            self._catalogue,
            candidates=self._dialogues.candidates,
            key=self._form.messages_key,
        )
        rendered = self._renderer.examples(
            dialogue["messages"],
            dialogue["tools"],
            last_only=not self._form.enable_concatenated_multi_turn,
            **self._options,
        )
        made = [
            Experience(
                tokens=torch.tensor(it.tokens_T),
                prompt_length=it.prompt_length,
                action_mask=torch.tensor(it.learned_R),
            )
            for it in rendered
        ]
        return made, dialogue["task_type"]

    def _pair(self, row: Mapping[str, Any]) -> tuple[list[Experience], str]:
        form, tools = self._form, []
        if form.prompt_type is PromptType.PLAINTEXT:
            messages = self._prompt(row)
            answers = [
                {"role": "assistant", "content": row[key]}
                for key in (form.chosen_key, form.rejected_key)
            ]
        else:
            keys = form.messages_key, form.chosen_key, form.rejected_key
            pair = as_pair(row, keys=keys)
            messages, tools = pair["messages"], pair["tools"]
            answers = [pair["chosen"], pair["rejected"]]
        prompt = self._renderer.prompt(messages, tools, **self._options)
        chosen, rejected = (
            torch.tensor(self._renderer.answer(messages, tools, answer, **self._options))
            for answer in answers
        )
        tokens = torch.tensor(prompt)
        made = Experience(
            tokens=tokens, prompt_length=len(prompt), chosen=chosen, rejected=rejected
        )
        return [made], "selection"

    def _text(self, row: Mapping[str, Any]) -> tuple[list[Experience], str]:
        ids = self._renderer.tokenizer(row[self._form.prompt_key])["input_ids"]
        return [Experience(tokens=torch.tensor(ids), prompt_length=1)], "selection"

    def _prompt(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        form, messages = self._form, []
        system = row[form.system_prompt_key] if form.system_prompt_key else form.system_prompt
        if system is not None:
            messages.append({"role": "system", "content": system})
        return [*messages, {"role": "user", "content": row[form.prompt_key]}]


_RENDERED = ("tokens", "action_mask", "chosen", "rejected")


class Rendered(_Made):
    """For Trinity's trainer: what `Experiences` made, from the file that `hand_over` wrote."""

    def _init_formatter_and_dataset(self, config: StorageConfig) -> tuple[Any, Any]:
        made = []
        with (Path(str(config.path)) / _RENDERED_FILE).open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                tensors = {name: torch.tensor(row[name]) for name in _RENDERED if name in row}
                made.append(Experience(**tensors, prompt_length=row["prompt_length"]))
        return None, self._batches(made, config)


def hand_over(reader: Experiences, config: AflowConfig, steps: int) -> None:
    """Have Trinity's trainer read what `reader` made for `steps` train steps."""
    buffer = experience_buffer(config)
    assert buffer is not None
    folder = Path(config.checkpoint_job_dir) / "data" / "rendered"
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in reader.in_order(steps))
    write_whole(folder / _RENDERED_FILE, lines)
    buffer.path, buffer.storage_type = str(folder), f"{Rendered.__module__}.Rendered"
    if reader.weighted:
        buffer.data_selector = None


def _answer_lengths(experience: Experience) -> list[int]:
    if experience.experience_type == "dpo":
        return [len(experience.chosen), len(experience.rejected)]
    return [len(experience.tokens) - experience.prompt_length]


def open_experiences(config: AflowConfig) -> Experiences | BatchFiles:
    """The reader of a prepared configuration's data set, at its first row. Raises BadInput as
    the reader; RunFailed: Hugging Face `datasets` cannot read the files."""
    buffer = experience_buffer(config)
    assert buffer is not None
    if buffer.storage_type == BATCH_FILES:
        return BatchFiles(buffer.to_storage_config())
    files = [file.resolve() for file in locate(config, buffer).files]  # not the links
    model = str(resolve_model(config.model.model_path))
    storage = replace(buffer.to_storage_config(), tokenizer_path=model)
    longest = config.model.max_model_len if config.engine == "local" else None
    if files:
        table = read_table(str(buffer.path), files, whole=True)
        if table.faults:
            raise BadInput(f"{buffer.path} cannot be read.", table.faults)
        table = of_split(with_answers(table, files), held_out=False)
    else:
        table = _from_hub(storage)
    return Experiences(storage, table, longest, config.dialogues, catalogue_of(config), config.seed)


def _from_hub(storage: StorageConfig) -> Table:
    try:
        rows = load_dataset(storage.path, name=storage.subset_name, split=storage.split)
    except (OSError, ValueError, DatasetsError) as error:
        raise RunFailed(f"the data set {storage.path} cannot be read: {error}") from error
    places = [f"{storage.path} row {number}" for number in range(len(rows))]
    return Table(str(storage.path), list(rows), places, len(rows))


def left_out_warning(reader: Experiences | BatchFiles, config: AflowConfig) -> str | None:
    """A warning about the rows that were left out, None without any."""
    if isinstance(reader, BatchFiles) or not (count := len(reader.left_out)):
        return None
    rows = len(set(reader.numbers)) + count
    told = "".join(f"\n  {line}" for line in reader.left_out[:_NAMED])
    more = f"\n  and {count - _NAMED} more" if count > _NAMED else ""
    return f"{count} of {rows} rows cannot be learned from and are left out:{told}{more}"
