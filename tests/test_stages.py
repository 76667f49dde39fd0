"""`stages`: read, checked together, run one after the other, stopped and resumed in each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from data_project import pair, write_rows
from project import HELD, WORKFLOW, write_project
from trinity.common.config import Config

from aflow_tune.cli import main
from aflow_tune.config.load import read_config
from aflow_tune.config.stages import stage_configs
from aflow_tune.errors import AlreadyFinished, BadInput, BudgetReached
from aflow_tune.tuning import run_config

STAGES = """
stages:
  - stage_name: warm_up
    mode: train
    algorithm: {{algorithm_type: sft}}
    buffer:
      train_batch_size: 4
      total_steps: 6
      explorer_input: {{eval_tasksets: []}}
      trainer_input:
        experience_buffer:
          path: {root}/sft.jsonl
          storage_type: file
          format: {{messages_key: messages}}
          data_selector: {{selector_type: shuffle}}
    trainer: {{save_interval: 2}}
  - stage_name: learn
  - stage_name: test
    mode: bench
"""
NAMES = ("warm_up", "learn", "test")


@pytest.fixture
def chain(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """The configuration of a chain: sft, then two steps of GRPO, then a bench; inline."""
    return _write_chain(tmp_path, tiny_model_dir)


def _write_chain(root: Path, model: Path, workflow: str = WORKFLOW) -> Path:
    config = write_project(root, model, workflow=workflow)
    write_rows(root / "sft.jsonl", [pair(f"What is {n}?", "aaaa bbbb") for n in range(12)])
    config.write_text(config.read_text() + "inline: true\n" + STAGES.format(root=root))
    return config


def _folder(config: Path) -> Path:
    return config.parent / "runs" / "tests" / "tiny"


def _statuses(config: Path) -> dict[str, str]:
    entries = json.loads((_folder(config) / "chain.json").read_text())["stages"]
    return {entry["name"]: entry["status"] for entry in entries}


def _line(config: Path, text: str) -> int:
    """Number of the first line with `text`."""
    return next(n for n, line in enumerate(config.read_text().splitlines(), 1) if text in line)


def _transcripts(folder: Path, step: int) -> list[str]:
    path = folder / "evaluations" / "held_out" / f"step_{step}.jsonl"
    records = sorted(map(json.loads, path.read_text().splitlines()), key=lambda r: r["item"])
    return [call["response"] for record in records for call in record["transcript"]]


# --- reading ---------------------------------------------------------------------------------


def test_a_stage_holds_only_what_differs(chain: Path) -> None:
    config, faults = read_config(chain)
    assert not faults
    warm_up, learn, test = stage_configs(config)
    theirs = [part.flatten() for part in Config.__iter__(config)]
    assert [part.flatten() for part in (warm_up, learn, test)] == theirs
    assert [part.name for part in (warm_up, learn, test)] == [f"tiny/{name}" for name in NAMES]
    assert [part.mode for part in (warm_up, learn, test)] == ["train", "both", "bench"]
    assert warm_up.algorithm.algorithm_type == "sft"
    assert warm_up.algorithm.optimizer.lr == 0.003  # of the top level
    assert (warm_up.buffer.total_steps, learn.buffer.total_steps) == (6, 2)
    assert warm_up.buffer.explorer_input.eval_tasksets == []
    assert learn.buffer.explorer_input.eval_tasksets[0].name == "held_out"
    # A key is named where it was written.
    where = warm_up.positions.where("algorithm.algorithm_type")
    assert where == f"{chain}:{_line(chain, 'type: sft')}: stages[0].algorithm.algorithm_type"
    where = warm_up.positions.where("algorithm.optimizer.lr")
    assert where == f"{chain}:{_line(chain, 'optimizer:')}: algorithm.optimizer.lr"
    where = learn.positions.where("data_processor.task_pipeline")
    line = _line(chain, "stage_name: learn")
    assert where == f"{chain}:{line}: stages[1].data_processor.task_pipeline"


def test_overrides_reach_stages_and_the_top_level(chain: Path) -> None:
    overrides = ["stages[1].buffer.total_steps=7", "buffer.total_steps=9", "seed=11"]
    overrides += ["stages[0].model.max_model_len=300"]
    config, faults = read_config(chain, overrides)
    assert not faults
    warm_up, learn, test = stage_configs(config)
    assert [part.buffer.total_steps for part in (warm_up, learn, test)] == [6, 7, 9]
    assert [part.seed for part in (warm_up, learn, test)] == [11, 11, 11]
    assert (warm_up.model.max_model_len, learn.model.max_model_len) == (300, 256)
    assert warm_up.model.model_path == learn.model.model_path
    where = learn.positions.where("buffer.total_steps")
    assert where == "command line: stages[1].buffer.total_steps=7"


# --- running ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_chain_runs_from_sft_to_bench(chain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_config(chain)
    folder = _folder(chain)
    assert result.run_dir == folder
    assert result.steps_done == 2
    assert [point.path.parent.name for point in result.checkpoints] == ["learn", "learn"]
    assert _statuses(chain) == dict.fromkeys(NAMES, "finished")

    # The bench evaluates what the second stage ended with, on the same tasks and seeds.
    assert _transcripts(folder / "test", 0) == _transcripts(folder / "learn", 2)
    page = (folder / "report.html").read_text()
    assert all(f'href="{name}/report.html"' in page for name in NAMES)
    printed = capsys.readouterr().out
    assert "warm_up  train  finished  6 of 6" in printed
    assert "held_out, over all stages:" in printed

    # `eval` measures the last stage that trained, from what the one before it left.
    assert main(["eval", str(chain)]) == 0
    columns = sorted((folder / "learn" / "eval" / "columns").iterdir())
    assert [column.name.split("-")[0] for column in columns] == ["base", "step"]
    for column, step in zip(columns, (0, 2), strict=True):
        assert _transcripts(column, step) == _transcripts(folder / "learn", step)

    with pytest.raises(AlreadyFinished, match="All 3 stages"):
        run_config(chain)
    with pytest.raises(BadInput) as caught:  # what later stages were built upon
        run_config(chain, ["stages[0].buffer.train_batch_size=3"])
    assert "stages[0].buffer.train_batch_size" in caught.value.faults[0].where


@pytest.mark.slow
def test_grpo_begins_with_the_weights_of_sft(chain: Path) -> None:
    """Bit for bit: a new adapter adds nothing to the model that the first stage exported."""
    import torch

    from aflow_tune.config.prepare import prepare
    from aflow_tune.engines.local.packed_model import Sample
    from aflow_tune.engines.local.trainer import LocalTrainer
    from aflow_tune.engines.trinity.training.trainer import build_trainer

    run_config(chain)
    merged = _folder(chain) / "warm_up" / "export" / "merged"
    resolved = read_config(_folder(chain) / "learn" / "resolved.yaml")[0]
    assert resolved.model.model_path == str(merged)
    learn = stage_configs(read_config(chain)[0])[1]
    base_path = learn.model.model_path
    learn.model.model_path = resolved.model.model_path
    prepare(learn)
    trainer = build_trainer(learn)
    assert trainer.settings.lora is not None
    whole = replace(trainer.settings, lora=None)
    sample = Sample(torch.tensor([257, *range(100, 140)]), 9, torch.ones(32, dtype=torch.bool))
    begun = trainer.logprobs([sample])[0]
    assert torch.equal(begun, LocalTrainer(merged, whole).logprobs([sample])[0])
    assert not torch.equal(begun, LocalTrainer(base_path, whole).logprobs([sample])[0])


@pytest.mark.slow
def test_one_budget_for_all_stages(chain: Path) -> None:
    """A step of GRPO makes 2 tasks x 4 runs x 2 calls, the evaluation before it 4 x 2: 24, so
    that 30 end in the second step."""
    with pytest.raises(BudgetReached, match="stage 'learn'"):
        run_config(chain, ["budget.calls=30"])
    assert (_folder(chain) / "account.sqlite").exists()
    assert not (_folder(chain) / "learn" / "account.sqlite").exists()
    with pytest.raises(BudgetReached, match="stage 'test'"):
        # 30, step 2 again (16), its evaluation (8): 54; the bench needs 8 more.
        run_config(chain, ["budget.calls=58"])
    assert _statuses(chain) == {"warm_up": "finished", "learn": "finished", "test": "interrupted"}
    run_config(chain, ["budget.calls=1000"])
    assert set(_statuses(chain).values()) == {"finished"}


# --- stopping --------------------------------------------------------------------------------

_LONG = ("deterministic=true", "stages[0].buffer.total_steps=40", "buffer.total_steps=3")


def _start(config: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "aflow_tune.cli", str(config), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)  # six commands, each of which imports everything anew
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_chain_that_is_stopped_in_every_stage_ends_as_one_that_is_not(
    tmp_path: Path, tiny_model_dir: Path, how: signal.Signals
) -> None:
    from safetensors.torch import load_file

    whole = _write_chain(tmp_path / "whole", tiny_model_dir)
    output, _ = (process := _start(whole, *_LONG)).communicate(timeout=900)
    assert process.returncode == 0, output

    parts = _write_chain(tmp_path / "parts", tiny_model_dir, HELD)
    held = tmp_path / "parts" / "held"
    signs = ("warm_up/global_step_2", "learn/global_step_1", "test/run.json")
    for sign in signs:
        held.symlink_to(_folder(parts) / sign)  # so that the stage cannot be over before
        process = _start(parts, *_LONG)
        deadline = time.monotonic() + 900
        while not (_folder(parts) / sign).exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, sign
            time.sleep(0.02)
        process.send_signal(how)
        if not sign.startswith("test/"):  # an evaluation is broken off, a step is made to its end
            held.unlink()
        output, _ = process.communicate(timeout=900)
        held.unlink(missing_ok=True)
        assert process.returncode == (3 if how is signal.SIGINT else -signal.SIGKILL), output
        if how is signal.SIGINT:
            assert _statuses(parts)[sign.partition("/")[0]] == "interrupted"
    output, _ = (process := _start(parts, *_LONG)).communicate(timeout=900)
    assert process.returncode == 0, output
    assert output.count(": finished\n") == 2

    for stage, step in (("warm_up", 40), ("learn", 3)):
        one, other = (
            load_file(_folder(config) / stage / f"global_step_{step}" / "weights.safetensors")
            for config in (whole, parts)
        )
        assert all(bool((one[name] == other[name]).all()) for name in one), stage
    assert _transcripts(_folder(whole) / "test", 0) == _transcripts(_folder(parts) / "test", 0)
    assert _start(parts, *_LONG).wait(timeout=900) == 5
