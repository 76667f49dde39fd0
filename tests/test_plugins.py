"""Naming user code: by file and by module, with errors that cure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.errors import BadInput
from aflow_tune.plugins import discover, loaded_from_file, resolve, workflow

SOURCE = """
from aflow_tune import workflow
from plugin_sibling import NUMBER

@workflow
async def marked(task, model):
    return NUMBER

async def other(task, model):
    return 0

value = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "plugin_sibling.py").write_text("NUMBER = 7\n")
    (tmp_path / "flows.py").write_text(SOURCE)
    (tmp_path / "two.py").write_text(SOURCE.replace("async def other", "@workflow\nasync def other"))
    (tmp_path / "none.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("import json\n\nx = 1 / 0\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "needs.py").write_text("import not_installed_anywhere\n")
    return tmp_path


def test_a_function_of_a_file_with_its_sibling(folder: Path) -> None:
    function = resolve(f"{folder}/flows.py:other")
    assert function.__name__ == "other"
    assert resolve(f"{folder}/flows.py:other") is function
    assert sys.modules[function.__module__] in loaded_from_file()


def test_a_relative_path_is_looked_for_beside_the_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert resolve("flows.py:other", base_dir=folder).__name__ == "other"
    monkeypatch.chdir(folder)
    assert resolve("flows.py:other").__name__ == "other"


def test_the_only_marked_function_needs_no_name(folder: Path) -> None:
    function = resolve(f"{folder}/flows.py")
    assert function.__name__ == "marked"
    assert list(discover(sys.modules[function.__module__])) == ["marked"]


def test_a_module_and_an_attribute_of_it() -> None:
    assert resolve("json:dumps").__name__ == "dumps"
    assert resolve("json.decoder:JSONDecoder.decode").__name__ == "decode"


@pytest.mark.parametrize(
    ("spec", "phrases"),
    [
        ("{folder}/flow.py:other", ["no file", "flows.py"]),
        ("{folder}/flows.py:othr", ["no such name", "other"]),
        ("{folder}/flows.py:value", ["a function", "int 3"]),
        ("{folder}/two.py", ["exactly one", ":marked", ":other"]),
        ("{folder}/none.py", ["0 functions", "@workflow"]),
        ("{folder}/broken.py:x", ["ZeroDivisionError", "broken.py:3"]),
        ("{folder}/syntax.py:x", ["SyntaxError", "syntax.py:1"]),
        ("{folder}/needs.py:x", ["not_installed_anywhere", "needs.py:1"]),
        ("jsn:dumps", ["no module 'jsn'", "json"]),
        ("json:dmps", ["no such name", "dumps"]),
        ("json", ["no colon"]),
        (":f", ["incomplete"]),
        ("json:", ["incomplete"]),
    ],
)
def test_each_error_says_what_to_write(folder: Path, spec: str, phrases: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        resolve(spec.format(folder=folder))
    for phrase in phrases:
        assert phrase in str(caught.value)


def test_marking_changes_nothing_else() -> None:
    def bare() -> Any: ...

    assert workflow(bare) is bare
    named = workflow(name="second")(bare)
    assert named is bare
    assert list(discover(sys.modules[__name__])) == []
