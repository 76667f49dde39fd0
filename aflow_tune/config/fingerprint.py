"""What a run folder's run must have in common with the command that resumes it.

Every setting but those that change how long, how often or where a run works, not what is learned.
"""

from __future__ import annotations

import re
from typing import Any

from aflow_tune.config.load import AflowConfig
from aflow_tune.models.redaction import masked

_FREE_KEYS = (
    "budget.",
    "buffer.total_steps",
    "buffer.total_epochs",
    "checkpoints.",
    "cluster.",
    "continue_from_checkpoint",
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
    "physical_gpus",
    "protected_pids",
    "quick_eval",
    "report.",
    "rollout.run_timeout",
    "runtime_env.",
)
_FREE_OF_A_MODEL = re.compile(
    r"models\.[^.]+\.(retries|backoff|timeout|max_concurrency|api_key_env|headers_env)(\.|$)"
)
"""How an API is reached. A run that stopped because one was away may go on with more patience."""
_PRIVATE = (
    "workflow_func",
    "judge_func",
    "total_epochs",
    "total_steps",
    "batch_size",
    "eval_dir",
    "ray_namespace",
    "run_dir",
)


_PLAIN = (int, float, str, bool, type(None))


def fingerprint_of(config: AflowConfig) -> dict[str, Any]:
    """What a resumed run must have in common with its beginning, as plain JSON values; secrets
    are masked, and may change."""
    # With a data set the latter is the batch; with rollouts it is filled in, and not read.
    own = ("buffer.batch_size", *(("buffer.train_batch_size",) if config.mode == "train" else ()))
    return {
        key: masked(key, value if isinstance(value, _PLAIN) else str(value))
        for key, value in config.flatten().items()
        if key in own or not (is_free(key) or key.endswith(_PRIVATE))
    }


MOVED = {
    "aflow_tune.engines.trinity.rollout.anchors.AnchorRate": (
        "aflow_tune.engines.trinity.rollout.operators.AnchorRate"
    ),
    "aflow_tune.engines.trinity.training.sampling.WholeStepSampleStrategy": (
        "aflow_tune.engines.trinity.rollout.operators.WholeStepSampleStrategy"
    ),
}
"""Classes of ours by the paths that older runs know them by, and where they are now."""


def present(value: Any) -> Any:
    """A value of an older run, with our classes under the paths that they have now."""
    if not isinstance(value, str):
        return value
    for old, new in MOVED.items():
        value = value.replace(old, new)
    return value


def is_free(key: str) -> bool:
    """Whether a setting may change between two commands of one run."""
    return key.startswith(_FREE_KEYS) or _FREE_OF_A_MODEL.match(key) is not None
