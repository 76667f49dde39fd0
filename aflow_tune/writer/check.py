"""The static check: whether a written graph may run, and what it can cost at worst.

    text -> `form.py` -> syntax -> `allowed.py` -> `calls.py` -> `bound.py` -> budget

Each refusal is a sentence with its place that the policy can learn from; all are reported at once.
Nothing of the graph is executed, and no text makes the check raise or take long. What passes still
runs in the sandbox.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aflow_tune.graph import inside
from aflow_tune.graph.flow import ANSWER
from aflow_tune.graph.graph import Graph, bare
from aflow_tune.graph.run import GraphLimits
from aflow_tune.graph.shape import Function, Shape, levels, parameters
from aflow_tune.operators import Operator
from aflow_tune.writer.allowed import check_syntax
from aflow_tune.writer.bound import WorstCase
from aflow_tune.writer.calls import CallCheck, check_names
from aflow_tune.writer.form import Unreadable, read_with_refusals
from aflow_tune.writer.source import Source, returns_of
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
"""Of the graph code. A graph is a page or two."""
MAX_NODES = 8_000
"""Of the syntax tree."""
MAX_DEPTH = 80
"""Of nested expressions and statements."""
MAX_PROMPT_CHARS = 20_000
"""Of one instruction."""
LABEL = "graph_code"
"""How messages name the graph."""
_MADE_OF_PARTS = (ast.Return, ast.Constant, ast.JoinedStr, ast.FormattedValue, ast.BinOp)
_CONDITIONAL = (
    ast.If, ast.For, ast.While, ast.Try, ast.Match, ast.IfExp, ast.BoolOp
)  # fmt: skip


def check_written(
    text: str,
    *,
    operators: Mapping[str, type[Operator]],
    problem_type: str | None = None,
    limits: CheckLimits | None = None,
) -> Verdict:
    """Check a reply of the policy. Never raises.

    Args:
        operators: those that the graph may use, by name.
        problem_type: math, code or qa; only code has an entry point. None: any.
        limits: what the graph may use at worst.
    """
    try:
        written, refusals = read_with_refusals(text)
    except Unreadable as error:
        return Verdict(None, None, (error.refusal,))
    verdict = check_graph_of(written, operators=operators, problem_type=problem_type, limits=limits)
    return replace(verdict, refusals=(*verdict.refusals, *refusals))


def check_graph_of(
    written: Written,
    *,
    operators: Mapping[str, type[Operator]],
    problem_type: str | None = None,
    limits: CheckLimits | None = None,
) -> Verdict:
    """As `check_written`, for a workflow that `form.py` has read."""
    check = _Check(written, operators, problem_type, limits or CheckLimits())
    try:
        check.all()
    except (RecursionError, MemoryError):
        check.too_large()
    return Verdict(written, check.graph, check.refusals.in_order(), check.bound)


def check_loaded(
    graph: Graph,
    *,
    operators: Mapping[str, type[Operator]],
    problem_type: str | None = None,
    limits: CheckLimits | None = None,
) -> Verdict:
    """As `check_written`, for a graph with its prompts as it was loaded."""
    written = Written(graph.sources[inside.GRAPH_FILE], graph.instructions)
    check = _Check(written, operators, problem_type, limits or CheckLimits(), loaded=graph)
    try:
        check.all()
    except (RecursionError, MemoryError):
        check.too_large()
    return Verdict(written, graph, check.refusals.in_order(), check.bound)


@dataclass
class _Check:
    written: Written
    operators: Mapping[str, type[Operator]]
    problem_type: str | None
    limits: CheckLimits
    loaded: Graph | None = None
    refusals: Refusals = field(default_factory=Refusals)
    graph: Graph | None = None
    bound: Bound | None = None

    def too_large(self) -> None:
        self.bound = None
        message = "the graph is too long or too deep; write a page of plain steps: at most "
        message += f"{MAX_CODE_CHARS:,} characters, {MAX_DEPTH} inside each other"
        self.refusals.add(RefusalKind.TOO_LARGE, message)

    def all(self) -> None:
        """Run every check. Fills in graph, bound and refusals."""
        if not self._is_python():
            return
        self.graph = self.loaded or Graph(
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
            texts = {**shape.constants, **self.graph.constants, **self.graph.told}
            used = CallCheck(source, texts, self.refusals).used_prompts
            worst = WorstCase(source, self.limits, self.refusals)
            self._answer(source)
        elif "__call__" in source.methods:
            self.too_large()
        self._shape(shape, source)
        self._prompts(self.graph, used)
        if worst is not None and worst.bound is not None:
            self.bound = worst.bound
            self._budget(worst.bound, worst.spenders)

    def _is_python(self) -> bool:
        code = self.written.code
        depth = nesting = 0  # brackets in strings count too; that does no harm
        for bracket in re.findall(r"[()\[\]{}]", code[: MAX_CODE_CHARS + 1]):
            depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
            nesting = max(nesting, depth)
        try:
            if len(code) <= MAX_CODE_CHARS and nesting <= MAX_DEPTH:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(code)
                    nodes, depth = levels(tree, MAX_NODES, MAX_DEPTH)
                    if len(nodes) <= MAX_NODES and depth <= MAX_DEPTH:
                        compile(tree, inside.GRAPH_FILE, "exec", dont_inherit=True)
                        return True
            self.too_large()
        except SyntaxError as error:
            line = min(error.lineno or 0, len(code.splitlines()))
            message = f"this is no Python: {error.msg}"
            if error.text and error.text.strip():
                message += f", in `{error.text.strip():.60}`"
            self.refusals.at(RefusalKind.SYNTAX, message, line, max(1, error.offset or 1))
        except (RecursionError, MemoryError):
            self.too_large()
        except ValueError as error:
            self.refusals.add(RefusalKind.SYNTAX, f"this is no Python: {error}")
        return False

    def _answer(self, source: Source) -> None:
        """Refuse a graph whose answer comes from no operator: the policy would earn the most by
        writing an answer that it knows into the graph, at no cost."""
        flow, call = source.graph.flow, source.methods["__call__"]
        if not returns_of(call):
            message = "__call__ returns nothing; end it with `return answer, cost`"
        elif self.refusals.by_place:
            return
        elif not flow.nodes and not flow.handed_on:
            message = "the workflow calls no operator, as in await self.solve(input=problem)"
        elif any(edge.target == ANSWER and edge.source >= 0 for edge in flow.edges):
            return
        elif all(_written_out(source, item, call) for item in returns_of(call)):
            message = "no operator's result reaches the answer; return one's result, as in "
            message += 'return solution["response"]'
        else:
            return
        self.refusals.add(RefusalKind.SHAPE, message, call)

    def _shape(self, shape: Shape, source: Source) -> None:
        """Add faults of `graph/shape.py` on lines without a refusal, and a wrong entry point."""
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
        budgets: tuple[tuple[float | None, float | None, str], ...] = (
            (bound.model_calls, limits.model_calls, "calls of models"),
            (bound.tokens, limits.tokens, "tokens"),
            (bound.usd, limits.usd, "US dollars"),
            (bound.operator_calls, most_calls, "calls of operators"),
        )
        for used, allowed, what in budgets:
            if used is None or allowed is None or used <= allowed:
                continue
            message = f"the graph can use {used:,} {what}, and {allowed:,} are allowed; write "
            message += "fewer calls, or fewer turns of its loops"
            line = column = 0
            if spenders:
                (line, column, operator), calls = spenders.most_common(1)[0]
                message += f" ({operator} on line {line} takes up to {calls:,})"
            self.refusals.at(RefusalKind.OVER_BUDGET, message, line, column)
            return


def _written_out(
    source: Source, node: ast.AST, function: Function, asked: frozenset[str] = frozenset()
) -> bool:
    """Whether a part of a function consists, on every path, of constants and parameters only, also
    through names that are only assigned such."""
    above: ast.AST | None = node
    while above is not function and above is not None:
        above = source.parent.get(above)
        if isinstance(above, _CONDITIONAL):
            return False
    if isinstance(node, ast.Name):
        if node.id in {item.arg for item in parameters(function.args)}:
            return (function, node.id) not in source.stores
        if node.id in asked:  # text = text + "..."
            return True
        values, asked = source.values(node), asked | {node.id}
        return values is not None and all(
            not isinstance(value, ast.Name) and _written_out(source, value, function, asked)
            for value in values
        )
    parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        parts = node.value.elts[:1]  # without the cost
    return isinstance(node, _MADE_OF_PARTS) and all(
        _written_out(source, part, function, asked) for part in parts
    )
