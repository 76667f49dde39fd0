"""Writes a run folder as a run would leave it: metrics, evaluation records, exports. The names of
the metrics are those that explorer and trainer log; the numbers are made up."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aflow_tune.report.metrics import append_metrics
from aflow_tune.report.records import EvalRecord, append_record

TASKSET = "held_out"


def write_evaluation(
    run_dir: Path,
    step: int,
    scores: Sequence[float | None],
    *,
    taskset: str = TASKSET,
    run: int = 0,
    finished: bool = True,
    transcript: Sequence[Mapping[str, Any]] | None = None,
    failure: str = "raised",
) -> None:
    """One run for each item with these scores (None: it failed); `finished` logs the end."""
    for item, score in enumerate(scores):
        append_record(
            run_dir / "evaluations",
            EvalRecord(
                step=step,
                taskset=taskset,
                item=item,
                run=run,
                score=score,
                reward=None if score is None else 0.1 + 0.9 * score,
                failure=failure if score is None else None,
                metrics={} if score is None else {"correct": score},
                transcript=[dict(call) for call in transcript or ()],
                seconds=0.5,
            ),
        )
    if finished:
        metrics = {
            f"eval/{taskset}/finished_task_count": float(len(scores)),
            f"eval/{taskset}/correct/mean@1": sum(s or 0.0 for s in scores) / len(scores),
            "time/eval": 3.0,
        }
        append_metrics(run_dir, "explorer", step, metrics)


def write_step(run_dir: Path, step: int, reward: float = 0.5, **failures: float) -> None:
    """What explorer and trainer log for one step; `failures` are counts by kind."""
    explorer = {
        "rollout/reward/mean": reward,
        "rollout/correct/mean": reward,
        "rollout/calls/mean": 2.0,
        "rollout/response_tokens/mean": 20.0,
        "rollout/finished_task_count": 8.0,
        "experience_pipeline/experience_count": 128.0,
        "experience_pipeline/group/frac_mixed": 0.75,
        "experience_pipeline/group/frac_all_best": 0.125,
        "experience_pipeline/group/frac_all_worst": 0.125,
        "explorer/time/wait_explore_step": 4.0,
        **{f"rollout/failure/{kind}/sum": count for kind, count in failures.items()},
    }
    append_metrics(run_dir, "explorer", step, explorer)
    trainer = {
        "actor/final_loss": 0.02 / step,
        "actor/ppo_kl": 0.001 * step,
        "actor/entropy_loss": 1.5 / step,
        "actor/grad_norm": 0.3,
        "actor/lr": 5e-4,
        "response_length/mean": 10.0,
        "response_length/min": 8.0,
        "response_length/max": 12.0,
        "perf/total_num_tokens": 14000.0,
        "time/train_step": 2.0,
        "time/sync_weight": 0.1,
    }
    append_metrics(run_dir, "trainer", step, trainer)


def call(response: str, asked: Any = "8 + 9", caller: str = "first_sum") -> dict[str, Any]:
    """One call of a transcript."""
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": asked}]
    return {"caller": caller, "messages": messages, "response": response, "tokens": 9}


def write_fake_run(
    run_dir: Path,
    *,
    steps: int = 6,
    items: int = 60,
    evaluate_at: Sequence[int] = (0, 3, 6),
    before: float = 0.2,
    after: float = 0.8,
    seed: int = 0,
) -> Path:
    """A whole run that went from a share of `before` right answers to one of `after`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for step in range(steps + 1):
        share = before + (after - before) * (step / steps if steps else 0.0)
        if step:
            write_step(run_dir, step, share, raised=float(step == 2))
        if step in evaluate_at:
            scores = [float(draw.random() < share) for _ in range(items)]
            said = call(f"<answer>{step}</answer>")
            write_evaluation(run_dir, step, scores, transcript=[said])
    for name in ("export/merged", "export/adapter", "monitor", f"global_step_{steps}"):
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    return run_dir
