"""What a run's functions need, and what cannot be sent (the arrival: test_shipping.py)."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aflow_tune.engines.trinity.config import load_config
from aflow_tune.engines.trinity.ship import pack, trace_run, user_modules
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


CACHED = """
import functools, sys, typing
from pathlib import Path
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
        return fibonacci(90) + Reader().read("1") + inner(1.0)
    return flow
if __name__ == "__main__":
    from aflow_tune.engines.trinity.ship import pack
    Path(sys.argv[1]).write_bytes(pack([make()]))
"""
LOAD_CACHED = """
import asyncio, pickle, sys
(flow,) = pickle.load(open(sys.argv[1], "rb"))
print(asyncio.run(flow({}, None)))
"""


def test_cached_functions_and_new_types_of_a_script_arrive(tmp_path: Path) -> None:
    script, sent = tmp_path / "train.py", tmp_path / "sent"
    script.write_text(CACHED)
    subprocess.run([sys.executable, script, sent], check=True)
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_CACHED, sent], capture_output=True, text=True, check=True
    )
    assert float(ran.stdout) == 2880067194370816122.0


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
