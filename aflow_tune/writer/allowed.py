"""The Python that a written graph may be made of: an allow-list over its syntax tree, and its
names.

What is not named here is refused, with what to write instead. The list keeps graphs readable and
without effects of their own. It is not the security boundary: that is the sandbox.

Which names of modules are used, and what is called with what, is for `calls.py`.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
import types
import typing
from collections.abc import Iterator

from aflow_tune.graph import inside
from aflow_tune.graph.shape import children, parameters
from aflow_tune.writer.types import MAX_REFUSALS, RefusalKind, Refusals, did_you_mean, shown


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOGGING = _words(
    "CRITICAL DEBUG ERROR FATAL Formatter INFO Logger NOTSET NullHandler StreamHandler WARN "
    "WARNING basicConfig critical debug disable error exception getLevelName getLogger info log "
    "warn warning"
)
LOGGER = LOGGING | _words(
    "addHandler getChild getEffectiveLevel handlers hasHandlers isEnabledFor level name "
    "propagate removeHandler setFormatter setLevel"
)
"""What may be used of a logger, and of its handlers."""
MODULES: dict[str, frozenset[str] | None] = {
    "asyncio": _words(
        "gather create_task ensure_future wait wait_for shield as_completed sleep timeout "
        "Semaphore Lock TaskGroup TimeoutError CancelledError ALL_COMPLETED FIRST_COMPLETED"
    ),
    "ast": frozenset({"literal_eval"}),
    "bisect": None,
    "cmath": None,
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "collections.abc": None,
    "copy": frozenset({"copy", "deepcopy"}),
    "datetime": None,
    "decimal": None,
    "difflib": None,
    "fractions": frozenset({"Fraction"}),
    "functools": frozenset({"cmp_to_key", "partial", "reduce"}),
    "heapq": None,
    "html": frozenset({"escape", "unescape"}),
    "itertools": _words(
        "accumulate chain combinations combinations_with_replacement compress count cycle "
        "dropwhile filterfalse groupby islice pairwise permutations product repeat starmap "
        "takewhile zip_longest"
    ),
    "json": frozenset({"JSONDecodeError", "dumps", "loads"}),
    "logging": LOGGING,
    "math": None,
    "random": None,
    "re": None,
    "statistics": None,
    "string": None,
    "textwrap": None,
    "time": frozenset({"monotonic", "perf_counter", "time"}),
    "traceback": frozenset({"format_exc"}),
    "typing": None,
    "unicodedata": None,
}
"""Modules of Python, each with what may be used of it. None: all that is public."""
_EVALUATING = frozenset({"string.Formatter", "typing.ForwardRef", "typing.get_type_hints"})
"""They make code of texts, or read attributes that these name."""
BUILTINS = _words(
    "abs all any bin bool callable chr dict divmod enumerate filter float format frozenset "
    "getattr hasattr hash hex int isinstance issubclass iter len list map max min next oct ord "
    "pow print range repr reversed round set slice sorted str sum object staticmethod super tuple "
    "type zip ArithmeticError AssertionError AttributeError "
    "Exception IndexError KeyError LookupError NameError NotImplementedError OverflowError "
    "RecursionError RuntimeError StopIteration SyntaxError TimeoutError TypeError UnicodeError "
    "ValueError ZeroDivisionError"
)
"""Python's own names that a graph may use."""
_SHIMS = frozenset({"operator", "prompt", "model", "dataset", "cost", "log"})
FRAMES = _words(
    "add_done_callback ag_code ag_frame cr_code cr_frame f_back f_builtins f_code f_globals "
    "f_locals gi_code gi_frame gi_yieldfrom tb_frame tb_next func_globals mro"
)
_STATEMENTS = (
    ast.AnnAssign, ast.Assert, ast.Assign, ast.AsyncFunctionDef, ast.AsyncWith, ast.AugAssign,
    ast.Break, ast.ClassDef, ast.Continue, ast.Delete, ast.Expr, ast.For, ast.FunctionDef, ast.If,
    ast.Import, ast.ImportFrom, ast.Match, ast.Nonlocal, ast.Pass, ast.Raise, ast.Return, ast.Try,
    ast.While, ast.With,
)  # fmt: skip
_EXPRESSIONS = (
    ast.Attribute, ast.Await, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant,
    ast.Dict, ast.DictComp, ast.FormattedValue, ast.GeneratorExp, ast.IfExp, ast.JoinedStr,
    ast.Lambda, ast.List, ast.ListComp, ast.Name, ast.NamedExpr, ast.Set, ast.SetComp, ast.Slice,
    ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp,
)  # fmt: skip
_KNOWN = frozenset(
    {*_STATEMENTS, *_EXPRESSIONS, ast.alias, ast.arg, ast.arguments, ast.comprehension,
     ast.keyword, ast.ExceptHandler, ast.MatchClass}
)  # fmt: skip
_INSTEAD = {
    ast.AsyncFor: "`async for` has no known number of turns; write `for` over a list",
    ast.Global: "`global` is not allowed; hand values over as arguments or keep them on self",
    ast.Yield: "`yield` is not allowed; collect the values in a list and return it",
    ast.YieldFrom: "`yield` is not allowed; collect the values in a list and return it",
    ast.TryStar: "`except*` is not allowed; write `except Exception`",
}
_FORBIDDEN = {
    "breakpoint": "it waits for a person",
    "compile": "a graph may not make code of texts",
    "eval": "a graph may not make code of texts; let operator.Programmer compute",
    "exec": "a graph may not make code of texts; let operator.Programmer run a program",
    "globals": "a graph names its values",
    "help": "it waits for a person",
    "input": "the problem is the argument of __call__",
    "locals": "a graph names its values",
    "open": "a graph has no files",
    "setattr": "write self.name = value",
    "delattr": "a graph names its values",
    "vars": "a graph names its values",
    "dir": "a graph names its values",
}
_STATIC = "staticmethod"
_READS_PRIVATE = re.compile(r"\{[^{}\s]*[.\[]__\w+__[^{}]*\}")
"""A text that `format` would read private attributes by."""
NAME = "__name__"
"""Of a module, a class or a function: a text, and what loggers are called by."""
_SETTABLE = ("cost_manager", "propagate")
"""Attributes of anything that code of the field sets: of AFlow's model, of a logger."""


def check_syntax(tree: ast.Module, workflow: ast.ClassDef | None, refusals: Refusals) -> None:
    """Refuse everything in a tree that is not on the list. `workflow` is its class Workflow."""
    _Check(workflow, refusals).module(tree)


def _why_forbidden(name: str) -> str | None:
    """Why a graph may not use one of Python's own names; None for a name that is not Python's."""
    if name in BUILTINS or not hasattr(builtins, name):
        return None
    why = _FORBIDDEN.get(name, "a graph has no use for it")
    return f"`{name}` is not allowed: {why}"


def public(module: str, name: str) -> bool:
    """Whether a graph may use this name of an allowed module."""
    names = MODULES[module]
    if names is not None:
        return name in names
    if name.startswith("_") or f"{module}.{name}" in _EVALUATING:
        return False
    # A module's own imports (`typing.sys`) lead to everything that graphs may not have.
    found = getattr(sys.modules.get(module) or _load(module), name, sys)
    return not isinstance(found, types.ModuleType)


def _load(module: str) -> object:
    # Only modules of the table above: Python's own, without effects.
    return __import__(module, fromlist=["_"])


class _Check:
    def __init__(self, workflow: ast.ClassDef | None, refusals: Refusals) -> None:
        self.workflow, self.refusals = workflow, refusals
        self.named: set[ast.AST] = set()
        """Whose name is read: a class may be one, as in `error.__class__.__name__`."""
        self.called: set[ast.AST] = set()

    def refuse(self, message: str, node: ast.AST) -> None:
        self.refusals.add(RefusalKind.NOT_ALLOWED, message, node)

    def module(self, tree: ast.Module) -> None:
        for statement in tree.body:
            self._at_top(statement)
        pending: list[ast.AST] = list(reversed(tree.body))
        while pending:
            node = pending.pop()
            if self._node(node):
                pending += reversed(children(node))

    def _at_top(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Try):
            for part in (*node.body, *node.orelse, *node.finalbody):
                self._at_top(part)
            for handler in node.handlers:
                for part in handler.body:
                    self._at_top(part)
            return
        plain = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(node, (*plain, ast.Pass)) or _is_constant(node):
            return
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if all(isinstance(target, (ast.Name, ast.Attribute)) for target in targets):
                return  # which attributes may be set is the same everywhere
        call = node.value if isinstance(node, ast.Expr) else None
        called = call.func if isinstance(call, ast.Call) else None
        if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            return  # logging.basicConfig(...), random.seed(...): which, is for `calls.py`
        message = (
            f"`{shown(node)}` stands outside of the class; beside it only imports, constants and "
            "functions are allowed"
        )
        self.refuse(message, node)

    def _node(self, node: ast.AST) -> bool:
        """Check one node; whether to look inside it."""
        kind = type(node)
        if kind not in _KNOWN:
            return self._unknown(node)
        check = getattr(self, f"_{kind.__name__}", None)
        return True if check is None else check(node) is not False

    def _unknown(self, node: ast.AST) -> bool:
        instead = _INSTEAD.get(type(node))
        if instead is not None:
            self.refuse(instead, node)
            return isinstance(node, (ast.AsyncFor, ast.TryStar))
        if isinstance(node, ast.stmt):
            self.refuse(f"`{type(node).__name__}` is not allowed in a graph", node)
            return False
        if isinstance(node, ast.expr):
            self.refuse(f"`{shown(node)}` is not allowed in a graph", node)
            return False
        return True

    def _ClassDef(self, node: ast.ClassDef) -> bool:
        if node is not self.workflow:
            self.refuse(
                f"class {node.name} is not allowed; a graph is the one class Workflow, with "
                "helper methods in it",
                node,
            )
            return False
        if node.keywords or any(
            not (isinstance(base, ast.Name) and base.id == "object") for base in node.bases
        ):
            self.refuse("class Workflow has no bases; write `class Workflow:`", node)
        for decorator in node.decorator_list:
            self.refuse("a decorator is not allowed here; leave it out", decorator)
        for member in node.body:
            targets: list[ast.expr] = []
            if isinstance(member, ast.Assign):
                targets = member.targets
            elif isinstance(member, ast.AnnAssign):
                targets = [member.target]
            named = bool(targets) and all(isinstance(target, ast.Name) for target in targets)
            functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Pass)
            if not (named or isinstance(member, functions) or _is_constant(member)):
                message = "in the class itself only methods and constants are allowed"
                self.refuse(message, member)
        return True

    def _FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            if not (isinstance(decorator, ast.Name) and decorator.id == _STATIC):
                message = f"the decorator @{shown(decorator)} is not allowed; leave it out"
                self.refuse(message, decorator)
        own = self.workflow is not None and node in self.workflow.body
        if node.name.startswith("__") and not (own and node.name in ("__init__", "__call__")):
            self.refuse(
                f"{node.name} is not allowed; Workflow has __init__, __call__ and helper methods "
                "with names of their own",
                node,
            )

    _AsyncFunctionDef = _FunctionDef

    def _comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            message = "`async for` has no known number of turns; write `for` over a list"
            self.refuse(message, node.target)

    def _GeneratorExp(self, node: ast.GeneratorExp) -> None:
        inner = [node.elt, *(test for part in node.generators for test in part.ifs)]
        inner += [part.iter for part in node.generators[1:]]
        if any(isinstance(item, ast.Await) for part in inner for item in ast.walk(part)):
            self.refuse("a generator cannot wait; write a list: [await ... for ... in ...]", node)

    def _Name(self, node: ast.Name) -> None:
        if node.id == "getattr" and node not in self.called:
            message = "getattr is only called, with the name written out, and not handed over"
            self.refuse(message, node)
        if node.id.startswith("__") and not (node.id == NAME and isinstance(node.ctx, ast.Load)):
            self.refuse(f"`{node.id}` is not allowed; a graph keeps to names of its own", node)

    def _Attribute(self, node: ast.Attribute) -> bool:
        of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        name = node.attr
        if name == NAME and isinstance(node.ctx, ast.Load):
            self.named.add(node.value)
            return True
        if name == "__class__" and node in self.named:
            return True
        if name.startswith("__") and not _is_super_init(node):
            self.refuse(f"`.{name}` is not allowed; names with two underscores are Python's", node)
            return False
        if (name.startswith("_") and not of_self and not _is_super_init(node)) or name in FRAMES:
            self.refuse(f"`.{name}` is not allowed; it is private", node)
            return False
        if isinstance(node.ctx, ast.Del) or (
            isinstance(node.ctx, ast.Store) and not of_self and name not in _SETTABLE
        ):
            self.refuse(
                f"`{shown(node)}` may not be set; keep values in variables or on self", node
            )
        return True

    def _MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            if name.startswith("_") or name in FRAMES:
                self.refuse(f"`{name:.40}` in a pattern is not allowed; it is private", node)

    def _Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            self.called.add(node.func)

    def _Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _READS_PRIVATE.search(node.value):
            self.refuse("a text may not make format read private attributes", node)

    def _Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if inside.shim_of(alias.name) not in _SHIMS:
                self._module(alias.name, node)

    def _ImportFrom(self, node: ast.ImportFrom) -> None:
        module = inside.absolute(node.module or "", node.level)
        kind = inside.shim_of(module)
        if kind in _SHIMS or module == "__future__":
            return
        shims = [inside.shim_of(f"{module}.{alias.name}") for alias in node.names]
        if all(shim in _SHIMS for shim in shims) or not self._module(module, node):
            return
        for alias in node.names:
            if alias.name == "*":
                self.refuse(f"name what you import from {module}", node)
            elif not public(module, alias.name):
                self.refuse(_not_offered(module, alias.name), node)

    def _module(self, module: str, node: ast.stmt) -> bool:
        if module in MODULES:
            return True
        if module in ("operator", "prompt_custom"):
            message = f"leave `import {module}` out: {module} is there already"
        elif module.partition(".")[0] in sys.stdlib_module_names:
            message = f"importing {module} is not allowed; {_OFFERED}"
        else:
            message = f"there is no module {module} for a graph; {_OFFERED}"
        self.refuse(message, node)
        return False

    def _With(self, node: ast.With | ast.AsyncWith) -> None:
        if isinstance(node, ast.With):
            self.refuse("`with` is not allowed; a graph opens nothing", node)


_OFFERED = (
    "a graph may import asyncio, collections, itertools, json, math, random, re, typing and a few "
    "more of Python's modules"
)


def _not_offered(module: str, name: str) -> str:
    names = MODULES[module]
    near = did_you_mean(name, names or ())
    return f"{module}.{name} is not allowed in a graph{near}"


def _is_constant(node: ast.stmt) -> bool:
    """A docstring, or a value on a line of its own."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_super_init(node: ast.Attribute) -> bool:
    call = node.value
    return (
        node.attr == "__init__"
        and isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "super"
        and not call.args
    )


# Names

GIVEN = ("operator", "prompt_custom", "create_llm_instance", "DatasetType")
"""Names that a graph has without importing them."""

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_REPEATING = (
    *FUNCTIONS, ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
)  # fmt: skip


class Scopes:
    """Which names each scope of a graph binds, and which scope is around it.

    Python's rules: a name belongs to the innermost function that binds it, then to the module.
    Names of a comprehension count as those of the function around it.
    """

    def __init__(self, tree: ast.Module, workflow: ast.ClassDef | None) -> None:
        self.bound: dict[Scope, set[str]] = {}
        self.around: dict[Scope, Scope] = {}
        self.scope_of: dict[ast.AST, Scope] = {}
        """Of every node."""
        self.parent: dict[ast.AST, ast.AST] = {}
        self.of_class = {
            name
            for member in (workflow.body if workflow is not None else ())
            for name in _binds(member)
        }
        future = [item for item in tree.body if isinstance(item, ast.ImportFrom)]
        self._binds_besides: dict[Scope, bool] = {}
        self._annotated = all(item.module != "__future__" for item in future)
        self._read(tree, None)
        self.imports_all = "*" in self.bound[tree]
        self.stores: dict[tuple[Scope, str], list[ast.AST]] = {}
        """Where a name gets a value, by imports and definitions apart."""
        self.loads: dict[tuple[Scope | None, str], list[ast.Name]] = {}
        for node, scope in self.scope_of.items():
            if isinstance(node, ast.Name):
                owner = self.owner(scope, node.id)
                if isinstance(node.ctx, ast.Load):
                    self.loads.setdefault((owner, node.id), []).append(node)
                elif owner is not None:
                    self.stores.setdefault((owner, node.id), []).append(node)
            elif isinstance(node, (ast.ExceptHandler, ast.pattern)):
                for name in _binds(node):
                    self.stores.setdefault((scope, name), []).append(node)

    def owner(self, scope: Scope, name: str) -> Scope | None:
        """The scope in which a name of this scope lives; None for Python's and the given ones."""
        here: Scope | None = scope
        while here is not None and name not in self.bound[here]:
            here = self.around.get(here)
        return here

    @staticmethod
    def names_of(node: ast.AST) -> list[str]:
        """The names that a statement itself binds."""
        return list(_binds(node))

    def outward(self, node: ast.AST) -> Iterator[ast.AST]:
        """What is around a node, the nearest first."""
        while (found := self.parent.get(node)) is not None:
            yield (node := found)

    def check(self, refusals: Refusals) -> None:
        """Refuse every name that nothing stands for, or nothing yet."""
        for (owner, name), nodes in self.loads.items():
            for node in nodes:
                if len(refusals.in_order()) >= MAX_REFUSALS:
                    return
                if owner is not None:
                    self._check_is_set(owner, node, refusals)
                elif not (
                    name.startswith("__") or name in GIVEN or name in BUILTINS or self.imports_all
                ):
                    self._refuse_unknown(node, refusals)

    def _refuse_unknown(self, node: ast.Name, refusals: Refusals) -> None:
        scope = self.scope_of[node]
        if (why := _why_forbidden(node.id)) is not None:
            refusals.add(RefusalKind.NOT_ALLOWED, why, node)
            return
        if node.id in self.of_class:
            message = f"`{node.id}` belongs to the class; write self.{node.id}"
        elif (line := _import_of(node.id)) is not None:
            message = f"`{node.id}` is not defined; write `{line}`"
        else:
            known = [*self._visible(scope), *GIVEN, *BUILTINS]
            near = did_you_mean(node.id, known)
            message = f"`{node.id}` is not defined{near}; assign it before you use it"
        refusals.add(RefusalKind.UNKNOWN_NAME, message, node)

    def _check_is_set(self, owner: Scope, node: ast.Name, refusals: Refusals) -> None:
        """Refuse a name that is read above every line that gives it a value, on no second turn."""
        stores = self.stores.get((owner, node.id), ())
        if not stores or self.scope_of[node] is not owner or isinstance(owner, ast.Module):
            return
        if node.id in {item.arg for item in parameters(owner.args)}:
            return
        if any(getattr(store, "lineno", 0) <= node.lineno for store in stores):
            return
        if any(isinstance(self.parent.get(store), ast.NamedExpr) for store in stores):
            return
        if owner not in self._binds_besides:
            kinds = (ast.Nonlocal, ast.Import, ast.ImportFrom, ast.Try, ast.Match)
            inside_ = ast.walk(owner)
            self._binds_besides[owner] = any(isinstance(item, kinds) for item in inside_)
        if self._binds_besides[owner]:
            return
        for item in self.outward(node):
            if item is owner:
                break
            if isinstance(item, _REPEATING):
                return
        message = f"`{node.id}` has no value here on any path; assign it before this line"
        refusals.add(RefusalKind.UNKNOWN_NAME, message, node)

    def _visible(self, scope: Scope) -> Iterator[str]:
        here: Scope | None = scope
        while here is not None:
            yield from sorted(self.bound[here])
            here = self.around.get(here)

    def _read(self, scope: Scope, around: Scope | None) -> None:
        """Read the names of a scope and of those in it."""
        names: set[str] = set()
        self.bound[scope] = names
        if around is not None:
            self.around[scope] = around
        if isinstance(scope, FUNCTIONS):
            names |= {item.arg for item in parameters(scope.args)}
        inner: list[Scope] = []
        outer: set[str] = set()
        body = scope.body if isinstance(scope.body, list) else [scope.body]
        self.parent.update(dict.fromkeys(body, scope))
        pending: list[ast.AST] = list(reversed(body))
        while pending:
            node = pending.pop()
            self.scope_of[node] = scope
            names.update(_binds(node))
            parts = children(node)
            self.parent.update(dict.fromkeys(parts, node))
            if isinstance(node, ast.Nonlocal):
                outer.update(node.names)
            elif isinstance(node, ast.ClassDef):
                # What a class binds is not visible in its methods.
                parts = [*node.bases, *node.decorator_list]
                for member in node.body:
                    self.scope_of[member] = scope
                    if isinstance(member, FUNCTIONS):
                        parts += self._outside(member)
                        inner.append(member)
                    elif isinstance(member, (ast.Assign, ast.AnnAssign)) and member.value:
                        parts.append(member.value)
                        self.parent[member.value] = member
            elif isinstance(node, FUNCTIONS):
                inner.append(node)
                parts = self._outside(node)
            elif isinstance(node, ast.AnnAssign):
                parts = [item for item in (node.value, node.target) if item is not None]
            pending += reversed(parts)
        names -= outer
        for item in inner:
            self._read(item, scope)

    def _outside(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    ) -> list[ast.AST]:
        """What of a function is evaluated where it stands."""
        parts: list[ast.AST | None] = [*function.args.defaults, *function.args.kw_defaults]
        if not isinstance(function, ast.Lambda):
            parts += function.decorator_list
            if self._annotated:
                parts += [item.annotation for item in parameters(function.args)]
                parts.append(function.returns)
        found = [item for item in parts if item is not None]
        self.parent.update(dict.fromkeys(found, function))
        return found


def _binds(node: ast.AST) -> Iterator[str]:
    """The names that a node itself binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _import_of(name: str) -> str | None:
    """The line that brings a name of Python's modules; None for any other name."""
    if name in MODULES:
        return f"import {name}"
    homes = [module for module, names in MODULES.items() if names and name in names]
    if not homes and name in typing.__all__:
        homes = ["typing"]
    return f"from {homes[0]} import {name}" if homes else None
