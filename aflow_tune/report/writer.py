"""The report's section on a policy that writes workflows: records, statistics and warnings.

The writer's workflow keeps one record per rollout under `writer` (`aflow_tune.context.keep`): in
`rollouts/` for training, in the evaluation records for held-out tasks.

A record contains what a model wrote, so nothing in it is trusted: a field of a wrong type counts as
missing, texts are cut, and a record without the field `valid` is ignored. A graph is drawn from its
code, which is parsed and never run; the template escapes texts.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from aflow_tune.graph.draw import to_svg
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.inside import GRAPH_FILE
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.report.audit import Finding
from aflow_tune.report.charts import Chart, Curve, Point, draw, number
from aflow_tune.report.evaluation import Evaluations, pair, per_solved
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
"""The key of the record in what a rollout kept."""
ENDS = 5
"""Steps at each end of training that are compared; in a short training half of its steps."""
WRITER_CHECKS = (
    "valid graphs becoming fewer",
    "fallbacks that earn what clean rollouts earn",
    "one structure for everything",
    "an executor that fails",
)
MOST_NODES = 40
"""Larger graphs are not drawn."""

_MOST_CODE, _MOST_PROMPT, _MOST_TEXT, _MOST_NAME = 20_000, 4_000, 2_000, 60
_MOST_KEY, _MOST_ENTRIES = 400, 30
_MOST_ROWS = 6
"""Rows for structures, and for kinds of refusals, in the table."""
_NO_MODEL = ("model_failed", "sandbox_unavailable")
_LEVELS = {
    Level.CLEAN: "the graph as written",
    Level.DEFAULT_PROMPTS: "fallback 1: default prompts",
    Level.SIMPLER: "fallback 2: simpler graph",
    Level.DEFAULT_WORKFLOW: "fallback 3: default workflow",
}


def _cut(value: Any, most: int = _MOST_TEXT) -> str:
    if not isinstance(value, str):
        return ""
    return value if len(value) <= most else f"{value[: most - 1]}…"


def _name(value: Any) -> str:
    return _cut(value, _MOST_NAME)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    """A count, an integer in [0, 1e15); None for anything else."""
    number = _number(value)
    whole = number is not None and number == int(number) and 0 <= number < 1e15
    return int(value) if whole else None


def _key(value: Any) -> str | None:
    """A structure's key; a long one is cut, and a hash added."""
    if not isinstance(value, str) or len(value) <= _MOST_KEY:
        return value if isinstance(value, str) else None
    return f"{value[:_MOST_KEY]} {hashlib.sha256(value.encode(errors='replace')).hexdigest()[:12]}"


def _entries(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """A reader of mappings: the first `_MOST_ENTRIES` entries, without unreadable values."""

    def entries(value: Any) -> dict[str, Any]:
        listed = list(value.items())[:_MOST_ENTRIES] if isinstance(value, Mapping) else []
        found = {_name(str(key)): read(entry) for key, entry in listed}
        return {key: entry for key, entry in found.items() if entry is not None}

    return entries


def _refusals(value: Any) -> list[tuple[str, str]]:
    found = []
    for entry in value[:_MOST_ENTRIES] if isinstance(value, list) else []:
        if isinstance(entry, Mapping) and isinstance(entry.get("kind"), str):
            line = _whole(entry.get("line"))
            place = f"line {line}: " if line else ""
            found.append((_name(entry["kind"]), place + _cut(entry.get("message"))))
    return found


def _by(read: Callable[[Any], Any]) -> Any:
    """A dataclass field with the reader that converts the untrusted value."""
    return field(metadata={"read": read})


@dataclass(frozen=True)
class WriterRollout:
    """One rollout of the writer, from its record.

    `task` is the task set (in training the step) and the task's number in it, `level` a `Level`,
    `refusals` are kinds with messages, `text` is what the policy wrote if no code could be read.
    """

    step: int
    task: tuple[str, int]
    reward: float | None
    valid: bool
    level: int | None = _by(lambda value: n if (n := _whole(value)) in set(Level) else None)
    problem_type: str = _by(_name)
    problem: str = _by(_cut)
    text: str = _by(lambda value: _cut(value, _MOST_PROMPT))
    prompts: Mapping[str, str] = _by(_entries(lambda value: _cut(value, _MOST_PROMPT) or None))
    code: str = _by(lambda value: _cut(value, _MOST_CODE))
    refusals: Sequence[tuple[str, str]] = _by(_refusals)
    structure: str | None = _by(_key)
    operators: Mapping[str, int] = _by(_entries(_whole))
    ending: str = _by(_name)
    reason: str = _by(_cut)
    answer: str = _by(_cut)
    score: float | None = _by(_number)
    parts: Mapping[str, float] = _by(_entries(_number))
    usd: float | None = _by(_number)
    tokens: int | None = _by(_whole)

    @property
    def clean(self) -> bool:
        """Whether the written graph itself gave the answer."""
        return self.level == Level.CLEAN


Rollouts = Sequence[WriterRollout]


class WriterRecords:
    """All records of a run folder: of training by step, of held-out task sets by name and step.

    `first` and `last` are the two ends of training (`first` is empty if there is one step),
    `before` and `after` the first and last evaluations (`before` only of task sets with more than
    one). `latest` are the last evaluations, or else the last steps.
    """

    def __init__(
        self, training: Mapping[int, Rollouts], held_out: Mapping[str, Mapping[int, Rollouts]]
    ) -> None:
        self.training, self.held_out = training, held_out
        ends = [(of, min(of), max(of)) for of in held_out.values()]
        self.before = [rollout for of, low, high in ends if low < high for rollout in of[low]]
        self.after = [rollout for of, _, high in ends for rollout in of[high]]
        steps = sorted(training)
        most = min(ENDS, max(1, len(steps) // 2))
        first = steps[:most] if len(steps) > 1 else []
        self.first = [rollout for step in first for rollout in training[step]]
        self.last = [rollout for step in steps[-most:] for rollout in training[step]]
        self.latest = self.after or self.last


def load_writer(run_dir: Path, evaluations: Evaluations) -> WriterRecords | None:
    """The writer's records of a run folder; None if there are none."""
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
    """The record in what a rollout kept; None if there is none with a field `valid`."""
    raw = kept.get(KEPT) if isinstance(kept, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("valid"), bool):
        return None
    readers = {item.name: item.metadata.get("read") for item in fields(WriterRollout)}
    found = {name: read(raw.get(name)) for name, read in readers.items() if read}
    if found["code"]:
        found["text"] = ""
    return WriterRollout(step, task, _number(reward), raw["valid"], **found)


class Numbers:
    """Statistics of one or more rollouts.

    Intervals are over tasks; the rollouts of a task are averaged first. `levels`, `fallbacks` and
    `refusals` (by kind) are shares of the rollouts, `structures` counts valid graphs, `shares` are
    shares of these. `clean_score` counts a fallback's answer as 0. `usd_per_solved` and
    `tokens_per_solved` divide the executor's spend in all rollouts by the number that scored 1.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        valid = task_interval(rollouts, is_valid)
        assert valid is not None
        self.valid = valid
        self.rollouts = len(rollouts)
        levels = Counter(rollout.level for rollout in rollouts)
        self.levels = {level.value: levels[level] / len(rollouts) for level in Level}
        self.fallbacks = math.fsum(self.levels[level] for level in Level if level != Level.CLEAN)
        kinds = Counter(kind for r in rollouts for kind in {kind for kind, _ in r.refusals})
        self.refusals = {kind: count / len(rollouts) for kind, count in kinds.items()}
        self.structures = structures_of(rollouts)
        total = self.structures.total()
        self.shares = {key: count / total for key, count in self.structures.items()}
        self.score = task_interval(rollouts, lambda r: r.score)
        self.clean_score = task_interval(
            rollouts, lambda r: r.score if r.score is None or r.clean else 0.0
        )
        solved = sum(r.score is not None and r.score >= 1.0 for r in rollouts)
        self.usd_per_solved = per_solved(_sum_if_known(r.usd for r in rollouts), solved)
        self.tokens_per_solved = per_solved(_sum_if_known(r.tokens for r in rollouts), solved)


def _sum_if_known(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    known = [value for value in listed if value is not None]
    return math.fsum(known) if len(known) == len(listed) else None


def is_valid(rollout: WriterRollout) -> float:
    return float(rollout.valid)


def structures_of(rollouts: Rollouts) -> Counter[str]:
    """The number of valid graphs of each structure."""
    return Counter(r.structure for r in rollouts if r.valid and r.structure)


def steps_told(rollouts: Rollouts) -> str:
    """`step 4`, or `steps 1 to 5`."""
    steps = sorted({rollout.step for rollout in rollouts})
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def task_means(
    rollouts: Rollouts, value: Callable[[WriterRollout], float | None]
) -> dict[tuple[str, int], float]:
    """The mean of a value over the rollouts of each task; tasks without a value are left out."""
    by_task: dict[tuple[str, int], list[float]] = defaultdict(list)
    for rollout in rollouts:
        found = value(rollout)
        if found is not None:
            by_task[rollout.task].append(found)
    return {task: mean(values) for task, values in sorted(by_task.items())}


def task_interval(
    rollouts: Rollouts, value: Callable[[WriterRollout], float | None]
) -> Interval | None:
    """The mean over tasks of a value in [0, 1] with its 95% interval; None if none has it."""
    return share_or_mean_interval(list(task_means(rollouts, value).values()), shares=True)


# Warnings


def audit_writer(records: WriterRecords, evaluations: Evaluations) -> Iterator[Finding]:
    """All warnings about the writer's records, by the criteria of `audit.py`. `evaluations` provide
    the outcomes of operators."""
    fewer, earning, one_structure, executor = WRITER_CHECKS
    falls = []
    intervals = [task_interval(rollouts, is_valid) for rollouts in records.training.values()]
    shares = [interval.mean for interval in intervals if interval is not None]
    if (change := rise(shares)) is not None:
        falls.append((change, f"from the first to the second half of {len(shares)} training steps"))
    first, last = (task_means(of, is_valid) for of in (records.before, records.after))
    if tasks := sorted(first.keys() & last.keys()):
        change = paired_difference([first[task] for task in tasks], [last[task] for task in tasks])
        falls.append((change, f"on {len(tasks)} held-out tasks to {steps_told(records.after)}"))
    for change, where in falls:
        if change.high is not None and change.high < 0:
            yield Finding(
                fewer,
                f"The share of valid graphs fell by {-change.mean:.0%} {where}.",
                "The refusals by kind say what the policy began to do wrong. Use earlier weights, "
                "a lower learning rate or a stronger KL term.",
            )
    # No test needed: by this package's reward, no fallback reaches a clean rollout.
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
    latest, place = records.latest, f"At {steps_told(records.latest)}"
    uses: Counter[str] = Counter()
    for name, held_out in records.held_out.items():
        for record in evaluations[name][max(held_out)].records if name in evaluations else ():
            uses.update(str(use.get("outcome")) for use in record.operators)
    failed = sum(uses[outcome] for outcome in _NO_MODEL)
    graphs = structures_of(latest)
    same = max(graphs.values(), default=0)
    unrewarded = sum(rollout.reward is None for rollout in latest)
    # Warn if there are enough cases and the 95% Wilson interval is above the allowed share.
    cases: tuple[tuple[str, int, int, int, float, str, str], ...] = (
        (
            *(one_structure, same, graphs.total(), 20, 0.9),
            f"{place} {same} of {graphs.total()} valid graphs have the same structure.",
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
            *(executor, failed, uses.total(), 10, 0.1),
            f"In the last evaluations {failed} of {uses.total()} uses of operators failed because "
            "a model or the sandbox did.",
            "Their scores speak of the executor and not of the policy: look at its server, key and "
            "limits, and evaluate again.",
        ),
    )
    for check, count, of, least, allowed, found, cure in cases:
        if of >= least and wilson_interval(count, of)[0] > allowed:
            yield Finding(check, found, cure)


# The section of the page


def writer_section(records: WriterRecords) -> dict[str, Any]:
    """The variables of `writer.html.jinja`: one table, one chart, and examples."""
    ends = {"training": (records.first, records.last), "held-out": (records.before, records.after)}
    phases = [(kind, rollouts) for kind, both in ends.items() for rollouts in both if rollouts]
    held_out = []  # valid graphs before and after, on the same tasks
    for name, steps in records.held_out.items():
        before, after = (task_means(steps[at], is_valid) for at in (min(steps), max(steps)))
        paired = pair({n: v for (_, n), v in before.items()}, {n: v for (_, n), v in after.items()})
        if len(steps) > 1 and paired is not None:
            held_out.append(f"{name}: {paired.numbers()}")
    training = {step: Numbers(of_step) for step, of_step in records.training.items()}
    valid = [Point(step, n.valid.mean, n.valid.low, n.valid.high) for step, n in training.items()]
    clean = [Point(step, n.levels[Level.CLEAN]) for step, n in training.items()]
    curves = [Curve("valid", valid), Curve("answered as written", clean, 2)]
    chart = Chart(
        "Valid graphs", "share of the rollouts in training, 95% interval", curves, "share"
    )
    return {
        "phases": [f"{kind}, {steps_told(rollouts)}" for kind, rollouts in phases],
        "rows": _rows([Numbers(rollouts) for _, rollouts in phases]),
        "held_out": held_out,
        "charts": draw([chart], (min(training, default=0), max(training, default=0))),
        "examples": examples(records.latest),
        "levels": _LEVELS,
    }


def _rows(phases: Sequence[Numbers]) -> list[tuple[str, list[str]]]:
    """The rows of the table: a label, and a text for each phase."""

    def told(found: Interval | None) -> str:
        return found.text() if found else ""

    def amount(found: float | None) -> str:
        return "" if found is None else number(found)

    refusals: Counter[str] = Counter()
    structures: Counter[str] = Counter()
    for phase in phases:
        refusals.update(phase.refusals)
        structures.update(phase.shares)
    table: list[tuple[str, Callable[[Numbers], str]]] = [
        ("rollouts", lambda n: str(n.rollouts)),
        ("valid graphs", lambda n: n.valid.text()),
        *(
            (f"answered by {name}", lambda n, level=level: f"{n.levels[level]:.0%}")
            for level, name in _LEVELS.items()
        ),
        ("score", lambda n: told(n.score)),
        ("score, fallbacks as 0", lambda n: told(n.clean_score)),
        ("US dollars a solved task", lambda n: amount(n.usd_per_solved)),
        ("tokens a solved task", lambda n: amount(n.tokens_per_solved)),
        *(
            (f"refused: {kind}", lambda n, kind=kind: f"{n.refusals.get(kind, 0.0):.0%}")
            for kind, _ in refusals.most_common(_MOST_ROWS)
        ),
        ("distinct structures", lambda n: str(len(n.structures))),
        *(
            (f"valid graphs like {key}", lambda n, key=key: f"{n.shares.get(key, 0.0):.0%}")
            for key, _ in structures.most_common(_MOST_ROWS)
        ),
    ]
    rows = [(label, [text(phase) for phase in phases]) for label, text in table]
    return [(label, texts) for label, texts in rows if any(texts)]


def examples(rollouts: Rollouts) -> list[dict[str, Any]]:
    """A rollout with a graph of the most frequent structure, and one with the most frequent
    refusal; of each kind the one with the median reward."""
    kinds: dict[str, dict[str, list[WriterRollout]]] = {
        "A graph of the most frequent structure": defaultdict(list),
        "A graph with the most frequent refusal": defaultdict(list),
    }
    valid, refused = kinds.values()
    for rollout in rollouts:
        if rollout.valid and rollout.structure:
            valid[rollout.structure].append(rollout)
        elif not rollout.valid and rollout.refusals:
            refused[rollout.refusals[0][0]].append(rollout)
    found: list[dict[str, Any]] = []
    for title, groups in kinds.items():
        for most in sorted(groups.values(), key=len)[-1:]:
            most.sort(key=lambda r: -math.inf if r.reward is None else r.reward)
            shown = most[len(most) // 2]
            drawing = drawing_of(shown.code, shown.operators, f"graph-{len(found)}")
            found.append({"title": title, "rollout": shown, "drawing": drawing})
    return found


def summary_line(records: WriterRecords) -> str:
    """One line for the end of a run: valid graphs, fallbacks, structures, before and after."""
    earliest = records.before if records.after else records.first
    told = []
    for rollouts in filter(None, (earliest, records.latest)):
        n = Numbers(rollouts)
        told.append(
            f"{n.valid.mean:.0%} valid, {n.fallbacks:.0%} answered by a fallback, "
            f"{len(n.structures)} structures ({steps_told(rollouts)})"
        )
    kind = "held-out" if records.after else "training"
    return f"Written graphs, {kind}: {' -> '.join(told)}."


def drawing_of(code: str, operators: Collection[str] = (), name: str = "graph") -> str:
    """The graph of this code as inline SVG; "" if it cannot be drawn.

    ElementTree escapes every text. The drawing's own style and background are removed: the page has
    styles for light and dark, and an inline style would apply to the whole page.

    Args:
        operators: names of operators, besides the registry's, that the code may use.
        name: unique among the drawings of the page.
    """
    if not code or len(code) >= _MOST_CODE:
        return ""
    own = {other: Operator for other in operators if other not in OPERATORS}
    try:
        flow = Graph(name, {GRAPH_FILE: code}, operators=own).flow
    except (RecursionError, MemoryError):
        return ""
    if not 0 < len(flow.nodes) <= MOST_NODES:
        return ""
    root = ElementTree.fromstring(to_svg(flow, title=name))
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        if element.get("marker-end"):
            element.set("marker-end", f"url(#{name}-head)")
        if element.tag == "marker":
            element.set("id", f"{name}-head")
    for child in list(root):
        if child.tag == "style" or (child.tag == "rect" and child.get("width") == "100%"):
            root.remove(child)
    root.set("class", "graph")
    return Markup(ElementTree.tostring(root, encoding="unicode"))
