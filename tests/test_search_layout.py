"""A search's tree in AFlow's own layout, and a workflow in ours.

Checked against what AFlow's loaders need: `DataUtils.load_results` and `get_top_rounds` (a list in
workflows/results.json whose rows have an int `round` and a number `score`), `DataUtils.load_log` (a
list in round_N/log.json), `ExperienceUtils.load_experience` (the keys of round_N/experience.json,
from which it builds processed_experience.json), `GraphUtils.read_graph_files` and
`extract_solve_graph` (prompt.py and graph.py with `class Workflow:`).
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.errors import Interrupted
from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.operators import OPERATORS
from aflow_tune.search import (
    RLEnhancedOptimizer,
    SearchSettings,
    SharedExperiencePool,
    TaskSet,
    WorkflowState,
)
from aflow_tune.search.layout import write_graph, write_layout
from aflow_tune.search.optimizer import Tree
from aflow_tune.search.pool import Trial
from aflow_tune.search.proposers import Edits

PLAIN = Path(__file__).parents[1] / "workflows" / "graphs" / "plain"
PROBLEMS = [f"problem {number}" for number in range(8)]
TELL = {"short": "Answer in one word."}


async def scripted(taskset: TaskSet, state: WorkflowState, problem: str) -> Trial:
    """Half of the problems are solved, with an instruction three quarters, reviewed none."""
    number = int(problem.split()[1])
    solved = number < (6 if state.instructions else 4)
    if "Review" in state.structure:
        return Trial(0.0, "failed", "crashed: no answer", tokens=30, usd=0.03)
    return Trial(float(solved), tokens=10, usd=0.01, answer=f"answer {number}")


async def stopped(taskset: TaskSet, state: WorkflowState, problem: str) -> Trial:
    raise Interrupted("stopped")


def searched(folder: Path, evaluate: Any = scripted, rounds: int = 3) -> Tree:
    seed = WorkflowState.of("gsm8k", load_graph(PLAIN))
    operators = {name: OPERATORS[name] for name in ("Custom", "Review", "Revise", "ScEnsemble")}
    edits = Edits(operators, words={}, instructions={"gsm8k": TELL}, joints={})
    search = RLEnhancedOptimizer(
        SharedExperiencePool(folder / "pool.sqlite"),
        [TaskSet("gsm8k", seed, PROBLEMS)],
        evaluate,
        [edits],
        SearchSettings(rounds=rounds, children=2),
    )
    asyncio.run(search.run())
    return search.trees[0]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def described(problem: str) -> tuple[str, str]:
    return f"What is {problem}?", f"gold of {problem}"


def test_every_workflow_that_was_raced_is_a_round(tmp_path: Path) -> None:
    tree = searched(tmp_path)
    unfit = write_layout(tmp_path / "workspace", tree, describe=described)
    workflows = tmp_path / "workspace" / "GSM8K" / "workflows"
    raced = [edge for edge in tree.edges if edge.gain is not None]
    assert len(raced) > 3
    results = read(workflows / "results.json")
    assert [row["round"] for row in results] == [*range(1, len(raced) + 2)]
    assert all(type(row["score"]) is float and 0 <= row["score"] <= 1 for row in results)
    seed = results[0]
    assert seed["score"] == 0.5
    assert (seed["avg_cost"], seed["total_cost"]) == pytest.approx((0.01, 0.08))
    assert all(re.fullmatch(r"[\d-]{10}T[\d:.]{15}", row["time"]) for row in results)
    keys = [tree.root.key, *(edge.child for edge in raced)]
    for number, edge in enumerate(raced, 2):
        folder = workflows / f"round_{number}"
        assert edge.child is not None
        node = tree.tried[edge.child]
        assert results[number - 1]["score"] == node.value
        found = read(folder / "experience.json")
        assert found["father node"] == keys.index(edge.parent) + 1
        assert found["modification"] == edge.what
        assert found["after"] - found["before"] == pytest.approx(edge.gain)
        assert found["succeed"] is (edge.gain is not None and edge.gain > 0)
    assert set(unfit) <= {row["round"] for row in results}


def test_the_experience_is_grouped_by_father(tmp_path: Path) -> None:
    tree = searched(tmp_path)
    write_layout(tmp_path, tree)
    workflows = tmp_path / "GSM8K" / "workflows"
    processed = read(workflows / "processed_experience.json")
    own = {
        int(folder.name.removeprefix("round_")): read(folder / "experience.json")
        for folder in workflows.glob("round_*")
        if folder.name != "round_1"
    }
    assert not (workflows / "round_1" / "experience.json").exists()
    assert processed.keys() == {str(one["father node"]) for one in own.values()}
    for number, one in own.items():
        of_father = processed[str(one["father node"])]
        assert of_father["score"] == one["before"]
        kind = "success" if one["succeed"] else "failure"
        told = {"modification": one["modification"], "score": one["after"]}
        assert of_father[kind][str(number)] == told
    assert processed["1"]["success"]
    assert processed["1"]["failure"]


def test_wrong_answers_are_logged_as_aflow_logs_them(tmp_path: Path) -> None:
    tree = searched(tmp_path)
    write_layout(tmp_path, tree, describe=described)
    rows = read(tmp_path / "GSM8K" / "workflows" / "round_1" / "log.json")
    assert len(rows) == 4
    assert rows[0] == {
        "question": "What is problem 4?",
        "right_answer": "gold of problem 4",
        "model_output": "answer 4",
        "extracted_output": "answer 4",
        "extract_answer_code": "None",
    }


def test_what_has_no_score_is_no_wrong_answer(tmp_path: Path) -> None:
    async def down(taskset: TaskSet, state: WorkflowState, problem: str) -> Trial:
        down_now = problem == PROBLEMS[0]
        return Trial(None, "unscored", "down", usd=None) if down_now else Trial(1.0, usd=None)

    write_layout(tmp_path, searched(tmp_path, down, rounds=1))
    workflows = tmp_path / "GSM8K" / "workflows"
    assert not (workflows / "round_1" / "log.json").exists()
    assert read(workflows / "results.json")[0]["total_cost"] is None


def test_rounds_are_in_aflows_form_with_instructions_as_prompts(tmp_path: Path) -> None:
    tree = searched(tmp_path)
    unfit = write_layout(tmp_path, tree)
    workflows = tmp_path / "GSM8K" / "workflows"
    told = []
    for row in read(workflows / "results.json"):
        folder = workflows / f"round_{row['round']}"
        graph, prompt = ((folder / name).read_text() for name in ("graph.py", "prompt.py"))
        assert (folder / "__init__.py").read_text() == ""
        ast.parse(prompt)
        assert re.search(r"class Workflow:.+", graph, re.DOTALL)
        if row["round"] not in unfit:
            place = f"workspace.GSM8K.workflows.round_{row['round']}.prompt"
            assert f"import {place} as prompt_custom" in graph
            told += [row["round"]] if TELL["short"] in prompt else []
    assert told
    # AFlow's template of GSM8K has no such operator: our source stands there as it is.
    told_why = r"round_{}/graph\.py:\d+: operator\.Review"
    reviewed = next(n for n, why in unfit.items() if re.search(told_why.format(n), why))
    assert "operator.Review" in (workflows / f"round_{reviewed}" / "graph.py").read_text()


def test_a_search_that_was_stopped_at_its_seed_has_no_rounds(tmp_path: Path) -> None:
    seed = WorkflowState.of("gsm8k", load_graph(PLAIN))
    pool = SharedExperiencePool(tmp_path / "pool.sqlite")
    search = RLEnhancedOptimizer(pool, [TaskSet("gsm8k", seed, PROBLEMS)], stopped, [])
    with pytest.raises(Interrupted):
        asyncio.run(search.run())
    assert write_layout(tmp_path, search.trees[0]) == {}
    workflows = tmp_path / "GSM8K" / "workflows"
    assert read(workflows / "results.json") == []
    assert not list(workflows.glob("round_*"))


def test_a_layout_replaces_that_of_an_earlier_call(tmp_path: Path) -> None:
    write_layout(tmp_path, searched(tmp_path / "long", rounds=4), dataset="MATH")
    workflows = tmp_path / "MATH" / "workflows"
    before = {path.name for path in workflows.glob("round_*")}
    (workflows / "round_2" / "mine.txt").write_text("kept")
    tree = searched(tmp_path / "short", rounds=1)
    write_layout(tmp_path, tree, dataset="math")
    write_layout(tmp_path, tree, dataset="math")
    assert len(read(workflows / "results.json")) < len(before)
    listed = {f"round_{row['round']}" for row in read(workflows / "results.json")}
    assert {path.parent.name for path in workflows.glob("round_*/graph.py")} == listed
    assert (workflows / "round_2" / "mine.txt").read_text() == "kept"


def test_a_task_set_need_not_be_named_as_a_module(tmp_path: Path) -> None:
    write_layout(tmp_path, searched(tmp_path, rounds=1), dataset="2 questions/small")
    graph = tmp_path / "_2_questions_small" / "workflows" / "round_1" / "graph.py"
    assert "import workspace._2_questions_small.workflows.round_1.prompt" in graph.read_text()


WRITTEN = Graph(
    "mine",
    {
        "graph.py": (PLAIN / "graph.py").read_text(),
        "prompt.py": 'ASK = "Ä question: "\n',
    },
    {"Custom": {"main": "Q: {input}\n{instruction}"}, "ASK": "Another: "},
    instructions={"ask": "In one\nword."},
)


def test_a_written_graph_is_loaded_as_it_was(tmp_path: Path) -> None:
    state = WorkflowState.of("train", WRITTEN)
    write_graph(tmp_path / "best", state)
    again = load_graph(tmp_path / "best")
    assert WorkflowState.of("train", again) == state
    bare = WorkflowState.of("train", load_graph(PLAIN))
    write_graph(tmp_path / "best", bare, {"Custom": "Q: {input} {instruction}"})
    assert {path.name for path in (tmp_path / "best").iterdir()} == {"graph.py", "prompts.json"}
    write_graph(tmp_path / "best", bare)
    assert WorkflowState.of("train", load_graph(tmp_path / "best")) == bare


def test_a_workflows_own_prompts_win_over_those_of_the_run(tmp_path: Path) -> None:
    write_graph(
        tmp_path, WorkflowState.of("train", WRITTEN), {"ASK": "Run's", "Review": "{solution}"}
    )
    assert read(tmp_path / "prompts.json") == {**WRITTEN.prompts, "Review": "{solution}"}
