"""Each operator's own figure of its worst use, held against the use that costs the most."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from aflow_tune.models.client import ScriptedModel
from aflow_tune.models.types import Message
from aflow_tune.operators import OPERATORS, Field, Operator, Prompt, TestCases

EMPTY = ""
"""A reply that no operator can read."""
FAILING = "```python\ndef solve():\n    raise ValueError('no')\n```"
WRONG = "```python\ndef one():\n    return 2\n```"
TESTS = TestCases.of_rows([{"entry_point": "one", "test": ["assert candidate() == 1"]}])


def worst(name: str, replies: Any, call: dict[str, Any], **options: Any) -> int:
    """Model calls of one use on a model that says what costs the most."""
    model = ScriptedModel(replies)
    operator = OPERATORS[name](model, **options)
    asyncio.run(operator(**call))
    return len(model.asked)


def always(text: str) -> Any:
    return lambda messages: text


def unreadable_first(text: str, retries: int) -> Any:
    """An unreadable reply until the last attempt, then `text`, again and again."""

    def reply(messages: Sequence[Message]) -> str:
        reply.turn += 1  # type: ignore[attr-defined]
        return text if reply.turn % (retries + 1) == 0 else EMPTY  # type: ignore[attr-defined]

    reply.turn = 0  # type: ignore[attr-defined]
    return reply


ONCE = {
    "Custom": {"input": "x"},
    "AnswerGenerate": {"input": "x"},
    "CustomCodeGenerate": {"problem": "x", "entry_point": "one"},
    "ScEnsemble": {"solutions": ["a", "b"], "problem": "x"},
    "Format": {"problem": "x", "solution": "y"},
    "Review": {"problem": "x", "solution": "y"},
    "Revise": {"problem": "x", "solution": "y", "feedback": "z"},
}


@pytest.mark.parametrize("name", ONCE)
@pytest.mark.parametrize("retries", [0, 2])
def test_operators_that_ask_once(name: str, retries: int) -> None:
    used = worst(name, always(EMPTY), ONCE[name], retries=retries)
    assert used == OPERATORS[name].most_calls(retries=retries) == 1 + retries


@pytest.mark.parametrize(("votes", "retries"), [(5, 0), (3, 1), (1, 2)])
def test_every_vote_of_an_ensemble(votes: int, retries: int) -> None:
    call = {"solutions": ["a", "b"], "problem": "x"}
    used = worst("MdEnsemble", always(EMPTY), call, vote_count=votes, retries=retries)
    declared = OPERATORS["MdEnsemble"].most_calls(retries=retries, vote_count=votes)
    assert used == declared == votes * (1 + retries)


@pytest.mark.parametrize(("programs", "retries"), [(3, 0), (2, 1)])
def test_every_program_of_a_programmer(programs: int, retries: int) -> None:
    replies = unreadable_first(FAILING, retries)
    used = worst("Programmer", replies, {"problem": "x"}, programs=programs, retries=retries)
    declared = OPERATORS["Programmer"].most_calls(retries=retries, programs=programs)
    assert used == declared == programs * (1 + retries)


@pytest.mark.parametrize(("loops", "retries"), [(3, 0), (2, 1), (0, 1), (-1, 0)])
def test_every_mending_of_a_test(loops: int, retries: int) -> None:
    call = {"problem": "x", "solution": "def one():\n    return 3\n", "entry_point": "one"}
    replies = unreadable_first(WRONG, retries)
    used = worst("Test", replies, {**call, "test_loop": loops}, tests=TESTS, retries=retries)
    declared = OPERATORS["Test"].most_calls(retries=retries, test_loop=loops)
    assert used == declared == max(0, loops) * (1 + retries)


def test_what_is_not_known_is_the_most_that_there_can_be() -> None:
    assert OPERATORS["MdEnsemble"].most_calls(retries=0, vote_count=None) == 100
    assert OPERATORS["Programmer"].most_calls(retries=0, programs=None) == 10
    assert OPERATORS["Test"].most_calls(retries=0, test_loop=None) == 20
    assert OPERATORS["Test"].most_calls(retries=0, test_loop=10**6) == 20


def test_the_defaults_are_the_operators_own() -> None:
    assert OPERATORS["MdEnsemble"].most_calls(retries=0) == 5
    assert OPERATORS["Programmer"].most_calls(retries=0) == 3
    assert OPERATORS["Test"].most_calls(retries=0) == 3
    assert OPERATORS["Custom"].most_calls() == 3


def test_an_operator_of_a_user_declares_its_own() -> None:
    class Twice(Operator):
        """Asks twice."""

        fields = (Field("text"),)
        asks: ClassVar = {"main": Prompt(needs=("text",), text="{text}")}

        @classmethod
        def most_calls(cls, *, retries: int = 2, **settings: Any) -> int:
            return 2 * (1 + retries)

        async def run(self, text: str) -> Any:
            await self.ask({"text": text})
            return await self.ask({"text": text})

    model = ScriptedModel(always(EMPTY))
    asyncio.run(Twice(model, retries=1)(text="x"))
    assert len(model.asked) == Twice.most_calls(retries=1) == 4
