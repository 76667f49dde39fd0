"""The records of a policy that writes workflows, read from a run folder.

The writer's workflow keeps one record a run under `writer` (`aflow_tune.context.keep`): in
`rollouts/` for training, in the evaluation records for held-out tasks. Here they are read.
`writer_numbers.py` counts; `writer_charts.py`, `writer_graphs.py` and `writer_prompts.py` choose
what `writer_section.py` shows; `writer_audit.py` warns.

A record holds what a model wrote, so nothing in it is trusted: a field of another type counts as
absent, texts are cut, a record that does not say whether its graph was valid is passed over.
What is not known is None and never 0.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.report.evaluation import Evaluation
from aflow_tune.report.rollouts import read_rollouts
from aflow_tune.writer.types import Level

KEPT = "writer"
"""The name under which the writer's workflow keeps its record."""
ENDS = 5
"""Steps at each end of training that are compared; of a short training, half of them each."""

_MOST_CODE, _MOST_PROMPT, _MOST_TEXT, _MOST_NAME = 20_000, 4_000, 2_000, 60
_MOST_KEY = 400
_MOST_ENTRIES = 30


@dataclass(frozen=True)
class RefusalTold:
    """One refusal of a record: its kind and its sentence, with its place."""

    kind: str
    message: str


@dataclass(frozen=True)
class WriterRun:
    """One run of the writer, as its record tells it."""

    step: int
    task: tuple[str, int]
    """The task set (for training the step) and the task's number in it."""
    reward: float | None
    valid: bool
    level: int | None = None
    """A `Level`."""
    problem_type: str = ""
    problem: str = ""
    text: str = ""
    """What the policy wrote, where no code could be read of it."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    refusals: tuple[RefusalTold, ...] = ()
    structure: str | None = None
    operators: Mapping[str, int] = field(default_factory=dict)
    nodes: int | None = None
    ending: str = ""
    reason: str = ""
    answer: str = ""
    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    usd: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    calls: int | None = None

    @property
    def clean(self) -> bool:
        """Whether the written graph itself gave the answer."""
        return self.level == Level.CLEAN

    @property
    def correct_clean(self) -> float | None:
        """The score if the written graph itself earned it, else 0; None where unscored."""
        return self.score if self.score is None or self.clean else 0.0


@dataclass(frozen=True)
class WriterRecords:
    """All records of a run folder, by step; evaluations that were cut off are left out."""

    training: Mapping[int, Sequence[WriterRun]]
    held_out: Mapping[str, Mapping[int, Sequence[WriterRun]]]
    """By task set, then by step. Only evaluations with records."""

    @property
    def before(self) -> list[WriterRun]:
        """The first evaluation of each task set that has a later one."""
        ends = [steps for steps in self.held_out.values() if len(steps) > 1]
        return [run for steps in ends for run in steps[min(steps)]]

    @property
    def after(self) -> list[WriterRun]:
        """The last evaluation of each task set."""
        return [run for steps in self.held_out.values() for run in steps[max(steps)]]

    @property
    def training_ends(self) -> tuple[list[int], list[int]]:
        """The first and the last steps of training; the first are empty if there is one step."""
        steps = sorted(self.training)
        most = min(ENDS, max(1, len(steps) // 2))
        return (steps[:most] if len(steps) > 1 else []), steps[-most:]

    def of_steps(self, steps: Iterable[int]) -> list[WriterRun]:
        """The training runs of these steps."""
        return [run for step in steps for run in self.training[step]]

    @property
    def latest(self) -> list[WriterRun]:
        """The newest picture of the policy: the last evaluations, else the last steps."""
        return self.after or self.of_steps(self.training_ends[1])

    @property
    def earliest(self) -> list[WriterRun]:
        """The first picture that can be compared with `latest`; empty where there is none."""
        return self.before if self.after else self.of_steps(self.training_ends[0])

    @property
    def every(self) -> list[WriterRun]:
        """All runs: training by step, then the evaluations."""
        return [
            *(run for step in sorted(self.training) for run in self.training[step]),
            *(
                run
                for steps in self.held_out.values()
                for step in sorted(steps)
                for run in steps[step]
            ),
        ]


def load_writer(
    run_dir: Path, evaluations: Mapping[str, Mapping[int, Evaluation]]
) -> WriterRecords | None:
    """The writer's records of a run folder; None where no run kept one."""
    training: dict[int, list[WriterRun]] = defaultdict(list)
    for rollout in read_rollouts(run_dir):
        task = (f"step {rollout.step}", rollout.task)
        run = read_run(rollout.kept, rollout.step, task, rollout.reward)
        if run is not None:
            training[rollout.step].append(run)
    held_out: dict[str, dict[int, list[WriterRun]]] = {}
    for name, steps in evaluations.items():
        for step, evaluation in steps.items():
            found = [
                run
                for record in evaluation.records
                if (run := read_run(record.kept, step, (name, record.item), record.reward))
            ]
            if found and evaluation.whole:
                held_out.setdefault(name, {})[step] = found
    if not training and not held_out:
        return None
    return WriterRecords(dict(sorted(training.items())), held_out)


def read_run(kept: Any, step: int, task: tuple[str, int], reward: Any = None) -> WriterRun | None:
    """The record in what a run kept; None where there is none that says whether it is valid."""
    raw = kept.get(KEPT) if isinstance(kept, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("valid"), bool):
        return None
    level = _whole(raw.get("level"))
    code = _text(raw.get("code"), _MOST_CODE)
    return WriterRun(
        step=step,
        task=task,
        reward=_number(reward),
        valid=raw["valid"],
        level=level if level in set(Level) else None,
        problem_type=_text(raw.get("problem_type"), _MOST_NAME),
        problem=_text(raw.get("problem"), _MOST_TEXT),
        text="" if code else _text(raw.get("text"), _MOST_PROMPT),
        prompts={
            name: _text(text, _MOST_PROMPT)
            for name, text in _entries(raw.get("prompts"))
            if isinstance(text, str)
        },
        code=code,
        refusals=_refusals(raw.get("refusals")),
        structure=_key(raw.get("structure")),
        operators={
            name: calls
            for name, sites in _entries(raw.get("operators"))
            if (calls := _whole(sites)) is not None
        },
        nodes=_whole(raw.get("nodes")),
        ending=_text(raw.get("ending"), _MOST_NAME),
        reason=_text(raw.get("reason"), _MOST_TEXT),
        answer=_text(raw.get("answer"), _MOST_TEXT),
        score=_number(raw.get("score")),
        parts={
            name: number
            for name, part in _entries(raw.get("parts"))
            if (number := _number(part)) is not None
        },
        usd=_number(raw.get("usd")),
        tokens=_whole(raw.get("tokens")),
        seconds=_number(raw.get("seconds")),
        calls=_whole(raw.get("calls")),
    )


def _refusals(value: Any) -> tuple[RefusalTold, ...]:
    found = []
    for entry in value[:_MOST_ENTRIES] if isinstance(value, list) else []:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("kind"), str):
            continue
        line, column = _whole(entry.get("line")), _whole(entry.get("column"))
        place = f"line {line}, column {column or 0}: " if line else ""
        message = _text(entry.get("message"), _MOST_TEXT)
        found.append(RefusalTold(_text(entry["kind"], _MOST_NAME), place + message))
    return tuple(found)


def _entries(value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return []
    return [(_text(str(name), _MOST_NAME), entry) for name, entry in value.items()][:_MOST_ENTRIES]


def _key(value: Any) -> str | None:
    """A structure's key; a long one is cut and told apart by a hash."""
    if not isinstance(value, str):
        return None
    if len(value) <= _MOST_KEY:
        return value
    return f"{value[:_MOST_KEY]} {hashlib.sha256(value.encode(errors='replace')).hexdigest()[:12]}"


def _text(value: Any, most: int) -> str:
    if not isinstance(value, str):
        return ""
    return value if len(value) <= most else f"{value[: most - 1]}…"


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    """A count: whole and not negative, of a size that can be shown."""
    number = _number(value)
    whole = number is not None and number == int(number) and 0 <= number < 1e15
    return int(value) if whole else None
