"""A causal language model as numbers: its layers, parameters and cache entries.

`shape_of` takes the settings of a Hugging Face `config.json` (with the defaults that
`AutoConfig` fills in) and counts what transformers' module of that `model_type` holds; the tests
compare every family with that module built on torch's meta device. A family that is not in
`FAMILIES` is refused: a near miss would be a wrong number that looks right.

Mixture-of-experts models hold all their experts in memory and compute with a few of them for
each token: `parameters` and `active_parameters` are told apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.errors import BadInput, Fault

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block: its module path below the block, widths, and bias."""

    path: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        """Weights and bias."""
        return self.inputs * self.outputs + self.outputs * self.bias


@dataclass(frozen=True)
class Block:
    """One decoder layer. Widths in elements.

    `experts` 0: an ordinary MLP, which is among `linears`. Otherwise `experts` MLPs of width
    `mlp` are held as plain parameters and `active` of them compute a token.
    """

    linears: tuple[Linear, ...]
    norms: int
    mlp: int
    gated: bool = True
    window: int | None = None
    experts: int = 0
    active: int = 0
    router: int = 0
    expert: int = 0
    """Parameters of one expert."""

    @property
    def parameters(self) -> int:
        """Everything that the layer holds."""
        linears = sum(linear.parameters for linear in self.linears)
        return linears + self.norms + self.router + self.experts * self.expert

    @property
    def active_parameters(self) -> int:
        """What one token is computed with."""
        return self.parameters - (self.experts - self.active) * self.expert


@dataclass(frozen=True)
class ModelShape:
    """A causal LM. `tied`: the output head is the embedding."""

    family: str
    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: tuple[Block, ...]
    tied: bool
    final_norm: int
    positions: int = 0
    """Rows of a learned position embedding; 0 where positions are rotary."""
    prefix: str = "model.layers"
    """Where the blocks stand in the module tree."""
    fp32_norms: bool = True
    """RMS norms that compute, and keep for the backward pass, a copy of their input in fp32."""
    max_length: int | None = None
    """Tokens that the model was made for."""

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.blocks)

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding, and of an output head of its own."""
        return self.vocabulary * self.hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of all decoder layers."""
        return sum(block.parameters for block in self.blocks)

    @property
    def parameters(self) -> int:
        """All of them, shared ones once."""
        heads = 1 if self.tied else 2
        rest = self.final_norm + self.positions * self.hidden
        return heads * self.embedding + self.block_parameters + rest

    @property
    def active_parameters(self) -> int:
        """What one token is computed with, the embedding and the head included."""
        idle = sum(block.parameters - block.active_parameters for block in self.blocks)
        return self.parameters - idle

    @property
    def linear_parameters(self) -> int:
        """Weights of the layers' linear modules, without biases."""
        return sum(
            linear.inputs * linear.outputs for block in self.blocks for linear in block.linears
        )

    def kv_elements_per_token(self) -> int:
        """Elements of one token's keys and values over all layers: 2 x heads x head_dim each."""
        return 2 * self.kv_heads * self.head_dim * self.layers

    def modules(self) -> Iterator[tuple[str, Linear]]:
        """Every linear layer but the output head, with its full module path."""
        for number, block in enumerate(self.blocks):
            for linear in block.linears:
                yield f"{self.prefix}.{number}.{linear.path}", linear


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter. `targets` and `excludes` mean what PEFT takes: 'all-linear', a regular
    expression that matches a whole module path, or the last parts of module paths."""

    rank: int
    targets: str | tuple[str, ...] = "all-linear"
    excludes: str | tuple[str, ...] | None = None

    def adapted(self, shape: ModelShape) -> list[Linear]:
        """The linear layers that get an adapter."""
        return [linear for path, linear in shape.modules() if self.adapts(path)]

    def adapts(self, path: str) -> bool:
        """Whether the linear layer at `path` gets an adapter."""
        named = self._named(path, self.targets)
        return named and (self.excludes is None or not self._named(path, self.excludes))

    def parameters(self, shape: ModelShape) -> int:
        """A [rank, in] and B [out, rank] of every adapted layer (arXiv:2106.09685)."""
        return sum(self.rank * (linear.inputs + linear.outputs) for linear in self.adapted(shape))

    @staticmethod
    def _named(path: str, names: str | tuple[str, ...]) -> bool:
        if names == "all-linear":
            return True
        if isinstance(names, str):
            return re.fullmatch(names, path) is not None or names == path.rpartition(".")[2]
        return any(path == name or path.endswith(f".{name}") for name in names)


def shape_of(settings: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that the settings of a `config.json` describe.

    Raises:
        BadInput: a family that is not counted here, weights that are quantised, or a setting
            that is missing.
    """
    family = settings.get("model_type")
    build = FAMILIES.get(str(family))
    if build is None:
        raise _refused(
            where,
            "a model_type among " + ", ".join(sorted(FAMILIES)),
            repr(family),
            "estimate with a model of one of these families, or measure a short run instead",
        )
    if settings.get("quantization_config"):
        method = settings["quantization_config"].get("quant_method", "unknown")
        raise _refused(
            where,
            "weights that are not quantised",
            f"quantization_config: {method}",
            "name the unquantised model; the engine's own quantisation is counted "
            "(explorer.rollout_model.extra_engine_args.quantization)",
        )
    try:
        return build(settings)
    except KeyError as error:
        found = f"no {error.args[0]}"
        raise _refused(
            where, f"the settings of a {family} model", found, "save the model again"
        ) from error


def _refused(where: str, expected: str, found: str, cure: str) -> BadInput:
    return BadInput("The model's size cannot be worked out.", [Fault(where, expected, found, cure)])


def _attention(
    c: Mapping[str, Any], head_dim: int, qkv_bias: bool, out_bias: bool
) -> tuple[Linear, ...]:
    h, q = c["hidden_size"], c["num_attention_heads"] * head_dim
    kv = _kv_heads(c) * head_dim
    return (
        Linear("self_attn.q_proj", h, q, qkv_bias),
        Linear("self_attn.k_proj", h, kv, qkv_bias),
        Linear("self_attn.v_proj", h, kv, qkv_bias),
        Linear("self_attn.o_proj", q, h, out_bias),
    )


def _mlp(c: Mapping[str, Any], bias: bool = False) -> tuple[Linear, ...]:
    h, i = c["hidden_size"], c["intermediate_size"]
    return (
        Linear("mlp.gate_proj", h, i, bias),
        Linear("mlp.up_proj", h, i, bias),
        Linear("mlp.down_proj", i, h, bias),
    )


def _kv_heads(c: Mapping[str, Any]) -> int:
    return int(c.get("num_key_value_heads") or c["num_attention_heads"])


def _head_dim(c: Mapping[str, Any]) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def _windows(c: Mapping[str, Any]) -> Sequence[int | None]:
    """The attention window of each layer; None sees everything."""
    count, window = c["num_hidden_layers"], c.get("sliding_window")
    kinds = c.get("layer_types")
    if kinds:
        return [window if kind == SLIDING else None for kind in kinds]
    everywhere = bool(window) and c.get("use_sliding_window", True)
    return [window if everywhere else None] * count


def _shape(c: Mapping[str, Any], blocks: tuple[Block, ...], **more: Any) -> ModelShape:
    settings: dict[str, Any] = {
        "family": c["model_type"],
        "vocabulary": c["vocab_size"],
        "hidden": c["hidden_size"],
        "heads": c["num_attention_heads"],
        "kv_heads": _kv_heads(c),
        "head_dim": _head_dim(c),
        "blocks": blocks,
        "tied": bool(c.get("tie_word_embeddings")),
        "final_norm": c["hidden_size"],
        "max_length": c.get("max_position_embeddings"),
    }
    return ModelShape(**(settings | more))


def _dense(
    c: Mapping[str, Any],
    *,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool = False,
    norms: int = 2,
    head_norms: int = 0,
) -> ModelShape:
    """The Llama form: pre-norm attention and a gated MLP. `norms` of width hidden, `head_norms`
    of width head_dim, in every layer."""
    head_dim = _head_dim(c)
    linears = _attention(c, head_dim, qkv_bias, out_bias) + _mlp(c, mlp_bias)
    width = norms * c["hidden_size"] + head_norms * head_dim
    blocks = tuple(
        Block(linears, width, c["intermediate_size"], window=window) for window in _windows(c)
    )
    return _shape(c, blocks)


def _llama(c: Mapping[str, Any]) -> ModelShape:
    bias = bool(c.get("attention_bias"))
    return _dense(c, qkv_bias=bias, out_bias=bias, mlp_bias=bool(c.get("mlp_bias")))


def _mistral(c: Mapping[str, Any]) -> ModelShape:
    return _dense(c, qkv_bias=False, out_bias=False)


def _qwen2(c: Mapping[str, Any]) -> ModelShape:
    return _dense(c, qkv_bias=True, out_bias=False)


def _qwen3(c: Mapping[str, Any]) -> ModelShape:
    bias = bool(c.get("attention_bias"))
    return _dense(c, qkv_bias=bias, out_bias=bias, head_norms=2)


def _gemma2(c: Mapping[str, Any]) -> ModelShape:
    bias = bool(c.get("attention_bias"))
    return _dense(c, qkv_bias=bias, out_bias=bias, norms=4)


def _gemma3(c: Mapping[str, Any]) -> ModelShape:
    bias = bool(c.get("attention_bias"))
    return _dense(c, qkv_bias=bias, out_bias=bias, norms=4, head_norms=2)


def _phi3(c: Mapping[str, Any]) -> ModelShape:
    h, head_dim = c["hidden_size"], _head_dim(c)
    q, kv, i = c["num_attention_heads"] * head_dim, _kv_heads(c) * head_dim, c["intermediate_size"]
    linears = (
        Linear("self_attn.qkv_proj", h, q + 2 * kv),
        Linear("self_attn.o_proj", q, h),
        Linear("mlp.gate_up_proj", h, 2 * i),
        Linear("mlp.down_proj", i, h),
    )
    blocks = tuple(Block(linears, 2 * h, i, window=window) for window in _windows(c))
    return _shape(c, blocks)


def _mixtral(c: Mapping[str, Any]) -> ModelShape:
    h, i, experts = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    block = Block(
        _attention(c, _head_dim(c), False, False),
        2 * h,
        i,
        experts=experts,
        active=c["num_experts_per_tok"],
        router=experts * h,
        expert=3 * h * i,
        window=c.get("sliding_window"),
    )
    return _shape(c, (block,) * c["num_hidden_layers"])


def _qwen3_moe(c: Mapping[str, Any]) -> ModelShape:
    h, i, head_dim = c["hidden_size"], c["moe_intermediate_size"], _head_dim(c)
    # transformers 5 writes num_local_experts, older config.json files num_experts.
    experts = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]
    step = c.get("decoder_sparse_step") or 1
    bias = bool(c.get("attention_bias"))
    attention = _attention(c, head_dim, bias, bias)
    norms = 2 * h + 2 * head_dim
    plain = c.get("mlp_only_layers") or []
    blocks = []
    for number, window in enumerate(_windows(c)):
        if experts > 0 and number not in plain and (number + 1) % step == 0:
            sparse = Block(
                attention,
                norms,
                i,
                window=window,
                experts=experts,
                active=c["num_experts_per_tok"],
                router=experts * h,
                expert=3 * h * i,
            )
            blocks.append(sparse)
        else:
            blocks.append(Block(attention + _mlp(c), norms, c["intermediate_size"], window=window))
    return _shape(c, tuple(blocks))


def _gpt2(c: Mapping[str, Any]) -> ModelShape:
    h = c["n_embd"]
    i = c.get("n_inner") or 4 * h
    linears = (
        Linear("attn.c_attn", h, 3 * h, True),
        Linear("attn.c_proj", h, h, True),
        Linear("mlp.c_fc", h, i, True),
        Linear("mlp.c_proj", i, h, True),
    )
    block = Block(linears, 4 * h, i, gated=False)
    return ModelShape(
        family="gpt2",
        vocabulary=c["vocab_size"],
        hidden=h,
        heads=c["n_head"],
        kv_heads=c["n_head"],
        head_dim=h // c["n_head"],
        blocks=(block,) * c["n_layer"],
        tied=bool(c.get("tie_word_embeddings", True)),
        final_norm=2 * h,
        positions=c["n_positions"],
        prefix="transformer.h",
        fp32_norms=False,
        max_length=c["n_positions"],
    )


FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelShape]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _llama,
    "phi3": _phi3,
    "gemma": _llama,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt2": _gpt2,
}
"""Counted families by `model_type`."""
