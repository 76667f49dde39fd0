"""The contracts of workflow and judge functions, checked before anything starts.

    async def f(task: Dict, model: TrinityChatModel) -> float
    async def f(task: Dict, model: OpenAIChatModel, [auxiliary_models, logger, system_prompt])
        -> WorkflowOutput
    async def judge(task: Dict, response: Any, [auxiliary_models, logger]) -> JudgeOutput

What means the same is accepted. Annotations are compared by what they resolve to where that
is possible and by their text where it is not, so that names imported for type checkers only
are no problem and neither AgentScope nor Trinity has to be imported here.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aflow_tune.errors import BadInput, Fault

TASK_TYPES = ("dict", "Dict", "Mapping", "MutableMapping", "Any")
MODEL_TYPES = ("TrinityChatModel", "OpenAIChatModel", "ChatModelBase", "Any")
OPTIONAL_OF_WORKFLOW = ("auxiliary_models", "logger", "system_prompt")
OPTIONAL_OF_JUDGE = ("auxiliary_models", "logger")
_OUTPUT_FIELDS = {
    "WorkflowOutput": {"reward", "response", "metrics"},
    "JudgeOutput": {"reward", "metrics"},
}


@dataclass(frozen=True)
class Contract:
    """What is known about an accepted function.

    `returns` is 'float', 'WorkflowOutput' or 'JudgeOutput'; `optional` are the optional
    parameters that it asks for.
    """

    name: str
    file: str
    line: int
    returns: str
    optional: tuple[str, ...]


@dataclass(frozen=True)
class _Shape:
    """What one kind of function must look like."""

    kind: str
    required: Mapping[str, tuple[str, ...]]
    optional: tuple[str, ...]
    returns: tuple[str, ...]
    signature: str


_WORKFLOW = _Shape(
    kind="workflow",
    required={"task": TASK_TYPES, "model": MODEL_TYPES},
    optional=OPTIONAL_OF_WORKFLOW,
    returns=("float", "WorkflowOutput"),
    signature="task: Dict, model: TrinityChatModel",
)
_JUDGE = _Shape(
    kind="judge",
    required={"task": TASK_TYPES, "response": ()},
    optional=OPTIONAL_OF_JUDGE,
    returns=("JudgeOutput",),
    signature="task: Dict, response: Any",
)


def check_workflow(function: Any) -> Contract:
    """Accept a workflow function.

    Raises:
        BadInput: with every fault of the function, each with the corrected line to paste.
    """
    return _check(function, _WORKFLOW)


def check_judge(function: Any) -> Contract:
    """Accept a judge function. Raises as `check_workflow`."""
    return _check(function, _JUDGE)


def _check(function: Any, shape: _Shape) -> Contract:
    if not callable(function):
        raise BadInput(
            f"This is no {shape.kind} function.",
            [
                Fault(
                    f"{type(function).__name__} {function!r:.80}",
                    "an async function",
                    "something that cannot be called",
                    _corrected(shape, f"my_{shape.kind}", shape.returns[0], ()),
                )
            ],
        )
    return _Checker(function, shape).check()


class _Checker:
    def __init__(self, function: Any, shape: _Shape) -> None:
        self.shape = shape
        self.code, self.bound = _underlying(function)
        self.name = getattr(self.code, "__name__", type(function).__name__)
        if self.name == "__call__":
            self.name = type(function).__name__
        self.file, self.line = _place(self.code)
        try:
            self.signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):
            self.signature = None
        self.hints = _hints(self.code)
        self.faults: list[Fault] = []
        self.misnamed: set[str] = set()

    def check(self) -> Contract:
        self._check_async()
        optional = self._check_parameters()
        returns = self._check_return()
        if self.faults:
            count = len(self.faults)
            raise BadInput(
                f"{self.shape.kind} function {self.name!r} has "
                f"{'one fault' if count == 1 else f'{count} faults'}.",
                self.faults,
            )
        return Contract(self.name, self.file, self.line, returns, optional)

    def _check_async(self) -> None:
        if inspect.isasyncgenfunction(self.code):
            self._fault("an async function that returns once", "an async generator (it yields)")
        elif not inspect.iscoroutinefunction(self.code):
            self._fault("`async def`", "a function that is not async")

    def _check_parameters(self) -> tuple[str, ...]:
        if self.signature is None:
            self._fault("a Python function with parameters", "one whose parameters are unknown")
            return ()
        parameters = dict(self.signature.parameters)
        optional: list[str] = []
        allowed = [*self.shape.required, *self.shape.optional]
        missing = [name for name in self.shape.required if name not in parameters]
        for name, parameter in parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                self._fault("named parameters only", f"*{name}")
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                self._fault("named parameters only", f"**{name}")
            elif name in self.bound:
                continue  # a partial has given it a value
            elif name not in allowed:
                self._extra(name, missing)
            elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                self._fault(f"a parameter {name!r} that can be given by name", f"{name}, /")
            elif name in self.shape.optional:
                optional.append(name)
            else:
                self._check_type(name)
        for name in missing:
            if name not in self.misnamed:
                self._fault(f"a parameter {name!r}", f"parameters ({', '.join(parameters)})")
        return tuple(optional)

    def _extra(self, name: str, missing: list[str]) -> None:
        wanted = difflib.get_close_matches(name, missing, n=1, cutoff=0.5)
        if not wanted and len(missing) == 1:
            wanted = missing
        if wanted:
            self.misnamed.add(wanted[0])
            self._fault(f"a parameter named {wanted[0]!r}", f"the name {name!r}")
            return
        listed = ", ".join([*self.shape.required, *(f"[{o}]" for o in self.shape.optional)])
        self._fault(f"no parameters but {listed}", f"an extra parameter {name!r}")

    def _check_type(self, name: str) -> None:
        wanted = self.shape.required[name]
        if not wanted:
            return
        annotation = self._annotation(name)
        if annotation is inspect.Parameter.empty:
            self._fault(f"{name} annotated as {wanted[0]}", f"{name} without an annotation")
        elif not _is_one_of(annotation, wanted):
            shown = _text(annotation)
            self._fault(f"{name}: {' or '.join(_shown(wanted))}", f"{name}: {shown}")

    def _check_return(self) -> str:
        annotation = self._annotation("return")
        wanted = " or ".join(self.shape.returns)
        if annotation is inspect.Parameter.empty:
            self._fault(f"the return annotation `-> {wanted}`", "no return annotation")
            return ""
        for name in self.shape.returns:
            if _is_one_of(annotation, (name,)) or _has_fields(annotation, name):
                return name
        self._fault(f"the return annotation `-> {wanted}`", f"-> {_text(annotation)}")
        return ""

    def _annotation(self, name: str) -> Any:
        if name in self.hints:
            return self.hints[name]
        raw = getattr(self.code, "__annotations__", {})
        return raw.get(name, inspect.Parameter.empty)

    def _fault(self, expected: str, found: str) -> None:
        parameters = self.signature.parameters if self.signature is not None else {}
        optional = tuple(name for name in self.shape.optional if name in parameters)
        annotation = self._annotation("return")
        returns = self.shape.returns[0]
        for name in self.shape.returns:
            if annotation is not inspect.Parameter.empty and _is_one_of(annotation, (name,)):
                returns = name
        name = self.name if self.name.isidentifier() else f"my_{self.shape.kind}"
        self.faults.append(
            Fault(
                f"{self.file}:{self.line}: {self.name}",
                expected,
                found,
                _corrected(self.shape, name, returns, optional),
            )
        )


def _corrected(shape: _Shape, name: str, returns: str, optional: tuple[str, ...]) -> str:
    types = {
        "auxiliary_models": "Dict[str, ChatModelBase]",
        "logger": "Logger",
        "system_prompt": "str",
    }
    rest = "".join(f", {item}: {types[item]}" for item in optional)
    return f"write: async def {name}({shape.signature}{rest}) -> {returns}:"


def _underlying(function: Any) -> tuple[Any, set[str]]:
    """The function that runs, and the parameters that partials have filled in by name."""
    bound: set[str] = set()
    while True:
        if isinstance(function, functools.partial):
            bound |= set(function.keywords)
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.ismethod(function):
            function = function.__func__
        elif not inspect.isroutine(function) and not isinstance(function, type):
            call = getattr(type(function), "__call__", None)
            if call is None or not inspect.isroutine(call) or not hasattr(call, "__code__"):
                return function, bound
            function = call
        else:
            return function, bound


def _place(code: Any) -> tuple[str, int]:
    raw = getattr(code, "__code__", None)
    if raw is None:
        return getattr(code, "__module__", None) or "unknown file", 0
    return raw.co_filename, raw.co_firstlineno


def _hints(code: Any) -> dict[str, Any]:
    """Annotations resolved one by one; what cannot be resolved stays the text it is."""
    found = {}
    for name, annotation in getattr(code, "__annotations__", {}).items():
        if isinstance(annotation, str):
            # The names may exist for type checkers only: the text then has to do.
            with contextlib.suppress(Exception):
                annotation = eval(annotation, getattr(code, "__globals__", {}), vars(typing))
        found[name] = annotation
    return found


def _is_one_of(annotation: Any, names: tuple[str, ...]) -> bool:
    if isinstance(annotation, str):
        text = annotation.strip().strip("'\"")
        base = re.sub(r"\[.*\]$", "", text, flags=re.DOTALL).strip()
        return base.rpartition(".")[2] in names
    if annotation is Any:
        return "Any" in names
    if isinstance(annotation, typing.ForwardRef):
        return _is_one_of(annotation.__forward_arg__, names)
    origin = typing.get_origin(annotation) or annotation
    if isinstance(origin, type):
        if origin is bool or (origin is int and "float" in names):
            return False
        return any(base.__name__ in names for base in origin.__mro__ if base is not object)
    return False


def _has_fields(annotation: Any, name: str) -> bool:
    """Another library's output class, recognised by its fields."""
    wanted = _OUTPUT_FIELDS.get(name)
    if wanted is None or not isinstance(annotation, type):
        return False
    fields = set(getattr(annotation, "model_fields", None) or {}) | set(
        getattr(annotation, "__dataclass_fields__", {})
    )
    return fields == wanted


def _text(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _shown(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name != "Any"]

