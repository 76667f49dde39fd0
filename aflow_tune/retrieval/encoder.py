"""The trained half of a retriever: texts to unit vectors, by the policy's own token embeddings.

A text's vector is the sum of its tokens' rows in one table [V, D], scaled to length 1. Untrained,
a row is the model's embedding times a/(a + p), p the token's share of all tokens seen: Arora et
al., A simple but tough-to-beat baseline for sentence embeddings, 2017. Training learns a matrix
[D, D] and a weight for each token by InfoNCE (van den Oord et al., 2018) among the tools of a
batch and what BM25 takes for the right ones; both are then multiplied into the table. So a tool
that is new needs no training, only its text.

No transformer runs, neither in training nor in use: queries cost microseconds, training seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from aflow_tune.errors import BadInput
from aflow_tune.retrieval.bm25 import BM25
from aflow_tune.retrieval.catalogue import Asked, Tool, words_of

WIDEST = 576
"""Wider embeddings are reduced to so many principal components."""
RARE = 1e-3
"""The `a` of a/(a + p)."""
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_AT_ONCE = 4096
"""Texts that are encoded at once."""
_LIKELY = 10
"""A hard negative is drawn from so many wrong tools that BM25 ranks first."""


class Encoder:
    """Texts to unit vectors. `table_VD`: a row for each token of the tokenizer, in fp32."""

    def __init__(self, tokenizer: Tokenizer, table_VD: Tensor) -> None:
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
        encoder = cls(Tokenizer.from_file(str(path)), table_VH)
        counts_V = torch.zeros(len(table_VH))
        for ids in encoder.tokens(texts):
            counts_V += torch.bincount(torch.tensor(ids), minlength=len(table_VH))
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


def info_nce(
    cosines_QT: Tensor, right_Q: Tensor, scale: Tensor | float, also_right_QT: Tensor | None = None
) -> Tensor:
    """The mean over queries of -log softmax(scale * cosines)[right]; `also_right_QT` (bool) marks
    a query's other right tools, which are no negatives of it."""
    logits_QT = cosines_QT * scale
    if also_right_QT is not None:
        logits_QT = logits_QT.masked_fill(also_right_QT, -torch.inf)
    return F.cross_entropy(logits_QT, right_Q)


@dataclass(frozen=True)
class Schedule:
    """How a retriever is trained. Chosen on MetaTool (docs/numbers.md)."""

    epochs: int = 4
    batch: int = 256
    """Queries a step; small data makes smaller ones, for at least eight steps an epoch."""
    hard: int = 2
    """Hard negatives a query."""
    dropout: float = 0.3
    """Share of a text's tokens that are left out in training."""
    rate: float = 3e-4
    """Learning rate of the matrix, falling to zero; that of the tokens' weights is 30 times it."""
    scale: float = 20.0
    """The scale of cosines at the start; it is learned."""


def train(
    untrained: Encoder,
    tools: Sequence[Tool],
    asked: Sequence[Asked],
    *,
    seed: int = 0,
    schedule: Schedule | None = None,
    say: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Encoder:
    """Train on queries and their tools. Tools that no query asks for take no part.

    Args:
        asked: their tools are among `tools`.
        say: called after each step with its number, the number of steps, and its loss.
    """
    plan, draw = schedule or Schedule(), np.random.default_rng(seed)
    names = {name for one in asked for name in one.tools}
    tools = [tool for tool in tools if tool.name in names]
    place = {tool.name: number for number, tool in enumerate(tools)}
    right = [[place[name] for name in one.tools] for one in asked]
    likely = _hard_negatives([tool.text for tool in tools], asked, right)
    queries = untrained.tokens(one.query for one in asked)
    texts = untrained.tokens(tool.text for tool in tools)
    table_VD = untrained.table_VD
    matrix_DD = torch.eye(table_VD.shape[1], requires_grad=True)
    weights_V = torch.zeros(len(table_VD), requires_grad=True)  # logarithms
    scale = torch.tensor(plan.scale).log().requires_grad_()
    groups: list[dict[str, Any]] = [{"params": [matrix_DD]}]
    groups += [{"params": [weights_V, scale], "lr": 30 * plan.rate}]
    optimizer = torch.optim.Adam(groups, lr=plan.rate)
    batch = min(plan.batch, max(2, len(asked) // 8))
    steps = plan.epochs * -(-len(asked) // batch)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)

    def vectors(held: Sequence[Sequence[int]]) -> Tensor:
        kept = [[one for one in ids if draw.random() >= plan.dropout] or ids for ids in held]
        return F.normalize(summed(table_VD, kept, weights_V.exp()) @ matrix_DD, dim=1)

    step = 0
    for _ in range(plan.epochs):
        order = draw.permutation(len(asked)).tolist()
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            chosen = [right[row][draw.integers(len(right[row]))] for row in rows]
            hard = [n for row in rows for n in draw.permutation(likely[row])[: plan.hard].tolist()]
            column = {number: i for i, number in enumerate(dict.fromkeys([*chosen, *hard]))}
            also = torch.zeros(len(rows), len(column), dtype=torch.bool)
            for at, (row, taken) in enumerate(zip(rows, chosen, strict=True)):
                for number in right[row]:
                    if number != taken and number in column:
                        also[at, column[number]] = True
            cosines = (
                vectors([queries[row] for row in rows]) @ vectors([texts[n] for n in column]).T
            )
            target = torch.tensor([column[number] for number in chosen])
            loss = info_nce(cosines, target, scale.exp(), also)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
            step += 1
            say(step, steps, loss.item())
    with torch.no_grad():
        trained_VD = (table_VD * weights_V.exp()[:, None]) @ matrix_DD
    # As it is saved, so that one read from a folder is the same to the bit.
    return Encoder(untrained.tokenizer, trained_VD.half().float())


def _hard_negatives(
    texts: Sequence[str], asked: Sequence[Asked], right: Sequence[Sequence[int]]
) -> list[NDArray[np.int64]]:
    """For each query the wrong tools that BM25 ranks first."""
    ranking, found = BM25(texts), []
    for one, numbers in zip(asked, right, strict=True):
        order = np.argsort(-ranking.scores(one.query), kind="stable")[: _LIKELY + len(numbers)]
        found.append(order[~np.isin(order, numbers)][:_LIKELY])
    return found


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
