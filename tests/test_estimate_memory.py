"""Parameters and memory by hand-computed numbers, against transformers' own modules, and against
what autograd keeps."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from aflow_tune.errors import BadInput
from aflow_tune.estimate.gpus import Engine, GpuTrainer
from aflow_tune.estimate.local import (
    LocalRun,
    MicroBatch,
    Sampler,
    Trainer,
    cache_columns,
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

_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXTURE |= {"mlp_only_layers": [1], "num_hidden_layers": 3, "model_type": "qwen3_moe"}


def test_a_mixture_holds_all_experts_and_computes_with_some():
    mixed = _shape(_TINY | _MIXTURE)
    assert [block.experts for block in mixed.blocks] == [6, 0, 6]
    assert mixed.parameters - mixed.active_parameters == 2 * (6 - 2) * (3 * 64 * 32)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt2"])
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
    ("targets", "excludes"),
    [
        (r".*\.(q|k|v|o)_proj", None),
        ("all-linear", r".*\.(gate|up|down)_proj"),
        (("q_proj", "k_proj", "v_proj", "o_proj"), None),
    ],
)
def test_adapters_of_some_modules(targets, excludes):
    assert Lora(2, targets, excludes).parameters(TINY) == 2 * 2 * (128 + 96 + 96 + 128)


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
    token = kept_per_token(shape, shape.blocks[0], dtype.itemsize, lora, gathered=True)
    mask = _TOKENS * _TOKENS
    assert (large - small) / 2 == pytest.approx(_TOKENS * token + mask, rel=0.04)


def _saved(family, dtype, rank, layers):
    """Bytes of the different tensors that a training pass of our trainer keeps, weights apart."""
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
    attention = 3584 * 3584 + 3584 + 2 * (3584 * 512 + 512) + 3584 * 3584
    layer = attention + 3 * 3584 * 18944 + 2 * 3584
    assert SEVEN.parameters == 2 * 152064 * 3584 + 28 * layer + 3584
    engine = Engine("rollout", SEVEN)
    assert engine.weight_bytes() == SEVEN.parameters * 2
    # 256 blocks of 16 tokens; 2 x 28 layers x 4 heads x 128 in bf16 a token
    assert engine.sequence_bytes() == 4096 * 57_344
    need = engine.need(80 * GIB)
    fixed, kv = sum(part.size for part in need.parts[:-1]), need.parts[-1]
    assert kv.size == int((0.9 * 80 * GIB - fixed) // (16 * 57_344)) * 16 * 57_344
    fp8 = Engine("rollout", SEVEN, quantization="fp8")  # embeddings stay whole
    assert engine.weight_bytes() - fp8.weight_bytes() == SEVEN.linear_parameters
    assert Engine("rollout", SEVEN, max_length=32768).need(18 * GIB).fits is False


def test_tensor_parallelism_divides_heads_until_one_is_left():
    engines = [Engine("rollout", SEVEN, tensor_parallel=n) for n in (1, 2, 4, 8)]
    assert [engine.token_bytes() for engine in engines] == [57_344, 28_672, 14_336, 14_336]


def test_a_window_bounds_a_sequence():
    windowed = _shape(_TINY | {"model_type": "mistral", "sliding_window": 128})
    engine = Engine("rollout", windowed, max_length=8192, forward_tokens=512)
    # 128 - 1 + 512 tokens are 40 blocks, and one more; 2 layers x 2 x 2 heads x 16 x bf16
    assert engine.sequence_bytes() == 41 * 16 * (2 * 2 * 2 * 16 * 2)


def test_training_takes_sixteen_bytes_a_parameter_divided_among_gpus():
    assert sum(GpuTrainer(SEVEN, 4, 4, 8192).states()) == 16 * SEVEN.parameters
    one, eight = (
        {p.name: p.size for p in GpuTrainer(SEVEN, n, 8, 8192).needs(None, None, [])[0].parts}
        for n in (1, 8)
    )
    assert eight["policy optimizer"] * 8 == one["policy optimizer"] == 8 * SEVEN.parameters
    assert eight["activations"] == one["activations"]
    assert one["logits and backward buffers"] == 10 * 8192 * 152064  # Trinity's coefficient
    gpu, host = GpuTrainer(SEVEN, 2, 2, 4096, offload=True).needs(24 * GIB, None, [])
    assert not [part for part in gpu.parts if "optimizer" in part.name]
    assert sum(p.size for p in host.parts if "offloaded" in p.name) == 16 * SEVEN.parameters


def test_an_adapter_under_fsdp2_is_trained_in_bf16():
    lora = Lora(64, "all-linear", r".*\.(gate|up|down)_proj")
    count = 28 * 64 * (2 * (3584 + 3584) + 2 * (3584 + 512))
    weights, gradients, moments = GpuTrainer(SEVEN, 1, 1, 8192, lora).states()
    assert weights == 4 * SEVEN.parameters + 2 * count
    assert (gradients, moments) == (2 * count, 4 * count)


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
def test_the_cache_grows_as_the_engine_reserves(prompt, length, columns):
    from aflow_tune.engines.local.kv_cache import CacheShape, KVCache

    assert cache_columns(prompt, length) == columns
    cache = KVCache(CacheShape(2, 2, 16, torch.float32, torch.device("cpu")))
    for column in range(prompt + 1, length + 1):
        cache.reserve(4, column)
        cache.lengths = [column] * 4
    assert cache.kv.shape[4] == columns[0]


def test_mapped_weights_count_once_and_converted_or_trained_ones_each():
    parts = _parts(_trainer(Lora(4)))
    assert parts["sampler weights"] == 4 * TINY.parameters
    assert "trainer weights" not in parts
    parts = _parts(_trainer(itemsize=2), _sampler(itemsize=2))
    assert parts["sampler weights"] == parts["trainer weights"] == 2 * TINY.parameters


_JOINED = 2 * (64 * 64 + 2 * 64 * 32) * 4
_ATTENTION = _JOINED + 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("device", "lora", "updated", "packed"),
    [
        ("cpu", Lora(4), True, (LINEARS * 4 + 259 * 64 * 4, LINEARS * 4)),
        ("cpu", Lora(4), False, (LINEARS * 4 + 259 * 64 * 4, 0)),
        ("cuda", Lora(4, r".*\.(q|k|v|o)_proj"), True, (_ATTENTION, _ATTENTION)),
        ("cuda", Lora(4), True, (LINEARS * 4, LINEARS * 4)),
        ("cuda", None, True, (_JOINED, _JOINED)),
        ("cuda", Lora(4), False, (_JOINED, 0)),
    ],
)
def test_packed_weights_are_twice_there_at_an_update(device, lora, updated, packed):
    run = LocalRun((), _trainer(lora), inline=True, device=device)
    assert packed_bytes(_sampler(updated=updated), run) == packed


def test_what_training_keeps():
    count = Lora(4).parameters(TINY)
    # value, gradient and two moments in fp32, and two copies for the sampler
    assert [part.size for part in trained_states(_trainer(Lora(4)))] == [16 * count, 8 * count]
    full = {part.name: part.size / TINY.parameters for part in trained_states(_trainer(itemsize=2))}
    assert (full["fp32 masters"], full["gradients"], full["optimizer"]) == (4, 6, 8)
    # An export takes the place of a step that gave its memory back. In fp32 with an adapter: a
    # copy of every linear layer, as the file itself is mapped.
    for tokens in (10, 1000):
        parts = _parts(_trainer(Lora(4), tokens=tokens))
        step = sum(parts[name] for name in ("activations", "backward pass", "logits"))
        assert parts.get("export", 0.0) == pytest.approx(max(0.0, LINEARS * 4 - step))
