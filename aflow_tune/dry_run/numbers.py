"""The numbers of a dry run: what was played, read from its records and its metrics.

`PlayedRun` is a line of the file that the adapter writes; `DryRunResult` holds them with the
step's metrics and with `Plan`, what the configuration asks for. Everything shown is computed
here; text and JSON are `render.py`'s. Rewards are those of scripted answers: they say what the
reward does with such answers, never what a model would earn.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.files import append_line, as_line
from aflow_tune.report.quantities import GRADIENT_NORM, GROUP_HEALTH, LOSS

PLAYED_FILE = "played.jsonl"
BINS = 10
COUNT = "experience_pipeline/experience_count"
_LONE = "experience_pipeline/group/lone_runs"
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True)
class PlayedCall:
    """One recorded call of the policy; tokens."""

    prompt: int
    response: int
    truncated: bool = False


@dataclass(frozen=True)
class PlayedRun:
    """One run of the workflow.

    `task` counts the tasks of the step, `item` is the row in its task set, `run` counts the
    group's runs, `kind` and `source` are what was said and where it is from (`script.py`).
    `reward` is None where the run failed; `failure` then says how and `detail` why. `calls` are
    those that are trained.
    """

    task: int
    item: int
    run: int
    kind: str
    source: str
    reward: float | None
    failure: str | None = None
    detail: str = ""
    calls: tuple[PlayedCall, ...] = ()


def append_run(folder: Path, run: PlayedRun) -> None:
    """Append a line to the file of `folder`.

    Raises:
        OSError: it could not be written whole.
    """
    append_line(folder / PLAYED_FILE, as_line(asdict(run)))


def read_runs(folder: Path) -> list[PlayedRun]:
    """All whole lines, by task and run. A run that was tried again counts once, as it ended."""
    path = folder / PLAYED_FILE
    if not path.exists():
        return []
    found: dict[tuple[int, int], PlayedRun] = {}
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the empty end, or what a killed worker left torn
        calls = tuple(PlayedCall(**call) for call in entry.pop("calls"))
        run = PlayedRun(**entry, calls=calls)
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
    seconds: float
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
        return fill_of(self.plan, self.metrics.get(COUNT, 0.0))

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
    whole = played * plan.tasks / plan.played
    if not played:
        return Fill(0.0, None, False, "nothing was left to train on")
    if not plan.counts_calls:
        words = f"each step trains on all {whole:g} experiences of its {plan.tasks} tasks"
        return Fill(whole, None, True, words)
    wanted = plan.train_batch_size
    share = f"a step leaves {whole:g} experiences, train_batch_size is {wanted}"
    if plan.explorer_rounds is not None:
        there, needed = plan.explorer_rounds * whole, plan.trainer_steps * wanted
        if there < needed:
            return Fill(
                whole,
                wanted,
                False,
                f"{share}: it never fills, and both sides wait (the explorer stops for new "
                f"weights after {there:g} experiences, the trainer needs {needed}); set "
                f"buffer.train_batch_size to at most {int(there // plan.trainer_steps)}",
            )
    if whole > wanted:
        per = whole / wanted
        return Fill(whole, wanted, True, f"{share}: {per:.3g} train steps a step of the explorer")
    if whole < wanted:
        return Fill(whole, wanted, True, f"{share}: it takes {wanted / whole:.3g} steps to fill")
    return Fill(whole, wanted, True, f"{share}: exactly one train step")


@dataclass(frozen=True)
class Distribution:
    """Of the rewards of the runs that succeeded."""

    count: int
    mean: float
    quartiles: tuple[float, float, float, float, float]
    """Least, first quartile, median, third quartile, greatest (inclusive method)."""
    histogram: tuple[tuple[float, float, int], ...]
    """(from, to, runs) of each bin; the last one includes its end. A single value is one bin."""


def distribution(rewards: Sequence[float]) -> Distribution | None:
    """None without rewards. Up to ten different values have a bin each, of width 0."""
    if not rewards:
        return None
    least, greatest = min(rewards), max(rewards)
    if len(rewards) > 1:
        inner = statistics.quantiles(rewards, n=4, method="inclusive")
    else:
        inner = [least] * 3
    quartiles = (least, inner[0], inner[1], inner[2], greatest)
    return Distribution(len(rewards), statistics.fmean(rewards), quartiles, _histogram(rewards))


def _histogram(rewards: Sequence[float]) -> tuple[tuple[float, float, int], ...]:
    counts = Counter(rewards)
    if len(counts) <= BINS:
        return tuple((value, value, counts[value]) for value in sorted(counts))
    least, greatest = min(rewards), max(rewards)
    width = (greatest - least) / BINS
    bins = Counter(min(BINS - 1, int((reward - least) / width)) for reward in rewards)
    return tuple(
        (least + number * width, least + (number + 1) * width, bins[number])
        for number in range(BINS)
    )


def groups(result: DryRunResult) -> dict[str, int]:
    """Groups of runs by their rewards: `mixed`, `all best`, `all worst`, `failed` (no run of it
    succeeded) and `lone` (one did, and was taken out). The first three are the run filter's own."""
    by_task: dict[int, list[PlayedRun]] = {}
    for run in result.runs:
        by_task.setdefault(run.task, []).append(run)
    alive = sum(any(run.failure is None for run in group) for group in by_task.values())
    lone = round(result.metrics.get(_LONE, 0.0))
    found = {"failed": len(by_task) - alive, "lone": lone}
    for name, key in GROUP_HEALTH.items():
        if key in result.metrics:
            found[name] = round(result.metrics[key] * (alive - lone))
    return found


def sources(result: DryRunResult) -> dict[str, int]:
    """How many runs said what: where their answers are from, in the order of first use."""
    return dict(Counter(run.source for run in result.runs))


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


def tokens(result: DryRunResult) -> dict[str, float]:
    """Tokens of the trained calls of a whole step, and the longest of the played ones."""
    calls = [call for run in result.runs if run.failure is None for call in run.calls]
    if not calls:
        return {}
    scale = result.plan.tasks / result.plan.played
    return {
        "calls": len(calls) * scale,
        "prompt": sum(call.prompt for call in calls) * scale,
        "response": sum(call.response for call in calls) * scale,
        "longest_prompt": max(call.prompt for call in calls),
        "longest_response": max(call.response for call in calls),
        "longest": max(call.prompt + call.response for call in calls),
        "truncated": sum(call.truncated for call in calls) * scale,
    }


def step(result: DryRunResult) -> dict[str, float]:
    """The optimiser step: what the trainer logged of it, under short names."""
    names = {
        "loss": LOSS,
        "gradient_norm": GRADIENT_NORM,
        "advantage_min": ("critic/advantages/min",),
        "advantage_mean": ("critic/advantages/mean",),
        "advantage_max": ("critic/advantages/max",),
        "train_tokens": ("perf/train_tokens",),
        "skipped": ("actor/skipped_steps",),
    }
    found = {}
    for name, keys in names.items():
        value = next((result.metrics[key] for key in keys if key in result.metrics), None)
        if value is not None:
            found[name] = value
    return found


def place_of(text: str) -> str | None:
    """`file:line (function)` of the innermost frame of a traceback; None where there is none."""
    frames = _PLACE.findall(text)
    if not frames:
        return None
    file, line, name = frames[-1]
    return f"{file}:{line} ({name})"
