"""The `sandbox:` setting: a backend, and the packages that programs may import.

A policy is a string, the name of a backend followed by packages: `auto+numpy+sympy`. During a run
a context variable says what `auto` means. A package comes with the packages it requires and its
bundled libraries (`numpy.libs`); programs can read no other installed package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from aflow_tune.context import within
from aflow_tune.errors import BadInput, Fault
from aflow_tune.sandbox.types import Level

_TITLE = "There is no such sandbox."
POLICIES = ("auto", *(level.value for level in Level))

_policy: ContextVar[str] = ContextVar("aflow_tune_sandbox_policy", default="auto")


@contextlib.contextmanager
def use_policy(policy: str) -> Iterator[None]:
    """Resolve `auto` to this policy in the block and all it starts. Raises BadInput: unknown."""
    with within(_policy, meant(policy)):
        yield


def meant(policy: str) -> str:
    """`policy` with `auto` resolved by the context. Raises BadInput: there is no such policy."""
    backend, names = parts(policy)
    if backend not in POLICIES:
        expected = f"one of {', '.join(POLICIES)}"
        raise BadInput.of("unknown sandbox policy", "sandbox", expected, repr(policy), "use auto")
    if backend != "auto":
        return policy
    backend, more = parts(_policy.get())
    return "+".join(dict.fromkeys((backend, *more, *names)))


def parts(policy: str) -> tuple[str, tuple[str, ...]]:
    """The backend and the packages of a policy."""
    backend, *names = policy.split("+")
    return backend, tuple(names)


def of_setting(value: Any) -> str:
    """The policy of a `sandbox:` value: a backend, or a mapping with `policy` and `packages`.
    Raises BadInput: it is neither, or a package is not installed."""
    if isinstance(value, str):
        backend, names = parts(value)
    elif isinstance(value, Mapping) and not set(value) - {"policy", "packages"}:
        backend, names = value.get("policy", "auto"), value.get("packages") or ()
        if isinstance(names, str):
            names = (names,)
    else:
        backend, names = None, ()
    if backend not in POLICIES:
        expected = f"one of {', '.join(POLICIES)}, or {{policy: auto, packages: [numpy]}}"
        where = "sandbox" if backend is None else "sandbox.policy"
        raise BadInput.of(_TITLE, where, expected, f"{value!r:.80}", "write `sandbox: auto`")
    find_packages(tuple(names), "sandbox.packages")
    return "+".join(dict.fromkeys((backend, *names)))


MATHEMATICS = ("numpy", "sympy")
"""The packages that mathematical programs usually import."""


def installed(names: Sequence[str]) -> tuple[str, ...]:
    found = []
    for name in names:
        with contextlib.suppress(BadInput):
            find_packages((name,))
            found.append(name)
    return tuple(found)


@functools.lru_cache(maxsize=64)
def find_packages(
    names: tuple[str, ...], where: str = "sandbox: packages"
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The file of each importable module by name, requirements included, and the paths that must be
    readable to import them. Raises BadInput with every name that is not an installed package."""
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
            fix = "install it, or leave it out; name packages as programs import them: numpy"
            faults.append(Fault(place, "an installed package", f"{name!r:.80}: {found}", fix))
            continue
        files[name] = file
        whole = file.removesuffix("/__init__.py")
        folders[whole] = None
        for distribution in _distributions().get(name, ()):
            for libraries in {name, distribution}:
                beside = os.path.join(os.path.dirname(whole), f"{libraries}.libs")
                if os.path.isdir(beside):
                    folders[beside] = None
            pending += [(other, place) for other in _required(distribution)]
    if faults:
        raise BadInput("These packages cannot be given to programs.", faults)
    return files, tuple(folders)


def _file_of(name: object) -> tuple[str | None, str]:
    """The file of a module; or None, and why."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
        return None, "no plain name"
    if name in sys.stdlib_module_names:
        return None, "of the standard library, which is there already"
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not os.path.isfile(spec.origin):
        return None, "not installed, or a folder without __init__.py"
    return os.path.realpath(spec.origin), ""


@functools.cache
def _distributions() -> dict[str, list[str]]:
    """The distributions of each top-level module."""
    from importlib.metadata import packages_distributions  # takes long to import

    return {name: sorted(set(whose)) for name, whose in packages_distributions().items()}


def _required(distribution: str) -> list[str]:
    """Top-level modules of what a distribution requires on this machine, without extras."""
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
