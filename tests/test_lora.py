"""The fused LoRA layer is PEFT's layer; merging is the same weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from aflow_tune.engines.local.lora import (
    FusedLoraLinear,
    LoraSpec,
    adapted_modules,
    adapter_layers,
    adapter_state,
    inject,
    load_adapter_state,
    merge_into,
)

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
    assert len(adapted_modules(first)) == 14
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


def test_disabling_the_adapter_gives_the_base_model(tiny_model_dir: Path) -> None:
    model = adapted(tiny_model_dir)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with model.disable_adapter():
        assert torch.equal(model(input_ids=IDS).logits, base(input_ids=IDS).logits)
    assert not torch.allclose(model(input_ids=IDS).logits, base(input_ids=IDS).logits, atol=1e-2)


def test_bf16_masters_stay_fp32_and_receive_gradients(tiny_model_dir: Path) -> None:
    model = adapted(tiny_model_dir, torch.bfloat16)
    model(input_ids=IDS).logits.float().logsumexp(-1).sum().backward()
    for name, A_RI, B_OR in adapter_layers(model):
        assert A_RI.dtype == B_OR.dtype == torch.float32
        assert A_RI.grad is not None
        assert A_RI.grad.dtype == torch.float32, name
        assert float(B_OR.grad.abs().sum()) > 0, name


def test_merging_twice_from_the_base_weights_is_merging_once(tiny_model_dir: Path) -> None:
    trained = adapted(tiny_model_dir)
    state = adapter_state(trained)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    base = {path: model.get_submodule(path).weight.clone() for path in adapted_modules(state)}
    merge_into(model, base, state, SPEC)
    merge_into(model, base, state, SPEC)
    assert torch.allclose(
        model(input_ids=IDS).logits, trained(input_ids=IDS).logits, atol=1e-4, rtol=1e-4
    )


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
    merge_into(plain, {}, adapter_state(trained), spec)
    assert torch.allclose(
        plain(input_ids=IDS).logits, trained(input_ids=IDS).logits, atol=1e-3, rtol=1e-3
    )


def test_a_state_that_lacks_a_layer_is_refused(tiny_model_dir: Path) -> None:
    model = adapted(tiny_model_dir)
    state = adapter_state(model)
    state.pop(next(iter(state)))
    with pytest.raises(KeyError):
        load_adapter_state(model, state)


def test_an_adapter_can_be_collected_layer_by_layer() -> None:
    """As verl syncs it; peft 0.21 gives nothing for a layer's own state dict."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **shape))
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    layer = adapted.base_model.model.model.layers[0].state_dict()
    assert len(get_peft_model_state_dict(adapted, state_dict=layer)) == 2 * 7
