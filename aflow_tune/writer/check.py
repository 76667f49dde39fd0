"""The check before running: whether a written graph may run, and what it can cost at worst.

    text -> `form.py` -> syntax -> `allowed.py` -> `calls.py` -> `bound.py` -> budget

Each refusal is a sentence that a policy could learn from, with its place; all are said at once.
Nothing of the graph is run, and no text makes the check raise, or take long. What passes still
runs in the sandbox.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.graph import inside
from aflow_tune.graph.flow import ANSWER
from aflow_tune.graph.graph import Graph, bare
from aflow_tune.graph.run import GraphLimits
from aflow_tune.graph.shape import Function, Shape, children, levels, parameters
from aflow_tune.operators import Operator
from aflow_tune.writer.allowed import BUILTINS, check_syntax
from aflow_tune.writer.bound import WorstCase
from aflow_tune.writer.calls import CallCheck, check_names
from aflow_tune.writer.form import Unreadable, read_with_refusals
from aflow_tune.writer.source import Source, is_self, returns_of
from aflow_tune.writer.types import (
    Bound,
    CheckLimits,
    RefusalKind,
    Refusals,
    Verdict,
    Written,
    did_you_mean,
    listed,
)

MAX_CODE_CHARS = 40_000
"""Of the graph's code. A graph is a page or two."""
MAX_NODES = 8_000
"""Of its syntax tree."""
MAX_DEPTH = 80
"""Of expressions and statements inside each other."""
MAX_PROMPT_CHARS = 20_000
"""Of one instruction."""
LABEL = "graph_code"
"""How messages name the graph."""
_MOST_PASSES = 12
"""Over the code, for where results go. What takes more is not refused."""


def check_written(
    text: str,
    *,
    operators: Mapping[str, type[Operator]],
    problem_type: str | None = None,
    limits: CheckLimits | None = None,
) -> Verdict:
    """Check what a policy wrote. Never raises.

    Args:
        operators: those that the graph may use, by name.
        problem_type: math, code or qa: what the workflow will be called with. None: either.
        limits: what it may use at worst.
    """
    try:
        written, refusals = read_with_refusals(text)
    except Unreadable as error:
        return Verdict(None, None, (error.refusal,))
    verdict = check_graph_of(written, operators=operators, problem_type=problem_type, limits=limits)
    if not refusals:
        return verdict
    return Verdict(verdict.written, verdict.graph, (*verdict.refusals, *refusals), verdict.bound)


def check_graph_of(
    written: Written,
    *,
    operators: Mapping[str, type[Operator]],
    problem_type: str | None = None,
    limits: CheckLimits | None = None,
) -> Verdict:
    """Check a workflow that has been read; as `check_written`, whose arguments these are."""
    check = _Check(written, operators, problem_type, limits or CheckLimits())
    try:
        check.all()
    except (RecursionError, MemoryError):
        check.too_large("is too large to be followed")
    return Verdict(written, check.graph, check.refusals.in_order(), check.bound)


@dataclass
class _Check:
    written: Written
    operators: Mapping[str, type[Operator]]
    problem_type: str | None
    limits: CheckLimits
    refusals: Refusals = field(default_factory=Refusals)
    graph: Graph | None = None
    bound: Bound | None = None

    def too_large(self, what: str) -> None:
        self.bound = None
        message = f"the graph {what}; a graph is a page of plain steps"
        self.refusals.add(RefusalKind.TOO_LARGE, message)

    def all(self) -> None:
        """Everything that can be found. Fills in graph, bound and refusals."""
        if not self._is_python():
            return
        self.graph = Graph(
            LABEL,
            {inside.GRAPH_FILE: self.written.code},
            operators=dict(self.operators),
            instructions=dict(self.written.prompts),
        )
        shape = self.graph.shape
        assert shape.tree is not None
        check_syntax(shape.tree, shape.workflow, self.refusals)
        source = Source(self.graph, self.operators)
        check_names(source, self.refusals)
        used: set[str] = set()
        worst: WorstCase | None = None
        if "__call__" in source.methods and self.graph.flow.complete:
            used = CallCheck(source, self.graph.told, self.refusals).used_prompts
            worst = WorstCase(source, self.limits, self.refusals)
            self._answer(source)
        elif "__call__" in source.methods:
            self.too_large("is too large to be followed")
        self._shape(shape, source)
        self._prompts(self.graph, used)
        if worst is not None and worst.bound is not None:
            self.bound = worst.bound
            self._budget(worst.bound, worst.spenders)

    # Syntax

    def _is_python(self) -> bool:
        code = self.written.code
        depth = nesting = 0  # brackets in texts count too, which does no harm
        for bracket in re.findall(r"[()\[\]{}]", code[: MAX_CODE_CHARS + 1]):
            depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
            nesting = max(nesting, depth)
        try:
            if len(code) > MAX_CODE_CHARS:
                self.too_large(f"has {len(code):,} characters, at most {MAX_CODE_CHARS:,} may be")
            elif nesting > MAX_DEPTH:
                self.too_large("is nested too deeply")
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(code)
                    nodes, depth = levels(tree, MAX_NODES, MAX_DEPTH)
                    if len(nodes) <= MAX_NODES and depth <= MAX_DEPTH:
                        compile(tree, inside.GRAPH_FILE, "exec", dont_inherit=True)
                        return True
                self.too_large("has too many parts, or is nested too deeply")
        except SyntaxError as error:
            lines = code.splitlines()
            line = min(error.lineno or 0, len(lines))
            text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
            message = f"this is no Python: {error.msg}" + (f", in `{text:.60}`" if text else "")
            self.refusals.at(RefusalKind.SYNTAX, message, line, max(1, error.offset or 1))
        except (RecursionError, MemoryError):
            self.too_large("is nested too deeply")
        except ValueError as error:
            self.refusals.add(RefusalKind.SYNTAX, f"this is no Python: {error}")
        return False

    # What the graph does

    def _answer(self, source: Source) -> None:
        """Whether the answer comes from an operator: a policy is to write workflows, not answers.

        An answer that the policy knew would otherwise earn the most, for the least.
        """
        flow, call = source.graph.flow, source.methods["__call__"]
        if not returns_of(call):
            message = "__call__ returns nothing; end it with `return answer, cost`"
        elif self.refusals.by_place:
            return
        elif not flow.nodes and not flow.handed_on:
            message = "the workflow calls no operator, as in await self.solve(input=problem)"
        elif any(edge.target == ANSWER and edge.source >= 0 for edge in flow.edges):
            return
        elif not _Carried(source).may_return(call):
            message = "no operator's result reaches the answer; return one's result, as in "
            message += 'return solution["response"]'
        else:
            return
        self.refusals.add(RefusalKind.SHAPE, message, call)

    def _shape(self, shape: Shape, source: Source) -> None:
        """What `graph/shape.py` finds, where nothing was said about that line."""
        for fault in shape.faults:
            place = re.search(r":(\d+)$", fault.where)
            line = int(place[1]) if place else 0
            if not (line and any(place[0] == line for place in self.refusals.by_place)):
                message = f"expected {fault.expected}, found {fault.found}; {fault.cure}"
                self.refusals.at(RefusalKind.SHAPE, message, line, 1 if line else 0)
        call = source.methods.get("__call__")
        if call is not None and shape.needs_entry_point and self.problem_type not in (None, "code"):
            message = f"a problem of the type {self.problem_type} has no entry point; write "
            message += "async def __call__(self, problem)"
            self.refusals.add(RefusalKind.SHAPE, message, call)

    # Prompts and budget

    def _prompts(self, graph: Graph, used: set[str]) -> None:
        shape = graph.shape
        called = {name for handles in graph.flow.calls.values() for _, name in handles}
        known = [*dict.fromkeys([*shape.instances, *sorted(used)])]
        meant = {bare(name) for name in (*shape.instances, *shape.instances.values(), *called)}
        for name, text in self.written.prompts.items():
            if name not in known and bare(name) not in meant:
                near, there = did_you_mean(name, known), listed(shape.instances)
                what = f"belongs to no operator of the graph{near}; its instances are {there}"
            elif len(text) > MAX_PROMPT_CHARS:
                what = f"has {len(text):,} characters; write at most {MAX_PROMPT_CHARS:,}"
            else:
                continue
            self.refusals.add(RefusalKind.PROMPT, f"the prompt {name!r:.60} {what}")

    def _budget(self, bound: Bound, spenders: Counter[tuple[int, int, str]]) -> None:
        limits = self.limits
        most_calls = max(GraphLimits().calls, limits.model_calls)
        budgets: tuple[tuple[float | None, float | None, str, str], ...] = (
            (bound.model_calls, limits.model_calls, ",", "calls of models"),
            (bound.tokens, limits.tokens, ",", "tokens"),
            (bound.usd, limits.usd, ".4f", "US dollars"),
            (bound.operator_calls, most_calls, ",", "calls of operators"),
        )
        for used, allowed, form, what in budgets:
            if used is None or allowed is None or used <= allowed:
                continue
            message = f"the graph can use {used:{form}} {what}, and {allowed:{form}} are allowed; "
            message += "write fewer calls, or fewer turns of its loops"
            line = column = 0
            if spenders:
                (line, column, operator), calls = spenders.most_common(1)[0]
                message += f" ({operator} on line {line} takes up to {calls:,})"
            self.refusals.at(RefusalKind.OVER_BUDGET, message, line, column)
            return


class _Carried:
    """The names that may hold what an operator gave, or hang on it: variables, and `.name` for
    attributes. Everything that may carry a result counts as carrying it, over all of the code."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.names: set[str] = set()
        self.decided: set[ast.AST] = set()
        """What is reached, or not, by what an operator gave."""
        self.unsettled = False
        for _ in range(_MOST_PASSES):
            before = len(self.names) + len(self.decided)
            for node in source.nodes:
                self._pass_on(node)
            if before == len(self.names) + len(self.decided):
                return
        self.unsettled = True

    def may_return(self, function: ast.AST) -> bool:
        """Whether what a function returns may come from an operator."""
        for node in returns_of(function):
            value: Any = node.value
            if isinstance(value, ast.Tuple) and len(value.elts) == 2:
                value = value.elts[0]  # the other one is the cost
            if node in self.decided or self._holds(value):
                return True
        return self.unsettled

    def _holds(self, *parts: ast.AST | None) -> bool:
        for node in (item for part in parts if part is not None for item in ast.walk(part)):
            call = node.value if isinstance(node, ast.Await) else None
            own = isinstance(call, ast.Call) and self.source.function(call.func) is not None
            name = getattr(node, "id", f".{getattr(node, 'attr', '')}")
            if (call is not None and not own) or self.source.handles(node) or name in self.names:
                return True
        return False

    def _pass_on(self, node: Any) -> None:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inside_ = [part for target in targets for part in ast.walk(target)]
            keys = [part.slice for part in inside_ if isinstance(part, ast.Subscript)]
            if node in self.decided or self._holds(node.value, *keys):
                self._put(targets)
            if isinstance(node.value, (ast.Name, ast.Attribute)) and self._holds(*targets):
                self._put([node.value])  # both may be the same list
        elif isinstance(node, (ast.For, ast.comprehension)):
            leaving = (ast.Break, ast.Continue)
            left = any(isinstance(one, leaving) and one in self.decided for one in ast.walk(node))
            if left or self._holds(node.iter, node.target):
                self._put([node.target, node.iter])
                self._decide(getattr(node, "body", []))
        elif isinstance(node, (ast.If, ast.While, ast.Match)):
            if self._holds(getattr(node, "test", None), getattr(node, "subject", None)):
                self._decide(children(node))
        elif isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, Function) and self.may_return(node):
            self.names |= {node.name, f".{node.name}"}

    def _call(self, node: ast.Call) -> None:
        """What a call is given may end up in its owner, and in what else it is given."""
        python = self.source.python_name(node.func)
        if self.source.handles(node) or python in BUILTINS:
            return
        given = [*node.args, *(word.value for word in node.keywords)]
        function = self.source.function(node.func)
        taken = [] if function is None else [item.arg for item in parameters(function.args)]
        if self._holds(*given):
            self.names.update(item for item in taken if item != "self")
        if self._holds(*given) or node in self.decided or not self.names.isdisjoint(taken):
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) and not python else []
            self._put([*owner, *given])

    def _put(self, targets: Sequence[ast.AST]) -> None:
        for target in targets:
            if isinstance(target, (ast.Tuple, ast.List)):
                self._put(target.elts)
                continue
            node: Any = target
            while node is not None and not isinstance(node, ast.Name):
                if isinstance(node, ast.Attribute) and is_self(node.value):
                    self.names.add(f".{node.attr}")
                    break
                node = getattr(node, "value", getattr(node, "func", None))
                node = node if isinstance(node, ast.AST) else None
            if isinstance(node, ast.Name) and node.id not in ("self", "operator"):
                self.names.add(node.id)

    def _decide(self, statements: Sequence[ast.AST]) -> None:
        self.decided.update(part for item in statements for part in ast.walk(item))
