"""The machine itself: Python, the build of PyTorch, the sandbox, GPUs, room on disks.

PyTorch is read, not imported: what it was built for stands in its `torch/version.py`. What the GPU
driver says is read in `aflow_tune/gpus/`; one that hangs is cut off by the time of the check. On a
disk a file is really written, synced and removed: free space alone does not tell of quotas, rights
or a full table of files.
"""

from __future__ import annotations

import ast
import errno
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import shlex
import shutil
import sys
from pathlib import Path

from aflow_tune.config.clashes import matches
from aflow_tune.contract.import_faults import package_cure
from aflow_tune.doctor.lines import GIB, Line, fault, note, ok, size
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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = _memory()
    amount = f", {memory / GIB:.0f} GiB of memory" if memory else ""
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {cores} cores{amount}"
    if sys.platform == "linux":
        lines.append(ok("platform", system))
    elif sys.platform == "darwin":
        lines.append(note("platform", f"{system}: untested", "use Linux for what has to work"))
    else:
        cure = "use Linux; on Windows inside WSL 2"
        lines.append(fault("platform", f"{system}: not supported", cure))
    return lines


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def torch_cuda() -> str | None:
    """The CUDA version that the installed PyTorch was built for; None: none, or no PyTorch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"))
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.AnnAssign):
            target = node.target
        if isinstance(target, ast.Name) and target.id == "cuda":
            value = getattr(node, "value", None)
            constant = value.value if isinstance(value, ast.Constant) else None
            return constant if isinstance(constant, str) else None
    return None


def check_sandbox(policy: str = "auto", needed: bool = True) -> list[Line]:
    """The wall that programs written by a model run behind, proved by starting one.

    Args:
        needed: False where the configuration runs no such program by itself.
    """
    from aflow_tune.sandbox import Level, detect
    from aflow_tune.sandbox.walls import INSTALL

    found = detect(policy)
    if found.level is Level.BUBBLEWRAP:
        return [ok("sandbox", "bubblewrap: one was started and its wall seen to stand")]
    if found.level is Level.UNSAFE_SUBPROCESS:
        text = "unsafe_subprocess: no wall; programs of a model run with your rights"
        return [note("sandbox", text, f"{INSTALL} and write `sandbox: auto`")]
    if found.level is Level.LANDLOCK:
        text = f"landlock, the second wall ({found.why})"
        return [
            note("sandbox", text, INSTALL) if policy.startswith("auto") else ok("sandbox", text)
        ]
    text = f"none can be built, so programs of a model do not run ({found.why})"
    cure = INSTALL
    if "bwrap is not installed" not in found.why:
        cure = "sudo sysctl -w user.max_user_namespaces=15000  # docs/sandbox.md has the rest"
    if "util-linux" in found.why:
        cure = "sudo apt-get install -y util-linux, or export PATH=$PATH:/usr/bin"
    if sys.platform != "linux":
        cure = "use a Linux machine or container, where a wall can be built"
    return [fault("sandbox", text, cure) if needed else note("sandbox", text, cure)]


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


PROBE_BYTES = 1 << 20
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
        _write(there)
    except OSError as error:
        return [_unwritable(check, folder, there, error, move)]
    found = f"{folder}: {size(free)} free"
    if needed is not None:
        found += f", about {size(needed)} will be written"
    if needed is not None and needed > free:
        return [fault(check, found, f"free {size(needed - free)} there, or {move}")]
    if free < _LITTLE:
        return [note(check, found, f"free some there, or {move}")]
    return [ok(check, found)]


def _unwritable(check: str, folder: Path, there: Path, error: OSError, move: str) -> Line:
    """`there` is the nearest folder above `folder` that exists, as far as can be seen."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        found = f"{there}: nothing more can be written ({reason})"
        return fault(
            check, found, f"free some room there (`df -h {shlex.quote(str(there))}`), or {move}"
        )
    found = f"{folder}: cannot be written ({there}: {reason})"
    if error.errno not in (errno.EACCES, errno.EPERM):
        return fault(check, found, move)
    name = shlex.quote(str(folder))
    return fault(check, found, f"{move}, or sudo mkdir -p {name} && sudo chown $(id -un) {name}")


def _write(folder: Path) -> None:
    path = folder / f".aflow-tune-doctor-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        block, left = secrets.token_bytes(PROBE_BYTES), PROBE_BYTES
        while left:
            left -= os.write(descriptor, block[-left:])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()
