"""Workflow and judge functions are held against their contract before anything starts.

    async def workflow(task: Dict, model: TrinityChatModel) -> float
    async def workflow(task: Dict, model: TrinityChatModel) -> WorkflowOutput
    async def judge(task: Dict, response: Any) -> JudgeOutput

Both forms of a workflow may also take `auxiliary_models`, `logger` and `system_prompt`, a judge
the first two. What means the same is accepted, by these rules:

- Everything is passed by name: order is free, keyword-only is fine, positional-only is not.
- An annotation must admit what is passed: a plain dict, a TrinityChatModel. So base classes,
  unions with a fitting member, TypedDicts and `Any` are fine. `task` and `model` must have one.
- The return annotation decides the form, so it must be there: `float` or a subclass (but not
  `int`, `bool` or an Optional), or a class with the fields of `WorkflowOutput`.
- No other parameter may be there, with a default or without, as in AgentScope's own check. A
  parameter that `functools.partial` bound by name is no longer a parameter.
- A name that only type checkers can resolve is compared by its spelling.

What the function does with its arguments is not looked at. Neither torch, Trinity nor AgentScope
is imported: their classes are recognised by name, result types by their fields.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.errors import BadInput, Fault

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_Parameter = inspect.Parameter

# --- What an annotation means --------------------------------------------------------------------


class _Unresolved(type):
    """The type of stand-ins for names that exist for type checkers only, or not at all."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Unresolved(name, (), {})

    def __getitem__(cls, arguments: Any) -> Any:
        return types.GenericAlias(cls, arguments)


class _Names(dict[str, Any]):
    """Where the names of a function's annotations are looked up; every name is found."""

    def __init__(self, namespace: Mapping[str, Any], for_type_checkers: Mapping[str, str]) -> None:
        super().__init__(namespace)
        self.for_type_checkers = for_type_checkers

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        meaning = self.for_type_checkers.get(name, name)
        if meaning != name:
            return typing.Annotated[meaning, None]  # read as a text of its own
        return _Unresolved(name, (), {})

    def members(self, annotation: Any) -> list[Any]:
        """The members of an annotation's union; `Optional[X]` has `X` and None's type."""
        try:
            return list(self._members(annotation))
        except RecursionError:  # an alias of itself
            return [_Unresolved(str(annotation), (), {})]

    def _members(self, annotation: Any) -> Iterator[Any]:
        if isinstance(annotation, typing.ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            yield from self._of_text(annotation)
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
            for argument in arguments:
                yield from self._members(argument)
            if spelled == "Optional":
                yield type(None)
        elif not isinstance(annotation, type) and (
            meaning := getattr(annotation, "__supertype__", getattr(annotation, "__value__", None))
        ):  # NewType, the `type` statement
            yield from self._members(meaning)
        else:
            yield annotation

    def _of_text(self, text: str) -> Iterator[Any]:
        try:
            node = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            yield _Unresolved(text, (), {})
            return
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            yield from self._of_text(ast.unparse(node.right))
            node = node.left
        source = ast.unparse(node)
        try:
            found = eval(source, {"__builtins__": {}}, self)
        except RecursionError:
            raise
        except Exception:
            found = _Unresolved(source.rpartition(".")[2], (), {})
        yield from self._members(found)


def _name(member: Any) -> str:
    """The last part of a type's name: 'dict', 'TrinityChatModel', 'None', 'Any'."""
    if member is type(None):
        return "None"
    target = typing.get_origin(member) or member
    name = getattr(target, "__name__", None) or getattr(target, "_name", None)
    return str(name or inspect.formatannotation(target))


# --- What a workflow and a judge must look like --------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What may be written for one parameter."""

    expected: str
    admits: Callable[[Any, _Names], bool]
    """Whether one member of the annotation's union takes what is passed."""
    spellings: tuple[str, ...]
    """Annotations to paste: the first that the module has the name of, or the last one."""
    suffix: str = ""

    def to_paste(self, names: _Names) -> str:
        """An annotation that is right in a module with these names."""
        last = self.spellings[-1] if self.spellings else ""
        return next((name for name in self.spellings if name in names), last) + self.suffix


@dataclass(frozen=True)
class _Contract:
    """The shape of one noun's functions."""

    noun: str
    usual: str
    essential: Mapping[str, _Kind]
    optional: Mapping[str, _Kind]
    returns: tuple[str, ...]
    """What the return annotation may be, as `_result_name` calls it; the usual one first."""


_MODELS = ("TrinityChatModel", "OpenAIChatModel", "ChatModelBase", "RunChatModel")
_FIELDS = {
    "WorkflowOutput": {"reward", "response", "metrics"},
    "JudgeOutput": {"reward", "metrics"},
}
_ANYTHING = ("Any", "object")


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
    protocol = bool(getattr(target, "_is_protocol", False))
    return protocol or _name(member) in (*_MODELS, "Callable")


_TASK = _Kind(
    "Dict (or dict, Dict[str, Any], Mapping, MutableMapping, a TypedDict)",
    _admits_mapping,
    ("Dict", "dict"),
)
_AUXILIARY = _Kind(
    "Dict[str, OpenAIChatModel] | None", _admits_mapping, ("Dict", "dict"), " | None"
)
_LOGGER = _Kind(
    "logging.Logger | None", lambda member, _: _name(member) == "Logger", ('"Logger | None"',)
)

WORKFLOW = _Contract(
    noun="workflow",
    usual="async def f(task: Dict, model: TrinityChatModel) -> float",
    essential={
        "task": _TASK,
        "model": _Kind(
            "TrinityChatModel (or its bases OpenAIChatModel, ChatModelBase)",
            _admits_model,
            (*_MODELS, '"TrinityChatModel"'),
        ),
    },
    optional={
        "auxiliary_models": _AUXILIARY,
        "logger": _LOGGER,
        "system_prompt": _Kind(
            "str | None", lambda member, _: _name(member) == "str", ("str | None",)
        ),
    },
    returns=("float", "WorkflowOutput"),
)
JUDGE = _Contract(
    noun="judge",
    usual="async def f(task: Dict, response: Any) -> JudgeOutput",
    essential={"task": _TASK, "response": _Kind("any type", lambda *_: True, ())},
    optional={"auxiliary_models": _AUXILIARY, "logger": _LOGGER},
    returns=("JudgeOutput",),
)


def _result_name(member: Any) -> str:
    """'float', 'WorkflowOutput', 'JudgeOutput', or another name, of what a function returns."""
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


def _why_not(members: Sequence[Any], accepted: Sequence[str]) -> str:
    """Why a return annotation with these members is none of those accepted."""
    names = [_result_name(member) for member in members]
    fitting = [name for name in names if name in accepted]
    if "None" in names:
        optional = "it may be None; a run that has no reward raises instead"
        return optional if fitting else "a run without a reward teaches nothing"
    if len(fitting) > 1:
        return "two forms; a function has one"
    if set(names) & {"Awaitable", "Coroutine"}:
        return "an `async def` is annotated with what awaiting it gives"
    if set(names) & {"int", "bool"}:
        return "a reward is a float"
    if "Any" in names:
        return "it does not say which form"
    if names[0] in _FIELDS:
        return f"that is what a {'workflow' if names[0] == 'WorkflowOutput' else 'judge'} returns"
    if not fitting and isinstance(members[0], _Unresolved):
        return "a name that the module does not define"
    return "another type"


# --- Where a function was written ----------------------------------------------------------------


@dataclass(frozen=True)
class _Definition:
    """What can be known about the source of a callable.

    Looks through partials, bound methods, objects with a `__call__` and decorators that use
    `functools.wraps`, down to the plain function whose source a person can edit.
    """

    name: str
    """To be shown: the qualified name, without the function around a local one."""
    file: str
    line: int
    """Line of `def`; 0 where unknown."""
    layers: tuple[Any, ...]
    """The callable, what it wraps, ..., the plain function."""
    node: _FunctionNode | None
    """Its syntax tree; None without a source (typed into a prompt, built-in, compiled)."""
    names: _Names

    @property
    def where(self) -> str:
        """`file:line: name` for messages."""
        return f"{self.file}:{self.line}: {self.name}" if self.line else f"{self.file}: {self.name}"

    @property
    def is_async(self) -> bool:
        """Whether calling it gives something to await.

        A decorator's plain function counts as async if what it wraps is, since it usually passes
        the coroutine on; not so if it runs an event loop itself.
        """
        for layer in self.layers:
            if inspect.iscoroutinefunction(layer):
                return True
            used = set(getattr(getattr(layer, "__code__", None), "co_names", ()))
            if "run_until_complete" in used or ("run" in used and used & _DRIVERS):
                return False
        return False

    def arguments(self) -> dict[str, tuple[ast.arg, ast.expr | None]]:
        """Each parameter and its default, as in the `def` line, without `*args`, `**kwargs`."""
        if self.node is None:
            return {}
        given = self.node.args
        positional = [*given.posonlyargs, *given.args]
        defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
        every = zip([*positional, *given.kwonlyargs], [*defaults, *given.kw_defaults], strict=True)
        return {item.arg: (item, default) for item, default in every}

    def text(self, parameter: str, annotation: Any) -> str:
        """An annotation as the user wrote it; `parameter` empty: what is returned."""
        written = self.node.returns if self.node is not None else None
        if parameter:
            found = self.arguments().get(parameter)
            written = found[0].annotation if found is not None else None
        if written is not None:
            return ast.unparse(written)
        return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


_DRIVERS = {"asyncio", "anyio", "trio"}


def _define(function: Any) -> _Definition:
    layers = tuple(_layers(function))
    inner = layers[-1]
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    name = str(name).rpartition("<locals>.")[2]
    if not inspect.isfunction(inner):
        module = getattr(inner, "__module__", None) or type(inner).__module__
        return _Definition(name, f"module {module}", 0, layers, None, _Names({}, {}))
    code, closure = inner.__code__, inspect.getclosurevars(inner).nonlocals
    node, for_type_checkers = None, {}
    try:
        module = ast.parse("".join(linecache.getlines(code.co_filename, inner.__globals__)))
    except (SyntaxError, ValueError):
        module = ast.Module([], [])
    for found in ast.walk(module):
        if isinstance(found, _FunctionNode) and found.name == code.co_name:
            first = min(line.lineno for line in (found, *found.decorator_list))
            if first == code.co_firstlineno:
                node, for_type_checkers = found, dict(_for_type_checkers(module))
    line = node.lineno if node is not None else code.co_firstlineno
    names = _Names({**inner.__globals__, **closure}, for_type_checkers)
    return _Definition(name, code.co_filename, line, layers, node, names)


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


def _for_type_checkers(module: ast.Module) -> Iterator[tuple[str, str]]:
    """What the names stand for that a module defines under `if TYPE_CHECKING:`."""
    for block in ast.walk(module):
        if not isinstance(block, ast.If) or not ast.unparse(block.test).endswith("TYPE_CHECKING"):
            continue
        for statement in block.body:
            if isinstance(statement, ast.ImportFrom):
                yield from ((name.asname or name.name, name.name) for name in statement.names)
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    yield ast.unparse(target), ast.unparse(statement.value)


# --- The check -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """A workflow or judge function that passed the check."""

    name: str
    file: str
    line: int
    returns: str
    """'float', 'WorkflowOutput' or 'JudgeOutput' (for every class with the fields)."""
    optional: tuple[str, ...]
    """Which of `auxiliary_models`, `logger`, `system_prompt` it takes, in its own order."""


def check_workflow(function: Callable[..., Any]) -> Checked:
    """Check a workflow function.

    Raises:
        BadInput: with every fault of the function; each gives the corrected `def` line.
    """
    return _Check(function, WORKFLOW).run()


def check_judge(function: Callable[..., Any]) -> Checked:
    """Check a judge function.

    Raises:
        BadInput: with every fault of the function; each gives the corrected `def` line.
    """
    return _Check(function, JUDGE).run()


def check_functions(
    workflow: Callable[..., Any], judge: Callable[..., Any] | None = None
) -> tuple[Checked, Checked | None]:
    """Check a workflow, its judge, and that they fit together.

    Raises:
        BadInput: with every fault of both functions.
    """
    errors: list[BadInput] = []
    checked = scorer = None
    try:
        checked = check_workflow(workflow)
    except BadInput as error:
        errors.append(error)
    try:
        scorer = check_judge(judge) if judge is not None else None
    except BadInput as error:
        errors.append(error)
    if errors or checked is None:
        faults = [fault for error in errors for fault in error.faults]
        raise BadInput("\n".join(error.title for error in errors), faults)
    if scorer is not None and checked.returns == "float":
        raise _Check(workflow, WORKFLOW).has_no_use_for(scorer.name)
    return checked, scorer


class _Check:
    """One function held against one contract; collects faults and the line without them."""

    def __init__(self, function: Callable[..., Any], contract: _Contract) -> None:
        self.contract = contract
        self.known = {**contract.essential, **contract.optional}
        if not callable(function) or inspect.isclass(function):
            raise _not_a_function(function, contract)
        self.definition = _define(function)
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise _not_python(self.definition, contract) from None
        if not inspect.isfunction(self.definition.layers[-1]) and not self.definition.is_async:
            raise _not_python(self.definition, contract)
        partials = (item for item in self.definition.layers if isinstance(item, functools.partial))
        self.bound = {name for partial in partials for name in partial.keywords}
        self.parameters = {
            name: parameter
            for name, parameter in self.signature.parameters.items()
            if name not in self.bound
        }
        self.faults: list[tuple[str, str, str]] = []  # expected, found, advice
        self.renamed: dict[str, str] = {}
        self.retyped: set[str] = set()
        self.dropped: set[str] = set()

    def run(self) -> Checked:
        """Raises BadInput with all faults."""
        self._check_kind()
        self._check_names()
        for name, parameter in self.parameters.items():
            self._check_type(name, parameter)
        returns = self._check_return()
        if returns is None or self.faults:
            raise self._refusal()
        optional = tuple(name for name in self.parameters if name in self.contract.optional)
        place = self.definition
        return Checked(place.name, place.file, place.line, returns, optional)

    def has_no_use_for(self, judge: str) -> BadInput:
        """The refusal of a judge beside a workflow that returns its reward itself."""
        self._fault(
            "`-> WorkflowOutput`, whose response the judge scores",
            f"{self.definition.name} returns float, so the judge `{judge}` would never be called",
            "return WorkflowOutput(response=...), or leave the judge out",
        )
        return self._refusal("WorkflowOutput")

    def _fault(self, expected: str, found: str, advice: str) -> None:
        self.faults.append((expected, found, advice))

    def _check_kind(self) -> None:
        inner = self.definition.layers[-1]
        if inspect.isasyncgenfunction(inner):
            self._fault(
                "a coroutine function: one result, given back with `return`",
                "an async generator: its body has `yield`",
                "replace `yield` by `return`",
            )
        elif not self.definition.is_async:
            kind = "generator" if inspect.isgeneratorfunction(inner) else "sync"
            self._fault(
                f"an async function: `{self.contract.usual}`",
                f"a {kind} function: `{self.definition.name}` has no `async` before `def`",
                "write `async def`, and `await` the calls inside",
            )

    def _check_names(self) -> None:
        unknown = self._check_passing()
        missing = [name for name in self.contract.essential if name not in self.parameters]
        for name in self.bound.intersection(missing):
            missing.remove(name)
            self._fault(
                f"`{name}` left free: every run passes its own",
                f"`{name}` is bound by functools.partial",
                f"leave `{name}=` out of the partial",
            )
        self.renamed = self._pair(unknown, missing)
        for name, meant in self.renamed.items():
            self._fault(
                f"a parameter named `{meant}` (arguments are passed by name)",
                f"`{name}` in its place",
                f"rename `{name}` to `{meant}`, in the body too",
            )
        stars = (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD)
        named = [f"`{name}`" for name, item in self.parameters.items() if item.kind not in stars]
        found = f"only {', '.join(named)}" if named else "no parameter with a name"
        for name in missing:
            if name not in self.renamed.values():
                self._fault(f"a parameter `{name}`", found, f"add `{name}`")
        for name in unknown:
            if name not in self.renamed:
                self.dropped.add(name)
                self._refuse_extra(name)

    def _check_passing(self) -> list[str]:
        """Refuse what cannot be passed by name; the names that the contract does not know."""
        unknown = []
        kinds = {parameter.kind for parameter in self.parameters.values()}
        is_wrapper = {_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD} <= kinds
        for name, parameter in self.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
                wraps = "put @functools.wraps(...) on it if it is a decorator's wrapper, or "
                advice = f"{wraps if is_wrapper else ''}write the parameters out"
                self._fault("parameters with names of their own", f"`{star}{name}`", advice)
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                found = f"`{name}` is positional-only: it stands before `/`"
                self._fault("parameters that can be passed by name", found, "remove the `/`")
            if name not in self.known:
                unknown.append(name)
        return unknown

    def _pair(self, unknown: list[str], missing: list[str]) -> dict[str, str]:
        """Which unknown name stands for which missing one: by spelling, then by order."""
        free = [
            name
            for name in unknown
            if self.parameters[name].default is _Parameter.empty and not self._is_self(name)
        ]
        paired: dict[str, str] = {}
        for meant in missing:
            for name in difflib.get_close_matches(meant, free, 1, 0.7):
                paired[name] = meant
                free.remove(name)
        left = [meant for meant in missing if meant not in paired.values()]
        return {**paired, **dict(zip(free, left, strict=False))}

    def _is_self(self, name: str) -> bool:
        return name == "self" and next(iter(self.parameters)) == "self"

    def _refuse_extra(self, name: str) -> None:
        if self._is_self(name):
            owner = self.definition.name.rpartition(".")[0] or "Class"
            method = self.definition.name.rpartition(".")[2]
            self._fault(
                "a function, or the method of an object",
                "a method without its object: `self` is left to be passed",
                f"pass `{owner}(...).{method}`, or make it a plain function",
            )
            return
        has_default = self.parameters[name].default is not _Parameter.empty
        optional = ", ".join(f"`{known}`" for known in self.contract.optional)
        self._fault(
            f"only `{'`, `'.join(self.contract.essential)}` and, if wanted, {optional}",
            f"an extra parameter `{name}`{' (its default does not help)' * has_default}",
            f"read it from the task, or bind it: functools.partial(..., {name}=...)",
        )

    def _check_type(self, name: str, parameter: inspect.Parameter) -> None:
        meant = self.renamed.get(name, name)
        kind, names = self.known.get(meant), self.definition.names
        if kind is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return
        if parameter.annotation is parameter.empty:
            if meant in self.contract.essential and not kind.admits(object, names):
                self.retyped.add(name)
                found = f"`{name}` without an annotation"
                expected = f"`{meant}` annotated, as {kind.expected}"
                self._fault(expected, found, f"annotate `{meant}`")
            return
        members = names.members(parameter.annotation)
        if any(_name(member) in _ANYTHING or kind.admits(member, names) for member in members):
            return
        self.retyped.add(name)
        unknown = [_name(item) for item in members if isinstance(item, _Unresolved)]
        remark = f", and the module defines no `{unknown[0]}`" if unknown else ""
        self._fault(
            f"`{meant}` of type {kind.expected}",
            f"`{name}: {self.definition.text(name, parameter.annotation)}`{remark}",
            f"annotate `{meant}` with what is passed",
        )

    def _check_return(self) -> str | None:
        annotation = self.signature.return_annotation
        expected = " or ".join(f"`-> {name}`" for name in self.contract.returns)
        if annotation is inspect.Signature.empty:
            self._fault(expected, "no return annotation", "say what is returned")
            return None
        members = self.definition.names.members(annotation)
        found = [_result_name(member) for member in members]
        if len(found) == 1 and found[0] in self.contract.returns:
            return found[0]
        text = self.definition.text("", annotation)
        reason = _why_not(members, self.contract.returns)
        self._fault(expected, f"`-> {text}`: {reason}", "annotate what is returned")
        return None

    def _refusal(self, returns: str | None = None) -> BadInput:
        line = self._corrected(returns)
        faults = [
            Fault(
                self.definition.where,
                expected,
                found,
                f"{advice}; the corrected line:\n              {line}",
            )
            for expected, found, advice in self.faults
        ]
        noun = self.contract.noun
        return BadInput(f"{self.definition.name} does not fit the contract of a {noun}.", faults)

    def _corrected(self, returns: str | None) -> str:
        """A `def` line that passes: what was right as it was written, and what partials bind."""
        definition, parts = self.definition, []
        written = definition.arguments()
        meant = {self.renamed.get(name, name): name for name in self.parameters}
        for name, (argument, default) in written.items():
            if name not in self.parameters:
                parts.append(_as_written(argument, default))
        for name, kind in self.known.items():
            own = meant.get(name)
            if own in written and own not in self.retyped:
                argument, default = written[own]
                parts.append(_as_written(ast.arg(name, argument.annotation), default))
            elif own is not None or name in self.contract.essential:
                pasted = kind.to_paste(definition.names)
                parts.append(f"{name}: {pasted}" if pasted else name)
        parts.sort(key=lambda part: "=" in part)
        name = definition.name.rpartition(".")[2]
        name = name if name.isidentifier() else self.contract.noun
        return f"async def {name}({', '.join(parts)}) -> {self._returns(returns)}:"

    def _returns(self, wanted: str | None) -> str:
        """The return annotation to paste: as written, else as returned, else the usual one."""
        accepted, annotation = self.contract.returns, self.signature.return_annotation
        definition, names = self.definition, self.definition.names
        found: list[str] = []
        if wanted is None and annotation is not inspect.Signature.empty:
            found = [_result_name(member) for member in names.members(annotation)]
            if len(found) == 1 and found[0] in accepted and definition.node is not None:
                return definition.text("", annotation)
        for node in ast.walk(definition.node) if definition.node else ():
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                found.append(ast.unparse(node.value.func).rpartition(".")[2])
        name = wanted or next((name for name in accepted if name in found), accepted[0])
        return name if name == "float" or name in names else f'"{name}"'


def _as_written(argument: ast.arg, default: ast.expr | None) -> str:
    given = "" if default is None else f" = {ast.unparse(default)}"
    return f"{ast.unparse(argument)}{given}"


def _not_a_function(function: Any, contract: _Contract) -> BadInput:
    found = f"{type(function).__name__}: {function!r:.80}"
    advice = f"pass a function `{contract.usual}`"
    if inspect.isclass(function):
        found = f"the class {function.__name__}"
        advice = f"pass an object, `{function.__name__}(...)`, whose `__call__` is async"
    elif inspect.iscoroutine(function):
        found = f"a coroutine: `{function.__name__}` was called already"
        advice = f"pass `{function.__name__}` itself, without parentheses"
        function.close()
    fault = Fault(f"the {contract.noun} function", "an async function", found, advice)
    return BadInput(f"This cannot be a {contract.noun}.", [fault])


def _not_python(definition: _Definition, contract: _Contract) -> BadInput:
    fault = Fault(
        definition.where,
        f"an async function written in Python: `{contract.usual}`",
        f"`{definition.name}`, which is built in, compiled, a class, or hides its signature",
        "call it from a function of your own",
    )
    return BadInput(f"{definition.name} cannot be a {contract.noun}.", [fault])
