"""Trained weights in the two forms that other tools load.

A PEFT folder (adapter_config.json, adapter_model.safetensors) for `PeftModel`, vLLM and the
hub; and a merged Hugging Face folder for `AutoModelForCausalLM`. Tokenizer files are copied
along. Both appear atomically.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from aflow_tune.engines.local.checkpoint import write_atomically
from aflow_tune.engines.local.lora import inject, load_adapter_state, merge_into
from aflow_tune.engines.local.lora_spec import LoraSpec

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


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_peft(model: PeftModel, model_path: Path, target: Path) -> None:
    """Write the adapter of `model`; its configuration names `model_path` as the base."""

    def write(folder: Path) -> None:
        model.save_pretrained(str(folder), safe_serialization=True)
        config_file = folder / "adapter_config.json"
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

    def write(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
        if spec is not None:
            merge_into(model, {}, weights, spec)
        else:
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(weights[name])
        model.save_pretrained(str(folder), safe_serialization=True)
        _copy_tokenizer(model_path, folder)

    write_atomically(target, write)
