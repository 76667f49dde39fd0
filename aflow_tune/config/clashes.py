"""Installed versions that are known to break, each with its reason and what to install.

Only metadata is read, since several of these clashes break the import itself. `aflow-tune doctor`
checks every node of a cluster; every command that needs Trinity checks at its start, and refuses.

In the table 'seen' means that the versions were installed and failed; 'read' that the failure
follows from the installed sources or from the package's requirements.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Installed = Mapping[str, str]
"""Versions of the installed distributions by name."""


@dataclass(frozen=True)
class Clash:
    """Versions of one distribution that break, always or only beside others."""

    name: str
    breaks: str
    """PEP 440 specifiers of the versions that break."""
    reason: str
    cure: str
    """Requirements to install."""
    beside: Mapping[str, str | None] = field(default_factory=dict)
    """The clash also needs these distributions in these versions; None: not installed."""


_TRANSFORMERS, _VLLM = "transformers>=5.12.1,<6", "vllm>=0.22.1,<=0.23.0"
_AGENTSCOPE, _AGENTSCOPE_2, _VERL = "agentscope>=1.0.19,<2", "agentscope==2.0.10", "verl==0.8.0"

CLASHES: tuple[Clash, ...] = (
    # read: our adapter, Explorer and Trainer subclass what is not a public interface
    Clash("trinity-rft", "!=0.6.0", "we follow the interfaces of 0.6.0", "trinity-rft==0.6.0"),
    # read: trinity/common/models/vllm_extension.py; Trinity's metadata asks for 0.19.1 only
    Clash("vllm", "<0.22.1", "Trinity imports pack_tensors, which came with 0.22.1", _VLLM),
    # read: the requirements of verl 0.9.0 and of trinity-rft 0.6.0
    Clash("verl", ">=0.9.dev0", "0.9 wants transformers below 5.11, Trinity 5.12.1", _VERL),
    # read: trinity/trainer/trainer.py, is_verl_legacy
    Clash("verl", "<0.8", "Trinity runs other code with it, never tried with ours", _VERL),
    # seen: get_peft_model_state_dict: 0 tensors with 0.21.0, 14 with 0.18 to 0.20
    Clash("peft", ">=0.21.dev0", "verl gets no tensors of an adapter", "peft>=0.18,<0.21"),
    # seen: 2.0.11 beside mcp 1.30.0: no Client in mcp
    Clash("agentscope", ">=2.0.11.dev0", "it needs mcp 2, we mcp 1", _AGENTSCOPE_2),
    # seen: 2.0.4: its OpenAI model takes no extra_body; 2.0.7: its tools take no permission
    Clash("agentscope", ">=2.dev0,<2.0.8", "its models were others before 2.0.8", _AGENTSCOPE_2),
    Clash("agentscope", "<1.0.19", "it has no TrinityChatModel as it is used here", _AGENTSCOPE),
    # seen: 26.0.1 with numpy 1.26.4: 'pyarrow requires NumPy 2.0 or newer'
    Clash(
        "pyarrow",
        ">=26.dev0",
        "it needs numpy 2: `import datasets` fails and every Ray actor dies",
        "pyarrow>=24,<26",
        {"numpy": "<2"},
    ),
    # seen: 2.3.0: no streamablehttp_client in mcp.client.streamable_http
    Clash("mcp", ">=2.dev0", "it renamed what `import agentscope` imports", "mcp>=1.13,<2"),
    # seen: 2.1.9 without greenlet: `import agentscope` fails in sqlalchemy.ext.asyncio
    Clash(
        "SQLAlchemy",
        ">=2.1.dev0",
        "it no longer brings greenlet, without which `import agentscope` fails",
        "sqlalchemy[asyncio]>=2.0,<2.1",
        {"greenlet": None},
    ),
    # seen: 2.4.0: no get_yaml_loader in omegaconf._utils; hydra-core (of verl) wants < 2.4
    Clash("omegaconf", ">=2.4.dev0", "it dropped the YAML loader we use", "omegaconf>=2.3,<2.4"),
    # read: the requirements of trinity-rft 0.6.0
    Clash("transformers", "<5.12.1", "Trinity wants 5.12.1 or later", _TRANSFORMERS),
)

NEEDED = ("torch", "ray", "trinity-rft", "transformers", "agentscope", "omegaconf")
"""Distributions without which nothing that trains can be imported."""

_JUDGED = [name for clash in CLASHES for name in (clash.name, *clash.beside)]
WATCHED: tuple[str, ...] = tuple(dict.fromkeys([*NEEDED, *_JUDGED, "torchvision"]))


def installed_versions(names: tuple[str, ...] = WATCHED) -> dict[str, str]:
    """The versions of the installed ones among `names`, from metadata; nothing is imported."""
    found = {}
    for name in names:
        try:
            version = importlib.metadata.version(name)
        except (importlib.metadata.PackageNotFoundError, OSError, UnicodeDecodeError):
            continue
        if version:  # a left-over folder without METADATA has none
            found[name] = version
    return found


def known_clashes(installed: Installed) -> list[tuple[Clash, str]]:
    """Each clash that is installed, that of torchvision included, with the versions in words."""
    found = [_torchvision(installed)]
    for clash in CLASHES:
        names = [name for name in (clash.name, *clash.beside) if name in installed]
        if clash.name in installed and all(
            name not in installed if wanted is None else matches(installed.get(name, ""), wanted)
            for name, wanted in {clash.name: clash.breaks, **clash.beside}.items()
        ):
            found.append((clash, " beside ".join(f"{name} {installed[name]}" for name in names)))
    return [one for one in found if one is not None]


def missing(installed: Installed) -> list[str]:
    """The distributions of `NEEDED` that are not installed."""
    return [name for name in NEEDED if name not in installed]


def install(*requirements: str) -> str:
    """The pip command that installs these requirements."""
    return f"python -m pip install {' '.join(repr(text) for text in requirements)}"


def cure_of(clash: Clash) -> str:
    """The command that resolves a clash."""
    return clash.cure if " " in clash.cure else install(clash.cure)


@functools.cache
def refuse_clashes() -> None:
    """Refuse to start with versions that are known to break; checked once per process.

    Raises BadInput: with all of them, and with needed packages that are not installed."""
    installed = installed_versions()
    faults = [
        Fault(f"the installed {one.name}", f"another version: {one.reason}", found, cure_of(one))
        for one, found in known_clashes(installed)
    ]
    for name in missing(installed):
        faults.append(Fault(f"the package {name}", "installed", "no", install("aflow-tune")))
    if faults:
        title = "These installed versions are known to break (`aflow-tune doctor` shows the rest)."
        raise BadInput(title, faults)


def matches(version: str, specifiers: str) -> bool:
    """Whether a version fits the specifiers; False for a malformed version."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(specifiers).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _torchvision(installed: Installed) -> tuple[Clash, str] | None:
    """A torchvision built for another PyTorch; on a CPU Trinity does without torchvision.
    seen: torchvision 0.29.2 beside torch 2.13.0+cpu: transformers cannot import a model."""
    torch, vision = installed.get("torch"), installed.get("torchvision")
    if torch is None or vision is None:
        return None
    builds = [version.partition("+")[2] for version in (torch, vision)]
    wanted = [need.specifier for need in requirements_of("torchvision") if need.name == "torch"]
    unmet = any(not matches(torch, str(specifier)) for specifier in wanted[:1])
    if not unmet and (builds[0] == builds[1] or "cpu" not in builds):
        return None
    what = "install --force-reinstall torch" if "vllm" in installed else "uninstall -y"
    cure = f"python -m pip {what} torchvision"
    reason = "it was built for another PyTorch: transformers then cannot import its models"
    return Clash("torchvision", "", reason, cure), f"torchvision {vision} beside torch {torch}"


def requirements_of(name: str) -> list[Requirement]:
    """The requirements of an installed distribution on this platform, without extras."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = [Requirement(line) for line in importlib.metadata.requires(name) or []]
    except (importlib.metadata.PackageNotFoundError, InvalidRequirement, OSError, ValueError):
        return []
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
