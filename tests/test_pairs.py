"""`mode: pairs`: which answers make a pair, and a chain that samples and learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from project import run_dir, write_project
from tiny import write_tiny_model

from aflow_tune.cli import main
from aflow_tune.errors import RunFailed
from aflow_tune.report.records import EvalRecord
from aflow_tune.running.pairing import pairs_of, write_pairs
from aflow_tune.tuning import run_config

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def call(prompt: str, response: str, **more: Any) -> dict[str, Any]:
    asked = {"caller": "workflow", "messages": [{"role": "user", "content": prompt}]}
    return {**asked, "response": response, "tokens": 3, **more}


def record(run: int, reward: float | None, *calls: dict[str, Any], item: int = 0) -> EvalRecord:
    failure = "raised" if reward is None else None
    return EvalRecord(0, "train", item, run, reward, reward, failure, transcript=list(calls))


def test_the_best_and_the_worst_answer_to_one_prompt_are_a_pair() -> None:
    tool = {"name": "add", "arguments": '{"a": 1}'}
    rows, counts = pairs_of(
        [
            record(0, 0.5, call("a?", "half", tools=TOOLS)),
            record(1, 0.25, call("a?", "bad", tools=TOOLS), call("then?", "only here")),
            record(2, 1.0, call("a?", "", tools=TOOLS, calls=[tool])),
            record(3, 0.25, call("a?", "bad, too", tools=TOOLS)),
            record(4, 2.0, call("a?", "cut o", tools=TOOLS, truncated=True)),
            record(5, None, call("a?", "crashed", tools=TOOLS)),
            # The same prompt with other tools is another one; equal rewards are no pair.
            record(6, 1.0, call("a?", "without")),
            record(0, 1.0, call("b?", "x"), item=1),
            record(1, 1.0, call("b?", "y"), item=1),
            # True histories: each call has its own reward, of which 0 is one.
            record(0, 0.5, call("c?", "no", reward=0.0), call("d?", "yes", reward=1.0), item=2),
            record(1, 0.5, call("c?", "yes", reward=1.0), call("d?", "no", reward=0.0), item=2),
        ]
    )
    chosen = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_0", "type": "function", "function": tool}],
    }
    assert rows[0] == {
        "messages": [{"role": "user", "content": "a?"}],
        "tools": TOOLS,
        "chosen": [chosen],
        "rejected": [{"role": "assistant", "content": "bad"}],
        "chosen_reward": 1.0,
        "rejected_reward": 0.25,
        "taskset": "train",
        "item": 0,
        "samples": 4,
    }
    told = [(row["messages"][0]["content"], row["chosen"][0]["content"]) for row in rows[1:]]
    assert told == [("c?", "yes"), ("d?", "yes")]
    assert counts == {
        "pairs": 3,
        "tasks": 3,
        "prompts": 6,
        "answers": 12,
        "prompts_answered_once": 2,
        "prompts_without_difference": 1,
        "failed_rollouts": 1,
        "answers_cut_off": 1,
        "chosen_reward": 1.0,
        "rejected_reward": pytest.approx(0.25 / 3),
    }


def test_without_a_difference_there_is_no_file_of_pairs(tmp_path: Path) -> None:
    records = [record(run, 1.0, call("a?", str(run))) for run in range(3)]
    with pytest.raises(RunFailed, match=r"prompts without difference: 1.*repeat_times"):
        write_pairs(tmp_path, records)
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.json"]


def test_one_answer_to_each_task_is_refused(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_project(tmp_path, tiny_model_dir)
    one = ["mode=pairs", "algorithm.repeat_times=1"]
    assert main(["validate", str(config), *one]) == 2
    assert "algorithm.repeat_times=1" in (told := capsys.readouterr().out)
    assert "2 or more answers" in told
    assert main(["validate", str(config), "mode=pairs"]) == 0


@pytest.mark.slow
def test_a_chain_samples_pairs_and_learns_from_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model says a, 1 or the end, each as often: other answers would be cut off."""
    ends = ["a", "1", "<|im_end|>"]
    path = write_project(tmp_path, write_tiny_model(tmp_path / "model", says=ends))
    content = yaml.safe_load(path.read_text())
    dpo = {
        "algorithm": {"algorithm_type": "dpo"},
        "buffer": {
            "train_batch_size": 4,
            "total_steps": 2,
            "trainer_input": {
                "experience_buffer": {
                    "path": "stage://sample/pairs.jsonl",
                    "format": {"prompt_type": "messages", "messages_key": "messages"},
                }
            },
            "explorer_input": {"eval_tasksets": []},
        },
    }
    content["stages"] = [
        {"stage_name": "sample", "mode": "pairs"},
        {"stage_name": "prefer", "mode": "train", **dpo},
        {"stage_name": "again", "mode": "pairs", "algorithm": {"repeat_times": 2}},
    ]
    path.write_text(yaml.safe_dump(content))
    held_out = tmp_path / "held_out.jsonl"
    result = run_config(path, inline=True)
    assert result.steps_done == 2
    chain = run_dir(tmp_path)
    for stage in ("sample", "again"):
        rows = [json.loads(line) for line in (chain / stage / "pairs.jsonl").open()]
        assert rows
        for row in rows:
            assert row["chosen_reward"] > row["rejected_reward"]
            (asked,) = row["messages"]
            assert asked["content"].startswith(f"What is {row['item']}?")
        assert (
            chain / stage / "data" / "train" / "train"
        ).is_dir()  # what it reads is no held-out set
        counts = json.loads((chain / stage / "pairs.json").read_text())
        assert (counts["pairs"], counts["tasks"]) == (len(rows), 12)
    capsys.readouterr()
    evaluate = ["eval", "--compare", str(chain / "prefer"), "base", "--limit", "1", "--json"]
    assert main([*evaluate, f"buffer.explorer_input.eval_tasksets=[{{path: {held_out}}}]"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [column["name"] for column in compared["columns"]] == ["base", "prefer, step 2"]
