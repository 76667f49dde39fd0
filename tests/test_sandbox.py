"""What a program gets and how its end is told, behind each backend; policies; the pool."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from sandbox_outside import BACKENDS, need, open_folder, run, runs

from aflow_tune.cli import main
from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput
from aflow_tune.sandbox import (
    Ending,
    Limits,
    ProgramEnded,
    open_channel,
    run_program,
    run_program_sync,
    seccomp,
    view,
)
from aflow_tune.sandbox.types import BackendFailed
from aflow_tune.trace import ProgramRun, Trace

AMPLE = Limits(seconds=60)
"""For programs that end by themselves, on a busy machine."""


@pytest.fixture(params=[*BACKENDS, "unsafe_subprocess"])
def level(request: pytest.FixtureRequest) -> str:
    return need(request.param)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A process of its own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_program_is_run_as_python_would(level: str) -> None:
    program = """
import sys, os, helper, sub.inner
from dataclasses import dataclass
if __name__ == "__main__":
    @dataclass
    class Point:
        x: int
    print(sys.stdin.read(), Point(3), helper.VALUE, sub.inner.VALUE, sys.argv)
    print("to stderr", file=sys.stderr)
    import inspect
    print(inspect.getsource(Point).splitlines()[1].strip())
    exit(0)
"""
    ended = run_program_sync(
        program,
        stdin="ünï " + "x" * 300_000,
        files={"helper.py": "VALUE = 41", "sub/inner.py": "VALUE = 'deep'"},
        policy=level,
        limits=AMPLE,
    )
    first, second = ended.stdout.splitlines()
    folder = re.search(r"\['(/tmp[^']*)/main.py'\]", first)
    assert folder is not None
    expected = f"Point(x=3) 41 deep ['{folder[1]}/main.py']"
    assert first == "ünï " + "x" * 300_000 + " " + expected
    assert second == "class Point:"
    assert ended.stderr == "to stderr\n"
    assert (ended.ending, ended.exit_code, ended.limits_hit) == (Ending.FINISHED, 0, ())
    assert ended.level == level
    assert not Path(folder[1], "main.py").exists()


@pytest.mark.parametrize("text", ["def f(:\n", "x = '\ud800'", "a\0b", "import numpy", "1 / 0"])
def test_a_program_that_cannot_run_has_failed(level: str, text: str) -> None:
    ended = run(level, text)
    assert (ended.ending, ended.exit_code) == (Ending.FAILED, 1)
    assert "Error" in ended.stderr


def test_common_parts_of_the_library_work(level: str) -> None:
    program = """
import asyncio, concurrent.futures, collections, datetime, decimal, fractions, hashlib, json
import math, random, re, socket, ssl, sqlite3, statistics, string, subprocess, tempfile, threading
import zoneinfo, ctypes, uuid, zlib, unittest
async def main():
    await asyncio.sleep(0.001)
    return await asyncio.to_thread(lambda: 5)
assert asyncio.run(main()) == 5
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    assert list(pool.map(abs, [-1, 2])) == [1, 2]
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("hello")
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/x", "w").close()
assert sqlite3.connect(":memory:").execute("select 2").fetchone() == (2,)
assert subprocess.run(["/usr/bin/cat"], input=b"z", capture_output=True).stdout == b"z"
assert datetime.datetime.now(zoneinfo.ZoneInfo("Europe/Paris")).year > 2000
print(random.random() < 1, uuid.uuid4().version)
"""
    ended = run(level, program)
    assert ended.stdout == "True 4\n", ended.stderr


@pytest.mark.parametrize(
    ("program", "limits", "ending", "hits"),
    [
        ("print(7, flush=True)\nwhile True: pass", {"seconds": 3}, Ending.TIMED_OUT, ("seconds",)),
        ("while True: pass", {"cpu_seconds": 1}, Ending.TIMED_OUT, ("cpu_seconds",)),
        ("x = bytearray(10**9)", {}, Ending.OUT_OF_MEMORY, ("memory_mb",)),
        ("print('x' * 3000)", {"output_kb": 2}, Ending.TOO_MUCH_OUTPUT, ("output_kb",)),
        ("print('x' * 2047)", {"output_kb": 2}, Ending.FINISHED, ()),
        ("f = [open('main.py') for _ in range(99)]", {}, Ending.FAILED, ()),
        ("open('x', 'wb').write(b'x' * 3_000_000)", {"disk_mb": 2}, Ending.FAILED, ("disk_mb",)),
    ],
)
def test_limits_are_told_apart(
    level: str, program: str, limits: dict[str, float], ending: Ending, hits: tuple[str, ...]
) -> None:
    ended = run(level, program, **limits)
    assert (ended.ending, ended.limits_hit) == (ending, hits), ended.stderr
    assert ended.stdout.startswith("7" if "flush" in program else "")


def test_a_cancelled_call_has_killed_its_program(level: str) -> None:
    mark = f"13{time.time_ns() % 10**10}.5"
    program = f"import subprocess\nsubprocess.run(['/usr/bin/sleep', '{mark}'])"

    async def main() -> bool:
        task = asyncio.ensure_future(run_program(program, policy=level, limits=AMPLE))
        while not runs(mark):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return runs(mark)

    assert asyncio.run(main()) is False


def test_what_makes_no_sense_is_refused_with_every_fault() -> None:
    with pytest.raises(BadInput) as refused:
        run_program_sync(
            "",
            limits=Limits(seconds=0, memory_mb=-1),
            files={"../up.py": "", "/etc/x": "", "ok.py": "", "main.py": ""},
        )
    places = [fault.where for fault in refused.value.faults]
    assert places[:2] == ["limits.seconds", "limits.memory_mb"]
    assert places[2:] == ["files['../up.py']", "files['/etc/x']", "files['main.py']"]
    with pytest.raises(BadInput):
        run_program_sync("", policy="docker")


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a process of its own, where neither backend can be built."""
    code = f"""
from aflow_tune.sandbox import SandboxUnavailable, _confine, backends, run_program_sync
backends.find_tool = lambda name: None
_confine.version = lambda: 2
try:
    run_program_sync("open({str(tmp_path / "ran")!r}, 'w')")
except SandboxUnavailable as error:
    print(error)
print(run_program_sync("print('no backend')", policy="unsafe_subprocess").stdout)
run_program_sync("", policy="unsafe_subprocess")
"""
    ended = python(code)
    assert not (tmp_path / "ran").exists()
    assert "bwrap is not installed" in ended.stdout
    assert "landlock: Landlock 2 is offered" in ended.stdout
    assert "sudo apt-get install -y bubblewrap" in ended.stdout
    assert ended.stdout.endswith("no backend\n\n")
    assert ended.stderr.count("Not protected") == 1


def test_a_backend_that_does_not_hold_is_not_used() -> None:
    """A bwrap that builds nothing: seen from outside, whatever the inside would say."""
    need("landlock")
    with open_folder() as folder:  # which any user may enter, unlike those of pytest
        fake = folder / "bwrap"
        fake.write_text(
            '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n', encoding="utf-8"
        )
        fake.chmod(0o755)
        code = f"""
from aflow_tune.sandbox import backends, detect
real = backends.find_tool
backends.find_tool = lambda name: {str(fake)!r} if name == "bwrap" else real(name)
print(detect().level.value, detect().reasons["bubblewrap"])
"""
        ended = python(code)
    assert ended.stdout.startswith("landlock ")
    assert "namespace is shared" in ended.stdout


def test_a_forked_process_has_sandboxes_of_its_own(level: str) -> None:
    code = f"""
import os
from aflow_tune.sandbox import run_program_sync
print(run_program_sync("print('parent')", policy={level!r}).stdout, end="", flush=True)
child = os.fork()
if child == 0:
    print(run_program_sync("print('child')", policy={level!r}).stdout, end="", flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(run_program_sync("print('again')", policy={level!r}).stdout, end="", flush=True)
"""
    ended = python(code)
    assert ended.stdout.split() == ["parent", "child", "again"], ended.stderr


HEADERS = ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"]


@pytest.mark.parametrize(("column", "header"), list(enumerate(HEADERS)))
def test_the_numbers_of_the_filter_are_the_kernel_s(header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip(f"no {header} (Debian package linux-libc-dev)")
    pattern = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)")
    known = {name: int(number) for name, number in pattern.findall(Path(header).read_text())}
    tables = [
        seccomp.CALLS,
        seccomp.LANDLOCK_CALLS,
        seccomp.LANDLOCK_READS,
        seccomp.SIGNAL_CALLS,
        {name: pair for name, (pair, _) in seccomp.EXAMINED.items()},
    ]
    newer = {"fchmodat2", "statmount", "listmount"} - known.keys()
    for name, numbers in (item for table in tables for item in table.items()):
        if name not in newer:
            assert (name, known.get(name)) == (name, numbers[column])


# A conversation with a program that may not be honest


async def everything(channel: Any) -> list[Any]:
    found = []
    while (message := await channel.receive()) is not None:
        found.append(message)
    return found


def test_values_go_both_ways_in_order(level: str) -> None:
    program = """
import aflow_channel
while (message := aflow_channel.receive()) is not None:
    aflow_channel.send([message, "seen"])
    if message == "last":
        break
print("to stdout")
"""
    values = [1, "ünï\n", {"a": [1.5, None, True]}, "x" * 500_000, "last"]

    async def main() -> None:
        async with open_channel(program, policy=level, limits=AMPLE) as channel:
            for value in values:
                await channel.send(value)
                assert await channel.receive() == [value, "seen"]
            assert await channel.receive() is None
            ended = channel.execution()
            assert (ended.ending, ended.stdout) == (Ending.FINISHED, "to stdout\n")
            with pytest.raises(ProgramEnded):
                await channel.send("anyone?")

    with Trace().activate() as trace:
        asyncio.run(main())
    (noted,) = trace.of(ProgramRun)
    assert (noted.level, noted.outcome) == (level, "finished")


@pytest.mark.parametrize(
    ("words", "ending", "hits"),
    [
        ("b'no json\\n'", Ending.FAILED, ()),
        ("b'[' * 100_000 + b'\\n'", Ending.FAILED, ()),
        ("b'\\xff\\xfe\\n'", Ending.FAILED, ()),
        ("b'\"' + b'x' * 2_000_000 + b'\"\\n'", Ending.TOO_MUCH_OUTPUT, ("output_kb",)),
    ],
)
def test_what_is_no_message_ends_the_program(
    level: str, words: str, ending: Ending, hits: tuple[str, ...]
) -> None:
    program = f"""
import aflow_channel, os, time
aflow_channel.send("first")
data = {words}
while data:
    data = data[os.write(aflow_channel.fd, data):]
time.sleep(600)
"""

    async def main() -> None:
        async with open_channel(program, policy=level, limits=AMPLE) as channel:
            assert await everything(channel) == ["first"]
            ended = channel.execution()
            assert (ended.ending, ended.limits_hit) == (ending, hits)

    asyncio.run(main())


# Policies, packages and the command

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
    execution = run_program_sync(USES, policy=f"{backend}+numpy+sympy", limits=AMPLE)
    assert execution.stdout == "9 6.0\n200.0\n", execution.stderr
    execution = run_program_sync(USES, policy=backend, limits=AMPLE)
    assert "No module named 'numpy'" in execution.stderr


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
    assert run_program_sync(program, policy=f"{backend}+numpy", limits=AMPLE).stdout == "[]\n"


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
        policy = f"{backend}+{package.name}"
        execution = run_program_sync(program, policy=policy, limits=AMPLE)
    assert execution.stdout == "42\n", execution.stderr


@pytest.mark.parametrize("name", ["no_such_package", "numpy.linalg", "../numpy", "json", 7])
def test_what_is_no_package_is_refused_with_its_place(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: x\nsandbox:\n  policy: auto\n  packages: [numpy, {name!r}]\n")
    with pytest.raises(BadInput) as caught:
        load_config(path)
    (fault,) = caught.value.faults
    assert fault.where.startswith(f"{path}:4")


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


def test_the_command_runs_one_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, stdin = tmp_path / "program.py", tmp_path / "stdin"
    command = ["sandbox", "run", str(program)]
    program.write_text("print(input()[::-1])")
    stdin.write_text("olleh\n")
    assert main([*command, "--stdin", str(stdin), "--policy", need("auto"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["outcome"], told["exit_code"], told["stdout"]) == ("finished", 0, "hello\n")
    assert {"stderr", "limits_hit", "level", "seconds"} < told.keys()
    # A terminal obeys nothing that a program prints.
    program.write_text("print('\\x1b[2Jcleared\\rhidden \\x9b1A ünï')")
    assert main(command) == 0
    assert "stdout:\n\\x1b[2Jcleared\\rhidden \\x9b1A ünï\n" in capsys.readouterr().out
    program.write_text("x = bytearray(300_000_000)")
    assert main([*command, "--memory", "128", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "out_of_memory"
    program.write_text("import numpy\nwhile True: pass")
    assert main([*command, "--package", "numpy", "--time", "2"]) == 1
    assert "limits hit: seconds" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)  # all of test_sandbox_attacks.py in one test
def test_the_sandbox_holds_for_an_ordinary_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("not root: test_sandbox_attacks.py has done it")
    nsenter, setpriv = shutil.which("nsenter"), shutil.which("setpriv")
    if nsenter is None or setpriv is None:
        pytest.skip("nsenter and setpriv (Debian package util-linux) are not there")
    user = "64999"
    prefix = [setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", "--"]
    passed: tuple[int, ...] = ()
    try:
        staged = view.stage()
    except BackendFailed as error:
        pytest.skip(f"another user cannot reach the interpreter: {error}")
    if staged is not None:
        passed, prefix = (staged,), [nsenter, f"--mount=/proc/self/fd/{staged}", "--", *prefix]

    def as_user(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, sys.executable, "-B", *words],
            pass_fds=passed,
            env={"PATH": os.defpath, "HOME": "/nonexistent"},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )

    if as_user("-c", "import aflow_tune.sandbox, psutil, pytest").returncode != 0:
        pytest.skip("another user cannot run this checkout")
    settings = ("-p", "no:cacheprovider", "-o", "addopts=--strict-markers", "-rs")
    # By its full path: whoever enters a mount namespace stands at its root.
    attacks = str(Path(__file__).with_name("test_sandbox_attacks.py"))
    ended = as_user("-m", "pytest", *settings, attacks)
    assert ended.returncode == 0, ended.stdout[-6000:]
    assert " passed" in ended.stdout
