"""The GPUs as text: once, or repeatedly until Ctrl-C, in place on a terminal.

Lines of JSON omit the arguments of commands: these may be secrets, and more people read a log file
than a screen.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from pathlib import Path

from aflow_tune.files import append_line
from aflow_tune.gpus.devices import Device, GpuProcess, Snapshot, snapshot

_GIB = 2**30
_LONGEST = 200


def render(now: Snapshot, width: int = _LONGEST) -> str:
    """Every device with its processes; no line is longer than `width` characters."""
    lines = [f"{now.host}, driver {now.driver or 'unknown'}, CUDA {now.cuda or 'unknown'}"]
    if not now.devices:
        lines.append("the driver runs, but there is no GPU")
    for device in now.devices:
        lines += ["", *_device_lines(device)]
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines)


def process_line(process: GpuProcess) -> str:
    """A process in one line: id, user, kind, memory, start, command."""
    seen = process.seen
    memory = "?" if process.memory is None else f"{process.memory / _GIB:.1f} GiB"
    user, since = "?", "?"
    command = "not visible from here: the host's or another container's, hidden, or gone"
    if seen is not None:
        user, since = seen.user, time.strftime("%Y-%m-%d %H:%M", time.localtime(seen.since))
        command = ("[container] " if seen.in_container else "") + seen.command
    kind = "+".join(process.kinds)
    line = f"{process.pid:>8}  {user:<12} {kind:<16} {memory:>9}  {since:<16} {command}"
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _device_lines(device: Device, indent: str = "") -> list[str]:
    title = f"{indent}GPU {device.label}  {device.name}"
    title += f"  {device.uuid}" if device.uuid else ""
    if device.problem:
        return [title, f"{indent}  not usable: {device.problem}"]
    used, total = device.memory_used, device.memory_total
    facts = [] if device.use is None else [f"use {device.use:.0%}"]
    if used is not None and total is not None:
        facts.append(f"memory {used / _GIB:.1f} of {total / _GIB:.1f} GiB")
    if device.temperature_c is not None:
        facts.append(f"{device.temperature_c} °C")
    if device.power_w is not None:
        limit = "" if device.power_limit_w is None else f" of {device.power_limit_w:.0f}"
        facts.append(f"{device.power_w:.0f}{limit} W")
    facts += ["divided (MIG)"] * device.divided
    lines = [title, f"{indent}  {', '.join(facts) or 'the driver says nothing about it'}"]
    if device.claimed:
        lines.append(f"{indent}  claimed by {device.claimed}")
    listed = device.processes or ()
    for instance in device.instances:
        lines += _device_lines(instance, indent + "  ")
        within = {process.pid for process in instance.processes or ()}
        listed = tuple(process for process in listed if process.pid not in within)
    if not device.divided and device.processes is None:
        lines.append(f"{indent}  processes: unknown ({device.processes_unknown})")
    elif not device.divided and not listed:
        lines.append(f"{indent}  no process")
    return lines + [f"{indent}  {process_line(process)}" for process in listed]


def watch(interval: float, *, owner: int, log: Path | None = None, as_json: bool = False) -> None:
    """Show the GPUs every `interval` seconds until Ctrl-C, as lines of JSON if `as_json`. `log`: a
    file to append such lines to. `owner`: the user id whose processes are `own` in JSON.
    NvmlUnavailable: no driver, or one that refuses. OSError: the log cannot be written."""
    due = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            now = snapshot()
            if log is not None:
                append(log, now, owner)
            width, height = shutil.get_terminal_size((_LONGEST, 50))
            at = time.strftime("%H:%M:%S")
            if as_json:
                text = logged(now, owner)
            elif sys.stdout.isatty():  # overwrite the previous screen
                lines = f"{at}  {render(now, width)}".splitlines()[: height - 2]
                text = "\n".join(["\x1b[H\x1b[2J", *lines, "Ctrl-C ends"])
            else:
                text = f"{at}  {render(now)}\n"
            print(text, flush=True)  # stdout may be a pipe
            due = max(due + interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))


def logged(now: Snapshot, owner: int) -> str:
    """A snapshot as one line of JSON, without the arguments of commands."""

    told = now.to_json(owner)
    for device in (each for gpu in told["devices"] for each in (gpu, *gpu["instances"])):
        for process in device["processes"] or ():
            del process["command"]
    return json.dumps(told, ensure_ascii=False)


def append(path: Path, now: Snapshot, owner: int) -> None:
    """Append `logged(now, owner)` to a file. Raises as `append_line`."""
    append_line(path, logged(now, owner).encode() + b"\n")
