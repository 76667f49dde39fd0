"""The contract: what means the same is accepted, everything else gets its own sentence."""

from __future__ import annotations

import functools
import typing
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Optional

import pytest
from agentscope.model import OpenAIChatModel, TrinityChatModel
from pydantic import BaseModel

from aflow_tune.errors import BadInput
from aflow_tune.signature import check_judge, check_workflow
from aflow_tune.types import JudgeOutput, WorkflowOutput

if TYPE_CHECKING:
    from logging import Logger

    from somewhere_else import NotInstalledModel  # type: ignore[import-not-found]


async def plain(task: Dict, model: TrinityChatModel) -> float: ...
async def subscripted(task: Dict[str, Any], model: TrinityChatModel) -> float: ...
async def builtin(task: dict[str, object], model: OpenAIChatModel) -> float: ...
async def mapping(task: Mapping, model: TrinityChatModel) -> float: ...
async def mutable(task: MutableMapping[str, Any], model: TrinityChatModel) -> float: ...
async def reordered(model: TrinityChatModel, task: Dict) -> float: ...
async def keyword_only(*, task: Dict, model: TrinityChatModel) -> float: ...
async def quoted(task: "Dict", model: "agentscope.model.TrinityChatModel") -> "float": ...  # noqa: F821
async def output(task: Dict, model: OpenAIChatModel) -> WorkflowOutput: ...
async def asks_for_all(
    task: Dict,
    model: OpenAIChatModel,
    auxiliary_models: Dict[str, OpenAIChatModel] | None = None,
    logger: Logger | None = None,
    system_prompt: str = "",
) -> WorkflowOutput: ...


class TheirOutput(BaseModel):
    reward: float | None = None
    response: Any = None
    metrics: dict[str, float] | None = None


@dataclass
class WithCall:
    scale: float = 1.0

    async def __call__(self, task: Dict, model: TrinityChatModel) -> float: ...

    async def method(self, task: Dict, model: TrinityChatModel) -> float: ...


async def theirs(task: Dict, model: TrinityChatModel) -> TheirOutput: ...
async def with_setting(task: Dict, model: TrinityChatModel, scale: float) -> float: ...


def decorated(function: Callable) -> Callable:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return wrapper


ACCEPTED = [
    plain,
    subscripted,
    builtin,
    mapping,
    mutable,
    reordered,
    keyword_only,
    quoted,
    output,
    theirs,
    asks_for_all,
    decorated(plain),
    decorated(decorated(output)),
    functools.partial(with_setting, scale=2.0),
    functools.partial(functools.partial(with_setting, scale=2.0)),
    WithCall(),
    WithCall().method,
]


@pytest.mark.parametrize("function", ACCEPTED, ids=lambda f: getattr(f, "__name__", repr(f)))
def test_what_means_the_same_is_accepted(function: Any) -> None:
    contract = check_workflow(function)
    assert contract.returns in ("float", "WorkflowOutput")
    assert contract.file == __file__


def test_the_contract_knows_form_and_optional_parameters() -> None:
    assert check_workflow(plain).returns == "float"
    contract = check_workflow(asks_for_all)
    assert contract.returns == "WorkflowOutput"
    assert contract.optional == ("auxiliary_models", "logger", "system_prompt")
    assert check_workflow(theirs).returns == "WorkflowOutput"


def sync(task: Dict, model: TrinityChatModel) -> float: ...
async def generator(task: Dict, model: TrinityChatModel) -> AsyncIterator[float]:
    yield 1.0
async def no_model(task: Dict) -> float: ...
async def no_parameters() -> float: ...
async def misnamed(task: Dict, llm: TrinityChatModel) -> float: ...
async def extra(task: Dict, model: TrinityChatModel, scale: float) -> float: ...
async def extra_with_default(task: Dict, model: TrinityChatModel, scale: float = 1) -> float: ...
async def wrong_task(task: str, model: TrinityChatModel) -> float: ...
async def wrong_model(task: Dict, model: int) -> float: ...
async def no_annotation(task, model: TrinityChatModel) -> float: ...  # type: ignore[no-untyped-def]
async def starred(task: Dict, model: TrinityChatModel, *rest: int) -> float: ...
async def double_starred(task: Dict, model: TrinityChatModel, **more: int) -> float: ...
async def no_return(task: Dict, model: TrinityChatModel): ...  # type: ignore[no-untyped-def]
async def returns_int(task: Dict, model: TrinityChatModel) -> int: ...
async def returns_bool(task: Dict, model: TrinityChatModel) -> bool: ...
async def returns_none(task: Dict, model: TrinityChatModel) -> None: ...
async def returns_optional(task: Dict, model: TrinityChatModel) -> Optional[float]: ...
async def unknown_model(task: Dict, model: NotInstalledModel) -> float: ...
async def positional_only(task: Dict, model: TrinityChatModel, /) -> float: ...


REFUSED = [
    (sync, "`async def`", "not async"),
    (generator, "returns once", "yields"),
    (no_model, "a parameter 'model'", "(task)"),
    (no_parameters, "a parameter 'task'", "()"),
    (misnamed, "a parameter named 'model'", "'llm'"),
    (extra, "no parameters but", "'scale'"),
    (extra_with_default, "no parameters but", "'scale'"),
    (wrong_task, "task: dict", "task: str"),
    (wrong_model, "model: TrinityChatModel", "model: int"),
    (no_annotation, "task annotated", "without an annotation"),
    (starred, "named parameters only", "*rest"),
    (double_starred, "named parameters only", "**more"),
    (no_return, "-> float or WorkflowOutput", "no return annotation"),
    (returns_int, "-> float or WorkflowOutput", "-> int"),
    (returns_bool, "-> float or WorkflowOutput", "-> bool"),
    (returns_none, "-> float or WorkflowOutput", "None"),
    (returns_optional, "-> float or WorkflowOutput", "float"),
    (unknown_model, "model: TrinityChatModel", "NotInstalledModel"),
    (positional_only, "given by name", "/"),
]


@pytest.mark.parametrize(("function", "expected", "found"), REFUSED)
def test_each_fault_has_a_sentence_of_its_own(function: Any, expected: str, found: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_workflow(function)
    line = function.__code__.co_firstlineno
    matching = [f for f in caught.value.faults if expected in f.expected and found in f.found]
    assert matching, str(caught.value)
    assert matching[0].where == f"{__file__}:{line}: {function.__name__}"


@pytest.mark.parametrize("function", [case[0] for case in REFUSED])
def test_the_corrected_line_passes_the_check(function: Any) -> None:
    with pytest.raises(BadInput) as caught:
        check_workflow(function)
    for fault in caught.value.faults:
        line = fault.cure.removeprefix("write: ")
        namespace: dict[str, Any] = {
            **vars(typing),
            "TrinityChatModel": TrinityChatModel,
            "WorkflowOutput": WorkflowOutput,
        }
        exec(f"{line} ...", namespace)
        check_workflow(namespace[function.__name__])


async def many_faults(task: str, llm: TrinityChatModel, *rest: int):  # type: ignore[no-untyped-def]
    ...


def test_all_faults_of_a_function_come_together() -> None:
    with pytest.raises(BadInput) as caught:
        check_workflow(many_faults)
    assert len(caught.value.faults) == 4


@pytest.mark.parametrize("thing", [None, 3, "module:function", len, dict, lambda task, model: 1.0])
def test_things_that_are_no_workflow_at_all(thing: Any) -> None:
    with pytest.raises(BadInput):
        check_workflow(thing)


async def judge(task: Dict, response: Any) -> JudgeOutput: ...
async def judge_with_models(
    task: Dict, response: str, auxiliary_models: Dict[str, OpenAIChatModel] | None = None
) -> JudgeOutput: ...
async def judge_of_float(task: Dict, response: Any) -> float: ...
async def judge_without_response(task: Dict, answer: Any) -> JudgeOutput: ...


def test_judges() -> None:
    assert check_judge(judge).returns == "JudgeOutput"
    assert check_judge(judge_with_models).optional == ("auxiliary_models",)
    for function in (judge_of_float, judge_without_response, plain):
        with pytest.raises(BadInput):
            check_judge(function)
