"""`mode: bench` on the local engine: which weights, resumed, as a guest, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from project import WORKFLOW, run_dir, write_project

from aflow_tune.errors import AlreadyFinished, BadInput, BudgetReached, RunFailed
from aflow_tune.tuning import run_config


def _records(folder: Path, step: int) -> list[dict[str, Any]]:
    path = folder / "evaluations" / "held_out" / f"step_{step}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda record: (record["item"], record["run"]))


def _scores(folder: Path, step: int) -> list[float]:
    return [record["score"] for record in _records(folder, step)]


def test_a_bench_of_its_own_goes_on_from_its_last_record(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    with pytest.raises(BudgetReached, match="The same command goes on"):
        run_config(config, ["mode=bench", "budget.calls=5", "local.max_batch=1"])
    assert json.loads((run_dir(tmp_path) / "run.json").read_text())["status"] == "interrupted"
    kept = [r for r in _records(run_dir(tmp_path), 0) if r["failure"] is None]
    assert 0 < len(kept) < 4
    result = run_config(config, ["mode=bench"])
    assert (result.steps_done, result.checkpoints) == (0, ())
    latest = {record["item"]: record for record in _records(run_dir(tmp_path), 0)}
    assert sorted(latest) == [0, 1, 2, 3]
    assert [latest[record["item"]] for record in kept] == kept
    scores = [record["score"] for record in latest.values()]
    assert result.metrics["eval/held_out/score/mean"] == pytest.approx(sum(scores) / 4)
    assert result.metrics["eval/held_out/finished_task_count"] == 4
    assert result.report is not None
    with pytest.raises(AlreadyFinished, match="is finished"):
        run_config(config, ["mode=bench"])


def test_a_guest_evaluates_what_the_training_run_did_not(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """The training run evaluated steps 0 and 2; the bench adds step 1, and touches no state."""
    config = write_project(tmp_path, tiny_model_dir)
    run_config(config, inline=True)
    folder = run_dir(tmp_path)
    state, before = (folder / "run.json").read_text(), _scores(folder, 2)
    assert not (folder / "evaluations" / "held_out" / "step_1.jsonl").exists()
    run_config(config, ["mode=bench"])
    assert len(_scores(folder, 1)) == 4
    assert _scores(folder, 2) == before
    assert (folder / "run.json").read_text() == state
    with pytest.raises(AlreadyFinished, match="evaluated already"):
        run_config(config, ["mode=bench"])
    with pytest.raises(BadInput, match="made with other settings") as caught:
        run_config(config, ["mode=bench", "seed=4"])
    assert [fault.where for fault in caught.value.faults] == ["seed"]


def test_the_newest_checkpoint_alone(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    newest = ["mode=bench", "explorer.bench_on_latest_checkpoint=true"]
    with pytest.raises(BadInput, match="nothing to evaluate"):
        run_config(config, [*newest, "name=empty"])
    run_config(config, ["explorer.eval_on_startup=false"], inline=True)
    folder = run_dir(tmp_path)
    trained = _scores(folder, 2)
    (folder / "evaluations" / "held_out" / "step_2.jsonl").unlink()
    run_config(config, newest)
    assert _scores(folder, 2) == trained
    assert not (folder / "evaluations" / "held_out" / "step_0.jsonl").exists()


def test_a_bench_in_which_everything_fails_is_no_success(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    broken = WORKFLOW.replace("share = sum", 'raise LookupError("no such planet")\n    share = sum')
    config = write_project(tmp_path, tiny_model_dir, workflow=broken)
    with pytest.raises(RunFailed, match="held_out at step 0 failed"):
        run_config(config, ["mode=bench"])
