"""The contract: what is accepted, what is refused and how, and that the cure cures."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aflow_tune.errors import BadInput
from aflow_tune.signature import check_functions, check_judge, check_workflow

HEADER = """\
import abc, asyncio, dataclasses, functools, logging, typing
from collections import OrderedDict
from collections.abc import (AsyncIterator, Awaitable, Callable, Coroutine, Mapping,
                             MutableMapping)
from typing import Annotated, Any, Dict, List, NewType, Optional, Protocol, TypedDict, TypeVar, Union
from aflow_tune.types import JudgeOutput, WorkflowOutput


class ChatModelBase: ...
class OpenAIChatModel(ChatModelBase): ...
class TrinityChatModel(OpenAIChatModel): ...
class DashScopeChatModel(ChatModelBase): ...
class Row(TypedDict):
    question: str
class Model(Protocol):
    async def __call__(self, messages: list) -> Any: ...
class Plain: ...
TaskRow = Dict[str, Any]
NamedTask = NewType("NamedTask", dict)
M = TypeVar("M", bound=ChatModelBase)
@dataclasses.dataclass
class OwnOutput:
    reward: float | None = None
    response: Any = None
    metrics: dict | None = None
class Richer(OwnOutput):
    extra: int = 0
class Half:
    reward: float
class Real(float): ...

"""
counter = itertools.count()


def load(folder: Path, source: str) -> ModuleType:
    path = folder / f"user_{next(counter)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def name_of(module: ModuleType) -> Any:
    return getattr(module, "given", None) or module.f


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
    "Annotated": "async def f(task: Annotated[dict, 'row'], model: 'Annotated[M, 1]') -> float: ...",
    "optional task": "async def f(task: dict | None, model: Optional[ChatModelBase]) -> float: ...",
    "text": "async def f(task: 'Dict[str, Any]', model: 'TrinityChatModel') -> 'float': ...",
    "text in text": "async def f(task: \"'Dict'\", model: 'Optional[\"ChatModelBase\"]') -> float: ...",
    "forward reference": "async def f(task: Optional['Dict'], model: 'Later') -> float: ...\n"
    "class Later(TrinityChatModel): ...\nLater = TrinityChatModel",
    "base class": "async def f(task: Dict, model: ChatModelBase) -> float: ...",
    "other base": "async def f(task: Dict, model: OpenAIChatModel) -> float: ...",
    "union of models": "async def f(task: Dict, model: DashScopeChatModel | OpenAIChatModel) -> float: ...",
    "text union": "async def f(task: Dict, model: 'Nowhere | OpenAIChatModel') -> float: ...",
    "type variable": "async def f(task: Dict, model: M) -> float: ...",
    "protocol": "async def f(task: Dict, model: Model) -> float: ...",
    "callable": "async def f(task: Dict, model: Callable[..., Awaitable[Any]]) -> float: ...",
    "no annotations": "async def f(task, model) -> float: ...",
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
    "partial by name": "async def f(task: Dict, model: OpenAIChatModel, tools: list) -> float: ...\n"
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
    "decorator class": "class d:\n    def __init__(self, g):\n        functools.update_wrapper(self, g)\n"
    "        self.g = g\n    def __call__(self, *a, **k):\n        return self.g(*a, **k)\n"
    "@d\nasync def f(task: Dict, model: TrinityChatModel) -> float: ...",
    "our decorators": "from aflow_tune import caller, workflow\n@workflow(name='n')\n@caller('c')\n"
    "async def f(task: Dict, model: TrinityChatModel) -> float: ...",
    "local": "def make(n):\n    async def flow(task: Dict, model: Any) -> float:\n        return n\n"
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
    assert contract.form == "float"


@pytest.mark.parametrize("future", [False, True], ids=["objects", "texts"])
@pytest.mark.parametrize("source", ACCEPTED_OUTPUT.values(), ids=ACCEPTED_OUTPUT.keys())
def test_accepted_with_an_output(tmp_path: Path, source: str, future: bool) -> None:
    top = "from __future__ import annotations\n" if future else ""
    contract = check_workflow(name_of(load(tmp_path, top + HEADER + source)))
    assert contract.form == "output"


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


TYPE_CHECKING_ONLY = """\
from __future__ import annotations
import typing
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import agentscope.model as am
    from typing import Dict, Any
    from agentscope.model import TrinityChatModel
    from agentscope.model import OpenAIChatModel as Chat
    from agentscope.tuner import WorkflowOutput as Output
    Task = Dict[str, Any]
"""


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ("async def f(task: Dict, model: TrinityChatModel) -> float: ...", "float"),
        ("async def f(task: Dict[str, Any], model: Chat) -> float: ...", "float"),
        ("async def f(task: Task, model: am.ChatModelBase) -> float: ...", "float"),
        ("async def f(task: Dict | None, model: Chat | None) -> Output: ...", "output"),
        (
            "async def f(task: Dict['str', Any], model: typing.Optional[Chat]) -> Output: ...",
            "output",
        ),
        (
            "async def f(task: typing.Annotated[Task, 'x'], model: typing.Union[Chat, int]) -> float: ...",
            "float",
        ),
    ],
)
def test_names_for_type_checkers_are_compared_by_spelling(
    tmp_path: Path, line: str, form: str
) -> None:
    assert check_workflow(load(tmp_path, TYPE_CHECKING_ONLY + line).f).form == form


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


GOOD = "task: Dict, model: TrinityChatModel"
REFUSED: dict[str, tuple[str, list[str]]] = {
    "sync": (f"def f({GOOD}) -> float:", ["a sync function: `f` has no `async` before `def`"]),
    "missing model": ("async def f(task: Dict) -> float:", ["a parameter `model`|only `task`"]),
    "missing task": (
        "async def f(model: TrinityChatModel) -> float:",
        ["a parameter `task`|only `model`"],
    ),
    "missing both": (
        "async def f() -> float:",
        ["a parameter `task`|only no parameters", "a parameter `model`|only no parameters"],
    ),
    "missing, with an option": (
        "async def f(task: Dict, logger=None) -> float:",
        ["a parameter `model`|only `task`, `logger`"],
    ),
    "extra": (f"async def f({GOOD}, tools: list) -> float:", ["an extra parameter `tools`"]),
    "extra with default": (
        f"async def f({GOOD}, k: int = 3) -> float:",
        ["an extra parameter `k` (its default does not help)"],
    ),
    "extra, keyword only": (
        f"async def f({GOOD}, *, k: int) -> float:",
        ["an extra parameter `k`"],
    ),
    "extra in front": (f"async def f(cfg, {GOOD}) -> float:", ["an extra parameter `cfg`"]),
    "two extras": (
        f"async def f({GOOD}, a, b) -> float:",
        ["an extra parameter `a`", "an extra parameter `b`"],
    ),
    "misnamed task": (
        "async def f(item: Dict, model: TrinityChatModel) -> float:",
        ["a parameter named `task`|`item` in its place"],
    ),
    "misnamed model": (
        "async def f(task: Dict, llm: TrinityChatModel) -> float:",
        ["a parameter named `model`|`llm` in its place"],
    ),
    "both misnamed": (
        "async def f(tasks: Dict, modle: TrinityChatModel) -> float:",
        ["`tasks` in its place", "`modle` in its place"],
    ),
    "swapped and misspelt": (
        "async def f(modell: TrinityChatModel, tsk: Dict) -> float:",
        ["`tsk` in its place", "`modell` in its place"],
    ),
    "misnamed and extra": (
        "async def f(data: Dict, model: TrinityChatModel, k) -> float:",
        ["`data` in its place", "an extra parameter `k`"],
    ),
    "misnamed and mistyped": (
        "async def f(item: str, model: TrinityChatModel) -> float:",
        ["`item` in its place", "`item: str`"],
    ),
    "task is a text": (
        "async def f(task: str, model: TrinityChatModel) -> float:",
        ["`task` of type Dict|`task: str`"],
    ),
    "task is a list": (
        "async def f(task: List[dict], model: TrinityChatModel) -> float:",
        ["`task: List[dict]`"],
    ),
    "task with numbered columns": (
        "async def f(task: Dict[int, str], model: TrinityChatModel) -> float:",
        ["`task: Dict[int, str]`"],
    ),
    "another mapping": (
        "async def f(task: OrderedDict, model: TrinityChatModel) -> float:",
        ["`task: OrderedDict`"],
    ),
    "a class of the user": (
        "async def f(task: Plain, model: TrinityChatModel) -> float:",
        ["`task: Plain`"],
    ),
    "model is a text": ("async def f(task: Dict, model: str) -> float:", ["`model: str`"]),
    "model is None": ("async def f(task: Dict, model: None) -> float:", ["`model: None`"]),
    "another model": (
        "async def f(task: Dict, model: DashScopeChatModel) -> float:",
        ["`model` of type TrinityChatModel|`model: DashScopeChatModel`"],
    ),
    "types swapped": (
        "async def f(task: TrinityChatModel, model: Dict) -> float:",
        ["`task: TrinityChatModel`", "`model: Dict`"],
    ),
    "mistyped options": (
        f"async def f({GOOD}, auxiliary_models: list, logger: str, system_prompt: int) -> float:",
        ["`auxiliary_models: list`", "`logger: str`", "`system_prompt: int`"],
    ),
    "star": (f"async def f({GOOD}, *rest) -> float:", ["parameters with names|`*rest`"]),
    "two stars": (f"async def f({GOOD}, **options: Any) -> float:", ["|`**options`"]),
    "only stars": (
        "async def f(*args, **kwargs) -> float:",
        ["`*args`", "`**kwargs`", "a parameter `task`", "a parameter `model`"],
    ),
    "positional only": (
        f"async def f({GOOD}, /) -> float:",
        ["`task` is positional-only", "`model` is positional-only"],
    ),
    "no return annotation": (
        f"async def f({GOOD}):",
        ["`-> float` or `-> WorkflowOutput`|no return"],
    ),
    "returns a text": (f"async def f({GOOD}) -> str:", ["`-> str`: another type"]),
    "returns an int": (f"async def f({GOOD}) -> int:", ["`-> int`: a reward is a float"]),
    "returns a bool": (f"async def f({GOOD}) -> bool:", ["`-> bool`: a reward is a float"]),
    "returns None": (f"async def f({GOOD}) -> None:", ["`-> None`: a run without a reward"]),
    "returns Any": (f"async def f({GOOD}) -> Any:", ["`-> Any`: it does not say which form"]),
    "returns an optional": (f"async def f({GOOD}) -> Optional[float]:", ["it may be None"]),
    "returns float or None": (f"async def f({GOOD}) -> float | None:", ["it may be None"]),
    "returns either": (f"async def f({GOOD}) -> float | WorkflowOutput:", ["two forms"]),
    "returns a float or int": (f"async def f({GOOD}) -> int | float:", ["a reward is a float"]),
    "returns an awaitable": (
        f"async def f({GOOD}) -> Awaitable[float]:",
        ["what awaiting it gives"],
    ),
    "returns a coroutine": (
        f"async def f({GOOD}) -> 'Coroutine[Any, Any, float]':",
        ["what awaiting it gives"],
    ),
    "returns a judgement": (f"async def f({GOOD}) -> JudgeOutput:", ["what a judge returns"]),
    "returns a tuple": (f"async def f({GOOD}) -> tuple[float, dict]:", ["another type"]),
    "returns half an output": (f"async def f({GOOD}) -> Half:", ["`-> Half`: another type"]),
    "everything": (
        "def f(item: str, llm, k: int = 1, *rest, **more):",
        [
            "a sync function",
            "`item` in its place",
            "`llm` in its place",
            "an extra parameter `k`",
            "`*rest`",
            "`**more`",
            "`item: str`",
            "no return annotation",
        ],
    ),
    "many lines": (
        "async def f(\n    task: Dict,  # the row\n    llm: OpenAIChatModel,\n    logger=None,\n"
        ") -> float:",
        ["`llm` in its place"],
    ),
}


def refusal(folder: Path, header: str, source: str, phrases: list[str]) -> str:
    """Check that `f` is refused with these faults, then paste the line; it must pass."""
    module = load(folder, f"{header}{source}\n    return 1.0\n")
    with pytest.raises(BadInput) as caught:
        check_workflow(name_of(module))
    return cured(folder, module, caught.value, phrases, check_workflow)


def cured(
    folder: Path,
    module: ModuleType,
    error: BadInput,
    phrases: list[str],
    check: Callable[[Any], Any],
) -> str:
    assert len(error.faults) == len(phrases), str(error)
    texts = [f"{fault.expected}|{fault.found}" for fault in error.faults]
    for phrase in phrases:
        expected, bar, found = phrase.rpartition("|")
        fits = [text for text in texts if expected in text and found in text]
        assert len(fits) == 1, (phrase, texts)
    assert len(set(texts)) == len(texts)
    file = module.__file__
    assert file is not None
    source = Path(file).read_text()
    corrections = {fault.cure.rpartition("\n")[2].strip() for fault in error.faults}
    assert len(corrections) == 1
    (line,) = corrections
    node = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and f"{file}:{node.lineno}, function " in error.faults[0].where
    )
    assert all(fault.where.endswith(f"function {qualified(error)}") for fault in error.faults)
    assert error.faults[0].where.rpartition(".")[2].endswith(node.name)
    lines = source.splitlines()
    indent = " " * node.col_offset
    lines[node.lineno - 1 : node.body[0].lineno - 1] = [indent + line]
    check(name_of(load(folder, "\n".join(lines) + "\n")))
    return line


def qualified(error: BadInput) -> str:
    return error.title.partition(" ")[0]


@pytest.mark.parametrize("future", [False, True], ids=["objects", "texts"])
@pytest.mark.parametrize(("source", "phrases"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_line_that_cures(
    tmp_path: Path, source: str, phrases: list[str], future: bool
) -> None:
    top = "from __future__ import annotations\n" if future else ""
    refusal(tmp_path, top + HEADER, source, phrases)


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "async def f(task: Mapping[str, Any], llm: ChatModelBase, k=1) -> float:",
            "async def f(task: Mapping[str, Any], model: ChatModelBase) -> float:",
        ),
        (
            "async def f(model, logger: logging.Logger | None = None) -> 'float':",
            "async def f(task: Dict, model, logger: logging.Logger | None=None) -> 'float':",
        ),
        (
            "def f(*, task: str, model: TrinityChatModel, system_prompt='x'):",
            "async def f(*, task: Dict, model: TrinityChatModel, system_prompt='x') -> float:",
        ),
        (
            "async def f(task: Dict = {}) -> float:",
            "async def f(model: TrinityChatModel, task: Dict = {}) -> float:",
        ),
    ],
)
def test_what_was_right_stays_in_the_corrected_line(tmp_path: Path, source: str, line: str) -> None:
    module = load(tmp_path, f"{HEADER}{source}\n    return 1.0\n")
    with pytest.raises(BadInput) as caught:
        check_workflow(module.f)
    pasted = caught.value.faults[0].cure.rpartition("\n")[2].strip()
    assert ast.dump(ast.parse(pasted + " ...")) == ast.dump(ast.parse(line + " ..."))


def test_the_line_uses_only_names_that_the_module_has(tmp_path: Path) -> None:
    line = refusal(tmp_path, "", "def f(item):", ["sync", "`item` in its", "`model`", "no return"])
    assert line == 'async def f(model: "TrinityChatModel", task) -> float:'


def test_the_form_is_guessed_from_what_is_returned(tmp_path: Path) -> None:
    source = (
        "from aflow_tune import WorkflowOutput as Out\n"
        "async def f(task, model):\n    return types.WorkflowOutput(response=1)\n"
    )
    module = load(tmp_path, source)
    with pytest.raises(BadInput) as caught:
        check_workflow(module.f)
    assert caught.value.faults[0].cure.endswith('async def f(task, model) -> "WorkflowOutput":')


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


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(task: Dict, model: Any) -> float:", "a generator function"),
        ("async def f(task: Dict, model: Any) -> AsyncIterator[float]:", "an async generator"),
    ],
)
def test_generators(tmp_path: Path, source: str, found: str) -> None:
    text = faults(load(tmp_path, f"{HEADER}{source}\n    yield 1.0\n").f)
    assert found in text
    assert "async def f(task: Dict, model: Any) -> float:" in text


def faults(function: Any, check: Callable[[Any], Any] = check_workflow) -> str:
    with pytest.raises(BadInput) as caught:
        check(function)
    assert len(caught.value.faults) >= 1
    return str(caught.value)


def test_wrapper_without_wraps_names_functools_wraps() -> None:
    async def wrapper(*args: Any, **kwargs: Any) -> float:
        return 1.0

    assert "@functools.wraps" in faults(wrapper)


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


def test_a_class_instead_of_an_object() -> None:
    class Agent:
        async def __call__(self, task: dict, model: Any) -> float:
            return 1.0

    assert "`Agent(...)`, whose `__call__` is async" in faults(Agent)
    check_workflow(Agent())


def test_a_coroutine_instead_of_its_function() -> None:
    async def flow(task: dict, model: Any) -> float:
        return 1.0

    assert "pass `flow` itself, without parentheses" in faults(flow({}, None))


@pytest.mark.parametrize("thing", [None, 3, "flows.py:solve", {"a": 1}, object()])
def test_things_that_cannot_be_called(thing: Any) -> None:
    assert f"found:    {type(thing).__name__}: " in faults(thing)


@pytest.mark.parametrize("thing", [len, print, dict.get, "".join, functools.reduce, min])
def test_code_without_python_source(thing: Any) -> None:
    text = faults(thing)
    assert thing.__name__ in text
    assert "async" in text


def test_code_that_was_typed_into_a_prompt() -> None:
    namespace: dict[str, Any] = {}
    exec("def solve(item: str, model, k=1):\n    return 1.0", namespace)
    text = faults(namespace["solve"])
    assert "<string>:1, function solve" in text
    assert 'async def solve(task: dict, model: "TrinityChatModel") -> float:' in text


JUDGES = [
    "async def f(task: Dict, response: Any) -> JudgeOutput: ...",
    "async def f(task: Dict, response: str, auxiliary_models: dict | None = None) -> JudgeOutput: ...",
    "async def f(response, task, logger=None) -> 'JudgeOutput': ...",
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
    assert (workflow.form, judge and judge.name) == ("output", "judge")
    assert check_functions(module.output)[1] is None
    assert check_functions(module.plain)[0].form == "float"
    with pytest.raises(BadInput) as both:
        check_functions(module.reward, module.wrong)
    assert len(both.value.faults) == 2
    with pytest.raises(BadInput) as unused:
        check_functions(module.plain, module.judge)
    (fault,) = unused.value.faults
    assert "judge `judge` that would never be called" in fault.found
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
    assert (workflow.form, workflow.optional) == ("output", ("auxiliary_models",))
    assert judge is not None
    assert judge.optional == ("auxiliary_models",)
    assert check_workflow(module.first_tuner).form == "float"
    assert check_functions(module.tutorial, module.tutorial_judge)[0].form == "output"


def test_agentscopes_result_types_are_known_by_their_fields(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        "from pydantic import BaseModel, Field\nfrom typing import Any, Dict\n"
        "class Result(BaseModel):\n    reward: float | None = Field(default=None)\n"
        "    response: Any | None = None\n    metrics: Dict[str, float] | None = None\n"
        "class Verdict(BaseModel):\n    reward: float\n    metrics: Dict[str, float] | None = None\n"
        "async def f(task: Dict, model) -> Result: ...\n"
        "async def j(task: Dict, response) -> Verdict: ...\n",
    )
    assert check_functions(module.f, module.j)[0].form == "output"


def test_numpy_floats_are_floats() -> None:
    import numpy as np

    async def flow(task: dict, model: Any) -> np.float64:
        return np.float64(1)

    assert check_workflow(flow).form == "float"


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, aflow_tune.signature, aflow_tune.plugins, aflow_tune.context\n"
        "heavy = {'torch', 'ray', 'trinity', 'agentscope', 'numpy', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
