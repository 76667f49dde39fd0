"""What a run's functions need, and what cannot be sent (the arrival: test_shipping.py)."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aflow_tune.cluster.ship import pack, trace_run, user_modules
from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput

LOCK = threading.Lock()


async def locked(task: dict, model: object) -> float:
    with LOCK:
        return 1.0


def test_a_module_and_its_sibling_are_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ship_sibling.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "ship_main.py").write_text(
        "from ship_sibling import double\n\n\ndef run(x):\n    return double(x) + 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("ship_main")
    assert user_modules([module.run, None]) == ["ship_main", "ship_sibling"]


def test_installed_code_is_not() -> None:
    import json

    assert user_modules([json.dumps]) == []


def test_modules_that_the_configuration_names_travel_and_run_folders_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ship_operators.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "notes.txt").write_text("")
    (tmp_path / "extra.txt").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(
        None,
        [
            f"checkpoint_root_dir={tmp_path}/runs",
            "data_processor.experience_pipeline.operators=[{name: ship_operators.Mine}]",
            f"runtime_env.include=[{tmp_path}/extra.txt, {tmp_path}/nothing]",
        ],
    )
    found, _ = trace_run(config, [])
    assert set(found.files) == {tmp_path / "ship_operators.py", tmp_path / "extra.txt"}
    assert [fault.where for fault in found.faults] == [f"{tmp_path}/nothing"]


def test_what_cannot_be_sent_is_named() -> None:
    by_value = type(locked)(locked.__code__, globals(), "by_value")
    by_value.__qualname__ = "made.<locals>.by_value"
    with pytest.raises(BadInput) as refused:
        pack([by_value])
    (fault,) = refused.value.faults
    assert "`LOCK`" in fault.expected
    assert "lock" in fault.found
    assert "inside the function" in fault.cure


SCRIPT = """
import contextvars, functools, sys, typing
from pathlib import Path
P = typing.ParamSpec("P")
Rest = typing.TypeVarTuple("Rest")
Result = typing.TypeVar("Result")
depth = contextvars.ContextVar("depth", default=100.0)
unset = contextvars.ContextVar("unset")
depth.set(5.0)
def once(function: typing.Callable[P, Result]) -> typing.Callable[P, Result]:
    def run(*given: P.args, **named: P.kwargs) -> Result:
        return function(*given, **named)
    return run
@functools.singledispatch
def weight(item) -> float:
    return 10.0
@weight.register
def _(item: int) -> float:
    return 20.0
assert weight("text") == 10.0  # looked up: remembered, weakly
class Held(typing.Generic[typing.Unpack[Rest]]):
    @functools.cached_property
    def size(self) -> float:
        return 1000.0
    @functools.singledispatchmethod
    def of(self, item) -> float:
        return 2000.0
Count = typing.NewType("Count", int)
@functools.cache
def fibonacci(n: Count) -> Count:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
class Reader:
    @functools.lru_cache(maxsize=7)
    def read(self, text):
        return float(text)
def make():
    @functools.lru_cache
    def inner(n):
        return n
    async def flow(task, model):
        assert Reader.read.cache_parameters()["maxsize"] == 7
        assert unset.get(None) is None
        assert once(weight)("text") == 10.0
        held = Held[int]()
        assert (held.size, held.__dict__["size"], held.of(1)) == (1000.0, 1000.0, 2000.0)
        return fibonacci(20) + Reader().read("1") + inner(1.0) + weight(1) + depth.get()
    return flow
if __name__ == "__main__":
    from aflow_tune.cluster.ship import pack
    Path(sys.argv[1]).write_bytes(pack([make()]))
"""
LOAD_AND_SEND_ON = """
import asyncio, pickle, sys
from aflow_tune.cluster.ship import pack
(flow,) = pickle.load(open(sys.argv[1], "rb"))
(flow,) = pickle.loads(pack([flow]))
print(asyncio.run(flow({}, None)))
"""


def test_what_scripts_make_beside_functions_and_classes_arrives(tmp_path: Path) -> None:
    script, sent = tmp_path / "train.py", tmp_path / "sent"
    script.write_text(SCRIPT)
    subprocess.run([sys.executable, script, sent], check=True)
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_AND_SEND_ON, sent], capture_output=True, text=True, check=True
    )
    assert float(ran.stdout) == 6765 + 1 + 1 + 20 + 100


SINGLETON = """
class Only:
    def __reduce__(self):
        return "only"
only = Only()
async def flow(task, model):
    return float(only is not None)
if __name__ == "__main__":
    from aflow_tune.cluster.ship import pack
    pack([flow])
"""


def test_what_is_sent_by_a_name_that_workers_do_not_have_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SINGLETON)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert f"{script}\n" in ran.stderr
    assert "`only` in a form that can be sent" in ran.stderr
    assert "a Only that is sent by its name only" in ran.stderr


async def plain(task: dict, model: object, box: object = None) -> float:
    return 1.0


class Hidden:
    """Becomes something else when it is sent; nothing that it holds says so."""

    def __reduce__(self) -> object:
        # Put together, so that reading this file does not find it either.
        return importlib.import_module("_".join(("ship", "hidden"))).Tool, ()


def test_what_an_object_becomes_when_it_is_sent_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ship_hidden.py").write_text("class Tool:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(None, [f"checkpoint_root_dir={tmp_path}/runs"])
    found, _ = trace_run(config, [functools.partial(plain, box=Hidden())])
    assert "ship_hidden" in found.modules
    assert tmp_path / "ship_hidden.py" in found.files
    found, _ = trace_run(config, [functools.partial(plain, box=1)])
    assert "ship_hidden" not in found.modules


def test_names_of_files_and_models_are_no_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ship_data", "ship_kinds"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(
        None,
        [
            f"checkpoint_root_dir={tmp_path}/runs",
            "buffer.explorer_input.taskset.path=ship_data.jsonl",
            "model.model_path=ship_kinds.v1",
        ],
    )
    found, _ = trace_run(config, [])
    assert (found.modules, found.files) == ({}, {})
