"""What a run's processes import before they work: each of six pays for it."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

from aflow_tune.cluster.sent_function import received, send


def python(program: str, *folders: Path) -> str:
    """What a fresh process prints."""
    path = os.pathsep.join(map(str, folders))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_classes_that_every_process_loads_bring_no_framework() -> None:
    """Whoever gets the handle of an actor imports its class, Trinity's Synchronizer too."""
    heavy = ("peft", "agentscope", "openai", "fastapi", "torch._dynamo")
    names = ("rollout.explorer", "training.trainer", "rollout.adapter", "rollout.rollout_model")
    imported = ", ".join(f"aflow_tune.engines.trinity.{name}" for name in names)
    program = f"import sys, {imported}\nprint([it for it in {heavy} if it in sys.modules])"
    assert python(program) == "[]"


def test_functions_that_were_sent_together_share_what_they_refer_to() -> None:
    seen: list[int] = []

    def workflow(item: int) -> None:
        seen.append(item)

    def judge() -> list[int]:
        return seen

    made = send(workflow, None, judge)
    assert copy.deepcopy({"workflow_func": made[0]})["workflow_func"] is made[0]
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(made))))
    sent, none, sent_judge = again
    received(sent)(3)
    assert none is None
    assert sent_judge() == [3]
    assert seen == []
