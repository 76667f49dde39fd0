"""Which program an answer holds, and Python values that travel as JSON."""

from __future__ import annotations

import array
import ast
import collections
import datetime
import enum
import json
import math
import pathlib
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from aflow_tune.scoring import _graded as values
from aflow_tune.scoring.code import NoProgram, published_program, strict_program

SQUARE = "def square(x):\n    return x * x"


def _same(first: str, second: str) -> bool:
    return ast.dump(ast.parse(first)) == ast.dump(ast.parse(second))


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        (SQUARE, SQUARE),
        # The longest run of lines that is Python; the fences are not.
        (f"Here it is:\n```python\n{SQUARE}\n```\nIt works.", SQUARE),
        # Imports, and what the entry point reaches through others; no statements.
        (
            "import os\nK = 2\ndef twice(x):\n    return K * x\ndef other(x):\n    return x\n"
            "def square(x):\n    return twice(x)\nprint(square(3))\n",
            "import os\nK = 2\ndef twice(x):\n    return K * x\n"
            "def square(x):\n    return twice(x)",
        ),
        ("def other(x):\n    return x", ""),
        ("two lines\nof words", "two lines"),
        # Of two runs of equal length the first; only whole lines count.
        ("x = 1\ny = 2\n???\nsquare = 3\nz = 4", ""),
    ],
)
def test_the_published_program(answer: str, program: str) -> None:
    found = published_program(answer, "square")
    assert found == program or _same(found, program)


def test_the_strict_program() -> None:
    assert strict_program(SQUARE, "square") == SQUARE
    fenced = f"First:\n```python\nprint(1)\n```\nso\n```py\n{SQUARE}\n```\n"
    assert strict_program(fenced, "square").strip() == SQUARE
    twice = f"```\n{SQUARE}\n```\nagain\n```\n{SQUARE}  # the same\n```\n"
    assert _same(strict_program(twice, "square"), SQUARE)
    other = f"```\n{SQUARE}\n```\nor\n```\n{SQUARE} + 1\n```\n"
    with pytest.raises(NoProgram, match="2 programs that differ"):
        strict_program(other, "square")
    with pytest.raises(NoProgram, match="no Python program that defines square"):
        strict_program("I would square it.", "square")
    with pytest.raises(NoProgram, match="longer than"):
        strict_program("x = 1\n" * 50_000, "x")


class Colour(enum.IntEnum):
    RED = 3


class Always(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


Point = collections.namedtuple("Point", "x y")


def _keep(value: Any) -> tuple[int, str]:
    return 7, type(value).__name__


def _there(message: Any) -> Any:
    text = json.dumps(message, allow_nan=False)
    return values.Crossing(_keep, lambda *handle: handle).receive(json.loads(text))


def _travel(value: Any) -> Any:
    return _there(values.Crossing(_keep, lambda *handle: handle).send(value))


VALUES: list[Any] = [
    *(None, True, 0, -5, 2**53 + 1, -(10**5000), 1.5, -0.0, float("inf"), 2 + 3j),
    *("\u00e9\ud800\n", b"\x00\xff", bytearray(b"x"), range(1, 10, 2)),
    *([1, [2]], (1, (2,)), {1, 2}, frozenset({(1, 2)}), {"a": 1, (1, 2): [3]}, {}, [], ()),
    *(collections.Counter("aab"), collections.deque([1, 2], 5), Decimal("1.10"), Fraction(1, 3)),
    # What looks like a packed value is none.
    *({"t": [1]}, {"h": 1}, [0], ["l", 1]),
    *(datetime.date(2020, 2, 29), datetime.timedelta(-1, 5), int, ValueError, math, slice(1, None)),
    *(datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.time(1, tzinfo=datetime.UTC)),
    *(uuid.UUID(int=3), pathlib.Path("a/b"), array.array("d", [1.5]), memoryview(b"ab")),
]


def test_values_arrive_as_they_were() -> None:
    for value in VALUES:
        arrived = _travel(value)
        assert arrived == value
        assert type(arrived) is type(value)


def test_values_that_arrive_otherwise() -> None:
    assert math.isnan(_travel(float("nan")))
    assert (_travel(Colour.RED), type(_travel(Colour.RED))) == (3, int)
    assert _travel(Always(7)) == 7
    assert _travel(Always(7)) != 8
    assert (_travel(Point(1, 2)), type(_travel(Point(1, 2)))) == ((1, 2), tuple)
    assert _travel({1: 2}.keys()) == {1}
    assert list(_travel(map(str, [1, 2]))) == ["1", "2"]
    assert sorted(_travel({1: [2]}.values())) == [[2]]
    assert _travel({1: [2]}.items()) == {1: [2]}.items()
    assert _travel(OSError(2, "none")).errno == 2
    assert _travel(json.JSONDecodeError("bad", "x", 0)).args == ("bad: line 1 column 1 (char 0)",)
    assert _travel([object()]) == [(7, "object")]


def test_depth_and_identity() -> None:
    itself: list[Any] = [[]]
    itself += [itself, itself[0], (itself[0],)]
    arrived = _travel(itself)
    assert arrived[1] is arrived
    assert arrived[0] is arrived[2] is arrived[3][0]
    deep: Any = ()
    for _ in range(20_000):
        deep = (deep, [deep])
    arrived = _travel(deep)
    assert arrived[0] is arrived[1][0]


@pytest.mark.parametrize(
    "data",
    [
        *(5, [1], [[0], [], []], [{}, [], []], [1, [], [[0, ["l"]]]], [1, [["d", 1]], []]),
        *([{tag: "x"}, [], []] for tag in ("i", "z", "T", "m", "h")),
        *([[0], [[tag, "os.system", "x"]], []] for tag in ("o", "e", "zz", "n", "q")),
        *([{"T": "eval"}, [], []], {"m": "aflow_tune"}, [[0], [["e", "SystemExit"]], []]),
    ],
)
def test_json_of_another_form_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        _there(data)


def test_changed_arguments_keep_their_identity() -> None:
    inner = [1]
    outer = {"a": inner, "b": {2}, "c": collections.defaultdict(int)}
    here, there = (values.Crossing(_keep, lambda *handle: handle) for _ in range(2))
    message = here.send(outer)
    arrived = there.receive(message)
    arrived["a"].append(arrived["b"])
    arrived["c"][5] = arrived.pop("b")
    result = here.receive(there.send(arrived["a"], message[1]))
    assert result is inner is outer["a"]
    assert inner == [1, {2}]
    assert outer["c"][5] is inner[1]
    assert "b" not in outer
    assert type(outer["c"]) is collections.defaultdict
