"""Installed versions that are known to break, each with its reason and its cure.

The table is data. It is judged on the metadata of what is installed, without importing any of
it: several of these clashes break the very import. It is used by `aflow-tune doctor`, for every
node of a cluster, and at the start of every command that needs Trinity, which refuses.
`packaging` may be missing as well, and is imported where it is used.

How each line was found: 'seen' means that the versions were installed and the failure was seen;
'read' that it follows from the installed sources or from the package's own requirements.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aflow_tune.contract.import_faults import package_cure
from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Installed = Mapping[str, str]
"""Version by name of the distribution; what is not installed is not in it."""


@dataclass(frozen=True)
class Clash:
    """Versions of one distribution that break, perhaps only beside others."""

    name: str
    breaks: str
    """Specifiers of the versions that break."""
    reason: str
    cure: str
    """Requirements to install."""
    beside: Mapping[str, str | None] = field(default_factory=dict)
    """Only if these are installed in such versions too; None: only if it is not installed."""


CLASHES: tuple[Clash, ...] = (
    Clash(
        "trinity-rft",
        "!=0.6.0",
        # read: our adapter, Explorer and Trainer subclass what is not a public interface
        "our adapter, explorer and trainer follow the interfaces of exactly 0.6.0",
        "trinity-rft==0.6.0",
    ),
    Clash(
        "vllm",
        "<0.22.1",
        # read: trinity/common/models/vllm_extension.py
        "Trinity's weight transfer imports pack_tensors, which came with 0.22.1; its own "
        "metadata asks for 0.19.1 only",
        "vllm>=0.22.1,<=0.23.0",
    ),
    Clash(
        "verl",
        ">=0.9.dev0",
        # read: the requirements of verl 0.9.0 and of trinity-rft 0.6.0
        "0.9 wants transformers below 5.11 and numpy 2, Trinity wants transformers 5.12.1 or later",
        "verl==0.8.0",
    ),
    Clash(
        "verl",
        "<0.8",
        # read: trinity/trainer/trainer.py, is_verl_legacy
        "Trinity runs other code with it, which was never tried with ours",
        "verl==0.8.0",
    ),
    Clash(
        "peft",
        ">=0.21.dev0",
        # seen: get_peft_model_state_dict of a layer with its own state dict: 0 tensors with 0.21.0,
        # 14 with 0.18 to 0.20
        "verl collects an adapter layer by layer and gets nothing: the sampler never has what was "
        "trained",
        "peft>=0.18,<0.21",
    ),
    Clash(
        "agentscope",
        ">=2.dev0",
        # read: agentscope 2.0.11 has neither agentscope.model.TrinityChatModel nor the tuner
        "2.0 dropped TrinityChatModel, which workflow functions are given",
        "agentscope>=1.0.19,<2",
    ),
    Clash(
        "agentscope",
        "<1.0.19",
        "it has no TrinityChatModel as it is used here",
        "agentscope>=1.0.19,<2",
    ),
    Clash(
        "pyarrow",
        ">=26.dev0",
        # seen: 26.0.1 with numpy 1.26.4: 'pyarrow requires NumPy 2.0 or newer'
        "it needs numpy 2: `import datasets` fails and every Ray actor dies",
        "pyarrow>=24,<26",
        {"numpy": "<2"},
    ),
    Clash(
        "mcp",
        ">=2.dev0",
        # seen: 2.3.0: no streamablehttp_client in mcp.client.streamable_http
        "it renamed what `import agentscope` imports",
        "mcp>=1.13,<2",
    ),
    Clash(
        "SQLAlchemy",
        ">=2.1.dev0",
        # seen: 2.1.9 without greenlet: `import agentscope` fails in sqlalchemy.ext.asyncio
        "it no longer brings greenlet, without which `import agentscope` fails",
        "sqlalchemy[asyncio]>=2.0,<2.1",
        {"greenlet": None},
    ),
    Clash(
        "omegaconf",
        ">=2.4.dev0",
        # seen: 2.4.0: no get_yaml_loader in omegaconf._utils; hydra-core wants < 2.4
        "it dropped the YAML loader that configurations are read with, and hydra (of verl) wants "
        "less than 2.4",
        "omegaconf>=2.3,<2.4",
    ),
    Clash(
        "transformers",
        "<5.12.1",
        # read: the requirements of trinity-rft 0.6.0
        "Trinity wants 5.12.1 or later",
        "transformers>=5.12.1,<6",
    ),
)

DOUBTS: tuple[Clash, ...] = (
    Clash(
        "openai",
        ">=3.dev0",
        # seen: 3.54.0 imports beside agentscope; no call was tried
        "untested: structured answers are parsed with helpers of 2.x",
        "openai>=2,<3",
    ),
    Clash(
        "vllm",
        ">0.23.0",
        "untested: Trinity patches vLLM's inside and says 0.23.0 at most",
        "vllm>=0.22.1,<=0.23.0",
    ),
    Clash("transformers", ">=6.dev0", "untested", "transformers>=5.12.1,<6"),
)
"""Not known to break and not refused, only told by `doctor`."""

UNREADABLE = "unreadable"
"""Stands for the version of what is installed with METADATA that cannot be read."""

NEEDED = ("torch", "ray", "trinity-rft", "transformers", "agentscope", "omegaconf")
"""Without these nothing that trains can be imported."""

WATCHED: tuple[str, ...] = tuple(
    dict.fromkeys(
        [
            *NEEDED,
            *(name for clash in (*CLASHES, *DOUBTS) for name in (clash.name, *clash.beside)),
            "torchvision",
        ]
    )
)
"""Every distribution that a judgement here looks at."""


def installed_versions(names: tuple[str, ...] = WATCHED) -> dict[str, str]:
    """The versions of those that are installed, from their metadata; nothing is imported."""
    found = {}
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        except (OSError, UnicodeDecodeError):  # what imports it reads it too, and fails
            version = UNREADABLE
        if version:  # a left-over folder without METADATA has none
            found[name] = version
    return found


def known_clashes(installed: Installed) -> list[tuple[Clash, str]]:
    """Each clash of `CLASHES` that is installed, with the versions found in words."""
    found = [_without_metadata(name) for name, text in installed.items() if text == UNREADABLE]
    found += _judged(CLASHES, installed)
    vision = _torchvision(installed)
    return found if vision is None else [*found, vision]


def doubtful(installed: Installed) -> list[tuple[Clash, str]]:
    """The same for `DOUBTS`."""
    return _judged(DOUBTS, installed)


def missing(installed: Installed) -> list[str]:
    """What is needed and not installed."""
    return [name for name in NEEDED if name not in installed]


def hollow(installed: Installed) -> list[str]:
    """What is needed and installed by its metadata only: its modules are not there."""
    return [name for name in NEEDED if name in installed and not _is_there(module_of(name))]


def module_of(name: str) -> str:
    """The module of a distribution of `NEEDED`."""
    return "trinity" if name == "trinity-rft" else name


def _is_there(module: str) -> bool:
    if module in sys.modules:
        return True
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def install(*requirements: str) -> str:
    """The command that installs these into the environment that runs us."""
    return f"python -m pip install {' '.join(repr(text) for text in requirements)}"


def cure_of(clash: Clash) -> str:
    """The command that ends a clash."""
    return clash.cure if " " in clash.cure else install(clash.cure)


@functools.cache
def refuse_clashes() -> None:
    """Refuse to start with versions that are known to break, once a process.

    Raises:
        BadInput: with each of them, and with what is not installed at all.
    """
    installed = installed_versions()
    faults = [
        Fault(
            f"the installed {clash.name}", f"another version: {clash.reason}", found, cure_of(clash)
        )
        for clash, found in known_clashes(installed)
    ]
    faults += [
        Fault(f"the package {name}", "that it is installed", "it is not", install("aflow-tune"))
        for name in missing(installed)
    ]
    for name in hollow(installed):
        cure = package_cure(module_of(name))
        faults.append(Fault(f"the package {name}", "its modules", "its metadata only", cure))
    if faults:
        raise BadInput(
            "These installed versions are known to break (`aflow-tune doctor` shows the rest).",
            faults,
        )


def matches(version: str, specifiers: str) -> bool:
    """Whether a version is one of those; False for a version that cannot be read."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(specifiers).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _judged(table: tuple[Clash, ...], installed: Installed) -> list[tuple[Clash, str]]:
    found = []
    for clash in table:
        version = installed.get(clash.name)
        if version is None or not matches(version, clash.breaks):
            continue
        if all(_stands(installed.get(name), wanted) for name, wanted in clash.beside.items()):
            beside = [f"{name} {installed[name]}" for name in clash.beside if name in installed]
            found.append((clash, " beside ".join([f"{clash.name} {version}", *beside])))
    return found


def _without_metadata(name: str) -> tuple[Clash, str]:
    """METADATA that a broken disk or a killed pip has left: pip cannot replace it either."""
    place = "the dist-info folder of it"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # another node's is not here
        place = shlex.quote(str(getattr(importlib.metadata.distribution(name), "_path", place)))
    wanted = next((clash.cure for clash in CLASHES if clash.name == name), name)
    reason = "whatever asks for its version fails"
    cure = f"rm -r {place} && {install(wanted)}"
    return Clash(name, "", reason, cure), f"{name} with METADATA that cannot be read"


def _stands(version: str | None, wanted: str | None) -> bool:
    if wanted is None or version is None:
        return version is None and wanted is None
    return matches(version, wanted)


def _torchvision(
    installed: Installed, requires: Callable[[str], list[str] | None] = importlib.metadata.requires
) -> tuple[Clash, str] | None:
    """A torchvision that was built for another PyTorch; Trinity needs none on a CPU.

    seen: torchvision 0.29.2 beside torch 2.13.0+cpu: transformers cannot import a model.
    """
    from packaging.version import InvalidVersion, Version

    torch, vision = installed.get("torch"), installed.get("torchvision")
    if torch is None or vision is None:
        return None
    other_build = False
    try:
        ours, theirs = Version(torch).local, Version(vision).local
        other_build = ours != theirs and "cpu" in (ours, theirs)
    except InvalidVersion:
        pass
    wanted = next((r for r in requirements_of("torchvision", requires) if r.name == "torch"), None)
    unmet = wanted is not None and not matches(torch, str(wanted.specifier))
    if not (other_build or unmet):
        return None
    cure = "python -m pip uninstall -y torchvision"
    if "vllm" in installed:
        cure = "python -m pip install --force-reinstall torch torchvision"
    reason = "it was built for another PyTorch: transformers then cannot import its models"
    return Clash("torchvision", "", reason, cure), f"torchvision {vision} beside torch {torch}"


def requirements_of(
    name: str, requires: Callable[[str], list[str] | None] = importlib.metadata.requires
) -> list[Requirement]:
    """What an installed distribution itself asks for, here and without extras."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        lines = requires(name) or []
    except (importlib.metadata.PackageNotFoundError, OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            found.append(requirement)
    return found
