"""What the policy is told: taught from the operators' declarations, within a small model's room."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import pytest

from aflow_tune.operators import OPERATORS, Operator, Prompt
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import read_written
from aflow_tune.writer.prompting import (
    PLACEHOLDERS,
    Turn,
    example_for,
    operator_line,
    policy_messages,
    template_faults,
)
from aflow_tune.writer.types import PROBLEM_TYPES, CheckLimits, WrittenForm

LIMITS = CheckLimits(model_calls=6)


def text_of(*names: str, kind: Any = "math", **more: Any) -> str:
    operators = {name: OPERATORS[name] for name in names or OPERATORS}
    asked = {"problem_type": kind, "limits": LIMITS, **more}
    (message,) = policy_messages("What is 1+2?", operators=operators, **asked)
    assert message["role"] == "user"
    return message["content"]


def test_it_says_operators_form_grammar_budget_and_last_the_problem() -> None:
    text = text_of("Custom", "Programmer", "ScEnsemble")
    assert '- Custom(input, instruction="") -> response (1 call). Follows an instruction' in text
    assert '- Programmer(problem, analysis="None") -> code, output (up to 3 calls).' in text
    assert '- ScEnsemble(solutions: list[str], problem="") -> response (1 call).' in text
    assert "Review" not in text
    assert "At most 6 model calls." in text
    assert "Type: math\nProblem:\nWhat is 1+2?" in text
    assert text.endswith("What is 1+2?")
    assert "entry_point" not in text
    code = text_of("CustomCodeGenerate", kind="code", entry_point="add")
    assert (
        "Define __call__(self, problem, entry_point); the answer is Python that defines add."
        in (code)
    )


def test_a_new_argument_of_an_operator_is_taught_without_a_change_here() -> None:
    class Shout(Operator):
        """Says it loudly."""

        asks: ClassVar = {"main": Prompt(needs=("text",), text="{text}")}
        returns: ClassVar = {"loud": "the text in capitals"}

        async def run(self, text: str) -> dict[str, str]:
            return {"loud": text.upper()}

    before = operator_line(Shout, LIMITS)
    assert before == "- Shout(text) -> loud (1 call). Says it loudly."

    async def run(self: Any, text: str, times: int = 2, marks: str = "!") -> dict[str, str]:
        return {"loud": text.upper()}

    grown = type("Shout", (Shout,), {"run": run, "__doc__": Shout.__doc__})
    after = operator_line(grown, LIMITS)
    assert after == '- Shout(text, times: int=2, marks="!") -> loud (1 call). Says it loudly.'


@pytest.mark.parametrize("kind", PROBLEM_TYPES)
def test_the_example_passes_the_check_with_whatever_is_allowed(kind: Any) -> None:
    shown = 0
    names = sorted(OPERATORS)
    for size in (1, 2, 3, len(names)):
        for chosen in combinations(names, size):
            allowed = {name: OPERATORS[name] for name in chosen}
            text = example_for(allowed, kind, LIMITS)
            if not text:
                continue
            shown += 1
            verdict = check_written(text, operators=allowed, problem_type=kind, limits=LIMITS)
            assert verdict.ok, (chosen, verdict.refusals)
            assert read_written(text).form is WrittenForm.HYBRID
            assert text in text_of(*chosen, kind=kind)
    assert shown > 50


def test_the_example_keeps_to_a_small_budget() -> None:
    allowed = {name: OPERATORS[name] for name in ("Programmer", "Custom")}
    one = CheckLimits(model_calls=1)
    text = example_for(allowed, "math", one)
    assert "operator.Custom" in text
    assert "Programmer" not in text
    only = {"Programmer": OPERATORS["Programmer"]}
    assert example_for(only, "math", one) == ""  # it may ask three times
    prompt = policy_messages("P", operators=only, problem_type="math", limits=one)[0]["content"]
    assert "{" not in prompt


def test_a_template_of_the_users_takes_the_place(tmp_path: Path) -> None:
    template = (
        "{{x}} {operators}\nBudget: {budget}\nWrite {entry_point}.\n{problem} [{problem_type}]"
    )
    text = text_of("Custom", template=template)
    line = '- Custom(input, instruction="") -> response (1 call). '
    line += "Follows an instruction on an input and returns the whole reply."
    assert text == f"{{x}} {line}\nBudget: At most 6 model calls.\nWhat is 1+2? [math]"
    assert "Write f." in text_of("Custom", template=template, entry_point="f")


def test_faults_of_a_template() -> None:
    whole = "\n".join(f"{{{name}}}" for name in PLACEHOLDERS)
    assert template_faults(whole, "writer.prompt") == []
    faults = template_faults("{operator} and {{problem}}", "writer.prompt")
    assert [(fault.expected, fault.found) for fault in faults] == [
        ("one of " + ", ".join(f"{{{name}}}" for name in PLACEHOLDERS), "{operator}"),
        ("a text with {problem}", "none"),
    ]
    assert faults[0].cure.startswith("did you mean {operators}?")


def test_earlier_turns_stand_behind_the_problem() -> None:
    earlier = [Turn("one", "it failed"), Turn("two", "it answered 4")]
    messages = policy_messages(
        "P",
        operators={"Custom": OPERATORS["Custom"]},
        problem_type="math",
        limits=LIMITS,
        earlier=earlier,
    )
    assert [message["role"] for message in messages] == ["user", *["assistant", "user"] * 2]
    assert [message["content"] for message in messages[1:]] == [
        "one",
        "it failed",
        "two",
        "it answered 4",
    ]
