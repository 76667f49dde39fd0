"""The GPUs that a run could use: the driver, what PyTorch was built for, room on each device.

What the driver says is read in `aflow_tune/gpus/`, which also tells who uses a device; here it
is only judged. A driver that hangs is cut off by the time of the check.
"""

from __future__ import annotations

import os

from aflow_tune.contract.import_faults import package_cure
from aflow_tune.doctor.lines import GIB, Line, fault, note, ok
from aflow_tune.doctor.machine import torch_cuda
from aflow_tune.gpus.devices import Device, NvmlUnavailable, snapshot


def check_gpus(needed: bool | None = None) -> list[Line]:
    """Driver, CUDA, the build of PyTorch, and each GPU.

    Args:
        needed: whether the run needs GPUs of this machine; None: that is not known.
    """
    try:
        built = torch_cuda()
    except (OSError, SyntaxError, ValueError) as error:
        text = f"PyTorch is damaged ({type(error).__name__}: {error})"
        return [fault("gpu", text, package_cure("torch"))]
    torch = "a CPU build of PyTorch" if built is None else f"PyTorch built for CUDA {built}"
    try:
        now = snapshot()
    except NvmlUnavailable as error:
        found = f"none ({error.reason}); {torch}"
        if needed:
            cure = f"aflow-tune CONFIG engine=local, or {error.cure}"
            return [fault("gpu", f"{found}; engine: trinity needs one", cure)]
        return [ok("gpu", f"{found}; engine: local runs without")]
    driver, newest = now.driver or "unknown", now.cuda or "unknown"
    lines = [ok("gpu", f"driver {driver}, CUDA up to {newest}; {torch}")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        lines.append(note("gpu", f"CUDA_VISIBLE_DEVICES={visible!r} hides the others"))
    if built is None:
        cure = "python -m pip install --force-reinstall torch  # from an index with CUDA wheels"
        text = f"{torch} beside a GPU: it cannot use it"
        lines.append(fault("gpu", text, cure) if needed else note("gpu", text, cure))
    elif now.cuda is not None and _major(built) > _major(now.cuda):
        # Within a major version a newer CUDA runs on an older driver.
        cure = f"install a driver for CUDA {_major(built)}, or a PyTorch for {now.cuda}"
        lines.append(fault("gpu", f"{torch}, but the driver runs {now.cuda} at most", cure))
    if not now.devices:
        cure = "nvidia-smi  # the driver is there and lists no device"
        lines.append(fault("gpu", "no device", cure) if needed else note("gpu", "no device", cure))
    return lines + [_room(device) for device in now.devices]


def _room(device: Device) -> Line:
    check = f"gpu {device.label}"
    if device.problem is not None:
        cure = "nvidia-smi  # it may have fallen off the bus: restart the machine"
        return note(check, f"not usable: {device.problem}", cure)
    if device.memory_used is None or device.memory_total is None:
        return note(check, f"{device.name}: the driver does not tell its memory")
    free = device.memory_total - device.memory_used
    found = f"{device.name}: {free / GIB:.1f} of {device.memory_total / GIB:.1f} GiB free"
    if free < device.memory_total / 2:
        return note(check, f"{found}; others use it", "aflow-tune gpus  # shows who")
    return ok(check, found)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
