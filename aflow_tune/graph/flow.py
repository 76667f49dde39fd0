"""The data flow of a graph, found in its source: which operator call feeds which.

An abstract interpretation of `__call__`: an environment maps each name to the calls whose results
it may hold on any path. An operator call is a node, with an edge from every node whose result may
be in its arguments, and a 'decides' edge from those in the conditions around it. Loop bodies are
followed twice: an edge that only the second pass finds is 'carried' to the next iteration. Code
that hides its data flow (setattr, globals, exec) is not seen. Nothing is executed.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aflow_tune.graph.shape import Function, Shape, workflow_methods

PROBLEM = -1  # source of edges: what the workflow was called with
ANSWER = -2  # target of edges: what it returns
MODEL = "llm"  # instance name of a direct call of the graph's model
Place = tuple[int, int, int | None, int | None]
"""Start and end of an expression, line and column, as `ast` counts them."""
Loop = tuple[int, str]
"""A loop around calls: its line and the text of its head."""
Handle = tuple[str, str]
"""A built operator as (instance, operator name); (MODEL, "") for the model."""

_MAX_DEPTH = 8  # of nested calls of helper functions
_MAX_STEPS = 50_000
"""Expressions evaluated, each helper anew at every call; beyond that the flow is incomplete."""


@dataclass(frozen=True)
class Node:
    """One call of an operator (or of the model) in the source."""

    number: int
    instance: str
    operator: str  # empty for a direct call of the model
    line: int
    loops: tuple[Loop, ...]
    prompts: tuple[str, ...]  # names of the `prompt_custom` texts among its arguments


@dataclass(frozen=True, order=True)
class Edge:
    """`kind` is 'data', 'carried' (to a later loop iteration) or 'decides' (a condition)."""

    source: int
    target: int
    kind: str


@dataclass
class Flow:
    """Nodes in the order of their first call, and the edges between them, sorted."""

    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    calls: dict[Place, frozenset[Handle]] = field(default_factory=dict)
    """Operators (or the model) that each call may reach, also through dicts and variables."""
    handed_on: dict[Handle, int] = field(default_factory=dict)
    """Operators passed to code that is not followed, with the line."""
    models: set[str] = field(default_factory=set)  # names of the graph's model, such as `self.llm`
    complete: bool = True  # False: it was too large to follow to the end


def trace_flow(shape: Shape) -> Flow:
    """The calls of a workflow and what flows between them; empty if there is no workflow."""
    walk = _Walk(shape, workflow_methods(shape))
    try:
        walk.start()
    except (RecursionError, _CutOff):
        walk.flow.complete = False
    walk.flow.nodes, walk.flow.edges = [*walk.nodes.values()], sorted(walk.edges)
    return walk.flow


def place_of(node: ast.expr) -> Place:
    """The position of a node, which is the same in two parses of one source."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


class _CutOff(Exception):
    """The graph is too large to follow to the end."""


@dataclass(frozen=True)
class _Value:
    """What an expression may hold: results of nodes, operators, and functions of the graph."""

    sources: frozenset[int] = frozenset()
    handles: frozenset[Handle] = frozenset()
    prompts: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()  # operator classes, not yet built
    functions: tuple[ast.AST, ...] = ()
    workflow: bool = False  # whether it may be the workflow, `self`


_NOTHING = _Value()
_KEEPING = frozenset(
    ("append", "deque", "dict", "enumerate", "extend", "getattr", "insert", "isinstance", "items",
     "list", "next", "print", "random", "reversed", "setdefault", "tuple", "update", "values",
     "zip")
)  # fmt: skip
"""Functions that do not call their arguments."""
_LEAVING = (ast.Return, ast.Break, ast.Continue, ast.Raise)
_Env = dict[str, _Value]  # by name: `x`, `self.x`, and `x['key']` for literal keys


def _join(*values: _Value) -> _Value:
    """A value that may be any of these."""
    told = [value for value in values if value is not _NOTHING]
    if len(told) < 2:
        return told[0] if told else _NOTHING
    return _Value(
        frozenset().union(*(value.sources for value in told)),
        frozenset().union(*(value.handles for value in told)),
        frozenset().union(*(value.prompts for value in told)),
        frozenset().union(*(value.kinds for value in told)),
        tuple(dict.fromkeys(item for value in told for item in value.functions)),
        any(value.workflow for value in told),
    )


def _merged(ends: Sequence[_Env]) -> _Env:
    """The environment after several paths."""
    names = {name for end in ends for name in end}
    names -= {name for name in names if name[-1] == "]" and not all(name in end for end in ends)}
    return {name: _join(*(end.get(name, _NOTHING) for end in ends)) for name in names}


class _Walk:
    def __init__(self, shape: Shape, methods: Mapping[str, Function]) -> None:
        self.shape, self.methods = shape, methods
        self.places = {(built.line, built.column): built for built in shape.operators}
        self.nodes: dict[tuple[int, int, str], Node] = {}
        self.edges: set[Edge] = set()
        self.flow = Flow()
        self.loops: tuple[Loop, ...] = ()
        self.conditions: frozenset[int] = frozenset()
        self.stops: frozenset[int] = frozenset()  # nodes that decided whether to leave the loop
        self.repeating = False  # in the second pass over a loop body, where new edges are carried
        self.depth = self.steps = 0
        self.returned: list[_Value] = []

    def start(self) -> None:
        if self.shape.tree is None or "__call__" not in self.methods:
            return
        functions = [node for node in self.shape.tree.body if isinstance(node, Function)]
        env: _Env = {node.name: _Value(functions=(node,)) for node in functions}
        if "__init__" in self.methods:
            self.block(self.methods["__init__"].body, env)
            # What the constructor computes does not depend on the problem.
            for made in (self.nodes, self.edges, self.returned):
                made.clear()
            env = {name: replace(value, sources=frozenset()) for name, value in env.items()}
        call = self.methods["__call__"]
        for item in [*call.args.posonlyargs, *call.args.args][1:]:
            env[item.arg] = _Value(frozenset({PROBLEM}))
        self.block(call.body, env)
        for value in self.returned:
            self.connect(value.sources, ANSWER)

    @contextlib.contextmanager
    def within(self, **changes: Any) -> Iterator[None]:
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        try:
            yield
        finally:
            vars(self).update(before)

    def tested(self, test: ast.expr, env: _Env) -> frozenset[int]:
        return self.value(test, env).sources - {PROBLEM}

    def connect(self, sources: Iterable[int], target: int, kind: str = "data") -> None:
        for source in sources:
            carried, plain = Edge(source, target, "carried"), Edge(source, target, "data")
            if kind == "decides":
                if not {plain, carried} & self.edges:
                    self.edges.add(Edge(source, target, kind))
            elif self.repeating and plain not in self.edges:
                self.edges.add(carried)
            elif carried not in self.edges:
                self.edges.add(plain)

    # Statements

    def block(self, statements: Sequence[ast.stmt], env: _Env) -> None:
        with self.within(conditions=self.conditions):
            for statement in statements:
                self.statement(statement, env)
                if isinstance(statement, ast.If) and any(
                    body and isinstance(body[-1], _LEAVING)
                    for body in (statement.body, statement.orelse)
                ):
                    # What follows, and the next iteration, run only if this branch did not leave.
                    decided = self.tested(statement.test, env)
                    self.conditions |= decided
                    self.stops |= decided

    def statement(self, node: ast.stmt, env: _Env) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            value = self.value(node.value, env)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.assign(target, value, env, add=isinstance(node, ast.AugAssign))
                name, items = _name(target), node.value
                if isinstance(items, ast.Dict) and name is not None:
                    for key, held in zip(items.keys, items.values, strict=True):
                        if isinstance(key, ast.Constant):
                            env[f"{name}[{key.value!r}]"] = self.value(held, env)
        elif isinstance(node, ast.Return):
            answer = node.value
            if isinstance(answer, ast.Tuple) and len(answer.elts) == 2:  # `return answer, cost`
                answer = answer.elts[0]
            self.returned.append(self.value(answer, env))
        elif isinstance(node, ast.If):
            self.branch(node.test, [node.body, node.orelse], env)
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            self.loop(node, env)
            self.block(node.orelse, env)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                value = self.value(item.context_expr, env)
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, value, env)
            self.block(node.body, env)
        elif isinstance(node, (ast.Try, ast.TryStar)):
            before = dict(env)
            self.block(node.body, env)
            ends = []
            for handler in node.handlers:  # may be entered from anywhere in the body
                ends.append(_merged([before, env]))
                self.block(handler.body, ends[-1])
            self.block(node.orelse, env)
            env |= _merged([*ends, env])
            self.block(node.finalbody, env)
        elif isinstance(node, ast.Match):
            subject = self.value(node.subject, env)
            for part in (part for case in node.cases for part in ast.walk(case.pattern)):
                if name := getattr(part, "name", None) or getattr(part, "rest", None):
                    env[name] = _join(env.get(name, _NOTHING), subject)
            self.branch(node.subject, [case.body for case in node.cases], env)
        elif isinstance(node, Function):
            env[node.name] = _Value(functions=(node,))
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child, env)

    def branch(self, test: ast.expr, bodies: Sequence[Sequence[ast.stmt]], env: _Env) -> None:
        with self.within(conditions=self.conditions | self.tested(test, env)):
            ends = [dict(env) for _ in bodies]
            for body, end in zip(bodies, ends, strict=True):
                self.block(body, end)
            env |= _merged([*ends, env])

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, env: _Env) -> None:
        if isinstance(node, ast.While):
            label, items = f"while {ast.unparse(node.test)}", _NOTHING
        else:
            label, items = _label(node), self.value(node.iter, env)
        repeating, conditions = self.repeating, self.conditions
        loops = (*self.loops, (node.lineno, label))
        with self.within(
            loops=loops, stops=frozenset(), repeating=repeating, conditions=conditions
        ):
            for turn in range(2):
                self.repeating = repeating or turn == 1
                self.conditions = conditions | self.stops
                before = dict(env)
                if isinstance(node, ast.While):
                    self.conditions |= self.tested(node.test, env)
                else:
                    self.assign(node.target, items, env)
                self.block(node.body, env)
                env |= _merged([before, env])

    def assign(self, target: ast.expr, value: _Value, env: _Env, add: bool = False) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self.assign(part, value, env, add)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value, env, add)
        elif isinstance(target, ast.Subscript):
            key = _Value(self.value(target.slice, env).sources)  # `votes[answer] += 1`
            item, owner = _item(target), f"{_name(target.value)}["
            kept = {name: held for name, held in env.items() if name.startswith(owner)}
            self.assign(target.value, _join(value, key), env, add=True)
            if item is not None:  # else the key is unknown
                env |= {**kept, item: value}
        elif (name := _name(target)) is not None:
            self.put(name, _join(env.get(name, _NOTHING), value) if add else value, env)

    def put(self, name: str, value: _Value, env: _Env) -> None:
        for inner in [key for key in env if key.startswith(f"{name}[")]:
            del env[inner]
        env[name] = value
        if value.handles == {(MODEL, "")}:
            self.flow.models.add(name)

    # Expressions

    def value(self, node: ast.expr | None, env: _Env) -> _Value:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise _CutOff
        if node is None or isinstance(node, ast.Constant):
            return _NOTHING
        if isinstance(node, ast.Await):
            return self.value(node.value, env)
        if isinstance(node, ast.Subscript) and (item := _item(node)) in env:
            return env[str(item)]
        if isinstance(node, ast.Call):
            return self.call(node, env)
        if isinstance(node, ast.NamedExpr):
            value = self.value(node.value, env)
            self.assign(node.target, value, env)
            return value
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            inner = dict(env)
            with self.within(loops=self.loops, conditions=self.conditions):
                for generator in node.generators:
                    self.assign(generator.target, self.value(generator.iter, inner), inner)
                    self.loops = (*self.loops, (node.lineno, _label(generator)))
                    for test in generator.ifs:
                        self.conditions |= self.tested(test, inner)
                made = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
                return _join(*(self.value(part, inner) for part in made))
        if isinstance(node, ast.Lambda):
            return _Value(functions=(node,))
        if isinstance(node, ast.IfExp):
            with self.within(conditions=self.conditions | self.tested(node.test, env)):
                return _join(self.value(node.body, env), self.value(node.orelse, env))
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self.name(node, env)
        parts = [item for item in ast.iter_child_nodes(node) if isinstance(item, ast.expr)]
        return _join(*(self.value(part, env) for part in parts))

    def name(self, node: ast.Name | ast.Attribute, env: _Env) -> _Value:
        name = _name(node)
        if name is not None and name in env:
            return env[name]
        kind = self.shape.operator_class(node)
        if kind is not None:
            return _Value(kinds=frozenset({kind}))
        if isinstance(node, ast.Name):
            return _Value(workflow=True) if node.id == "self" else _NOTHING
        owner_name = node.value.id if isinstance(node.value, ast.Name) else ""
        if self.shape.modules.get(owner_name) == "prompt":
            return _Value(prompts=frozenset({node.attr}))
        methods = (self.methods[node.attr],) if node.attr in self.methods else ()
        if owner_name == "self" and methods:
            return _Value(functions=methods)
        owner = self.value(node.value, env)
        if not owner.workflow:
            return owner
        if node.attr == "__dict__":
            return _of_self(env)
        return _join(env.get(f"self.{node.attr}", _NOTHING), _Value(functions=methods))

    def call(self, node: ast.Call, env: _Env) -> _Value:
        built = self.places.get((node.lineno, node.col_offset))
        if built is not None and self.shape.operator_class(node.func) is not None:
            return _Value(handles=frozenset({(built.instance, built.operator)}))
        called = str(getattr(node.func, "id", getattr(node.func, "attr", "")))
        if called in ("create_llm_instance", "AsyncLLM"):
            return _Value(handles=frozenset({(MODEL, "")}))
        given = [self.value(argument, env) for argument in node.args]
        named = {word.arg: self.value(word.value, env) for word in node.keywords}
        arguments = _join(*given, *named.values())
        if called == "getattr" and len(node.args) > 1:
            arguments = _join(arguments, self.looked_up(node, env))
        func, is_handle = node.func, True  # the handle itself is called, not one of its methods
        if isinstance(func, ast.Attribute) and func.attr in ("aask", "__call__"):
            func = func.value
        elif isinstance(func, ast.Attribute):
            is_handle = _name(func) in env or not self.value(func.value, env).handles
        target = self.value(func, env)
        if target.handles and is_handle:
            place, calls = place_of(node), self.flow.calls
            calls[place] = calls.get(place, frozenset()) | target.handles
            results = [self.node(node, handle, arguments) for handle in sorted(target.handles)]
            return _Value(frozenset(results))
        if target.kinds:
            return _Value(handles=frozenset((name.lower(), name) for name in target.kinds))
        followed = [self.follow(item, given, named, env) for item in target.functions]
        if isinstance(node.func, ast.Attribute) and not target.functions:
            # `solutions.append(x)`, `seen.update(x)`: the object now holds its argument.
            name = _name(node.func.value)
            if name is not None and name in env:
                self.put(name, _join(env[name], replace(arguments, functions=())), env)
        passed = [
            self.follow(item, [arguments], {}, env)
            for value in (*given, *named.values())
            for item in value.functions
        ]
        if target.functions:
            return _join(*followed, *passed)
        if called not in _KEEPING:
            for handle in arguments.handles:
                self.flow.handed_on.setdefault(handle, node.lineno)
        # An unknown function may return its arguments.
        return replace(_join(target, arguments, *passed), functions=())

    def looked_up(self, node: ast.Call, env: _Env) -> _Value:
        """`getattr(prompt_custom, "NAME", ...)`, `getattr(self, "solve")`."""
        owner, name = node.args[0], node.args[1]
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            return _of_self(env) if self.value(owner, env).workflow else _NOTHING
        at = ast.copy_location(ast.Attribute(owner, name.value, ast.Load()), node)
        return self.name(at, env)

    def node(self, call: ast.Call, handle: Handle, arguments: _Value) -> int:
        instance, operator = handle
        key = (call.lineno, call.col_offset, instance)
        if key not in self.nodes:
            prompts = tuple(sorted(arguments.prompts))
            number = len(self.nodes)
            self.nodes[key] = Node(number, instance, operator, call.lineno, self.loops, prompts)
        number = self.nodes[key].number
        self.connect(arguments.sources, number)
        self.connect(self.conditions - {number}, number, "decides")
        return number

    def follow(
        self, function: ast.AST, given: Sequence[_Value], named: dict[str | None, _Value], env: _Env
    ) -> _Value:
        """What a function of the graph may return for these arguments."""
        if self.depth >= _MAX_DEPTH or not isinstance(function, (Function, ast.Lambda)):
            return _NOTHING
        arguments = function.args
        names = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
        if names[:1] == ["self"] and not isinstance(function, ast.Lambda):
            names = names[1:]
        keyword_only = (item.arg for item in arguments.kwonlyargs)
        inner = env | dict.fromkeys([*names, *keyword_only], _NOTHING)
        inner |= dict(zip(names, given, strict=False))
        inner |= {name: value for name, value in named.items() if name is not None}
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                inner[extra.arg] = _join(*given[len(names) :])
        with self.within(depth=self.depth + 1, returned=[]):
            if isinstance(function, ast.Lambda):
                return self.value(function.body, inner)
            self.block(function.body, inner)
            value = _join(*self.returned)
        # What the function stores on the workflow persists.
        env |= {name: held for name, held in inner.items() if name.startswith("self.")}
        return value


def _label(node: ast.For | ast.AsyncFor | ast.comprehension) -> str:
    return f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"


def _name(node: ast.expr) -> str | None:
    """`x` or `self.x` as one name of the environment; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    is_own = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"
    return f"self.{node.attr}" if is_own else None  # type: ignore[attr-defined]


def _item(node: ast.Subscript) -> str | None:
    """`self.steps["check"]` as a name of the environment; None unless the key is a literal."""
    name = _name(node.value)
    fits = name is not None and isinstance(node.slice, ast.Constant)
    return f"{name}[{node.slice.value!r}]" if fits else None  # type: ignore[attr-defined]


def _of_self(env: _Env) -> _Value:
    """Anything that the workflow holds."""
    return _join(*(value for name, value in env.items() if name.startswith("self.")))
