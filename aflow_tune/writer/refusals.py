"""Collecting what is refused of a graph: one sentence for each place, in the order of the source.

The first refusal of a place stands: what follows from it says nothing new.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable

from aflow_tune.writer.types import Refusal, RefusalKind

MAX_REFUSALS = 50
"""Of one graph. What has more is not mended by reading on."""
MAX_SHOWN = 60
"""Characters of a piece of source in a message."""


class Refusals:
    """The refusals of one graph."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, int], Refusal] = {}
        self._elsewhere: list[Refusal] = []

    def add(self, kind: RefusalKind, message: str, node: ast.AST | None = None) -> None:
        """Refuse something, at a node of the source or at no place."""
        line = getattr(node, "lineno", 0)
        column = getattr(node, "col_offset", -1) + 1
        self.at(kind, message, line, column)

    def at(self, kind: RefusalKind, message: str, line: int, column: int) -> None:
        """Refuse something at a line and column, both from 1."""
        refusal = Refusal(kind, message, line, column)
        if line:
            self._by_place.setdefault((line, column), refusal)
        elif refusal not in self._elsewhere:
            self._elsewhere.append(refusal)

    def take(self, others: Refusals) -> None:
        """Take over what was refused elsewhere."""
        for refusal in others.in_order():
            self.at(refusal.kind, refusal.message, refusal.line, refusal.column)

    def has_line(self, line: int) -> bool:
        """Whether something was refused on a line."""
        return any(place[0] == line for place in self._by_place)

    def any(self) -> bool:
        """Whether something was refused."""
        return bool(self._by_place or self._elsewhere)

    def in_order(self) -> tuple[Refusal, ...]:
        """Those of the code by place, then the others."""
        by_place = [self._by_place[place] for place in sorted(self._by_place)]
        return (*by_place, *self._elsewhere)[:MAX_REFUSALS]


def shown(node: ast.AST) -> str:
    """A piece of source for a message, shortened."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "this"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, or nothing."""
    near = difflib.get_close_matches(name[:80], [item for item in known if len(item) <= 80], 1)
    return f" (did you mean {near[0]}?)" if near else ""


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for a message: `a, b and c`."""
    all_names = list(names)
    shortened = all_names[:most] + (["..."] if len(all_names) > most else [])
    if len(shortened) < 2:
        return "".join(shortened) or "nothing"
    return f"{', '.join(shortened[:-1])} and {shortened[-1]}"
