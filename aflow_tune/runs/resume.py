"""The command that began a run, as its folder remembers it.

Running it again is the whole of resuming: it finds the folder by its configuration, refuses one
that has changed, and goes on from the last sound checkpoint. A run that `tune()` began from Python
has no command: its functions are not in any file that we know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.runs.folder import CHAIN_FILE, read_state


@dataclass(frozen=True)
class Command:
    """`aflow-tune CONFIG OVERRIDES...`, and the folder that it was typed in."""

    config: Path
    overrides: tuple[str, ...]
    inline: bool | None
    cwd: Path


def command_of(folder: Path, overrides: Sequence[str] = ()) -> Command:
    """What began the run in `folder`; a stage's folder stands for its chain.

    Args:
        overrides: settings that are to be added. Those that hold secrets were not written down
            and must be among them.

    Raises:
        BadInput: there is no run, no command began it, its files are not there any more, or a
            secret is missing.
    """
    path = folder.expanduser().resolve()
    if (path.parent / CHAIN_FILE).is_file():
        path = path.parent
    told = _told(path)
    try:
        if told is None:
            raise _no_command(path)
        command = Command(
            Path(told["config"]), tuple(told["overrides"]), told["inline"], Path(told["cwd"])
        )
    except (KeyError, TypeError):
        raise _no_command(path) from None
    cure = "put it back, or run `aflow-tune CONFIG` with the settings of its resolved.yaml"
    faults = [
        Fault(str(place), f"the {what} that the run was started with", "it is gone", cure)
        for what, place, there in (
            ("configuration", command.config, command.config.is_file()),
            ("folder", command.cwd, command.cwd.is_dir()),
        )
        if not there
    ]
    given = {item.partition("=")[0] for item in overrides}
    cure = "name it once more: aflow-tune runs resume DIR key=value"
    faults += [
        Fault(key, "a setting that holds a secret, which is kept nowhere", "it is not given", cure)
        for key in told.get("secret", ())
        if key not in given
    ]
    if faults:
        raise BadInput("This run cannot be resumed by its folder.", faults)
    # Where the command asked for a fresh folder, it would get another one now.
    again = (f"name={path.name}", "continue_from_checkpoint=true") if told.get("renamed") else ()
    return Command(command.config, (*command.overrides, *again), command.inline, command.cwd)


def _told(path: Path) -> dict[str, Any] | None:
    chain = path / CHAIN_FILE
    if chain.is_file():
        try:
            found: dict[str, Any] | None = json.loads(chain.read_text(encoding="utf-8"))["command"]
        except (ValueError, KeyError, TypeError):
            return None
        return found
    state = read_state(path)
    if state is None:
        found_there = "a folder without run.json" if path.is_dir() else "no such folder"
        cure = "aflow-tune runs shows what there is"
        raise BadInput(
            "There is no run to resume.", [Fault(str(path), "a run folder", found_there, cure)]
        )
    return state.command


def _no_command(path: Path) -> BadInput:
    cure = "call tune() again, or type the same `aflow-tune CONFIG ...` again"
    found = "none: it was started by tune() in Python, or by an older version"
    fault = Fault(str(path), "the command that the run was started with", found, cure)
    return BadInput("This run cannot be resumed by its folder.", [fault])
