"""What is wrong with the data set of `mode: train`, row by row.

The keys are Trinity's (`buffer.trainer_input.experience_buffer` and its `format`), and so is the
meaning: `sft` takes `messages` that end with the assistant's turn, or a `prompt` and a
`response`; `dpo` a prompt with a `chosen` and a `rejected` answer; `cpt` plain text. Nothing is
tokenised here; what is too long is found where the rows are read (`engines/trinity/readers.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from trinity.common.config import FormatConfig
from trinity.common.constants import PromptType

from aflow_tune.config.mode_rules import FROM_DATA
from aflow_tune.config.schema_names import nearest
from aflow_tune.config.tasksets import (
    experience_buffer,
    is_file,
    locate,
    read_taskset,
    taskset_fault,
    total_steps,
)
from aflow_tune.data.checks import Findings, check_rows
from aflow_tune.errors import Fault

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

KEY = "buffer.trainer_input.experience_buffer"
_MOST_FAULTS = 5

Problem = tuple[str, str, str]
"""What is expected of a row, what was found, and the cure."""


def check_experiences(config: AflowConfig) -> list[Fault]:
    """Faults of the settings: no data set, one that is not there, batches that it cannot fill."""
    if config.mode != "train":
        return []
    where, buffer = config.positions.where, experience_buffer(config)
    if buffer is None or not buffer.path:
        cure = f"{KEY}: {{path: data/sft.jsonl, storage_type: file}}"
        return [Fault(where(f"{KEY}.path"), "the data set to learn from", "none", cure)]
    faults = []
    if not is_file(buffer) and config.engine == "local":
        place, found = where(f"{KEY}.storage_type"), repr(buffer.storage_type)
        faults.append(Fault(place, "file (engine: local)", found, "storage_type: file"))
    elif not awaited(config) and (fault := taskset_fault(config, KEY, buffer)):
        faults.append(fault)
    if config.algorithm.algorithm_type == "cpt" and buffer.format.prompt_type.value != "plaintext":
        place, found = where(f"{KEY}.format.prompt_type"), repr(buffer.format.prompt_type.value)
        cure = "prompt_type: plaintext, with prompt_key: text"
        faults.append(Fault(place, "plaintext: cpt reads text, no messages", found, cure))
    size = config.buffer.train_batch_size
    if size < 1:
        place, found = where("buffer.train_batch_size"), str(size) if size else "none"
        expected = "the rows of the data set that one step takes (`mode: train`)"
        faults.append(Fault(place, expected, found, "train_batch_size: 16"))
    elif not faults:
        faults += _size(config)
    if config.positions.given("trainer.save_interval") and config.trainer.save_interval == 0:
        # Trinity synchronises these algorithms as often as it saves.
        place, expected = where("trainer.save_interval"), "1 or more with `mode: train`"
        faults.append(Fault(place, expected, "0", "save_interval: 10"))
    return faults


def awaited(config: AflowConfig) -> bool:
    """Whether an earlier stage is still to write the data set."""
    buffer = experience_buffer(config)
    path = config.__dict__.get("_awaited")
    return path is not None and buffer is not None and locate(config, buffer).kind == "missing"


def check_experience_rows(config: AflowConfig) -> Findings:
    """Rows that are unreadable, or lack what the algorithm learns from: with file and line."""
    found = Findings()
    buffer = experience_buffer(config)
    if buffer is None or not buffer.path or awaited(config):
        return found
    located = locate(config, buffer)
    if located.warning:
        found.warnings.append(located.warning)
    table = read_taskset(config, buffer)
    if table is None:
        return found
    found.add(check_rows(table))
    kind = config.algorithm.algorithm_type
    if found.faults or kind not in FROM_DATA:
        return found
    check = _row_check(kind, buffer.format)
    wrong = 0
    for row, place in zip(table.rows, table.places, strict=True):
        problem = check(row)
        if problem is None:
            continue
        wrong += 1
        if wrong <= _MOST_FAULTS:
            found.faults.append(Fault(place, *problem))
    if wrong > _MOST_FAULTS:
        found.warnings.append(f"{table.source}: {wrong} of {len(table.rows)} rows are faulty")
    return found


def _size(config: AflowConfig) -> Iterable[Fault]:
    buffer, size = experience_buffer(config), config.buffer.train_batch_size
    table = None if buffer is None or awaited(config) else read_taskset(config, buffer)
    if table is None or table.faults or not table.total:
        return
    where = config.positions.where("buffer.train_batch_size")
    if size > table.total:
        expected = f"at most the {table.total} rows of {table.source}"
        yield Fault(where, expected, str(size), f"train_batch_size: {table.total}")
    elif total_steps(config) == 0:
        found = f"0 steps: fewer rows x epochs than the batch of {size}"
        yield Fault(where, "at least one step", found, "lower it, or raise buffer.total_epochs")


def _row_check(kind: str, form: FormatConfig) -> Callable[[Mapping[str, Any]], Problem | None]:
    """What is asked of every row; returns the first problem of one."""
    messages = form.prompt_type is PromptType.MESSAGES
    if kind == "cpt":
        return lambda row: _text(row, "prompt_key", form.prompt_key)
    if kind == "dpo" and messages:
        return lambda row: (
            _messages(row, "messages_key", form.messages_key, answered=False)
            or _messages(row, "chosen_key", form.chosen_key, answered=True)
            or _messages(row, "rejected_key", form.rejected_key, answered=True)
        )
    if kind == "sft" and messages:
        return lambda row: _messages(row, "messages_key", form.messages_key, answered=True)
    keys = {"prompt_key": form.prompt_key, "system_prompt_key": form.system_prompt_key}
    if kind == "dpo":
        keys |= {"chosen_key": form.chosen_key, "rejected_key": form.rejected_key}
    else:
        keys |= {"response_key": form.response_key}

    def texts(row: Mapping[str, Any]) -> Problem | None:
        problems = (_text(row, setting, key) for setting, key in keys.items() if key is not None)
        return next((problem for problem in problems if problem), None)

    return texts


def _text(row: Mapping[str, Any], setting: str, key: str) -> Problem | None:
    if key not in row:
        return _missing(row, setting, key)
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        return f"a text under {key!r}", _short(value), "write the text, or remove the row"
    return None


def _messages(row: Mapping[str, Any], setting: str, key: str, *, answered: bool) -> Problem | None:
    """Whether the row has a list of messages, with the assistant's at the end if `answered`."""
    if key not in row:
        return _missing(row, setting, key)
    messages = row[key]
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except json.JSONDecodeError:
            messages = None
    expected = f"a list of messages under {key!r}, each with `role` and `content`"
    cure = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(messages, list) or not messages:
        return expected, _short(row[key]), cure
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return expected, _short(message), cure
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            return expected, _short(message), cure
    last = messages[-1]["role"]
    if answered and last != "assistant":
        expected = f"the assistant's message at the end of {key!r}: it is what is learned"
        return expected, f"{last!r} at the end", "add the answer, or remove the row"
    return None


def _missing(row: Mapping[str, Any], setting: str, key: str) -> Problem:
    columns = list(row)
    close = nearest(key, columns, 0.5) or (columns[0] if len(columns) == 1 else None)
    cure = f"{KEY}.format.{setting}: {close or 'COLUMN'}"
    return f"a field {key!r} (format.{setting})", ", ".join(map(repr, columns)), cure


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
