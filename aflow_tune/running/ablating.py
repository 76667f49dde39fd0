"""Runs `aflow-tune graph ablate`: a graph, and the same without each of its parts, on the same
held-out problems with the same random numbers.

    <run folder>/ablation/
      pool.sqlite      every trial, by all that decides it: the same command goes on from there
      ablation.json    what was found

What is taken out and how it is judged is decided in `aflow_tune.search.ablation`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.config.accounting import spend_of
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.validate import check_run_prompts, resolve_functions
from aflow_tune.errors import BadInput, Fault, RunFailed
from aflow_tune.evaluation.evaluating import LocalModels
from aflow_tune.files import write_json
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.workflow import GraphWorkflow
from aflow_tune.report.statistics import mean, share_or_mean_interval
from aflow_tune.running.harvesting import digest, read_rows
from aflow_tune.running.stopping import run_within_limits
from aflow_tune.running.trialling import KEPT, Trials, asks_policy
from aflow_tune.search.ablation import (
    Effect,
    Measured,
    Part,
    effect_of,
    operator_parts,
    prompt_parts,
)
from aflow_tune.search.pool import SharedExperiencePool, Trial
from aflow_tune.search.state import WorkflowState
from aflow_tune.writer.check import check_loaded
from aflow_tune.writer.types import CheckLimits
from aflow_tune.writer.workflow import TYPE_OF_BENCHMARK

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

FOLDER, RECORD_FILE, POOL_FILE = "ablation", "ablation.json", "pool.sqlite"
_TASKSET = "held_out"

Ask = Callable[[str], Any]


@dataclass(frozen=True)
class Ablation:
    """A graph that is ready to be measured without each of its parts.

    `executor`: the auxiliary model or the role of `models` that answers as the graph's model; None:
    the model under `model`. `local`: whether a model of this machine answers."""

    config: AflowConfig
    workflow: GraphWorkflow
    parts: list[Part]
    folder: Path
    executor: str | None
    local: bool


@dataclass(frozen=True)
class AblationSummary:
    """The trials of the whole graph, and the effect of each part."""

    whole: Measured
    effects: list[Effect]
    folder: Path
    facts: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The content of `ablation.json`."""
        trials = [*self.whole.trials.values()]
        interval = share_or_mean_interval([*self.whole.scores().values()], shares=True)
        costs = [trial.usd for trial in trials if trial.usd is not None]
        failed = self.whole.failed({*self.whole.trials})
        return {
            **self.facts,
            "problems": len(trials),
            "failed": len(failed),
            "first_failure": failed[0].reason if failed else None,
            "unscored": len(trials) - len(self.whole.scores()),
            "score": None if interval is None else asdict(interval),
            "calls": mean([trial.calls for trial in trials]),
            "tokens": mean([trial.tokens for trial in trials]),
            "usd": mean(costs) if len(costs) == len(trials) else None,
            "parts": [effect.to_json() for effect in self.effects],
        }


def prepare_ablation(
    config: AflowConfig, path: Path, *, prompts: bool = False, executor: str | None = None
) -> Ablation:
    """Prepare a configuration, in place, for the graph at `path`; nothing is run.

    Raises BadInput: the settings, the graph, the data or the executor cannot be used, or nothing
    can be taken out of the graph."""
    config.graph.path = str(path.resolve())
    config.workflow, config.writer.executor = None, None
    auxiliary = [str(model.name) for model in config.explorer.auxiliary_models]
    faults = []
    if config.judge:
        fix = "graph: {benchmark: NAME} or graph: {score: path/file.py:function}"
        faults.append(config.fault("judge", "a benchmark or a score function", config.judge, fix))
    if executor is not None and executor not in (*config.models, *auxiliary):
        known = ", ".join([*config.models, *auxiliary]) or "there is none"
        expected = f"a role of `models` or an auxiliary model ({known})"
        faults.append(Fault("--executor", expected, executor, "name one of them, or leave it out"))
    if faults:
        raise BadInput("The graph cannot be measured.", faults)
    check_run_prompts(config)
    workflow = resolve_functions(config)[0]
    assert isinstance(workflow, GraphWorkflow)  # without a judge
    local = executor is None and asks_policy(workflow)
    prepare(config, Purpose.EVALUATE, workflow=workflow, local_model=local)
    parts = _parts(workflow, prompts)
    if not any(part.graph for part in parts):
        raise _nothing_to_take_out(workflow.graph, parts, prompts)
    folder = Path(config.get_checkpoint_job_dir()) / FOLDER
    return Ablation(config, workflow, parts, folder, executor, local or executor in auxiliary)


def _parts(workflow: GraphWorkflow, prompts: bool) -> list[Part]:
    if prompts:
        return prompt_parts(workflow.graph)
    kind = TYPE_OF_BENCHMARK.get(workflow.benchmark or "")
    limits = CheckLimits(model_calls=workflow.limits.calls)

    def refusals(graph: Graph) -> set[str]:
        verdict = check_loaded(graph, operators=graph.known, problem_type=kind, limits=limits)
        found = {refusal.message for refusal in verdict.refusals}
        return found | {fault.found for fault in graph.shape.faults}

    return operator_parts(workflow.graph, refusals)


def _nothing_to_take_out(graph: Graph, parts: list[Part], prompts: bool) -> BadInput:
    fix = "measure one with more parts" if prompts else "--prompts takes out texts instead"
    faults = [
        Fault(f"{graph.label}: {part.name}", "an operator to do without", part.why, fix)
        for part in parts
    ]
    if not faults:
        kind = "no instruction or prompt" if prompts else "no operator"
        faults = [Fault(graph.label, "a graph with parts", kind, fix)]
    return BadInput("Nothing can be taken out of this graph.", faults)


def run_ablation(
    ablation: Ablation,
    stop: Callable[[], bool],
    phase: Callable[[str], None],
    *,
    limit: int | None = None,
) -> AblationSummary:
    """Measure the graph and each variant, on the first `limit` problems of every held-out task set,
    in a folder that the caller has locked.

    Raises:
        BadInput: rows or models cannot be used.
        Interrupted, BudgetReached: stopped; the same call goes on.
        RunFailed: the whole graph was scored on no problem, or a file cannot be written.
    """
    config, folder = ablation.config, ablation.folder
    work = _Measuring(ablation, phase, limit).run()
    summary = run_within_limits(config, work, stop, phase, KEPT, folder)
    try:
        write_json(folder / RECORD_FILE, summary.to_json())
    except OSError as error:
        raise RunFailed(f"the results cannot be written to {folder}: {error}") from error
    if not summary.whole.scores():
        why = next((trial.reason for trial in summary.whole.trials.values()), "no held-out problem")
        raise RunFailed(f"the whole graph was not scored on any problem: {why}")
    return summary


class _Measuring:
    """One measurement, from its problems to the effects."""

    def __init__(self, ablation: Ablation, phase: Callable[[str], None], limit: int | None) -> None:
        self.ablation, self.phase, self.limit = ablation, phase, limit
        self.config, self.workflow = ablation.config, ablation.workflow
        self.pool = SharedExperiencePool(ablation.folder / POOL_FILE)
        self.trials = Trials(self.config, {_TASKSET: self.workflow}, ablation.executor)
        self.fingerprint = self.trials.fingerprint(_TASKSET)

    async def run(self) -> AblationSummary:
        self.phase("reading the problems")
        problems: dict[str, Mapping[str, Any]] = {}
        for taskset in self.config.buffer.explorer_input.eval_tasksets:
            rows = (await read_rows(taskset))[: self.limit]
            problems |= {digest(row): row for row in rows}
        without = [part.graph for part in self.ablation.parts if part.graph is not None]
        graphs = [self.workflow.graph, *without]
        known = self.pool.trials(_TASKSET, self.fingerprint)
        states = [WorkflowState.of(_TASKSET, graph) for graph in graphs]
        found: list[dict[str, Trial]] = [{} for _ in graphs]
        left = []
        for problem in problems:  # one after the other, so that an early stop leaves whole pairs
            for number, state in enumerate(states):
                _, trial = known.get((state.key, problem), ("", None))
                if trial is not None and trial.score is not None:
                    found[number][problem] = trial
                else:
                    left.append((number, problem))
        total = len(graphs) * len(problems)
        self.phase(
            f"{len(graphs)} graphs on {len(problems)} problems: {total} rollouts"
            + (f", {total - len(left)} are there from an earlier command" * (len(left) < total))
        )
        done = 0

        async def one(number: int, problem: str) -> None:
            nonlocal done
            trial = await self.trials.run(_TASKSET, states[number], problem, problems[problem])
            found[number][problem] = trial
            self.pool.add_trial(_TASKSET, self.fingerprint, states[number].key, problem, trial)
            done += 1
            self.phase(f"ablating: {done} of {len(left)} rollouts")

        for state in states:
            self.pool.add_workflow(state)
        spend_of(self.config).start()
        async with LocalModels() as models, contextlib.AsyncExitStack() as stack:
            if left:
                await stack.enter_async_context(self.trials.started(models, self.phase))
            try:
                async with asyncio.TaskGroup() as group:
                    for job in left:
                        group.create_task(one(*job))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        whole, measured = Measured(found[0]), map(Measured, found[1:])
        effects = [
            effect_of(part, whole, next(measured) if part.graph is not None else None)
            for part in self.ablation.parts
        ]
        return AblationSummary(whole, effects, self.ablation.folder, self._facts())

    def _facts(self) -> dict[str, Any]:
        executor = self.ablation.executor
        roles = sorted({*self.workflow.models.values()})
        answers = executor or (self.config.model.model_path if self.ablation.local else None)
        return {
            "graph": self.config.graph.path,
            "model": answers or ", ".join(roles),
            "seed": self.config.seed,
        }
