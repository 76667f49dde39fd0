"""A causal language model as numbers: its layers, parameters, cache entries and activations.

`named_model` reads the `config.json` of a model; its weights are looked at only for their number
format. `shape_of` builds transformers' module of it on torch's meta device, where nothing is
allocated, and counts. Families whose activations are not known here are refused: a near miss would
be a wrong number that looks right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from aflow_tune.engines.local.models import BUNDLED, cache_dir, header_of, is_cached
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
FAMILIES = (
    *("gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "smollm3"),
)
"""Counted families by `model_type`."""


class Linear(NamedTuple):
    """A linear layer of a block: its module path, and widths."""

    path: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Block:
    """One decoder layer. Widths in elements; `norms`: parameters of all its norms.

    `experts` 0: an ordinary MLP, of linear layers. Otherwise `experts` MLPs of width `mlp`, of
    `expert` parameters each, are held, and `active` of them compute a token.
    """

    parameters: int
    norms: int
    mlp: int
    window: int | None = None
    experts: int = 0
    active: int = 0
    expert: int = 0


@dataclass(frozen=True)
class ModelShape:
    """A causal LM. `linears`: of all blocks, without the output head. `parameters`: all of them,
    shared ones once. `tied`: the output head is the embedding."""

    family: str
    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: tuple[Block, ...]
    linears: tuple[Linear, ...]
    tied: bool
    parameters: int

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding, and of an output head of its own."""
        return self.vocabulary * self.hidden

    @property
    def block_parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """What one token is computed with, the embedding and the head included."""
        idle = sum((block.experts - block.active) * block.expert for block in self.blocks)
        return self.parameters - idle

    @property
    def linear_parameters(self) -> int:
        """Weights of the layers' linear modules, without biases."""
        return sum(linear.inputs * linear.outputs for linear in self.linears)

    def kv_elements_per_token(self) -> int:
        """Elements of one token's keys and values over all layers: 2 x heads x head_dim each."""
        return 2 * self.kv_heads * self.head_dim * self.layers


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter. `targets` and `excludes` mean what PEFT takes: 'all-linear', a regular
    expression that matches a whole module path, or the last parts of module paths."""

    rank: int
    targets: str | Sequence[str] = "all-linear"
    excludes: str | Sequence[str] | None = None

    def adapts(self, path: str) -> bool:
        named = _named(path, self.targets)
        return named and (self.excludes is None or not _named(path, self.excludes))

    def parameters(self, shape: ModelShape) -> int:
        """A [rank, in] and B [out, rank] of every adapted layer (arXiv:2106.09685)."""
        adapted = [linear for linear in shape.linears if self.adapts(linear.path)]
        return sum(self.rank * (linear.inputs + linear.outputs) for linear in adapted)

    def rows_per_layer(self, shape: ModelShape) -> float:
        """Ranks of the adapters of a layer, summed, on average."""
        return self.rank * sum(self.adapts(linear.path) for linear in shape.linears) / shape.layers


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


@lru_cache
def named_model(name: str, where: str) -> NamedModel:
    """The model called `name`, as `model.model_path` takes it.

    Args:
        where: the key that names it, for what is refused.

    Raises:
        BadInput: it is not on this machine, its settings cannot be read, or it is of a family
            whose parameters are not counted.
    """
    from transformers import AutoConfig, LlamaConfig

    folder = _folder(name)
    if folder is None and name in BUNDLED:
        return NamedModel(name, shape_of(LlamaConfig(**_SMOLLM2)), 4)
    if folder is None:
        expected = "a folder with config.json, a cached hub id, or one of " + ", ".join(BUNDLED)
        cure = f"hf download {name} config.json, or name a folder that holds the config.json"
        raise BadInput.of(_TITLE, where, expected, f"{name}: no config.json on this machine", cure)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        shape = shape_of(config, where)
    except BadInput:
        raise
    except Exception as error:  # whatever settings that do not fit together lead to
        expected = "a config.json that transformers reads"
        raise BadInput.of(_TITLE, where, expected, f"{error!r:.200}", "check the model") from error
    activation = getattr(config, "hidden_act", "silu")
    return NamedModel(name, shape, _itemsize(folder, config), activation, folder)


def _folder(name: str) -> Path | None:
    """The folder with the model's config.json, or None where none is at hand."""
    if not is_cached(name):
        return None
    folder = cache_dir() / name if name in BUNDLED else Path(name).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        folder = Path(str(try_to_load_from_cache(name, "config.json"))).parent
    return folder


def _itemsize(folder: Path, config: Any) -> int:
    for file in sorted(folder.glob("*.safetensors")):
        header = header_of(file) or {}
        kinds = [item["dtype"] for name, item in header.items() if name != "__metadata__"]
        if kinds:
            return _SIZES.get(max(set(kinds), key=kinds.count), 2)
    dtype = str(getattr(config, "dtype", None) or "float32")
    return 4 if dtype.removeprefix("torch.") == "float32" else 2


def shape_of(config: Any, where: str = "config.json") -> ModelShape:
    """The shape of a model, from transformers' configuration of it.

    Raises:
        BadInput: a family that is not counted here, or weights that are quantised.
    """
    from transformers import AutoModelForCausalLM

    family = config.model_type
    if family not in FAMILIES:
        expected = "a model_type among " + ", ".join(FAMILIES)
        cure = "estimate with a model of one of these families, or measure a short run instead"
        raise BadInput.of(_TITLE, where, expected, repr(family), cure)
    if getattr(config, "quantization_config", None):
        cure = (
            "name the unquantised model; the engine's own quantisation is counted "
            "(explorer.rollout_model.extra_engine_args.quantization)"
        )
        expected = "weights that are not quantised"
        raise BadInput.of(_TITLE, where, expected, "quantization_config", cure)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    prefix, layers = next(
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, torch.nn.ModuleList) and len(child) == config.num_hidden_layers
    )
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    blocks, linears = [], []
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        own = [*_linears(layer, f"{prefix}.{number}")]
        blocks.append(_block(layer, config, own, window if kind == "sliding_attention" else None))
        linears += own
    heads = config.num_attention_heads
    return ModelShape(
        family,
        config.vocab_size,
        config.hidden_size,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        tuple(blocks),
        tuple(linears),
        bool(config.tie_word_embeddings),
        sum(parameter.numel() for parameter in module.parameters()),
    )


def _linears(layer: torch.nn.Module, prefix: str) -> Iterator[Linear]:
    from transformers.pytorch_utils import Conv1D

    for path, child in layer.named_modules():
        if isinstance(child, torch.nn.Linear | Conv1D):
            width, other = child.weight.shape
            widths = (width, other) if isinstance(child, Conv1D) else (other, width)
            yield Linear(f"{prefix}.{path}", *widths)


def _block(
    layer: torch.nn.Module, config: Any, linears: Sequence[Linear], window: int | None
) -> Block:
    sizes = {name: parameter.numel() for name, parameter in layer.named_parameters()}
    norms = sum(size for name, size in sizes.items() if "norm" in name or "ln_" in name)
    held = {name: p for name, p in layer.named_parameters() if ".experts." in name}
    if not held:
        return Block(sum(sizes.values()), norms, linears[-1].inputs, window)
    down = next(parameter for name, parameter in held.items() if name.endswith("down_proj"))
    experts, _, mlp = down.shape  # [experts, hidden, intermediate]
    expert = sum(parameter.numel() for parameter in held.values()) // experts
    active = config.num_experts_per_tok
    return Block(sum(sizes.values()), norms, mlp, window, experts, active, expert)


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
    if shape.family != "gpt2":
        count, rest = divmod(block.norms, hidden)
        norms = count * (_FP32 * hidden + _FP32 + itemsize * hidden * (2 if full else 1))
        if rest == 2 * shape.head_dim:
            norms += (q_width + kv_width) * (_FP32 + (itemsize if full else 0))
    else:  # LayerNorm: input, mean and deviation, output
        norms = 2 * (itemsize * 2 * hidden + 2 * _FP32)
    attention = 2 * q_width + 2 * keys * kv_width + (q_width if gathered else 0)
    # gelu by its tanh formula keeps input, half of it, tanh, 1 + tanh and the product
    mlp = 5 * block.mlp if shape.family == "gpt2" else 4 * block.mlp * max(1, block.active)
    rows = 0.0 if lora is None else lora.rows_per_layer(shape)
    return norms + itemsize * (attention + mlp + rows)


def widest_mlp(shape: ModelShape) -> int:
    """Elements of a token in the widest MLP: of a mixture, in the experts that it visits."""
    return max(block.mlp * max(1, block.active) for block in shape.blocks)
