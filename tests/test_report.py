"""Records, metrics, comparison, panel and report page, on written run folders."""

from __future__ import annotations

import io
import json
import multiprocessing
from pathlib import Path

import pytest
from rich.console import Console

from aflow_tune.report.evaluation import compare, first_and_last, load_evaluations
from aflow_tune.report.html import summary_text, write_report
from aflow_tune.report.metrics import append_metrics, read_metrics, rewind_metrics, series
from aflow_tune.report.panel import Panel, read_progress
from aflow_tune.report.records import EvalRecord, append_record, read_records, record_path


def _record(run_dir: Path, step: int, item: int, score: float | None, **more: object) -> None:
    failure = None if score is not None else "raised"
    record = EvalRecord(step, "held_out", item, 0, score, score, failure, **more)  # type: ignore[arg-type]
    append_record(run_dir / "evaluations", record)


def _write_many(arguments: tuple[Path, int]) -> None:
    run_dir, start = arguments
    for item in range(start, start + 50):
        _record(run_dir, 0, item, 1.0, metrics={"padding": 0.123456789})


def test_concurrent_writers_never_mix_their_lines(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(_write_many, [(tmp_path, 0), (tmp_path, 50)])
    records = read_records(record_path(tmp_path / "evaluations", "held_out", 0))
    assert sorted(record.item for record in records) == list(range(100))


def test_a_torn_last_line_is_passed_over(tmp_path: Path) -> None:
    _record(tmp_path, 0, 0, 1.0)
    path = record_path(tmp_path / "evaluations", "held_out", 0)
    path.write_text(path.read_text() + '{"step": 0, "tasks')
    assert len(read_records(path)) == 1
    append_metrics(tmp_path, "trainer", 1, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1, "role"')
    assert len(read_metrics(tmp_path)) == 1


def test_metrics_keep_numbers_and_later_lines_win(tmp_path: Path) -> None:
    append_metrics(tmp_path, "trainer", 1, {"a": 1, "b": float("nan"), "c": "text", "d": True})
    append_metrics(tmp_path, "trainer", 1, {"a": 2})
    append_metrics(tmp_path, "trainer", 2, {"a": 3})
    lines = read_metrics(tmp_path)
    assert lines[0].metrics == {"a": 1.0}
    assert series(lines, "a") == [(1, 2.0), (2, 3.0)]
    rewind_metrics(tmp_path, 1)
    assert series(read_metrics(tmp_path), "a") == [(1, 2.0)]


def test_the_comparison_pairs_items_and_leaves_failures_out(tmp_path: Path) -> None:
    for item, (before, after) in enumerate([(0.0, 1.0), (0.0, 1.0), (1.0, 1.0), (None, 1.0)]):
        _record(tmp_path, 0, item, before)
        _record(tmp_path, 8, item, after)
    steps = load_evaluations(tmp_path)["held_out"]
    comparison = compare(steps[0], steps[8])
    assert comparison is not None
    assert comparison.mean_before == pytest.approx(1 / 3)
    assert comparison.mean_after == 1.0
    assert comparison.difference.mean == pytest.approx(2 / 3)
    assert comparison.difference.count == 3
    assert comparison.left_out == 1
    assert steps[0].failed_runs == 1
    assert "includes zero" in comparison.verdict()


def test_an_improvement_and_a_loss_are_named(tmp_path: Path) -> None:
    for item in range(40):
        _record(tmp_path / "up", 0, item, float(item % 4 == 0))
        _record(tmp_path / "up", 5, item, float(item % 4 != 0))
        _record(tmp_path / "down", 0, item, float(item % 4 != 0))
        _record(tmp_path / "down", 5, item, float(item % 4 == 0))
    assert "rose from 0.250 to 0.750" in first_and_last(tmp_path / "up")["held_out"].verdict()
    assert "fell from 0.750 to 0.250" in first_and_last(tmp_path / "down")["held_out"].verdict()


def test_the_report_escapes_what_a_model_wrote(tmp_path: Path) -> None:
    hostile = "</pre><script>alert(1)</script>"
    call = {
        "caller": hostile,
        "messages": [{"role": "user", "content": hostile}],
        "response": hostile,
        "tokens": 3,
    }
    for step in (0, 4):
        for item in range(3):
            _record(tmp_path, step, item, float(step > 0), transcript=[call])
    append_metrics(tmp_path, "explorer", 1, {"rollout/reward/mean": 0.5})
    append_metrics(tmp_path, "explorer", 2, {"rollout/reward/mean": 0.7})
    text = write_report(tmp_path, {"name": hostile}).read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "<svg" in text
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert "rose from 0.000 to 1.000" in text
    assert "report.html" in summary_text(tmp_path, tmp_path / "report.html")


def test_a_run_without_evaluations_claims_nothing(tmp_path: Path) -> None:
    text = write_report(tmp_path).read_text()
    assert "shows nothing about learning" in text
    assert "nothing was shown" in summary_text(tmp_path, tmp_path / "report.html")


def test_progress_shows_whole_evaluations_only(tmp_path: Path) -> None:
    for item in range(4):
        _record(tmp_path, 0, item, 0.5)
    assert read_progress(tmp_path, 10).held_out == {"held_out": []}
    assert read_progress(tmp_path, 10).evaluated_now == 4
    append_metrics(tmp_path, "explorer", 0, {"eval/held_out/finished_task_count": 4})
    append_metrics(tmp_path, "explorer", 1, {"rollout/failure/raised/sum": 2})
    append_metrics(tmp_path, "trainer", 1, {"actor/grad_norm": 1.0})
    progress = read_progress(tmp_path, 10)
    assert progress.held_out == {"held_out": [(0, 0.5)]}
    assert progress.step == 1
    assert progress.failures == {"raised": 2.0}


@pytest.mark.parametrize("terminal", [True, False])
def test_the_panel_shows_the_state_on_terminals_and_in_logs(tmp_path: Path, terminal: bool) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=70)
    with Panel(tmp_path, 4, console) as panel:
        panel.phase("loading the model")
        panel._update()
        append_metrics(
            tmp_path,
            "explorer",
            1,
            {"rollout/reward/mean": 0.25, "experience_pipeline/group/frac_mixed": 0.75},
        )
        append_metrics(tmp_path, "trainer", 1, {"actor/grad_norm": 1.0})
    text = output.getvalue()
    assert "0.250" in text
    assert "75% mixed" in text
    assert ("step 1/4" in text) is not terminal


def test_a_broken_file_never_harms_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with Panel(tmp_path, 4, Console(file=io.StringIO())) as panel:
        panel.phase("training")


def test_records_are_plain_json_lines(tmp_path: Path) -> None:
    _record(tmp_path, 3, 7, 0.5)
    line = record_path(tmp_path / "evaluations", "held_out", 3).read_text().strip()
    assert json.loads(line)["item"] == 7
