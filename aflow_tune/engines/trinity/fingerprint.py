"""What a run folder's run must have in common with the command that resumes it.

Every setting but those that change how long, how often or where a run works, not what is learned.
"""

from __future__ import annotations

from typing import Any

from aflow_tune.engines.trinity.config import AflowConfig

_FREE_KEYS = (
    "budget.",
    "buffer.total_steps",
    "buffer.total_epochs",
    "trainer.total_steps",
    "trainer.save_interval",
    "trainer.max_checkpoints_to_keep",
    "explorer.eval_interval",
    "explorer.max_timeout",
    "explorer.runner_per_model",
    "inline",
    "local.threads",
    "local.max_batch",
    "log.",
    "monitor.",
    "quick_eval",
    "report.",
    "rollout.run_timeout",
)
_PRIVATE = (
    "workflow_func",
    "judge_func",
    "total_epochs",
    "total_steps",
    "batch_size",
    "eval_dir",
    "run_dir",
)


def fingerprint_of(config: AflowConfig) -> dict[str, Any]:
    """What a resumed run must have in common with its beginning, as plain JSON values."""
    # With a data set this is the batch; with rollouts it is filled in, and not read.
    own = ("buffer.train_batch_size",) if config.mode == "train" else ()
    return {
        key: value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
        for key, value in config.flatten().items()
        if key in own or not (key.startswith(_FREE_KEYS) or key.endswith(_PRIVATE))
    }
