"""The shipped workflows: each passes the check; which one stands in for a graph that fails."""

from __future__ import annotations

import pytest

from aflow_tune.operators import OPERATORS
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import as_text
from aflow_tune.writer.templates import TEMPLATES, default_graph


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_passes_the_check(name: str) -> None:
    """That each runs and scores is in `test_writer_answer_form.py`."""
    template = TEMPLATES[name]
    text = as_text(template.prompts, template.code)
    for problem_type in template.problem_types:
        verdict = check_written(text, operators=OPERATORS, problem_type=problem_type)
        assert verdict.refusals == ()
        assert verdict.bound is not None
        assert verdict.bound.model_calls <= 7


@pytest.mark.parametrize(
    ("problem_type", "allowed", "label"),
    [
        ("math", list(OPERATORS), "template program_or_answer"),
        ("math", ["Programmer", "Custom"], "template program"),
        ("math", ["Custom", "ScEnsemble"], "template self_consistency"),
        ("math", ["Custom", "Review"], "template one_call"),
        ("code", list(OPERATORS), "template code_with_tests"),
        ("code", ["CustomCodeGenerate", "Review"], "template code_once"),
        ("code", ["Custom"], "a straight line of Custom"),
        ("qa", list(OPERATORS), "template extract_then_answer"),
        ("qa", ["Programmer", "Format"], "a straight line of Programmer, Format"),
    ],
)
def test_the_default_workflow_uses_what_is_allowed(
    problem_type: str, allowed: list[str], label: str
) -> None:
    operators = {name: OPERATORS[name] for name in allowed}
    graph = default_graph(problem_type, operators)
    assert graph.label == label
    assert set(graph.shape.instances.values()) <= set(allowed)
