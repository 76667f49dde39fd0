"""What an answer of the graph, such as `11 + 2 = 13`, is worth.

The first sum earns 0.4 and the second 0.6; the held-out score, `correct`, counts only the last
number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aflow_tune import record_metrics


def score(task: Mapping[str, Any], answer: Any) -> float:
    """From 0.0 to 1.0."""
    numbers = [int(text) for text in re.findall(r"\d+", str(answer))]
    if len(numbers) != 3:
        raise ValueError(f"the graph answers `SUM + TERM = SUM`, not {answer!r:.80}")
    partial, _, total = numbers
    first, correct = partial == sum(task["terms"][:2]), total == task["answer"]
    record_metrics(correct=correct, first_sum_correct=first)
    return 0.4 * first + 0.6 * correct
