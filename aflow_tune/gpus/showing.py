"""A `Snapshot` as text for a terminal."""

from __future__ import annotations

import time

from aflow_tune.gpus.devices import Device, GpuProcess, Snapshot

_GIB = 2**30
_LONGEST = 200


def render(now: Snapshot, width: int = _LONGEST) -> str:
    """Every device with its processes; no line is longer than `width` characters."""
    head = [now.host]
    head += [f"driver {now.driver}"] if now.driver else []
    head += [f"CUDA {now.cuda}"] if now.cuda else []
    lines = [", ".join(head)]
    if not now.devices:
        lines.append("the driver runs, but there is no GPU")
    for device in now.devices:
        lines += ["", *_device_lines(device)]
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines)


def process_line(process: GpuProcess) -> str:
    """Number, user, kind, memory, start, command."""
    seen = process.seen
    memory = "?" if process.memory is None else f"{process.memory / _GIB:.1f} GiB"
    kind = "+".join(process.kinds)
    if seen is None:
        user, since = "?", "?"
        command = "not visible from here: the host's or another container's, hidden, or gone"
    else:
        user, since = seen.user, _since(seen.since)
        state = " (ended, not yet taken notice of)" if seen.ended else ""
        command = ("[container] " if seen.in_container else "") + seen.command + state
    line = f"{process.pid:>8}  {user:<12} {kind:<16} {memory:>9}  {since:<16} {command}"
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def _device_lines(device: Device, indent: str = "") -> list[str]:
    title = f"{indent}GPU {device.label}  {device.name}"
    title += f"  {device.uuid}" if device.uuid else ""
    if device.problem:
        return [title, f"{indent}  not usable: {device.problem}"]
    facts = [*_facts(device), *(["divided (MIG)"] if device.divided else [])]
    lines = [title, f"{indent}  {', '.join(facts) or 'the driver says nothing about it'}"]
    if device.claimed:
        lines.append(f"{indent}  claimed by {device.claimed}")
    if device.divided:
        for instance in device.instances:
            lines += _device_lines(instance, indent + "  ")
        within = {p.pid for i in device.instances for p in i.processes or ()}
        outside = [p for p in device.processes or () if p.pid not in within]
        return lines + [f"{indent}  {process_line(process)}" for process in outside]
    if device.processes is None:
        lines.append(f"{indent}  processes: unknown ({device.unknown_why})")
    elif not device.processes:
        lines.append(f"{indent}  no process")
    lines += [f"{indent}  {process_line(process)}" for process in device.processes or ()]
    return lines


def _facts(device: Device) -> list[str]:
    facts = []
    if device.use is not None:
        facts.append(f"use {device.use:.0%}")
    if device.memory_used is not None and device.memory_total is not None:
        used, total = device.memory_used / _GIB, device.memory_total / _GIB
        facts.append(f"memory {used:.1f} of {total:.1f} GiB")
    if device.temperature is not None:
        facts.append(f"{device.temperature} °C")
    if device.power is not None:
        limit = f" of {device.power_limit:.0f}" if device.power_limit is not None else ""
        facts.append(f"{device.power:.0f}{limit} W")
    return facts


def _since(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
