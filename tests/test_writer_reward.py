"""What written workflows earn: numbers by hand, and the order of clean runs and fallbacks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from aflow_tune.scoring.rewards import Usage
from aflow_tune.sections import FivePartSection
from aflow_tune.writer.results import writer_reward, writing_form
from aflow_tune.writer.types import Level, Refusal, RefusalKind, WrittenForm

NOTHING = Usage(usd=0.0, tokens=0, seconds=0.0, operators=0)
SOME = Usage(usd=0.004, tokens=2048, seconds=15.0, operators=4)
"""Efficiency 1 - 0.004 / 0.01 = 0.6; simplicity (1 - 15/60 + 1 - 4/10) / 2 = 0.675."""
HYBRID, REPAIRED, CODE = WrittenForm.HYBRID, WrittenForm.REPAIRED, WrittenForm.CODE


def refused(*kinds: RefusalKind) -> list[Refusal]:
    return [Refusal(kind, "no") for kind in kinds]


ARGUMENTS, SYNTAX = RefusalKind.ARGUMENTS, RefusalKind.SYNTAX


@pytest.mark.parametrize(
    ("level", "score", "usage", "form", "refusals", "total"),
    [
        (0, 1.0, NOTHING, HYBRID, [], 10.0),  # sum 1: 20 * (0.1 + 0.9) - 10
        (0, 0.0, NOTHING, HYBRID, [], -1.7),  # sum 0.35: 20 * (0.1 + 0.315) - 10
        (0, 1.0, NOTHING, REPAIRED, [], 9.775),  # format 0.75, sum 0.9875
        # 0.65 + 0.15 * 0.6 + 0.1 * 0.675 + 0.05 + 0.05 = 0.9075: 20 * (0.1 + 0.81675) - 10
        (0, 1.0, SOME, HYBRID, [], 8.335),
        (1, 1.0, SOME, HYBRID, [], -8.437),  # 20 * (0.06 + 0.02 * 0.9075) - 10
        (1, 1.0, SOME, HYBRID, refused(RefusalKind.PROMPT), -8.439),  # format 0.9, sum 0.9025
        (2, 1.0, SOME, HYBRID, [], -9.037),  # 20 * (0.03 + 0.02 * 0.9075) - 10
        # 20 * 0.02 * 0.9 - 10, whatever the default workflow answered
        (3, 1.0, SOME, HYBRID, refused(ARGUMENTS), -9.64),
        (3, 0.0, NOTHING, HYBRID, refused(ARGUMENTS), -9.64),
        (3, 1.0, NOTHING, None, refused(RefusalKind.UNREADABLE), -10.0),
    ],
)
def test_totals_by_hand(
    level: int, score: float, usage: Usage, form: Any, refusals: list[Refusal], total: float
) -> None:
    given = {"level": Level(level), "form": form, "refusals": refusals}
    assert writer_reward(score, "42", usage, **given).reward == pytest.approx(total)


SCORES = (0.0, 0.3, 1.0)
USAGES = (
    NOTHING,
    SOME,
    Usage(None, None, 0.0, 0),
    Usage(None, 4000, 30.0, 3),
    Usage(usd=5.0, tokens=10**7, seconds=1e5, operators=500),
)
WRITINGS = [
    (form, refused(*kinds))
    for form in (HYBRID, REPAIRED, CODE, None)
    for kinds in ((), (ARGUMENTS,), (ARGUMENTS,) * 3, (SYNTAX,), (RefusalKind.PROMPT,) * 20)
]
ANSWERS = ("42", "", "a b c d " * 50)


def test_no_fallback_earns_what_any_clean_run_earns() -> None:
    settings = [FivePartSection(), FivePartSection(lowest=-1.0, highest=0.5)]
    draw = random.Random(0)
    for _ in range(20):  # weights of every kind, the extreme ones too
        weights = [draw.random() ** 4 for _ in range(5)]
        scaled = [weight / sum(weights) for weight in weights]
        settings.append(FivePartSection(*scaled))
    for chosen in settings:
        clean, fallbacks = [], []
        cases = itertools.product(Level, SCORES, USAGES, WRITINGS, ANSWERS)
        for level, score, usage, (form, refusals), answer in cases:
            if level is Level.CLEAN and (form is None or refusals):
                continue  # what was refused does not run
            found = writer_reward(
                score, answer, usage, level=level, form=form, refusals=refusals, settings=chosen
            ).reward
            assert chosen.lowest <= found <= chosen.highest + 1e-9
            (clean if level is Level.CLEAN else fallbacks).append(found)
        assert max(fallbacks) < min(clean)


@pytest.mark.parametrize(
    ("form", "refusals", "worth"),
    [
        (HYBRID, [], 1.0),
        (REPAIRED, [], 0.75),
        (CODE, [], 0.5),
        (None, [], 0.0),
        (HYBRID, refused(ARGUMENTS), 0.9),
        (HYBRID, refused(*[ARGUMENTS] * 50), 0.1),
        (HYBRID, refused(SYNTAX), 0.1),
        (CODE, refused(SYNTAX), 0.05),
    ],
)
def test_the_form_of_the_writing(
    form: WrittenForm | None, refusals: list[Refusal], worth: float
) -> None:
    assert writing_form(form, refusals) == pytest.approx(worth)
