"""The GPU set: one version of everything, all that the project asks for, no addresses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
SET = FOLDER / "gpu.txt"
ENVIRONMENTS = [
    {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.9", "extra": ""}
    for minor in (11, 12)
]


def lines(path: Path) -> list[str]:
    content = [line.split(" #")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in content if line and not line.startswith("#")]


def pinned() -> dict[str, Version]:
    found = {}
    for line in lines(SET):
        name, equals, version = line.partition("==")
        assert equals, line
        found[canonicalize_name(name)] = Version(version)
    return found


def overridden() -> dict[str, Requirement]:
    given = [Requirement(line) for line in lines(FOLDER / "gpu-overrides.txt")]
    return {canonicalize_name(item.name): item for item in given}


def unmet(asked: list[Requirement], environment: dict[str, str]) -> list[str]:
    """What the set does not satisfy, once the overrides stand in the place of what they name."""
    versions, replaced = pinned(), overridden()
    wrong = []
    for item in asked:
        if item.marker is not None and not item.marker.evaluate(environment):
            continue
        name = canonicalize_name(item.name)
        wanted = replaced.get(name, item).specifier
        if name not in versions or not wanted.contains(versions[name], prereleases=True):
            wrong.append(f"{item} ({versions.get(name, 'absent')})")
    return wrong


def project_requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in project["dependencies"]]


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=["3.11", "3.12"])
def test_the_set_holds_what_the_project_and_its_inputs_ask_for(environment: dict[str, str]) -> None:
    inputs = [Requirement(line) for line in lines(FOLDER / "gpu.in")]
    assert unmet([*project_requirements(), *inputs], environment) == []


def test_it_names_versions_and_nothing_else() -> None:
    for path in (*FOLDER.glob("*.txt"), *FOLDER.glob("*.in")):
        for line in lines(path):
            assert re.fullmatch(r"[A-Za-z0-9._\-]+(\[[a-z]+\])?[<>=!~]=?[\w.,<>=]+", line), line
    names = [line.partition("==")[0].lower() for line in lines(SET)]
    assert names == sorted(set(names))
