"""The ten operators, each on well-formed, malformed, empty, huge and hostile replies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from aflow_tune.errors import BadInput
from aflow_tune.models import ScriptedModel
from aflow_tune.operators import (
    OPERATORS,
    MdEnsemble,
    Operator,
    OperatorResult,
    ScEnsemble,
    TestCases,
)
from aflow_tune.operators.reading import MAX_REPLY_CHARACTERS
from aflow_tune.sandbox import Limits

PROGRAM = "def f(x):\n    return x"
PYTHON = f"```python\n{PROGRAM}\n```"
SOLVE = "def solve():\n    return 6 * 7"
THREE = ["one", "two", "three"]

CALLS: dict[str, tuple[Any, ...]] = {
    "Custom": ("the input", "the instruction"),
    "AnswerGenerate": ("the task",),
    "CustomCodeGenerate": ("the problem", "f", "the instruction"),
    "ScEnsemble": (THREE, "the problem"),
    "Programmer": ("the problem", "an analysis"),
    "Test": ("the problem", "def f(x):\n    return 0", "f", 1),
    "Format": ("the problem", "the solution"),
    "Review": ("the problem", "the solution"),
    "Revise": ("the problem", "the solution", "the feedback"),
    "MdEnsemble": (THREE, "the problem"),
}
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "Custom": ("  any text ", {"response": "any text"}),
    "AnswerGenerate": ("<thought>t</thought><answer>a</answer>", {"thought": "t", "answer": "a"}),
    "CustomCodeGenerate": (PYTHON, {"response": PROGRAM}),
    "ScEnsemble": ("<solution_letter>B</solution_letter>", {"response": "two"}),
    "Programmer": (f"```python\n{SOLVE}\n```", {"code": SOLVE, "output": "42"}),
    "Test": (PYTHON, {"result": True, "solution": PROGRAM}),
    "Format": ("42", {"response": "42", "solution": "42"}),
    "Review": (
        "<review_result>False</review_result><feedback>step 2</feedback>",
        {"review_result": False, "feedback": "step 2"},
    ),
    "Revise": ("<solution>better</solution>", {"solution": "better"}),
    "MdEnsemble": ("<solution_letter>A</solution_letter>", {}),  # of a shuffled order
}
REPAIRABLE: dict[str, str] = {
    "AnswerGenerate": '{"thought": "t", "answer": "a"}',
    "CustomCodeGenerate": f"Here:\n{PROGRAM}\nIt returns x.",
    "ScEnsemble": "I think that solution B is best.",
    "Programmer": f"```python\n{SOLVE}",
    "Test": f"<solution>\n{PROGRAM}",
    "Review": "review_result: **False**\nfeedback: step 2",
    "Revise": "<solution>better",
}
FALLBACK: dict[str, dict[str, Any]] = {
    "Custom": {"response": ""},
    "AnswerGenerate": {"thought": "", "answer": ""},
    "CustomCodeGenerate": {"response": ""},
    "ScEnsemble": {"response": "one"},
    "Programmer": {"code": "", "output": "Error: no program could be read: "},
    "Test": {"result": False, "solution": "def f(x):\n    return 0"},
    "Format": {"response": "", "solution": ""},
    "Review": {"review_result": False, "feedback": ""},
    "Revise": {"solution": "the solution"},
    "MdEnsemble": {"solution": "one"},
}
"""What is returned where nothing could be read; of the program's output the beginning."""


def use(name: str, reply: Any, **settings: Any) -> tuple[OperatorResult, ScriptedModel]:
    """One use of an operator by name, on a model that always replies the same."""
    if name in ("Programmer", "Test"):
        settings.setdefault("limits", Limits(seconds=60))  # for a busy machine
    if name == "Test":
        settings.setdefault("tests", {"f": ["assert candidate(3) == 3"]})
    model = ScriptedModel(lambda _: reply)
    operator: Operator = OPERATORS[name](model, **settings)
    return asyncio.run(operator(*CALLS[name])), model


@pytest.mark.parametrize("name", CALLS)
def test_well_formed_malformed_and_huge(name: str) -> None:
    reply, expected = GOOD[name]
    result, model = use(name, reply)
    assert dict(result) == expected if expected else result["solution"] in THREE
    assert all(type(result[key]) is type(value) for key, value in expected.items())
    # Test mends a program that was wrong, which its outcome tells.
    assert result.outcome == ("repaired" if name == "Test" else "answered")
    assert result.attempts == len(model.asked) == (5 if name == "MdEnsemble" else 1)
    asked = str(model.asked[0].messages[0]["content"])
    for argument in CALLS[name]:
        for text in argument if isinstance(argument, list) else [argument]:
            assert isinstance(text, int) or text in asked, text
    if name in REPAIRABLE:
        result, _ = use(name, REPAIRABLE[name])
        assert (dict(result), result.outcome, result.attempts) == (expected, "repaired", 1)
    padding = "so it goes on and on. " * 100_000
    if name in ("Custom", "Format"):  # they take any reply that is not empty
        assert use(name, padding)[0]["response"] == padding.strip()
    elif expected:
        assert dict(use(name, f"{padding}\n\n{reply}")[0]) == expected


UNREADABLE = ["", "I would rather talk about A and B.", "x" * (MAX_REPLY_CHARACTERS + 1)]
HOSTILE = [
    "<answer>" * 50_000,
    "{" * 100_000,
    "```python\n" + "(" * 50_000 + "\n```",
    "</response></solution></code>" * 1000,
    "\ud800\0\x1b[2J\u202e",
    "{problem} {solution} {0} %s ${HOME} {{}} {form}",
    "<review_result>{}</review_result>" * 3,
    "<solution_letter>__import__('os').system('true')</solution_letter>",
    '{"answer": ' + "[" * 100_000,
    '{"response": 1e999, "solution": NaN, "code": -Infinity}',
    "<!DOCTYPE a [<!ENTITY b 'c'>]><answer>&b;</answer>",
]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", range(len(UNREADABLE + HOSTILE)))
def test_beyond_repair_and_hostile(name: str, number: int) -> None:
    """Whatever comes back has the operator's keys and types, and can be sent on."""
    reply = (UNREADABLE + HOSTILE)[number]
    result, model = use(name, reply, retries=1)
    assert set(result) == set(FALLBACK[name])
    assert all(type(value) is type(FALLBACK[name][key]) for key, value in result.items())
    json.dumps(result, ensure_ascii=False).encode()
    if name == "Review":
        assert result["review_result"] is False
    if name in ("ScEnsemble", "MdEnsemble"):
        assert next(iter(result.values())) in THREE
    if number >= len(UNREADABLE) or (name in ("Custom", "Format") and number == 1):
        return
    shown = {key: value[:33] if name == "Programmer" else value for key, value in result.items()}
    assert shown == FALLBACK[name]
    # Test says about the solution what it found; every other that nothing could be read.
    assert result.outcome == ("tests_failed" if name == "Test" else "unreadable")
    assert result.reason
    assert result.attempts == len(model.asked) == (10 if name == "MdEnsemble" else 2)  # bounded


# Ensembles


def choose(*letters: str) -> ScriptedModel:
    return ScriptedModel([f"<solution_letter>{letter}</solution_letter>" for letter in letters])


def by_text(text: str) -> Any:
    """A model that votes for the candidate with this text, wherever it stands."""

    def reply(messages: Any) -> str:
        blocks = messages[0]["content"].partition("Candidates:\n")[2].split("\n\n")
        label = next(block.split(":\n")[0] for block in blocks if block.endswith(f":\n{text}"))
        return f"<solution_letter>{label}</solution_letter>"

    return reply


def shown(model: ScriptedModel, number: int) -> dict[str, str]:
    """The candidates of a question: label to text."""
    text = str(model.asked[number].messages[0]["content"])
    blocks = text.partition("Candidates:\n")[2].split("\n\n")
    pairs = [block.split(":\n", 1) for block in blocks if ":\n" in block]
    return {label: rest for label, rest in pairs if label.isalpha() and label.isupper()}


def test_sc_ensemble_goes_past_z_and_keeps_equal_candidates_apart() -> None:
    model = choose("AD")
    chosen = asyncio.run(ScEnsemble(model)([f"s{number}" for number in range(30)], "p"))
    assert chosen == {"response": "s29"}
    assert list(shown(model, 0)) == [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "AA", "AB", "AC", "AD"]
    model = choose("C")
    assert asyncio.run(ScEnsemble(model)(["x", "x", "y"], "p")) == {"response": "y"}
    assert shown(model, 0) == {"A": "x", "B": "x", "C": "y"}


@pytest.mark.parametrize(("kind", "key"), [(ScEnsemble, "response"), (MdEnsemble, "solution")])
def test_empty_candidates_whole_results_and_what_is_no_list(kind: type[Operator], key: str) -> None:
    result = asyncio.run(kind(ScriptedModel([]))(["", " "], "p"))
    assert (result, result.outcome) == ({key: ""}, "unreadable")
    model = ScriptedModel(by_text("7"))
    assert asyncio.run(kind(model)(["", "x", None, 7], "p")) == {key: "7"}
    assert sorted(shown(model, 0).values()) == ["7", "x"]
    results = [OperatorResult({"thought": "t", "answer": text}) for text in ("1", "2", "3")]
    chosen = asyncio.run(kind(ScriptedModel(by_text(str(dict(results[1])))))([*results, "4"], "p"))
    assert chosen[key] == {"thought": "t", "answer": "2"}
    empty = OperatorResult({"thought": "", "answer": ""})
    assert asyncio.run(kind(choose(*"AAAAA"))([empty, "only"], "p"))[key] == "only"
    assert asyncio.run(kind(ScriptedModel([]))([empty, empty], "p"))[key] == empty
    for wrong in ([], "a text", None, [("a", 1), ["x"], "fine"]):
        with pytest.raises(BadInput, match="solutions"):
            asyncio.run(kind(ScriptedModel([]))(wrong, "p"))


def test_md_ensemble_maps_each_vote_back_through_its_own_order() -> None:
    for wanted in THREE:
        model = ScriptedModel(by_text(wanted))
        result = asyncio.run(MdEnsemble(model, vote_count=7)(THREE, "p"))
        assert (result, result.outcome) == ({"solution": wanted}, "answered")
        assert len(model.asked) == 7
    assert len({tuple(shown(model, number).values()) for number in range(7)}) > 1  # shuffled


def test_md_ensemble_survives_lost_votes_and_breaks_ties_by_place() -> None:
    replies = iter([lambda _: "no idea", lambda _: "no idea", by_text("two")])
    model = ScriptedModel(lambda messages: next(replies)(messages))
    result = asyncio.run(MdEnsemble(model, vote_count=3, retries=0)(THREE, "p"))
    assert (result, result.outcome) == ({"solution": "two"}, "repaired")
    assert result.reason.startswith("2 of 3 votes")
    turns = iter(["three", "one", "three", "one"])
    model = ScriptedModel(lambda messages: by_text(next(turns))(messages))
    assert asyncio.run(MdEnsemble(model, vote_count=4)(THREE, "p")) == {"solution": "one"}
    # Without a readable vote the most frequent counts.
    result = asyncio.run(ScEnsemble(ScriptedModel(lambda _: "X or Y"))(["a", "b", "c", "b "], "p"))
    assert (result, result.outcome) == ({"response": "b"}, "unreadable")


# The most calls of a use: each operator's own figure, against the use that costs the most.

FAILING = "```python\ndef solve():\n    raise ValueError('no')\n```"
WRONG = "```python\ndef one():\n    return 2\n```"
TESTS = TestCases.of_rows([{"entry_point": "one", "test": ["assert candidate() == 1"]}])
WRONG_ONE = {"problem": "x", "solution": "def one():\n    return 3\n", "entry_point": "one"}
HARDEST = [
    ("Custom", {"input": "x"}, {}, {}, 1),
    ("ScEnsemble", {"solutions": ["a", "b"], "problem": "x"}, {}, {}, 1),
    ("Review", {"problem": "x", "solution": "y"}, {}, {}, 1),
    ("MdEnsemble", {"solutions": ["a", "b"], "problem": "x"}, {"vote_count": 5}, {}, 5),
    ("Programmer", {"problem": "x"}, {"programs": 2}, {}, 2),
    ("Test", WRONG_ONE, {"tests": TESTS}, {"test_loop": 2}, 2),
]


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
    turns = iter(range(1, 1000))

    def reply(_: Any) -> str:
        """Nothing that can be read until the last attempt."""
        good = {"Programmer": FAILING, "Test": WRONG}.get(name, "")
        return good if next(turns) % (retries + 1) == 0 else ""

    model = ScriptedModel(reply)
    asyncio.run(OPERATORS[name](model, retries=retries, **options)(**call, **last))
    known = {key: value for key, value in (options | last).items() if key != "tests"}
    declared = OPERATORS[name].most_calls(retries=retries, **known)
    assert len(model.asked) == declared == times * (1 + retries)
