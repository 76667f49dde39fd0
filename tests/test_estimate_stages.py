"""`aflow-tune estimate` of what is not a plain run: data sets, chains of stages, other models."""

from __future__ import annotations

import json

import pytest
import yaml
from data_project import data_dir, pair, write_data_project
from project import write_project
from tiny import write_tiny_model

from aflow_tune.cli import main
from aflow_tune.engines.local.models import can_give_back
from aflow_tune.estimate.estimating import memory_here


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def run(capsys, *arguments, code=0):
    assert main(["estimate", *map(str, arguments), "--memory", "64GB", "--json"]) == code
    return json.loads(capsys.readouterr().out)["runs"]


def parts(stage):
    return {part["name"]: part for part in stage["needs"][0]["parts"]}


def tokens_at_once(stage):
    return int(parts(stage)["activations"]["note"].split()[0])


def test_rows_are_as_long_as_they_are(capsys, tmp_path, tiny):
    question, answer = "What is 12?", "It is twelve."
    path = write_data_project(tmp_path, tiny, [pair(question, answer)] * 4)
    (found,) = run(capsys, path)
    # One token a byte and one for each mark: <|im_start|>user\n...<|im_end|>\n, and the same again.
    # Four equal rows are one path of the trie.
    row = 1 + len("user\n") + len(question) + 2 + 1 + len("assistant\n") + len(answer) + 2
    assert tokens_at_once(found) == pytest.approx(row, abs=3)
    assert not found["notes"]
    assert not data_dir(tmp_path).exists()


def test_a_row_is_one_sample_whatever_a_workflow_would_call(capsys, tmp_path, tiny):
    path = write_data_project(tmp_path, tiny, [pair("What is 1?", "One.")] * 4)
    (found,) = run(capsys, path, "--prompt-tokens", 100, "--response-tokens", 20, "--calls", 3)
    # 4 rows of 120 tokens, no two alike; the last token of a row is not computed.
    assert tokens_at_once(found) == pytest.approx(4 * 120, abs=4)


def test_rows_that_cannot_be_read_are_bounded_and_said(capsys, tmp_path, tiny):
    model = tmp_path / "sizes"
    model.mkdir()
    (model / "config.json").write_text((tiny / "config.json").read_text())
    path = write_data_project(tmp_path, model, [pair("What is 1?", "One.")] * 4)
    (found,) = run(capsys, path)
    # A prompt of 200 and a response of 56, four times.
    assert tokens_at_once(found) == pytest.approx(4 * 256, abs=4)
    assert any("the rows were not read" in note for note in found["notes"])


@pytest.fixture
def chain(tmp_path, tiny):
    """SFT on rows, then GRPO on the project's workflow, in one process."""
    path = write_project(tmp_path, tiny)
    content = yaml.safe_load(path.read_text())
    (tmp_path / "rows.jsonl").write_text(json.dumps(pair("What is 1?", "One.")) + "\n")
    rows = {
        "storage_type": "file",
        "path": str(tmp_path / "rows.jsonl"),
        "format": {"prompt_type": "messages", "messages_key": "messages"},
    }
    sft = {
        "stage_name": "sft",
        "mode": "train",
        "algorithm": {"algorithm_type": "sft"},
        "buffer": {
            "train_batch_size": 1,
            "total_steps": 1,
            "explorer_input": {"eval_tasksets": []},
            "trainer_input": {"experience_buffer": rows},
        },
    }
    grpo = {"stage_name": "grpo", "mode": "both"}
    content["inline"] = True
    content["stages"] = [sft, grpo, {**grpo, "stage_name": "again"}]
    path.write_text(yaml.safe_dump(content))
    return path


_KEPT = "kept from the stages before"


def test_a_stage_carries_what_the_stages_before_left(capsys, chain):
    sft, grpo, again = run(capsys, chain, "--no-rehearsal")
    assert [stage["stage"] for stage in (sft, grpo, again)] == ["sft", "grpo", "again"]
    assert _KEPT not in parts(sft)
    sampler = ("sampler forward pass", "sampler stored prefixes")
    trainer = ("activations", "backward pass", "logits")
    left = sum(parts(grpo)[name]["bytes"] for name in sampler)
    if can_give_back():
        # Nothing was evaluated after the rows, and the last step gave everything back.
        assert _KEPT not in parts(grpo)
    else:
        left += sum(parts(grpo)[name]["bytes"] for name in trainer)
    assert parts(again)[_KEPT]["bytes"] == pytest.approx(left)


def test_behind_ray_stages_share_no_process(capsys, chain):
    assert all(
        _KEPT not in parts(stage) for stage in run(capsys, chain, "inline=false", "--no-rehearsal")
    )


def test_an_auxiliary_model_shares_mapped_weights_and_is_not_updated(capsys, tmp_path, tiny):
    path = write_project(tmp_path, tiny)
    (alone,) = run(capsys, path, "--inline", "--no-rehearsal")
    content = yaml.safe_load(path.read_text())
    content["explorer"]["auxiliary_models"] = [{"name": "judge", "model_path": str(tiny)}]
    path.write_text(yaml.safe_dump(content))
    (found,) = run(capsys, path, "--inline", "--no-rehearsal")
    added = parts(found).keys() - parts(alone).keys()
    # Weights of the same file are mapped once: there is no 'judge weights'.
    assert added == {
        "judge packed weights",
        "judge keys and values",
        "judge forward pass",
        "judge stored prefixes",
    }
    # Every linear layer and the head in fp32; the tuned model has its layers twice at an update.
    layers, head = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 4, 259 * 64 * 4
    assert parts(found)["judge packed weights"]["bytes"] == layers + head
    assert parts(found)["sampler packed weights"]["bytes"] == 2 * layers + head


def test_memory_that_only_holds_files_is_free(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 250000\ninactive_file 200000\n")
    # Of 600,000 bytes 200,000 can be given up.
    assert memory_here(tmp_path) == 1_000_000 - 400_000


def test_memory_without_a_limit_is_what_the_machine_has_free(tmp_path):
    assert memory_here(tmp_path / "nothing") > 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    assert memory_here(tmp_path) > 1_000_000
