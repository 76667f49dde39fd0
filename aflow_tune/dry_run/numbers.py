"""What was played, read from its records and metrics, as text for a terminal and as plain data.

`PlayedRun` is a line of the file that the adapter writes; `DryRunResult` holds them with the
step's metrics and with `Plan`, what the configuration asks for. Rewards are those of scripted
answers: they say what the reward does with such answers, never what a model would earn.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.files import append_line, as_line
from aflow_tune.report.quantities import GRADIENT_NORM, GROUP_HEALTH, LOSS

PLAYED_FILE = "played.jsonl"
BINS = 10
_COUNT = "experience_pipeline/experience_count"
_LONE = "experience_pipeline/group/lone_runs"
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_BAR = 40
_GROUPS = ("mixed", "all best", "all worst", "failed", "lone")
_STEP = {
    "loss": LOSS,
    "gradient_norm": GRADIENT_NORM,
    "advantage_min": ("critic/advantages/min",),
    "advantage_mean": ("critic/advantages/mean",),
    "advantage_max": ("critic/advantages/max",),
    "train_tokens": ("perf/train_tokens",),
    "skipped": ("actor/skipped_steps",),
}
"""What the trainer logs of the optimiser step, by short name."""


@dataclass(frozen=True)
class PlayedRun:
    """One run of the workflow.

    `task` counts the tasks of the step, `item` is the row in its task set, `run` counts the
    group's runs, `kind` and `source` are what was said and where it is from (`script.py`).
    `reward` is None where the run failed; `failure` then says how and `detail` why. `calls` are
    those that are trained: tokens of `prompt` and `response`, and whether it was `truncated`.
    """

    task: int
    item: int
    run: int
    kind: str
    source: str
    reward: float | None
    failure: str | None = None
    detail: str = ""
    calls: tuple[dict[str, int], ...] = ()


def append_run(folder: Path, run: PlayedRun) -> None:
    append_line(folder / PLAYED_FILE, as_line(asdict(run)))


def read_runs(folder: Path) -> list[PlayedRun]:
    """All whole lines, by task and run. A run that was tried again counts once, as it ended."""
    path = folder / PLAYED_FILE
    found: dict[tuple[int, int], PlayedRun] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the empty end, or what a killed worker left torn
        run = PlayedRun(**entry)
        found[run.task, run.run] = run
    return [found[key] for key in sorted(found)]


@dataclass(frozen=True)
class Plan:
    """What the configuration asks for, beside what of it was played.

    `tasks` are those of a step, `played` how many of them the dry run took. `counts_calls`: the
    trainer waits for `train_batch_size` calls (Trinity's default sample strategy); else it
    trains on whole steps. `explorer_rounds` steps are explored before the explorer waits for
    the weights of trainer step `trainer_steps`; None where it does not wait.
    """

    model: str
    engine: str
    algorithm: str
    advantage: str
    loss: str
    tasks: int
    played: int
    repeats: int
    steps: int | None
    train_batch_size: int
    counts_calls: bool
    explorer_rounds: int | None
    trainer_steps: int
    max_prompt: int | None
    max_response: int | None
    max_length: int | None
    own_tokens: bool
    stage: str = ""


@dataclass
class DryRunResult:
    """A dry run, finished or not. `failure` is None if a step was trained."""

    plan: Plan
    runs: list[PlayedRun]
    metrics: dict[str, float]
    seconds: float = 0.0
    real: list[str] = field(default_factory=list)
    stood_in: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def trained(self) -> bool:
        """Whether the optimiser step was made."""
        return self.failure is None and any(name in self.metrics for name in GRADIENT_NORM)

    @property
    def good(self) -> bool:
        """Whether a batch fills and a step was made of it: exit code 0."""
        return self.trained and self.fill.fills

    @property
    def fill(self) -> Fill:
        """How the calls of a step fill the trainer's batch."""
        return fill_of(self.plan, self.metrics.get(_COUNT, 0.0))

    @property
    def spread(self) -> Distribution | None:
        """The rewards of the runs that succeeded."""
        return distribution([run.reward for run in self.runs if run.reward is not None])

    @property
    def first_failure(self) -> PlayedRun | None:
        """The first run that failed, by task and run."""
        return next((run for run in self.runs if run.failure is not None), None)


@dataclass(frozen=True)
class Fill:
    """`experiences` of a whole step against `wanted` of a train step; None: all are taken."""

    experiences: float
    wanted: int | None
    fills: bool
    words: str


def fill_of(plan: Plan, played: float) -> Fill:
    """What becomes of the experiences that the played tasks left for the trainer."""
    whole, wanted = played * plan.tasks / plan.played, plan.train_batch_size
    if not played:
        return Fill(0.0, None, False, "nothing was left to train on")
    if not plan.counts_calls:
        words = f"each step trains on all {whole:g} experiences of its {plan.tasks} tasks"
        return Fill(whole, None, True, words)
    share = f"a step leaves {whole:g} experiences, train_batch_size is {wanted}"
    there, needed = (plan.explorer_rounds or 0) * whole, plan.trainer_steps * wanted
    if plan.explorer_rounds is not None and there < needed:
        words = (
            f"{share}: it never fills, and both sides wait (the explorer stops for new weights "
            f"after {there:g} experiences, the trainer needs {needed}); set "
            f"buffer.train_batch_size to at most {int(there // plan.trainer_steps)}"
        )
        return Fill(whole, wanted, False, words)
    words = f"{whole / wanted:.3g} train steps a step of the explorer"
    if whole < wanted:
        words = f"it takes {wanted / whole:.3g} steps to fill"
    return Fill(whole, wanted, True, f"{share}: {words}")


@dataclass(frozen=True)
class Distribution:
    """Of the rewards of the runs that succeeded."""

    count: int
    mean: float
    quartiles: tuple[float, float, float, float, float]
    """Least, first quartile, median, third quartile, greatest (inclusive method)."""
    histogram: tuple[tuple[float, float, int], ...]
    """(from, to, runs) of each bin; the last one includes its end. Up to ten different values have
    a bin each, of width 0."""


def distribution(rewards: Sequence[float]) -> Distribution | None:
    """None without rewards."""
    if not rewards:
        return None
    least, greatest, counts = min(rewards), max(rewards), Counter(rewards)
    inner = [least] * 3
    if len(rewards) > 1:
        inner = statistics.quantiles(rewards, n=4, method="inclusive")
    histogram = [(value, value, counts[value]) for value in sorted(counts)]
    if len(counts) > BINS:
        width = (greatest - least) / BINS
        bins = Counter(min(BINS - 1, int((reward - least) / width)) for reward in rewards)
        histogram = [(least + n * width, least + (n + 1) * width, bins[n]) for n in range(BINS)]
    quartiles = (least, inner[0], inner[1], inner[2], greatest)
    return Distribution(len(rewards), statistics.fmean(rewards), quartiles, tuple(histogram))


def groups(result: DryRunResult) -> dict[str, int]:
    """Groups of runs by their rewards: `mixed`, `all best`, `all worst`, `failed` (no run of it
    succeeded) and `lone` (one did, and was taken out). The first three are the run filter's own."""
    tasks = {run.task for run in result.runs}
    alive = len({run.task for run in result.runs if run.failure is None})
    lone = round(result.metrics.get(_LONE, 0.0))
    found = {"failed": len(tasks) - alive, "lone": lone}
    for name, key in GROUP_HEALTH.items():
        if key in result.metrics:
            found[name] = round(result.metrics[key] * (alive - lone))
    return found


def by_kind(result: DryRunResult) -> dict[str, dict[str, Any]]:
    """Runs, failed ones and mean reward of each kind of answers, in the order of first use."""
    found: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(run.kind for run in result.runs):
        runs = [run for run in result.runs if run.kind == kind]
        rewards = [run.reward for run in runs if run.reward is not None]
        found[kind] = {
            "runs": len(runs),
            "failed": sum(run.failure is not None for run in runs),
            "reward": statistics.fmean(rewards) if rewards else None,
        }
    return found


def _tokens(result: DryRunResult) -> dict[str, float]:
    """Tokens of the trained calls of a whole step, and the longest of the played ones."""
    calls = [call for run in result.runs if run.failure is None for call in run.calls]
    if not calls:
        return {}
    scale = result.plan.tasks / result.plan.played
    return {
        "calls": len(calls) * scale,
        "prompt": sum(call["prompt"] for call in calls) * scale,
        "response": sum(call["response"] for call in calls) * scale,
        "longest_prompt": max(call["prompt"] for call in calls),
        "longest_response": max(call["response"] for call in calls),
        "longest": max(call["prompt"] + call["response"] for call in calls),
        "truncated": sum(call["truncated"] for call in calls) * scale,
    }


def _step(result: DryRunResult) -> dict[str, float]:
    metrics = result.metrics
    found = {name: [metrics[key] for key in keys if key in metrics] for name, keys in _STEP.items()}
    return {name: values[0] for name, values in found.items() if values}


def place_of(text: str) -> str | None:
    """`file:line (function)` of the innermost frame of a traceback; None where there is none."""
    frames = _PLACE.findall(text)
    return "{}:{} ({})".format(*frames[-1]) if frames else None


def as_json(result: DryRunResult) -> dict[str, Any]:
    """Everything as plain data."""
    spread, first = result.spread, result.first_failure
    return {
        "ok": result.good,
        "failure": None if result.good else result.failure or verdict(result),
        "seconds": result.seconds,
        "plan": asdict(result.plan),
        "answers": {
            "sources": dict(Counter(run.source for run in result.runs)),
            "by_kind": by_kind(result),
        },
        "rewards": spread and asdict(spread),
        "groups": groups(result),
        "batch": asdict(result.fill),
        "tokens": _tokens(result),
        "step": _step(result),
        "failed_runs": dict(Counter(run.failure for run in result.runs if run.failure)),
        "first_failure": first and asdict(first) | {"place": place_of(first.detail)},
        "real": result.real,
        "stood_in": result.stood_in,
        "warnings": result.warnings,
    }


# -- as text -------------------------------------------------------------------------------


def render(result: DryRunResult) -> str:
    """Everything that is known, the verdict last."""
    plan, held, made = result.plan, _tokens(result), _step(result)
    stage = f", stage {plan.stage}" if plan.stage else ""
    sources = Counter(run.source for run in result.runs)
    said = "; ".join(f"{runs} runs: {source}" for source, runs in sources.items())
    lines = [
        f"Dry run of one step ({plan.algorithm}, engine {plan.engine}{stage}): "
        f"{plan.played} of {plan.tasks} tasks x {plan.repeats} runs; sums are scaled to the step.",
        f"The answers are scripted: nothing here is what {plan.model} would do.",
        f"answers: {said or 'none was asked for'}",
        "",
        *_reward_lines(result),
    ]
    found = groups(result)
    listed = ", ".join(f"{found[name]} {name}" for name in _GROUPS if name in found)
    steps = "not known: the rows are not on this machine" if plan.steps is None else plan.steps
    lines += [
        f"groups of {plan.repeats} runs: {listed}",
        f"batch: {result.fill.words}",
        f"steps of the run: {steps}",
        "",
    ]
    if held:
        limits = (
            f"{name} {held[key]:.0f}" + ("" if limit is None else f" of {limit}")
            for name, key, limit in (
                ("longest prompt", "longest_prompt", plan.max_prompt),
                ("longest response", "longest_response", plan.max_response),
                ("longest together", "longest", plan.max_length),
            )
        )
        lines += [
            f"a step holds {plan.tasks} tasks, {plan.tasks * plan.repeats} runs, "
            f"{held['calls']:.0f} calls, {held['prompt']:.0f} prompt and "
            f"{held['response']:.0f} response tokens (responses are as long as the script's)",
            f"  {', '.join(limits)}; {held['truncated']:.0f} responses cut off",
        ]
        if not plan.own_tokens:
            note = "counted by another tokenizer than the model's; the limits were widened for it"
            lines.append(f"  {note}")
    if "gradient_norm" in made:
        values = ", ".join(
            f"{name.replace('_', ' ')} {value:.4g}"
            for name, value in made.items()
            if name not in ("train_tokens", "skipped")
        )
        lines += [f"the optimiser step on the tiny model: {values}"]
    if (first := result.first_failure) is not None:
        kinds = Counter(run.failure for run in result.runs if run.failure)
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        place = place_of(first.detail)
        lines += [
            "",
            f"failed runs: {listed}. The first (row {first.item}, run {first.run}, "
            f"answers {first.kind}){f' at {place}' if place else ''}:",
            *(f"  {line}" for line in first.detail.splitlines()),
        ]
    lists = {"real": result.real, "stood in for": result.stood_in, "warnings": result.warnings}
    for title, items in lists.items():
        if items:
            lines += ["", f"{title}:", *(f"  - {item}" for item in items)]
    return "\n".join([*lines, "", verdict(result)])


def verdict(result: DryRunResult) -> str:
    """One line, or the failure with its traceback."""
    seconds = f"({result.seconds:.0f} s)"
    if result.good:
        return f"dry run: a batch was filled and one optimiser step was made {seconds}"
    if result.failure is not None:
        first, reason = result.first_failure, result.failure
        if first is not None and first.detail and first.detail in reason:
            reason = reason.partition(first.detail)[0] + "  (above)"  # it is not shown twice
    elif not result.trained:
        reason = "no optimiser step was made"
    else:
        reason = f"the batch does not fill: {result.fill.words}"
    return f"dry run: FAILED {seconds}: {reason}"


def _reward_lines(result: DryRunResult) -> Iterator[str]:
    if (spread := result.spread) is None:
        return
    least, first, median, third, greatest = spread.quartiles
    yield (
        f"rewards of {spread.count} scripted runs: mean {spread.mean:.4g}, least {least:.4g}, "
        f"quartiles {first:.4g} / {median:.4g} / {third:.4g}, greatest {greatest:.4g}"
    )
    most = max(count for _, _, count in spread.histogram)
    for start, end, count in spread.histogram:
        label = f"{start:.4g}" if start == end else f"{start:.4g} to {end:.4g}"
        yield f"  {label:>20} {count:6d} {'#' * round(_BAR * count / most)}".rstrip()
    yield "  by what was said:"
    for kind, found in by_kind(result).items():
        mean = "none" if found["reward"] is None else f"{found['reward']:.4g}"
        yield f"    {kind:<6} {found['runs']:6d} runs, mean reward {mean}, {found['failed']} failed"
    yield ""
