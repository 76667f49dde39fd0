"""User code that only this process can import reaches another process by value."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from aflow_tune.engines.trinity.ship import import_folders, see_import_folders, ship_by_value

LOAD = "import sys, pickle; f = pickle.loads(sys.stdin.buffer.read()); print(f(20))"


def _call_elsewhere(payload: bytes, folder: Path) -> str:
    """Unpickle and call in a fresh interpreter that cannot see the modules' folder."""
    result = subprocess.run(
        [sys.executable, "-c", LOAD], input=payload, capture_output=True, cwd=folder, check=True
    )
    return result.stdout.decode().strip()


def test_a_module_and_its_sibling_travel_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "ship_sibling.py").write_text("def double(x):\n    return 2 * x\n")
    (source / "ship_main.py").write_text(
        "from ship_sibling import double\n\n\ndef run(x):\n    return double(x) + 1\n"
    )
    monkeypatch.syspath_prepend(str(source))
    module = importlib.import_module("ship_main")
    names = ship_by_value([module.run, None])
    assert {"ship_main", "ship_sibling"} <= set(names)
    assert _call_elsewhere(cloudpickle.dumps(module.run), tmp_path) == "41"


def test_installed_code_travels_by_reference() -> None:
    import json

    assert ship_by_value([json.dumps]) == []


def test_a_worker_imports_late_from_the_folders_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "nowhere")])
    folders = import_folders()
    assert str(tmp_path) in folders
    assert not any("site-packages" in folder or "nowhere" in folder for folder in folders)

    monkeypatch.setattr(sys, "path", ["/first", str(tmp_path)])
    see_import_folders([str(tmp_path), "/second"])
    assert sys.path == ["/first", str(tmp_path), "/second"]
