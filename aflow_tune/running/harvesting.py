"""A harvest from a prepared configuration to its file: `mode: harvest` and `aflow-tune harvest`.

    <folder>/
      sft.jsonl             the pairs: `messages` and where they are from; for `mode: train`, sft
      harvest.json          what became of all candidates
      trials/ID.jsonl       what was executed, for one set of settings that decide its outcome
      lessons/ID.jsonl      what one teacher answered

The first two appear whole or not at all, when the harvest is done; the others grow while it
runs, and the same command goes on from them. Problems that also stand in a held-out task set,
exactly or nearly, are dropped before anything is asked.

What is tried and what is kept is decided in `aflow_tune.writer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity.common.config import DataSelectorConfig

from aflow_tune.config.accounting import books_of
from aflow_tune.config.mixes import benchmarks_of
from aflow_tune.config.rules.harvest_rules import run_folders, templates_of
from aflow_tune.data.leaks import find_leaks
from aflow_tune.data.rows import with_source
from aflow_tune.engines.local.models import pick_device
from aflow_tune.engines.trinity.readers import read_all
from aflow_tune.errors import BudgetReached, Interrupted, RunFailed
from aflow_tune.evaluation.evaluating import LocalModels
from aflow_tune.files import as_line, write_json, write_whole
from aflow_tune.harvest.candidates import PastRun, past_candidates, template_candidates
from aflow_tune.harvest.harvest import Candidate, Harvest, Harvested, Problem
from aflow_tune.harvest.trials import Journal, Lesson, Trial
from aflow_tune.harvest.trying import Trying
from aflow_tune.models.books import client_for
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.report.html import COUNTS_FILE
from aflow_tune.report.records import read_rollouts
from aflow_tune.running.stopping import until_stopped
from aflow_tune.sandbox import use_policy
from aflow_tune.writer.templates import Template

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.writer.workflow import WriterWorkflow

PAIRS_FILE = "sft.jsonl"
AT_ONCE_ON_PROCESSOR = 16
_SLACK_SECONDS = 1.0
"""Whoever says `stop` because of `budget.wall_seconds` began to count a little earlier."""


@dataclass(frozen=True)
class HarvestSummary:
    """What a harvest left: the pairs, and the counts that `harvest.json` holds."""

    pairs: Path
    counts: Mapping[str, Any]


def run_harvest(
    config: AflowConfig,
    folder: Path,
    stop: Callable[[], bool],
    phase: Callable[[str], None],
    workflow: WriterWorkflow,
    *,
    out: Path | None = None,
) -> HarvestSummary:
    """Harvest with a prepared configuration whose task sets are laid out.

    Args:
        folder: that is held by the caller.
        stop: asked often; what was tried until it says so is kept.
        phase: told what is going on.
        out: where the pairs go; None: into the folder.

    Raises:
        BadInput: rows, templates or models cannot be used.
        Interrupted, BudgetReached: stopped; the same call goes on.
        RunFailed: no graph solved a problem, or a file cannot be written.
    """
    pairs = out or folder / PAIRS_FILE
    try:
        harvested = asyncio.run(_Harvesting(config, folder, stop, phase, workflow).run())
        write_json(folder / COUNTS_FILE, harvested.counts)
        if harvested.rows:
            write_whole(pairs, b"".join(map(as_line, harvested.rows)))
    except OSError as error:
        raise RunFailed(f"the harvest cannot be written to {folder}: {error}") from error
    if not harvested.rows:
        raise RunFailed(nothing_kept(harvested.counts))
    return HarvestSummary(pairs, harvested.counts)


def nothing_kept(counts: Mapping[str, Any]) -> str:
    """Why a harvest came to nothing, and what to do about it."""
    if not counts["problems"]:
        why = f"there is no problem left: {counts['leaks']} stand in a held-out task set too"
        return f"nothing was harvested: {why}. Give the training task set rows of its own."
    tried = {name: counts[name] for name in ("untried", "refused", "failed", "wrong", "unscored")}
    cures = {
        "untried": "is the executor running, and is its address right? See untried_by_reason",
        "refused": "allow the operators that the graphs need (writer.operators), or raise "
        "writer.max_calls",
        "failed": "see failed_examples",
        "wrong": "take an executor that can solve these problems, ask a teacher for other graphs, "
        "or lower harvest.min_score",
        "unscored": "see that rows and scorer fit each other",
    }
    most = max(tried, key=lambda name: tried[name])
    if not tried[most]:
        return "nothing was harvested: there was no graph to try. Add a source to harvest.sources."
    shown = ", ".join(f"{count} {name}" for name, count in tried.items() if count)
    examples = [*counts["untried_by_reason"], *counts["failed_examples"]][:1]
    lines = [f"nothing was harvested: no graph solved a problem ({shown})", *examples]
    return "\n".join([*lines, f"do: {cures[most]}"])


class _Harvesting:
    """One harvest: problems, candidates, models, and the journals."""

    def __init__(
        self,
        config: AflowConfig,
        folder: Path,
        stop: Callable[[], bool],
        phase: Callable[[str], None],
        workflow: WriterWorkflow,
    ) -> None:
        self.config = config
        self.section = config.harvest
        self.folder = folder
        self.workflow = workflow
        self._stop, self._phase = stop, phase
        self._books = books_of(config)

    async def run(self) -> Harvested:
        """Raises as `run_harvest`, but for an empty result."""
        limit = self.config.budget.wall_seconds
        deadline = None if limit is None else time.monotonic() + limit

        def late(slack: float = 0.0) -> bool:
            return deadline is not None and time.monotonic() > deadline - slack

        kept = f"What was tried is kept in {self.folder}. The same command goes on from there."
        try:
            return await until_stopped(
                self._all(),
                lambda: self._stop() or late(),
                lambda: self._phase("stopping: what was tried is kept"),
            )
        except BudgetReached as error:
            raise BudgetReached(f"{error} {kept}") from None
        except asyncio.CancelledError:
            reason = self._books.reached()
            if reason is None and late(_SLACK_SECONDS):
                reason = f"budget.wall_seconds ({limit:g}) reached"
            kind: type[Exception] = Interrupted if reason is None else BudgetReached
            raise kind(f"{reason or 'stopped'}. {kept}") from None

    async def _all(self) -> Harvested:
        self._phase("reading the problems")
        problems, leaks = await self._problems()
        candidates, strangers = self._candidates(problems)
        self._books.start()
        async with LocalModels() as local, contextlib.AsyncExitStack() as stack:
            with (
                use_policy(self.config.sandbox),
                use_prompts(self.config.prompts),
                self._books.open(),
            ):
                trials, lessons = self._journals()
                auxiliary = await self._auxiliary(local, stack) if problems else {}
                harvest = Harvest(
                    problems,
                    candidates,
                    self._messages,
                    Trying(
                        self.workflow,
                        auxiliary,
                        self.config.rewards,
                        self.config.rollout.run_timeout,
                    ),
                    self.section,
                    trials=trials,
                    lessons=lessons,
                    teacher=client_for(str(self.section.teacher)) if self._asks else None,
                    seed=self.config.seed,
                    at_once=self._at_once(computed_here=bool(auxiliary)),
                )
                await harvest.run(self._progress(len(problems)))
                harvested = harvest.result()
        harvested.counts.update(leaks=leaks, rollouts_of_other_problems=strangers)
        return harvested

    @property
    def _asks(self) -> bool:
        return "teacher" in self.section.sources

    def _at_once(self, *, computed_here: bool) -> int:
        """Problems under way together. Where the executor computes on this processor, many graphs
        that wait for each other would only run out of time."""
        most = self.config.local.max_batch
        on_processor = computed_here and pick_device(self.config.local.device).type != "cuda"
        return min(most, AT_ONCE_ON_PROCESSOR) if on_processor else most

    async def _problems(self) -> tuple[list[Problem], int]:
        """The problems to harvest on, and how many were dropped because they are held out."""
        rows = [row async for row in self._rows()]
        held_out = [
            dict(task.raw_task or {})
            for taskset in self.config.buffer.explorer_input.eval_tasksets
            for task in await read_all(replace(taskset, data_selector=DataSelectorConfig()))
        ]
        # Asked the other way round: every training row that stands among the held-out ones.
        leaking = {leak.held_out for leak in await asyncio.to_thread(find_leaks, held_out, rows)}
        found = {
            problem.key: problem
            for number, row in enumerate(rows)
            if number not in leaking
            for problem in [self._problem(row)]
        }
        problems = list(found.values())
        if self.section.limit is not None and self.section.limit < len(problems):
            drawn = random.Random(self.config.seed).sample(range(len(problems)), self.section.limit)
            problems = [problems[number] for number in sorted(drawn)]
        if leaking:
            self._phase(f"{len(leaking)} problems are held out too, exactly or nearly: dropped")
        return problems, len(leaking)

    async def _rows(self) -> Any:
        """The rows of the training task sets, once each, with what a mix adds to them."""
        config, benchmarks = self.config, benchmarks_of(self.config)
        inputs = config.buffer.explorer_input
        for taskset in [*([inputs.taskset] if inputs.taskset else []), *inputs.tasksets]:
            whole = replace(
                taskset,
                is_eval=True,
                index=0,
                total_epochs=1,
                total_steps=None,
                data_selector=DataSelectorConfig(),
                task_selector=DataSelectorConfig(),
            )
            for task in await read_all(whole):
                row = dict(task.raw_task or {})
                if config.mix:
                    named = taskset.name in config.mix
                    source = taskset.name if named else str(row.get("source"))
                    row = with_source(row, source, benchmarks.get(source))
                yield row

    def _problem(self, row: Mapping[str, Any]) -> Problem:
        workflow = self.workflow
        entry_point = row.get(workflow.entry_point)
        return Problem(
            key=_digest(row),
            text=workflow.problem_of(row),
            problem_type=workflow.type_of(row),
            row=row,
            entry_point=entry_point if isinstance(entry_point, str) else None,
        )

    def _messages(self, problem: Problem) -> list[dict[str, str]]:
        return self.workflow.messages(
            problem.text,
            problem.problem_type,
            problem.entry_point,
            answer_form=self.workflow.answer_form_of(problem.row),
        )

    def _candidates(
        self, problems: Sequence[Problem]
    ) -> tuple[Callable[[Problem], list[Candidate]], int]:
        """Candidates of a problem from templates and runs; rollouts that fit no problem."""
        templates: Sequence[Template] = ()
        if "templates" in self.section.sources:
            templates = templates_of(self.config)
        past: dict[str, list[Candidate]] = {}
        strangers = 0
        if "runs" in self.section.sources:
            rollouts = _past_runs(run_folders(self.config))
            past, strangers = past_candidates(rollouts, problems, self.section.min_score)

        def of(problem: Problem) -> list[Candidate]:
            own = template_candidates(problem, templates, self.workflow.operators)
            return [*own, *past.get(problem.key, [])]

        return of, strangers

    async def _auxiliary(
        self, local: LocalModels, stack: contextlib.AsyncExitStack
    ) -> dict[str, Any]:
        """The auxiliary models that graphs may call, by name; loaded only if one is named."""
        names = {self.workflow.executor, *self.workflow.models.values()}
        if not names & {model.name for model in self.config.explorer.auxiliary_models}:
            return {}
        self._phase("loading the executor")
        return await stack.enter_async_context(local.auxiliary_chat_models(self.config))

    def _journals(self) -> tuple[Journal[Trial], Journal[Lesson]]:
        """What was tried with the very same settings, and what the same teacher answered."""
        config, workflow = self.config, self.workflow
        roles = sorted({workflow.executor, *workflow.models.values()} & set(config.models))
        decides = {
            "writer": asdict(config.writer),
            "models": {role: asdict(config.models[role]) for role in roles},
            "auxiliary": {
                str(model.name): [model.model_path, model.temperature, model.top_p, model.top_k]
                for model in config.explorer.auxiliary_models
            },
            "rewards": asdict(config.rewards),
            "prompts": config.prompts,
            "code": [_source_of(item) for item in workflow.carries],
            "sandbox": config.sandbox,
        }
        teacher = asdict(config.models[str(self.section.teacher)]) if self._asks else None
        trials = Journal(self.folder / "trials" / f"{_digest(decides)}.jsonl", Trial)
        lessons = Journal(self.folder / "lessons" / f"{_digest(teacher)}.jsonl", Lesson)
        if trials.entries or lessons.entries:
            count = len(trials.entries)
            self._phase(f"going on: {count} graphs were tried by an earlier command")
        return trials, lessons

    def _progress(self, total: int) -> Callable[[], None]:
        done = 0

        def advance() -> None:
            nonlocal done
            done += 1
            self._phase(f"harvesting: {done} of {total} problems")

        return advance


def _past_runs(folders: Iterable[Path]) -> Iterator[PastRun]:
    """What the writer kept in these runs; other workflows' rollouts are passed over."""
    for folder in folders:
        for rollout in read_rollouts(folder):
            kept = rollout.kept.get("writer")
            if isinstance(kept, Mapping) and rollout.reward is not None:
                yield PastRun(folder.name, rollout.reward, kept)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source_of(item: Callable[..., Any]) -> str:
    """The text of the file that a function or class of the user's stands in; its name if none."""
    name = f"{getattr(item, '__module__', '')}.{getattr(item, '__qualname__', item)}"
    module = sys.modules.get(getattr(item, "__module__", "") or "")
    try:
        return name + inspect.getsource(module or item)
    except (OSError, TypeError):
        return name
