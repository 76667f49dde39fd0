"""The live panel and its plain lines, on run folders that grow while it looks."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path

import pytest
from fake_run import TASKSET, write_evaluation, write_fake_run, write_step
from rich.console import Console

from aflow_tune.report.panel import Panel, Progress, RunFollower, StepState


def _lines(output: io.StringIO) -> list[str]:
    return [line.partition("] ")[2] for line in output.getvalue().splitlines()]


def test_progress_of_a_whole_run(tmp_path: Path) -> None:
    progress = RunFollower(write_fake_run(tmp_path / "run"), 6).update()
    assert (progress.step, progress.rolled_out) == (6, 6)
    assert progress.reward == pytest.approx(0.8)
    assert progress.health == {"mixed": 0.75, "all best": 0.125, "all worst": 0.125}
    assert progress.failures == {"raised": 1.0}
    assert progress.tokens_per_second == 320.0
    assert [step for step, _ in progress.held_out[TASKSET]] == [0, 3, 6]
    assert progress.evaluated_now == 0


def test_an_evaluation_under_way_is_counted_but_has_no_score_yet(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 0, [1.0, 0.0, 0.0, 0.0])
    write_evaluation(tmp_path, 4, [1.0, 1.0], finished=False)
    progress = RunFollower(tmp_path, 8).update()
    assert progress.held_out == {TASKSET: [(0, 0.25)]}
    assert (progress.evaluated_now, progress.evaluated_of) == (2, 4)
    left_over = RunFollower(tmp_path, 8, since=time.time() + 60).update()
    assert left_over.evaluated_now == 0
    first = RunFollower(tmp_path, 8, sizes={"other": 5}).update()
    assert first.evaluated_of == 4


def test_the_time_left_comes_from_the_latest_steps() -> None:
    def state(step: int, seconds: float) -> StepState:
        return StepState(step, seconds, None, {}, None, {})

    progress = Progress(total=20, steps=[state(1, 110.0), state(2, 120.0)])
    # Ten seconds a step, 18 to go, three of the next one already gone.
    assert progress.seconds_left(now=123.0, since=100.0) == pytest.approx(177.0)
    # An evaluation at the start is no part of the first step.
    progress = Progress(total=3, steps=[state(1, 110.0)], evaluated_at={0: 105.0})
    assert progress.seconds_left(now=110.0, since=0.0) == pytest.approx(10.0)
    # Of a resumed run only its own steps count.
    progress = Progress(total=9, steps=[state(4, 50.0), state(5, 206.0)])
    assert progress.seconds_left(now=206.0, since=200.0, start=4) == pytest.approx(24.0)
    assert Progress(total=9).seconds_left(now=1.0, since=0.0) is None


def test_plain_lines_tell_every_step_once(tmp_path: Path) -> None:
    output = io.StringIO()
    with Panel(tmp_path, 4, Console(file=output, width=40)) as panel:
        panel.phase("loading the model")
        write_evaluation(tmp_path, 0, [1.0, 0.0, 0.0, 0.0])
        panel.phase("rolling out")
        write_step(tmp_path, 1, 0.25)
        write_step(tmp_path, 2, 0.5, timed_out=3.0)
        panel._update()
        panel._update()
        panel.phase("training")
    lines = _lines(output)
    assert lines[0] == "loading the model"
    assert lines[1] == f"held-out 0.250 at step 0 [{TASKSET}]"
    assert lines[2].startswith(
        "step 1/4  reward 0.250 (75% mixed, 12% all best, 12% all worst)  held-out 0.250  320 tok/s"
    )
    assert lines[3].startswith("step 2/4  reward 0.500")
    assert "failed 3 timed_out" in lines[3]
    assert lines[-1] == "done"
    assert len(lines) == 5
    assert "\x1b" not in output.getvalue()


def test_a_resumed_run_does_not_tell_old_news(tmp_path: Path) -> None:
    write_fake_run(tmp_path / "run", steps=3, evaluate_at=(0,))
    output = io.StringIO()
    with Panel(tmp_path / "run", 5, Console(file=output)):
        write_step(tmp_path / "run", 4, 0.9)
    assert [line.split()[1] for line in _lines(output) if line.startswith("step")] == ["4/5"]


@pytest.mark.parametrize("width", [24, 70, 200])
def test_the_live_panel_shows_the_state(tmp_path: Path, width: int) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width)
    with Panel(tmp_path, 4, console) as panel:
        panel.phase("rolling out and training")
        write_evaluation(tmp_path, 0, [1.0, 0.0])
        write_step(tmp_path, 1, 0.25, raised=2.0)
        panel.warn("[bold]not markup")
        panel._update()
    text = output.getvalue()
    assert "0.250" in text
    assert "0.500" in text
    if width >= 70:
        assert "1 of 4" in text
        assert "75% mixed" in text
        assert "2 raised" in text
        assert "320 tokens/s" in text
        assert "[bold]not markup" in text
    assert text.rstrip().endswith(("╯", "\x1b[?25h"))


def test_warnings_of_the_logs_are_shown_from_now_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "explorer.log").write_text("WARNING 11-21 05:54:34 [queue.py:349] old news\n")
    output = io.StringIO()
    with Panel(tmp_path, 4, Console(file=output)) as panel:
        with (log / "explorer.log").open("a") as file:
            file.write("INFO 11-21 05:54:34 [a.py:1] fine\n")
            file.write("WARNING 11-21 05:54:34 [queue.py:349] Save experiences in x\n")
            file.write("ERROR 11-21 05:54:34 [b.py:2] the disk is full\n")
        panel._update()
        (log / "driver.log").write_text("2026-11-21 05:54 WARNING trinity c.py:3 slow network\n")
        panel._update()
    assert [line for line in _lines(output) if "warning" in line] == [
        "warning: the disk is full",
        "warning: slow network",
    ]


class _Broken(io.StringIO):
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
    with Panel(tmp_path, 4, Console(file=_Broken(), force_terminal=terminal)) as panel:
        panel.phase("training")
        panel.warn("nobody reads this")
        panel._update()


def test_looking_costs_what_is_new_not_what_is_there(tmp_path: Path) -> None:
    write_fake_run(tmp_path / "run")
    follower = RunFollower(tmp_path / "run", 6)
    follower.update()
    path = tmp_path / "run" / "metrics.jsonl"
    before = os.stat(path)
    # What was read before is not looked at again: garbling it changes nothing.
    path.write_bytes(b"x" * before.st_size)
    write_step(tmp_path / "run", 7)
    assert follower.update().step == 7
