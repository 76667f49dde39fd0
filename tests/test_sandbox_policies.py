"""What `sandbox:` may say, packages that programs may import, and `aflow-tune sandbox`."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from sandbox_outside import BACKENDS, need

from aflow_tune.cli import main
from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput
from aflow_tune.sandbox import Ending, run_program_sync

USES = """
import numpy, sympy
x = sympy.Symbol("x")
print(sympy.integrate(2 * x, (x, 0, 3)), float(numpy.linalg.det(numpy.diag([2.0, 3.0]))))
print((numpy.ones((200, 200)) @ numpy.ones((200, 200)))[0, 0])
"""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return need(request.param)


def test_packages_work_where_they_were_asked_for(backend: str) -> None:
    execution = run_program_sync(USES, policy=f"{backend}+numpy+sympy")
    assert execution.stdout == "9 6.0\n200.0\n", execution.stderr
    without = run_program_sync(USES, policy=backend)
    assert without.ending is Ending.FAILED
    assert "No module named 'numpy'" in without.stderr


def test_nothing_else_of_the_installed_packages_is_there(backend: str) -> None:
    site = Path(pytest.__file__).parent.parent
    program = f"""
import os, numpy
found = []
def attempt(function, *arguments):
    try:
        found.append(function(*arguments))
    except (ImportError, OSError):
        pass
for name in ("pytest", "yaml", "torch", "sympy", "aflow_tune"):
    attempt(__import__, name)
for name in ("yaml", "pytest"):
    attempt(lambda: open({str(site)!r} + "/" + name + "/__init__.py").read())
attempt(lambda: set(os.listdir({str(site)!r})) - {{"numpy", "numpy.libs"}} or 1 / 0)
attempt(open, os.path.join(os.path.dirname(numpy.__file__), "mine.py"), "w")
print(found)
""".replace("(ImportError, OSError)", "(ImportError, OSError, ZeroDivisionError)")
    assert run_program_sync(program, policy=f"{backend}+numpy").stdout == "[]\n"


def test_root_may_keep_packages_in_a_folder_that_others_may_not_enter(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path("/root")
    if os.geteuid() != 0 or home.stat().st_mode & 0o001:
        pytest.skip("closed folders are root's concern, and others may enter /root")
    with tempfile.TemporaryDirectory(dir=home) as folder:
        package = Path(folder, f"closed_{backend}")
        package.mkdir()
        (package / "__init__.py").write_text("VALUE = 41\n")
        monkeypatch.syspath_prepend(folder)
        program = f"import {package.name} as closed\nprint(closed.VALUE + 1)"
        execution = run_program_sync(program, policy=f"{backend}+{package.name}")
    assert execution.stdout == "42\n", execution.stderr


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
        *((text, None) for text in ("[numpy]", "{package: numpy}", "{policy: strong}", "soft")),
    ],
)
def test_what_the_yaml_may_say(tmp_path: Path, text: str, policy: str | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"sandbox: {text}\n")
    if policy is None:
        with pytest.raises(BadInput, match="sandbox"):
            load_config(path)
        return
    assert load_config(path).sandbox == policy
    assert load_config(None, [f"sandbox={policy}"]).sandbox == policy


# The command


def test_the_command_runs_one_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, stdin = tmp_path / "program.py", tmp_path / "stdin"
    command = ["sandbox", "run", str(program)]
    program.write_text("print(input()[::-1])")
    stdin.write_text("olleh\n")
    for level in (need("auto"), "unsafe_subprocess"):
        assert main([*command, "--stdin", str(stdin), "--policy", level, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["outcome"], told["exit_code"], told["stdout"]) == ("finished", 0, "hello\n")
        assert told.keys() == {
            *("outcome", "exit_code", "stdout", "stderr", "limits_hit", "level", "seconds"),
        }
    # A terminal obeys nothing that a program prints.
    program.write_text("print('\\x1b[2Jcleared\\rhidden \\x9b1A ünï')")
    assert main(command) == 0
    assert "stdout:\n\\x1b[2Jcleared\\rhidden \\x9b1A ünï\n" in capsys.readouterr().out
    program.write_text("while True: pass")
    assert main([*command, "--time", "0.5"]) == 1
    shown = capsys.readouterr().out
    assert "outcome:    timed_out" in shown
    assert "limits hit: seconds" in shown
    program.write_text("x = bytearray(300_000_000)")
    assert main([*command, "--memory", "128", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "out_of_memory"
    assert main([*command, "--memory", "512"]) == 0
    program.write_text(USES)
    assert main([*command, "--package", "numpy", "--package", "sympy"]) == 0
    assert main([*command, "--package", "numpy"]) == 1
