"""Folders with trained weights: which kind one is, and what the sampler takes from it.

Three kinds: a checkpoint of ours (`global_step_N`), a PEFT adapter, and a whole model in Hugging
Face's form. The first two are weights for a base model that is loaded already; the last is a
model of its own.
"""

from __future__ import annotations

import hashlib
import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.engines.local.checkpoint import MANIFEST, read_checkpoint
from aflow_tune.engines.local.lora_spec import LoraSpec
from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_CONFIG = "adapter_config.json"
_PEFT_PREFIX = "base_model.model."


class Kind(StrEnum):
    """What a folder holds."""

    CHECKPOINT = "checkpoint"
    ADAPTER = "adapter"
    MODEL = "model"


def kind_of(folder: Path) -> Kind | None:
    """What `folder` holds; None for nothing that can be sampled from."""
    names = {
        MANIFEST: Kind.CHECKPOINT,
        ADAPTER_CONFIG: Kind.ADAPTER,
        "config.json": Kind.MODEL,
    }
    return next((kind for name, kind in names.items() if (folder / name).is_file()), None)


def fingerprint(folder: Path) -> str:
    """Changes when the weights in `folder` do; reads no large file.

    A checkpoint's manifest holds the hash of every file; elsewhere sizes and times stand in.
    """
    manifest = folder / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def read_weights(folder: Path) -> tuple[dict[str, Tensor], LoraSpec | None]:
    """Weights for a sampler of the base model, from a checkpoint or a PEFT adapter.

    Returns:
        An adapter state with its shape, or all parameters by name and None.

    Raises:
        BadInput: a kind of adapter that the sampler does not compute.
        CheckpointError: the checkpoint is damaged.
    """
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

    config = PeftConfig.from_pretrained(str(folder))
    odd = [
        name
        for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
        if getattr(config, name, None)
    ]
    if str(config.peft_type) != "PeftType.LORA" and config.peft_type != "LORA":
        odd.insert(0, f"peft_type {config.peft_type}")
    if getattr(config, "bias", "none") != "none":
        odd.append(f"bias {config.bias}")
    if odd:
        raise _refused(folder, f"an adapter with {', '.join(odd)}")
    # Rank-stabilised LoRA scales by alpha / sqrt(rank) (arXiv:2312.03732).
    alpha = config.lora_alpha * (math.sqrt(config.r) if config.use_rslora else 1.0)
    state = {}
    for name, tensor in load_peft_weights(str(folder), device="cpu").items():
        path = name.removeprefix(_PEFT_PREFIX)
        for peft_part, part in ((".lora_A.weight", ".A"), (".lora_B.weight", ".B")):
            if path.endswith(peft_part):
                state[f"lora.{path.removesuffix(peft_part)}{part}"] = tensor.float()
                break
        else:
            raise _refused(folder, f"a tensor called {name}")
    return state, LoraSpec(config.r, alpha)


def _refused(folder: Path, found: str) -> BadInput:
    cure = "merge it (PeftModel.merge_and_unload, save_pretrained) and name the merged folder"
    return BadInput(
        "The adapter cannot be sampled from.",
        [Fault(str(folder / ADAPTER_CONFIG), "a plain LoRA adapter", found, cure)],
    )
