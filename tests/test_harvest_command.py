"""`aflow-tune harvest`, `mode: harvest` as a stage, and Trinity's reader on what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from faulty_server import FaultyServer, Step
from harvest_project import folder, pairs, sums, write_project

from aflow_tune.cli import main
from aflow_tune.errors import ExitCode

# isort: split


@pytest.fixture
def executor() -> Iterator[FaultyServer]:
    with FaultyServer(sums) as server:
        yield server


def test_the_command_prints_what_became_of_the_graphs(
    tmp_path: Path, executor: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path, executor.openai_url)
    out = tmp_path / "elsewhere" / "best.jsonl"
    arguments = ["harvest", str(path), "--limit", "4", "seed=1", "--out", str(out)]
    assert main([*arguments, "harvest.per_structure=1.0"]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert f"pairs:  {out}" in printed
    assert "refused by kind: not_allowed 4" in printed
    assert "solved problems: 4" in printed
    assert len(pairs(out)) == 4
    assert (folder(tmp_path) / "harvest.json").exists()
    assert not (folder(tmp_path) / "sft.jsonl").exists()


def started(path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "aflow_tune.cli", "harvest", str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_stopped_it_goes_on_where_it_was(
    tmp_path: Path, executor: FaultyServer, how: signal.Signals
) -> None:
    path = write_project(tmp_path, executor.openai_url, templates=["even"])
    executor.steps = lambda number, request: (
        Step(kind="hang") if number == 3 else sums(number, request)
    )
    process = started(path, "local.max_batch=1")
    wait_for(lambda: len(executor.requests) == 4, process)
    os.kill(process.pid, how)
    _, said = process.communicate(timeout=300)
    if how is not signal.SIGKILL:
        assert process.returncode == ExitCode.INTERRUPTED
        assert b"The same command goes on from there." in said
    assert main(["harvest", str(path), "local.max_batch=1"]) == ExitCode.DONE
    asked = [request.body["messages"][-1]["content"] for request in executor.requests]
    numbers = [text.split("What is ")[1].split()[0] for text in asked]
    assert numbers == [*"0123", *"34567"]
    assert [row["problem"] for row in pairs(folder(tmp_path) / "sft.jsonl")] == [
        f"What is {n} + 10?" for n in (0, 2, 4, 6)
    ]


CHAIN = """
project: tests
name: chain
checkpoint_root_dir: {root}/runs
inline: true
seed: 3
local: {{dtype: float32, threads: 1, max_batch: 8}}
writer:
  executor: executor
  operators: [Custom]
  score: {root}/score.py:score
  problem_type: math
  prompt: {root}/prompt.txt
  timeout: 60
harvest: {{templates: {root}/templates, per_structure: 0.5}}
model:
  model_path: {model}
  max_model_len: 1000
  max_response_tokens: 8
  lora_configs: [{{lora_rank: 4, lora_alpha: 8}}]
explorer:
  auxiliary_models:
    - {{name: executor, model_path: {model}, max_model_len: 512, max_response_tokens: 4}}
stages:
  - stage_name: warm_up
    mode: harvest
  - stage_name: sft
    mode: train
    algorithm: {{algorithm_type: sft, optimizer: {{lr: 0.001}}}}
    buffer:
      train_batch_size: 2
      total_steps: 2
      trainer_input:
        experience_buffer:
          name: pairs
          storage_type: file
          path: stage://warm_up/sft.jsonl
          format: {{prompt_type: messages, messages_key: messages}}
buffer:
  explorer_input:
    taskset: {{name: train, path: {root}/train.jsonl}}
"""


@pytest.mark.slow
def test_a_stage_harvests_with_a_local_executor_and_the_next_learns_from_it(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_project(tmp_path, "http://127.0.0.1:9/v1", templates=["even", "always"], problems=4)
    (tmp_path / "prompt.txt").write_text("Write a workflow: {problem}")
    # The tiny model's answers are noise: any is right.
    (tmp_path / "score.py").write_text("def score(row, answer):\n    return 1.0\n")
    path = tmp_path / "chain.yaml"
    path.write_text(CHAIN.format(root=tmp_path, model=tiny_model_dir))
    assert main([str(path)]) == ExitCode.DONE, capsys.readouterr()
    chain = tmp_path / "runs" / "tests" / "chain"
    kept = pairs(chain / "warm_up" / "sft.jsonl")
    counts = json.loads((chain / "warm_up" / "harvest.json").read_text())
    assert counts["candidates"] == {"templates": 8}
    assert counts["kept"] == len(kept) >= 2
    assert kept[0]["messages"][0]["content"] == f"Write a workflow: {kept[0]['problem']}"
    assert (chain / "sft" / "export" / "merged" / "config.json").is_file()
    content = yaml.safe_load((chain / "warm_up" / "resolved.yaml").read_text())
    assert content["mode"] == "harvest"
    assert main([str(path)]) == ExitCode.ALREADY_FINISHED
