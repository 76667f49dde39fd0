"""Naming user code: by file and by module, with errors that cure."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from aflow_tune.contract.plugins import resolve
from aflow_tune.errors import BadInput, Fault


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))


MARKED = "from aflow_tune import workflow\n@workflow\nasync def solve(task, model): return 1\n"


@pytest.fixture(autouse=True)
def _clean_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that a test makes importable reaches the next one."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def fault(spec: str, base: Path | None = None) -> Fault:
    with pytest.raises(BadInput) as caught:
        resolve(spec, base)
    (only,) = caught.value.faults
    return only


def test_a_function_of_a_file_with_its_siblings(tmp_path: Path) -> None:
    write(
        tmp_path,
        flows="from near_helper import N\ndef f(): return N\ndef g():\n    import near_late\n"
        "    return near_late.M\n",
        near_helper="N = 7",
        near_late="M = 8",
    )
    function = resolve(f"{tmp_path}/flows.py:f")
    assert function() == 7
    assert resolve(f"{tmp_path}/flows.py:g")() == 8


def test_what_is_installed_is_never_shadowed(tmp_path: Path) -> None:
    write(tmp_path, flow="import colorsys, isympy\ndef f(): return colorsys, isympy")
    write(tmp_path, colorsys="", isympy="")
    colorsys, isympy = resolve(f"{tmp_path}/flow.py:f")()
    assert hasattr(colorsys, "rgb_to_hsv")
    assert hasattr(isympy, "main")


def test_a_sibling_with_the_name_of_anothers_sibling_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", flow="import twin_helper\ndef f(): ...", twin_helper="X = 'a'")
    write(tmp_path / "b", flow="\nfrom twin_helper import X\ndef f(): ...", twin_helper="X = 'b'")
    resolve(f"{tmp_path}/a/flow.py:f")
    found = fault(f"{tmp_path}/b/flow.py:f")
    assert found.where == f"{tmp_path}/b/flow.py:2"
    assert f"{tmp_path}/a/twin_helper.py" in found.found


def test_a_file_in_a_package_may_import_relatively(tmp_path: Path) -> None:
    package = tmp_path / "plug_package"
    write(package, __init__="", helpers="N = 3")
    write(package / "flows", __init__="", react="from ..helpers import N\ndef f(): return N\n")
    function = resolve(f"{package}/flows/react.py:f")
    assert function() == 3
    assert function.__module__ == "plug_package.flows.react"
    assert resolve("plug_package.flows.react:f") is function


def test_the_only_marked_function_needs_no_name(tmp_path: Path) -> None:
    write(
        tmp_path,
        flow="from other_flow import solve\nfrom aflow_tune import workflow\n"
        "async def helper(): ...\n@workflow\nasync def own(task, model): ...\nagain = own\n",
        other_flow=MARKED,
    )
    assert resolve(f"{tmp_path}/flow.py").__name__ == "own"
    assert resolve(f"{tmp_path}/flow.py:").__name__ == "own"


def test_marks(tmp_path: Path) -> None:
    write(
        tmp_path,
        flow="""
        import functools
        from aflow_tune import workflow

        @workflow(name="first")
        async def one(task, model): ...

        bound = workflow(name="bound")(functools.partial(one, k=1))
        """,
    )
    assert resolve(f"{tmp_path}/flow.py:first").__name__ == "one"
    assert "first, bound" in fault(f"{tmp_path}/flow.py").found


@pytest.mark.parametrize(
    ("spec", "found", "cure"),
    [
        ("{}/flow.py:f", "no file {}/flow.py", "flows.py"),
        ("{}/no/flows.py:f", "no file", "absolute"),
        ("{}/flows.py:othr", "has other", ""),
        ("{}/flows.py", "none", "{}/flows.py:other"),
        ("zzqqzz:f", "no such module", "path/zzqqzz.py:function"),
        ("json:dmps", "json/__init__.py has dumps", ""),
        ("json.dumps", "no such module", "`json:dumps`"),
        ("", "''", "path/file.py:function"),
    ],
)
def test_each_error_says_what_to_write(tmp_path: Path, spec: str, found: str, cure: str) -> None:
    write(
        tmp_path,
        flows="from json import dumps\ndef other(): ...\ndef another(): ...\nnumber = 3\n",
    )
    spec = spec.replace("{}", str(tmp_path))
    told = fault(spec)
    assert told.where == spec
    assert found.replace("{}", str(tmp_path)) in told.found
    assert cure.replace("{}", str(tmp_path)) in told.cure


@pytest.mark.parametrize(
    ("source", "line", "found", "cure"),
    [
        ("import json\n\nx = 1 / 0\n", 3, "ZeroDivisionError: division by zero at `x = 1 / 0`", ""),
        ("\nimport nowhere_at_all\n", 2, "No module named 'nowhere_at_all'", "install"),
        ("from json import dmps\n", 1, "cannot import name 'dmps' from 'json'", "json/__init__"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3 at `sys.exit(3)`", ""),
        ("from agentscope.tune import tune\n", 1, "agentscope", "from `aflow_tune`"),
        ("from json import TrinityChatModel\n", 1, "TrinityChatModel", "from `aflow_tune`"),
        ("x = '\0'\n", None, "null bytes", ""),
    ],
)
def test_a_file_that_cannot_be_imported_shows_its_own_line(
    tmp_path: Path, source: str, line: int | None, found: str, cure: str
) -> None:
    (tmp_path / "flow.py").write_text(source)
    told = fault(f"{tmp_path}/flow.py:f")
    assert told.where == f"{tmp_path}/flow.py:{f'{line}' if line else 'f'}"
    assert found in told.found
    assert cure in told.cure


def test_here_is_looked_at_first_then_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, local_flows="class A:\n    def go(self): ...\nobj = A()\n")
    write(tmp_path / "base", local_flows="", other="def f(): return 'other'")
    monkeypatch.chdir(tmp_path)
    assert resolve("local_flows:obj.go").__name__ == "go"
    assert resolve("local_flows.py:obj.go", tmp_path / "base").__name__ == "go"
    assert resolve("other.py:f", tmp_path / "base")() == "other"
