"""Run folders as commands leave them, made by hand: states, checkpoints, evaluations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fake_run import write_evaluation, write_step

from aflow_tune.runs.folder import RunState, new_state, write_state

BYTES = 1000
"""Size of the weights of a checkpoint."""


def write_saved(run_dir: Path, step: int) -> Path:
    """A checkpoint in our form whose hashes are right."""
    folder = run_dir / f"global_step_{step}"
    folder.mkdir(parents=True)
    content = bytes([step % 256]) * BYTES
    (folder / "weights.safetensors").write_bytes(content)
    of = {"bytes": BYTES, "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"format": 1, "files": {"weights.safetensors": of}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def write_run(
    run_dir: Path,
    status: str = "finished",
    *,
    saved: Iterable[int] = (),
    shares: Mapping[int, float] | None = None,
    target: int = 8,
    trained: int = 0,
    **of_state: Any,
) -> RunState:
    """A run with checkpoints of the steps `saved`, and held-out shares by step of ten items."""
    state = new_state(target, max(saved, default=0), {"mode": "both"}, None)
    state.status = status
    for name, value in of_state.items():
        setattr(state, name, value)
    write_state(run_dir, state)
    for step in saved:
        write_saved(run_dir, step)
    for step, share in (shares or {}).items():
        right = round(10 * share)
        write_evaluation(run_dir, step, [1.0] * right + [0.0] * (10 - right))
    for step in range(1, trained + 1):
        write_step(run_dir, step)
    return state
