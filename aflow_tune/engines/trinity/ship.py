"""How user code reaches the workers: by value.

A function from a file or from a folder that only this process knows cannot be imported in a
Ray worker. Its module, and every module of the same folder that it imported, is therefore
pickled by value. What is installed (in site-packages or the standard library) travels by
reference. What a function imports only while it runs is found in `import_folders()`, as long
as the worker sees the same disk.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import cloudpickle

_PACKAGE_DIR = Path(__file__).resolve().parents[2]


def ship_by_value(functions: Iterable[Callable[..., Any] | None]) -> list[str]:
    """Register the user modules behind `functions` for pickling by value.

    A function that is an object may hold others: it names them in `carries`.

    Returns the names of the modules registered.
    """
    given = [function for function in functions if function]
    given += [inner for function in given for inner in getattr(function, "carries", ())]
    roots = {root for function in given for root in _folders(function)}
    registered = []
    for name, module in list(sys.modules.items()):
        path = _source(module)
        if path is None or name == "__main__" or not _belongs(path, roots):
            continue
        cloudpickle.register_pickle_by_value(module)
        registered.append(name)
    return sorted(registered)


def import_folders() -> list[str]:
    """Folders of user code that this process imports from, in order."""
    installed = tuple(Path(prefix).resolve() for prefix in {sys.prefix, sys.base_prefix})
    folders = [Path(entry).resolve() for entry in sys.path]
    return [
        str(folder)
        for folder in dict.fromkeys(folders)
        if folder.is_dir() and not any(folder.is_relative_to(place) for place in installed)
    ]


def see_import_folders(folders: Iterable[str]) -> None:
    """In a worker: import from these folders too, after everything that is installed."""
    sys.path += [folder for folder in folders if folder not in sys.path]


def _folders(function: Callable[..., Any]) -> Iterable[Path]:
    unwrapped = inspect.unwrap(getattr(function, "func", function))
    if not hasattr(unwrapped, "__code__"):
        unwrapped = type(unwrapped)
    module = sys.modules.get(getattr(unwrapped, "__module__", ""))
    path = _source(module) if module else None
    if path is None or _installed(path):
        return
    top_level = module.__name__.partition(".")[0] if module else ""
    package = sys.modules.get(top_level)
    package_path = _source(package) if package is not None else None
    yield (package_path or path).parent if package_path else path.parent


def _source(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _installed(path: Path) -> bool:
    return any(path.is_relative_to(place) for place in (*_install_folders(), _PACKAGE_DIR))


@functools.cache
def _install_folders() -> tuple[Path, ...]:
    """Asked of every module of the process: looking them up each time would take seconds."""
    keys = ("purelib", "platlib", "stdlib")
    return tuple({Path(sysconfig.get_path(key)).resolve() for key in keys})


def _belongs(path: Path, roots: set[Path]) -> bool:
    return not _installed(path) and any(path.is_relative_to(root) for root in roots)
