"""Statistics of evaluations: t interval, exact sign test, Wilson interval, pass@k.

The unit is the held-out item: the rollouts of an item share its difficulty, so they are averaged
first, and before and after are paired by item.

The t interval (Student, Biometrika 6, 1908) is adequate from `SMALL_SAMPLE` items on and draws no
random numbers; below that the exact sign test has to agree. Not covered: the interval has no width
if all items changed by the same amount, and nothing corrects for looking at many steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from statistics import fmean as mean

CONFIDENCE = 0.95
SMALL_SAMPLE = 30
"""Below this number of items the exact sign test has to confirm the t interval."""


@dataclass(frozen=True)
class Interval:
    """A mean of `count` values with its interval; `low` and `high` are None together."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)

    def text(self) -> str:
        """`0.120 (0.050 to 0.210)`, or the mean alone."""
        bounds = "" if self.low is None else f" ({self.low:.3f} to {self.high:.3f})"
        return f"{self.mean:.3f}{bounds}"


def standard_deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation (n - 1); None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean with its t interval, mean +- t(n - 1) * s / sqrt(n); no bounds for one value.
    Raises ValueError: there are no values."""
    centre, deviation, count = mean(values), standard_deviation(values), len(values)
    if deviation is None:
        return Interval(centre, None, None, count)
    half = t_quantile(0.5 + confidence / 2, count - 1) * deviation / math.sqrt(count)
    return Interval(centre, centre - half, centre + half, count)


def share_or_mean_interval(values: Sequence[float], *, shares: bool = False) -> Interval | None:
    """The mean with its interval: Wilson's if every value is 0 or 1, else the t interval.

    `shares`: the values are in [0, 1], so the bounds are clipped to it. None without values.
    """
    if not values:
        return None
    if all(value in (0.0, 1.0) for value in values):
        successes, count = round(sum(values)), len(values)
        return Interval(successes / count, *wilson_interval(successes, count), count)
    found = mean_interval(values)
    if not shares or found.low is None or found.high is None:
        return found
    return Interval(found.mean, max(0.0, found.low), min(1.0, found.high), found.count)


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of `k` samples solves a task.

    1 - C(n - c, k) / C(n, k) for c of n samples solved (Chen et al., "Evaluating Large Language
    Models Trained on Code", arXiv:2107.03374, equation 1). Raises ValueError unless 1 <= k <= n
    and 0 <= c <= n.
    """
    if not (1 <= k <= samples and 0 <= solved <= samples):
        raise ValueError(f"no pass@{k} of {samples} samples of which {solved} solved the task")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def rise(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Mean of the second half of a series minus that of the first, with Welch's interval.

    A middle value is left out. The degrees of freedom are those of one half, so the interval is
    never narrower than Welch's own (Biometrika 34, 1947). None for fewer than four values. Not
    covered: neighbouring steps depend on each other.
    """
    half = len(values) // 2
    if half < 2:
        return None
    first, second = values[:half], values[-half:]
    change = mean(second) - mean(first)
    spread = math.hypot(standard_deviation(first) or 0.0, standard_deviation(second) or 0.0)
    reach = t_quantile(0.5 + confidence / 2, half - 1) * spread / math.sqrt(half)
    return Interval(change, change - reach, change + reach, 2 * half)


def paired_difference(
    before: Sequence[float], after: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """The mean of after - before, paired by position, with its t interval. Raises ValueError: the
    lengths differ or there are no items."""
    return mean_interval([b - a for a, b in zip(before, after, strict=True)], confidence)


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided p-value of 'rises and falls are equally likely'; unchanged items do not count.

    Exact, from the binomial distribution (Dixon and Mood, JASA 41, 1946); for right-or-wrong
    scores it is McNemar's exact test. 1.0 where nothing changed.
    """
    rises = sum(difference > 0 for difference in differences)
    falls = sum(difference < 0 for difference in differences)
    ways = sum(math.comb(rises + falls, k) for k in range(min(rises, falls) + 1))
    # Integers of any size: the power overflows a float from 1,024 items on.
    return min(1.0, 2 * ways / 2 ** (rises + falls))


def wilson_interval(
    successes: int, count: int, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Interval of a share (Wilson, JASA 22, 1927), valid near 0 and 1; (0, 1) if `count` is 0."""
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
    """Quantile of Student's t distribution, by bisection of its distribution function; above
    10,000 degrees by the expansion around the normal quantile (Abramowitz and Stegun 26.7.5), whose
    error is then below 1e-10. Raises ValueError: the probability is outside (0, 1), or there is no
    degree of freedom."""
    if not 0 < probability < 1 or degrees < 1:
        raise ValueError(f"no t quantile at {probability} with {degrees} degrees of freedom")
    if probability < 0.5:
        return -t_quantile(1 - probability, degrees)
    if degrees > 10_000:
        z = NormalDist().inv_cdf(probability)
        first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        return z + first / degrees + second / degrees**2
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0, by its finite series (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    square = math.cos(angle) ** 2
    term, terms = math.cos(angle) if odd else 1.0, []
    for k in range(2 + odd, degrees + 1, 2):
        terms.append(term)
        term *= square * (k - 1) / k
        if term < 1e-18:
            break
    inside = math.sin(angle) * math.fsum(terms)
    return 0.5 + ((angle + inside) * 2 / math.pi if odd else inside) / 2
