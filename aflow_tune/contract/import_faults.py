"""What went wrong while something was imported: a user's file, or a package that is damaged."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import sysconfig
import traceback
from pathlib import Path

from aflow_tune.errors import Fault

_AGENTSCOPE_TUNER = ("agentscope.tuner", "agentscope.tune")


def import_fault(spec: str, error: BaseException) -> Fault:
    """The fault behind an exception that importing `spec` raised.

    Its place is the last line of the user's own code that led there; `found` shows that line.
    """
    if isinstance(error, SyntaxError) and error.filename:
        line = (error.text or "").strip()
        return Fault(
            f"{error.filename}:{error.lineno}",
            "Python that can be parsed",
            f"{type(error).__name__}: {error.msg}" + (f" in `{line}`" if line else ""),
            "correct this line",
        )
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    where, line = spec, ""
    if own:
        where, line = f"{own[-1].filename}:{own[-1].lineno}", own[-1].line or ""
    message = ": ".join(filter(None, (type(error).__name__, str(error)))).splitlines()[0]
    return Fault(
        where,
        f"{spec} to be importable",
        message + (f" at `{line}`" if line else ""),
        _cure(error, line or spec),
    )


def package_fault(error: BaseException) -> Fault | None:
    """The fault behind an import of a package that is missing or damaged; None for other errors.

    What fails is in site-packages, or not there at all, and never a file of ours.
    """
    if isinstance(error, importlib.metadata.PackageNotFoundError):  # its name may be a sentence
        name = re.search(r"[\w.-]+(?=[<>=!~])|^[\w.-]+$", str(error.name))
        top = name[0] if name else "that it asks for"
    elif isinstance(error, ModuleNotFoundError):
        top = str(error.name or "").partition(".")[0]
    else:
        top = _being_imported(error)
    if top in ("", Path(__file__).parents[1].name):
        return None
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
    expected = "that it can be imported"
    return Fault(f"the package {top}", expected, message, package_cure(top))


def _being_imported(error: BaseException) -> str:
    """The installed package whose module failed while it was imported; empty if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    modules = [frame.filename for frame in frames if frame.name == "<module>"]
    if isinstance(error, SyntaxError):
        statement = re.match(r"(?:from|import) (\w+)", (frames[-1].line or "") if frames else "")
        if not error.filename and statement:  # bytes that are no text at all
            return statement[1]
        modules.append(error.filename or "")
    for place in [Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")]:
        if modules and Path(modules[-1]).is_relative_to(place):
            return Path(modules[-1]).relative_to(place).parts[0].partition(".")[0]
    return ""


def package_cure(module: str) -> str:
    """The command that brings an installed package, or one that others need, back."""
    names = importlib.metadata.packages_distributions().get(module)
    if not names:
        return "python -m pip install 'aflow-tune'"
    version = importlib.metadata.version(names[0]).partition("+")[0]
    return f"python -m pip install --force-reinstall --no-deps '{names[0]}=={version}'"


def _cure(error: BaseException, line: str) -> str:
    if any(name in line for name in _AGENTSCOPE_TUNER):
        return (
            "import WorkflowOutput, JudgeOutput and tune from `aflow_tune`: AgentScope's own "
            "module does not import without an extra"
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        if top in sys.modules:
            return f"correct the module's name: `{top}` is there, `{error.name}` is not"
        return f"install the package that provides `{top}`, or correct the name"
    if isinstance(error, ImportError) and error.path:
        return f"that module is {error.path}; correct the name, or rename a file of yours"
    if isinstance(error, SystemExit):
        return 'put what starts the script under `if __name__ == "__main__":`'
    return "make the file importable: `python -c` with this import shows the whole traceback"


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    places = {Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib", "stdlib")}
    if "site-packages" in path.parts:  # of an environment that this one borrows from
        return False
    return not any(path.is_relative_to(place) for place in (*places, Path(__file__).parents[1]))
