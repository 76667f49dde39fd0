"""The run folder: locking, resuming, refusing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_folders import write_saved

from aflow_tune.engines.trinity.training.run_state import (
    check_restart,
    rewind,
    rewind_trinity,
    save_taskset_state,
    trinity_step,
)
from aflow_tune.errors import AlreadyFinished, BadInput
from aflow_tune.runs.folder import RunState, write_state


def test_rewind_goes_back_to_the_tasks_of_the_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_taskset_state(tmp_path, step, [{"current_index": step * 4}])
    folder = tmp_path / "evaluations" / "held_out"
    folder.mkdir(parents=True)
    for step in (0, 2, 3):
        (folder / f"step_{step}.jsonl").write_text("{}\n")
    (tmp_path / "buffer").mkdir()

    rewind(tmp_path, 2, "explorer")

    saved = json.loads((tmp_path / "explorer_meta.json").read_text())
    assert saved == {"latest_iteration": 2, "taskset_states": [{"current_index": 8}]}
    assert sorted(path.name for path in folder.iterdir()) == ["step_0.jsonl", "step_2.jsonl"]
    assert not (tmp_path / "buffer").exists()


def test_finished_changed_resumed_and_extended_runs(tmp_path: Path) -> None:
    assert check_restart(tmp_path, {}, 8) is None
    write_state(tmp_path, RunState("finished", 8, 8, {"seed": 1, "lr": 0.1}))
    with pytest.raises(AlreadyFinished, match="step 8 of 8"):
        check_restart(tmp_path, {"seed": 1, "lr": 0.1}, 8)
    extended = check_restart(tmp_path, {"seed": 1, "lr": 0.1}, 12)
    assert extended is not None
    assert extended.step == 8
    write_state(tmp_path, RunState("failed", 4, 8, {"seed": 1, "lr": 0.1}))
    assert check_restart(tmp_path, {"seed": 1, "lr": 0.1}, 8) is not None
    with pytest.raises(BadInput) as caught:
        check_restart(tmp_path, {"seed": 2, "new": True}, 8)
    assert [fault.where for fault in caught.value.faults] == ["lr", "new", "seed"]


def test_checkpoints_without_a_state_are_of_no_run_that_could_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "global_step_8").mkdir()
    assert check_restart(tmp_path, {}, 8) is None  # not in our form: Trinity's own to judge
    write_saved(tmp_path, 4)
    with pytest.raises(BadInput, match="nothing says of which run") as caught:
        check_restart(tmp_path, {}, 8)
    assert "up to step 4 without run.json" in caught.value.faults[0].found


def test_trinity_resumes_from_its_finished_saves_and_forgets_later_weights(tmp_path: Path) -> None:
    """Killed in the save of step 3, after the weights of step 3 were sent to the sampler."""
    assert trinity_step(tmp_path) == 0
    for step in (1, 2, 3):
        (tmp_path / f"global_step_{step}" / "actor").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "latest_state_dict_iteration.txt").write_text("3")
    assert trinity_step(tmp_path) == 2
    rewind_trinity(tmp_path, 2)
    assert {path.name for path in tmp_path.glob("global_step_*")} == {
        "global_step_1",
        "global_step_2",
    }
    assert (tmp_path / "latest_state_dict_iteration.txt").read_text() == "2"
    rewind_trinity(tmp_path, 0)
    assert not (tmp_path / "latest_state_dict_iteration.txt").exists()
