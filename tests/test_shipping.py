"""User code reaches a process that cannot see the user's folder (without Ray)."""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import sysconfig
import textwrap
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest
from user_packages import CASES, COMPILED, LOAD, Case, run_driver

from aflow_tune.errors import BadInput
from aflow_tune.shipping import origin
from aflow_tune.shipping.bundle import write_bundle
from aflow_tune.shipping.moving import move_paths
from aflow_tune.shipping.reach import modules_in_pickle, reach
from aflow_tune.shipping.tracing import Trace, trace
from aflow_tune.shipping.trees import is_private

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {
    **{key: value for key, value in os.environ.items() if not key.startswith("AFLOW_TUNE")},
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
}


def _send_and_call(case: Case, tmp_path: Path) -> str:
    source, out, hidden = tmp_path / "driver", tmp_path / "out", tmp_path / "away"
    out.mkdir()
    found = run_driver(case, case.write(source), out, ENVIRONMENT)
    assert found["faults"] == []
    source.rename(hidden)
    hidden.chmod(0)
    # A module of the node's own, with the name of the user's: it must not be taken.
    nodes = tmp_path / "node"
    nodes.mkdir()
    (nodes / "json_repair_helper.py").write_text("VALUE = 0.0\n")
    environment = {
        **ENVIRONMENT,
        **{name: case.environment[name] for name in found["variables"] if name in case.environment},
        "PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(nodes), str(out)]),
        "AFLOW_TUNE_SHIPMENT": (out / "name").read_text(),
        "HIDDEN": str(source),
    }
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(out / "function")],
        cwd=nodes,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("name", CASES)
def test_it_arrives(name: str, tmp_path: Path) -> None:
    assert _send_and_call(CASES[name], tmp_path) == "1.0"


def test_a_compiled_module_is_refused_with_what_to_do(tmp_path: Path) -> None:
    source = COMPILED.write(tmp_path / "driver")
    library = source / "native" / f"_speed{EXTENSION_SUFFIXES[0]}"
    library.write_bytes(b"\x7fELF")
    found = run_driver(COMPILED, source, tmp_path, ENVIRONMENT)
    (fault,) = found["faults"]
    assert f"{source}/native/flows.py:2" in fault
    assert str(library) in fault
    assert "runtime_env: {pip:" in fault
    assert str(library) not in found["files"]


def test_a_compiled_module_that_the_code_does_without_stays(tmp_path: Path) -> None:
    files = {
        **COMPILED.files,
        "native/flows.py": "try:\n    from native import _speed\nexcept ImportError:\n"
        "    _speed = None\nasync def flow(task, model):\n    return 1.0\n",
    }
    case = Case(files, COMPILED.spec)
    source = case.write(tmp_path / "driver")
    (source / "native" / f"_speed{EXTENSION_SUFFIXES[0]}").write_bytes(b"\x7fELF")
    assert run_driver(case, source, tmp_path, ENVIRONMENT)["faults"] == []


def test_what_is_needed_there_is_named_with_its_place(tmp_path: Path) -> None:
    case = Case(
        {
            "flow.py": "import httpx2\ntry:\n    import sympy\nexcept ImportError:\n    sympy = 0\n"
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rich\n"
            "async def flow(task, model):\n    import jinja2\n    return 1.0\n"
        },
        "flow.py:flow",
    )
    source = case.write(tmp_path / "driver")
    found = run_driver(case, source, tmp_path, ENVIRONMENT)
    assert found["needs"] == {"httpx2": f"{source}/flow.py:1", "jinja2": f"{source}/flow.py:10"}


def test_keys_and_large_files_stay_at_home(tmp_path: Path) -> None:
    case = Case(
        {
            "flow.py": "from pathlib import Path\nHERE = Path(__file__).parent\n"
            "async def flow(task, model):\n    open('.env')\n"
            "    open(HERE / 'certs' / 'server.pem')\n    open(HERE / '.secret' / 'text.txt')\n",
            ".env": "KEY=sk-1",
            "certs/server.pem": "private",
            ".secret/text.txt": "private",
            "prod.env": "KEY=sk-2",
            "venv/pyvenv.cfg": "",
            "venv/lib/thing.py": "",
            "notes.txt": "travels",
        },
        "flow.py:flow",
    )
    source = case.write(tmp_path / "driver")
    with (source / "weights.bin").open("wb") as file:
        file.truncate(65 * 2**20)
    found = run_driver(case, source, tmp_path, ENVIRONMENT)
    assert sorted(found["files"]) == [f"{source}/flow.py", f"{source}/notes.txt"]
    for name in (".env", "certs/server.pem", ".secret/text.txt"):
        assert any(text.startswith(f"{source}/{name} stays here") for text in found["warnings"])


@pytest.mark.parametrize(
    ("path", "private"),
    [
        ("/home/me/.work/project/data.txt", False),
        ("/home/me/.work/project/.env", True),
        ("/home/me/.work/project/.git/config", True),
        ("/home/me/.ssh/config", True),
        ("/home/me/.work/keys/id_rsa", True),
        ("/data/words.txt", False),
    ],
)
def test_what_is_private_is_seen_from_where_it_is_named(path: str, private: bool) -> None:
    assert is_private(Path(path), [Path("/home/me/.work/project/src")]) is private


def test_what_the_user_excludes_stays(tmp_path: Path) -> None:
    for name in ("code.py", "raw/a.txt", "deep/raw/b.txt", "deep/c.ckpt", "d.txt"):
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    project = tmp_path / "project"
    found = trace(include=[project], exclude=[f"{project}/raw", "*.ckpt", f"{project}/d*.txt"])
    assert sorted(path.relative_to(project).as_posix() for path in found.files) == [
        "code.py",
        "deep/raw/b.txt",
    ]


def test_a_file_whose_name_is_no_text_stays(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a.txt").touch()
    with open(os.fsencode(tmp_path / "project") + b"/caf\xe9.txt", "w"):
        pass
    found = trace(include=[tmp_path / "project"])
    assert list(found.files) == [tmp_path / "project" / "a.txt"]
    (warning,) = found.warnings
    assert warning.isascii()
    assert "caf\\udce9.txt' stays here" in warning
    write_bundle(found, tmp_path / "out")


def test_a_joined_name_that_is_none_is_passed_over(tmp_path: Path) -> None:
    long = "x" * 300
    text = f"import os\nasync def flow(task, model):\n    return os.path.join('{long}', task)\n"
    case = Case({"flow.py": text}, "flow.py:flow")
    found = run_driver(case, case.write(tmp_path / "driver"), tmp_path, ENVIRONMENT)
    assert found["files"] == [f"{tmp_path}/driver/flow.py"]


def test_what_only_type_checkers_import_is_not_needed(tmp_path: Path) -> None:
    text = "import typing as t\nif t.TYPE_CHECKING:\n    import rich\n"
    case = Case(
        {"flow.py": text + "async def flow(task, model):\n    return 1.0\n"}, "flow.py:flow"
    )
    assert run_driver(case, case.write(tmp_path / "driver"), tmp_path, ENVIRONMENT)["needs"] == {}


def test_a_named_folder_that_is_too_large_is_told_and_stays(tmp_path: Path) -> None:
    case = Case(
        {
            "stays/__init__.py": "",
            "stays/flows.py": "from pathlib import Path\n"
            "BIG = Path(__file__).parents[1] / 'big'\n"
            "async def flow(task, model):\n    return 1.0\n",
        },
        "stays.flows:flow",
    )
    source = case.write(tmp_path / "driver")
    (source / "big").mkdir()
    for number in range(2001):
        (source / "big" / str(number)).touch()
    found = run_driver(case, source, tmp_path, ENVIRONMENT)
    assert sorted(found["files"]) == [f"{source}/stays/__init__.py", f"{source}/stays/flows.py"]
    (warning,) = found["warnings"]
    assert warning.startswith(f"{source}/big, which {source}/stays/flows.py names, is too large")


def test_a_file_that_holds_a_key_or_is_gone_is_refused(tmp_path: Path) -> None:
    held, gone = tmp_path / "settings.json", tmp_path / "gone.txt"
    held.write_text('{"key": "sk-0123456789"}')
    code = Trace(files={held: 24, gone: 1})
    with pytest.raises(BadInput) as refused:
        write_bundle(code, tmp_path / "out", secrets={"MY_KEY": "sk-0123456789"})
    assert [fault.where for fault in refused.value.faults] == [str(gone), str(held)]
    assert refused.value.faults[1].found == "the value of MY_KEY"
    assert "sk-0123456789" not in str(refused.value)


async def flow(task: dict, model: object, **given: object) -> float:
    return 1.0


class Odd:
    """Hides what it holds from whoever looks at its attributes."""

    def __init__(self, hidden: object) -> None:
        self.hidden = [hidden]

    def __getstate__(self) -> object:
        return self.hidden[0]


def test_what_objects_hold_is_looked_through(tmp_path: Path) -> None:
    (tmp_path / "words.txt").touch()
    box = SimpleNamespace(tool=json.JSONDecoder(), path=str(tmp_path / "words.txt"))
    found = reach([functools.partial(flow, boxes={"one": [box]})])
    assert {"test_shipping", "json.decoder"} <= found.modules
    assert found.paths == {tmp_path / "words.txt"}


def test_code_is_found_before_data_and_what_is_not_looked_at_is_told() -> None:
    texts = [f"text {number}" for number in range(50_000)]
    found = reach([functools.partial(flow, docs=texts)], most=100)
    assert found.complete
    assert "test_shipping" in found.modules
    rows = [{"n": number} for number in range(200)]
    found = reach([functools.partial(flow, rows=rows)], most=100)
    assert not found.complete
    assert "test_shipping" in found.modules


def test_the_modules_that_a_pickle_names_are_read_off_it() -> None:
    import cloudpickle

    def by_value() -> object:
        return json.dumps(textwrap.TextWrapper)

    held = [Odd(Path("/a")), Odd(Path("/b")), functools.partial(flow), by_value, sysconfig, json]
    found = modules_in_pickle(cloudpickle.dumps(held))
    assert {"test_shipping", "functools", "textwrap", "sysconfig", "json"} <= found
    assert any(name.startswith("pathlib") for name in found)
    assert modules_in_pickle(pickle.dumps([Odd(1), Odd(2)])) == {"test_shipping"}
    assert {"test_shipping"} <= modules_in_pickle(pickle.dumps(Odd(1), protocol=2))


def test_paths_are_changed_in_place_and_nothing_else(tmp_path: Path) -> None:
    def relocated(path: str) -> str | None:
        return f"/there{path}" if path.startswith("/here/") else None

    inner = functools.partial(flow, path=Path("/here/a"))
    inner.mark = "kept"  # type: ignore[attr-defined]
    given = SimpleNamespace(
        partial=inner, pair=("/here/b", 1), names={"/here/c"}, other="/else/d", loop=None
    )
    given.loop = given
    assert move_paths(given, relocated) is given
    assert given.partial is inner
    assert (inner.keywords, inner.mark) == ({"path": Path("/there/here/a")}, "kept")  # type: ignore[attr-defined]
    assert (given.pair, given.names) == (("/there/here/b", 1), {"/there/here/c"})
    assert given.other == "/else/d"


def test_the_standard_library_is_installed_by_whichever_link_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(sysconfig.get_path("stdlib"))
    link = tmp_path / "python"
    link.symlink_to(real)
    monkeypatch.setattr(origin.sysconfig, "get_path", lambda name: str(link))
    origin._installed_folders.cache_clear()
    try:
        assert origin.is_installed(link / "json" / "__init__.py")
        assert origin.is_installed(real.resolve() / "json" / "__init__.py")
        assert not origin.is_installed(tmp_path / "mine.py")
        assert origin.is_installed(Path(origin.__file__))
    finally:
        origin._installed_folders.cache_clear()
