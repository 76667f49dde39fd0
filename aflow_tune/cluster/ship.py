"""What a run's code needs on its workers, found before anything is started.

The tracing itself is in the room `shipping`. Here it is told what a configuration adds: the
modules that it names by dotted path, what `runtime_env` includes and excludes, and the run
folders that stay. Nothing of it may hold the value of a key.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from aflow_tune.cluster.by_value import stays
from aflow_tune.errors import BadInput, Fault
from aflow_tune.shipping.arrival import arrived
from aflow_tune.shipping.bundle import secrets_in
from aflow_tune.shipping.reach import modules_in_pickle, names_in_pickle
from aflow_tune.shipping.tracing import Trace, trace

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

Function = Callable[..., Any]
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_FILE_NAME = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow|txt|md|ya?ml|toml|py|gz|db|log)$")

READ_INSIDE = "read it inside the function, with os.environ: every worker has it"
CANNOT_BE_SENT = "A function cannot be sent to the workers."
NAME_IT = "give its name instead: `runtime_env: {secrets: [NAME]}`"


def trace_run(
    config: AflowConfig, functions: Iterable[Function | None], further: Iterable[Any] = ()
) -> tuple[Trace, bytes]:
    """What the functions of a run and the modules that its configuration names need; and the
    functions as bytes, which shows that they can be sent.

    In a submitted job the client has traced and sent everything, and only what is said of the
    nodes is asked again.

    Args:
        further: other objects whose code has to travel, such as operators.

    Raises:
        BadInput: something that a function holds cannot be pickled; it is named.
    """
    given = [function for function in functions if function is not None]
    objects = [*given, *further]
    modules = _named_modules(config)
    runs = [Path(config.checkpoint_root_dir)] if config.checkpoint_root_dir else []
    in_job = is_submitted()
    include = () if in_job else [Path(name).expanduser() for name in config.runtime_env.include]
    content = pack(given)
    # Objects hide what they hold; what they become when they are sent does not.
    modules |= modules_in_pickle(content)
    found = trace(objects, modules, include, runs, config.runtime_env.exclude)
    if found.without_file:
        content = pack(given, found.without_file)
    if in_job:
        found.faults.clear()
    return found, content


def is_submitted() -> bool:
    """Whether this process is a job that `aflow-tune submit` sent."""
    arrival = arrived()
    return arrival is not None and arrival.base is not None


def refuse_secrets(content: bytes, secrets: Mapping[str, str], where: str, cure: str) -> None:
    """Refuse to send what holds the value of a key: clusters log it and keep it on disk.

    Raises:
        BadInput: it does; the variables are named.
    """
    faults = list(secrets_in(content, secrets, where, cure))
    if faults:
        raise BadInput("A key would travel in clear.", faults)


def _named_modules(config: AflowConfig) -> set[str]:
    """The modules of dotted paths in the settings, such as that of a policy loss."""
    named = [value for value in config.flatten().values() if isinstance(value, str)]
    dotted = [value for value in named if _DOTTED.fullmatch(value)]
    modules = {value.rpartition(".")[0] for value in dotted if not _FILE_NAME.search(value)}
    return {name for name in modules if "." in name or _holds_code(name)}


def _holds_code(name: str) -> bool:
    """Whether a top-level module has a file: no class is in a mere folder of that name."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return name in sys.modules
    return spec is not None and spec.origin is not None


def pack(functions: Iterable[Function | None], without_file: Iterable[str] = ()) -> bytes:
    """The functions as bytes. Modules without a file are sent by value, all others by the names
    that the shipment gives them.

    Raises:
        BadInput: something that a function holds cannot be pickled, or only by a name that no
            worker knows; it is named.
    """
    for name in without_file:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    given = [function for function in functions if function is not None]
    try:
        content: bytes = cloudpickle.dumps(given)
    except Exception as error:  # whatever the objects' own __reduce__ raises
        raise BadInput(
            CANNOT_BE_SENT,
            [_culprit(function) or _unpicklable(function, error) for function in given],
        ) from error
    missed = sorted(name for name in names_in_pickle(content) if stays(name[0]))
    if missed:
        raise BadInput(CANNOT_BE_SENT, [_only_by_name(*name) for name in missed])
    return content


def _culprit(function: Function) -> Fault | None:
    """The name of the function's module that holds what cannot be pickled."""
    plain = getattr(function, "func", function)
    scope = getattr(plain, "__globals__", {})
    code = getattr(plain, "__code__", None)
    for name in code.co_names if code else ():
        if name not in scope:
            continue
        try:
            cloudpickle.dumps(scope[name])
        except Exception as error:  # as above
            return Fault(
                f"{code.co_filename}:{code.co_firstlineno}" if code else str(function),
                f"`{name}` in a form that can be sent to another process",
                f"{type(scope[name]).__name__}: {error}",
                f"make `{name}` inside the function, or in a module that the function imports",
            )
    return None


def _only_by_name(module: str, name: str) -> Fault:
    home = sys.modules.get(module)
    kind = type(getattr(home, name.partition(".")[0], None)).__name__
    return Fault(
        getattr(home, "__file__", None) or module,
        f"`{name or module}` in a form that can be sent to another process",
        f"a {kind} that is sent by its name only, in a script that workers do not have",
        f"move `{name or module}` into a module that the script imports",
    )


def _unpicklable(function: Function, error: Exception) -> Fault:
    return Fault(
        getattr(function, "__qualname__", type(function).__name__),
        "a function that can be sent to another process",
        f"{type(error).__name__}: {error}",
        "make files, clients and locks inside the function instead of around it",
    )


def user_modules(functions: Iterable[Function | None]) -> list[str]:
    """Names of the loaded modules of the user's own that functions come from, siblings that
    they imported among them."""
    given = [function for function in functions if function is not None]
    found = trace(given)
    return sorted(
        name
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None)) is not None
        and name != "__main__"
        and Path(file).absolute() in found.files
        and name.partition(".")[0] in found.modules
    )
