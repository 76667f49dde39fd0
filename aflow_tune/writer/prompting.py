"""The policy's prompt: the operators, the form, the budget, an example, the problem.

The operators' lines come from their own declarations. The shipped text is short enough for small
models; a user's file with the same placeholders may replace it. The example passes the check under
the run's own limits. The gold answer and hidden tests are never passed in here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph import inside
from aflow_tune.operators import Operator
from aflow_tune.operators.prompts import fill, placeholders
from aflow_tune.writer.calls import keys_of
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import as_text
from aflow_tune.writer.templates import TEMPLATES, default_graph
from aflow_tune.writer.types import CheckLimits, ProblemType

PLACEHOLDERS = (
    *("operators", "budget", "example", "problem", "problem_type", "entry_point", "answer_form"),
)
"""Placeholders of a template; `problem` is required."""
TEMPLATE = """\
Write a workflow of operators for the problem below; another model runs it. Reply with one JSON \
object only, like
{example}
prompts: what to tell each operator of __init__. Operators and the keys they return:
{operators}
In __call__: await, if, for over lists or range(n), lists, strings; no imports. {budget}
Define __call__(self, problem, entry_point); the answer is Python that defines {entry_point}.
The text of `problem` also says: {answer_form}
Type: {problem_type}
Problem:
{problem}"""
"""The shipped template. A line with a placeholder without a value is dropped."""
KEEP = "KEEP"
"""The reply that keeps the previous graph; the JSON object {"keep": true} means the same."""
_COST = ', self.llm.get_usage_summary()["total_cost"]'
"""The cost that AFlow's graphs return; the example omits it, as every run is metered."""


def policy_messages(
    problem: str,
    *,
    operators: Mapping[str, type[Operator]],
    problem_type: ProblemType | None,
    limits: CheckLimits,
    entry_point: str | None = None,
    template: str | None = None,
    answer_form: str = "",
    earlier: Sequence[tuple[str, str]] = (),
) -> list[dict[str, str]]:
    """The messages that the policy answers with a workflow. `template` replaces the shipped one;
    `answer_form`: of the problem's benchmark; `earlier`: for each previous turn what the policy
    wrote and the feedback on it."""
    most = [f"{limits.model_calls} model call{'' if limits.model_calls == 1 else 's'}"]
    most += [f"{limits.tokens} tokens"] if limits.tokens is not None else []
    most += [f"{limits.usd:g} US dollars"] if limits.usd is not None else []
    values = {
        "operators": "\n".join(operator_line(kind, limits) for kind in operators.values()),
        "budget": f"At most {' and '.join(most)}.",
        "example": _example(tuple(sorted(operators.items())), problem_type, limits),
        "problem": problem,
        "problem_type": problem_type or "",
        "entry_point": entry_point or "",
        "answer_form": answer_form,
    }
    # Drop lines with an empty value, except that of the problem.
    empty = {name for name, value in values.items() if not value and name != "problem"}
    lines = (TEMPLATE if template is None else template).split("\n")
    kept = [line for line in lines if not placeholders(line) & empty]
    messages = [{"role": "user", "content": fill("\n".join(kept), values)}]
    for wrote, told in earlier:
        messages += [{"role": "assistant", "content": wrote}, {"role": "user", "content": told}]
    return messages


def operator_line(kind: type[Operator], limits: CheckLimits) -> str:
    """An operator's call, result keys, worst-case model calls and description."""
    arguments = []
    for item in list(inspect.signature(kind.__call__).parameters.values())[1:]:
        if item.name == "mode":  # only for AFlow's graphs
            continue
        text, of = item.name, item.annotation
        shown = of if isinstance(of, str) else inspect.formatannotation(of)
        if of is not item.empty and shown not in ("str", "Any"):
            text += f": {shown}"
        if item.default is not item.empty:
            default = item.default
            text += f'="{default}"' if isinstance(default, str) else f"={default!r}"
        arguments.append(text)
    calls = kind.most_calls(retries=limits.retries)
    counted = "1 call" if calls == 1 else f"up to {calls} calls"
    call, keys = f"{kind.__name__}({', '.join(arguments)})", ", ".join(keys_of(kind))
    about = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    return f"- {call} -> {keys} ({counted}). {about}"


def template_faults(template: str, where: str) -> list[Fault]:
    """The faults of a user's template."""
    found = placeholders(template)
    expected = "one of " + ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
    faults = [
        Fault(where, expected, f"{{{name}}}", f"for braces that are text write {{{{{name}}}}}")
        for name in sorted(found - set(PLACEHOLDERS))
    ]
    if "problem" not in found:
        cure = "put {problem} where the problem belongs, at the end"
        faults.append(Fault(where, "a text with {problem}", "none", cure))
    return faults


@functools.lru_cache(maxsize=64)
def _example(
    operators: tuple[tuple[str, type[Operator]], ...],
    problem_type: ProblemType | None,
    limits: CheckLimits,
) -> str:
    """The shortest shipped template that passes the check, else the default workflow, in the hybrid
    form and without the cost; empty if none passes."""
    allowed = dict(operators)
    fitting = [one for one in TEMPLATES.values() if one.fits(problem_type, allowed)]
    texts = [as_text(one.prompts, one.code.replace(_COST, "").strip()) for one in fitting]
    texts.sort(key=len)
    with contextlib.suppress(BadInput):
        graph = default_graph(problem_type or "math", allowed)
        code = graph.sources[inside.GRAPH_FILE].replace(_COST, "").strip()
        texts.append(as_text(graph.instructions, code))
    given: dict[str, Any] = {"operators": allowed, "problem_type": problem_type, "limits": limits}
    return next((text for text in texts if check_written(text, **given).ok), "")
