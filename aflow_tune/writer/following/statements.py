"""The statements and loops of a written graph, and the walk through the whole of it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from aflow_tune.graph import inside
from aflow_tune.writer.allowed import MODULES
from aflow_tune.writer.following.loops import Loops
from aflow_tune.writer.following.using import Given
from aflow_tune.writer.following.values import (
    BROKEN,
    NONE,
    NOTHING,
    PLAIN,
    TEXT,
    Config,
    Function,
    Module,
    Named,
    Result,
    Self,
    State,
    Value,
    joined,
)
from aflow_tune.writer.following.walking import Cost, End, Returned
from aflow_tune.writer.refusals import shown
from aflow_tune.writer.types import RefusalKind


class Walk(Loops):
    """A graph followed from its constructor to its answer."""

    def run(self) -> Cost:
        """Follow the whole graph; its cost at worst.

        Raises:
            TooLarge: it takes too many steps.
        """
        tree, workflow = self.shape.tree, self.shape.workflow
        assert tree is not None
        assert workflow is not None
        self.scope = tree
        self.block(tree.body)
        for member in workflow.body:
            if isinstance(member, (ast.Assign, ast.AnnAssign)) and member.value is not None:
                targets = member.targets if isinstance(member, ast.Assign) else [member.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.set_on_self(target.id, self.value(member.value))
        start = self.functions.get("__init__")
        if start is not None:
            config: Value = frozenset({Config()})
            given = {"name": TEXT, "llm_config": config, "dataset": TEXT}
            self.enter(start, given)
        call = self.functions["__call__"]
        answer = self.enter(call, dict.fromkeys(self.shape.parameters, TEXT))
        self._check_answer(call, answer)
        self._refuse_valueless(tree)
        cost, spenders = self.peak, self.spenders.copy()
        self._follow_the_rest()
        self.spenders = spenders
        return cost

    def enter(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, given: dict[str, Value]
    ) -> Value:
        """Follow a method that the run calls."""
        known = [item.arg for item in (*function.args.args, *function.args.kwonlyargs)]
        first = known[0] if known else "self"
        named = {name: value for name, value in given.items() if name in known}
        self.entered.add(function)
        self._bind(function, False, Given([], {first: frozenset({Self()}), **named}))
        return self.follow(function, function)

    def _check_answer(self, call: ast.AST, answer: Value) -> None:
        if answer and answer == NONE:
            message = "__call__ returns nothing; end it with `return answer, cost`"
            self.refuse(RefusalKind.SHAPE, message, call)

    def _refuse_valueless(self, tree: ast.Module) -> None:
        """Names that no path gives a value before they are read."""
        if self.unbounded:  # a loop may have been followed too rarely
            return
        # What a function made in a comprehension reads lives on behind it.
        apart = {
            item.id
            for node in ast.walk(tree)
            if isinstance(node, ast.comprehension)
            for item in ast.walk(node.target)
            if isinstance(item, ast.Name)
        }
        for node, valueless in self.valueless.items():
            if valueless and node.id not in apart:
                message = f"`{node.id}` has no value here on any path; assign it before this line"
                self.refuse(RefusalKind.UNKNOWN_NAME, message, node)

    def _follow_the_rest(self) -> None:
        """Functions that nothing calls: what is refused in them, without their cost."""
        tree = self.shape.tree
        assert tree is not None
        functions = [*self.functions.values()]
        functions += [
            node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        ]
        unbounded = self.unbounded
        for function in functions:
            if function in self.entered:
                continue
            self.state = self.state or State()
            names = [item.arg for item in (*function.args.args, *function.args.kwonlyargs)]
            bound = function in self.functions.values()
            values = {
                name: frozenset({Self()}) if bound and place == 0 else BROKEN
                for place, name in enumerate(names)
            }
            self.scope = tree
            self._bind(function, False, Given([], values))
            self.follow(function, function)
        self.unbounded = unbounded

    # Functions

    def follow(
        self, node: ast.AST, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    ) -> Value:
        outer = (self.scope, self.returns, self.breaks, self.continues, self.path)
        self.scope, self.returns, self.breaks, self.continues = function, [], [], []
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
        self.path = (*self.path, place)
        self.stack.append(function)
        try:
            if isinstance(function, ast.Lambda):
                return self.value(function.body)
            self.block(function.body)
            values = [found.value for found in self.returns]
            ends = [(found.state, found.cost) for found in self.returns]
            if self.state is not None:
                values.append(NONE)
                ends += self.ends()
            self.meet(ends)
            if self.state is None:  # it always raises
                self.state = State()
                return BROKEN
            return joined(NOTHING, *values)
        finally:
            self.stack.pop()
            self.scope, self.returns, self.breaks, self.continues, self.path = outer

    # Statements

    def block(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements; what cannot be reached is left out."""
        for statement in statements:
            if self.state is None:
                return
            self.step()
            method = getattr(self, f"_{type(statement).__name__}", None)
            if method is not None:
                method(statement)

    def _Expr(self, node: ast.Expr) -> None:
        value = self.value(node.value)
        if any(obj.kind == "pending" for _, obj in self.pending_in(value)):
            self.settled(value, node)

    def _Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.value(node.value))

    def _AugAssign(self, node: ast.AugAssign) -> None:
        reading = ast.copy_location(_as_load(node.target), node.target)
        before = self.settled(self.value(reading), node)
        value = self.settled(self.value(node.value), node.value)
        lists = [
            (ref, obj)
            for ref, obj in self.here.objects(before)
            if obj.kind in ("list", "set", "dict")
        ]
        if lists and isinstance(node.op, (ast.Add, ast.BitOr)):
            for ref, _ in lists:
                self.grow(node, ref, "extend", value)
            return
        if lists and isinstance(node.op, ast.Mult):
            for ref, obj in lists:
                self.check_growth(node, ref)
                self.put(ref, obj.items, None)
            return
        self.assign(node.target, self.combined(node, before, node.op, value))

    def _Return(self, node: ast.Return) -> None:
        value = NONE if node.value is None else self.value(node.value)
        if len(self.stack) == 1 and self.stack[0] is self.functions.get("__call__"):
            self._check_return(node, value)
        if self.state is not None:
            self.returns.append(Returned(value, self.state, self.cost))
        self.state = None

    def _check_return(self, node: ast.Return, value: Value) -> None:
        """What `__call__` returns: an answer, or an answer and its cost."""
        if isinstance(node.value, ast.Tuple) and not any(
            isinstance(part, ast.Starred) for part in node.value.elts
        ):
            if len(node.value.elts) != 2:
                message = (
                    f"__call__ returns {len(node.value.elts)} values; return the answer and the "
                    "cost, or the answer alone"
                )
                self.refuse(RefusalKind.SHAPE, message, node)
            for _, obj in self.here.objects(value):
                for number, element in enumerate(obj.elements or ()):
                    part = node.value.elts[number]
                    self.settled(element, part)
                    if number == 0:
                        self._check_is_text(part, element)
        elif node.value is not None:
            self._check_is_text(node.value, self.settled(value, node.value))

    def _check_is_text(self, node: ast.expr, value: Value) -> None:
        """Whether the answer may be a text or a number: nothing scores a result or a list."""
        results = [atom for atom in value if isinstance(atom, Result)]
        kinds = [obj.kind for _, obj in self.here.objects(value)]
        if results and len(results) == len(value):
            key = self.keys_of(results[0])[-1]
            message = (
                f"__call__ returns the whole result of {results[0].operator}; return its text, as "
                f'in {shown(node)}["{key}"]'
            )
        elif len(kinds) == len(value) == 1 and kinds[0] in ("dict", "set", "list"):
            message = f"__call__ returns a {kinds[0]}; return the text of the answer"
        else:
            return
        self.refuse(RefusalKind.SHAPE, message, node)

    def _Raise(self, node: ast.Raise) -> None:
        for part in (node.exc, node.cause):
            if part is not None:
                self.here.let_go(self.value(part))
        self.state = None

    def _Break(self, node: ast.Break) -> None:
        self.breaks += self.ends()
        self.state = None

    def _Continue(self, node: ast.Continue) -> None:
        self.continues += self.ends()
        self.state = None

    def _Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                for ref, _ in self.here.objects(self.value(target.value)):
                    self.here.change(ref, lambda old: replace(old, elements=None, names=None))

    def _Assert(self, node: ast.Assert) -> None:
        self.settled(self.value(node.test), node.test)

    def _FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.assign_name(node.name, frozenset({Function(node)}))

    _AsyncFunctionDef = _FunctionDef

    def _ClassDef(self, node: ast.ClassDef) -> None:
        self.assign_name(node.name, PLAIN)

    def assign_name(self, name: str, value: Value) -> None:
        key = self.key(name)
        if key is not None:
            self.here.variables[key] = value

    def _Import(self, node: ast.Import) -> None:
        for alias in node.names:
            kind = inside.shim_of(alias.name)
            if alias.asname or "." not in alias.name:
                module = Module(kind, shim=True) if kind else Module(alias.name)
                bound = alias.asname or alias.name
            elif kind:
                bound = alias.name.partition(".")[0]
                module = Module(f"package:{bound}", shim=True)
            else:
                bound = alias.name.partition(".")[0]
                module = Module(bound)
            known = kind or alias.name in MODULES
            self.assign_name(bound, frozenset({module}) if known else BROKEN)

    def _ImportFrom(self, node: ast.ImportFrom) -> None:
        module = inside.absolute(node.module or "", node.level)
        kind = inside.shim_of(module)
        for alias in node.names:
            bound = alias.asname or alias.name
            inner = inside.shim_of(f"{module}.{alias.name}")
            value: Value
            if alias.name == "*" or module == "__future__":
                continue
            if kind is None and inner is not None:
                value = frozenset({Module(inner, shim=True)})
            elif kind == "operator":
                value = self.operator_named(node, alias.name)
            elif kind == "prompt":
                value = self.prompt_named(node, alias.name, alias.name)
            elif kind is not None:
                value = self.shim_name(node, kind, alias.name)
            elif module in MODULES:
                value = frozenset({Named(f"{module}.{alias.name}")})
            else:
                value = BROKEN
            self.assign_name(bound, value)

    # Branches

    def _If(self, node: ast.If) -> None:
        self.settled(self.value(node.test), node.test)
        self.branch([node.body, node.orelse])

    def branch(self, bodies: Sequence[Sequence[ast.stmt]]) -> None:
        before, cost = self.here, self.cost
        ends: list[End] = []
        for body in bodies:
            self.state, self.cost = before.copy(), cost
            self.block(body)
            ends += self.ends()
        self.meet(ends)

    def _Match(self, node: ast.Match) -> None:
        subject = self.settled(self.value(node.subject), node.subject)
        held = self.anything([subject])
        for case in node.cases:
            for part in ast.walk(case.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    self.assign_name(name, held)
            if case.guard is not None:
                self.value(case.guard)
        self.branch([*(case.body for case in node.cases), []])

    def _AsyncWith(self, node: ast.AsyncWith | ast.With) -> None:
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
        self.block(node.body)

    _With = _AsyncWith

    def _Try(self, node: ast.Try) -> None:
        """A body may end anywhere: a handler begins with what any statement before it left."""
        anywhere, peak = self.here.copy(), self.peak
        counts = (len(self.returns), len(self.breaks), len(self.continues))
        self.peak = self.cost
        for statement in node.body:
            self.block([statement])
            if self.state is None:
                break
            anywhere.join(self.state)
        for found in self.returns[counts[0] :]:
            anywhere.join(found.state)
        body_peak = self.peak
        if self.state is not None:
            self.block(node.orelse)
        ends = self.ends()
        for handler in node.handlers:
            self.state, self.cost = anywhere.copy(), body_peak
            if handler.name:
                self.assign_name(handler.name, PLAIN)
            self.block(handler.body)
            ends += self.ends()
        self.meet(ends)
        if node.finalbody:
            self._finally(node.finalbody, anywhere, counts)
        self.peak = peak.or_more(self.peak)

    _TryStar = _Try

    def _finally(
        self, body: Sequence[ast.stmt], anywhere: State, counts: tuple[int, int, int]
    ) -> None:
        """What runs on every path out of a `try`, those that leave it included."""
        alive = self.state is not None
        if self.state is None:
            self.state = anywhere
        self.cost = before = self.peak
        self.block(body)
        used = self.peak - before
        for found in self.returns[counts[0] :]:
            found.cost += used
        self.breaks[counts[1] :] = [(end, cost + used) for end, cost in self.breaks[counts[1] :]]
        rest = self.continues[counts[2] :]
        self.continues[counts[2] :] = [(end, cost + used) for end, cost in rest]
        if not alive:
            self.state = None


def _as_load(target: ast.expr) -> ast.expr:
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    assert isinstance(target, ast.Subscript)
    return ast.Subscript(target.value, target.slice, ast.Load())
