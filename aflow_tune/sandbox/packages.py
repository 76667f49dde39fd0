"""Installed packages that sandboxed programs may import, by name: numpy, sympy and their like.

A package brings what its distribution requires and the libraries that came with it (`numpy.libs`),
and nothing else: programs get a finder for these names alone, and behind a wall no other folder of
installed packages can be read. Nothing is imported here.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from aflow_tune.errors import BadInput, Fault

MATHEMATICS = ("numpy", "sympy")
"""What programs that solve mathematics are written with."""


@dataclass(frozen=True)
class Packages:
    """Where packages and what they require lie."""

    files: tuple[tuple[str, str], ...] = ()
    """Name and file (`__init__.py` of a package) of each module that can be imported."""
    folders: tuple[str, ...] = ()
    """Folders and files that must be readable; links resolved."""


def installed(names: Sequence[str]) -> tuple[str, ...]:
    """Those of some names that `find` finds."""
    found = []
    for name in names:
        try:
            find((name,))
        except BadInput:
            continue
        found.append(name)
    return tuple(found)


@functools.lru_cache(maxsize=64)
def find(names: tuple[str, ...], where: str = "sandbox: packages") -> Packages:
    """Look packages up, with what they require.

    Raises:
        BadInput: with every name that is no package, or not one that is installed here.
    """
    faults: list[Fault] = []
    files: dict[str, str] = {}
    folders: dict[str, None] = {}
    pending = [(name, f"{where}[{number}]") for number, name in enumerate(names)]
    while pending:
        name, place = pending.pop(0)
        if name in files:
            continue
        file, found = _file_of(name)
        if file is None:
            cure = f"pip install {name}, or leave it out"
            if found != "not installed":
                cure = "name packages as programs import them, such as numpy"
            faults.append(Fault(place, "an installed package", f"{name!r:.80}: {found}", cure))
            continue
        files[name] = file
        whole = os.path.dirname(file) if os.path.basename(file) == "__init__.py" else file
        folders[whole] = None
        for distribution in _distributions().get(name, ()):
            for libraries in {name, distribution}:
                beside = os.path.join(os.path.dirname(whole), f"{libraries}.libs")
                if os.path.isdir(beside):
                    folders[beside] = None
            pending += [(other, place) for other in _required(distribution)]
    if faults:
        raise BadInput("These packages cannot be given to programs.", faults)
    return Packages(tuple(files.items()), tuple(folders))


def _file_of(name: object) -> tuple[str | None, str]:
    """The file of a module, or why there is none."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
        return None, "no plain name"
    if name in sys.stdlib_module_names:
        return None, "of the standard library, which is there already"
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None, "not installed"
    if spec.origin is None or not os.path.isfile(spec.origin):
        return None, "a folder without __init__.py"
    return os.path.realpath(spec.origin), ""


@functools.cache
def _distributions() -> dict[str, list[str]]:
    """Distributions by what can be imported of them."""
    from importlib.metadata import packages_distributions  # takes long to import

    found = packages_distributions()
    return {name: list(dict.fromkeys(whose)) for name, whose in found.items()}


def _required(distribution: str) -> list[str]:
    """The modules of what a distribution requires here, without its extras."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    wanted = set()
    for text in requires(distribution) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            wanted.add(canonicalize_name(requirement.name))
    return [
        name
        for name, whose in _distributions().items()
        if any(canonicalize_name(item) in wanted for item in whose) and not name.startswith("_")
    ]
