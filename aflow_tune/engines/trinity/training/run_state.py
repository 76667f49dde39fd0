"""From which step a run resumes, and how its folder is rewound to that step.

The checkpoint (`global_step_N`) decides: data position, metrics (`report.metrics`), evaluations and
rollout records are rewound to N before the run starts. On the local engine N is the newest with
correct hashes, and damaged newer ones are renamed; on `engine: trinity` it is Trinity's own record.
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
    """Raise BadInput if the folder belongs to a chain of stages: a single run would mix with it."""
    if (run_dir / CHAIN_FILE).exists():
        title = "This folder belongs to a configuration with `stages`."
        expected, fix = "the folder of a single run, or a new one", "give this run another `name=`"
        raise BadInput.of(title, str(run_dir), expected, "a chain of stages", fix)


def save_taskset_state(run_dir: Path, step: int, state: list[dict[str, Any]]) -> None:
    """Save the readers' position after batch `step` was read, for `rewind`."""
    write_json(run_dir / "taskset_state" / f"step_{step}.json", state)


def is_evaluated(run_dir: Path, step: int, tasksets: Iterable[str]) -> bool:
    """Whether the evaluation of `step` is complete on every one of `tasksets`, by the metrics."""
    lines = (line for line in read_metrics(run_dir) if line.step == step)
    done = {name for line in lines for name in finished_evaluations(line.metrics)}
    return done.issuperset(tasksets)


def forget_evaluation(taskset: TasksetConfig, step: int) -> None:
    """Remove the records of an interrupted evaluation of these weights, before a new one."""
    directory = taskset.workflow_args.get("eval_dir")
    if directory:
        record_path(Path(directory), taskset.name, step).unlink(missing_ok=True)


def newest_sound(run_dir: Path) -> int:
    """The step of the newest intact checkpoint, 0 if there is none. Damaged newer ones are renamed
    to `damaged_global_step_N`. Raises BadInput: all are damaged; nothing is renamed."""
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
    """Rewind data position, evaluations and rollout records to `step`; the caller rewinds metrics.
    Raises BadInput: the data position at `step` is missing."""
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
    # The buffer's copy on disk is only a log; a stale one would mix two attempts.
    shutil.rmtree(run_dir / "buffer", ignore_errors=True)


def trinity_step(run_dir: Path) -> int:
    """The step from which Trinity's trainer resumes, 0 for a new run. By its record of finished
    saves: a folder may be half written, or hold only weights for the sampler."""
    record = run_dir / "latest_checkpointed_iteration.txt"
    return int(record.read_text(encoding="utf-8")) if record.exists() else 0


def rewind_trinity(run_dir: Path, step: int) -> None:
    """Remove weights of later steps: Trinity would load the newest into the sampler, whatever step
    the trainer resumes from."""
    for checkpoint in checkpoints(run_dir):
        if checkpoint.step > step:
            remove_checkpoint(checkpoint.path)
    sent = run_dir / "latest_state_dict_iteration.txt"
    if step:
        sent.write_text(str(step), encoding="utf-8")
    else:
        sent.unlink(missing_ok=True)


def check_restart(run_dir: Path, fingerprint: dict[str, Any], target: int) -> RunState | None:
    """The state of the run to resume, None for a new run. Raises AlreadyFinished: the same
    configuration reached its target here; BadInput: the configuration changed (a fault for each
    changed key), or checkpoints exist without `run.json`."""
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
    """A fault for every setting in which `fingerprint` differs from the run of `state`, by key."""
    before = state.fingerprint
    return [
        Fault(
            key,
            f"{before.get(key)!r} (as the run in {run_dir} was started)",
            repr(fingerprint.get(key)),
            "set it back to resume, or give the changed run another `name=`",
        )
        for key in sorted(before.keys() | fingerprint.keys())
        # An older version may have stored a setting that may change by now, or named one of our
        # classes by another path.
        if renamed(before.get(key)) != fingerprint.get(key) and not is_free(key)
    ]
