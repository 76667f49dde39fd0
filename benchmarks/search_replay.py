"""Searches over workflows, replayed without a model: ours, AFlow's rule, GEPA's engine, chance.

    pip install --no-deps gepa==0.1.4             for this only; without it its rows are left out
    python benchmarks/search_replay.py            300 seeds, about six minutes on two cores
    python benchmarks/search_replay.py --seeds 10 --budgets 300 600 --json replay.json

Every rollout is looked up in `search_table.json`: 496 workflows for the two-questions task, 60
problems, one frozen greedy executor, and the edits between them. A search sees only the scores that
it pays for. Counted is the mean score, over all 60 problems, of the workflow that it returns as its
best itself; a seed decides its draws and the order of the problems.

Two ways to draw an edit. `learned`: ours (`search.proposers.Edits`), by what such edits were worth
so far, with routers whose gain is foreseen from known scores. `uniform`: any edit, or a router to
any workflow that was tried, with equal chances. Every algorithm but chance is run with both. Where
one leaves a choice open (how many problems an evaluation has, children a round), its row is the
choice with the best mean, found on the same seeds, which favours it. Ours has its default settings
and 24 problems to race on.

AFlow's rule is our search with `select="aflow"` and without races. `as AFlow evaluates` runs each
child on all 60 problems, one a round; the row above it is the best of that and of what ours has
besides: 24 varied problems, four children a round. Finalists, and the dropping of children that are
no better, stay ours in both. GEPA is its own engine (`gepa.optimize`) with its defaults: Pareto
selection, minibatches of 3, strict improvement, then the whole validation set. A candidate is the
number of a workflow; the adapter's `propose_new_texts` draws an edit to one that GEPA did not
accept, first those that it did not see. It counts its rollouts itself, may exceed the budget by its
last validation, and pays for the parent's minibatch each time; with `repeats free` a run of a
workflow on a problem counts once, as for the others.

What it does not show: anything beyond one task, one executor and one seed workflow, which scores 0.
The table holds edits of few kinds (two operators, three instructions, one joint, two router words)
and no router of routers. Its best workflows are routers three edits away, whose two sides are worse
alone than other workflows: that suits foreseen routers, and not a selection from the Pareto front.
GEPA is meant for prompts and a model that reflects on failures, which nobody does here; its merging
needs several components, and is off by default.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import multiprocessing
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from aflow_tune.graph.graph import Graph
from aflow_tune.report.statistics import Interval, mean, mean_interval, paired_difference
from aflow_tune.search.edits import Move
from aflow_tune.search.optimizer import (
    Node,
    Proposal,
    RLEnhancedOptimizer,
    SearchSettings,
    TaskSet,
    Tree,
)
from aflow_tune.search.pool import SearchEdge, SharedExperiencePool, Trial
from aflow_tune.search.problems import varied
from aflow_tune.search.proposers import Edits, Router
from aflow_tune.search.state import WorkflowState

gepa: Any = importlib.import_module("gepa") if importlib.util.find_spec("gepa") else None

TABLE = Path(__file__).with_name("search_table.json")
NAME = "table"
SEEDS = 300
BUDGETS = (300, 600, 1200)
RACED = 24
"""Problems that ours races on; further ones are for its finalists."""
WHOLE = 60
DRAWS = ("learned", "uniform")
OURS, AFLOW, RANDOM = "ours", "AFlow's rule", "random"
AFLOW_ITSELF = "AFlow's rule, as AFlow evaluates"
GEPA, GEPA_FREE = "GEPA", "GEPA, repeats free"


class Change(NamedTuple):
    kind: str
    what: str
    child: int


class Table:
    """Workflows by number, the seed first, and what is known of them."""

    def __init__(self, path: Path) -> None:
        held = json.loads(path.read_text())
        self.problems: list[str] = held["problems"]
        self.scores = [[int(mark) for mark in marks] for _, marks in held["graphs"]]
        self.means = [mean(scores) for scores in self.scores]
        self.states = [
            WorkflowState(NAME, {"graph.py": str(number)}, structure=structure)
            for number, (structure, _) in enumerate(held["graphs"])
        ]
        self.place = {state.key: number for number, state in enumerate(self.states)}
        self.moves: dict[int, list[Change]] = defaultdict(list)
        self.routers: dict[tuple[str, int, int], int] = {}
        """By word, the workflow for problems with it, and the one for the others."""
        self.beside: dict[int, list[tuple[int, Change]]] = defaultdict(list)
        """By workflow: the others that it can be joined with, and what becomes of it."""
        for parent, kind, what, child, *joined in held["edges"]:
            change = Change(kind, what, child)
            if not joined:
                self.moves[parent].append(change)
                continue
            word, other = joined
            self.routers[word, parent, other] = child
            self.beside[parent].append((other, change))
            self.beside[other].append((parent, change))
        self.words = sorted({word for word, _, _ in self.routers})

    def order(self, seed: int) -> list[int]:
        """The problems as a search gets them: shuffled, then each prefix varied."""
        shuffled = list(range(len(self.problems)))
        random.Random(seed).shuffle(shuffled)
        return [shuffled[at] for at in varied([self.problems[at] for at in shuffled])]

    def changes(self, parent: int, tried: Collection[int]) -> list[Change]:
        """Every edit of a workflow, with routers to those that were tried."""
        joined = [change for other, change in self.beside[parent] if other in tried]
        return list({change.child: change for change in [*self.moves[parent], *joined]}.values())


class Unkept(SharedExperiencePool):
    """A pool that keeps nothing, as no replay resumes."""

    def __init__(self) -> None:
        super().__init__(Path())

    def add_workflow(self, state: WorkflowState) -> None: ...

    def add_trial(self, *trial: Any) -> None: ...

    def add_edges(self, search: str, taskset: str, edges: Sequence[SearchEdge]) -> None: ...

    def note(self, search: str, name: str, value: Any) -> None: ...

    def noted(self, search: str, name: str) -> Any:
        return None

    def gains(self) -> dict[str, list[float]]:
        return {}

    def edges(self, search: str | None = None, taskset: str | None = None) -> list[SearchEdge]:
        return []

    def trials(
        self, taskset: str, executor: str, workflow: str | None = None
    ) -> dict[tuple[str, str], tuple[str, Trial]]:
        return {}

    def best(
        self, taskset: str, executor: str, most: int = 3, least: int = 1
    ) -> list[WorkflowState]:
        return []


class Learned(Edits):
    """Our proposer; only the edits themselves are the table's."""

    def __init__(self, table: Table, words: Mapping[str, Sequence[bool]]) -> None:
        super().__init__({}, {NAME: words}, {}, {})
        self.table = table

    def of(self, tree: Tree, node: Node) -> list[Move]:
        changes = self.table.moves[self.table.place[node.key]]
        return [Move(kind, what, Graph(str(child), {})) for kind, what, child in changes]

    def made(self, tree: Tree, change: Move | Router) -> Proposal:
        if isinstance(change, Router):
            return super().made(tree, change)
        state = self.table.states[int(change.graph.label)]
        return Proposal(state, self.name, change.kind, change.what)

    def grafted(self, tree: Tree, router: Router) -> WorkflowState | None:
        place = self.table.place
        child = self.table.routers.get((router.word, place[router.yes], place[router.no]))
        return None if child is None else self.table.states[child]

    def ranked(self, tree: Tree, node: Node) -> list[Proposal]:
        """Every edit, in the order in which it was drawn."""
        return [self.made(tree, change) for _, change in self._drawn(tree, node)]


class Uniform:
    """Edits with equal chances."""

    name = "uniform"

    def __init__(self, table: Table) -> None:
        self.table = table

    async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]:
        ranked = self.ranked(tree, node)
        return [one for one in ranked if one.state and one.state.key not in tree.tried][:count]

    def ranked(self, tree: Tree, node: Node) -> list[Proposal]:
        tried = {self.table.place[key] for key in tree.tried}
        found = self.table.changes(self.table.place[node.key], tried)
        states = self.table.states
        made = [Proposal(states[child], self.name, kind, what) for kind, what, child in found]
        return tree.draw.sample(made, len(made))


@dataclass(frozen=True)
class End:
    """What a search returned, and the rollouts that it took."""

    graph: int
    rollouts: int


Run = Callable[[Table, int, int], End]
"""Replays a search: table, seed, budget."""


def prepared(
    table: Table, draws: str, size: int, settings: SearchSettings
) -> tuple[RLEnhancedOptimizer, Learned | Uniform]:
    """Our search on the first `size` problems, and its only proposer."""
    order = table.order(settings.seed)
    keys = [str(problem) for problem in order]
    taskset = TaskSet(NAME, table.states[0], keys[:size], keys[size:])
    proposer: Learned | Uniform
    if draws == "learned":
        texts = [table.problems[problem].lower() for problem in order[:size]]
        holds = {word: [word in text for text in texts] for word in table.words}
        proposer = Learned(table, holds)
    else:
        proposer = Uniform(table)

    async def evaluate(taskset: TaskSet, state: WorkflowState, problem: str) -> Trial:
        return Trial(float(table.scores[table.place[state.key]][int(problem)]))

    return RLEnhancedOptimizer(Unkept(), [taskset], evaluate, [proposer], settings), proposer


def by_tree(
    table: Table, seed: int, budget: int, *, draws: str, size: int = RACED, **settings: Any
) -> End:
    """Our search or a variant of it; `settings` as in SearchSettings."""
    asked = SearchSettings(seed=seed, rollouts=budget, patience=None, **settings)
    search, _ = prepared(table, draws, size, asked)
    best = asyncio.run(search.run())[NAME]
    return End(table.place[best.key], search.spent["rollouts"])


def by_chance(table: Table, seed: int, budget: int, *, size: int) -> End:
    """Any tried workflow, any edit, the whole evaluation; the best one is returned."""
    problems, draw, spent = table.order(seed)[:size], random.Random(seed), 0
    found: dict[int, float] = {}
    graph = 0
    while spent + size <= budget:
        found[graph] = mean([table.scores[graph][problem] for problem in problems])
        spent += size
        left = {
            one: [change.child for change in table.changes(one, found) if change.child not in found]
            for one in found
        }
        graph = draw.choice(left[draw.choice([one for one in found if left[one]])])
    return End(max(found, key=lambda one: found[one]), spent)


class Adapter:
    """The table as GEPA sees it, and our proposer, which learns from GEPA's evaluations."""

    def __init__(
        self, table: Table, search: RLEnhancedOptimizer, proposer: Learned | Uniform, free: bool
    ) -> None:
        self.proposer = proposer
        self.table, self.search, self.free = table, search, free
        self.tree = search.trees[0]
        self.tree.tried[self.tree.root.key] = self.tree.root
        self.tree.draw.seed(search.settings.seed)
        self.accepted: set[str] = set()
        self.times: Counter[str] = Counter()
        """How often each workflow was proposed."""
        self.asked: tuple[Node, Node, Proposal] | None = None
        """The last proposal and its parent, of which it is not noted yet what came of it."""

    def node(self, candidate: Mapping[str, str]) -> Node:
        return self.tree.tried[self.table.states[int(candidate["graph"])].key]

    def evaluate(
        self, batch: list[str], candidate: dict[str, str], capture_traces: bool = False
    ) -> Any:
        node, scores = self.node(candidate), self.table.scores[int(candidate["graph"])]
        new = [problem for problem in batch if problem not in node.trials]
        node.trials.update({problem: Trial(float(scores[int(problem)])) for problem in batch})
        return gepa.EvaluationBatch(
            outputs=list(batch),
            scores=[float(scores[int(problem)]) for problem in batch],
            trajectories=list(batch) if capture_traces else None,
            num_metric_calls=len(new) if self.free else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], evaluated: Any, components: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        return {component: [] for component in components}

    def propose_new_texts(
        self, candidate: dict[str, str], dataset: Any, components: list[str]
    ) -> dict[str, str]:
        """A workflow one edit away that GEPA did not accept yet; nothing if there is none left. One
        that it rejected may come again, after those that it did not see: 3 problems say little."""
        self.settle()
        tree, parent = self.tree, self.node(candidate)
        left = [
            (proposal, proposal.state)
            for proposal in self.proposer.ranked(tree, parent)
            if proposal.state is not None and proposal.state.key not in self.accepted
        ]
        if not left:
            return {}
        proposal, state = min(left, key=lambda one: self.times[one[1].key])
        self.times[state.key] += 1
        child = tree.tried.setdefault(state.key, Node(state, parent, None))
        self.asked = parent, child, proposal
        return {"graph": str(self.table.place[child.key])}

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        self.accepted.add(self.node(event["candidate"]).key)

    def settle(self) -> None:
        """Tell the proposer what its last proposal was worth, as `Tree` does."""
        if self.asked is None:
            return
        parent, child, proposal = self.asked
        gain = self.tree.difference(parent, child)
        for name in (proposal.proposer, proposal.kind, proposal.what):
            self.tree.improved[name][gain > 0] += 1
        gains = self.search.gains[self.tree.place(parent)]
        gains.setdefault(proposal.kind, []).append(gain)
        self.asked = None


class Silent:
    def log(self, message: str) -> None: ...


def by_gepa(
    table: Table, seed: int, budget: int, *, draws: str, size: int, trained: int, free: bool = False
) -> End:
    """GEPA with `size` problems to validate on, of `trained` from which minibatches are drawn."""
    search, proposer = prepared(table, draws, trained, SearchSettings(seed=seed))
    keys = list(search.trees[0].taskset.problems)
    adapter = Adapter(table, search, proposer, free)
    found = gepa.optimize(
        seed_candidate={"graph": "0"},
        trainset=keys,
        valset=keys[:size],
        adapter=adapter,
        max_metric_calls=budget,
        # Where repeats are free, it may go on without spending anything.
        stop_callbacks=gepa.utils.MaxCandidateProposalsStopper(budget),
        cache_evaluation=free,
        callbacks=[adapter],
        logger=Silent(),
        seed=seed,
    )
    return End(int(found.best_candidate["graph"]), found.total_metric_calls)


def algorithms() -> dict[tuple[str, str], dict[str, Run]]:
    """By name and way to draw edits, the choices that an algorithm leaves open."""
    found: dict[tuple[str, str], dict[str, Run]] = {}
    for draws in DRAWS:
        ours = partial(by_tree, draws=draws)
        found[OURS, draws] = {"24 problems": ours}
        found[AFLOW, draws] = {
            f"{size} problems, {children} a round": partial(
                ours, size=size, select="aflow", race=False, children=children
            )
            for size in (RACED, WHOLE)
            for children in (1, 4)
        }
        found[AFLOW_ITSELF, draws] = {
            "60 problems, 1 a round": found[AFLOW, draws]["60 problems, 1 a round"]
        }
        if gepa is not None:
            engine = partial(by_gepa, draws=draws)
            found[GEPA, draws] = {
                f"{size} problems, minibatches from {trained}": partial(
                    engine, size=size, trained=trained
                )
                for size, trained in ((RACED, RACED), (RACED, WHOLE), (WHOLE, WHOLE))
            }
            free = partial(engine, size=WHOLE, trained=WHOLE, free=True)
            found[GEPA_FREE, draws] = {"60 problems, minibatches from 60": free}
        if draws == "uniform":
            found[RANDOM, draws] = {
                f"{size} problems": partial(by_chance, size=size) for size in (RACED, WHOLE)
            }
        found["ours, no races", draws] = {"24 problems": partial(ours, race=False)}
        found["ours, random selection", draws] = {"24 problems": partial(ours, select="random")}
    return found


@dataclass(frozen=True)
class Row:
    """One algorithm with one budget: of each seed the true mean score of what it returned."""

    budget: int
    name: str
    draws: str
    choice: str
    scores: list[float]
    rollouts: float

    @property
    def mean(self) -> float:
        return mean(self.scores)


def ended(place: tuple[str, str, str], budget: int, seed: int) -> tuple[float, int]:
    """In a process of the pool: one search; the true mean score of its result, and its rollouts."""
    global _TABLE
    _TABLE = _TABLE or Table(TABLE)
    name, draws, choice = place
    end = algorithms()[name, draws][choice](_TABLE, seed, budget)
    return _TABLE.means[end.graph], end.rollouts


_TABLE: Table | None = None


def replay(pool: Any, budget: int, seeds: int) -> tuple[list[Row], list[Row]]:
    """Every algorithm's best choice, and all choices."""
    best, every = [], []
    for (name, draws), choices in algorithms().items():
        rows = []
        for choice in choices:
            asked = [((name, draws, choice), budget, seed) for seed in range(seeds)]
            scores, spent = zip(*pool.starmap(ended, asked, chunksize=5), strict=True)
            rows.append(Row(budget, name, draws, choice, list(scores), mean(spent)))
        best.append(max(rows, key=lambda row: row.mean))
        every += rows
    return best, every


def find(rows: Sequence[Row], budget: int, name: str, draws: str = "learned") -> Row:
    return next(row for row in rows if (row.budget, row.name, row.draws) == (budget, name, draws))


def described(row: Row, best: Sequence[Row], optimum: float) -> dict[str, Any]:
    """The figures of a row; ours and AFlow's rule are those with the same way to draw."""
    ours = find(best, row.budget, OURS, row.draws)
    aflow = find(best, row.budget, AFLOW, row.draws)
    return {
        "budget": row.budget,
        "algorithm": row.name,
        "draws": row.draws,
        "choice": row.choice,
        "best_choice": row in best,
        "rollouts": round(row.rollouts, 1),
        "score": mean_interval(row.scores),
        "of_optimum": row.mean / optimum,
        "ours_minus_it": None if row is ours else paired_difference(row.scores, ours.scores),
        "to_aflow": row.mean / aflow.mean,
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """As Markdown, for docs/numbers.md."""
    heads = "draws", "algorithm", "score", "of best", "ours minus it", "to AFlow's rule", "choice"
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        less = "" if row["ours_minus_it"] is None else row["ours_minus_it"].text()
        print(
            f"| {row['draws']} | {row['algorithm']} | {row['score'].text()} "
            f"| {row['of_optimum']:.1%} | {less} | {row['to_aflow']:.2f} "
            f"| {row['choice']}; {row['rollouts']:.0f} rollouts |"
        )


def targets(best: Sequence[Row], optimum: float) -> list[tuple[str, bool]]:
    """What was wanted of ours, and whether it holds; the rivals draw as ours does."""
    ours, aflow = find(best, 600, OURS), find(best, 600, AFLOW_ITSELF)
    early, chance = find(best, 300, OURS), find(best, 600, RANDOM, "uniform")
    share, ratio = ours.mean / optimum, ours.mean / aflow.mean
    helped = ours.mean / find(best, 600, AFLOW).mean
    found = [
        (f"at 600, 90% of the optimum: {share:.1%}", share >= 0.9),
        (
            f"at 600, 1.3 times AFlow's rule as AFlow evaluates: {ratio:.2f} (with 24 varied "
            f"problems and four children, as ours: {helped:.2f})",
            ratio >= 1.3,
        ),
        (
            f"in 300, what chance has at 600: {early.mean:.3f}, {chance.mean:.3f}",
            early.mean >= chance.mean,
        ),
    ]
    if gepa is not None:
        more = paired_difference(find(best, 600, GEPA).scores, ours.scores)
        above = more.low is not None and more.low > 0
        found.insert(2, (f"at 600, above GEPA: {more.text()}", above))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, help="rollouts")
    parser.add_argument("--json", type=Path, help="write the numbers of every choice here as well")
    options = parser.parse_args()
    table, started = Table(TABLE), time.monotonic()
    optimum = max(table.means)
    print(f"{len(table.means)} workflows, the best {optimum:.3f}; {options.seeds} seeds")
    best: list[Row] = []
    every: list[Row] = []
    pool = multiprocessing.Pool()
    for budget in options.budgets:
        for found, rows in zip((best, every), replay(pool, budget, options.seeds), strict=True):
            found.extend(rows)
        print(f"\n{budget} rollouts, after {time.monotonic() - started:.0f} s\n")
        print_rows([described(row, best, optimum) for row in best if row.budget == budget])
    reached = targets(best, optimum) if {300, 600} <= {*options.budgets} else []
    print()
    for text, met in reached:
        print(f"{'met' if met else 'MISSED'}: {text}")
    if options.json:
        held = {
            "seeds": options.seeds,
            "optimum": optimum,
            "targets": [{"target": text, "met": met} for text, met in reached],
            "rows": [described(row, best, optimum) for row in every],
        }
        text = json.dumps(held, default=lambda interval: asdict(rounded(interval)), indent=1)
        options.json.write_text(text + "\n")


def rounded(interval: Interval) -> Interval:
    low, high = (None if end is None else round(end, 4) for end in (interval.low, interval.high))
    return Interval(round(interval.mean, 4), low, high, interval.count)


if __name__ == "__main__":
    main()
