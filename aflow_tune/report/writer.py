"""A policy that writes workflows: its records, what is counted of them, and what they may hide.

The writer's workflow keeps one record a rollout under `writer` (`aflow_tune.context.keep`): in
`rollouts/` for training, in the evaluation records for held-out tasks. `writer_section.py` makes
a section of the report of them.

A record holds what a model wrote, so nothing in it is trusted: a field of another type counts as
absent, texts are cut, a record that does not say whether its graph was valid is passed over.
What is not known is None and never 0.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.report.audit import Finding
from aflow_tune.report.evaluation import Evaluations
from aflow_tune.report.records import read_rollouts
from aflow_tune.report.statistics import (
    Interval,
    mean,
    paired_difference,
    rise,
    share_or_mean_interval,
    wilson_interval,
)
from aflow_tune.report.usage import per_solved
from aflow_tune.writer.types import Level

KEPT = "writer"
"""The name under which the writer's workflow keeps its record."""
ENDS = 5
"""Steps at each end of training that are compared; of a short training, half of them each."""
SOLVED_AT = 1.0
"""The score from which on a rollout has solved its task."""

DOMINANT_STRUCTURE, DOMINANT_GRAPHS = 0.9, 20
"""One structure is nearly all if it certainly (Wilson, 95%) has more than this share of the valid
graphs; fewer graphs are not judged."""
FAILED_DEFAULTS = 0.2
"""Share of rollouts of the default workflow without an answer that speaks of a failing executor."""
FAILED_CALLS = 0.1
"""The same of the uses of operators whose model did not answer."""
UNREWARDED = 0.1
"""The same of the rollouts that wrote something and have no reward."""
FEW = 10
"""Fewer rollouts, or uses of operators, are not judged."""
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


@dataclass(frozen=True)
class RefusalTold:
    """One refusal of a record: its kind and its sentence, with its place."""

    kind: str
    message: str


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
    level: int | None = None
    problem_type: str = ""
    problem: str = ""
    text: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    refusals: tuple[RefusalTold, ...] = ()
    structure: str | None = None
    operators: Mapping[str, int] = field(default_factory=dict)
    nodes: int | None = None
    ending: str = ""
    reason: str = ""
    answer: str = ""
    score: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    usd: float | None = None
    tokens: int | None = None
    seconds: float | None = None
    calls: int | None = None

    @property
    def clean(self) -> bool:
        """Whether the written graph itself gave the answer."""
        return self.level == Level.CLEAN

    @property
    def correct_clean(self) -> float | None:
        """The score if the written graph itself earned it, else 0; None where unscored."""
        return self.score if self.score is None or self.clean else 0.0


Rollouts = Sequence[WriterRollout]


@dataclass(frozen=True)
class WriterRecords:
    """All records of a run folder: of training by step, of held-out task sets by name and step.
    Evaluations that were cut off or have no records are left out."""

    training: Mapping[int, Rollouts]
    held_out: Mapping[str, Mapping[int, Rollouts]]

    @property
    def before(self) -> list[WriterRollout]:
        """The first evaluation of each task set that has a later one."""
        ends = [steps for steps in self.held_out.values() if len(steps) > 1]
        return [rollout for steps in ends for rollout in steps[min(steps)]]

    @property
    def after(self) -> list[WriterRollout]:
        """The last evaluation of each task set."""
        return [rollout for steps in self.held_out.values() for rollout in steps[max(steps)]]

    @property
    def training_ends(self) -> tuple[list[WriterRollout], list[WriterRollout]]:
        """The first and the last steps of training; the first are empty if there is one step."""
        steps = sorted(self.training)
        most = min(ENDS, max(1, len(steps) // 2))
        first = self.of_steps(steps[:most]) if len(steps) > 1 else []
        return first, self.of_steps(steps[-most:])

    def of_steps(self, steps: Iterable[int]) -> list[WriterRollout]:
        """The training rollouts of these steps."""
        return [rollout for step in steps for rollout in self.training[step]]

    @property
    def latest(self) -> list[WriterRollout]:
        """The newest picture of the policy: the last evaluations, else the last steps."""
        return self.after or self.training_ends[1]

    @property
    def earliest(self) -> list[WriterRollout]:
        """The first picture that can be compared with `latest`; empty where there is none."""
        return self.before if self.after else self.training_ends[0]

    @property
    def every(self) -> list[WriterRollout]:
        """All rollouts: training by step, then the evaluations."""
        sets = [self.training, *self.held_out.values()]
        return [rollout for steps in sets for step in sorted(steps) for rollout in steps[step]]


def load_writer(run_dir: Path, evaluations: Evaluations) -> WriterRecords | None:
    """The writer's records of a run folder; None where no rollout kept one."""
    training: dict[int, list[WriterRollout]] = defaultdict(list)
    for kept in read_rollouts(run_dir):
        task = (f"step {kept.step}", kept.task)
        rollout = read_rollout(kept.kept, kept.step, task, kept.reward)
        if rollout is not None:
            training[kept.step].append(rollout)
    held_out: dict[str, dict[int, Rollouts]] = {}
    for name, steps in evaluations.items():
        for step, evaluation in steps.items():
            read = (
                read_rollout(record.kept, step, (name, record.item), record.reward)
                for record in evaluation.records
            )
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

    def text(name: str, most: int = _MOST_TEXT) -> str:
        return _cut(raw.get(name), most)

    def number(name: str) -> float | None:
        return _number(raw.get(name))

    def entries(name: str, read: Callable[[Any], Any]) -> dict[str, Any]:
        """The first entries of a mapping that can be read."""
        value = raw.get(name)
        listed = list(value.items())[:_MOST_ENTRIES] if isinstance(value, Mapping) else []
        found = {_cut(str(key), _MOST_NAME): read(entry) for key, entry in listed}
        return {key: entry for key, entry in found.items() if entry is not None}

    level, code = _whole(raw.get("level")), text("code", _MOST_CODE)
    return WriterRollout(
        step=step,
        task=task,
        reward=_number(reward),
        valid=raw["valid"],
        level=level if level in set(Level) else None,
        problem_type=text("problem_type", _MOST_NAME),
        problem=text("problem"),
        text="" if code else text("text", _MOST_PROMPT),
        prompts=entries("prompts", lambda e: _cut(e, _MOST_PROMPT) if isinstance(e, str) else None),
        code=code,
        refusals=_refusals(raw.get("refusals")),
        structure=_key(raw.get("structure")),
        operators=entries("operators", _whole),
        nodes=_whole(raw.get("nodes")),
        ending=text("ending", _MOST_NAME),
        reason=text("reason"),
        answer=text("answer"),
        score=number("score"),
        parts=entries("parts", _number),
        usd=number("usd"),
        tokens=_whole(raw.get("tokens")),
        seconds=number("seconds"),
        calls=_whole(raw.get("calls")),
    )


def _refusals(value: Any) -> tuple[RefusalTold, ...]:
    found = []
    for entry in value[:_MOST_ENTRIES] if isinstance(value, list) else []:
        if isinstance(entry, Mapping) and isinstance(entry.get("kind"), str):
            line, column = _whole(entry.get("line")), _whole(entry.get("column"))
            place = f"line {line}, column {column or 0}: " if line else ""
            message = place + _cut(entry.get("message"), _MOST_TEXT)
            found.append(RefusalTold(_cut(entry["kind"], _MOST_NAME), message))
    return tuple(found)


def _key(value: Any) -> str | None:
    """A structure's key; a long one is cut and told apart by a hash."""
    if not isinstance(value, str) or len(value) <= _MOST_KEY:
        return value if isinstance(value, str) else None
    return f"{value[:_MOST_KEY]} {hashlib.sha256(value.encode(errors='replace')).hexdigest()[:12]}"


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


@dataclass(frozen=True)
class Numbers:
    """What is counted of some rollouts: those of a step, of an evaluation, of several steps.

    Intervals are over tasks, the rollouts of a task being averaged first. A graph counts as read
    where it has a structure, whether or not it was refused. Shares by name are the most frequent
    first: `refusals` of the rollouts with a refusal of this kind, `operators` of the read graphs
    that name it. `levels` are shares of the rollouts. `nodes` are the calls in a graph's source:
    the mean, the smallest and the largest. `structures` counts valid graphs, `prompts` distinct
    pairs of instance and text. What a solved task cost is what all rollouts spent on executing;
    None: unknown, or none solved.
    """

    rollouts: int
    valid: Interval
    levels: Mapping[int, float]
    refusals: Mapping[str, float]
    operators: Mapping[str, float]
    nodes: Interval | None
    structures: Mapping[str, int]
    prompts: int
    correct: Interval | None
    correct_clean: Interval | None
    usd_per_solved: float | None
    tokens_per_solved: float | None

    @property
    def fallbacks(self) -> float:
        """Share of the rollouts whose answer did not come from the graph as written."""
        return math.fsum(share for level, share in self.levels.items() if level != Level.CLEAN)

    @property
    def dominance(self) -> float | None:
        """Share of the most frequent structure among the valid graphs; None without any."""
        counts = list(self.structures.values())
        return counts[0] / sum(counts) if counts else None


def count(rollouts: Rollouts) -> Numbers:
    """The numbers of these rollouts.

    Raises:
        ValueError: there are none.
    """
    valid = task_interval(rollouts, is_valid)
    if valid is None:
        raise ValueError("numbers of no rollouts")
    levels = Counter(rollout.level for rollout in rollouts)
    graphs = [rollout for rollout in rollouts if rollout.structure is not None]
    nodes = [rollout.nodes for rollout in graphs if rollout.nodes is not None]
    solved = sum(r.score is not None and r.score >= SOLVED_AT for r in rollouts)

    def spent_per_solved(spent: list[float | None]) -> float | None:
        known = [value for value in spent if value is not None]
        return per_solved(math.fsum(known), solved) if len(known) == len(spent) else None

    return Numbers(
        rollouts=len(rollouts),
        valid=valid,
        levels={level.value: levels[level] / len(rollouts) for level in Level},
        refusals=_shares(({told.kind for told in r.refusals} for r in rollouts), len(rollouts)),
        operators=_shares((r.operators.keys() for r in graphs), len(graphs)),
        nodes=Interval(mean(nodes), min(nodes), max(nodes), len(nodes)) if nodes else None,
        structures=dict(Counter(map(structure_of, with_graphs(graphs))).most_common()),
        prompts=len({prompt for rollout in rollouts for prompt in rollout.prompts.items()}),
        correct=task_interval(rollouts, lambda rollout: rollout.score),
        correct_clean=task_interval(rollouts, lambda rollout: rollout.correct_clean),
        usd_per_solved=spent_per_solved([rollout.usd for rollout in rollouts]),
        tokens_per_solved=spent_per_solved([rollout.tokens for rollout in rollouts]),
    )


def is_valid(rollout: WriterRollout) -> float:
    return float(rollout.valid)


def with_graphs(rollouts: Rollouts) -> list[WriterRollout]:
    """Those whose graph is valid and has a structure."""
    return [rollout for rollout in rollouts if rollout.valid and rollout.structure]


def structure_of(rollout: WriterRollout) -> str:
    return rollout.structure or ""


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


def _shares(names: Iterable[Iterable[str]], of: int) -> dict[str, float]:
    counts = Counter(name for found in names for name in found)
    return {name: number / of for name, number in counts.most_common()}


def audit_writer(records: WriterRecords, evaluations: Evaluations) -> list[Finding]:
    """All warnings about the writer's records, as in `audit.py`: where chance is an unlikely
    reason. `evaluations` tell what their operators did."""
    uses = [
        use
        for name, steps in records.held_out.items()
        if name in evaluations
        for record in evaluations[name][max(steps)].records
        for use in record.operators
    ]
    found = [
        fewer_valid_in_training(records),
        fewer_valid_held_out(records),
        earning_fallbacks(records.of_steps(records.training), "training"),
        *(
            earning_fallbacks([rollout for of_step in steps.values() for rollout in of_step], name)
            for name, steps in records.held_out.items()
        ),
        one_structure(records.latest),
        unrewarded_rollouts(records.latest),
        failing_defaults(records.latest),
        failing_calls(uses),
    ]
    return [finding for finding in found if finding is not None]


def fewer_valid_in_training(records: WriterRecords) -> Finding | None:
    """The second half of training has fewer valid graphs than the first."""
    intervals = [task_interval(rollouts, is_valid) for rollouts in records.training.values()]
    shares = [interval.mean for interval in intervals if interval is not None]
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
    first, last = (task_means(of, is_valid) for of in (records.before, records.after))
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


def earning_fallbacks(rollouts: Rollouts, where: str) -> Finding | None:
    """A rollout whose answer came from a fallback has a reward that a clean one also has. No
    matter of chance: the reward of this package keeps the two apart."""
    rewarded = [(r.clean, r.reward) for r in rollouts if r.level is not None]
    clean = [reward for is_clean, reward in rewarded if is_clean and reward is not None]
    if not clean:
        return None
    lowest = min(clean)
    fallbacks = [reward for is_clean, reward in rewarded if not is_clean and reward is not None]
    earning = [reward for reward in fallbacks if reward >= lowest]
    if not earning:
        return None
    return Finding(
        WRITER_CHECKS[1],
        f"In {where} {len(earning)} rollouts whose answer came from a fallback have a reward of "
        f"up to {max(earning):.3g}, while a clean one has one of {lowest:.3g}.",
        "A policy can then gain by writing rubbish: let no fallback earn what a clean rollout "
        "earns.",
    )


def one_structure(rollouts: Rollouts) -> Finding | None:
    """Nearly all valid graphs have the same structure."""
    graphs = with_graphs(rollouts)
    if len(graphs) < DOMINANT_GRAPHS:
        return None
    number = Counter(map(structure_of, graphs)).most_common(1)[0][1]
    if wilson_interval(number, len(graphs))[0] <= DOMINANT_STRUCTURE:
        return None
    types = {rollout.problem_type for rollout in graphs}
    kinds = f" on {len(types)} problem types" if len(types) > 1 else ""
    return Finding(
        WRITER_CHECKS[2],
        f"At {steps_told(rollouts)} {number} of {len(graphs)} valid graphs{kinds} have the same "
        "structure.",
        "One template for every task is no written workflow: compare with the fixed default "
        "workflow, vary the examples of the prompt or of the warm start, or sample hotter.",
    )


def unrewarded_rollouts(rollouts: Rollouts) -> Finding | None:
    """Rollouts have no reward though the policy wrote something: what came behind it failed."""
    failed = sum(rollout.reward is None for rollout in rollouts)
    if len(rollouts) < FEW or wilson_interval(failed, len(rollouts))[0] <= UNREWARDED:
        return None
    return Finding(
        WRITER_CHECKS[3],
        f"At {steps_told(rollouts)} {failed} of {len(rollouts)} rollouts have no reward though "
        "the policy answered: the executor did not, or the answer could not be scored.",
        "The reasons stand in the evaluation records and in the run's log; what is left of the "
        "tasks is no fair sample.",
    )


def failing_defaults(rollouts: Rollouts) -> Finding | None:
    """The default workflow, which is ours and tested, ends without an answer."""
    defaults = [
        rollout
        for rollout in rollouts
        if rollout.level == Level.DEFAULT_WORKFLOW and rollout.ending and rollout.reward is not None
    ]
    failed = Counter(rollout.ending for rollout in defaults if rollout.ending != "answered")
    count = failed.total()
    if len(defaults) < FEW or wilson_interval(count, len(defaults))[0] <= FAILED_DEFAULTS:
        return None
    return Finding(
        WRITER_CHECKS[3],
        f"At {steps_told(rollouts)} {count} of {len(defaults)} rollouts of the default workflow "
        f"had no answer (most often: {failed.most_common(1)[0][0]}).",
        "Its graph is tested: look at the executor's server, key and limits, and at the sandbox.",
    )


def failing_calls(uses: Iterable[Mapping[str, object]]) -> Finding | None:
    """Operators got no answer of their model, or no sandbox for their program."""
    outcomes = Counter(str(use.get("outcome")) for use in uses)
    failed = sum(outcomes[outcome] for outcome in _NO_MODEL)
    if outcomes.total() < FEW or wilson_interval(failed, outcomes.total())[0] <= FAILED_CALLS:
        return None
    told = ", ".join(f"{outcomes[kind]} {kind}" for kind in _NO_MODEL if outcomes[kind])
    return Finding(
        WRITER_CHECKS[3],
        f"In the last evaluations {failed} of {outcomes.total()} uses of operators failed for no "
        f"fault of their graph ({told}).",
        "Their scores speak of the executor and not of the policy: look at its server, key and "
        "limits, and evaluate again.",
    )
