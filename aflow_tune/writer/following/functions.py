"""The graph's own functions: their arguments, and what Python's functions do with them.

A function is followed anew wherever it is called, with what it is called with there; one that
calls itself is refused.
"""

from __future__ import annotations

import ast

from aflow_tune.writer.following.methods import Methods
from aflow_tune.writer.following.using import Given
from aflow_tune.writer.following.values import (
    NOTHING,
    TEXT,
    Function,
    Handle,
    Obj,
    Self,
    Value,
    joined,
)
from aflow_tune.writer.following.walking import MAX_STACK, TooLarge
from aflow_tune.writer.refusals import did_you_mean, listed
from aflow_tune.writer.types import RefusalKind


class Functions(Methods):
    """Following the graph's own functions where they are called."""

    def function(self, node: ast.AST, target: Function, given: Given) -> Value:
        """Follow a function of the graph with these arguments."""
        function = target.node
        name = getattr(function, "name", "the lambda")
        if len(self.stack) >= MAX_STACK:
            raise TooLarge
        if function in self.stack:
            self.unbounded = True
            message = f"{name} calls itself; write a `for` over a known number of turns instead"
            return self.refuse(RefusalKind.UNBOUNDED, message, node)
        self.entered.add(function)
        problem = self._bind(function, target.bound, given)
        if problem:
            return self.refuse(RefusalKind.ARGUMENTS, f"{name}: {problem}", node)
        value = self.follow(node, function)
        if isinstance(function, ast.AsyncFunctionDef):
            return self.new(node, Obj("pending", None, value), name)
        return value

    def _bind(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        bound: bool,
        given: Given,
    ) -> str:
        """Put arguments into the function's scope; what does not fit."""
        arguments = function.args
        positional = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
        values = [frozenset({Self()}), *given.values] if bound else list(given.values)
        keyword_only = [item.arg for item in arguments.kwonlyargs]
        defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False)) | {
            name: default
            for name, default in zip(keyword_only, arguments.kw_defaults, strict=True)
            if default is not None
        }
        found: dict[str, Value] = dict(zip(positional, values, strict=False))
        extra = values[len(positional) :]
        unknown = [name for name in given.named if name not in (*positional, *keyword_only)]
        found |= {name: item for name, item in given.named.items() if name not in unknown}
        if given.open:
            anything = self.anything(given.values)
            found = dict.fromkeys([*positional, *keyword_only], anything) | given.named
            if bound:
                found[positional[0]] = frozenset({Self()})
        elif extra and arguments.vararg is None:
            return f"it takes {len(positional) - bound} arguments, not {len(values) - bound}"
        elif unknown and arguments.kwarg is None:
            return f"it has no parameter {unknown[0]}{did_you_mean(unknown[0], positional)}"
        missing = [name for name in (*positional, *keyword_only) if name not in found]
        lacking = [name for name in missing if name not in defaults]
        if lacking:
            return f"the argument {listed(lacking)} is missing"
        for name in missing:
            found[name] = self.value(defaults[name])
            # A list of a default lives on from call to call.
            self.here.let_go(found[name])
        rest = [item for name, item in given.named.items() if name in unknown]
        if arguments.vararg is not None:
            found[arguments.vararg.arg] = self.new(
                arguments.vararg,
                Obj("tuple", None if given.open else len(extra), joined(NOTHING, *extra)),
            )
        if arguments.kwarg is not None:
            found[arguments.kwarg.arg] = self.new(
                arguments.kwarg,
                Obj("dict", None if given.open else len(rest), joined(NOTHING, *rest), TEXT),
            )
        for key in [key for key in self.here.variables if key[0] is function]:
            del self.here.variables[key]
        for name, value in found.items():
            self.here.variables[(function, name)] = value
        return ""

    def apply(self, node: ast.AST, callee: Value, items: list[Value], turns: int | None) -> Value:
        """Let one of Python's functions call the graph's own, so many times."""
        results = []
        for target in callee:
            if not isinstance(target, (Function, Handle)):
                continue
            part, heap = self.begin_part(), dict(self.here.heap)
            if isinstance(target, Handle):
                if isinstance(node, ast.Call):
                    results.append(self.use(node, target, Given(items, {})))
            else:
                wanted = len(target.node.args.args) - target.bound
                fits = len(items) == wanted or target.node.args.vararg is not None
                anything = [self.anything(items)] * max(0, wanted)
                given = Given(items if fits else anything, {})
                results.append(self.function(node, target, given))
            if self.peak != part[0] and turns is None:
                self.unbounded = True
                message = (
                    "how often this calls an operator cannot be told; write a `for` over a list "
                    "of known length"
                )
                self.refuse(RefusalKind.UNBOUNDED, message, node)
            self.end_part(part, 1 if turns is None else max(1, turns))
            if turns != 1:  # what grew in one call grows in each
                grown = [ref for ref, obj in heap.items() if self.here.heap.get(ref) != obj]
                self.here.let_go(frozenset(grown))
        return joined(NOTHING, *results)
