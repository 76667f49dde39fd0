"""Which rows make up batch N of a mix of sources: exact shares, endless, a function of the seed.

Batch N follows from shares, row counts, batch size and seed alone, so a run can resume at any batch
without saved state.

Shares. A source whose share of the batch is not a whole number (3.2 of 8) gets the whole number
below or above it, and after any number of batches its total differs from its exact share by less
than one item: extra items are scheduled like the slots of a periodic task set (PD2: Anderson and
Srinivasan, "Mixed Pfair/ERfair scheduling of asynchronous periodic tasks", J. Computer and System
Sciences 68, 2004), which keeps every such lag between -1 and 1.

Passes. Each pass over a source is a new shuffle of all its rows, so no row repeats within a pass.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

DEFAULT_SHARES = {"math": Fraction(2, 5), "code": Fraction(3, 10), "qa": Fraction(3, 10)}
"""Shares by kind of source, used if the configuration names none."""
KINDS = dict(gsm8k="math", math="math", humaneval="code", mbpp="code", hotpotqa="qa", drop="qa")
"""What kind of task a benchmark holds."""
SUM_TOLERANCE = Fraction(1, 10**6)
"""How far the sum of the written shares may be from 1: thirds cannot be written exactly."""


def kind_of(source: str, benchmark: str | None) -> str | None:
    """`math`, `code` or `qa`, by a source's benchmark or its own name; None if both are unknown."""
    if benchmark in KINDS:
        return KINDS[benchmark]
    return source if source in DEFAULT_SHARES else KINDS.get(source)


def default_shares(kinds: Mapping[str, str]) -> dict[str, Fraction]:
    """Default shares for sources of these kinds (source to kind), 1 in sum: sources of one kind get
    equal parts of its share; if a kind is missing, the others keep their proportions."""
    present = set(kinds.values())
    whole = sum(DEFAULT_SHARES[kind] for kind in present)
    of_kind = {kind: sum(other == kind for other in kinds.values()) for kind in present}
    return {source: DEFAULT_SHARES[kind] / whole / of_kind[kind] for source, kind in kinds.items()}


def exact_shares(written: Mapping[str, float]) -> dict[str, Fraction]:
    """The written decimals as fractions (0.4 is two fifths), scaled to sum to 1.

    Raises ValueError: a share is not above 0, or the sum is off by more than `SUM_TOLERANCE`."""
    for source, share in written.items():
        if not (math.isfinite(share) and share > 0):
            raise ValueError(f"the share of {source} is {share}: it must be above 0")
    shares = {source: Fraction(str(share)) for source, share in written.items()}
    total = sum(shares.values(), Fraction())
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(f"the shares are {float(total):g} together: they must be 1")
    return {source: share / total for source, share in shares.items()}


def apportion(total: int, shares: Mapping[str, Fraction]) -> dict[str, int]:
    """Split `total` items by shares, by largest remainder; ties go to the source named first."""
    counts = {source: math.floor(total * share) for source, share in shares.items()}
    by_remainder = sorted(shares, key=lambda source: counts[source] - total * shares[source])
    for source in by_remainder[: total - sum(counts.values())]:
        counts[source] += 1
    return counts


def sample(labels: Sequence[str | None], size: int, seed: int) -> list[int]:
    """A stratified sample of at most `size` row numbers, ascending, fixed by `seed`. `labels` has
    the stratum of each row."""
    if size >= len(labels):
        return list(range(len(labels)))
    by_label: dict[str, list[int]] = {}
    for number, label in enumerate(labels):
        by_label.setdefault(str(label), []).append(number)
    shares = {label: Fraction(len(rows), len(labels)) for label, rows in by_label.items()}
    drawn: list[int] = []
    for label, count in apportion(size, shares).items():
        rows = by_label[label]
        random.Random(f"sample/{seed}/{label}").shuffle(rows)
        drawn += rows[:count]
    return sorted(drawn)


class Mix:
    """The batches of a mix.

    Args:
        rows: how many rows each source has.
        seed: decides the shuffles, not how many items of a source a batch has.

    Raises:
        ValueError: a share is not above 0, they do not sum to 1, or a source has no rows.
    """

    def __init__(
        self, shares: Mapping[str, Fraction], rows: Mapping[str, int], batch_size: int, seed: int
    ) -> None:
        if sum(shares.values()) != 1 or min(shares.values()) <= 0:
            raise ValueError("shares must be above 0, and 1 together")
        empty = [source for source in shares if rows[source] < 1]
        if empty:
            raise ValueError(f"no rows: {', '.join(empty)}")
        self.sources = list(shares)
        self.seed = seed
        self._rows = [rows[source] for source in self.sources]
        quotas = [batch_size * shares[source] for source in self.sources]
        self._whole = [math.floor(quota) for quota in quotas]
        self._parts = [quota - whole for quota, whole in zip(quotas, self._whole, strict=True)]
        self._seats = int(sum(self._parts))
        """Extra items of a batch: its size minus the whole parts of all quotas."""
        self._period = math.lcm(*(part.denominator for part in self._parts))
        """Batches after which every source has exactly its share."""
        self._at, self._extra = 0, [0] * len(self.sources)

    def batch(self, number: int) -> list[tuple[str, int]]:
        """(source, row number) of every item of batch `number`, shuffled."""
        before, after = self._taken(number), self._taken(number + 1)
        items = [
            (source, self._row(place, position))
            for place, source in enumerate(self.sources)
            for position in range(before[place], after[place])
        ]
        random.Random(f"batch/{self.seed}/{number}").shuffle(items)
        return items

    def _taken(self, batch: int) -> list[int]:
        """Items of each source in all batches before `batch`."""
        period, within = divmod(batch, self._period)
        if within < self._at:
            self._at, self._extra = 0, [0] * len(self.sources)
        while self._at < within:
            for source in self._chosen(self._at):
                self._extra[source] += 1
            self._at += 1
        return [
            whole * batch + int(part * self._period) * period + extra
            for whole, part, extra in zip(self._whole, self._parts, self._extra, strict=True)
        ]

    def _chosen(self, slot: int) -> list[int]:
        """The sources that get one extra item in this batch of the period, by PD2.

        The n-th extra item of a source of weight w is released at batch floor((n-1)/w) and due by
        batch ceil(n/w). Released items are ordered by earliest deadline; then by whether the
        window overlaps the next one (b-bit); then by the latest group deadline, the end of the
        chain of windows of length two that a late choice would push back.
        """
        waiting: list[tuple[int, int, int, int]] = []
        for source, weight in enumerate(self._parts):
            item = self._extra[source] + 1
            if weight == 0 or math.floor((item - 1) / weight) > slot:
                continue
            deadline = math.ceil(item / weight)
            overlaps = deadline - math.floor(item / weight)
            chain = 0
            if weight >= Fraction(1, 2):
                chain = math.ceil(math.ceil(deadline * (1 - weight)) / (1 - weight))
            waiting.append((deadline, -overlaps, -chain, source))
        return [source for *_, source in sorted(waiting)[: self._seats]]

    def _row(self, source: int, position: int) -> int:
        turn, place = divmod(position, self._rows[source])
        return _pass(self.seed, self.sources[source], turn, self._rows[source])[place]


@lru_cache(maxsize=32)
def _pass(seed: int, source: str, turn: int, rows: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"pass/{seed}/{source}/{turn}").shuffle(order)
    return order
