"""Rollout records on disk, one line each, for training and for held-out evaluations.

    <run folder>/evaluations/<task set>/step_<n>.jsonl    every rollout of a held-out item
    <run folder>/rollouts/step_<n>.jsonl                  training rollouts whose workflow kept
                                                          something (`aflow_tune.context.keep`)

The adapter appends them from several processes, each line in one write; reports read them. The
field `run` of both is the number of the rollout among those of its item (the name on disk is kept).
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
"""Characters kept of the reason why a rollout failed."""
MAX_ANSWER = 80
"""Characters of an answer's key; a longer answer is cut and a hash of it added."""

_LOOKED_AT = 20_000
"""Characters at the end of a response that are searched for a tag or box."""
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class EvalRecord:
    """The record of one rollout on one held-out item.

    `score` is None if the rollout failed or could not be scored; then `failure` is the kind and
    `reason` a text (at most `MAX_REASON` characters). `item` is the row of the data set.
    `transcript` lists answered calls: `caller`, `messages`, `response` (its text), `tokens`, and if
    they apply `tools` (offered ones), `calls` (of tools), `reward` (of the step), `truncated`.

    `calls` lists every call of the tuned model in order of start: `caller`, `prompt_tokens`,
    `tokens` (sampled; both None if the server reports none), and if they apply `truncated`,
    `failed` (no answer) and `tools` (`name`, `arguments`). `operators` lists `operator`,
    `instance`, `outcome`, `attempts`. `answer` is the `answer_key` of the last response.
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
        """The record as one line of JSON, with the newline."""
        return as_line(asdict(self))

    @classmethod
    def from_line(cls, line: bytes) -> EvalRecord:
        """The record of a line; unknown keys, of newer versions, are ignored. Raises ValueError: it
        is not a complete record."""
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
    """One training rollout. `task` is the task's number in the step, `run` the rollout's in its
    group; `reward` is None if it failed, and `failure` is then the kind."""

    step: int
    task: int
    run: int
    reward: float | None
    failure: str | None = None
    kept: dict[str, Any] = field(default_factory=dict)


def record_path(eval_dir: Path, taskset: str, step: int) -> Path:
    """The file of the evaluation of `taskset` with the weights of `step`."""
    return eval_dir / taskset / f"step_{step}.jsonl"


def append_record(eval_dir: Path, record: EvalRecord) -> None:
    """Append one line in one write. Raises OSError: it was not written completely."""
    append_line(record_path(eval_dir, record.taskset, record.step), record.to_line())


def read_records(path: Path) -> list[EvalRecord]:
    """All records of a file, without a torn last line. Raises ValueError, with file and line:
    another line is damaged."""
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
    """Step and path of each `step_N.jsonl` below a folder, in no particular order."""
    for path in folder.rglob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            yield int(number), path


def append_rollout(run_dir: Path, rollout: Rollout) -> None:
    """Append one line in one write. Raises OSError: it was not written completely."""
    append_line(run_dir / "rollouts" / f"step_{rollout.step}.jsonl", as_line(asdict(rollout)))


def read_rollouts(run_dir: Path) -> Iterator[Rollout]:
    """All rollouts in order of step, task and run. Of several lines for one rollout, as after a
    repeated step, the last counts. Damaged lines are skipped."""
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
    """Remove the files of steps later than `after`, before these are repeated."""
    for step, path in record_files(run_dir / "rollouts"):
        if step > after:
            path.unlink()


def traces_of(records: Iterable[EvalRecord]) -> list[tuple[Trace, float | None]]:
    """The trace of each rollout with its reward (None if it failed). Records have no calls of other
    models and no costs, so the traces lack them."""
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
    """A response's final answer as a short key, to count equal answers: the last `<answer>` tag,
    else the last `\\boxed{}`, else the whole text. "" if it is blank."""
    end = text[-_LOOKED_AT:]
    marked = _TAG.findall(end) or boxed_answers(end) or [text]
    answer = " ".join(marked[-1].split())
    if len(answer) <= MAX_ANSWER:
        return answer
    digest = hashlib.sha256(answer.encode(errors="replace")).hexdigest()[:12]
    return f"{answer[:MAX_ANSWER]}... [{digest}]"
