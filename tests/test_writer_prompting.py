"""What the policy is told: taught from the operators' declarations, within a small model's room."""

from __future__ import annotations

from typing import Any

from aflow_tune.operators import OPERATORS
from aflow_tune.writer.prompting import PLACEHOLDERS, policy_messages, template_faults
from aflow_tune.writer.types import CheckLimits

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


def test_faults_of_a_template() -> None:
    whole = "\n".join(f"{{{name}}}" for name in PLACEHOLDERS)
    assert template_faults(whole, "writer.prompt") == []
    faults = template_faults("{operator} and {{problem}}", "writer.prompt")
    assert [fault.found for fault in faults] == ["{operator}", "none"]
