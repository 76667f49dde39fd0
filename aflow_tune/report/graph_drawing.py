"""Graphs that a model wrote as drawings of the page, and what is said where none can be made.

A graph is drawn from its code, which is parsed and never run. The drawing is that of
`graph/draw.py` without its own style and background: the page's style gives it the colours of
light and dark, and a style inside a page would reach everything else on it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from xml.etree import ElementTree

from aflow_tune.graph.draw import to_svg
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.inside import GRAPH_FILE
from aflow_tune.operators import OPERATORS, Operator

MOST_NODES = 40
"""Larger graphs are not drawn: nobody could read them."""
MOST_CODE = 20_000
"""Characters of code; longer ones are not drawn."""
_MOST_WIDTH = 2_000.0
"""Pixels of a drawing."""


@dataclass(frozen=True)
class Drawing:
    """A graph's drawing as SVG that may stand in a page; "" where there is none, and why."""

    svg: str
    why_not: str = ""

    def __html__(self) -> str:
        """What a template puts into the page: the SVG as it is. It was built as an element tree,
        which escapes every text."""
        return self.svg


def draw(code: str, operators: Collection[str] = (), name: str = "graph") -> Drawing:
    """Draw the graph of this code.

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
    return Drawing(_of_the_page(to_svg(flow, title=name), name))


def _of_the_page(svg: str, name: str) -> str:
    """The drawing without its style, background and namespace, its arrow head under a name of
    its own."""
    root = ElementTree.fromstring(svg)
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
    return ElementTree.tostring(root, encoding="unicode")
