"""What the scripted policy says, and where each text comes from.

A run of a dry run is of one kind, by its number in its group: even runs are meant to be good,
odd ones bad. So every group has both kinds where both are known, and a group whose rewards are
all alike is one whose reward does not tell them apart. How often a real model is right, and so how
many groups it makes mixed, no script can know.

| kind | what is said |
|---|---|
| good, bad | the texts of the answers file (`answers.py`) |
| truth | what the row itself gives as its answer, as it stands, in every call of free form |
| words | plain words that answer nothing |

A good run says `good`, else the row's truth, else words; a bad one `bad`, else words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.scoring.benchmarks import find

GOOD, BAD, TRUTH, WORDS = "good", "bad", "truth", "words"
TRUTH_FIELDS = ("answer", "solution", "target", "label")
"""Fields of a row that hold its answer where neither a benchmark nor the configuration says so."""
ANY = "*"
"""Key of the answers for every row without its own."""

Saying = str | list[str] | dict[str, str | list[str]]
"""One text for every call; a text for each call in turn, the last one staying; or either of them by
caller."""


@dataclass(frozen=True)
class Answers:
    """What a good and a bad policy say to one row; None where it is not given."""

    good: Saying | None = None
    bad: Saying | None = None


@dataclass(frozen=True)
class Script:
    """The scripted policy of a dry run. Travels to the workers by value.

    `by_number` holds answers by the number of a row in its task set, from 0; `by_text` by a text
    that one of the row's fields has; `anywhere` those of every other row, whose `{field}` become
    the row's own.
    """

    by_number: Mapping[int, Answers] = field(default_factory=dict)
    by_text: Mapping[str, Answers] = field(default_factory=dict)
    anywhere: Answers | None = None
    benchmark: str | None = None
    """The benchmark of rows that do not say it, whose gold answer is the truth."""
    truth_fields: tuple[str, ...] = TRUTH_FIELDS
    file: str = ""
    """The answers file, where there is one."""

    def part(self, row: Mapping[str, Any], number: int, run: int) -> Part:
        """What run `run` of the group of a row says."""
        answers = self._answers(row, number)
        good = run % 2 == 0
        saying = answers.good if good else answers.bad
        if saying is not None:
            kind = GOOD if good else BAD
            return Part(kind, saying, f"`{kind}` of {self.file}")
        truth = self.truth(row) if good else None
        if truth is not None:
            return Part(TRUTH, *truth)
        return Part(WORDS, None, "plain words")

    def truth(self, row: Mapping[str, Any]) -> tuple[str, str] | None:
        """The row's own answer as a text, and where it is from; None where it is not known."""
        name = row.get("benchmark") or self.benchmark
        if isinstance(name, str):
            try:
                return find(name).gold(row), f"the gold answer by benchmark {name}"
            except Exception:
                # No such benchmark, or a row that is none of its: each benchmark raises its own
                # errors at a foreign row, and the fields below are left.
                pass
        for key in self.truth_fields:
            value = row.get(key)
            if isinstance(value, list) and value:
                value = value[0]  # one of several accepted answers
            if isinstance(value, str | int | float):
                return str(value), f"the row's field `{key}`"
        return None

    def _answers(self, row: Mapping[str, Any], number: int) -> Answers:
        if number in self.by_number:
            return self.by_number[number]
        if self.by_text:
            for value in row.values():
                if isinstance(value, str | int) and str(value) in self.by_text:
                    return self.by_text[str(value)]
        if self.anywhere is None:
            return Answers()
        return Answers(_filled(self.anywhere.good, row), _filled(self.anywhere.bad, row))


class Part:
    """What one run says, call by call. `kind` is one of GOOD, BAD, TRUTH, WORDS; `source` says in
    words where it is from."""

    def __init__(self, kind: str, saying: Saying | None, source: str) -> None:
        self.kind = kind
        self.source = source
        self._saying = saying
        self._calls: Counter[str] = Counter()

    def next(self, caller: str) -> str | None:
        """The answer to the next call of `caller`; None where none is given: plain words."""
        saying, counted = self._saying, ""
        if isinstance(saying, dict):
            saying, counted = saying.get(caller), caller
        number = self._calls[counted]
        self._calls[counted] += 1
        if isinstance(saying, list):
            return saying[min(number, len(saying) - 1)] if saying else None
        return saying


def _filled(saying: Saying | None, row: Mapping[str, Any]) -> Any:
    """A saying with every `{name}` of a field replaced; other braces stay."""
    if isinstance(saying, dict):
        return {caller: _filled(inner, row) for caller, inner in saying.items()}
    if isinstance(saying, list):
        return [_filled(inner, row) for inner in saying]
    if saying is None:
        return None
    return re.sub(r"\{(\w+)\}", lambda found: str(row.get(found[1], found[0])), saying)
