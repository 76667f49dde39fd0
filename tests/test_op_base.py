"""What every operator does: attribution, outcomes, attempts, prompts' order, users' operators."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest

from aflow_tune.context import caller
from aflow_tune.errors import BadInput, BudgetReached
from aflow_tune.models import ModelError, ModelFailure, ScriptedModel
from aflow_tune.operators import (
    OPERATORS,
    AnswerGenerate,
    Custom,
    Field,
    Kind,
    Operator,
    OperatorResult,
    Outcome,
    Prompt,
    Review,
    check_prompts,
    load_operators,
    use_prompts,
)
from aflow_tune.operators.prompts import FORM_PROMPTS, shipped
from aflow_tune.trace import ModelCall, OperatorCall, Trace

GOOD = "<thought>t</thought><answer>42</answer>"
YES = "<review_result>yes</review_result>"


def run(work: Any) -> tuple[Any, Trace]:
    trace = Trace()

    async def traced() -> Any:
        with trace.activate():
            return await work

    return asyncio.run(traced()), trace


def only(trace: Trace) -> OperatorCall:
    (use,) = trace.of(OperatorCall)
    return use


def texts(model: ScriptedModel) -> list[str]:
    """The last message of every question."""
    return [str(ask.messages[-1]["content"]) for ask in model.asked]


def test_a_use_is_noted_with_its_operator_instance_outcome_and_attempts() -> None:
    async def work() -> OperatorResult:
        with caller("first"):
            return await AnswerGenerate(ScriptedModel([GOOD]), name="solver")("2 * 21?")

    result, trace = run(work())
    assert result == {"thought": "t", "answer": "42"}
    assert (result.outcome, result.reason, result.attempts, result.ok) == ("answered", "", 1, True)
    use = only(trace)
    assert (use.operator, use.instance, use.outcome) == ("AnswerGenerate", "solver", "answered")
    assert (use.attempts, use.seconds > 0) == (1, True)
    (call,) = trace.of(ModelCall)
    assert use.caller == call.caller == "first/AnswerGenerate.solver"
    assert trace.metrics()["operator/AnswerGenerate/answered"] == 1
    again = pickle.loads(pickle.dumps(result))
    assert (again, again.outcome, again.attempts) == (result, "answered", 1)


def test_what_cannot_be_read_is_asked_for_again_with_what_was_wrong() -> None:
    model = ScriptedModel(["x" * 100_000, "<thought>t</thought>", GOOD])
    result, trace = run(AnswerGenerate(model)("2 * 21?"))
    assert (result["answer"], result.outcome, result.attempts) == ("42", "repaired", 3)
    assert (only(trace).outcome, only(trace).attempts) == ("repaired", 3)
    second = model.asked[1].messages
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[0] == model.asked[0].messages[0]
    assert "[...]" in second[1]["content"]  # cut
    assert len(second[1]["content"]) < 5_000
    assert "there is no answer" in second[2]["content"]
    assert model.asked[2].messages[1]["content"] == "<thought>t</thought>"
    model = ScriptedModel(["", "\ud800", "<thought>half</thought>", GOOD])
    result, trace = run(AnswerGenerate(model)("2 * 21?"))
    assert (result, result.outcome) == ({"thought": "half", "answer": ""}, Outcome.UNREADABLE)
    assert (only(trace).outcome, only(trace).attempts) == ("unreadable", 3)
    for ask in model.asked:  # what goes back to the model can be sent
        assert all(message["content"].encode().strip() for message in ask.messages)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ModelError(ModelFailure.SERVER, "down"), "model_failed"),
        (BudgetReached("no more"), "stopped"),
        (asyncio.CancelledError("over"), "stopped"),
        (RuntimeError("a defect"), "raised"),
    ],
)
def test_failures_raise_and_are_noted(error: BaseException, outcome: str) -> None:
    async def fail(_: Any) -> str:
        raise error

    async def work() -> None:
        with pytest.raises(type(error)):
            await Review(ScriptedModel(fail))("p", "s")

    _, trace = run(work())
    assert only(trace).outcome == outcome
    assert str(error) in only(trace).reason


class Summarise(Operator):
    """Shortens a text.

    More about it.
    """

    fields = (Field("summary"), Field("words", Kind.INT, "how many words it has"))
    asks: ClassVar = {
        "main": Prompt(needs=("text",), may=("limit",), text="Shorten {text} to {limit}.")
    }

    async def run(self, text: str, limit: int = 10) -> dict[str, Any]:
        answer = await self.ask({"text": text, "limit": limit})
        return {"summary": answer["summary"].upper()}


def test_users_operators_need_a_prompt_fields_and_a_run() -> None:
    model = ScriptedModel(["<summary>short</summary><words>1</words>"])
    result, trace = run(Summarise(model)("a long text", limit=3))
    assert (result, result.outcome) == ({"summary": "SHORT"}, "answered")
    assert texts(model)[0].startswith("Shorten a long text to 3.")
    assert "<words>how many words it has (a whole number)</words>" in texts(model)[0]
    assert only(trace).operator == "Summarise"
    result, _ = run(Summarise(ScriptedModel(["no"] * 3))("a long text"))
    assert (result, result.outcome) == ({"summary": ""}, "unreadable")  # the worst of its answers
    with pytest.raises(TypeError, match="name it `run`"):
        type("Old", (Operator,), {"__call__": lambda self: None})
    with pytest.raises(TypeError, match="async def run"):
        type("Sync", (Operator,), {"run": lambda self: None})


def test_faults_of_the_arguments_come_together() -> None:
    wrong = {"main": "{problem} {what}", "mian": "x"}
    with pytest.raises(BadInput) as caught:
        Review(ScriptedModel([]), name="a/b", prompts=wrong, form="code", retries=-1)
    assert len(caught.value.faults) == 5
    text = str(caught.value)
    for word in ("`{solution}` is missing; unknown `{what}`", "did you mean `main`?", "xml, json"):
        assert word in text
    with pytest.raises(BadInput, match="cannot be used as a model"):
        Review(object())


def test_prompts_of_instance_run_and_operator_have_an_order() -> None:
    async def asked(**arguments: Any) -> str:
        model = ScriptedModel([YES])
        await Review(model, **arguments)("the problem", "the solution")
        return texts(model)[0].split("\n")[0]

    run_level = {"Review": "R {solution}", "Review.strict": {"main": "S {solution}"}}

    async def work() -> list[str]:
        own = await asked()
        with use_prompts(run_level):
            by_operator, by_instance = await asked(), await asked(name="strict")
            with use_prompts({"Review": "inner {solution}", "Custom": "{input}"}):
                assert await asked() == "inner the solution"
                assert await asked(name="strict") == by_instance
            by_argument = await asked(name="strict", prompts="A {solution} {problem}")
        return [own, by_operator, by_instance, by_argument, await asked()]

    (own, *rest, after), _ = run(work())
    assert rest == ["R the solution", "S the solution", "A the solution the problem"]
    assert own == after
    assert "examiner" in own


def test_forms_and_the_sentences_that_ask_for_them() -> None:
    model = ScriptedModel([YES] * 2 + ["nothing", YES])
    prompts = 'JSON: {"a": {"b": 1}} {{solution}} {solution} {form} END'
    run(Review(model, prompts=prompts)("p", "{problem} {form} {{x}} {0}"))
    first = texts(model)[0]
    assert first.startswith('JSON: {"a": {"b": 1}} {solution} {problem} {form} {{x}} {0} Write')
    assert first.endswith("END")
    run(Review(model)("p", "s"))
    assert texts(model)[1].rstrip().endswith("</feedback>")

    async def work() -> OperatorResult:
        with use_prompts({"forms": {"xml": "TAGS {fields}", "again": "AGAIN {fault}"}}):
            return await Review(model)("p", "s")

    run(work())
    assert "TAGS <review_result>" in texts(model)[2]
    assert texts(model)[3].startswith("AGAIN review_result is neither")
    model = ScriptedModel(['{"review_result": false, "feedback": "step 2"}'])
    result, _ = run(Review(model, form="json")("p", "s"))
    assert (result["review_result"], result.outcome) == (False, "answered")
    schema = model.asked[0].schema
    assert schema is not None
    assert schema["properties"]["review_result"]["type"] == "boolean"
    model = ScriptedModel(["all of it", "<response>of it</response>", "it"])
    modes = [("single_fill", "all of it"), ("xml_fill", "of it"), ("whatever", "it")]
    for mode, expected in modes:  # one that the fields cannot have is passed over
        assert run(Custom(model)("i", "do", mode=mode))[0] == {"response": expected}


def test_a_runs_prompts_are_checked_together() -> None:
    assert set(shipped()) == {*OPERATORS, "forms"}
    assert all(set(shipped()[name]) == set(OPERATORS[name].asks) for name in OPERATORS)
    assert set(shipped()["forms"]) == set(FORM_PROMPTS)
    check_prompts(shipped())
    check_prompts({"Review": "{solution}", "Review.strict": {"main": "{solution}"}})
    wrong = {"Reveiw": "{solution}", "Revise": "{solution}", "Custom": {"main": 7}, "Test": 3}
    with pytest.raises(BadInput) as caught:
        check_prompts({**wrong, "forms": {"yaml": "x"}})
    assert len(caught.value.faults) == 5
    assert "did you mean Review?" in str(caught.value)
    with pytest.raises(BadInput, match="is missing"), use_prompts({"Revise": "{solution}"}):
        run(OPERATORS["Revise"](ScriptedModel([]))("p", "s", "f"))


def test_operators_are_added_by_class_and_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from aflow_tune.operators import Custom\n\n\n"
        "class Shout(Custom):\n    '''Shouts.'''\n\n"
        "    async def run(self, input: str):\n"
        "        return {'response': (await self.ask({'input': input}))['response'].upper()}\n"
    )
    spec = f"{tmp_path}/mine.py:Shout"
    found = load_operators({"Shout": spec, "Summarise": Summarise})
    assert set(found) == set(load_operators([spec, Summarise])) == {"Shout", "Summarise"}
    check_prompts({"Shout": "{input}"}, operators=found)
    result = run(found["Shout"](ScriptedModel(["hey"]), prompts="{input}")("x"))[0]
    assert result == {"response": "HEY"}
    wrong = {"A": "no.such.module:Thing", "Path": Path, "Custom": Summarise, "Shorten": Summarise}
    with pytest.raises(BadInput) as caught:
        load_operators({**wrong, "Operator": Operator})
    assert len(caught.value.faults) == 5


def test_the_documentation_names_every_operator_outcome_and_runs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "operators.md").read_text(encoding="utf-8")
    assert all(f"\n| {name} | `(" in text for name in OPERATORS)
    assert all(f"`{outcome.value}`" in text for outcome in Outcome)
    first, own = (block.split("```")[0] for block in text.split("```python\n")[1:])
    space: dict[str, Any] = {}
    exec(first, space)
    exec(own, space)
    replies = ["<answer>41</answer>", "<review_result>No</review_result>"]
    model = ScriptedModel([*replies, "<solution>42</solution>"])
    assert run(space["solve"]({"question": "6 * 7?"}, model))[0] == "42"
    short = run(space["Summarise"](ScriptedModel(["<summary>s</summary>"]))("long"))[0]
    assert short == {"summary": "s"}
