"""Checks of the machine: Python, installed versions, the sandbox, GPUs, folders to write to.

Known version conflicts (`config/clashes.py`) and missing requirements are faults. Versions that
differ from the set tested together (`tested_cpu.txt`, derived from `constraints.txt`) are a note.
PyTorch's version file is read; PyTorch is not imported. A folder is checked by writing a file: free
space says nothing about quotas or permissions.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

import psutil

from aflow_tune.config import clashes
from aflow_tune.doctor.lines import Line, fault, lacking, note, ok
from aflow_tune.gpus.devices import NvmlUnavailable, snapshot

GIB = 2**30
_PYTHONS = ">=3.11,<3.13"
_TESTED = resources.files("aflow_tune.doctor") / "tested_cpu.txt"
_SHOWN = ("trinity-rft", "verl", "agentscope", "ray", "torch", "transformers")
_EXTRAS = ("vllm", "bitsandbytes")
"""Also shown; not needed."""
_MOST_NAMED = 8


def check_python() -> list[Line]:
    version = platform.python_version()
    found = f"{version} ({sys.executable})"
    lines = [ok("python", found)]
    if not clashes.matches(version, _PYTHONS):
        cure = "python3.11 -m venv .venv && .venv/bin/pip install aflow-tune"
        lines = [fault("python", f"{found}; {_PYTHONS} is needed", cure)]
    cores, memory = os.cpu_count(), psutil.virtual_memory().total
    machine = f"{platform.system()} {platform.release()} {platform.machine()}"
    system = f"{machine}, {cores} cores, {memory / GIB:.0f} GiB of memory"
    if sys.platform == "linux":
        return [*lines, ok("platform", system)]
    untested = lacking(sys.platform != "darwin", "platform", f"{system}: untested", "use Linux")
    return [*lines, untested]


def check_versions(distribution: str = "aflow-tune") -> list[Line]:
    """Lines about the installed packages; `distribution` is the one whose requirements count."""
    installed = clashes.installed_versions()
    shown = installed | clashes.installed_versions(_EXTRAS)
    told = ", ".join(f"{name} {shown.get(name, 'none')}" for name in (*_SHOWN, *_EXTRAS))
    lines = [ok("versions", told)]
    for clash, found in clashes.known_clashes(installed):
        lines.append(fault("versions", f"{found}: {clash.reason}", clashes.cure_of(clash)))
    declared, wanted = clashes.requirements_of(distribution), {}
    if not declared:  # a checkout that is not installed declares nothing
        wanted = dict.fromkeys(clashes.missing(installed), "aflow-tune")
    for name in clashes.NEEDED:
        wanted |= {str(need): name for need in clashes.requirements_of(name)}
    wanted |= {str(need): distribution for need in declared}
    for need, by in wanted.items():
        name = re.split(r"[^\w.-]", need)[0]
        if not clashes.installed_versions((name,)):
            lines.append(
                fault("versions", f"{name} is not installed; {by} needs it", clashes.install(need))
            )
    if "vllm" in installed:  # the tested set is for installations without vLLM
        return lines
    tested = dict(line.split("==") for line in _TESTED.read_text(encoding="utf-8").split())
    other = {
        name: f"{name} {version} (tested {tested[name]})"
        for name, version in sorted(clashes.installed_versions(tuple(tested)).items())
        if not clashes.matches(version, f"=={tested[name]}")
    }
    if not other:
        return [*lines, ok("versions", "as tested together")]
    cure = f"python -m pip install -c {Path(str(_TESTED))} {' '.join(other)}"
    found = f"{len(other)} not as tested: {', '.join(list(other.values())[:_MOST_NAMED])}"
    return [*lines, note("versions", found, cure)]


def check_sandbox(policy: str = "auto", needed: bool = True) -> list[Line]:
    """The sandbox for programs of a model, verified by starting one. `needed`: the configuration
    runs such programs, so a missing sandbox is a fault."""
    from aflow_tune.sandbox import Level, detect
    from aflow_tune.sandbox.backends import INSTALL

    found = detect(policy)
    if found.level is Level.BUBBLEWRAP:
        return [ok("sandbox", "bubblewrap: one was started and proved to isolate")]
    if found.level is Level.UNSAFE_SUBPROCESS:
        text = "unsafe_subprocess: no isolation; programs of a model run with your rights"
        return [note("sandbox", text, f"{INSTALL} and write `sandbox: auto`")]
    if found.level is Level.LANDLOCK:
        text, chosen = f"landlock, the second choice ({found.why})", not policy.startswith("auto")
        return [ok("sandbox", text) if chosen else note("sandbox", text, INSTALL)]
    cure = "sudo sysctl -w user.max_user_namespaces=15000  # docs/sandbox.md has the rest"
    if "util-linux" in found.why:
        cure = "sudo apt-get install -y util-linux, or export PATH=$PATH:/usr/bin"
    elif "bwrap is not installed" in found.why:
        cure = INSTALL
    text = f"none works, so programs of a model do not run ({found.why})"
    return [lacking(needed, "sandbox", text, cure)]


def check_gpus(needed: bool | None = None) -> list[Line]:
    """Driver, CUDA, the build of PyTorch, and each GPU. `needed`: whether the run needs GPUs here;
    None: unknown."""
    built = torch_cuda()
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
    if built is None:
        cure = "python -m pip install --force-reinstall torch  # from an index with CUDA wheels"
        lines.append(lacking(needed, "gpu", f"{torch} beside a GPU: it cannot use it", cure))
    elif now.cuda is not None and int(built.split(".")[0]) > int(now.cuda.split(".")[0]):
        # Within a major version of CUDA a newer build runs on an older driver.
        cure = f"install a newer driver, or a PyTorch for CUDA {now.cuda}"
        lines.append(fault("gpu", f"{torch}, but the driver runs {now.cuda} at most", cure))
    if not now.devices:
        lines.append(lacking(needed, "gpu", "no device", "nvidia-smi  # it lists none either?"))
    for device in now.devices:
        check, total, used = f"gpu {device.label}", device.memory_total, device.memory_used
        if device.problem is not None:
            cure = "nvidia-smi  # it may have fallen off the bus: restart the machine"
            lines.append(note(check, f"not usable: {device.problem}", cure))
        elif used is None or total is None:
            lines.append(note(check, f"{device.name}: the driver does not tell its memory"))
        else:
            text = f"{device.name}: {(total - used) / GIB:.1f} of {total / GIB:.1f} GiB free"
            busy = note(check, f"{text}; others use it", "aflow-tune gpus  # shows who")
            lines.append(busy if used > total / 2 else ok(check, text))
    return lines


def torch_cuda() -> str | None:
    """The CUDA version that PyTorch was built for; None: a CPU build, or no PyTorch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b[^=\n]*= *'([\d.]+)'", text, re.MULTILINE)
    return None if found is None else found[1]


def check_folder(folder: Path, move: str) -> list[Line]:
    """Whether `folder` (or its nearest parent) is writable. `move`: how to choose another one."""
    folder = Path(os.path.abspath(folder.expanduser()))
    there = folder
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            return [fault("disk", f"{there}: a file, where a folder is needed", move)]
        free = shutil.disk_usage(there).free
        with tempfile.NamedTemporaryFile(prefix=".aflow-tune-doctor-", dir=there) as file:
            file.write(secrets.token_bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        return [fault("disk", f"{folder}: cannot be written ({there}: {reason})", move)]
    found, cure = f"{folder}: {free / GIB:.1f} GiB free", f"free some there, or {move}"
    return [note("disk", found, cure) if free < GIB else ok("disk", found)]
