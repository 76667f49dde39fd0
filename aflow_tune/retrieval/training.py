"""Trains a retriever on queries and their tools: the encoder, then how much BM25 counts beside it.

Learned are a matrix [D, D] and a weight for each token, by InfoNCE (van den Oord et al., 2018): the
right tool against the others of the batch and what BM25 takes for right. Both are then multiplied
into the encoder's table, so a new tool needs no training, only its text. How much BM25 counts is
chosen on a fifth of the tools and queries, which a first training leaves out; the second has all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from aflow_tune.data.catalogue import Asked, Tool
from aflow_tune.retrieval.bm25 import BM25
from aflow_tune.retrieval.encoder import Encoder, summed
from aflow_tune.retrieval.index import ToolIndex, Trained
from aflow_tune.retrieval.measures import DEPTH, held_out, measured

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
"""What BM25 may count."""
_LIKELY = 10
"""A hard negative is drawn from so many wrong tools that BM25 ranks first."""
_CHOSEN_BY = 1000
"""Queries of a kind by which the share of BM25 is chosen, at most."""

Say = Callable[[int, int, float], None]
"""Called after each step with its number, the number of steps, and its loss."""


def silent(step: int, steps: int, loss: float) -> None:
    """Says nothing."""


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


def fit(
    untrained: Encoder,
    tools: Sequence[Tool],
    asked: Sequence[Asked],
    *,
    model: str = "",
    seed: int = 0,
    schedule: Schedule | None = None,
    say: Say = silent,
) -> ToolIndex:
    """The index of `tools` with a retriever trained on `asked`, whose tools are among them.

    Args:
        model: what the untrained encoder was made of, which the index keeps.
        say: sees the steps of both trainings as one row.
    """
    used, tested, unseen = held_out(asked, 0.2, seed)
    words = 0.5  # of too little data to tell
    before = 0
    if used and tested and unseen:

        def first(step: int, steps: int, loss: float) -> None:
            nonlocal before
            before = step
            say(step, round(steps * (1 + len(asked) / len(used))), loss)

        trial = ToolIndex(tools, train(untrained, tools, used, seed, schedule, first))
        kinds = [one[:: -(-len(one) // _CHOSEN_BY)] for one in (tested, unseen)]  # spread evenly
        words = _best_share(trial, kinds)

    def second(step: int, steps: int, loss: float) -> None:
        say(before + step, before + steps, loss)

    encoder = train(untrained, tools, asked, seed, schedule, second)
    return ToolIndex(tools, encoder, words, Trained.on(model, asked))


def _best_share(trial: ToolIndex, kinds: Sequence[Sequence[Asked]]) -> float:
    """The share of BM25 with the highest mean of the kinds' nDCG; of equals the smallest."""

    def worth(share: float) -> float:
        trial.share = share
        return sum(float(measured(trial, asked, DEPTH)[:, 2].mean()) for asked in kinds)

    return max(SHARES, key=worth)


def info_nce(
    cosines_QT: Tensor, right_Q: Tensor, scale: Tensor | float, also_right_QT: Tensor | None = None
) -> Tensor:
    """The mean over queries of -log softmax(scale * cosines)[right]; `also_right_QT` (bool) marks
    a query's other right tools, which are no negatives of it."""
    logits_QT = cosines_QT * scale
    if also_right_QT is not None:
        logits_QT = logits_QT.masked_fill(also_right_QT, -torch.inf)
    return F.cross_entropy(logits_QT, right_Q)


def train(
    untrained: Encoder,
    tools: Sequence[Tool],
    asked: Sequence[Asked],
    seed: int = 0,
    schedule: Schedule | None = None,
    say: Say = silent,
) -> Encoder:
    """The encoder trained on queries and their tools. Tools that no query asks for take no part."""
    plan, draw = schedule or Schedule(), np.random.default_rng(seed)
    names = {name for one in asked for name in one.tools}
    tools = [tool for tool in tools if tool.name in names]
    place = {tool.name: number for number, tool in enumerate(tools)}
    right = [[place[name] for name in one.tools] for one in asked]
    likely = hard_negatives([tool.text for tool in tools], asked, right)
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
            asking_QD = vectors([queries[row] for row in rows])
            cosines_QT = asking_QD @ vectors([texts[number] for number in column]).T
            target_Q = torch.tensor([column[number] for number in chosen])
            loss = info_nce(cosines_QT, target_Q, scale.exp(), also)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            falling.step()
            step += 1
            say(step, steps, loss.item())
    with torch.no_grad():
        trained_VD = (table_VD * weights_V.exp()[:, None]) @ matrix_DD
        trained_VD /= trained_VD.abs().max()  # far from where fp16 ends; cosines stay
    # As it is saved, so that one read from a folder is the same to the bit.
    return Encoder(untrained.tokenizer, trained_VD.half().float())


def hard_negatives(
    texts: Sequence[str], asked: Sequence[Asked], right: Sequence[Sequence[int]]
) -> list[NDArray[np.int64]]:
    """For each query the wrong tools that BM25 ranks first."""
    ranking, found = BM25(texts), []
    for one, numbers in zip(asked, right, strict=True):
        order = np.argsort(-ranking.scores(one.query), kind="stable")[: _LIKELY + len(numbers)]
        found.append(order[~np.isin(order, numbers)][:_LIKELY])
    return found
