"""A graph as a picture: what is written on it, and its Mermaid text.

One box for each call in the source, named by its operator instance, with arrows for what flows
where. With traces, the numbers of an instance stand in its first box. Where the boxes lie is
for `svg.py`, or for Mermaid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aflow_tune.graph.flow import ANSWER, PROBLEM, Edge, Flow, Loop, Node
from aflow_tune.graph.measure import Measured

MAX_LABEL = 48
"""Characters of one line in a box."""


@dataclass(frozen=True)
class Box:
    """One box of the picture."""

    number: int
    """`PROBLEM`, `ANSWER` or the node's."""
    lines: tuple[str, ...]
    loops: tuple[Loop, ...] = ()
    failed: bool = False
    """Whether it had failures in the traces."""


def boxes(flow: Flow, measured: Mapping[str, Measured] | None = None) -> list[Box]:
    """The boxes from the problem to the answer, in the order of the source."""
    told: set[str] = set()
    middle = []
    for node in flow.nodes:
        who = caller_name(node)
        numbers = (measured or {}).get(who)
        first = who not in told
        told.add(who)
        lines = [f"{node.instance}: {node.operator}" if node.operator else node.instance]
        lines += [", ".join(node.prompts)] if node.prompts else []
        lines += [f"repeats: {loop.label}" for loop in node.loops]
        if numbers is not None and first:
            shared = sum(caller_name(other) == who for other in flow.nodes)
            lines += figures(numbers, shared)
        failed = numbers is not None and numbers.failures > 0
        middle.append(
            Box(node.number, tuple(shortened(line) for line in lines), node.loops, failed)
        )
    return [Box(PROBLEM, ("problem",)), *middle, Box(ANSWER, ("answer",))]


def caller_name(node: Node) -> str:
    """How the node's calls are attributed in traces and experiences."""
    return f"{node.operator}.{node.instance}" if node.operator else node.instance


def figures(numbers: Measured, places: int = 1) -> list[str]:
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


def to_mermaid(flow: Flow, measured: Mapping[str, Measured] | None = None) -> str:
    """The graph as a Mermaid flowchart."""
    drawn = boxes(flow, measured)
    lines = ["flowchart TD", *_blocks(drawn, 0, ())]
    lines += [f"    {_edge(edge)}" for edge in flow.edges]
    failed = [_id(box.number) for box in drawn if box.failed]
    if failed:
        lines += ["    classDef failed stroke:#c0392b", f"    class {','.join(failed)} failed"]
    return "\n".join(lines) + "\n"


def _blocks(drawn: Sequence[Box], depth: int, loops: tuple[Loop, ...]) -> list[str]:
    """Boxes, those of a loop inside a subgraph."""
    pad = "    " * (depth + 1)
    lines = []
    done: set[Loop] = set()
    for box in drawn:
        if box.loops == loops:
            left, right = ('(["', '"])') if box.number in (PROBLEM, ANSWER) else ('["', '"]')
            label = "<br/>".join(escape_mermaid(line) for line in box.lines)
            lines.append(f"{pad}{_id(box.number)}{left}{label}{right}")
        elif box.loops[: len(loops)] == loops and box.loops[len(loops)] not in done:
            loop = box.loops[len(loops)]
            done.add(loop)
            inside = [other for other in drawn if other.loops[: len(loops) + 1] == (*loops, loop)]
            name = f"loop_{'_'.join(str(outer.line) for outer in (*loops, loop))}_{depth}"
            lines.append(f'{pad}subgraph {name}["{escape_mermaid(shortened(loop.label))}"]')
            lines += _blocks(inside, depth + 1, (*loops, loop))
            lines.append(f"{pad}end")
    return lines


def _edge(edge: Edge) -> str:
    source, target = _id(edge.source), _id(edge.target)
    if edge.kind == "carried":
        return f"{source} -. next turn .-> {target}"
    if edge.kind == "decides":
        return f"{source} -. decides .-> {target}"
    return f"{source} --> {target}"


def _id(number: int) -> str:
    return {PROBLEM: "problem", ANSWER: "answer"}.get(number, f"n{number}")


def escape_mermaid(text: str) -> str:
    """Text as Mermaid shows it and never reads it: all but plain characters as numbers."""
    plain = " _-.,:()"
    return "".join(
        c if (c.isascii() and c.isalnum()) or c in plain or ord(c) > 127 else f"#{ord(c)};"
        for c in text
    )
