"""User code as a test writes it: files that are loaded, refused, cured and loaded again."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from aflow_tune.errors import BadInput

HEADER = """\
import abc, asyncio, dataclasses, functools, logging, typing
from collections import OrderedDict
from collections.abc import (AsyncIterator, Awaitable, Callable, Coroutine, Mapping,
                             MutableMapping)
from typing import Annotated, Any, Dict, List, NewType, Optional, Protocol, TypedDict, TypeVar
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
        expected, _, found = phrase.rpartition("|")
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
        and f"{file}:{node.lineno}: " in error.faults[0].where
    )
    assert all(fault.where.endswith(f": {qualified(error)}") for fault in error.faults)
    assert qualified(error).rpartition(".")[2] == node.name
    lines = source.splitlines()
    indent = " " * node.col_offset
    lines[node.lineno - 1 : node.body[0].lineno - 1] = [indent + line]
    check(name_of(load(folder, "\n".join(lines) + "\n")))
    return line


def qualified(error: BadInput) -> str:
    return error.title.partition(" ")[0]
