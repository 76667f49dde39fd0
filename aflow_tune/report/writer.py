"""A policy that writes workflows: its records, what is counted of them, and what they may hide.

The writer's workflow keeps one record a rollout under `writer` (`aflow_tune.context.keep`): in
`rollouts/` for training, in the evaluation records for held-out tasks. `writer_section.py` shows
them.

A record holds what a model wrote, so nothing in it is trusted: a field of another type counts as
absent, texts are cut, a record that does not say whether its graph was valid is passed over.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from aflow_tune.report.audit import Finding
from aflow_tune.report.evaluation import Evaluations, per_solved
from aflow_tune.report.records import read_rollouts
from aflow_tune.report.statistics import (
    Interval,
    mean,
    paired_difference,
    rise,
    share_or_mean_interval,
    wilson_interval,
)
from aflow_tune.writer.types import Level

KEPT = "writer"
"""The name under which the writer's workflow keeps its record."""
ENDS = 5
"""Steps at each end of training that are compared; of a short training, half of them each."""
WRITER_CHECKS = (
    "valid graphs becoming fewer",
    "fallbacks that earn what clean rollouts earn",
    "one structure for everything",
    "an executor that fails",
)
"""What is looked for, in words."""

_MOST_CODE, _MOST_PROMPT, _MOST_TEXT, _MOST_NAME = 20_000, 4_000, 2_000, 60
_MOST_KEY, _MOST_ENTRIES = 400, 30
_NO_MODEL = ("model_failed", "sandbox_unavailable")


class RefusalTold(NamedTuple):
    """One refusal of a record; `message` begins with its place."""

    kind: str
    message: str


def _text(most: int = _MOST_TEXT) -> Callable[[Any], str]:
    return lambda value: _cut(value, most)


def _cut(value: Any, most: int) -> str:
    if not isinstance(value, str):
        return ""
    return value if len(value) <= most else f"{value[: most - 1]}…"


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    """A count: whole and not negative, of a size that can be shown."""
    number = _number(value)
    whole = number is not None and number == int(number) and 0 <= number < 1e15
    return int(value) if whole else None


def _key(value: Any) -> str | None:
    """A structure's key; a long one is cut and told apart by a hash."""
    if not isinstance(value, str) or len(value) <= _MOST_KEY:
        return value if isinstance(value, str) else None
    return f"{value[:_MOST_KEY]} {hashlib.sha256(value.encode(errors='replace')).hexdigest()[:12]}"


def _entries(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """Reads those of the first entries of a mapping that can be read."""

    def entries(value: Any) -> dict[str, Any]:
        listed = list(value.items())[:_MOST_ENTRIES] if isinstance(value, Mapping) else []
        found = {_cut(str(key), _MOST_NAME): read(entry) for key, entry in listed}
        return {key: entry for key, entry in found.items() if entry is not None}

    return entries


def _refusals(value: Any) -> list[RefusalTold]:
    found = []
    for entry in value[:_MOST_ENTRIES] if isinstance(value, list) else []:
        if isinstance(entry, Mapping) and isinstance(entry.get("kind"), str):
            line, column = _whole(entry.get("line")), _whole(entry.get("column"))
            place = f"line {line}, column {column or 0}: " if line else ""
            message = place + _cut(entry.get("message"), _MOST_TEXT)
            found.append(RefusalTold(_cut(entry["kind"], _MOST_NAME), message))
    return found


def _by(read: Callable[[Any], Any]) -> Any:
    """A field of a record, and how it is read from whatever stands there."""
    return field(metadata={"read": read})


@dataclass(frozen=True)
class WriterRollout:
    """One rollout of the writer, as its record tells it.

    `task` is the task set (for training the step) and the task's number in it, `level` a `Level`,
    `text` what the policy wrote where no code could be read of it.
    """

    step: int
    task: tuple[str, int]
    reward: float | None
    valid: bool
    level: int | None = _by(lambda value: n if (n := _whole(value)) in set(Level) else None)
    problem_type: str = _by(_text(_MOST_NAME))
    problem: str = _by(_text())
    text: str = _by(_text(_MOST_PROMPT))
    prompts: Mapping[str, str] = _by(
        _entries(lambda value: _cut(value, _MOST_PROMPT) if isinstance(value, str) else None)
    )
    code: str = _by(_text(_MOST_CODE))
    refusals: Sequence[RefusalTold] = _by(_refusals)
    structure: str | None = _by(_key)
    operators: Mapping[str, int] = _by(_entries(_whole))
    nodes: int | None = _by(_whole)
    ending: str = _by(_text(_MOST_NAME))
    reason: str = _by(_text())
    answer: str = _by(_text())
    score: float | None = _by(_number)
    parts: Mapping[str, float] = _by(_entries(_number))
    usd: float | None = _by(_number)
    tokens: int | None = _by(_whole)
    seconds: float | None = _by(_number)
    calls: int | None = _by(_whole)

    @property
    def clean(self) -> bool:
        """Whether the written graph itself gave the answer."""
        return self.level == Level.CLEAN

    @property
    def correct_clean(self) -> float | None:
        """The score if the written graph itself earned it, else 0; None where unscored."""
        return self.score if self.score is None or self.clean else 0.0


Rollouts = Sequence[WriterRollout]


class WriterRecords:
    """All records of a run folder: of training by step, of held-out task sets by name and step.
    Evaluations that were cut off or have no records are left out.

    `first` and `last` are those of the ends of training (`first` is empty if there is one step),
    `before` those of the first evaluation of each task set that has a later one, `after` of the
    last. `latest` is the newest picture of the policy, the last evaluations or else the last steps,
    `earliest` what it can be compared with, perhaps empty. `every` has training before evaluations.
    """

    def __init__(
        self, training: Mapping[int, Rollouts], held_out: Mapping[str, Mapping[int, Rollouts]]
    ) -> None:
        self.training, self.held_out = training, held_out
        sets = [training, *held_out.values()]
        self.every = [rollout for of in sets for step in sorted(of) for rollout in of[step]]
        ends = [(of, min(of), max(of)) for of in held_out.values()]
        self.before = [rollout for of, low, high in ends if low < high for rollout in of[low]]
        self.after = [rollout for of, _, high in ends for rollout in of[high]]
        steps = sorted(training)
        most = min(ENDS, max(1, len(steps) // 2))
        first = steps[:most] if len(steps) > 1 else []
        self.first = [rollout for step in first for rollout in training[step]]
        self.last = [rollout for step in steps[-most:] for rollout in training[step]]
        self.latest = self.after or self.last
        self.earliest = self.before if self.after else self.first


def load_writer(run_dir: Path, evaluations: Evaluations) -> WriterRecords | None:
    """The writer's records of a run folder; None where no rollout kept one."""
    training: dict[int, list[WriterRollout]] = defaultdict(list)
    for kept in read_rollouts(run_dir):
        task = (f"step {kept.step}", kept.task)
        if (rollout := read_rollout(kept.kept, kept.step, task, kept.reward)) is not None:
            training[kept.step].append(rollout)
    held_out: dict[str, dict[int, Rollouts]] = {}
    for name, steps in evaluations.items():
        for step, evaluation in steps.items():
            read = [
                read_rollout(record.kept, step, (name, record.item), record.reward)
                for record in evaluation.records
            ]
            found = [rollout for rollout in read if rollout is not None]
            if found and evaluation.whole:
                held_out.setdefault(name, {})[step] = found
    if not training and not held_out:
        return None
    return WriterRecords(dict(sorted(training.items())), held_out)


def read_rollout(
    kept: Any, step: int, task: tuple[str, int], reward: Any = None
) -> WriterRollout | None:
    """The record in what a rollout kept; None where none says whether its graph was valid."""
    raw = kept.get(KEPT) if isinstance(kept, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("valid"), bool):
        return None
    readers = {item.name: item.metadata.get("read") for item in fields(WriterRollout)}
    found = {name: read(raw.get(name)) for name, read in readers.items() if read}
    if found["code"]:
        found["text"] = ""
    return WriterRollout(step, task, _number(reward), raw["valid"], **found)


class Numbers:
    """What is counted of some rollouts, of which there is at least one.

    Intervals are over tasks, the rollouts of a task being averaged first. A graph counts as read
    where it has a structure, refused or not. Shares by name have the most frequent first:
    `refusals` of the rollouts with a refusal of this kind, `operators` of the read graphs that
    name it; `levels` of the rollouts, `fallbacks` of those not answered by the graph as written.
    `nodes`: the calls in a graph's source, their mean, smallest and largest. `structures` counts
    valid graphs, `dominance` is the share of the most frequent one (None without any), `prompts`
    counts distinct pairs of instance and text. The cost of a solved task is what all rollouts spent
    on executing for each that scored 1.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        valid = task_interval(rollouts, is_valid)
        assert valid is not None
        self.valid = valid
        self.rollouts = len(rollouts)
        levels = Counter(rollout.level for rollout in rollouts)
        self.levels = {level.value: levels[level] / len(rollouts) for level in Level}
        self.fallbacks = math.fsum(self.levels[level] for level in Level if level != Level.CLEAN)
        self.refusals = _shares({told.kind for told in r.refusals} for r in rollouts)
        graphs = [rollout for rollout in rollouts if rollout.structure is not None]
        self.operators = _shares(graph.operators.keys() for graph in graphs)
        nodes = [rollout.nodes for rollout in graphs if rollout.nodes is not None]
        self.nodes = Interval(mean(nodes), min(nodes), max(nodes), len(nodes)) if nodes else None
        self.structures = dict(structures_of(graphs).most_common())
        most = max(self.structures.values(), default=0)
        self.dominance = most / sum(self.structures.values()) if most else None
        self.prompts = len({prompt for r in rollouts for prompt in r.prompts.items()})
        self.correct = task_interval(rollouts, lambda rollout: rollout.score)
        self.correct_clean = task_interval(rollouts, lambda rollout: rollout.correct_clean)
        solved = sum(r.score is not None and r.score >= 1.0 for r in rollouts)
        self.usd_per_solved = per_solved(_sum_if_known(r.usd for r in rollouts), solved)
        self.tokens_per_solved = per_solved(_sum_if_known(r.tokens for r in rollouts), solved)


def _shares(names: Iterable[Iterable[str]]) -> dict[str, float]:
    """Of collections of names the share that has each."""
    listed = list(names)
    counts = Counter(name for found in listed for name in found)
    return {name: number / len(listed) for name, number in counts.most_common()}


def _sum_if_known(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    known = [value for value in listed if value is not None]
    return math.fsum(known) if len(known) == len(listed) else None


def is_valid(rollout: WriterRollout) -> float:
    return float(rollout.valid)


def structures_of(rollouts: Rollouts) -> Counter[str]:
    """How many valid graphs have which structure."""
    return Counter(r.structure for r in rollouts if r.valid and r.structure)


def steps_told(rollouts: Rollouts) -> str:
    """`step 4`, or `steps 1 to 5`."""
    steps = sorted({rollout.step for rollout in rollouts})
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def task_means(
    rollouts: Iterable[WriterRollout], value: Callable[[WriterRollout], float | None]
) -> dict[tuple[str, int], float]:
    """The mean of a value over the rollouts of each task that has it."""
    by_task: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rollout in rollouts:
        found = value(rollout)
        if found is not None:
            by_task[rollout.task].append(found)
    return {task: mean(values) for task, values in sorted(by_task.items())}


def task_interval(
    rollouts: Iterable[WriterRollout], value: Callable[[WriterRollout], float | None]
) -> Interval | None:
    """The mean over tasks of a value in [0, 1] with its 95% interval; None if none has it."""
    return share_or_mean_interval(list(task_means(rollouts, value).values()), shares=True)


def audit_writer(records: WriterRecords, evaluations: Evaluations) -> Iterator[Finding]:
    """All warnings about the writer's records, as in `audit.py`: where chance is an unlikely
    reason. `evaluations` tell what their operators did."""
    fewer, earning = WRITER_CHECKS[:2]
    intervals = [task_interval(rollouts, is_valid) for rollouts in records.training.values()]
    shares = [interval.mean for interval in intervals if interval is not None]
    change = rise(shares)
    if change is not None and change.high is not None and change.high < 0:
        yield Finding(
            fewer,
            f"The share of valid graphs fell by {-change.mean:.0%} from the first to the second "
            f"half of {len(shares)} training steps.",
            "The refusals by kind say what the policy began to do wrong. A lower learning rate or "
            "a stronger KL term keeps it nearer to what it could do.",
        )
    first, last = (task_means(of, is_valid) for of in (records.before, records.after))
    if tasks := sorted(first.keys() & last.keys()):
        change = paired_difference([first[task] for task in tasks], [last[task] for task in tasks])
        if change.high is not None and change.high < 0:
            yield Finding(
                fewer,
                f"On {len(tasks)} held-out tasks the share of valid graphs fell by "
                f"{-change.mean:.0%} from {steps_told(records.before)} to "
                f"{steps_told(records.after)}.",
                "Look at the refusals of the last evaluation, and use earlier weights.",
            )
    # No matter of chance: the reward of this package keeps clean rollouts and fallbacks apart.
    for where, steps in {"training": records.training, **records.held_out}.items():
        known = [
            (r.clean, r.reward)
            for rollouts in steps.values()
            for r in rollouts
            if r.level is not None and r.reward is not None
        ]
        lowest = min((reward for clean, reward in known if clean), default=math.inf)
        earned = [reward for clean, reward in known if not clean and reward >= lowest]
        if earned:
            yield Finding(
                earning,
                f"In {where} {len(earned)} rollouts whose answer came from a fallback have a "
                f"reward of up to {max(earned):.3g}, while a clean one has one of {lowest:.3g}.",
                "A policy can then gain by writing rubbish: let no fallback earn what a clean "
                "rollout earns.",
            )
    yield from _certain_shares(records, evaluations)


def _certain_shares(records: WriterRecords, evaluations: Evaluations) -> Iterator[Finding]:
    """Shares that are certainly (Wilson, 95%) larger than they should be, of enough cases."""
    latest = records.latest
    place = f"At {steps_told(latest)}"
    uses: Counter[str] = Counter()
    for name, held_out in records.held_out.items():
        for record in evaluations[name][max(held_out)].records if name in evaluations else ():
            uses.update(str(use.get("outcome")) for use in record.operators)
    graphs = structures_of(latest)
    dominant = max(graphs.values(), default=0)
    types = {rollout.problem_type for rollout in latest if rollout.valid and rollout.structure}
    kinds = f" on {len(types)} problem types" if len(types) > 1 else ""
    unrewarded = sum(rollout.reward is None for rollout in latest)
    # The default workflow is ours and tested: it should not end without an answer.
    defaults = Counter(
        rollout.ending
        for rollout in latest
        if rollout.level == Level.DEFAULT_WORKFLOW and rollout.ending and rollout.reward is not None
    )
    endings = Counter({ending: n for ending, n in defaults.items() if ending != "answered"})
    often = endings.most_common(1)[0][0] if endings else ""
    no_model = {outcome: uses[outcome] for outcome in _NO_MODEL if uses[outcome]}
    failed_uses = sum(no_model.values())
    told = ", ".join(f"{number} {outcome}" for outcome, number in no_model.items())
    one_structure, executor = WRITER_CHECKS[2:]
    cases: tuple[tuple[str, int, int, int, float, str, str], ...] = (
        (
            *(one_structure, dominant, graphs.total(), 20, 0.9),
            f"{place} {dominant} of {graphs.total()} valid graphs{kinds} have the same structure.",
            "One template for every task is no written workflow: compare with the fixed default "
            "workflow, vary the examples of the prompt or of the warm start, or sample hotter.",
        ),
        (
            *(executor, unrewarded, len(latest), 10, 0.1),
            f"{place} {unrewarded} of {len(latest)} rollouts have no reward though "
            "the policy answered: the executor did not, or the answer could not be scored.",
            "The reasons stand in the evaluation records and in the run's log; what is left of the "
            "tasks is no fair sample.",
        ),
        (
            *(executor, endings.total(), defaults.total(), 10, 0.2),
            f"{place} {endings.total()} of {defaults.total()} rollouts of the default workflow "
            f"had no answer (most often: {often}).",
            "Its graph is tested: look at the executor's server, key and limits, and at the "
            "sandbox.",
        ),
        (
            *(executor, failed_uses, uses.total(), 10, 0.1),
            f"In the last evaluations {failed_uses} of {uses.total()} uses of operators failed for "
            f"no fault of their graph ({told}).",
            "Their scores speak of the executor and not of the policy: look at its server, key and "
            "limits, and evaluate again.",
        ),
    )
    for check, number, of, least, allowed, found, cure in cases:
        if of >= least and wilson_interval(number, of)[0] > allowed:
            yield Finding(check, found, cure)
