"""Scoring many answers at once: rows and answers in order, both rules, and the mean."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.scoring.benchmarks import Benchmark, score_both
from aflow_tune.scoring.rows import Row, read_jsonl
from aflow_tune.scoring.types import Rule, Score

CONCURRENCY = 4
"""Answers that are scored at the same time; each program is two processes."""


@dataclass(frozen=True)
class Scores:
    """The scores of a list of answers, in its order."""

    rows: tuple[dict[Rule, Score], ...]

    def values(self, rule: Rule) -> list[float | None]:
        """The values by one rule; None where unscored."""
        return [scores[rule].value for scores in self.rows]

    @property
    def mean(self) -> float | None:
        """The mean of the strict scores over the rows that have one; None where none has."""
        values = [value for value in self.values("strict") if value is not None]
        return sum(values) / len(values) if values else None

    @property
    def unscored(self) -> int:
        """How many answers the strict rule could not score."""
        return self.values("strict").count(None)

    def to_json(self) -> dict[str, Any]:
        """What `aflow-tune score --json` prints."""
        return {
            "mean": self.mean,
            "strict": self.values("strict"),
            "published": self.values("published"),
            "unscored": self.unscored,
        }


async def score_all(
    benchmark: Benchmark, rows: Sequence[Row], answers: Sequence[str], *, policy: str = "auto"
) -> Scores:
    """Score `answers`, one a row.

    Raises:
        SandboxUnavailable: the answers are code and nothing here may run it.
    """
    pairs = zip(rows, answers, strict=True)
    return await _gather([_later(score_both, benchmark, *pair, policy=policy) for pair in pairs])


async def score_gold(benchmark: Benchmark, rows: Sequence[Row], *, policy: str = "auto") -> Scores:
    """Score each row's own gold answer: all 1.0 unless the data is faulty.

    Raises:
        SandboxUnavailable: the answers are code and nothing here may run it.
    """
    return await _gather([_later(benchmark.check_gold, row, policy=policy) for row in rows])


def read_answers(path: Path, rows: int) -> list[str]:
    """The texts of a file with one `{"answer": TEXT}` a line.

    Raises:
        BadInput: a line is something else, or there are not `rows` of them.
    """
    lines = read_jsonl(path, {"answer": str})
    if len(lines) != rows:
        cure = "give one answer a row, in the order of the rows"
        fault = Fault(str(path), f"{rows} answers", f"{len(lines)} answers", cure)
        raise BadInput(f"{path} does not fit the rows", [fault])
    return [line["answer"] for line in lines]


_Job = Callable[[], Awaitable[dict[Rule, Score]]]


def _later(
    function: Callable[..., Awaitable[dict[Rule, Score]]], *args: Any, **kwargs: Any
) -> _Job:
    return lambda: function(*args, **kwargs)


async def _gather(jobs: Sequence[_Job]) -> Scores:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(job: _Job) -> dict[Rule, Score]:
        async with gate:
            return await job()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(job)) for job in jobs]
    return Scores(tuple(task.result() for task in tasks))
