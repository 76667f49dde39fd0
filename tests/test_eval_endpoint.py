"""`aflow-tune eval --endpoint`: whole evaluations against a scripted server over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from graph_samples import own_form, simple
from project import run_dir, write_project
from scripted_server import Reply, ScriptedServer

from aflow_tune.cli import main
from aflow_tune.report.records import read_records

WORKFLOW = """
from typing import Dict

from aflow_tune import TrinityChatModel, caller, record_metrics, text_of
from aflow_tune.operators import Custom


async def by_operator(task: Dict, model: TrinityChatModel) -> float:
    result = await Custom(model, name="solve")(input=task["question"], instruction="Answer: ")
    right = float(task["answer"] in result["response"])
    record_metrics(right=right)
    return right


async def ask_once(task: Dict, model: TrinityChatModel) -> float:
    with caller("ask"):
        reply = await model([{"role": "user", "content": task["question"]}])
    text = text_of(reply.content)
    if text == "crash":
        raise LookupError("no such planet")
    right = float(task["answer"] in text)
    record_metrics(right=right)
    return right


async def always_wrong(task: Dict, model: TrinityChatModel) -> float:
    await model([{"role": "user", "content": task["question"]}])
    record_metrics(right=0.0)
    return 0.0
"""


def numbers(request: dict[str, Any]) -> Reply:
    """`tuned` answers every question right, `small` the even ones."""
    number = int("".join(c for c in request["messages"][-1]["content"] if c.isdigit()))
    right = request["model"] == "tuned" or number % 2 == 0
    return Reply(f"<answer>{number if right else 0}</answer>")


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(numbers) as running:
        yield running


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A project of ten held-out tasks; its model is on no disk."""
    path = write_project(tmp_path, Path("nobody/no-such-model"), workflow=WORKFLOW)
    rows = [json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in range(100, 110)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows) + "\n")
    text = path.read_text().replace("flow.py:two_calls", "flow.py:ask_once")
    path.write_text(text.replace("score: letters", "score: right"))
    return path


@pytest.fixture
def evaluate(server: ScriptedServer, config: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command on the server; its exit code and what it printed as JSON."""

    def run(*arguments: str, models: tuple[str, ...] = ("small",)) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        endpoint = ["--endpoint", server.url, "--model", *models]
        code = main(["eval", str(config), *arguments, *endpoint, "--json"])
        printed = capsys.readouterr().out
        return code, json.loads(printed) if printed else {}

    return run


def test_two_models_of_an_endpoint_are_measured_and_compared(
    evaluate: Run, server: ScriptedServer, tmp_path: Path
) -> None:
    varied = ("--vary", "temperature=0.2,0.7", "--vary", "max_tokens=5", "--limit", "1")
    assert len(evaluate(*varied)[1]["comparisons"]) == 1
    sent = {(request["temperature"], request["max_tokens"]) for request in server.requests}
    assert sent == {(0.2, 5), (0.7, 5)}
    code, result = evaluate("--samples", "2", models=("small", "tuned"))
    assert code == 0
    base, tuned = result["columns"]
    assert (base["name"], tuned["name"], base["model"]) == ("base", "tuned", "small")
    cell, other = base["tasksets"]["held_out"], tuned["tasksets"]["held_out"]
    assert (cell["items"], cell["runs"], cell["solved_runs"]) == (10, 20, 10)
    assert cell["score"]["mean"] == 0.5
    assert (cell["pass_at"]["1"]["mean"], cell["pass_at"]["2"]["mean"]) == (0.5, 0.5)
    assert other["score"] == {"mean": 1.0, "low": pytest.approx(0.7225, abs=1e-4), "high": 1.0,
                              "count": 10}  # fmt: skip
    # A prompt 'What is 100?' has 12 bytes; '<answer>100</answer>' 20 and '<answer>0</answer>'
    # 18, each with its end: 20 runs of 12, ten answers of 21 and ten of 19 tokens.
    assert (cell["tokens"]["prompt_tokens"], cell["tokens"]["tokens"]) == (240, 400)
    assert cell["tokens"]["per_solved_run"] == 64.0
    assert cell["callers"][0]["caller"] == "ask"
    assert cell["cost_usd"] == {
        "total": None, "per_solved_run": None, "by_role": {}, "unknown_roles": ["policy"],
    }  # fmt: skip
    (comparison,) = result["comparisons"]
    assert (comparison["before"], comparison["after"]) == ("base", "tuned")
    assert (comparison["better"], comparison["worse"]) == (5, 0)
    out = run_dir(tmp_path) / "eval"
    assert json.loads((out / "eval.json").read_text()) == result
    page = (out / "eval.html").read_text()
    assert "tuned" in page
    assert "<script" not in page


def test_the_same_command_measures_only_what_is_missing(
    evaluate: Run, server: ScriptedServer
) -> None:
    evaluate("--limit", "4")
    assert len(server.requests) == 4
    evaluate("--limit", "4")
    assert len(server.requests) == 4
    _, more = evaluate("--limit", "6", "--samples", "2")
    assert len(server.requests) == 12
    assert more["columns"][0]["tasksets"]["held_out"]["runs"] == 12
    _, less = evaluate("--limit", "2")
    assert len(server.requests) == 12
    assert less["columns"][0]["tasksets"]["held_out"]["runs"] == 2
    for setting, requests in (("seed=4", 13), ("model.temperature=0.5", 14)):
        evaluate("--limit", "1", setting)  # what decides the records starts new ones
        assert len(server.requests) == requests


def test_another_configuration_runs_on_the_first_ones_tasks(
    evaluate: Run, server: ScriptedServer, config: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    text = config.read_text().replace("flow.py:ask_once", "flow.py:always_wrong")
    text = text.replace("held_out.jsonl", "train.jsonl").replace("seed: 3", "seed: 8")
    other.write_text(text.replace("max_response_tokens: 8", "max_response_tokens: 6"))
    code, result = evaluate("--compare", "base", str(other), "--limit", "2")
    assert code == 0
    cells = [column["tasksets"]["held_out"] for column in result["columns"]]
    assert [cell["score"]["mean"] for cell in cells] == [0.5, 0.0]
    assert {request["max_tokens"] for request in server.requests} == {8, 6}
    assert {request["messages"][-1]["content"] for request in server.requests} == {
        "What is 100?",
        "What is 101?",
    }


def test_failed_runs_are_told_by_kind_and_made_again_on_request(
    evaluate: Run, server: ScriptedServer
) -> None:
    server.answer = lambda request: Reply("crash") if "101" in str(request) else numbers(request)
    code, result = evaluate("--limit", "4")
    cell = result["columns"][0]["tasksets"]["held_out"]
    assert code == 0
    assert (cell["failures"], cell["score"]["count"]) == ({"raised": 1}, 3)
    assert cell["pass_at"]["1"]["mean"] == pytest.approx(2 / 3)
    assert cell["pass_at_failed_as_unsolved"]["1"]["mean"] == 0.5
    server.answer = numbers
    server.requests.clear()
    evaluate("--limit", "4")
    assert server.requests == []
    _, again = evaluate("--limit", "4", "--retry-failed")
    assert len(server.requests) == 1
    assert again["columns"][0]["tasksets"]["held_out"]["failures"] == {}


def test_tool_using_agents_get_their_measures(
    evaluate: Run, server: ScriptedServer, config: Path, tmp_path: Path
) -> None:
    rows = [
        {"question": "1", "answer": "1", "target_tools": ["search"], "optimal_steps": 1},
        {"question": "2", "answer": "2", "target_tools": ["search", "open"]},
        {"question": "3", "answer": "3", "target_tools": []},
    ]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def answer(request: dict[str, Any]) -> Reply:
        called = {"1": [("search", {})], "2": [("search", {})], "3": []}
        question = request["messages"][-1]["content"]
        return Reply("1", tool_calls=called[question])

    server.answer = answer
    code, result = evaluate()
    assert code == 0
    agents = result["columns"][0]["tasksets"]["held_out"]["agents"]
    accuracy = [1.0, 2 / 3, 1.0]  # F1 of one of two wanted tools: 2 * 1 * 0.5 / 1.5
    assert agents["tool_selection_accuracy"]["mean"] == pytest.approx(sum(accuracy) / 3)
    assert agents["tool_selection_accuracy"]["count"] == 3
    assert agents["plan_success_rate"]["mean"] == pytest.approx(2 / 3)
    assert agents["plan_success_rate"]["std"] == pytest.approx((1 / 3) ** 0.5)
    assert agents["step_efficiency"]["mean"] == 1.0
    assert agents["timing_precision"]["mean"] == 1.0
    assert agents["end_to_end_success"]["mean"] == pytest.approx(1 / 3)


def test_keys_are_sent_where_they_belong_and_kept_nowhere(
    evaluate: Run, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-secret")
    monkeypatch.setenv("MY_KEY", "sk-own-secret")
    evaluate("--limit", "1")
    assert server.keys == {"Bearer EMPTY"}
    evaluate("--limit", "2", "--key-variable", "MY_KEY")
    assert server.keys == {"Bearer EMPTY", "Bearer sk-own-secret"}
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"secret" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--endpoint", "http://127.0.0.1:9/v1", "--model", "m"], "no answer"),
        (["--endpoint", "localhost:8000", "--model", "m"], "an http or https URL"),
        (["--endpoint", "http://127.0.0.1:9"], "no --model"),
        (["--model", "m"], "no --endpoint"),
        (["--limit", "-1"], "1 or more"),
        (["buffer.explorer_input.eval_tasksets=[]"], "at least one held-out task set"),
        (["--compare", "base", "workflow:flow.py:nobody"], "nobody"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_exit_code_2(
    config: Path, capsys: pytest.CaptureFixture[str], tiny_model_dir: Path,
    arguments: list[str], expected: str,
) -> None:  # fmt: skip
    model = [] if "--endpoint" in arguments else [f"model.model_path={tiny_model_dir}"]
    assert main(["eval", str(config), *model, *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert "do: " in error
    assert not (config.parent / "runs").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(
    config: Path, tmp_path: Path
) -> None:
    release = threading.Event()

    def answer(request: dict[str, Any]) -> Reply:
        slow = any(str(n) in str(request["messages"]) for n in range(105, 110))
        return Reply("x", delay=60.0) if slow and not release.is_set() else numbers(request)

    with ScriptedServer(answer) as server:
        command = [
            *(sys.executable, "-m", "aflow_tune.cli", "eval", str(config)),
            *("--endpoint", server.url, "--model", "small", "--json"),
        ]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        columns = run_dir(tmp_path) / "eval" / "columns"
        deadline = time.monotonic() + 240
        while sum(len(read_records(path)) for path in columns.rglob("step_0.jsonl")) < 5:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=120)
        assert child.returncode == 3, error
        assert "goes on from there" in " ".join(error.split())
        release.set()
        server.requests.clear()
        again = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert again.returncode == 0, again.stderr
        assert len(server.requests) == 5
        result = json.loads(again.stdout)
        assert result["columns"][0]["tasksets"]["held_out"]["runs"] == 10
        assert "5 of 10 rollouts are there" in again.stderr


def test_a_budget_of_calls_ends_an_evaluation_and_a_higher_one_goes_on(
    evaluate: Run, server: ScriptedServer, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = ["--endpoint", server.url, "--model", "small"]
    assert main(["eval", str(config), "budget.calls=4", *endpoint]) == 4
    told = capsys.readouterr().err
    assert len(server.requests) == 4
    assert "goes on from there" in " ".join(told.split())
    code, result = evaluate("budget.calls=40")
    assert code == 0
    # A run that ended when the budget was reached is made again.
    assert 10 <= len(server.requests) <= 14
    cell = result["columns"][0]["tasksets"]["held_out"]
    assert (cell["runs"], cell["failed_runs"]) == (10, 0)


def test_a_budget_of_money_needs_the_price_of_what_is_measured(
    evaluate: Run, server: ScriptedServer, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", str(config), "budget.usd=1"]
    for options in ([], ["--endpoint", server.url, "--model", "gpt-4o-mini"]):
        assert main([*command, *options]) == 2
        assert "budget.usd is set" in " ".join(capsys.readouterr().err.split())
    asked = [request for request in server.requests if "messages" in request]
    assert not asked
    code, result = evaluate("budget.usd=1", "models.policy.prices.listed=gpt-4o-mini")
    assert code == 0
    cell = result["columns"][0]["tasksets"]["held_out"]
    # 10 prompts of 12 tokens; five answers of 21 and five of 19: (120 * 0.15 + 200 * 0.6) / 1e6
    assert cell["cost_usd"]["total"] == pytest.approx(0.000138)
    code, _ = evaluate("budget.usd=0.001", "seed=2", "models.policy.prices.listed=gpt-4o")
    assert code == 4


def marked(word: str) -> Callable[[dict[str, Any]], Reply]:
    """A server that knows answers only where it reads this word."""
    return lambda request: (
        numbers(request) if word in str(request["messages"]) else Reply("nothing")
    )


def test_operator_graphs_are_compared(
    evaluate: Run, server: ScriptedServer, config: Path, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        own_form(tmp_path / name, simple(f"return await self.llm('{name}: ' + problem), 0"))
    scoring = "def right(row, answer):\n    return float(row['answer'] in answer)\n"
    (tmp_path / "score.py").write_text(scoring)
    graph = f"graph: {{path: {tmp_path}/first, trust: true, score: {tmp_path}/score.py:right}}"
    text = config.read_text().replace(f"workflow: {tmp_path}/flow.py:ask_once", graph)
    config.write_text(text.replace("score: right", "score: reward"))
    server.answer = marked("second")
    code, result = evaluate("--compare", "base", str(tmp_path / "second"), "--limit", "4")
    assert code == 0
    means = {c["name"]: c["tasksets"]["held_out"]["score"]["mean"] for c in result["columns"]}
    assert means == {"base": 0.0, "base, second": 0.5}


def test_prompts_of_operators_are_columns(
    evaluate: Run, server: ScriptedServer, tmp_path: Path
) -> None:
    (tmp_path / "plain.yaml").write_text('Custom: "{instruction}{input}"\n')
    ours = 'prompts: {Custom.solve: {main: "MARK {instruction} {input}"}}\n'
    (tmp_path / "marked.yaml").write_text(ours)
    server.answer = marked("MARK")
    files = (str(tmp_path / "plain.yaml"), str(tmp_path / "marked.yaml"))
    workflow = f"workflow={tmp_path}/flow.py:by_operator"
    code, result = evaluate("--limit", "4", workflow, "--prompts", *files)
    assert code == 0
    plain, other = (column["tasksets"]["held_out"] for column in result["columns"])
    assert (plain["score"]["mean"], other["score"]["mean"]) == (0.0, 0.5)
    (use,) = other["callers"]
    assert (use["caller"], use["outcomes"]) == ("Custom.solve", {"answered": 4})
