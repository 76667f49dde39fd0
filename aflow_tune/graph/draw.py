"""Shows a graph to people: as Mermaid, as SVG, as text for a terminal.

Each call in the source is a box, named by its operator instance; arrows show the data flow. With
traces (`measure`), the numbers of an instance are in its first box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from aflow_tune.graph.flow import ANSWER, PROBLEM, Edge, Flow
from aflow_tune.graph.graph import Graph
from aflow_tune.operators import READ_OUTCOMES
from aflow_tune.trace import ModelCall, OperatorCall, Trace

MAX_LABEL = 48  # characters of one line in a box


@dataclass
class Measured:
    """What one operator instance did over all traced rollouts."""

    calls: int = 0
    """Calls of the operator; for the caller `llm`, direct calls of the model."""
    tokens: int = 0
    """Prompt and completion; calls without a reported usage count 0."""
    failures: int = 0
    reward_share: float | None = None
    """Credit, not cause: each rollout's reward is split evenly over its model calls and summed by
    caller. None if no rollout has a reward, or the rewards sum to 0 or differ in sign."""


def measure(runs: Sequence[tuple[Trace, float | None]]) -> dict[str, Measured]:
    """Numbers by caller, `Operator.instance` or `llm`, from each rollout's trace and reward."""
    measured: dict[str, Measured] = {}
    earned: dict[str, float] = {}
    for trace, reward in runs:
        for use in trace.of(OperatorCall):
            row = measured.setdefault(f"{use.operator}.{use.instance}", Measured())
            row.calls += 1
            row.failures += use.outcome not in READ_OUTCOMES
        calls = trace.of(ModelCall)
        for call in calls:
            who = call.caller.rpartition("/")[2]
            row = measured.setdefault(who, Measured())
            row.tokens += (call.prompt_tokens or 0) + (call.completion_tokens or 0)
            if "." not in who:  # a direct call, which no OperatorCall counts
                row.calls += 1
                row.failures += call.failure is not None
            if reward is not None:
                earned[who] = earned.get(who, 0.0) + reward / len(calls)
    rewards = [reward for _, reward in runs if reward is not None]
    total = sum(rewards)
    if total and (min(rewards) >= 0 or max(rewards) <= 0):
        for who, row in measured.items():
            row.reward_share = earned.get(who, 0.0) / total
    return measured


@dataclass
class _Box:
    number: int  # `PROBLEM`, `ANSWER` or the number of the node
    lines: Sequence[str]
    repeats: bool = False
    failed: bool = False  # whether a call failed in the traces
    row: int = 0
    x: float = 0.0  # of the centre
    y: float = 0.0  # of the upper edge

    def __post_init__(self) -> None:
        self.id = {PROBLEM: "problem", ANSWER: "answer"}.get(self.number, f"n{self.number}")
        self.width = max(max(map(len, self.lines)) * _CHAR_WIDTH + 2 * _PADDING, 80.0)
        self.height = len(self.lines) * _LINE_HEIGHT + 2 * _PADDING


def _boxes(flow: Flow, measured: Mapping[str, Measured] | None) -> dict[int, _Box]:
    """Boxes by number, from the problem to the answer, in source order."""
    left = dict(measured or {})
    boxes = {PROBLEM: _Box(PROBLEM, ("problem",))}
    for node in flow.nodes:
        lines = [f"{node.instance}: {node.operator}" if node.operator else node.instance]
        lines += [", ".join(node.prompts)] if node.prompts else []
        lines += [f"repeats: {label}" for _, label in node.loops]
        # The name of the caller in traces and experiences.
        who = f"{node.operator}.{node.instance}" if node.operator else node.instance
        numbers = left.pop(who, None)
        if numbers is not None:
            lines.append(f"{numbers.calls} calls, {numbers.tokens} tokens")
            if numbers.reward_share is not None:
                lines.append(f"{numbers.reward_share:.0%} of the reward")
            lines += [f"{numbers.failures} failures"] if numbers.failures else []
        failed = numbers is not None and numbers.failures > 0
        shown = [*map(shortened, lines)]
        boxes[node.number] = _Box(node.number, shown, bool(node.loops), failed)
    return boxes | {ANSWER: _Box(ANSWER, ("answer",))}


def shortened(text: str, most: int = MAX_LABEL) -> str:
    """The text as one line of at most `most` printable characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


# Mermaid

_ARROWS = {"data": "-->", "carried": "-. next turn .->", "decides": "-. decides .->"}


def to_mermaid(flow: Flow, measured: Mapping[str, Measured] | None = None) -> str:
    """The graph as a Mermaid flowchart."""
    boxes = _boxes(flow, measured)
    lines = ["flowchart TD"]
    for box in boxes.values():
        left, right = ('(["', '"])') if box.number < 0 else ('["', '"]')
        label = "<br/>".join(escape_mermaid(line) for line in box.lines)
        lines.append(f"    {box.id}{left}{label}{right}")
    for edge in flow.edges:
        lines.append(f"    {boxes[edge.source].id} {_ARROWS[edge.kind]} {boxes[edge.target].id}")
    if failed := [box.id for box in boxes.values() if box.failed]:
        lines += ["    classDef failed stroke:#c0392b", f"    class {','.join(failed)} failed"]
    return "\n".join(lines) + "\n"


def escape_mermaid(text: str) -> str:
    """Text that Mermaid shows literally: all but plain characters become character codes."""
    plain = " _-.,:()"
    return "".join(
        c if (c.isascii() and c.isalnum()) or c in plain or ord(c) > 127 else f"#{ord(c)};"
        for c in text
    )


# SVG: the row of a box is the longest path to it from the problem. Arrows back to an earlier box go
# along the right side. Built as an element tree, which escapes every text; no scripts, no links.
# Lengths are in pixels at font size 12.

_CHAR_WIDTH, _LINE_HEIGHT, _PADDING = 7.3, 17.0, 10.0
_GAP_X, _GAP_Y, _MARGIN = 36.0, 46.0, 24.0
_BACK_ROOM = 34.0  # between the boxes and each arrow along the right side
_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1b1f24}"
    ".name{font-weight:600}.box{fill:#f6f8fa;stroke:#57606a}.end{fill:#ddf4ff;stroke:#0969da}"
    ".failed{stroke:#cf222e;stroke-width:2}.repeats{fill:#fff8e5}"
    ".edge{fill:none;stroke:#57606a}.from-problem{stroke:#afb8c1}"
    ".carried{stroke:#9a6700;stroke-dasharray:5 3}.decides{stroke:#8250df;stroke-dasharray:2 3}"
)


def to_svg(
    flow: Flow, measured: Mapping[str, Measured] | None = None, title: str = "operator graph"
) -> str:
    """The graph as the text of an SVG file."""
    boxes = _boxes(flow, measured)
    _place(boxes, flow.edges)
    back = [edge for edge in flow.edges if boxes[edge.source].row >= boxes[edge.target].row]
    right = max(box.x + box.width / 2 for box in boxes.values())
    width = _px(right + _MARGIN + (_BACK_ROOM * (1 + len(back)) if back else 0))
    height = _px(max(box.y + box.height for box in boxes.values()) + _MARGIN)
    frame = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}", "role": "img"}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **frame})
    ElementTree.SubElement(root, "title").text = "".join(c for c in title if c.isprintable())
    ElementTree.SubElement(root, "style").text = _STYLE
    head = {"id": "head", "viewBox": "0 0 8 8", "refX": "8", "refY": "4"}
    head |= {"markerWidth": "8", "markerHeight": "8", "orient": "auto"}
    marker = ElementTree.SubElement(ElementTree.SubElement(root, "defs"), "marker", head)
    ElementTree.SubElement(marker, "path", d="M 0 0 L 8 4 L 0 8 z", fill="#57606a")
    ElementTree.SubElement(root, "rect", width="100%", height="100%", fill="#ffffff")
    for edge in flow.edges:
        source, target = boxes[edge.source], boxes[edge.target]
        bottom = source.y + source.height
        bend = max(_GAP_Y, (target.y - bottom) / 2)
        points = [(source.x, bottom), (source.x, bottom + bend)]
        points += [(target.x, target.y - bend), (target.x, target.y)]
        if edge in back:
            side = right + _BACK_ROOM * (back.index(edge) + 1)
            start, end = source.y + source.height * 0.7, target.y + target.height * 0.3
            points = [(source.x + source.width / 2, start), (side, start), (side, end)]
            points.append((target.x + target.width / 2, end))
        first, *rest = (f"{_px(x)} {_px(y)}" for x, y in points)
        kinds = ["edge", edge.kind] + (["from-problem"] if edge.source == PROBLEM else [])
        attributes = {"class": " ".join(kinds), "marker-end": "url(#head)"}
        attributes["d"] = f"M {first} C {', '.join(rest)}"
        ElementTree.SubElement(root, "path", attributes)
    for box in boxes.values():
        kinds = ["end" if box.number < 0 else "box"]
        kinds += ["repeats"] if box.repeats else []
        kinds += ["failed"] if box.failed else []
        group = ElementTree.SubElement(root, "g")
        rect = {"class": " ".join(kinds), "x": _px(box.x - box.width / 2), "y": _px(box.y)}
        rect |= {"width": _px(box.width), "height": _px(box.height)}
        ElementTree.SubElement(group, "rect", rect | {"rx": "14" if box.number < 0 else "5"})
        for number, line in enumerate(box.lines):
            y = _px(box.y + _PADDING + (number + 0.75) * _LINE_HEIGHT)
            attributes = {"text-anchor": "middle"} | ({} if number else {"class": "name"})
            ElementTree.SubElement(group, "text", attributes, x=_px(box.x), y=y).text = line
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _place(boxes: Mapping[int, _Box], edges: Sequence[Edge]) -> None:
    """Set row, `x` and `y` of every box."""
    order = {number: place for place, number in enumerate(boxes)}
    above: dict[int, list[int]] = {number: [PROBLEM] for number in boxes}
    for edge in edges:
        if edge.kind != "carried" and order[edge.source] < order[edge.target]:
            above[edge.target].append(edge.source)
    above[PROBLEM], above[ANSWER] = [], [*order][:-1]
    for number, box in boxes.items():
        box.row = max([boxes[other].row + 1 for other in above[number]], default=0)
    y = _MARGIN
    for row in range(boxes[ANSWER].row + 1):
        here = [box for box in boxes.values() if box.row == row]
        x = -(sum(box.width for box in here) + _GAP_X * (len(here) - 1)) / 2
        for box in here:
            box.x, box.y = x + box.width / 2, y
            x += box.width + _GAP_X
        y += max((box.height + _GAP_Y for box in here), default=0.0)
    left = min(box.x - box.width / 2 for box in boxes.values())
    for box in boxes.values():
        box.x += _MARGIN - left


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# Text for a terminal

_WORDS = {"data": "feeds", "carried": "feeds, in its next turn,", "decides": "decides about"}


def describe(graph: Graph) -> str:
    """Operators, prompts, edges and faults as text. Every line is printable, whatever the graph's
    files hold."""
    shape, flow = graph.shape, graph.flow
    title = f"graph: {shortened(graph.label, 400)}"
    if graph.dataset:
        round_ = "" if graph.round is None else f", round {graph.round}"
        title += f" ({shortened(graph.dataset)}{round_})"
    lines = [title, f"called with: {', '.join(shape.parameters) or 'unknown'}", "\noperators:"]
    for built in shape.operators:
        prompted = " (own prompts)" if {built.instance, built.operator} & set(graph.prompts) else ""
        lines.append(f"  {built.instance}: {built.operator}, line {built.line}{prompted}")
    if not shape.operators:
        lines.append("  none")
    if prompts := {**shape.constants, **graph.constants}:
        lines.append("\nprompts:")
        lines += [f"  {shortened(name)}: {shortened(text)}" for name, text in prompts.items()]
    if flow.edges:
        names = {node.number: f"{node.instance} (line {node.line})" for node in flow.nodes}
        names |= {PROBLEM: "the problem", ANSWER: "the answer"}
        lines.append("\nedges:")
        for edge in flow.edges:
            lines.append(f"  {names[edge.source]} {_WORDS[edge.kind]} {names[edge.target]}")
    if shape.faults:
        lines.append("\nfaults:")
        lines += [f"{number}. {fault}" for number, fault in enumerate(shape.faults, 1)]
    return "\n".join(lines)
