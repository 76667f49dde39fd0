"""What an answer to one or two questions, such as `56 Lima`, is worth: all of it or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def score(task: Mapping[str, Any], answer: Any) -> float:
    """1.0 for the expected words in their order and nothing else, else 0.0."""
    return float(str(answer).split() == str(task["answer"]).split())
