"""Asking what was trained: the command, the batch, and `Inferer` from Python."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer
from writer_servers import PROMPT, executor, policy, write_config

from aflow_tune.cli import main
from aflow_tune.errors import BadInput
from aflow_tune.using.inferring import benchmark_row, open_trained
from aflow_tune.using.solved import Problem, Solved
from aflow_tune.writer.types import Level

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
    assert got["answer"] == "The answer is 391"
    assert (got["level"], got["level_meaning"]) == (0, "the workflow as it was written")
    workflow = got["workflow"]
    assert workflow["valid"]
    assert workflow["form"] == "hybrid"
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

    kinds = [(call["kind"], call.get("role") or call.get("operator")) for call in got["calls"]]
    assert kinds == [
        ("model", "policy"),
        ("workflow", None),
        ("operator", "Custom"),
        ("model", "executor"),
    ]
    policy_call, workflow_call, operator_call, executor_call = got["calls"]
    assert workflow_call["outcome"] == "finished"
    assert policy_call["usd"] is None
    assert got["policy_tokens"] == (policy_call["prompt_tokens"] + policy_call["completion_tokens"])
    assert operator_call["instance"] == "solve"
    assert operator_call["outcome"] == "answered"
    assert executor_call["usd"] == pytest.approx(got["usd"])
    assert executor_call["model"] == "frozen"


def test_the_policy_is_sampled_as_held_out_tasks_are(
    infer: Ask, servers: tuple[ScriptedServer, ScriptedServer]
) -> None:
    infer("What is 1 + 1?")
    infer("What is 1 + 1?", "--temperature", "0")
    first, second = servers[0].requests
    assert (first["temperature"], second["temperature"]) == (0.25, 0.0)
    assert first["max_tokens"] == 24
    assert first["seed"] == second["seed"]


def test_without_a_truth_nothing_is_rewarded(infer: Ask) -> None:
    code, got = infer("What is 17 * 23?")
    assert code == 0
    assert not {"truth", "score", "reward", "parts"} & set(got)


def test_the_names_of_data_sets_are_taken_too(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--problem", "17 * 23?", "--problem-type", "math", "--ground-truth", "391", "--json"]
    assert main(["infer", *options, *asked]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == 1.0
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "17 * 23?", "problem_type": "math", "ground_truth": "391"}\n')
    assert main(["infer", *options, "--batch", str(file), "--type", "qa"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == 1.0


def test_a_wrong_answer_scores_0(infer: Ask) -> None:
    code, got = infer("What is 17 * 23?", "--truth", "392")
    assert code == 0
    assert got["score"] == 0.0
    assert got["parts"]["correctness"] == 0.0


@pytest.mark.parametrize(
    ("problem", "level", "endings"),
    [("rubbish", 3, [3]), ("raises", 2, [0, 2])],
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
    assert got["ran"]["svg"].startswith("<svg")
    assert got["score"] == 1.0
    assert got["reward"] < -10 + 20 * 0.1  # what the worst clean run earns


def test_code_is_scored_by_a_file_of_tests(infer: Ask, tmp_path: Path) -> None:
    tests = tmp_path / "tests.py"
    tests.write_text("assert candidate(2, 3) == 5\nassert add(-1, 1) == 0\n")
    asked = ("Write a function add(a, b).", "--entry-point", "add")
    code, got = infer(*asked, "--truth", str(tests), kind="code")
    assert code == 0
    assert got["score"] == 1.0, got["score_reason"]
    tests.write_text("assert candidate(2, 3) == 6\n")
    _, got = infer(*asked, "--truth", str(tests), kind="code")
    assert got["score"] == 0.0


@pytest.mark.parametrize(
    ("problem", "limits"),
    [
        ("broken: 17 * 23?", {}),
        ("patience: 17 * 23?", {"models.executor.timeout": 1}),
        ("patience: 17 * 23?", {"writer.timeout": 8}),
    ],
)
def test_no_answer_of_the_executor_is_exit_code_1_and_no_reward(
    infer: Ask, problem: str, limits: dict[str, float]
) -> None:
    settings = [part for name, value in limits.items() for part in ("--set", f"{name}={value}")]
    code, got = infer(problem, "--truth", "391", *settings)
    assert code == 1
    assert got["answer"] is None
    assert got["answered"] is False
    assert (got["score"], got["reward"]) == (None, None)  # nobody's doing
    assert "no call of the executor was answered" in got["score_reason"]


def test_a_policy_that_cannot_be_asked(infer: Ask, options: list[str]) -> None:
    code, got = infer("refuse: 17 * 23?")
    assert code == 1
    assert got is None


def test_the_text_form(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["infer", *options, "--type", "math", "--truth", "391", "--problem"]
    assert main([*asked, "What is 17 * 23?"]) == 0
    text = capsys.readouterr().out
    for part in (
        "workflow: read as hybrid; passed the check; at worst 1 model call and",
        "    class Workflow:", "  solve:", f"    {PROMPT}", "    flowchart TD",
        "answer (the workflow as it was written):", "    The answer is 391",
        "model calls 1", "reward ", "correctness 1.00",
    ):  # fmt: skip
        assert part in text
    picture = tmp_path / "graph.svg"
    assert main([*asked, "rubbish", "--svg", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "refused: " in text
    assert "what ran instead: fallback 3" in text
    assert not picture.exists()  # there was no code to draw
    assert main([*asked, "17?", "--svg", str(picture)]) == 0
    assert picture.read_text().startswith("<svg")
    assert "flowchart" not in capsys.readouterr().out


def test_samples_draw_different_numbers(
    infer: Ask, servers: tuple[ScriptedServer, ScriptedServer]
) -> None:
    code, got = infer("What is 17 * 23?", "--samples", "3")
    assert code == 0
    assert len(got) == 3
    assert len({request["seed"] for request in servers[0].requests}) == 3


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
    assert lines[1]["id"] == "first"
    assert lines[1]["score"] == lines[3]["score"] == 1.0
    assert "error" in lines[2]

    # Only what has no result is asked again: a torn line, and the row that met an error.
    whole = [line for line in out.read_text().splitlines() if json.loads(line)["row"] != 3]
    out.write_text("\n".join(whole) + '\n{"row": 3, "sam')
    before = len(servers[0].requests)
    assert main(command) == 1
    assert "1 of 3 results are there" in capsys.readouterr().err
    asked = [request["messages"][-1]["content"] for request in servers[0].requests[before:]]
    assert any("refuse this" in text for text in asked)
    assert any("Where?" in text for text in asked)
    assert not any("17 * 23" in text for text in asked)
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(entry["row"] for entry in entries) == [1, 2, 3]

    # Results of another make are not mixed in.
    assert main([*command, "--temperature", "0"]) == 2
    assert "something else" in capsys.readouterr().err


def test_a_batch_prints_a_line_a_result(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "What is 17 * 23?"}\n\n{"problem": "And 3 * 4?", "type": "qa"}\n')
    assert main(["infer", *options, "--batch", str(file), "--type", "math"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(entry["row"], entry["type"]) for entry in entries} == {(1, "math"), (2, "qa")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--problem", "2?"], "--type"),
        (["--type", "math"], "a problem"),
        (["--problem", "  ", "--type", "math"], "a text that is not empty"),
        (["--problem", "x" * 50_001, "--type", "math"], "at most 50000"),
        (["--problem", "2?", "--type", "code", "--entry-point", "no name"], "name of a function"),
        (["--problem", "2?", "--type", "code", "--truth", "none.py"], "a file of tests"),
        (["--problem", "2?", "--batch", "rows.jsonl"], "either it or --batch"),
        (["--batch", "none.jsonl"], "a file with a problem a line"),
        (["--problem", "2?", "--type", "math", "--samples", "0"], "1 or more"),
        (["--problem", "2?", "--type", "math", "--set", "writer.turns=x"], "writer.turns"),
    ],
)
def test_input_that_is_refused(
    arguments: list[str], said: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", *options, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_faulty_rows_are_named_with_their_lines(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "2?", "type": "poem"}\n[1]\n{"type": "math"}\n')
    assert main(["infer", *options, "--batch", str(file)]) == 2
    said = capsys.readouterr().err
    for line in (1, 2, 3):
        assert f"rows.jsonl:{line}" in said


def test_folders_with_nothing_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["infer", "--problem", "2?", "--type", "math", "--checkpoint"]
    assert main([*command, str(tmp_path)]) == 2
    assert "a run folder with checkpoints" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text("{}")
    assert main([*command, str(tmp_path)]) == 2
    assert "--config my.yaml" in capsys.readouterr().err


def test_a_model_that_writes_no_workflows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "plain.yaml"
    config.write_text("workflow: flow.py:solve\n")
    command = ["infer", "--config", str(config), "--endpoint", "http://127.0.0.1:9", "--model", "m"]
    with ScriptedServer(policy) as server:
        command[4] = server.url
        assert main([*command, "--problem", "2?", "--type", "math"]) == 2
    assert "not trained to write workflows" in capsys.readouterr().err


def test_from_python_many_at_once(
    servers: tuple[ScriptedServer, ScriptedServer], tmp_path: Path
) -> None:
    config = write_config(tmp_path, servers[1].url)

    async def ask() -> list[Solved]:
        async with open_trained(
            None, config=config, endpoint=servers[0].url, served_model="tuned"
        ) as inferer:
            problems = [Problem(f"What is {n}?", "math") for n in range(8)]
            return await asyncio.gather(*map(inferer.solve, problems))

    found = asyncio.run(ask())
    assert [solved.level for solved in found] == [Level.CLEAN] * 8
    assert [solved.problem.text for solved in found] == [f"What is {n}?" for n in range(8)]
    assert [solved.model_calls for solved in found] == [1] * 8


def test_a_problem_that_is_given_up_asks_no_more(
    servers: tuple[ScriptedServer, ScriptedServer], tmp_path: Path
) -> None:
    config = write_config(tmp_path, servers[1].url)

    async def ask() -> None:
        opened = open_trained(None, config=config, endpoint=servers[0].url, served_model="tuned")
        async with opened as inferer:
            inferer.seconds = 8.0  # the policy has to be asked by then
            with pytest.raises(TimeoutError):
                await inferer.solve(Problem("slow?", "math"))
            deadline = time.monotonic() + 60
            while not servers[0].cancelled and time.monotonic() < deadline:
                await asyncio.sleep(0.05)

    asyncio.run(ask())
    assert servers[0].cancelled == 1
    assert not servers[1].requests


def test_an_answer_that_does_not_come_in_time(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    limit = ("--set", "rollout.run_timeout=1")
    command = ["infer", *options, *limit, "--problem", "slow?", "--type", "math"]
    assert main(command) == 1
    assert "not solved within 1 s" in capsys.readouterr().err


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


def test_what_a_problem_may_be() -> None:
    with pytest.raises(BadInput) as refused:
        Problem.of({"problem": 3, "type": "poem", "entry_point": "a b", "truth": []}, "here")
    assert [fault.where for fault in refused.value.faults] == [
        "here: problem", "here: type", "here: entry_point", "here: truth",
    ]  # fmt: skip
