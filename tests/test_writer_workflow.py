"""A writer's run: what is asked, run, scored, kept, and what no executor can do to it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from writer_samples import (
    NO_ANSWER,
    ONE,
    PROMPTS,
    RAISES,
    REFUSED,
    SOLVE,
    Ran,
    executing,
    graph,
    run,
    text,
    writer,
)

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.models import ScriptedModel
from aflow_tune.models.types import ModelError, ModelFailure, Reply, Usage
from aflow_tune.operators import OPERATORS, TestCases
from aflow_tune.scoring.rewards import Unscored
from aflow_tune.writer.prompting import KEEP
from aflow_tune.writer.results import ExecutorFailed, keeps

GARBAGE = "I do not know how to do this."


def answering(answer: str, prompt: int = 100, completion: int = 10, cost: float = 0.001) -> Reply:
    return Reply(text=answer, model="frozen", usage=Usage(prompt, completion), cost=cost)


def test_a_clean_run_is_scored_rewarded_and_kept() -> None:
    ran = run([text()], [answering("It is 3")])
    assert ran.error is None
    record = ran.record
    # efficiency is counted in tokens, for the script knows no price: 1 - 110 / 8192
    assert record["parts"]["correctness"] == 1.0
    assert record["parts"]["efficiency"] == pytest.approx(1 - 110 / 8192)
    assert record["parts"]["format"] == 1.0
    simplicity = (1 - record["seconds"] / 60 + 1 - 1 / 10) / 2
    assert record["parts"]["simplicity"] == pytest.approx(simplicity, abs=1e-4)
    total = 0.65 + 0.15 * record["parts"]["efficiency"] + 0.1 * record["parts"]["simplicity"] + 0.1
    assert ran.reward == pytest.approx(20 * (0.1 + 0.9 * total) - 10)
    plain: dict[str, Any] = {"problem": "What is 1+2?", "problem_type": "math", "turns": 1}
    plain |= {"text": text(), "prompts": PROMPTS, "form": "hybrid", "valid": True, "refusals": []}
    plain |= {"level": 0, "operators": {"Custom": 1}, "nodes": 1, "ending": "answered"}
    plain |= {"reason": "", "answer": "It is 3", "score": 1.0, "tokens": 110, "calls": 1}
    assert {name: record[name] for name in plain} == plain
    assert record["code"].strip() == ONE.strip()
    assert record["structure"]
    assert record["bound"]["model_calls"] == 1
    json.dumps(record)
    ones = "correct correct_clean strict published writer/valid writer/level_0 writer/nodes"
    wanted = dict.fromkeys([*ones.split(), "writer/turns", "writer/model_calls"], 1.0)
    wanted |= {f"writer/level_{level}": 0.0 for level in (1, 2, 3)}
    assert {name: ran.metrics[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    "early",
    [
        'if problem:\n    return "3"\n',
        # Its call fails for a reason of its own, or it does not wait for the executor.
        "try:\n    await self.solve(input=float('nan'))\nexcept Exception:\n    return \"3\"\n",
        "import asyncio\ntry:\n    await asyncio.wait_for(self.solve(input='stuck'), 0.01)\n"
        'except Exception:\n    return "3"\n',
    ],
)
def test_a_graph_that_answers_without_any_operator_has_not_answered(early: str) -> None:
    """Else an answer that the policy knew would earn the most, for nothing."""
    code = graph(early + 'found = await self.solve(input=problem)\nreturn found["response"]')

    async def reply(messages: Any) -> str:
        if "stuck" in str(messages):
            await asyncio.Event().wait()
        return "3"

    ran = run([text(code)], reply)
    assert ran.error is None
    assert (ran.record["refusals"], ran.record["level"]) == ([], 2)
    assert ran.record["outcome"] == "no_answer"
    assert ran.metrics["correct_clean"] == 0.0
    assert ran.reward is not None
    assert ran.reward < -8.8


LEVELS = [
    (text(), 0, "answered"),
    (text(ONE, solve=SOLVE, nobody="x"), 1, "refused"),
    (text(RAISES), 2, "raised"),
    (text(NO_ANSWER), 2, "no_answer"),
    (text(REFUSED), 3, "refused"),
    (GARBAGE, 3, "unreadable"),
]


@pytest.mark.parametrize(("written", "level", "outcome"), LEVELS)
def test_each_fallback_is_counted_and_earns_less_than_any_clean_run(
    written: str, level: int, outcome: str
) -> None:
    program = "<code>def solve():\n    return 3</code>"
    answers = lambda messages: program if "Python" in str(messages) else "3"  # noqa: E731
    ran = run([written], answers)
    assert ran.error is None
    assert ran.record["level"] == level
    assert ran.record["outcome"] == outcome
    assert ran.metrics[f"writer/level_{level}"] == 1.0
    assert ran.metrics["correct"] == 1.0
    assert ran.metrics["correct_clean"] == float(level == 0)
    assert ran.metrics["writer/valid"] == float(not ran.record["refusals"])
    assert ran.reward is not None
    wrong = run([text()], ["4"]).reward
    assert wrong is not None
    assert (ran.reward > wrong) if level == 0 else (ran.reward < -8.0 < wrong)


def test_a_score_function_of_the_users() -> None:
    async def later(task: Any, answer: Any) -> float:
        return 0.5 if answer == "a" and task["gold"] == "g" else 0.0

    row = {"text": "q", "gold": "g"}
    settings = {"benchmark": None, "problem": "text", "problem_type": "qa"}
    ran = run([text()], ["a"], row, score=later, **settings)
    assert (ran.metrics["correct"], ran.record["problem_type"]) == (0.5, "qa")
    for value in (3, float("nan"), None, "high"):
        ran = run([text()], ["a"], row, score=lambda task, answer, v=value: v, **settings)
        assert isinstance(ran.error, Unscored)
        assert ran.record["score"] is None  # what was written is kept all the same


def failing(failure: ModelFailure) -> ModelError:
    return ModelError(failure, "no")


@pytest.mark.parametrize("failure", list(ModelFailure))
def test_an_executor_that_never_answers_fails_the_run(failure: ModelFailure) -> None:
    ran = run([text()], lambda messages: failing(failure))
    assert isinstance(ran.error, ExecutorFailed)
    assert failure.value in str(ran.error)
    assert ran.record["score"] is None


def test_the_policy_sees_the_outcome_and_writes_again() -> None:
    policy = ScriptedModel([text(RAISES), text(), KEEP])
    executor = executing(lambda messages: "It is 3" if SOLVE in str(messages) else "4")
    ran = Ran(writer(clients={"executor": executor}, turns=3), policy)
    assert ran.error is None
    second, third = (ask.messages for ask in policy.asked[1:])
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"] == text(RAISES)
    told = second[2]["content"].split("\n")
    assert told[0].startswith("Your workflow failed: raised: graph_code/graph.py:8: ValueError: ")
    assert told[1].startswith("In its place a simpler workflow of the same operators ran")
    assert told[2] == "4"
    assert KEEP in told[-1]
    assert third[:3] == second
    assert third[4]["content"].startswith("Your workflow ran and answered:\nIt is 3\nIt made 1 ")
    assert (ran.record["turns"], ran.record["level"], ran.metrics["correct"]) == (3, 0, 1.0)


def test_nothing_of_the_gold_answer_or_the_score_is_told() -> None:
    row = {"question": "How many?", "answer": "Because of 4711 reasons.\n#### 4711"}
    for answer in ("4712", "4711"):
        policy = ScriptedModel([text(), text(RAISES), GARBAGE, KEEP])
        ran = Ran(
            writer(clients={"executor": executing(lambda _, a=answer: a)}, turns=4), policy, row
        )
        assert ran.error is None
        words = " ".join(str(m["content"]) for ask in policy.asked for m in ask.messages)
        assert ("4711" in words) == (answer == "4711")
        for secret in ("reasons", "score", "correct", "reward", "wrong", "right"):
            assert secret not in words.replace("of a task", ""), secret


@pytest.mark.parametrize(
    "reply", ["KEEP", ' {"keep": true} ', "keep.", '```json\n{"keep": true}\n```']
)
def test_a_graph_is_kept(reply: str) -> None:
    assert keeps(reply)
    executor = executing(["It is 3"])
    policy = ScriptedModel([text(), reply])
    ran = Ran(writer(clients={"executor": executor}, turns=3), policy)
    assert len(executor.asked) == 1
    assert len(policy.asked) == 2
    assert (ran.record["turns"], ran.record["text"], ran.metrics["correct"]) == (2, text(), 1.0)


def test_code_uses_the_entry_point_and_the_public_tests() -> None:
    code = graph(
        "draft = await self.write(problem=problem, entry_point=entry_point)\n"
        "checked = await self.test(problem=problem, solution=draft['response'], "
        "entry_point=entry_point)\n"
        "return checked['solution'] if checked['result'] else 'failed'",
        "self.write = operator.CustomCodeGenerate(self.llm)\nself.test = operator.Test(self.llm)",
    ).replace("__call__(self, problem)", "__call__(self, problem, entry_point)")
    operators = {name: OPERATORS[name] for name in ("CustomCodeGenerate", "Test")}
    seen = []

    def score(task: Any, answer: Any) -> float:
        seen.append(answer)
        return float("def" in answer)

    row = {"prompt": "def f(x): ...", "entry_point": "f"}
    for check, level in (("assert candidate(2) == 2", 0), ("assert candidate(2) == 3", 0)):
        cases = TestCases.of_rows([{"entry_point": "f", "test": [check]}])
        ran = run(
            [text(code, write="Write it.")],
            lambda _: "```python\ndef f(x):\n    return x\n```",
            row,
            operators=operators,
            benchmark=None,
            score=score,
            problem_type="code",
            test_cases=cases,
        )
        assert ran.error is None, ran.error
        assert ran.record["level"] == level, ran.record["refusals"]
    assert seen == ["def f(x):\n    return x", "failed"]
