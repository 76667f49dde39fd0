"""The machine itself: Python, the build of PyTorch, the wall around programs.

PyTorch is read, not imported: what it was built for stands in its `torch/version.py`.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import sys
from pathlib import Path

from aflow_tune.config.clashes import matches
from aflow_tune.doctor.lines import GIB, Line, fault, note, ok

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
    from aflow_tune.sandbox.backends import INSTALL

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
