"""What a run folder knows about itself: status, target, and where to resume.

    <run folder>/
      run.json                   status, step, target, the configuration's fingerprint
      run.lock                   held by the command that is running
      resolved.yaml              the configuration as it was run
      global_step_N/             checkpoints, each written atomically
      taskset_state/step_N.json  position in the task sets after batch N was read
      metrics.jsonl, evaluations/, rollouts/, monitor/, log/

A checkpoint of step N is the only truth on resume: the explorer's position, the metrics and
the evaluations are taken back to N before anything starts, so that work done after N is done
again from the same tasks.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trinity.common.config import TasksetConfig

from aflow_tune.errors import AlreadyFinished, BadInput, Fault
from aflow_tune.files import write_json
from aflow_tune.report.metrics import read_metrics
from aflow_tune.report.quantities import finished_evaluations
from aflow_tune.report.records import record_path
from aflow_tune.report.rollouts import forget_rollouts
from aflow_tune.types import Checkpoint

RUN_FILE = "run.json"
CHAIN_FILE = "chain.json"
"""In the folder of a chain of stages, in place of `run.json`; see `stage_chain.py`."""
STEP_PREFIX = "global_step_"


@dataclass
class RunState:
    """The content of `run.json`. `status`: running, interrupted, failed or finished."""

    status: str
    step: int
    target: int
    fingerprint: dict[str, Any]


def read_state(run_dir: Path) -> RunState | None:
    """The state of the run in `run_dir`; None where no run was started."""
    path = run_dir / RUN_FILE
    if not path.exists():
        return None
    return RunState(**json.loads(path.read_text(encoding="utf-8")))


def write_state(run_dir: Path, state: RunState) -> None:
    """Replace `run.json` atomically."""
    write_json(run_dir / RUN_FILE, asdict(state))


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run folder for this process.

    Raises:
        BadInput: another command is running in the same folder.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "run.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(
                "Another command is using this run folder.",
                [
                    Fault(
                        str(run_dir),
                        "a run folder that nobody else is writing to",
                        "a lock held by a running command",
                        "wait for it, stop it, or choose another `name=`",
                    )
                ],
            ) from None
        yield


def refuse_chain(run_dir: Path) -> None:
    """BadInput if the folder belongs to a chain of stages: one of its stages would be lost."""
    if (run_dir / CHAIN_FILE).exists():
        found, cure = "a chain of stages", "give this run another `name=`"
        raise BadInput(
            "This folder belongs to a configuration with `stages`.",
            [Fault(str(run_dir), "the folder of a single run, or a new one", found, cure)],
        )


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """All checkpoints of the folder, oldest first. Half-written ones have other names."""
    found = []
    for path in run_dir.glob(f"{STEP_PREFIX}*"):
        suffix = path.name.removeprefix(STEP_PREFIX)
        if suffix.isdigit() and path.is_dir():
            found.append(Checkpoint(int(suffix), path))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of `step` lives."""
    return run_dir / f"{STEP_PREFIX}{step}"


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


def rewind(run_dir: Path, step: int, explorer_name: str) -> None:
    """Take everything but the checkpoints back to `step`.

    Raises:
        BadInput: the position in the task sets at `step` was lost.
    """
    explorer_file = run_dir / f"{explorer_name}_meta.json"
    if step == 0:
        explorer_file.unlink(missing_ok=True)
    else:
        source = run_dir / "taskset_state" / f"step_{step}.json"
        if not source.exists():
            raise BadInput(
                "This run cannot be resumed.",
                [
                    Fault(
                        str(source),
                        f"the position in the task sets after step {step}",
                        "no such file",
                        "start again under another `name=`",
                    )
                ],
            )
        states = json.loads(source.read_text(encoding="utf-8"))
        write_json(explorer_file, {"latest_iteration": step, "taskset_states": states})
    for path in run_dir.glob("evaluations/*/step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()
    forget_rollouts(run_dir, step)
    # The queue's copy on disk is only a log; a stale one would mix two attempts.
    shutil.rmtree(run_dir / "buffer", ignore_errors=True)


def check_restart(run_dir: Path, fingerprint: dict[str, Any], target: int) -> RunState | None:
    """Compare a folder's earlier run with the one asked for.

    Returns the earlier state if it is to be resumed, None for a new run.

    Raises:
        AlreadyFinished: the same configuration already reached its target here.
        BadInput: the configuration changed; every changed key is listed.
    """
    state = read_state(run_dir)
    if state is None:
        return None
    changed = changed_keys(run_dir, state, fingerprint)
    if changed:
        raise BadInput("This run folder belongs to a run with another configuration.", changed)
    if state.status == "finished" and target == 0:  # a mode without steps
        raise AlreadyFinished(
            f"The run in {run_dir} is finished. Nothing was started. For a new run give another "
            "`name=`."
        )
    if state.status == "finished" and state.step >= target:
        raise AlreadyFinished(
            f"The run in {run_dir} already reached step {state.step} of {target}. Nothing was "
            "started. For more steps raise `buffer.total_steps` or `buffer.total_epochs`; for a "
            "new run give another `name=`."
        )
    return state


def changed_keys(run_dir: Path, state: RunState, fingerprint: dict[str, Any]) -> list[Fault]:
    """Every setting in which `fingerprint` differs from the run of `state`, by its key."""
    return [
        Fault(
            key,
            f"{state.fingerprint.get(key)!r} (as the run in {run_dir} was started)",
            repr(fingerprint.get(key)),
            "set it back to resume, or give the changed run another `name=`",
        )
        for key in sorted(state.fingerprint.keys() | fingerprint.keys())
        if state.fingerprint.get(key) != fingerprint.get(key)
    ]
