"""Keys and values of the sequences being decoded, and of prefixes worth keeping.

Rows 0..rows-1 are always the active sequences, each one's tokens at columns 0..length-1, so that a
decode step reads one dense block. `PrefixStore` keeps finished sequences for a while, because an
agent's next prompt usually begins with its last one. `plan` has shared beginnings computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TokenArray = NDArray[np.int64]
_COLUMN_STEP = 64


@dataclass
class CacheShape:
    """What one token's entry looks like: layers x {key, value} x heads x head_dim."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """Storage `kv` of shape [layers, 2, rows, heads, columns, head_dim]."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.clear()

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def clear(self) -> None:
        self.lengths: list[int] = []
        self.kv = self._empty(0, 0)

    def _empty(self, rows: int, columns: int) -> Tensor:
        s = self.shape
        size = (s.layers, 2, rows, s.heads, columns, s.head_dim)
        # Zeros: masked columns are multiplied by a weight of 0, and 0 times garbage can be NaN.
        return torch.zeros(size, dtype=s.dtype, device=s.device)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` rows of `columns` columns; keeps what active rows hold."""
        have_rows, have_columns = self.kv.shape[2], self.kv.shape[4]
        if rows <= have_rows and columns <= have_columns:
            return
        if rows > have_rows:
            rows = max(rows, min(2 * have_rows, rows + 16))
        if columns > have_columns:
            columns = max(columns, have_columns * 3 // 2)
            columns = -(-columns // _COLUMN_STEP) * _COLUMN_STEP
        grown = self._empty(max(rows, have_rows), max(columns, have_columns))
        if self.rows:
            used = max(self.lengths)
            grown[:, :, : self.rows, :, :used] = self.kv[:, :, : self.rows, :, :used]
        self.kv = grown

    def copy_prefix(self, source: Tensor, row: int, length: int) -> None:
        """Write the first `length` columns of `source` [layers, 2, heads, columns, dim]."""
        self.kv[:, :, row, :, :length] = source[:, :, :, :length]

    def row(self, row: int) -> Tensor:
        return self.kv[:, :, row]  # [layers, 2, heads, columns, head_dim], a view

    def drop(self, dropped: set[int]) -> list[int]:
        """Remove rows and close the gaps with the last rows. Returns for each remaining row the row
        that it was before."""
        order = list(range(self.rows))
        for hole in sorted(dropped, reverse=True):
            last = len(order) - 1
            if hole != last:
                # Rows above `hole` are all kept here: holes are closed from the highest down.
                length = self.lengths[last]
                self.kv[:, :, hole, :, :length] = self.kv[:, :, last, :, :length]
                order[hole], self.lengths[hole] = order[last], length
            order.pop()
            self.lengths.pop()
        return order


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@dataclass
class PrefixStore:
    """Finished sequences and their keys and values, least recently used out first. `capacity`
    counts tokens. Contents are valid for one version of the weights only."""

    capacity: int
    entries: list[tuple[TokenArray, Tensor]] = field(default_factory=list)

    def best(self, prompt: TokenArray) -> tuple[int, Tensor | None]:
        """The longest stored common prefix with `prompt`: its length and its storage."""
        shared = [common_prefix(tokens, prompt) for tokens, _ in self.entries]
        length = max(shared, default=0)
        if not length:
            return 0, None
        self.entries.append(self.entries.pop(shared.index(length)))
        return length, self.entries[-1][1]

    def add(self, tokens: TokenArray, storage: Tensor) -> None:
        """Keep a copy of `storage` [layers, 2, heads, columns, dim] for `tokens`."""
        if len(tokens) > self.capacity:
            return
        shared = [common_prefix(known, tokens) for known, _ in self.entries]
        if len(tokens) in shared:
            self.entries.append(self.entries.pop(shared.index(len(tokens))))
            return
        kept = [it for it, n in zip(self.entries, shared, strict=True) if n < len(it[0])]
        while kept and sum(len(it) for it, _ in kept) + len(tokens) > self.capacity:
            kept.pop(0)
        self.entries = [*kept, (tokens, storage[:, :, :, : len(tokens)].clone())]


_WORTH_COPYING = 16
"""Fewer shared tokens than this are computed again: copying would only split the batch."""


@dataclass
class Span:
    """The part of one prompt that is computed: `tokens`, from column `offset` on. The columns
    before come from `storage` or from the prompt `donor` of the same batch."""

    index: int
    offset: int
    tokens: TokenArray
    storage: Tensor | None = None
    donor: int | None = None


@dataclass
class Plan:
    """`leaders` are computed first; `followers` take their prefix from one of them. `copies`: the
    indices of prompts that equal an earlier one, and of that one."""

    leaders: list[Span]
    followers: list[Span]
    copies: dict[int, int]
    shared_tokens: int

    def waves(self, token_limit: int) -> Iterator[list[Span]]:
        """Spans in an order that respects donors, at most `token_limit` tokens at once."""
        for spans in (self.leaders, self.followers):
            wave: list[Span] = []
            filled = 0
            for span in spans:
                if wave and filled + len(span.tokens) > token_limit:
                    yield wave
                    wave, filled = [], 0
                wave.append(span)
                filled += len(span.tokens)
            if wave:
                yield wave


def plan(
    prompts: Sequence[TokenArray],
    active: Sequence[tuple[TokenArray, Tensor]],
    store: PrefixStore,
) -> Plan:
    """Decide what to compute for `prompts`. `active`: tokens and storage of the sequences being
    decoded; `store`: finished ones."""
    result = Plan([], [], {}, 0)
    seen: dict[bytes, int] = {}
    for index, prompt in enumerate(prompts):
        original = seen.setdefault(prompt.tobytes(), index)
        if original != index:
            result.copies[index] = original
            result.shared_tokens += len(prompt)
            continue
        # The last prompt token is always computed: its logits are needed.
        limit = len(prompt) - 1
        held, storage = store.best(prompt)
        for tokens, row in active:
            if (shared := common_prefix(tokens, prompt)) > held:
                held, storage = shared, row
        held = min(held, limit)
        if held < _WORTH_COPYING:
            held, storage = 0, None
        donor, shared = None, held + _WORTH_COPYING - 1
        for leader in result.leaders:
            if (n := min(common_prefix(prompts[leader.index], prompt), limit)) > shared:
                donor, shared = leader.index, n
        if donor is None:
            result.leaders.append(Span(index, held, prompt[held:], storage))
        else:
            held = shared
            result.followers.append(Span(index, held, prompt[held:], None, donor))
        result.shared_tokens += held
    return result
