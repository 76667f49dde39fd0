"""The contract of workflows and judges: what is accepted, each fault, the line that mends it."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from aflow_tune.contract.signature import JUDGE, check_function, check_functions
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
check_judge = functools.partial(check_function, contract=JUDGE)


def load(folder: Path, source: str) -> ModuleType:
    path = folder / f"user_{next(numbers)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def function_of(module: ModuleType) -> Any:
    return getattr(module, "given", None) or module.f


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
    __slots__ = ()
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
        checked = check_function(function_of(load(tmp_path, future + HEADER + source)))
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
        ("async def f(task: Dict, model: Unknown) -> float: ...", "defines no `Unknown`"),
        ("async def f(task: Dict, model: Chat) -> Unknown: ...", "defines no `Unknown`"),
        ("async def f(task: Dict, model: Chat) -> Output | None: ...", "Output | None"),
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
async def f(task: Dict, logger=None) -> float | a parameter `model`
async def f({GOOD}, tools: list) -> float | `tools`
async def f({GOOD}, *, k: int = 1) -> float | `k`
async def f(task: Dict, llm: TrinityChatModel) -> float | `llm` in its place
async def f(tasks: Dict, modle: TrinityChatModel) -> float | `tasks` in | `modle` in
async def f(data: Dict, model: TrinityChatModel, k) -> float | `data` in its place | `k`
async def f(item: str, model: TrinityChatModel) -> float | `item` in its place | `item: str`
async def f(task: List[dict], model: TrinityChatModel) -> float | List[dict]
async def f(task: Dict[int, str], model: TrinityChatModel) -> float | Dict[int, str]
async def f(task: OrderedDict, model: TrinityChatModel) -> float | OrderedDict
async def f(task: Dict, model: str) -> float | `model: str`
async def f(task: TrinityChatModel, model: Dict) -> float | `task: | `model:
async def f({GOOD}, auxiliary_models: list, logger: str, system_prompt: int) -> float | \
`auxiliary_models: list` | `logger: str` | `system_prompt: int`
async def f({GOOD}, *rest) -> float | `*rest`
async def f({GOOD}, **options: Any) -> float | `**options`
async def f({GOOD}, /) -> float | `task` is positional-only | `model` is positional-only
async def f({GOOD}) | no return annotation
async def f({GOOD}) -> str | `-> str`
async def f({GOOD}) -> bool | `-> bool`
async def f({GOOD}) -> None | `-> None`
async def f({GOOD}) -> Optional[float] | float
async def f({GOOD}) -> Union[float, WorkflowOutput] | WorkflowOutput
async def f({GOOD}) -> Half | Half
async def f({GOOD}) -> JudgeOutput | JudgeOutput
def f(item) | a sync function | `item` in its place | `model` | `item` without | no return
"""
REFUSED_JUDGES = """
def f(task: Dict, response: Any) -> JudgeOutput | a sync function
async def f(task: Dict, answer: Any) -> JudgeOutput | `answer` in its place
async def f(task: str, response: Any) -> JudgeOutput | `task: str`
async def f(task: Dict, response: Any) -> float | `-> float`
async def f(task: Dict, response: Any) -> OwnOutput | OwnOutput
async def f(task: Dict, response: Any, system_prompt: str) -> JudgeOutput | `system_prompt`
"""


@pytest.mark.parametrize("future", ["", FUTURE], ids=["objects", "texts"])
@pytest.mark.parametrize(
    ("check", "table"), [(check_function, REFUSED), (check_judge, REFUSED_JUDGES)]
)
def test_refused_with_a_line_that_passes(
    tmp_path: Path, check: Callable[[Any], Any], table: str, future: str
) -> None:
    header = f"{future}from typing import Union\n{HEADER}"
    for line in table.strip().splitlines():
        source, *phrases = line.split(" | ")
        module = load(tmp_path, f"{header}{source}:\n    return 1.0\n")
        faults = refusal(module.f, check).faults
        assert len(faults) == len(phrases), line
        for phrase, fault in zip(phrases, faults, strict=True):
            assert phrase in f"{fault.expected} | {fault.found}", line
            assert fault.where == f"{module.__file__}:{len(header.splitlines()) + 1}: f"
        (corrected,) = {fault.cure.rpartition("\n")[2].strip() for fault in faults}
        check(load(tmp_path, f"{header}{corrected} ...\n").f)


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
        (functools.partial(Agent().go, k=1, model=None), "`model` is bound"),
        (Agent(), "`Agent.__call__` has no `async`"),
        (Agent, "type: "),
        (lambda task, model: 1.0, "`<lambda>` has no `async`"),
        (len, "`len`, which is built in"),
        ("flows.py:solve", "str: "),
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


def test_result_types_of_others_are_known_by_their_fields(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        "from pydantic import BaseModel, Field\nfrom typing import Any, Dict\n"
        "class Result(BaseModel):\n    reward: float | None = Field(default=None)\n"
        "    response: Any | None = None\n    metrics: Dict[str, float] | None = None\n"
        "class Verdict(BaseModel):\n    reward: float\n    metrics: dict | None = None\n"
        "async def f(task: Dict, model: Any) -> Result: ...\n"
        "async def j(task: Dict, response) -> Verdict: ...\n",
    )
    assert check_functions(module.f, module.j)[0].returns == "WorkflowOutput"
