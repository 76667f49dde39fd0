"""Packages that sandboxed programs may import: those that were asked for, behind each wall."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.cli import main
from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import Programmer
from aflow_tune.operators.programs import use_libraries
from aflow_tune.sandbox import Ending, Limits, detect, run_program_sync, use_policy


def runs(wall: str) -> bool:
    return detect(wall).level is not None


WALLS = [
    pytest.param(wall, marks=pytest.mark.skipif(not runs(wall), reason=f"no {wall} here"))
    for wall in ("bubblewrap", "landlock")
]
USES = """
import numpy, sympy
x = sympy.Symbol("x")
print(sympy.integrate(2 * x, (x, 0, 3)), float(numpy.linalg.det(numpy.diag([2.0, 3.0]))))
print((numpy.ones((200, 200)) @ numpy.ones((200, 200)))[0, 0])
"""


@pytest.mark.parametrize("wall", WALLS)
def test_packages_work_where_they_were_asked_for(wall: str) -> None:
    execution = run_program_sync(USES, policy=f"{wall}+numpy+sympy")
    assert execution.stdout == "9 6.0\n200.0\n", execution.stderr
    without = run_program_sync(USES, policy=wall)
    assert without.ending is Ending.FAILED
    assert "No module named 'numpy'" in without.stderr


@pytest.mark.parametrize("wall", WALLS)
def test_nothing_else_of_the_installed_packages_is_there(wall: str) -> None:
    site = Path(pytest.__file__).parent.parent
    program = f"""
import os, numpy
found = []
for name in ("pytest", "yaml", "torch", "sympy", "aflow_tune"):
    try:
        __import__(name)
        found.append(name)
    except ImportError:
        pass
for path in ({str(site / "yaml" / "__init__.py")!r}, {str(site / "pytest" / "__init__.py")!r}):
    try:
        found.append(open(path).read())
    except OSError:
        pass
try:
    found += sorted(set(os.listdir({str(site)!r})) - {{"numpy", "numpy.libs"}})
except OSError:
    pass
try:
    open(os.path.join(os.path.dirname(numpy.__file__), "mine.py"), "w")
    found.append("written")
except OSError:
    pass
print(found)
"""
    assert run_program_sync(program, policy=f"{wall}+numpy").stdout == "[]\n"


@pytest.mark.parametrize("wall", WALLS)
def test_limits_hold_for_what_packages_do(wall: str) -> None:
    greedy = "import numpy\nnumpy.ones(400_000_000)"
    execution = run_program_sync(greedy, policy=f"{wall}+numpy", limits=Limits(memory_mb=300))
    assert execution.ending in (Ending.OUT_OF_MEMORY, Ending.FAILED)
    slow = "import numpy\nwhile True:\n    numpy.linalg.svd(numpy.random.rand(300, 300))"
    execution = run_program_sync(slow, policy=f"{wall}+numpy", limits=Limits(seconds=3))
    assert execution.ending is Ending.TIMED_OUT


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_such_package", "not installed"),
        ("numpy.linalg", "no plain name"),
        ("../numpy", "no plain name"),
        ("json", "standard library"),
        (7, "no plain name"),
    ],
)
def test_what_is_no_package_is_refused_with_its_place(tmp_path: Path, name: Any, told: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: x\nsandbox:\n  policy: auto\n  packages: [numpy, {name!r}]\n")
    with pytest.raises(BadInput) as caught:
        load_config(path)
    (fault,) = caught.value.faults
    assert fault.where.startswith(f"{path}:4")
    assert told in fault.found


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("landlock", "landlock"),
        ("{packages: [sympy, numpy]}", "auto+sympy+numpy"),
        ("{policy: bubblewrap, packages: numpy}", "bubblewrap+numpy"),
        ("{policy: bubblewrap}", "bubblewrap"),
    ],
)
def test_what_the_yaml_may_say(tmp_path: Path, text: str, policy: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"sandbox: {text}\n")
    assert load_config(path).sandbox == policy
    assert load_config(None, [f"sandbox={policy}"]).sandbox == policy


@pytest.mark.parametrize("text", ["[numpy]", "{package: numpy}", "{policy: strong}", "soft", "3"])
def test_what_it_may_not_say(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"sandbox: {text}\n")
    with pytest.raises(BadInput, match="sandbox"):
        load_config(path)


CODE = "```python\nimport sympy\ndef solve():\n    return sympy.factorint(91)\n```"


@pytest.mark.skipif(not runs("auto"), reason="no sandbox can be built here")
def test_programmer_imports_what_the_run_or_its_benchmark_gives() -> None:
    def ask() -> tuple[str, str]:
        model = ScriptedModel([CODE] * 3)
        output = asyncio.run(Programmer(model)("p"))["output"]
        return output, str(model.asked[0].messages[0]["content"])

    assert "Error" in ask()[0]
    with use_policy("auto+sympy"):
        output, prompt = ask()
    assert output == "{7: 1, 13: 1}"
    assert "sympy" in prompt
    with use_libraries(("sympy", "not_there_at_all")):
        output, prompt = ask()
    assert output == "{7: 1, 13: 1}"
    assert "not_there_at_all" not in prompt


@pytest.mark.skipif(not runs("auto"), reason="no sandbox can be built here")
def test_the_command_takes_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(USES)
    command = ["sandbox", "run", str(program), "--package", "numpy"]
    assert main([*command, "--package", "sympy"]) == 0
    assert "9 6.0" in capsys.readouterr().out
    assert main(command) == 1
    assert main([*command, "--package", "no_such_package"]) == 2
    assert "no_such_package" in capsys.readouterr().err


@pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="closed folders are root's concern"
)
@pytest.mark.parametrize("wall", WALLS)
def test_root_may_keep_packages_in_a_folder_that_others_may_not_enter(
    tmp_path: Path, wall: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path("/root")
    if os.stat(home).st_mode & 0o001:
        pytest.skip("others may enter /root")
    folder = home / f".aflow_tune_test_{wall}_{os.getpid()}"
    package = folder / f"closed_{wall}"
    package.mkdir(parents=True)
    try:
        (package / "__init__.py").write_text("VALUE = 41\n")
        monkeypatch.syspath_prepend(str(folder))
        program = f"import closed_{wall} as closed\nprint(closed.VALUE + 1)"
        execution = run_program_sync(program, policy=f"{wall}+closed_{wall}")
        assert execution.stdout == "42\n", execution.stderr
    finally:
        (package / "__init__.py").unlink()
        for path in package.glob("__pycache__/*"):
            path.unlink()
        for path in (package / "__pycache__", package, folder):
            if path.is_dir():
                path.rmdir()
