"""The contract of workflows and judges: what is accepted, and each fault."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from aflow_tune.contract.signature import JUDGE, WORKFLOW, check_function, check_functions
from aflow_tune.errors import BadInput

PROJECT = yaml.safe_load((Path(__file__).parent / "frozen" / "project.yaml").read_text())
HEADER: str = PROJECT["signatures.py"]
FUTURE = "from __future__ import annotations\n"
TYPE_CHECKING_ONLY = """\
from __future__ import annotations
import typing
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import agentscope.model as am
    from typing import Dict, Any
    from agentscope.model import OpenAIChatModel as Chat
    from agentscope.tuner import WorkflowOutput as Output
    Task = Dict[str, Any]
"""
numbers = itertools.count()


def load(folder: Path, source: str) -> Any:
    path = folder / f"user_{next(numbers)}.py"
    path.write_text(source)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the folder's time may be that of the file before
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(folder))


def refusal(function: Any, check: Callable[[Any], Any] = check_function) -> BadInput:
    with pytest.raises(BadInput) as caught:
        check(function)
    return caught.value


def several(text: str) -> list[str]:
    return text.split("; ")


TASKS = several(
    "Dict; dict; Dict[str, Any]; dict[str, object]; Mapping; TaskRow; Any; 'TaskRow'; Row; object"
    "; typing.Mapping[str, Any]; MutableMapping[str, Any]; NamedTask; Annotated[dict, 'row']"
    "; Optional[dict]; 'Dict[str, Any]'; \"'Dict'\"; Optional['Dict']"
)
MODELS = several(
    "TrinityChatModel; ChatModelBase; OpenAIChatModel; DashScopeChatModel | OpenAIChatModel; M; Any"
    "; Optional[ChatModelBase]; 'Annotated[M, 1]'; 'Optional[\"ChatModelBase\"]'; Model; object"
    "; 'Nowhere | OpenAIChatModel'; Callable[..., Awaitable[Any]]"
)
GOOD = "task: Dict, model: TrinityChatModel"
OBJECTS = f"""
class A:
    async def go(self, {GOOD}) -> float: ...
given = A().go

class A:
    async def __call__(self, {GOOD}) -> float: ...
given = A()

async def f(a, {GOOD}, b) -> float: ...
given = functools.partial(functools.partial(f, 1), b=2)

def d(g):
    @functools.wraps(g)
    def w(*a, **k):
        return g(*a, **k)
    return w
@d
@d
async def f({GOOD}) -> float: ...

from aflow_tune import caller, workflow
@workflow(name='n')
@caller('c')
async def f({GOOD}) -> float: ...

def make(n):
    async def flow({GOOD}) -> float: return n
    return flow
given = make(1)
"""
ACCEPTED = [
    *(f"async def f(task: {task}, model: Any) -> float: ..." for task in TASKS),
    *(f"async def f(task: Dict, model: {model}) -> float: ..." for model in MODELS),
    f"async def f({GOOD}) -> 'float': ...",
    f"async def f({GOOD}) -> Real: ...",
    f"async def f(*, {GOOD}) -> float: ...",
    "async def f(model: TrinityChatModel, task: Dict) -> float: ...",
    "async def f(task: Dict = {}, model: TrinityChatModel = None) -> float: ...",
    f"async def f({GOOD}, system_prompt: str, auxiliary_models: Dict[str, OpenAIChatModel] | None "
    "= None, logger: logging.Logger | None = None) -> float: ...",
    *OBJECTS.strip().split("\n\n"),
]
OUTPUTS = several("WorkflowOutput; 'WorkflowOutput'; OwnOutput; Richer; 'tuner.WorkflowOutput'")


@pytest.mark.parametrize("future", ["", FUTURE], ids=["objects", "texts"])
def test_accepted(tmp_path: Path, future: str) -> None:
    for source in ACCEPTED:
        module = load(tmp_path, future + HEADER + source)
        checked = check_function(getattr(module, "given", None) or module.f)
        assert checked.returns == "float", source
    for output in OUTPUTS:
        source = f"{future}{HEADER}async def f({GOOD}, logger=None) -> {output}: ..."
        assert check_function(load(tmp_path, source).f).returns == "WorkflowOutput", output


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ("async def f(task: Dict[str, Any], model: Chat) -> float: ...", "float"),
        ("async def f(task: Task, model: am.ChatModelBase) -> float: ...", "float"),
        ("async def f(task: Dict | None, model: Chat | None) -> Output: ...", "WorkflowOutput"),
        ("async def f(task: Dict, model: typing.Optional[Chat]) -> Output: ...", "WorkflowOutput"),
        ("async def f(task: Dict[int, Any], model: Chat) -> float: ...", "`task: Dict[int, Any]`"),
        ("async def f(task: Dict, model: Chat) -> Unknown: ...", "defines no `Unknown`"),
        ("async def f(task: 'Dict[', model: Chat) -> float: ...", "Dict["),
    ],
)
def test_names_for_type_checkers_are_compared_by_spelling(
    tmp_path: Path, line: str, form: str
) -> None:
    function = load(tmp_path, TYPE_CHECKING_ONLY + line).f
    if form in ("float", "WorkflowOutput"):
        assert check_function(function).returns == form
    else:
        (fault,) = refusal(function).faults
        assert form in fault.found


REFUSED = f"""
async def f(model: TrinityChatModel) -> float | a parameter `task`
async def f(tasks: Dict, modle: TrinityChatModel) -> float | `tasks` in | `modle` in
async def f(data: Dict, model: TrinityChatModel, k) -> float | `data` in its place | `k`
async def f(task: List[dict], model: TrinityChatModel) -> float | List[dict]
async def f(task: Dict[int, str], model: TrinityChatModel) -> float | Dict[int, str]
async def f(task: TrinityChatModel, model: Dict) -> float | `task: | `model:
async def f({GOOD}, auxiliary_models: list, logger: str, system_prompt: int) -> float | \
`auxiliary_models: list` | `logger: str` | `system_prompt: int`
async def f({GOOD}, *rest) -> float | `*rest`
async def f({GOOD}, /) -> float | `task` is positional-only | `model` is positional-only
async def f({GOOD}) | no return annotation
async def f({GOOD}) -> None | `-> None`
def f(item) | a sync function | `item` in its place | `model` | `item` without | no return
def judge(task: Dict, response: Any) -> JudgeOutput | a sync function
async def judge(task: str, answer: Any) -> JudgeOutput | `answer` in its place | `task: str`
async def judge(task: Dict, response: Any) -> float | `-> float`
async def judge(task: Dict, response: Any) -> OwnOutput | OwnOutput
async def judge(task: Dict, response: Any, system_prompt: str) -> JudgeOutput | `system_prompt`
"""


@pytest.mark.parametrize("future", ["", FUTURE], ids=["objects", "texts"])
def test_each_fault_is_told_at_the_line_of_the_function(tmp_path: Path, future: str) -> None:
    header = f"{future}{HEADER}"
    for line in REFUSED.strip().splitlines():
        source, *phrases = line.split(" | ")
        module = load(tmp_path, f"{header}{source}:\n    return 1.0\n")
        judge = getattr(module, "judge", None)
        contract = WORKFLOW if judge is None else JUDGE
        faults = refusal((judge or module.f, contract), lambda pair: check_function(*pair)).faults
        assert len(faults) == len(phrases), line
        for phrase, fault in zip(phrases, faults, strict=True):
            assert phrase in f"{fault.expected} | {fault.found}", line
            assert f"{module.__file__}:{len(header.splitlines()) + 1}: " in fault.where


class Agent:
    async def go(self, task: dict, model: Any, k: int = 1) -> float:
        return 1.0

    def __call__(self, task: dict, model: Any) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("thing", "found"),
    [
        (Agent.go, "`self`"),
        (Agent().go, "`k`"),
        (functools.partial(Agent().go, k=1, model=None), "`task`"),
        (Agent(), "`Agent.__call__` has no `async`"),
        (Agent, "type: "),
        (len, "`len`, which is built in"),
    ],
)
def test_objects_that_are_no_workflow(thing: Any, found: str) -> None:
    assert any(found in fault.found for fault in refusal(thing).faults)
    assert check_function(functools.partial(Agent().go, k=1)).returns == "float"


def test_workflow_and_judge_together(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        HEADER + "async def reward(task: Dict, model: Any, k: int = 1) -> float: ...\n"
        f"async def output({GOOD}) -> WorkflowOutput: ...\n"
        f"async def plain({GOOD}) -> float: ...\n"
        "async def judge(response, task: Dict, logger=None) -> 'JudgeOutput': ...\n"
        "async def wrong(task: Dict, answer: Any) -> JudgeOutput: ...\n",
    )
    workflow, judge = check_functions(module.output, module.judge)
    assert (workflow.returns, judge and judge.name) == ("WorkflowOutput", "judge")
    assert check_functions(module.plain)[0].returns == "float"
    both = refusal((module.reward, module.wrong), lambda pair: check_functions(*pair))
    assert len(both.faults) == 2
    unused = refusal((module.plain, module.judge), lambda pair: check_functions(*pair))
    assert "`judge` would never be called" in unused.faults[0].found
