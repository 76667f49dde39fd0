"""Warnings about a policy that writes workflows: what its numbers may hide.

As in `audit.py`: each check is a function of records, warns only where chance is an unlikely
reason, and says what it counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from aflow_tune.report.audit import Finding
from aflow_tune.report.evaluation import Evaluation
from aflow_tune.report.statistics import paired_difference, rise, wilson_interval
from aflow_tune.report.writer_numbers import steps_told, task_interval, task_means
from aflow_tune.report.writer_records import WriterRecords, WriterRun
from aflow_tune.writer.types import Level

DOMINANT_STRUCTURE = 0.9
"""One structure is nearly all if it certainly (Wilson, 95%) has more than this share."""
DOMINANT_GRAPHS = 20
"""Fewer valid graphs are not judged."""
FAILED_DEFAULTS = 0.2
"""Share of runs of the default workflow without an answer that speaks of a failing executor."""
FAILED_CALLS = 0.1
"""The same of the uses of operators whose model did not answer."""
UNREWARDED = 0.1
"""The same of the runs that wrote something and have no reward."""
FEW = 10
"""Fewer runs, runs of the default workflow, or uses of operators, are not judged."""

WRITER_CHECKS = (
    "valid graphs becoming fewer",
    "fallbacks that earn what clean runs earn",
    "one structure for everything",
    "an executor that fails",
)
"""What is looked for, in words."""

_ANSWERED = "answered"
_NO_MODEL = ("model_failed", "sandbox_unavailable")


def audit_writer(
    records: WriterRecords, evaluations: Mapping[str, Mapping[int, Evaluation]]
) -> list[Finding]:
    """All warnings about the writer's records. `evaluations` tell what their operators did."""
    last = [
        steps[max(records.held_out[name])]
        for name, steps in evaluations.items()
        if name in records.held_out
    ]
    found = [
        fewer_valid_in_training(records),
        fewer_valid_held_out(records),
        earning_fallbacks(records.of_steps(records.training), "training"),
        *(
            earning_fallbacks([run for runs in steps.values() for run in runs], name)
            for name, steps in records.held_out.items()
        ),
        one_structure(records.latest),
        unrewarded_runs(records.latest),
        failing_defaults(records.latest),
        failing_calls(
            use for evaluation in last for r in evaluation.records for use in r.operators
        ),
    ]
    return [finding for finding in found if finding is not None]


def fewer_valid_in_training(records: WriterRecords) -> Finding | None:
    """The second half of training has fewer valid graphs than the first."""
    shares = [
        interval.mean
        for runs in records.training.values()
        if (interval := task_interval(runs, _valid)) is not None
    ]
    change = rise(shares)
    if change is None or change.high is None or change.high >= 0:
        return None
    return Finding(
        WRITER_CHECKS[0],
        f"The share of valid graphs fell by {-change.mean:.0%} from the first to the second half "
        f"of {len(shares)} training steps.",
        "The refusals by kind say what the policy began to do wrong. A lower learning rate or a "
        "stronger KL term keeps it nearer to what it could do.",
    )


def fewer_valid_held_out(records: WriterRecords) -> Finding | None:
    """The last evaluations have fewer valid graphs than the first, on the same tasks."""
    first, last = (task_means(runs, _valid) for runs in (records.before, records.after))
    tasks = sorted(first.keys() & last.keys())
    if not tasks:
        return None
    change = paired_difference([first[task] for task in tasks], [last[task] for task in tasks])
    if change.high is None or change.high >= 0:
        return None
    return Finding(
        WRITER_CHECKS[0],
        f"On {len(tasks)} held-out tasks the share of valid graphs fell by {-change.mean:.0%} from "
        f"{steps_told(records.before)} to {steps_told(records.after)}.",
        "Look at the refusals of the last evaluation, and use earlier weights.",
    )


def earning_fallbacks(runs: Sequence[WriterRun], where: str) -> Finding | None:
    """A run whose answer came from a fallback has a reward that a clean run also has.

    No matter of chance: the reward of this package keeps the two apart.
    """
    rewarded = [run for run in runs if run.reward is not None and run.level is not None]
    clean = [run.reward for run in rewarded if run.clean and run.reward is not None]
    if not clean:
        return None
    lowest = min(clean)
    earning = [run for run in rewarded if not run.clean and (run.reward or 0.0) >= lowest]
    if not earning:
        return None
    highest = max(run.reward or 0.0 for run in earning)
    return Finding(
        WRITER_CHECKS[1],
        f"In {where} {len(earning)} runs whose answer came from a fallback have a reward of "
        f"up to {highest:.3g}, while a clean run has one of {lowest:.3g}.",
        "A policy can then gain by writing rubbish: let no fallback earn what a clean run earns.",
    )


def one_structure(runs: Sequence[WriterRun]) -> Finding | None:
    """Nearly all valid graphs have the same structure."""
    keys = Counter(run.structure for run in runs if run.valid and run.structure)
    if keys.total() < DOMINANT_GRAPHS:
        return None
    number = keys.most_common(1)[0][1]
    low, _ = wilson_interval(number, keys.total())
    if low <= DOMINANT_STRUCTURE:
        return None
    types = {run.problem_type for run in runs if run.valid and run.structure}
    kinds = f" on {len(types)} problem types" if len(types) > 1 else ""
    return Finding(
        WRITER_CHECKS[2],
        f"At {steps_told(runs)} {number} of {keys.total()} valid graphs{kinds} have the same "
        "structure.",
        "One template for every task is no written workflow: compare with the fixed default "
        "workflow, vary the examples of the prompt or of the warm start, or sample hotter.",
    )


def unrewarded_runs(runs: Sequence[WriterRun]) -> Finding | None:
    """Runs have no reward though the policy wrote something: what came behind it failed."""
    failed = sum(run.reward is None for run in runs)
    if len(runs) < FEW or wilson_interval(failed, len(runs))[0] <= UNREWARDED:
        return None
    return Finding(
        WRITER_CHECKS[3],
        f"At {steps_told(runs)} {failed} of {len(runs)} runs have no reward though the policy "
        "answered: the executor did not, or the answer could not be scored.",
        "The reasons stand in the evaluation records and in the run's log; what is left of the "
        "tasks is no fair sample.",
    )


def failing_defaults(runs: Sequence[WriterRun]) -> Finding | None:
    """The default workflow, which is ours and tested, ends without an answer."""
    defaults = [
        run
        for run in runs
        if run.level == Level.DEFAULT_WORKFLOW and run.ending and run.reward is not None
    ]
    failed = [run for run in defaults if run.ending != _ANSWERED]
    if len(defaults) < FEW or wilson_interval(len(failed), len(defaults))[0] <= FAILED_DEFAULTS:
        return None
    ending, _ = Counter(run.ending for run in failed).most_common(1)[0]
    return Finding(
        WRITER_CHECKS[3],
        f"At {steps_told(runs)} {len(failed)} of {len(defaults)} runs of the default workflow had "
        f"no answer (most often: {ending}).",
        "Its graph is tested: look at the executor's server, key and limits, and at the sandbox.",
    )


def failing_calls(uses: Iterable[Mapping[str, object]]) -> Finding | None:
    """Operators got no answer of their model, or no sandbox for their program."""
    outcomes = Counter(str(use.get("outcome")) for use in uses)
    failed = sum(outcomes[outcome] for outcome in _NO_MODEL)
    low = wilson_interval(failed, outcomes.total())[0] if outcomes.total() >= FEW else 0.0
    if low <= FAILED_CALLS:
        return None
    told = ", ".join(f"{outcomes[kind]} {kind}" for kind in _NO_MODEL if outcomes[kind])
    return Finding(
        WRITER_CHECKS[3],
        f"In the last evaluations {failed} of {outcomes.total()} uses of operators failed for no "
        f"fault of their graph ({told}).",
        "Their scores speak of the executor and not of the policy: look at its server, key and "
        "limits, and evaluate again.",
    )


def _valid(run: WriterRun) -> float:
    return float(run.valid)
