"""Where a callable was written, and the `def` line that it should have.

Looks through partials, bound methods, objects with a `__call__` and decorators that use
`functools.wraps`, down to the plain function whose source a person can edit. Code without a
source (typed into a prompt, built-in, compiled) has a definition too, with less in it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aflow_tune.contract.annotations import Names, names_for_type_checkers

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_DRIVERS = {"asyncio": {"run"}, "anyio": {"run"}, "trio": {"run"}}


@dataclass(frozen=True)
class DefParameter:
    """One parameter as it stands in a `def` line; empty texts where there is nothing."""

    name: str
    annotation: str = ""
    default: str = ""
    keyword_only: bool = False

    def __str__(self) -> str:
        annotated = f"{self.name}: {self.annotation}" if self.annotation else self.name
        if not self.default:
            return annotated
        return f"{annotated} = {self.default}" if self.annotation else f"{annotated}={self.default}"


@dataclass(frozen=True)
class Definition:
    """What can be known about the source of a callable."""

    name: str
    """To be shown: the qualified name, without the function around a local one."""
    file: str
    line: int
    """Line of `def`; 0 where unknown."""
    layers: tuple[Any, ...]
    """The callable, what it wraps, ..., the plain function."""
    node: FunctionNode | None = None
    """Its syntax tree, None without source."""
    names: Names = field(default_factory=lambda: Names({}, {}))

    @property
    def where(self) -> str:
        """`file:line: name` for messages."""
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.name}"

    @property
    def bound(self) -> frozenset[str]:
        """Names of the parameters that partials gave a value by name."""
        partials = (layer for layer in self.layers if isinstance(layer, functools.partial))
        return frozenset(name for layer in partials for name in layer.keywords)

    def annotation_text(self, parameter: str, annotation: Any) -> str:
        """An annotation as the user wrote it."""
        for argument in self._arguments():
            if argument.arg == parameter and argument.annotation is not None:
                return ast.unparse(argument.annotation)
        return annotation_text(annotation)

    def parameters(self) -> list[DefParameter]:
        """The parameters of the `def` line, without `*args` and `**kwargs`."""
        if self.node is None:
            return _parameters_without_source(self.layers[-1])
        arguments = self.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
        defaults += arguments.defaults
        return [
            *(_parameter(*pair, False) for pair in zip(positional, defaults, strict=True)),
            *(
                _parameter(*pair, True)
                for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            ),
        ]

    def def_line(self, parameters: Iterable[DefParameter], returns: str, default_name: str) -> str:
        """An `async def` line with these parameters, in an order that Python accepts."""
        name = self.name.rpartition(".")[2]
        ordered = list(parameters)
        positional = [parameter for parameter in ordered if not parameter.keyword_only]
        keyword_only = [parameter for parameter in ordered if parameter.keyword_only]
        positional.sort(key=lambda parameter: bool(parameter.default))
        parts = [str(parameter) for parameter in positional]
        if keyword_only:
            parts += ["*", *(str(parameter) for parameter in keyword_only)]
        name = name if name.isidentifier() else default_name
        return f"async def {name}({', '.join(parts)}) -> {returns}:"

    def returned_calls(self) -> Iterator[str]:
        """Names of what is called in the function's `return` statements."""
        for node in ast.walk(self.node) if self.node else ():
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                yield ast.unparse(node.value.func).rpartition(".")[2]

    def _arguments(self) -> list[ast.arg]:
        if self.node is None:
            return []
        arguments = self.node.args
        return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def define(function: Callable[..., Any]) -> Definition:
    """Find where a callable was written."""
    layers = tuple(_layers(function))
    inner = layers[-1]
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    name = str(name).rpartition("<locals>.")[2]
    if not inspect.isfunction(inner):
        module = getattr(inner, "__module__", None) or type(inner).__module__
        return Definition(name, f"module {module}", 0, layers)
    code = inner.__code__
    lines = linecache.getlines(code.co_filename, inner.__globals__)
    node, for_type_checkers = _find(code, "".join(lines))
    line = node.lineno if node is not None else code.co_firstlineno
    names = Names({**inner.__globals__, **_closure(inner)}, for_type_checkers)
    return Definition(name, code.co_filename, line, layers, node, names)


def is_async(definition: Definition) -> bool:
    """Whether calling it gives something to await.

    A decorator's plain function counts as async if what it wraps is, since it usually passes
    the coroutine on; not so if it runs an event loop itself.
    """
    for layer in definition.layers:
        if inspect.iscoroutinefunction(layer):
            return True
        if _runs_a_loop(getattr(layer, "__code__", None)):
            return False
    return False


def annotation_text(annotation: Any) -> str:
    """An annotation for a message, when its source is not at hand."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _layers(function: Any) -> Iterator[Any]:
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif inspect.ismethod(function):
            function = function.__func__
        elif inspect.getattr_static(function, "__wrapped__", None) is not None:
            function = function.__wrapped__
        elif inspect.isroutine(function) or inspect.isclass(function):
            return
        else:
            function = getattr(type(function), "__call__", None)  # noqa: B004


def _find(code: Any, source: str) -> tuple[FunctionNode | None, Mapping[str, str]]:
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        return None, {}
    for node in ast.walk(module):
        if isinstance(node, FunctionNode) and node.name == code.co_name:
            first = min(line.lineno for line in (node, *node.decorator_list))
            if first == code.co_firstlineno:
                return node, names_for_type_checkers(module)
    return None, {}


def _closure(function: Any) -> Mapping[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is still empty
            found[name] = cell.cell_contents
    return found


def _runs_a_loop(code: Any) -> bool:
    used = set(getattr(code, "co_names", ()))
    if "run_until_complete" in used:
        return True
    return any(module in used and calls & used for module, calls in _DRIVERS.items())


def _parameter(argument: ast.arg, default: ast.expr | None, keyword_only: bool) -> DefParameter:
    return DefParameter(
        argument.arg,
        ast.unparse(argument.annotation) if argument.annotation else "",
        ast.unparse(default) if default else "",
        keyword_only,
    )


def _parameters_without_source(function: Any) -> list[DefParameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    plain = [
        DefParameter(parameter.name, "", "", parameter.kind is parameter.KEYWORD_ONLY)
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    has_default = {
        parameter.name for parameter in parameters if parameter.default is not parameter.empty
    }
    return [
        replace(parameter, default="None") if parameter.name in has_default else parameter
        for parameter in plain
    ]
