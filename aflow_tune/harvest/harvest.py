"""Harvest: pairs of a problem and a graph that was run and solved it, for the warm start.

A policy that never writes a graph that runs learns nothing from rewards, so it first learns from
examples. Each problem gets candidates (`candidates.py`, and a teacher who is asked with the very
prompt of the policy); each candidate is checked, executed and scored exactly as the policy's own
graphs are; of those that solved their problem `balance.py` chooses the pairs.

Left to others: which problems there are and whether one of them is held out, the models, and
files (`running/harvesting.py`).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.harvest.balance import Solved, choose
from aflow_tune.harvest.trials import Journal, Lesson, Trial, TrialEnding, text_key
from aflow_tune.models.types import ModelClient, ModelError
from aflow_tune.sections import HarvestSection
from aflow_tune.writer.form import Unreadable, as_text, read_written
from aflow_tune.writer.types import ProblemType

SOURCES = ("templates", "teacher", "runs")
EXAMPLES = 3
"""Reasons of failed trials that are kept for the summary."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Problem:
    """One problem of the training task set."""

    key: str
    """The same whenever the row is the same."""
    text: str
    problem_type: ProblemType
    row: Mapping[str, Any]
    entry_point: str | None = None
    """The function to write, for problems of code."""


@dataclass(frozen=True)
class Candidate:
    """A graph that might solve a problem."""

    source: str
    """One of SOURCES."""
    name: str
    """Which template, teacher or run it is from."""
    text: str


class Untried(Exception):
    """A trial came to nothing for a reason that may pass: it is made again the next time."""


TryGraph = Callable[[Problem, str], Awaitable[Trial]]
"""Check, execute and score a graph on a problem. Raises Untried and BudgetReached."""


@dataclass
class Harvested:
    """The rows for supervised training, and what became of all candidates."""

    rows: list[dict[str, Any]]
    counts: dict[str, Any]


@dataclass
class _Found:
    """What is known about the candidates so far, by problem and text."""

    candidates: dict[tuple[str, str], Candidate] = field(default_factory=dict)
    trials: dict[tuple[str, str], Trial] = field(default_factory=dict)
    untried: Counter[str] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)


class Harvest:
    """One harvest.

    Args:
        problems: in the order in which their pairs are written.
        candidates: of a problem, from templates and runs.
        messages: what the policy is asked about a problem.
        try_graph: see `TryGraph`.
        teacher: who is asked for graphs too; None: nobody.
        seed: of the teacher's samples, and of the choice between equals.
        at_once: problems under way at the same time.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        candidates: Callable[[Problem], Sequence[Candidate]],
        messages: Callable[[Problem], Messages],
        try_graph: TryGraph,
        settings: HarvestSection,
        *,
        trials: Journal[Trial],
        lessons: Journal[Lesson],
        teacher: ModelClient | None = None,
        seed: int = 0,
        at_once: int = 8,
    ) -> None:
        self.problems = problems
        self.settings = settings
        self._candidates = candidates
        self._messages = messages
        self._try_graph = try_graph
        self._trials, self._lessons = trials, lessons
        self._teacher = teacher
        self._seed = seed
        self._at_once = at_once
        self._found = _Found()

    async def run(self, advance: Callable[[], None]) -> None:
        """Try every candidate on its problem; `advance` is called after each problem.

        Raises:
            BudgetReached: a limit was reached. What was tried by then is kept.
        """
        slots = asyncio.Semaphore(self._at_once)

        async def one(problem: Problem) -> None:
            async with slots:
                for candidate in self._candidates(problem):
                    await self._try(problem, candidate)
                if self._teacher is not None:
                    for number in range(self.settings.teacher_tries):
                        await self._learn(problem, number, self._teacher)
            advance()

        try:
            async with asyncio.TaskGroup() as group:
                for problem in self.problems:
                    group.create_task(one(problem))
        except* Exception as errors:
            # The first one stopped all others; a group of its own would hide its kind.
            raise errors.exceptions[0] from None

    def result(self) -> Harvested:
        """The rows of what was tried, and the counts."""
        solved = [
            Solved(trial.problem, trial.structure or "", trial.text, trial.reward or 0.0)
            for trial in self._in_order()
            if self._solves(trial)
        ]
        chosen = choose(
            solved,
            per_problem=self.settings.per_problem,
            per_structure=self.settings.per_structure,
            seed=self._seed,
        )
        problems = {problem.key: problem for problem in self.problems}
        rows = [self._row(problems[pair.problem], pair) for pair in chosen.pairs]
        counts = self._counts() | {
            "kept": len(rows),
            "kept_by_source": dict(Counter(row["source"] for row in rows)),
            "kept_by_structure": dict(Counter(row["structure"] for row in rows)),
            "dropped_for_balance": chosen.dropped,
            "share_in_force": chosen.share,
        }
        return Harvested(rows, counts)

    async def _try(self, problem: Problem, candidate: Candidate) -> None:
        text = canonical(candidate.text)
        key = problem.key, text_key(text)
        if key in self._found.candidates:
            return  # another source had the same
        self._found.candidates[key] = candidate
        trial = self._trials.entries.get(key)
        if trial is None:
            try:
                trial = await self._try_graph(problem, text)
            except Untried as error:
                self._found.untried[str(error)] += 1
                return
            if trial.ending is not TrialEnding.REFUSED:  # which costs nothing to find again
                self._trials.add(trial)
        self._found.trials[key] = trial

    async def _learn(self, problem: Problem, number: int, teacher: ModelClient) -> None:
        """Ask the teacher, unless it has answered, and try what it wrote."""
        messages = self._messages(problem)
        asked = question_key(messages)
        lesson = self._lessons.entries.get((asked, str(number)))
        if lesson is None:
            seed = int(text_key(f"{self._seed}|{asked}|{number}")[:7], 16)
            try:
                reply = await teacher.complete(messages, seed=seed)
            except ModelError as error:
                self._found.unanswered[error.failure.value] += 1
                return
            usage = reply.usage
            tokens = 0 if usage is None else usage.prompt_tokens + usage.completion_tokens
            lesson = Lesson(asked, number, reply.text, tokens, reply.cost)
            self._lessons.add(lesson)
        await self._try(problem, Candidate("teacher", teacher.model, lesson.text))

    def _in_order(self) -> list[Trial]:
        order = {problem.key: number for number, problem in enumerate(self.problems)}
        return sorted(self._found.trials.values(), key=lambda trial: order[trial.problem])

    def _row(self, problem: Problem, pair: Solved) -> dict[str, Any]:
        key = problem.key, text_key(pair.text)
        candidate = self._found.candidates[key]
        answer = {"role": "assistant", "content": pair.text}
        return {
            "messages": [*map(dict, self._messages(problem)), answer],
            "problem": problem.text,
            "problem_type": problem.problem_type,
            "source": candidate.source,
            "name": candidate.name,
            "structure": pair.structure,
            "score": self._found.trials[key].score,
            "reward": pair.reward,
        }

    def _counts(self) -> dict[str, Any]:
        found, trials = self._found, self._in_order()
        refused = [trial for trial in trials if trial.ending is TrialEnding.REFUSED]
        failed = [trial for trial in trials if trial.ending is TrialEnding.FAILED]
        scored = [trial for trial in trials if trial.ending is TrialEnding.SCORED]
        solved = [trial for trial in scored if self._solves(trial)]
        lessons = self._lessons_used()
        return {
            "problems": len(self.problems),
            "candidates": dict(Counter(item.source for item in found.candidates.values())),
            "refused": len(refused),
            "refused_by_kind": dict(Counter(kind for trial in refused for kind in trial.refusals)),
            "failed": len(failed),
            "failed_examples": list(dict.fromkeys(trial.reason for trial in failed))[:EXAMPLES],
            "unscored": sum(trial.ending is TrialEnding.UNSCORED for trial in trials),
            "wrong": len(scored) - len(solved),
            "solved": len(solved),
            "solved_problems": len({trial.problem for trial in solved}),
            "untried": sum(found.untried.values()),
            "untried_by_reason": dict(found.untried),
            "teacher_answers": len(lessons),
            "teacher_failures": dict(found.unanswered),
            "executor": _spent(trials) | {"calls": sum(trial.model_calls for trial in trials)},
            "teacher": _spent(lessons),
        }

    def _solves(self, trial: Trial) -> bool:
        score = trial.score
        return (
            trial.ending is TrialEnding.SCORED
            and score is not None
            and score >= self.settings.min_score
        )

    def _lessons_used(self) -> list[Lesson]:
        if self._teacher is None:
            return []
        asked = {question_key(self._messages(problem)) for problem in self.problems}
        return [
            lesson
            for lesson in self._lessons.entries.values()
            if lesson.question in asked and lesson.number < self.settings.teacher_tries
        ]


def question_key(messages: Messages) -> str:
    """Short name of what a teacher is asked."""
    return text_key(json.dumps([dict(message) for message in messages], sort_keys=True))


def canonical(text: str) -> str:
    """A graph in the hybrid form, as its pair will hold it; what is none stays as it is."""
    try:
        written = read_written(text)
    except Unreadable:
        return text
    return as_text(written.prompts, written.code)


def _spent(entries: Sequence[Trial] | Sequence[Lesson]) -> dict[str, Any]:
    costs = [entry.usd for entry in entries]
    known = [cost for cost in costs if cost is not None]
    return {
        "tokens": sum(entry.tokens for entry in entries),
        "usd": sum(known) if len(known) == len(costs) else None,
    }
