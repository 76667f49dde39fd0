"""`mode: train` on the local engine: sft, dpo and cpt from a data set, on a tiny random model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_project import data_dir, pair, trainer_metrics, write_data_project, write_rows
from trinity.buffer import get_buffer_reader
from trinity.common.config import ExperienceBufferConfig

from aflow_tune.config.load import load_config
from aflow_tune.engines.local.models import load_tokenizer
from aflow_tune.engines.trinity.readers import Experiences, hand_over, open_experiences
from aflow_tune.errors import AlreadyFinished, BadInput, BudgetReached
from aflow_tune.running.run import DataRun
from aflow_tune.tuning import run_config, validate_config

ANSWER = "the moon is round"
QUESTIONS = [f"tell me {number}" for number in range(12)]


def _sft_rows() -> list[dict[str, Any]]:
    return [pair(question, ANSWER) for question in QUESTIONS]


def _weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "weights.safetensors")


def _answer(model: Path, question: str, tokens: int) -> str:
    """What the model answers by taking the likeliest token each time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    out = net.generate(prompt, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)


def test_sft_learns_to_say_its_answer(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = write_data_project(tmp_path, tiny_model_dir, _sft_rows(), steps=60)
    result = run_config(config, ["trainer.save_interval=30"])

    assert result.steps_done == 60
    metrics = trainer_metrics(data_dir(tmp_path))
    assert metrics[60]["actor/sft_loss"] < 0.2 < metrics[1]["actor/sft_loss"] / 5
    merged = data_dir(tmp_path) / "export" / "merged"
    assert _answer(tiny_model_dir, "tell me 99", 18).strip() != ANSWER
    assert _answer(merged, "tell me 99", 18).strip() == ANSWER
    with pytest.raises(AlreadyFinished):
        run_config(config, ["trainer.save_interval=30"])


def test_all_answers_are_learned_or_the_last_on_request(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """By hand: ChatML, one token a byte. Prompt `<|im_start|>user\\nq<|im_end|>\\n` + `<|im_start|>
    assistant\\n`: 1+5+1+1+1 + 1+10 = 20; first answer `a<|im_end|>`: 2; then a line end, the second
    question 9 and 11 again, and `ok<|im_end|>`: 3."""
    messages = pair("q", "a")["messages"] + pair("q", "ok")["messages"]
    config = write_data_project(tmp_path, tiny_model_dir, [{"messages": messages}] * 4, steps=1)
    run_config(config)
    (every,) = trainer_metrics(data_dir(tmp_path)).values()
    assert (every["prompt_length/mean"], every["response_length/mean"]) == (20, 2 + 1 + 9 + 11 + 3)

    key = "buffer.trainer_input.experience_buffer.format.enable_concatenated_multi_turn"
    run_config(config, [f"{key}=false", "name=last"])
    (last,) = trainer_metrics(data_dir(tmp_path).with_name("last")).values()
    assert (last["prompt_length/mean"], last["response_length/mean"]) == (43, 3)


def test_dpo_widens_the_margin(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": "yes, of course"}],
            "rejected": [{"role": "assistant", "content": "no, never ever"}],
        }
        for question in QUESTIONS
    ]
    config = write_data_project(tmp_path, tiny_model_dir, rows, kind="dpo", steps=5, lr=0.0003)
    assert run_config(config).steps_done == 5
    metrics = trainer_metrics(data_dir(tmp_path))
    # At the start policy and reference are one model: the loss of every pair is log 2.
    assert metrics[1]["actor/dpo_loss"] == pytest.approx(0.693147, abs=1e-4)
    margins = {
        step: found["actor/chosen_reward"] - found["actor/rejected_reward"]
        for step, found in metrics.items()
    }
    assert abs(margins[1]) < 1e-4
    assert margins[5] > margins[4] > margins[3] > margins[2] > 0.01


def test_too_long_rows_are_left_out_and_named(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [*_sft_rows()[:5], pair("long", "x" * 300), pair("longer", "y" * 400)]
    config = write_data_project(tmp_path, tiny_model_dir, rows)
    overrides = ["buffer.total_steps=null", "buffer.train_batch_size=5"]
    assert run_config(config, overrides).steps_done == 1
    printed = capsys.readouterr().out
    assert "2 of 7 rows cannot be learned from and are left out" in printed
    # 23 tokens of prompt (`long`), 300 of answer, `<|im_end|>`.
    assert f"{tmp_path / 'rows.jsonl'}:6: 324 tokens" in printed
    with pytest.raises(BadInput, match="at most 5, the rows that can be learned from"):
        run_config(config, ["buffer.train_batch_size=6", "name=six"])
    write_rows(tmp_path / "rows.jsonl", rows[-2:])
    with pytest.raises(BadInput, match="2 rows, none of them so"):
        run_config(config, ["buffer.train_batch_size=2", "name=none"])


def test_faulty_rows_are_named_with_their_lines(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = {"type": "function", "function": {"name": "look"}}
    calls = [{"function": {"name": "hear", "arguments": "{}"}}]
    unknown = {**pair("q", "a"), "tools": [tool]}
    unknown["messages"][1]["tool_calls"] = calls
    broken = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{"}}]},
        ]
    }
    unanswered: dict[str, Any] = {"messages": [{"role": "user", "content": "no answer"}]}
    rows = [*_sft_rows()[:4], unanswered, {"other": 1}, {"messages": []}, unknown, broken]
    config = write_data_project(tmp_path, tiny_model_dir, rows)
    places = [f"{tmp_path / 'rows.jsonl'}:{line}" for line in (5, 6, 7)]
    assert [fault.where for fault in validate_config(config).faults] == places
    with pytest.raises(BadInput, match="do not fit"):
        run_config(config)
    assert not data_dir(tmp_path).exists() or not (data_dir(tmp_path) / "run.json").exists()
    write_rows(tmp_path / "rows.jsonl", [*rows[:4], unknown, broken])
    run_config(config, ["buffer.total_steps=1"])
    printed = capsys.readouterr().out
    assert "2 of 6 rows cannot be learned from" in printed
    assert f"{tmp_path / 'rows.jsonl'}:5: a call of 'hear'" in printed
    assert f"{tmp_path / 'rows.jsonl'}:6: messages[1]: arguments: broken JSON" in printed


def test_a_stop_and_a_kill_resume_to_the_uninterrupted_weights(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    overrides = ["buffer.total_steps=8", "trainer.save_interval=2", "deterministic=true"]
    whole = write_data_project(tmp_path / "whole", tiny_model_dir, _sft_rows())
    run_config(whole, overrides)
    parts = write_data_project(tmp_path / "parts", tiny_model_dir, _sft_rows())
    with pytest.raises(BudgetReached, match="at step 0 of 8"):
        run_config(parts, [*overrides, "budget.wall_seconds=0"])
    # As a kill leaves it: two steps past the newest checkpoint are not saved.
    run_config(parts, [*overrides, "buffer.total_steps=5"])
    folder = data_dir(tmp_path / "parts")
    state = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**state, "status": "running", "step": 4}))
    for path in (folder / "global_step_5").iterdir():
        path.unlink()
    (folder / "global_step_5").rmdir()
    run_config(parts, overrides)
    first = _weights(data_dir(tmp_path / "whole") / "global_step_8")
    second = _weights(folder / "global_step_8")
    assert all(bool((first[name] == second[name]).all()) for name in first)
    assert sorted(trainer_metrics(folder)) == list(range(1, 9))
    with pytest.raises(BadInput, match="another configuration") as caught:
        run_config(parts, [*overrides, "buffer.train_batch_size=3"])
    assert "buffer.train_batch_size" in [fault.where for fault in caught.value.faults]


def test_on_trinitys_engines_its_trainer_keeps_the_position(tmp_path: Path) -> None:
    """No explorer writes the position in the data there; a run resumes all the same."""
    run = DataRun(load_config(None, ["mode=train", "engine=trinity"]), None, None)
    run.run_dir, run.start, run.target = tmp_path, 2, 4
    run._rewind()
    assert (tmp_path / "latest_state_dict_iteration.txt").read_text() == "2"


WEIGHTS = {"selection": 0.35, "planning": 0.3, "timing": 0.2, "retrieval": 0.15}


def test_batches_have_the_weights_of_task_types_on_either_engine(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """100 rows at the four weights: 35, 30, 20, 15; Trinity's trainer reads the same tokens."""
    rows = [
        {**pair(f"{kind} {number}", kind), "task_type": kind}
        for kind, count in (("selection", 70), ("planning", 9), ("timing", 20), ("retrieval", 30))
        for number in range(count)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").symlink_to(tmp_path / "rows.jsonl")
    config = load_config(None, [f"checkpoint_root_dir={tmp_path}", "mode=train"])
    config.dialogues.task_weights = WEIGHTS
    config.checkpoint_job_dir = str(tmp_path / "run")
    config.buffer.trainer_input.experience_buffer = ExperienceBufferConfig(
        name="rows", path=str(tmp_path / "data"), storage_type="file", batch_size=100,
        schema_type="sft", total_epochs=4, split="train",
    )  # fmt: skip
    config.model.model_path, config.model.max_model_len = str(tiny_model_dir), 256
    reader = open_experiences(config)
    assert isinstance(reader, Experiences)
    tokenizer = load_tokenizer(tiny_model_dir)

    def kinds(batch: list[Any]) -> Counter[str]:
        answers = [tokenizer.decode(exp.tokens[exp.prompt_length :]) for exp in batch]
        return Counter(answer.removesuffix("<|im_end|>") for answer in answers)

    batches = [asyncio.run(reader.read()) for _ in range(3)]
    assert kinds(batches[1]) == {"selection": 35, "planning": 30, "timing": 20, "retrieval": 15}
    position = reader.state_dict()
    wanted = [exp.tokens.tolist() for exp in asyncio.run(reader.read())]
    again = open_experiences(config)
    again.load_state_dict(position)
    assert [exp.tokens.tolist() for exp in asyncio.run(again.read())] == wanted

    hand_over(again, config, steps=4)
    buffer = config.buffer.trainer_input.experience_buffer
    trinitys = get_buffer_reader(buffer.to_storage_config())
    batches = [asyncio.run(trinitys.read()) for _ in range(4)]
    assert [exp.tokens.tolist() for exp in batches[3]] == wanted
    assert batches[3][0].action_mask.all()
