"""Whole runs on a tiny random model: inline and through Ray, resumed, failed, refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from project import HELD, WORKFLOW, run_dir, write_project

from aflow_tune.errors import AlreadyFinished, BadInput, BudgetReached, RunFailed
from aflow_tune.models import Spend
from aflow_tune.tuning import run_config, tune


def _metrics(root: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Metrics by role and step; the last line wins."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for line in (run_dir(root) / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found.setdefault((entry["role"], entry["step"]), {}).update(entry["metrics"])
    return found


def _evaluation(root: Path, step: int) -> list[dict[str, Any]]:
    path = run_dir(root) / "evaluations" / "held_out" / f"step_{step}.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(records, key=lambda record: (record["item"], record["run"]))


def _texts(root: Path, step: int) -> list[str]:
    return [call["response"] for record in _evaluation(root, step) for call in record["transcript"]]


def _weights(root: Path, step: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(run_dir(root) / f"global_step_{step}" / "weights.safetensors")


def _same_weights(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        bool((first[name] == second[name]).all()) for name in first
    )


def test_an_inline_run_trains_evaluates_and_reports(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    result = run_config(config, inline=True)

    assert result.steps_done == 2
    assert result.run_dir == run_dir(tmp_path)
    assert [checkpoint.step for checkpoint in result.checkpoints] == [1, 2]
    assert result.report is not None
    assert "<html" in result.report.read_text()
    metrics = _metrics(tmp_path)
    assert 0 < metrics["explorer", 1]["rollout/reward/mean"] < 1
    assert metrics["trainer", 2]["actor/grad_norm"] > 0
    for step in (0, 2):
        records = _evaluation(tmp_path, step)
        assert [record["item"] for record in records] == [0, 1, 2, 3]
        assert all(record["score"] == record["metrics"]["letters"] for record in records)
    callers = [call["caller"] for call in _evaluation(tmp_path, 0)[0]["transcript"]]
    assert callers == ["first", "second"]
    assert (run_dir(tmp_path) / "export" / "adapter" / "adapter_config.json").exists()
    assert (run_dir(tmp_path) / "export" / "merged" / "config.json").exists()
    assert (run_dir(tmp_path) / "resolved.yaml").exists()

    with pytest.raises(AlreadyFinished):
        run_config(config, inline=True)
    with pytest.raises(BadInput, match="another configuration") as caught:
        run_config(config, ["seed=4"], inline=True)
    assert [fault.where for fault in caught.value.faults] == ["seed"]
    longer = run_config(config, ["buffer.total_steps=3"], inline=True)
    assert longer.steps_done == 3


def test_tune_works_inside_a_running_event_loop(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=1)
    namespace: dict[str, Any] = {}
    exec(compile(WORKFLOW, "<notebook>", "exec"), namespace)

    async def notebook() -> int:
        overrides = ["explorer.eval_interval=1"]
        return tune(namespace["two_calls"], config, inline=True, overrides=overrides).steps_done

    assert asyncio.run(notebook()) == 1


def test_a_workflow_that_always_fails_stops_with_its_first_traceback(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    broken = WORKFLOW.replace("share = sum", 'raise LookupError("no such planet")\n    share = sum')
    config = write_project(tmp_path, tiny_model_dir, workflow=broken)
    with pytest.raises(RunFailed, match="no such planet") as caught:
        run_config(config, ["explorer.eval_on_startup=false"], inline=True)
    assert str(caught.value).count("Traceback") == 1
    state = json.loads((run_dir(tmp_path) / "run.json").read_text())
    assert state["status"] == "failed"
    with pytest.raises(RunFailed, match="held_out at step 0 failed"):
        run_config(config, ["mode=bench", "name=bench"])


def test_an_evaluation_that_was_cut_off_is_made_again(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    run_config(config, inline=True)
    # As a kill during the evaluation of step 2 leaves it: half of the records, no closing line.
    records = run_dir(tmp_path) / "evaluations" / "held_out" / "step_2.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    records.write_text("".join(lines[:2]))
    metrics = run_dir(tmp_path) / "metrics.jsonl"
    kept = [line for line in metrics.read_text().splitlines() if '"time/eval"' not in line]
    metrics.write_text("".join(f"{line}\n" for line in kept))

    overrides = ["buffer.total_steps=3", "explorer.eval_interval=2"]
    assert run_config(config, overrides, inline=True).steps_done == 3
    assert [record["item"] for record in _evaluation(tmp_path, 2)] == [0, 1, 2, 3]


def _start(config: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "aflow_tune.cli", str(config), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _wait_for(path: Path, process: subprocess.Popen, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.1)


def _child_named(process: subprocess.Popen, name: str, seconds: float = 600) -> psutil.Process:
    """A process below that calls itself so."""
    deadline = time.monotonic() + seconds
    while True:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if name in " ".join(child.cmdline()):
                    return child
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no process {name}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three commands, each of which imports everything anew
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_inline_run_resumes_to_the_uninterrupted_result(
    tmp_path: Path, tiny_model_dir: Path, how: signal.Signals
) -> None:
    words = ("--inline", "deterministic=true", "buffer.total_steps=4")
    whole = write_project(tmp_path / "whole", tiny_model_dir)
    process = _start(whole, *words)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output

    parts = write_project(tmp_path / "parts", tiny_model_dir, workflow=HELD)
    saved, held = run_dir(tmp_path / "parts") / "global_step_2", tmp_path / "parts" / "held"
    held.symlink_to(saved)  # so that the run cannot be over before it is stopped
    process = _start(parts, *words)
    _wait_for(saved, process)
    process.send_signal(how)
    held.unlink()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == (3 if how is signal.SIGINT else -signal.SIGKILL), output
    process = _start(parts, *words)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "resuming" in output

    assert _same_weights(_weights(tmp_path / "whole", 4), _weights(tmp_path / "parts", 4))
    assert _texts(tmp_path / "whole", 4) == _texts(tmp_path / "parts", 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three commands, two of which start a Ray
def test_a_killed_run_through_ray_resumes_to_what_an_inline_run_comes_to(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Token for token and bit for bit; the kill leaves no process. Nor does it matter that the
    process in which the workflows run is killed: its tasks run again in another one."""
    words = ["deterministic=true", "buffer.total_steps=4", "explorer.eval_interval=1"]
    parts, whole = tmp_path / "split", tmp_path / "inline"
    saved, held = run_dir(parts) / "global_step_2", tmp_path / "held"
    # Imported only when a run gets there, in a worker that never saw this folder.
    late = HELD.replace('Path(__file__).with_name("held")', f"Path({str(held)!r})")
    late = late.replace("    share = sum", "    import late_helper\n\n    share = sum")
    late = late.replace(
        "record_metrics(letters=share)", "record_metrics(letters=late_helper.same(share))"
    )
    configs = [write_project(root, tiny_model_dir, workflow=late) for root in (parts, whole)]
    for root in (parts, whole):
        (root / "late_helper.py").write_text("def same(value):\n    return value\n")

    held.symlink_to(saved)  # so that the run cannot be over before it is killed
    process = _start(configs[0], *words)
    _wait_for(saved, process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    held.unlink()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert [child for child in alive if child.is_running()] == []  # not another of its number

    held.symlink_to(configs[0])  # so that its process dies with runs under way
    process = _start(configs[0], *words)
    runner = _child_named(process, "ray::LocalRunner.run_task")
    runner.kill()
    held.unlink()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    process = _start(configs[1], "--inline", *words)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output

    split, inline = _metrics(parts), _metrics(whole)
    assert {step for role, step in split if role == "trainer"} == {1, 2, 3, 4}
    for step in range(5):
        assert _texts(parts, step) == _texts(whole, step)
    log = (run_dir(parts) / "log" / "explorer_rollout_coordinator.log").read_text()
    assert "the process that runs workflows died" in log
    for step in range(1, 5):
        # The means are summed in the order in which tasks finished: equal but for the last bit.
        reward = split["explorer", step]["rollout/reward/mean"]
        assert reward == pytest.approx(inline["explorer", step]["rollout/reward/mean"], abs=1e-12)
    assert _same_weights(_weights(parts, 4), _weights(whole, 4))


# A budget that ends within a run

FIRST_EVALUATION, STEP = 4 * 2, 2 * 4 * 2
"""Calls: four held-out items, then two tasks by four runs; two calls each."""
SWALLOWS = WORKFLOW.replace(
    'with caller("second"):\n        second = await model(',
    "try:\n        second = await model(",
).replace(
    "    text += text_of(second.content)",
    "    except Exception:\n        return 1.0\n    text += text_of(second.content)",
)
"""Makes a reward of a call that the budget refused."""


def _spend(root: Path) -> Spend:
    return Spend(path=run_dir(root) / "account.sqlite")


@pytest.mark.parametrize(
    ("inline", "workflow"),
    [(True, WORKFLOW), (True, SWALLOWS), pytest.param(False, SWALLOWS, marks=pytest.mark.slow)],
    ids=["raises", "swallows", "swallows-ray"],
)
def test_a_limit_on_calls_is_kept_to_the_call(
    tmp_path: Path, tiny_model_dir: Path, inline: bool, workflow: str
) -> None:
    config = write_project(tmp_path, tiny_model_dir, workflow=workflow)
    limit = FIRST_EVALUATION + STEP + 5
    with pytest.raises(BudgetReached, match=rf"calls: {limit} of {limit}.*step 1 of 2.*saved"):
        run_config(config, [f"budget.calls={limit}"], inline=inline)
    assert _spend(tmp_path).spent().calls == limit
    assert _spend(tmp_path).spent("policy").calls == limit
    assert json.loads((run_dir(tmp_path) / "run.json").read_text())["status"] == "interrupted"

    done = run_config(config, ["budget.calls=1000"], inline=inline)
    assert [checkpoint.step for checkpoint in done.checkpoints] == [1, 2]
    # The second step was made again from its beginning, and the last evaluation once.
    assert _spend(tmp_path).spent().calls == limit + STEP + FIRST_EVALUATION


# `mode: bench`


def _scores(root: Path, step: int) -> list[float]:
    return [record["score"] for record in _evaluation(root, step)]


def test_a_bench_of_its_own_goes_on_from_its_last_record(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    with pytest.raises(BudgetReached, match="same command"):
        run_config(config, ["mode=bench", "budget.calls=5", "local.max_batch=1"])
    assert json.loads((run_dir(tmp_path) / "run.json").read_text())["status"] == "interrupted"
    kept = [r for r in _evaluation(tmp_path, 0) if r["failure"] is None]
    assert 0 < len(kept) < 4
    result = run_config(config, ["mode=bench"])
    assert (result.steps_done, result.checkpoints) == (0, ())
    latest = {record["item"]: record for record in _evaluation(tmp_path, 0)}
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
    state, before = (folder / "run.json").read_text(), _scores(tmp_path, 2)
    assert not (folder / "evaluations" / "held_out" / "step_1.jsonl").exists()
    run_config(config, ["mode=bench"])
    assert len(_scores(tmp_path, 1)) == 4
    assert _scores(tmp_path, 2) == before
    assert (folder / "run.json").read_text() == state
    with pytest.raises(AlreadyFinished, match="evaluated already"):
        run_config(config, ["mode=bench"])
    with pytest.raises(BadInput, match="made with other settings") as caught:
        run_config(config, ["mode=bench", "seed=4"])
    assert [fault.where for fault in caught.value.faults] == ["seed"]
