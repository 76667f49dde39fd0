"""The report's section on the workflows that the policy wrote, ready for `writer.html.jinja`.

`writer.py` reads and counts; here that becomes tables, curves, drawings and sentences of bounded
size. Escaping is the template's. A graph is drawn from its code, which is parsed and never run.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup

from aflow_tune.graph.draw import to_svg
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.inside import GRAPH_FILE
from aflow_tune.operators import OPERATORS, Operator
from aflow_tune.report.charts import Chart, Curve, Point, draw, number
from aflow_tune.report.evaluation import pair
from aflow_tune.report.page import plain_text
from aflow_tune.report.statistics import Interval, mean
from aflow_tune.report.writer import (
    Numbers,
    Rollouts,
    WriterRecords,
    WriterRollout,
    is_valid,
    steps_told,
    structures_of,
    task_means,
)
from aflow_tune.writer.types import Level

_LEVELS = {
    Level.CLEAN: ("as written", 2),
    Level.DEFAULT_PROMPTS: ("default prompts", 0),
    Level.SIMPLER: ("simpler graph", 1),
    Level.DEFAULT_WORKFLOW: ("default workflow", 3),
}
"""Names and colours."""
MOST_NODES = 40
"""Larger graphs are not drawn: nobody could read them."""
MOST_CODE = 20_000
"""Characters of code; longer ones are not drawn."""
FEW_USES = 3
"""A graph is judged from so many uses on: of fewer the mean reward is mostly luck."""
MOST_CHARACTERS, MOST_WORDS = 1500, 300
"""Of a prompt: that are compared, and that are compared one by one."""

_MOST_KINDS, _MOST_STRUCTURES, _MOST_TYPES, _MOST_CURVES, _MOST_INSTANCES = 8, 6, 6, 6, 4
_MOST_WIDTH = 2_000.0
"""Pixels of a drawing."""


def _rows(n: Numbers) -> dict[str, str]:
    """The table of numbers: labels, and the texts for one phase."""
    usd, tokens, clean = n.usd_per_solved, n.tokens_per_solved, n.correct_clean
    levels = {
        f"answered by fallback {level.value}: {name}": f"{n.levels[level]:.0%}"
        for level, (name, _) in _LEVELS.items()
        if level != Level.CLEAN
    }
    return {
        "rollouts": str(n.rollouts),
        "valid graphs": n.valid.text(),
        "answered by the graph as written": f"{n.levels[Level.CLEAN]:.0%}",
        **levels,
        "score": n.correct.text() if n.correct else "",
        "score of clean rollouts, fallbacks as 0": clean.text() if clean else "",
        "calls in a graph, mean": f"{n.nodes.mean:.1f}" if n.nodes else "",
        "distinct structures": str(len(n.structures)),
        "distinct prompts": str(n.prompts),
        "US dollars a solved task": "" if usd is None else number(usd),
        "tokens a solved task": "" if tokens is None else f"{tokens:,.0f}",
    }


class Phase(NamedTuple):
    """A column of a table."""

    label: str
    rollouts: Rollouts
    numbers: Numbers


def writer_section(records: WriterRecords) -> dict[str, Any]:
    """All that the section shows of a run folder's records."""
    ends = {"training": (records.first, records.last), "held-out": (records.before, records.after)}
    phases = [
        Phase(f"{label}, {steps_told(rollouts)}", rollouts, Numbers(rollouts))
        for label, both in ends.items()
        for rollouts in both
        if rollouts
    ]
    texts = [_rows(phase.numbers) for phase in phases]
    rows = [(label, [column[label] for column in texts]) for label in texts[0]]
    held_out = []  # valid graphs before and after, on the same tasks
    for name, steps in list(records.held_out.items())[:_MOST_CURVES]:
        first, last = min(steps), max(steps)
        means = (task_means(steps[step], is_valid) for step in (first, last))
        before, after = ({item: share for (_, item), share in of.items()} for of in means)
        if first < last:
            paired = pair(before, after)
            held_out.append({"taskset": name, "before": first, "after": last, "valid": paired})
    totals: Counter[str] = Counter()
    for phase in phases:
        totals.update(phase.numbers.refusals)
    refusals = []  # the most frequent, with what most rollouts of the newest phase were told
    for kind in sorted(totals, key=lambda kind: (-totals[kind], kind))[:_MOST_KINDS]:
        example = ""
        for phase in phases:
            listed = [refusal for rollout in phase.rollouts for refusal in rollout.refusals]
            said = Counter(one.message for one in listed if one.kind == kind and one.message)
            example = said.most_common(1)[0][0] if said else example
        shares = [phase.numbers.refusals.get(kind, 0.0) for phase in phases]
        refusals.append({"kind": kind, "shares": shares, "example": plain_text(example)})
    shown = structures(records)
    types = by_type(records.latest, shown)
    sentence = ""  # whether kinds of task get different graphs
    most = {row["most"] for row in types}
    if len(most) == 1 < len(types) and "" not in most:
        sentence = f"All types have the same most frequent structure, {types[0]['most']}."
    elif len(types) > 1:
        told = ", ".join(f"{row['problem_type']}: {row['most'] or 'another'}" for row in types)
        sentence = f"Types differ in their most frequent structure ({told})."
    kind = "held-out" if records.after else "training"
    return {
        "rollouts": len(records.every),
        "phases": phases,
        "rows": [(label, texts) for label, texts in rows if any(texts)],
        "held_out": held_out,
        "charts": writer_charts(records),
        "refusals": refusals,
        "structures": shown,
        "distinct": len(structures_of(records.latest)),
        "types": types,
        "types_sentence": sentence,
        "where": f"{kind}, {steps_told(records.latest)}",
        "graphs": best_and_worst(records),
        "changes": prompt_changes(records.training),
        "level_names": {level: name for level, (name, _) in _LEVELS.items()},
    }


def summary_lines(records: WriterRecords) -> list[str]:
    """Two lines for the end of a run: valid graphs and fallbacks, and distinct structures."""
    after, place = Numbers(records.latest), steps_told(records.latest)
    valid, fallbacks = f"{after.valid.mean:.0%}", f"{after.fallbacks:.0%}"
    if records.earliest:
        before = Numbers(records.earliest)
        place = f"{steps_told(records.earliest)} to {place}"
        valid = f"{before.valid.mean:.0%} -> {valid}"
        fallbacks = f"{before.fallbacks:.0%} -> {fallbacks}"
    where = "held-out" if records.after else "training"
    graphs = sum(after.structures.values())
    most = "" if after.dominance is None else f", the most frequent in {after.dominance:.0%}"
    return [
        f"Written graphs: {valid} valid, {fallbacks} answered by a fallback ({where}, {place}).",
        f"Distinct structures: {len(after.structures)} among {graphs} valid graphs{most}.",
    ]


# Curves

Value = Callable[[Numbers], Any]
"""An interval, a number, or None: not known."""
_SHARE = "share of the rollouts, 95% interval"


def writer_charts(records: WriterRecords) -> list[dict[str, Any]]:
    """All charts that the records have numbers for: over training steps and over evaluations."""
    training = {step: Numbers(of_step) for step, of_step in records.training.items()}
    held_out = {
        name: {step: Numbers(of_step) for step, of_step in steps.items()}
        for name, steps in list(records.held_out.items())[:_MOST_CURVES]
    }
    evaluated = [step for steps in held_out.values() for step in steps] or [0]
    ends = min(evaluated), max(evaluated)

    def one(value: Value) -> list[Curve]:
        return [Curve("", _points(training, value))]

    def by_taskset(value: Value) -> list[Curve]:
        named = enumerate(held_out.items())
        return [Curve(name, _points(steps, value), colour) for colour, (name, steps) in named]

    def most_frequent(shares: Callable[[Numbers], Mapping[str, float]]) -> list[Curve]:
        totals: Counter[str] = Counter()
        for numbers in training.values():
            totals.update(shares(numbers))
        most = sorted(totals, key=lambda name: (-totals[name], name))[:_MOST_CURVES]
        return [
            Curve(
                plain_text(name),
                _points(training, lambda n, name=name: shares(n).get(name, 0.0)),  # type: ignore[misc]
                colour,
            )
            for colour, name in enumerate(most)
        ]

    levels = [
        Curve(name, _points(training, lambda n, level=level: n.levels[level]), colour)  # type: ignore[misc]
        for level, (name, colour) in _LEVELS.items()
    ]
    answered = len(training) > 1 and any(point.value for c in levels for point in c.points)
    in_usd = all(
        n.usd_per_solved is not None or n.tokens_per_solved is None for n in training.values()
    )
    listed = [
        Chart("Valid graphs", f"training: {_SHARE}", one(lambda n: n.valid), "share"),
        Chart(
            "Valid graphs, held-out", _SHARE, by_taskset(lambda n: n.valid),
            "share", legend=True, steps=ends,
        ),
        Chart(
            "Right answers of clean rollouts, held-out", "score; 0 where a fallback answered",
            by_taskset(lambda n: n.correct_clean), "share", legend=True, steps=ends,
        ),
        Chart(
            "Which workflow answered", "share of the rollouts, by what gave the answer",
            levels if answered else [], "share", stacked=True,
        ),
        Chart(
            "Refusals by kind", "share of the rollouts that were told it",
            most_frequent(lambda n: n.refusals), "share", legend=True,
        ),
        Chart(
            "Operators used", "share of the graphs that name it",
            most_frequent(lambda n: n.operators), "share", legend=True,
        ),
        Chart(
            "Graph length", "calls in the source: mean, smallest to largest",
            one(lambda n: n.nodes), "zero",
        ),
        Chart(
            "Distinct structures", "among the valid graphs of a step",
            one(lambda n: len(n.structures)), "zero",
        ),
        Chart(
            "Most frequent structure", "its share of the valid graphs of a step",
            one(lambda n: n.dominance), "share",
        ),
        Chart(
            "Distinct prompts", "pairs of instance and text in a step",
            one(lambda n: n.prompts), "zero",
        ),
        Chart(
            "Cost of a solved task", f"{'US dollars' if in_usd else 'tokens'} of executing",
            one(lambda n: n.usd_per_solved if in_usd else n.tokens_per_solved), "zero",
        ),
    ]  # fmt: skip
    return draw(listed, (min(training, default=0), max(training, default=0)))


def _points(steps: Mapping[int, Numbers], value: Value) -> list[Point]:
    found = [(step, value(numbers)) for step, numbers in steps.items()]
    return [
        Point(step, v.mean, v.low, v.high) if isinstance(v, Interval) else Point(step, float(v))
        for step, v in found
        if v is not None
    ]


# Structures and graphs


class Drawing(NamedTuple):
    """A graph's drawing, built as an element tree, which escapes every text; "" where there is
    none, and why."""

    svg: str
    why_not: str = ""


def drawing_of(code: str, operators: Collection[str] = (), name: str = "graph") -> Drawing:
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
    return Drawing(Markup(ElementTree.tostring(root, encoding="unicode")))


def structures(records: WriterRecords) -> list[dict[str, Any]]:
    """The most frequent structures of the newest picture, named S1, S2, ...; then those that only
    earlier rollouts had.

    `share` is that of the newest picture's valid graphs, `earlier` that of the first picture's
    (None where there is none). Drawn is the rollout with the highest reward, the latest of equals.
    """
    overall, newest, first = (
        structures_of(rollouts) for rollouts in (records.every, records.latest, records.earliest)
    )
    examples: dict[str, WriterRollout] = {}
    for rollout in records.every:
        key = rollout.structure if rollout.valid else None
        if key and (key not in examples or _reward(rollout) >= _reward(examples[key])):
            examples[key] = rollout
    order = sorted(overall, key=lambda key: (-newest[key], -overall[key], key))
    found = []
    for place, key in enumerate(order[:_MOST_STRUCTURES], 1):
        example = examples[key]
        sites = [f"{sites} {name}" for name, sites in example.operators.items()]
        found.append(
            {
                "name": f"S{place}",
                "key": key,
                "operators": ", ".join(sites) or "no operator",
                "share": newest[key] / newest.total() if newest else 0.0,
                "earlier": first[key] / first.total() if first else None,
                "drawing": drawing_of(example.code, example.operators, f"structure-{place}"),
            }
        )
    return found


def by_type(rollouts: Rollouts, shown: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which structures the valid graphs of each problem type have; the most frequent types.

    `shares` are in the order of the structures shown; `most` names the most frequent, "" if it
    is not among those."""
    of_type: dict[str, list[WriterRollout]] = defaultdict(list)
    for rollout in rollouts:
        of_type[rollout.problem_type].append(rollout)
    types = [(name, counts) for name, of in of_type.items() if (counts := structures_of(of))]
    types.sort(key=lambda item: (-item[1].total(), item[0]))
    names = {structure["key"]: structure["name"] for structure in shown}
    return [
        {
            "problem_type": name or "not said",
            "graphs": counts.total(),
            "distinct": len(counts),
            "shares": [counts[key] / counts.total() for key in names],
            "most": names.get(counts.most_common(1)[0][0], ""),
        }
        for name, counts in types[:_MOST_TYPES]
    ]


def best_and_worst(records: WriterRecords) -> list[dict[str, Any]]:
    """The best and the worst valid graph and the worst refused one, by the mean reward of their
    uses in training (in the newest evaluations where there was no training), each with its use of
    the highest or lowest reward. What could not be read is shown where nothing else was refused.

    A graph is told apart by its code, whatever its prompts: a policy that writes prompts for each
    problem writes no text twice. Those used less than `FEW_USES` times count where all are.
    """
    training = [rollout for of_step in records.training.values() for rollout in of_step]
    rewarded = [rollout for rollout in training or records.latest if rollout.reward is not None]
    invalid = [rollout for rollout in rewarded if not rollout.valid]

    def worst_first(rollouts: Rollouts) -> list[list[WriterRollout]]:
        graphs: dict[str, list[WriterRollout]] = defaultdict(list)
        for rollout in rollouts:
            graphs[(rollout.code or rollout.text).strip()].append(rollout)
        often = [uses for uses in graphs.values() if len(uses) >= FEW_USES]
        return sorted(often or graphs.values(), key=_mean_reward)

    valid = worst_first([rollout for rollout in rewarded if rollout.valid])
    refused = worst_first([rollout for rollout in invalid if rollout.code] or invalid)
    shown = [("Best graph", "best", uses, 1) for uses in valid[-1:]]
    shown += [("Worst valid graph", "worst", uses, -1) for uses in valid[:-1][:1]]
    shown += [("Worst refused graph", "refused", uses, -1) for uses in refused[:1]]
    found = []
    for title, name, uses, sign in shown:
        rollout = max(uses, key=lambda use: (sign * _reward(use), use.step))
        drawing = drawing_of(rollout.code, rollout.operators, f"{name}-graph")
        told = {"title": title, "uses": len(uses), "reward": _mean_reward(uses)}
        found.append({**told, "rollout": rollout, "drawing": drawing})
    return found


def _mean_reward(uses: Rollouts) -> float:
    return mean([_reward(use) for use in uses])


def _reward(rollout: WriterRollout) -> float:
    return rollout.reward if rollout.reward is not None else float("-inf")


# Prompts

Pieces = list[tuple[str, str]]
"""Texts with their marks: "", "del" or "ins"."""


def prompt_changes(training: Mapping[int, Rollouts]) -> list[dict[str, Any]]:
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
        if len(steps) < 2 or len(found) == _MOST_INSTANCES:
            continue
        sides: list[dict[str, Any]] = []
        for step in (steps[0], steps[-1]):
            text, number = texts[step].most_common(1)[0]
            told = {"step": step, "count": number, "of": texts[step].total()}
            sides.append({**told, "text": text[:MOST_CHARACTERS]})
        before, after = (side["text"] for side in sides)
        change = {"instance": name, "before": sides[0], "after": sides[1]}
        found.append({**change, "pieces": marked(before, after), "same": before == after})
    return found


def marked(before: str, after: str) -> tuple[Pieces, Pieces]:
    """Both texts in pieces: what the second lacks is marked in the first, and the reverse."""

    def words(text: str) -> list[str]:
        """Words with the white space behind them, so that joining gives the text again; what is
        behind the last of `MOST_WORDS` is one piece, as the comparison's time is their cube."""
        found = re.findall(r"\s+|\S+\s*", text)
        return [*found[:MOST_WORDS], *filter(None, ["".join(found[MOST_WORDS:])])]

    old, new = words(before), words(after)
    first: Pieces = []
    second: Pieces = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if b > a:
            first.append(("" if kind == "equal" else "del", "".join(old[a:b])))
        if d > c:
            second.append(("" if kind == "equal" else "ins", "".join(new[c:d])))
    return first, second
