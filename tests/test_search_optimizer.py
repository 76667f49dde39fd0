"""The loop of a search with scripted executors and proposers.

A workflow of these tests is one call whose instruction says which problems it solves: `solves
012` solves problems 0, 1 and 2. An interrupted search and its resumption must come to the same as
one that was never interrupted, without running or asking for anything twice.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from writer_samples import ONE, REFUSED, TWO, text

from aflow_tune.errors import Interrupted, RunFailed
from aflow_tune.graph.graph import Graph
from aflow_tune.models.types import ModelError, ModelFailure
from aflow_tune.operators import OPERATORS
from aflow_tune.search import (
    RLEnhancedOptimizer,
    SearchSettings,
    SharedExperiencePool,
    TaskSet,
    WorkflowState,
)
from aflow_tune.search.optimizer import Node, Proposal, Tree
from aflow_tune.search.pool import Trial
from aflow_tune.search.proposers import GRAFT, Edits, Written
from aflow_tune.writer.check import check_loaded

DIGITS = "0123456789"


def state(solves: str = "", code: str = ONE, taskset: str = "sums") -> WorkflowState:
    told = {"solve": f"solves {solves}"} if solves else {}
    return WorkflowState.of(taskset, Graph("sample", {"graph.py": code}, instructions=told))


def solved(state: WorkflowState) -> str:
    return state.instructions.get("solve", "").removeprefix("solves ")


def problems_of(taskset: str, count: int = 10) -> list[str]:
    return [f"{taskset} {number}" for number in range(count)]


def taskset(seed: str = "01", count: int = 10, name: str = "sums", **more: Any) -> TaskSet:
    problems = more.pop("problems", problems_of(name, count))
    return TaskSet(name, state(seed, taskset=name), problems, **more)


class Executor:
    """Runs what `solved` says; counts each trial, and stops after `most` of them."""

    def __init__(self, most: int | None = None, **more: Any) -> None:
        self.most, self.asked = most, Counter[tuple[str, str, str]]()
        self.finished: list[tuple[str, str, str]] = []
        self.shuffled: int | None = more.get("shuffled")
        self.down: Callable[[WorkflowState, str], bool] = more.get("down", lambda *_: False)

    async def __call__(self, taskset: TaskSet, state: WorkflowState, problem: str) -> Trial:
        place = taskset.name, state.key, problem
        if self.most is not None and self.asked.total() >= self.most:
            raise Interrupted("stopped")
        self.asked[place] += 1
        waits = zlib.crc32(f"{self.shuffled}/{place}".encode()) % 4 if self.shuffled else 1
        for _ in range(waits):
            await asyncio.sleep(0)
        self.finished.append(place)
        if self.down(state, problem):
            return Trial(None, "unscored", "the server is down", tokens=5, usd=0.1)
        score = float(problem.split()[1] in solved(state))
        return Trial(score, tokens=10 + len(solved(state)), usd=0.01, answer=f"answer {problem}")


class Scripted:
    """Proposes these instructions for any workflow, a few at a time."""

    def __init__(self, *solves: str, name: str = "scripted", **more: Any) -> None:
        self.solves, self.name, self.kinds = solves, name, more.get("kinds", {})
        self.at: Counter[str] = Counter()

    async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]:
        first = self.at[node.key]
        self.at[node.key] += count
        name = tree.taskset.name
        return [
            Proposal(
                state(one, taskset=name), self.name, self.kinds.get(one, "instruct"), f"tell {one}"
            )
            for one in self.solves[first : first + count]
        ]


class Better:
    """Proposes to solve one problem more or fewer, drawn by the search's own draws."""

    name = "better"

    async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]:
        found = []
        for _ in range(count):
            digit = tree.draw.choice(DIGITS)
            now = {*solved(node.state)}
            now = now - {digit} if digit in now and tree.draw.random() < 0.7 else now | {digit}
            told = "".join(sorted(now))
            child = state(told, taskset=tree.taskset.name)
            found.append(Proposal(child, self.name, f"change {digit}", f"change to {told}"))
        return found


def search_of(
    folder: Path,
    proposers: Sequence[Any],
    evaluate: Any = None,
    tasksets: Sequence[TaskSet] = (),
    **more: Any,
) -> RLEnhancedOptimizer:
    options = {name: more.pop(name) for name in ("say", "stop", "train") if name in more}
    pool = SharedExperiencePool(folder / "pool.sqlite")
    settings = SearchSettings(**{"patience": None, "rounds": 3, **more})
    sets, executor = tasksets or [taskset()], evaluate or Executor()
    return RLEnhancedOptimizer(pool, sets, executor, proposers, settings, **options)


def run(search: RLEnhancedOptimizer) -> dict[str, Node]:
    return asyncio.run(search.run())


def best(search: RLEnhancedOptimizer, name: str = "sums") -> str:
    return solved(run(search)[name].state)


def result(search: RLEnhancedOptimizer) -> Any:
    """Everything that a search decided, and what it spent."""
    return json.loads(json.dumps([[tree.to_json() for tree in search.trees], search.spent]))


def trials(search: RLEnhancedOptimizer) -> dict[Any, Any]:
    held: dict[Any, Any] = {}
    for tree in search.trees:
        found = search.pool.trials(tree.taskset.name, tree.taskset.executor)
        held |= {(tree.taskset.name, *place): kept for place, kept in found.items()}
    return held


# What is found


def test_a_planted_better_workflow_is_found(tmp_path: Path) -> None:
    search = search_of(tmp_path, [Scripted("0", "13", DIGITS, "012", "0", "4")])
    assert best(search) == DIGITS
    tree = search.trees[0]
    assert (tree.root.value, tree.winner().value) == (0.2, 1.0)
    assert tree.to_json()["winner"] == state(DIGITS).key
    assert {solved(node.state) for node in tree.nodes.values()} == {"01", "012", DIGITS}


def test_it_climbs_in_small_steps(tmp_path: Path) -> None:
    search = search_of(tmp_path, [Better()], rounds=40, children=3)
    assert best(search) == DIGITS
    assert search.why == "its rounds are done"


@pytest.mark.parametrize("select", ["puct", "aflow", "random"])
def test_each_way_to_select_climbs(tmp_path: Path, select: str) -> None:
    search = search_of(tmp_path, [Better()], rounds=25, select=select, race=select != "aflow")
    assert len(best(search)) >= 7
    parents = {edge.parent for edge in search.trees[0].edges}
    assert len(parents) > 3


def test_three_rounds_leave_a_pool_whose_values_are_read(tmp_path: Path) -> None:
    run(search_of(tmp_path, [Scripted("012", "0123", "0", "1", "2", "34")]))
    pool = SharedExperiencePool(tmp_path / "pool.sqlite")
    found = pool.describe()
    assert found["workflows"] == 7
    assert found["edges"] >= 6
    assert found["trials"] > 30
    place = f"sums | {state().structure} | wrong | instruct"
    # Gains of 0.1, 0.2 and of the four that lose: -0.1, -0.1, -0.1 and 0, as raced.
    values, gains = pool.values(), pool.gains()
    assert {*values} == {place}
    assert values[place] == pytest.approx(sum(gains[place]) / (len(gains[place]) + 4))
    later = search_of(tmp_path, [Better()], name="later")
    assert later.value_of(place.removesuffix(" | instruct"), "instruct") == values[place]
    assert later.value_of("sums", "unknown") == 0.0


def test_the_anchor_with_gains_is_expanded_first(tmp_path: Path) -> None:
    """Of equal scores and no visits, only what edits were worth tells workflows apart."""
    search = search_of(tmp_path, [], mixed=1.0)
    (tree,) = search.trees
    asyncio.run(tree.start())
    for code in (TWO, REFUSED):
        node = Node(state("01", code), tree.root, None, dict(tree.root.trials), tree.root.value)
        tree.nodes[node.key] = node
    tree.nodes[state("5").key] = Node(state("5"), tree.root, None, {}, 0.1)
    first, two, other, _ = tree.nodes.values()
    assert tree.select() is first
    search.gains[tree.place(two)]["swap"] = [0.5, 0.5]
    search.gains[tree.place(other)]["swap"] = [-0.5, -0.5]
    assert tree.select() is two
    search.gains[tree.place(other)]["vote"] = [0.9] * 9
    assert tree.select() is other


# Races


def test_losers_are_stopped_early(tmp_path: Path) -> None:
    sets = [taskset("0123", 30)]
    for race, rollouts in ((True, 6 + 30), (False, 60)):
        executor = Executor()
        folder = tmp_path / str(race)
        proposer = Scripted("0", "01234")
        search = search_of(folder, [proposer], executor, sets, rounds=1, race=race)
        run(search)
        assert search.spent["rollouts"] - 30 == rollouts
        assert executor.asked.total() == search.spent["rollouts"]
        by_key = {edge.child: edge.shared for edge in search.trees[0].edges}
        assert by_key[state("01234").key] == 30
        assert by_key[state("0").key] == (6 if race else 30)


def test_a_child_that_is_no_better_is_dropped_after_twelve(tmp_path: Path) -> None:
    search = search_of(tmp_path, [Scripted("4567")], tasksets=[taskset("4567", 30)], rounds=1)
    assert search.trees[0].root.value == 0.0
    same = Scripted("89")  # as good in the first problems of the race: none of both kinds changes
    sets = [taskset("45", 30)]
    search = search_of(tmp_path / "same", [same], tasksets=sets, rounds=1)
    run(search)
    (edge,) = search.trees[0].edges
    assert edge.gain is not None
    assert edge.gain <= 0
    assert edge.shared < 30


def test_identical_and_refused_proposals_cost_no_rollout(tmp_path: Path) -> None:
    executor = Executor()

    def check(state: WorkflowState) -> str:
        return "too long" if solved(state) == "987" else ""

    proposer = Scripted("01", "987", "01", "987", "987")
    search = search_of(tmp_path, [proposer], executor, [taskset(check=check)], rounds=2)
    run(search)
    assert executor.asked.total() == 10
    edges = search.trees[0].edges
    assert [edge.refusal for edge in edges[:2]] == ["this workflow was tried already", "too long"]
    assert all(edge.gain is None for edge in edges)
    assert search.trees[0].root.visits == len(edges) == 5
    assert search.why == "no change is left to try"


# Unscored trials


def test_unscored_trials_never_count_as_wrong(tmp_path: Path) -> None:
    down = Executor(down=lambda _, problem: int(problem.split()[1]) >= 5)
    search = search_of(tmp_path, [Scripted("012", "0")], down, rounds=1)
    assert best(search) == "012"
    tree = search.trees[0]
    assert tree.root.value == 0.4
    assert tree.winner().value == pytest.approx(0.6)
    assert tree.root.outcome().scored == 5
    lost = tree.tried[state("0").key]
    assert lost.edge is not None
    assert lost.edge.gain == pytest.approx(-0.2)
    assert lost.edge.shared == 5


def test_a_child_that_cannot_be_scored_has_no_gain(tmp_path: Path) -> None:
    down = Executor(down=lambda state, _: solved(state) == "0123")
    search = search_of(tmp_path, [Scripted("0123", "012")], down, rounds=1)
    assert best(search) == "012"
    by_child = {edge.child: edge for edge in search.trees[0].edges}
    assert by_child[state("0123").key].gain is None
    assert state("0123").key not in search.trees[0].nodes
    assert [len(gains) for gains in search.pool.gains().values()] == [1]


def test_a_seed_that_cannot_be_scored_fails(tmp_path: Path) -> None:
    search = search_of(tmp_path, [Better()], Executor(down=lambda *_: True))
    with pytest.raises(RunFailed, match="the server is down"):
        run(search)


def test_an_executor_that_fails_half_the_time_still_lets_it_finish(tmp_path: Path) -> None:
    def down(state: WorkflowState, problem: str) -> bool:
        return zlib.crc32(f"{state.key}/{problem}".encode()) % 2 == 0

    executor = Executor(down=down)
    sets = [taskset("01", problems=[f"{n} {n % 10}" for n in range(40)])]
    search = search_of(tmp_path, [Better()], executor, sets, rounds=30)
    assert len(best(search)) >= 6
    assert max(executor.asked.values()) == 1
    (tree,) = search.trees
    for node in tree.tried.values():
        assert 0 <= node.value <= 1
    scored = [trial.score for _, trial in trials(search).values()]
    assert 0.3 < scored.count(None) / len(scored) < 0.7


# Limits


@pytest.mark.parametrize("sets", [1, 2])
def test_there_are_never_more_rollouts_than_the_limit(tmp_path: Path, sets: int) -> None:
    names = ["sums", "words"][:sets]
    chosen = [taskset("01", 10 // sets, name, more=problems_of("more", 3)) for name in names]
    for limit in range(10, 120, 3):
        executor, folder = Executor(shuffled=7), tmp_path / str(limit)
        search = search_of(folder, [Better()], executor, chosen, rounds=None, rollouts=limit)
        run(search)
        assert executor.asked.total() == search.spent["rollouts"] <= limit
        assert search.why == "its limits are reached"


def test_limits_that_do_not_allow_the_seed_are_told(tmp_path: Path) -> None:
    executor = Executor()
    with pytest.raises(RunFailed, match="10 problems"):
        run(search_of(tmp_path, [Better()], executor, rollouts=9))
    assert executor.asked.total() == 0


@pytest.mark.parametrize(
    ("name", "limit", "buys"),
    [("tokens", 100, "less than its 10 problems"), ("usd", 0.25, "2 proposals")],
)
def test_a_limit_that_buys_less_than_three_proposals_is_refused_early(
    tmp_path: Path, name: str, limit: float, buys: str
) -> None:
    executor, limits = Executor(), {name: limit}
    with pytest.raises(RunFailed, match=buys):
        run(search_of(tmp_path, [Better()], executor, **limits))
    assert executor.asked.total() == 6
    run(search_of(tmp_path, [Better()], executor, **{name: limit * 10}))
    assert max(executor.asked.values()) == 1


def test_a_dropped_workflow_is_reopened_when_nothing_else_is_left(tmp_path: Path) -> None:
    """Only by way of a workflow that is worse than the seed is a better one to be had."""

    class Detour:
        name = "detour"

        async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]:
            ways = {"01": "2", "2": "2345"}
            found = ways.get(solved(node.state))
            children = [found] if found and state(found).key not in tree.tried else []
            return [Proposal(state(one), self.name, "tell", one) for one in children]

    search = search_of(tmp_path, [Detour()], rounds=None)
    assert best(search) == "2345"
    assert search.why == "no change is left to try"
    reopened = search.trees[0].nodes[state("2").key]
    assert (len(reopened.trials), reopened.value) == (10, 0.1)  # its children need a fair race


def test_rollouts_are_kept_back_for_finalists(tmp_path: Path) -> None:
    sets = [taskset("01", more=problems_of("more", 4))]
    search = search_of(tmp_path, [Better()], None, sets, rounds=None, rollouts=100, finalists=2)
    winner = run(search)["sums"]
    finalists = search.trees[0].finalists()
    assert len(finalists) == 2
    assert all(len(node.trials) == 14 for node in finalists)
    assert winner in finalists


@pytest.mark.parametrize(("name", "limit"), [("tokens", 700), ("usd", 0.5)])
def test_tokens_and_money_end_it_after_the_batch_that_spends_them(
    tmp_path: Path, name: str, limit: float
) -> None:
    limits: dict[str, Any] = {name: limit}
    search = search_of(tmp_path, [Better()], rounds=None, children=1, **limits)
    run(search)
    spent = search.spent[name]
    most = 10 * (20 if name == "tokens" else 0.01)
    assert limit <= spent + 1e-9 <= limit + most
    assert search.why == "its limits are reached"


def test_what_a_model_was_paid_for_proposals_counts(tmp_path: Path) -> None:
    class Dear(Scripted):
        async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]:
            record = {"tokens_used": 300, "usd": 0.5}
            return [Proposal(None, "dear", "unreadable", "", "no", record)] * count

    search = search_of(tmp_path, [Dear()], rounds=None, usd=1.0, tokens=100_000)
    run(search)
    assert search.spent["usd"] == pytest.approx(0.1 + 4 * 0.5)
    assert search.spent["tokens"] == 10 * 12 + 4 * 300
    assert search.why == "its limits are reached"


def test_rounds_and_patience_end_it(tmp_path: Path) -> None:
    said: list[str] = []
    run(search_of(tmp_path / "rounds", [Better()], rounds=5, say=said.append))
    assert [line.split(":")[0] for line in said[1:]] == [f"round {n}" for n in range(1, 6)]
    worse = Scripted(*"0198765")
    search = search_of(tmp_path / "patience", [worse], rounds=None, patience=2, children=1)
    run(search)
    assert search.why == "it has converged"
    assert max(edge.round for edge in search.trees[0].edges) == 3  # the first is from nothing


def test_the_policy_trains_between_rounds(tmp_path: Path) -> None:
    trained: list[int] = []

    async def train(number: int) -> None:
        trained.append(number)

    run(search_of(tmp_path, [Better()], rounds=5, train_every=2, train=train))
    assert trained == [2, 4]


def test_stop_is_heeded_before_a_batch(tmp_path: Path) -> None:
    executor = Executor()
    search = search_of(tmp_path, [Better()], executor, stop=lambda: executor.asked.total() > 10)
    with pytest.raises(Interrupted):
        run(search)
    assert executor.asked.total() == len(trials(search)) > 10


# Several searches and task sets


def two_sets() -> list[TaskSet]:
    return [taskset("01", 10, "sums"), taskset("789", 10, "words")]


def test_two_task_sets_share_one_budget_and_each_has_its_winner(tmp_path: Path) -> None:
    executor = Executor()
    search = search_of(tmp_path, [Better()], executor, two_sets(), rounds=None, rollouts=400)
    found = run(search)
    assert {name: len(solved(node.state)) > 5 for name, node in found.items()} == {
        "sums": True,
        "words": True,
    }
    for name in found:
        own = sum(count for place, count in executor.asked.items() if place[0] == name)
        assert 100 < own < 300
    assert {node.state.taskset for node in search.trees[1].tried.values()} == {"words"}


def test_a_second_search_starts_warm(tmp_path: Path) -> None:
    first = search_of(tmp_path, [Better()], rounds=12, name="first")
    won = best(first)
    assert len(won) > 4
    executor, said = Executor(), list[str]()
    sets = [taskset("3", 10)]
    later = search_of(tmp_path, [Better()], executor, sets, rounds=6, name="later", say=said.append)
    assert len(best(later)) >= len(won)
    assert "took over 3 workflows of the pool" in said[0]
    (tree,) = later.trees
    assert sum(node.edge is None for node in tree.nodes.values()) == 4
    assert later.spent["reused"] >= 3 * 10
    there = first.pool.trials("sums", "")
    mine = {place for place, (search, _) in there.items() if search == "later"}
    assert {place[1:] for place in executor.asked} == mine
    assert max(executor.asked.values()) == 1


def test_what_was_taken_over_but_is_worse_than_the_seed_does_not_win(tmp_path: Path) -> None:
    run(search_of(tmp_path, [Scripted("012")], rounds=1, name="first"))
    sets = [taskset(DIGITS)]
    later = search_of(tmp_path, [Scripted("5")], None, sets, rounds=1, name="later")
    assert best(later) == DIGITS


def test_unscored_trials_of_another_search_are_run_again(tmp_path: Path) -> None:
    halves = Executor(down=lambda _, problem: problem.endswith(("1", "3")))
    first = search_of(tmp_path, [Scripted("012")], halves, rounds=1, name="first")
    run(first)
    executor = Executor()
    later = search_of(tmp_path, [], executor, rounds=1, name="later")
    run(later)
    assert later.trees[0].root.value == 0.2
    assert {place[2] for place in executor.asked} == {"sums 1", "sums 3"}
    scores = later.trees[0].root.scores(problems_of("sums"))
    assert scores == [1.0, 1.0, *[0.0] * 8]


# Typed edits


WORDS = ("even", "low")
ALLOWED = ("Custom", "AnswerGenerate", "ScEnsemble")


def edits(*sets: TaskSet) -> Edits:
    holds = {"even": [n % 2 == 0 for n in range(10)], "low": [n < 5 for n in range(10)]}
    told = {"evens": "solves 02468", "odds": "solves 13579", "none": "solves -"}
    names = [one.name for one in sets] or ["sums"]
    operators = {name: OPERATORS[name] for name in ALLOWED}
    return Edits(operators, {n: holds for n in names}, {n: told for n in names}, {})


class ByText(Executor):
    """Solves what any instruction says; a router by `even` sends each half to its own."""

    async def __call__(self, taskset: TaskSet, state: WorkflowState, problem: str) -> Trial:
        await super().__call__(taskset, state, problem)
        number = problem.split()[1]
        told = {name: text.removeprefix("solves ") for name, text in state.instructions.items()}
        even = int(number) % 2 == 0
        if "if 'even' in problem.lower()" not in state.code:
            return Trial(float(any(number in text for text in told.values())), tokens=10)
        own = [text for name, text in told.items() if name.endswith("_2") is not even]
        return Trial(float(any(number in text for text in own)), tokens=10)


@functools.cache
def checked(state: WorkflowState) -> str:
    operators = {name: OPERATORS[name] for name in ALLOWED}
    return "; ".join(map(str, check_loaded(state.graph(), operators=operators).refusals))


def test_a_router_is_foreseen_from_trials(tmp_path: Path) -> None:
    """Neither half is solved by the other's workflow; routing by the word solves all."""
    search = search_of(
        tmp_path, [edits()], ByText(), [taskset("", check=checked)], rounds=10, children=4
    )
    winner = run(search)["sums"]
    assert winner.value == 1.0
    grafts = [edge for edge in search.trees[0].edges if edge.kind == GRAFT]
    gains = [edge.gain for edge in grafts if edge.gain is not None and edge.what == "route 'even'"]
    assert max(gains) == pytest.approx(0.5)
    assert "if 'even' in problem.lower()" in winner.state.code


def test_no_edit_is_proposed_twice_for_one_workflow(tmp_path: Path) -> None:
    search = search_of(tmp_path, [edits()], ByText(), [taskset("", check=checked)], rounds=30)
    run(search)
    told = [(edge.parent, edge.child) for edge in search.trees[0].edges if edge.child]
    assert len(told) == len({*told}) > 20


# Models that propose


class Model:
    """Answers by script; counts how often each seed was asked."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.seeds = replies, Counter[int]()
        self.prompts: list[str] = []
        self.most: int | None = None

    async def __call__(
        self, messages: Sequence[Mapping[str, str]], seed: int, most_tokens: int | None = None
    ) -> tuple[str, dict[str, Any]]:
        if self.most is not None and self.seeds.total() >= self.most:
            raise Interrupted("stopped")
        self.prompts.append(messages[0]["content"])
        self.seeds[seed] += 1
        await asyncio.sleep(0)
        reply = self.replies[seed % len(self.replies)]
        if isinstance(reply, Exception):
            raise reply
        return reply, {"tokens_used": 50, "usd": 0.001, "logprobs": [-0.5]}


DOWN = ModelError(ModelFailure.CONNECTION, "the server is down")


def written(model: Model, name: str = "teacher", sets: Sequence[TaskSet] = ()) -> Written:
    return Written(name, model, edits(*sets), lambda _, key: (f"What is {key}?", f"gold {key}"))


def whole(solves: str) -> str:
    return text(ONE, solve=f"solves {solves}")


def test_a_model_writes_or_chooses(tmp_path: Path) -> None:
    model = Model('{"edit": 1}', whole("0123456"), 'I choose {"edit": "2"}.', whole("012"))
    proposer = written(model)
    search = search_of(tmp_path, [proposer], ByText(), [taskset("01", check=checked)], rounds=3)
    assert solved(run(search)["sums"].state) in ("0123456", "02468", "13579")
    edges = search.trees[0].edges
    kinds = {edge.kind for edge in edges}
    assert {"written"} < kinds
    assert {edge.proposer for edge in edges} == {"teacher"}
    assert all(edge.record and edge.record["logprobs"] == [-0.5] for edge in edges)
    assert search.spent["tokens"] == 50 * len(edges) + 10 * search.spent["rollouts"]
    first = model.prompts[0]
    assert "What is sums 2?" in first
    assert "expected 'gold sums 2'" in first
    assert "answers 2 of 10 problems right" in first
    assert "1. " in first
    (tree,) = search.trees
    (asked,) = proposer.messages(tree, tree.root, [])
    raced = [edge for edge in edges if edge.parent == tree.root.key and edge.gain is not None]
    assert f"- {raced[-1].what}: {raced[-1].gain:+.2f}" in asked["content"]


def test_a_short_prompt_leaves_the_source_out(tmp_path: Path) -> None:
    search = search_of(tmp_path, [])
    (tree,) = search.trees
    asyncio.run(tree.start())
    proposer = written(Model())
    menu = proposer.edits.menu(tree, tree.root, 8)
    (whole_prompt,) = proposer.messages(tree, tree.root, menu)
    proposer.fits = lambda messages: len(messages[0]["content"]) < len(whole_prompt["content"])
    (short,) = proposer.messages(tree, tree.root, menu)
    assert "class Workflow" in whole_prompt["content"]
    assert "class Workflow" not in short["content"]
    assert tree.root.state.structure in short["content"]
    proposer.fits = lambda messages: False
    with pytest.raises(RunFailed, match="too long"):
        proposer.messages(tree, tree.root, menu)


def test_a_model_that_is_down_fails_after_a_number_of_calls(tmp_path: Path) -> None:
    model = Model(DOWN)
    with pytest.raises(RunFailed, match="the server is down"):
        run(search_of(tmp_path, [written(model)], rounds=None))
    assert model.seeds.total() <= 24


def test_a_model_that_is_down_at_times_does_not(tmp_path: Path) -> None:
    model = Model(DOWN, whole("0123"), DOWN, whole("012345"), whole("9"))
    search = search_of(tmp_path, [written(model)], tasksets=[taskset(check=checked)], rounds=4)
    assert best(search) == "012345"
    assert {edge.kind for edge in search.trees[0].edges} == {"unanswered", "written"}


MISBEHAVING = {
    "garbage": ("I cannot help with that.", "{", '{"graph_code": 3}', "\ud800", ""),
    "no such number": ('{"edit": 0}', '{"edit": 99999999999999999999}', '{"edit": -1}'),
    "hostile": (text(REFUSED), text("import os\nos.system('true')"), text("while True: pass")),
    "the seed again": (whole("01"),),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_what_a_model_writes_wrongly_costs_no_rollout(tmp_path: Path, name: str) -> None:
    executor, model = Executor(), Model(*MISBEHAVING[name])
    sets = [taskset("01", check=checked)]
    for _ in range(2):  # resumed, it is not asked again
        search = search_of(tmp_path, [written(model)], executor, sets, rounds=None)
        run(search)
        assert executor.asked.total() == 10
        edges = search.trees[0].edges
        assert len(edges) == 16
        assert all(edge.refusal for edge in edges)
        assert model.seeds.total() == 16
        assert search.why == "no change is left to try"
        assert search.spent["rollouts"] == 10


def test_beside_a_model_that_misbehaves_edits_win(tmp_path: Path) -> None:
    model = Model("no")
    proposers = [written(model), edits()]
    sets = [taskset("", check=checked)]
    search = search_of(tmp_path, proposers, ByText(), sets, rounds=12)
    assert run(search)["sums"].value >= 0.9
    asked = Counter(edge.proposer for edge in search.trees[0].edges)
    assert asked["edits"] > asked["teacher"] > 0


# Resuming


class Kind:
    """A search that can be begun any number of times."""

    def __init__(self, name: str) -> None:
        self.several = "two" in name
        self.sets = [
            TaskSet(one.name, one.seed, one.problems, problems_of("more", 3), check=checked)
            for one in (two_sets() if self.several else [taskset("01")])
        ]
        self.model = Model(
            whole("0123"), '{"edit": 3}', "no", whole("45678"), text(REFUSED), '{"edit": 1}'
        )
        self.name = name
        self.settings: dict[str, Any] = {"rounds": 5, "children": 3, "seed": 5}
        if "limits" in name:
            self.settings = {**self.settings, "rounds": None, "rollouts": 230, "tokens": 2500}

    def search(self, folder: Path, executor: Executor) -> RLEnhancedOptimizer:
        proposers: list[Any] = []
        if "edits" in self.name:
            proposers.append(edits(*self.sets))
        if "better" in self.name:
            proposers.append(Better())
        if "written" in self.name:
            proposers.append(written(self.model, sets=self.sets))
        return search_of(folder, proposers, executor, self.sets, **self.settings)


KINDS = ["edits", "better", "written", "edits written two", "better two limits", "better limits"]


def executor_of(kind: str, most: int | None = None, shuffled: int = 0) -> Executor:
    def down(state: WorkflowState, problem: str) -> bool:
        return zlib.crc32(f"{state.key}{problem}".encode()) % 7 == 0

    made = ByText if "edits" in kind else Executor
    return made(most, shuffled=shuffled, down=down)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_an_interrupted_search_comes_to_the_same(tmp_path: Path, name: str) -> None:
    kind = Kind(name)
    executor = executor_of(name)
    whole_search = kind.search(tmp_path / "whole", executor)
    found = {taskset: node.key for taskset, node in run(whole_search).items()}
    expected, kept, asked = result(whole_search), trials(whole_search), kind.model.seeds
    total, chance = executor.asked.total(), random.Random(zlib.crc32(name.encode()))
    assert total == len(kept) > 60
    for point in range(20):
        folder = tmp_path / str(point)
        kind = Kind(name)
        ran, most = Counter[tuple[str, str, str]](), 0
        while True:
            # Interrupted several times, at first before its last trial or at a random point.
            first = chance.randrange(1, total) if point else total - 1
            most = chance.randrange(20, total) if most else first
            executor = executor_of(name, most, shuffled=point)
            search = kind.search(folder, executor)
            try:
                winners = run(search)
            except Interrupted:
                ran.update(executor.finished)
                continue
            ran.update(executor.finished)
            break
        assert result(search) == expected
        assert {taskset: node.key for taskset, node in winners.items()} == found
        assert trials(search) == kept
        assert ran.keys() == {place for place in kept}
        assert kind.model.seeds.keys() == asked.keys()
        assert max(kind.model.seeds.values(), default=1) == 1 or "two" in name


@pytest.mark.parametrize("name", ["better", "written", "edits written two"])
def test_a_cancelled_search_runs_nothing_twice(tmp_path: Path, name: str) -> None:
    kind = Kind(name)
    executor = executor_of(name)
    whole_search = kind.search(tmp_path / "whole", executor)
    run(whole_search)
    chance = random.Random(3)
    for point in range(6):
        kind, finished = Kind(name), list[tuple[str, str, str]]()
        for turn in range(3):
            executor = executor_of(name, shuffled=point + 1)
            search = kind.search(tmp_path / str(point), executor)

            async def cancelled(search: RLEnhancedOptimizer, steps: int) -> None:
                task = asyncio.ensure_future(search.run())
                for _ in range(steps):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            if turn < 2:
                asyncio.run(cancelled(search, chance.randrange(1, 60)))
            else:
                run(search)
            finished += executor.finished
        assert result(search) == result(whole_search)
        assert Counter(finished).most_common(1)[0][1] == 1
        assert len(finished) == len(trials(search))


@pytest.mark.parametrize("name", ["better", "edits written two", "better two limits"])
def test_the_order_in_which_trials_finish_changes_nothing(tmp_path: Path, name: str) -> None:
    found = []
    for shuffled in (0, 1, 2):
        search = Kind(name).search(tmp_path / str(shuffled), executor_of(name, shuffled=shuffled))
        run(search)
        found.append(result(search))
    assert found[0] == found[1] == found[2]


def test_a_finished_search_resumes_to_itself(tmp_path: Path) -> None:
    first = search_of(tmp_path, [Better()], rounds=5)
    run(first)
    executor = Executor()
    again = search_of(tmp_path, [Better()], executor, rounds=5)
    run(again)
    assert executor.asked.total() == 0
    assert result(again) == result(first)
    further = search_of(tmp_path, [Better()], executor, rounds=8)
    run(further)
    assert (
        result(further)[0][0]["edges"][: len(again.trees[0].edges)] == result(first)[0][0]["edges"]
    )
    assert executor.asked


def test_what_others_learn_meanwhile_does_not_change_a_search(tmp_path: Path) -> None:
    """Gains are taken over once; those of another search come too late, as do its workflows."""
    alone = search_of(tmp_path / "alone", [Better()], rounds=8)
    run(alone)
    folder = tmp_path / "shared"
    with pytest.raises(Interrupted):
        run(search_of(folder, [Better()], Executor(60), rounds=8))
    run(search_of(folder, [Better()], rounds=4, seed=9, name="other"))
    resumed = search_of(folder, [Better()], rounds=8)
    run(resumed)
    trees = [result(one)[0][0] for one in (alone, resumed)]
    assert trees[0] == trees[1]
