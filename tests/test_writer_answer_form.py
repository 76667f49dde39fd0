"""Each benchmark's answer form reaches whoever answers, whichever workflow asks, and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from writer_samples import RAISES, Ran, executing, graph, text, writer

from aflow_tune.models import ScriptedModel
from aflow_tune.operators import OPERATORS
from aflow_tune.sandbox import run_program_sync
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.scoring import BENCHMARKS, find
from aflow_tune.writer.form import as_text
from aflow_tune.writer.templates import TEMPLATES
from aflow_tune.writer.workflow import TYPE_OF_BENCHMARK

_CODE = {"entry_point": "square", "test": "def check(candidate):\n    assert candidate(3) == 9\n"}
_PROGRAM = "def square(x):\n    return x * x\n"
# By benchmark: a row, the answer in the form asked for, and the bare value.
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gsm8k": ({"question": "Half of 14?", "answer": "14/2\n#### 7"}, "14 / 2 = 7", "7"),
    "math": (
        {"problem": "Half of 1?", "solution": r"It is $\boxed{\frac{1}{2}}$."},
        r"As $1/2$ is a half, \boxed{\frac{1}{2}}",
        r"\frac{1}{2}",
    ),
    "humaneval": (
        {"prompt": "def square(x):\n", "canonical_solution": "    return x * x\n", **_CODE},
        _PROGRAM,
        _PROGRAM,
    ),
    "mbpp": ({"prompt": "Square a number.", "code": _PROGRAM, **_CODE}, _PROGRAM, _PROGRAM),
    "hotpotqa": (
        {"question": "Its capital?", "answer": "Lima", "context": [["Peru", ["Lima."]]]},
        "Lima",
        "Lima",
    ),
    "drop": (
        {"context": "English and Spanish. Which?\nAnswer:", "ref_text": "English and Spanish"},
    )
    + ("English and Spanish",) * 2,
}
PROGRAMMER = graph(
    'found = await self.solve(problem=problem)\nreturn int("x" + found["output"])',
    "self.solve = operator.Programmer(self.llm)",
)
WRITTEN = {
    "custom, simpler": (text(RAISES), 2),
    "programmer, simpler": (text(PROGRAMMER), 2),
    "default workflow": ("I cannot.", 3),
}
"""What the policy writes, and the level of the fallback that answers."""
CASES = [
    (benchmark, name)
    for benchmark, kind in TYPE_OF_BENCHMARK.items()
    for name in [*(n for n, held in TEMPLATES.items() if kind in held.problem_types), *WRITTEN]
]


def answering(benchmark: str) -> Any:
    """An executor that answers rightly in the form asked for, if it is asked for one."""
    form, (_, answer, bare) = find(benchmark).answer_form, ROWS[benchmark]

    def say(messages: Sequence[Any]) -> str:
        asked = str(messages[-1]["content"])
        right = answer if form in asked else "nobody said in which form"
        if "solve()" in asked:  # a program computes the bare value
            return f"```python\ndef solve():\n    return {bare!r}\n```"
        if "```python" in asked:
            return f"```python\n{right}\n```"
        for sign, reply in {
            "review_result": "<review_result>no</review_result><feedback>wrong</feedback>",
            "solution_letter": "<solution_letter>A</solution_letter>",
            "<solution>": f"<solution>{right}</solution>",
            "<answer>": f"<thought>So.</thought><answer>{right}</answer>",
        }.items():
            if sign in asked:
                return reply
        return right

    return say


def test_every_benchmark_says_its_form_and_is_tried_here() -> None:
    assert set(ROWS) == set(TYPE_OF_BENCHMARK) == set(BENCHMARKS)
    assert all(benchmark.answer_form for benchmark in BENCHMARKS.values())


@pytest.mark.parametrize(("benchmark", "name"), CASES)
def test_templates_and_fallbacks_ask_for_it_and_score(benchmark: str, name: str) -> None:
    try:
        run_program_sync("pass")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox can be built here: {error}")
    written, level = WRITTEN.get(name) or (
        as_text(TEMPLATES[name].prompts, TEMPLATES[name].code),
        0,
    )
    clients = {"executor": executing(answering(benchmark))}
    policy = ScriptedModel([written])
    workflow = writer(benchmark=benchmark, operators=dict(OPERATORS), clients=clients)
    ran = Ran(workflow, policy, ROWS[benchmark][0])
    assert ran.error is None
    assert ran.record["level"] == level
    assert (ran.metrics["strict"], ran.metrics["published"]) == (1.0, 1.0)
    (told,) = policy.asked
    assert find(benchmark).answer_form in told.messages[-1]["content"]
