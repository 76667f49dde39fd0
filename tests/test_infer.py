"""Asking a trained policy: what a solved problem is, in one and in many."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_server import ScriptedServer
from writer_servers import PROMPT, executor, policy, write_config

from aflow_tune.cli import main
from aflow_tune.config.changes import save_resolved
from aflow_tune.config.load import load_config
from aflow_tune.engines.local.trainer import LocalTrainer, TrainerSettings
from aflow_tune.engines.local.weights import LoraSpec
from aflow_tune.errors import BadInput
from aflow_tune.evaluation.trained import find_weights
from aflow_tune.using.inferring import benchmark_row
from aflow_tune.using.solved import Problem

Ask = Callable[..., Any]


@pytest.fixture
def servers() -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    """Policy and executor."""
    with ScriptedServer(policy) as writes, ScriptedServer(executor) as runs:
        yield writes, runs


@pytest.fixture
def options(servers: tuple[ScriptedServer, ScriptedServer], tmp_path: Path) -> list[str]:
    """What names configuration and policy on the command line."""
    config = write_config(tmp_path, servers[1].url)
    return ["--config", str(config), "--endpoint", servers[0].url, "--model", "tuned"]


@pytest.fixture
def infer(options: list[str], capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command with --json: exit code and result."""

    def run(problem: str, *arguments: str, kind: str = "math") -> tuple[int, Any]:
        asked = ["--problem", problem, "--type", kind, *arguments, "--json"]
        code = main(["infer", *options, *asked])
        printed = capsys.readouterr().out
        return code, json.loads(printed) if printed else None

    return run


def test_a_clean_run_with_its_reward_by_hand(
    infer: Ask, servers: tuple[ScriptedServer, ScriptedServer]
) -> None:
    code, got = infer("What is 17 * 23?", "--truth", "391")
    assert code == 0
    assert (got["answer"], got["level"]) == ("The answer is 391", 0)
    workflow = got["workflow"]
    assert (workflow["valid"], workflow["form"]) == (True, "hybrid")
    assert workflow["prompts"] == {"solve": PROMPT}
    assert "flowchart TD" in workflow["mermaid"]
    assert workflow["svg"].startswith("<svg")
    assert workflow["bound"]["model_calls"] == 1

    # The executor's one call: tokens are bytes, the answer's last one an end mark.
    (asked,) = servers[1].requests
    prompt = len("|".join(str(message["content"]) for message in asked["messages"]).encode())
    drawn = len(b"The answer is 391") + 1
    assert got["tokens"] == prompt + drawn
    assert got["usd"] == pytest.approx((prompt + 2 * drawn) / 1e6)
    assert got["model_calls"] == 1
    assert PROMPT in json.dumps(asked, ensure_ascii=False)

    parts = got["parts"]
    assert got["score"] == 1.0
    assert parts["correctness"] == parts["format"] == parts["repetition"] == 1.0
    assert parts["efficiency"] == pytest.approx(1 - got["usd"] / 0.01)
    weights = {"correctness": 0.65, "efficiency": 0.15, "simplicity": 0.1}
    total = 0.05 + 0.05 + sum(weight * parts[name] for name, weight in weights.items())
    assert got["reward"] == pytest.approx(-10 + 20 * (0.1 + 0.9 * total))

    policy_call, workflow_call, operator_call, executor_call = got["calls"]
    assert (policy_call["role"], policy_call["usd"]) == ("policy", None)
    assert got["policy_tokens"] == (policy_call["prompt_tokens"] + policy_call["completion_tokens"])
    assert (workflow_call["kind"], workflow_call["outcome"]) == ("workflow", "finished")
    assert (operator_call["instance"], operator_call["outcome"]) == ("solve", "answered")
    assert (executor_call["model"], executor_call["usd"]) == ("frozen", pytest.approx(got["usd"]))


@pytest.mark.parametrize(
    ("problem", "level", "endings"), [("rubbish", 3, [3]), ("raises", 2, [0, 2])]
)
def test_fallbacks_are_said_plainly(
    infer: Ask, problem: str, level: int, endings: list[int]
) -> None:
    code, got = infer(f"{problem}: 17 * 23?", "--truth", "391")
    assert code == 0
    assert got["level"] == level
    assert f"fallback {level}" in got["level_meaning"]
    assert [attempt["level"] for attempt in got["attempts"]] == endings
    assert got["ran"]["code"] != got["workflow"]["code"]
    assert (got["ran"]["svg"][:4], got["score"]) == ("<svg", 1.0)
    assert got["reward"] < -10 + 20 * 0.1  # what the worst clean run earns


def test_code_is_scored_by_a_file_of_tests(infer: Ask, tmp_path: Path) -> None:
    tests = tmp_path / "tests.py"
    asked = ("Write a function add(a, b).", "--entry-point", "add", "--truth", str(tests))
    for result, score in ((5, 1.0), (6, 0.0)):
        tests.write_text(f"assert candidate(2, 3) == {result}\nassert add(-1, 1) == 0\n")
        code, got = infer(*asked, kind="code")
        assert (code, got["score"]) == (0, score), got["score_reason"]


@pytest.mark.parametrize(
    ("problem", "limits"),
    [("broken: 17 * 23?", ()), ("patience: 17 * 23?", ("--set", "models.executor.timeout=1"))],
)
def test_no_answer_of_the_executor_is_exit_code_1_and_no_reward(
    infer: Ask, problem: str, limits: tuple[str, ...]
) -> None:
    code, got = infer(problem, "--truth", "391", *limits)
    assert (code, got["answer"], got["answered"]) == (1, None, False)
    assert (got["score"], got["reward"]) == (None, None)  # nobody's doing
    assert "no call of the executor was answered" in got["score_reason"]


def test_a_batch_goes_on_where_it_was_stopped(
    options: list[str],
    servers: tuple[ScriptedServer, ScriptedServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        {"problem": "What is 17 * 23?", "type": "math", "truth": 391, "id": "first"},
        {"problem": "refuse this", "type": "math"},
        {"problem": "Where?", "type": "qa", "truth": "The answer is 391"},
    ]
    file, out = tmp_path / "rows.jsonl", tmp_path / "results.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    command = ["infer", *options, "--batch", str(file), "--out", str(out)]
    assert main(command) == 1  # the second row has no answer
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2 of 3 rows have an answer" in captured.err
    lines = {line["row"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert (lines[1]["id"], lines[1]["score"], lines[3]["score"]) == ("first", 1.0, 1.0)
    assert "error" in lines[2]

    # Only what has no result is asked again: a torn line, and the row that met an error.
    whole = [line for line in out.read_text().splitlines() if json.loads(line)["row"] != 3]
    out.write_text("\n".join(whole) + '\n{"row": 3, "sam')
    before = len(servers[0].requests)
    assert main(command) == 1
    assert "1 of 3 results are there" in capsys.readouterr().err
    asked = str([request["messages"][-1] for request in servers[0].requests[before:]])
    words = [word for word in ("refuse this", "Where?", "17 * 23") if word in asked]
    assert words == ["refuse this", "Where?"]
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(entry["row"] for entry in entries) == [1, 2, 3]

    # Results of another make are not mixed in.
    assert main([*command, "--temperature", "0"]) == 2
    assert "something else" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--problem", "2?"], "--type"),
        (["--type", "math"], "a problem"),
        (["--problem", "  ", "--type", "math"], "not empty"),
        (["--problem", "2?", "--type", "code", "--truth", "none.py"], "a file of tests"),
        (["--problem", "2?", "--batch", "rows.jsonl"], "either it or --batch"),
        (["--batch", "none.jsonl"], "a file with a problem a line"),
        (["--problem", "2?", "--type", "math", "--set", "writer.turns=x"], "writer.turns"),
        (["--problem", "2?", "--type", "math", "--config", "PLAIN"], "not trained to write"),
    ],
)
def test_input_that_is_refused(
    arguments: list[str], said: str, options: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plain = tmp_path / "plain.yaml"
    plain.write_text("workflow: flow.py:solve\n")
    arguments = [str(plain) if word == "PLAIN" else word for word in arguments]
    assert main(["infer", *options, *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "truth", "configured", "benchmark", "fields"),
    [
        ("math", "1,234.5", None, "gsm8k", {"answer": "#### 1,234.5"}),
        ("math", "\\frac{1}{2}", None, "math", {"solution": "\\frac{1}{2}"}),
        ("math", "4", "math", "math", {"solution": "4"}),
        ("math", "4", "hotpotqa", "gsm8k", {"answer": "#### 4"}),
        ("qa", "Lima", "drop", "drop", {"ref_text": "Lima"}),
        ("qa", "Lima", None, "hotpotqa", {"answer": "Lima"}),
        ("code", "assert f()", "mbpp", "mbpp", {"test": "assert f()", "code": ""}),
        ("code", "assert f()", None, "humaneval", {"test": "assert f()", "entry_point": "f"}),
    ],
)
def test_the_rule_that_scores_a_truth(
    kind: Any, truth: str, configured: str | None, benchmark: str, fields: dict[str, str]
) -> None:
    problem = Problem("?", kind, "f" if kind == "code" else None, truth)
    name, row = benchmark_row(problem, configured)
    assert name == benchmark
    assert fields.items() <= row.items()


def test_a_run_is_asked_by_what_it_left(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its task sets are gone, and its paths go out from the YAML."""
    run = tmp_path / "run"
    run.mkdir()
    config = load_config(write_config(tmp_path, "http://127.0.0.1:9", tiny_model_dir))
    (tmp_path / "score.py").write_text("def score(row, answer):\n    return 1.0\n")
    config.writer.benchmark, config.writer.score = None, "score.py:score"
    (tmp_path / "short.txt").write_text("Write a workflow: {problem}")
    config.writer.prompt = "short.txt"
    save_resolved(config, [], run / "resolved.yaml")
    trainer = LocalTrainer(tiny_model_dir, TrainerSettings(lora=LoraSpec(4, 8)))
    assert trainer.peft is not None
    with torch.no_grad():  # B is zero at first, which would change nothing
        for name, parameter in trainer.peft.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.4)
    trainer.save(run / "global_step_2")
    texts = []
    for model in (("--checkpoint", str(run)), ("--config", str(run / "resolved.yaml"))):
        capsys.readouterr()
        with ScriptedServer(executor) as server:
            address = ("--set", f"models.executor.base_url={server.url}/v1", "--temperature", "0")
            problem = ("--type", "qa", "--problem", "Where?", "--truth", "The answer is 391")
            assert main(["infer", *model, *address, *problem, "--json"]) == 0
        got = json.loads(capsys.readouterr().out)
        assert (got["level"], got["score"]) == (3, 1.0)  # random weights write no workflow
        assert got["policy_tokens"] > len("Write a workflow: Where?")
        texts.append(got["workflow"]["text"])
    assert texts[0] != texts[1]  # the base model writes something else


def test_what_a_folder_means(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for place, file in (
        ("global_step_1", "manifest.json"),
        ("global_step_2", "manifest.json"),
        ("export/adapter", "adapter_config.json"),
    ):
        (run / place).mkdir(parents=True)
        (run / place / file).write_text("{}")
    (run / "resolved.yaml").write_text("")
    assert find_weights(run).name == "run/global_step_2"
    assert find_weights(run / "global_step_1").name == "run/global_step_1"
    assert find_weights(run / "export" / "adapter").name == "run/export/adapter"
    elsewhere = shutil.copytree(run / "export" / "adapter", tmp_path / "mine")
    assert (find_weights(elsewhere).run_dir, find_weights(elsewhere).name) == (None, "mine")

    # A chain of stages: the last one that trained, whatever the clock says.
    chain = tmp_path / "chain"
    for name in ("sft", "grpo"):
        shutil.copytree(run, chain / name)
    stages = [{"name": name} for name in ("warm_up", "sft", "grpo", "evaluation")]
    (chain / "chain.json").write_text(json.dumps({"stages": stages}))
    assert find_weights(chain).name == "grpo/global_step_2"
    (chain / "chain.json").write_text("[]")
    with pytest.raises(BadInput, match="chain"):
        find_weights(chain)
