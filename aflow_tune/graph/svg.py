"""A graph as SVG: boxes in rows, each below those that it gets data from.

The row of a box is the longest way to it from the problem; within a row, boxes stand where the
middle of their sources is. Arrows back to an earlier box (the next turn of a loop) run along
the right side. Built as an element tree, which escapes every text; no scripts, no links.

Not a general layout: arrows over several rows may pass behind boxes. Graphs of operators are
small, and the boxes say in words what repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from aflow_tune.graph.draw import Box, boxes
from aflow_tune.graph.flow import ANSWER, PROBLEM, Edge, Flow
from aflow_tune.graph.measure import Measured

CHAR_WIDTH, LINE_HEIGHT, PADDING = 7.3, 17.0, 10.0
"""Pixels at the font size of 12."""
GAP_X, GAP_Y, MARGIN = 36.0, 46.0, 24.0
BACK_ROOM = 34.0
"""Pixels that an arrow along the right side keeps from its boxes."""

_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1b1f24}"
    ".name{font-weight:600}.box{fill:#f6f8fa;stroke:#57606a}.end{fill:#ddf4ff;stroke:#0969da}"
    ".failed{stroke:#cf222e;stroke-width:2}.repeats{fill:#fff8e5}"
    ".edge{fill:none;stroke:#57606a}.from-problem{stroke:#afb8c1}"
    ".carried{stroke:#9a6700;stroke-dasharray:5 3}.decides{stroke:#8250df;stroke-dasharray:2 3}"
)


@dataclass
class _Placed:
    box: Box
    row: int
    width: float
    height: float
    x: float = 0.0
    """Of the middle."""
    y: float = 0.0
    """Of the upper edge."""


def to_svg(
    flow: Flow, measured: Mapping[str, Measured] | None = None, title: str = "operator graph"
) -> str:
    """The picture as the text of an SVG file."""
    placed = _place(boxes(flow, measured), flow.edges)
    back = [edge for edge in flow.edges if _goes_back(placed, edge)]
    width = max(item.x + item.width / 2 for item in placed.values()) + MARGIN
    width += BACK_ROOM * (1 + len(back)) if back else 0
    height = max(item.y + item.height for item in placed.values()) + MARGIN
    root = ElementTree.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=_px(width),
        height=_px(height),
        viewBox=f"0 0 {_px(width)} {_px(height)}",
        role="img",
    )
    ElementTree.SubElement(root, "title").text = "".join(c for c in title if c.isprintable())
    ElementTree.SubElement(root, "style").text = _STYLE
    _arrow_head(ElementTree.SubElement(root, "defs"))
    ElementTree.SubElement(root, "rect", width="100%", height="100%", fill="#ffffff")
    for edge in flow.edges:
        lane = back.index(edge) if edge in back else None
        _draw_edge(root, placed, edge, lane)
    for item in placed.values():
        _draw_box(root, item)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _place(drawn: Sequence[Box], edges: Sequence[Edge]) -> dict[int, _Placed]:
    order = {box.number: place for place, box in enumerate(drawn)}
    forward = [
        edge for edge in edges if edge.kind != "carried" and order[edge.source] < order[edge.target]
    ]
    rows: dict[int, int] = {}
    for box in drawn:
        above = [rows[edge.source] for edge in forward if edge.target == box.number]
        lowest = 0 if box.number == PROBLEM else 1
        rows[box.number] = max([lowest, *(row + 1 for row in above)])
    rows[ANSWER] = max(row for number, row in rows.items() if number != ANSWER) + 1
    placed = {box.number: _Placed(box, rows[box.number], *_size(box)) for box in drawn}
    y = MARGIN
    for row in range(rows[ANSWER] + 1):
        here = [item for item in placed.values() if item.row == row]
        if not here:
            continue
        here.sort(key=lambda item: _middle_of_sources(item, placed, forward))
        x = -(sum(item.width for item in here) + GAP_X * (len(here) - 1)) / 2
        for item in here:
            item.x, item.y = x + item.width / 2, y
            x += item.width + GAP_X
        y += max(item.height for item in here) + GAP_Y
    left = min(item.x - item.width / 2 for item in placed.values())
    for item in placed.values():
        item.x += MARGIN - left
    return placed


def _size(box: Box) -> tuple[float, float]:
    width = max(len(line) for line in box.lines) * CHAR_WIDTH + 2 * PADDING
    return max(width, 80.0), len(box.lines) * LINE_HEIGHT + 2 * PADDING


def _middle_of_sources(
    item: _Placed, placed: Mapping[int, _Placed], forward: Sequence[Edge]
) -> float:
    above = [
        placed[edge.source].x
        for edge in forward
        if edge.target == item.box.number and edge.source != PROBLEM
    ]
    return sum(above) / len(above) if above else 0.0


def _goes_back(placed: Mapping[int, _Placed], edge: Edge) -> bool:
    return placed[edge.source].row >= placed[edge.target].row


def _draw_edge(
    root: ElementTree.Element, placed: Mapping[int, _Placed], edge: Edge, lane: int | None
) -> None:
    source, target = placed[edge.source], placed[edge.target]
    if lane is None:
        top, bottom = source.y + source.height, target.y
        bend = max(GAP_Y, (bottom - top) / 2)
        points = [
            (source.x, top),
            (source.x, top + bend),
            (target.x, bottom - bend),
            (target.x, bottom),
        ]
    else:
        side = max(item.x + item.width / 2 for item in placed.values()) + BACK_ROOM * (lane + 1)
        start, end = source.y + source.height * 0.7, target.y + target.height * 0.3
        points = [
            (source.x + source.width / 2, start),
            (side, start),
            (side, end),
            (target.x + target.width / 2, end),
        ]
    first, *rest = (f"{_px(x)} {_px(y)}" for x, y in points)
    kinds = ["edge", edge.kind] + (["from-problem"] if edge.source == PROBLEM else [])
    attributes = {"class": " ".join(kinds), "marker-end": "url(#head)"}
    attributes["d"] = f"M {first} C {', '.join(rest)}"
    ElementTree.SubElement(root, "path", attributes)


def _draw_box(root: ElementTree.Element, item: _Placed) -> None:
    kinds = ["end" if item.box.number in (PROBLEM, ANSWER) else "box"]
    kinds += ["repeats"] if item.box.loops else []
    kinds += ["failed"] if item.box.failed else []
    group = ElementTree.SubElement(root, "g")
    ElementTree.SubElement(
        group,
        "rect",
        x=_px(item.x - item.width / 2),
        y=_px(item.y),
        width=_px(item.width),
        height=_px(item.height),
        rx="14" if "end" in kinds else "5",
        attrib={"class": " ".join(kinds)},
    )
    for number, line in enumerate(item.box.lines):
        text = ElementTree.SubElement(
            group,
            "text",
            x=_px(item.x),
            y=_px(item.y + PADDING + (number + 0.75) * LINE_HEIGHT),
            attrib={"text-anchor": "middle", **({"class": "name"} if number == 0 else {})},
        )
        text.text = line


def _arrow_head(defs: ElementTree.Element) -> None:
    marker = ElementTree.SubElement(
        defs,
        "marker",
        id="head",
        viewBox="0 0 8 8",
        refX="8",
        refY="4",
        markerWidth="8",
        markerHeight="8",
        orient="auto",
    )
    ElementTree.SubElement(marker, "path", d="M 0 0 L 8 4 L 0 8 z", fill="#57606a")


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
