"""Starts a command as a child process in its own session, so that Ctrl-C reaches only the parent.
If the parent is killed, Linux sends the child SIGTERM (`_launch.py`): a run saves and stops."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_TAIL_BYTES = 4000


def own_program() -> list[str]:
    """The command line of `aflow-tune` in this environment."""
    return [sys.executable, "-m", "aflow_tune.cli"]


class RunProcess:
    """A running command; its output is appended to `output`. `command[0]` is a full path. Create it
    in a thread that outlives the command (the death signal follows the thread). Raises OSError."""

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.output = output
        output.parent.mkdir(parents=True, exist_ok=True)
        launch = str(Path(__file__).with_name("_launch.py"))
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", launch, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Send SIGTERM: the first asks a run to save and stop, the second to stop at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)


def last_words(output: Path) -> str:
    """The last error of `aflow-tune` in the file `output`, else its last line; "" if unreadable."""
    try:
        with output.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    refused = [number for number, line in enumerate(said) if line.startswith("aflow-tune: ")]
    last = said[refused[-1] :] if refused else said[-1:]
    return " ".join(last).removeprefix("aflow-tune: ")
