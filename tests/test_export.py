"""Exports load with the tools they are for and compute what the trainer computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from test_local_trainer import PolicyGradient, batch, make
from transformers import AutoModelForCausalLM, AutoTokenizer

from aflow_tune.engines.local.trainer import Sample


def own_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=sample.tokens_T[None]).logits[0, sample.prompt_length - 1 : -1]
    targets = sample.tokens_T[sample.prompt_length :, None]
    return logits.log_softmax(-1).gather(1, targets)[:, 0]


def test_both_exports_of_an_adapter(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = make(tiny_model_dir)
    groups = batch(trainer)
    for _ in range(2):
        trainer.step(groups, PolicyGradient())
    sample = groups[0][2]
    expected = trainer.logprobs([sample])[0]
    trainer.export_peft(tmp_path / "adapter")
    trainer.export_merged(tmp_path / "merged")

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert not torch.allclose(own_logprobs(base, sample), expected, atol=1e-2)
    adapter = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(own_logprobs(adapter, sample), expected, atol=1e-4)
    assert torch.allclose(own_logprobs(merged, sample), expected, atol=1e-4)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
    assert config["r"] == 4
    for folder in ("adapter", "merged"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        assert rendered.startswith("<|im_start|>user")
    # Exporting changes nothing in the trainer.
    assert torch.equal(trainer.logprobs([sample])[0], expected)


def test_full_weights_export_merged_only(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = make(tiny_model_dir, lora=None)
    groups = batch(trainer)
    trainer.step(groups, PolicyGradient())
    trainer.export_merged(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = trainer.logprobs([groups[0][2]])[0]
    assert torch.allclose(own_logprobs(merged, groups[0][2]), expected, atol=1e-4)
    with pytest.raises(ValueError, match="export_merged"):
        trainer.export_peft(tmp_path / "adapter")
