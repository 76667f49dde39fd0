"""Asking what a run left on disk: checkpoint, adapter, merged model, chain; executors here too."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_server import ScriptedServer
from writer_servers import executor, write_config

from aflow_tune.cli import main
from aflow_tune.config.changes import save_resolved
from aflow_tune.config.load import load_config
from aflow_tune.engines.local.trainer import LocalTrainer, TrainerSettings
from aflow_tune.engines.local.weights import LoraSpec
from aflow_tune.errors import BadInput
from aflow_tune.evaluation.trained import find_weights

SAME = ("--set", "deterministic=true", "--temperature", "0")
"""Fp32, no batching effects, the likeliest token: equal weights write equal texts."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A run folder with two checkpoints of an adapter and its exports."""
    root = tmp_path_factory.mktemp("infer_local")
    folder = root / "run"
    folder.mkdir()
    config = load_config(write_config(root, "http://127.0.0.1:9", tiny_model_dir))
    # Its task sets are gone and its paths go out from the YAML: asking needs no more than that.
    (root / "score.py").write_text("def score(row, answer):\n    return 1.0\n")
    config.writer.benchmark, config.writer.score = None, "score.py:score"
    (root / "short.txt").write_text("Write a workflow: {problem}")
    config.writer.prompt = "short.txt"
    save_resolved(config, [], folder / "resolved.yaml")
    for step in (1, 2):
        settings = TrainerSettings(lora=LoraSpec(4, 8), seed=step)
        trainer = LocalTrainer(tiny_model_dir, replace(settings))
        assert trainer.peft is not None
        with torch.no_grad():  # B is zero at first, which would change nothing
            for name, parameter in trainer.peft.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.2 * step)
        trainer.save(folder / f"global_step_{step}")
    trainer.export_peft(folder / "export" / "adapter")
    trainer.export_merged(folder / "export" / "merged")
    return folder


@pytest.fixture
def ask(run: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a checkpoint writes, and the whole result. The executor is scripted."""

    def infer(*checkpoint: str) -> dict[str, Any]:
        capsys.readouterr()
        with ScriptedServer(executor) as server:
            address = ("--set", f"models.executor.base_url={server.url}/v1")
            problem = ("--type", "qa", "--problem", "Where?", "--truth", "The answer is 391")
            assert main(["infer", *checkpoint, *address, *SAME, *problem, "--json"]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    return infer


@pytest.mark.slow
def test_every_form_of_the_same_weights_writes_the_same(run: Path, ask: Any) -> None:
    newest = ask("--checkpoint", str(run))
    text = newest["workflow"]["text"]
    assert text
    assert newest["level"] == 3  # random weights write no workflow
    assert newest["answer"] == "The answer is 391"
    assert newest["score"] == 1.0
    assert newest["policy_tokens"] > len("Write a workflow: Where?")
    for folder in ("global_step_2", "export/adapter", "export/merged"):
        assert ask("--checkpoint", str(run / folder))["workflow"]["text"] == text
    others = [ask("--checkpoint", str(run / "global_step_1"))]
    others.append(ask("--config", str(run / "resolved.yaml")))
    texts = {text, *(other["workflow"]["text"] for other in others)}
    assert len(texts) == 3  # another step, and the base model, write something else


@pytest.mark.slow
def test_an_executor_on_this_machine(
    run: Path, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The local recipe's form: policy and frozen executor are both sampled here."""
    text = (run / "resolved.yaml").read_text()
    config = tmp_path / "two.yaml"
    here = run.parent
    text = text.replace("score.py:score", f"{here}/score.py:score")
    config.write_text(text.replace("short.txt", f"{here}/short.txt"))
    local = (
        "explorer.auxiliary_models=[{name: frozen, max_prompt_tokens: 900, "
        f"max_response_tokens: 8, max_model_len: 1024, model_path: {tiny_model_dir}}}]"
    )
    options = ["--config", str(config), "--set", local, "--set", "writer.executor=frozen"]
    arguments = ["--checkpoint", str(run), *options, "--type", "math", "--problem", "1 + 1?"]
    code = main(["infer", *arguments, "--json"])
    got = json.loads(capsys.readouterr().out)
    assert code == (0 if got["answered"] else 1)  # random weights may say nothing
    asked = [call for call in got["calls"] if call["kind"] == "model"]
    assert {call["role"] for call in asked} == {"policy", "executor"}
    assert all(call["failure"] is None for call in asked)
    assert got["model_calls"] >= 1
    assert got["tokens"] > 0


def test_what_a_folder_means(run: Path, tmp_path: Path) -> None:
    assert find_weights(run).name == "run/global_step_2"
    assert find_weights(run / "global_step_1").name == "run/global_step_1"
    assert find_weights(run / "export" / "adapter").name == "run/export/adapter"
    elsewhere = shutil.copytree(run / "export" / "adapter", tmp_path / "mine")
    assert (find_weights(elsewhere).run_dir, find_weights(elsewhere).name) == (None, "mine")

    # A chain of stages: the last one that trained, whatever the clock says.
    chain = tmp_path / "chain"
    for name in ("sft", "grpo"):
        shutil.copytree(run, chain / name)
    (chain / "evaluation").mkdir()
    stages = [{"name": name} for name in ("warm_up", "sft", "grpo", "evaluation")]
    (chain / "chain.json").write_text(json.dumps({"stages": stages}))
    assert find_weights(chain).name == "grpo/global_step_2"
    shutil.rmtree(chain / "grpo" / "global_step_2")
    assert find_weights(chain).name == "grpo/global_step_1"
    (chain / "chain.json").write_text("[]")
    with pytest.raises(BadInput, match="chain"):
        find_weights(chain)
