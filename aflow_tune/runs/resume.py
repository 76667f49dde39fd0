"""The command that began a run, as its folder remembers it.

Running it again is the whole of resuming: it finds the folder by its configuration, refuses one
that has changed, and goes on from the last sound checkpoint. A run that `tune()` began from Python
has no command: its functions are not in any file that we know.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.runs.folder import CHAIN_FILE, read_state

_TITLE = "This run cannot be resumed by its folder."


@dataclass(frozen=True)
class Command:
    """`aflow-tune CONFIG OVERRIDES...`, and the folder that it was typed in."""

    config: Path
    overrides: tuple[str, ...]
    inline: bool | None
    cwd: Path


def command_of(folder: Path, overrides: Sequence[str] = ()) -> Command:
    """What began the run in `folder`; a stage's folder stands for its chain. Settings that hold
    secrets were not written down and must be among the `overrides`. BadInput: there is no run, no
    command began it, its files are gone, or a secret is missing."""
    path = folder.expanduser().resolve()
    if (path.parent / CHAIN_FILE).is_file():
        path = path.parent
    try:
        told = _told(path)
        config, cwd = Path(told["config"]), Path(told["cwd"])
        began, inline = tuple(told["overrides"]), told["inline"]
    except (KeyError, TypeError):
        expected, found = "the command that the run was started with", "none, such as after tune()"
        fix = "call tune() again, or type the same `aflow-tune CONFIG ...` again"
        raise BadInput.of(_TITLE, str(path), expected, found, fix) from None
    fix = "put it back"
    faults = [
        Fault(str(place), "what the run was started with", "it is gone", fix)
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
        raise BadInput(_TITLE, faults)
    if told.get("renamed"):  # the command asked for a fresh folder, and would get another one now
        began = (*began, f"name={path.name}", "continue_from_checkpoint=true")
    return Command(config, began, inline, cwd)


def _told(path: Path) -> Any:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return json.loads((path / CHAIN_FILE).read_text(encoding="utf-8"))["command"]
    state = read_state(path)
    if state is None:
        found = "a folder without run.json" if path.is_dir() else "no such folder"
        title, fix = "There is no run to resume.", "aflow-tune runs shows what there is"
        raise BadInput.of(title, str(path), "a run folder", found, fix)
    return state.command
