"""What the adapter is told about a run, by training and by evaluation alike.

One place, so that a workflow is run and scored in the same way wherever it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.cluster.sent_function import send

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.models.clients import RunSpend


def adapter_arguments(
    config: AflowConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    books: RunSpend,
    eval_dir: Path,
    run_dir: Path | None = None,
) -> dict[str, Any]:
    """The adapter's `workflow_args`. `eval_dir` gets the records of evaluations, `run_dir` those
    of training runs."""
    sent, sent_judge = send(workflow, judge)
    return {
        "workflow_func": sent,
        "judge_func": sent_judge,
        "run_timeout": config.rollout.run_timeout,
        "system_prompt": config.rollout.system_prompt,
        "rewards": config.rewards,
        "sandbox": config.sandbox,
        "prompts": config.prompts,
        "books": books,
        "seed": config.seed,
        "score": config.report.score,
        "transcripts": config.report.transcripts,
        "eval_dir": str(eval_dir),
        "run_dir": None if run_dir is None else str(run_dir),
    }
