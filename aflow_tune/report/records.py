"""One line for each run of a held-out task: what the evaluation is computed from.

The adapter appends them while a run evaluates, several processes at once, each line in one
write. The report reads them. Layout: `<run folder>/evaluations/<task set>/step_<n>.jsonl`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from aflow_tune.files import append_line, as_line

MAX_REASON = 600
"""Characters that are kept of the reason why a run failed."""


@dataclass(frozen=True)
class EvalRecord:
    """How one run on one held-out item went.

    `score` is None where nothing could be scored; `failure` then says why in a word and `reason`
    in words (their end, at most `MAX_REASON` characters). `item` is the row of the data set.
    `transcript` lists the calls: caller, messages, response, tokens.

    `calls` lists every call of the tuned model in the order of their start: `caller`,
    `prompt_tokens` and `tokens` (drawn; both None where the server did not count them), and only
    where there is something to tell `truncated`, `failed` (no answer came) and `tools` (the
    tool calls of the answer: `name` and `arguments`). `operators` lists the uses of operators:
    `operator`, `instance`, `outcome`, `attempts`. `answer` is what `answers.py` makes of the
    last response: "" for an empty one, None where there is none. `kept` is what the workflow kept
    with `aflow_tune.context.keep`.
    """

    step: int
    taskset: str
    item: int
    run: int
    score: float | None
    reward: float | None
    failure: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    transcript: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    calls: list[dict[str, Any]] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)
    answer: str | None = None
    reason: str = ""
    kept: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> bytes:
        """The record as one line of JSON with its line end."""
        return as_line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> EvalRecord:
        """The record of a line; keys that a newer version wrote are passed over.

        Raises:
            ValueError: the line is not a whole record.
        """
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise ValueError("a record is a JSON object")
        known = {item.name for item in fields(cls)}
        try:
            return cls(**{name: value for name, value in entry.items() if name in known})
        except TypeError as error:
            raise ValueError(str(error)) from error


def record_path(eval_dir: Path, taskset: str, step: int) -> Path:
    """The file that holds the evaluation of `taskset` with the weights of `step`."""
    return eval_dir / taskset / f"step_{step}.jsonl"


def append_record(eval_dir: Path, record: EvalRecord) -> None:
    """Append one line in one write, so that concurrent writers never mix.

    Raises:
        OSError: the line could not be written whole.
    """
    append_line(record_path(eval_dir, record.taskset, record.step), record.to_line())


def read_records(path: Path) -> list[EvalRecord]:
    """All records of a file. A torn last line, still being written or left by a writer that was
    killed, is passed over.

    Raises:
        ValueError: another line is damaged; file and line number are named.
    """
    *lines, last = path.read_bytes().split(b"\n")
    if last:
        lines.append(last)
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(EvalRecord.from_line(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is damaged: {error}") from error
    return records
