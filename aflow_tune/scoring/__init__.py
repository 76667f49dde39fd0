"""Scores answers to benchmark tasks: numbers, mathematics, question answering, code.

`score_answer` and `score_both` score an answer to a row of one of the `BENCHMARKS`, by the
published rule and by the strict one; `check_code` runs tests against a program. `scoring.rewards`
computes rewards from scores. Rules: docs/scoring.md.
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported on first use: the child processes of this package need none of them.
_BENCHMARKS = ("BENCHMARKS", "Benchmark", "find", "score_answer", "score_both", "with_form")
_HOME = {
    **dict.fromkeys(_BENCHMARKS, "benchmarks"),
    **{"CodeVerdict": "code", "check_code": "code", "Rule": "types", "Score": "types"},
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aflow_tune.scoring' has no attribute {name!r}")
    return getattr(importlib.import_module(f"aflow_tune.scoring.{_HOME[name]}"), name)
