"""Keys and the hub, against a local server that speaks the protocols."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models_server import GOOD, LISTED, ModelsServer

from aflow_tune.config.load import load_config
from aflow_tune.doctor import services
from aflow_tune.doctor.lines import Line, State
from aflow_tune.sections import ModelSettings

WRONG = "sk-wrong-0123456789"
PROVIDERS = [
    ("openai", "/v1/models", "gpt-small"),
    ("anthropic", "/v1/models?limit=1000", "claude-small"),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers has the time to do so on a busy machine."""
    monkeypatch.setattr("aflow_tune.doctor.services.SECONDS", 60.0)


def check_keys(models: dict[str, ModelSettings], *, ask: bool = True) -> list[Line]:
    config = load_config(None)
    config.models = models
    return services.check_keys(config, ask=ask)


def _model(server: ModelsServer, provider: str, model: str = "m", **more: object) -> ModelSettings:
    url = f"{server.url}/v1" if provider == "openai" else server.url
    settings = {"api_key_env": "DOCTOR_TEST_KEY", "base_url": url, **more}
    return ModelSettings(provider=provider, model=model, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("provider", "path", "model"), PROVIDERS)
def test_a_good_a_wrong_and_an_unproved_key(
    provider: str, path: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCTOR_TEST_KEY", GOOD)
    with ModelsServer() as server:
        (good,) = check_keys({"judge": _model(server, provider, model)})
        asked, without = server.seen  # the second proves that the list is not open to anybody
        assert asked == (path, GOOD)
        assert without[1] != GOOD
        monkeypatch.setenv("DOCTOR_TEST_KEY", WRONG)
        (wrong,) = check_keys({"judge": _model(server, provider, model)})
    assert good.state is State.OK
    assert f"judge ({model})" in good.found
    assert "takes the key in DOCTOR_TEST_KEY" in good.found
    assert wrong.state is State.FAULT
    assert wrong.given
    assert "refuses the key in DOCTOR_TEST_KEY (HTTP 401" in wrong.found
    assert wrong.cure.startswith("export DOCTOR_TEST_KEY=")
    assert not {GOOD, WRONG} & {*good.found.split(), *wrong.found.split()}  # the server repeats it
    assert WRONG not in wrong.found
    with ModelsServer(open_list=True) as server:
        (unproved,) = check_keys({"judge": _model(server, provider, model)})
    assert unproved.state is State.NOTE
    assert "was not proved" in unproved.found


def test_one_endpoint_is_asked_once_and_an_unknown_model_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DOCTOR_TEST_KEY", GOOD)
    with ModelsServer() as server:
        models = {
            "judge": _model(server, "openai", LISTED[0]),
            "executor": _model(server, "openai", "gpt-none"),
        }
        lines = check_keys(models)
        assert [key for _, key in server.seen].count(GOOD) == 1
    assert [line.state for line in lines] == [State.OK, State.NOTE]
    assert "judge (gpt-small), executor (gpt-none)" in lines[0].found
    assert "does not list 'gpt-none'" in lines[1].found


def test_a_missing_key_and_offline_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCTOR_TEST_KEY", raising=False)
    with ModelsServer() as server:
        models = {"judge": _model(server, "openai")}
        (missing,) = check_keys(models)
        monkeypatch.setenv("DOCTOR_TEST_KEY", GOOD)
        (offline,) = check_keys(models, ask=False)
        assert server.seen == []
    assert missing.state is State.FAULT
    assert "models.judge.api_key_env: not set" in missing.found
    assert missing.cure == "export DOCTOR_TEST_KEY=..."
    assert offline.state is State.NOTE


def test_nobody_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aflow_tune.doctor.services.SECONDS", 0.5)
    settings = ModelSettings(model="m", base_url="http://127.0.0.1:9/v1")
    (line,) = check_keys({"executor": settings})
    assert line.state is State.FAULT
    assert "does not answer" in line.found
    assert "models.executor.base_url" in line.cure


HUB = """
import json, sys
from aflow_tune.doctor import services as hub
from aflow_tune.doctor.services import check_hub
hub.SECONDS = 60.0
for name, kind in json.loads(sys.argv[1]):
    (line,) = check_hub("model", name, kind)
    print(json.dumps(vars(line)))
"""


def _hub(asked: list[tuple[str, str]], **environment: str) -> list[Line]:
    """The hub's client reads the environment when it is imported."""
    kept = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_ENDPOINT")}
    result = subprocess.run(
        [sys.executable, "-c", HUB, json.dumps(asked)],
        capture_output=True,
        text=True,
        env={**kept, **environment},
    )
    assert result.returncode == 0, result.stderr
    told = [json.loads(line) for line in result.stdout.splitlines()]
    return [Line(**{**line, "state": State(line["state"])}) for line in told]


def test_the_hub(tmp_path: Path) -> None:
    names = ("there", "nowhere", "gated")
    asked = [*((f"org/{name}", "model") for name in names), ("org/rows", "dataset")]
    with ModelsServer() as server:
        there, nowhere, gated, rows = _hub(asked, HF_ENDPOINT=server.url, HF_HOME=str(tmp_path))
    assert (there.state, rows.state) == (State.OK, State.OK)
    assert "on the hub (2 GB)" in there.found
    assert (nowhere.state, nowhere.given) == (State.FAULT, True)
    assert "knows no such model" in nowhere.found
    assert gated.state is State.FAULT
    assert "hf auth login" in gated.cure


def test_no_hub() -> None:
    (line,) = _hub([("org/there", "model")], HF_ENDPOINT="http://127.0.0.1:9")
    assert (line.state, line.given) == (State.FAULT, False)
    assert "http://127.0.0.1:9 does not answer" in line.found
    (line,) = _hub([("org/there", "model")], HF_HUB_OFFLINE="1")
    assert line.state is State.FAULT
    assert line.cure == "HF_HUB_OFFLINE=0 hf download org/there --repo-type model"
