"""The report's section on the workflows that the policy wrote, ready for `writer.html.jinja`.

`writer.py` reads and counts; here that becomes tables, curves, drawings and sentences of bounded
size. Escaping is the template's. A graph is drawn from its code, which is parsed and never run.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree

from markupsafe import Markup

from aflow_tune.graph.draw import to_svg
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.inside import GRAPH_FILE
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.report.charts import Curve, Point, number
from aflow_tune.report.curves import Chart, Scale, draw_chart
from aflow_tune.report.evaluation import pair
from aflow_tune.report.page import plain_text
from aflow_tune.report.statistics import Interval, mean
from aflow_tune.report.writer import (
    Numbers,
    Rollouts,
    WriterRecords,
    WriterRollout,
    count,
    is_valid,
    steps_told,
    structure_of,
    task_means,
    with_graphs,
)
from aflow_tune.writer.types import Level

LEVEL_NAMES = {
    Level.CLEAN: "as written",
    Level.DEFAULT_PROMPTS: "default prompts",
    Level.SIMPLER: "simpler graph",
    Level.DEFAULT_WORKFLOW: "default workflow",
}
MOST_NODES = 40
"""Larger graphs are not drawn: nobody could read them."""
MOST_CODE = 20_000
"""Characters of code; longer ones are not drawn."""
FEW_USES = 3
"""A graph is judged from so many uses on: of fewer the mean reward is mostly luck."""
MOST_CHARACTERS, MOST_WORDS = 1500, 300
"""Of a prompt: that are compared, and that are compared one by one."""

_LEVEL_COLOURS = {
    Level.CLEAN: 2,
    Level.DEFAULT_PROMPTS: 0,
    Level.SIMPLER: 1,
    Level.DEFAULT_WORKFLOW: 3,
}
_MOST_KINDS, _MOST_STRUCTURES, _MOST_TYPES, _MOST_CURVES, _MOST_INSTANCES = 8, 6, 6, 6, 4
_MOST_WIDTH = 2_000.0
"""Pixels of a drawing."""


def _share(level: Level) -> Callable[[Numbers], str]:
    return lambda numbers: f"{numbers.levels[level]:.0%}"


_ROWS: Mapping[str, Callable[[Numbers], str]] = {
    "rollouts": lambda n: str(n.rollouts),
    "valid graphs": lambda n: n.valid.text(),
    "answered by the graph as written": _share(Level.CLEAN),
    **{
        f"answered by fallback {level.value}: {LEVEL_NAMES[level]}": _share(level)
        for level in Level
        if level != Level.CLEAN
    },
    "score": lambda n: n.correct.text() if n.correct else "",
    "score of clean rollouts, fallbacks as 0": (
        lambda n: n.correct_clean.text() if n.correct_clean else ""
    ),
    "calls in a graph, mean": lambda n: f"{n.nodes.mean:.1f}" if n.nodes else "",
    "distinct structures": lambda n: str(len(n.structures)),
    "distinct prompts": lambda n: str(n.prompts),
    "US dollars a solved task": (
        lambda n: "" if n.usd_per_solved is None else number(n.usd_per_solved)
    ),
    "tokens a solved task": (
        lambda n: "" if n.tokens_per_solved is None else f"{n.tokens_per_solved:,.0f}"
    ),
}
"""The table of numbers: a label, and the text for a phase."""


@dataclass(frozen=True)
class Phase:
    """Some rollouts that stand together in a table: a column of it."""

    label: str
    rollouts: Rollouts
    numbers: Numbers


def writer_section(records: WriterRecords) -> dict[str, Any]:
    """All that the section shows of a run folder's records."""
    ends = {"training": records.training_ends, "held-out": (records.before, records.after)}
    phases = [
        Phase(f"{label}, {steps_told(rollouts)}", rollouts, count(rollouts))
        for label, both in ends.items()
        for rollouts in both
        if rollouts
    ]
    rows = [(label, [text(p.numbers) for p in phases]) for label, text in _ROWS.items()]
    shown = structures(records)
    types = by_type(records.latest, shown)
    kind = "held-out" if records.after else "training"
    return {
        "rollouts": len(records.every),
        "phases": phases,
        "rows": [(label, texts) for label, texts in rows if any(texts)],
        "held_out": _held_out(records),
        "charts": [(chart, Markup(chart.svg)) for chart in writer_charts(records)],
        "refusals": _refusals(phases),
        "structures": shown,
        "distinct": len(count(records.latest).structures),
        "types": types,
        "types_sentence": _types_sentence(types),
        "where": f"{kind}, {steps_told(records.latest)}",
        "graphs": best_and_worst(records),
        "changes": prompt_changes(records.training),
    }


def summary_lines(records: WriterRecords) -> list[str]:
    """Two lines for the end of a run: valid graphs and fallbacks, and distinct structures."""
    after, place = count(records.latest), steps_told(records.latest)
    valid, fallbacks = f"{after.valid.mean:.0%}", f"{after.fallbacks:.0%}"
    if records.earliest:
        before = count(records.earliest)
        place = f"{steps_told(records.earliest)} to {place}"
        valid = f"{before.valid.mean:.0%} -> {valid}"
        fallbacks = f"{before.fallbacks:.0%} -> {fallbacks}"
    where = "held-out" if records.after else "training"
    graphs = sum(after.structures.values())
    distinct = f"Distinct structures: {len(after.structures)} among {graphs} valid graphs"
    if after.dominance is not None:
        distinct += f", the most frequent in {after.dominance:.0%}"
    return [
        f"Written graphs: {valid} valid, {fallbacks} answered by a fallback ({where}, {place}).",
        f"{distinct}.",
    ]


def _held_out(records: WriterRecords) -> list[dict[str, Any]]:
    """Valid graphs of each task set before and after, on the same tasks."""
    found = []
    for name, steps in list(records.held_out.items())[:_MOST_CURVES]:
        first, last = min(steps), max(steps)
        before, after = (
            {item: share for (_, item), share in task_means(steps[step], is_valid).items()}
            for step in (first, last)
        )
        if first < last:
            paired = pair(before, after)
            found.append({"taskset": name, "before": first, "after": last, "valid": paired})
    return found


def _refusals(phases: Sequence[Phase]) -> list[dict[str, Any]]:
    """The most frequent kinds over all phases, with their shares and an example."""
    totals: Counter[str] = Counter()
    for phase in phases:
        totals.update(phase.numbers.refusals)
    return [
        {
            "kind": kind,
            "shares": [phase.numbers.refusals.get(kind, 0.0) for phase in phases],
            "example": plain_text(_example(phases, kind)),
        }
        for kind in sorted(totals, key=lambda kind: (-totals[kind], kind))[:_MOST_KINDS]
    ]


def _example(phases: Sequence[Phase], kind: str) -> str:
    """The sentence of this kind that most rollouts of the newest phase were told."""
    for phase in reversed(phases):
        told = [refusal for rollout in phase.rollouts for refusal in rollout.refusals]
        messages = Counter(refusal.message for refusal in told if refusal.kind == kind)
        del messages[""]
        if messages:
            return messages.most_common(1)[0][0]
    return ""


# Curves


def writer_charts(records: WriterRecords) -> list[Chart]:
    """All charts that the records have numbers for: over training steps and over evaluations."""
    training = {step: count(of_step) for step, of_step in records.training.items()}
    span = min(training, default=0), max(training, default=0)
    held_out = {
        name: {step: count(of_step) for step, of_step in steps.items()}
        for name, steps in list(records.held_out.items())[:_MOST_CURVES]
    }
    evaluated = [step for steps in held_out.values() for step in steps]
    held_out_span = min(evaluated, default=0), max(evaluated, default=0)

    def one(
        title: str, note: str, value: Callable[[Numbers], Any], scale: Scale = "zero"
    ) -> Chart | None:
        return draw_chart(title, note, [Curve(title, _points(training, value))], span, scale)

    def by_taskset(title: str, note: str, value: Callable[[Numbers], Any]) -> Chart | None:
        curves = [
            Curve(name, _points(steps, value), colour)
            for colour, (name, steps) in enumerate(held_out.items())
        ]
        return draw_chart(title, note, curves, held_out_span, "share", legend=True)

    def by_name(
        title: str, note: str, shares: Callable[[Numbers], Mapping[str, float]]
    ) -> Chart | None:
        """A curve for each of the most frequent names; a step without one has a share of 0."""
        totals: Counter[str] = Counter()
        for numbers in training.values():
            totals.update(shares(numbers))
        most = sorted(totals, key=lambda name: (-totals[name], name))[:_MOST_CURVES]
        curves = [
            Curve(
                plain_text(name),
                [Point(step, shares(n).get(name, 0.0)) for step, n in training.items()],
                colour,
            )
            for colour, name in enumerate(most)
        ]
        return draw_chart(title, note, curves, span, "share", legend=True)

    levels = [
        Curve(
            name,
            [Point(step, n.levels[level]) for step, n in training.items()],
            _LEVEL_COLOURS[level],
        )
        for level, name in LEVEL_NAMES.items()
    ]
    answered = len(training) > 1 and any(point.value for c in levels for point in c.points)
    in_usd = all(
        n.usd_per_solved is not None or n.tokens_per_solved is None for n in training.values()
    )
    interval = "share of the rollouts, 95% interval"
    found = [
        one("Valid graphs", f"training: {interval}", lambda n: n.valid, "share"),
        by_taskset("Valid graphs, held-out", interval, lambda n: n.valid),
        by_taskset(
            "Right answers of clean rollouts, held-out",
            "score; 0 where a fallback answered",
            lambda n: n.correct_clean,
        ),
        draw_chart(
            "Which workflow answered",
            "share of the rollouts, by what gave the answer",
            levels if answered else [],
            span,
            "share",
            stacked=True,
        ),
        by_name(
            "Refusals by kind", "share of the rollouts that were told it", lambda n: n.refusals
        ),
        by_name("Operators used", "share of the graphs that name it", lambda n: n.operators),
        one("Graph length", "calls in the source: mean, smallest to largest", lambda n: n.nodes),
        one("Distinct structures", "among the valid graphs of a step", lambda n: len(n.structures)),
        one(
            "Most frequent structure",
            "its share of the valid graphs of a step",
            lambda n: n.dominance,
            "share",
        ),
        one("Distinct prompts", "pairs of instance and text in a step", lambda n: n.prompts),
        one(
            "Cost of a solved task",
            "US dollars of executing" if in_usd else "tokens of executing",
            lambda n: n.usd_per_solved if in_usd else n.tokens_per_solved,
        ),
    ]
    return [chart for chart in found if chart is not None]


def _points(steps: Mapping[int, Numbers], value: Callable[[Numbers], Any]) -> list[Point]:
    """Points of a value that is an interval, a number, or not known."""
    found = [(step, value(numbers)) for step, numbers in steps.items()]
    return [
        Point(step, v.mean, v.low, v.high) if isinstance(v, Interval) else Point(step, float(v))
        for step, v in found
        if v is not None
    ]


# Structures and graphs


@dataclass(frozen=True)
class Drawing:
    """A graph's drawing as SVG that may stand in a page; "" where there is none, and why."""

    svg: str
    why_not: str = ""

    def __html__(self) -> str:
        """What a template puts into the page: the SVG as it is. It was built as an element tree,
        which escapes every text."""
        return self.svg


@dataclass(frozen=True)
class Structure:
    """One structure of valid graphs, named S1, S2, ... by how frequent it is.

    `operators` tells its operators in words, `share` is that of the newest picture's valid
    graphs, `earlier` that of the first picture's (None where there is none). `example` is the
    rollout with the highest reward that wrote it, the latest of equals.
    """

    name: str
    key: str
    operators: str
    share: float
    earlier: float | None
    example: WriterRollout
    drawing: Drawing


def draw(code: str, operators: Collection[str] = (), name: str = "graph") -> Drawing:
    """Draw the graph of this code.

    The drawing is `graph/draw.py`'s without its own style and background: the page's style gives
    it the colours of light and dark, and a style inside a page would reach everything on it.

    Args:
        operators: names of operators beside the registry's that the code may use.
        name: of the drawing, unlike that of any other drawing of the page.
    """
    if not code:
        return Drawing("", "No graph could be read.")
    if len(code) >= MOST_CODE:
        return Drawing("", "Its code is too long to be drawn.")
    own = {other: Operator for other in operators if other not in OPERATORS}
    graph = Graph(name, {GRAPH_FILE: code}, operators=own)
    try:
        flow = graph.flow
    except (RecursionError, MemoryError):
        return Drawing("", "Its code is nested too deeply to be drawn.")
    if graph.shape.tree is None:
        return Drawing("", "Nothing to draw: its code is no Python.")
    if not flow.nodes:
        return Drawing("", "Nothing to draw: no call of an operator was found in its code.")
    if len(flow.nodes) > MOST_NODES:
        return Drawing("", f"Too large to be drawn: {len(flow.nodes)} calls.")
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
    if float(root.get("width", "0")) > _MOST_WIDTH:
        root.attrib.pop("width")
        root.attrib.pop("height")
    return Drawing(ElementTree.tostring(root, encoding="unicode"))


def structures(records: WriterRecords, most: int = _MOST_STRUCTURES) -> list[Structure]:
    """The most frequent structures of the newest picture, each drawn; then those that only
    earlier rollouts had."""
    every = with_graphs(records.every)
    overall, newest, first = (
        Counter(map(structure_of, with_graphs(rollouts)))
        for rollouts in (every, records.latest, records.earliest)
    )
    examples: dict[str, WriterRollout] = {}
    for rollout in every:
        best = examples.get(structure_of(rollout))
        if best is None or _reward(rollout) >= _reward(best):
            examples[structure_of(rollout)] = rollout
    order = sorted(overall, key=lambda key: (-newest[key], -overall[key], key))
    found = []
    for place, key in enumerate(order[:most], 1):
        example = examples[key]
        sites = [f"{sites} {name}" for name, sites in example.operators.items()]
        found.append(
            Structure(
                name=f"S{place}",
                key=key,
                operators=", ".join(sites) or "no operator",
                share=newest[key] / newest.total() if newest else 0.0,
                earlier=first[key] / first.total() if first else None,
                example=example,
                drawing=draw(example.code, example.operators, f"structure-{place}"),
            )
        )
    return found


def by_type(rollouts: Rollouts, shown: Sequence[Structure]) -> list[dict[str, Any]]:
    """Which structures the valid graphs of each problem type have; the most frequent types.

    `shares` are in the order of the structures shown; `most` names the most frequent, "" if it
    is not among those."""
    types: dict[str, Counter[str]] = defaultdict(Counter)
    for rollout in with_graphs(rollouts):
        types[rollout.problem_type][structure_of(rollout)] += 1
    names = {structure.key: structure.name for structure in shown}
    most = sorted(types.items(), key=lambda item: (-item[1].total(), item[0]))[:_MOST_TYPES]
    return [
        {
            "problem_type": name or "not said",
            "graphs": counts.total(),
            "distinct": len(counts),
            "shares": [counts[structure.key] / counts.total() for structure in shown],
            "most": names.get(counts.most_common(1)[0][0], ""),
        }
        for name, counts in most
    ]


def _types_sentence(types: Sequence[Mapping[str, Any]]) -> str:
    """Whether kinds of task get different graphs, judged by their most frequent structure."""
    if len(types) < 2:
        return ""
    most = {row["most"] for row in types}
    if len(most) == 1 and "" not in most:
        return f"All types have the same most frequent structure, {types[0]['most']}."
    told = ", ".join(f"{row['problem_type']}: {row['most'] or 'another'}" for row in types)
    return f"Types differ in their most frequent structure ({told})."


def best_and_worst(records: WriterRecords) -> list[dict[str, Any]]:
    """The best and the worst valid graph and the worst refused one, by the mean reward of their
    uses in training (in the newest evaluations where there was no training). What could not even
    be read is shown where nothing else was refused.

    A graph is told apart by its code, whatever its prompts: a policy that writes prompts for each
    problem writes no text twice.
    """
    rollouts = records.of_steps(records.training) or records.latest
    rewarded = [rollout for rollout in rollouts if rollout.reward is not None]
    valid = _by_code([rollout for rollout in rewarded if rollout.valid])
    invalid = [rollout for rollout in rewarded if not rollout.valid]
    refused = _by_code([rollout for rollout in invalid if rollout.code] or invalid)
    found = []
    if valid:
        best, worst = max(valid, key=_mean_reward), min(valid, key=_mean_reward)
        found.append(_shown("Best graph", "best", best, highest=True))
        if worst is not best:
            found.append(_shown("Worst valid graph", "worst", worst))
    if refused:
        found.append(_shown("Worst refused graph", "refused", min(refused, key=_mean_reward)))
    return found


def _by_code(rollouts: Rollouts) -> list[list[WriterRollout]]:
    """The uses of each graph, of those used often enough; of all where none is."""
    graphs: dict[str, list[WriterRollout]] = defaultdict(list)
    for rollout in rollouts:
        graphs[(rollout.code or rollout.text).strip()].append(rollout)
    often = [uses for uses in graphs.values() if len(uses) >= FEW_USES]
    return often or list(graphs.values())


def _shown(title: str, name: str, uses: Rollouts, highest: bool = False) -> dict[str, Any]:
    """With its most telling use: that of the highest or lowest reward, the latest of equals."""
    sign = 1 if highest else -1
    rollout = max(uses, key=lambda use: (sign * _reward(use), use.step))
    drawing = draw(rollout.code, rollout.operators, f"{name}-graph")
    told = {"title": title, "uses": len(uses), "reward": _mean_reward(uses)}
    return {**told, "rollout": rollout, "drawing": drawing}


def _mean_reward(uses: Rollouts) -> float:
    return mean([_reward(use) for use in uses])


def _reward(rollout: WriterRollout) -> float:
    return rollout.reward if rollout.reward is not None else float("-inf")


# Prompts

Mark = Literal["", "del", "ins"]
Pieces = list[tuple[Mark, str]]


def prompt_changes(
    training: Mapping[int, Rollouts], most: int = _MOST_INSTANCES
) -> list[dict[str, Any]]:
    """How prompts changed: of the most frequent operator instances that were written in at least
    two steps, the text that most rollouts of the first and of the last such step wrote (the first
    of them where no text was written twice): `count` of the `of` rollouts that wrote one."""
    used = Counter(name for of in training.values() for rollout in of for name in rollout.prompts)
    found: list[dict[str, Any]] = []
    for name, _ in used.most_common():
        texts = {
            step: Counter(r.prompts[name] for r in rollouts if name in r.prompts)
            for step, rollouts in sorted(training.items())
        }
        steps = [step for step, counts in texts.items() if counts]
        if len(steps) < 2 or len(found) == most:
            continue
        sides: list[dict[str, Any]] = []
        for step in (steps[0], steps[-1]):
            text, number = texts[step].most_common(1)[0]
            text = text[:MOST_CHARACTERS]
            sides.append({"step": step, "text": text, "count": number, "of": texts[step].total()})
        before, after = sides
        pieces = marked(before["text"], after["text"])
        same = before["text"] == after["text"]
        change = {"instance": name, "before": before, "after": after}
        found.append({**change, "pieces": pieces, "same": same})
    return found


def marked(before: str, after: str) -> tuple[Pieces, Pieces]:
    """Both texts in pieces: what the second lacks is marked in the first, and the reverse."""
    old, new = _words(before), _words(after)
    first: Pieces = []
    second: Pieces = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if b > a:
            first.append(("" if kind == "equal" else "del", "".join(old[a:b])))
        if d > c:
            second.append(("" if kind == "equal" else "ins", "".join(new[c:d])))
    return first, second


def _words(text: str) -> list[str]:
    """Words with the white space behind them, so that joining gives the text again; what is
    behind the last of `MOST_WORDS` is one piece, as the comparison's time is their cube."""
    words = re.findall(r"\s+|\S+\s*", text)
    rest = "".join(words[MOST_WORDS:])
    return [*words[:MOST_WORDS], *([rest] if rest else [])]
