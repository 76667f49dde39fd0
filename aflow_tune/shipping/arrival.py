"""At the other end: the user's modules under the names that they have on the user's machine.

A worker that starts with `AFLOW_TUNE_SHIPMENT` in its environment calls `arrive()`. The names in
the manifest are then imported from the files that travelled, before anything of the same name
that the node happens to have, as they were on the user's machine; all other imports are left
alone. The user's folders come last on `sys.path`, for what is imported by a computed name.

On the user's own machine nothing is copied: the manifest alone leads to the files in place.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, NamespaceLoader, PathFinder
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault

VARIABLE = "AFLOW_TUNE_SHIPMENT"
"""Environment variable: the shipment's name, to be found on `sys.path`, or a manifest's path."""
PREFIX = "aflow_tune_shipment_"
MANIFEST = "manifest.json"
FILES = "files"
MARK = ".aflow-tune"
"""An empty file in the folder that the command was started in."""


@dataclass
class Arrival:
    """A shipment in this process."""

    base: Path | None
    """Where the files' former paths begin; None where they lie in their own places."""
    modules: dict[str, list[Any]]
    folders: list[str]
    roots: list[str]
    cwd: str
    conflicts: list[str] = field(default_factory=list)
    """Names that were imported from elsewhere before the shipment arrived."""

    def here(self, path: str) -> str:
        """Where a file or folder of the user's machine lies here."""
        return path if self.base is None else str(self.base / path.lstrip("/"))

    def relocated(self, path: str) -> str | None:
        """Where a path of the user's machine lies here, if it travelled."""
        if self.base is None or not path.startswith("/"):
            return None
        path = os.path.normpath(path)
        inside = any(path == root or path.startswith(f"{root}/") for root in self.roots)
        here = self.here(path)
        return here if inside and os.path.exists(here) else None


_arrived: Arrival | None = None


def arrive(shipment: str | None = None) -> Arrival | None:
    """Make the shipment importable in this process; None where there is none.

    Raises:
        FileNotFoundError: it is named, but not to be found.
    """
    global _arrived
    shipment = shipment or os.environ.get(VARIABLE)
    if not shipment or _arrived is not None:
        return _arrived
    manifest = _manifest(shipment)
    told = json.loads(manifest.read_text(encoding="utf-8"))
    in_place = not manifest.parent.name.startswith(PREFIX)
    arrival = Arrival(None if in_place else manifest.parent / FILES, **told)
    for name, (file, _) in arrival.modules.items():
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if name in sys.modules and loaded != (file and arrival.here(file)):
            arrival.conflicts.append(f"`{name}`, imported from {loaded} before")
    sys.meta_path.insert(0, _Finder(arrival))
    for folder in dict.fromkeys(arrival.here(folder) for folder in arrival.folders):
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.append(folder)
    if arrival.base is not None and os.path.isdir(arrival.here(arrival.cwd)):
        os.chdir(arrival.here(arrival.cwd))
    _arrived = arrival
    return arrival


def arrived() -> Arrival | None:
    """The shipment of this process, if there is one.

    Raises:
        BadInput: a module of the user's has the name of one that this worker had loaded already.
    """
    if _arrived is not None and _arrived.conflicts:
        raise BadInput(
            "A worker had loaded modules with the names of yours.",
            [
                Fault(f"process {os.getpid()}", "your modules", found, "rename your module")
                for found in _arrived.conflicts
            ],
        )
    return _arrived


def travelled(named: str) -> str:
    """A path of the settings, or `path/file.py:name`, as it is called here: in a submitted job what
    travelled lies elsewhere than on the user's machine."""
    file, colon, name = named.rpartition(":") if ".py:" in named else (named, "", "")
    arrival = arrived()
    moved = None if arrival is None else arrival.relocated(os.path.expanduser(file))
    return named if moved is None else f"{moved}{colon}{name}"


def conflicts() -> list[str]:
    """What this process had imported under the names of the user's modules before they came."""
    return [] if _arrived is None else list(_arrived.conflicts)


def settle(given: Any) -> Any:
    """A function that was sent by value, with the paths that it holds changed to those here.

    Only what travelled is changed; `moving.py` says where it is looked for.
    """
    arrival = arrived()
    if arrival is None or arrival.base is None:
        return given
    from aflow_tune.shipping.moving import move_paths

    return move_paths(given, arrival.relocated)


def _manifest(shipment: str) -> Path:
    if os.path.isabs(shipment):
        return Path(shipment)
    for entry in sys.path:
        manifest = Path(entry or ".").absolute() / shipment / MANIFEST
        if manifest.is_file():
            return manifest
    raise FileNotFoundError(
        f"the user's code ({shipment}) did not reach this process: it is in no folder of sys.path"
    )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of a shipment by the names in its manifest."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None or name not in self.arrival.modules:
            return None
        file, folders = self.arrival.modules[name]
        here = None if folders is None else [self.arrival.here(folder) for folder in folders]
        if file is not None:
            return importlib.util.spec_from_file_location(
                name, self.arrival.here(file), submodule_search_locations=here
            )
        return self._namespace(name, here or [])

    def _namespace(self, name: str, own: list[str]) -> ModuleSpec:
        """A package without a file, in all its portions: ours, then those that the node has."""
        found = PathFinder.find_spec(name, sys.path)
        # A package proper that the node has is another one: on the user's machine it was none.
        portions = found.submodule_search_locations if found and found.origin is None else None
        places = [*own, *(place for place in portions or () if place not in own)]
        loader = NamespaceLoader(name, places, lambda *_: None)
        spec = ModuleSpec(name, loader, is_package=True)
        spec.submodule_search_locations = loader._path  # type: ignore[attr-defined]
        return spec
