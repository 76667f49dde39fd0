"""Harvest: pairs of a problem and a graph that solved it when executed, for the warm start.

Each problem gets candidates (from `candidates.py`, and from a teacher model with the policy's
prompt); each is checked, executed and scored by the workflow that training uses. `choose` picks the
pairs from those that solved their problem. Teacher replies and executions are kept in journals on
disk and not repeated, except those that failed for a transient reason, such as a silent server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from aflow_tune.context import RolloutContext
from aflow_tune.errors import AflowTuneError
from aflow_tune.files import append_line, as_line, drop_torn_line
from aflow_tune.graph.run import GraphEnding
from aflow_tune.harvest.candidates import Candidate, Problem
from aflow_tune.models.types import Message, ModelClient, ModelError, Reply
from aflow_tune.scoring.rewards import Unscored
from aflow_tune.sections import HarvestSection, RewardsSection
from aflow_tune.trace import POLICY, Trace
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import Unreadable, as_text, read_written
from aflow_tune.writer.results import ExecutorFailed
from aflow_tune.writer.types import Level
from aflow_tune.writer.workflow import CALLER, WriterWorkflow

MAX_REASON = 300
"""Most characters of a reason in a journal."""


class TrialEnding(StrEnum):
    """How the trial of a graph on one problem ended. The values appear in files."""

    REFUSED = "refused"  # by the check; it was not run
    FAILED = "failed"  # as written, it did not give an answer
    UNSCORED = "unscored"  # its answer could not be scored: right or wrong is unknown
    SCORED = "scored"


@dataclass(frozen=True)
class Trial:
    """One graph on one problem. `problem` is the problem's key.

    `text`: the graph in canonical form, or as it came if unreadable; `refusals`: distinct kinds;
    `score` (0 to 1) and `reward`: only for SCORED; `usd`: None if a price is unknown."""

    problem: str
    text: str
    ending: TrialEnding
    reason: str = ""
    refusals: tuple[str, ...] = ()
    structure: str | None = None
    score: float | None = None
    reward: float | None = None
    model_calls: int = 0
    tokens: int = 0
    usd: float | None = 0.0

    def __post_init__(self) -> None:  # from plain JSON values
        object.__setattr__(self, "ending", TrialEnding(self.ending))
        object.__setattr__(self, "refusals", tuple(self.refusals))

    @property
    def key(self) -> tuple[str, str]:
        return self.problem, text_key(self.text)


@dataclass(frozen=True)
class Lesson:
    """One reply of the teacher to the prompt with this `question_key`; `number`: of the try."""

    question: str
    number: int
    text: str
    tokens: int = 0
    usd: float | None = 0.0

    @property
    def key(self) -> tuple[str, str]:
        return self.question, str(self.number)


class Journal:
    """Trials or lessons by key, in an append-only JSONL file. One process at a time."""

    def __init__(self, path: Path, kind: type[Trial] | type[Lesson]) -> None:
        self.path = path
        self.entries: dict[tuple[str, str], Any] = {}
        drop_torn_line(path)
        known = {item.name for item in fields(kind)}
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                held = json.loads(line)
                entry = kind(**{name: value for name, value in held.items() if name in known})
                self.entries[entry.key] = entry
            except (ValueError, TypeError, AttributeError):
                continue  # damaged, or from another version: it is made again

    def add(self, entry: Trial | Lesson) -> None:
        """Add an entry, on disk first. Raises `OSError` if it cannot be written."""
        append_line(self.path, as_line(asdict(entry)))
        self.entries[entry.key] = entry


class Untried(Exception):
    """A trial failed for a transient reason: the next harvest makes it again."""


@dataclass
class _Recited:
    """A policy that replies with a given text, at no cost and outside any budget."""

    text: str
    role: str = POLICY
    model: str = "harvest"

    async def complete(self, messages: Sequence[Message], **_: Any) -> Reply:
        return Reply(self.text, self.model, cost=0.0)


@dataclass
class Harvest:
    """One harvest with the prompt, operators, limits, executor and scoring of `workflow`. `trials`
    and `lessons`: journals of the same settings and teacher; `seconds`: limit of one trial,
    including scoring; `at_once`: problems in progress at the same time."""

    workflow: WriterWorkflow
    problems: Sequence[Problem]
    candidates: Callable[[Problem], Sequence[Candidate]]
    settings: HarvestSection
    trials: Journal
    lessons: Journal
    auxiliary: dict[str, Any]
    rewards: RewardsSection
    teacher: ModelClient | None
    seconds: float
    seed: int
    at_once: int

    def __post_init__(self) -> None:
        self._tried: dict[tuple[str, str], Candidate] = {}
        self._found: dict[tuple[str, str], Trial] = {}
        self._untried: Counter[str] = Counter()
        self._unanswered: Counter[str] = Counter()

    async def run(self, advance: Callable[[], None]) -> None:
        """Try every candidate on its problem, and call `advance` after each problem. Raises
        `BudgetReached` if a limit is reached; the journals keep what was tried by then."""
        slots = asyncio.Semaphore(self.at_once)

        async def one(problem: Problem) -> None:
            async with slots:
                for candidate in self.candidates(problem):
                    await self._try(problem, candidate)
                for number in range(self.settings.teacher_tries if self.teacher else 0):
                    await self._learn(problem, number)
            advance()

        try:
            async with asyncio.TaskGroup() as group:
                for problem in self.problems:
                    group.create_task(one(problem))
        except ExceptionGroup as errors:
            # The first error cancelled all others; an exception group would hide its type.
            raise errors.exceptions[0] from None

    def result(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The rows for supervised training, and counts over all candidates."""
        problems = {problem.key: problem for problem in self.problems}
        order = {key: number for number, key in enumerate(problems)}
        trials = sorted(self._found.values(), key=lambda trial: order[trial.problem])
        least = self.settings.min_score
        solved = [trial for trial in trials if trial.score is not None and trial.score >= least]
        pairs, dropped, share = choose(
            solved,
            per_problem=self.settings.per_problem,
            per_structure=self.settings.per_structure,
            seed=self.seed,
        )
        rows = []
        for pair in pairs:
            problem, candidate = problems[pair.problem], self._tried[pair.key]
            answer = {"role": "assistant", "content": pair.text}
            row = {
                "messages": [*self._messages(problem), answer],
                "problem": problem.text,
                "problem_type": problem.problem_type,
                "source": candidate.source,
                "name": candidate.name,
                "structure": pair.structure or "",
                "score": pair.score,
                "reward": pair.reward or 0.0,
            }
            rows.append(row)
        counts = self._counts(trials, solved) | {
            "kept": len(rows),
            "kept_by_source": dict(Counter(row["source"] for row in rows)),
            "kept_by_structure": dict(Counter(row["structure"] for row in rows)),
            "dropped_for_balance": dropped,
            "share_in_force": share,
        }
        return rows, counts

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        asked = problem.text, problem.problem_type, problem.entry_point
        form = self.workflow.answer_form_of(problem.row)
        return self.workflow.messages(*asked, answer_form=form)

    async def _try(self, problem: Problem, candidate: Candidate) -> None:
        text = candidate.text
        with contextlib.suppress(Unreadable):  # the canonical form, as in training pairs
            written = read_written(text)
            text = as_text(written.prompts, written.code)
        key = problem.key, text_key(text)
        if key in self._tried:
            return  # another source had the same graph
        self._tried[key] = candidate
        trial = self.trials.entries.get(key)
        if trial is None:
            try:
                trial = await self.try_graph(problem, text)
            except Untried as error:
                self._untried[str(error)] += 1
                return
            if trial.ending is not TrialEnding.REFUSED:  # the check is free to repeat
                self.trials.add(trial)
        self._found[key] = trial

    async def _learn(self, problem: Problem, number: int) -> None:
        assert self.teacher is not None
        messages = self._messages(problem)
        asked = question_key(messages)
        lesson = self.lessons.entries.get((asked, str(number)))
        if lesson is None:
            seed = int(text_key(f"{self.seed}|{asked}|{number}")[:7], 16)
            try:
                reply = await self.teacher.complete(messages, seed=seed)
            except ModelError as error:
                self._unanswered[error.failure.value] += 1
                return
            usage = reply.usage
            tokens = 0 if usage is None else usage.prompt_tokens + usage.completion_tokens
            lesson = Lesson(asked, number, reply.text, tokens, reply.cost)
            self.lessons.add(lesson)
        await self._try(problem, Candidate("teacher", self.teacher.model, lesson.text))

    async def try_graph(self, problem: Problem, text: str) -> Trial:
        """Check, execute and score a graph on a problem. A refused graph is not executed: its
        fallback would cost model calls and cannot become a pair.

        Raises:
            Untried: the frozen models did not answer, or not in time.
            BudgetReached, SandboxUnavailable, BadInput: as the workflow.
        """
        workflow = dataclasses.replace(self.workflow, turns=1, fallbacks=False)
        kind, limits = problem.problem_type, workflow.check
        verdict = check_written(
            text, operators=workflow.operators, problem_type=kind, limits=limits
        )
        if not verdict.ok:
            kinds = tuple(dict.fromkeys(refusal.kind.value for refusal in verdict.refusals))
            reason = str(verdict.refusals[0])[:MAX_REASON]
            return Trial(problem.key, text, TrialEnding.REFUSED, reason, kinds)
        context = RolloutContext(rewards=self.rewards)
        reward, unscored = None, ""
        try:
            async with asyncio.timeout(self.seconds):
                with context.activate(), Trace().activate():
                    reward = await workflow(dict(problem.row), _Recited(text), self.auxiliary)
        except ExecutorFailed as error:
            raise Untried(str(error).partition(";")[0][:MAX_REASON]) from None
        except Unscored as error:
            unscored = str(error)
        except TimeoutError:
            unscored = f"no result in {self.seconds:g} s"
        except AflowTuneError:
            raise
        except Exception as error:  # from the user's scorer
            unscored = f"{type(error).__name__}: {error}"
        kept = context.kept.get(CALLER, {})
        if kept.get("outcome") == GraphEnding.TIMED_OUT:
            raise Untried(
                f"the graph had no answer in time (writer.timeout: {workflow.seconds:g} s): a "
                "slow executor, or too much at once (local.max_batch)"
            )
        clean = kept.get("level") == Level.CLEAN and kept.get("ending") == GraphEnding.ANSWERED
        scored = reward is not None and not unscored and (clean or not kept)
        ending, reason = (TrialEnding.SCORED, "") if scored else (TrialEnding.UNSCORED, unscored)
        if kept and not clean:
            ending, reason = TrialEnding.FAILED, str(kept["reason"])
        return Trial(
            problem.key,
            text,
            ending,
            reason=reason[:MAX_REASON],
            structure=kept.get("structure"),
            score=float(kept["score"]) if scored else None,
            reward=reward if scored else None,
            model_calls=int(kept.get("calls") or 0),
            tokens=int(kept.get("tokens") or 0),
            usd=kept.get("usd", 0.0),
        )

    def _counts(self, trials: Sequence[Trial], solved: Sequence[Trial]) -> dict[str, Any]:
        endings = Counter(trial.ending for trial in trials)
        failed = [trial.reason for trial in trials if trial.ending is TrialEnding.FAILED]
        asked = {question_key(self._messages(one)) for one in self.problems if self.teacher}
        tries, every = self.settings.teacher_tries, self.lessons.entries.values()
        lessons = [item for item in every if item.question in asked and item.number < tries]
        return {
            "problems": len(self.problems),
            "candidates": dict(Counter(item.source for item in self._tried.values())),
            "refused": endings[TrialEnding.REFUSED],
            "refused_by_kind": dict(Counter(kind for trial in trials for kind in trial.refusals)),
            "failed": len(failed),
            "failed_examples": list(dict.fromkeys(failed))[:3],
            "unscored": endings[TrialEnding.UNSCORED],
            "wrong": endings[TrialEnding.SCORED] - len(solved),
            "solved": len(solved),
            "solved_problems": len({trial.problem for trial in solved}),
            "untried": self._untried.total(),
            "untried_by_reason": dict(self._untried),
            "teacher_answers": len(lessons),
            "teacher_failures": dict(self._unanswered),
            "executor": _spent(trials) | {"calls": sum(trial.model_calls for trial in trials)},
            "teacher": _spent(lessons),
        }


def choose(
    solved: Sequence[Trial], *, per_problem: int = 1, per_structure: float | None = None, seed: int
) -> tuple[list[Trial], int, float | None]:
    """Choose the training pairs: returns them in problem order, how many the cap dropped, and the
    share in force (None without `per_structure`).

    Of each problem, the `per_problem` structures with the highest rewards are taken. So that the
    policy does not collapse onto one graph, a structure gets at most the share max(per_structure,
    1 / structures) of all pairs, but at least one: problems move to another graph that solved them,
    at the least loss of reward; any excess is dropped, lowest rewards first."""
    order = {problem: at for at, problem in enumerate(dict.fromkeys(s.problem for s in solved))}
    # By problem, the best graph of each structure, best first.
    best: dict[str, dict[str, Trial]] = defaultdict(dict)
    for item in sorted(solved, key=lambda item: _rank(item, seed)):
        best[item.problem].setdefault(item.structure or "", item)
    kept = {problem: list(of.values())[:per_problem] for problem, of in best.items()}
    share = None
    dropped = 0
    if per_structure is not None and solved:
        share = max(per_structure, 1 / len({item.structure for item in solved}))
        _move(kept, best, share)
        dropped = _trim(kept, share, seed)
    pairs = [item for problem in sorted(kept, key=order.__getitem__) for item in kept[problem]]
    return pairs, dropped, share


def _move(kept: dict[str, list[Trial]], best: dict[str, dict[str, Trial]], share: float) -> None:
    """Move problems from structures above the cap to others, at the least loss of reward."""
    most = math.floor(share * sum(map(len, kept.values())) + 1e-9)
    counts = Counter(item.structure or "" for items in kept.values() for item in items)
    for crowded in [name for name, count in counts.most_common() if count > most]:
        moves = sorted(
            ((item.reward or 0.0) - (other.reward or 0.0), problem, target)
            for problem, items in kept.items()
            for item in items
            if item.structure == crowded
            for target, other in best[problem].items()
            if target not in {held.structure for held in items}
        )
        for _, problem, target in moves:
            held = [item.structure for item in kept[problem]]
            free = counts[target] < most < counts[crowded]
            if free and crowded in held and target not in held:
                kept[problem][held.index(crowded)] = best[problem][target]
                counts[crowded] -= 1
                counts[target] += 1


def _trim(kept: dict[str, list[Trial]], share: float, seed: int) -> int:
    """Drop pairs until no structure exceeds the share of those that remain; returns how many."""
    by_structure: dict[str | None, list[Trial]] = defaultdict(list)
    for item in [item for items in kept.values() for item in items]:
        by_structure[item.structure].append(item)
    counts = [len(items) for items in by_structure.values()]
    # The largest cap whose share of what then remains is allowed; the share grows with the cap.
    most = 1
    for wider in range(2, max(counts) + 1):
        if wider <= share * sum(min(count, wider) for count in counts) + 1e-9:
            most = wider
    dropped = 0
    for items in by_structure.values():
        for item in sorted(items, key=lambda item: _rank(item, seed))[most:]:
            kept[item.problem].remove(item)
            dropped += 1
    return dropped


def _rank(item: Trial, seed: int) -> tuple[float, bytes]:
    """Sort key: highest reward first; ties in a random but reproducible order."""
    text = f"{seed}|{item.problem}|{item.text}"
    return -(item.reward or 0.0), hashlib.sha256(text.encode(errors="replace")).digest()


def text_key(text: str) -> str:
    """A short hash of a graph's text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def question_key(messages: Sequence[Mapping[str, Any]]) -> str:
    """A short hash of a teacher's prompt."""
    return text_key(json.dumps([dict(message) for message in messages], sort_keys=True))


def _spent(entries: Sequence[Trial] | Sequence[Lesson]) -> dict[str, Any]:
    costs = [entry.usd for entry in entries]
    known = [cost for cost in costs if cost is not None]
    return {
        "tokens": sum(entry.tokens for entry in entries),
        "usd": sum(known) if len(known) == len(costs) else None,
    }
