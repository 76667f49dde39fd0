"""Train samples as token tries: a shared prefix is computed once, and nothing is padded.

All samples of a micro-batch go into one trie, whose nodes are the tokens of one packed row. A node
attends to its ancestors, so the row equals the separate samples for any causal model. Tokens after
the last scored one are left out. The arithmetic is in `packed_model.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import BoolTensor, LongTensor, Tensor

BUCKET_FILL = 0.75
"""Paths share one padded attention block if each fills at least this share of the longest."""


@dataclass
class Sample:
    """One model call of one rollout. action_mask_R marks the response tokens that the policy made;
    columns beyond T - prompt_length never count. logprobs_R: behaviour policy, fp32. `extra`: what
    a loss needs, [R] or []. Samples with the same `run` stay in one micro-batch."""

    tokens_T: Tensor
    prompt_length: int
    action_mask_R: Tensor
    logprobs_R: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    run: Hashable = None

    def scored_columns(self) -> list[int]:
        """The response columns whose log-probability counts, ascending."""
        room = len(self.tokens_T) - self.prompt_length
        columns = self.action_mask_R[: max(0, room)].nonzero().flatten().tolist()
        # The first token of a sequence has no prediction.
        return [column for column in columns if self.prompt_length + column > 0]

    def path(self) -> list[int]:
        """The tokens that must be computed: up to the one before the last scored token."""
        columns = self.scored_columns()
        return self.tokens_T[: self.prompt_length + columns[-1]].tolist() if columns else []


class TokenTrie:
    """Tokens by prefix. Node ids count up in the order of insertion."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def missing(self, tokens: Sequence[int]) -> int:
        """How many nodes `add(tokens)` would create."""
        node = -1
        for depth, token in enumerate(tokens):
            child = self._children.get((node, token))
            if child is None:
                return len(tokens) - depth
            node = child
        return 0

    def add(self, tokens: Sequence[int]) -> list[int]:
        """The node ids along `tokens`; new nodes are the consecutive last ones."""
        path, node = [], -1
        for depth, token in enumerate(tokens):
            key = (node, token)
            child = self._children.get(key)
            if child is None:
                child = self._children[key] = len(self.tokens)
                self.tokens.append(token)
                self.depths.append(depth)
            path.append(child)
            node = child
        return path


@dataclass(frozen=True)
class AttentionBlock:
    """Paths of similar length, padded to one [S, Q] x [S, K] attention problem over node ids. Query
    q of path s sits at position offsets_S[s] + q and sees the keys up to itself. `causal`: all
    offsets are 0 and Q = K, so that a kernel's own causal flag says the same as the mask."""

    queries_SQ: LongTensor
    keys_SK: LongTensor
    offsets_S: LongTensor
    causal: bool

    def mask(self, window: int | None = None) -> BoolTensor:
        """True where a query sees a key, [S, 1, Q, K]; `window` counts the token itself."""
        last = self.keys_SK.shape[1] - 1
        device = self.keys_SK.device
        q = torch.arange(self.queries_SQ.shape[1], device=device)
        # Padded queries look at the last key: whatever they give is never read.
        at_SQ1 = (self.offsets_S[:, None] + q).clamp(max=last)[:, :, None]
        k = torch.arange(last + 1, device=device)
        seen = k <= at_SQ1
        if window is not None:
            seen &= k > at_SQ1 - window
        return seen[:, None]  # type: ignore[return-value]


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch as one row of N tokens. Attention outputs of all `blocks`, flattened and
    concatenated, give the row's by `index_select(place_N)`. scored_U: nodes whose next token
    counts. Score m is the log-probability of target_M[m] after node scored_U[node_M[m]]; it belongs
    to sample row_M[m], response column column_M[m]."""

    tokens_N: LongTensor
    positions_N: LongTensor
    blocks: tuple[AttentionBlock, ...]
    place_N: LongTensor
    scored_U: LongTensor
    node_M: LongTensor
    target_M: LongTensor
    row_M: LongTensor
    column_M: LongTensor


def _long(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> LongTensor:
    return torch.tensor(values, dtype=torch.long, device=device)  # type: ignore[return-value]


def _blocks(
    segments: list[tuple[list[int], int]], size: int, device: torch.device
) -> tuple[tuple[AttentionBlock, ...], list[int]]:
    """Attention blocks for (path, first owned depth) segments, and where each node's output is.
    Paths from the root are kept apart from the others: a kernel's causal flag fits them only."""
    blocks: list[AttentionBlock] = []
    place = [0] * size
    done = 0

    def padded(rows: list[list[int]]) -> LongTensor:
        width = max(len(row) for row in rows)
        return _long([row + [row[0]] * (width - len(row)) for row in rows], device)

    for causal in (True, False):
        todo = sorted(
            (segment for segment in segments if (segment[1] == 0) == causal),
            key=lambda segment: (-len(segment[0]), segment[1]),
        )
        while todo:
            longest, widest = len(todo[0][0]), len(todo[0][0]) - todo[0][1]
            bucket: list[tuple[list[int], int]] = []
            rest: list[tuple[list[int], int]] = []
            for path, own in todo:
                fits = len(path) >= BUCKET_FILL * longest and len(path) - own <= max(16, widest)
                (bucket if fits else rest).append((path, own))
            todo = rest
            queries_SQ = padded([path[own:] for path, own in bucket])
            width = queries_SQ.shape[1]
            for s, (path, own) in enumerate(bucket):
                for i, node in enumerate(path[own:]):
                    place[node] = done + s * width + i
            done += len(bucket) * width
            keys_SK = padded([path for path, _ in bucket])
            offsets_S = _long([own for _, own in bucket], device)
            blocks.append(AttentionBlock(queries_SQ, keys_SK, offsets_S, causal))
    return tuple(blocks), place


def pack(samples: Sequence[Sample], device: torch.device | str = "cpu") -> PackedRow | None:
    """One packed row of `samples`; None if no token of them counts."""
    device = torch.device(device)
    trie = TokenTrie()
    segments: list[tuple[list[int], int]] = []
    scores: list[tuple[int, int, int, int]] = []  # node, target, row, column
    for index, sample in enumerate(samples):
        columns = sample.scored_columns()
        if not columns:
            continue
        before = len(trie)
        path = trie.add(sample.path())
        created = len(trie) - before
        if created:
            segments.append((path, len(path) - created))
        tokens = sample.tokens_T.tolist()
        start = sample.prompt_length
        scores += [(path[start + c - 1], tokens[start + c], index, c) for c in columns]
    if not scores:
        return None
    blocks, place = _blocks(segments, len(trie), device)
    nodes, target, row, column = zip(*scores, strict=True)
    scored = sorted(set(nodes))
    rank = {node: u for u, node in enumerate(scored)}
    return PackedRow(
        tokens_N=_long(trie.tokens, device),
        positions_N=_long(trie.depths, device),
        blocks=blocks,
        place_N=_long(place, device),
        scored_U=_long(scored, device),
        node_M=_long([rank[node] for node in nodes], device),
        target_M=_long(target, device),
        row_M=_long(row, device),
        column_M=_long(column, device),
    )


def micro_batches(
    samples: Sequence[Sample], groups: Sequence[Sequence[int]], max_tokens: int
) -> list[list[int]]:
    """Split a train batch into micro-batches of whole rollouts, at most `max_tokens` packed tokens.
    `groups` lists sample indices by task. A group that fits is not cut; a rollout longer than
    `max_tokens` is a micro-batch of its own. The order is kept."""
    paths = [sample.path() for sample in samples]
    batches: list[list[int]] = [[]]
    trie = TokenTrie()

    def cost(indices: Sequence[int], base: TokenTrie) -> int:
        """Upper bound of the nodes that `indices` add: exact unless both tries share parts."""
        alone = TokenTrie()
        total = 0
        for index in indices:
            total += min(base.missing(paths[index]), alone.missing(paths[index]))
            alone.add(paths[index])
        return total

    for group in groups:
        runs: dict[Hashable, list[int]] = {}
        for index in group:
            run = samples[index].run
            runs.setdefault(("sample", index) if run is None else ("run", run), []).append(index)
        if len(trie) + cost(group, trie) > max_tokens and cost(group, TokenTrie()) <= max_tokens:
            batches, trie = [*batches, []], TokenTrie()
        for indices in runs.values():
            if batches[-1] and len(trie) + cost(indices, trie) > max_tokens:
                batches, trie = [*batches, []], TokenTrie()
            for index in indices:
                trie.add(paths[index])
            batches[-1].extend(indices)
    return [batch for batch in batches if batch]
