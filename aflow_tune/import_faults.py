"""What went wrong while a user's file was imported, told with the user's own line."""

from __future__ import annotations

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
    return not any(path.is_relative_to(place) for place in (*places, Path(__file__).parent))
