"""A budget that ends within a run: the step in which it ends is not trained, the state before
is saved, and a higher limit goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from project import WORKFLOW, run_dir, write_project

from aflow_tune.errors import BadInput, BudgetReached
from aflow_tune.models import Spend
from aflow_tune.tuning import run_config

FIRST_EVALUATION, STEP = 4 * 2, 2 * 4 * 2
"""Calls: four held-out items, then two tasks by four runs; two calls each."""
SWALLOWS = WORKFLOW.replace(
    'with caller("second"):\n        second = await model(',
    "try:\n        second = await model(",
).replace(
    '    text += second.content[0]["text"]',
    '    except Exception:\n        return 1.0\n    text += second.content[0]["text"]',
)
"""Makes a reward of a call that the budget refused."""


def _spend(root: Path) -> Spend:
    return Spend(path=run_dir(root) / "account.sqlite")


@pytest.mark.parametrize(
    ("inline", "workflow"),
    [(True, WORKFLOW), (True, SWALLOWS), pytest.param(False, SWALLOWS, marks=pytest.mark.slow)],
    ids=["raises", "swallows", "swallows-ray"],
)
def test_a_limit_on_calls_is_kept_to_the_call(
    tmp_path: Path, tiny_model_dir: Path, inline: bool, workflow: str
) -> None:
    config = write_project(tmp_path, tiny_model_dir, workflow=workflow)
    limit = FIRST_EVALUATION + STEP + 5
    with pytest.raises(BudgetReached, match=rf"calls: {limit} of {limit}.*step 1 of 2.*saved"):
        run_config(config, [f"budget.calls={limit}"], inline=inline)
    assert _spend(tmp_path).spent().calls == limit
    assert _spend(tmp_path).spent("policy").calls == limit
    assert json.loads((run_dir(tmp_path) / "run.json").read_text())["status"] == "interrupted"

    done = run_config(config, ["budget.calls=1000"], inline=inline)
    assert [checkpoint.step for checkpoint in done.checkpoints] == [1, 2]
    # The second step was made again from its beginning, and the last evaluation once.
    assert _spend(tmp_path).spent().calls == limit + STEP + FIRST_EVALUATION


def test_an_evaluation_in_which_the_budget_ends_is_made_again(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    with pytest.raises(BudgetReached):
        run_config(config, [f"budget.calls={FIRST_EVALUATION - 1}"], inline=True)
    assert run_config(config, ["budget.calls=1000"], inline=True).steps_done == 2
    records = (run_dir(tmp_path) / "evaluations/held_out/step_0.jsonl").read_text().splitlines()
    assert [json.loads(record)["failure"] for record in records] == [None] * 4


def test_models_limits_and_prices_are_checked_before_anything_starts(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setenv("SOME_KEY", "sk-0")
    config = write_project(tmp_path, tiny_model_dir)
    wrong = ["budget.tokens=-1", "models.judge.model=m", "models.judge.api_key_env=NO_SUCH_KEY"]
    with pytest.raises(BadInput) as caught:
        run_config(config, wrong, inline=True)
    assert {fault.where for fault in caught.value.faults} == {
        "command line: budget.tokens=-1",
        "command line: models.judge.api_key_env=NO_SUCH_KEY",
    }
    judges = [
        "models.listed.model=gpt-4o-mini",
        "models.listed.api_key_env=SOME_KEY",
        "models.own.model=mine",
        "models.own.base_url=http://127.0.0.1:1/v1",
    ]
    with pytest.raises(BadInput) as caught:
        run_config(config, ["budget.usd=1", *judges], inline=True)
    cures = [fault.cure for fault in caught.value.faults]
    assert [cure.split(":")[1].strip(" {") for cure in cures] == ["policy", "own"]
    assert not (run_dir(tmp_path) / "run.json").exists()
