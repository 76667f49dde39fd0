"""Explains failed imports: of a user's file, or of a missing or damaged package."""

from __future__ import annotations

import importlib.metadata
import re
import sysconfig
import traceback
from pathlib import Path

from aflow_tune.errors import Fault

_OURS = Path(__file__).parents[1]


def import_fault(spec: str, error: BaseException) -> Fault:
    """The fault for an exception that importing `spec` raised, at the last line of the user's own
    code in the traceback."""
    where, line, message = spec, "", str(error)
    if isinstance(error, SyntaxError) and error.filename:
        where, line = f"{error.filename}:{error.lineno}", (error.text or "").strip()
        message = error.msg
    else:
        own = [one for one in traceback.extract_tb(error.__traceback__) if _is_users(one.filename)]
        if own:
            where, line = f"{own[-1].filename}:{own[-1].lineno}", own[-1].line or ""
    found = ": ".join(filter(None, (type(error).__name__, message))).splitlines()[0]
    fix = "correct this line: `python -c` with this import shows the whole traceback"
    if "agentscope.tune" in (line or spec):
        fix = (
            "import WorkflowOutput, JudgeOutput and tune from `aflow_tune`: AgentScope's own "
            "module does not import without an extra"
        )
    elif isinstance(error, ImportError) and "'TrinityChatModel'" in message:
        fix = "import TrinityChatModel from `aflow_tune`: AgentScope 2 has it no more"
    elif isinstance(error, ModuleNotFoundError) and error.name:
        fix = f"install the package that provides `{error.name}`, or correct the name"
    elif isinstance(error, ImportError) and error.path:
        fix = f"that module is {error.path}; correct the name, or rename a file of yours"
    return Fault(where, f"{spec} to be importable", found + (f" at `{line}`" * bool(line)), fix)


def _is_users(filename: str) -> bool:
    path, standard = Path(filename).resolve(), Path(sysconfig.get_path("stdlib")).resolve()
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    ours = path.is_relative_to(_OURS) or path.is_relative_to(standard)
    return not (filename.startswith("<") or installed or ours)


def package_fault(error: BaseException) -> Fault | None:
    """The fault for a failed import of a missing or damaged package; None for other errors."""
    if isinstance(error, importlib.metadata.PackageNotFoundError):  # its `name` may be a sentence
        name = re.search(r"[\w.-]+(?=[<>=!~])|^[\w.-]+$", str(error.name))
        top = name[0] if name else "that it asks for"
    elif isinstance(error, ModuleNotFoundError):
        top = str(error.name or "").partition(".")[0]
    else:  # the installed package whose module failed while it was imported
        frames = traceback.extract_tb(error.__traceback__)
        modules = [frame.filename for frame in frames if frame.name == "<module>"]
        modules += [error.filename or ""] if isinstance(error, SyntaxError) else []
        place = re.search(r"(?:site|dist)-packages/([^/.]+)", modules[-1] if modules else "")
        top = place[1] if place else ""
    if top in ("", _OURS.name):
        return None
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    return Fault(f"the package {top}", "that it can be imported", message, package_cure(top))


def package_cure(module: str) -> str:
    """The pip command that reinstalls the package of a module, or this one if it is unknown."""
    names = importlib.metadata.packages_distributions().get(module)
    if not names:
        return "python -m pip install 'aflow-tune'"
    version = importlib.metadata.version(names[0]).partition("+")[0]
    return f"python -m pip install --force-reinstall --no-deps '{names[0]}=={version}'"
