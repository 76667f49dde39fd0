"""The contract of workflows and judges: what is accepted, each fault, the line that mends it."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from user_code import HEADER, TYPE_CHECKING_ONLY, cured, load, name_of

from aflow_tune.contract.signature import check_functions, check_judge, check_workflow
from aflow_tune.errors import BadInput

FUTURE = "from __future__ import annotations\n"


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
GIVEN = "task: Dict, model: OpenAIChatModel"
ACCEPTED = {
    **{f"task: {task}": f"async def f(task: {task}, model: Any) -> float: ..." for task in TASKS},
    **{f"model: {one}": f"async def f(task: Dict, model: {one}) -> float: ..." for one in MODELS},
    "returns text": f"async def f({GIVEN}) -> 'float': ...",
    "subclass of float": f"async def f({GIVEN}) -> Real: ...",
    "keyword only": f"async def f(*, {GIVEN}) -> float: ...",
    "other order": "async def f(model: TrinityChatModel, task: Dict) -> float: ...",
    "defaults": "async def f(task: Dict = {}, model: TrinityChatModel = None) -> float: ...",
    "all options": f"async def f({GIVEN}, system_prompt: str, "
    "auxiliary_models: Dict[str, OpenAIChatModel] | None = None, "
    "logger: logging.Logger | None = None) -> float: ...",
    "method": f"class A:\n    async def go(self, {GIVEN}) -> float: ...\ngiven = A().go",
    "class method": "class A:\n    @classmethod\n"
    f"    async def go(cls, {GIVEN}) -> float: ...\ngiven = A.go",
    "static method": "class A:\n    @staticmethod\n"
    f"    async def go({GIVEN}) -> float: ...\ngiven = A.go",
    "object": "class A:\n    __slots__ = ()\n"
    f"    async def __call__(self, {GIVEN}) -> float: ...\ngiven = A()",
    "partial by name": f"async def f({GIVEN}, tools: list) -> float: ...\n"
    "given = functools.partial(f, tools=[])",
    "partial of partial": "async def f(a, task: Dict, model: Any, b) -> float: ...\n"
    "given = functools.partial(functools.partial(f, 1), b=2)",
    "partial of object": f"class A:\n    async def __call__(self, {GIVEN}, k: int) -> float: ...\n"
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


GOOD = "task: Dict, model: TrinityChatModel"
REFUSED_LINES = r"""
async def f(model: TrinityChatModel) -> float:
    a parameter `task`|only `model`
async def f(task: Dict, logger=None) -> float:
    a parameter `model`|only `task`, `logger`
async def f(GOOD, tools: list) -> float:
    an extra parameter `tools`
async def f(GOOD, *, k: int) -> float:
    an extra parameter `k`
async def f(cfg, GOOD) -> float:
    an extra parameter `cfg`
async def f(task: Dict, llm: TrinityChatModel) -> float:
    a parameter named `model`|`llm` in its place
async def f(tasks: Dict, modle: TrinityChatModel) -> float:
    `tasks` in its place
    `modle` in its place
async def f(data: Dict, model: TrinityChatModel, k) -> float:
    `data` in its place
    an extra parameter `k`
async def f(item: str, model: TrinityChatModel) -> float:
    `item` in its place
    `item: str`
async def f(task: List[dict], model: TrinityChatModel) -> float:
    `task: List[dict]`
async def f(task: Dict[int, str], model: TrinityChatModel) -> float:
    `task: Dict[int, str]`
async def f(task: OrderedDict, model: TrinityChatModel) -> float:
    `task: OrderedDict`
async def f(task: Plain, model: TrinityChatModel) -> float:
    `task: Plain`
async def f(task: Dict, model: str) -> float:
    `model: str`
async def f(task: Dict, model: None) -> float:
    `model: None`
async def f(task: TrinityChatModel, model: Dict) -> float:
    `task: TrinityChatModel`
    `model: Dict`
async def f(GOOD, auxiliary_models: list, logger: str, system_prompt: int) -> float:
    `auxiliary_models: list`
    `logger: str`
    `system_prompt: int`
async def f(GOOD, *rest) -> float:
    parameters with names|`*rest`
async def f(GOOD, **options: Any) -> float:
    |`**options`
async def f(GOOD) -> str:
    `-> str`: another type
async def f(GOOD) -> int:
    `-> int`: a reward is a float
async def f(GOOD) -> None:
    `-> None`: a run without a reward
async def f(GOOD) -> Any:
    `-> Any`: it does not say which form
async def f(GOOD) -> float | None:
    it may be None
async def f(GOOD) -> float | WorkflowOutput:
    two forms
async def f(GOOD) -> int | float:
    a reward is a float
async def f(GOOD) -> Awaitable[float]:
    what awaiting it gives
async def f(GOOD) -> 'Coroutine[Any, Any, float]':
    what awaiting it gives
async def f(GOOD) -> tuple[float, dict]:
    another type
"""
"""Signatures, each followed by what is said of it."""


def refused() -> list[tuple[str, list[str]]]:
    cases: list[tuple[str, list[str]]] = []
    for line in REFUSED_LINES.strip().splitlines():
        if line.startswith(" "):
            cases[-1][1].append(line.strip())
        else:
            cases.append((line.replace("GOOD", GOOD).replace("\\n", "\n"), []))
    return cases


def refusal(folder: Path, header: str, source: str, phrases: list[str]) -> str:
    """Check that `f` is refused with these faults, then paste the line; it must pass."""
    module = load(folder, f"{header}{source}\n    return 1.0\n")
    with pytest.raises(BadInput) as caught:
        check_workflow(name_of(module))
    return cured(folder, module, caught.value, phrases, check_workflow)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "async def f(task: Dict[int, Any], model: Chat) -> float:\n    ...",
            "`task: Dict[int, Any]`",
        ),
        ("async def f(task: Chat, model: Chat) -> float:\n    ...", "`task: Chat`"),
        (
            "async def f(task: Dict, model: am.DashScopeChatModel) -> float:\n    ...",
            "defines no `DashScopeChatModel`",
        ),
        ("async def f(task: Dict, model: Unknown) -> float:\n    ...", "defines no `Unknown`"),
        (
            "async def f(task: Dict, model: Chat) -> Unknown:\n    ...",
            "`-> Unknown`: a name that the module does not define",
        ),
        ("async def f(task: Dict, model: Chat) -> Output | None:\n    ...", "may be None"),
        ("async def f(task: 'Dict[', model: Chat) -> float:\n    ...", "Dict["),
    ],
)
def test_unresolvable_names_are_refused_when_their_spelling_is_wrong(
    tmp_path: Path, line: str, found: str
) -> None:
    refusal(tmp_path, TYPE_CHECKING_ONLY, line, [found])


@pytest.mark.parametrize("future", [False, True], ids=["objects", "texts"])
@pytest.mark.parametrize(("source", "phrases"), refused())
def test_refused_with_the_line_that_cures(
    tmp_path: Path, source: str, phrases: list[str], future: bool
) -> None:
    top = "from __future__ import annotations\n" if future else ""
    refusal(tmp_path, top + HEADER, source, phrases)


def test_the_line_uses_only_names_that_the_module_has(tmp_path: Path) -> None:
    phrases = ["sync", "`item` in its", "`item` without", "only `item`", "no return"]
    line = refusal(tmp_path, "", "def f(item):", phrases)
    assert line == 'async def f(task: dict, model: "TrinityChatModel") -> float:'


def test_the_form_is_guessed_from_what_is_returned(tmp_path: Path) -> None:
    source = (
        "from aflow_tune import WorkflowOutput as Out\n"
        "async def f(task: dict, model: object):\n    return types.WorkflowOutput(response=1)\n"
    )
    module = load(tmp_path, source)
    with pytest.raises(BadInput) as caught:
        check_workflow(module.f)
    assert caught.value.faults[0].cure.endswith(
        'async def f(task: dict, model: object) -> "WorkflowOutput":'
    )


REFUSED_OBJECTS: dict[str, tuple[str, list[str]]] = {
    "method": (
        "class A:\n    async def go(self, item: Dict, model: Any) -> float:\n        return 1.0\n"
        "given = A().go",
        ["`item` in its place"],
    ),
    "object": (
        "class A:\n    def __call__(self, task: Dict, model: Any) -> float:\n        return 1.0\n"
        "given = A()",
        ["a sync function: `A.__call__`"],
    ),
    "partial": (
        "async def f(cfg: int, task: str, model: Any, k: int) -> float:\n    return 1.0\n"
        "given = functools.partial(f, 1, k=2)",
        ["`task: str`"],
    ),
    "partial that misses one": (
        "async def f(task: Dict, model: Any, k: int, j: int) -> float:\n    return 1.0\n"
        "given = functools.partial(f, k=2)",
        ["an extra parameter `j`"],
    ),
    "wraps": (
        "def d(g):\n    @functools.wraps(g)\n    async def w(*a, **k):\n        return await g()\n"
        "    return w\n@d\n@d\nasync def f(task: Dict, llm: Any) -> float:\n    return 1.0",
        ["`llm` in its place"],
    ),
    "wrapper without wraps": (
        "def d(g):\n    async def w(*a, **k):\n        return await g()\n    return w\n"
        "@d\nasync def f(task: Dict, model: Any) -> float:\n    return 1.0",
        ["`*a`", "`**k`", "a parameter `task`", "a parameter `model`", "no return annotation"],
    ),
    "local class": (
        "def make():\n    class Local: ...\n    async def flow(task: Local, model: Any) -> float:\n"
        "        return 1.0\n    return flow\ngiven = make()",
        ["`task: Local`"],
    ),
}


@pytest.mark.parametrize(
    ("source", "phrases"), REFUSED_OBJECTS.values(), ids=REFUSED_OBJECTS.keys()
)
def test_refused_objects(tmp_path: Path, source: str, phrases: list[str]) -> None:
    module = load(tmp_path, f"{HEADER}{source}\n")
    with pytest.raises(BadInput) as caught:
        check_workflow(name_of(module))
    cured(tmp_path, module, caught.value, phrases, check_workflow)


def faults(function: Any, check: Callable[[Any], Any] = check_workflow) -> str:
    with pytest.raises(BadInput) as caught:
        check(function)
    assert len(caught.value.faults) >= 1
    return str(caught.value)


def test_a_decorator_that_runs_the_loop_makes_it_sync(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        HEADER + "def d(g):\n    @functools.wraps(g)\n    def w(*a, **k):\n"
        "        return asyncio.run(g(*a, **k))\n    return w\n"
        "@d\nasync def f(task: Dict, model: Any) -> float: ...\n",
    )
    assert "a sync function" in faults(module.f)


def test_a_bound_argument_is_not_left_free(tmp_path: Path) -> None:
    async def flow(task: dict, model: Any) -> float:
        return 1.0

    text = faults(functools.partial(flow, model=None))
    assert "`model` is bound by functools.partial" in text
    assert text.count("expected:") == 1


def test_unbound_method() -> None:
    class Agent:
        async def go(self, task: dict, model: Any) -> float:
            return 1.0

    text = faults(Agent.go)
    assert "a method without its object" in text
    assert "Agent(...).go" in text
    assert text.count("expected:") == 1
    check_workflow(Agent().go)


def test_lambda() -> None:
    text = faults(lambda task, model: 1.0)
    assert "a sync function: `<lambda>`" in text
    assert 'async def workflow(task: dict, model: "TrinityChatModel") -> float:' in text
    assert f"{__file__}:" in text


def test_a_coroutine_instead_of_its_function() -> None:
    async def flow(task: dict, model: Any) -> float:
        return 1.0

    assert "pass `flow` itself, without parentheses" in faults(flow({}, None))


@pytest.mark.parametrize("thing", [None, 3, "flows.py:solve", {"a": 1}, object()])
def test_things_that_cannot_be_called(thing: Any) -> None:
    assert f"found:    {type(thing).__name__}: " in faults(thing)


@pytest.mark.parametrize(
    "thing", [len, dict.get, "".join, functools.reduce, functools.partial(min, 1)]
)
def test_code_without_python_source(thing: Any) -> None:
    text = faults(thing)
    thing = getattr(thing, "func", thing)
    assert f"`{thing.__qualname__}`, which is built in" in text


def test_code_that_was_typed_into_a_prompt() -> None:
    namespace: dict[str, Any] = {}
    exec("def solve(item: str, model, k=1):\n    return 1.0", namespace)
    text = faults(namespace["solve"])
    assert "<string>:1: solve" in text
    assert 'async def solve(task: dict, model: "TrinityChatModel") -> float:' in text


class Answers:
    """An object that has every attribute."""

    def __getattr__(self, name: str) -> Any:
        return self

    async def __call__(self, task: dict, model: object) -> float:
        return 1.0


def test_objects_that_have_every_attribute() -> None:
    assert "hides its signature" in faults(Answers())


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
