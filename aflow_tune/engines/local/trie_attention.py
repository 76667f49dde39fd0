"""Attention over a packed row of token tries, as an attention function of transformers.

The row's queries, keys and values are gathered into a few padded blocks of whole paths, so
the work grows with the paths' lengths and not with the square of the row, and no mask of the
row exists. `use_layout` says which row is being computed. No mask function is registered
under this name, hence models make no mask.

On a CPU the flash kernel's backward pass is several times slower than the few batched matrix
products it stands for, so there the backward pass is written out; the forward pass, which
decides log-probabilities, is PyTorch's kernel everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from aflow_tune.engines.local.packing import AttentionBlock, PackedRow

NAME = "aflow_token_trie"

_layout: ContextVar[PackedRow | None] = ContextVar("token_trie_layout", default=None)

_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments that change the attention weights; models that pass them run unpacked."""

_MAX_SCORES = 1 << 24
"""Longest block (scores = S H Q K) whose written-out backward pass is used; beyond it the
flash kernel's constant memory matters more than its speed."""


@contextmanager
def use_layout(row: PackedRow) -> Iterator[None]:
    """Attention inside the `with` block is that of `row`."""
    token = _layout.set(row)
    try:
        yield
    finally:
        _layout.reset(token)


def _paths(x_NHD: Tensor, index_SL: Tensor) -> Tensor:
    """Rows of x by path, [S, H, L, D].

    `index_select` because its backward pass is many times faster than that of indexing.
    """
    rows = x_NHD.flatten(1).index_select(0, index_SL.flatten())
    return rows.view(*index_SL.shape, *x_NHD.shape[1:]).transpose(1, 2)


def _attend(
    q_SHQD: Tensor, k_SHKD: Tensor, v_SHKD: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    return nn.functional.scaled_dot_product_attention(
        q_SHQD,
        k_SHKD,
        v_SHKD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_SHQD.shape[1] != k_SHKD.shape[1],
    )


class _BlockAttention(torch.autograd.Function):
    """Attention of one block with the softmax's backward pass as batched matrix products.

    With P = softmax(s Q K' + mask):  dV = P' dO,  dS = P * (dO V' - rowsum(dO * O)),
    dQ = s dS K,  dK = s dS' Q. Query heads that share a key head are stacked as more rows.
    """

    @staticmethod
    def forward(
        ctx: Any, q_SHQD: Tensor, k_SGKD: Tensor, v_SGKD: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        o_SHQD = _attend(q_SHQD, k_SGKD, v_SGKD, mask, scale)
        ctx.save_for_backward(q_SHQD, k_SGKD, v_SGKD, o_SHQD, mask)
        ctx.scale = scale
        return o_SHQD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (do_SHQD,) = grads
        q_SHQD, k_SGKD, v_SGKD, o_SHQD, mask_S1QK = ctx.saved_tensors
        S, H, Q, D = q_SHQD.shape
        G, K = k_SGKD.shape[1:3]

        def stack(x_SHQD: Tensor) -> Tensor:  # [S G, (H/G) Q, D]
            return x_SHQD.reshape(S * G, (H // G) * Q, D)

        k, v = k_SGKD.reshape(S * G, K, D), v_SGKD.reshape(S * G, K, D)
        q, do = stack(q_SHQD * ctx.scale), stack(do_SHQD)
        scores = torch.bmm(q, k.mT).view(S, H, Q, K)
        p = scores.masked_fill_(~mask_S1QK, float("-inf")).softmax(-1).view(S * G, -1, K)
        dv = torch.bmm(p.mT, do)
        ds = torch.bmm(do, v.mT)
        ds -= (do * stack(o_SHQD)).sum(-1, keepdim=True)
        ds *= p
        dq = torch.bmm(ds, k).mul_(ctx.scale)
        dk = torch.bmm(ds.mT, q)
        return dq.view(S, H, Q, D), dk.view(S, G, K, D), dv.view(S, G, K, D), None, None


def _block_attention(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    block: AttentionBlock,
    scale: float,
    window: int | None,
) -> Tensor:
    """Outputs of a block's queries, [S Q, H D]."""
    q, k, v = (
        _paths(q_NHD, block.queries_SQ),
        _paths(k_NGD, block.keys_SK),
        _paths(v_NGD, block.keys_SK),
    )
    windowed = window is not None and block.keys_SK.shape[1] > window
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if torch.is_grad_enabled() and q.device.type == "cpu" and scores <= _MAX_SCORES:
        o = _BlockAttention.apply(q, k, v, block.mask(window if windowed else None), scale)
    elif block.causal and not windowed:
        o = _attend(q, k, v, None, scale)
    else:
        o = _attend(q, k, v, block.mask(window if windowed else None), scale)
    return o.transpose(1, 2).flatten(2).flatten(0, 1)


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
    """Attention of one packed row: query [1, H, N, D], key and value [1, H_kv, N, D].

    Returns [1, N, H, D]. Raises NotImplementedError for variants that it does not know, and
    RuntimeError outside `use_layout`.
    """
    row = _layout.get()
    if row is None:
        raise RuntimeError("packed attention is only defined inside use_layout(row)")
    unknown = [name for name in _REFUSED if kwargs.get(name) is not None]
    if unknown or dropout or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise NotImplementedError(f"packed attention with {unknown or 'dropout or a cache'}")
    q_NHD, k_NGD, v_NGD = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q_NHD.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = [
        _block_attention(q_NHD, k_NGD, v_NGD, block, scale, sliding_window) for block in row.blocks
    ]
    o_NE = (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).index_select(0, row.place_N)
    return o_NE.view(1, *q_NHD.shape[:2], -1), None


AttentionInterface.register(NAME, trie_attention)
