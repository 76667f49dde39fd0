"""The shipped workflows: each can be read, passes the check, runs, and needs what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphEnding
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import OPERATORS
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import as_text
from aflow_tune.writer.templates import TEMPLATES, default_graph

PROGRAM = "```python\ndef solve():\n    return 42\n\ndef twice(x):\n    return 2 * x\n```"
NEW = {
    "review_result": "<review_result>no</review_result><feedback>wrong</feedback>",
    "solution_letter": "<solution_letter>A</solution_letter>",
    "<solution>": "<solution>mended</solution>",
    "<answer>": "<answer>short</answer>",
    "```python": PROGRAM,
}
"""What the model says to a prompt that mentions this."""
# Instances, model calls on that model, and the answer.
RUNS = {
    "analyse_then_program": (("analyse", "compute"), 2, "42"),
    "answer": (("answer",), 1, "short"),
    "code_choice": (("plain", "clever", "choose"), 5, PROGRAM[10:-4]),
    "code_once": (("write",), 1, PROGRAM[10:-4]),
    "code_with_tests": (("write",), 1, PROGRAM[10:-4]),
    "decompose_then_solve": (("split", "solve", "shorten"), 3, "plain text"),
    "extract_then_answer": (("extract", "answer", "shorten"), 3, "plain text"),
    "one_call": (("solve",), 1, "plain text"),
    "program": (("compute",), 1, "42"),
    "program_or_answer": (("compute",), 1, "42"),
    "review_then_revise": (("draft", "review", "revise"), 3, "mended"),
    "self_consistency": (("solve", "vote"), 4, "plain text"),
}


def say(messages: Sequence[Any]) -> str:
    asked = messages[-1]["content"]
    return next((reply for sign, reply in NEW.items() if sign in asked), "plain text")


def run(graph: Graph, model: ScriptedModel) -> Any:
    return asyncio.run(graph.run("How many?", "twice", model=model))


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_passes_the_check_and_runs_and_its_prompts_reach_the_model(name: str) -> None:
    template = TEMPLATES[name]
    instances, calls, answer = RUNS[name]
    model = ScriptedModel(say)
    ran = run(template.graph, model)
    assert (ran.ending, ran.answer, ran.model_calls) == (GraphEnding.ANSWERED, answer, calls)
    said = [str(ask.messages[0]["content"]) for ask in model.asked]
    for instance in instances:
        assert any(template.prompts[instance] in text for text in said), instance
    text = as_text(template.prompts, template.code)
    for problem_type in template.problem_types:
        verdict = check_written(text, operators=OPERATORS, problem_type=problem_type)
        assert verdict.refusals == ()
        assert verdict.bound is not None
        assert calls <= verdict.bound.model_calls <= 7


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
    assert run(graph, ScriptedModel(say)).ok
