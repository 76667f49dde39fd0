"""User code reaches a process that cannot see the user's folder (without Ray), and what stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from user_packages import ENVIRONMENT, LOAD, SPECS, run_driver, write_files

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.cluster.ray_for_run import code_of
from aflow_tune.cluster.sent_function import pack
from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput
from aflow_tune.shipping import Code, LeftOut, gather, write_bundle

ROOT = Path(__file__).resolve().parents[1]
PLAIN = {
    **{key: value for key, value in os.environ.items() if not key.startswith("AFLOW_TUNE")},
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
}
FLOW = "async def flow(task, model):\n    return 1.0\n"


@pytest.mark.parametrize(
    ("script", "names"),
    [("train.py", {*SPECS, "script", "closure", "partial"}), ("notebook.py", {"notebook"})],
)
def test_every_kind_of_code_arrives(script: str, names: set[str], tmp_path: Path) -> None:
    source, out = write_files(tmp_path / "driver"), tmp_path / "out"
    found = run_driver(script, source, out, PLAIN)
    source.rename(tmp_path / "away")
    # A module of the node's own, with the name of one of the user's: it must not be taken.
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "json_repair_helper.py").write_text("VALUE = 0.0\n")
    path = os.pathsep.join([PLAIN["PYTHONPATH"], str(tmp_path / "node"), str(out)])
    handed_over = {name: ENVIRONMENT[name] for name in found["variables"]}
    told = {"PYTHONPATH": path, "AFLOW_TUNE_SHIPMENT": found["bundle"], "HIDDEN": str(source)}
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(out / "functions")],
        cwd=tmp_path / "node",
        env={**PLAIN, **handed_over, **told},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == dict.fromkeys(names, 1.0)


def gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, files: dict[str, str]
) -> tuple[Path, Code]:
    """What a module of a project with these files needs."""
    user = write_files(tmp_path / "user", files)
    monkeypatch.syspath_prepend(str(user))
    monkeypatch.chdir(user)
    return user, gather([module])


def test_what_is_needed_there_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import httpx\ntry:\n    import sympy\nexcept ImportError:\n    sympy = 0\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rich\n"
        "async def flow(task, model):\n    import jinja2\n    return 1.0\n"
    )
    user, code = gathered(tmp_path, monkeypatch, "ship_needing", {"ship_needing.py": text})
    assert code.needs == {
        "httpx": f"{user}/ship_needing.py:1",
        "jinja2": f"{user}/ship_needing.py:10",
    }


def test_keys_hidden_and_large_files_stay_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays = (".env", "certs/server.pem", ".secret/text.txt", "prod.env", ".git/config", "id_rsa")
    stays += ("venv/pyvenv.cfg", "venv/lib/thing.py", "__pycache__/a.pyc")
    write_files(tmp_path / "user", dict.fromkeys((*stays, "notes.txt"), "text"))
    with (tmp_path / "user" / "weights.bin").open("wb") as file:
        file.truncate(65 * 2**20)
    with open(os.fsencode(tmp_path / "user") + b"/caf\xe9.txt", "w"):
        pass
    user, code = gathered(tmp_path, monkeypatch, "ship_small", {"ship_small.py": FLOW})
    assert sorted(code.files) == [user / "notes.txt", user / "ship_small.py"]
    assert len(code.warnings) == 2
    write_bundle(code, tmp_path / "out")
    named = gather([], include=[user / ".env"])
    assert (named.files, len(named.warnings)) == (set(), 1)
    with pytest.raises(BadInput, match="nothing there"):
        gather([], include=[user / "nothing"])


def test_of_a_folder_that_is_too_large_the_modules_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "user", {f"big/{number}": "" for number in range(2001)})
    files = {f"ship_stays/{name}.py": "import ship_beside\n" for name in ("__init__", "flows")}
    files["ship_beside.py"] = ""
    user, code = gathered(tmp_path, monkeypatch, "ship_stays.flows", files)
    names = ("ship_beside.py", "ship_stays/__init__.py", "ship_stays/flows.py")
    assert sorted(code.files) == [user / name for name in names]
    (warning,) = code.warnings
    assert str(user) in warning
    assert "include" in warning


def test_what_the_user_excludes_stays(tmp_path: Path) -> None:
    project = write_files(
        tmp_path / "project",
        dict.fromkeys(
            ("code.py", "raw/a.txt", "deep/raw/b.txt", "deep/c.ckpt", "d.txt", "runs/e"), ""
        ),
    )
    stays = LeftOut([project / "runs"], [f"{project}/raw", "*.ckpt", f"{project}/d*.txt"])
    found = gather([], include=[project], stays=stays)
    assert sorted(found.files) == [project / "code.py", project / "deep/raw/b.txt"]


def test_a_file_that_holds_a_key_or_is_gone_is_refused(tmp_path: Path) -> None:
    held, gone = tmp_path / "settings.json", tmp_path / "gone.txt"
    held.write_text('{"key": "sk-0123456789"}')
    code = Code(files={held, gone})
    with pytest.raises(BadInput) as refused:
        write_bundle(code, tmp_path / "out", secrets={"MY_KEY": "sk-0123456789"})
    assert [fault.where for fault in refused.value.faults] == [str(gone), str(held)]
    assert "MY_KEY" in refused.value.faults[1].found
    assert "sk-0123456789" not in str(refused.value)


def test_modules_that_the_configuration_names_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(
        tmp_path / "user",
        {"ship_operators.py": "", "ship_data/notes.txt": "", "ship_kinds/a.txt": ""},
    )
    monkeypatch.syspath_prepend(str(tmp_path / "user"))
    config = load_config(
        None,
        [
            f"checkpoint_root_dir={tmp_path}/runs",
            "data_processor.experience_pipeline.operators=[{name: ship_operators.Mine}]",
            "buffer.explorer_input.taskset.path=ship_data.jsonl",
            "model.model_path=ship_kinds.v1",
        ],
    )
    found, _ = code_of(config, [])
    assert list(found.modules) == ["ship_operators"]


# -- what cannot be sent -----------------------------------------------------------------------

LOCK = threading.Lock()


async def locked(task: dict, model: object) -> float:
    with LOCK:
        return 1.0


def test_what_cannot_be_sent_is_named() -> None:
    by_value = type(locked)(locked.__code__, globals(), "by_value")
    by_value.__qualname__ = "made.<locals>.by_value"
    with pytest.raises(BadInput) as refused:
        pack([by_value])
    (fault,) = refused.value.faults
    assert "`LOCK`" in fault.expected
    assert "inside the function" in fault.cure
