"""Texts to unit vectors, by the policy's own token embeddings.

A text's vector is the sum of its tokens' rows in one table [V, D], scaled to length 1. Untrained,
a row is the model's embedding times a/(a + p), p the token's share of all tokens seen: Arora et
al., A simple but tough-to-beat baseline for sentence embeddings, 2017. `training.py` makes a better
table. No transformer runs, neither in training nor in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from aflow_tune.data.catalogue import words_of
from aflow_tune.errors import BadInput

WIDEST = 576
"""Wider embeddings are reduced to so many principal components."""
RARE = 1e-3
"""The `a` of a/(a + p)."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_AT_ONCE = 4096
"""Texts that are encoded at once."""


class Encoder:
    """Texts to unit vectors. `table_VD`: a row for each token of the tokenizer, in fp32; may have
    more. Raises BadInput: it has fewer. `where`: the place of the two."""

    def __init__(self, tokenizer: Tokenizer, table_VD: Tensor, where: str = "table_VD") -> None:
        if len(table_VD) < tokenizer.get_vocab_size():
            title, expected = "Table and tokenizer do not fit.", "a row for each token"
            found = f"{len(table_VD)} rows, {tokenizer.get_vocab_size()} tokens"
            cure = "take both from one model, or make the index again"
            raise BadInput.of(title, where, expected, found, cure)
        self.tokenizer, self.table_VD = tokenizer, table_VD

    @classmethod
    def of_model(cls, folder: Path, texts: Iterable[str]) -> Encoder:
        """The untrained one of a Hugging Face folder; its weights of tokens come from `texts`.
        Raises BadInput: the folder has no embeddings or fast tokenizer."""
        table_VH, path = _embeddings(folder), folder / "tokenizer.json"
        if not path.is_file():
            title, expected = "The model has no fast tokenizer.", "tokenizer.json"
            cure = "save it with transformers' AutoTokenizer.save_pretrained"
            raise BadInput.of(title, str(folder), expected, "none", cure)
        if table_VH.shape[1] > WIDEST:
            _, directions_HH = torch.linalg.eigh(table_VH.T @ table_VH)
            table_VH = table_VH @ directions_HH[:, -WIDEST:]
        encoder = cls(Tokenizer.from_file(str(path)), table_VH, str(folder))
        seen = torch.tensor(
            [*itertools.chain.from_iterable(encoder.tokens(texts))], dtype=torch.long
        )
        counts_V = torch.bincount(seen, minlength=len(table_VH))
        share_V = counts_V / counts_V.sum().clamp(min=1)
        return cls(encoder.tokenizer, table_VH * (RARE / (RARE + share_V))[:, None])

    def tokens(self, texts: Iterable[str]) -> list[list[int]]:
        """The tokens of each text, of its words in lower case."""
        plain = [f" {words_of(text).lower()}" for text in texts]
        return [found.ids for found in self.tokenizer.encode_batch(plain, add_special_tokens=False)]

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors [N, D]; zeros for a text without a token."""
        parts = [texts[start : start + _AT_ONCE] for start in range(0, len(texts), _AT_ONCE)]
        found = [F.normalize(summed(self.table_VD, self.tokens(part)), dim=1) for part in parts]
        vectors: NDArray[np.float32] = torch.cat(found).numpy()
        return vectors


def summed(
    table_VD: Tensor, texts: Sequence[Sequence[int]], weights_V: Tensor | None = None
) -> Tensor:
    """The sum of the rows of each text's tokens, [N, D], each times its weight."""
    flat = torch.tensor([*itertools.chain.from_iterable(texts)], dtype=torch.long)
    starts = torch.tensor([0, *itertools.accumulate(map(len, texts))][:-1], dtype=torch.long)
    weights = torch.ones(len(flat)) if weights_V is None else weights_V[flat]
    return F.embedding_bag(flat, table_VD, starts, mode="sum", per_sample_weights=weights)


def _embeddings(folder: Path) -> Tensor:
    """The input embeddings [V, H] of a Hugging Face folder, read without the rest of the model."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith(_EMBEDDINGS):
                    table: Tensor = file.get_tensor(name).float()
                    return table
    title, expected = "The model has no token embeddings.", f"a tensor {' or '.join(_EMBEDDINGS)}"
    cure = "name a folder with the model's weights as safetensors"
    raise BadInput.of(title, str(folder), expected, "none in its *.safetensors", cure)
