"""What `submit` sends: a job that cannot see the client's folder has the whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from project import run_dir, write_project

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.cluster import keys
from aflow_tune.cluster.submission import Submission, prepare_submission
from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput

ROOT = Path(__file__).resolve().parents[1]
OPERATOR = """
from aflow_tune.operators import Operator


class Echo(Operator):
    async def run(self, text: str):
        return {"text": text}
"""
CLOSURE = """
import os
from typing import Dict

from agentscope.model import TrinityChatModel


def make(key):
    async def flow(task: Dict, model: TrinityChatModel) -> float:
        return float(len(key))

    return flow


two_calls = make(os.environ["SUBMISSION_KEY"])
"""
IN_THE_JOB = """
import json, os, sys
import aflow_tune.engines.trinity
from pathlib import Path
from aflow_tune.cluster import keys
from aflow_tune.cluster import ship
from aflow_tune.config import tasksets
from aflow_tune.config import validate
from aflow_tune.cluster.attached_ray import runtime_env_of
from aflow_tune.cluster.submitted import open_payload
from aflow_tune.shipping.arrival import travelled

payload = open_payload()
config = payload.config
validate.check_run_prompts(config)
code, _ = ship.trace_run(config, payload.functions)
print(json.dumps({
    "function": payload.functions[0].__name__,
    "rows": [tasksets.read_taskset(config, t).total for _, t, _ in tasksets.user_tasksets(config)],
    "beside": config.positions.beside("extra/note.txt").read_text(),
    "operator": os.path.exists(travelled(config.operators["Echo"]).rpartition(":")[0]),
    "faults": [str(fault) for fault in code.faults],
    "environment": runtime_env_of(config, code, Path("."), {"A": "b"}, True),
    "namespace": config.ray_namespace,
    "command": config.command["config"],
}))
"""


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project on the client, its folder being the current one."""
    for name in keys._USUAL:
        monkeypatch.delenv(name, raising=False)
    client = tmp_path / "client"
    write_project(client, tiny_model_dir)
    monkeypatch.chdir(client)
    return client


def _send(folder: Path, *overrides: str) -> Submission:
    folder.mkdir()
    return prepare_submission(Path("config.yaml"), overrides, folder)


@pytest.mark.slow
def test_a_job_has_the_run_without_the_clients_folder(project: Path, tmp_path: Path) -> None:
    (project / "extra").mkdir()
    (project / "extra" / "note.txt").write_text("here")
    (project / "my_operators.py").write_text(OPERATOR)
    sent = tmp_path / "sent"
    run = _send(
        sent,
        f"runtime_env.include=[{project}/extra]",
        f"operators.Echo={project}/my_operators.py:Echo",
    )
    assert run.names == []
    assert run.run_dir == str(run_dir(project))
    assert run.warnings == []
    (bundle,) = run.environment["py_modules"]
    assert run.environment["env_vars"] == {
        "RAY_JOB_STOP_WAIT_TIME_S": "240",
        "AFLOW_TUNE_SHIPMENT": Path(bundle).name,
    }
    project.rename(tmp_path / "away")
    told = subprocess.run(
        [sys.executable, "-c", IN_THE_JOB],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(sent)]),
            "AFLOW_TUNE_SHIPMENT": Path(bundle).name,
        },
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout.splitlines()[-1]) == {
        "function": "two_calls",
        "rows": [12, 4],
        "beside": "here",
        "operator": True,
        "faults": [],
        "environment": {"env_vars": {"A": "b", "AFLOW_TUNE_KEYS": ""}},
        "namespace": "",
        "command": f"{project}/config.yaml",
    }


def test_what_means_another_thing_there_is_refused(project: Path, tmp_path: Path) -> None:
    (project / "weights").mkdir()
    with pytest.raises(BadInput) as refused:
        _send(
            tmp_path / "sent",
            "checkpoint_root_dir=runs",
            "cluster.ray_address=local",
            "model.model_path=weights",
        )
    assert [fault.where.partition("=")[0] for fault in refused.value.faults] == [
        "command line: checkpoint_root_dir",
        "command line: cluster.ray_address",
        "command line: model.model_path",
    ]


def test_a_key_inside_what_would_be_sent_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-submission-0123456789"
    monkeypatch.setenv("SUBMISSION_KEY", key)
    (project / "flow.py").write_text(CLOSURE)
    with pytest.raises(BadInput) as refused:
        _send(tmp_path / "sent")
    assert [fault.found for fault in refused.value.faults] == ["the value of SUBMISSION_KEY"]
    assert key not in str(refused.value)
    assert not list((tmp_path / "sent").rglob("job.pickle"))


def test_a_key_in_a_file_or_in_plain_variables_is_refused(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-submission-0123456789"
    monkeypatch.setenv("SUBMISSION_KEY", key)
    secret = "runtime_env.secrets=[SUBMISSION_KEY]"
    with pytest.raises(BadInput) as refused:
        _send(tmp_path / "first", secret, f"runtime_env.env_vars.PLAIN={key}")
    assert "SUBMISSION_KEY" in str(refused.value)
    (project / "settings.json").write_text(json.dumps({"key": key}))
    with pytest.raises(BadInput) as refused:
        _send(tmp_path / "second", secret)
    assert [fault.where for fault in refused.value.faults] == [f"{project}/settings.json"]


def test_a_key_among_the_settings_is_refused(project: Path, tmp_path: Path) -> None:
    key = "monitor.monitor_args.api_key"
    with pytest.raises(BadInput) as refused:
        _send(tmp_path / "sent", "seed=2", f"{key}=sk-0123456789", "runtime_env.env_vars.A_KEY=x")
    assert sorted(fault.where for fault in refused.value.faults) == [
        f"command line: {key}",
        "command line: runtime_env.env_vars.A_KEY",
    ]
    assert "sk-0123456789" not in str(refused.value)


def test_a_command_is_noted_without_its_secrets() -> None:
    config = load_config(None)
    config.note_command("c.yaml", ["seed=2", "monitor.monitor_args.api_key=sk-0123456789"], True)
    told = config.command
    assert told is not None
    assert (told["overrides"], told["secret"]) == (["seed=2"], ["monitor.monitor_args.api_key"])
    assert (told["inline"], told["renamed"]) == (True, False)
    assert Path(told["config"]).is_absolute()


def test_the_last_line_of_a_job_is_how_it_ended_even_after_a_defect(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "aflow_tune.commands.run_submitted"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "AFLOW_TUNE_SHIPMENT": "not_there"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 1
    assert "FileNotFoundError" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "aflow-tune: ended with exit code 1"
