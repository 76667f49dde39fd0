"""What a graph does, without its words: a key by which two graphs can be told apart.

Two graphs have one structure if the same operators are called at the same places of the same
loops, and the same results flow between them. Names of instances, prompts, the texts around
the results and how often a loop turns play no part.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from aflow_tune.graph.flow import ANSWER, MODEL, PROBLEM, Flow, Loop
from aflow_tune.graph.graph import Graph

_MARKS = {"data": ">", "carried": "~", "decides": "?"}
_ROUNDS = 6
"""Of colour refinement: graphs are a few calls deep."""


def structure_of(graph: Graph) -> str:
    """The structure as one line, such as `Custom[1] ScEnsemble | P>0 0>1 1>A`.

    Operators stand by their distance from the problem and then by name, so that the order of
    statements that do not depend on each other plays no part; each with the loops around it. `>`
    is 'feeds', `~` 'feeds in its next turn', `?` 'decides about'. Empty for a graph without calls.
    """
    flow = graph.flow
    order = _order(flow)
    place = {number: at for at, number in enumerate(order)}
    loops: dict[Loop, int] = {}
    calls = []
    for number in order:
        node = flow.nodes[number]
        numbers = [loops.setdefault(loop, len(loops) + 1) for loop in node.loops]
        around = f"[{'.'.join(map(str, numbers))}]" if numbers else ""
        calls.append((node.operator or MODEL) + around)
    if not calls:
        return ""
    edges = sorted(
        (place.get(edge.source, -1), place.get(edge.target, len(order)), _MARKS[edge.kind])
        for edge in flow.edges
    )
    drawn = [
        f"{'P' if source < 0 else source}{mark}{'A' if target == len(order) else target}"
        for source, target, mark in edges
    ]
    return f"{' '.join(calls)} | {' '.join(drawn)}"


def _order(flow: Flow) -> list[int]:
    """The nodes in an order that their own surroundings decide, not the source's lines.

    Nodes that a few rounds of colour refinement (Weisfeiler and Leman) cannot tell apart keep
    the order of the source.
    """
    count = len(flow.nodes)
    colours: dict[int, str] = {
        node.number: f"{node.operator or MODEL}/{len(node.loops)}" for node in flow.nodes
    }
    names = dict(colours)
    colours |= {PROBLEM: "P", ANSWER: "A"}
    for _ in range(min(count, _ROUNDS)):
        around: dict[int, list[str]] = {number: [] for number in colours}
        for edge in flow.edges:
            around[edge.target].append(f"in {edge.kind} {colours[edge.source]}")
            around[edge.source].append(f"out {edge.kind} {colours[edge.target]}")
        colours = {
            number: hashlib.sha256("|".join([colour, *sorted(around[number])]).encode()).hexdigest()
            for number, colour in colours.items()
        }
    depths = dict.fromkeys(range(count), 0)
    for _ in range(count):
        before = dict(depths)
        for edge in flow.edges:
            if edge.source >= 0 and edge.target >= 0 and edge.kind != "carried":
                depths[edge.target] = min(count, max(depths[edge.target], depths[edge.source] + 1))
        if depths == before:
            break
    return sorted(range(count), key=lambda n: (depths[n], names[n], colours[n], n))


def operators_of(graph: Graph) -> dict[str, int]:
    """Call sites by operator; direct calls of the model under `llm`."""
    return dict(Counter(node.operator or MODEL for node in graph.flow.nodes))
