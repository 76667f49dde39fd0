"""`aflow-tune eval` on the local sampler: base model and everything that a run leaves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from project import run_dir, write_project

from aflow_tune.cli import main
from aflow_tune.report.records import EvalRecord, read_records
from aflow_tune.tuning import run_config

OVERRIDES = ("deterministic=true", "algorithm.optimizer.lr=0.05")
"""Fp32 and one request at a time: equal weights give equal tokens. A large step changes them."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A configuration whose run has finished: evaluated at 0 and 2, checkpoints 1 and 2."""
    root = tmp_path_factory.mktemp("trained")
    config = write_project(root, tiny_model_dir)
    run_config(config, OVERRIDES, inline=True)
    return config


def evaluate(config: Path, *arguments: str) -> dict[str, Any]:
    """The result of the command."""
    assert main(["eval", str(config), *OVERRIDES, *arguments]) == 0
    out = Path(arguments[arguments.index("--out") + 1]) if "--out" in arguments else None
    folder = out or run_dir(config.parent) / "eval"
    result: dict[str, Any] = json.loads((folder / "eval.json").read_text())
    return result


def comparable(records: list[EvalRecord]) -> list[tuple[Any, ...]]:
    """What two evaluations of equal weights have in common."""
    return sorted(
        (record.item, record.run, record.score, record.answer, record.calls, record.transcript)
        for record in records
    )


def records_of(config: Path, column: str, step: int) -> list[EvalRecord]:
    (folder,) = (run_dir(config.parent) / "eval" / "columns").glob(f"{column}-*")
    return read_records(folder / "evaluations" / "held_out" / f"step_{step}.jsonl")


@pytest.mark.slow
def test_base_and_checkpoint_are_what_the_run_measured(trained: Path) -> None:
    """Same seeds, same tokens, same scores as the evaluations of the run itself."""
    result = evaluate(trained)
    assert [column["name"] for column in result["columns"]] == ["base", "step 2 (last)"]
    by_run = run_dir(trained.parent) / "evaluations" / "held_out"
    for column, step in (("base", 0), ("step-2-last", 2)):
        own = read_records(by_run / f"step_{step}.jsonl")
        assert comparable(records_of(trained, column, step)) == comparable(own)
    before, after = records_of(trained, "base", 0), records_of(trained, "step-2-last", 2)
    assert comparable(before) != comparable(after)
    assert not list(run_dir(trained.parent).glob("eval/global_step_*"))


@pytest.mark.slow
def test_every_form_of_the_same_weights_scores_the_same(trained: Path, tmp_path: Path) -> None:
    export = run_dir(trained.parent) / "export"
    elsewhere = shutil.copytree(run_dir(trained.parent) / "global_step_2", tmp_path / "copied")
    result = evaluate(
        trained,
        *("--checkpoint", "2", str(export / "adapter"), str(export / "merged"), str(elsewhere)),
        *("--out", str(tmp_path / "out")),
    )
    columns = result["columns"]
    assert [column["name"] for column in columns] == [
        "base", "step 2", "export/adapter", "export/merged",
        f"{tmp_path.name}/copied",
    ]  # fmt: skip
    means = [column["tasksets"]["held_out"]["score"]["mean"] for column in columns]
    assert means[1] == means[2] == means[4]
    # Merged weights are rounded once more: a token may differ, most do not.
    assert means[3] == pytest.approx(means[1], abs=0.05)
    assert means[0] != means[1]


@pytest.mark.slow
def test_the_base_model_is_itself_again_after_full_weights(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_project(tmp_path, tiny_model_dir, steps=1)
    config.write_text(
        config.read_text().replace("  lora_configs: [{lora_rank: 4, lora_alpha: 8}]\n", "")
    )
    run_config(config, [*OVERRIDES, "explorer.eval_interval=1"], inline=True)
    result = evaluate(config, "--compare", "1", f"workflow:{tmp_path / 'flow.py'}:two_calls")
    cells = {c["name"]: c["tasksets"]["held_out"]["score"]["mean"] for c in result["columns"]}
    assert set(cells) == {"base", "step 1", "base, two_calls"}
    assert cells["base"] == cells["base, two_calls"] != cells["step 1"]
    own = run_dir(tmp_path) / "evaluations" / "held_out" / "step_1.jsonl"
    assert comparable(records_of(config, "step-1", 1)) == comparable(read_records(own))


@pytest.mark.slow
def test_a_strange_adapter_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = shutil.copytree(run_dir(trained.parent) / "export" / "adapter", tmp_path / "adapter")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["alpha_pattern"] = {"q_proj": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    assert main(["eval", str(trained), *OVERRIDES, "--checkpoint", str(adapter)]) == 2
    assert "alpha_pattern" in capsys.readouterr().err
