"""The page of a search: verdicts with known numbers, missing parts, and texts that stay texts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_html_report import HOSTILE, Page
from writer_samples import ONE, TWO

from aflow_tune.graph.graph import Graph
from aflow_tune.report.search import (
    SEARCH_FILE,
    ablation_rows,
    search_summary,
    write_search_report,
)
from aflow_tune.search.optimizer import (
    Node,
    Proposal,
    RLEnhancedOptimizer,
    SearchSettings,
    TaskSet,
    Tree,
)
from aflow_tune.search.pool import SharedExperiencePool, Trial
from aflow_tune.search.state import WorkflowState

LOST = [1.0] * 10 + [0.0] * 30
WON = [1.0] * 30 + [0.0] * 10
"""40 problems: against `LOST` 20 are better and none worse, so the difference is 0.5. Its standard
deviation is sqrt(40 / 39) / 2 and t(0.975, 39) is 2.0227, so the bounds are 0.338 and 0.662."""


def state(code: str, **instructions: str) -> WorkflowState:
    graph = Graph("sample", {"graph.py": code}, instructions=instructions)
    return WorkflowState.of("sums", graph)


def edge(number: int, parent: str, child: str | None, **more: Any) -> dict[str, Any]:
    told = {"number": number, "round": number, "parent": parent, "child": child}
    rest = {"refusal": "", "gain": None, "shared": 0, "anchor": "", "record": None}
    return {**told, "proposer": "edits", "kind": "vote", "what": f"what {number}", **rest, **more}


def workflow(of: WorkflowState, value: float, kept: bool = True) -> dict[str, Any]:
    outcome = {"score": value, "scored": 20, "failed": 1, "tokens": 4000, "usd": 0.02}
    told = {"structure": of.structure, "value": value, "outcome": outcome}
    told |= {"kept": kept, "visits": 3}
    return {**told, "state": of.to_json()} if kept else told


def column(scores: list[Any], tokens: int, answer: str = "answer") -> dict[str, Any]:
    answers = [f"{answer} {place}" for place in range(len(scores))]
    return {"scores": scores, "answers": answers, "tokens": tokens, "usd": None}


def a_search(winner: list[Any] = WON, seed: list[Any] = LOST) -> dict[str, Any]:
    """A search of three rounds: two edits kept in a row, one dropped, one refused, one cut off."""
    first, second, third = state(ONE), state(ONE, solve="Think."), state(TWO, solve="Think.")
    edges = [
        edge(0, first.key, second.key, gain=0.1, shared=20, kind="instruct"),
        edge(1, first.key, "lost", gain=-0.2, shared=6),
        edge(2, second.key, third.key, gain=0.2, shared=20),
        edge(3, second.key, None, refusal="no graph was written"),
        edge(4, second.key, first.key, refusal="this workflow was tried already"),
        edge(5, third.key, "cut off"),
    ]
    workflows = {
        first.key: workflow(first, 0.5),
        second.key: workflow(second, 0.6),
        third.key: workflow(third, 0.8),
        "lost": workflow(first, 0.3, kept=False),
        "cut off": workflow(first, 0.3, kept=False),
    }
    tree = {"taskset": "sums", "seed": first.key, "winner": third.key, "problems": 20}
    tree |= {"workflows": workflows, "edges": edges, "best": "out/best"}
    columns = {"winner": column(winner, 80_000, "new"), "seed": column(seed, 20_000, "old")}
    columns["single call"] = column(seed, 10_000)
    texts = [f"problem {place}" for place in range(40)]
    return {
        "name": "a search",
        "seed": 1,
        "select": "puct",
        "proposers": {"edits": {"proposed": 6, "refused": 2, "won": 2, "tokens": 0, "usd": 0.0}},
        "trained": [{"round": 2, "rows": 8, "loss": 0.25}],
        "spent": {"rollouts": 210, "tokens": 120_000, "usd": 0.5, "reused": 3},
        "finished": True,
        "why": "converged",
        "pool": {"path": "pool.db", "searches": 2, "workflows": 9},
        "trees": [tree],
        "comparison": {"sums": {"problems": texts, "expected": [None] * 40, "columns": columns}},
    }


def page_of(folder: Path, held: dict[str, Any]) -> Page:
    (folder / SEARCH_FILE).write_text(json.dumps(held))
    page = write_search_report(folder)
    assert page == folder / "report.html"
    return Page(page.read_text("utf-8"))


GAIN = "from 0.250 to 0.750 (+0.500, 95% interval +0.338 to +0.662, 40 paired items)"


def test_a_search_that_won(tmp_path: Path) -> None:
    page = page_of(tmp_path, a_search())
    wanted = (
        f"The winner is better than the seed: {GAIN}.",
        f"The winner is better than a single call: {GAIN}.",
        "winner 0.750 (0.598 to 0.858) 0 2k unknown",  # Wilson's interval, 80,000 / 40 tokens
        "0.600 +0.100 what 0 Custom · instruct by edits in round 0 · 3 tried: 1 kept, 2 refused @@",
        "+Think.",
        "what 1 edits -0.200 dropped after 6 problems",
        "what 3 edits refused: no graph was written",
        "what 5 edits not raced to the end",
        "The first 6 of 20 fresh problems with another score",
        "problem 11 problem 10 Seed score 0 old 10 Winner score 1 new 10",
        "edits 6 2 2 0 0",
        "kept workflows 60 12,000 0.06 dropped workflows 40 8,000 0.04",
        "final comparison 120 110,000 unknown",
        "round rows loss 2 8 0.25",
        "The pool pool.db holds 2 searches, 9 workflows.",
    )
    assert [words for words in wanted if words not in page.text] == []
    assert ("class", "verdict rose") in page.attributes
    assert page.attributes.count(("class", "graph")) == 2
    # Over the rounds: the best score, and 20 of the seed and the races' problems, summed.
    assert [w for w in page.words if "step 2:" in w] == ["sums, step 2: 0.8", "sums, step 2: 66"]
    # The seed, its child, and that one's child: each one further to the right.
    margins = [value for name, value in page.attributes if name == "style"]
    assert [float(value.split()[1].removesuffix("rem")) for value in margins] == [0.0, 1.3, 2.6]
    assert search_summary(tmp_path).splitlines() == [
        f"The winner is better than the seed: {GAIN}.",
        f"The winner is better than a single call: {GAIN}.",
        "Spent 210 rollouts, 120,000 tokens, 0.5 US dollars; 3 trials came from the pool; "
        "ended by: converged.",
        "",
        "best:       out/best",
        f"report:     {tmp_path / 'report.html'}",
    ]


@pytest.mark.parametrize(
    ("winner", "said", "tone"),
    [
        (LOST, "The winner is no better than the seed: from 0.250 to 0.250 (+0.000", "unclear"),
        ([1.0] * 11 + [0.0] * 29, "The winner is no better than the seed: from 0.250", "unclear"),
        ([0.0] * 40, "The winner is worse than the seed: from 0.250 to 0.000", "fell"),
        # 5 of 14 better: the interval excludes zero, but not the exact sign test.
        ([*LOST[:9], None, *[1.0] * 5], "Too few problems to tell the winner from", "unclear"),
    ],
)
def test_no_gain_is_said_plainly(tmp_path: Path, winner: list[Any], said: str, tone: str) -> None:
    page = page_of(tmp_path, a_search(winner))
    assert said in page.text
    assert ("class", f"verdict {tone}") in page.attributes
    assert said in search_summary(tmp_path)


def test_a_seed_that_nothing_beat_is_its_own_winner(tmp_path: Path) -> None:
    held = a_search()
    held["trees"][0]["winner"] = held["trees"][0]["seed"]
    page = page_of(tmp_path, held)
    assert "No better than the seed: the winner is the seed itself." in page.text
    assert "better than the seed: from" not in page.text  # chance between two runs of one workflow
    assert "better than a single call: from" in page.text
    assert page.attributes.count(("class", "graph")) == 1


PARTS = [
    {"comparison": {}, "finished": False, "why": "stopped"},
    {"comparison": {}, "trees": [], "trained": [], "proposers": {}, "finished": False},
    {"spent": {}, "pool": {}, "proposers": {"model": {}}},
    {"trees": [{"taskset": "sums", "seed": "a", "winner": "a", "workflows": {}, "edges": []}]},
    {"comparison": {"sums": {"columns": {"winner": {}, "seed": {"scores": [1.0]}}}}},
]


@pytest.mark.parametrize("missing", [*PARTS, None])
def test_an_interrupted_search_has_a_page(tmp_path: Path, missing: dict[str, Any] | None) -> None:
    page = page_of(tmp_path, {} if missing is None else {**a_search(), **missing})
    finished = missing is not None and missing.get("finished", True)
    assert ("has not finished: run it again to resume." in page.text) is not finished
    assert ("has not finished" in search_summary(tmp_path)) is not finished
    if missing and not missing.get("comparison", True) and "trees" not in missing:
        assert "Nothing was compared on fresh problems: no gain is shown." in page.text
        assert "what 2" in page.text


def filled(value: Any, text: str) -> Any:
    """Every text of a JSON value replaced, but keys that other parts refer to."""
    if isinstance(value, dict):
        same = ("seed", "winner", "parent", "child", "structure", "select", "refusal", "taskset")
        kept = {k: v if k in same and k != "refusal" else filled(v, text) for k, v in value.items()}
        return {**kept, "refusal": text} if value.get("refusal") else kept
    if isinstance(value, list):
        return [filled(item, text) for item in value]
    return text if isinstance(value, str) and value else value


def with_ablation(columns: dict[str, Any]) -> dict[str, Any]:
    held = a_search()
    held["comparison"]["sums"]["ablation"] = columns
    return held


@pytest.mark.parametrize("hostile", [*HOSTILE, "half a pair: \ud83d", "\x00 \u202e"])
def test_what_models_and_users_wrote_stays_text(tmp_path: Path, hostile: str) -> None:
    held = filled(a_search(), hostile)
    held["proposers"] = {hostile: {"proposed": 1}}
    scores = {"scores": [1.0, 0.0], "tokens": 2, "calls": 1}
    held["comparison"]["sums"]["ablation"] = {"whole": scores, hostile: scores}
    held["comparison"][hostile] = held["comparison"]["sums"]
    page = page_of(tmp_path, held)
    clean = page_of(tmp_path, with_ablation({"whole": scores, "vote": scores}))
    assert {*page.tags} <= {*clean.tags}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    if hostile in HOSTILE:
        assert page.text.count(" ".join(hostile.split())) > 20


def test_what_an_operator_earns(tmp_path: Path) -> None:
    columns = {
        "vote": {"scores": LOST, "tokens": 40_000, "calls": 40},
        "whole": {"scores": WON, "tokens": 80_000, "calls": 120},
        "review": {"scores": WON, "tokens": None},
    }
    rows = [row for row, _ in ablation_rows(columns)]
    assert [row.name for row in rows] == ["whole", "vote", "review"]
    name, score, difference, tokens, calls = rows[1]
    assert (name, score, tokens, calls) == ("vote", 0.25, 1000.0, 1.0)
    assert difference is not None
    bounds = (difference.mean, difference.low, difference.high)
    assert bounds == pytest.approx((-0.5, -0.66194, -0.33806), abs=1e-5)
    assert rows[0].difference is None
    page = page_of(tmp_path, with_ablation(columns))
    assert "vote 0.250 -0.500 -0.662 to -0.338 1,000 1.0 yes" in page.text
    assert "review 0.750 +0.000 +0.000 to +0.000 unknown unknown not shown" in page.text
    assert "what each operator earns 80 unknown" in page.text


@dataclass
class Changes:
    """Proposes one good instruction, and then bad ones."""

    name: str = "scripted"

    async def propose(self, tree: Tree, node: Node, count: int) -> list[Proposal]:
        text = "good" if node is tree.root and not node.visits else f"bad {len(tree.edges)}"
        return [Proposal(state(ONE, solve=text), self.name, "instruct", f"say {text}")]


def test_the_page_reads_what_a_real_search_writes(tmp_path: Path) -> None:
    async def evaluate(taskset: TaskSet, of: WorkflowState, problem: str) -> Trial:
        right = int(problem) < (6 if of.instructions.get("solve") == "good" else 3)
        return Trial(float(right), tokens=10)

    problems = [str(place) for place in range(8)]
    pool = SharedExperiencePool(tmp_path / "pool.db")
    settings = SearchSettings(rounds=3, children=2, race=False)
    tasksets = [TaskSet("sums", state(ONE), problems)]
    search = RLEnhancedOptimizer(pool, tasksets, evaluate, [Changes()], settings)
    asyncio.run(search.run())
    tree = json.loads(json.dumps(search.trees[0].to_json()))
    page = page_of(tmp_path, {"trees": [tree], "pool": pool.describe(), "finished": True})
    assert "0.375 the seed Custom · " in page.text
    assert "0.750 +0.375 say good winner Custom · instruct by scripted in round 1" in page.text
    assert "-solve" not in page.text
    assert "+good" in page.text
