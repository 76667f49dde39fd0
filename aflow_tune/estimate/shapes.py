"""The sizes of a causal language model: its layers, parameters, KV cache and activations.

`named_model` reads the `config.json` of a model; `shape_of` builds its transformers module on
torch's meta device, which allocates nothing, and counts. Every layer is assumed to be as large as
the largest one and to attend to the whole sequence. Families without known activations are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
    "tie_word_embeddings": True,
}
"""SmolLM2-135M as published, so that it can be estimated before it is downloaded."""
_SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_FP32 = 4
_TITLE = "The model's size cannot be worked out."
FAMILIES = {
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
}
"""Supported families, by `model_type`."""


class Linear(NamedTuple):
    """A linear module of a decoder layer: its path in the model, and its widths."""

    path: str
    inputs: int
    outputs: int


@dataclass(frozen=True)
class ModelShape:
    """A causal LM. Widths in elements.

    layer, norms: parameters of the largest layer, and of its norms. mlp: its inner width.
    linears: of all layers, without the output head. layer_parameters: of all layers.
    tied: the output head is the embedding.
    lean: whether `engines/local/llama.py` decodes it (`llama.supports`, from settings alone).
    """

    family: str
    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    layer: int
    norms: int
    mlp: int
    linears: tuple[Linear, ...]
    tied: bool
    parameters: int
    layer_parameters: int
    lean: bool

    @property
    def linear_parameters(self) -> int:
        """Weights of the layers' linear modules, without biases."""
        return sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
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


def _named(path: str, names: str | Sequence[str]) -> bool:
    if isinstance(names, str):
        return names in ("all-linear", path.rpartition(".")[2]) or bool(re.fullmatch(names, path))
    return any(path == name or path.endswith(f".{name}") for name in names)


@dataclass(frozen=True)
class NamedModel:
    """A model's shape, the bytes of an element in its file, and the folder of its config.json, None
    for a bundled model that is not downloaded yet."""

    name: str
    shape: ModelShape
    stored_itemsize: int
    folder: Path | None = None


@lru_cache
def named_model(name: str, where: str) -> NamedModel:
    """The model called `name`, as `model.model_path` takes it; `where` names it in faults.

    Raises:
        BadInput: it is not on this machine, its settings cannot be read, or as `shape_of`.
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
        return NamedModel(name, shape_of(config, where), _itemsize(folder, config), folder)
    except BadInput:
        raise
    except Exception as error:  # inconsistent settings raise many types
        expected = "a config.json that transformers reads"
        raise BadInput.of(_TITLE, where, expected, f"{error!r:.200}", "check the model") from error


def _folder(name: str) -> Path | None:
    """The folder with the model's config.json; None if it is not on this machine."""
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
    return 4 if str(getattr(config, "dtype", None) or "float32").endswith("float32") else 2


def shape_of(config: Any, where: str = "config.json") -> ModelShape:
    """The shape of a model, from its transformers configuration.

    Raises:
        BadInput: a family that is not in `FAMILIES`, or quantised weights.
    """
    from transformers import AutoModelForCausalLM

    family = config.model_type
    if family not in FAMILIES:
        cure = "estimate with a model of one of these families, or measure a short run instead"
        raise BadInput.of(
            _TITLE, where, "one of " + ", ".join(sorted(FAMILIES)), repr(family), cure
        )
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
    linears, widths, sizes, norms = [], [], [], []
    for path, child in layers.named_modules():
        if isinstance(child, torch.nn.Linear):
            linears.append(Linear(f"{prefix}.{path}", child.in_features, child.out_features))
            widths.append(child.in_features if path.endswith("down_proj") else 0)
    for layer in layers:
        named = [*layer.named_parameters()]
        sizes.append(sum(parameter.numel() for _, parameter in named))
        norms.append(sum(p.numel() for name, p in named if "norm" in name))
    heads, kinds = config.num_attention_heads, getattr(config, "layer_types", None) or ()
    windowed = "sliding_attention" in kinds or (family == "mistral" and config.sliding_window)
    return ModelShape(
        family,
        config.vocab_size,
        config.hidden_size,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        len(layers),
        max(sizes),
        max(norms),
        max(widths),
        tuple(linears),
        bool(config.tie_word_embeddings),
        sum(parameter.numel() for parameter in module.parameters()),
        sum(sizes),
        family in ("llama", "mistral", "qwen2", "qwen3")
        and getattr(config, "hidden_act", "silu") in ("silu", "swish")
        and not windowed,
    )


def kept_per_token(
    shape: ModelShape,
    itemsize: int,
    lora: Lora | None,
    *,
    keys: float = 1.0,
    gathered: bool = False,
    fused_norms: bool = False,
) -> float:
    """Bytes that one layer keeps of one token for the backward pass.

    Counted as in Korthikanti et al. (arXiv:2205.05198, section 4.1), but for RMS norms, rotary
    embeddings, attention with a kernel that recomputes the scores (arXiv:2205.14135) and a gated
    MLP:

        norms      input in fp32 (4 H), its reciprocal root mean square (4), output (e H), each
        attention  query (e Q), key and value (2 e K), output (e Q)
        MLP        gate, silu(gate), up, and their product (4 e I)

    with H hidden, Q = heads x head_dim, K = kv_heads x head_dim, I intermediate width and e bytes
    an element (`itemsize`). Trained weights add the normalised input of each norm (e H), adapters
    their inner rows (e rank). `keys`: keys and values per token, above 1 where a shared prefix is
    repeated. `gathered`: attention's output is reordered, so a copy of it is kept too.
    `fused_norms`: they keep their input as it is (e H) and, trained or not, no normalised one.
    """
    hidden, own = shape.hidden, itemsize if lora is None else 0
    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    count, rest = divmod(shape.norms, hidden)
    kept = itemsize if fused_norms else _FP32 + own
    norms = count * (kept * hidden + _FP32 + itemsize * hidden)
    if rest:  # of queries and keys, by heads
        norms += (q_width + kv_width) * kept
    attention = 2 * q_width + 2 * keys * kv_width + (q_width if gathered else 0)
    adapted = sum(lora.adapts(linear.path) for linear in shape.linears) if lora else 0
    rows = lora.rank * adapted / shape.layers if lora else 0.0
    return norms + itemsize * (attention + 4 * shape.mlp + rows)
