"""A graph in words, for a terminal: operators, prompts, edges, faults."""

from __future__ import annotations

from collections.abc import Iterator

from aflow_tune.graph.draw import shortened
from aflow_tune.graph.flow import ANSWER, PROBLEM
from aflow_tune.graph.graph import Graph

_WORDS = {"data": "feeds", "carried": "feeds, in its next turn,", "decides": "decides about"}


def describe(graph: Graph) -> str:
    """The graph as text. Every line is printable, whatever the graph's files hold."""
    return "\n".join(_lines(graph))


def _lines(graph: Graph) -> Iterator[str]:
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
