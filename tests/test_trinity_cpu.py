"""Trinity's own engines run for real, on processors: vLLM samples, verl trains, Ray in between.

In the environment of requirements/trinity-cpu.txt (docs/trinity_cpu.md), a minute or two a run. The
model is tiny and random: what is tested is that every rollout comes from the weights it should.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("trinity_on_cpu") is None,
        reason="the set of requirements/trinity-cpu.txt is not installed here",
    ),
]

WORKFLOW = '''
import contextlib
from typing import Dict

from aflow_tune import TrinityChatModel
from openai import LengthFinishReasonError
from pydantic import BaseModel

from aflow_tune import caller, record_metrics

NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"name": "add", "description": "adds", "parameters": NUMBER}


class Verdict(BaseModel):
    good: bool


def said(reply) -> str:
    return "".join(block.get("text", "") for block in reply.content)


def letters(text: str) -> float:
    share = sum(c.isalpha() for c in text) / max(1, len(text))
    record_metrics(letters=share)
    return share


async def calls(task: Dict, model: TrinityChatModel) -> float:
    """Three calls: plain, with a tool on offer, and one that must answer in JSON."""
    ask = [{"role": "user", "content": task["question"]}]
    with caller("plain"):
        text = said(await model(ask))
    with caller("tool"):
        text += said(await model(ask, tools=[{"type": "function", "function": TOOL}]))
    with caller("verdict"), contextlib.suppress(LengthFinishReasonError):
        await model(ask, structured_model=Verdict)
    return letters(text)


async def one_call(task: Dict, model: TrinityChatModel) -> float:
    return letters(said(await model([{"role": "user", "content": task["question"]}])))


async def with_judge(task: Dict, model: TrinityChatModel, auxiliary_models) -> float:
    share = await one_call(task, model)
    verdict = await next(iter(auxiliary_models.values()))([{"role": "user", "content": "?"}])
    return share + 0.01 * len(said(verdict))
'''

SAMPLER = {
    "engine_num": 1,
    "enforce_eager": True,
    "dtype": "float32",
    "extra_engine_args": {"max_num_batched_tokens": 512, "max_num_seqs": 16},
}
FP32 = {
    "actor": {
        "fsdp_config": {"use_torch_compile": False, "mixed_precision": {"param_dtype": "fp32"}}
    }
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32 numbers: vLLM's attention on a CPU has none of 16."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), heads=2)


def settings(root: Path, model: Path, function: str = "one_call", calls: int = 1) -> dict[str, Any]:
    """A run of three steps, four rollouts for each of two tasks, full weights."""
    (root / "flow.py").write_text(WORKFLOW)
    for name, numbers in (("train", range(12)), ("held_out", range(100, 104))):
        rows = [json.dumps({"question": f"What is {n}?"}) + "\n" for n in numbers]
        (root / f"{name}.jsonl").write_text("".join(rows))
    return {
        "project": "tests",
        "name": "cpu",
        "checkpoint_root_dir": str(root / "runs"),
        "engine": "trinity",
        "workflow": f"{root}/flow.py:{function}",
        "report": {"score": "letters"},
        "model": {
            "model_path": str(model),
            "max_response_tokens": 24,
            "max_model_len": 320,
        },
        "algorithm": {
            "algorithm_type": "multi_step_grpo",
            "repeat_times": 4,
            "optimizer": {"lr": 3e-3},
            "kl_loss_fn": "none",
        },
        "buffer": {
            "batch_size": 2,
            "train_batch_size": 8 * calls,
            "total_steps": 3,
            "explorer_input": {
                "taskset": {"name": "train", "path": str(root / "train.jsonl")},
                "eval_tasksets": [{"name": "held_out", "path": str(root / "held_out.jsonl")}],
            },
        },
        "explorer": {"runner_per_model": 1, "eval_interval": 3, "rollout_model": SAMPLER},
        "trainer": {
            "save_interval": 1,
            "use_remove_padding": False,
            "max_token_len_per_gpu": 1024,
            "trainer_config": FP32,
        },
    }


def started(root: Path, content: dict[str, Any], path: str = "") -> subprocess.Popen[str]:
    config = root / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "aflow_tune.cli", str(config)]
    paths = [item for item in (path, os.environ.get("PYTHONPATH", "")) if item]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (root / "out.log").open("a") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment
        )


def finished(root: Path, content: dict[str, Any], *, code: int = 0, path: str = "") -> str:
    """Run to the end; what was printed."""
    process = started(root, content, path)
    process.wait()
    printed = (root / "out.log").read_text()
    assert process.returncode == code, printed[-6000:]
    return printed


def folder(root: Path) -> Path:
    return root / "runs" / "tests" / "cpu"


def metrics(run: Path) -> list[tuple[int, dict[str, float]]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["metrics"]) for line in lines]


def mismatches(run: Path) -> dict[int, float]:
    name = "rollout/mismatch"
    return {step: found[name] for step, found in metrics(run) if name in found}


BF16 = 0.1
"""How far weights that verl rounded to bf16 on their way may take this random model."""
EXACT = 1e-4


@pytest.mark.parametrize("method", ["checkpoint", "nccl"])
def test_full_weights_reach_the_sampler(tmp_path: Path, model: Path, method: str) -> None:
    """By NCCL beside a judge; by memory: see the stages."""
    content = settings(tmp_path, model, "with_judge" if method == "nccl" else "calls", calls=3)
    content["synchronizer"] = {"sync_method": method}
    if method == "nccl":
        content["buffer"]["train_batch_size"] = 8
        content["explorer"]["auxiliary_models"] = [{**SAMPLER, "model_path": str(model)}]
    finished(tmp_path, content)
    run = folder(tmp_path)
    assert mismatches(run).keys() == {0, 1, 2, 3}  # the last evaluation has the last weights
    assert max(mismatches(run).values()) < BF16
    evaluated = {step for step, found in metrics(run) if any("eval/" in name for name in found)}
    assert {0, 3} <= evaluated
    assert (run / "global_step_3" / "actor" / "huggingface" / "config.json").exists()


def test_an_adapter_reaches_the_sampler_and_outlives_a_kill(tmp_path: Path, model: Path) -> None:
    content = settings(tmp_path, model)
    content["model"]["lora_configs"] = [{"lora_rank": 4, "lora_alpha": 8}]
    content["buffer"]["total_steps"] = 4
    run = folder(tmp_path)
    process = started(tmp_path, content)
    while not (run / "global_step_2").exists():
        assert process.poll() is None, (tmp_path / "out.log").read_text()[-6000:]
        time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished(tmp_path, content)
    assert max(mismatches(run).values()) < EXACT
    assert (run / "global_step_4" / "actor" / "lora_adapter").exists()


def test_an_adapter_shares_the_only_gpu(tmp_path: Path, model: Path) -> None:
    content = settings(tmp_path, model)
    content["mode"] = "colocate"
    content["model"]["lora_configs"] = [{"lora_rank": 16, "lora_alpha": 16}]
    finished(tmp_path, content)
    assert max(mismatches(folder(tmp_path)).values()) < EXACT


BREAKING = """
import builtins, sys

real = builtins.__import__


def broken(*arguments, **more):
    '''Once our sampler's class is there, its server is Trinity's again: without adapters.'''
    module = real(*arguments, **more)
    room = sys.modules.get("aflow_tune.engines.trinity.rollout.vllm_sampler")
    if "run_api_server" in vars(getattr(room, "VllmSampler", object)):
        del room.VllmSampler.run_api_server
    return module


builtins.__import__ = broken
"""


def test_rollouts_without_the_adapter_end_the_run(tmp_path: Path, model: Path) -> None:
    """The defect of Trinity 0.6.0, put back."""
    (tmp_path / "breaking").mkdir()
    (tmp_path / "breaking" / "sitecustomize.py").write_text(BREAKING)
    content = settings(tmp_path, model)
    content["model"]["lora_configs"] = [{"lora_rank": 16, "lora_alpha": 32}]
    printed = finished(tmp_path, content, code=1, path=str(tmp_path / "breaking"))
    assert "does not have the trainer's weights" in printed


def test_stages_of_examples_pairs_and_rollouts(tmp_path: Path, model: Path) -> None:
    """SFT, DPO on whole pairs, then GiGPO by memory, each from what the one before left."""
    content = settings(tmp_path, model, "calls", calls=3)
    sets = {
        "sft": (4, [{"prompt": f"say {n}", "response": "yes"} for n in range(8)]),
        "dpo": (3, [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no no"} for n in range(6)]),
    }
    content["stages"] = []
    for name, (size, rows) in sets.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"name": name, "storage_type": "file", "path": str(path)}
        data["format"] = {"prompt_type": "plaintext"}
        buffer = {"train_batch_size": size, "total_steps": 2}
        buffer["explorer_input"] = {"eval_tasksets": []}
        buffer["trainer_input"] = {"experience_buffer": data}
        algorithm = {"algorithm_type": name, "optimizer": {"lr": 1e-3}}
        stage = {"stage_name": name, "mode": "train", "algorithm": algorithm, "buffer": buffer}
        content["stages"].append(stage)
    gigpo = {"stage_name": "gigpo", "mode": "both", "algorithm": {"algorithm_type": "gigpo"}}
    content["stages"].append(gigpo)
    content["synchronizer"] = {"sync_method": "memory"}
    finished(tmp_path, content)
    runs = [path.parent for path in (tmp_path / "runs").rglob("metrics.jsonl")]
    dpo, last = (next(run for run in runs if name in str(run)) for name in ("dpo", "gigpo"))
    # Before the first step policy and reference (which verl holds in bf16) are about equal:
    # -log sigmoid(0), of every pair.
    assert metrics(dpo)[0][1]["actor/dpo_loss"] == pytest.approx(0.6931, abs=0.03)
    assert "sync_method: memory" in (last / "resolved.yaml").read_text()
    assert mismatches(last).keys() == {0, 1, 2, 3}
    assert max(mismatches(last).values()) < BF16
