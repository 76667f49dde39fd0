"""Which rows of a data set to learn from, by what the policy makes of each: `choose`.

`loss_topk` takes the rows of the highest mean loss per learned token; `diversity` centres that
leave no row far from one (k-centre greedy: Gonzalez 1985; as a coreset: Sener and Savarese,
arXiv:1708.00489); `hybrid` half by loss, then centres beside these; `random` asks no policy. At
scale such scores barely beat chance (arXiv:2410.09335): measure a choice beside `random`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray


def count_of(size: float, rows: int) -> int:
    """How many of `rows` a size stands for: below 1 it is a share, of one row at least."""
    return int(size) if size >= 1 else max(1, round(Fraction(str(size)) * rows))


def k_centre(points_NH: NDArray[Any], size: int, first: Sequence[int]) -> list[int]:
    """`size` row numbers, those of `first` included: each further one is the row farthest (Euclid)
    from all chosen so far, the lower number where two are equally far."""
    points = points_NH.astype(np.float64)
    squares = (points**2).sum(1)
    nearest = np.full(len(points), np.inf)
    chosen: list[int] = []
    while len(chosen) < size:
        row = first[len(chosen)] if len(chosen) < len(first) else int(nearest.argmax())
        chosen.append(row)
        nearest = np.minimum(nearest, squares + squares[row] - 2 * points @ points[row])
        nearest[chosen] = -np.inf  # a copy of a chosen row is at 0, or a rounding below
    return chosen


def choose(
    strategy: str,
    size: int,
    rows: int,
    seed: int,
    losses_N: NDArray[Any] | None = None,
    points_NH: NDArray[Any] | None = None,
) -> list[int]:
    """`size` of `rows` numbers, ascending. `losses_N` (nan: unknown, last) and `points_NH` may be
    None for `random` only; `seed` decides it, and where `diversity` begins."""
    draw = random.Random(f"coreset/{seed}")
    if strategy == "random":
        return sorted(draw.sample(range(rows), size))
    assert losses_N is not None
    assert points_NH is not None
    hardest = np.argsort(-losses_N, kind="stable").tolist()
    if strategy == "loss_topk":
        return sorted(hardest[:size])
    half = math.ceil(size / 2)
    first = hardest[:half] if strategy == "hybrid" else [draw.randrange(rows)]
    return sorted(k_centre(points_NH, size, first))
