"""How well tools are found: hit@1, recall@k and nDCG@10, with intervals and paired differences.

The unit is the query. An interval is the bootstrap's (Efron, 1979): the mean over queries drawn
with replacement, its 2.5% and 97.5% quantiles in a thousand drawings. nDCG is Järvelin and
Kekäläinen's (2002) with gains of 0 and 1: the sum of 1/log2(rank + 1) over the right tools among
the first ten, as a share of the best possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aflow_tune.data.catalogue import Asked
from aflow_tune.report.statistics import Interval
from aflow_tune.retrieval.encoder import Encoder
from aflow_tune.retrieval.index import ToolIndex, mark

DEPTH = 10
"""Of nDCG."""
KINDS = ("all", "tools seen", "tools unseen", "both")
_DRAWINGS = 1000
_AT_ONCE = 512
BASELINE = "BM25"


@dataclass(frozen=True)
class Group:
    """Queries of one kind: measure to column to the mean, or to its difference from BM25."""

    count: int
    means: Mapping[str, Mapping[str, Interval]]
    over_baseline: Mapping[str, Mapping[str, Interval]]

    def to_json(self) -> dict[str, object]:
        """The same as plain data: mean, low and high."""

        def plain(part: Mapping[str, Mapping[str, Interval]]) -> dict[str, object]:
            return {
                measure: {name: [one.mean, one.low, one.high] for name, one in columns.items()}
                for measure, columns in part.items()
            }

        means, over = plain(self.means), plain(self.over_baseline)
        return {"queries": self.count, "means": means, "over_bm25": over}


@dataclass(frozen=True)
class Measured:
    """An evaluation. `groups`: 'tools seen', 'tools unseen' and 'both' where a retriever was
    trained, else 'all'. `left_out`: queries that stood in training."""

    groups: Mapping[str, Group]
    left_out: int


def measure(
    index: ToolIndex, asked: Sequence[Asked], k: int = 5, untrained: Path | None = None
) -> Measured:
    """Ask the index every query that its training has not seen.

    Args:
        untrained: the folder of the model whose embeddings, untrained, are a column, with the same
            share of BM25. Their weights of tokens are counted on the catalogue and these queries.
    """
    new = [one for one in asked if mark(one.query) not in index.trained.queries]
    columns = {BASELINE: ToolIndex(index.tools)}
    if untrained is not None and new:
        texts = [*(tool.text for tool in index.tools), *(one.query for one in new)]
        encoder = Encoder.of_model(untrained, texts)
        columns["untrained"] = ToolIndex(index.tools, encoder, index.share)
    if index.encoder is not None:
        columns["trained"] = index
    kinds: dict[str, list[Asked]] = {}
    for one in new:
        kinds.setdefault(_kind(index, one), []).append(one)
    groups = {}
    for kind in filter(kinds.__contains__, KINDS):
        values = {name: measured(column, kinds[kind], k) for name, column in columns.items()}
        means: dict[str, dict[str, Interval]] = {}
        over: dict[str, dict[str, Interval]] = {}
        for column, found in values.items():
            both = bootstrap(np.hstack([found, found - values[BASELINE]]))
            for at, name in enumerate(("hit@1", f"recall@{k}", f"nDCG@{DEPTH}")):
                means.setdefault(name, {})[column] = both[at]
                over.setdefault(name, {})[column] = both[at + 3]
        groups[kind] = Group(len(kinds[kind]), means, over)
    return Measured(groups, len(asked) - len(new))


def _kind(index: ToolIndex, one: Asked) -> str:
    if index.encoder is None:
        return "all"
    seen = {name in index.trained.tools for name in one.tools}
    return "both" if len(seen) > 1 else "tools seen" if seen.pop() else "tools unseen"


def measured(index: ToolIndex, asked: Sequence[Asked], k: int) -> NDArray[np.float64]:
    """hit@1, recall@k and nDCG@10 of each query, [Q, 3]."""
    place = {tool.name: number for number, tool in enumerate(index.tools)}
    found = []
    for start in range(0, len(asked), _AT_ONCE):
        part = asked[start : start + _AT_ONCE]
        scores_QN = index.scores([one.query for one in part])
        for one, order in zip(part, np.argsort(-scores_QN, axis=1, kind="stable"), strict=True):
            right = np.isin(order[: max(k, DEPTH)], [place[name] for name in one.tools])
            recall = right[:k].sum() / len(one.tools)
            found.append((float(right[0]), recall, ndcg(right[:DEPTH], len(one.tools))))
    return np.array(found)


def ndcg(right: Sequence[bool] | NDArray[np.bool_], total: int) -> float:
    """nDCG of a ranking, cut where `right` ends, of `total` right answers."""
    discounts = 1 / np.log2(np.arange(2, len(right) + 2))
    return float(discounts[np.asarray(right)].sum() / discounts[:total].sum())


def bootstrap(values_QM: NDArray[np.float64], seed: int = 0) -> list[Interval]:
    """The mean of each measure with its 95% interval over resampled queries."""
    draw, count = np.random.default_rng(seed), len(values_QM)
    even = np.full(count, 1 / count)
    means = [
        draw.multinomial(count, even, 100) @ values_QM / count for _ in range(_DRAWINGS // 100)
    ]
    bounds = np.quantile(np.concatenate(means), (0.025, 0.975), axis=0).T.tolist()
    middles = values_QM.mean(axis=0).tolist()
    return [Interval(m, low, high, count) for m, (low, high) in zip(middles, bounds, strict=True)]


def held_out(
    asked: Sequence[Asked], share: float, seed: int
) -> tuple[list[Asked], list[Asked], list[Asked]]:
    """Split queries for an honest measure: a `share` of the tools with every query that asks for
    one, and the same share of the other queries, are left out.

    Returns:
        Queries to train on; queries left out whose tools training sees; those with tools that it
        does not see.
    """
    draw = np.random.default_rng(seed)
    names = sorted({name for one in asked for name in one.tools})
    unseen = set(draw.permutation(names)[: round(share * len(names))].tolist())
    rest = [one for one in asked if not unseen & set(one.tools)]
    order = draw.permutation(len(rest)).tolist()
    cut = round(share * len(rest))
    used = [rest[number] for number in sorted(order[cut:])]
    tested = [rest[number] for number in sorted(order[:cut])]
    return used, tested, [one for one in asked if unseen & set(one.tools)]
