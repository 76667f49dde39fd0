"""From a folder of dialogues to an evaluated model: the commands, the classes, and their YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from data_project import write_rows

from aflow_tune.agents import (
    AgentRewardConfig,
    AgentRewardModel,
    AgentSFTConfig,
    AgentSFTFormatter,
    CoresetSelector,
    OnlineContinualLearner,
    RLTrainingConfig,
)
from aflow_tune.cli import main
from aflow_tune.data.agent_data import find_agent_data
from aflow_tune.errors import BadInput
from aflow_tune.tuning import validate_config

TOOLS = [
    {"tool_id": f"{name}_00{number}", "name": name, "description": name, "inputs": []}
    for number, name in enumerate(("look", "hear", "walk", "rest"))
]


def dialogue(number: int, split: str = "train") -> dict[str, Any]:
    tool = TOOLS[number % 4]["tool_id"]
    return {
        "dialog_id": f"{split}_{number:06d}",
        "goal": "g",
        "turns": [
            {"role": "user", "content": f"{split} {number}"},
            {"role": "tool", "tool_id": tool, "arguments": {}, "result": "ok", "content": ""},
            {"role": "assistant", "content": "done"},
        ],
        "target_tools": [tool],
        "metadata": {},
        "split": split,
    }


def question(number: int) -> dict[str, Any]:
    names = [tool["tool_id"] for tool in TOOLS]
    truth = {"top_k": names[number % 4 : number % 4 + 1], "explanation": ""}
    row = {"sample_id": f"s{number}", "task_type": "tool_selection", "instruction": f"q {number}"}
    return {**row, "candidate_tools": names[:], "ground_truth": truth, "split": "test"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "data"
    (data / "agent_benchmark" / "splits").mkdir(parents=True)
    write_rows(data / "tool_catalog.jsonl", TOOLS)
    rows = [dialogue(number) for number in range(12)] + [dialogue(n, "dev") for n in range(3)]
    write_rows(data / "sft_conversations.jsonl", rows)
    path = data / "agent_benchmark" / "splits" / "tool_selection.jsonl"
    write_rows(path, [question(number) for number in range(4)])
    (data / "README.md").write_text("what this is")
    return data


def test_a_folder_is_read_by_what_its_rows_are(folder: Path) -> None:
    found = find_agent_data(folder)
    assert found.catalogue == folder / "tool_catalog.jsonl"
    assert found.dialogues == [folder / "sft_conversations.jsonl"]
    held_out = {path.name for path in found.benchmark}
    assert held_out == {"tool_selection.jsonl", "sft_conversations.jsonl"}
    write_rows(folder / "more_tools.jsonl", TOOLS[:1])
    with pytest.raises(BadInput, match="one catalogue"):
        find_agent_data(folder)
    with pytest.raises(BadInput, match="no data for an agent"):
        find_agent_data(folder / "tool_catalog.jsonl")


def test_the_classes_and_the_command_stand_for_one_yaml(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = dict(base_model="m", data=folder, output=tmp_path / "out" / "one", epochs=2, seed=3)
    weights = {"selection": 0.75, "planning": 0.25}
    by_class = RLTrainingConfig(
        **common, methods=("sft", "dpo"), task_weights=weights, beta=0.2, num_samples=8
    ).as_yaml()
    words = ["--base-model", "m", "--data", str(folder), "--output", str(tmp_path / "out" / "one")]
    words += ["--epochs", "2", "--seed", "3", "--beta", "0.2", "--num-samples", "8", "--print"]
    words += ["--task-weights", "selection=0.75,planning=0.25"]
    assert main(["agent", "train", "sft", "dpo", *words]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == by_class
    assert [stage["stage_name"] for stage in by_class["stages"]] == ["sft", "pairs", "dpo"]
    assert by_class["stages"][1]["algorithm"]["repeat_times"] == 8
    loss = by_class["stages"][2]["algorithm"]["policy_loss_fn_args"]
    assert loss == {"beta": 0.2, "rpo_alpha": 1.0}
    assert by_class["dialogues"]["task_weights"] == weights

    more = AgentSFTConfig(
        **common,
        coreset=CoresetSelector(0.25, "random"),
        replay=OnlineContinualLearner(tmp_path / "buffer.jsonl", 0.3, rounds=["a"]),
    ).as_yaml()
    assert more["coreset"] == {"size": 0.25, "strategy": "random"}
    assert more["replay"] == {"buffer": f"{tmp_path}/buffer.jsonl", "ratio": 0.3, "from": ["a"]}
    assert (more["mode"], more["buffer"]["total_epochs"]) == ("train", 2)
    with pytest.raises(BadInput, match="sft, dpo, ppo, grpo"):
        RLTrainingConfig(**common, methods=("kto",)).as_yaml()


@pytest.mark.parametrize("methods", [("sft",), ("sft", "dpo"), ("ppo",), ("grpo",)])
def test_every_yaml_is_a_valid_configuration(
    methods: tuple[str, ...], folder: Path, tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = RLTrainingConfig(
        base_model=str(tiny_model_dir),
        data=folder,
        output=tmp_path / "out" / "one",
        methods=methods,
        batch_size=4,
        reward=AgentRewardConfig({"end_to_end_success": 1.0}),
    )
    path = tmp_path / "agent.yaml"
    path.write_text(yaml.safe_dump(config.as_yaml()))
    report = validate_config(path)
    assert not report.faults


def test_train_and_evaluate(
    folder: Path,
    tmp_path: Path,
    tiny_model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out" / "one"
    words = ["--base-model", str(tiny_model_dir), "--data", str(folder), "--max-response", "8"]
    train = ["--output", str(out), "--batch-size", "4"]
    assert main(["agent", "train", "sft", *words, *train]) == 0
    printed = capsys.readouterr().out
    assert "rows of other splits: dev 3" in printed
    assert "step 3/3" in printed
    assert main(["agent", "evaluate", str(out), *words, "--output", str(tmp_path / "ev")]) == 0
    printed = capsys.readouterr().out
    assert "tool_selection_accuracy, selection" in printed
    assert main(["agent", "train", "sft", "--data", str(tmp_path / "none")]) == 2


def test_reward_and_formatter_are_those_of_the_runs(tiny_model_dir: Path) -> None:
    task = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": "{}"}}]},
        ],
        "tools": [{"name": "x", "description": "d"}],
    }
    (example,) = AgentSFTFormatter(str(tiny_model_dir)).format(task)
    assert sum(example.learned_R) == len(example.tokens_T) - example.prompt_length
    wanted = {**task, "tools": [{"type": "function", "function": task["tools"][0]}]}
    calls = [{"function": {"name": "y", "arguments": json.dumps({})}}]
    wrong = {"role": "assistant", "tool_calls": calls}
    reward = AgentRewardModel(AgentRewardConfig({"timing_precision": 1.0}))
    assert reward.score(wrong, wanted) == 1
    assert reward.measures(wrong, wanted)["tool_selection_accuracy"] == 0
    assert AgentRewardModel().score(wanted["messages"][1], wanted) == 1
