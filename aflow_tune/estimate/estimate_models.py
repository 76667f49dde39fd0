"""The shapes of the models that a configuration names, without loading or fetching any.

Reads `config.json` of a folder, of the local hub cache, or of a model of ours; weights are
looked at only for the number format that their file has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.engines.local.models import BUNDLED, cache_dir, header_of
from aflow_tune.errors import BadInput, Fault
from aflow_tune.estimate.shapes import ModelShape, shape_of

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


@dataclass(frozen=True)
class NamedModel:
    """A model's shape, the bytes of an element in its file, and where it is read from."""

    name: str
    shape: ModelShape
    stored_itemsize: int
    settings: dict[str, Any]
    folder: Path | None = None
    """Where its config.json lies; None for one of ours that was not fetched yet."""

    @property
    def lean(self) -> bool:
        """Whether `engines/local/llama.py` decodes it (`llama.supports`, from settings alone)."""
        return (
            self.shape.family in ("llama", "mistral", "qwen2", "qwen3")
            and self.settings.get("hidden_act", "silu") in ("silu", "swish")
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
        return NamedModel(name, shape_of(_SMOLLM2), 4, dict(_SMOLLM2))
    if folder is None:
        expected = "a folder with config.json, a cached hub id, or one of " + ", ".join(BUNDLED)
        cure = f"hf download {name} config.json, or name a folder that holds the config.json"
        raise BadInput(
            "The model's size cannot be worked out.",
            [Fault(where, expected, f"{name}: no config.json on this machine", cure)],
        )
    settings = _settings(folder, where)
    itemsize = _itemsize(folder, settings)
    return NamedModel(name, shape_of(settings, where), itemsize, settings, folder)


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


def _settings(folder: Path, where: str) -> dict[str, Any]:
    """The settings of `config.json` with the defaults of its family."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(
            "The model's size cannot be worked out.",
            [Fault(where, "a config.json that transformers reads", found, "check the model")],
        ) from error
    settings: dict[str, Any] = config.to_dict()
    return settings


def _itemsize(folder: Path, settings: dict[str, Any]) -> int:
    """Bytes of an element in the weights' file, or else by the settings."""
    for file in sorted(folder.glob("*.safetensors")):
        header = header_of(file)
        if header is None:
            break
        kinds = [item["dtype"] for name, item in header.items() if name != "__metadata__"]
        if kinds:
            return _SIZES.get(max(set(kinds), key=kinds.count), 2)
    dtype = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    return 4 if dtype.removeprefix("torch.") == "float32" else 2
