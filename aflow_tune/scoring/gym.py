"""Tasks of reasoning-gym: it generates the rows and its verifiers score the answers.

The library is an optional extra. Its verifiers parse some answers with `eval` or SymPy's
`parse_expr`, so they run in a child process in which both evaluate plain mathematics only.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.scoring.asked_process import AskedProcess, evaluate_literal, guard_sympy, serve
from aflow_tune.scoring.types import Score

PREFIX = "reasoning_gym:"
CPU_SECONDS = 10  # processor time for one verification
_GRID_TASKS = {"arc_agi", "rearc"}  # they compare grids of tuples, which JSON turns into lists
_CHILD = AskedProcess("aflow_tune.scoring.gym", "reasoning-gym", CPU_SECONDS)


def require_task(name: str) -> None:
    """Raises BadInput: the library is not installed, or has no such task."""
    title, where = "This task of reasoning-gym cannot be used", f"benchmark {PREFIX}{name}"
    if importlib.util.find_spec("reasoning_gym") is None:
        fix = "pip install 'aflow-tune[reasoning]'"
        raise BadInput.of(title, where, "the package reasoning-gym", "none", fix)
    if name not in task_names():
        close = difflib.get_close_matches(name, task_names(), n=3)
        fix = f"use {', '.join(close) or 'a name of reasoning_gym.factory.DATASETS'}"
        raise BadInput.of(title, where, "a task of reasoning-gym", repr(name), fix)


@functools.cache
def task_names() -> tuple[str, ...]:
    from reasoning_gym.factory import DATASETS

    return tuple(sorted(DATASETS))


def make_rows(task: str, size: int, seed: int = 0, **settings: Any) -> list[dict[str, Any]]:
    """`size` rows with `question`, `answer`, `metadata`; equal for equal seeds. Raises BadInput."""
    require_task(task)
    import reasoning_gym

    return list(reasoning_gym.create_dataset(task, size=size, seed=seed, **settings))


def score_published(task: str, answer: str, row: Mapping[str, Any]) -> Score:
    """The verifier's score, clipped to [0, 1]. Raises as `AskedProcess.ask`."""
    value = min(1.0, max(0.0, float(_CHILD.ask(task, answer, dict(row)))))
    return Score(value, "" if value == 1 else "the verifier of reasoning-gym says so")


def score_strict(task: str, answer: str, row: Mapping[str, Any]) -> Score:
    """1 if the verifier gives its full score, else 0. Raises as `score_published`."""
    score = score_published(task, answer, row)
    return score if score.value == 1 else Score(0.0, score.reason)


def _serve() -> None:
    import reasoning_gym

    guard_sympy()
    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym") and module is not None:
            module.__dict__["eval"] = evaluate_literal

    verifier = functools.cache(reasoning_gym.get_score_answer_fn)

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tuples(item) for key, item in value.items()}
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    def score(task: str, answer: str, row: dict[str, Any]) -> float:
        return float(verifier(task)(answer, tuples(row) if task in _GRID_TASKS else row))

    serve(score)


if __name__ == "__main__":
    _serve()
