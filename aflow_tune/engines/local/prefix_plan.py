"""Which prompt tokens to compute, and which keys and values to copy from where.

Prompts that arrive together usually share a system prompt or worked examples, and a group of
runs shares everything. `plan` computes each such part once: equal prompts are copies of one;
a prompt that begins like an active or a finished sequence takes over that beginning; among
the rest, those that begin alike wait for the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from aflow_tune.engines.local.kv_cache import PrefixStore, TokenArray, common_prefix

_WORTH_COPYING = 16
"""Fewer shared tokens than this are computed again: copying would only split the batch."""


@dataclass
class Span:
    """The part of one prompt that is computed: `tokens`, from column `offset` on.

    The columns before come from `storage` (a stored prefix) or from the prompt `donor` of the
    same batch; with neither, `offset` is 0.
    """

    index: int
    offset: int
    tokens: TokenArray
    storage: Tensor | None = None
    donor: int | None = None


@dataclass
class Plan:
    """`leaders` are computed first; `followers` take their prefix from one of them."""

    leaders: list[Span]
    followers: list[Span]
    copies: dict[int, int]
    """Prompts equal to an earlier one: index -> index of the earlier one."""
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
    """Decide what to compute for `prompts`.

    Args:
        prompts: the prompts to add.
        active: tokens and storage of the sequences being decoded.
        store: finished sequences.
    """
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
