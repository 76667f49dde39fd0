"""Reward for GSM8K: the last number of the answer against the number after `####`."""

from __future__ import annotations

import re

TOLERANCE = 1e-6
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def last_number(text: str) -> float | None:
    """The last number in a text, thousands separators removed; None if there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def gsm8k_reward(response: str, truth: str) -> float:
    """1 if the last number of `response` is that of the reference, within 1e-6; else 0."""
    expected = last_number(truth.rpartition("####")[2])
    answer = last_number(response)
    if expected is None or answer is None:
        return 0.0
    return float(abs(answer - expected) <= TOLERANCE)
