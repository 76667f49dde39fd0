"""What a run meets on the way: a full disk, damaged files, an API that is away, a straggler.

Whole runs in one process on the tiny model. Kills at random moments: `benchmarks/kills.py`, and
`test_run.py` for one of each kind.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from faulty_server import FaultyServer, Request, Step
from project import WORKFLOW, run_dir, write_project

from aflow_tune import cli
from aflow_tune.engines.local.checkpoint import verify_checkpoint
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.runs.folder import read_state
from aflow_tune.runs.listing import State, describe
from aflow_tune.tuning import run_config

QUIET = ["explorer.eval_on_startup=false", "buffer.explorer_input.eval_tasksets=[]"]
ONE_STEP = [*QUIET, "explorer.eval_interval=1"]  # no more than a run has steps
"""Without evaluations these runs take half the time."""


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in run.glob("global_step_*"))


def trained(root: Path) -> list[int]:
    """The steps that the trainer logged, in order."""
    lines = map(json.loads, (run_dir(root) / "metrics.jsonl").read_text().splitlines())
    return [line["step"] for line in lines if line["role"] == "trainer"]


# -- the disk ------------------------------------------------------------------------------


def test_a_checkpoint_that_cannot_be_written_stops_the_run_with_its_state_whole(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=1)
    run_config(config, ONE_STEP, inline=True)
    run = run_dir(tmp_path)
    largest = max(path.stat().st_size for path in (run / "global_step_1").iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, hard))  # files may not grow so large
    try:
        with pytest.raises(RunFailed, match="global_step_2 could not be written") as caught:
            run_config(config, [*ONE_STEP, "buffer.total_steps=3"], inline=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "The state of step 1 of 3 is saved" in str(caught.value)
    assert steps_in(run) == [1]
    verify_checkpoint(run / "global_step_1")
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []
    state = describe(run)
    assert (state.state, state.saved) == (State.FAILED, 1)
    assert state.error is not None
    assert "global_step_2 could not be written" in state.error
    assert run_config(config, [*ONE_STEP, "buffer.total_steps=3"], inline=True).steps_done == 3


# -- damaged files -------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=2)
    run_config(config, QUIET, inline=True)
    run = run_dir(tmp_path)
    weights = run / "global_step_2" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert run_config(config, [*QUIET, "buffer.total_steps=3"], inline=True).steps_done == 3
    said = capsys.readouterr().out
    assert "the checkpoint of step 2 is damaged" in said
    assert "resuming" in said
    assert "from step 1 of 3" in said
    assert trained(tmp_path) == [1, 2, 3]
    assert (run / "damaged_global_step_2" / "weights.safetensors").read_bytes() == bytes(content)
    verify_checkpoint(run / "global_step_2")

    for step in (1, 2, 3):  # cut off, as a copy that was broken off leaves them
        path = run / f"global_step_{step}" / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match="No checkpoint of this run is sound") as caught:
        run_config(config, [*QUIET, "buffer.total_steps=4"], inline=True)
    assert len(caught.value.faults) == 3
    assert steps_in(run) == [1, 2, 3]  # left where they are


# -- what stays ----------------------------------------------------------------------------


def test_best_and_newest_stay_and_runs_resume_goes_on(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Rewards that say how well a step did: the held-out score is best at step 2.
    scored = WORKFLOW.replace(
        "    record_metrics(letters=share)",
        "    import json, pathlib\n"
        f"    lines = pathlib.Path({str(run_dir(tmp_path))!r}) / 'metrics.jsonl'\n"
        "    steps = [json.loads(x) for x in lines.read_text().splitlines()] if lines.exists() "
        "else []\n"
        "    done = max([x['step'] for x in steps if x['role'] == 'trainer'], default=0)\n"
        "    record_metrics(letters={2: 0.9}.get(done, 0.1 * done))",
    )
    write_project(tmp_path, tiny_model_dir, workflow=scored)
    monkeypatch.chdir(tmp_path)
    words = ["buffer.total_steps=5", "explorer.eval_interval=1"]
    words += ["trainer.max_checkpoints_to_keep=1", "budget.wall_seconds=1000"]
    assert cli.main(["config.yaml", "--inline", *words]) == 0
    run = run_dir(tmp_path)
    assert steps_in(run) == [2, 5]
    assert describe(run).best == (2, pytest.approx(0.9))
    assert describe(run).step == 5

    monkeypatch.chdir("/")
    assert cli.main(["runs", "resume", str(run)]) == 5  # it has reached its target
    assert cli.main(["runs", "resume", str(run), "buffer.total_steps=6"]) == 0
    assert steps_in(run) == [2, 6]
    state = read_state(run)
    assert state is not None
    assert state.command is not None
    assert state.command["cwd"] == str(tmp_path)
    assert state.summary["scores"]["2"] == {"held_out": pytest.approx(0.9)}


# -- what others do ------------------------------------------------------------------------

ASKING = WORKFLOW.replace(
    "    share = sum",
    "    from aflow_tune import client_for\n"
    '    await client_for("executor").complete([{"role": "user", "content": "hello"}])\n'
    "    share = sum",
)


def test_an_api_that_is_down_stops_the_run_with_what_it_learned(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=4, workflow=ASKING)
    away: list[bool] = [True]

    def answer(number: int, _: Request) -> Step:
        return Step(kind="cut") if away and number >= 8 else Step()  # a step has 8 rollouts

    with FaultyServer(answer) as server:
        model = f"{{model: m, base_url: '{server.openai_url}', retries: 1, backoff: 0.1}}"
        words = [*QUIET, f"models={{executor: {model}}}", "trainer.save_interval=10"]
        with pytest.raises(RunFailed, match="m gave no answer") as caught:
            run_config(config, words, inline=True)
        # Nothing had been saved before: what was learned is saved because of the failure.
        assert steps_in(run_dir(tmp_path)) == [1]
        assert "The state of step 1 of 4 is saved" in str(caught.value)
        away.clear()
        assert run_config(config, words, inline=True).steps_done == 4
    assert trained(tmp_path) == [1, 2, 3, 4]
