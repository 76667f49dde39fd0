"""Folders with trained weights: what one holds, what a sampler takes from it, how it is written.

Three kinds: a checkpoint of ours (`global_step_N`), a PEFT adapter (adapter_config.json,
adapter_model.safetensors) for `PeftModel`, vLLM and the hub, and a whole model in Hugging Face's
form for `AutoModelForCausalLM`. The first two are weights for a base model that is loaded already.
Exports appear atomically, with the tokenizer's files.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.engines.local.checkpoint import MANIFEST, read_checkpoint, write_atomically
from aflow_tune.errors import BadInput

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

    from aflow_tune.engines.local.weights import LoraSpec

ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


class Kind(StrEnum):
    CHECKPOINT = "checkpoint"
    ADAPTER = "adapter"
    MODEL = "model"


def kind_of(folder: Path) -> Kind | None:
    """What `folder` holds; None for nothing that can be sampled from."""
    names = {MANIFEST: Kind.CHECKPOINT, ADAPTER_CONFIG: Kind.ADAPTER, "config.json": Kind.MODEL}
    return next((kind for name, kind in names.items() if (folder / name).is_file()), None)


def fingerprint(folder: Path) -> str:
    """Changes when the weights in `folder` do; reads no large file: a checkpoint's manifest has the
    hash of every file, elsewhere sizes and times stand in."""
    manifest = folder / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def read_weights(folder: Path) -> tuple[dict[str, Tensor], LoraSpec | None]:
    """Weights for a sampler of the base model, from a checkpoint or a PEFT adapter: an adapter
    state with its shape, or all parameters by name and None.

    Raises:
        BadInput: a kind of adapter that the sampler does not compute.
        CheckpointError: the checkpoint is damaged.
    """
    from aflow_tune.engines.local.weights import LoraSpec

    if kind_of(folder) is Kind.ADAPTER:
        return _read_peft(folder)
    tensors, state = read_checkpoint(folder)
    shape: dict[str, Any] | None = state["lora"]
    if shape is None:
        return tensors["weights"], None
    modules = shape["target_modules"]
    targets = modules if isinstance(modules, str) else tuple(modules)
    return tensors["weights"], LoraSpec(shape["rank"], shape["alpha"], targets)


def _read_peft(folder: Path) -> tuple[dict[str, Tensor], LoraSpec]:
    from peft import PeftConfig
    from peft.utils.save_and_load import load_peft_weights

    from aflow_tune.engines.local.weights import LoraSpec

    def refused(found: str) -> BadInput:
        return BadInput.of(
            "The adapter cannot be sampled from.",
            str(folder / ADAPTER_CONFIG),
            "a plain LoRA adapter",
            f"an adapter with {found}",
            "merge it (PeftModel.merge_and_unload, save_pretrained) and name the merged folder",
        )

    config = PeftConfig.from_pretrained(str(folder))
    beyond = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
    odd = [name for name in beyond if getattr(config, name, None)]
    if str(config.peft_type) != "PeftType.LORA" and config.peft_type != "LORA":
        odd.insert(0, f"peft_type {config.peft_type}")
    if getattr(config, "bias", "none") != "none":
        odd.append(f"bias {config.bias}")
    if odd:
        raise refused(", ".join(odd))
    parts, state = {".lora_A.weight": ".A", ".lora_B.weight": ".B"}, {}
    for name, tensor in load_peft_weights(str(folder), device="cpu").items():
        part = next((part for part in parts if name.endswith(part)), None)
        if part is None:
            raise refused(f"a tensor called {name}")
        path = name.removeprefix("base_model.model.").removesuffix(part)
        state[f"lora.{path}{parts[part]}"] = tensor.float()
    # Rank-stabilised LoRA scales by alpha / sqrt(rank) (arXiv:2312.03732).
    alpha = config.lora_alpha * (math.sqrt(config.r) if config.use_rslora else 1.0)
    return state, LoraSpec(config.r, alpha)


def write_peft(model: PeftModel, model_path: Path, target: Path) -> None:
    """Write the adapter of `model`; its configuration names `model_path` as the base."""

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder), safe_serialization=True)
        config_file = folder / ADAPTER_CONFIG
        config = json.loads(config_file.read_text())
        config["base_model_name_or_path"] = str(model_path)
        config["inference_mode"] = True
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True))
        _copy_tokenizer(model_path, folder)

    write_atomically(target, write)


def write_adapter(
    model_path: Path, weights: Mapping[str, Tensor], spec: LoraSpec, target: Path
) -> None:
    """Write an adapter state (see `lora.py`) as `write_peft` writes the adapter of a model."""
    from transformers import AutoModelForCausalLM

    from aflow_tune.engines.local.lora import inject, load_adapter_state

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
    peft = inject(model, spec, seed=0)
    load_adapter_state(peft, weights)
    write_peft(peft, model_path, target)


def write_merged(
    model_path: Path, weights: Mapping[str, Tensor], spec: LoraSpec | None, target: Path
) -> None:
    """Write the base model of `model_path` with `weights` applied, in the base's own type.

    `weights` is an adapter state if `spec` is given, else parameters by name.
    """
    from transformers import AutoModelForCausalLM

    from aflow_tune.engines.local.weights import Weights

    def write(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
        merged = Weights(model)
        merged.load(weights, spec)
        for path in merged.adapted_paths():
            weight = model.get_submodule(path).weight
            weight.data.copy_(merged.merged(path, weight.data))
        model.save_pretrained(str(folder), safe_serialization=True)
        _copy_tokenizer(model_path, folder)

    write_atomically(target, write)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
