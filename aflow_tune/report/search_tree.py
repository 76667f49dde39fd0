"""The tree of a search on its page: kept workflows, what each changed, charts, the best graph.

A tree is an entry of `trees` in `search.json`, perhaps of an interrupted search: edges are whole,
and anything else may be missing. Graphs are drawn from their source, which is parsed and never run.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aflow_tune.graph.inside import GRAPH_FILE
from aflow_tune.report.charts import Chart, Curve, Point, draw
from aflow_tune.report.writer import drawing_of

_MOST_TRIED, _MOST_DIFF = 40, 200
_FATES = ("kept", "dropped", "refused", "not raced to the end")
"""What became of a proposal."""
Json = Mapping[str, Any]


def tree_lines(tree: Json) -> list[dict[str, Any]]:
    """The kept workflows of a tree, each above its children, with what was tried below it."""
    workflows, edges = tree.get("workflows") or {}, tree.get("edges") or []
    seed, winner = tree.get("seed"), tree.get("winner")
    kept = [key for key, workflow in workflows.items() if workflow.get("kept") or key == seed]
    below: dict[str, list[Json]] = defaultdict(list)
    made: dict[str, Json] = {}
    for edge in edges:
        below[edge["parent"]].append(edge)
        if not edge.get("refusal") and edge.get("child") in kept and edge["child"] != seed:
            made.setdefault(edge["child"], edge)
    on_way = {winner}
    while winner in made and made[winner]["parent"] not in on_way:
        winner = made[winner]["parent"]
        on_way.add(winner)

    def fate(edge: Json) -> str:
        if edge.get("refusal"):
            return "refused"
        if made.get(edge.get("child") or "") is edge:
            return "kept"
        return "not raced to the end" if edge.get("gain") is None else "dropped"

    roots = [key for key in kept if key not in made]
    left, lines = [(key, 0) for key in sorted(roots, key=lambda key: key == seed)], []
    while left:
        key, depth = left.pop()
        own, workflow, edge = below[key], workflows[key], made.get(key)
        children = [item["child"] for item in own if fate(item) == "kept"]
        left += [(child, depth + 1) for child in reversed(children)]
        counts = Counter(map(fate, own))
        told = ", ".join(f"{counts[what]} {what}" for what in _FATES if counts[what])
        before = workflows.get(edge["parent"], {}).get("state") if edge else None
        lines.append(
            {
                "depth": depth,
                "value": workflow.get("value"),
                "edge": edge,
                "what": edge["what"] if edge else "the seed" if key == seed else "from the pool",
                "operators": str(workflow.get("structure") or "").partition(" | ")[0],
                "tried": f"{len(own)} tried: {told}" if own else "",
                "others": [(e, fate(e)) for e in own if fate(e) != "kept"][:_MOST_TRIED],
                "winner": key == tree.get("winner"),
                "on_way": key in on_way,
                "diff": [*_diff(before or {}, workflow.get("state") or {})] if edge else [],
            }
        )
    return lines


def _text(state: Json) -> str:
    """Everything of a workflow that an edit can change."""
    parts = [*(state.get("sources") or {}).values()]
    for kind in ("instructions", "prompts"):
        for name, text in (state.get(kind) or {}).items():
            text = text if isinstance(text, str) else json.dumps(text, indent=1)
            parts.append(f"{kind.removesuffix('s')} of {name}:\n{text}")
    return "\n\n".join(str(part).rstrip() for part in parts)


def _diff(before: Json, after: Json) -> Iterator[tuple[str, str]]:
    """The changed lines with a little around them, each with its CSS class."""
    old, new = _text(before).splitlines(), _text(after).splitlines()
    changed = difflib.unified_diff(old, new, lineterm="", n=2)
    for line in itertools.islice(changed, 2, 2 + _MOST_DIFF):  # without the names of files
        yield {"+": "new", "-": "old", "@": "where"}.get(line[:1], ""), line


def best_graphs(tree: Json, name: str) -> list[dict[str, Any]]:
    """The seed and the winner, drawn, with all their texts."""
    found: list[dict[str, Any]] = []
    for title, key in {"The winner": tree.get("winner"), "The seed": tree.get("seed")}.items():
        workflow = (tree.get("workflows") or {}).get(key) or {}
        state = workflow.get("state") or {}
        code = (state.get("sources") or {}).get(GRAPH_FILE) or ""
        words = str(workflow.get("structure") or "").partition(" | ")[0].split()
        operators = {word.partition("[")[0] for word in words}
        drawing = drawing_of(code, operators, f"{name}-{len(found)}")
        told = {"title": title, "drawing": drawing, "text": _text(state)}
        found += [told] if told["text"] else []
    return found[::-1] if tree.get("winner") != tree.get("seed") else found[-1:]


def tree_charts(trees: Sequence[Json]) -> list[dict[str, Any]]:
    """The best score and the rollouts of races, by round; a line a task set."""
    best, spent, last = [], [], 0
    for colour, tree in enumerate(trees):
        workflows, edges = tree.get("workflows") or {}, tree.get("edges") or []
        children = {edge.get("child") for edge in edges if not edge.get("refusal")}
        roots = [one for key, one in workflows.items() if key not in children]
        top = max((one["value"] for one in roots if one.get("value") is not None), default=0.0)
        most = tree.get("problems") or math.inf
        trials = sum(min(most, (one.get("outcome") or {}).get("scored") or 0) for one in roots)
        tops, sums = [Point(0, top)], [Point(0, trials)]
        for step, of in itertools.groupby(edges, lambda edge: edge["round"]):
            for edge in of:
                workflow = workflows.get(edge.get("child") or "") or {}
                if workflow.get("kept") and not edge.get("refusal"):
                    top = max(top, workflow.get("value") or 0.0)
                trials += edge.get("shared") or 0
            tops.append(Point(step, top))
            sums.append(Point(step, trials))
        last = max(last, tops[-1].step)
        label = str(tree.get("taskset"))
        best.append(Curve(label, tops, colour % 6))
        spent.append(Curve(label, sums, colour % 6))
    note = "by round, on the problems of the races: chosen by them, so too high"
    charts = [
        Chart("Best score so far", note, best, "unit"),
        Chart("Rollouts of races", "by round, summed; scored ones", spent, "zero"),
    ]
    return draw(charts, (0, last))
