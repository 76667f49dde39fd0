"""docs/training_yaml.md: the keys that it names exist, its example is what Trinity computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from trinity.algorithm.advantage_fn.multi_step_grpo_advantage import StepWiseGRPOAdvantageFn
from trinity.algorithm.advantage_fn.opmd_advantage import OPMDGroupAdvantage
from trinity.common.experience import EID, Experience

from aflow_tune.config.load import AflowConfig
from aflow_tune.config.schema import index

PAGE = (Path(__file__).parents[1] / "docs" / "training_yaml.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.partition("## Mathematics")[0].splitlines()
    if line.startswith("| `") or line.startswith("| weights")
]


def keys_of(cell: str) -> list[str]:
    """The keys in a cell's code; `.name` continues the path of the key before it."""
    found: list[str] = []
    for code in re.findall(r"`([^`]+)`", cell):
        key = re.sub(r"\[\d*\]", "[]", code.partition(":")[0].strip())
        if key.startswith("."):
            key = found[-1].rpartition(".")[0] + key
        found.append(key)
    return found


def test_every_key_of_ours_exists() -> None:
    known = index(AflowConfig)
    assert len(ROWS) == 36
    for row in ROWS:
        for key in keys_of(row[1]):
            path = re.sub(r"\.(trainer_config|extra_engine_args)\..*", r".\1", key)  # free within
            assert path.replace("models.executor", "models") in known, key


@pytest.mark.parametrize("function", [OPMDGroupAdvantage(), StepWiseGRPOAdvantageFn()])
def test_the_example_of_the_advantages(function: OPMDGroupAdvantage) -> None:
    name = "reward - mean" if isinstance(function, OPMDGroupAdvantage) else "divided by 3.830"
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    told = [float(cell) for cell in line.split("|")[2:-1]]
    experiences = [
        Experience(
            eid=EID(batch=1, task=0, run=run, step=0),
            tokens=torch.tensor([1, 2]),
            prompt_length=1,
            reward=reward,
            logprobs=torch.zeros(1),
            action_mask=torch.ones(1),
        )
        for run, reward in enumerate((10.0, 6.0, 2.0, 2.0))
    ]
    computed, _ = function.process(experiences)
    assert [float(e.advantages[0]) for e in computed] == pytest.approx(told, abs=5e-4)
