"""The operators that workflows are made of.

    review = Review(model, name="strict")
    verdict = await review(problem, solution)
    verdict["review_result"], verdict.outcome

The ten of AFlow, with its arguments and keys, and the base class for more. What a use returns
is an `OperatorResult`: a dict with the operator's keys and a typed outcome beside it.
"""

from aflow_tune.operators.asking import (
    AnswerGenerate,
    Custom,
    CustomCodeGenerate,
    Format,
    MdEnsemble,
    Review,
    Revise,
    ScEnsemble,
)
from aflow_tune.operators.base import READ_OUTCOMES, Operator, OperatorResult, Outcome
from aflow_tune.operators.fields import Field, Form, Kind
from aflow_tune.operators.programs import Programmer, Test, TestCases, use_test_cases
from aflow_tune.operators.prompts import Prompt, use_prompts
from aflow_tune.operators.registry import OPERATORS, check_prompts, load_operators

__all__ = [
    "OPERATORS",
    "READ_OUTCOMES",
    "AnswerGenerate",
    "Custom",
    "CustomCodeGenerate",
    "Field",
    "Form",
    "Format",
    "Kind",
    "MdEnsemble",
    "Operator",
    "OperatorResult",
    "Outcome",
    "Programmer",
    "Prompt",
    "Review",
    "Revise",
    "ScEnsemble",
    "Test",
    "TestCases",
    "check_prompts",
    "load_operators",
    "use_prompts",
    "use_test_cases",
]
