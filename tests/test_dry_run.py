"""`aflow-tune run --dry-run`: script and numbers by hand, and whole dry runs on a tiny project."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from project import run_dir, write_project

from aflow_tune.cli import main
from aflow_tune.dry_run.dry_run import fill_of
from aflow_tune.dry_run.script import Script, read_answers
from aflow_tune.errors import BadInput

WORKFLOW = """
from typing import Dict

from aflow_tune import TrinityChatModel, caller, text_of


async def two_calls(task: Dict, model: TrinityChatModel) -> float:
    with caller("draft"):
        draft = await model([{"role": "user", "content": task["question"]}])
    with caller("final"):
        shown = task["question"] + text_of(draft.content)
        final = await model([{"role": "user", "content": shown}])
    return 1.0 if text_of(final.content) == task["answer"] else 0.0
"""
PLAN = {"tasks": 4, "played": 2, "train_batch_size": 64, "counts_calls": True}
PLAN |= {"explorer_rounds": 1, "trainer_steps": 1}


def lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def dry(capsys, *arguments, code=0):
    assert main(["run", "--dry-run", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


# --- the script and the numbers ------------------------------------------------------------


def test_even_runs_say_the_truth_and_odd_ones_words():
    script, row = Script(), {"question": "2 + 3", "answer": 5}
    good, bad = script.part(row, 0, 0), script.part(row, 0, 1)
    assert (good.kind, good.source) == ("truth", "the row's field `answer`")
    assert [good.next("a"), good.next("b")] == ["5", "5"]
    assert (bad.kind, bad.next("a")) == ("words", None)
    assert script.part({"question": "why?"}, 0, 0).kind == "words"
    gold = {"question": "2 + 3", "answer": "2 + 3 = 5\n#### 5", "benchmark": "gsm8k"}
    assert script.truth(gold) == (gold["answer"], "the gold answer by benchmark gsm8k")
    # not a row of that benchmark: its fields are left
    assert Script(benchmark="humaneval").truth({"label": ["a", "b"]})[0] == "a"


def test_answers_are_found_by_number_by_text_and_for_all(tmp_path):
    def script(name, *entries):
        return Script(read_answers(lines(tmp_path / name, *entries)))

    told = script(
        "a.jsonl",
        {"good": "zero"},
        {"item": "What is 5?", "good": ["one", "two"], "bad": "no"},
        {"good": "first"},
        {"item": "*", "good": {"final": "<{answer}> {other}"}, "bad": {"final": ["x", "y"]}},
    )
    row, other = {"question": "What is 5?", "answer": "5"}, {"question": "else", "answer": "8"}
    assert told.part({"answer": "9"}, 0, 0).next("any") == "zero"
    assert told.part({"answer": "9"}, 1, 2).next("any") == "first"
    listed = told.part(row, 7, 0)
    assert [listed.next("any") for _ in range(3)] == ["one", "two", "two"]
    assert told.part(row, 7, 1).next("any") == "no"
    by_caller = told.part(other, 8, 0)
    assert (by_caller.kind, by_caller.next("final")) == ("good", "<8> {other}")
    assert by_caller.next("draft") is None
    bad = told.part(other, 8, 1)
    assert [bad.next("final"), bad.next("draft"), bad.next("final")] == ["x", None, "y"]
    # what a line leaves out is said by default
    assert told.part({"answer": "9"}, 0, 1).kind == "words"
    assert script("b.jsonl", {"bad": "no"}).part(row, 0, 0).kind == "truth"


def test_every_faulty_line_of_the_answers_is_named(tmp_path):
    entries = [{"item": 0}, {"item": -1, "good": "a"}, {"item": True, "good": "a"}]
    entries += [{"good": [], "bed": "b"}, {"item": 4, "good": {"x": 3}}, {"item": 5, "good": "a"}]
    path = lines(tmp_path / "a.jsonl", *entries, {"item": 5, "bad": "b"}, ["no", "object"])
    with path.open("a") as file:
        file.write("{torn\n")
    with pytest.raises(BadInput) as caught:
        read_answers(path)
    places = [fault.where.removeprefix(str(path)) for fault in caught.value.faults]
    expected = [":1", ":2: item", ":3: item", ":4: good", ":4: bed", ":5: good", ":7", ":8", ":9"]
    assert places == expected
    with pytest.raises(BadInput, match="several training task sets"):
        read_answers(lines(tmp_path / "b.jsonl", {"item": 0, "good": "a"}), numbered=False)
    with pytest.raises(BadInput, match="cannot be read"):
        read_answers(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("changes", "played", "fills", "words"),
    [
        ({}, 32, True, "1 train steps"),  # 32 of 2 tasks are 64 of 4
        ({}, 64, True, "2 train steps"),
        ({}, 16, False, "at most 32"),
        ({"explorer_rounds": 2, "trainer_steps": 1}, 16, True, "2 steps to fill"),
        ({"explorer_rounds": 2, "trainer_steps": 2}, 16, False, "needs 128"),
        ({"explorer_rounds": None}, 16, True, "2 steps to fill"),
        ({"counts_calls": False}, 16, True, "32 experiences"),
        ({"counts_calls": False}, 0, False, "nothing"),
    ],
)
def test_how_a_batch_fills(changes, played, fills, words):
    found = fill_of(PLAN | changes, float(played))
    assert found["fills"] is fills
    assert words in found["words"]


# --- the scripted sampler ------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler(tiny_model_dir):
    import torch

    from aflow_tune.engines.local.models import load_model, load_tokenizer
    from aflow_tune.engines.local.scripted import ScriptedSampler

    made = ScriptedSampler(
        load_model(tiny_model_dir, torch.float32, torch.device("cpu")),
        load_tokenizer(tiny_model_dir),
        max_model_len=512,
        threads=1,
    )
    yield made
    made.close()


def test_given_words_get_the_models_own_probabilities(sampler):
    from aflow_tune.engines.local.sampler import SamplingParams
    from aflow_tune.engines.local.scripted import _answer

    prompt = sampler.vocabulary.tokenizer("Hello there", add_special_tokens=False)["input_ids"]

    def ask(text, **params):
        async def inside():
            _answer.set(text)
            return await sampler.submit(prompt, SamplingParams(**{"max_tokens": 50, **params}))

        (found,) = asyncio.run(inside())
        return found

    told = ask("five", temperature=0.7)
    end = sampler.vocabulary.tokenizer.eos_token_id
    assert (told.text, told.finish_reason) == ("five", "stop")
    assert len(told.token_ids) == 5
    assert told.token_ids[-1] == end
    forced = sampler.token_logprobs([*prompt, *told.token_ids], 0.7)[len(prompt) - 1 :]
    assert told.logprobs == pytest.approx(forced, abs=1e-3)
    cut = ask("five", max_tokens=3)
    assert (cut.text, cut.finish_reason) == ("fiv", "length")
    properties = {"a": {"type": "integer", "minimum": 2}, "b": {"$ref": "#/$defs/B"}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"]}
    schema["$defs"] = {"B": {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]}}
    assert json.loads(ask(None, json_schema=schema).text) == {"a": 2, "b": "x"}


# --- whole dry runs ------------------------------------------------------------------------


def test_a_dry_run_by_hand(capsys, tmp_path, tiny_model_dir):
    config = write_project(tmp_path, tiny_model_dir, workflow=WORKFLOW)
    found = dry(capsys, config, "--inline")
    assert found["ok"] is True
    # 2 tasks x 4 runs: two of each group say the row's answer and earn 1
    assert found["answers"]["sources"] == {"the row's field `answer`": 4, "plain words": 4}
    rewards = {kind: of["reward"] for kind, of in found["answers"]["by_kind"].items()}
    assert rewards == {"truth": 1.0, "words": 0.0}
    spread = {"count": 8, "least": 0.0, "mean": 0.5, "median": 0.5, "greatest": 1.0}
    assert found["rewards"] == spread
    expected = {"failed": 0, "lone": 0, "mixed": 2, "all best": 0, "all worst": 0}
    assert found["groups"] == expected
    assert found["batch"]["experiences"] == 16
    assert found["plan"]["steps"] == 2
    # One token a byte. The first prompt, from <|im_start|>user to <|im_start|>assistant and its
    # line end, has 1 + 5 + 10 + 1 + 1 + 1 + 10 = 29; the second has the first answer on top: one
    # byte, or seven (words are cut so that they fit into 8 with their end).
    tokens = found["tokens"]
    assert tokens["prompt"] == 2 * (2 * (29 + 30) + 2 * (29 + 36))
    assert tokens["response"] == 2 * (2 * (2 + 2) + 2 * (8 + 8))
    assert (tokens["longest_prompt"], tokens["longest"], tokens["truncated"]) == (36, 44, 0)
    # rewards 1, 0, 1, 0: the sample deviation is sqrt(1/3)
    assert found["step"]["advantage_max"] == pytest.approx(0.5 / (3**-0.5 + 1e-6))
    assert found["step"]["advantage_min"] == pytest.approx(-0.5 / (3**-0.5 + 1e-6))
    assert found["step"]["gradient_norm"] > 0
    assert found["plan"]["own_tokens"] is True
    assert str(tiny_model_dir) in found["stood_in"][0]
    assert not (tmp_path / "runs").exists()


def test_failed_runs_are_shown_with_their_place(capsys, tmp_path, tiny_model_dir):
    raising = '    raise LookupError("no such planet")'
    broken = WORKFLOW.replace("    return 1.0 if", f"{raising}\n    return 1.0 if")
    config = write_project(tmp_path, tiny_model_dir, workflow=broken)
    assert main(["run", "--dry-run", "--inline", str(config)]) == 1
    text = capsys.readouterr().out
    assert f"{tmp_path}/flow.py:{1 + broken.splitlines().index(raising)}" in text
    assert text.count("LookupError: no such planet") == 1


def test_a_gpu_configuration_is_played_here_and_its_batch_counted(
    capsys, monkeypatch, tmp_path, tiny_model_dir
):
    monkeypatch.setenv("AFLOW_TUNE_CACHE", str(tmp_path / "cache"))  # no model of ours is there
    # how often this one calls cannot be seen from its source
    loop = WORKFLOW.replace('    with caller("final"):', "    for _ in range(1):")
    config = write_project(tmp_path, tiny_model_dir, workflow=loop)
    content = yaml.safe_load(config.read_text())
    content |= {"engine": "trinity", "synchronizer": {"sync_method": "checkpoint"}}
    content["model"]["model_path"] = "nobody/has-this-model"
    content["model"]["repetition_penalty"] = 1.1
    content["explorer"] = {"rollout_model": {"engine_num": 1}}
    content["buffer"]["train_batch_size"] = 40
    config.write_text(yaml.safe_dump(content))
    answers = lines(tmp_path / "a.jsonl", {"item": "*", "good": "{answer}", "bad": ["a", "b"]})
    found = dry(capsys, config, "--inline", "--answers", answers, "buffer.total_steps=3", code=1)
    # 2 tasks x 4 runs x 2 calls = 16 of 40
    assert found["batch"]["fills"] is False
    assert found["batch"]["experiences"] == 16
    assert "train_batch_size to at most 16" in found["failure"]
    assert found["step"]["gradient_norm"] > 0
    assert found["answers"]["by_kind"]["good"]["reward"] == 1.0
    assert found["answers"]["by_kind"]["bad"]["runs"] == 4
    assert found["plan"]["steps"] == 3
    assert found["plan"]["own_tokens"] is False
    assert "vLLM and verl" in str(found["stood_in"])
    assert "model.repetition_penalty: 1.1" in str(found["stood_in"])
    assert not (tmp_path / "runs").exists()


def test_models_behind_an_api_are_not_called(capsys, monkeypatch, tmp_path, tiny_model_dir):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judged = WORKFLOW.replace("caller, text_of", "caller, client_for, text_of").replace(
        "    return 1.0 if",
        '    verdict = await client_for("judge").complete([{"role": "user", "content": "Well?"}])\n'
        '    assert verdict.model == "far-judge" and verdict.text.endswith(".")\n'
        "    return 1.0 if",
    )
    config = write_project(tmp_path, tiny_model_dir, workflow=judged)
    content = yaml.safe_load(config.read_text())
    judge = {"model": "far-judge", "base_url": "http://127.0.0.1:9/v1"}
    content["models"] = {"judge": judge | {"api_key_env": "NO_SUCH_KEY"}}
    config.write_text(yaml.safe_dump(content))
    found = dry(capsys, config, "--inline", "--tasks", 1)
    assert found["failed_runs"] == {}
    assert "judge (far-judge at http://127.0.0.1:9/v1): plain words" in str(found["stood_in"])
    # one task was played of two, and what a step holds is scaled
    assert (found["plan"]["played"], found["plan"]["tasks"]) == (1, 2)
    assert found["tokens"]["calls"] == 16
    # with them, their keys are asked for before anything starts
    assert main(["run", "--dry-run", str(config), "--inline", "--call-apis"]) == 2
    assert "NO_SUCH_KEY" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--answers", "a.jsonl"], "--dry-run --answers"),
        (["--dry-run", "--stage", "grpo"], "--stage"),
        (["--dry-run", "mode=bench"], "trains on rollouts"),
        (["--dry-run", "algorithm.repeat_times=0"], "algorithm.repeat_times"),
    ],
)
def test_what_is_no_dry_run_is_refused(capsys, tmp_path, tiny_model_dir, arguments, said):
    config = write_project(tmp_path, tiny_model_dir, workflow=WORKFLOW)
    assert main([str(config), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_dry_run_in_ray_workers(capsys, monkeypatch, tmp_path, tiny_model_dir):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # a run would join this one
    config = write_project(tmp_path, tiny_model_dir, workflow=WORKFLOW)
    (run_dir(tmp_path) / "global_step_7").mkdir(parents=True)
    found = dry(capsys, config)
    assert (found["ok"], found["batch"]["experiences"]) == (True, 16)
    assert found["answers"]["by_kind"]["truth"]["reward"] == 1.0
    assert any("Ray of its own" in line for line in found["real"])
    assert [path.name for path in run_dir(tmp_path).iterdir()] == ["global_step_7"]
