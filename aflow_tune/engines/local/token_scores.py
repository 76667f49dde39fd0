"""Log-probabilities of chosen tokens without keeping logits.

The logits of a train batch are its largest tensor (4,000 scored tokens of a vocabulary of
50,000: 800 MB in fp32, several times over in a plain backward pass). Both outputs here have
a gradient with respect to the hidden states that is linear in one number a row:

    d log p(y) / dh = (W_y - p W) / T          d H / dh = -(p (log p + H)) W / T

so the forward pass goes through the rows in chunks, keeps p W (and the entropy's product)
of shape [rows, hidden] and throws the logits away. The backward pass is a gather and a sum.
A trained output head needs the gradient of W too; then the chunk's logits are made again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 128 * 49152
"""Logits that exist at once; small enough for a CPU's shared cache to be of use."""


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
        lse_U = hidden_UH.new_empty(rows, dtype=torch.float32)
        chosen_M = hidden_UH.new_empty(len(node_M), dtype=torch.float32)
        entropy_U = hidden_UH.new_zeros(rows if want_entropy else 0, dtype=torch.float32)
        mean_UH = torch.empty_like(hidden_UH) if need else None
        slope_UH = torch.empty_like(hidden_UH) if need and want_entropy else None
        order_M = torch.argsort(node_M, stable=True)
        counts = torch.searchsorted(node_M[order_M], torch.arange(rows + 1, device=node_M.device))
        for start, stop in _chunks(rows, vocabulary):
            z = _logits(hidden_UH[start:stop], weight_VH, bias_V, temperature)
            pick = order_M[counts[start] : counts[stop]]
            chosen_M[pick] = z[node_M[pick] - start, target_M[pick]]
            top = z.amax(-1, keepdim=True)
            # From here z holds exp(z - max); the sum normalises after the product with W.
            shifted = z.sub_(top)
            p = shifted.exp() if want_entropy else shifted.exp_()
            total = p.sum(-1, keepdim=True)
            lse_U[start:stop] = (top + total.log()).squeeze(-1)
            if want_entropy:
                # H = log(total) - sum p (z - max) / total
                logp = shifted.sub_(total.log())
                p.div_(total)
                entropy = -(p * logp).sum(-1, keepdim=True)
                entropy_U[start:stop] = entropy.squeeze(-1)
                if slope_UH is not None:
                    weights = (logp.add_(entropy).mul_(p)).neg_().to(weight_VH.dtype)
                    slope_UH[start:stop] = weights @ weight_VH
                total = torch.ones_like(total)
            if mean_UH is not None:
                product = p.to(weight_VH.dtype) @ weight_VH
                mean_UH[start:stop] = product / total.to(product.dtype)
        ctx.save_for_backward(
            hidden_UH, weight_VH, bias_V, node_M, target_M, lse_U, entropy_U, mean_UH, slope_UH
        )
        ctx.temperature = temperature
        return chosen_M - lse_U[node_M], entropy_U

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g_M, e_U = grads
        (hidden_UH, weight_VH, bias_V, node_M, target_M, lse_U, entropy_U, mean_UH, slope_UH) = (
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
            z = _logits(hidden_UH[start:stop], weight_VH, bias_V, ctx.temperature)
            logp = z.sub_(lse_U[start:stop, None])
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
    """fp32 logits / temperature, a fresh tensor."""
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
    """Log-probability of target_M[m] under softmax(logits / temperature) of row node_M[m].

    Returns fp32 logprobs_M and, if asked for, the entropy of every row, fp32 [U], in nats.
    """
    logprobs_M, entropy_U = _TokenScores.apply(
        hidden_UH, weight_VH, bias_V, node_M, target_M, temperature, entropy
    )
    return logprobs_M, entropy_U if entropy else None
