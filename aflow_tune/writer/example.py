"""The one example that the policy is shown: short, of allowed operators, and within the budget.

It is the shortest shipped template of the problem's type that passes the check under the run's
own limits, or else a straight line of the allowed operators. So whatever operators and budget a
configuration names, the example is never something that the policy would be refused for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from aflow_tune.errors import BadInput
from aflow_tune.graph import inside
from aflow_tune.operators import Operator
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import as_text
from aflow_tune.writer.templates import default_graph, templates_for
from aflow_tune.writer.types import CheckLimits, ProblemType

_COST = ', self.llm.get_usage_summary()["total_cost"]'


def example_for(
    operators: Mapping[str, type[Operator]],
    problem_type: ProblemType | None,
    limits: CheckLimits,
) -> str:
    """A workflow in the hybrid form; empty where nothing passes the check."""
    return _example(tuple(sorted(operators.items())), problem_type, limits)


@functools.lru_cache(maxsize=64)
def _example(
    operators: tuple[tuple[str, type[Operator]], ...],
    problem_type: ProblemType | None,
    limits: CheckLimits,
) -> str:
    allowed = dict(operators)
    for text in _candidates(allowed, problem_type):
        verdict = check_written(text, operators=allowed, problem_type=problem_type, limits=limits)
        if verdict.ok:
            return text
    return ""


def _candidates(
    allowed: Mapping[str, type[Operator]], problem_type: ProblemType | None
) -> Iterator[str]:
    templates = templates_for(problem_type, allowed)
    yield from sorted((_text(item.prompts, item.code) for item in templates), key=len)
    try:
        graph = default_graph(problem_type or "math", allowed)
    except BadInput:
        return
    yield _text(graph.instructions, graph.sources[inside.GRAPH_FILE])


def _text(prompts: Mapping[str, str], code: str) -> str:
    """Without the cost beside the answer, which AFlow's graphs return: a run counts its own."""
    return as_text(prompts, code.replace(_COST, "").strip())
