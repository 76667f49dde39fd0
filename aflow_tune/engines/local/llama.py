"""A fast forward pass for Llama, Mistral, Qwen2 and Qwen3 models, with its key-value cache.

Same arithmetic as Hugging Face's modules, arranged for a few dozen rows on a CPU: packed weights,
prompts without padding, and shared prompt prefixes computed once (`plan`). Each adapter is merged
into the packed copies from the base weights, so that updates do not accumulate rounding errors.
Quantised layers stay as they are (`quantised.JoinedProduct`).

Rows 0..rows-1 of the cache are always the active sequences, each one's tokens at columns
0..length-1, so that a decode step reads one dense block. `PrefixStore` keeps recently finished
sequences, because an agent's next prompt usually begins with its last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from aflow_tune.engines.local.quantised import JoinedProduct, QuantisedLinear
from aflow_tune.engines.local.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aflow_tune.engines.local.weights import LoraSpec

TokenArray = NDArray[np.int64]
_COLUMN_STEP = 64


@dataclass
class CacheShape:
    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class KVCache:
    """Storage `kv` of shape [layers, rows, columns, 2, heads, head_dim], so that a token's keys and
    values lie as the projection to them puts them out."""

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
        size = (s.layers, rows, columns, 2, s.heads, s.head_dim)
        # Zeros: masked columns get weight 0, and 0 times uninitialised memory can be NaN.
        return torch.zeros(size, dtype=s.dtype, device=s.device)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` rows of `columns` columns; keeps the content of active rows."""
        _, have_rows, have_columns = self.kv.shape[:3]
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
            grown[:, : self.rows, :used] = self.kv[:, : self.rows, :used]
        self.kv = grown

    def copy_prefix(self, source: Tensor, row: int, length: int) -> None:
        """Copy the first `length` columns of `source`, a row, to `row`."""
        self.kv[:, row, :length] = source[:, :length]

    def row(self, row: int) -> Tensor:
        return self.kv[:, row]  # [layers, columns, 2, heads, head_dim], a view

    def drop(self, dropped: set[int]) -> list[int]:
        """Remove rows and fill the gaps with the last ones; returns the old index of each row."""
        order = list(range(self.rows))
        for hole in sorted(dropped, reverse=True):
            last = len(order) - 1
            if hole != last:
                # Holes are filled from the highest down, so all rows above `hole` are kept ones.
                length = self.lengths[last]
                self.kv[:, hole, :length] = self.kv[:, last, :length]
                order[hole], self.lengths[hole] = order[last], length
            order.pop()
            self.lengths.pop()
        return order


def keys_and_values(kv: Tensor) -> Tensor:
    """`kv` of a layer, [rows, columns, 2, heads, head_dim], viewed as attention takes it:
    [2, rows, heads, columns, head_dim]."""
    return kv.permute(2, 0, 3, 1, 4)


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@dataclass
class PrefixStore:
    """An LRU cache of finished sequences with their keys and values. `capacity` counts tokens.
    Entries are valid for one version of the weights only."""

    capacity: int
    entries: list[tuple[TokenArray, Tensor]] = field(default_factory=list)

    def best(self, prompt: TokenArray) -> tuple[int, Tensor | None]:
        """Length and storage of the longest stored prefix of `prompt`; (0, None) if none."""
        shared = [common_prefix(tokens, prompt) for tokens, _ in self.entries]
        length = max(shared, default=0)
        if not length:
            return 0, None
        self.entries.append(self.entries.pop(shared.index(length)))
        return length, self.entries[-1][1]

    def add(self, tokens: TokenArray, storage: Tensor) -> None:
        """Store a copy of `storage` [layers, columns, 2, heads, dim] for `tokens`."""
        if len(tokens) > self.capacity:
            return
        shared = [common_prefix(known, tokens) for known, _ in self.entries]
        if len(tokens) in shared:
            self.entries.append(self.entries.pop(shared.index(len(tokens))))
            return
        kept = [it for it, n in zip(self.entries, shared, strict=True) if n < len(it[0])]
        while kept and sum(len(it) for it, _ in kept) + len(tokens) > self.capacity:
            kept.pop(0)
        self.entries = [*kept, (tokens, storage[:, : len(tokens)].clone())]


_WORTH_COPYING = 16  # fewer shared tokens are recomputed: copying would split the batch


@dataclass
class Span:
    """The part of one prompt to compute: `tokens`, from column `offset` on. The columns before it
    are copied from `storage`, or from the prompt `donor` of the same batch."""

    index: int
    offset: int
    tokens: TokenArray
    storage: Tensor | None = None
    donor: int | None = None


@dataclass
class Plan:
    """`leaders` are computed first; `followers` copy their prefix from one of them. `copies`: index
    of each prompt that equals an earlier one, to the index of that one."""

    leaders: list[Span]
    followers: list[Span]
    copies: dict[int, int]
    shared_tokens: int

    def waves(self, token_limit: int) -> Iterator[list[Span]]:
        """Spans in batches of at most `token_limit` tokens (or one longer span), donors first."""
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
    prompts: Sequence[TokenArray], active: Sequence[tuple[TokenArray, Tensor]], store: PrefixStore
) -> Plan:
    """Decide what to compute for `prompts` and which prefixes to copy. `active`: tokens and storage
    of the sequences being decoded; `store`: finished ones."""
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


@dataclass
class Groups:
    """Rows of a batch whose first `columns` tokens are equal, `order`ed by group: their `sizes`,
    and a row of each."""

    columns: int
    order: list[int]
    sizes: list[int]
    leaders: list[int]


def groups_of(rows: Sequence[list[int]]) -> Groups | None:
    """The groups that save most reading of keys and values, if attention to a group's common tokens
    is computed at once; None: it saves none. `rows`: the tokens of the active sequences."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    arrays = [np.asarray(rows[row], dtype=np.int64) for row in order]
    shared = [common_prefix(a, b) for a, b in itertools.pairwise(arrays)]
    shortest = min(map(len, rows), default=0)

    def saved(columns: int) -> int:
        """In keys of one row, with what the calls cost: as measured, for 9 heads of 64."""
        groups = 1 + sum(length < columns for length in shared)
        return columns * (len(rows) - 3 * groups) - 300 * groups - 1500

    columns = max((min(length, shortest) for length in shared), key=saved, default=0)
    if saved(columns) <= 0:
        return None
    starts = [0, *(i for i, length in enumerate(shared, 1) if length < columns)]
    sizes = [stop - start for start, stop in itertools.pairwise([*starts, len(rows)])]
    return Groups(columns, order, sizes, [order[start] for start in starts])


class PackedLinear:
    """y_NO = x_NI W' + b for a frozen W, with fused element-wise operations. The weight is laid out
    for oneDNN once: on every call that would cost more than the product of a decode step. Without
    these kernels plain torch computes the same."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.packed = (
            weight_OI.device.type == "cpu"
            and weight_OI.dtype in (torch.float32, torch.bfloat16)
            and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise")
            and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        )
        self.bias_O = bias_O
        self.weight = weight_OI
        if self.packed:  # a layout for 32 rows, which also works with other counts
            order = torch.ops.mkldnn._reorder_linear_weight
            self.weight = order(weight_OI.contiguous(), 32)

    def __call__(self, x_NI: Tensor, activation: str = "none") -> Tensor:
        """x W' + b; with the activation 'swish', its SiLU."""
        if self.packed:
            multiply = torch.ops.mkldnn._linear_pointwise
            return multiply(x_NI, self.weight, self.bias_O, activation, [], "")
        y_NO = F.linear(x_NI, self.weight, self.bias_O)
        return F.silu(y_NO) if activation == "swish" else y_NO

    def combined(self, x_NI: Tensor, operation: str, other_NO: Tensor) -> Tensor:
        """(x W' + b) * other for 'mul', x W' + b + other for 'add'."""
        if self.packed:
            combine = torch.ops.mkldnn._linear_pointwise.binary
            return combine(x_NI, other_NO, self.weight, self.bias_O, operation)
        y_NO = F.linear(x_NI, self.weight, self.bias_O)
        return y_NO.mul_(other_NO) if operation == "mul" else y_NO.add_(other_NO)


_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_PREFILL_TOKENS = 4096  # prompt tokens in one forward pass; bounds activation memory
_SCORE_ROWS = 256  # positions whose logits are held at once while scoring
_STORED_TOKENS = 8192  # tokens of finished sequences that stay available as prefixes


def logprobs_of(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets, fp32 [T]."""
    scaled_TV = logits_TV.float() / temperature
    chosen_T = scaled_TV.gather(-1, targets_T[:, None])[:, 0]
    return chosen_T - torch.logsumexp(scaled_TV, dim=-1)


def supports(model: PreTrainedModel) -> bool:
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    linears = (m for n, m in model.named_modules() if n.endswith("_proj"))
    return (
        type(model).__name__ in _CLASSES
        and config.hidden_act in ("silu", "swish")
        and rope.get("rope_type", "default") in _ROPE_TYPES
        and rope.get("partial_rotary_factor", 1.0) == 1.0
        and kinds == {"full_attention"}
        and not (config.model_type == "mistral" and config.sliding_window)
        and all(type(linear) in (torch.nn.Linear, QuantisedLinear) for linear in linears)
    )


@dataclass
class _Layer:
    qkv: PackedLinear | JoinedProduct
    out: PackedLinear | JoinedProduct
    gate: PackedLinear | JoinedProduct
    up: PackedLinear | JoinedProduct
    down: PackedLinear | JoinedProduct
    norm_attention: Tensor
    norm_mlp: Tensor
    norm_q: Tensor | None
    norm_k: Tensor | None


class LlamaDecoder:
    """`decoder.Decoder` for the models that `supports` accepts."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config
        self.model = model
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.q_width = self.heads * self.head_dim
        self.rotated_width = (self.heads + self.kv_heads) * self.head_dim
        self.device, self.dtype = model.device, model.dtype
        self._eps = torch.tensor(config.rms_norm_eps, device=self.device)
        self.computed_tokens = 0
        self.shared_tokens = 0
        self.shape = CacheShape(
            config.num_hidden_layers, self.kv_heads, self.head_dim, self.dtype, self.device
        )
        self.cache = KVCache(self.shape)
        self.store = PrefixStore(_STORED_TOKENS)
        self.tokens: list[list[int]] = []
        self._groups: Groups | None = None
        self._regroup = True  # rows joined or left: the others only grow, and keep what they share
        self._turns_PD = torch.empty(0, self.head_dim // 2, dtype=torch.complex64)
        self.weights = Weights(model)
        self._pack()

    def load(self, state: Mapping[str, Tensor], lora: LoraSpec | None) -> None:
        self.weights.load(state, lora)
        self.reset()
        self._pack()

    @torch.inference_mode()
    def _pack(self) -> None:
        inner: Any = self.model.model
        self.embedding = inner.embed_tokens.weight
        self.norm = inner.norm.weight
        self.layers = [self._pack_layer(i, layer) for i, layer in enumerate(inner.layers)]
        self.head = PackedLinear(self.weights.effective("lm_head"))

    def _pack_layer(self, index: int, layer: Any) -> _Layer:
        def linear(path: str) -> PackedLinear | JoinedProduct:
            path = f"model.layers.{index}.{path}"
            module = self.model.get_submodule(path)
            if isinstance(module, QuantisedLinear):
                return JoinedProduct(module)
            return PackedLinear(self.weights.effective(path), self.weights.bias(path))

        def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat([self._interleave(q), self._interleave(k), v])

        def attention() -> PackedLinear | JoinedProduct:
            paths = [f"model.layers.{index}.self_attn.{name}_proj" for name in "qkv"]
            modules: list[Any] = [self.model.get_submodule(path) for path in paths]
            if isinstance(modules[0], QuantisedLinear):
                rows = torch.arange(sum(module.out_features for module in modules))
                parts = rows.split([module.out_features for module in modules])
                return JoinedProduct(*modules, order_O=joined(*parts).to(self.device))
            biases: list[Any] = [self.weights.bias(path) for path in paths]
            bias = None if biases[2] is None else joined(*biases)
            return PackedLinear(joined(*map(self.weights.effective, paths)), bias)

        norms = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
        norm_q, norm_k = (self._interleave(n.weight) if n else None for n in norms)
        return _Layer(
            qkv=attention(),
            out=linear("self_attn.o_proj"),
            gate=linear("mlp.gate_proj"),
            up=linear("mlp.up_proj"),
            down=linear("mlp.down_proj"),
            norm_attention=layer.input_layernorm.weight,
            norm_mlp=layer.post_attention_layernorm.weight,
            norm_q=norm_q,
            norm_k=norm_k,
        )

    def _interleave(self, weight: Tensor) -> Tensor:
        """Reorder each head so that the pairs that rotate together are adjacent. Queries and keys
        are reordered alike, so their products are unchanged."""
        halves = weight.view(-1, 2, self.head_dim // 2, *weight.shape[1:])
        return halves.transpose(1, 2).reshape(weight.shape)

    def add(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Equal prompts and common prefixes are computed once."""
        arrays = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
        first, cache = self.cache.rows, self.cache
        cache.reserve(first + len(arrays), max(map(len, arrays)) + 1)
        active = [
            (np.asarray(tokens, dtype=np.int64), cache.row(row))
            for row, tokens in enumerate(self.tokens)
        ]
        prefill = plan(arrays, active, self.store)
        logits_NV: Tensor | None = None
        for wave in prefill.waves(_PREFILL_TOKENS):
            for span in wave:
                donor = None if span.donor is None else cache.row(first + span.donor)
                source = donor if span.storage is None else span.storage
                if source is not None:
                    cache.copy_prefix(source, first + span.index, span.offset)
            rows_KV = self.head(self._extend(cache, first, wave, last_only=True))
            if logits_NV is None:
                logits_NV = rows_KV.new_empty(len(arrays), rows_KV.shape[1])
            logits_NV[[span.index for span in wave]] = rows_KV
            self.computed_tokens += sum(len(span.tokens) for span in wave)
        assert logits_NV is not None
        for copy, original in prefill.copies.items():
            cache.copy_prefix(cache.row(first + original), first + copy, len(arrays[copy]))
            logits_NV[copy] = logits_NV[original]
        self.shared_tokens += prefill.shared_tokens
        cache.lengths += [len(array) for array in arrays]
        self.tokens += [array.tolist() for array in arrays]
        self._regroup = True
        return logits_NV

    def step(self, tokens_B: Tensor) -> Tensor:
        cache, rows = self.cache, self.cache.rows
        if self._regroup:
            self._groups = groups_of(self.tokens) if self.device.type == "cpu" else None
            self._regroup = False
        positions_B = torch.tensor(cache.lengths, device=self.device)
        for row, token in enumerate(tokens_B.tolist()):
            self.tokens[row].append(token)
        used = max(cache.lengths) + 1
        cache.reserve(rows, used)
        cache.lengths = [length + 1 for length in cache.lengths]
        attend = self._decode_attention(cache, positions_B, used)
        rows_B = torch.arange(rows, device=self.device)
        return self.head(self._forward(cache, tokens_B, positions_B, rows_B, attend))

    def drop(self, rows: set[int]) -> list[int]:
        """Also adds the rows to the prefix store."""
        for row in rows:
            self.store.add(np.asarray(self.tokens[row], dtype=np.int64), self.cache.row(row))
        order = self.cache.drop(rows)
        self.tokens = [self.tokens[row] for row in order]
        self._regroup = True
        return order

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], temperature: float, first: int = 1) -> list[float]:
        tokens = np.asarray(token_ids, dtype=np.int64)
        inputs, targets_T = tokens[:-1], torch.from_numpy(tokens[first:]).to(self.device)
        cache = KVCache(self.shape)
        cache.reserve(1, len(inputs))
        span = Span(index=0, offset=0, tokens=inputs)
        hidden_TE = self._extend(cache, 0, [span], last_only=False)[first - 1 :]
        chunks = zip(hidden_TE.split(_SCORE_ROWS), targets_T.split(_SCORE_ROWS), strict=True)
        pieces = [logprobs_of(self.head(hidden), it, temperature) for hidden, it in chunks]
        return torch.cat(pieces).tolist()

    def reset(self) -> None:
        self.cache.clear()
        self.store.entries.clear()
        self.tokens = []
        self._regroup = True

    def _extend(
        self, cache: KVCache, first_row: int, spans: list[Span], *, last_only: bool
    ) -> Tensor:
        """Run new tokens of several rows, packed; returns hidden_TE of all tokens, or of each
        span's last. Sorts `spans`, so that equal offsets and lengths share an attention call."""
        spans.sort(key=lambda span: (span.offset, len(span.tokens)))
        lengths = [len(span.tokens) for span in spans]
        starts = np.cumsum([0, *lengths])

        def packed(arrays: list[Any]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(self.device)

        tokens_T = packed([span.tokens for span in spans])
        positions_T = packed([span.offset + np.arange(len(span.tokens)) for span in spans])
        rows = torch.tensor([first_row + span.index for span in spans])
        rows_T = rows.repeat_interleave(torch.tensor(lengths)).to(self.device)
        rows = rows.to(self.device)
        blocks: dict[tuple[int, int], list[int]] = {}
        for i, span in enumerate(spans):
            blocks.setdefault((span.offset, lengths[i]), []).append(i)

        def attend(layer: int, qkv_TW: Tensor) -> Tensor:
            outputs = []
            for (offset, _), members in blocks.items():
                start, stop = members[0], members[-1] + 1
                part_TW, own = qkv_TW[starts[start] : starts[stop]], rows[start:stop]
                outputs.append(self._attend_block(cache.kv[layer], part_TW, own, offset))
            return torch.cat(outputs)

        wanted = torch.from_numpy(starts[1:] - 1).to(self.device) if last_only else None
        return self._forward(cache, tokens_T, positions_T, rows_T, attend, wanted)

    def _decode_attention(
        self, cache: KVCache, positions_B: Tensor, used: int
    ) -> Callable[[int, Tensor], Tensor]:
        """Attention of one new token per row to its first `positions + 1` columns, to those that a
        group of rows shares at once."""
        rows, groups = len(positions_B), self.heads // self.kv_heads
        columns = torch.arange(used, device=self.device)
        mask = torch.zeros(rows, 1, 1, used, dtype=self.dtype, device=self.device)
        mask.masked_fill_((columns > positions_B[:, None])[:, None, None], float("-inf"))
        mask = mask.expand(rows, self.kv_heads, groups, used)
        if self._groups is not None:
            return self._grouped_attention(cache, mask, self._groups)

        def attend(layer: int, qkv_BW: Tensor) -> Tensor:
            q = qkv_BW[:, : self.q_width].view(rows, self.kv_heads, groups, self.head_dim)
            k, v = keys_and_values(cache.kv[layer, :rows, :used])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).reshape(rows, -1)

        return attend

    def _grouped_attention(
        self, cache: KVCache, mask: Tensor, shared: Groups
    ) -> Callable[[int, Tensor], Tensor]:
        """`_decode_attention` in two parts: to the columns that groups share, with the queries of a
        group's rows as those of one, and to each row's own. Softmaxes over parts of the keys add up
        by their sums (arXiv:2402.05099)."""
        rows, _, heads, used = mask.shape
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        order, cut = torch.tensor(shared.order), shared.columns
        back = order.argsort()
        sizes = [size * heads for size in shared.sizes]
        own_mask = mask[..., cut:]

        def unsorted(parts: Sequence[Tensor]) -> Tensor:
            joined = torch.cat(list(parts), dim=2)[0].unflatten(1, (rows, heads))
            return joined.index_select(1, back).transpose(0, 1)

        def attend(layer: int, qkv_BW: Tensor) -> Tensor:
            q = qkv_BW[:, : self.q_width].view(rows, self.kv_heads, heads, self.head_dim)
            k, v = keys_and_values(cache.kv[layer, :rows, :used])
            own, own_sum = kernel(q, k[:, :, cut:], v[:, :, cut:], attn_mask=own_mask)
            queries = q.transpose(0, 1).index_select(1, order).flatten(1, 2)[None]
            parts = [
                kernel(part, k[row : row + 1, :, :cut], v[row : row + 1, :, :cut])
                for part, row in zip(queries.split(sizes, dim=2), shared.leaders, strict=True)
            ]
            common, common_sum = map(unsorted, zip(*parts, strict=True))
            weight = torch.sigmoid(common_sum - own_sum)[..., None]
            both = torch.lerp(own.float(), common.float(), weight)
            return both.to(q.dtype).reshape(rows, -1)

        return attend

    def _attend_block(self, kv: Tensor, qkv_TW: Tensor, rows: Tensor, offset: int) -> Tensor:
        """Causal attention of spans with equal offset and length; `kv` is one layer's storage."""
        count, groups = len(rows), self.heads // self.kv_heads
        heads = qkv_TW.view(count, -1, self.heads + 2 * self.kv_heads, self.head_dim)
        length = heads.shape[1]
        q = heads[:, :, : self.heads].transpose(1, 2)
        mask = None
        if offset == 0:
            k, v = heads[:, :, self.heads :].transpose(1, 2).split(self.kv_heads, dim=1)
        else:
            k, v = keys_and_values(kv[:, : offset + length].index_select(0, rows))
            mask = torch.ones(length, offset + length, dtype=torch.bool, device=rows.device)
            mask = mask.tril(offset)
        out = F.scaled_dot_product_attention(
            q,
            k.repeat_interleave(groups, dim=1),
            v.repeat_interleave(groups, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return out.transpose(1, 2).reshape(count * length, self.q_width)

    def _forward(
        self,
        cache: KVCache,
        tokens_T: Tensor,
        positions_T: Tensor,
        rows_T: Tensor,
        attend: Callable[[int, Tensor], Tensor],
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, of the packed tokens `wanted` (None: all); writes
        keys and values to `rows_T` of `cache`."""
        columns = cache.kv.shape[2]
        index = rows_T * columns + positions_T
        turns = self._turns(columns)[positions_T][:, None]
        x = F.embedding(tokens_T, self.embedding)
        for number, layer in enumerate(self.layers):
            qkv = layer.qkv(self._rms(x, layer.norm_attention))
            self._rotate(qkv, layer, turns)
            fresh = qkv[:, self.q_width :]
            cache.kv[number].view(-1, fresh.shape[1]).index_copy_(0, index, fresh)
            attended = attend(number, qkv)
            if wanted is not None and number == len(self.layers) - 1:
                attended, x = attended[wanted], x[wanted]
            x = layer.out.combined(attended, "add", x)
            h = self._rms(x, layer.norm_mlp)
            gated = layer.up.combined(h, "mul", layer.gate(h, "swish"))
            x = layer.down.combined(gated, "add", x)
        return self._rms(x, self.norm)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 and rounded
        before the weight, as by the models; fewer passes over memory than torch's seven."""
        exact = x.float()  # First: `vector_norm` of bf16 loses digits, whatever its dtype says.
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (exact * scale).to(x.dtype) * weight

    def _rotate(self, qkv_TW: Tensor, layer: _Layer, turns: Tensor) -> None:
        """Rotary embedding of queries and keys, in place (arXiv:2104.09864)."""
        turned = qkv_TW[:, : self.rotated_width].unflatten(1, (-1, self.head_dim))
        if layer.norm_q is not None and layer.norm_k is not None:
            q, k = turned.split([self.heads, self.kv_heads], dim=1)
            q.copy_(self._rms(q, layer.norm_q))
            k.copy_(self._rms(k, layer.norm_k))
        exact = turned.float()
        torch.view_as_complex(exact.unflatten(-1, (-1, 2))).mul_(turns)
        if exact.data_ptr() != turned.data_ptr():
            turned.copy_(exact)

    def _turns(self, positions: int) -> Tensor:
        """exp(i angle) of every position and pair, complex64 [positions, head_dim / 2]."""
        if len(self._turns_PD) < positions:
            ids = torch.arange(positions, device=self.device)[None]
            probe = torch.empty(0, dtype=torch.float32, device=self.device)
            cos, sin = self.model.model.rotary_emb(probe, ids)
            half = self.head_dim // 2
            self._turns_PD = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return self._turns_PD
