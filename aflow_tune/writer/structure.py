"""What a graph does, without its words: a key by which two graphs can be told apart.

Two graphs have one structure if the same operators are called at the same places of the same
loops, and the same results flow between them. Names of instances, prompts, the texts around
the results and how often a loop turns play no part.
"""

from __future__ import annotations

from collections import Counter

from aflow_tune.graph.flow import ANSWER, MODEL, PROBLEM, Loop
from aflow_tune.graph.graph import Graph

_MARKS = {"data": ">", "carried": "~", "decides": "?"}


def structure_of(graph: Graph) -> str:
    """The structure as one line, such as `Custom[1] ScEnsemble | P>0 0>1 1>A`.

    Operators stand in the order of the source, each with the loops around it; `>` is 'feeds',
    `~` 'feeds in its next turn', `?` 'decides about'. Empty for a graph without calls.
    """
    loops: dict[Loop, int] = {}
    calls = []
    for node in graph.flow.nodes:
        numbers = [loops.setdefault(loop, len(loops) + 1) for loop in node.loops]
        around = f"[{'.'.join(map(str, numbers))}]" if numbers else ""
        calls.append((node.operator or MODEL) + around)
    if not calls:
        return ""
    names = {PROBLEM: "P", ANSWER: "A"}
    edges = [
        f"{names.get(edge.source, edge.source)}{_MARKS[edge.kind]}"
        f"{names.get(edge.target, edge.target)}"
        for edge in graph.flow.edges
    ]
    return f"{' '.join(calls)} | {' '.join(edges)}"


def operators_of(graph: Graph) -> dict[str, int]:
    """Call sites by operator; direct calls of the model under `llm`."""
    return dict(Counter(node.operator or MODEL for node in graph.flow.nodes))
