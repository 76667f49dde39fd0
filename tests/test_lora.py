"""The fused LoRA layer is PEFT's layer; merging is the same weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_local_trainer import PolicyGradient, batch, make
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from aflow_tune.engines.local.lora import (
    FusedLoraLinear,
    adapter_layers,
    adapter_state,
    inject,
    load_adapter_state,
)
from aflow_tune.engines.local.trainer import Sample
from aflow_tune.engines.local.weights import LoraSpec, Weights

IDS = torch.arange(40)[None] * 5 % 256
SPEC = LoraSpec(4, 8.0)


def adapted(folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A model with an adapter whose B is not zero."""
    model = inject(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), SPEC, seed=seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, _, B_OR in adapter_layers(model):
            B_OR.copy_(torch.randn(B_OR.shape, generator=generator) * 0.1)
    return model.eval()


def test_injection_is_seeded_and_leaves_only_the_adapter_trainable(tiny_model_dir: Path) -> None:
    first, again, other = (
        adapter_state(inject(AutoModelForCausalLM.from_pretrained(tiny_model_dir), SPEC, seed=s))
        for s in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert all(not tensor.any() for name, tensor in first.items() if name.endswith(".B"))
    # Seven linear layers a block, two blocks; the tied output head stays untouched.
    assert len(first) == 2 * 14
    model = inject(AutoModelForCausalLM.from_pretrained(tiny_model_dir), SPEC, seed=0)
    trainable = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


def test_values_and_gradients_equal_those_of_peft(tiny_model_dir: Path) -> None:
    ours = adapted(tiny_model_dir)
    assert any(isinstance(module, FusedLoraLinear) for module in ours.modules())
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), config).eval()
    load_adapter_state(theirs, adapter_state(ours))
    assert not any(isinstance(module, FusedLoraLinear) for module in theirs.modules())
    logits = [model(input_ids=IDS).logits for model in (ours, theirs)]
    assert torch.allclose(*logits, atol=1e-5, rtol=1e-5)
    for output in logits:
        output.log_softmax(-1)[..., 3].sum().backward()
    pairs = zip(adapter_layers(ours), adapter_layers(theirs), strict=True)
    for (name, a, b), (_, expected_a, expected_b) in pairs:
        assert torch.allclose(a.grad, expected_a.grad, atol=1e-4, rtol=1e-4), name
        assert torch.allclose(b.grad, expected_b.grad, atol=1e-4, rtol=1e-4), name


def test_layers_stored_transposed_merge_as_well() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=32, n_layer=1, n_head=4, initializer_range=0.3)
    plain = GPT2LMHeadModel(config).eval()
    model = GPT2LMHeadModel(config).eval()
    model.load_state_dict(plain.state_dict())
    spec = LoraSpec(2, 4.0, ("c_attn", "c_proj"))
    trained = inject(model, spec, seed=0).eval()
    with torch.no_grad():
        for _, _, B_OR in adapter_layers(trained):
            B_OR.normal_()
    merged = Weights(plain)
    merged.load(adapter_state(trained), spec)
    with torch.no_grad():
        for path in merged.adapted_paths():
            plain.get_submodule(path).weight.copy_(merged.effective(path))
    assert torch.allclose(
        plain(input_ids=IDS).logits, trained(input_ids=IDS).logits, atol=1e-3, rtol=1e-3
    )


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
