"""The machine itself: Python, the build of PyTorch, the sandbox, GPUs, room on disks.

PyTorch is read, not imported: what it was built for stands in its `torch/version.py`. On a disk a
file is really written, synced and removed: free space alone does not tell of quotas, rights or a
full table of files.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import psutil

from aflow_tune.config.clashes import matches
from aflow_tune.contract.import_faults import package_cure
from aflow_tune.doctor.lines import GIB, Line, fault, lacking, note, ok, size
from aflow_tune.gpus.devices import Device, NvmlUnavailable, snapshot

_PYTHONS = ">=3.11,<3.13"
"""Where this package is not installed and has no metadata to ask."""


def check_python() -> list[Line]:
    """The interpreter and the system under it."""
    version = platform.python_version()
    try:
        wanted = importlib.metadata.metadata("aflow-tune")["Requires-Python"] or _PYTHONS
    except (importlib.metadata.PackageNotFoundError, OSError, UnicodeDecodeError):
        wanted = _PYTHONS
    found = f"{version} ({sys.executable})"
    lines = [ok("python", found)]
    if not matches(version, wanted):
        cure = "python3.11 -m venv .venv && .venv/bin/pip install aflow-tune"
        lines = [fault("python", f"{found}; {wanted} is needed", cure)]
    cores, memory = os.cpu_count(), psutil.virtual_memory().total
    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    system = f"{machine}, {cores} cores, {memory / GIB:.0f} GiB of memory"
    if sys.platform == "linux":
        return [*lines, ok("platform", system)]
    untested = lacking(sys.platform != "darwin", "platform", f"{system}: untested", "use Linux")
    return [*lines, untested]


def torch_cuda() -> str | None:
    """The CUDA version that the installed PyTorch was built for; None: none, or no PyTorch.

    Raises:
        OSError: PyTorch is damaged.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return None if found is None else found[1]


def check_sandbox(policy: str = "auto", needed: bool = True) -> list[Line]:
    """The sandbox backend for programs written by a model, proved by starting one.

    Args:
        needed: False where the configuration runs no such program by itself.
    """
    from aflow_tune.sandbox import Level, detect
    from aflow_tune.sandbox.backends import INSTALL

    found = detect(policy)
    if found.level is Level.BUBBLEWRAP:
        return [ok("sandbox", "bubblewrap: one was started and proved to isolate")]
    if found.level is Level.UNSAFE_SUBPROCESS:
        text = "unsafe_subprocess: no isolation; programs of a model run with your rights"
        return [note("sandbox", text, f"{INSTALL} and write `sandbox: auto`")]
    if found.level is Level.LANDLOCK:
        text = f"landlock, the second choice ({found.why})"
        return [
            note("sandbox", text, INSTALL) if policy.startswith("auto") else ok("sandbox", text)
        ]
    cure = "sudo sysctl -w user.max_user_namespaces=15000  # docs/sandbox.md has the rest"
    if "util-linux" in found.why:
        cure = "sudo apt-get install -y util-linux, or export PATH=$PATH:/usr/bin"
    elif "bwrap is not installed" in found.why:
        cure = INSTALL
    text = f"none works, so programs of a model do not run ({found.why})"
    return [lacking(needed, "sandbox", text, cure)]


def check_gpus(needed: bool | None = None) -> list[Line]:
    """Driver, CUDA, the build of PyTorch, and each GPU.

    Args:
        needed: whether the run needs GPUs of this machine; None: that is not known.
    """
    try:
        built = torch_cuda()
    except (OSError, ValueError) as error:
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
        lines.append(lacking(needed, "gpu", f"{torch} beside a GPU: it cannot use it", cure))
    elif now.cuda is not None and int(built.split(".")[0]) > int(now.cuda.split(".")[0]):
        # Within a major version a newer CUDA runs on an older driver.
        cure = f"install a newer driver, or a PyTorch for CUDA {now.cuda}"
        lines.append(fault("gpu", f"{torch}, but the driver runs {now.cuda} at most", cure))
    if not now.devices:
        lines.append(lacking(needed, "gpu", "no device", "nvidia-smi  # it lists none either?"))
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


_PROBE_BYTES = 1 << 20
_LITTLE = GIB
"""Less free space than this is said, whatever the run writes."""


def check_folder(check: str, folder: Path, needed: float | None, move: str) -> list[Line]:
    """Whether `folder` (or what will hold it) can take `needed` bytes.

    Args:
        needed: None where it is not known what will be written.
        move: how another folder is chosen, as it is typed.
    """
    folder = Path(os.path.abspath(folder.expanduser()))
    there = folder
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return [fault(check, f"{there}: a file, where a folder is needed", move)]
        free = shutil.disk_usage(there).free
        with tempfile.NamedTemporaryFile(prefix=".aflow-tune-doctor-", dir=there) as file:
            file.write(secrets.token_bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            cure = f"free some room there (`df -h {shlex.quote(str(there))}`), or {move}"
            return [fault(check, f"{there}: nothing more can be written ({reason})", cure)]
        return [fault(check, f"{folder}: cannot be written ({there}: {reason})", move)]
    found = f"{folder}: {size(free)} free"
    if needed is not None:
        found += f", about {size(needed)} will be written"
        if needed > free:
            return [fault(check, found, f"free {size(needed - free)} there, or {move}")]
    if free < _LITTLE:
        return [note(check, found, f"free some there, or {move}")]
    return [ok(check, found)]
