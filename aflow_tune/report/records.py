"""What rollouts leave on disk: a line each, for training and for held-out evaluations.

    <run folder>/evaluations/<task set>/step_<n>.jsonl    every rollout of a held-out item
    <run folder>/rollouts/step_<n>.jsonl                  training rollouts whose workflow kept
                                                          something (`aflow_tune.context.keep`)

The adapter appends them, several processes at once, each line in one write; reports read them.
The field `run` of both is the rollout's number among those of its item: that is its name on disk.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from aflow_tune.files import append_line, as_line
from aflow_tune.scoring.numbers import boxed_answers
from aflow_tune.trace import POLICY, ModelCall, OperatorCall, Trace

MAX_REASON = 600
"""Characters that are kept of the reason why a rollout failed."""
MAX_ANSWER = 80
"""Characters of an answer's key; a longer one is cut and ends with a hash of the whole."""

_LOOKED_AT = 20_000
"""Characters of a response, from its end, in which the mark of an answer is looked for."""
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class EvalRecord:
    """How one rollout on one held-out item went.

    `score` is None where nothing could be scored; `failure` then says why in a word and `reason`
    in words (at most `MAX_REASON` characters). `item` is the row of the data set. `transcript`
    lists calls: caller, messages, response, tokens.

    `calls` lists every call of the tuned model by its start: `caller`, `prompt_tokens` and `tokens`
    (drawn; both None where the server did not count), and where they apply `truncated`, `failed`
    (no answer came) and `tools` (`name` and `arguments`). `operators` lists `operator`, `instance`,
    `outcome`, `attempts`. `answer` is the `answer_key` of the last response.
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
        """The record of a line; keys that a newer version wrote are passed over. Raises ValueError
        if it is not a whole record."""
        entry = json.loads(line)
        if not isinstance(entry, dict):
            raise ValueError("a record is a JSON object")
        known = {item.name for item in fields(cls)}
        try:
            return cls(**{name: value for name, value in entry.items() if name in known})
        except TypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class Rollout:
    """One training rollout. `task` counts the tasks of the step, `run` the rollouts of the group;
    `reward` is None where it failed, and `failure` then says how."""

    step: int
    task: int
    run: int
    reward: float | None
    failure: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)


def record_path(eval_dir: Path, taskset: str, step: int) -> Path:
    """The file that holds the evaluation of `taskset` with the weights of `step`."""
    return eval_dir / taskset / f"step_{step}.jsonl"


def append_record(eval_dir: Path, record: EvalRecord) -> None:
    """Append one line in one write. Raises OSError if it could not be written whole."""
    append_line(record_path(eval_dir, record.taskset, record.step), record.to_line())


def read_records(path: Path) -> list[EvalRecord]:
    """All records of a file but for a torn last line. Raises ValueError with file and line if
    another one is damaged."""
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(EvalRecord.from_line(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is damaged: {error}") from error
    return records


def record_files(folder: Path) -> Iterator[tuple[int, Path]]:
    """The `step_N.jsonl` below a folder, with their steps."""
    for path in folder.rglob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            yield int(number), path


def append_rollout(run_dir: Path, rollout: Rollout) -> None:
    """Append one line. Raises OSError if it could not be written whole."""
    append_line(run_dir / "rollouts" / f"step_{rollout.step}.jsonl", as_line(asdict(rollout)))


def read_rollouts(run_dir: Path) -> Iterator[Rollout]:
    """All rollouts by step; of a step that was begun twice those of the later attempt. Torn and
    otherwise damaged lines are passed over."""
    for _, path in sorted(record_files(run_dir / "rollouts")):
        found: dict[tuple[int, int], Rollout] = {}
        for line in path.read_bytes().split(b"\n"):
            try:
                rollout = Rollout(**json.loads(line))
            except (ValueError, TypeError, RecursionError):
                continue
            counted = all(type(n) is int for n in (rollout.step, rollout.task, rollout.run))
            if counted and isinstance(rollout.kept, dict):
                found[rollout.task, rollout.run] = rollout
        yield from (found[key] for key in sorted(found))


def forget_rollouts(run_dir: Path, after: int) -> None:
    """Remove the files of the steps behind `after`, before they are done again."""
    for step, path in record_files(run_dir / "rollouts"):
        if step > after:
            path.unlink()


def traces_of(records: Iterable[EvalRecord]) -> list[tuple[Trace, float | None]]:
    """The trace of each rollout with its reward; None for one that failed. Calls of other models
    and costs are not in records, so the traces lack them."""
    found = []
    for record in records:
        trace = Trace()
        for call in record.calls:
            trace.events.append(
                ModelCall(
                    caller=call["caller"],
                    role=POLICY,
                    model="",
                    prompt_tokens=call["prompt_tokens"],
                    completion_tokens=call["tokens"],
                    failure="no answer" if call.get("failed") else None,
                )
            )
        names = ("operator", "instance", "outcome", "attempts")
        for use in record.operators:
            trace.events.append(OperatorCall(**{name: use[name] for name in names}))
        found.append((trace, record.reward))
    return found


def answer_key(text: str) -> str:
    """A response's final answer as a short key, so that equal answers can be counted: the last
    `<answer>` tag or `\\boxed{}`, else the whole text. "" for nothing but white space."""
    end = text[-_LOOKED_AT:]
    marked = _TAG.findall(end) or boxed_answers(end) or [text]
    answer = " ".join(marked[-1].split())
    if len(answer) <= MAX_ANSWER:
        return answer
    digest = hashlib.sha256(answer.encode(errors="replace")).hexdigest()[:12]
    return f"{answer[:MAX_ANSWER]}... [{digest}]"
