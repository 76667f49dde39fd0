"""The operator that picks the tools for a text, so that a thousand tools fit a small context."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from aflow_tune.errors import BadInput
from aflow_tune.operators import Operator, OperatorResult
from aflow_tune.operators.base import whole_number
from aflow_tune.retrieval.index import ToolIndex

MOST = 128
"""Tools that one call returns at most, as OpenAI's API takes at most."""


class RetrieveTools(Operator):
    """Finds the tools that fit a text, the best first.

    Asks no model. For graphs, which name operators without arguments that are files, make a
    subclass with `index`.

    Args:
        tools: the index; None: that of the class.
    """

    returns: ClassVar[Mapping[str, str]] = {
        "tools": "the tools as a chat request takes them, the best first",
        "names": "their names",
    }
    index: ClassVar[str | Path | None] = None
    """The folder of the index, which `aflow-tune tools index` or `train` wrote."""

    def __init__(
        self,
        llm: Any,
        name: str | None = None,
        prompts: Any = None,
        tools: ToolIndex | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(llm, name, prompts, **settings)
        if tools is None and self.index is not None:
            tools = _loaded(Path(self.index).expanduser().resolve())
        if not isinstance(tools, ToolIndex):
            title, expected = "An operator cannot be built.", "a ToolIndex, or a class with `index`"
            cure = "pass tools=ToolIndex.load(FOLDER)"
            raise BadInput.of(title, f"{self.caller}: tools", expected, f"{tools!r:.80}", cure)
        self.tools = tools

    @classmethod
    def most_calls(cls, **settings: Any) -> int:
        """No model is asked."""
        return 0

    async def run(self, query: str, k: int = 5) -> OperatorResult:
        """The `k` best tools; all of them, in order, if there are fewer."""
        whole_number(f"{self.caller}: k", k, 1, MOST)
        found = [tool for tool, _ in self.tools.search(str(query), k)]
        names = [tool.name for tool in found]
        return OperatorResult({"tools": [tool.to_openai() for tool in found], "names": names})


@cache
def _loaded(folder: Path) -> ToolIndex:
    """One index for all instances in this process."""
    return ToolIndex.load(folder)
