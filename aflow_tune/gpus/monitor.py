"""Watching the GPUs until Ctrl-C: on a terminal in place, elsewhere one picture after another.

Every picture can be kept as a line of JSON. Kept lines name programs but hold no arguments:
these may be secrets, and a file is read by more people than a screen.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aflow_tune.files import append_line
from aflow_tune.gpus.devices import Snapshot
from aflow_tune.gpus.reading import snapshot
from aflow_tune.gpus.showing import render


def _print(text: str) -> None:
    """At once, also where the reader is a pipe, for which Python would gather some kilobytes."""
    print(text, flush=True)


def watch(
    interval: float,
    *,
    owner: int,
    log: Path | None = None,
    as_json: bool = False,
    say: Callable[[str], None] = _print,
) -> None:
    """Show the GPUs every `interval` seconds, until KeyboardInterrupt ends it (it returns).

    Args:
        owner: the user whose processes are marked as own in JSON.
        log: a file to append a line of JSON to each time.
        as_json: print such lines instead of pictures.

    Raises:
        NvmlUnavailable: there is no driver to ask, or not any more.
        OSError: the file cannot be written.
    """
    with contextlib.suppress(KeyboardInterrupt), _shown(as_json, say) as show:
        due = time.monotonic()
        while True:
            now = snapshot()
            if log is not None:
                append(log, now, owner)
            show(logged(now, owner) if as_json else now)
            due = max(due + interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


def logged(now: Snapshot, owner: int) -> str:
    """A snapshot as one line of JSON, without the arguments of commands."""
    return json.dumps(_without_commands(now.to_json(owner)), ensure_ascii=False)


def append(path: Path, now: Snapshot, owner: int) -> None:
    """Append a snapshot as a line of JSON. Raises as `append_line`."""
    append_line(path, logged(now, owner).encode() + b"\n")


def _without_commands(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_commands(v) for k, v in value.items() if k != "command"}
    return [_without_commands(item) for item in value] if isinstance(value, list) else value


@contextlib.contextmanager
def _shown(as_json: bool, say: Callable[[str], None]) -> Iterator[Callable[[Any], None]]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    if as_json:
        yield say
    elif not console.is_terminal or console.is_dumb_terminal:
        yield lambda now: say(f"{time.strftime('%H:%M:%S')}  {render(now)}\n")
    else:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:

            def show(now: Snapshot) -> None:
                text = f"{time.strftime('%H:%M:%S')}  {render(now, console.width)}\n\nCtrl-C ends"
                live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

            yield show
