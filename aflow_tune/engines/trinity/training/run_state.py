"""From which step a run folder's run resumes, and what else must go back there.

A checkpoint (`global_step_N`) is the only truth on resume: the position in the task sets, the
metrics and the evaluations are taken back to N before anything starts. N is the newest whose hashes
are right; a damaged one is set aside as `damaged_global_step_N`.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trinity.common.config import TasksetConfig

from aflow_tune.config.changes import is_free, renamed
from aflow_tune.engines.local.checkpoint import MANIFEST, CheckpointError, verify_checkpoint
from aflow_tune.errors import AlreadyFinished, BadInput, Fault
from aflow_tune.files import write_json
from aflow_tune.report.metrics import read_metrics
from aflow_tune.report.quantities import finished_evaluations
from aflow_tune.report.records import forget_rollouts, record_path
from aflow_tune.runs.folder import (
    CHAIN_FILE,
    RUN_FILE,
    RunState,
    checkpoints,
    read_state,
    remove_checkpoint,
)
from aflow_tune.types import Checkpoint


def refuse_chain(run_dir: Path) -> None:
    """BadInput if the folder belongs to a chain of stages: one of its stages would be lost."""
    if (run_dir / CHAIN_FILE).exists():
        title = "This folder belongs to a configuration with `stages`."
        expected, fix = "the folder of a single run, or a new one", "give this run another `name=`"
        raise BadInput.of(title, str(run_dir), expected, "a chain of stages", fix)


def save_taskset_state(run_dir: Path, step: int, state: list[dict[str, Any]]) -> None:
    """Keep the task sets' position after batch `step` was read, before it is submitted."""
    write_json(run_dir / "taskset_state" / f"step_{step}.json", state)


def is_evaluated(run_dir: Path, step: int, tasksets: Iterable[str]) -> bool:
    """Whether the weights of `step` were evaluated to the end on every one of `tasksets`."""
    lines = (line for line in read_metrics(run_dir) if line.step == step)
    done = {name for line in lines for name in finished_evaluations(line.metrics)}
    return done.issuperset(tasksets)


def forget_evaluation(taskset: TasksetConfig, step: int) -> None:
    """Remove what an earlier, broken-off evaluation of these weights left, before a new one."""
    directory = taskset.workflow_args.get("eval_dir")
    if directory:
        record_path(Path(directory), taskset.name, step).unlink(missing_ok=True)


def newest_sound(run_dir: Path) -> int:
    """The step of the newest sound checkpoint, 0 without any. Newer ones that are damaged are
    renamed to `damaged_global_step_N`. BadInput: all are damaged; they stay as they are."""
    damaged: list[tuple[Checkpoint, CheckpointError]] = []
    for checkpoint in reversed(checkpoints(run_dir)):
        try:
            verify_checkpoint(checkpoint.path)
        except CheckpointError as error:
            damaged.append((checkpoint, error))
            continue
        for other, problem in damaged:
            name = f"damaged_{other.path.name}"
            names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            aside = next(path for it in names if not (path := run_dir / it).exists())
            other.path.rename(aside)
            print(
                f"warning: the checkpoint of step {other.step} is damaged ({problem}). It was set "
                f"aside as {aside.name}; the run goes on from step {checkpoint.step}.",
                flush=True,
            )
        return checkpoint.step
    if damaged:
        expected = "files as they were written"
        fix = "put a sound copy back, or start again under another `name=`"
        faults = [Fault(str(point.path), expected, str(error), fix) for point, error in damaged]
        raise BadInput("No checkpoint of this run is sound.", faults)
    return 0


def rewind(run_dir: Path, step: int, explorer_name: str) -> None:
    """Take everything but the checkpoints back to `step`. Raises BadInput: the position in the task
    sets at `step` was lost."""
    explorer_file = run_dir / f"{explorer_name}_meta.json"
    if step == 0:
        explorer_file.unlink(missing_ok=True)
    else:
        source = run_dir / "taskset_state" / f"step_{step}.json"
        try:
            states = json.loads(source.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            title, fix = "This run cannot be resumed.", "start again under another `name=`"
            expected = f"the position in the task sets after step {step}"
            raise BadInput.of(title, str(source), expected, str(error), fix) from None
        write_json(explorer_file, {"latest_iteration": step, "taskset_states": states})
    for path in run_dir.glob("evaluations/*/step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
    forget_rollouts(run_dir, step)
    # The queue's copy on disk is only a log; a stale one would mix two attempts.
    shutil.rmtree(run_dir / "buffer", ignore_errors=True)


def trinity_step(run_dir: Path) -> int:
    """The step from which Trinity's own trainer resumes, by its record of finished saves (folders
    may be half written, or hold only what the sampler was sent); 0 without any."""
    record = run_dir / "latest_checkpointed_iteration.txt"
    return int(record.read_text(encoding="utf-8")) if record.exists() else 0


def rewind_trinity(run_dir: Path, step: int) -> None:
    """Take away weights of later steps: Trinity would give the newest to the sampler, whatever the
    trainer resumes from."""
    for checkpoint in checkpoints(run_dir):
        if checkpoint.step > step:
            remove_checkpoint(checkpoint.path)
    sent = run_dir / "latest_state_dict_iteration.txt"
    if step:
        sent.write_text(str(step), encoding="utf-8")
    else:
        sent.unlink(missing_ok=True)


def check_restart(run_dir: Path, fingerprint: dict[str, Any], target: int) -> RunState | None:
    """The state of the folder's earlier run if it is to be resumed, None for a new run. Raises
    AlreadyFinished: the same configuration reached its target here. BadInput: the configuration
    changed, every changed key is listed; or nothing says what was trained."""
    state = read_state(run_dir)
    if state is None:
        ours = [point for point in checkpoints(run_dir) if (point.path / MANIFEST).is_file()]
        if ours:
            title = "This folder holds checkpoints, and nothing says of which run."
            expected = f"{RUN_FILE} beside its checkpoints, or a folder without any"
            found = f"checkpoints up to step {ours[-1].step} without {RUN_FILE}"
            fix = f"put {RUN_FILE} back, or give this run another `name=`"
            raise BadInput.of(title, str(run_dir), expected, found, fix)
        return None
    changed = changed_keys(run_dir, state, fingerprint)
    if changed:
        raise BadInput("This run folder belongs to a run with another configuration.", changed)
    if state.status == "finished" and state.step >= target:  # 0: a mode without steps
        reached = f"already reached step {state.step} of {target}" if target else "is finished"
        raise AlreadyFinished(
            f"The run in {run_dir} {reached}. Nothing was started. For more steps raise "
            "`buffer.total_steps` or `buffer.total_epochs`; for a new run give another `name=`."
        )
    return state


def changed_keys(run_dir: Path, state: RunState, fingerprint: dict[str, Any]) -> list[Fault]:
    """Every setting in which `fingerprint` differs from the run of `state`, by its key."""
    before = state.fingerprint
    return [
        Fault(
            key,
            f"{before.get(key)!r} (as the run in {run_dir} was started)",
            repr(fingerprint.get(key)),
            "set it back to resume, or give the changed run another `name=`",
        )
        for key in sorted(before.keys() | fingerprint.keys())
        # An older version may have counted a setting that is free by now, or have named a class
        # of ours by another path.
        if renamed(before.get(key)) != fingerprint.get(key) and not is_free(key)
    ]
