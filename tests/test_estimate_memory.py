"""Parameters and memory by hand-computed numbers, against transformers' own modules, and against
what autograd keeps."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from aflow_tune.errors import BadInput
from aflow_tune.estimate.gpus import engine_need
from aflow_tune.estimate.local import packed_bytes, trained_states
from aflow_tune.estimate.needs import GIB
from aflow_tune.estimate.shapes import Lora, NamedModel, kept_per_token, shape_of

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
_TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 259,
    "tie_word_embeddings": True,
}


def _config(settings):
    return CONFIG_MAPPING[settings["model_type"]](**settings)


def _shape(settings):
    return shape_of(_config(settings))


SEVEN = _shape(QWEN_7B)
TINY = _shape(_TINY)
LINEARS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)


# --- shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma3_text"])
def test_adapter_parameters_are_pefts(name):
    from peft import LoraConfig, get_peft_model

    config = _config(_TINY | {"model_type": name, "pad_token_id": 0})
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(module, lora).named_parameters()
    counted = sum(p.numel() for n, p in adapted if "lora_" in n)
    assert Lora(4).parameters(shape_of(config)) == counted


@pytest.mark.parametrize(
    "settings",
    [{"model_type": "mamba"}, QWEN_7B | {"quantization_config": {"quant_method": "awq"}}],
)
def test_what_cannot_be_counted_is_refused(settings):
    with pytest.raises(BadInput):
        _shape(settings)


# --- activations --------------------------------------------------------------------------

_TOKENS = 192


@pytest.mark.parametrize(
    ("family", "dtype", "rank"),
    [
        ("llama", torch.float32, None),
        ("llama", torch.bfloat16, 4),
        ("qwen3", torch.float32, 4),
        ("qwen3", torch.bfloat16, None),
    ],
)
def test_kept_bytes_are_those_that_autograd_saves(family, dtype, rank):
    """The difference between models of 3 and of 1 layers is what two layers keep."""
    small, large = (_saved(family, dtype, rank, layers) for layers in (1, 3))
    shape = _shape(_TINY | {"model_type": family, "num_hidden_layers": 3, "head_dim": 16})
    lora = None if rank is None else Lora(rank)
    token = kept_per_token(shape, dtype.itemsize, lora, gathered=True, fused_norms=True)
    mask = _TOKENS * _TOKENS
    assert (large - small) / 2 == pytest.approx(_TOKENS * token + mask, rel=0.04)


def _saved(family, dtype, rank, layers):
    """Bytes of the different tensors that a training pass of our trainer keeps, weights apart."""
    from aflow_tune.engines.local.lora import inject
    from aflow_tune.engines.local.packed_model import PackedModel, Sample
    from aflow_tune.engines.local.weights import LoraSpec

    settings = {k: v for k, v in _TINY.items() if k != "model_type"}
    config = CONFIG_MAPPING[family](**(settings | {"num_hidden_layers": layers, "head_dim": 16}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    if rank is not None:
        inject(model, LoraSpec(rank, 8), seed=0)
    policy = PackedModel(model)
    assert policy.packed
    assert policy.fused_head
    assert policy.fused_norms
    tokens = torch.arange(_TOKENS + 1) % 250
    sample = Sample(tokens, _TOKENS - 8, torch.ones(9, dtype=torch.bool))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.scores([sample], 9)
    return sum(size for size, _ in kept.values())


# --- GPUs ---------------------------------------------------------------------------------


def engine(shape=SEVEN, limit=None, longest=4096, **settings):
    from trinity.common.config import InferenceModelConfig

    model = InferenceModelConfig(**{"gpu_memory_utilization": 0.9, **settings})
    need = engine_need("rollout", shape, model, None, longest, limit)
    return need, {part.name: part.size for part in need.parts}


def test_qwen_7b_weights_and_cache_of_one_engine():
    attention = 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3584 * 3584
    layer = attention + 3 * 3584 * 18944 + 2 * 3584
    assert SEVEN.parameters == 2 * 152064 * 3584 + 28 * layer + 3584
    _, least = engine()
    assert least["weights"] == SEVEN.parameters * 2
    # 256 blocks of 16 tokens; 2 x 28 layers x 4 heads x 128 in bf16 a token
    assert least["keys and values"] == 4096 * 57_344
    need, parts = engine(limit=80 * GIB)
    kv = parts.pop("keys and values")
    assert kv == int((0.9 * 80 * GIB - sum(parts.values())) // (16 * 57_344)) * 16 * 57_344
    assert need.fits
    fp8 = engine(extra_engine_args={"quantization": "fp8"})[1]  # embeddings stay whole
    assert least["weights"] - fp8["weights"] == SEVEN.linear_parameters
    assert engine(limit=18 * GIB, longest=32768)[0].fits is False


def test_tensor_parallelism_divides_heads_until_one_is_left():
    sizes = [engine(tensor_parallel_size=n)[1]["keys and values"] for n in (1, 2, 4, 8)]
    assert [size / 4096 for size in sizes] == [57_344, 28_672, 14_336, 14_336]


# --- local engines ------------------------------------------------------------------------


_JOINED = 2 * (64 * 64 + 2 * 64 * 32) * 4
_ATTENTION = _JOINED + 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("on_cpu", "lora", "updated", "packed"),
    [
        (True, Lora(4), True, 2 * LINEARS * 4 + 259 * 64 * 4),
        (False, Lora(4, r".*\.(q|k|v|o)_proj"), True, 2 * _ATTENTION),
        (False, Lora(4, "all-linear", r".*\.(gate|up|down)_proj"), True, 2 * _ATTENTION),
        (False, Lora(4, ("q_proj", "k_proj", "v_proj")), False, _JOINED),
    ],
)
def test_packed_weights_are_twice_there_at_an_update(on_cpu, lora, updated, packed):
    model = NamedModel("m", TINY, 4)
    assert packed_bytes(model, lora, 4, on_cpu, updated=updated) == packed


def test_what_training_keeps():
    count = Lora(4).parameters(TINY)
    # value, gradient and two moments in fp32, and two copies for the sampler
    assert [part.size for part in trained_states(TINY, 4, Lora(4))] == [16 * count, 8 * count]
    full = {part.name: part.size / TINY.parameters for part in trained_states(TINY, 2, None)}
    assert (full["fp32 masters"], full["gradients"], full["optimizer"]) == (4, 6, 8)
