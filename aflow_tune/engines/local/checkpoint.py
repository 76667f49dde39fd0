"""Reads and atomically writes folders with trained weights.

Three kinds: our checkpoint (`global_step_N`: safetensors files, a `state.json`, and a manifest with
the size and SHA-256 of every file, verified before reading), a PEFT adapter, and a whole model in
Hugging Face's format. All are written under a temporary name, fsynced, and renamed into place.
Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import AflowTuneError, BadInput, disk_fault

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

    from aflow_tune.engines.local.weights import LoraSpec

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
ADAPTER_CONFIG = "adapter_config.json"
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
TOKENIZER_FILES += ["added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt"]
TOKENIZER_FILES += ["tokenizer.model"]


class CheckpointError(AflowTuneError, ValueError):
    """A checkpoint is missing, damaged, of another model, or cannot be written; names the file."""


def verify_checkpoint(path: Path) -> list[str]:
    """Check sizes and hashes against the manifest; returns its files. Raises CheckpointError."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(errors="replace"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{file}: format {manifest['format']}, expected {FORMAT}")
        for name, expected in manifest["files"].items():
            file = path / name
            found = file.stat().st_size
            if found != expected["bytes"]:
                raise CheckpointError(f"{file}: {found} bytes, expected {expected['bytes']}")
            if sha256_of(file) != expected["sha256"]:
                raise CheckpointError(f"{file}: the content does not match its SHA-256")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not a checkpoint: {file.name} is missing") from None
    except (KeyError, TypeError, AttributeError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file}: unreadable ({error})") from error
    return list(manifest["files"])


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Create or replace the folder `target` with what `write(temporary folder)` writes. If it
    fails, `target` is unchanged; a process killed between the two renames leaves the old folder as
    `.NAME.old-PID`. Raises CheckpointError: the disk is full, read-only or broken."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left_over in target.parent.glob(f".{target.name}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = target.parent / f".{target.name}.tmp-{os.getpid()}"
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    try:
        temporary.mkdir()
        write(temporary)
        for path in (*temporary.rglob("*"), temporary):
            _fsync(path)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        try:
            temporary.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
        _fsync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if problem := disk_fault(error):
            raise CheckpointError(f"{target} could not be written: {problem}") from error
        raise


def write_checkpoint(
    target: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> None:
    """Write `tensors` (one file per group) and the JSON `state` as the checkpoint `target`."""
    from safetensors.torch import save_file

    def write(folder: Path) -> None:
        for name, group in tensors.items():
            flat = {key: t.detach().to("cpu").contiguous() for key, t in group.items()}
            save_file(flat, str(folder / f"{name}.safetensors"))
        (folder / STATE).write_text(json.dumps(state, indent=1, sort_keys=True))
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in sorted(folder.iterdir())
        }
        manifest = {"format": FORMAT, "files": files}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))

    write_atomically(target, write)


def read_checkpoint(
    path: Path, *, expected_weights: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """The tensors by group and the state of a verified checkpoint. With `expected_weights`, names
    and shapes of the group 'weights' must match. Raises CheckpointError."""
    from safetensors.torch import load_file

    names = verify_checkpoint(path)
    try:
        tensors = {
            name.removesuffix(".safetensors"): load_file(str(path / name))
            for name in names
            if name.endswith(".safetensors")
        }
        state = json.loads((path / STATE).read_text())
    except OSError as error:  # a running run removed it since it was verified
        raise CheckpointError(f"{path}: {error}") from error
    if expected_weights is not None:
        found = {name: tuple(tensor.shape) for name, tensor in tensors["weights"].items()}
        expected = {name: tuple(tensor.shape) for name, tensor in expected_weights.items()}
        odd = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
        if odd:
            raise CheckpointError(
                f"{path}: holds other weights than this model and adapter have: {len(odd)} differ, "
                f"first {odd[0]!r}: {found.get(odd[0])}, expected {expected.get(odd[0])}"
            )
    return tensors, state


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Kind(StrEnum):
    CHECKPOINT = "checkpoint"
    ADAPTER = "adapter"
    MODEL = "model"


def kind_of(folder: Path) -> Kind | None:
    """What `folder` holds; None if it is none of the three kinds."""
    names = {MANIFEST: Kind.CHECKPOINT, ADAPTER_CONFIG: Kind.ADAPTER, "config.json": Kind.MODEL}
    return next((kind for name, kind in names.items() if (folder / name).is_file()), None)


def fingerprint(folder: Path) -> str:
    """A key that changes with the weights in `folder`, from small files: the hashes in a
    checkpoint's manifest, else sizes and modification times."""
    manifest = folder / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    listed = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(listed).encode()).hexdigest()[:16]


def read_weights(folder: Path) -> tuple[dict[str, Tensor], LoraSpec | None]:
    """Weights for a sampler of the base model: an adapter state and its spec, or all parameters by
    name and None. Raises BadInput: the adapter is not plain LoRA; CheckpointError."""
    from aflow_tune.engines.local.weights import LoraSpec

    if kind_of(folder) is Kind.ADAPTER:
        return _read_peft(folder)
    tensors, state = read_checkpoint(folder)
    shape: dict[str, Any] | None = state["lora"]
    return tensors["weights"], None if shape is None else LoraSpec(**shape)


def _read_peft(folder: Path) -> tuple[dict[str, Tensor], LoraSpec]:
    from peft import PeftConfig
    from peft.utils.save_and_load import load_peft_weights

    from aflow_tune.engines.local.weights import LoraSpec

    config: Any = PeftConfig.from_pretrained(str(folder))
    beyond = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
    odd = [name for name in beyond if getattr(config, name, None)]
    if config.peft_type != "LORA":
        odd = [f"peft_type {config.peft_type}"]
    elif config.bias != "none":
        odd.append(f"bias {config.bias}")
    state = {}
    for name, tensor in load_peft_weights(str(folder), device="cpu").items():
        path, _, part = name.removesuffix(".weight").rpartition(".lora_")
        if part not in ("A", "B"):
            odd.append(f"a tensor called {name}")
        state[f"lora.{path.removeprefix('base_model.model.')}.{part}"] = tensor.float()
    if odd:
        raise BadInput.of(
            "The adapter cannot be sampled from.",
            str(folder / ADAPTER_CONFIG),
            "a plain LoRA adapter",
            f"an adapter with {', '.join(odd[:5])}",
            "merge it (PeftModel.merge_and_unload, save_pretrained) and name the merged folder",
        )
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
    `weights` is an adapter state if `spec` is given, else parameters by name."""
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
