"""Writes `report.html` of a search over workflows, and the lines printed at its end.

Everything comes from `search.json` in the search's folder. An interrupted search lacks parts of it;
the page then shows the rest. Only the comparison is on problems that the search has not seen: the
scores of the tree are those that its workflows were chosen by, and are too high for that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aflow_tune.report.charts import number
from aflow_tune.report.evaluation import Paired, pair
from aflow_tune.report.page import write_page
from aflow_tune.report.search_tree import Json, best_graphs, tree_charts, tree_lines
from aflow_tune.report.statistics import Interval, mean, share_or_mean_interval

SEARCH_FILE = "search.json"
WHOLE = "whole"
"""The column of an ablation with every operator."""
_PAGE = "report.html"
_MOST_LINES, _MOST_SHOWN = 200, 6
_NAMES = {"seed": "the seed", "single call": "a single call"}


def write_search_report(folder: Path) -> Path:
    """Write the page of a search; returns its path. Raises OSError, ValueError: `search.json` is
    not there, or is no JSON."""
    held = read_search(folder)
    spent, trained = held.get("spent") or {}, held.get("trained") or []
    pool = held.get("pool") or {}
    facts = [
        ("seed", held.get("seed")),
        ("selection", held.get("select")),
        ("rollouts", spent.get("rollouts")),
        ("reused from the pool", spent.get("reused")),
        ("tokens", None if spent.get("tokens") is None else number(spent["tokens"])),
        ("US dollars", _usd(spent["usd"]) if "usd" in spent else None),
        ("ended by", held.get("why") or None),
    ]
    counts = ("searches", "workflows", "edges", "trials")
    return write_page(
        folder / _PAGE,
        "search.html.jinja",
        title=str(held.get("name") or folder.resolve().name),
        facts=[(label, value) for label, value in facts if value is not None],
        unfinished=_unfinished(held),
        tasksets=_tasksets(held),
        charts=tree_charts(held.get("trees") or []),
        proposers=held.get("proposers") or {},
        uses=_uses(held),
        trained=trained,
        measures=list(dict.fromkeys(name for step in trained for name in step)),
        pool=[f"{pool[name]:,} {name}" for name in counts if name in pool],
        pool_path=pool.get("path", ""),
        usd=_usd,
        folder=str(folder),
    )


def search_summary(folder: Path) -> str:
    """The text printed at the end of a search: verdicts, what was spent, paths."""
    held = read_search(folder)
    sections, spent = _tasksets(held), held.get("spent") or {}
    sentences = [
        f"{section['name']}: {sentence}" if len(sections) > 1 else sentence
        for section in sections
        for sentence in section["sentences"]
    ]
    told = [f"{spent.get('rollouts', 0):,} rollouts", f"{spent.get('tokens', 0):,} tokens"]
    told += [_usd(spent["usd"]) + " US dollars"] if spent.get("usd") is not None else []
    reused = f"; {spent['reused']:,} trials came from the pool" if spent.get("reused") else ""
    ended = f"; ended by: {held['why']}" if held.get("why") else ""
    sentences.append(f"Spent {', '.join(told)}{reused}{ended}.")
    sentences += [text] if (text := _unfinished(held)) else []
    best = [str(tree["best"]) for tree in held.get("trees") or [] if tree.get("best")]
    places = [("best", path) for path in best] + [("report", str(folder / _PAGE))]
    return "\n".join([*sentences, "", *(f"{label + ':':<12}{path}" for label, path in places)])


def read_search(folder: Path) -> dict[str, Any]:
    """The content of `search.json`. Raises OSError, ValueError."""
    held = json.loads((folder / SEARCH_FILE).read_text("utf-8"))
    if not isinstance(held, dict):
        raise ValueError(f"{folder / SEARCH_FILE} has no JSON object")
    return held


def _unfinished(held: Json) -> str:
    return "" if held.get("finished") else "This search has not finished: run it again to resume."


def _usd(value: float | None) -> str:
    return "unknown" if value is None else number(value)


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum; None if a part is unknown."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


# The verdict


@dataclass(frozen=True)
class Versus:
    """The winner against another column on the same fresh problems, without the `unscored` ones,
    which a side has no score on."""

    old: str
    paired: Paired
    unscored: int

    def verdict(self) -> str:
        """One sentence: whether the difference is shown, and the numbers."""
        change, numbers = self.paired.difference, self.paired.numbers()
        if self.paired.direction:
            word = "better" if self.paired.direction > 0 else "worse"
            return f"The winner is {word} than {self.old}: {numbers}."
        if not change.excludes_zero:
            why = "one problem is too few" if change.low is None else "the interval includes zero"
            return f"The winner is no better than {self.old}: {numbers}; {why}."
        doubt = f"chance alone does as much (exact sign test, p = {self.paired.p_value:.2g})"
        return f"Too few problems to tell the winner from {self.old}: {numbers}, but {doubt}."


def _scores(column: Json) -> list[float | None]:
    return list(column.get("scores") or [])


def _paired(old: Json, new: Json) -> Paired | None:
    """Two columns on the problems that both have a score on."""
    sides = (
        {place: score for place, score in enumerate(_scores(column)) if score is not None}
        for column in (old, new)
    )
    return pair(*sides)


def _tasksets(held: Json) -> list[dict[str, Any]]:
    """What the page shows of each task set."""
    trees = {str(tree.get("taskset")): tree for tree in held.get("trees") or []}
    compared = held.get("comparison") or {}
    found: list[dict[str, Any]] = []
    for name in dict.fromkeys([*trees, *compared]):
        tree, comparison = trees.get(name, {}), compared.get(name) or {}
        columns = comparison.get("columns") or {}
        same = bool(tree) and tree.get("winner") == tree.get("seed")
        versus = []
        for other in sorted(columns, key=lambda label: label != "seed"):
            old, new = columns[other], columns.get("winner") or {}
            paired = None if other == "winner" else _paired(old, new)
            if paired is not None and not (same and other == "seed"):
                left_out = len(_scores(old)) - paired.difference.count
                versus.append(Versus(_NAMES.get(other, other), paired, left_out))
        sentences = ["No better than the seed: the winner is the seed itself."] if same else []
        sentences += [one.verdict() for one in versus]
        nothing = "Nothing was compared on fresh problems: no gain is shown."
        lines = tree_lines(tree)
        found.append(
            {
                "name": name,
                "versus": versus,
                "sentences": sentences if versus else [*sentences, nothing],
                "columns": [(label, *_column(column)) for label, column in columns.items()],
                "lines": lines[:_MOST_LINES],
                "left_out": len(lines[_MOST_LINES:]),
                "graphs": best_graphs(tree, f"graph-{len(found)}"),
                "differing": _differing(comparison),
                "ablation": ablation_rows(comparison.get("ablation") or {}),
                "best": tree.get("best") or "",
            }
        )
    return found


def _column(column: Json) -> tuple[str, int, str, str]:
    """Mean score with its interval, unscored problems, tokens a problem, US dollars."""
    scores = _scores(column)
    known = [score for score in scores if score is not None]
    interval = share_or_mean_interval(known, shares=True)
    told = "none" if interval is None else interval.text()
    tokens = _each(column, "tokens")
    each = "unknown" if tokens is None else number(tokens)
    return told, len(scores) - len(known), each, _usd(column.get("usd"))


def _each(column: Json, name: str) -> float | None:
    """A total of a column by problem; None if it is unknown."""
    total, count = column.get(name), len(_scores(column))
    return None if total is None or not count else total / count


def _differing(comparison: Json) -> dict[str, Any]:
    """The first held-out problems, by their place, on which winner and seed have other scores."""
    columns = comparison.get("columns") or {}
    sides = [columns.get(name) or {} for name in ("seed", "winner")]
    places = [
        place
        for place, (old, new) in enumerate(zip(*map(_scores, sides), strict=False))
        if old is not None and new is not None and old != new
    ]

    def at(values: Any, place: int) -> Any:
        return values[place] if values and place < len(values) else None

    shown = [
        {
            "problem": at(comparison.get("problems"), place),
            "expected": at(comparison.get("expected"), place),
            "sides": [(at(s.get("answers"), place), at(_scores(s), place)) for s in sides],
            "place": place + 1,
        }
        for place in places[:_MOST_SHOWN]
    ]
    return {"count": len(places), "shown": shown}


# Where the money went


def _uses(held: Json) -> list[tuple[str, int, float | None, float | None]]:
    """What spent tokens: its name, how many trials it had, its tokens, its US dollars."""
    workflows = [
        workflow for tree in held.get("trees") or [] for workflow in tree["workflows"].values()
    ]
    found = []
    for name, kept in {"kept workflows": True, "dropped workflows": False}.items():
        outcomes = [w.get("outcome") or {} for w in workflows if bool(w.get("kept")) is kept]
        found.append((name, sum(one.get("scored") or 0 for one in outcomes), outcomes))
    compared = list((held.get("comparison") or {}).values())
    columns = [c for one in compared for c in (one.get("columns") or {}).values()]
    found.append(("final comparison", sum(len(_scores(c)) for c in columns), columns))
    ablated = [
        column
        for one in compared
        for name, column in (one.get("ablation") or {}).items()
        if name != WHOLE
    ]
    found.append(("what each operator earns", sum(len(_scores(c)) for c in ablated), ablated))
    found.append(("proposing", 0, list((held.get("proposers") or {}).values())))
    return [
        (name, trials, _sum([p.get("tokens") for p in parts]), _sum([p.get("usd") for p in parts]))
        for name, trials, parts in found
        if parts
    ]


class AblationRow(NamedTuple):
    """A workflow without one operator, or the whole: its mean score (None: nothing was scored),
    the paired difference to the whole (None for the whole itself), and its use of the model."""

    name: str
    score: float | None
    difference: Interval | None
    tokens: float | None
    calls: float | None


def ablation_rows(columns: Mapping[str, Json]) -> list[tuple[AblationRow, str]]:
    """What an operator earns, by the score of the workflow without it, each row with a word on
    whether it earns its calls; the whole comes first. A difference below zero is score that its
    removal costs; tokens and calls are by problem.

    Args:
        columns: by the removed instance, or `whole`: `scores`, and totals of `tokens` and `calls`.
    """
    words = {1: "no: better without it", -1: "yes", 0: "not shown"}
    found = []
    for name in sorted(columns, key=lambda name: name != WHOLE):
        column = columns[name]
        paired = None if name == WHOLE else _paired(columns.get(WHOLE) or {}, column)
        scores = [score for score in _scores(column) if score is not None]
        row = AblationRow(
            name,
            mean(scores) if scores else None,
            paired.difference if paired else None,
            _each(column, "tokens"),
            _each(column, "calls"),
        )
        found.append((row, words[paired.direction] if paired else ""))
    return found
