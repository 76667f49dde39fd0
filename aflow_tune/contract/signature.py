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

What the function does with its arguments is not looked at.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from aflow_tune.contract.annotations import Meaning, read
from aflow_tune.contract.definition import (
    Definition,
    DefParameter,
    annotation_text,
    define,
    is_async,
)
from aflow_tune.contract.kinds import JUDGE, WORKFLOW, Contract, result_name, why_not
from aflow_tune.errors import BadInput, Fault

_ANYTHING = ("Any", "object")


@dataclass(frozen=True)
class WorkflowContract:
    """A workflow function that passed the check."""

    name: str
    file: str
    line: int
    returns: str
    """'float', or 'WorkflowOutput' for every class with its fields."""
    optional: tuple[str, ...]
    """Which of `auxiliary_models`, `logger`, `system_prompt` it takes."""


@dataclass(frozen=True)
class JudgeContract:
    """A judge function that passed the check."""

    name: str
    file: str
    line: int
    optional: tuple[str, ...]
    """Which of `auxiliary_models`, `logger` it takes."""


def check_workflow(function: Callable[..., Any]) -> WorkflowContract:
    """Check a workflow function.

    Raises:
        BadInput: with every fault of the function; each gives the corrected `def` line.
    """
    check = _Check(function, WORKFLOW)
    returns = check.run()
    where = check.definition
    return WorkflowContract(where.name, where.file, where.line, returns, check.optional())


def check_judge(function: Callable[..., Any]) -> JudgeContract:
    """Check a judge function.

    Raises:
        BadInput: with every fault of the function; each gives the corrected `def` line.
    """
    check = _Check(function, JUDGE)
    check.run()
    where = check.definition
    return JudgeContract(where.name, where.file, where.line, check.optional())


def check_functions(
    workflow: Callable[..., Any], judge: Callable[..., Any] | None = None
) -> tuple[WorkflowContract, JudgeContract | None]:
    """Check a workflow, its judge, and that they fit together.

    Raises:
        BadInput: with every fault of both functions.
    """
    errors = []
    contracts: dict[str, Any] = {"judge": None}
    try:
        contracts["workflow"] = check_workflow(workflow)
    except BadInput as error:
        errors.append(error)
    if judge is not None:
        try:
            contracts["judge"] = check_judge(judge)
        except BadInput as error:
            errors.append(error)
    if errors:
        faults = [fault for error in errors for fault in error.faults]
        raise BadInput("\n".join(error.title for error in errors), faults)
    if judge is not None and contracts["workflow"].returns == "float":
        raise _Check(workflow, WORKFLOW).has_no_use_for(contracts["judge"].name)
    return contracts["workflow"], contracts["judge"]


class _Check:
    """One function held against one contract; collects faults and the line without them."""

    definition: Definition

    def __init__(self, function: Callable[..., Any], contract: Contract) -> None:
        self.contract = contract
        self.known = {**contract.essential, **contract.optional}
        if not callable(function) or inspect.isclass(function):
            raise _not_a_function(function, contract)
        self.definition = define(function)
        is_python = inspect.isfunction(self.definition.layers[-1])
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise _not_python(self.definition, contract) from None
        if not is_python and not is_async(self.definition):
            raise _not_python(self.definition, contract)
        self.parameters = {
            name: parameter
            for name, parameter in self.signature.parameters.items()
            if name not in self.definition.bound
        }
        self.faults: list[tuple[str, str, str]] = []  # expected, found, advice
        self.renamed: dict[str, str] = {}
        self.retyped: set[str] = set()
        self.dropped: set[str] = set()

    def run(self) -> str:
        """What the function returns. Raises BadInput with all faults."""
        self._check_kind()
        self._check_names()
        for name, parameter in self.parameters.items():
            self._check_type(name, parameter)
        returns = self._check_return()
        if returns is None or self.faults:
            raise self._refusal()
        return returns

    def optional(self) -> tuple[str, ...]:
        """The optional parameters that the function takes, in its own order."""
        return tuple(name for name in self.parameters if name in self.contract.optional)

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
        elif not is_async(self.definition):
            kind = "generator" if inspect.isgeneratorfunction(inner) else "sync"
            self._fault(
                f"an async function: `{self.contract.usual}`",
                f"a {kind} function: `{self.definition.name}` has no `async` before `def`",
                "write `async def`, and `await` the calls inside",
            )

    def _check_names(self) -> None:
        unknown = self._check_passing()
        missing = [name for name in self.contract.essential if name not in self.parameters]
        for name in self.definition.bound.intersection(missing):
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
        stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [name for name, found in self.parameters.items() if found.kind not in stars]
        present = ", ".join(f"`{name}`" for name in named)
        for name in missing:
            if name not in self.renamed.values():
                found = f"only {present}" if present else "no parameter with a name"
                self._fault(f"a parameter `{name}`", found, f"add `{name}`")
        for name in unknown:
            if name not in self.renamed:
                self.dropped.add(name)
                self._refuse_extra(name)

    def _check_passing(self) -> list[str]:
        """Refuse what cannot be passed by name; the names that the contract does not know."""
        unknown = []
        kinds = {parameter.kind for parameter in self.parameters.values()}
        is_wrapper = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
        for name, parameter in self.parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                star = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
                wraps = "put @functools.wraps(...) on it if it is a decorator's wrapper, or "
                self._fault(
                    "parameters with names of their own",
                    f"`{star}{name}`",
                    f"{wraps if is_wrapper else ''}write the parameters out",
                )
                continue
            if parameter.kind is parameter.POSITIONAL_ONLY:
                self._fault(
                    "parameters that can be passed by name",
                    f"`{name}` is positional-only: it stands before `/`",
                    "remove the `/`",
                )
            if name not in self.known:
                unknown.append(name)
        return unknown

    def _pair(self, unknown: list[str], missing: list[str]) -> dict[str, str]:
        """Which unknown name stands for which missing one: by spelling, then by order."""
        free = [
            name
            for name in unknown
            if self.parameters[name].default is inspect.Parameter.empty
            and not self._is_unbound_self(name)
        ]
        paired: dict[str, str] = {}
        for meant in missing:
            for name in difflib.get_close_matches(meant, free, 1, 0.7):
                paired[name] = meant
                free.remove(name)
        left = [meant for meant in missing if meant not in paired.values()]
        return {**paired, **dict(zip(free, left, strict=False))}

    def _is_unbound_self(self, name: str) -> bool:
        return name == "self" and next(iter(self.parameters)) == "self"

    def _refuse_extra(self, name: str) -> None:
        if self._is_unbound_self(name):
            owner, _, method = self.definition.name.rpartition(".")
            self._fault(
                "a function, or the method of an object",
                "a method without its object: `self` is left to be passed",
                f"pass `{owner or 'Class'}(...).{method}`, or make it a plain function",
            )
            return
        has_default = self.parameters[name].default is not inspect.Parameter.empty
        optional = ", ".join(f"`{known}`" for known in self.contract.optional)
        self._fault(
            f"only `{'`, `'.join(self.contract.essential)}` and, if wanted, {optional}",
            f"an extra parameter `{name}`{' (its default does not help)' * has_default}",
            f"read it from the task, or bind it: functools.partial(..., {name}=...)",
        )

    def _check_type(self, name: str, parameter: inspect.Parameter) -> None:
        meant = self.renamed.get(name, name)
        kind = self.known.get(meant)
        if kind is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return
        if parameter.annotation is parameter.empty:
            self._refuse_bare(name, meant)
            return
        meanings = read(parameter.annotation, self.definition.names)
        if any(meaning.name in _ANYTHING or kind.admits(meaning) for meaning in meanings):
            return
        self.retyped.add(name)
        text = self.definition.annotation_text(name, parameter.annotation)
        unknown = [meaning.name for meaning in meanings if meaning.type is None]
        remark = f", and the module defines no `{unknown[0]}`" if unknown else ""
        self._fault(
            f"`{meant}` of type {kind.expected}",
            f"`{name}: {text}`{remark}",
            f"annotate `{meant}` with what is passed",
        )

    def _refuse_bare(self, name: str, meant: str) -> None:
        kind = self.known[meant]
        if meant in self.contract.essential and not kind.admits(Meaning("object")):
            self.retyped.add(name)
            self._fault(
                f"`{meant}` annotated, as {kind.expected}",
                f"`{name}` without an annotation",
                f"annotate `{meant}`",
            )

    def _check_return(self) -> str | None:
        annotation = self.signature.return_annotation
        accepted = self.contract.returns
        expected = " or ".join(f"`-> {name}`" for name in accepted)
        if annotation is inspect.Signature.empty:
            self._fault(expected, "no return annotation", "say what is returned")
            return None
        meanings = read(annotation, self.definition.names)
        names = [result_name(meaning) for meaning in meanings]
        if len(names) == 1 and names[0] in accepted:
            return names[0]
        node = self.definition.node
        text = ast.unparse(node.returns) if node and node.returns else annotation_text(annotation)
        reason = why_not(meanings, accepted)
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
        """The `def` line that passes; what was right stays as it was written."""
        namespace = self.definition.names.namespace
        bound: list[DefParameter] = []
        free: list[DefParameter] = []
        for parameter in self.definition.parameters():
            if parameter.name in self.dropped:
                continue
            if parameter.name not in self.parameters:
                bound.append(parameter)
                continue
            name = self.renamed.get(parameter.name, parameter.name)
            annotation = parameter.annotation
            if parameter.name in self.retyped or self.definition.node is None:
                annotation = self.known[name].to_paste(namespace)
            free.append(replace(parameter, name=name, annotation=annotation))
        present = {parameter.name for parameter in (*bound, *free)}
        added = [
            DefParameter(name, kind.to_paste(namespace))
            for name, kind in self.contract.essential.items()
            if name not in present
        ]
        if added:  # there is no order of the user's to keep
            order = list(self.known)
            free = sorted([*added, *free], key=lambda parameter: order.index(parameter.name))
        parameters = [*bound, *free]
        return self.definition.def_line(parameters, self._returns(returns), self.contract.noun)

    def _returns(self, wanted: str | None) -> str:
        """The return annotation to paste: as written, else as returned, else the usual one."""
        names = self.contract.returns
        annotation = self.signature.return_annotation
        members: list[str] = []
        if wanted is None and annotation is not inspect.Signature.empty:
            members = [result_name(part) for part in read(annotation, self.definition.names)]
            node = self.definition.node
            if len(members) == 1 and members[0] in names and node and node.returns:
                return ast.unparse(node.returns)
        returned = set(self.definition.returned_calls())
        likely = [name for name in names if name in members or name in returned]
        name = wanted or (likely or names)[0]
        in_reach = name == "float" or name in self.definition.names.namespace
        return name if in_reach else f'"{name}"'


def _not_a_function(function: Any, contract: Contract) -> BadInput:
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


def _not_python(definition: Definition, contract: Contract) -> BadInput:
    fault = Fault(
        definition.where,
        f"an async function written in Python: `{contract.usual}`",
        f"`{definition.name}`, which is built in, compiled, a class, or hides its signature",
        "call it from a function of your own",
    )
    return BadInput(f"{definition.name} cannot be a {contract.noun}.", [fault])
