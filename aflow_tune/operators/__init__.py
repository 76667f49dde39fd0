"""The operators that workflows are made of.

    review = Review(model, name="strict")
    verdict = await review(problem, solution)
    verdict["review_result"], verdict.outcome

The ten of AFlow, with its arguments and keys, and the base class for more. What a use returns
is an `OperatorResult`: a dict with the operator's keys and a typed outcome beside it.
"""

from aflow_tune.operators.asking import AnswerGenerate, Custom, CustomCodeGenerate, Format
from aflow_tune.operators.base import Operator
from aflow_tune.operators.ensembles import MdEnsemble, ScEnsemble
from aflow_tune.operators.fields import Field, Kind
from aflow_tune.operators.outcome import READ_OUTCOMES, OperatorResult, Outcome
from aflow_tune.operators.programmer import Programmer
from aflow_tune.operators.prompts import Prompt, use_prompts
from aflow_tune.operators.reading import Form
from aflow_tune.operators.registry import (
    OPERATORS,
    check_prompts,
    load_operators,
)
from aflow_tune.operators.reviewing import Review, Revise
from aflow_tune.operators.test_cases import TestCases, use_test_cases
from aflow_tune.operators.testing import Test

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
