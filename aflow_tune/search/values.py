"""The arithmetic of the search: who is expanded, when a race ends, what an edit was worth.

Sources: AFlow's selection (arXiv 2410.10762, `scripts/optimizer_utils/data_utils.py`); PUCT (Rosin,
2011) with the value of the best child and a rank prior as in TTT-Discover (arXiv 2601.16175); the
step advantage of GiGPO (arXiv 2505.10978).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STAGES = (6, 12, 24)
"""Problems of a race after which a loser is dropped; a last stage is all of them."""


def aflow_probabilities(scores: Sequence[float]) -> list[float]:
    """AFlow's probabilities of expanding each of these: 0.3 / n + 0.7 softmax(20 score)."""
    most = max(scores)
    weights = [math.exp(0.2 * 100 * (score - most)) for score in scores]
    return [0.3 / len(scores) + 0.7 * weight / sum(weights) for weight in weights]


def rank_priors(scores: Sequence[float]) -> list[float]:
    """n for the best of n scores, n - 1 for the next, and so on, divided by their sum."""
    order = sorted(range(len(scores)), key=lambda place: (scores[place], -place))
    ranks = [0.0] * len(scores)
    for rank, place in enumerate(order, 1):
        ranks[place] = rank / (len(scores) * (len(scores) + 1) / 2)
    return ranks


def softmax(values: Sequence[float], temperature: float) -> list[float]:
    """exp(v / temperature), normalised."""
    most = max(values)
    weights = [math.exp((value - most) / temperature) for value in values]
    return [weight / sum(weights) for weight in weights]


def puct(
    scores: Sequence[float],
    best_children: Sequence[float | None],
    visits: Sequence[int],
    learned: Sequence[float] | None = None,
    *,
    exploration: float = 1.0,
    mixed: float = 0.0,
    temperature: float = 0.1,
) -> list[float]:
    """The upper bound u = Q + c D P sqrt(1 + T) / (1 + n) of each workflow.

    Q is the larger of its own score and its best child's, D the spread of the scores, T the sum of
    the visits n, and P = (1 - e) rank prior + e softmax(V / temperature).

    Args:
        best_children: score of the best child of each; None if it has none.
        visits: n, how many children each got, refused ones included.
        learned: V, the learned value of expanding each; needed if `mixed` (e) is above 0.
        exploration: c.
    """
    spread, total = max(scores) - min(scores), sum(visits)
    priors = rank_priors(scores)
    if learned is not None and mixed:
        values = softmax(learned, temperature)
        priors = [(1 - mixed) * p + mixed * v for p, v in zip(priors, values, strict=True)]
    bounds = []
    for score, child, prior, n in zip(scores, best_children, priors, visits, strict=True):
        quality = score if child is None else max(score, child)
        bonus = exploration * spread * prior * math.sqrt(1 + total) / (1 + n)
        bounds.append(quality + bonus)
    return bounds


def race_difference(
    failing: float, fixed: float, tried_failed: int, broken: float, tried_passed: int
) -> float:
    """The estimated gain of a child over its parent, from a sample of both kinds of problems.

    d = f fixed / tried - (1 - f) broken / tried, where f is the share of all problems that the
    parent `failing`; a kind that was not tried counts as unchanged."""
    gained = failing * fixed / tried_failed if tried_failed else 0.0
    lost = (1 - failing) * broken / tried_passed if tried_passed else 0.0
    return gained - lost


def race_order(parent: Sequence[float | None]) -> list[int]:
    """The problems that the parent was scored on, alternating those it failed and passed, each
    kind in its order; a score below 1 is failed."""
    failed = [at for at, score in enumerate(parent) if score is not None and score < 1]
    passed = [at for at, score in enumerate(parent) if score is not None and score >= 1]
    both = [at for pair in zip(failed, passed, strict=False) for at in pair]
    least = min(len(failed), len(passed))
    return [*both, *failed[least:], *passed[least:]]


def stages(problems: int) -> list[int]:
    """How many problems a race has been run on at the end of each of its stages."""
    return [size for size in STAGES if size < problems] + [problems]


def learned_value(gains: Sequence[float]) -> float:
    """V = n / (n + 4) times the mean gain of the n edits at one anchor; 0 without any."""
    return sum(gains) / (len(gains) + 4)
