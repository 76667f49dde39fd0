"""Checks the names, calls and keys of a written graph before it runs.

Operators with literal options are built on trial, and their calls are bound as at run time
(`aflow_tune.graph.run.bind`). What the source does not determine is left to run time. Modules are
stricter: one may only stand in front of a dot, so that nothing bypasses the allow-list
(`allowed.py`).
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.graph import inside
from aflow_tune.graph.flow import MODEL
from aflow_tune.graph.run import bind
from aflow_tune.graph.shape import walk
from aflow_tune.models.client import ScriptedModel
from aflow_tune.operators import Operator
from aflow_tune.writer.allowed import FRAMES, KNOWN, LOGGER, MODULES, public, why_forbidden
from aflow_tune.writer.source import FUNCTIONS, Source, is_self, options_of
from aflow_tune.writer.types import MAX_REFUSALS, RefusalKind, Refusals, did_you_mean, listed, shown

K = RefusalKind
_RESULT_METHODS = frozenset(dir(dict))
_PUTTING = ("update", "setdefault")
_READING = frozenset({"str", "print", "len", "int", "float", "isinstance"})
_ASKING = (ast.BoolOp, ast.Compare, ast.If, ast.IfExp, ast.UnaryOp)
"""Contexts in which a None from `.get(key)` does no harm."""
_DISPLAYS = (ast.Dict, ast.DictComp, ast.List, ast.ListComp, ast.Set, ast.SetComp)
_OUT_OF_ORDER = (
    *FUNCTIONS, ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Try, ast.Match, ast.NamedExpr,
)  # fmt: skip
"""Nodes that may bind names in another order than that of the lines."""


def check_names(source: Source, refusals: Refusals) -> None:
    """Refuse names that are undefined, not allowed, or read before any assignment."""
    for (owner, name), nodes in source.loads.items():
        given = name.startswith("__") or name in KNOWN or source.imports_all
        why = why_forbidden(name)
        for node in nodes[:MAX_REFUSALS]:
            if owner is not None and _is_unset(source, owner, node):
                message = f"`{name}` has no value here on any path; assign it before this line"
                refusals.add(K.UNKNOWN_NAME, message, node)
            elif owner is None and not given and why is not None:
                refusals.add(K.NOT_ALLOWED, why, node)
            elif owner is None and not given:
                own = [f"self.{item}" for item in (*source.set_on_self, *source.methods)]
                near = did_you_mean(name, [*sorted(set().union(*source.bound.values())), *own])
                message = f"`{name}` is not defined{near}; assign or import it before you use it"
                refusals.add(K.UNKNOWN_NAME, message, node)


def _is_unset(source: Source, owner: Any, node: ast.Name) -> bool:
    """Whether a name is read above every line that binds it, in straight-line code."""
    stores = source.stores_of(node)
    if not stores or source.scope_of[node] is not owner or isinstance(owner, ast.Module):
        return False
    if any(getattr(store, "lineno", 0) <= node.lineno for store in stores):
        return False
    return not any(isinstance(item, _OUT_OF_ORDER) for item in ast.walk(owner) if item is not owner)


class CallCheck:
    """Adds what is wrong in a graph to `refusals`; collects the prompts that its code reads in
    `used_prompts`. A method `_KIND` checks each evaluated node of that class."""

    def __init__(self, source: Source, prompts: Mapping[str, str], refusals: Refusals) -> None:
        self.source, self.prompts, self.refusals = source, prompts, refusals
        self.shape, self.operators, self.parent = source.shape, source.operators, source.parent
        self.used_prompts: set[str] = set()
        self.own_prompts = "prompts" in source.set_on_self
        """Whether the graph itself sets `self.prompts`, so that any name may have a text."""
        self.written_keys: set[str] = set()
        """Keys that the graph itself stores in objects."""
        for node in source.nodes:
            stored = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
            if stored or getattr(node, "attr", "") in _PUTTING:
                self.own_prompts |= _is_prompts(node.value)  # type: ignore[attr-defined]
            if stored or getattr(getattr(node, "func", None), "attr", "") in _PUTTING:
                for item in ast.walk(getattr(node, "slice", node)):
                    key = item.arg if isinstance(item, ast.keyword) else getattr(item, "value", "")
                    self.written_keys |= {key} if isinstance(key, str) else set()
        self._waits = functools.cache(self._function_waits)
        for node in source.nodes:
            check = getattr(self, f"_{type(node).__name__}", None)
            if check is not None and node in source.scope_of:
                check(node)

    def refuse(self, kind: RefusalKind, message: str, node: ast.AST) -> None:
        self.refusals.add(kind, message, node)

    def _is_called(self, node: ast.AST) -> bool:
        around = self.parent.get(node)
        return isinstance(around, ast.Call) and around.func is node

    # Names and modules

    def _Name(self, node: ast.Name) -> None:
        name, around = self.source.python_name(node), self.parent.get(node)
        if name in MODULES and isinstance(node.ctx, ast.Load):
            asked = isinstance(around, ast.Call) and getattr(around.func, "id", "") == "getattr"
            if not isinstance(around, ast.Attribute) and not asked:
                message = f"`{node.id}` is a module; use a name in it, as in json.loads(...)"
                self.refuse(K.NOT_ALLOWED, message, node)
        compared = isinstance(around, (ast.Compare, *FUNCTIONS))
        if name == "type" and not self._is_called(node) and not compared:
            self.refuse(K.NOT_ALLOWED, "type is only called, as in type(found)", node)
        known = node.id in KNOWN or node.id.startswith("__")
        if self.source.imports_all and not known and self.source.owner(node) is None:
            self._operator(node, node.id)

    def _operator(self, node: ast.AST, name: str) -> None:
        if name not in self.operators:
            near, all_ = did_you_mean(name, self.operators), listed(self.operators, 30)
            message = f"there is no operator {name:.60}{near}; a graph may use {all_}"
            self.refuse(K.UNKNOWN_OPERATOR, message, node)

    def _ImportFrom(self, node: ast.ImportFrom) -> None:
        kind = inside.shim_of(inside.absolute(node.module or "", node.level))
        for name in (alias.name for alias in node.names if alias.name != "*"):
            if kind == "operator":
                self._operator(node, name)
            elif kind == "prompt":
                self._prompt(node, name, name)

    def _Attribute(self, node: ast.Attribute) -> None:
        name, owner = node.attr, node.value
        if not isinstance(node.ctx, ast.Load):
            return
        if (module := self.source.python_name(owner)) in MODULES:
            self._of_module(node, module, name)
        elif self.shape.operator_class(node) is not None:
            self._operator(node, name)
        elif isinstance(owner, ast.Name) and self.shape.modules.get(owner.id) == "prompt":
            self._prompt(node, name, f"{owner.id}.{name}")
        elif is_self(owner):
            self._of_self(node, name)
        elif name not in LOGGER and self._is_logger(owner):
            self._no_attribute(node, "a logger")
        elif isinstance(owner, ast.Attribute) and is_self(owner.value):
            values = self.source.values(owner) or []
            built = bool(values) and all(value in self.source.built.values() for value in values)
            if built and name not in ("name", "llm", "__class__"):
                self._no_attribute(node, f"{shown(owner)}, an operator to be called,")
        elif name not in _RESULT_METHODS and (results := self.source.results(owner)):
            keys = listed(keys_of(self.operators[min(results)]))
            self._no_attribute(node, f"the result of {min(results)}, a dictionary of {keys},")

    def _no_attribute(self, node: ast.Attribute, what: str) -> None:
        self.refuse(K.UNKNOWN_NAME, f"{what} has no attribute `{node.attr:.60}`", node)

    def _of_module(self, node: ast.AST, module: str, name: str) -> None:
        dotted = f"{module}.{name}"
        if dotted in MODULES and isinstance(self.parent.get(node), ast.Attribute):
            return
        if dotted in MODULES or not public(module, name):
            near = did_you_mean(name, MODULES[module] or ())
            self.refuse(K.NOT_ALLOWED, f"{dotted:.80} is not allowed in a graph{near}", node)
        if dotted == "logging.basicConfig" and not self._is_called(node):
            self.refuse(K.NOT_ALLOWED, "logging.basicConfig is only called", node)

    def _is_logger(self, node: ast.expr) -> bool:
        values = [node] if isinstance(node, ast.Call) else self.source.values(node) or []
        made = (self.source.python_name(getattr(value, "func", value)) for value in values)
        return any(name.endswith(("getLogger", "logging.Logger")) for name in made)

    def _of_self(self, node: ast.AST, name: str) -> None:
        known = [*sorted(self.source.set_on_self), *self.source.methods, "prompts", "__class__"]
        if name not in known:
            message = f"self.{name:.60} is never assigned{did_you_mean(name, known)}"
            self.refuse(K.UNKNOWN_NAME, message, node)

    def _Subscript(self, node: ast.Subscript) -> None:
        key = getattr(node.slice, "value", None) if isinstance(node.ctx, ast.Load) else None
        if isinstance(node.slice, ast.Constant) and isinstance(key, str):
            self._key(node, node.value, key)

    def _key(self, node: ast.AST, owner: ast.expr, key: str) -> None:
        """Check `owner[key]`, where `owner` may be `self.prompts` or an operator's result."""
        if _is_prompts(owner):
            self._prompt(node, key, f'self.prompts["{key:.60}"]')
            return
        results = sorted(self.source.results(owner))
        keys = [keys_of(self.operators[name]) for name in results]
        if keys and key not in self.written_keys and not any(key in item for item in keys):
            message = f"{results[0]} returns {listed(keys[0])}, not {key!r:.60}"
            self.refuse(K.UNKNOWN_NAME, message, node)

    def _prompt(self, node: ast.AST, name: str, text: str) -> None:
        self.used_prompts.add(name)
        there = name in self.prompts or (self.own_prompts and text.startswith("self."))
        if not there and node in self.shape.certain:  # else it only fails at run time, if reached
            near = did_you_mean(name, self.prompts)
            message = f'{text:.80} has no text{near}; write one under `prompts` as "{name:.60}"'
            self.refuse(K.PROMPT, message, node)

    # Statements

    def _Assign(self, node: ast.Assign) -> None:
        value, call = node.value, getattr(node.value, "value", None)
        given: Sequence[ast.expr] = value.elts if isinstance(value, (ast.Tuple, ast.List)) else ()
        if isinstance(value, ast.Await) and isinstance(call, ast.Call):
            given = call.args if self.source.python_name(call.func) == "asyncio.gather" else ()
        for target in node.targets if given else ():
            names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else given
            starred = any(isinstance(part, ast.Starred) for part in (*names, *given))
            if not starred and len(given) != len(names):
                message = f"{len(given)} values are put into {len(names)} names"
                self.refuse(K.ARGUMENTS, message, target)

    def _Return(self, node: ast.Return) -> None:
        """`__call__` must return an answer, or an answer and its cost."""
        value = node.value
        if value is None or not self._of_call(node):
            return
        if isinstance(value, ast.Tuple):
            if len(value.elts) != 2 and not any(isinstance(e, ast.Starred) for e in value.elts):
                message = f"__call__ returns {len(value.elts)} values; return the answer, or it "
                self.refuse(K.SHAPE, message + "and the cost", node)
            value = value.elts[0] if value.elts else value
        results = self.source.results(value)
        if results or isinstance(value, _DISPLAYS):
            keys = f", one of {listed(keys_of(self.operators[min(results)]))}" if results else ""
            message = f"__call__ returns `{shown(value)}`; return the text of the answer{keys}"
            self.refuse(K.SHAPE, message, value)

    def _of_call(self, node: ast.AST) -> bool:
        return self.source.scope_of[node] is self.source.methods.get("__call__")

    # Waiting

    def _Await(self, node: ast.Await) -> None:
        value = node.value
        built = isinstance(value, ast.Attribute) and value.attr in self.shape.instances
        if built and is_self(value.value):  # type: ignore[attr-defined]
            message = f"`{shown(value)}` is not called; write `await {shown(value)}(...)`"
            self.refuse(K.ARGUMENTS, message, node)
        function = self.source.function(value.func) if isinstance(value, ast.Call) else None
        if isinstance(function, ast.FunctionDef) and not self._waits(function):
            message = f"`{shown(value)}` is nothing to wait for; leave out `await`"
            self.refuse(K.ARGUMENTS, message, node)

    def _function_waits(self, function: ast.FunctionDef) -> bool:
        """Whether a `def` may return an awaitable, judging by what it calls."""
        for node in walk(function):
            if isinstance(node, ast.Call):
                name = self.source.python_name(node.func)
                data = isinstance(node.func, ast.Attribute) and not is_self(node.func.value)
                plain = (name or data) and not name.startswith("asyncio.")
                if self.source.handles(node) or not plain:
                    return True
        return False

    def _check_awaited(self, node: ast.Call) -> None:
        """Refuse a call whose result is used as if it had been awaited."""
        around = self.parent.get(node)
        wrong = self._is_data(node) or isinstance(around, ast.Expr)
        if isinstance(around, ast.Tuple):
            around = self.parent.get(around)
        if isinstance(around, ast.Return):
            wrong = self._of_call(node)
        elif isinstance(around, ast.Assign) and isinstance(around.targets[0], ast.Name):
            key = self.source.owner(around.targets[0]), around.targets[0].id
            loads = self.source.loads.get(key, [])
            alone = len(self.source.stores.get(key, ())) == 1
            wrong = alone and bool(loads) and all(map(self._is_data, loads))
        if wrong:
            text = shown(node.func)
            message = f"`{text}(...)` is not awaited; write `await {text}(...)`"
            self.refuse(K.ARGUMENTS, message, node)

    def _is_data(self, node: ast.expr) -> bool:
        """Whether the context of an expression needs its value, not an awaitable."""
        around = self.parent.get(node)
        if isinstance(around, (ast.Subscript, ast.Attribute)):
            task = getattr(around, "attr", "") in ("result", "done", "cancel")
            return around.value is node and not task
        while isinstance(around, (ast.keyword, ast.List)):  # `op([call(...)])` too
            around = self.parent.get(around)
        if isinstance(around, ast.Call) and around.func is not node:
            reads = self.source.python_name(around.func) in _READING
            return reads or bool(self.source.handles(around))
        return isinstance(around, (ast.FormattedValue, ast.BinOp, ast.Compare))

    # Calls

    def _Call(self, node: ast.Call) -> None:
        called, first = node.func, node.args[0] if node.args else None
        name, function = self.source.python_name(called), self.source.function(called)
        operator = self.shape.operator_class(called) or ""
        again = self.source.python_name(called.func) if isinstance(called, ast.Call) else ""
        if name:
            self._python(node, name)
        elif operator in self.operators:
            self._build(node, operator)
        elif handles := sorted(self.source.handles(node)):
            problems = [self._misuse(node, *handle) for handle in handles]
            if all(problems):  # with several candidates, one has to fit
                self.refuse(K.ARGUMENTS, *problems[0])  # type: ignore[misc]
            self._check_awaited(node)
        elif function is not None:
            if isinstance(function, ast.AsyncFunctionDef):
                self._check_awaited(node)
        elif shown(called) in ("create_llm_instance", "AsyncLLM"):
            if isinstance(first, ast.Constant):
                message = "a graph has one model; write create_llm_instance(llm_config)"
                self.refuse(K.ARGUMENTS, message, node)
        elif is_self(called) or again.partition(".")[0] in ("json", "re", "math", "ast"):
            self.refuse(K.NOT_ALLOWED, f"`{shown(called)}` is not known to be a function", node)
        # `owner.get("key")`, with or without a default
        key = first.value if isinstance(first, ast.Constant) else None
        if isinstance(called, ast.Attribute) and called.attr == "get" and isinstance(key, str):
            own = _is_prompts(called.value)
            if len(node.args) + len(node.keywords) > 1:
                self.used_prompts |= {key} if own else set()
            elif own or not isinstance(self.parent.get(node), _ASKING):
                self._key(node.args[0], called.value, key)

    def _python(self, node: ast.Call, name: str) -> None:
        if name == "getattr":
            self._getattr(node)
        elif name == "type" and (len(node.args) != 1 or node.keywords):
            self.refuse(K.NOT_ALLOWED, "type(...) makes no classes in a graph", node)
        elif name == "logging.basicConfig":
            words = {word.arg for word in node.keywords}
            if node.args or not words.isdisjoint((None, "filename", "handlers", "stream")):
                message = "a log goes nowhere; write logging.basicConfig(level=logging.INFO)"
                self.refuse(K.NOT_ALLOWED, message, node)
        elif name == "asyncio.gather":
            for given in node.args:
                values = self.source.values(given) or [given]
                if all(isinstance(value, (ast.List, ast.ListComp, ast.Await)) for value in values):
                    message = "asyncio.gather takes calls that are not awaited: one by one, or "
                    message += "with a star a list of them, asyncio.gather(*calls)"
                    self.refuse(K.ARGUMENTS, message, node)

    def _getattr(self, node: ast.Call) -> None:
        name = node.args[1] if len(node.args) > 1 else None
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            message = 'getattr needs the name written out: getattr(prompt_custom, "NAME", "")'
            self.refuse(K.NOT_ALLOWED, message, node)
            return
        module = self.source.python_name(node.args[0])
        if name.value.startswith("_") or name.value in FRAMES:
            self.refuse(K.NOT_ALLOWED, f"`{name.value:.40}` is private", name)
        elif module in MODULES:
            self._of_module(node, module, name.value)
        elif shown(node.args[0]) == "prompt_custom":
            self.used_prompts.add(name.value)
        elif is_self(node.args[0]) and len(node.args) == 2:
            self._of_self(node, name.value)

    def _build(self, node: ast.Call, name: str) -> None:
        words = {word.arg for word in node.keywords}
        first: ast.AST | None = node.args[0] if node.args else None
        if first is None:
            first = next((word.value for word in node.keywords if word.arg == "llm"), None)
        written = isinstance(first, (ast.Constant, ast.JoinedStr, ast.Starred))
        problem = "takes the model, then its options by name; prompts stand under `prompts`"
        if not (first is None or written or len(node.args) > 2 or words & {None, "prompts"}):
            options = options_of(node).items()
            known = {key: value for key, value in options if not isinstance(value, ast.AST)}
            problem = _problem_of(self.operators[name], known) if known else ""
        if problem:
            message = f"{name} {problem}; write operator.{name}(self.llm)"
            self.refuse(K.ARGUMENTS, message, node)

    def _misuse(self, node: ast.Call, instance: str, name: str) -> tuple[str, ast.AST] | None:
        """What is wrong in a call of this operator or the model, and the node; None if nothing."""
        named = {word.arg: word.value for word in node.keywords}
        if name not in self.operators:
            asked = isinstance(node.func, ast.Attribute) and node.func.attr == "aask"
            fits = asked or len(node.args) + len(named.keys() & {"prompt"}) == 1 >= len(named)
            values = self.source.values(node.func) or () if instance == MODEL else ()
            if fits or not any("create_llm_instance" in shown(value) for value in values):
                return None
            return "the model is called with one text: await self.llm(text)", node
        kind = self.operators[name]
        items = list(inspect.signature(kind.__call__).parameters.values())
        items = [item for item in items if item.name not in ("self", "mode")]
        plain = [item.replace(annotation=inspect.Parameter.empty) for item in items]
        who, signature = f"{instance} ({name})", inspect.Signature(plain)
        if starred := [item.value for item in node.args if isinstance(item, ast.Starred)]:
            texts = {item.arg for item in self.source.methods["__call__"].args.args}
            text = f"{who} is called with the letters of a text; write {signature}"
            return (text, node) if shown(starred[0]) in texts else None
        if None in named:
            return None
        try:
            bound = bind(kind, node.args, named)  # type: ignore[arg-type]
        except TypeError as error:
            return f"{who} is called as {signature}: {error}", node
        for item in items:
            value = bound.arguments.get(item.name)
            lists = str(item.annotation).casefold().startswith(("list", "sequence", "typing.list"))
            if lists and isinstance(value, ast.expr) and self._is_text(value):
                return f"{item.name} of {who} is a list of texts; write [{shown(value)}]", value
        return None

    def _is_text(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Subscript) and self.source.results(node.value):
            return True
        values = self.source.values(node) if isinstance(node, ast.Name) else None
        if values is not None:
            return all(not isinstance(item, ast.Name) and self._is_text(item) for item in values)
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        return text or isinstance(node, ast.JoinedStr) or bool(self.source.results(node))


def _is_prompts(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "prompts" and is_self(node.value)


def keys_of(kind: type[Operator]) -> list[str]:
    """The keys of an operator's result."""
    return list(kind.returns or [field.name for field in kind.fields])


def _problem_of(kind: type[Operator], options: Mapping[str, Any]) -> str:
    try:
        kind(ScriptedModel([]), name="checked", **options)
    except BadInput as error:
        fault = error.faults[0]
        return f"cannot be built: expected {fault.expected}, found {fault.found}"
    except Exception as error:  # a user's operator may raise anything
        return f"cannot be built: {str(error) or type(error).__name__:.200}"
    return ""
