"""What the policy is told: the operators, the form, the budget, an example, the problem.

The operators' lines come from their own declarations. The shipped text is short, since a small
model reads it too; a file of the user's may take its place, with the same placeholders. The example
passes the check under the run's own limits. Nothing that an answer is scored with is ever here.
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
"""What a template may mention. It has to mention the problem."""
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
"""The shipped template. A line with a placeholder that has no value is left out."""
KEEP = "KEEP"
"""The word by which the policy keeps its graph; the JSON object {"keep": true} means the same."""
_COST = ', self.llm.get_usage_summary()["total_cost"]'
"""What AFlow's graphs return beside the answer; a run counts its own."""


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
    """The conversation that the policy answers with a workflow. `template`: in place of the shipped
    one; `answer_form`: of the problem's benchmark; `earlier`: what the policy wrote in each turn,
    and was told about it."""
    most = [f"{limits.model_calls} model call{'' if limits.model_calls == 1 else 's'}"]
    most += [f"{limits.tokens} tokens"] if limits.tokens is not None else []
    most += [f"{limits.usd:g} US dollars"] if limits.usd is not None else []
    values = {
        "operators": "\n".join(_operator_line(kind, limits) for kind in operators.values()),
        "budget": f"At most {' and '.join(most)}.",
        "example": _example(tuple(sorted(operators.items())), problem_type, limits),
        "problem": problem,
        "problem_type": problem_type or "",
        "entry_point": entry_point or "",
        "answer_form": answer_form,
    }
    # Lines that would show an empty value are left out, except that of the problem.
    empty = {name for name, value in values.items() if not value and name != "problem"}
    lines = (TEMPLATE if template is None else template).split("\n")
    kept = [line for line in lines if not placeholders(line) & empty]
    messages = [{"role": "user", "content": fill("\n".join(kept), values)}]
    for wrote, told in earlier:
        messages += [{"role": "assistant", "content": wrote}, {"role": "user", "content": told}]
    return messages


def _operator_line(kind: type[Operator], limits: CheckLimits) -> str:
    """One operator: its call, the keys it returns, its most calls of the model, its purpose."""
    arguments = []
    for item in list(inspect.signature(kind.__call__).parameters.values())[1:]:
        if item.name == "mode":  # taken for the sake of AFlow's graphs
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
    """What is wrong with a template of the user's."""
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
    """The shortest workflow in the hybrid form that passes the check, without the cost beside its
    answer; empty where none passes."""
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
