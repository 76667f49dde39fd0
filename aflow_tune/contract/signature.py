"""Checks workflow and judge functions against their contract before anything starts.

    async def workflow(task: Dict, model: TrinityChatModel) -> float
    async def workflow(task: Dict, model: TrinityChatModel) -> WorkflowOutput
    async def judge(task: Dict, response: Any) -> JudgeOutput

A workflow may also take `auxiliary_models`, `logger` and `system_prompt`, a judge the first two,
and nothing else, as in AgentScope's own check. Equivalent forms are accepted:

- Arguments are passed by name: any order and keyword-only are fine, positional-only is not.
- An annotation must admit what is passed: a plain dict, a TrinityChatModel. So base classes,
  unions with a fitting member, TypedDicts and `Any` are fine. `task` and `model` must have one.
- The return annotation is required, as it decides the form: `float` or a subclass (but not `int`,
  `bool` or an Optional), or a class with the fields of `WorkflowOutput`.
- A name that only type checkers can resolve is compared by its spelling.

The body of the function is not checked and nothing is imported for the check: classes of other
packages are recognised by name, result types by their fields.
"""

from __future__ import annotations

import ast
import builtins
import collections.abc
import difflib
import functools
import inspect
import linecache
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from aflow_tune.errors import BadInput, Fault

_Node = ast.FunctionDef | ast.AsyncFunctionDef
_STARS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Unresolved(type):
    """Metaclass of stand-ins for names that exist for type checkers only, or not at all."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Unresolved(name, (), {})

    def __getitem__(cls, arguments: Any) -> Any:
        return types.GenericAlias(cls, arguments)


class _Names(dict[str, Any]):
    """Namespace for evaluating a function's annotations; an unknown name yields a stand-in."""

    def __init__(self, found: Mapping[str, Any], for_type_checkers: Mapping[str, str]) -> None:
        super().__init__({**vars(builtins), **found})
        self.for_type_checkers = for_type_checkers

    def __missing__(self, name: str) -> Any:
        meaning = self.for_type_checkers.get(name, name)
        if meaning != name:
            return typing.Annotated[meaning, None]  # evaluated as an annotation of its own
        return _Unresolved(name, (), {})

    def members(self, annotation: Any) -> list[Any]:
        """The members of a union, else the annotation; `Optional[X]` has `X` and NoneType."""
        try:
            return list(self._members(annotation))
        except RecursionError:  # an alias of itself
            return [_Unresolved(str(annotation), (), {})]

    def _members(self, annotation: Any) -> Iterator[Any]:
        if isinstance(annotation, typing.ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, {"__builtins__": {}}, self)
            except RecursionError:
                raise
            except Exception:
                annotation = _Unresolved(annotation, (), {})
            yield from self._members(annotation)
            return
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        spelled = origin.__name__ if isinstance(origin, _Unresolved) else ""
        if annotation is None:
            yield type(None)
        elif isinstance(annotation, typing.TypeVar):
            for bound in annotation.__constraints__ or (annotation.__bound__ or Any,):
                yield from self._members(bound)
        elif origin is typing.Annotated or spelled == "Annotated":
            yield from self._members(arguments[0])
        elif origin in (typing.Union, types.UnionType) or spelled in ("Union", "Optional"):
            for argument in (*arguments, *([None] if spelled == "Optional" else [])):
                yield from self._members(argument)
        elif not isinstance(annotation, type) and (
            meaning := getattr(annotation, "__supertype__", getattr(annotation, "__value__", None))
        ):  # NewType, the `type` statement
            yield from self._members(meaning)
        else:
            yield annotation


def _name(member: Any) -> str:
    """The last part of a type's name: 'dict', 'TrinityChatModel', 'None', 'Any'."""
    if member is type(None):
        return "None"
    target = typing.get_origin(member) or member
    name = getattr(target, "__name__", None) or getattr(target, "_name", None)
    return str(name or inspect.formatannotation(target))


_ANYTHING = ("Any", "object")
_MODELS = ("TrinityChatModel", "OpenAIChatModel", "ChatModelBase", "RunChatModel", "Callable")
_FIELDS = {
    "WorkflowOutput": {"reward", "response", "metrics"},
    "JudgeOutput": {"reward", "metrics"},
}


def _admits_mapping(member: Any, names: _Names) -> bool:
    target = typing.get_origin(member) or member
    if isinstance(target, _Unresolved):
        fits = target.__name__ in ("dict", "Dict", "Mapping", "MutableMapping")
    else:
        mappings = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
        fits = any(target is known for known in mappings) or typing.is_typeddict(target)
    arguments = typing.get_args(member)
    keys = [_name(key) for key in names.members(arguments[0])] if arguments else ["str"]
    return fits and any(key in ("str", *_ANYTHING) for key in keys)


def _admits_model(member: Any, names: _Names) -> bool:
    target = typing.get_origin(member) or member
    return bool(getattr(target, "_is_protocol", False)) or _name(member) in _MODELS


_PARAMETERS: dict[str, tuple[str, Callable[[Any, _Names], bool]]] = {
    "task": ("dict (or Dict, Mapping, a TypedDict)", _admits_mapping),
    "model": ("TrinityChatModel (or its bases OpenAIChatModel, ChatModelBase)", _admits_model),
    "response": ("any type", lambda *_: True),
    "auxiliary_models": ("Dict[str, OpenAIChatModel] | None", _admits_mapping),
    "logger": ("logging.Logger | None", lambda member, _: _name(member) == "Logger"),
    "system_prompt": ("str | None", lambda member, _: _name(member) == "str"),
}
"""By parameter: its type in words, and whether a member of a union admits what is passed."""


class Contract(NamedTuple):
    noun: str
    usual: str
    """The usual `def` line, for messages."""
    essential: tuple[str, ...]
    optional: tuple[str, ...]
    returns: tuple[str, ...]
    """Accepted return annotations, as named by `_result_name`."""


WORKFLOW = Contract(
    "workflow",
    'async def workflow(task: dict, model: "TrinityChatModel") -> float:',
    ("task", "model"),
    ("auxiliary_models", "logger", "system_prompt"),
    ("float", "WorkflowOutput"),
)
JUDGE = Contract(
    "judge",
    'async def judge(task: dict, response) -> "JudgeOutput":',
    ("task", "response"),
    ("auxiliary_models", "logger"),
    ("JudgeOutput",),
)


def _result_name(member: Any) -> str:
    """The form of a return type: 'float', 'WorkflowOutput', 'JudgeOutput', or another name."""
    name = _name(member)
    if not isinstance(member, type) or isinstance(member, _Unresolved):
        return name
    if issubclass(member, float):
        return "float"
    fields = {field for owner in member.__mro__ for field in vars(owner).get("__annotations__", {})}
    for known, needed in _FIELDS.items():
        if needed <= fields:
            return known
    return f"{name} without reward and metrics" if name in _FIELDS else name


def _layers(function: Any) -> Iterator[Any]:
    """The callable, what it wraps, and so on down to the plain function with the source."""
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


def _source(function: types.FunctionType) -> tuple[int, dict[str, str]]:
    """The line of a function's `def`, and the meaning of names that its module defines under
    `if TYPE_CHECKING:`."""
    code = function.__code__
    try:
        module = ast.parse("".join(linecache.getlines(code.co_filename, function.__globals__)))
    except (SyntaxError, ValueError):
        module = ast.Module([], [])
    line, named = code.co_firstlineno, dict[str, str]()
    for node in ast.walk(module):
        if isinstance(node, _Node) and node.name == code.co_name:
            first = min(part.lineno for part in (node, *node.decorator_list))
            line = node.lineno if first == code.co_firstlineno else line
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.body:
                if isinstance(statement, ast.ImportFrom):
                    named.update({name.asname or name.name: name.name for name in statement.names})
                elif isinstance(statement, ast.Assign):
                    meaning = ast.unparse(statement.value)
                    named.update({ast.unparse(target): meaning for target in statement.targets})
    return line, named


class Checked(NamedTuple):
    """A workflow or judge function that passed the check."""

    name: str
    returns: str
    """'float', 'WorkflowOutput' or 'JudgeOutput' (any class with its fields)."""
    where: str
    """`file:line: name`."""


def check_function(function: Callable[..., Any], contract: Contract = WORKFLOW) -> Checked:
    """Check one function. Raises BadInput: with every fault of the function."""
    return _Check(function, contract).run()


def check_functions(
    workflow: Callable[..., Any], judge: Callable[..., Any] | None = None
) -> tuple[Checked, Checked | None]:
    """Check a workflow, its judge, and that they fit together.

    Raises BadInput: with every fault of both functions."""
    checked: list[Checked] = []
    titles: list[str] = []
    faults: list[Fault] = []
    for function, contract in ((workflow, WORKFLOW), (judge, JUDGE)):
        try:
            if function is not None:
                checked.append(check_function(function, contract))
        except BadInput as error:
            titles.append(error.title)
            faults += error.faults
    if faults:
        raise BadInput("\n".join(titles), faults)
    if judge is None:
        return checked[0], None
    flow, scorer = checked
    if flow.returns == "float":
        raise BadInput.of(
            f"{flow.name} and {scorer.name} do not fit together.",
            flow.where,
            "`-> WorkflowOutput`, whose response the judge scores",
            f"{flow.name} returns float, so the judge `{scorer.name}` would never be called",
            "return WorkflowOutput(response=...), or leave the judge out",
        )
    return flow, scorer


class _Check:
    """The check of one function against one contract; collects faults."""

    def __init__(self, function: Any, contract: Contract) -> None:
        self.contract, self.faults = contract, list[Fault]()
        self.known = (*contract.essential, *contract.optional)
        self.where = f"the {contract.noun} function"
        if not callable(function) or inspect.isclass(function):
            self._refuse(f"{type(function).__name__}: {function!r:.80}")
        self.layers = list(_layers(function))
        # A plain wrapper of an async function counts as async: it returns the coroutine.
        self.is_async = any(map(inspect.iscoroutinefunction, self.layers))
        inner = self.layers[-1]
        name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
        self.name = str(name).rpartition("<locals>.")[2]
        self.where = f"module {getattr(inner, '__module__', None)}: {self.name}"
        self.names = _Names({}, {})
        if inspect.isfunction(inner):
            line, for_type_checkers = _source(inner)
            self.where = f"{inner.__code__.co_filename}:{line}: {self.name}"
            closure = inspect.getclosurevars(inner).nonlocals
            self.names = _Names({**inner.__globals__, **closure}, for_type_checkers)
        try:
            self.signature = inspect.signature(function)
            readable = inspect.isfunction(inner) or self.is_async
        except (TypeError, ValueError):
            readable = False
        if not readable:
            self._refuse(f"`{self.name}`, which is built in, compiled, or hides its signature")
        partials = (layer for layer in self.layers if isinstance(layer, functools.partial))
        bound = {name for partial in partials for name in partial.keywords}
        parameters = self.signature.parameters.items()
        self.parameters = {name: item for name, item in parameters if name not in bound}

    def _refuse(self, found: str) -> typing.NoReturn:
        expected = f"an async function, or an object whose `__call__` is: `{self.contract.usual}`"
        title, fix = f"This cannot be a {self.contract.noun}.", "call it from a function of yours"
        raise BadInput.of(title, self.where, expected, found, fix)

    def _fault(self, expected: str, found: str, advice: str) -> None:
        fix = f"{advice}; usual is `{self.contract.usual}`"
        self.faults.append(Fault(self.where, expected, found, fix))

    def run(self) -> Checked:
        """Check everything. Raises BadInput: with all faults."""
        expected = f"an async function that returns once: `{self.contract.usual}`"
        if not self.is_async:
            found = f"a sync function: `{self.name}` has no `async` before `def`"
            found = "a generator" if inspect.isasyncgenfunction(self.layers[-1]) else found
            self._fault(expected, found, "write `async def` and `return`, and `await` the calls")
        renamed = self._check_names()
        for name, parameter in self.parameters.items():
            self._check_type(name, renamed.get(name, name), parameter)
        returns = self._check_return()
        if self.faults or returns is None:
            title = f"{self.name} does not fit the contract of a {self.contract.noun}."
            raise BadInput(title, self.faults)
        return Checked(self.name, returns, self.where)

    def _check_names(self) -> dict[str, str]:
        """Find missing and extra names, and parameters that cannot be passed by name.

        Returns the misnamed parameters, each with the name in the contract."""
        unknown, missing = [], [n for n in self.contract.essential if n not in self.parameters]
        for name, parameter in self.parameters.items():
            if parameter.kind in _STARS:
                star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
                advice = "write them out, or put @functools.wraps(...) on a decorator's wrapper"
                self._fault("parameters with names of their own", f"`{star}{name}`", advice)
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                found = f"`{name}` is positional-only: it stands before `/`"
                self._fault("parameters that can be passed by name", found, "remove the `/`")
            if name not in self.known:
                unknown.append(name)
        renamed = self._pair(unknown, missing)
        for name, meant in renamed.items():
            expected = f"a parameter named `{meant}` (arguments are passed by name)"
            advice = f"rename `{name}` to `{meant}`, in the body too"
            self._fault(expected, f"`{name}` in its place", advice)
        for name in missing:
            if name not in renamed.values():
                there = ", ".join(f"`{other}`" for other in self.parameters) or "no parameters"
                self._fault(f"a parameter `{name}`", f"only {there}", f"add `{name}`")
        for name in unknown:
            if name not in renamed:
                advice = f"read it from the task, or bind it: functools.partial(..., {name}=...)"
                expected = f"only {', '.join(f'`{known}`' for known in self.known)}"
                self._fault(expected, f"an extra parameter `{name}`", advice)
        return renamed

    def _pair(self, unknown: list[str], missing: list[str]) -> dict[str, str]:
        """Match unknown names to missing ones: by spelling, then by order."""
        empty = inspect.Parameter.empty
        free = [n for n in unknown if self.parameters[n].default is empty and n != "self"]
        paired: dict[str, str] = {}
        for meant in missing:
            for name in difflib.get_close_matches(meant, free, 1, 0.7):
                paired[name] = meant
                free.remove(name)
        left = [meant for meant in missing if meant not in paired.values()]
        return {**paired, **dict(zip(free, left, strict=False))}

    def _check_type(self, name: str, meant: str, parameter: inspect.Parameter) -> None:
        if meant not in self.known or parameter.kind in _STARS:
            return
        told, admits = _PARAMETERS[meant]
        found = f"`{name}` without an annotation"
        if parameter.annotation is parameter.empty:
            fits = meant in self.contract.optional or admits(object, self.names)
        else:
            members = self.names.members(parameter.annotation)
            fits = any(_name(one) in _ANYTHING or admits(one, self.names) for one in members)
            found = f"`{name}: {_text(parameter.annotation, members)}"
        if not fits:
            advice = f"annotate `{meant}` with what is passed"
            self._fault(f"`{meant}` of type {told}", found, advice)

    def _check_return(self) -> str | None:
        annotation = self.signature.return_annotation
        members = self.names.members(annotation)
        names = [_result_name(member) for member in members]
        if len(names) == 1 and names[0] in self.contract.returns:
            return names[0]
        found = "no return annotation"
        if annotation is not inspect.Signature.empty:
            found = f"`-> {_text(annotation, members)}"
        expected = " or ".join(f"`-> {name}`" for name in self.contract.returns)
        advice = "annotate what awaiting it gives: one form, and never None"
        self._fault(expected, found, advice)
        return None


def _text(annotation: Any, members: list[Any]) -> str:
    """An annotation as written, a closing backtick, and a name in it that nothing defines."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    unknown = [_name(member) for member in members if isinstance(member, _Unresolved)]
    return f"{text}` (the module defines no `{unknown[0]}`)" if unknown else f"{text}`"
