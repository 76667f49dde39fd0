"""Scoring answers: what rewards are built from. Numbers, mathematics, question answering, code.

`score_answer` and `score_both` score an answer to a row of one of the `BENCHMARKS`, by the
published rule and by the strict one; `check_code` runs tests against a program; `five_part` and
`agent_reward` put rewards together. Where answers come from is left to others.
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported when they are asked for: the child processes of this room need none of them.
_BENCHMARKS = ("BENCHMARKS", "Benchmark", "find", "score_answer", "score_both", "with_form")
_HOME = {
    **dict.fromkeys(_BENCHMARKS, "benchmarks"),
    **{"CodeVerdict": "code", "check_code": "code", "Rule": "types", "Score": "types"},
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aflow_tune.scoring' has no attribute {name!r}")
    return getattr(importlib.import_module(f"aflow_tune.scoring.{_HOME[name]}"), name)
