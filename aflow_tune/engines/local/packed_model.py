"""Log-probabilities of a micro-batch from any Hugging Face causal LM, and their gradients.

Three optimisations make a step cheap. Each is tested once against the model's own forward pass; if
it fails or disagrees, that one is off: one unpadded sequence at a time, the model's own logits, its
own norms.

**Token tries.** All samples of a micro-batch go into one trie, whose nodes are the tokens of one
packed row. A node attends to its ancestors, so the row equals the separate samples for any causal
model. Attention runs on a few padded blocks of whole paths. On a CPU its backward pass is written
out as batched matrix products, several times faster than the flash kernel's.

**An output head that keeps no logits**, the largest tensor of a train batch. Both outputs of
`token_scores` have a gradient in the hidden states that is linear in one scalar per output:

    d log p(y) / dh = (W_y - p W) / T          d H / dh = -(p (log p + H)) W / T

so the forward pass processes the rows in chunks, keeps p W (and the entropy's product) of shape
[rows, hidden] and discards the logits. Only a trained output head recomputes them.

**RMS norms in fp32, a few rows at a time**: what lies between the passes stays in the cache, which
takes a quarter of the time of whole tensors on a CPU. The backward pass is torch's of layer norms.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import BoolTensor, LongTensor, Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

BUCKET_FILL = 0.75  # minimum length of a block's paths, relative to the longest


@dataclass
class Sample:
    """One model call of one rollout. action_mask_R marks response tokens sampled by the policy;
    columns beyond T - prompt_length never count. logprobs_R: behaviour policy, fp32. `extra`: loss
    inputs, [R] or []. Samples of one group with the same `run` stay in one micro-batch."""

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
        """The tokens to run through the model: those before the last scored token."""
        columns = self.scored_columns()
        return self.tokens_T[: self.prompt_length + columns[-1]].tolist() if columns else []


class TokenTrie:
    """A prefix tree of tokens; node ids are in order of insertion."""

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
    q of path s has position offsets_S[s] + q and sees the keys up to itself. `causal`: all offsets
    are 0 and Q = K, so that a kernel's own causal flag is equivalent to the mask."""

    queries_SQ: LongTensor
    keys_SK: LongTensor
    offsets_S: LongTensor
    causal: bool

    def flagged(self, window: int | None) -> bool:
        """Whether a kernel's causal flag does what `mask(window)` does."""
        return self.causal and window is None

    def mask(self, window: int | None = None) -> BoolTensor:
        """True where a query sees a key, [S, 1, Q, K]; `window` counts the token itself."""
        last = self.keys_SK.shape[1] - 1
        device = self.keys_SK.device
        q = torch.arange(self.queries_SQ.shape[1], device=device)
        # Padded queries are clamped to the last key; their outputs are never read.
        at_SQ1 = (self.offsets_S[:, None] + q).clamp(max=last)[:, :, None]
        k = torch.arange(last + 1, device=device)
        seen = k <= at_SQ1
        if window is not None:
            seen &= k > at_SQ1 - window
        return seen[:, None]  # type: ignore[return-value]


@dataclass(frozen=True)
class PackedRow:
    """One micro-batch as one row of N tokens. Attention outputs of all `blocks`, concatenated, give
    the row's by `index_select(place_N)`. Score m is the log-probability of target_M[m] after node
    scored_U[node_M[m]]; it belongs to sample row_M[m], response column column_M[m]."""

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
    """Attention blocks for (path, first owned depth) segments, and the index of each node's output.
    Paths from the root have their own blocks: a kernel's causal flag is only right for them."""
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
    """One packed row of `samples`; None if they have no scored token."""
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
    """Split a train batch, in order, into micro-batches of whole rollouts of at most `max_tokens`
    packed tokens; a longer rollout gets its own. `groups` (sample indices) that fit stay whole."""
    paths = [sample.path() for sample in samples]
    batches: list[list[int]] = [[]]
    trie = TokenTrie()

    def cost(indices: Sequence[int], base: TokenTrie) -> int:
        """Upper bound of the nodes that `indices` add; exact unless paths overlap both tries."""
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


NAME = "aflow_token_trie"
"""Name of `trie_attention` among transformers' attention functions. No mask function has this name,
so models create no mask."""
CHUNK_ELEMENTS = 128 * 49152  # logits held at once; they fit into a CPU's shared cache
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of a log-probability that counts as rounding in the probe."""
# Arguments that change the attention weights; models that pass them run unpacked.
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
_TILE = 128
"""Queries of a path that the backward pass on a CPU takes at once."""

logger = logging.getLogger(__name__)
_layout: ContextVar[PackedRow | None] = ContextVar("token_trie_layout", default=None)


def _paths(x_NHD: Tensor, index_SL: Tensor) -> Tensor:
    """Rows of x by path, [S, H, L, D]; `index_select` has a much faster backward pass than
    indexing."""
    rows = x_NHD.flatten(1).index_select(0, index_SL.flatten())
    return rows.view(*index_SL.shape, *x_NHD.shape[1:]).transpose(1, 2)


def _attend(
    q_SHQD: Tensor, k_SHKD: Tensor, v_SHKD: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    kind = {"attn_mask": mask, "is_causal": mask is None, "scale": scale}
    grouped = q_SHQD.shape[1] != k_SHKD.shape[1]
    attend: Any = nn.functional.scaled_dot_product_attention
    return attend(q_SHQD, k_SHKD, v_SHKD, enable_gqa=grouped, **kind)


class _BlockAttention(torch.autograd.Function):
    """Attention of one block with the softmax's backward pass as batched matrix products: with
    P = softmax(s Q K' + mask),  dV = P' dO,  dS = P * (dO V' - rowsum(dO * O)),  dQ = s dS K,
    dK = s dS' Q. Query heads that share a key head are stacked as more rows. A tile of queries is
    multiplied with the keys up to the last that it sees, which halves the work of whole paths."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SHQD: Tensor,
        k_SGKD: Tensor,
        v_SGKD: Tensor,
        block: AttentionBlock,
        window: int | None,
        scale: float,
    ) -> Tensor:
        mask = block.mask(window)
        o_SHQD = _attend(q_SHQD, k_SGKD, v_SGKD, None if block.flagged(window) else mask, scale)
        ctx.save_for_backward(q_SHQD, k_SGKD, v_SGKD, o_SHQD, mask)
        ctx.scale, ctx.windowed = scale, window is not None
        ctx.shortest, ctx.longest = (int(at) for at in block.offsets_S.aminmax())
        return o_SHQD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (do_SHQD,) = grads
        q_SHQD, k_SGKD, v_SGKD, o_SHQD, mask_S1QK = ctx.saved_tensors
        S, H, Q, D = q_SHQD.shape
        G, K = k_SGKD.shape[1:3]
        R = H // G

        def stack(x_SHQD: Tensor) -> Tensor:  # [S G, Q R, ...]: a tile of queries is a slice
            return x_SHQD.unflatten(1, (G, R)).transpose(2, 3).reshape(S * G, Q * R, -1)

        k_BKD, v_BKD = k_SGKD.reshape(S * G, K, D), v_SGKD.reshape(S * G, K, D)
        q_BND, do_BND = stack(q_SHQD * ctx.scale), stack(do_SHQD)
        rowsum_BN1 = stack((do_SHQD * o_SHQD).sum(-1, keepdim=True))
        dq_BND = torch.empty_like(q_BND)
        exact = torch.float32 if Q > _TILE else q_BND.dtype  # in which several tiles are summed
        for start in reversed(range(0, Q, _TILE)):  # the last tile sees all keys
            stop = min(start + _TILE, Q)
            seen = min(K, ctx.longest + stop)
            tile = slice(start * R, stop * R)
            k, v, q, do = k_BKD[:, :seen], v_BKD[:, :seen], q_BND[:, tile], do_BND[:, tile]
            p = torch.bmm(q, k.mT)
            # Keys before the tile's first query of every path need no mask.
            first = 0 if ctx.windowed else min(seen, ctx.shortest + start)
            hidden = ~mask_S1QK[:, :, start:stop, None, first:seen]
            p.view(S, G, -1, R, seen)[..., first:].masked_fill_(hidden, float("-inf"))
            p = p.softmax(-1)
            dv = torch.bmm(p.mT, do)
            ds = torch.bmm(do, v.mT)
            ds -= rowsum_BN1[:, tile]
            ds *= p
            torch.bmm(ds, k, out=dq_BND[:, tile])
            dk = torch.bmm(ds.mT, q)
            if stop == Q:
                dk_BKD, dv_BKD = dk.to(exact), dv.to(exact)
            else:
                dk_BKD[:, :seen] += dk
                dv_BKD[:, :seen] += dv
        dq_SHQD = dq_BND.mul_(ctx.scale).view(S, G, Q, R, D).transpose(2, 3).reshape(S, H, Q, D)
        dk, dv = (x.to(k_BKD.dtype).view(S, G, K, D) for x in (dk_BKD, dv_BKD))
        return dq_SHQD, dk, dv, None, None, None


def trie_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row: query [1, H, N, D], key and value [1, H_kv, N, D]. Returns
    [1, N, H, D]. Raises NotImplementedError: dropout, a cache, or an argument of `_REFUSED`."""
    row = _layout.get()
    unknown = [name for name in _REFUSED if kwargs.get(name) is not None]
    if row is None or unknown or dropout or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"packed attention with {unknown or 'dropout or a cache'}")
    q_NHD, k_NGD, v_NGD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q_NHD.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []  # of each block's queries, [S Q, H D]
    for block in row.blocks:
        q, k = _paths(q_NHD, block.queries_SQ), _paths(k_NGD, block.keys_SK)
        v = _paths(v_NGD, block.keys_SK)
        inside = sliding_window is None or block.keys_SK.shape[1] <= sliding_window
        window = None if inside else sliding_window
        if torch.is_grad_enabled() and q.device.type == "cpu":
            o = _BlockAttention.apply(q, k, v, block, window, scale)
        else:
            o = _attend(q, k, v, None if block.flagged(window) else block.mask(window), scale)
        outputs.append(o.transpose(1, 2).flatten(2).flatten(0, 1))
    o_NE = (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).index_select(0, row.place_N)
    return o_NE.view(1, *q_NHD.shape[:2], -1), None


AttentionInterface.register(NAME, trie_attention)


def _chunks(rows: int, vocabulary: int) -> list[tuple[int, int]]:
    step = max(1, CHUNK_ELEMENTS // vocabulary)
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_UH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        node_M: Tensor,
        target_M: Tensor,
        temperature: float,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        rows, vocabulary = hidden_UH.shape[0], weight_VH.shape[0]
        need = any(ctx.needs_input_grad[:3])
        logprobs_M = hidden_UH.new_empty(len(node_M), dtype=torch.float32)
        entropy_U = hidden_UH.new_zeros(rows if want_entropy else 0, dtype=torch.float32)
        mean_UH = torch.empty_like(hidden_UH) if need else None
        slope_UH = torch.empty_like(hidden_UH) if need and want_entropy else None
        order_M = torch.argsort(node_M, stable=True)
        counts = torch.searchsorted(node_M[order_M], torch.arange(rows + 1, device=node_M.device))
        for start, stop in _chunks(rows, vocabulary):
            logits = _logits(hidden_UH[start:stop], weight_VH, bias_V, temperature)
            logp = logits.log_softmax(-1)
            pick = order_M[counts[start] : counts[stop]]
            logprobs_M[pick] = logp[node_M[pick] - start, target_M[pick]]
            p = logp.exp() if want_entropy else logp.exp_()
            if want_entropy:
                entropy = -(p * logp).sum(-1, keepdim=True)
                entropy_U[start:stop] = entropy.squeeze(-1)
                if slope_UH is not None:
                    weights = (logp.add_(entropy).mul_(p)).neg_().to(weight_VH.dtype)
                    slope_UH[start:stop] = weights @ weight_VH
            if mean_UH is not None:
                mean_UH[start:stop] = p.to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(
            hidden_UH, weight_VH, bias_V, node_M, target_M, entropy_U, mean_UH, slope_UH
        )
        ctx.temperature = temperature
        return logprobs_M, entropy_U

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g_M, e_U = grads
        (hidden_UH, weight_VH, bias_V, node_M, target_M, entropy_U, mean_UH, slope_UH) = (
            ctx.saved_tensors
        )
        rows = hidden_UH.shape[0]
        total_U = torch.zeros(rows, dtype=torch.float32, device=g_M.device)
        total_U.index_add_(0, node_M, g_M)
        dh = torch.zeros(hidden_UH.shape, dtype=torch.float32, device=g_M.device)
        dh.index_add_(0, node_M, g_M[:, None] * weight_VH[target_M].float())
        dh -= total_U[:, None] * mean_UH.float()
        if slope_UH is not None:
            dh += e_U[:, None] * slope_UH.float()
        dh = dh.div_(ctx.temperature).to(hidden_UH.dtype)
        if not (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            return dh, None, None, None, None, None, None
        dW = torch.zeros(weight_VH.shape, dtype=torch.float32, device=g_M.device)
        db = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for start, stop in _chunks(rows, weight_VH.shape[0]):
            logits = _logits(hidden_UH[start:stop], weight_VH, bias_V, ctx.temperature)
            logp = logits.log_softmax(-1)
            p = logp.exp()
            dz = -total_U[start:stop, None] * p
            if slope_UH is not None:
                dz -= e_U[start:stop, None] * p * (logp + entropy_U[start:stop, None])
            here = ((node_M >= start) & (node_M < stop)).nonzero().flatten()
            dz.index_put_((node_M[here] - start, target_M[here]), g_M[here], accumulate=True)
            dz.div_(ctx.temperature)
            dW += (dz.to(hidden_UH.dtype).T @ hidden_UH[start:stop]).float()
            if db is not None:
                db += dz.sum(0)
        return dh, dW.to(weight_VH.dtype), db, None, None, None, None


def _logits(
    hidden_UH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float
) -> Tensor:
    """fp32 logits / temperature, a new tensor."""
    z = torch.nn.functional.linear(hidden_UH, weight_VH, bias_V)
    z = z.float() if z.dtype != torch.float32 else z
    return z if temperature == 1.0 else z.div_(temperature)


def token_scores(
    hidden_UH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    node_M: Tensor,
    target_M: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of target_M[m] under softmax(logits / temperature) of row node_M[m]. Returns
    fp32 logprobs_M and, if requested, the entropy of every row, fp32 [U], in nats."""
    logprobs_M, entropy_U = _TokenScores.apply(
        hidden_UH, weight_VH, bias_V, node_M, target_M, temperature, entropy
    )
    return logprobs_M, entropy_U if entropy else None


_NORM_ROWS = 512


class _RmsNorm(torch.autograd.Function):
    """y = w x / rms(x) over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467), with
    rms(x) = sqrt(mean(x^2) + eps). For the gradient g of w x / rms(x) scaled by w:
    dx = (g - x mean(g x) / rms^2) / rms,  dw = sum(dy x / rms)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_NH = x.reshape(-1, x.shape[-1])
        y_NH = torch.empty_like(x_NH)
        scale_N1 = torch.empty(len(x_NH), 1, dtype=torch.float32, device=x.device)
        parts = (tensor.split(_NORM_ROWS) for tensor in (x_NH, y_NH, scale_N1))
        for x_, y_, scale in zip(*parts, strict=True):
            exact = x_.float()
            torch.rsqrt(exact.pow(2).mean(-1, keepdim=True).add_(eps), out=scale)
            # Rounded in between, as by the models.
            y_.copy_(exact * scale)
            torch.mul(weight_H, y_, out=y_)
        ctx.save_for_backward(x_NH, weight_H, scale_N1)
        return y_NH.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, weight_H, scale_N1 = ctx.saved_tensors
        dy_NH, width = grads[0].reshape(x_NH.shape), x_NH.shape[-1]
        # Torch's kernel for layer norms, told that the mean of x is 0, subtracts mean(g) / rms too.
        zero_N1, exact_H = torch.zeros_like(scale_N1), weight_H.float()
        given = (dy_NH, x_NH, [width], zero_N1, scale_N1, exact_H, None, [True, False, False])
        dx_NH = torch.ops.aten.native_layer_norm_backward(*given)[0]
        sum_N1 = (dy_NH @ weight_H)[:, None]
        dx_NH += (sum_N1 * scale_N1).div_(width).to(dx_NH.dtype)
        dw_H = None
        if ctx.needs_input_grad[1]:  # that kernel sums in the dtype of x
            parts = (tensor.split(_NORM_ROWS) for tensor in (x_NH, dy_NH, scale_N1))
            dw_H = sum((x * scale * dy).sum(0) for x, dy, scale in zip(*parts, strict=True))
            dw_H = dw_H.to(weight_H.dtype)
        return dx_NH.view(grads[0].shape), dw_H, None


def _is_rms_norm(module: nn.Module) -> bool:
    """Whether `module` looks like Llama's norm; the probe sees whether it computes the same."""
    kept = {name for name, _ in module.named_parameters()}
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")
    return named and kept == {"weight"}


def _rms_norm(module: Any, hidden_states: Tensor) -> Tensor:
    """The forward pass of an RMS norm. Anything but CPU tensors of the weight's type: its own."""
    if hidden_states.device.type != "cpu" or hidden_states.dtype != module.weight.dtype:
        return type(module).forward(module, hidden_states)
    return _RmsNorm.apply(hidden_states, module.weight, module.variance_epsilon)


class PackedModel:
    """A causal LM that scores samples. `packed`, `fused_head`, `fused_norms`: which optimisations
    are on."""

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0) -> None:
        self.model = model.eval()
        self.temperature = temperature
        self.device = next(model.parameters()).device
        self._own_attention: str = model.config._attn_implementation or "eager"
        self.packed = self.fused_head = self.fused_norms = False
        self._probe()

    def scores(
        self, samples: Sequence[Sample], width: int, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """fp32 logprobs_BR of the scored response tokens, and their entropies [B, R] or None.
        `width` is R. Columns that do not count are 0 and carry no gradient."""
        found: list[tuple[Tensor, ...]] = []  # rows, columns, log-probabilities, entropies
        for first, row in self._rows(samples):
            with self._as_packed(row) as inputs:
                logprobs_M, entropy_U = self._forward(row, inputs, entropy)
            entropy_M = () if entropy_U is None else (entropy_U[row.node_M],)
            found.append((row.row_M + first, row.column_M, logprobs_M, *entropy_M))
        joined = [torch.cat(parts) for parts in zip(*found, strict=True)]

        def spread(which: int) -> Tensor:
            zeros_BR = torch.zeros((len(samples), width), device=self.device)
            return zeros_BR.index_put(tuple(joined[:2]), joined[which]) if joined else zeros_BR

        return spread(2), spread(3) if entropy else None

    @torch.no_grad()
    def hidden(self, samples: Sequence[Sample]) -> list[Tensor]:
        """fp32 [M, H] of each sample: the last hidden states from which its scored tokens are
        predicted, in the order of `scored_columns`."""
        parts = [torch.empty(0, self.model.config.hidden_size, device=self.device)] * len(samples)
        for first, row in self._rows(samples):
            with self._as_packed(row) as inputs:
                hidden_UH = self._last_hidden(inputs).index_select(0, row.scored_U)
            hidden_MH = hidden_UH.float().index_select(0, row.node_M)
            counts = torch.bincount(row.row_M).tolist()  # a sample's are consecutive
            for index, part in enumerate(hidden_MH.split(counts), first):
                parts[index] = part
        return parts

    def _rows(self, samples: Sequence[Sample]) -> Iterator[tuple[int, PackedRow]]:
        """Packed rows with a scored token, each with the index of its first sample."""
        size = len(samples) if self.packed else 1
        for first in range(0, len(samples), size or 1):
            row = pack(samples[first : first + size], self.device)
            if row is not None:
                yield first, row

    @contextmanager
    def _as_packed(self, row: PackedRow) -> Iterator[dict[str, Tensor]]:
        """The model's inputs for `row`; within the block it attends along the row's paths."""
        inputs: dict[str, Tensor] = {"input_ids": row.tokens_N[None]}
        if not self.packed:
            yield inputs
            return
        self.model.set_attn_implementation(NAME)
        token = _layout.set(row)
        try:
            yield inputs | {"position_ids": row.positions_N[None]}
        finally:
            _layout.reset(token)
            self.model.set_attn_implementation(self._own_attention)

    def _last_hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        if self.model.base_model is not self.model:
            found: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state[0]
        else:
            found = self.model(**inputs, output_hidden_states=True).hidden_states[-1][0]
        return found

    def _forward(
        self, row: PackedRow, inputs: dict[str, Tensor], entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        if self.fused_head:
            head = self.model.get_output_embeddings()
            return token_scores(
                self._last_hidden(inputs).index_select(0, row.scored_U),
                head.weight,
                getattr(head, "bias", None),
                row.node_M,
                row.target_M,
                temperature=self.temperature,
                entropy=entropy,
            )
        logits_NV = self.model(**inputs).logits[0]
        logp_UV = (logits_NV[row.scored_U].float() / self.temperature).log_softmax(-1)
        entropy_U = -(logp_UV.exp() * logp_UV).sum(-1) if entropy else None
        return logp_UV[row.node_M, row.target_M], entropy_U

    @torch.no_grad()
    def _probe(self) -> None:
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        # A shared prefix, a branch, and a sample of its own, longer than the others.
        ids = [(7 * i * i + 3 * i + 1) % vocabulary for i in range(24)]
        samples = [
            Sample(torch.tensor(ids[:n] + ids[a:b]), n, torch.ones(b - a, dtype=torch.bool))
            for n, a, b in ((6, 6, 9), (6, 12, 16), (1, 14, 23))
        ]
        reference, _ = self.scores(samples, 9)

        def agrees(name: str) -> bool:
            try:
                difference = float((self.scores(samples, 9)[0] - reference).abs().max())
            except Exception as error:
                logger.info("%s is off: %s: %s", name, type(error).__name__, error)
                return False
            if difference > PROBE_TOLERANCE.get(self.model.dtype, 1e-3):
                logger.info("%s is off: log-probabilities differ by %.3g", name, difference)
                return False
            return True

        plain = isinstance(self.model.get_output_embeddings(), nn.Linear)
        self.fused_head = plain and self.model.base_model is not self.model
        self.fused_head = self.fused_head and agrees("the fused output head")
        takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        self.packed = takes_positions and bool(self.model._supports_attention_backend)
        self.packed = self.packed and agrees("packing")
        norms = [module for module in self.model.modules() if _is_rms_norm(module)]
        for norm in norms:
            norm.forward = partial(_rms_norm, norm)
        self.fused_norms = bool(norms) and agrees("the fused norms")
        for norm in norms if not self.fused_norms else ():
            del norm.forward
