"""Keys are in the environment of a run and in no file that it leaves, Ray's own included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from project import WORKFLOW, run_dir, write_project
from scripted_server import Reply, ScriptedServer

from aflow_tune.models import Spend
from aflow_tune.tuning import run_config

KEYS = {
    name: f"sk-{name.lower()}-5f0c2b9d7e31"
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "JUDGE_KEY", "HF_TOKEN", "WANDB_API_KEY")
}
JUDGED = WORKFLOW.replace(
    "record_metrics(letters=share)",
    'verdict = await client_for("judge").complete([{"role": "user", "content": text or "-"}])\n'
    '    record_metrics(letters=share, judged=float(verdict.text == "fine"))',
).replace(" caller,", " caller, client_for,")


def _sessions() -> set[Path]:
    """Of this process: other tests may run beside it."""
    return set(Path(os.environ["RAY_TMPDIR"], "ray").glob(f"session_2*_{os.getpid()}"))


def _files_with_a_key(folder: Path) -> list[str]:
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            held = path.read_bytes()
            found += [f"{path}: {name}" for name, key in KEYS.items() if key.encode() in held]
    return found


@pytest.mark.slow
def test_no_key_lies_in_any_file_after_a_run(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    asked: list[dict[str, Any]] = []

    def judge(request: dict[str, Any]) -> Reply:
        asked.append(request)
        return Reply("fine")

    before = _sessions()
    with ScriptedServer(judge) as server:
        config = write_project(tmp_path, tiny_model_dir, workflow=JUDGED)
        address = [f"models.judge.base_url={server.url}/v1", "models.judge.api_key_env=JUDGE_KEY"]
        run_config(config, [*address, "models.judge.model=judge", "budget.calls=1000"])

    assert asked, "the judge was never asked"
    spend = Spend(path=run_dir(tmp_path) / "account.sqlite")
    assert spend.spent("judge").calls == len(asked)
    assert spend.spent("policy").calls == 2 * len(asked)
    sessions = _sessions() - before
    assert sessions, "Ray left no session folder"
    for folder in (tmp_path, *sessions):
        assert not _files_with_a_key(folder)
