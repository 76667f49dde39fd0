"""How sure a difference is: paired t interval, exact sign test, Wilson interval.

Before and after are measured on the same held-out items, so items are the unit of the
statistics: the runs of an item are averaged first (they share its difficulty, so counting them
singly would make intervals too narrow), and the interval is that of the mean of the items'
differences.

Why the t interval is the primary one (Student, "The Probable Error of a Mean", Biometrika 6,
1908): from `SMALL_SAMPLE` items on, the mean of bounded differences is close enough to normal,
and unlike a bootstrap it draws no random numbers, so the same records always give the same
report. Below that the approximation is not to be trusted, least of all for right-or-wrong
scores, and the exact sign test has to agree. What neither covers: the interval has no width
where all items changed by the same amount, and nothing here corrects for looking at many steps
or many metrics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

CONFIDENCE = 0.95
SMALL_SAMPLE = 30
"""Fewer items than this need the exact sign test beside the t interval."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its interval. `low` and `high` are None where there is none."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside of the interval."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean, summed without rounding errors.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a mean of no values")
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[float]) -> float | None:
    """s / sqrt(n), s with n - 1; None for fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    centre = mean(values)
    variance = math.fsum((value - centre) ** 2 for value in values) / (count - 1)
    return math.sqrt(variance / count)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean with its t interval: mean +- t(n - 1) * s / sqrt(n).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("an interval of no values")
    centre, error = mean(values), standard_error(values)
    if error is None:
        return Interval(centre, None, None, len(values))
    half = t_quantile(0.5 + confidence / 2, len(values) - 1) * error
    return Interval(centre, centre - half, centre + half, len(values))


def share_interval(successes: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """A share with its Wilson interval.

    Raises:
        ValueError: nothing was counted.
    """
    if count < 1:
        raise ValueError("a share of nothing")
    return Interval(successes / count, *wilson_interval(successes, count, confidence), count)


def share_or_mean_interval(values: Sequence[float], *, shares: bool = False) -> Interval | None:
    """The mean with its interval: Wilson's where every value is 0 or 1, else the t interval.

    `shares`: the values can only be between 0 and 1, and so can the bounds. None for no values.
    """
    if not values:
        return None
    if all(value in (0.0, 1.0) for value in values):
        return share_interval(round(sum(values)), len(values))
    found = mean_interval(values)
    if not shares or found.low is None or found.high is None:
        return found
    return Interval(found.mean, max(0.0, found.low), min(1.0, found.high), found.count)


def standard_deviation(values: Sequence[float]) -> float | None:
    """The sample's standard deviation, with n - 1; None for fewer than two values."""
    error = standard_error(values)
    return None if error is None else error * math.sqrt(len(values))


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of `k` samples solves a task.

    1 - C(n - c, k) / C(n, k) for c of n samples solved (Chen et al., "Evaluating Large Language
    Models Trained on Code", arXiv:2107.03374, equation 1).

    Raises:
        ValueError: not 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= solved <= samples):
        raise ValueError(f"no pass@{k} of {samples} samples of which {solved} solved the task")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def rise(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Mean of the second half minus that of the first, with Welch's interval.

    For a series in the order of time; a middle value of an odd number is left out. The degrees
    of freedom are those of the smaller half, which makes the interval wider than Welch's own
    (Biometrika 34, 1947) and never narrower. None for fewer than four values. What it does not
    cover: neighbouring steps of a run depend on each other.
    """
    half = len(values) // 2
    if half < 2:
        return None
    first, second = values[:half], values[-half:]
    change = mean(second) - mean(first)
    error = math.hypot(standard_error(first) or 0.0, standard_error(second) or 0.0)
    reach = t_quantile(0.5 + confidence / 2, half - 1) * error
    return Interval(change, change - reach, change + reach, 2 * half)


def paired_difference(
    before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """The mean of after - before, item by item, with its t interval.

    Raises:
        ValueError: the lengths differ, or there are no items.
    """
    return mean_interval([b - a for a, b in zip(before, after, strict=True)], confidence)


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided p-value that rises and falls are equally likely; unchanged items do not count.

    Exact, from the binomial distribution (Dixon and Mood, JASA 41, 1946). For right-or-wrong
    scores it is McNemar's exact test. 1.0 where nothing changed.
    """
    rises = sum(difference > 0 for difference in differences)
    falls = sum(difference < 0 for difference in differences)
    changed = rises + falls
    ways = sum(math.comb(changed, k) for k in range(min(rises, falls) + 1))
    # Integers of any size: 2**changed overflows a float from 1,024 items on.
    return min(1.0, 2 * ways / 2**changed)


def wilson_interval(
    successes: int, count: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of a share (Wilson, JASA 22, 1927): right near 0 and 1, where the usual one is not.

    Nothing counted: everything from 0 to 1 is possible.
    """
    if count == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / count
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    # Exact at the ends, where rounding would leave 1e-17.
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == count else (centre + half) / scale
    return low, high


@functools.cache
def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, by bisection of its distribution function.

    Raises:
        ValueError: the probability is not inside (0, 1), or there is no degree of freedom.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"no t quantile at {probability} with {degrees} degrees of freedom")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if _t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, from the regularised incomplete beta function."""
    x = degrees / (degrees + t * t)
    return 1 - 0.5 * _incomplete_beta(degrees / 2, 0.5, x)


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """I_x(a, b) by its continued fraction (Abramowitz and Stegun 26.5.8, Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a
