"""What the adapter keeps of an evaluation run: calls, tools, operators, answer, trace metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_server import Reply, ScriptedModel, ScriptedRunner, ScriptedServer, make_task

from aflow_tune import TrinityChatModel, caller, record_metrics
from aflow_tune.models.client import BaseClient
from aflow_tune.models.spend import Call
from aflow_tune.models.types import Ask, Usage
from aflow_tune.models.types import Reply as ModelReply
from aflow_tune.report.records import EvalRecord, read_records
from aflow_tune.trace import ModelCall, OperatorCall, ProgramRun, note


def answer(request: dict[str, Any]) -> Reply:
    asked = request["messages"][-1]["content"] if request["messages"] else ""
    if asked == "refuse":
        return Reply("no", status=400)
    if asked == "tools":
        return Reply("", tool_calls=[("search", {"q": "x"}), ("open", {})])
    if asked == "long":
        return Reply("abc", finish_reason="length")
    return Reply("<answer>four</answer>")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(answer) as running:
        yield running


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def record_of(server: ScriptedServer, folder: Path, workflow: Any, **arguments: Any) -> EvalRecord:
    task = make_task(workflow, is_eval=True, batch_id="5/held", eval_dir=str(folder), **arguments)
    runner = ScriptedRunner(ScriptedModel(server.url))
    status, _ = asyncio.run(runner.run_task(task, "5/held", repeat_times=1))
    assert status.ok, status.message
    (record,) = read_records(folder / "held" / "step_5.jsonl")
    return record


def test_calls_and_answer_are_kept(server: ScriptedServer, tmp_path: Path) -> None:
    async def workflow(task: dict, model: TrinityChatModel) -> float:
        with caller("plan"):
            await model(ask("tools"))
        with caller("solve"):
            await model(ask("long"))
            with contextlib.suppress(openai.BadRequestError):
                await model(ask("refuse"))
        await model(ask("2 + 2?"))
        return 1.0

    record = record_of(server, tmp_path, workflow)
    tools = [{"name": "search", "arguments": '{"q": "x"}'}, {"name": "open", "arguments": "{}"}]
    # The scripted server counts a token for each byte, and one that ends the answer.
    assert record.calls == [
        {"caller": "plan", "prompt_tokens": 5, "tokens": 1, "tools": tools},
        {"caller": "solve", "prompt_tokens": 4, "tokens": 4, "truncated": True},
        {"caller": "solve", "prompt_tokens": None, "tokens": None, "failed": True},
        {"caller": "workflow", "prompt_tokens": 6, "tokens": 22},
    ]
    assert record.answer == "four"
    assert record.run == 0


def test_the_trace_becomes_metrics_but_never_over_the_users(
    server: ScriptedServer, tmp_path: Path
) -> None:
    async def workflow(task: dict, model: TrinityChatModel) -> float:
        await model(ask("2 + 2?"))
        with caller("Custom.solve"):
            note(OperatorCall(operator="Custom", instance="solve", outcome="ok", attempts=2))
        note(ProgramRun(level="bubblewrap", outcome="timed_out"))
        note(ProgramRun(level="bubblewrap", outcome="finished"))
        note(ModelCall(role="judge", model="m", cost=0.5))
        threads = (asyncio.to_thread(note, ModelCall(role="e", model="m")) for _ in range(3))
        await asyncio.gather(*threads)
        record_metrics(correct=1.0, **{"sandbox/timed_out": 7.0})
        return 1.0

    seeds = []  # runs share no trace, and may start at any number
    for folder, first in (("a", 0), ("b", 3), ("c", 3)):
        server.requests.clear()
        record = record_of(server, tmp_path / folder, workflow, first_run=first)
        others = {name: n for name, n in record.metrics.items() if not name.endswith("/policy")}
        assert others == {
            "correct": 1.0,
            "sandbox/timed_out": 7.0,
            "sandbox/finished": 1.0,
            "operator/Custom/ok": 1.0,
            "cost/judge": 0.5,
            "unpriced_calls/e": 3.0,
        }
        assert [use["attempts"] for use in record.operators] == [2]
        assert record.run == first
        seeds.append(server.requests[0]["seed"])
    assert seeds[0] != seeds[1] == seeds[2]


class CountingJudge(BaseClient):
    """A judge behind an address of its own, whose answers may be kept."""

    asked = 0

    def _endpoint(self) -> dict[str, str]:
        return {"provider": "openai", "base_url": "https://judge.example/v1", "model": self.model}

    async def _answer(self, ask: Ask, call: Call) -> ModelReply:
        self.asked += 1
        async with call:
            call.settle(Usage(1, 1))
        return ModelReply(text=f"verdict {self.asked}", model=self.model)


def test_an_evaluation_may_keep_the_answers_of_other_models(
    server: ScriptedServer, tmp_path: Path
) -> None:
    judge = CountingJudge("judge", "judge-1")

    async def judged(task: dict, model: TrinityChatModel) -> float:
        await model(ask("hello"))
        verdicts = [await judge.complete(ask("is it right?")) for _ in range(2)]
        return float(verdicts[0].text != verdicts[1].text)

    def evaluate(name: str, **arguments: Any) -> float | None:
        return record_of(server, tmp_path / name, judged, **arguments).reward

    kept = {"cache": str(tmp_path / "cache")}
    asked_policy = len(server.requests)
    for name in ("first", "again"):
        assert evaluate(name, **kept) == 1.0
        assert judge.asked == 2  # one question asked twice has two answers
    assert len(server.requests) - asked_policy == 2  # the measured model is always asked
    assert evaluate("without") == 1.0
    assert judge.asked == 4
