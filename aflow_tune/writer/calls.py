"""What is wrong with the calls, names and keys of a written graph, told before it runs.

Which calls go to operators is known from the flow of the graph (`aflow_tune.graph.flow`), also
through variables, lists and helpers. Here each is held against what it calls: operators are built
as they will be when the graph runs, and their calls bound by the rule of the run
(`aflow_tune.graph.broker.bind`). What cannot be told from the source is left to the run.

Modules are the exception: a module of Python's stands in front of a dot and nowhere else, so that
no way leads from one around the allow-list (`allowed.py`).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.graph import inside
from aflow_tune.graph.broker import bind
from aflow_tune.graph.flow import MODEL, Flow, place_of
from aflow_tune.graph.shape import Function, Shape, parameters, walk, workflow_methods
from aflow_tune.models.client import ScriptedModel
from aflow_tune.operators import Operator
from aflow_tune.writer.allowed import (
    BUILTINS,
    FRAMES,
    FUNCTIONS,
    GIVEN,
    LOGGER,
    MODULES,
    Scopes,
    public,
)
from aflow_tune.writer.types import RefusalKind, Refusals, did_you_mean, listed, shown

K = RefusalKind
_MODEL_ATTRIBUTES = frozenset(name for name in dir(inside.Model) if not name.startswith("_")) | {
    "usage_tracker",
    "cost_manager",
}
_RESULT_METHODS = frozenset(
    ["get", "keys", "values", "items", "copy", "pop", "setdefault", "update"]
)
_PUTTING = ("update", "setdefault")
_READING = frozenset({"str", "print", "len", "int", "float", "isinstance"})
_WRITES_FILES = ("filename", "handlers", "stream")
_ASKING = (ast.BoolOp, ast.Compare, ast.If, ast.IfExp, ast.UnaryOp)
"""Where None is as good as any other value."""
_DISPLAYS = {
    "dict": (ast.Dict, ast.DictComp),
    "list": (ast.List, ast.ListComp),
    "set": (ast.Set, ast.SetComp),
}


class Calls:
    """The calls of a graph, and what they go to."""

    def __init__(
        self, shape: Shape, flow: Flow, scopes: Scopes, operators: Mapping[str, type[Operator]]
    ) -> None:
        assert shape.tree is not None
        self.shape, self.flow, self.scopes, self.operators = shape, flow, scopes, operators
        self.methods = dict(workflow_methods(shape))
        self.nodes = walk(shape.tree)
        self.built = {
            (node.lineno, node.col_offset): node
            for node in self.nodes
            if isinstance(node, ast.Call) and shape.operator_class(node.func) in operators
        }
        self.options = {
            place.instance: _options(self.built[place.line, place.column])
            for place in shape.operators
            if (place.line, place.column) in self.built
        }
        """Of each instance, the options that are written out."""
        self.set_on_self: dict[str, list[ast.expr | None]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                value = getattr(scopes.parent.get(node), "value", None)
                self.set_on_self.setdefault(node.attr, []).append(value)
        for member in shape.workflow.body if shape.workflow is not None else ():
            for name in () if isinstance(member, Function) else scopes.names_of(member):
                value = getattr(member, "value", None)
                self.set_on_self.setdefault(name, []).append(value)
        self.imported = dict(self._imports())
        self.defined: dict[tuple[ast.AST, str], list[Function]] = {}
        for node in self.nodes:
            method = node in self.methods.values()
            if isinstance(node, Function) and node in scopes.scope_of and not method:
                key = (scopes.scope_of[node], node.name)
                self.defined.setdefault(key, []).append(node)
        self._facts: dict[str, Facts] = {}
        self._results: dict[tuple[Any, str, int], frozenset[str]] = {}

    def _imports(self) -> Iterator[tuple[tuple[ast.AST, str], str]]:
        """What the imports bring of Python's, by scope and name: `json`, `json.loads`."""
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                scope = self.scopes.scope_of[node]
                for alias in node.names:
                    if isinstance(node, ast.ImportFrom):
                        if node.module in MODULES:
                            dotted = f"{node.module}.{alias.name}"
                            yield (scope, alias.asname or alias.name), dotted
                    elif inside.shim_of(alias.name) is None:
                        bound = alias.name if alias.asname else alias.name.partition(".")[0]
                        yield (scope, alias.asname or bound), bound

    def python_name(self, node: ast.expr) -> str:
        """`json.loads` for what means that; empty for what is no name of Python's."""
        if isinstance(node, ast.Attribute):
            owner = self.python_name(node.value)
            return f"{owner}.{node.attr}" if owner in MODULES else ""
        if not isinstance(node, ast.Name) or node not in self.scopes.scope_of:
            return ""
        owner_scope = self.scopes.owner(self.scopes.scope_of[node], node.id)
        if owner_scope is None:
            return node.id if node.id in BUILTINS else ""
        return self.imported.get((owner_scope, node.id), "")

    def handles(self, node: ast.AST) -> frozenset[tuple[str, str]]:
        """Instance and name of the operators that a call may reach."""
        if not isinstance(node, ast.Call):
            return frozenset()
        return self.flow.calls.get(place_of(node), frozenset())

    def facts(self, operator: str) -> Facts:
        """What is known of an operator."""
        if operator not in self._facts:
            self._facts[operator] = Facts(self.operators[operator])
        return self._facts[operator]

    def parameters(self, operator: str) -> list[str]:
        """Of an operator's call."""
        return self.facts(operator).names

    def function(self, node: ast.expr) -> Function | ast.Lambda | None:
        """The function of the graph that an expression names."""
        if isinstance(node, ast.Lambda):
            return node
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            return self.methods.get(node.attr) if node.attr not in self.set_on_self else None
        if isinstance(node, ast.Name) and node in self.scopes.scope_of:
            owner = self.scopes.owner(self.scopes.scope_of[node], node.id)
            found = self.defined.get((owner, node.id), [])  # type: ignore[arg-type]
            if len(found) == 1 and (owner, node.id) not in self.scopes.stores:
                return found[0]
        return None

    def values(self, node: ast.expr) -> list[ast.expr] | None:
        """What is assigned to a name or to an attribute of self, anywhere; None if not known."""
        if isinstance(node, ast.Attribute) and _is_self(node.value):
            found = self.set_on_self.get(node.attr, [])
            return None if None in found or not found else found  # type: ignore[return-value]
        if not isinstance(node, ast.Name) or node not in self.scopes.scope_of:
            return None
        values = [self.value_of(store) for store in self._stores(node)]
        return None if not values or None in values else values  # type: ignore[return-value]

    def _stores(self, node: ast.Name) -> list[ast.AST]:
        """Where a name is set; nothing for a parameter, which may be anything."""
        owner = self.scopes.owner(self.scopes.scope_of[node], node.id)
        arguments = owner.args if isinstance(owner, FUNCTIONS) else None
        if arguments is not None and node.id in {item.arg for item in parameters(arguments)}:
            return []
        return [] if owner is None else self.scopes.stores.get((owner, node.id), [])

    def value_of(self, store: ast.AST) -> ast.expr | None:
        """What is assigned where a name is set; None where that is no plain assignment."""
        parent = self.scopes.parent.get(store)
        if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            return parent.value
        around = self.scopes.parent.get(parent) if isinstance(parent, ast.Tuple) else None
        value = around.value if isinstance(around, ast.Assign) else None
        if not isinstance(value, ast.Tuple) or not isinstance(parent, ast.Tuple):
            return None
        fits = len(value.elts) == len(parent.elts)
        return value.elts[parent.elts.index(store)] if fits else None  # type: ignore[arg-type]

    def results(self, node: ast.expr, depth: int = 4) -> frozenset[str]:
        """The operators whose whole result an expression is; none where it may be anything else."""
        if isinstance(node, ast.Await):
            found = frozenset(name for _, name in self.handles(node.value))
            return found if found <= set(self.operators) else frozenset()
        if not depth or not isinstance(node, ast.Name) or node not in self.scopes.scope_of:
            return frozenset()
        key = (self.scopes.owner(self.scopes.scope_of[node], node.id), node.id, depth)
        if key not in self._results:
            self._results[key] = _all_or_none(
                self._put_in(store, depth - 1) for store in self._stores(node)
            )
        return self._results[key]

    def _put_in(self, store: ast.AST, depth: int) -> frozenset[str]:
        value, around = self.value_of(store), self.scopes.parent.get(store)
        if isinstance(around, (ast.For, ast.comprehension)):
            return self._items(around.iter, depth)
        return frozenset() if value is None else self.results(value, depth)

    def _items(self, node: ast.expr, depth: int) -> frozenset[str]:
        """The same for the items of a list."""
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            return self.results(node.elt, depth)
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
            given = [item for item in node.value.args if isinstance(item, ast.Starred)]
            inner = given[0].value if len(given) == len(node.value.args) == 1 else None
            if isinstance(inner, (ast.ListComp, ast.GeneratorExp)):
                return self.results(ast.Await(inner.elt), depth)
        values = self.values(node) if depth and isinstance(node, ast.Name) else None
        uses = [
            self.scopes.parent.get(self.scopes.parent.get(load, load))
            for load in (self.uses(node) if values else ())
            if isinstance(self.scopes.parent.get(load), ast.Attribute)
        ]
        appended = [use.args[0] for use in uses if isinstance(use, ast.Call) and use.args]
        made = [item for item in values or () if not isinstance(item, ast.List) or item.elts]
        return _all_or_none(
            [*(self._items(item, depth - 1) for item in made),
             *(self.results(item, depth - 1) for item in appended)]
        )  # fmt: skip

    def uses(self, node: ast.expr) -> list[ast.expr]:
        """Everywhere that a variable, or an attribute of self, is read."""
        if isinstance(node, ast.Name):
            owner = self.scopes.owner(self.scopes.scope_of[node], node.id)
            return list(self.scopes.loads.get((owner, node.id), ()))
        return [
            item
            for item in self.nodes
            if isinstance(item, ast.Attribute)
            and item.attr == getattr(node, "attr", "")
            and isinstance(item.ctx, ast.Load)
        ]


def _all_or_none(found: Iterable[frozenset[str]]) -> frozenset[str]:
    """All together; nothing where one is not known."""
    many = list(found)
    return frozenset().union(*many) if all(many) else frozenset()


class CallCheck:
    """Puts to `refusals` what is wrong in a graph; notes the prompts that its code reads."""

    def __init__(self, calls: Calls, prompts: Mapping[str, str], refusals: Refusals) -> None:
        self.calls, self.prompts, self.refusals = calls, prompts, refusals
        self.shape, self.scopes, self.operators = calls.shape, calls.scopes, calls.operators
        self.used_prompts: set[str] = set()
        self.own_prompts, self.any_prompt = self._own_prompts()
        self.written_keys = set(self._written_keys())
        self._waiting: dict[ast.AST, bool] = {}
        for node in calls.nodes:
            check = getattr(self, f"_{type(node).__name__}", None)
            if check is not None and node in self.scopes.scope_of:
                check(node)

    def refuse(self, kind: RefusalKind, message: str, node: ast.AST) -> None:
        self.refusals.add(kind, message, node)

    def _own_prompts(self) -> tuple[set[str], bool]:
        """Names that the code itself puts into `self.prompts`, and whether there may be more."""
        names: set[str] = set()
        more = False
        for value in self.calls.set_on_self.get("prompts", ()):
            if isinstance(value, ast.Dict):
                names |= {str(key.value) for key in value.keys if isinstance(key, ast.Constant)}
                more = more or not all(isinstance(key, ast.Constant) for key in value.keys)
            else:
                words = value.keywords if isinstance(value, ast.Call) else []
                names |= {word.arg for word in words if word.arg}
                more = more or not words
        for node in self.calls.nodes:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                if _is_prompts(node.value) and isinstance(node.slice, ast.Constant):
                    names.add(str(node.slice.value))
                more = more or (_is_prompts(node.value) and not names)
            elif isinstance(node, ast.Attribute) and node.attr in _PUTTING:
                more = more or _is_prompts(node.value)
        return names, more

    def _written_keys(self) -> Iterator[str]:
        """Keys that the graph itself puts into objects."""
        for node in self.calls.nodes:
            parts: list[ast.AST] = []
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                parts = [node.slice]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _PUTTING:
                parts = [*node.args]
                yield from (word.arg for word in node.keywords if word.arg)
            for part in parts:
                for item in ast.walk(part):
                    if isinstance(item, ast.Constant) and isinstance(item.value, str):
                        yield item.value

    # Names and modules

    def _Name(self, node: ast.Name) -> None:
        module = self.calls.python_name(node)
        around = self.scopes.parent.get(node)
        if module in MODULES and isinstance(node.ctx, ast.Load):
            asked = isinstance(around, ast.Call) and getattr(around.func, "id", "") == "getattr"
            if not isinstance(around, ast.Attribute) and not asked:
                message = f"`{node.id}` is a module; use a name in it, as in json.loads(...)"
                self.refuse(K.NOT_ALLOWED, message, node)
        called = isinstance(around, ast.Call) and around.func is node
        if module == "type" and not called and not isinstance(around, (ast.Compare, *FUNCTIONS)):
            self.refuse(K.NOT_ALLOWED, "type is only called, as in type(found)", node)
        owner = self.scopes.owner(self.scopes.scope_of[node], node.id)
        known = node.id in BUILTINS or node.id in GIVEN or node.id.startswith("__")
        if owner is None and not known and self.scopes.imports_all:
            self._operator(node, node.id)

    def _operator(self, node: ast.AST, name: str) -> None:
        """`operator.NAME`."""
        if name not in self.operators:
            message = (
                f"there is no operator {name:.60}{did_you_mean(name, self.operators)}; "
                f"a graph may use {listed(self.operators, 30)}"
            )
            self.refuse(K.UNKNOWN_OPERATOR, message, node)

    def _ImportFrom(self, node: ast.ImportFrom) -> None:
        kind = inside.shim_of(inside.absolute(node.module or "", node.level))
        for alias in node.names:
            if kind == "operator" and alias.name != "*":
                self._operator(node, alias.name)
            elif kind == "prompt" and alias.name != "*":
                self._prompt(node, alias.name, alias.name)

    def _Attribute(self, node: ast.Attribute) -> None:
        name, owner = node.attr, node.value
        if not isinstance(node.ctx, ast.Load):
            return
        if (module := self.calls.python_name(owner)) in MODULES:
            self._of_module(node, module, name)
        elif self.shape.operator_class(node) is not None:
            self._operator(node, name)
        elif isinstance(owner, ast.Name) and self.shape.modules.get(owner.id) == "prompt":
            self._prompt(node, name, f"{owner.id}.{name}")
        elif _is_self(owner):
            self._of_self(node, name)
        elif shown(owner) in self.calls.flow.models and name not in _MODEL_ATTRIBUTES:
            self._no_attribute(node, "the model", _MODEL_ATTRIBUTES)
        elif self._is_logger(owner) and name not in LOGGER:
            self._no_attribute(node, "a logger", LOGGER)
        elif isinstance(owner, ast.Attribute) and _is_self(owner.value):
            values = self.calls.values(owner) or []
            built = bool(values) and all(value in self.calls.built.values() for value in values)
            if built and name not in ("name", "llm", "__class__"):
                message = (
                    f"{owner.attr} is an operator and has no `{name:.60}`; call it: "
                    f"await {shown(owner)}(...)"
                )
                self.refuse(K.UNKNOWN_NAME, message, node)
        elif name not in _RESULT_METHODS and (results := self.calls.results(owner)):
            result = sorted(results)[0]
            keys = self.calls.facts(result).keys
            cure = f"its keys are {listed(keys)}{did_you_mean(name, keys)}"
            cure = f'write {shown(owner)}["{name}"]' if name in keys else cure
            message = f"the result of {result} is a dictionary; {cure}"
            self.refuse(K.UNKNOWN_NAME, message, node)

    def _of_module(self, node: ast.AST, module: str, name: str) -> None:
        dotted = f"{module}.{name}"
        around = self.scopes.parent.get(node)
        if dotted in MODULES and isinstance(around, ast.Attribute):
            return
        if dotted in MODULES or not public(module, name):
            near = did_you_mean(name, MODULES[module] or ())
            message = f"{dotted:.80} is not allowed in a graph{near}"
            self.refuse(K.NOT_ALLOWED, message, node)
        called = isinstance(around, ast.Call) and around.func is node
        if dotted == "logging.basicConfig" and not called:
            self.refuse(K.NOT_ALLOWED, "logging.basicConfig is only called", node)

    def _no_attribute(self, node: ast.Attribute, what: str, known: Iterable[str]) -> None:
        message = f"{what} has no `{node.attr:.60}`{did_you_mean(node.attr, known)}"
        self.refuse(K.UNKNOWN_NAME, message, node)

    def _is_logger(self, node: ast.expr) -> bool:
        values = [node] if isinstance(node, ast.Call) else self.calls.values(node) or []
        return any(
            isinstance(value, ast.Call)
            and self.calls.python_name(value.func).endswith(("getLogger", "logging.Logger"))
            for value in values
        )

    def _of_self(self, node: ast.AST, name: str) -> None:
        known = [*sorted(self.calls.set_on_self), *self.calls.methods]
        if name in known or name in ("prompts", "__class__"):
            return
        near = did_you_mean(name, known)
        operator = next(
            (item for item in self.operators if item.casefold() == name.replace("_", "")), ""
        )
        cure = f"write self.{name} = operator.{operator}(self.llm)" if operator else "assign it"
        message = f"self.{name:.60} is never assigned{near}; {cure} in __init__"
        self.refuse(K.UNKNOWN_NAME, message, node)

    def _Subscript(self, node: ast.Subscript) -> None:
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if not isinstance(node.ctx, ast.Load) or not isinstance(key, str):
            return
        if _is_prompts(node.value):
            self._prompt(node, key, f'self.prompts["{key:.60}"]')
        else:
            self._key(node, node.value, key)

    def _key(self, node: ast.AST, owner: ast.expr, key: str) -> None:
        """`result["response"]`: whether one of the operators that it may be of returns that."""
        results = sorted(self.calls.results(owner) or ())
        keys = [self.calls.facts(name).keys for name in results if name in self.operators]
        if not keys or key in self.written_keys or any(key in item for item in keys):
            return
        message = (
            f"{results[0]} returns {listed(keys[0])}, not {key!r:.60}{did_you_mean(key, keys[0])}"
        )
        self.refuse(K.UNKNOWN_NAME, message, node)

    def _prompt(self, node: ast.AST, name: str, text: str) -> None:
        """`prompt_custom.NAME` or `self.prompts["NAME"]`."""
        self.used_prompts.add(name)
        there = name in self.prompts or name in self.own_prompts or self.any_prompt
        if not there and node in self.shape.certain:  # else a run that comes here says so
            message = (
                f"{text:.80} has no text{did_you_mean(name, self.prompts)}; write one under "
                f'`prompts` as "{name:.60}"'
            )
            self.refuse(K.PROMPT, message, node)

    # Statements

    def _Assign(self, node: ast.Assign) -> None:
        parts = _written_out(node.value)
        for target in node.targets:
            if not isinstance(target, (ast.Tuple, ast.List)) or parts is None:
                continue
            starred = any(isinstance(part, ast.Starred) for part in (*target.elts, *parts))
            if not starred and len(parts) != len(target.elts):
                message = (
                    f"{len(parts)} values are put into {len(target.elts)} names; "
                    f"`{shown(target)}` needs as many as there are"
                )
                self.refuse(K.ARGUMENTS, message, target)

    def _Return(self, node: ast.Return) -> None:
        """What `__call__` returns: an answer, or an answer and its cost."""
        value = node.value
        if self.scopes.scope_of[node] is not self.calls.methods.get("__call__") or value is None:
            return
        if isinstance(value, ast.Tuple):
            if len(value.elts) != 2 and not any(isinstance(e, ast.Starred) for e in value.elts):
                message = (
                    f"__call__ returns {len(value.elts)} values; return the answer and the cost, "
                    "or the answer alone"
                )
                self.refuse(K.SHAPE, message, node)
            value = value.elts[0] if value.elts else value
        results = self.calls.results(value)
        display = next((name for name, kind in _DISPLAYS.items() if isinstance(value, kind)), None)
        if results:
            name = sorted(results)[0]
            key = list(self.calls.facts(name).keys)[-1]
            message = (
                f"__call__ returns the whole result of {name}; return its text, as in "
                f'{shown(value)}["{key}"]'
            )
            self.refuse(K.SHAPE, message, value)
        elif display is not None:
            message = f"__call__ returns a {display}; return the text of the answer"
            self.refuse(K.SHAPE, message, value)

    # Waiting

    def _Await(self, node: ast.Await) -> None:
        value = node.value
        built = isinstance(value, ast.Attribute) and value.attr in self.shape.instances
        if built and _is_self(value.value):  # type: ignore[attr-defined]
            message = f"`{shown(value)}` is not called; write `await {shown(value)}(...)`"
            self.refuse(K.ARGUMENTS, message, node)
        function = self.calls.function(value.func) if isinstance(value, ast.Call) else None
        if isinstance(function, ast.FunctionDef) and function not in self._waiting:
            self._waiting[function] = any(map(self._waits, walk(function)))
        if isinstance(function, ast.FunctionDef) and not self._waiting[function]:
            message = f"`{shown(value)}` is nothing to wait for; leave out `await`"
            self.refuse(K.ARGUMENTS, message, node)

    def _waits(self, node: ast.AST) -> bool:
        """Whether this is a call that gives something to wait for, or may be one."""
        if not isinstance(node, ast.Call):
            return False
        function = self.calls.function(node.func)
        name = self.calls.python_name(node.func)
        if function is not None:
            return isinstance(function, ast.AsyncFunctionDef)
        data = isinstance(node.func, ast.Attribute) and not _is_self(node.func.value)
        return bool(self.calls.handles(node)) or name.startswith("asyncio.") or (
            not name and not data
        )  # fmt: skip

    def _check_awaited(self, node: ast.Call) -> None:
        """Refuse a call whose result is used as if it had been awaited."""
        around = self.scopes.parent.get(node)
        wrong = self._is_data(node, around) or isinstance(around, ast.Expr)
        if isinstance(around, ast.Tuple):
            around = self.scopes.parent.get(around)
        if isinstance(around, ast.Return):
            wrong = self.scopes.scope_of[node] is self.calls.methods.get("__call__")
        elif isinstance(around, ast.Assign) and isinstance(around.targets[0], ast.Name):
            name = around.targets[0]
            key = (self.scopes.owner(self.scopes.scope_of[name], name.id), name.id)
            loads = self.scopes.loads.get(key, [])
            alone = len(self.scopes.stores.get(key, [])) == 1  # type: ignore[arg-type]
            wrong = alone and bool(loads)
            wrong = wrong and all(self._is_data(one, self.scopes.parent.get(one)) for one in loads)
        if wrong:
            text = shown(node.func)
            message = f"`{text}(...)` is not awaited; write `await {text}(...)`"
            self.refuse(K.ARGUMENTS, message, node)

    def _is_data(self, node: ast.expr, around: ast.AST | None) -> bool:
        """Whether what is around an expression needs its value."""
        if isinstance(around, (ast.Subscript, ast.Attribute)):
            task = isinstance(around, ast.Attribute) and around.attr in ("result", "done", "cancel")
            return around.value is node and not task
        if isinstance(around, ast.keyword):
            around = self.scopes.parent.get(around)
        if isinstance(around, ast.List):  # of texts, for an operator
            around = self.scopes.parent.get(around)
            around = self.scopes.parent.get(around) if isinstance(around, ast.keyword) else around
            return bool(around) and bool(self.calls.handles(around))  # type: ignore[arg-type]
        if isinstance(around, ast.Call) and around.func is not node:
            return bool(self.calls.handles(around)) or (
                self.calls.python_name(around.func) in _READING
            )
        return isinstance(around, (ast.FormattedValue, ast.BinOp, ast.Compare))

    # Calls

    def _Call(self, node: ast.Call) -> None:
        name = self.calls.python_name(node.func)
        function = self.calls.function(node.func)
        handles = self.calls.handles(node)
        operator = self.shape.operator_class(node.func)
        if name:
            self._python(node, name)
        elif operator in self.operators:
            self._build(node, operator)  # type: ignore[arg-type]
        elif handles:
            self._use(node, sorted(handles))
            self._check_awaited(node)
        elif function is not None:
            problem = self._misfit(function, node)
            if problem:
                message = f"{getattr(function, 'name', 'the lambda')}: {problem}"
                self.refuse(K.ARGUMENTS, message, node)
            if isinstance(function, ast.AsyncFunctionDef):
                self._check_awaited(node)
        elif shown(node.func) in ("create_llm_instance", "AsyncLLM"):
            if node.args and isinstance(node.args[0], ast.Constant):
                message = "a graph has one model; write create_llm_instance(llm_config)"
                self.refuse(K.ARGUMENTS, message, node)
        elif _is_self(node.func) or self._gives_data(node.func):
            message = (
                f"`{shown(node.func)}` is not known to be a function; a graph calls operators, "
                "its own functions and Python's"
            )
            self.refuse(K.NOT_ALLOWED, message, node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            key = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if isinstance(key, str) and len(node.args) + len(node.keywords) > 1:
                self.used_prompts |= {key} if _is_prompts(node.func.value) else set()
            elif isinstance(key, str) and _is_prompts(node.func.value):
                self._prompt(node.args[0], key, f'self.prompts["{key:.60}"]')
            elif isinstance(key, str) and not isinstance(self.scopes.parent.get(node), _ASKING):
                self._key(node.args[0], node.func.value, key)

    def _gives_data(self, node: ast.expr) -> bool:
        """`json.loads(text)`: what is called again, and is no function."""
        name = self.calls.python_name(node.func) if isinstance(node, ast.Call) else ""
        return name.partition(".")[0] in ("json", "re", "math", "ast")

    def _python(self, node: ast.Call, name: str) -> None:
        if name == "getattr":
            self._getattr(node)
        elif name == "type" and (len(node.args) != 1 or node.keywords):
            self.refuse(K.NOT_ALLOWED, "type(...) makes no classes in a graph", node)
        elif name == "logging.basicConfig":
            words = {word.arg for word in node.keywords}
            if node.args or None in words or not words.isdisjoint(_WRITES_FILES):
                message = "a log goes nowhere; write logging.basicConfig(level=logging.INFO)"
                self.refuse(K.NOT_ALLOWED, message, node)
        elif name == "asyncio.gather":
            for given in node.args:
                values = self.calls.values(given) or [given]
                if all(isinstance(value, (ast.List, ast.ListComp)) for value in values):
                    message = (
                        "asyncio.gather waits for calls; write asyncio.gather(*...) with a star "
                        "for a list of calls"
                    )
                    self.refuse(K.ARGUMENTS, message, node)
                elif isinstance(given, ast.Await):
                    message = "asyncio.gather waits for calls; hand it calls that are not awaited"
                    self.refuse(K.ARGUMENTS, message, given)

    def _getattr(self, node: ast.Call) -> None:
        name = node.args[1] if len(node.args) > 1 else None
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            message = 'getattr needs the name written out: getattr(prompt_custom, "NAME", "")'
            self.refuse(K.NOT_ALLOWED, message, node)
            return
        module = self.calls.python_name(node.args[0])
        if name.value.startswith("_") or name.value in FRAMES:
            self.refuse(K.NOT_ALLOWED, f"`{name.value:.40}` is private", name)
        elif module in MODULES:
            self._of_module(node, module, name.value)
        elif shown(node.args[0]) == "prompt_custom":
            self.used_prompts.add(name.value)
        elif _is_self(node.args[0]) and len(node.args) == 2:
            self._of_self(node, name.value)

    def _build(self, node: ast.Call, name: str) -> None:
        """`operator.Custom(self.llm)`."""
        example = f"operator.{name}(self.llm)"
        words = {word.arg: word.value for word in node.keywords}
        options = {key: value for key, value in words.items() if key not in ("llm", "name")}
        first = node.args[0] if node.args else words.get("llm")
        problem, place = "", node
        if first is None or None in words or isinstance(first, ast.Starred):
            problem = f"{name} is built with the model; write {example}"
        elif isinstance(first, (ast.Constant, ast.JoinedStr)):
            problem = f"{name} is built with the model first, not with {shown(first)}; "
            problem += f"write {example}"
        elif len(node.args) > 2:
            problem = f"options of {name} are given by name, as in {example}"
        elif "prompts" in options:
            problem = f"{name} takes no prompts here; write its instruction under `prompts`"
            place = options["prompts"]  # type: ignore[assignment]
        else:
            known = {
                key: value
                for key, value in _options(node).items()
                if not isinstance(value, ast.AST)
            }
            why = _problem_of(self.operators[name], name, known) if known else ""
            problem = f"{name} cannot be built: {why}" if why else ""
        if problem:
            self.refuse(K.ARGUMENTS, problem, place)

    def _use(self, node: ast.Call, handles: list[tuple[str, str]]) -> None:
        """A call of an operator, or of the model. Where several are meant, one has to fit."""
        problems = []
        for instance, name in handles:
            if name in self.operators:
                problems.append(self._misuse(node, instance, name))
            elif instance == MODEL and self._is_model(node.func):
                asked = isinstance(node.func, ast.Attribute) and node.func.attr == "aask"
                wrong = len(node.args) > 1 or any(w.arg != "prompt" for w in node.keywords)
                wrong = not (node.args or node.keywords) or (not asked and wrong)
                said = "the model is called with one text: await self.llm(text)"
                problems.append((said, node) if wrong else None)
        if problems and all(problems):
            for problem in problems[:1]:
                self.refuse(K.ARGUMENTS, *problem)  # type: ignore[misc]

    def _is_model(self, func: ast.expr) -> bool:
        owner = func.value if isinstance(func, ast.Attribute) and func.attr == "aask" else func
        values = self.calls.values(owner) or []
        return any("create_llm_instance" in shown(value) for value in values)

    def _misuse(self, node: ast.Call, instance: str, name: str) -> tuple[str, ast.AST] | None:
        """What does not fit in a call of this operator, and where."""
        who, facts = f"{instance} ({name})", self.calls.facts(name)
        call = self.calls.methods.get("__call__")
        for given in node.args:
            if isinstance(given, ast.Starred):
                source = given.value
                texts = call is not None and shown(source) in {item.arg for item in call.args.args}
                text = f"{who} is called with the letters of a text; write {facts.signature}"
                return (text, node) if texts else None
        if any(word.arg is None for word in node.keywords):
            return None
        named = {str(word.arg): word.value for word in node.keywords}
        try:
            bound = bind(self.operators[name], node.args, named)
        except TypeError as error:
            problem = facts.misfit(list(named)) or str(error)
            return f"{who} is called as {facts.signature}: {problem}", node
        for argument, value in bound.arguments.items():
            if argument in facts.lists and isinstance(value, ast.expr) and self._is_text(value):
                return f"{argument} of {who} is a list of texts; write [{shown(value)}]", value
        return None

    def _is_text(self, node: ast.expr) -> bool:
        """Whether an expression is plainly one text, or one result."""
        if isinstance(node, ast.Subscript) and self.calls.results(node.value):
            return True
        values = self.calls.values(node)
        if values is not None and not isinstance(node, ast.Attribute):
            return all(not isinstance(item, ast.Name) and self._is_text(item) for item in values)
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        return text or isinstance(node, ast.JoinedStr) or bool(self.calls.results(node))

    def _misfit(self, function: Any, node: ast.Call) -> str:
        """What of a call does not fit the function of the graph that it goes to."""
        arguments = function.args
        if any(isinstance(item, ast.Starred) for item in node.args):
            return ""
        if any(word.arg is None for word in node.keywords):
            return ""
        static = any(getattr(item, "id", "") for item in getattr(function, "decorator_list", ()))
        method = function in self.calls.methods.values() and not static
        positional = [item.arg for item in (*arguments.posonlyargs, *arguments.args)][method:]
        names = [*positional, *(item.arg for item in arguments.kwonlyargs)]
        optional = set(positional[max(0, len(positional) - len(arguments.defaults)) :])
        if not arguments.defaults:
            optional = set()
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        optional |= {item.arg for item, default in pairs if default is not None}
        named = [word.arg or "" for word in node.keywords]
        unknown = [name for name in named if name not in names]
        if len(node.args) > len(positional) and arguments.vararg is None:
            return f"it takes {len(positional)} arguments, not {len(node.args)}"
        if unknown and arguments.kwarg is None:
            return f"it has no parameter {unknown[0]}{did_you_mean(unknown[0], names)}"
        given = {*positional[: len(node.args)], *named, *optional}
        lacking = [name for name in names if name not in given]
        return f"the argument {listed(lacking)} is missing" if lacking else ""


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _is_prompts(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "prompts" and _is_self(node.value)


def returns_of(function: ast.AST) -> list[ast.Return]:
    """The returns with a value of a function itself, without those of functions in it."""
    found, pending = [], list(getattr(function, "body", ()))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            found.append(node)
        if not isinstance(node, FUNCTIONS):
            pending += ast.iter_child_nodes(node)
    return found


def _written_out(value: ast.expr) -> list[ast.expr] | None:
    """The items of a display, and the calls of `await asyncio.gather(...)`."""
    if isinstance(value, (ast.Tuple, ast.List)):
        return value.elts
    call = value.value if isinstance(value, ast.Await) else None
    gathers = isinstance(call, ast.Call) and shown(call.func) in ("asyncio.gather", "gather")
    return call.args if gathers else None  # type: ignore[union-attr]


def _options(node: ast.Call) -> dict[str, Any]:
    """The options of an operator that is built; an expression where one is not written out."""
    options = {}
    for word in node.keywords:
        if word.arg and word.arg not in ("llm", "name"):
            try:
                options[word.arg] = ast.literal_eval(word.value)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                options[word.arg] = word.value
    return options


class Facts:
    """What the check needs to know of an operator."""

    def __init__(self, kind: type[Operator]) -> None:
        parameters = list(inspect.signature(kind.__call__).parameters.values())[1:]
        self.keys = list(kind.returns or [field.name for field in kind.fields])
        """Of its result."""
        self.lists = {
            item.name
            for item in parameters
            if str(item.annotation).casefold().startswith(("list", "sequence", "typing.list"))
        }
        """Parameters that take lists."""
        self.names = [item.name for item in parameters if item.name != "mode"]
        told = [_shown_parameter(item) for item in parameters if item.name in self.names]
        self.signature = f"({', '.join(told)})"
        self.takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters)

    def misfit(self, named: list[str]) -> str:
        """Which of these names is no argument; empty where all are."""
        unknown = [name for name in named if name not in (*self.names, "mode")]
        if not unknown or self.takes_any:
            return ""
        return f"it has no argument `{unknown[0]}`{did_you_mean(unknown[0], self.names)}"


def _shown_parameter(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r:.40}"
    return f"{stars}{parameter.name}{default}"


def _problem_of(kind: type[Operator], name: str, options: Mapping[str, Any]) -> str:
    """What an operator says about its options; empty where it takes them."""
    try:
        kind(ScriptedModel([]), name="checked", **options)
    except BadInput as error:
        fault = error.faults[0] if error.faults else None
        return f"expected {fault.expected}, found {fault.found}" if fault else str(error)
    except Exception as error:  # also whatever a user's operator raises
        return f"{str(error) or type(error).__name__:.200}".replace("Operator.__init__()", name)
    return ""
