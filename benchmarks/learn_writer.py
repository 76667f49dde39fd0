"""What a small policy learns about writing workflows: one command per seed, with intervals.

    python benchmarks/learn_writer.py                   seeds 0, 1, 2
    python benchmarks/learn_writer.py --seeds 0 --json writer.json
    python benchmarks/learn_writer.py --report RUN_DIR  the numbers of an earlier chain

Three paired comparisons over the held-out problems: GRPO against its own SFT start, and each of
them against the fixed default workflow of the problem's type, with the same executor and rewards.
The policy's numbers come from the records of the run itself. Seeds that do not improve are printed
like the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from learn import run_command

from aflow_tune.report.evaluation import Evaluation, load_evaluations, pair
from aflow_tune.report.records import read_rollouts

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "writer_local.yaml"
HELD_OUT = ROOT / "workflows" / "data" / "two_questions" / "held_out.jsonl"
STAGE = "grpo"
FEWEST_STRUCTURES = 4
AT_ONCE = 16
"""Default workflows that run concurrently; more would only wait for the executor."""
MEASURES = ("reward", "correct_clean")


@dataclass
class Change:
    """A paired difference over the held-out items, with its 95% interval."""

    before: float
    after: float
    difference: float
    low: float | None
    high: float | None
    items: int


@dataclass
class Outcome:
    """One seed. Shares are of the held-out problems. `sft` is the start of GRPO."""

    seed: int
    valid: dict[str, float]
    correct: dict[str, float]
    rewards: dict[str, float]
    structures: dict[str, int]
    """Distinct structures of valid graphs, on the held-out problems and in training."""
    fallbacks: dict[str, dict[int, int]]
    changes: dict[str, Change] = field(default_factory=dict)
    """By measure and comparison, such as 'reward: sft to grpo'."""
    training: list[dict[str, float]] = field(default_factory=list)
    """Share of valid graphs and mean reward of each step."""
    total_seconds: float | None = None
    peak_gigabytes: float | None = None
    run_dir: str = ""


def outcome_of(run_dir: Path, seed: int, default: dict[str, dict[int, float]]) -> Outcome:
    """The outcome of a chain, from the records of its GRPO stage. `default`: `default_scores`."""
    stage = run_dir / STAGE
    (evaluations,) = load_evaluations(stage).values()
    ends = {"sft": evaluations[min(evaluations)], "grpo": evaluations[max(evaluations)]}
    by_measure: dict[str, dict[str, dict[int, float]]] = {
        measure: {name: end.metric(measure) for name, end in ends.items()}
        | {"default": default[measure]}
        for measure in MEASURES
    }
    steps: dict[int, list[dict[str, Any]]] = {}
    for rollout in read_rollouts(stage):
        steps.setdefault(rollout.step, []).append(
            {"reward": rollout.reward, **rollout.kept["writer"]}
        )
    rollouts = [kept for step in steps.values() for kept in step]
    outcome = Outcome(
        seed=seed,
        valid={name: _mean(end.metric("writer/valid")) for name, end in ends.items()},
        correct={name: _mean(items) for name, items in by_measure["correct_clean"].items()},
        rewards={name: _mean(items) for name, items in by_measure["reward"].items()},
        structures={name: len(_structures(_kept(end))) for name, end in ends.items()}
        | {"training": len(_structures(rollouts))},
        fallbacks={
            name: dict(sorted(Counter(kept["level"] for kept in _kept(end)).items()))
            for name, end in ends.items()
        },
        training=[
            {
                "valid": round(sum(kept["valid"] for kept in runs) / len(runs), 3),
                "reward": round(
                    _mean({i: k["reward"] for i, k in enumerate(runs) if k["reward"] is not None}),
                    3,
                ),
            }
            for _, runs in sorted(steps.items())
        ],
        run_dir=str(run_dir),
    )
    for measure, scores in by_measure.items():
        for before, after in (("sft", "grpo"), ("default", "sft"), ("default", "grpo")):
            paired = pair(scores[before], scores[after])
            assert paired is not None
            change = paired.difference
            outcome.changes[f"{measure}: {before} to {after}"] = Change(
                paired.mean_before,
                paired.mean_after,
                change.mean,
                change.low,
                change.high,
                change.count,
            )
    return outcome


async def default_scores(config_file: Path) -> dict[str, dict[int, float]]:
    """Scores of the fixed default workflows on the held-out rows, by measure and item.

    Runs the recipe's own workflow function with a policy that answers each problem with the
    default workflow of its type, so check, executor, scoring and reward are the same.
    """
    from aflow_tune.config.load import load_config
    from aflow_tune.config.validate import resolve_functions
    from aflow_tune.context import RolloutContext
    from aflow_tune.evaluation.evaluating import LocalModels
    from aflow_tune.evaluation.trained import make_ready
    from aflow_tune.models import ScriptedModel
    from aflow_tune.operators.prompts import use_prompts
    from aflow_tune.writer.form import as_text
    from aflow_tune.writer.templates import default_graph

    config = load_config(config_file)
    workflow, _ = resolve_functions(config)
    make_ready(config)
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]
    found: dict[str, dict[int, float]] = {measure: {} for measure in MEASURES}
    async with LocalModels() as models, models.auxiliary_chat_models(config) as auxiliary:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(item: int, row: dict[str, Any]) -> None:
            graph = default_graph(workflow.type_of(row), workflow.operators)
            text = as_text(graph.instructions, graph.sources["graph.py"])
            context = RolloutContext(rewards=config.rewards)
            with context.activate(), use_prompts(config.prompts):
                async with slots:
                    reward = await workflow(row, ScriptedModel([text]), auxiliary_models=auxiliary)
            found["reward"][item] = reward
            found["correct_clean"][item] = context.metrics["correct_clean"]

        await asyncio.gather(*(one(item, row) for item, row in enumerate(rows)))
    return found


def _kept(evaluation: Evaluation) -> list[dict[str, Any]]:
    return [record.kept["writer"] for record in evaluation.records if "writer" in record.kept]


def _structures(kept: list[dict[str, Any]]) -> set[str]:
    return {one["structure"] for one in kept if one["valid"] and one["structure"]}


def _mean(items: dict[int, float]) -> float:
    return sum(items.values()) / len(items)


def print_outcome(outcome: Outcome) -> None:
    """Print one seed."""
    took = (
        ""
        if outcome.total_seconds is None
        else (f", {outcome.total_seconds:.0f} s, {outcome.peak_gigabytes:.1f} GB")
    )
    print(f"seed {outcome.seed}{took}: {outcome.run_dir}")
    for name in ("default", "sft", "grpo"):
        valid = f"valid graphs {outcome.valid[name]:.3f}, " if name in outcome.valid else ""
        counted = (
            f", {outcome.structures[name]} structures, by level {outcome.fallbacks[name]}"
            if name in outcome.structures
            else ""
        )
        print(
            f"  {name:8} {valid}right {outcome.correct[name]:.3f}, "
            f"reward {outcome.rewards[name]:+.2f}{counted}"
        )
    for name, change in outcome.changes.items():
        interval = f"{change.low:+.3f} to {change.high:+.3f}"
        print(
            f"  {name:32} {change.difference:+.3f}, 95% interval {interval}, {change.items} items"
        )
    print(f"  structures in training: {outcome.structures['training']}")
    print(f"  valid by step: {[step['valid'] for step in outcome.training]}", flush=True)


def main() -> int:
    """Run the seeds; 0 if GRPO is right more often than its SFT start in two of three, with an
    interval above zero, and keeps 4 structures or more in all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--root", type=Path, default=Path("runs/learn_writer"), help="run folders")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--report", type=Path, metavar="RUN_DIR", help="of this chain only")
    options = parser.parse_args()
    default = asyncio.run(default_scores(CONFIG))
    if options.report:
        print_outcome(outcome_of(options.report, 0, default))
        return 0
    outcomes = []
    for seed in options.seeds:
        started = time.time()
        root, peak = run_command(CONFIG, seed, options.root.resolve(), [])
        (run_dir,) = (path.parent for path in root.glob(f"*/*/{STAGE}"))
        outcome = outcome_of(run_dir, seed, default)
        outcome.total_seconds, outcome.peak_gigabytes = time.time() - started, peak / 1e9
        outcomes.append(outcome)
        print_outcome(outcome)
        if options.json:
            options.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    gained = sum((o.changes["correct_clean: sft to grpo"].low or 0) > 0 for o in outcomes)
    varied = all(o.structures["grpo"] >= FEWEST_STRUCTURES for o in outcomes)
    print(
        f"{gained} of {len(outcomes)} seeds: right more often after GRPO than after SFT, with an "
        f"interval above zero\nat least {FEWEST_STRUCTURES} structures in all: "
        f"{'yes' if varied else 'no'}"
    )
    return 0 if gained * 3 >= len(outcomes) * 2 and varied else 1


if __name__ == "__main__":
    sys.exit(main())
