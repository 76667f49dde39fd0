"""Which call of an operator feeds which: the edges of a graph, found in its source.

The workflow's `__call__` is followed statement by statement with an environment that maps each
name to the calls whose results it may hold. A call of an operator is a node; there is an edge
from every node whose result may be in its arguments, and a 'decides' edge from those in the
condition around it. Loop bodies are followed twice: what only the second pass finds is carried
from one turn to the next. Methods of the workflow and functions inside it are followed where
they are called.

An over-approximation: a name holds everything that was ever put into it on any path. Code that
hides its data (setattr, globals, exec) is not seen. Nothing is run.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aflow_tune.graph.shape import Function, Shape, workflow_methods

PROBLEM = -1
"""Source of edges: what the workflow was called with."""
ANSWER = -2
"""Target of edges: what it returns."""
MODEL = "llm"
"""Instance name of a direct call of the graph's model."""
Place = tuple[int, int, int | None, int | None]
"""Where an expression begins and ends, line and column, as the parser counts them."""
Handle = tuple[str, str]
"""An operator that was built: its instance and its name; (MODEL, "") for the model."""

_MAX_DEPTH = 8
"""Of helper functions that call each other."""
_MAX_STEPS = 50_000
"""Expressions that are looked at: a graph whose helpers multiply is cut off here."""


@dataclass(frozen=True)
class Loop:
    """A loop around calls, by its line."""

    line: int
    label: str


@dataclass(frozen=True)
class Node:
    """One call of an operator (or of the model) in the source."""

    number: int
    instance: str
    operator: str
    """Empty for a direct call of the model."""
    line: int
    loops: tuple[Loop, ...]
    prompts: tuple[str, ...]
    """Names of the `prompt_custom` texts among its arguments."""


@dataclass(frozen=True, order=True)
class Edge:
    """`kind` is 'data', 'carried' (to a later turn of a loop) or 'decides' (a condition)."""

    source: int
    target: int
    kind: str


@dataclass(frozen=True)
class Flow:
    """Nodes in the order of their first call, and the edges between them."""

    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()
    calls: Mapping[Place, frozenset[Handle]] = field(default_factory=dict)
    """Which operators (or the model) each call may reach, through dicts and variables too."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Operators whose classes are named, with a line; also through `getattr`."""
    handed_on: Mapping[Handle, int] = field(default_factory=dict)
    """Operators that code which is not followed gets hold of, with the line."""
    models: frozenset[str] = frozenset()
    """Expressions that hold the graph's model, such as `self.llm`."""
    whole: frozenset[Place] = frozenset()
    """Expressions among arguments and answers that are an operator's whole result on any path."""
    complete: bool = True
    """False: it was too large to be followed to its end."""


def trace_flow(shape: Shape) -> Flow:
    """The calls of a workflow and what flows between them; empty where there is none."""
    call = workflow_methods(shape).get("__call__")
    if call is None:
        return Flow()
    walk, complete = _Walk(shape), False
    with contextlib.suppress(RecursionError, _CutOff):
        walk.start(call)
        complete = True
    return Flow(
        tuple(walk.nodes.values()),
        tuple(sorted(walk.edges)),
        {place: frozenset(handles) for place, handles in walk.calls.items()},
        walk.kinds,
        walk.handed_on,
        frozenset(walk.models),
        frozenset(place for place, whole in walk.whole.items() if whole),
        complete,
    )


class _CutOff(Exception):
    """The graph is too large to be followed to its end."""


@dataclass(frozen=True)
class _Value:
    """What an expression may hold: results of nodes, operators, and functions of the graph."""

    sources: frozenset[int] = frozenset()
    handles: frozenset[Handle] = frozenset()
    functions: tuple[ast.AST, ...] = ()
    prompts: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    """Operators as classes."""
    whole: bool = False
    """Whether it is the result of an operator itself, not something made of it."""
    workflow: bool = False
    """Whether it may be the workflow, `self`."""

    def join(self, *others: _Value) -> _Value:
        joined = self
        for other in others:
            if other is _NOTHING:
                continue
            more = tuple(item for item in other.functions if item not in joined.functions)
            joined = _Value(
                joined.sources | other.sources,
                joined.handles | other.handles,
                joined.functions + more,
                joined.prompts | other.prompts,
                joined.kinds | other.kinds,
                (joined.whole or joined is _NOTHING) and other.whole,
                joined.workflow or other.workflow,
            )
        return joined


_NOTHING = _Value()
_CONSTANT = _Value()
_SELF = _Value(workflow=True)
_KEEPING = frozenset(
    ("append", "deque", "dict", "enumerate", "extend", "getattr", "insert", "isinstance", "items",
     "list", "next", "print", "random", "reversed", "setdefault", "tuple", "update", "values",
     "zip")
)  # fmt: skip
"""Functions that keep what they are given, without calling it."""
_Env = dict[str, _Value]


@dataclass
class _Walk:
    shape: Shape
    nodes: dict[tuple[int, int, str], Node] = field(default_factory=dict)
    calls: dict[Place, set[Handle]] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    handed_on: dict[Handle, int] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    whole: dict[Place, bool] = field(default_factory=dict)
    edges: set[Edge] = field(default_factory=set)
    loops: tuple[Loop, ...] = ()
    conditions: frozenset[int] = frozenset()
    stops: frozenset[int] = frozenset()
    """What decided so far whether to leave the loop."""
    repeating: bool = False
    """In the second pass over a loop's body: what is new now was carried."""
    depth: int = 0
    steps: int = 0
    returned: list[_Value] = field(default_factory=list)

    def start(self, call: Function) -> None:
        self.methods = workflow_methods(self.shape)
        self.places = {(built.line, built.column): built for built in self.shape.operators}
        assert self.shape.tree is not None
        env: _Env = {
            node.name: _Value(functions=(node,))
            for node in self.shape.tree.body
            if isinstance(node, Function)
        }
        init = self.methods.get("__init__")
        if init is not None:
            self.block(init.body, env)
            # What the constructor computes is the same for every run.
            self.nodes.clear()
            self.edges.clear()
            self.returned.clear()
        parameters = [item.arg for item in (*call.args.posonlyargs, *call.args.args)][1:]
        env |= {name: _Value(frozenset({PROBLEM})) for name in parameters}
        self.block(call.body, env)
        for value in self.returned:
            self.connect(value.sources, ANSWER)

    def connect(self, sources: Iterable[int], target: int, kind: str = "data") -> None:
        for source in sources:
            if kind == "data":
                carried = Edge(source, target, "carried")
                plain = Edge(source, target, "data")
                if self.repeating and plain not in self.edges:
                    self.edges.add(carried)
                elif carried not in self.edges:
                    self.edges.add(plain)
            elif not any(Edge(source, target, k) in self.edges for k in ("data", "carried")):
                self.edges.add(Edge(source, target, kind))

    # Statements

    def block(self, statements: Sequence[ast.stmt], env: _Env) -> None:
        outer = self.conditions
        for statement in statements:
            self.statement(statement, env)
            if isinstance(statement, ast.If) and _leaves(statement):
                # What follows, and the next turn, run only if the condition did not end it here.
                decided = _results(self.value(statement.test, env))
                self.conditions = self.conditions | decided
                self.stops = self.stops | decided
        self.conditions = outer

    def statement(self, node: ast.stmt, env: _Env) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            value = self.value(node.value, env) if node.value is not None else _NOTHING
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                self.assign(target, value, env, add=isinstance(node, ast.AugAssign))
                if isinstance(node.value, ast.Dict) and _name(target) is not None:
                    for key, held in zip(node.value.keys, node.value.values, strict=True):
                        if isinstance(key, ast.Constant):
                            env[f"{_name(target)}[{key.value!r}]"] = self.value(held, env)
        elif isinstance(node, ast.Return):
            answer = _answer(node.value)
            self.returned.append(self.value(answer, env))
            if answer is not None:
                self.note_whole(answer, self.returned[-1])
        elif isinstance(node, ast.If):
            self.branch(node.test, [node.body, node.orelse], env)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            items = self.value(node.iter, env)
            label = f"for {ast.unparse(node.target)} in {ast.unparse(node.iter)}"
            with_target = node.target
            self.loop(node, label, node.body, env, lambda: self.assign(with_target, items, env))
            self.block(node.orelse, env)
        elif isinstance(node, ast.While):
            label = f"while {ast.unparse(node.test)}"
            condition = node.test

            def test() -> None:
                self.conditions = self.conditions | _results(self.value(condition, env))

            self.loop(node, label, node.body, env, test)
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
            for handler in node.handlers:  # which may be entered from anywhere in the body
                end = _merged([before, env])
                self.block(handler.body, end)
                ends.append(end)
            self.block(node.orelse, env)
            env |= _merged([*ends, env])
            self.block(node.finalbody, env)
        elif isinstance(node, ast.Match):
            subject = self.value(node.subject, env)
            for case in node.cases:
                for part in ast.walk(case.pattern):
                    name = getattr(part, "name", None) or getattr(part, "rest", None)
                    if name:
                        env[name] = env.get(name, _NOTHING).join(subject)
            self.branch(node.subject, [case.body for case in node.cases], env)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            env[node.name] = _Value(functions=(node,))
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self.value(child, env)

    def branch(self, test: ast.expr, bodies: Sequence[Sequence[ast.stmt]], env: _Env) -> None:
        outer = self.conditions
        self.conditions = outer | _results(self.value(test, env))
        ends = []
        for body in bodies:
            end = dict(env)
            self.block(body, end)
            ends.append(end)
        env |= _merged([*ends, env])
        self.conditions = outer

    def loop(
        self,
        node: ast.stmt,
        label: str,
        body: Sequence[ast.stmt],
        env: _Env,
        begin: Callable[[], None],
    ) -> None:
        outer, repeating, conditions, stops = (
            self.loops,
            self.repeating,
            self.conditions,
            self.stops,
        )
        self.loops = (*outer, Loop(node.lineno, label))
        self.stops = frozenset()
        for turn in range(2):
            self.repeating = repeating or turn == 1
            self.conditions = conditions | self.stops
            before = dict(env)
            begin()
            self.block(body, env)
            env |= _merged([before, env])
        self.loops, self.repeating, self.conditions, self.stops = (
            outer,
            repeating,
            conditions,
            stops,
        )

    def assign(self, target: ast.expr, value: _Value, env: _Env, add: bool = False) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for part in target.elts:
                self.assign(part, replace(value, whole=False), env, add)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value, env, add)
        elif isinstance(target, ast.Subscript):
            key = _Value(self.value(target.slice, env).sources)  # `votes[answer] += 1`
            item, owner = _item(target), f"{_name(target.value)}["
            kept = {name: held for name, held in env.items() if name.startswith(owner)}
            self.assign(target.value, replace(value.join(key), whole=False), env, add=True)
            if item is not None:  # else it cannot be told which one it is
                env |= {**kept, item: value}
        else:
            name = _name(target)
            if name is not None:
                self.put(name, env.get(name, _NOTHING).join(value) if add else value, env)

    def put(self, name: str, value: _Value, env: _Env) -> None:
        for inner in [key for key in env if key.startswith(f"{name}[")]:
            del env[inner]
        env[name] = value
        if value.handles == {(MODEL, "")}:
            self.models.add(name)

    def note_whole(self, node: ast.expr, value: _Value) -> None:
        place = place_of(node)
        self.whole[place] = value.whole and self.whole.get(place, True)

    # Expressions

    def value(self, node: ast.expr | None, env: _Env) -> _Value:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise _CutOff
        if node is None or isinstance(node, ast.Constant):
            return _NOTHING if node is None else _CONSTANT
        if isinstance(node, ast.Await):
            return self.value(node.value, env)
        if isinstance(node, ast.Subscript) and _item(node) in env:
            return env[str(_item(node))]
        if isinstance(node, ast.Call):
            return self.call(node, env)
        if isinstance(node, ast.NamedExpr):
            value = self.value(node.value, env)
            self.assign(node.target, value, env)
            return value
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
            return self.comprehension(node, env)
        if isinstance(node, ast.Lambda):
            return _Value(functions=(node,))
        if isinstance(node, ast.IfExp):
            outer = self.conditions
            test = self.value(node.test, env)
            self.conditions = outer | _results(test)
            value = self.value(node.body, env).join(self.value(node.orelse, env))
            self.conditions = outer
            return value
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self.name(node, env)
        parts = [
            self.value(child, env)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.expr)
        ]
        return replace(_NOTHING.join(*parts), whole=False)

    def name(self, node: ast.Name | ast.Attribute, env: _Env) -> _Value:
        name = _name(node)
        if name is not None and name in env:
            return env[name]
        kind = self.shape.operator_class(node)
        if kind is not None:
            self.kinds.setdefault(kind, getattr(node, "lineno", 0))
            return _Value(kinds=frozenset({kind}))
        if isinstance(node, ast.Name):
            return _SELF if node.id == "self" else _NOTHING
        if isinstance(node.value, ast.Name):
            if self.shape.modules.get(node.value.id) == "prompt":
                return _Value(prompts=frozenset({node.attr}))
            if node.value.id == "self" and node.attr in self.methods:
                return _Value(functions=(self.methods[node.attr],))
        owner = self.value(node.value, env)
        if not owner.workflow:
            return owner
        if node.attr == "__dict__":
            return _of_self(env)
        method = (self.methods[node.attr],) if node.attr in self.methods else ()
        return env.get(f"self.{node.attr}", _NOTHING).join(_Value(functions=method))

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, env: _Env
    ) -> _Value:
        inner = dict(env)
        outer, conditions = self.loops, self.conditions
        for generator in node.generators:
            label = f"for {ast.unparse(generator.target)} in {ast.unparse(generator.iter)}"
            self.assign(generator.target, self.value(generator.iter, inner), inner)
            self.loops = (*self.loops, Loop(node.lineno, label))
            for test in generator.ifs:
                self.conditions = self.conditions | _results(self.value(test, inner))
        if isinstance(node, ast.DictComp):
            value = self.value(node.key, inner).join(self.value(node.value, inner))
        else:
            value = self.value(node.elt, inner)
        self.loops, self.conditions = outer, conditions
        return replace(value, whole=False)

    def call(self, node: ast.Call, env: _Env) -> _Value:
        built = self.places.get((node.lineno, node.col_offset))
        if built is not None and self.shape.operator_class(node.func) is not None:
            return _Value(handles=frozenset({(built.instance, built.operator)}))
        if _last_name(node.func) in ("create_llm_instance", "AsyncLLM"):
            return _Value(handles=frozenset({(MODEL, "")}))
        given = [self.value(argument, env) for argument in node.args]
        named = {word.arg: self.value(word.value, env) for word in node.keywords}
        arguments = _NOTHING.join(*given, *named.values())
        if _last_name(node.func) == "getattr" and len(node.args) > 1:
            arguments = arguments.join(self.looked_up(node, env))
        # `self.llm.aask(...)` is a call of the model too.
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        owner = (
            node.func.value
            if method in ("aask", "__call__") and isinstance(node.func, ast.Attribute)
            else None
        )
        target = self.value(owner or node.func, env)
        is_call_of_handle = owner is not None or not self.is_method_of_handle(node.func, env)
        if target.handles and is_call_of_handle:
            self.calls.setdefault(place_of(node), set()).update(target.handles)
            for argument, value in zip(node.args, given, strict=True):
                self.note_whole(argument, value)
            for word in node.keywords:
                self.note_whole(word.value, named[word.arg])
            results = [self.node(node, handle, arguments) for handle in sorted(target.handles)]
            return _Value(
                frozenset(results), whole=all(name != MODEL for name, _ in target.handles)
            )
        if target.kinds:
            made = {(f"{name.lower()}", name) for name in target.kinds}
            return _Value(handles=frozenset(made))
        followed = [self.follow(item, given, named, env) for item in target.functions]
        if isinstance(node.func, ast.Attribute) and not target.functions:
            # `solutions.append(x)`, `seen.update(x)`: the object now holds its argument.
            name = _name(node.func.value)
            if name is not None and name in env:
                put_in = replace(arguments, functions=(), whole=False)
                self.put(name, replace(env[name].join(put_in), whole=False), env)
        passed = [
            self.follow(item, [arguments], {}, env)
            for value in (*given, *named.values())
            for item in value.functions
        ]
        if target.functions:
            return _NOTHING.join(*followed, *passed)
        if _last_name(node.func) not in _KEEPING:
            for handle in arguments.handles:
                self.handed_on.setdefault(handle, node.lineno)
        # Whatever an unknown function returns may hold what it was given.
        return replace(target.join(arguments, *passed), functions=(), whole=False)

    def looked_up(self, node: ast.Call, env: _Env) -> _Value:
        """`getattr(prompt_custom, "NAME", ...)`, `getattr(self, "solve")`."""
        owner, name = node.args[0], node.args[1]
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            return _of_self(env) if self.value(owner, env).workflow else _NOTHING
        at = ast.copy_location(ast.Attribute(owner, name.value, ast.Load()), node)
        return self.name(at, env)

    def is_method_of_handle(self, func: ast.expr, env: _Env) -> bool:
        """Whether a call is `handle.method(...)`, as in `self.llm.get_usage_summary()`."""
        if not isinstance(func, ast.Attribute):
            return False
        whole = _name(func)
        return whole not in env and bool(self.value(func.value, env).handles)

    def node(self, call: ast.Call, handle: tuple[str, str], arguments: _Value) -> int:
        instance, operator = handle
        key = (call.lineno, call.col_offset, instance)
        node = self.nodes.get(key)
        if node is None:
            prompts = tuple(sorted(arguments.prompts))
            node = Node(len(self.nodes), instance, operator, call.lineno, self.loops, prompts)
            self.nodes[key] = node
        self.connect(arguments.sources, node.number)
        self.connect(self.conditions - {node.number}, node.number, "decides")
        return node.number

    def follow(
        self, function: ast.AST, given: Sequence[_Value], named: dict[str | None, _Value], env: _Env
    ) -> _Value:
        """What a function of the graph returns for these arguments."""
        if self.depth >= _MAX_DEPTH or not isinstance(function, (Function, ast.Lambda)):
            return _NOTHING
        arguments = function.args
        names = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
        if names and names[0] == "self" and not isinstance(function, ast.Lambda):
            names = names[1:]
        inner = dict(env)
        inner |= dict.fromkeys([*names, *(item.arg for item in arguments.kwonlyargs)], _NOTHING)
        for name, value in zip(names, given, strict=False):
            inner[name] = value
        inner |= {name: value for name, value in named.items() if name is not None}
        rest = _NOTHING.join(*given[len(names) :])
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                inner[extra.arg] = rest
        self.depth += 1
        try:
            if isinstance(function, ast.Lambda):
                return self.value(function.body, inner)
            outer, self.returned = self.returned, []
            self.block(function.body, inner)
            value, self.returned = _NOTHING.join(*self.returned), outer
        finally:
            self.depth -= 1
        # What the function keeps on the workflow stays.
        env |= {name: held for name, held in inner.items() if name.startswith("self.")}
        return value


def place_of(node: ast.expr) -> Place:
    """Its place, which two trees of one source share."""
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _answer(returned: ast.expr | None) -> ast.expr | None:
    """The answer of `return answer, cost`."""
    if isinstance(returned, ast.Tuple) and len(returned.elts) == 2:
        return returned.elts[0]
    return returned


def _leaves(statement: ast.If) -> bool:
    leaving = (ast.Return, ast.Break, ast.Continue, ast.Raise)
    return any(
        body and isinstance(body[-1], leaving) for body in (statement.body, statement.orelse)
    )


def _results(value: _Value) -> frozenset[int]:
    return value.sources - {PROBLEM}


def _name(node: ast.expr) -> str | None:
    """`x` or `self.x` as one name of the environment; None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"self.{node.attr}" if node.value.id == "self" else None
    return None


def _of_self(env: _Env) -> _Value:
    """Whatever the workflow holds."""
    return _NOTHING.join(*(value for name, value in env.items() if name.startswith("self.")))


def _item(node: ast.Subscript) -> str | None:
    """`self.steps["check"]` as a name of the environment, where the key is written out."""
    name = _name(node.value)
    fits = name is not None and isinstance(node.slice, ast.Constant)
    return f"{name}[{node.slice.value!r}]" if fits else None  # type: ignore[attr-defined]


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _merged(ends: Sequence[_Env]) -> _Env:
    names = {name for end in ends for name in end}
    names -= {name for name in names if name[-1] == "]" and not all(name in end for end in ends)}
    return {name: _NOTHING.join(*(end.get(name, _NOTHING) for end in ends)) for name in names}
