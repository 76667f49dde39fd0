"""The contract: each fault has its own message, and the line to paste cures it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from user_code import HEADER, TYPE_CHECKING_ONLY, cured, load, name_of

from aflow_tune.contract.signature import check_workflow
from aflow_tune.errors import BadInput

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
        [
            "a parameter `task`|no parameter with a name",
            "a parameter `model`|no parameter with a name",
        ],
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
    "no annotations": (
        "async def f(task, model) -> float:",
        ["`task` annotated|`task` without", "`model` annotated|`model` without"],
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
            "`llm` without an annotation",
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
            "async def f(model: Any, logger: logging.Logger | None = None) -> 'float':",
            "async def f(task: Dict, model: Any, logger: logging.Logger | None=None) -> 'float':",
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


def test_aliases_of_themselves_and_senseless_annotations(tmp_path: Path) -> None:
    source = (
        "Loop = 'Loop'\nasync def f(task: 'Loop', model: 3) -> {'a': 1}: ...\n"
        "async def g(task: 'x y', model: 'dict[') -> 'float | ': ...\n"
        "async def h(task: lambda: 1, model: ...) -> print: ...\n"
    )
    module = load(tmp_path, source)
    for function in (module.f, module.g, module.h):
        assert faults(function).count("expected:") == 3
