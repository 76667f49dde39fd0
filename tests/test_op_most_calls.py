"""Each operator's own figure of its worst use, held against the use that costs the most."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from aflow_tune.models.scripted import ScriptedModel
from aflow_tune.models.types import Message
from aflow_tune.operators import OPERATORS, TestCases

EMPTY = ""
"""A reply that no operator can read."""
FAILING = "```python\ndef solve():\n    raise ValueError('no')\n```"
WRONG = "```python\ndef one():\n    return 2\n```"
TESTS = TestCases.of_rows([{"entry_point": "one", "test": ["assert candidate() == 1"]}])


def unreadable_first(text: str, retries: int) -> Any:
    """An unreadable reply until the last attempt, then `text`, again and again."""

    def reply(messages: Sequence[Message]) -> str:
        reply.turn += 1  # type: ignore[attr-defined]
        return text if reply.turn % (retries + 1) == 0 else EMPTY  # type: ignore[attr-defined]

    reply.turn = 0  # type: ignore[attr-defined]
    return reply


def test_what_is_not_known_is_the_most_that_there_can_be() -> None:
    assert OPERATORS["MdEnsemble"].most_calls(retries=0, vote_count=None) == 100
    assert OPERATORS["Programmer"].most_calls(retries=0, programs=None) == 10
    assert OPERATORS["Test"].most_calls(retries=0, test_loop=None) == 20
    assert OPERATORS["Test"].most_calls(retries=0, test_loop=10**6) == 20


HARDEST = [
    ("Custom", {"input": "x"}, {}, {}, 1),
    ("ScEnsemble", {"solutions": ["a", "b"], "problem": "x"}, {}, {}, 1),
    ("Review", {"problem": "x", "solution": "y"}, {}, {}, 1),
    ("MdEnsemble", {"solutions": ["a", "b"], "problem": "x"}, {"vote_count": 5}, {}, 5),
    ("Programmer", {"problem": "x"}, {"programs": 2}, {}, 2),
    ("Test", {"problem": "x", "solution": "def one():\n    return 3\n", "entry_point": "one"},
     {"tests": TESTS}, {"test_loop": 2}, 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "options", "last", "times"), HARDEST)
@pytest.mark.parametrize("retries", [0, 1])
def test_the_worst_use_costs_what_was_declared(
    name: str,
    call: dict[str, Any],
    options: dict[str, Any],
    last: dict[str, Any],
    times: int,
    retries: int,
) -> None:
    reply = {"Programmer": FAILING, "Test": WRONG}.get(name)
    replies = unreadable_first(reply, retries) if reply else lambda _: EMPTY
    model = ScriptedModel(replies)
    operator = OPERATORS[name](model, retries=retries, **options)
    asyncio.run(operator(**call, **last))
    known = {key: value for key, value in (options | last).items() if key != "tests"}
    declared = OPERATORS[name].most_calls(retries=retries, **known)
    assert len(model.asked) == declared == times * (1 + retries)
