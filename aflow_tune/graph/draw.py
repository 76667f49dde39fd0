"""A graph for people to look at: Mermaid, SVG, words for a terminal.

One box for each call in the source, named by its operator instance, with arrows for what flows
where. With traces (`measure`), the numbers of an instance stand in its first box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from aflow_tune.graph.flow import ANSWER, PROBLEM, Edge, Flow, Loop, Node
from aflow_tune.graph.graph import Graph
from aflow_tune.operators import READ_OUTCOMES
from aflow_tune.trace import ModelCall, OperatorCall, Trace

MAX_LABEL = 48
"""Characters of one line in a box."""


@dataclass
class Measured:
    """What one operator instance did over all traced runs."""

    calls: int = 0
    """Of the operator; for direct calls of the model, of the model."""
    tokens: int = 0
    """Prompt and completion, as far as they are known."""
    cost: float | None = 0.0
    """US dollars; None once one price was unknown."""
    failures: int = 0
    reward_share: float | None = None
    """A bookkeeping of credit, not a cause: each run's reward is split evenly over the model calls
    of that run, and summed by who made them. None where no run has a reward, or where rewards are
    not all of one sign (shares of a sum near zero mean nothing)."""


def measure(runs: Sequence[tuple[Trace, float | None]]) -> dict[str, Measured]:
    """Numbers by caller, `Operator.instance` or `llm`, from traces with their rewards."""
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
            if row.cost is not None:
                row.cost = None if call.cost is None else row.cost + call.cost
            if "." not in who:  # no operator counts it
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


# Boxes


@dataclass(frozen=True)
class _Box:
    number: int
    """`PROBLEM`, `ANSWER` or the node's."""
    lines: tuple[str, ...]
    loops: tuple[Loop, ...] = ()
    failed: bool = False
    """Whether it had failures in the traces."""


def _boxes(flow: Flow, measured: Mapping[str, Measured] | None) -> list[_Box]:
    """The boxes from the problem to the answer, in the order of the source."""
    callers = [_caller(node) for node in flow.nodes]
    middle = []
    for place, (node, who) in enumerate(zip(flow.nodes, callers, strict=True)):
        numbers = (measured or {}).get(who)
        lines = [f"{node.instance}: {node.operator}" if node.operator else node.instance]
        lines += [", ".join(node.prompts)] if node.prompts else []
        lines += [f"repeats: {loop.label}" for loop in node.loops]
        if numbers is not None and who not in callers[:place]:
            lines += _figures(numbers, callers.count(who))
        failed = numbers is not None and numbers.failures > 0
        middle.append(_Box(node.number, tuple(map(shortened, lines)), node.loops, failed))
    return [_Box(PROBLEM, ("problem",)), *middle, _Box(ANSWER, ("answer",))]


def _caller(node: Node) -> str:
    """How the node's calls are attributed in traces and experiences."""
    return f"{node.operator}.{node.instance}" if node.operator else node.instance


def _figures(numbers: Measured, places: int) -> list[str]:
    """The lines of numbers in a box. `places`: how many boxes they belong to together."""
    lines = [f"{numbers.calls} calls, {numbers.tokens} tokens"]
    if numbers.cost is None:
        lines[0] += ", price unknown"
    elif numbers.cost:
        lines[0] += f", ${numbers.cost:.4f}"
    if numbers.reward_share is not None:
        lines.append(f"{numbers.reward_share:.0%} of the reward")
    if numbers.failures:
        lines.append(f"{numbers.failures} failures")
    if places > 1:
        lines[0] += f" (in all {places} places)"
    return lines


def shortened(text: str, most: int = MAX_LABEL) -> str:
    """One line of printable characters, at most so many."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


# Mermaid

_ARROWS = {"data": "-->", "carried": "-. next turn .->", "decides": "-. decides .->"}


def to_mermaid(flow: Flow, measured: Mapping[str, Measured] | None = None) -> str:
    """The graph as a Mermaid flowchart."""
    drawn = _boxes(flow, measured)
    lines = ["flowchart TD", *_blocks(drawn, ())]
    lines += [f"    {_id(e.source)} {_ARROWS[e.kind]} {_id(e.target)}" for e in flow.edges]
    failed = [_id(box.number) for box in drawn if box.failed]
    if failed:
        lines += ["    classDef failed stroke:#c0392b", f"    class {','.join(failed)} failed"]
    return "\n".join(lines) + "\n"


def _blocks(drawn: Sequence[_Box], loops: tuple[Loop, ...]) -> list[str]:
    """Boxes, those of a loop inside a subgraph."""
    depth = len(loops)
    pad = "    " * (depth + 1)
    lines = []
    done: set[Loop] = set()
    for box in drawn:
        if box.loops == loops:
            left, right = ('(["', '"])') if box.number in (PROBLEM, ANSWER) else ('["', '"]')
            label = "<br/>".join(escape_mermaid(line) for line in box.lines)
            lines.append(f"{pad}{_id(box.number)}{left}{label}{right}")
        elif box.loops[:depth] == loops and box.loops[depth] not in done:
            inner = box.loops[: depth + 1]
            done.add(inner[-1])
            name = f"loop_{'_'.join(str(loop.line) for loop in inner)}_{depth}"
            lines.append(f'{pad}subgraph {name}["{escape_mermaid(shortened(inner[-1].label))}"]')
            lines += _blocks([other for other in drawn if other.loops[: depth + 1] == inner], inner)
            lines.append(f"{pad}end")
    return lines


def _id(number: int) -> str:
    return {PROBLEM: "problem", ANSWER: "answer"}.get(number, f"n{number}")


def escape_mermaid(text: str) -> str:
    """Text as Mermaid shows it and never reads it: all but plain characters as numbers."""
    plain = " _-.,:()"
    return "".join(
        c if (c.isascii() and c.isalnum()) or c in plain or ord(c) > 127 else f"#{ord(c)};"
        for c in text
    )


# SVG: the row of a box is the longest way to it from the problem; within a row, boxes stand where
# the middle of their sources is. Arrows back to an earlier box (the next turn of a loop) run along
# the right side; arrows over several rows may pass behind boxes. Built as an element tree, which
# escapes every text; no scripts, no links. Lengths are pixels at the font size of 12.

_CHAR_WIDTH, _LINE_HEIGHT, _PADDING = 7.3, 17.0, 10.0
_GAP_X, _GAP_Y, _MARGIN = 36.0, 46.0, 24.0
_BACK_ROOM = 34.0
"""That an arrow along the right side keeps from its boxes."""
_STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,monospace;fill:#1b1f24}"
    ".name{font-weight:600}.box{fill:#f6f8fa;stroke:#57606a}.end{fill:#ddf4ff;stroke:#0969da}"
    ".failed{stroke:#cf222e;stroke-width:2}.repeats{fill:#fff8e5}"
    ".edge{fill:none;stroke:#57606a}.from-problem{stroke:#afb8c1}"
    ".carried{stroke:#9a6700;stroke-dasharray:5 3}.decides{stroke:#8250df;stroke-dasharray:2 3}"
)


class _Placed:
    """A box with its place: `x` of its middle, `y` of its upper edge."""

    def __init__(self, box: _Box, row: int) -> None:
        self.box, self.row = box, row
        self.width = max(max(map(len, box.lines)) * _CHAR_WIDTH + 2 * _PADDING, 80.0)
        self.height = len(box.lines) * _LINE_HEIGHT + 2 * _PADDING
        self.x = self.y = 0.0

    @property
    def right(self) -> float:
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        return self.y + self.height


def to_svg(
    flow: Flow, measured: Mapping[str, Measured] | None = None, title: str = "operator graph"
) -> str:
    """The picture as the text of an SVG file."""
    placed = _place(_boxes(flow, measured), flow.edges)
    back = [edge for edge in flow.edges if placed[edge.source].row >= placed[edge.target].row]
    right = max(item.right for item in placed.values())
    width = right + _MARGIN + (_BACK_ROOM * (1 + len(back)) if back else 0)
    height = max(item.bottom for item in placed.values()) + _MARGIN
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
    head = {"id": "head", "viewBox": "0 0 8 8", "refX": "8", "refY": "4"}
    head |= {"markerWidth": "8", "markerHeight": "8", "orient": "auto"}
    marker = ElementTree.SubElement(ElementTree.SubElement(root, "defs"), "marker", head)
    ElementTree.SubElement(marker, "path", d="M 0 0 L 8 4 L 0 8 z", fill="#57606a")
    ElementTree.SubElement(root, "rect", width="100%", height="100%", fill="#ffffff")
    for edge in flow.edges:
        side = right + _BACK_ROOM * (back.index(edge) + 1) if edge in back else None
        _draw_edge(root, edge, placed[edge.source], placed[edge.target], side)
    for item in placed.values():
        _draw_box(root, item)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _place(drawn: Sequence[_Box], edges: Sequence[Edge]) -> dict[int, _Placed]:
    order = {box.number: place for place, box in enumerate(drawn)}
    above: dict[int, list[int]] = {box.number: [] for box in drawn}
    for edge in edges:
        if edge.kind != "carried" and order[edge.source] < order[edge.target]:
            above[edge.target].append(edge.source)
    placed: dict[int, _Placed] = {}
    for box in drawn:
        others = placed.values() if box.number == ANSWER else map(placed.get, above[box.number])
        rows = [item.row + 1 for item in others if item is not None]
        placed[box.number] = _Placed(box, max([int(box.number != PROBLEM), *rows]))

    def middle_of_sources(item: _Placed) -> float:
        xs = [placed[number].x for number in above[item.box.number] if number != PROBLEM]
        return sum(xs) / len(xs) if xs else 0.0

    y = _MARGIN
    for row in range(placed[ANSWER].row + 1):
        here = [item for item in placed.values() if item.row == row]
        here.sort(key=middle_of_sources)
        x = -(sum(item.width for item in here) + _GAP_X * (len(here) - 1)) / 2
        for item in here:
            item.x, item.y = x + item.width / 2, y
            x += item.width + _GAP_X
        y += max((item.height + _GAP_Y for item in here), default=0.0)
    left = min(item.x - item.width / 2 for item in placed.values())
    for item in placed.values():
        item.x += _MARGIN - left
    return placed


def _draw_edge(
    root: ElementTree.Element, edge: Edge, source: _Placed, target: _Placed, side: float | None
) -> None:
    if side is None:
        bend = max(_GAP_Y, (target.y - source.bottom) / 2)
        points = [
            (source.x, source.bottom),
            (source.x, source.bottom + bend),
            (target.x, target.y - bend),
            (target.x, target.y),
        ]
    else:
        start, end = source.y + source.height * 0.7, target.y + target.height * 0.3
        points = [(source.right, start), (side, start), (side, end), (target.right, end)]
    first, *rest = (f"{_px(x)} {_px(y)}" for x, y in points)
    kinds = ["edge", edge.kind] + (["from-problem"] if edge.source == PROBLEM else [])
    attributes = {"class": " ".join(kinds), "marker-end": "url(#head)"}
    attributes["d"] = f"M {first} C {', '.join(rest)}"
    ElementTree.SubElement(root, "path", attributes)


def _draw_box(root: ElementTree.Element, item: _Placed) -> None:
    is_end = item.box.number in (PROBLEM, ANSWER)
    kinds = ["end" if is_end else "box"]
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
        rx="14" if is_end else "5",
        attrib={"class": " ".join(kinds)},
    )
    for number, line in enumerate(item.box.lines):
        y = _px(item.y + _PADDING + (number + 0.75) * _LINE_HEIGHT)
        attributes = {"text-anchor": "middle"} | ({} if number else {"class": "name"})
        ElementTree.SubElement(group, "text", attributes, x=_px(item.x), y=y).text = line


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# Words

_WORDS = {"data": "feeds", "carried": "feeds, in its next turn,", "decides": "decides about"}


def describe(graph: Graph) -> str:
    """Operators, prompts, edges and faults as text. Every line is printable, whatever the graph's
    files hold."""
    return "\n".join(_described(graph))


def _described(graph: Graph) -> Iterator[str]:
    shape, flow = graph.shape, graph.flow
    title = f"graph: {shortened(graph.label, 400)}"
    if graph.dataset:
        title += f" ({shortened(graph.dataset)}"
        title += ")" if graph.round is None else f", round {graph.round})"
    yield title
    yield f"called with: {', '.join(shape.parameters) or 'unknown'}"
    yield "\noperators:"
    for built in shape.operators:
        prompted = " (own prompts)" if {built.instance, built.operator} & set(graph.prompts) else ""
        yield f"  {built.instance}: {built.operator}, line {built.line}{prompted}"
    if not shape.operators:
        yield "  none"
    prompts = {**shape.constants, **graph.constants}
    if prompts:
        yield "\nprompts:"
        yield from (f"  {shortened(name)}: {shortened(text)}" for name, text in prompts.items())
    if flow.edges:
        names = {node.number: f"{node.instance} (line {node.line})" for node in flow.nodes}
        names |= {PROBLEM: "the problem", ANSWER: "the answer"}
        yield "\nedges:"
        for edge in flow.edges:
            yield f"  {names[edge.source]} {_WORDS[edge.kind]} {names[edge.target]}"
    if shape.faults:
        yield "\nfaults:"
        yield from (f"{number}. {fault}" for number, fault in enumerate(shape.faults, 1))
