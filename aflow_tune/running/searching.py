"""Runs a search over workflows (`aflow-tune search`) and writes what comes of it.

    <run folder>/search/
      pool.sqlite           every workflow, edit and trial: the same command resumes from it
      best/TASKSET/         the winner as a graph, for `graph: {path: ...}` of a run
      workspace/            every workflow that was raced, in AFlow's own layout
      search.json           the tree, the spend, the comparison on held-out problems
      report.html           the page about it

What is tried and kept is decided in `aflow_tune.search`; this module gives it problems, models and
limits, and compares the winner with the seed workflow and a single call at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.config.accounting import spend_of
from aflow_tune.errors import BudgetReached, Interrupted, RunFailed
from aflow_tune.evaluation.evaluating import LocalModels
from aflow_tune.files import write_json
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.workflow import GraphWorkflow, problem_of
from aflow_tune.models.clients import client_for
from aflow_tune.models.types import Usage
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.report.search import write_search_report
from aflow_tune.running.harvesting import digest, read_rows
from aflow_tune.running.learning import Answer, Learner, Recorded, Row
from aflow_tune.running.stopping import run_within_limits
from aflow_tune.running.trialling import KEPT, Trials
from aflow_tune.scoring import find
from aflow_tune.scoring.types import CannotScore
from aflow_tune.search.ablation import operator_parts
from aflow_tune.search.layout import write_graph, write_layout
from aflow_tune.search.optimizer import (
    Node,
    Proposer,
    RLEnhancedOptimizer,
    SearchSettings,
    TaskSet,
    Tree,
)
from aflow_tune.search.pool import SearchEdge, SharedExperiencePool, Trial
from aflow_tune.search.problems import examples, joints, telling_words, varied
from aflow_tune.search.proposers import Ask, Edits, Messages, Written
from aflow_tune.search.state import WorkflowState
from aflow_tune.writer.check import check_loaded
from aflow_tune.writer.templates import TEMPLATES
from aflow_tune.writer.types import CheckLimits
from aflow_tune.writer.workflow import TYPE_OF_BENCHMARK

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

RECORD_FILE = "search.json"
POOL_FILE = "pool.sqlite"
MOST_ROWS = 600
"""Training problems that a search looks at, drawn by `seed` where there are more."""
INSTRUCTIONS = {
    "answer only": "Give only the final answer, nothing else.",
    "step by step": "Think step by step, then give the final answer.",
}
"""Instructions that any operator may be given, beside examples of solved problems."""
WINNER, SEED, SINGLE = "winner", "seed", "single call"
WHOLE = "whole"
"""The winner with every operator, in its ablation."""
REFUSED = -0.1
"""What a proposal of the policy is worth that was refused: less than one that changes nothing."""


@dataclass(frozen=True)
class SearchSummary:
    """The folder of a search, and the content of its `search.json`."""

    folder: Path
    record: Mapping[str, Any]


@dataclass
class _Problems:
    """The problems of one task set by key, and what proposers are told of them."""

    workflow: GraphWorkflow
    rows: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    race: list[str] = field(default_factory=list)
    more: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    instructions: dict[str, str] = field(default_factory=dict)
    words: dict[str, list[bool]] = field(default_factory=dict)
    joints: list[str] = field(default_factory=list)

    def question(self, key: str) -> str:
        return problem_of(self.rows[key], self.workflow.problem, self.workflow.benchmark, "graph")

    def expected(self, key: str) -> str:
        """The gold answer of a problem; empty if the row has none that is known."""
        row = self.rows[key]
        if self.workflow.benchmark is not None:
            try:
                return find(self.workflow.benchmark).gold(row)
            except CannotScore:
                return ""
        return str(row.get("answer", ""))


def run_search(
    config: AflowConfig,
    folder: Path,
    stop: Callable[[], bool],
    phase: Callable[[str], None],
    workflows: Mapping[str, GraphWorkflow],
) -> SearchSummary:
    """Search with a prepared configuration and materialised task sets, in a folder that the caller
    has locked.

    Raises:
        BadInput: rows or limits cannot be used.
        Interrupted, BudgetReached: stopped; the same call resumes.
        RunFailed: a seed workflow could not be scored, or a proposer is down.
    """
    search = _Search(config, folder, phase, workflows, stop)
    with search.ray():
        try:
            record = run_within_limits(config, search.run(), stop, phase, KEPT, folder)
        except (Interrupted, BudgetReached) as error:
            search.write(finished=False, why=str(error))
            raise
        except OSError as error:
            raise RunFailed(f"the search cannot be written to {folder}: {error}") from error
    return SearchSummary(folder, record)


class _Search:
    """One search, from its problems to its page."""

    def __init__(
        self,
        config: AflowConfig,
        folder: Path,
        phase: Callable[[str], None],
        workflows: Mapping[str, GraphWorkflow],
        stop: Callable[[], bool],
    ) -> None:
        self.config, self.folder, self.phase = config, folder, phase
        self.section, self.workflows, self.stop = config.search, workflows, stop
        path = self.section.pool
        self.pool = SharedExperiencePool(
            folder / POOL_FILE if path is None else config.positions.beside(path)
        )
        # Training by Trinity's engines joins a Ray of its own, so trials then stay in this process.
        self.trains = "policy" in self.section.propose and self.section.train_every > 0
        self.on_ray = not config.inline and not (config.engine == "trinity" and self.trains)
        self.trials = Trials(config, workflows, self.section.executor, on_ray=self.on_ray)
        self.problems: dict[str, _Problems] = {}
        self.comparison: dict[str, Any] = {}
        self.optimizer: RLEnhancedOptimizer | None = None
        self.trained: list[dict[str, Any]] = []

    def ray(self) -> contextlib.AbstractContextManager[None]:
        """The Ray that trials run on; nothing if they run in this process."""
        if not self.on_ray:
            return contextlib.nullcontext()
        from aflow_tune.cluster.ray_for_run import ray_for_run

        return ray_for_run(self.config, self.workflows.values(), self.config.get_envs(), self.phase)

    async def run(self) -> dict[str, Any]:
        """Search, compare, write; returns the content of `search.json`."""
        _config, spend = self.config, spend_of(self.config)
        self.phase("reading the problems")
        for name, workflow in self.workflows.items():
            self.problems[name] = await self._problems(name, workflow)
        spend.start()
        async with LocalModels() as models, self.trials.started(models, self.phase):
            tasksets = [self._taskset(name) for name in self.problems]
            settings = self._settings(tasksets)
            with spend.open():
                proposers = await self._proposers(models, settings)
                before = self.pool.describe()
                if before["trials"]:
                    counts = ", ".join(f"{count} {name}" for name, count in before.items())
                    self.phase(f"the pool holds {counts}")
                self.optimizer = RLEnhancedOptimizer(
                    self.pool,
                    tasksets,
                    self._evaluate,
                    proposers,
                    settings,
                    train=self._train if self.trains else None,
                    say=self.phase,
                )
                winners = await self.optimizer.run()
                for tree in self.optimizer.trees:
                    await self._compare(tree, winners[tree.taskset.name])
        return self.write(finished=True, why=self.optimizer.why)

    # What the search is given

    async def _problems(self, name: str, workflow: GraphWorkflow) -> _Problems:
        inputs = self.config.buffer.explorer_input
        section, found = self.section, _Problems(workflow)
        training = [*([inputs.taskset] if inputs.taskset else []), *inputs.tasksets]
        own = section.tasksets.get(name)
        wanted = own.held_out if own else None
        chosen = [one for one in training if own is None or one.name == name]
        rows = [row for one in chosen for row in await read_rows(one)]
        chosen = [one for one in inputs.eval_tasksets if wanted is None or one.name == wanted]
        held_out = [row for one in chosen for row in await read_rows(one)]
        if len(rows) > MOST_ROWS:
            rows = random.Random(self.config.seed).sample(rows, MOST_ROWS)
        keys = []
        for row in [*rows, *held_out]:
            keys.append(digest(row))
            found.rows[keys[-1]] = row
        training_keys = list(dict.fromkeys(keys[: len(rows)]))
        found.held_out = [key for key in dict.fromkeys(keys[len(rows) :])]
        texts = [found.question(key) for key in training_keys]
        order = [training_keys[place] for place in varied(texts)]
        found.race = order[: section.problems]
        last = section.problems + section.final_problems
        found.more = order[section.problems : last]
        shown = order[last:] if len(order) - last >= 6 else found.more or found.race
        pairs = [(found.question(key), found.expected(key)) for key in shown]
        known = examples([pair for pair in pairs if pair[1]])
        found.instructions = {**INSTRUCTIONS, **known, **section.instructions}
        race = [found.question(key).lower() for key in found.race]
        found.words = {word: [word in text for text in race] for word in telling_words(texts)}
        found.joints = joints(texts)
        return found

    def _taskset(self, name: str) -> TaskSet:
        found, workflow = self.problems[name], self.workflows[name]
        refusals = self._refusals(name)

        def check(state: WorkflowState) -> str:
            return "; ".join(sorted(refusals(state.graph(workflow.graph.operators))))

        seed = WorkflowState.of(name, workflow.graph)
        executor = self.trials.fingerprint(name)
        return TaskSet(name, seed, found.race, found.more, executor, check)

    def _refusals(self, name: str) -> Callable[[Graph], set[str]]:
        """What the static check has against a graph for a task set."""
        operators = self._operators()
        limits = CheckLimits(model_calls=self.workflows[name].limits.calls)

        def refusals(graph: Graph) -> set[str]:
            verdict = check_loaded(
                graph, operators=operators, problem_type=self._kind(name), limits=limits
            )
            return {str(refusal) for refusal in verdict.refusals}

        return refusals

    def _operators(self) -> dict[str, type[Operator]]:
        own = next(iter(self.workflows.values())).graph.operators
        known = {**OPERATORS, **own}
        return {name: known[name] for name in self.section.operators or known}

    def _settings(self, tasksets: Sequence[TaskSet]) -> SearchSettings:
        section, config = self.section, self.config
        decides = {
            "tasksets": [
                [one.name, one.seed.key, one.executor, list(one.problems)] for one in tasksets
            ],
            "seed": config.seed,
            "model": config.model.model_path if "policy" in section.propose else None,
            **{
                name: getattr(section, name)
                for name in ("propose", "select", "operators", "instructions", "children", "race")
            },
            "train_every": section.train_every if "policy" in section.propose else 0,
        }
        rounds = section.rounds
        if rounds is None and config.positions.given("buffer.total_epochs"):
            rounds = config.buffer.total_epochs
        names = ("select", "rollouts", "tokens", "usd", "patience", "children", "race")
        return SearchSettings(
            name=f"{config.project}/{config.name}/{digest(decides)}",
            seed=config.seed,
            train_every=section.train_every,
            rounds=rounds,
            **{name: getattr(section, name) for name in names},
        )

    async def _proposers(self, models: LocalModels, settings: SearchSettings) -> list[Proposer]:
        problems, operators = self.problems, self._operators()
        kinds = {name: self._kind(name) for name in problems}
        first = next(iter(self.workflows.values()))
        edits = Edits(
            operators,
            words={name: one.words for name, one in problems.items()},
            instructions={name: one.instructions for name, one in problems.items()},
            joints={name: one.joints for name, one in problems.items()},
            problem_types=kinds,
            own=first.graph.operators,
        )

        def describe(taskset: str, key: str) -> tuple[str, str]:
            return problems[taskset].question(key), problems[taskset].expected(key)

        limits = CheckLimits(model_calls=first.limits.calls)
        found: list[Proposer] = []
        for name in self.section.propose:
            if name == "edits":
                found.append(edits)
            elif name == "teacher":
                ask = _asker(client_for(str(self.section.teacher)))
                found.append(Written(name, ask, edits, describe, limits))
            else:
                self.models, self.learner = models, Learner(self.config, self.folder)
                self.search_name = settings.name
                self.trained = self.pool.noted(settings.name, "trained") or []
                await self._take_policy()
                found.append(Written(name, self._ask_policy, edits, describe, limits, self._fits))
        return found

    def _kind(self, name: str) -> str | None:
        return TYPE_OF_BENCHMARK.get(self.workflows[name].benchmark or "")

    # The policy

    async def _take_policy(self) -> None:
        model = await self.models.take(self.config, self.learner.weights)
        self.policy = Recorded(model, self.learner.version)

    def _fits(self, messages: Messages) -> bool:
        model = self.config.model
        room = model.max_prompt_tokens or model.max_model_len
        return room is None or self.policy.prompt_tokens(messages) <= room

    async def _ask_policy(
        self, messages: Messages, seed: int, most_tokens: int | None
    ) -> tuple[str, dict[str, Any]]:
        reply, answer = await self.policy.ask(messages, seed=seed, max_tokens=most_tokens)
        return reply.text, {**vars(answer), **_used(reply.usage, reply.cost)}

    async def _train(self, number: int) -> None:
        """Train the policy on what its proposals of the last rounds were worth."""
        assert self.optimizer is not None
        if any(step["round"] == number for step in self.trained):
            return  # a resumed search is past it
        rows = [
            row
            for tree in self.optimizer.trees
            for edge in tree.edges
            if (row := _row(tree, edge)) is not None
        ]
        learned = await asyncio.to_thread(self.learner.train, rows, self.stop)
        worth = [row.reward for row in rows]
        step = {
            "round": number,
            "version": learned.version,
            "proposals": len(rows),
            "learned from": learned.trained,
            "mean worth": sum(worth) / len(worth) if worth else None,
        }
        self.trained.append(step)
        self.pool.note(self.search_name, "trained", self.trained)
        await self._take_policy()

    # Trials

    async def _evaluate(self, taskset: TaskSet, state: WorkflowState, problem: str) -> Trial:
        name = taskset.name
        return await self.trials.run(name, state, problem, self.problems[name].rows[problem])

    async def _compare(self, tree: Tree, winner: Node) -> None:
        """Run the winner, the seed and a single call on the held-out problems, and the winner
        without each of its operators."""
        name = tree.taskset.name
        found, workflow = self.problems[name], self.workflows[name]
        single = TEMPLATES["code_once" if workflow.graph.shape.needs_entry_point else "one_call"]
        states = {
            WINNER: winner.state,
            SEED: tree.root.state,
            SINGLE: WorkflowState.of(name, single.graph),
        }
        self.phase(f"comparing on {len(found.held_out)} held-out problems")
        measured = await self._held_out(tree, states)
        without = {
            part.name: WorkflowState.of(name, part.graph)
            for part in operator_parts(
                winner.state.graph(workflow.graph.operators), self._refusals(name)
            )
            if part.graph is not None
        }
        ablated = {}
        if without:
            self.phase(f"running the winner without each of {len(without)} operators")
            ablated = await self._held_out(tree, {WHOLE: winner.state, **without})
        self.comparison[name] = {
            "problems": [found.question(key) for key in found.held_out],
            "expected": [found.expected(key) for key in found.held_out],
            "columns": measured,
            "ablation": ablated,
        }

    async def _held_out(
        self, tree: Tree, states: Mapping[str, WorkflowState]
    ) -> dict[str, dict[str, Any]]:
        """By title, how a workflow did on the held-out problems. What the pool has is not run."""
        name, executor = tree.taskset.name, tree.taskset.executor
        found, place = self.problems[name], f"{name} (held out)"

        async def one(state: WorkflowState, known: Mapping[Any, Any], key: str) -> Trial:
            _, trial = known.get((state.key, key), ("", None))
            if trial is None or trial.score is None:
                trial = await self.trials.run(name, state, key, found.rows[key])
                self.pool.add_trial(place, executor, state.key, key, trial)
            return trial

        columns = {}
        for title, state in states.items():
            known = self.pool.trials(place, executor, state.key)
            self.pool.add_workflow(replace(state, taskset=place))
            trials = await asyncio.gather(*(one(state, known, key) for key in found.held_out))
            costs = [trial.usd for trial in trials]
            columns[title] = {
                "scores": [trial.score for trial in trials],
                "answers": [trial.answer or trial.reason for trial in trials],
                "calls": sum(trial.calls for trial in trials),
                "tokens": sum(trial.tokens for trial in trials),
                "usd": None if None in costs else sum(cost or 0.0 for cost in costs),
            }
        return columns

    # What comes out

    def write(self, *, finished: bool, why: str) -> dict[str, Any]:
        """Write everything that the search has found so far; returns `search.json`."""
        optimizer = self.optimizer
        if optimizer is None:
            return {}
        trees, told = [], dict[str, dict[str, Any]]()
        for tree in optimizer.trees:
            name = tree.taskset.name
            best, workflow = self.folder / "best" / name, self.workflows[name]
            write_graph(best, tree.winner().state)
            several = len(optimizer.trees) > 1
            write_layout(
                self.folder / "workspace" / (name if several else ""),
                tree,
                dataset=workflow.benchmark,
                describe=lambda key, found=self.problems[name]: (  # type: ignore[misc]
                    found.question(key),
                    found.expected(key),
                ),
                operators=workflow.graph.operators,
            )
            trees.append({**tree.to_json(), "best": str(best), "benchmark": workflow.benchmark})
            for edge in tree.edges:
                _count(told, edge)
        record = {
            "name": self.config.name,
            "seed": self.config.seed,
            "select": self.section.select,
            "finished": finished,
            "why": why,
            "spent": dict(optimizer.spent),
            "proposers": told,
            "trained": self.trained,
            "pool": {"path": str(self.pool.path), **self.pool.describe()},
            "trees": trees,
            "comparison": self.comparison,
        }
        write_json(self.folder / RECORD_FILE, record)
        write_search_report(self.folder)
        return record


def _asker(client: Any) -> Ask:
    """Asks a model behind an API."""

    async def ask(
        messages: Messages, seed: int, most_tokens: int | None
    ) -> tuple[str, dict[str, Any]]:
        reply = await client.complete(messages, seed=seed, max_tokens=most_tokens)
        return reply.text, _used(reply.usage, reply.cost)

    return ask


def _used(usage: Usage | None, usd: float | None) -> dict[str, Any]:
    tokens = usage.prompt_tokens + usage.completion_tokens if usage else 0
    return {"tokens_used": tokens, "usd": usd}


def _row(tree: Tree, edge: SearchEdge) -> Row | None:
    """What the policy learns from a proposal of its own: children of one parent are a group, and
    parents that are alike an anchor. None: nothing."""
    record = edge.record or {}
    if edge.proposer != "policy" or "logprobs" not in record:
        return None
    reward = edge.gain
    if edge.refusal:  # proposed twice, it is worth what it was found to be worth
        twin = tree.tried.get(edge.child or "")
        of_parent = twin is not None and twin.edge is not None and twin.edge.parent == edge.parent
        reward = twin.edge.gain if of_parent else REFUSED  # type: ignore[union-attr]
    if reward is None:  # its race has not ended
        return None
    kept = {name: record[name] for name in Answer.__dataclass_fields__}
    kept |= {name: tuple(kept[name]) for name in ("tokens", "logprobs")}
    answer = Answer(**kept)
    alike = edge.anchor.rpartition(" | ")[0]
    return answer.row(group=f"{tree.taskset.name}/{edge.parent}", anchor=alike, reward=reward)


def _count(told: dict[str, dict[str, Any]], edge: SearchEdge) -> None:
    """Add a proposal to the counts of its proposer."""
    empty = {"proposed": 0, "refused": 0, "won": 0, "tokens": 0, "usd": 0.0}
    row, record = told.setdefault(edge.proposer, empty), edge.record or {}
    row["proposed"] += 1
    row["refused"] += bool(edge.refusal)
    row["won"] += (edge.gain or 0) > 0
    row["tokens"] += record.get("tokens_used") or 0
    row["usd"] += record.get("usd") or 0.0
