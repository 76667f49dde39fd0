"""The Python subset that a written graph may use: an allow-list over its syntax tree.

Anything else is refused, with a hint what to write instead. The list keeps graphs readable and free
of side effects. It is not the security boundary: that is the sandbox. `calls.py` checks which names
of modules are used, and the arguments of calls.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
import types

from aflow_tune.graph import inside
from aflow_tune.graph.shape import children
from aflow_tune.writer.types import RefusalKind, Refusals, shown


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
"""Attributes of loggers and their handlers that a graph may use."""
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
"""Modules that a graph may import, and the names allowed of each. None: all public names."""
_EVALUATING = frozenset({"string.Formatter", "typing.ForwardRef", "typing.get_type_hints"})
"""Names that turn texts into code, or read attributes named in texts."""
BUILTINS = _words(
    "abs all any bin bool callable chr dict divmod enumerate filter float format frozenset "
    "getattr hasattr hash hex int isinstance issubclass iter len list map max min next oct ord "
    "pow print range repr reversed round set slice sorted str sum object staticmethod super tuple "
    "type zip ArithmeticError AssertionError AttributeError "
    "Exception IndexError KeyError LookupError NameError NotImplementedError OverflowError "
    "RecursionError RuntimeError StopIteration SyntaxError TimeoutError TypeError UnicodeError "
    "ValueError ZeroDivisionError"
)
"""Builtins that a graph may use."""
KNOWN = BUILTINS | _words("operator prompt_custom create_llm_instance DatasetType")
"""Names that a graph may use without importing them."""
_SHIMS = frozenset({"operator", "prompt", "model", "dataset", "cost", "log"})
FRAMES = _words(
    "add_done_callback ag_code ag_frame cr_code cr_frame f_back f_builtins f_code f_globals "
    "f_locals gi_code gi_frame gi_yieldfrom tb_frame tb_next func_globals mro"
)
_KNOWN = frozenset(
    {
        # statements
        ast.AnnAssign, ast.Assert, ast.Assign, ast.AsyncFunctionDef, ast.AsyncWith, ast.AugAssign,
        ast.Break, ast.ClassDef, ast.Continue, ast.Delete, ast.Expr, ast.For, ast.FunctionDef,
        ast.If, ast.Import, ast.ImportFrom, ast.Match, ast.Nonlocal, ast.Pass, ast.Raise,
        ast.Return, ast.Try, ast.While, ast.With,
        # expressions
        ast.Attribute, ast.Await, ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant,
        ast.Dict, ast.DictComp, ast.FormattedValue, ast.GeneratorExp, ast.IfExp, ast.JoinedStr,
        ast.Lambda, ast.List, ast.ListComp, ast.Name, ast.NamedExpr, ast.Set, ast.SetComp,
        ast.Slice, ast.Starred, ast.Subscript, ast.Tuple, ast.UnaryOp,
        # their parts
        ast.alias, ast.arg, ast.arguments, ast.comprehension, ast.keyword, ast.ExceptHandler,
        ast.MatchClass,
    }
)  # fmt: skip
_AT_TOP = (
    ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass
)  # fmt: skip
_INSTEAD: dict[type[ast.AST], str] = {
    ast.AsyncFor: "`async for` is not allowed; write `for` over a list",
    ast.Global: "`global` is not allowed; hand values over as arguments or keep them on self",
    ast.Yield: "`yield` is not allowed; collect the values in a list and return it",
    ast.TryStar: "`except*` is not allowed; write `except Exception`",
}
_READS_PRIVATE = re.compile(r"\{[^{}\s]*[.\[]__\w+__[^{}]*\}")
"""Matches a format string that reads private attributes."""
NAME = "__name__"  # allowed, since loggers are usually named by it
_SETTABLE = ("cost_manager", "propagate")
"""Attributes that may be set on any object, as AFlow's graphs set them on models and loggers."""


def check_syntax(tree: ast.Module, workflow: ast.ClassDef | None, refusals: Refusals) -> None:
    """Refuse everything in a tree that is not allowed. `workflow` is its class Workflow."""
    check = _Check(workflow, refusals)
    for statement in tree.body:
        check.at_top(statement)
    pending: list[ast.AST] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if check.node(node):
            pending += reversed(children(node))


def why_forbidden(name: str) -> str | None:
    """Why a graph may not use a builtin; None if it may, or if the name is no builtin."""
    if name in BUILTINS or not hasattr(builtins, name):
        return None
    return f"`{name}` is not allowed: a graph runs no other code and has no files"


def public(module: str, name: str) -> bool:
    """Whether a graph may use this name of an allowed module."""
    names = MODULES[module]
    if names is not None:
        return name in names
    if name.startswith("_") or f"{module}.{name}" in _EVALUATING:
        return False
    # A module's own imports (`typing.sys`) would give access to everything. Only modules of the
    # table are imported here: the standard library's, without side effects.
    found = getattr(importlib.import_module(module), name, sys)
    return not isinstance(found, types.ModuleType)


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


class _Check:
    """Checks one node at a time. A method `_KIND` checks nodes of that class; it returns False if
    the children are not to be checked."""

    def __init__(self, workflow: ast.ClassDef | None, refusals: Refusals) -> None:
        self.workflow, self.refusals = workflow, refusals
        self.named: set[ast.AST] = set()
        """Nodes whose `__name__` is read, where `__class__` is allowed: `e.__class__.__name__`."""
        self.called: set[ast.AST] = set()

    def refuse(self, message: str, node: ast.AST) -> None:
        self.refusals.add(RefusalKind.NOT_ALLOWED, message, node)

    def at_top(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Try):
            handled = [part for handler in node.handlers for part in handler.body]
            for part in (*node.body, *node.orelse, *node.finalbody, *handled):
                self.at_top(part)
            return
        targets = _targets(node)  # `_Attribute` checks which attributes may be set
        fits = bool(targets) and all(isinstance(t, (ast.Name, ast.Attribute)) for t in targets)
        if isinstance(node, ast.Expr):  # a docstring; logging.basicConfig(...), see `calls.py`
            called = node.value.func if isinstance(node.value, ast.Call) else None
            of_module = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)
            fits = isinstance(node.value, ast.Constant) or of_module
        if not (fits or isinstance(node, _AT_TOP)):
            message = f"`{shown(node)}` stands outside of the class; beside it only imports, "
            self.refuse(message + "constants and functions are allowed", node)

    def node(self, node: ast.AST) -> bool:
        """Check one node; returns whether to check its children."""
        kind = type(node)
        if kind in _KNOWN:
            check = getattr(self, f"_{kind.__name__}", None)
            return check is None or check(node) is not False
        if kind in _INSTEAD:
            self.refuse(_INSTEAD[kind], node)
            return isinstance(node, (ast.AsyncFor, ast.TryStar))
        if not isinstance(node, (ast.stmt, ast.expr)):
            return True
        what = kind.__name__ if isinstance(node, ast.stmt) else shown(node)
        self.refuse(f"`{what}` is not allowed in a graph", node)
        return False

    def _ClassDef(self, node: ast.ClassDef) -> bool:
        if node is not self.workflow:
            message = f"class {node.name} is not allowed; a graph is the one class Workflow, with "
            self.refuse(message + "helper methods in it", node)
            return False
        if node.keywords or any(getattr(base, "id", "") != "object" for base in node.bases):
            self.refuse("class Workflow has no bases; write `class Workflow:`", node)
        for decorator in node.decorator_list:
            self.refuse("a decorator is not allowed here; leave it out", decorator)
        for member in node.body:
            targets = _targets(member)
            fits = bool(targets) and all(isinstance(target, ast.Name) for target in targets)
            fits |= isinstance(member, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Pass))
            fits |= isinstance(member, ast.Expr) and isinstance(member.value, ast.Constant)
            if not fits:
                self.refuse("in the class itself only methods and constants are allowed", member)
        return True

    def _FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            if getattr(decorator, "id", "") != "staticmethod":
                message = f"the decorator @{shown(decorator)} is not allowed; leave it out"
                self.refuse(message, decorator)
        own = self.workflow is not None and node in self.workflow.body
        if node.name.startswith("__") and not (own and node.name in ("__init__", "__call__")):
            message = f"{node.name} is not allowed; Workflow has __init__, __call__ and helper "
            self.refuse(message + "methods with names of their own", node)

    _AsyncFunctionDef = _FunctionDef

    def _comprehension(self, node: ast.comprehension) -> None:
        if node.is_async:
            self.refuse(_INSTEAD[ast.AsyncFor], node.target)

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
        name, owner = node.attr, node.value
        of_self = getattr(owner, "id", "") == "self"
        if isinstance(node.ctx, ast.Load):
            if name == NAME:
                self.named.add(owner)
                return True
            of_super = isinstance(owner, ast.Call) and not owner.args
            of_super = of_super and getattr(owner.func, "id", "") == "super"  # type: ignore[attr-defined]
            if of_super and name == "__init__":
                return True
        if name == "__class__" and node in self.named:
            return True
        if name.startswith("__") or (name.startswith("_") and not of_self) or name in FRAMES:
            self.refuse(f"`.{name}` is not allowed; it is private, or Python's own", node)
            return False
        stored = isinstance(node.ctx, ast.Store) and not of_self and name not in _SETTABLE
        if stored or isinstance(node.ctx, ast.Del):
            message = f"`{shown(node)}` may not be set; keep values in variables or on self"
            self.refuse(message, node)
        return True

    def _MatchClass(self, node: ast.MatchClass) -> None:
        for name in node.kwd_attrs:
            if name.startswith("_") or name in FRAMES:
                self.refuse(f"`{name:.40}` in a pattern is not allowed; it is private", node)

    def _Call(self, node: ast.Call) -> None:
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
        shims = [inside.shim_of(f"{module}.{alias.name}") for alias in node.names]
        ours = inside.shim_of(module) in _SHIMS or all(shim in _SHIMS for shim in shims)
        if ours or module == "__future__" or not self._module(module, node):
            return
        for alias in node.names:
            if alias.name == "*":
                self.refuse(f"name what you import from {module}", node)
            elif not public(module, alias.name):
                self.refuse(f"{module}.{alias.name} is not allowed in a graph", node)

    def _module(self, module: str, node: ast.stmt) -> bool:
        if module not in MODULES:
            message = f"a graph has no module {module}; it may import asyncio, collections, "
            message += "itertools, json, math, random, re, typing and a few more of Python's"
            self.refuse(message, node)
        return module in MODULES

    def _With(self, node: ast.With) -> None:
        self.refuse("`with` is not allowed; a graph opens nothing", node)
