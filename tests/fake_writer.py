"""Writes what runs of a policy that writes workflows leave: records of training and evaluation.
The graphs are real code; the numbers are made up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fake_run import TASKSET, write_step
from writer_samples import graph

from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.metrics import append_metrics
from aflow_tune.report.records import EvalRecord, Rollout, append_record, append_rollout
from aflow_tune.report.writer import WriterRecords, WriterRollout, load_writer, read_rollout

SINGLE = graph('draft = await self.solve(input=problem)\nreturn draft["response"], 0')
VOTE = graph(
    """\
drafts = []
for turn in range(3):
    draft = await self.solve(input=problem)
    drafts.append(draft["response"])
best = await self.vote(solutions=drafts, problem=problem)
return best["response"], 0""",
    "self.solve = operator.Custom(self.llm)\nself.vote = operator.ScEnsemble(self.llm)",
)
GRAPHS: dict[str, tuple[str, dict[str, int]]] = {
    "Custom": (SINGLE, {"Custom": 1}),
    "Custom[3] > ScEnsemble": (VOTE, {"Custom": 1, "ScEnsemble": 1}),
}
"""Structure to code and operators."""
REFUSED = SINGLE.replace("operator.Custom", "operator.Solver")
UNKNOWN = {
    "kind": "unknown_operator",
    "message": "there is no operator Solver; the operators are Custom, Programmer, ScEnsemble",
    "line": 4,
    "column": 22,
}
UNREADABLE = {
    "kind": "unreadable",
    "message": "neither a JSON object nor a class Workflow was found; answer with one object",
    "line": 0,
    "column": 0,
}


def record(structure: str | None = "Custom", /, **changes: Any) -> dict[str, Any]:
    """What one run keeps: a clean run of a graph; `changes` win over it."""
    code, operators = GRAPHS.get(structure or "", ("", {}))
    return {
        "problem": "What is 17 + 25?",
        "problem_type": "math",
        "text": code,
        "prompts": {"solve": "Solve step by step."},
        "code": code,
        "valid": structure is not None,
        "refusals": [],
        "level": 0,
        "structure": structure,
        "operators": operators,
        "ending": "answered",
        "reason": "",
        "answer": "42",
        "score": 1.0,
        "parts": {"correctness": 1.0, "efficiency": 0.5},
        "usd": 0.001,
        "tokens": 400,
        **changes,
    }


def refused(refusal: dict[str, Any] = UNKNOWN, /, **changes: Any) -> dict[str, Any]:
    """What a run keeps whose graph was refused and answered by the default workflow."""
    code = "" if refusal is UNREADABLE else REFUSED
    text = code or "I would first think about the sum."
    told = {"code": code, "text": text, "prompts": {}, "refusals": [refusal]}
    return record(None, **{**told, "level": 3, "score": 0.0, **changes})


def reward_of(kept: dict[str, Any]) -> float:
    """A reward that keeps clean runs and fallbacks apart, from -10 to 10."""
    if kept.get("level"):
        return -8.0 - 0.5 * kept["level"]
    return -8.0 + 18.0 * (kept.get("score") or 0.0)


def rollouts(run_dir: Path, step: int, runs: Sequence[tuple[Any, float | None]]) -> None:
    """Training runs of a step, two a task: (record, reward)."""
    for index, (kept, reward) in enumerate(runs):
        append_rollout(
            run_dir, Rollout(step, index // 2, index % 2, reward, None, {"writer": kept})
        )


def evaluated(
    run_dir: Path, step: int, runs: Sequence[Any], *, taskset: str = TASKSET, **more: Any
) -> None:
    """A finished evaluation with one run for each record."""
    for item, kept in enumerate(runs):
        score = kept.get("score") if isinstance(kept, dict) else None
        found = EvalRecord(
            step=step, taskset=taskset, item=item, run=0, score=score,
            reward=reward_of(kept) if isinstance(kept, dict) else None,
            kept={"writer": kept}, **more,
        )  # fmt: skip
        append_record(run_dir / "evaluations", found)
    append_metrics(
        run_dir,
        "explorer",
        step,
        {f"eval/{taskset}/finished_task_count": float(len(runs)), "time/eval": 1.0},
    )


def read(kept: Any, step: int = 1, item: int = 0, reward: Any = 0.5) -> WriterRollout:
    """A record as it is read."""
    run = read_rollout({"writer": kept}, step, ("set", item), reward)
    assert run is not None
    return run


def loaded(run_dir: Path) -> WriterRecords:
    """The records of a run folder."""
    records = load_writer(run_dir, load_evaluations(run_dir))
    assert records is not None
    return records


def write_writer_run(
    run_dir: Path, *, steps: int = 20, runs: int = 16, items: int = 40, seed: int = 0
) -> Path:
    """A run whose policy learns to write valid graphs, of two structures by problem type."""
    run_dir.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    names = list(GRAPHS)

    def one(share: float, item: int, step: int) -> dict[str, Any]:
        kind = ("math", "code", "qa")[item % 3]
        if draw.random() > share:
            refusal = UNREADABLE if draw.random() > share else UNKNOWN
            return refused(refusal, problem_type=kind, level=draw.choice((1, 2, 3)))
        name = names[item % 2] if draw.random() < share else draw.choice(names)
        right = float(draw.random() < 0.4 + 0.5 * share)
        return record(name, problem_type=kind, score=right, answer=str(item))

    for step in range(steps + 1):
        share = 0.15 + 0.75 * step / steps
        if step:
            write_step(run_dir, step, share)
            valid = {"rollout/writer/valid/mean": share}
            append_metrics(run_dir, "explorer", step, valid)
            written = [one(share, run // 2, step) for run in range(runs)]
            rollouts(run_dir, step, [(kept, reward_of(kept)) for kept in written])
        if step in (0, steps // 2, steps):
            evaluated(run_dir, step, [one(share, item, step) for item in range(items)])
    return run_dir
