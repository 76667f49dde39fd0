"""The page on written workflows: what it shows, and that what a model wrote stays text."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from fake_run import write_step
from fake_writer import (
    GRAPHS,
    UNKNOWN,
    UNREADABLE,
    VOTE,
    evaluated,
    record,
    refused,
    rollouts,
    write_writer_run,
)
from rich.console import Console
from test_html_report import _HOSTILE, _Page, _page

from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.metrics import append_metrics
from aflow_tune.report.panel import Panel, read_progress

SECTION = "Workflows that the policy wrote"
_, VOTING, _ = GRAPHS


def test_the_section_of_a_run_that_learned(tmp_path: Path) -> None:
    page = _page(write_writer_run(tmp_path / "run"))
    for words in (
        SECTION,
        "Valid graphs on held_out, step 0 against step 20",
        "answered by fallback 3: default workflow",
        "US dollars a solved task",
        "Which workflow answered",
        "Refusals by kind",
        "Operators used",
        "Graph length",
        "Distinct structures",
        "Most frequent structure",
        "Distinct prompts",
        "Cost of a solved task",
        "Why graphs were refused",
        "line 4, column 22: there is no operator Solver",
        "Structures by problem type",
        "Types differ in their most frequent structure",
        "Best graph",
        "Worst valid graph",
        "Worst refused graph",
        "How prompts changed",
        "14 of 14 runs that wrote one",
    ):
        assert words in page.text, words
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) == 6
    assert {"del", "ins"} <= {*page.tags}


def test_a_run_that_was_only_evaluated(tmp_path: Path) -> None:
    evaluated(tmp_path, 0, [record(VOTING), refused()])
    page = _page(tmp_path)
    assert "Best graph" in page.text
    assert "held-out, step 0" in page.text
    assert "How prompts changed" not in page.text


@pytest.mark.parametrize(
    "kept",
    [
        {"valid": True},
        {"valid": False, "level": 7},
        record(None),
        record(code="no Python", score=None),
        refused(UNREADABLE, text="", problem=""),
        record(operators={}, nodes=None, prompts={"": ""}, parts={"": 0}),
    ],
)
def test_records_with_little_in_them_never_break_the_page(tmp_path: Path, kept: Any) -> None:
    rollouts(tmp_path, 1, [(kept, None), (kept, 1.0)])
    rollouts(tmp_path, 2, [(kept, 1.0)])
    evaluated(tmp_path, 0, [kept])
    assert SECTION in _page(tmp_path).text
    assert "Written graphs" in summary_text(tmp_path, tmp_path / "report.html")


@pytest.mark.parametrize(
    "hostile", [*_HOSTILE, "</script>", "<svg onload=x>", "\x1b[31m\u202e\ud83d"]
)
def test_what_a_model_wrote_stays_text(tmp_path: Path, hostile: str) -> None:
    quoted = repr(hostile)
    code = VOTE.replace("solutions=drafts", f"solutions=[{quoted}]").replace("range(3)", quoted)

    def runs(text: str, graph: str) -> list[tuple[Any, float]]:
        said = {
            name: text for name in ("problem", "problem_type", "text", "ending", "reason", "answer")
        }
        refusal = {**UNKNOWN, "kind": text, "message": text}
        written = {
            **said,
            "code": graph,
            "prompts": {text: text},
            "operators": {text: 1},
            "parts": {text: 0.5},
            "structure": text,
        }
        return [
            (record(VOTING, **written), 1.0),
            (record(VOTING, **{**written, "code": graph + "# 2\n"}), 0.0),
            (refused(**{**written, "refusals": [refusal]}), -1.0),
            (refused(**{**said, "code": text, "refusals": [refusal]}), -1.0),
        ]

    pages = []
    for name, text, graph in (("clean", "plain", VOTE), ("run", hostile, code)):
        run_dir = tmp_path / name
        for step in (1, 2):
            rollouts(run_dir, step, runs(text, graph))
        evaluated(run_dir, 0, [kept for kept, _ in runs(text, graph)])
        page = write_report(run_dir).read_text(encoding="utf-8")
        assert "\x1b" not in page
        assert "\u202e" not in page
        pages.append(_Page(page))
    clean, page = pages
    assert {*page.tags} == {*clean.tags}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    if hostile.isprintable():
        assert " ".join(hostile.split()) in page.text


def test_a_long_run_is_shown_within_bounds(tmp_path: Path) -> None:
    """200 steps of 64 runs, each with a graph, a problem and prompts of its own."""
    for step in range(1, 201):
        write_step(tmp_path, step)
        own = [
            record(
                f"{step}.{run}",
                code=VOTE + f"# {step}.{run}",
                problem="p" * 2000,
                prompts={f"i{run}": f"Prompt {step}.{run} " * 40},
                operators={f"O{run}": 1},
                refusals=[{**UNKNOWN, "kind": f"k{run}"}],
                problem_type=f"t{run}",
            )
            for run in range(64)
        ]
        rollouts(tmp_path, step, [(kept, step + 0.0) for kept in own])
    path = write_report(tmp_path)
    assert path.stat().st_size < 600_000
    page = _Page(path.read_text())
    assert "Best graph" in page.text
    assert "64 distinct structures" not in page.text
    assert "320 distinct structures" in page.text


def test_the_panel_shows_valid_graphs_where_there_are_any(tmp_path: Path) -> None:
    append_metrics(tmp_path, "explorer", 1, {"rollout/reward/mean": 0.5})
    assert read_progress(tmp_path, 4).valid_graphs is None
    output = io.StringIO()
    with Panel(tmp_path, 4, Console(file=output, width=120)):
        append_metrics(tmp_path, "explorer", 2, {"rollout/writer/valid/mean": 0.375})
        write_step(tmp_path, 2)
    assert read_progress(tmp_path, 4).valid_graphs == 0.375
    assert "valid graphs 38%" in output.getvalue()
