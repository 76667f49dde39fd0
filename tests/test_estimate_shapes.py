"""Parameter counts against transformers' own modules, and against published numbers."""

from __future__ import annotations

import pytest
import torch

from aflow_tune.errors import BadInput
from aflow_tune.estimate.shapes import Lora, shape_of

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 130,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CASES = {
    "llama": ("llama", {}),
    "llama with biases, tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 24},
    ),
    "mistral": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "head_dim": 16,
        },
    ),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_position_embeddings": 32768,
}
"""Qwen2.5-7B-Instruct's config.json, as published."""


def _module(family, settings):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    given = settings if family == "gpt2" else _SMALL | settings
    config = CONFIG_MAPPING[family](**given)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", _CASES)
def test_parameters_are_those_of_the_module(name):
    config, module = _module(*_CASES[name])
    shape = shape_of(config.to_dict())
    assert shape.parameters == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt2"])
def test_adapter_parameters_are_pefts(name):
    from peft import LoraConfig, get_peft_model

    config, module = _module(*_CASES[name])
    peft = get_peft_model(
        module, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    counted = sum(p.numel() for n, p in peft.named_parameters() if "lora_" in n)
    assert Lora(4).parameters(shape_of(config.to_dict())) == counted


@pytest.mark.parametrize(
    ("targets", "excludes"),
    [
        (r".*\.(q|k|v|o)_proj", None),
        ("all-linear", r".*\.(gate|up|down)_proj"),
        (("q_proj", "k_proj", "v_proj", "o_proj"), None),
    ],
)
def test_adapters_of_some_modules(targets, excludes):
    shape = shape_of(_SMALL | {"model_type": "llama"})
    # 3 layers x rank 2 x (q: 64+64, k: 64+32, v: 64+32, o: 64+64)
    assert Lora(2, targets, excludes).parameters(shape) == 3 * 2 * (128 + 96 + 96 + 128)


def test_qwen_7b_by_hand():
    shape = shape_of(QWEN_7B)
    attention = 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3584 * 3584
    layer = attention + 3 * 3584 * 18944 + 2 * 3584
    assert shape.parameters == 2 * 152064 * 3584 + 28 * layer + 3584 == 7_615_616_512
    # 2 x 28 layers x 4 heads x 128 in bf16
    assert shape.kv_elements_per_token() * 2 == 57_344
    assert all(block.window is None for block in shape.blocks)


def test_windows_are_told_by_layer():
    config, _ = _module(*_CASES["qwen2 with windows"])
    assert [block.window for block in shape_of(config.to_dict()).blocks] == [None, 8, 8]


def test_a_mixture_holds_all_experts_and_computes_with_some():
    shape = shape_of(
        _SMALL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    assert shape.parameters - shape.active_parameters == 3 * 2 * (3 * 64 * 96)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "llama", "hidden_size": 64}, "no "),
        (QWEN_7B | {"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_cannot_be_counted_is_refused(settings, found):
    with pytest.raises(BadInput) as caught:
        shape_of(settings, "model.model_path")
    assert found in caught.value.faults[0].found
