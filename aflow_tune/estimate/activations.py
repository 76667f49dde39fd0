"""What a forward pass keeps for its backward pass, in bytes for one token of one layer.

The bookkeeping is that of Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (arXiv:2205.05198, section 4.1): go through the layer and add up what each
operation saves. Their sum, 34 sbh + 5 as^2 b, is for GPT with dropout and materialised
attention scores; here it is for RMS norms, rotary embeddings, grouped-query attention whose
kernel recomputes the scores (arXiv:2205.14135) and a gated MLP, as transformers writes them:

    norms      input in fp32 (4 H), its reciprocal root mean square (4), output (e H), each
    attention  query (e Q), key and value (2 e K), output (e Q)
    MLP        gate, silu(gate), up, and their product (4 e I)

with H hidden, Q = heads x head_dim, K = kv_heads x head_dim, I intermediate width and e bytes an
element. Rotary embedding, residual sums and reshapes keep nothing of their own. Trained weights
add the normalised input of each norm (e H); adapters add their inner rows (e rank). The tests
compare the sum with what autograd saves in real modules.
"""

from __future__ import annotations

from aflow_tune.estimate.shapes import Block, ModelShape

_FP32 = 4


def kept_per_token(
    shape: ModelShape,
    block: Block,
    itemsize: int,
    *,
    full: bool,
    rank_rows: float = 0.0,
    queries: float = 1.0,
    keys: float = 1.0,
    gathered: bool = False,
) -> float:
    """Bytes that one layer keeps for one token.

    Args:
        itemsize: bytes of an element that the layer computes in.
        full: the weights themselves are trained, not an adapter.
        rank_rows: ranks of the layer's adapters, summed.
        queries, keys: rows of the attention problem for each token; above 1 where paths are
            padded or a shared prefix is repeated.
        gathered: attention's output is brought into another order, so its copy is kept too.
    """
    q_width = shape.heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    norms = _norms(shape, block, itemsize, full)
    attention = itemsize * (2 * queries * q_width + 2 * keys * kv_width)
    if gathered:
        attention += itemsize * q_width
    return norms + attention + itemsize * (_mlp_elements(block) + rank_rows)


def _norms(shape: ModelShape, block: Block, itemsize: int, full: bool) -> float:
    hidden = shape.hidden
    if not shape.fp32_norms:  # LayerNorm: input, mean and deviation, output
        return 2 * (itemsize * 2 * hidden + 2 * _FP32)
    count, head_width = _norm_counts(shape, block)
    each = _FP32 * hidden + _FP32 + itemsize * hidden
    if full:
        each += itemsize * hidden
    heads = head_width * (_FP32 + (itemsize if full else 0))
    return count * each + heads


def _norm_counts(shape: ModelShape, block: Block) -> tuple[int, int]:
    """Norms over the hidden width, and elements a token that go through norms of heads."""
    count, rest = divmod(block.norms, shape.hidden)
    per_head = rest == 2 * shape.head_dim
    return count, (shape.heads + shape.kv_heads) * shape.head_dim if per_head else 0


def _mlp_elements(block: Block) -> float:
    """Elements that the MLP keeps for a token: of a mixture, those of the experts it visits."""
    if not block.gated:  # gelu by its tanh formula: input, half of it, tanh, 1 + tanh, product
        return 5 * block.mlp
    return 4 * block.mlp * max(1, block.active)


def layer_working_set(shape: ModelShape, itemsize: int) -> float:
    """Bytes a token that the backward pass of the widest layer holds beside what was kept.

    The gradients of the MLP's product, gate and up projections and of the activation between
    them (4 e I) and two rows of the residual stream (2 e H).
    """
    width = max(block.mlp * max(1, block.active) for block in shape.blocks)
    return itemsize * (4 * width + 2 * shape.hidden)
