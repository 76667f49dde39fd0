"""A dry run as text for a terminal and as plain data for `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from aflow_tune.dry_run.numbers import (
    DryRunResult,
    by_kind,
    distribution,
    groups,
    place_of,
    sources,
    step,
    tokens,
)

_BAR = 40
_GROUPS = ("mixed", "all best", "all worst", "failed", "lone")


def render(result: DryRunResult) -> str:
    """Everything that is known, the verdict last."""
    blocks = [
        _head(result),
        *_rewards(result),
        *_groups_and_batch(result),
        *_step(result),
        *_failures(result),
        _list("real", result.real),
        _list("stood in for", result.stood_in),
        *([_list("warnings", result.warnings)] if result.warnings else []),
        verdict(result),
    ]
    return "\n\n".join(blocks)


def verdict(result: DryRunResult) -> str:
    """One line, or the failure with its traceback."""
    seconds = f"({result.seconds:.0f} s)"
    if result.good:
        return f"dry run: a batch was filled and one optimiser step was made {seconds}"
    if result.failure is not None:
        first, reason = result.first_failure, result.failure
        if first is not None and first.detail and first.detail in reason:
            reason = reason.partition(first.detail)[0] + "  (above)"  # it is not shown twice
        return f"dry run: FAILED {seconds}: {reason}"
    if not result.trained:
        return f"dry run: FAILED {seconds}: no optimiser step was made"
    return f"dry run: FAILED {seconds}: the batch does not fill: {result.fill.words}"


def as_json(result: DryRunResult) -> dict[str, Any]:
    """Everything as plain data."""
    spread = distribution([run.reward for run in result.runs if run.reward is not None])
    first = result.first_failure
    return {
        "ok": result.good,
        "failure": None if result.good else result.failure or verdict(result),
        "seconds": result.seconds,
        "plan": asdict(result.plan),
        "answers": {"sources": sources(result), "by_kind": by_kind(result)},
        "rewards": None if spread is None else asdict(spread),
        "groups": groups(result),
        "batch": asdict(result.fill),
        "tokens": tokens(result),
        "step": step(result),
        "failed_runs": dict(Counter(run.failure for run in result.runs if run.failure)),
        "first_failure": None
        if first is None
        else asdict(first) | {"place": place_of(first.detail)},
        "real": result.real,
        "stood_in": result.stood_in,
        "warnings": result.warnings,
    }


def _head(result: DryRunResult) -> str:
    plan = result.plan
    stage = f", stage {plan.stage}" if plan.stage else ""
    played = f"{plan.played} tasks x {plan.repeats} runs"
    if plan.played < plan.tasks:
        played += f" of the {plan.tasks} tasks of a step, whose sums are scaled"
    said = "; ".join(f"{runs} runs: {source}" for source, runs in sources(result).items())
    return (
        f"Dry run of one step ({plan.algorithm}, engine {plan.engine}{stage}): {played}.\n"
        f"The answers are scripted: nothing here is what {plan.model} would do.\n"
        f"answers: {said or 'none was asked for'}"
    )


def _rewards(result: DryRunResult) -> Iterator[str]:
    spread = distribution([run.reward for run in result.runs if run.reward is not None])
    if spread is None:
        return
    least, first, median, third, greatest = spread.quartiles
    lines = [
        f"rewards of {spread.count} scripted runs: mean {spread.mean:.4g}",
        f"  least {least:.4g}, quartiles {first:.4g} / {median:.4g} / {third:.4g}, "
        f"greatest {greatest:.4g}",
    ]
    most = max(count for _, _, count in spread.histogram)
    for start, end, count in spread.histogram:
        label = f"{start:.4g}" if start == end else f"{start:.4g} to {end:.4g}"
        lines.append(f"  {label:>20} {count:6d} {'#' * round(_BAR * count / most)}".rstrip())
    lines.append("  by what was said:")
    for kind, found in by_kind(result).items():
        mean = "none" if found["reward"] is None else f"{found['reward']:.4g}"
        lines.append(
            f"    {kind:<6} {found['runs']:6d} runs, mean reward {mean}, {found['failed']} failed"
        )
    yield "\n".join(lines)


def _groups_and_batch(result: DryRunResult) -> Iterator[str]:
    found, plan = groups(result), result.plan
    listed = ", ".join(f"{found[name]} {name}" for name in _GROUPS if name in found)
    lines = [f"groups of {plan.repeats} runs: {listed}", f"batch: {result.fill.words}"]
    steps = "not known: the rows are not on this machine" if plan.steps is None else plan.steps
    lines.append(f"steps of the run: {steps}")
    yield "\n".join(lines)


def _step(result: DryRunResult) -> Iterator[str]:
    held, plan = tokens(result), result.plan
    lines = []
    if held:
        runs = plan.tasks * plan.repeats
        lines += [
            f"a step holds {plan.tasks} tasks, {runs} runs, {held['calls']:.0f} calls, "
            f"{held['prompt']:.0f} prompt and {held['response']:.0f} response tokens",
            f"  longest prompt {held['longest_prompt']:.0f}{_of(plan.max_prompt)}, "
            f"longest response {held['longest_response']:.0f}{_of(plan.max_response)}, "
            f"longest together {held['longest']:.0f}{_of(plan.max_length)}; "
            f"{held['truncated']:.0f} responses cut off",
            "  responses are as long as the script's answers are, prompts as long as the "
            "workflow's words with them",
        ]
        if not plan.own_tokens:
            lines.append(
                "  counted by another tokenizer than the model's; the limits were set wider for it"
            )
    made = step(result)
    if "gradient_norm" in made:
        advantages = ""
        if "advantage_min" in made:
            advantages = (
                f"advantages {made['advantage_min']:.4g} to {made['advantage_max']:.4g} "
                f"(mean {made['advantage_mean']:.4g}), "
            )
        lines.append(
            f"the optimiser step on the tiny model: {advantages}loss {made.get('loss', 0.0):.4g}, "
            f"gradient norm {made['gradient_norm']:.4g}"
        )
    if lines:
        yield "\n".join(lines)


def _failures(result: DryRunResult) -> Iterator[str]:
    first = result.first_failure
    if first is None:
        return
    kinds = Counter(run.failure for run in result.runs if run.failure)
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    place = place_of(first.detail)
    at = f" at {place}" if place else ""
    detail = "\n".join(f"  {line}" for line in first.detail.splitlines())
    yield (
        f"failed runs: {listed}. The first (row {first.item}, run {first.run}, "
        f"answers {first.kind}){at}:\n{detail}"
    )


def _list(title: str, items: list[str]) -> str:
    return "\n".join([f"{title}:", *(f"  - {item}" for item in items)])


def _of(limit: int | None) -> str:
    return "" if limit is None else f" of {limit}"
