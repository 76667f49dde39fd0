"""`engine: trinity`: Trinity's own vLLM and verl, launched by Trinity's own stage runner.

We add only what upstream leaves out: the user's functions were shipped by value before, and a
stage that failed, or a trainer that ended early, is an error here instead of exit code 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from aflow_tune.engines.trinity.config import AflowConfig
from aflow_tune.errors import RunFailed


def run_cluster(config: AflowConfig, target: int, phase: Callable[[str], None]) -> int:
    """Run one stage on the cluster at `cluster.ray_address`; returns the step reached.

    Raises:
        RunFailed: the stage failed; its traceback is in the message.
    """
    from trinity.cli.launcher import run_stage

    phase(f"running on Trinity's engines, target step {target}")
    status = run_stage(config)
    if not status.success:
        detail = status.error.traceback_text if status.error else "no cause was given"
        raise RunFailed(f"Trinity's stage {status.stage!r} failed:\n{detail}")
    state = Path(config.checkpoint_job_dir) / f"{config.trainer.name}_meta.json"
    if not state.exists():
        return 0
    return int(json.loads(state.read_text(encoding="utf-8"))["latest_iteration"])
