"""Parameters and memory by hand-computed numbers, against transformers' own modules, and against
what autograd keeps."""

from __future__ import annotations

import pytest
import torch

from aflow_tune.errors import BadInput
from aflow_tune.estimate.gpus import Engine, GpuTrainer
from aflow_tune.estimate.local import (
    LocalRun,
    MicroBatch,
    Sampler,
    Trainer,
    cache_columns,
    export_bytes,
    local_needs,
    packed_bytes,
    trained_states,
)
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
_MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
    "head_dim": 16,
}
_CASES = {
    "llama": {},
    "llama biased": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 24,
    },
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen2 windows": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
    "qwen3": {"head_dim": 32},
    "smollm3": {},
    "phi3": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": _MIXTURE,
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
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
SEVEN = shape_of(QWEN_7B)
TINY = shape_of(_TINY)
LINEARS = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)


# --- shapes -------------------------------------------------------------------------------


def _module(name):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family, settings = name.split()[0], _CASES[name]
    config = CONFIG_MAPPING[family](**(settings if family == "gpt2" else _SMALL | settings))
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", _CASES)
def test_parameters_are_those_of_the_module(name):
    config, module = _module(name)
    shape = shape_of(config.to_dict())
    assert shape.parameters == sum(parameter.numel() for parameter in module.parameters())
    if name == "qwen2 windows":
        assert [block.window for block in shape.blocks] == [None, 8, 8]
    if name == "mixtral":
        assert shape.parameters - shape.active_parameters == 3 * 2 * (3 * 64 * 96)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt2"])
def test_adapter_parameters_are_pefts(name):
    from peft import LoraConfig, get_peft_model

    config, module = _module(name)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(module, lora).named_parameters()
    counted = sum(p.numel() for n, p in adapted if "lora_" in n)
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
    attention = 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3584 * 3584
    layer = attention + 3 * 3584 * 18944 + 2 * 3584
    assert SEVEN.parameters == 2 * 152064 * 3584 + 28 * layer + 3584 == 7_615_616_512
    # 2 x 28 layers x 4 heads x 128 in bf16
    assert SEVEN.kv_elements_per_token() * 2 == 57_344


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "llama", "hidden_size": 64}, "no "),
        (QWEN_7B | {"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_what_cannot_be_counted_is_refused(settings, found):
    with pytest.raises(BadInput) as caught:
        shape_of(settings, "model.model_path")
    assert found in caught.value.faults[0].found


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
    shape = shape_of(_TINY | {"model_type": family, "num_hidden_layers": 3, "head_dim": 16})
    lora = None if rank is None else Lora(rank)
    token = kept_per_token(shape, shape.blocks[0], dtype.itemsize, lora, gathered=True)
    mask = _TOKENS * _TOKENS
    assert (large - small) / 2 == pytest.approx(_TOKENS * token + mask, rel=0.04)


def _saved(family, dtype, rank, layers):
    """Bytes of the different tensors that a training pass of our trainer keeps, weights apart."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from aflow_tune.engines.local.lora import inject
    from aflow_tune.engines.local.packed_model import PackedModel
    from aflow_tune.engines.local.packing import Sample
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


def test_qwen_7b_weights_and_cache_of_one_engine():
    engine = Engine("rollout", SEVEN)
    assert engine.weight_bytes() == 7_615_616_512 * 2
    # 256 blocks of 16 tokens
    assert engine.sequence_bytes() == 4096 * 57_344
    need = engine.need(80 * GIB)
    fixed, kv = sum(part.size for part in need.parts[:-1]), need.parts[-1]
    assert kv.size == int((0.9 * 80 * GIB - fixed) // (16 * 57_344)) * 16 * 57_344
    fp8 = Engine("rollout", SEVEN, quantization="fp8")  # embeddings stay whole
    assert engine.weight_bytes() - fp8.weight_bytes() == SEVEN.linear_parameters


def test_tensor_parallelism_divides_heads_until_one_is_left():
    engines = [Engine("rollout", SEVEN, tensor_parallel=n) for n in (1, 2, 4, 8)]
    assert [engine.token_bytes() for engine in engines] == [57_344, 28_672, 14_336, 14_336]
    assert engines[-1].gpus == 8


def test_an_engine_without_room_for_one_sequence_is_refused():
    need = Engine("rollout", SEVEN, max_length=32768).need(18 * GIB)
    assert need.fits is False
    assert "would not start" in str(need.refusal)


def test_a_window_bounds_a_sequence():
    windowed = shape_of(_TINY | {"model_type": "mistral", "sliding_window": 128})
    engine = Engine("rollout", windowed, max_length=8192, forward_tokens=512)
    # 128 - 1 + 512 tokens are 40 blocks, and one more; 2 layers x 2 x 2 heads x 16 x bf16
    assert engine.sequence_bytes() == 41 * 16 * (2 * 2 * 2 * 16 * 2)


def test_full_training_takes_sixteen_bytes_a_parameter_divided_among_gpus():
    assert sum(GpuTrainer(SEVEN, 4, 4, 8192).states()) == 16 * SEVEN.parameters
    one, eight = (
        {p.name: p.size for p in GpuTrainer(SEVEN, n, 8, 8192).needs(None, None, [])[0].parts}
        for n in (1, 8)
    )
    assert eight["policy optimizer"] * 8 == one["policy optimizer"] == 8 * SEVEN.parameters
    assert eight["activations"] == one["activations"]
    assert one["logits and backward buffers"] == 10 * 8192 * 152064  # Trinity's coefficient


def test_an_adapter_under_fsdp2_is_trained_in_bf16():
    lora = Lora(64, "all-linear", r".*\.(gate|up|down)_proj")
    count = 28 * 64 * (2 * (3584 + 3584) + 2 * (3584 + 512))
    weights, gradients, moments = GpuTrainer(SEVEN, 1, 1, 8192, lora).states()
    assert weights == 4 * SEVEN.parameters + 2 * count
    assert (gradients, moments) == (2 * count, 4 * count)


def test_offloaded_states_move_to_the_machine():
    gpu, host = GpuTrainer(SEVEN, 2, 2, 4096, offload=True).needs(24 * GIB, None, [])
    assert not [part for part in gpu.parts if "optimizer" in part.name]
    (moved,) = [part for part in host.parts if part.name == "offloaded states"]
    assert moved.size == 16 * SEVEN.parameters


# --- local engines ------------------------------------------------------------------------


def _sampler(itemsize=4, **more):
    return Sampler(NamedModel("m", TINY, 4), itemsize, 8, 100, 112, 896, 2, **more)


def _trainer(lora=None, itemsize=4, tokens=100):
    micro = MicroBatch(tokens=tokens, keys=tokens, scored=10)
    return Trainer(NamedModel("m", TINY, 4), itemsize, lora, micro)


def _parts(trainer, sampler=None, device="cpu"):
    run = LocalRun((sampler or _sampler(),), trainer, inline=True, device=device)
    return {part.name: part.size for part in local_needs(run, None, None)[0].parts}


@pytest.mark.parametrize(
    ("prompt", "length", "columns"),
    [(100, 112, (128, 0)), (480, 768, (768, 512)), (10, 300, (320, 192))],
)
def test_the_cache_grows_by_half_in_steps_of_64(prompt, length, columns):
    assert cache_columns(prompt, length) == columns


def test_the_cache_is_what_the_engine_reserves():
    from aflow_tune.engines.local.kv_cache import CacheShape, KVCache

    cache = KVCache(CacheShape(2, 2, 16, torch.float32, torch.device("cpu")))
    cache.reserve(4, 101)
    cache.lengths = [100] * 4
    for length in range(101, 300):
        cache.reserve(4, length + 1)
    assert cache.kv.shape[4] == cache_columns(100, 300)[0]


def test_mapped_weights_count_once_and_converted_or_trained_ones_each():
    parts = _parts(_trainer(Lora(4)))
    assert parts["sampler weights"] == 4 * TINY.parameters
    assert "trainer weights" not in parts
    parts = _parts(_trainer(itemsize=2), _sampler(itemsize=2))
    assert parts["sampler weights"] == parts["trainer weights"] == 2 * TINY.parameters


def test_packed_weights_are_twice_there_at_an_update():
    run = LocalRun((), _trainer(Lora(4)), inline=True)
    assert packed_bytes(_sampler(), run) == (LINEARS * 4 + 259 * 64 * 4, LINEARS * 4)
    assert packed_bytes(_sampler(updated=False), run)[1] == 0


def test_on_a_gpu_only_joined_and_adapted_layers_are_copied():
    def packed(lora, **more):
        run = LocalRun((), _trainer(lora), inline=True, device="cuda")
        return packed_bytes(_sampler(**more), run)

    joined = 2 * (64 * 64 + 2 * 64 * 32) * 4
    attention = joined + 2 * 64 * 64 * 4
    assert packed(Lora(4, r".*\.(q|k|v|o)_proj")) == (attention, attention)
    assert packed(Lora(4)) == (LINEARS * 4,) * 2
    assert packed(None) == (joined, joined)
    assert packed(Lora(4), updated=False) == (joined, 0)
    assert {"sampler weights", "trainer weights"} <= _parts(_trainer(Lora(4)), device="cuda").keys()


def test_what_training_keeps():
    count = Lora(4).parameters(TINY)
    # value, gradient and two moments in fp32, and two copies for the sampler
    assert [part.size for part in trained_states(_trainer(Lora(4)))] == [16 * count, 8 * count]
    full = {part.name: part.size / TINY.parameters for part in trained_states(_trainer(itemsize=2))}
    assert (full["fp32 masters"], full["gradients"], full["optimizer"]) == (4, 6, 8)


def test_an_export_takes_the_place_of_a_step_that_gave_its_memory_back():
    # In fp32 with an adapter: a copy of every linear layer, as the file itself is mapped.
    assert export_bytes(_trainer(Lora(4))) == LINEARS * 4
    for tokens in (10, 1000):
        parts = _parts(_trainer(Lora(4), tokens=tokens))
        step = sum(parts[name] for name in ("activations", "backward pass", "logits"))
        assert parts.get("export", 0.0) == pytest.approx(max(0.0, LINEARS * 4 - step))
