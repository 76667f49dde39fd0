"""A causal language model as numbers: its layers, parameters, cache entries and activations.

`named_model` reads the `config.json` of a model; its weights are looked at only for their number
format. `shape_of` counts what transformers' module of that `model_type` holds, which the tests
compare on torch's meta device. Other families are refused: a near miss would be a wrong number that
looks right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.engines.local.models import BUNDLED, cache_dir, header_of
from aflow_tune.errors import BadInput

_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""Of SmolLM2-135M, as published: so that it can be estimated before it was ever fetched."""
_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_FP32 = 4
_TITLE = "The model's size cannot be worked out."
_DECODERS = {
    # model_type: (norms of width hidden, norms of width head_dim, biases) of a layer
    "llama": (2, 0, "configured"),
    "mistral": (2, 0, "none"),
    "qwen2": (2, 0, "qkv"),
    "qwen3": (2, 2, "configured"),
    "smollm3": (2, 0, "configured"),
    "phi3": (2, 0, "none"),
    "gemma": (2, 0, "configured"),
    "gemma2": (4, 0, "configured"),
    "gemma3_text": (4, 2, "configured"),
    "mixtral": (2, 0, "none"),
    "qwen3_moe": (2, 2, "configured"),
}
FAMILIES = (*_DECODERS, "gpt2")
"""Counted families by `model_type`."""


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block: its module path below the block, widths, and bias."""

    path: str
    inputs: int
    outputs: int
    bias: bool = False


@dataclass(frozen=True)
class Block:
    """One decoder layer. Widths in elements.

    `experts` 0: an ordinary MLP, which is among `linears`. Otherwise `experts` MLPs of width
    `mlp`, of `expert` parameters each, are held beside a `router`, and `active` of them compute a
    token.
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

    @property
    def parameters(self) -> int:
        """Everything that the layer holds."""
        linears = sum((linear.inputs + linear.bias) * linear.outputs for linear in self.linears)
        return linears + self.norms + self.router + self.experts * self.expert


@dataclass(frozen=True)
class ModelShape:
    """A causal LM. `tied`: the output head is the embedding. `positions`: rows of a learned
    position embedding. `prefix`: where the blocks stand in the module tree. `fp32_norms`: RMS norms
    that compute, and keep for the backward pass, a copy of their input in fp32."""

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
    prefix: str = "model.layers"
    fp32_norms: bool = True

    @property
    def layers(self) -> int:
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
        rest = self.final_norm + self.positions * self.hidden
        return (1 if self.tied else 2) * self.embedding + self.block_parameters + rest

    @property
    def active_parameters(self) -> int:
        """What one token is computed with, the embedding and the head included."""
        idle = sum((block.experts - block.active) * block.expert for block in self.blocks)
        return self.parameters - idle

    @property
    def linear_parameters(self) -> int:
        """Weights of the layers' linear modules, without biases."""
        return sum(linear.inputs * linear.outputs for _, linear in self.modules())

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
    targets: str | Sequence[str] = "all-linear"
    excludes: str | Sequence[str] | None = None

    def adapts(self, path: str) -> bool:
        """Whether the linear layer at `path` gets an adapter."""
        named = _named(path, self.targets)
        return named and (self.excludes is None or not _named(path, self.excludes))

    def parameters(self, shape: ModelShape) -> int:
        """A [rank, in] and B [out, rank] of every adapted layer (arXiv:2106.09685)."""
        adapted = [linear for path, linear in shape.modules() if self.adapts(path)]
        return sum(self.rank * (linear.inputs + linear.outputs) for linear in adapted)

    def rows_per_layer(self, shape: ModelShape) -> float:
        """Ranks of the adapters of a layer, summed, on average."""
        return self.rank * sum(self.adapts(path) for path, _ in shape.modules()) / shape.layers


def _named(path: str, names: str | Sequence[str]) -> bool:
    if names == "all-linear":
        return True
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None or names == path.rpartition(".")[2]
    return any(path == name or path.endswith(f".{name}") for name in names)


@dataclass(frozen=True)
class NamedModel:
    """A model's shape, the bytes of an element in its file, and the folder of its config.json;
    None for one of ours that was not fetched yet."""

    name: str
    shape: ModelShape
    stored_itemsize: int
    activation: str = "silu"
    folder: Path | None = None

    @property
    def lean(self) -> bool:
        """Whether `engines/local/llama.py` decodes it (`llama.supports`, from settings alone)."""
        return (
            self.shape.family in ("llama", "mistral", "qwen2", "qwen3")
            and self.activation in ("silu", "swish")
            and all(block.window is None for block in self.shape.blocks)
        )


def named_model(name: str, where: str) -> NamedModel:
    """The model called `name`, as `model.model_path` takes it.

    Args:
        where: the key that names it, for what is refused.

    Raises:
        BadInput: it is not on this machine, its settings cannot be read, or it is of a family
            whose parameters are not counted.
    """
    folder = _folder(name)
    if folder is None and name in BUNDLED:
        return NamedModel(name, shape_of(_SMOLLM2), 4)
    if folder is None:
        expected = "a folder with config.json, a cached hub id, or one of " + ", ".join(BUNDLED)
        cure = f"hf download {name} config.json, or name a folder that holds the config.json"
        raise BadInput.of(_TITLE, where, expected, f"{name}: no config.json on this machine", cure)
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = "a config.json that transformers reads"
        raise BadInput.of(_TITLE, where, expected, f"{error!r:.200}", "check the model") from error
    shape, itemsize = shape_of(settings, where), _itemsize(folder, settings)
    return NamedModel(name, shape, itemsize, settings.get("hidden_act", "silu"), folder)


def _folder(name: str) -> Path | None:
    """The folder with the model's config.json, or None where none is at hand."""
    folder = cache_dir() / name if name in BUNDLED else Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if name in BUNDLED or folder.is_dir():
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _itemsize(folder: Path, settings: Mapping[str, Any]) -> int:
    """Bytes of an element in the weights' file, or else by the settings."""
    for file in sorted(folder.glob("*.safetensors")):
        header = header_of(file) or {}
        kinds = [item["dtype"] for name, item in header.items() if name != "__metadata__"]
        if kinds:
            return _SIZES.get(max(set(kinds), key=kinds.count), 2)
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    return 4 if dtype.removeprefix("torch.") == "float32" else 2


def shape_of(settings: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """The shape that the settings of a `config.json` describe, with `AutoConfig`'s defaults.

    Raises:
        BadInput: a family that is not counted here, weights that are quantised, or a setting
            that is missing.
    """
    family = str(settings.get("model_type"))
    if family not in FAMILIES:
        expected = "a model_type among " + ", ".join(sorted(FAMILIES))
        cure = "estimate with a model of one of these families, or measure a short run instead"
        raise BadInput.of(_TITLE, where, expected, repr(family), cure)
    if quantised := settings.get("quantization_config"):
        found = f"quantization_config: {quantised.get('quant_method', 'unknown')}"
        cure = (
            "name the unquantised model; the engine's own quantisation is counted "
            "(explorer.rollout_model.extra_engine_args.quantization)"
        )
        raise BadInput.of(_TITLE, where, "weights that are not quantised", found, cure)
    try:
        return _gpt2(settings) if family == "gpt2" else _decoder(settings)
    except KeyError as error:
        expected, found = f"the settings of a {family} model", f"no {error.args[0]}"
        raise BadInput.of(_TITLE, where, expected, found, "save the model again") from error


def _decoder(c: Mapping[str, Any]) -> ModelShape:
    """The Llama form: pre-norm attention and a gated MLP, or a mixture of them."""
    family, h, i = c["model_type"], c["hidden_size"], c["intermediate_size"]
    norms, head_norms, biases = _DECODERS[family]
    heads = c["num_attention_heads"]
    kv_heads = int(c.get("num_key_value_heads") or heads)
    head_dim = int(c.get("head_dim") or h // heads)
    q, kv = heads * head_dim, kv_heads * head_dim
    bias = biases == "configured" and bool(c.get("attention_bias"))
    mlp_bias = biases == "configured" and bool(c.get("mlp_bias"))
    inward, outward = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)], ["gate_proj", "up_proj"]
    if family == "phi3":
        inward, outward = [("qkv_proj", q + 2 * kv)], ["gate_up_proj"]
    attention = (
        *(Linear(f"self_attn.{name}", h, n, bias or biases == "qkv") for name, n in inward),
        Linear("self_attn.o_proj", q, h, bias),
    )
    mlp = (
        *(Linear(f"mlp.{name}", h, 2 * i // len(outward), mlp_bias) for name in outward),
        Linear("mlp.down_proj", i, h, mlp_bias),
    )
    width = norms * h + head_norms * head_dim
    experts = 0
    if family in ("mixtral", "qwen3_moe"):
        # transformers 5 writes num_local_experts, older config.json files num_experts.
        experts = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]
    plain, every = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step") or 1
    blocks = []
    for number, window in enumerate(_windows(c)):
        if experts and number not in plain and (number + 1) % every == 0:
            wide = c["moe_intermediate_size"] if family == "qwen3_moe" else i
            active, router = c["num_experts_per_tok"], experts * h
            sparse = (attention, width, wide, True, window, experts, active, router, 3 * h * wide)
            blocks.append(Block(*sparse))
        else:
            blocks.append(Block(attention + mlp, width, i, window=window))
    tied = bool(c.get("tie_word_embeddings"))
    return ModelShape(
        family, c["vocab_size"], h, heads, kv_heads, head_dim, tuple(blocks), tied, final_norm=h
    )


def _windows(c: Mapping[str, Any]) -> Sequence[int | None]:
    """The attention window of each layer; None sees everything."""
    count, window = c["num_hidden_layers"], c.get("sliding_window")
    if kinds := c.get("layer_types"):
        return [window if kind == "sliding_attention" else None for kind in kinds]
    everywhere = bool(window) and c.get("use_sliding_window", True)
    return [window if everywhere else None] * count


def _gpt2(c: Mapping[str, Any]) -> ModelShape:
    h, heads = c["n_embd"], c["n_head"]
    i = c.get("n_inner") or 4 * h
    linears = (
        Linear("attn.c_attn", h, 3 * h, True),
        Linear("attn.c_proj", h, h, True),
        Linear("mlp.c_fc", h, i, True),
        Linear("mlp.c_proj", i, h, True),
    )
    return ModelShape(
        "gpt2",
        c["vocab_size"],
        h,
        heads,
        heads,
        h // heads,
        (Block(linears, 4 * h, i, gated=False),) * c["n_layer"],
        tied=bool(c.get("tie_word_embeddings", True)),
        final_norm=2 * h,
        positions=c["n_positions"],
        prefix="transformer.h",
        fp32_norms=False,
    )


def kept_per_token(
    shape: ModelShape,
    block: Block,
    itemsize: int,
    lora: Lora | None,
    *,
    keys: float = 1.0,
    gathered: bool = False,
) -> float:
    """Bytes that one layer keeps of one token for the backward pass.

    By the bookkeeping of Korthikanti et al. (arXiv:2205.05198, section 4.1), which adds up what
    each operation saves; here for RMS norms, rotary embeddings, grouped-query attention whose
    kernel recomputes the scores (arXiv:2205.14135) and a gated MLP, as transformers writes them:

        norms      input in fp32 (4 H), its reciprocal root mean square (4), output (e H), each
        attention  query (e Q), key and value (2 e K), output (e Q)
        MLP        gate, silu(gate), up, and their product (4 e I)

    with H hidden, Q = heads x head_dim, K = kv_heads x head_dim, I intermediate width and e bytes
    an element. Trained weights add the normalised input of each norm (e H), adapters their inner
    rows (e rank). The tests compare the sum with what autograd saves in real modules.

    Args:
        itemsize: bytes of an element that the layer computes in.
        lora: the adapter that is trained; None: the weights themselves.
        keys: rows of them for each token; above 1 where a shared prefix is repeated.
        gathered: attention's output is brought into another order, so its copy is kept too.
    """
    full, hidden = lora is None, shape.hidden
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.fp32_norms:
        count, rest = divmod(block.norms, hidden)
        norms = count * (_FP32 * hidden + _FP32 + itemsize * hidden * (2 if full else 1))
        if rest == 2 * shape.head_dim:
            norms += (q_width + kv_width) * (_FP32 + (itemsize if full else 0))
    else:  # LayerNorm: input, mean and deviation, output
        norms = 2 * (itemsize * 2 * hidden + 2 * _FP32)
    attention = 2 * q_width + 2 * keys * kv_width + (q_width if gathered else 0)
    # gelu by its tanh formula keeps input, half of it, tanh, 1 + tanh and the product
    mlp = 4 * block.mlp * max(1, block.active) if block.gated else 5 * block.mlp
    rows = 0.0 if lora is None else lora.rows_per_layer(shape)
    return norms + itemsize * (attention + mlp + rows)


def widest_mlp(shape: ModelShape) -> int:
    """Elements of a token in the widest MLP: of a mixture, in the experts that it visits."""
    return max(block.mlp * max(1, block.active) for block in shape.blocks)
