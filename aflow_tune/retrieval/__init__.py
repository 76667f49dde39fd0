"""Finding the right tools among many: catalogues, BM25, a trained retriever, an operator.

    index = ToolIndex.load("tools_index")
    index.search("what is the weather in Paris?", k=5)
    await RetrieveTools(model, tools=index)("what is the weather in Paris?", k=5)

`aflow-tune tools` makes and measures an index; docs/tools.md.
"""

from aflow_tune.data.catalogue import Asked, Tool, read_asked, read_catalogue
from aflow_tune.retrieval.index import ToolIndex
from aflow_tune.retrieval.operator import RetrieveTools

__all__ = ["Asked", "RetrieveTools", "Tool", "ToolIndex", "read_asked", "read_catalogue"]
