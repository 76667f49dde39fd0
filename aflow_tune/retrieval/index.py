"""`ToolIndex`: a catalogue that can be searched, by BM25 alone or with a trained encoder.

With an encoder a tool's score is (1 - w) times the cosine of its text and the query, plus w times
its BM25 score as a share of the query's best one: words help with tools that training never saw.
Saved as a folder of the local engine's form, every file with its SHA-256; vectors of tools are
computed when it is loaded, so that they always fit the catalogue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aflow_tune.data.catalogue import Asked, Tool, tools_of
from aflow_tune.engines.local.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from aflow_tune.errors import BadInput
from aflow_tune.retrieval.bm25 import BM25
from aflow_tune.retrieval.encoder import Encoder

_KIND = "tool index"
_TITLE = "The tool index cannot be used."
_CURE = "make it again: aflow-tune tools index, or aflow-tune tools train"


@dataclass(frozen=True)
class Trained:
    """What an encoder was trained on. `queries`: marks of its queries, see `mark`."""

    model: str = ""
    tools: frozenset[str] = frozenset()
    queries: frozenset[str] = frozenset()

    @classmethod
    def on(cls, model: str, asked: Sequence[Asked]) -> Trained:
        tools = frozenset(name for one in asked for name in one.tools)
        return cls(model, tools, frozenset(mark(one.query) for one in asked))


@dataclass
class ToolIndex:
    """Tools with what finds them. `encoder`: None for BM25 alone; `share`: BM25's in a score."""

    tools: Sequence[Tool]
    encoder: Encoder | None = None
    share: float = 0.0
    trained: Trained = field(default_factory=Trained)

    def __post_init__(self) -> None:
        texts = [tool.text for tool in self.tools]
        self.words = BM25(texts)
        self._vectors_ND = None if self.encoder is None else self.encoder.encode(texts)

    def scores(self, queries: Sequence[str]) -> NDArray[np.float64]:
        """The score of each tool for each query, [Q, N]."""
        words_QN = self.word_scores(queries)
        if self.encoder is None or self._vectors_ND is None:
            return words_QN
        best_Q1 = np.maximum(words_QN.max(axis=1, keepdims=True), 1e-9)
        cosines_QN = self.encoder.encode(queries) @ self._vectors_ND.T
        mixed: NDArray[np.float64] = (1 - self.share) * cosines_QN + self.share * words_QN / best_Q1
        return mixed

    def word_scores(self, queries: Sequence[str]) -> NDArray[np.float64]:
        """Those of BM25, [Q, N]."""
        return np.stack([self.words.scores(query) for query in queries])

    def search(self, query: str, k: int) -> list[tuple[Tool, float]]:
        """The `k` best tools with their scores, the best first; of equals the first."""
        (scores,) = self.scores([query])
        best = np.argsort(-scores, kind="stable")[:k]
        return [(self.tools[number], float(scores[number])) for number in best]

    def save(self, folder: Path) -> None:
        """Write the folder, whole or not at all. Raises CheckpointError."""
        state: dict[str, Any] = {
            "kind": _KIND,
            "tools": [tool.to_json() for tool in self.tools],
            "share": self.share,
            "model": self.trained.model,
            "trained_tools": sorted(self.trained.tools),
            "trained_queries": sorted(self.trained.queries),
        }
        tensors = {}
        if self.encoder is not None:
            tensors["encoder"] = {"table": self.encoder.table_VD.half()}
            state["tokenizer"] = self.encoder.tokenizer.to_str()
        write_checkpoint(folder, tensors, state)

    @classmethod
    def load(cls, folder: Path | str) -> ToolIndex:
        """Read a folder. Raises BadInput: it is none, damaged, or its parts do not fit."""
        folder = Path(folder)
        try:
            tensors, state = read_checkpoint(folder)
        except CheckpointError as error:
            raise BadInput.of(_TITLE, str(folder), "a whole index", str(error), _CURE) from error
        if not isinstance(state, dict) or state.get("kind") != _KIND:
            found = "a folder of another kind"
            raise BadInput.of(_TITLE, str(folder), f"a {_KIND}", found, _CURE)
        tools = [tool for row in state["tools"] for tool in tools_of(row)]
        encoder = None
        if "encoder" in tensors:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_str(state["tokenizer"])
            table_VD = tensors["encoder"]["table"].float()
            encoder = Encoder(tokenizer, table_VD, f"{folder}/encoder.safetensors")
        seen = frozenset(state["trained_tools"]), frozenset(state["trained_queries"])
        return cls(tools, encoder, state["share"], Trained(state["model"], *seen))


def mark(query: str) -> str:
    """A short mark of a query, by which an evaluation leaves out what training saw."""
    return hashlib.sha256(" ".join(query.lower().split()).encode(errors="replace")).hexdigest()[:16]
