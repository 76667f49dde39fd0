"""The contract: what means the same is accepted; judges; AgentScope's own functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from user_code import HEADER, TYPE_CHECKING_ONLY, cured, load, name_of

from aflow_tune.contract.signature import check_functions, check_judge, check_workflow
from aflow_tune.errors import BadInput

ACCEPTED = {
    "the contract": "async def f(task: Dict, model: TrinityChatModel) -> float: ...",
    "builtin dict": "async def f(task: dict, model: TrinityChatModel) -> float: ...",
    "dict of any": "async def f(task: Dict[str, Any], model: TrinityChatModel) -> float: ...",
    "dict of object": "async def f(task: dict[str, object], model: TrinityChatModel) -> float: ...",
    "dict of str": "async def f(task: dict[str, str], model: TrinityChatModel) -> float: ...",
    "Mapping": "async def f(task: Mapping, model: TrinityChatModel) -> float: ...",
    "Mapping of any": "async def f(task: Mapping[str, Any], model: TrinityChatModel) -> float: ...",
    "typing.Mapping": "async def f(task: typing.Mapping[str, Any], model: Any) -> float: ...",
    "MutableMapping": "async def f(task: MutableMapping[str, Any], model: Any) -> float: ...",
    "alias": "async def f(task: TaskRow, model: TrinityChatModel) -> float: ...",
    "alias as text": "async def f(task: 'TaskRow', model: TrinityChatModel) -> float: ...",
    "NewType": "async def f(task: NamedTask, model: TrinityChatModel) -> float: ...",
    "TypedDict": "async def f(task: Row, model: TrinityChatModel) -> float: ...",
    "Annotated": "async def f(task: Annotated[dict, 'row'], model: "
    "'Annotated[M, 1]') -> float: ...",
    "optional task": "async def f(task: dict | None, model: Optional[ChatModelBase]) -> float: ...",
    "text": "async def f(task: 'Dict[str, Any]', model: 'TrinityChatModel') -> 'float': ...",
    "text in text": "async def f(task: \"'Dict'\", model: "
    "'Optional[\"ChatModelBase\"]') -> float: ...",
    "forward reference": "async def f(task: Optional['Dict'], model: 'Later') -> float: ...\n"
    "class Later(TrinityChatModel): ...\nLater = TrinityChatModel",
    "base class": "async def f(task: Dict, model: ChatModelBase) -> float: ...",
    "other base": "async def f(task: Dict, model: OpenAIChatModel) -> float: ...",
    "union of models": "async def f(task: Dict, model: DashScopeChatModel | "
    "OpenAIChatModel) -> float: ...",
    "text union": "async def f(task: Dict, model: 'Nowhere | OpenAIChatModel') -> float: ...",
    "type variable": "async def f(task: Dict, model: M) -> float: ...",
    "protocol": "async def f(task: Dict, model: Model) -> float: ...",
    "callable": "async def f(task: Dict, model: Callable[..., Awaitable[Any]]) -> float: ...",
    "Any": "async def f(task: Any, model: Any) -> float: ...",
    "base of all": "async def f(task: object, model: object) -> float: ...",
    "keyword only": "async def f(*, task: Dict, model: TrinityChatModel) -> float: ...",
    "other order": "async def f(model: TrinityChatModel, task: Dict) -> float: ...",
    "defaults": "async def f(task: Dict = {}, model: TrinityChatModel = None) -> float: ...",
    "real": "async def f(task: Dict, model: TrinityChatModel) -> Real: ...",
    "all options": "async def f(task: Dict, model: OpenAIChatModel, system_prompt: str, "
    "auxiliary_models: Dict[str, OpenAIChatModel] | None = None, "
    "logger: logging.Logger | None = None) -> float: ...",
    "method": "class A:\n    async def go(self, task: Dict, model: OpenAIChatModel) -> float: ...\n"
    "given = A().go",
    "class method": "class A:\n    @classmethod\n"
    "    async def go(cls, task: Dict, model: OpenAIChatModel) -> float: ...\ngiven = A.go",
    "static method": "class A:\n    @staticmethod\n"
    "    async def go(task: Dict, model: OpenAIChatModel) -> float: ...\ngiven = A.go",
    "object": "class A:\n"
    "    async def __call__(self, task: Dict, model: OpenAIChatModel) -> float: ...\ngiven = A()",
    "object with __slots__": "class A:\n    __slots__ = ()\n"
    "    async def __call__(self, task: Dict, model: OpenAIChatModel) -> float: ...\ngiven = A()",
    "partial by name": "async def f(task: Dict, model: OpenAIChatModel, tools: "
    "list) -> float: ...\n"
    "given = functools.partial(f, tools=[])",
    "partial by position": "async def f(tools: list, task: Dict, model: Any) -> float: ...\n"
    "given = functools.partial(f, [])",
    "partial of partial": "async def f(a, task: Dict, model: Any, b) -> float: ...\n"
    "given = functools.partial(functools.partial(f, 1), b=2)",
    "partial of method": "class A:\n"
    "    async def go(self, task: Dict, model: OpenAIChatModel, k: int) -> float: ...\n"
    "given = functools.partial(A().go, k=1)",
    "partial of object": "class A:\n"
    "    async def __call__(self, task: Dict, model: OpenAIChatModel, k: int) -> float: ...\n"
    "given = functools.partial(A(), k=1)",
    "wraps": "def d(g):\n    @functools.wraps(g)\n    async def w(*a, **k):\n"
    "        return await g(*a, **k)\n    return w\n"
    "@d\nasync def f(task: Dict, model: TrinityChatModel) -> float: ...",
    "wraps, passing the coroutine on": "def d(g):\n    @functools.wraps(g)\n    def w(*a, **k):\n"
    "        return g(*a, **k)\n    return w\n"
    "@d\n@d\nasync def f(task: Dict, model: TrinityChatModel) -> float: ...",
    "decorator class": "class d:\n    def __init__(self, g):\n        "
    "functools.update_wrapper(self, g)\n"
    "        self.g = g\n    def __call__(self, *a, **k):\n        return self.g(*a, **k)\n"
    "@d\nasync def f(task: Dict, model: TrinityChatModel) -> float: ...",
    "our decorators": "from aflow_tune import caller, workflow\n@workflow(name='n')\n@caller('c')\n"
    "async def f(task: Dict, model: TrinityChatModel) -> float: ...",
    "local": "def make(n):\n    async def flow(task: Dict, model: Any) -> "
    "float:\n        return n\n"
    "    return flow\ngiven = make(1)",
}
ACCEPTED_OUTPUT = {
    "ours": "async def f(task: Dict, model: OpenAIChatModel) -> WorkflowOutput: ...",
    "text": "async def f(task: Dict, model: OpenAIChatModel) -> 'WorkflowOutput': ...",
    "by fields": "async def f(task: Dict, model: OpenAIChatModel) -> OwnOutput: ...",
    "by inherited fields": "async def f(task: Dict, model: OpenAIChatModel) -> Richer: ...",
    "by spelling": "async def f(task: Dict, model: OpenAIChatModel) -> 'tuner.WorkflowOutput': ...",
    "options": "async def f(task: Dict, model: OpenAIChatModel, "
    "auxiliary_models: Optional[Dict[str, ChatModelBase]] = None, logger=None, "
    "system_prompt: str = '') -> WorkflowOutput: ...",
}


@pytest.mark.parametrize("future", [False, True], ids=["objects", "texts"])
@pytest.mark.parametrize("source", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted(tmp_path: Path, source: str, future: bool) -> None:
    top = "from __future__ import annotations\n" if future else ""
    contract = check_workflow(name_of(load(tmp_path, top + HEADER + source)))
    assert contract.returns == "float"


@pytest.mark.parametrize("future", [False, True], ids=["objects", "texts"])
@pytest.mark.parametrize("source", ACCEPTED_OUTPUT.values(), ids=ACCEPTED_OUTPUT.keys())
def test_accepted_with_an_output(tmp_path: Path, source: str, future: bool) -> None:
    top = "from __future__ import annotations\n" if future else ""
    contract = check_workflow(name_of(load(tmp_path, top + HEADER + source)))
    assert contract.returns == "WorkflowOutput"


def test_what_the_contract_says(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        HEADER + "from aflow_tune import caller\n\n"
        "@caller(\n    'x',\n)\nasync def f(\n    task: Dict,\n"
        "    model: Any,\n    logger=None,\n    auxiliary_models=None,\n) -> WorkflowOutput: ...\n",
    )
    contract = check_workflow(module.f)
    assert contract.name == "f"
    assert contract.file == module.__file__
    source = Path(contract.file).read_text().splitlines()
    assert source[contract.line - 1] == "async def f("
    assert contract.optional == ("logger", "auxiliary_models")


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ("async def f(task: Dict, model: TrinityChatModel) -> float: ...", "float"),
        ("async def f(task: Dict[str, Any], model: Chat) -> float: ...", "float"),
        ("async def f(task: Task, model: am.ChatModelBase) -> float: ...", "float"),
        ("async def f(task: Dict | None, model: Chat | None) -> Output: ...", "WorkflowOutput"),
        (
            "async def f(task: Dict['str', Any], model: typing.Optional[Chat]) -> Output: ...",
            "WorkflowOutput",
        ),
        (
            "async def f(task: typing.Annotated[Task, 'x'], "
            "model: typing.Union[Chat, int]) -> float: ...",
            "float",
        ),
    ],
)
def test_names_for_type_checkers_are_compared_by_spelling(
    tmp_path: Path, line: str, form: str
) -> None:
    assert check_workflow(load(tmp_path, TYPE_CHECKING_ONLY + line).f).returns == form


JUDGES = [
    "async def f(task: Dict, response: Any) -> JudgeOutput: ...",
    "async def f(task: Dict, response: str, auxiliary_models: dict | None) -> JudgeOutput: ...",
    "async def f(response, task: Dict, logger=None) -> 'JudgeOutput': ...",
]


@pytest.mark.parametrize("source", JUDGES)
def test_judges(tmp_path: Path, source: str) -> None:
    contract = check_judge(load(tmp_path, HEADER + source).f)
    assert set(contract.optional) <= {"auxiliary_models", "logger"}
    assert contract.name == "f"


REFUSED_JUDGES: list[tuple[str, list[str]]] = [
    ("def f(task: Dict, response: Any) -> JudgeOutput:", ["a sync function"]),
    ("async def f(task: Dict, answer: Any) -> JudgeOutput:", ["`answer` in its place"]),
    ("async def f(response: Any) -> JudgeOutput:", ["a parameter `task`"]),
    ("async def f(task: str, response: Any) -> JudgeOutput:", ["`task: str`"]),
    ("async def f(task: Dict, response: Any) -> float:", ["`-> JudgeOutput`|`-> float`"]),
    ("async def f(task: Dict, response: Any) -> OwnOutput:", ["what a workflow returns"]),
    ("async def f(task: Dict, response: Any):", ["no return annotation"]),
    (
        "async def f(task: Dict, response: Any, system_prompt: str) -> JudgeOutput:",
        ["an extra parameter `system_prompt`"],
    ),
    ("async def f(task: Dict, response: Any, **k) -> JudgeOutput:", ["`**k`"]),
]


@pytest.mark.parametrize(("source", "phrases"), REFUSED_JUDGES)
def test_refused_judges(tmp_path: Path, source: str, phrases: list[str]) -> None:
    module = load(tmp_path, f"{HEADER}{source}\n    return 1\n")
    with pytest.raises(BadInput) as caught:
        check_judge(module.f)
    assert "contract of a judge" in caught.value.title
    cured(tmp_path, module, caught.value, phrases, check_judge)


def test_workflow_and_judge_together(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        HEADER + "async def reward(task: Dict, model: Any, k: int = 1) -> float: ...\n"
        "async def output(task: Dict, model: TrinityChatModel) -> WorkflowOutput: ...\n"
        "async def plain(task: Dict, model: TrinityChatModel) -> float: ...\n"
        "async def judge(task: Dict, response: Any) -> JudgeOutput: ...\n"
        "async def wrong(task: Dict, answer: Any) -> JudgeOutput: ...\n",
    )
    workflow, judge = check_functions(module.output, module.judge)
    assert (workflow.returns, judge and judge.name) == ("WorkflowOutput", "judge")
    assert check_functions(module.output)[1] is None
    assert check_functions(module.plain)[0].returns == "float"
    with pytest.raises(BadInput) as both:
        check_functions(module.reward, module.wrong)
    assert len(both.value.faults) == 2
    with pytest.raises(BadInput) as unused:
        check_functions(module.plain, module.judge)
    (fault,) = unused.value.faults
    assert "plain returns float, so the judge `judge` would never be called" in fault.found
    line = "async def plain(task: Dict, model: TrinityChatModel) -> WorkflowOutput:"
    assert fault.cure.endswith(line)


AGENTSCOPE_DOCS = """\
from typing import Any, Dict, Optional
from agentscope.model import ChatModelBase, OpenAIChatModel, TrinityChatModel
from agentscope.message import Msg
from aflow_tune import JudgeOutput, WorkflowOutput


async def tuner_example(
    task: Dict,
    model: OpenAIChatModel,
    auxiliary_models: Dict[str, OpenAIChatModel] | None = None,
) -> WorkflowOutput:
    return WorkflowOutput(response=None)


async def gsm8k_judge(
    task: Dict,
    response: Msg,
    auxiliary_models: Dict[str, OpenAIChatModel] | None = None,
) -> JudgeOutput:
    return JudgeOutput(reward=1.0)


async def first_tuner(task: Dict, model: TrinityChatModel) -> float:
    return 1.0


async def tutorial(
    task: Dict,
    model: ChatModelBase,
    auxiliary_models: Optional[Dict[str, ChatModelBase]] = None,
) -> WorkflowOutput:
    return WorkflowOutput(response=None)


async def tutorial_judge(
    task: Dict,
    response: Any,
    auxiliary_models: Optional[Dict[str, ChatModelBase]] = None,
) -> JudgeOutput:
    return JudgeOutput(reward=1.0)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_signatures_of_agentscopes_documentation(tmp_path: Path) -> None:
    module = load(tmp_path, AGENTSCOPE_DOCS)
    workflow, judge = check_functions(module.tuner_example, module.gsm8k_judge)
    assert (workflow.returns, workflow.optional) == ("WorkflowOutput", ("auxiliary_models",))
    assert judge is not None
    assert judge.optional == ("auxiliary_models",)
    assert check_workflow(module.first_tuner).returns == "float"
    assert check_functions(module.tutorial, module.tutorial_judge)[0].returns == "WorkflowOutput"


def test_agentscopes_result_types_are_known_by_their_fields(tmp_path: Path) -> None:
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


def test_numpy_floats_are_floats() -> None:
    import numpy as np

    async def flow(task: dict, model: Any) -> np.float64:
        return np.float64(1)

    assert check_workflow(flow).returns == "float"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, aflow_tune.context\n"
        "import aflow_tune.contract.signature, aflow_tune.contract.plugins\n"
        "heavy = {'torch', 'ray', 'trinity', 'agentscope', 'numpy', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
