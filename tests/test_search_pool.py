"""A search's workflows as values, and the pool: nothing that was said to be kept is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from writer_samples import ONE, TWO

from aflow_tune.errors import BadInput
from aflow_tune.graph.graph import Graph
from aflow_tune.search import Outcome, SharedExperiencePool, WorkflowState
from aflow_tune.search.pool import VERSION, SearchEdge, Trial

HERE = Path(__file__).parent


def state(code: str = ONE, taskset: str = "sums", **instructions: str) -> WorkflowState:
    graph = Graph("any", {"graph.py": code}, {"Custom": "{input}"}, instructions=instructions)
    return WorkflowState.of(taskset, graph)


def pool_in(folder: Path) -> SharedExperiencePool:
    return SharedExperiencePool(folder / "deep" / "pool.sqlite")


def edge(number: int, **more: Any) -> SearchEdge:
    given = {"round": 1, "parent": "p", "child": f"c{number}", "proposer": "edits"}
    return SearchEdge(number, **{**given, "kind": "swap", "what": "swap A for B", **more})


# WorkflowState


def test_states_are_equal_by_task_set_and_content() -> None:
    one = state(solve="Think.")
    assert one == state(solve="Think.").with_outcome(Outcome(0.5, 2))
    assert hash(one) == hash(state(solve="Think."))
    others = [state(), state(TWO, solve="Think."), state(taskset="more", solve="Think.")]
    assert len({one, *others}) == 4
    assert one != "a text"
    # The order in which instructions were given is no difference.
    assert state(a="1", b="2") == state(b="2", a="1")


def test_a_state_goes_through_json_and_pickle() -> None:
    one = state(solve="Ä line\nand \ud800").with_outcome(Outcome(0.5, 2, 1, 300, None))
    again = WorkflowState.from_json(json.loads(json.dumps(one.to_json())))
    for other in (again, pickle.loads(pickle.dumps(one))):
        assert other == one
        assert other.to_json() == one.to_json()
        assert other.outcome == one.outcome
    with pytest.raises((KeyError, TypeError)):
        WorkflowState.from_json({"taskset": "sums", "kind": "something else"})


def test_a_state_gives_its_graph_back() -> None:
    one = state(TWO, solve="Think.")
    graph = one.graph()
    assert (graph.sources, graph.prompts) == ({"graph.py": TWO}, {"Custom": "{input}"})
    assert graph.instructions == {"solve": "Think."}
    assert WorkflowState.of("sums", graph) == one
    assert one.structure == "Custom Custom | P>0 P>1 0>1 1>A"
    assert one.code == TWO


def test_a_key_is_the_same_in_every_process() -> None:
    program = "from test_search_pool import state; print(state(solve='x', a='y').key)"
    for seed in ("0", "1"):
        path = os.pathsep.join([str(HERE), str(HERE.parent)])
        told = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        ran = subprocess.run([sys.executable, "-c", program], env=told, capture_output=True)
        assert ran.stdout.decode().split() == [state(solve="x", a="y").key], ran.stderr.decode()


# Trials


def test_a_scored_trial_is_never_replaced_and_an_unscored_one_is(tmp_path: Path) -> None:
    pool = pool_in(tmp_path)
    place = "sums", "e", "w", "p"
    for trial, search in (
        (Trial(None, "unscored", "down", usd=None), "first"),
        (Trial(None, "unscored", "down again"), "second"),
        (Trial(0.0, "failed", "KeyError", 2, 30, 0.5, 0.1, "none"), "third"),
        (Trial(1.0), "fourth"),
        (Trial(None, "unscored", "down"), "fifth"),
    ):
        pool.add_trial(*place, trial, search)
    kept = Trial(0.0, "failed", "KeyError", 2, 30, 0.5, 0.1, "none")
    assert pool.trials("sums", "e") == {("w", "p"): ("third", kept)}
    # Another executor's, task set's or workflow's is another trial.
    pool.add_trial("sums", "other", "w", "p", Trial(1.0))
    pool.add_trial("more", "e", "w", "p", Trial(0.5))
    pool.add_trial("sums", "e", "v", "p", Trial(0.25), "x")
    assert pool.trials("sums", "other") == {("w", "p"): ("", Trial(1.0))}
    assert pool.trials("sums", "e", "v") == {("v", "p"): ("x", Trial(0.25))}


def test_what_is_no_character_does_not_end_a_search(tmp_path: Path) -> None:
    pool = pool_in(tmp_path)
    pool.add_trial("sums", "e", "w", "p", Trial(0.0, "failed", "\ud800", answer="a\0b\udfff"))
    pool.add_edges("one", "sums", [edge(0, refusal="\ud800", record={"text": "\ud800"})])
    _, trial = pool.trials("sums", "e")["w", "p"]
    assert (trial.reason, trial.answer) == ("?", "a\0b?")
    (found,) = pool.edges("one")
    assert (found.refusal, found.record) == ("?", {"text": "\ud800"})


def write(pool: SharedExperiencePool, writer: int, trials: int = 25) -> None:
    pool.add_workflow(state(solve=str(writer)))
    for number in range(trials):
        pool.add_trial("sums", "e", f"w{writer}", f"p{number}", Trial(1.0))
        pool.add_trial("sums", "e", "shared", f"p{number}", Trial(float(writer % 2)))
    pool.add_edges("one", f"set {writer}", [edge(number) for number in range(trials)])


def test_threads_at_once_lose_nothing(tmp_path: Path) -> None:
    pool = pool_in(tmp_path)
    threads = [threading.Thread(target=write, args=(pool, writer)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.describe() == {
        "searches": 1, "tasksets": 1, "workflows": 6, "edges": 150, "trials": 7 * 25
    }  # fmt: skip


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_at_once_lose_nothing(tmp_path: Path, method: str) -> None:
    pool = pool_in(tmp_path)
    if method == "fork":  # its connection is not to be shared with those that come of it
        pool.add_workflow(state())
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=write, args=(pool, writer)) for writer in range(3)]  # type: ignore[attr-defined]
    for process in processes:
        process.start()
    write(pool, 3)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = pool.describe()
    assert (found["edges"], found["trials"]) == (100, 5 * 25)


def test_a_pool_pickles_as_an_address(tmp_path: Path) -> None:
    pool = pool_in(tmp_path)
    pool.add_trial("sums", "e", "w", "p", Trial(1.0))
    again = pickle.loads(pickle.dumps(pool))
    assert again == pool
    again.add_trial("sums", "e", "w", "q", Trial(0.0))
    assert len(pool.trials("sums", "e")) == 2


WRITER = """
import itertools, sys
from aflow_tune.search.pool import SharedExperiencePool, Trial
pool = SharedExperiencePool(sys.argv[1])
for number in itertools.count():
    pool.add_trial("sums", "e", "w", str(number), Trial(1.0, answer="x" * 2000))
    print(number, flush=True)
"""


def test_a_killed_process_loses_no_trial_that_it_reported(tmp_path: Path) -> None:
    pool, reported = pool_in(tmp_path), -1
    for after in (1, 400):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(pool.path)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == after:
                writer.send_signal(signal.SIGKILL)
                break
        rest = [int(line) for line in writer.stdout.read().split()]
        writer.stdout.close()
        assert writer.wait() == -signal.SIGKILL
        reported = max([reported, after, *rest])
        held = {int(problem) for _, problem in pool.trials("sums", "e")}
        assert held >= set(range(reported + 1))
        assert len(held) <= reported + 2
    pool.add_trial("sums", "e", "w", "after", Trial(1.0))
    assert ("w", "after") in pool.trials("sums", "e")


# Files that are no pool


def of_version(path: Path, version: int) -> None:
    connection = sqlite3.connect(path)
    connection.executescript(f"CREATE TABLE news (x); PRAGMA user_version = {version};")
    connection.close()


NO_POOLS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: path.write_text("graph: {}\n" * 500),
    "newer": lambda path: of_version(path, VERSION + 1),
    "another database": lambda path: of_version(path, 0),
}


@pytest.mark.parametrize("name", NO_POOLS)
def test_a_file_that_is_no_pool_stays_as_it_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine"
    NO_POOLS[name](path)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(BadInput) as found:
            SharedExperiencePool(path).add_workflow(state())
        assert str(path) in str(found.value)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]


def test_a_folder_is_no_pool(tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        SharedExperiencePool(tmp_path).describe()


# Best, gains, edges, notes


def test_the_best_workflows_have_enough_trials(tmp_path: Path) -> None:
    pool = pool_in(tmp_path)
    states = {name: state(solve=name) for name in ("good", "lucky", "bad", "down")}
    for one in states.values():
        pool.add_workflow(one)

    def ran(name: str, *scores: float | None) -> None:
        for number, score in enumerate(scores):
            told = Trial(score, tokens=10, usd=None if score is None else 0.5)
            pool.add_trial("sums", "e", states[name].key, str(number), told)

    ran("good", 1.0, 0.5, None)
    ran("lucky", 1.0)
    ran("bad", 0.0, 0.5, 0.25)
    ran("down", None, None)
    found = pool.best("sums", "e", least=2)
    assert found == [states["good"], states["bad"]]
    assert found[0].outcome == Outcome(0.75, 2, 1, 30, None)
    assert found[1].outcome == Outcome(0.25, 3, 0, 30, 1.5)
    assert pool.best("sums", "e", 2) == [states["lucky"], states["good"]]
    assert pool.best("sums", "another") == []


def test_a_workflow_is_kept_without_its_outcome(tmp_path: Path) -> None:
    pool, one = pool_in(tmp_path), state(solve="Think.")
    pool.add_workflow(one.with_outcome(Outcome(1.0, 1)))
    pool.add_workflow(one)
    found = pool.workflow("sums", one.key)
    assert found == one
    assert found.outcome is None
    assert pool.describe()["workflows"] == 1
    with pytest.raises(KeyError):
        pool.workflow("more", one.key)


def test_edges_are_kept_in_order_and_updated(tmp_path: Path) -> None:
    pool = pool_in(tmp_path)
    record = {"tokens": [1, 2], "text": "ä"}
    first = [edge(1, anchor="here"), edge(0, record=record), edge(10, child=None, refusal="no")]
    pool.add_edges("one", "sums", first)
    pool.add_edges("one", "more", [edge(0, anchor="there", gain=-0.5)])
    pool.add_edges("two", "sums", [edge(0, anchor="here", gain=0.5)])
    raced = replace(first[0], gain=0.25, shared=12)
    pool.add_edges("one", "sums", [raced])
    assert pool.edges("one", "sums") == [first[1], raced, first[2]]
    assert [found.number for found in pool.edges("one")] == [0, 0, 1, 10]
    assert len(pool.edges(taskset="sums")) == 4
    assert len(pool.edges()) == 5
    assert pool.gains() == {"here": [0.25, 0.5], "there": [-0.5]}
    assert pool.values() == pytest.approx({"here": 0.75 / 6, "there": -0.5 / 5})


def test_notes_are_json_values_of_one_search(tmp_path: Path) -> None:
    pool = pool_in(tmp_path)
    pool.note("one", "gains", {"here": [0.1, 1 / 3]})
    pool.note("one", "gains", {"here": [0.1, 1 / 3], "empty": []})
    assert pool.noted("one", "gains") == {"here": [0.1, 1 / 3], "empty": []}
    assert (pool.noted("two", "gains"), pool.noted("one", "other")) == (None, None)
