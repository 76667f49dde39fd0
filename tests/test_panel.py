"""The live panel and its plain lines, on run folders that grow while it looks."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest
from fake_run import TASKSET, write_evaluation, write_fake_run, write_step
from rich.console import Console

from aflow_tune.report.panel import Panel, RunFollower, seconds_left
from aflow_tune.report.quantities import REWARD


def lines_of(output: io.StringIO) -> list[str]:
    return [line.partition("] ")[2] for line in output.getvalue().splitlines()]


def test_progress_of_a_whole_run(tmp_path: Path) -> None:
    run = RunFollower(write_fake_run(tmp_path / "run")).update()
    assert (run.step, max(run.rewards), run.evaluating) == (6, 6, 0)
    assert run.now[REWARD] == pytest.approx(0.8)
    assert run.failures == {"raised": 1.0}
    assert [step for step, _ in run.held_out[TASKSET]] == [0, 3, 6]
    # What was read before is not looked at again: garbling it changes nothing.
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(b"x" * os.stat(path).st_size)
    write_step(tmp_path / "run", 7)
    assert run.update().step == 7


def test_the_time_left_comes_from_the_latest_steps() -> None:
    # Ten seconds a step, 18 to go, three of the next one already gone.
    assert seconds_left({0: 100.0, 1: 110.0, 2: 120.0}, 20, now=123.0) == pytest.approx(177.0)
    ended = {0: 0.0, **{step: 100.0 + step for step in range(1, 21)}}
    assert seconds_left(ended, 30, now=120.0) == pytest.approx(10.0)
    assert seconds_left({0: 100.0}, 9, now=101.0) is None


@pytest.mark.parametrize("width", [None, 24, 200], ids=["lines", "narrow", "wide"])
def test_the_state_is_shown_and_old_news_is_not(tmp_path: Path, width: int | None) -> None:
    write_step(tmp_path, 1, 0.25)  # a resumed run
    output = io.StringIO()
    console = Console(file=output, force_terminal=width is not None, width=width or 40)
    with Panel(tmp_path, 4, console) as panel:
        panel.phase("loading the model")
        write_evaluation(tmp_path, 1, [1.0, 0.0, 0.0, 0.0])
        panel.phase("rolling out")
        write_step(tmp_path, 2, 0.5, timed_out=3.0)
        panel.phase("[bold]not markup")
        panel.update()
        panel.update()
    text = output.getvalue()
    told = ["0.500", "0.250"]
    if width is None:
        first, *between, last = lines_of(output)
        assert (first, last) == ("loading the model", "done")
        phase, held_out, step = sorted(between)  # nothing is told twice
        assert held_out == f"held-out 0.250 at step 1 [{TASKSET}]"
        assert step.startswith("step 2/4  reward 0.500 (75% mixed, 12% all best, 12% all worst)")
        assert phase == "[bold]not markup"
        assert "\x1b" not in text
        told += ["failed 3 timed_out", "320 tokens/s"]
    elif width > 24:
        told += ["2 of 4", "75% mixed", "3 timed_out", "320 tokens/s"]
    assert [word for word in told if word not in text] == []


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("the reader went away")


@pytest.mark.parametrize("terminal", [True, False])
def test_neither_broken_files_nor_a_closed_terminal_harm_the_run(
    tmp_path: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # rich closes standard output when its reader is gone: not that of the test session.
    monkeypatch.setattr(sys, "stdout", (tmp_path / "stdout").open("w"))
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "evaluations").write_text("not a folder")
    with Panel(tmp_path, 4, Console(file=Broken(), force_terminal=terminal)) as panel:
        panel.phase("nobody reads this")
        panel.update()
