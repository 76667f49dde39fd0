"""The layout of a run folder: its state file, its checkpoints, and the lock of the running command.

    <run folder>/
      run.json            `RunState`: status, step, target, fingerprint, how it was started
      run.lock            held (flock) by the command that is working in the folder
      global_step_N/      checkpoints, each written atomically
    <chain folder>/
      chain.json, run.lock, and a run folder for each stage

How a run is rewound to a checkpoint: `engines/trinity/training/run_state.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault, disk_fault
from aflow_tune.files import write_json
from aflow_tune.types import Checkpoint

RUN_FILE = "run.json"
CHAIN_FILE = "chain.json"  # a chain of stages has this instead of `run.json`
LOCK_FILE = "run.lock"
ACCOUNT_FILE = "account.sqlite"  # spend so far; written if the run has a limit
STEP_PREFIX = "global_step_"
MAX_ERROR = 2000  # characters of the last error that are kept
_LOCK_SECONDS = 1.0  # retry this long: `is_locked` holds a lock for an instant


@dataclass
class RunState:
    """The content of `run.json`. `status`: running, interrupted, failed or finished; `step`: of the
    last checkpoint when `status` was written."""

    status: str
    step: int
    target: int
    fingerprint: dict[str, Any]
    error: str | None = None
    """Why it was interrupted or failed: the message of the command."""
    command: dict[str, Any] | None = None
    """How to start it again: `config`, `overrides`, `inline`, `cwd`. None: a call of `tune()`."""
    host: str = ""
    started: float = 0.0
    """When the last command began, in seconds since the epoch."""
    ended: float = 0.0  # the same for its end; 0 while it runs
    summary: dict[str, Any] = field(default_factory=dict)
    """Result of `listing.summarise` when the last command ended."""


def read_state(run_dir: Path) -> RunState | None:
    """The state of the run in `run_dir`; None without `run.json`. Raises BadInput: the file cannot
    be read as a run's state."""
    path = run_dir / RUN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # A newer version may have written more fields.
        known = RunState.__dataclass_fields__.keys()
        return RunState(**{name: value for name, value in content.items() if name in known})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        title, expected = "The state of this run cannot be read.", "the state of a run, in JSON"
        fix = "start again under another `name=`; checkpoints can still be named one by one"
        raise BadInput.of(title, str(path), expected, str(error), fix) from None


def write_state(run_dir: Path, state: RunState) -> None:
    write_json(run_dir / RUN_FILE, asdict(state))


def new_state(
    target: int, step: int, fingerprint: dict[str, Any], command: Mapping[str, Any] | None
) -> RunState:
    """The state of a run that starts or resumes now on this host."""
    state = RunState("running", step, target, fingerprint, started=time.time())
    state.command, state.host = None if command is None else dict(command), socket.gethostname()
    return state


def read_stages(folder: Path) -> list[dict[str, Any]]:
    """The stages of a chain folder, in order; empty for any other folder. Raises BadInput:
    `chain.json` holds no valid list of stages."""
    path = folder / CHAIN_FILE
    try:
        stages = list(json.loads(path.read_text(encoding="utf-8"))["stages"])
        if wrong := [stage for stage in stages if Path(stage["name"]).name != stage["name"]]:
            raise ValueError(f"a stage that is no plain name: {wrong[0]['name']!r}")
        return stages
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        title, fix = "This chain cannot be read.", "name the folder of a stage"
        raise BadInput.of(title, str(path), "the stages of a chain", str(error), fix) from None


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Create and lock the run folder. Raises BadInput: another command holds the lock, or the
    folder is not writable; OSError: the disk is full, read-only or broken."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK_FILE).open("a+")
    except OSError as error:
        if disk_fault(error) is not None:
            raise
        title, fix = "This run folder cannot be written to.", "choose another `name=`"
        raise BadInput.of(title, str(run_dir), "one to write to", str(error), fix) from None
    with lock as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    title, fix = "Another command is using this run folder.", "wait for it, stop it"
                    told = "a folder that nobody is writing to", "a lock of a running command"
                    fix = f"{fix}, or choose another `name=`"
                    raise BadInput.of(title, str(run_dir), *told, fix) from None
                time.sleep(0.05)
        yield


def is_locked(run_dir: Path) -> bool:
    """Whether a command holds the folder's lock; also True if the lock file cannot be opened."""
    try:
        with (run_dir / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """All checkpoints of the folder, by step. Half-written ones have other names."""
    found = []
    for path in run_dir.glob(f"{STEP_PREFIX}*"):
        suffix = path.name.removeprefix(STEP_PREFIX)
        if suffix.isascii() and suffix.isdigit() and path.is_dir():
            found.append(Checkpoint(int(suffix), path))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / f"{STEP_PREFIX}{step}"


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint: rename it first, so that no reader sees half of it, then delete it."""
    doomed = path.with_name(f".{path.name}.removed-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def command_of(
    folder: Path, overrides: Sequence[str] = ()
) -> tuple[Path, list[str], bool | None, Path]:
    """How to resume the run in `folder` (for a stage, its chain): the config path and overrides of
    its command, `inline`, and the working directory. Secrets were not stored: each must be among
    `overrides`, which are only checked for it, not added to the result. Raises BadInput: no run is
    there, `tune()` started it, its configuration or directory is gone, or a secret is missing."""
    title, path = "This run cannot be resumed by its folder.", folder.expanduser().resolve()
    if (path.parent / CHAIN_FILE).is_file():
        path = path.parent
    try:
        if (path / CHAIN_FILE).is_file():
            told = json.loads((path / CHAIN_FILE).read_text(encoding="utf-8"))["command"]
        elif (state := read_state(path)) is not None:
            told = state.command
        else:
            fix = "aflow-tune runs shows what there is"
            raise BadInput.of(title, str(path), "a run folder", "no run.json there", fix)
        config, cwd = Path(told["config"]), Path(told["cwd"])
        began, inline = list(told["overrides"]), told["inline"]
    except (KeyError, TypeError, JSONDecodeError, UnicodeDecodeError):
        expected, found = "the command that the run was started with", "none, such as after tune()"
        fix = "call tune() again, or type the same `aflow-tune CONFIG ...` again"
        raise BadInput.of(title, str(path), expected, found, fix) from None
    faults = [
        Fault(str(place), "what the run was started with", "it is gone", "put it back")
        for place, there in ((config, config.is_file()), (cwd, cwd.is_dir()))
        if not there
    ]
    given = {item.partition("=")[0] for item in overrides}
    fix = "name it once more: aflow-tune runs resume DIR key=value"
    faults += [
        Fault(key, "a setting that holds a secret, which is kept nowhere", "it is not given", fix)
        for key in told.get("secret", ())
        if key not in given
    ]
    if faults:
        raise BadInput(title, faults)
    if told.get("renamed"):  # the same command would create another new folder
        began += [f"name={path.name}", "continue_from_checkpoint=true"]
    return config, began, inline, cwd
