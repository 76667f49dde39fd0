"""The pages of a run and of a harvest: what they show, and that nothing foreign acts in them."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from fake_run import TASKSET, call, write_evaluation, write_fake_run, write_step

from aflow_tune.report.charts import Curve, Point, line_chart
from aflow_tune.report.html import COUNTS_FILE, summary_text, write_report
from aflow_tune.report.page import MOST_CHARACTERS, plain_text
from aflow_tune.report.records import read_records, record_path

_VOID = {"meta", "br", "link", "input", "img"}


class Page(HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def page_of(run_dir: Path, *arguments: object) -> Page:
    return Page(write_report(run_dir, *arguments).read_text(encoding="utf-8"))  # type: ignore[arg-type]


def test_a_run_that_learned(tmp_path: Path) -> None:
    run_dir = write_fake_run(tmp_path / "my run")
    change = SimpleNamespace(key="engine", before="auto", after="local", why="no CUDA device")
    settings = {
        "model.model_path": "smollm2-135m",
        "model.max_response_tokens": 7,
        "report.score": "correct",
        "hf_token": "hf_123",
        "monitor.monitor_args.api_key": "sk-123",
        "workflow_func": len,
    }
    page = page_of(run_dir, settings, [change])
    wanted = (
        "my run",
        "Held-out score rose from",
        "smollm2-135m",
        "max_response_tokens",
        "no CUDA device",
        f"Held-out score: {TASKSET}",
        "Reward of the rollouts",
        "Health of the groups",
        "Rollouts that failed in training",
        "The same items before and after",
        "What to do next",
    )
    assert [words for words in wanted if words not in page.text] == []
    assert [words for words in ("sk-123", "hf_123", "workflow_func") if words in page.text] == []
    assert ("class", "verdict rose") in page.attributes
    lines = summary_text(run_dir, run_dir / "report.html").splitlines()
    assert lines[0].startswith("Held-out score rose from")
    assert f"model:      {run_dir}/export/merged" in lines
    assert f"checkpoint: {run_dir}/global_step_6" in lines
    assert f"curves:     tensorboard --logdir '{run_dir}/monitor'" in lines


HOSTILE = [
    "</pre><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "<!-- ",
    "javascript:alert(1)",
    "]]></style><style>*{display:none}",
]


@pytest.mark.parametrize("hostile", HOSTILE)
def test_what_models_and_users_wrote_stays_text(tmp_path: Path, hostile: str) -> None:
    clean = write_fake_run(tmp_path / "clean")
    run_dir = write_fake_run(tmp_path / "run")
    said = call(hostile, hostile, hostile)
    said["messages"].append({"role": hostile, "content": [{"type": "text", "text": hostile}]})
    taskset = hostile.replace("/", "_")
    for step in (0, 6):
        write_evaluation(
            run_dir, step, [0.0, None], taskset=taskset, transcript=[said], failure=hostile
        )
    write_step(run_dir, 6, **{hostile: 2.0})
    change = SimpleNamespace(key=hostile, before=hostile, after=hostile, why=hostile)
    page = page_of(run_dir, {"name": hostile, hostile: 1}, [change])
    assert {*page.tags} == {*page_of(clean, {"name": "x"}, [change]).tags}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert " ".join(hostile.split()) in page.text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([{"type": "text", "text": "a"}, {"url": "b"}], 'a\n{"url": "b"}'),
        ("a\x00b\x1b[31m\x7f", "a␀b␛[31m␡"),
        ("abc\u202edef\ud83d", "abc\\u202edef\\ud83d"),
        (3, "3"),
        (
            "x" * (MOST_CHARACTERS + 5),
            f"{'x' * 2000}\n[... 5 characters left out ...]\n{'x' * 2000}",
        ),
    ],
)
def test_texts_of_any_shape_become_plain_text(content: Any, text: str) -> None:
    assert plain_text(content) == text


def test_odd_transcripts_never_break_the_page(tmp_path: Path) -> None:
    tool_calls = [{"function": {"name": "f"}}, 1]
    transcript: list[Any] = [
        {},
        {"caller": None, "messages": None, "response": None, "tokens": "many"},
        {"messages": ["text", {"content": 3}, {"tool_calls": tool_calls}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": "none"}]},
        "not a call",
        call("half a pair: \ud83d"),
    ]
    for step in (0, 4):
        write_evaluation(tmp_path, step, [0.0, 1.0])
        path = record_path(tmp_path / "evaluations", TASKSET, step)
        records = [replace(record, transcript=transcript) for record in read_records(path)]
        path.write_bytes(b"".join(record.to_line() for record in records))
    assert "The same items before and after" in page_of(tmp_path).text


def test_empty_and_damaged_runs_have_a_page(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "nothing was shown about learning" in page_of(tmp_path / "empty").text
    assert "Curves" not in page_of(tmp_path / "empty").text
    run_dir = write_fake_run(tmp_path / "run")
    path = record_path(run_dir / "evaluations", TASKSET, 0)
    path.write_text("damaged\n" + path.read_text())
    assert "cannot be read" in page_of(run_dir).text
    assert "Reward of the rollouts" in page_of(run_dir).text
    assert "cannot be read" in summary_text(run_dir, run_dir / "report.html")


def test_charts_are_well_formed_and_show_their_values() -> None:
    points = [Point(0, 0.1, 0.0, 0.2), Point(10, 0.7, 0.6, 0.8)]
    svg = line_chart("a < b", [Curve('x "quoted" <b>', points)], (0, 10), (0.0, 1.0))
    root = ElementTree.fromstring(svg)
    dots = [node for node in root if node.get("class", "").startswith("dot")]
    assert [dot.find("title").text for dot in dots] == [  # type: ignore[union-attr]
        'x "quoted" <b>, step 0: 0.1 (0 to 0.2)',
        'x "quoted" <b>, step 10: 0.7 (0.6 to 0.8)',
    ]
    # Plot area: x from 44 to 391, y from 161 (0) to 9 (1).
    assert (dots[1].get("cx"), dots[1].get("cy")) == ("391.0", f"{161 - 0.7 * 152:.1f}")


def test_the_counts_of_a_harvest_stand_in_reading_order(tmp_path: Path) -> None:
    by = {"kept_by_source": {"templates": 1, "teacher": 2}, "kept_by_structure": {"Custom": 3}}
    counts = {"problems": 4, "kept": 3, **by, "executor": {"calls": 7, "tokens": 90}}
    (tmp_path / COUNTS_FILE).write_text(json.dumps(counts))
    page = page_of(tmp_path, {"mode": "harvest", "algorithm.algorithm_type": "ppo"}).text
    told = (
        "What was harvested problems 4 pairs kept 3 pairs from teacher 2 pairs from templates 1 "
        "pairs of the structure Custom 3 calls of the executor 7 tokens of the executor 90 "
    )
    assert told in page
    assert "ppo" not in page.partition("Audit")[0]
