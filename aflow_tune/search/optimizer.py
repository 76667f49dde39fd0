"""`RLEnhancedOptimizer`: Monte Carlo tree search over workflows, on a shared experience pool.

A round of one task set: select a workflow, let proposers change it, race the children against it on
the same problems, and keep those that are better. Whatever was tried is in the pool, and a search
is a function of its settings, its seed and the results there: a resumed one replays its rounds from
the pool without running anything twice, and goes on where it was. Several task sets have a tree
each, which grow together; the policy trains between rounds on what all of them proposed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from aflow_tune.errors import Interrupted, RunFailed
from aflow_tune.search.pool import SearchEdge, SharedExperiencePool, Trial
from aflow_tune.search.state import Outcome, WorkflowState
from aflow_tune.search.values import (
    STAGES,
    aflow_probabilities,
    learned_value,
    puct,
    race_difference,
    race_order,
    stages,
)

SEED = "seed"
_PART = " | "
"""Between the parts of an anchor."""
_ATTEMPTS = 4
"""For each child of a round, how many proposals may be refused before the round goes on."""
_SHOWN_BY_AFLOW = 4  # workflows among which AFlow's rule draws

T = TypeVar("T")


@dataclass(frozen=True)
class SearchSettings:
    """How a search goes. Limits that are None do not hold; a search without any ends when it has
    converged: the mean score of its three best workflows has not risen in `patience` rounds."""

    name: str = "search"
    seed: int = 0
    select: str = "puct"
    """puct, aflow or random."""
    rounds: int | None = None
    """Rounds of each task set."""
    rollouts: int | None = None
    """Executions of workflows, of all task sets together."""
    tokens: int | None = None
    usd: float | None = None
    patience: int | None = 20
    children: int = 4
    """Proposals that are raced together in a round: a group."""
    race: bool = True
    """Whether losers are dropped early; if not, each child runs on all problems, as in AFlow."""
    finalists: int = 3
    """Most workflows that are run on every training problem at the end."""
    exploration: float = 1.0
    mixed: float = 0.25
    train_every: int = 0
    """Rounds between two training steps of the policy; 0: none."""


@dataclass(frozen=True)
class TaskSet:
    """One task set of a search. `problems`: keys of those that races are run on, in an order of
    which each prefix is varied; `more`: further ones, for finalists only."""

    name: str
    seed: WorkflowState
    problems: Sequence[str]
    more: Sequence[str] = ()
    executor: str = ""
    """A hash of everything but workflow and problem that decides a score."""
    check: Callable[[WorkflowState], str] = lambda state: ""
    """Why a workflow may not run; empty if it may."""


@dataclass
class Node:
    """A workflow of the tree, and what is known of it."""

    state: WorkflowState
    parent: Node | None
    edge: SearchEdge | None
    trials: dict[str, Trial] = field(default_factory=dict)
    value: float = 0.0
    """Its estimated score: measured, or its parent's and the gain in their race."""
    visits: int = 0
    best_child: float | None = None
    exhausted: int = 0
    """How many workflows had been tried when nothing was left to propose for it; a router to a
    later one may be."""
    place: tuple[int, str] = (-1, "")
    """See `Tree.place`; at how many trials it was found."""

    @property
    def key(self) -> str:
        return self.state.key

    def scores(self, problems: Sequence[str]) -> list[float | None]:
        """The score on each problem; None where it is not known."""
        found = (self.trials.get(problem) for problem in problems)
        return [None if trial is None else trial.score for trial in found]

    def outcome(self) -> Outcome:
        """What all its trials showed."""
        trials = list(self.trials.values())
        scores = [trial.score for trial in trials if trial.score is not None]
        costs = [trial.usd for trial in trials if trial.usd is not None]
        return Outcome(
            sum(scores) / len(scores) if scores else None,
            len(scores),
            sum(trial.ending == "failed" for trial in trials),
            sum(trial.tokens for trial in trials),
            sum(costs) if len(costs) == len(trials) else None,
        )


@dataclass(frozen=True)
class Proposal:
    """A change of a workflow. `state` None: no graph came of it, and `refusal` says why."""

    state: WorkflowState | None
    proposer: str
    kind: str
    what: str
    refusal: str = ""
    record: Mapping[str, Any] | None = None


class Proposer(Protocol):
    """Proposes children of a node. Called again for each further proposal; an empty list means
    that it has none left, a refused proposal that it may have."""

    name: str

    async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]: ...


Evaluate = Callable[[TaskSet, WorkflowState, str], Awaitable[Trial]]
"""Runs a workflow on a problem. Raises BudgetReached: a limit of the run is reached."""
Train = Callable[[int], Awaitable[None]]
"""Trains the policy after this round."""


class OutOfBudget(Exception):
    """The limits of the search allow no further rollout."""


class RLEnhancedOptimizer:
    """A search over the workflows of one or several task sets.

    Args:
        evaluate: runs one workflow on one problem; many run at once.
        proposers: who proposes changes; they are drawn by Thompson sampling.
        train: trains the policy between rounds, every `settings.train_every`.
        say: gets a line of progress.
        stop: asked between batches whether to stop.
    """

    def __init__(
        self,
        pool: SharedExperiencePool,
        tasksets: Sequence[TaskSet],
        evaluate: Evaluate,
        proposers: Sequence[Proposer],
        settings: SearchSettings | None = None,
        *,
        train: Train | None = None,
        say: Callable[[str], None] = lambda text: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.pool, self.settings = pool, settings or SearchSettings()
        self.evaluate, self.proposers, self.train = evaluate, list(proposers), train
        self.say, self.stop = say, stop
        self.why = ""
        """Why the search ended."""
        gains = pool.noted(self.settings.name, "gains")
        if gains is None:  # of a resumed search they are there, perhaps none
            gains = pool.gains()
            pool.note(self.settings.name, "gains", gains)
        self.gains: dict[str, dict[str, list[float]]] = defaultdict(dict)
        """By place and kind, which make an anchor, the gains of edits: those in the pool when this
        search began, and its own."""
        for anchor, found in gains.items():
            place, _, kind = anchor.rpartition(_PART)
            self.gains[place][kind] = found
        self.trees = [Tree(self, taskset) for taskset in tasksets]

    @property
    def spent(self) -> Counter[str]:
        """rollouts, tokens and usd of this search, and `reused`: trials found in the pool."""
        total: Counter[str] = Counter()
        for tree in self.trees:
            total.update(tree.spent)
        return total

    async def run(self) -> dict[str, Node]:
        """Search; returns the best workflow of each task set.

        Raises:
            Interrupted: `stop` said so; the same search resumes.
            BudgetReached: from `evaluate`; likewise.
            RunFailed: a seed workflow could not be scored on any problem, or the limits do not
                allow to.
        """
        try:
            for tree in self.trees:
                self._share([tree])
                await tree.start()
            self.why = await self._rounds()
        except OutOfBudget:
            self.why = "its limits are reached"
        for tree in self.trees:
            self._share([tree])
            await tree.finish()
        return {tree.taskset.name: tree.winner() for tree in self.trees}

    async def _rounds(self) -> str:
        """Go on for as long as it is worth it; returns why it ended. Raises OutOfBudget."""
        done, stale, best = 0, 0, 0.0
        while self.settings.rounds is None or done < self.settings.rounds:
            open_trees = [tree for tree in self.trees if not tree.exhausted]
            if not open_trees:
                return "no change is left to try"
            self._share(open_trees, sum(tree.reserved for tree in self.trees))
            went_on = await _together([tree.within_limits(done + 1) for tree in open_trees])
            if not all(went_on):
                raise OutOfBudget
            done += 1
            level = sum(tree.level() for tree in self.trees)
            stale, best = (0, level) if level > best + 1e-9 else (stale + 1, best)
            if self.settings.patience is not None and stale >= self.settings.patience:
                return "it has converged"
            every = self.settings.train_every
            if self.train is not None and every and done % every == 0:
                await self.train(done)
        return "its rounds are done"

    def value_of(self, place: str, kind: str) -> float:
        """The learned value of an anchor: of its edits so far."""
        return learned_value(self.gains[place].get(kind, ())) if place in self.gains else 0.0

    def _share(self, trees: Sequence[Tree], reserved: int = 0) -> None:
        """Allow each of these trees, which go on at once, an equal part of what the limits leave
        besides `reserved` rollouts: what one may do must not depend on how fast the others are."""
        spent, settings = self.spent, self.settings
        left: dict[str, float] = {
            name: limit - spent[name]
            for name in ("tokens", "usd")
            if (limit := getattr(settings, name)) is not None
        }
        for tree in trees:
            own, count = tree.spent, len(trees)
            tree.allowed = {name: own[name] + rest / count for name, rest in left.items()}
            if settings.rollouts is not None:
                rest = max(0, settings.rollouts - reserved - spent["rollouts"]) // count
                tree.allowed["rollouts"] = own["rollouts"] + rest


class Tree:
    """The workflows of one task set, from its seed on."""

    def __init__(self, search: RLEnhancedOptimizer, taskset: TaskSet) -> None:
        self.search, self.taskset, self.settings = search, taskset, search.settings
        self.draw = random.Random()
        """Seeded anew for each decision, so that one replayed from the pool draws nothing."""
        self.root = Node(taskset.seed, None, None)
        self.nodes: dict[str, Node] = {}
        """Workflows that may be expanded: the seed, what was taken over, winners of races."""
        self.tried: dict[str, Node] = {}
        """Every workflow that was raced, by key: losers know something, too."""
        self.edges: list[SearchEdge] = []
        self.recorded = {
            edge.number: edge for edge in search.pool.edges(self.settings.name, taskset.name)
        }
        """What the pool holds of this search: on resuming, its rounds are replayed from it."""
        self.spent: Counter[str] = Counter()
        self.allowed: dict[str, float] = {}
        """What `spent` may come to; a name that is missing has no limit."""
        self._known: dict[str, Mapping[tuple[str, str], tuple[str, Trial]]] = {}
        self.improved: dict[str, Counter[bool]] = defaultdict(Counter)
        """By proposer, kind and change: how often it won its race, and how often not."""

    # Trials

    async def measure(self, node: Node, problems: Sequence[str]) -> None:
        """Run the workflow on those of the problems that it was not run on. Raises OutOfBudget if
        the limits do not allow all of them."""
        await self.measure_all([(node, problem) for problem in problems])

    async def measure_all(self, wanted: Sequence[tuple[Node, str]]) -> None:
        """As `measure`, for several workflows at once."""
        wanted = [(node, problem) for node, problem in wanted if problem not in node.trials]
        held = [self._held(node, problem) for node, problem in wanted]
        missing = [one for one, (_, trial) in zip(wanted, held, strict=True) if trial is None]
        # A resumed search has some of them in the pool: it must decide as if it had none.
        self._afford(sum(trial is None or own for own, trial in held))
        if missing and self.search.stop():
            raise Interrupted("stopped")
        ran = iter(await _together([self._run(node, problem) for node, problem in missing]))
        for (node, problem), (own, trial) in zip(wanted, held, strict=True):
            found = node.trials[problem] = next(ran) if trial is None else trial
            self._count(found if own or trial is None else None)

    def _held(self, node: Node, problem: str) -> tuple[bool, Trial | None]:
        """A trial in the pool that need not be repeated, and whether this search paid for it."""
        if node.key not in self._known:
            place = self.taskset.name, self.taskset.executor, node.key
            self._known[node.key] = self.search.pool.trials(*place)
        payer, trial = self._known[node.key].get((node.key, problem), ("", None))
        own = payer == self.settings.name
        return own, trial if own or (trial is not None and trial.score is not None) else None

    def _afford(self, rollouts: int) -> None:
        """Raise OutOfBudget if the limits do not allow so many. Tokens and money allow any number
        until they are spent."""
        spent, allowed = self.spent, self.allowed
        if not rollouts:
            return
        if any(spent[name] >= allowed[name] for name in ("tokens", "usd") if name in allowed):
            raise OutOfBudget
        if "rollouts" in allowed and spent["rollouts"] + rollouts > allowed["rollouts"]:
            raise OutOfBudget

    async def _run(self, node: Node, problem: str) -> Trial:
        taskset = self.taskset
        trial = await self.search.evaluate(taskset, node.state, problem)
        place = taskset.name, taskset.executor, node.key, problem
        self.search.pool.add_trial(*place, trial, self.settings.name)
        return trial

    def _count(self, trial: Trial | None) -> None:
        if trial is None:
            self.spent["reused"] += 1
            return
        self.spent.update(rollouts=1, tokens=trial.tokens)
        self.spent["usd"] += trial.usd or 0.0  # type: ignore[assignment]

    # A round

    async def start(self) -> None:
        """Measure the seed, and take over the best workflows of earlier searches."""
        taskset, pool = self.taskset, self.search.pool
        self.nodes[self.root.key] = self.tried[self.root.key] = self.root
        pool.add_workflow(taskset.seed)
        if refusal := taskset.check(taskset.seed):
            self.say(
                f"warning: no edit of the seed workflow may run, for the check says: {refusal}"
            )
        inherited = pool.noted(self.settings.name, f"inherited {taskset.name}")
        if inherited is None:
            least = min(12, len(taskset.problems))
            found = pool.best(taskset.name, taskset.executor, 3, least)
            inherited = [state.key for state in found if state.key != self.root.key]
            pool.note(self.settings.name, f"inherited {taskset.name}", inherited)
        try:
            if self.settings.tokens is not None or self.settings.usd is not None:
                await self.measure(self.root, taskset.problems[: STAGES[0]])
                self._check_limits()
            await self.measure(self.root, taskset.problems)
        except OutOfBudget:
            count = len(taskset.problems)
            raise RunFailed(
                f"the limits of the search do not allow to run the seed workflow on its {count} "
                f"problems, {taskset.name}"
            ) from None
        self.root.value = self._mean(self.root)
        trials = list(self.root.trials.values())
        if all(trial.score is None for trial in trials):
            why = next(iter(trials), Trial(None)).reason
            raise RunFailed(f"the seed workflow was not scored on any problem: {why}")
        if all(trial.ending != "scored" for trial in trials):
            self.say(f"warning: the seed workflow gives no answer: {trials[0].reason}")
        for key in inherited:
            node = Node(pool.workflow(taskset.name, key), self.root, None)
            await self.measure(node, taskset.problems)
            node.value = self._mean(node)
            self.nodes[key] = self.tried[key] = node
        told = f"; took over {len(inherited)} workflows of the pool" if inherited else ""
        self.say(f"the seed workflow scores {self.root.value:.3f}{told}")

    def _check_limits(self) -> None:
        """Raise RunFailed if, by the trials so far, tokens or money cannot buy three proposals."""
        trials, problems = list(self.root.trials.values()), len(self.taskset.problems)
        for name, unit in (("tokens", "tokens"), ("usd", "US dollars")):
            limit = getattr(self.settings, name)
            each = sum(getattr(trial, name) or 0 for trial in trials) / len(trials)
            if limit is None or not each:
                continue
            left = limit / len(self.search.trees) / each - problems
            if left < 3 * STAGES[0]:
                buys = f"its {problems} problems and {int(left / STAGES[0])} proposals"
                buys = f"less than its {problems} problems" if left < 0 else buys
                least = each * (problems + 3 * STAGES[0]) * len(self.search.trees)
                raise RunFailed(
                    f"search.{name}: the seed workflow takes {each:.4g} {unit} a rollout, so "
                    f"{limit:g} buys {buys}, {self.taskset.name}. Three proposals need {least:.4g} "
                    "or more: raise the limit, or lower search.problems"
                )

    @property
    def exhausted(self) -> bool:
        return all(map(self._is_exhausted, self.tried.values()))

    def _is_exhausted(self, node: Node) -> bool:
        return node.exhausted == len(self.tried)

    def _reopen(self) -> None:
        """If nothing is left to propose for the kept workflows, keep the best that was dropped."""
        if all(map(self._is_exhausted, self.nodes.values())):
            left = [node for node in self.tried.values() if not self._is_exhausted(node)]
            best = max(left, key=lambda node: node.value)
            self.nodes[best.key] = best

    async def within_limits(self, number: int) -> bool:
        """A round; False if the limits ended it."""
        try:
            await self.round(number)
        except OutOfBudget:
            return False
        return True

    async def round(self, number: int) -> None:
        """Select, propose, race, and keep what won."""
        proposed, group = len(self.edges), list[Node]()
        while len(self.edges) == proposed and not self.exhausted:
            self._reopen()
            self._shuffle(number)
            parent = self.select()
            group = await self._propose(parent, number)
            if not group:
                parent.exhausted = len(self.tried)
        if group:
            await self._race(parent, group)
            for node in group:
                self._end(parent, node)
            best = max(group, key=lambda node: node.value)
            told = f"best of {len(group)} {best.value - parent.value:+.3f} ({_what(best)})"
        else:
            refused = len(self.edges) - proposed
            told = f"{refused} changes were refused" if refused else "no change left to try"
        top = max(self.nodes.values(), key=lambda node: node.value)
        spent = self.search.spent
        self.say(
            f"round {number}: {_what(parent)} at {parent.value:.3f}: {told}; best so far "
            f"{top.value:.3f}, {spent['rollouts']} rollouts"
        )

    def _shuffle(self, number: int) -> None:
        place = self.settings.seed, self.taskset.name, number, len(self.edges)
        self.draw.seed("/".join(map(str, place)))

    def select(self) -> Node:
        """The workflow to expand, by `settings.select`."""
        nodes = [node for node in self.nodes.values() if not self._is_exhausted(node)]
        scores = [node.value for node in nodes]
        if self.settings.select == "random":
            return self.draw.choice(nodes)
        if self.settings.select == "aflow":
            top = sorted(nodes, key=lambda node: (-node.value, node is not self.root))
            top = top[:_SHOWN_BY_AFLOW]
            if self.root in nodes and self.root not in top:
                top[-1] = self.root
            weights = aflow_probabilities([node.value for node in top])
            return self.draw.choices(top, weights)[0]
        learned = [self._learned(node) for node in nodes]
        bounds = puct(
            scores,
            [node.best_child for node in nodes],
            [node.visits for node in nodes],
            learned,
            exploration=self.settings.exploration,
            mixed=self.settings.mixed,
        )
        return nodes[max(range(len(nodes)), key=lambda place: (bounds[place], -place))]

    def place(self, node: Node) -> str:
        """Where gains of a kind are comparable: task set, structure of the parent, how it fails."""
        if node.place[0] != len(node.trials):
            problems = self.taskset.problems
            scores = [score for score in node.scores(problems) if score is not None]
            trials = [node.trials[problem] for problem in problems if problem in node.trials]
            failing = sum(trial.ending == "failed" for trial in trials)
            outcome = "fails" if failing * 2 > len(trials) else "wrong"
            outcome = "right" if scores and sum(scores) * 2 > len(scores) else outcome
            parts = self.taskset.name, node.state.structure, outcome
            node.place = len(node.trials), _PART.join(parts)
        return node.place[1]

    def _learned(self, node: Node) -> float:
        """V of a workflow: of the best kind of edit at it. One that was not tried there has 0."""
        gains = self.search.gains.get(self.place(node), {})
        return max([0.0, *map(learned_value, gains.values())])

    async def _propose(self, parent: Node, number: int) -> list[Node]:
        """Up to `children` new workflows; refused and known ones cost no rollout."""
        group: list[Node] = []
        most = len(self.edges) + _ATTEMPTS * self.settings.children
        while len(group) < self.settings.children and len(self.edges) < most:
            self._shuffle(number)
            edge = self.recorded.get(len(self.edges))
            same = edge is not None and (edge.round, edge.parent) == (number, parent.key)
            if edge is not None and same and edge.record is not None:
                # A model was asked for it: what it answered then stands in the pool.
                state = edge.child and self.search.pool.workflow(self.taskset.name, edge.child)
                given = edge.proposer, edge.kind, edge.what, edge.refusal, edge.record
                proposals = [Proposal(state or None, *given)]
            else:
                self._afford(1)
                count = min(self.settings.children - len(group), most - len(self.edges))
                proposals = await self._ask(parent, count)
            if not proposals:
                break
            first = len(self.edges)
            admitted = [self._admit(parent, proposal, number) for proposal in proposals]
            group += [node for node in admitted if node is not None]
            self._keep(self.edges[first:])
        return group

    async def _ask(self, parent: Node, count: int) -> list[Proposal]:
        """Proposals of one proposer, drawn by Thompson sampling; of the next if it has none."""
        drawn = {
            proposer.name: self.draw.betavariate(*self.beta(proposer.name))
            for proposer in self.search.proposers
        }
        for proposer in sorted(self.search.proposers, key=lambda one: -drawn[one.name]):
            proposals = await proposer.propose(self, parent, count)
            if proposals:
                return proposals
        return []

    def beta(self, *names: str) -> tuple[float, float]:
        """The parameters of a Beta distribution of improving: 1 + won, 1 + lost of all `names`,
        each further one counted at most twice."""
        won, lost = 1.0, 1.0
        for place, name in enumerate(names):
            counts = self.improved[name]
            scale = min(1.0, 2 / counts.total()) if place and counts.total() else 1.0
            won, lost = won + scale * counts[True], lost + scale * counts[False]
        return won, lost

    def _admit(self, parent: Node, proposal: Proposal, number: int) -> Node | None:
        """Note a proposal in the tree; returns its node unless it is refused."""
        state, refusal = proposal.state, proposal.refusal
        if state is not None and state.key in self.tried:
            refusal = "this workflow was tried already"
        elif state is not None:
            refusal = refusal or self.taskset.check(state)
        edge = SearchEdge(
            number=len(self.edges),
            round=number,
            parent=parent.key,
            child=None if state is None else state.key,
            proposer=proposal.proposer,
            kind=proposal.kind,
            what=proposal.what,
            refusal=refusal,
            anchor=f"{self.place(parent)}{_PART}{proposal.kind}",
            record=proposal.record,
        )
        self.edges.append(edge)
        parent.visits += 1
        asked = proposal.record or {}
        self.spent.update(tokens=asked.get("tokens_used") or 0)
        self.spent["usd"] += asked.get("usd") or 0.0  # type: ignore[assignment]
        if state is not None and (not refusal or proposal.record is not None):
            self.search.pool.add_workflow(state)  # what a model wrote is needed on resuming
        if refusal or state is None:
            self._improved(edge, False)
            return None
        node = self.tried[state.key] = Node(state, parent, edge)
        return node

    def _keep(self, edges: Sequence[SearchEdge]) -> None:
        """Keep in the pool what it does not hold; of a replayed edge it knows the end already."""
        new = []
        for edge in edges:
            held = self.recorded.get(edge.number)
            if held is None or edge not in (held, replace(held, gain=None, shared=0)):
                new.append(edge)
        if new:
            self.search.pool.add_edges(self.settings.name, self.taskset.name, new)

    def _improved(self, edge: SearchEdge, won: bool) -> None:
        for name in (edge.proposer, edge.kind, edge.what):
            self.improved[name][won] += 1

    async def _race(self, parent: Node, group: Sequence[Node]) -> None:
        """Run the children on more and more of the parent's problems; losers are dropped."""
        problems = self.taskset.problems
        if any(problem not in parent.trials for problem in problems):  # it was dropped early
            await self.measure(parent, problems)
            parent.value = self._mean(parent)
        order = [problems[place] for place in race_order(parent.scores(problems))]
        sizes = stages(len(order)) if self.settings.race else [len(order)]
        running = list(group)
        for size in sizes:
            wanted = [(node, problem) for node in running for problem in order[:size]]
            await self.measure_all(wanted)
            for node in running:
                node.value = parent.value + self.difference(parent, node)
            if size < len(order):
                # Six problems can miss what twelve show: only what is worse is dropped there.
                floor = 0.0 if size == sizes[0] else 1e-9
                running = [node for node in running if node.value >= parent.value + floor]
        for node in running:
            self.nodes[node.key] = node
            if None not in node.scores(order):  # else the means are not of the same problems
                node.value = self._mean(node)

    def difference(self, parent: Node, child: Node) -> float:
        """The child's estimated gain, on the problems that both were scored on."""
        pairs = [
            (old, new)
            for old, new in zip(
                parent.scores(self.taskset.problems),
                child.scores(self.taskset.problems),
                strict=True,
            )
            if old is not None and new is not None
        ]
        known = [old for old in parent.scores(self.taskset.problems) if old is not None]
        failed = [(old, new) for old, new in pairs if old < 1]
        passed = [(old, new) for old, new in pairs if old >= 1]
        failing = sum(old < 1 for old in known) / len(known) if known else 0.0
        fixed = sum(new - old for old, new in failed)
        broken = sum(old - new for old, new in passed)
        return race_difference(failing, fixed, len(failed), broken, len(passed))

    def _end(self, parent: Node, node: Node) -> None:
        """What a race showed, for the tree, the proposers and the pool."""
        assert node.edge is not None
        gain = node.value - parent.value
        if gain <= 0:
            self.nodes.pop(node.key, None)
        shared = sum(score is not None for score in node.scores(self.taskset.problems))
        if not shared:  # its race showed nothing
            return
        node.edge = replace(node.edge, gain=gain, shared=shared)
        self.edges[node.edge.number] = node.edge
        self._keep([node.edge])
        self._improved(node.edge, gain > 0)
        self.search.gains[self.place(parent)].setdefault(node.edge.kind, []).append(gain)
        above: Node | None = parent
        while above is not None:
            if above.best_child is None or above.best_child < node.value:
                above.best_child = node.value
            above = above.parent

    # The end

    def level(self) -> float:
        """The mean score of the three best workflows."""
        top = sorted((node.value for node in self.nodes.values()), reverse=True)[:3]
        return sum(top) / len(top)

    @property
    def reserved(self) -> int:
        """Rollouts kept back for the finalists."""
        return self._most_finalists() * len(self.taskset.more)

    def _most_finalists(self) -> int:
        """At most `settings.finalists`, and fewer if their further problems took over a twelfth of
        all rollouts; 0 instead of a single one, which is the winner anyhow."""
        most, rollouts = self.settings.finalists, self.settings.rollouts
        if not self.taskset.more:
            return 0
        if rollouts is not None:
            each = len(self.taskset.more) * len(self.search.trees)
            most = min(most, rollouts // (12 * each))
        return most if most > 1 else 0

    def finalists(self) -> list[Node]:
        """The best workflows that are better than the seed, at least one if there is one."""
        nodes = [node for node in self.nodes.values() if node.value > self.root.value]
        return sorted(nodes, key=lambda node: -node.value)[: max(1, self._most_finalists())]

    async def finish(self) -> None:
        """Run the finalists on every training problem, as far as the limits allow."""
        found = self.finalists()
        for node in found if len(found) > 1 else ():
            try:
                await self.measure(node, [*self.taskset.problems, *self.taskset.more])
            except OutOfBudget:
                return

    def winner(self) -> Node:
        """The finalist with the best mean score on all its problems; the seed if there is none."""
        found = self.finalists()
        return max(found, key=lambda node: self._mean(node), default=self.root)

    def _mean(self, node: Node) -> float:
        return node.outcome().score or 0.0

    def say(self, text: str) -> None:
        several = len(self.search.trees) > 1
        self.search.say(f"{self.taskset.name}: {text}" if several else text)

    def to_json(self) -> dict[str, Any]:
        """The tree for the record of the search: workflows by key, and edges in their order."""
        workflows = {}
        for key, node in self.tried.items():
            workflows[key] = {
                "structure": node.state.structure,
                "value": node.value,
                "outcome": asdict(node.outcome()),
                "kept": key in self.nodes,
                "visits": node.visits,
            }
            if key in self.nodes:
                workflows[key]["state"] = node.state.to_json()
        return {
            "taskset": self.taskset.name,
            "seed": self.root.key,
            "winner": self.winner().key,
            "problems": len(self.taskset.problems),
            "workflows": workflows,
            "edges": [{**vars(edge), "record": None} for edge in self.edges],
        }


async def _together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in this order. If one raises, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _what(node: Node) -> str:
    return (
        node.edge.what if node.edge is not None else SEED if node.parent is None else "taken over"
    )
