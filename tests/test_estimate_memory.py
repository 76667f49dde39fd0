"""Memory by hand-computed numbers, and against what autograd keeps in real modules."""

from __future__ import annotations

import pytest
import torch
from test_estimate_shapes import QWEN_7B

from aflow_tune.estimate.activations import kept_per_token
from aflow_tune.estimate.local import (
    EngineLimits,
    LocalRun,
    MicroBatch,
    SamplerLoad,
    TrainerLoad,
    cache_columns,
    export_bytes,
    leftovers,
    local_needs,
    micro_batch_bytes,
    packed_bytes,
    trained_states,
)
from aflow_tune.estimate.rollout import (
    EngineSettings,
    cache_room,
    engine_need,
    kv_bytes_per_token,
    sequence_bytes,
    weight_bytes,
)
from aflow_tune.estimate.shapes import Lora, shape_of
from aflow_tune.estimate.training import TrainerSettings, states, trainer_needs
from aflow_tune.estimate.types import GIB, Need, Part

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
_LIMITS = EngineLimits(4096, 8192, 64, 128 * 49152)
SEVEN = shape_of(QWEN_7B)
TINY = shape_of(_TINY)


# --- GPUs ---------------------------------------------------------------------------------


def test_qwen_7b_weights_and_cache_of_one_engine():
    engine = EngineSettings("rollout", 1, max_length=4096)
    assert weight_bytes(SEVEN, engine) == 7_615_616_512 * 2
    assert kv_bytes_per_token(SEVEN, engine) == 57_344
    # 256 blocks of 16 tokens
    assert sequence_bytes(SEVEN, engine) == 4096 * 57_344
    room = cache_room(SEVEN, engine, 80 * GIB)
    fixed = sum(p.size for p in engine_need(SEVEN, engine, 80 * GIB).parts[:-1])
    assert room.blocks == int((0.9 * 80 * GIB - fixed) // (16 * 57_344))


def test_tensor_parallelism_divides_heads_until_one_is_left():
    by = {n: EngineSettings("rollout", 1, tensor_parallel=n) for n in (1, 2, 4, 8)}
    found = {n: kv_bytes_per_token(SEVEN, engine) for n, engine in by.items()}
    assert found == {1: 57_344, 2: 28_672, 4: 14_336, 8: 14_336}
    assert by[8].gpus == 8


def test_an_engine_without_room_for_one_sequence_is_refused():
    need = engine_need(SEVEN, EngineSettings("rollout", 1, max_length=32768), 18 * GIB)
    assert need.fits is False
    assert "would not start" in str(need.refusal)


def test_a_window_bounds_a_sequence():
    windowed = shape_of(_TINY | {"model_type": "mistral", "sliding_window": 128})
    engine = EngineSettings("rollout", 1, max_length=8192, forward_tokens=512)
    # 128 - 1 + 512 tokens are 40 blocks, and one more; 2 layers x 2 x 2 heads x 16 x bf16
    assert sequence_bytes(windowed, engine) == 41 * 16 * (2 * 2 * 2 * 16 * 2)


def test_quantised_engines_keep_embeddings_whole():
    plain = weight_bytes(SEVEN, EngineSettings("rollout", 1))
    fp8 = weight_bytes(SEVEN, EngineSettings("rollout", 1, quantization="fp8"))
    assert plain - fp8 == SEVEN.linear_parameters


def test_full_training_takes_sixteen_bytes_a_parameter():
    assert sum(states(SEVEN, TrainerSettings(4, 4, 8192))) == 16 * SEVEN.parameters


def test_states_are_divided_among_the_gpus():
    one, eight = (
        {
            p.name: p.size
            for p in trainer_needs(SEVEN, TrainerSettings(n, 8, 4096), None, None)[0].parts
        }
        for n in (1, 8)
    )
    assert eight["policy optimizer"] * 8 == one["policy optimizer"] == 8 * SEVEN.parameters
    assert eight["activations"] == one["activations"]


def test_an_adapter_under_fsdp2_is_trained_in_bf16():
    lora = Lora(64, "all-linear", r".*\.(gate|up|down)_proj")
    count = 28 * 64 * (2 * (3584 + 3584) + 2 * (3584 + 512))
    assert lora.parameters(SEVEN) == count
    weights, gradients, moments = states(SEVEN, TrainerSettings(1, 1, 8192, lora))
    assert weights == 4 * SEVEN.parameters + 2 * count
    assert (gradients, moments) == (2 * count, 4 * count)


def test_offloaded_states_move_to_the_machine():
    settings = TrainerSettings(2, 2, 4096, offload=True)
    gpu, host = trainer_needs(SEVEN, settings, 24 * GIB, None)
    assert not [part for part in gpu.parts if "optimizer" in part.name]
    (moved,) = [part for part in host.parts if part.name == "offloaded states"]
    assert moved.size == 16 * SEVEN.parameters


def test_logits_are_counted_by_trinitys_coefficient():
    gpu, _ = trainer_needs(SEVEN, TrainerSettings(1, 1, 8192), None, None)
    (logits,) = [part for part in gpu.parts if part.name.startswith("logits")]
    assert logits.size == 10 * 8192 * 152064


# --- activations --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [None, 4])
def test_kept_bytes_are_those_that_autograd_saves(family, dtype, rank):
    """The difference between models of 3 and of 1 layers is what two layers keep."""
    small, large = (_saved(family, dtype, rank, layers) for layers in (1, 3))
    shape = shape_of(_TINY | {"model_type": family, "num_hidden_layers": 3, "head_dim": 16})
    rows = 0 if rank is None else 7 * rank
    token = kept_per_token(
        shape, shape.blocks[0], dtype.itemsize, full=rank is None, rank_rows=rows, gathered=True
    )
    mask = _TOKENS * _TOKENS
    assert (large - small) / 2 == pytest.approx(_TOKENS * token + mask, rel=0.04)


_TOKENS = 192


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


# --- local engines ------------------------------------------------------------------------


def _load(**more):
    settings = {"rows": 8, "prompt": 100, "length": 112, "total": 896, "distinct": 2, "source": "m"}
    return SamplerLoad(TINY, 4, 4, True, **(settings | more))


def _trainer(lora=None, **more):
    micro = MicroBatch(tokens=100, queries=100, keys=100, masks=0, scores=0, scored=10)
    return TrainerLoad(TINY, 4, 4, lora, micro, source="m", **more)


def test_the_cache_grows_by_half_in_steps_of_64():
    assert cache_columns(100, 112, 64) == (128, 0)
    assert cache_columns(480, 768, 64) == (768, 512)
    assert cache_columns(10, 300, 64) == (320, 192)


def test_the_cache_is_what_the_engine_reserves():
    from aflow_tune.engines.local.kv_cache import CacheShape, KVCache

    cache = KVCache(CacheShape(2, 2, 16, torch.float32, torch.device("cpu")))
    cache.reserve(4, 101)
    cache.lengths = [100] * 4
    for length in range(101, 300):
        cache.reserve(4, length + 1)
    assert cache.kv.shape[4] == cache_columns(100, 300, 64)[0]


def test_mapped_weights_count_once():
    run = LocalRun((_load(),), _trainer(Lora(4)), _LIMITS, inline=True)
    parts = {part.name: part.size for part in local_needs(run, None, None)[0].parts}
    assert parts["sampler weights"] == 4 * TINY.parameters
    assert "trainer weights" not in parts


def test_converted_and_trained_weights_count_each():
    bf16 = SamplerLoad(TINY, 2, 4, True, 8, 100, 112, 896, 2, source="m")
    trained = TrainerLoad(TINY, 2, 4, None, _trainer().micro, source="m")
    run = LocalRun((bf16,), trained, _LIMITS, inline=True)
    parts = {part.name: part.size for part in local_needs(run, None, None)[0].parts}
    assert parts["sampler weights"] == parts["trainer weights"] == 2 * TINY.parameters


def test_packed_weights_are_twice_there_at_an_update():
    run = LocalRun((_load(),), _trainer(Lora(4)), _LIMITS, inline=True)
    linears = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 4
    assert packed_bytes(_load(), run) == (linears + 259 * 64 * 4, linears)
    assert packed_bytes(_load(updated=False), run)[1] == 0


def test_on_a_gpu_only_joined_and_adapted_layers_are_copied():
    def packed(lora, **more):
        run = LocalRun((_load(),), _trainer(lora), _LIMITS, inline=True, device="cuda")
        return packed_bytes(_load(**more), run)

    joined = 2 * (64 * 64 + 2 * 64 * 32) * 4
    attention = joined + 2 * 64 * 64 * 4
    assert packed(Lora(4, r".*\.(q|k|v|o)_proj")) == (attention, attention)
    assert packed(Lora(4)) == (attention + 2 * 3 * 64 * 128 * 4,) * 2
    assert packed(None) == (joined, joined)
    assert packed(Lora(4), updated=False) == (joined, 0)


def test_an_adapter_takes_four_fp32_copies_and_two_for_the_sampler():
    count = Lora(4).parameters(TINY)
    assert [part.size for part in trained_states(_trainer(Lora(4)))] == [16 * count, 8 * count]


def test_full_weights_in_bf16_have_fp32_masters():
    parts = {
        part.name: part.size
        for part in trained_states(TrainerLoad(TINY, 2, 2, None, _trainer().micro))
    }
    assert parts["fp32 masters"] == 4 * TINY.parameters
    assert parts["gradients"] == 6 * TINY.parameters
    assert parts["optimizer"] == 8 * TINY.parameters


def test_an_empty_micro_batch_keeps_nothing():
    empty = TrainerLoad(TINY, 4, 4, None, MicroBatch(0, 0, 0, 0, 0, 0))
    assert micro_batch_bytes(empty) == 0


def _export(gives_back, micro):
    trainer = TrainerLoad(TINY, 4, 4, Lora(4), micro, source="m")
    run = LocalRun((_load(),), trainer, _LIMITS, inline=True, gives_back=gives_back)
    parts = {part.name: part.size for part in local_needs(run, None, None)[0].parts}
    step = sum(parts[name] for name in ("activations", "backward pass", "logits"))
    return parts.get("export", 0.0), step, export_bytes(trainer)


def test_an_export_takes_the_place_of_a_step_that_gave_its_memory_back():
    # In fp32 with an adapter: a copy of every linear layer, as the file itself is mapped.
    linears = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 4
    small = MicroBatch(tokens=10, queries=10, keys=10, masks=0, scores=0, scored=1)
    assert _export(False, small) == (linears, pytest.approx(_export(True, small)[1]), linears)
    added, step, whole = _export(True, small)
    assert 0 < step < whole == linears
    assert added == pytest.approx(whole - step)


def test_a_step_that_is_larger_than_the_export_covers_it():
    large = MicroBatch(tokens=1000, queries=1000, keys=1000, masks=0, scores=0, scored=10)
    added, step, whole = _export(True, large)
    assert step > whole
    assert added == 0
    assert _export(False, large)[0] == whole


def _stage(**sizes):
    parts = tuple(Part(name.replace("_", " "), size) for name, size in sizes.items())
    return [Need("sampler and trainer", "memory", parts)]


def test_a_stage_that_trained_leaves_what_its_evaluation_took():
    both = _stage(sampler_forward_pass=10, sampler_stored_prefixes=3, activations=50, logits=7)
    assert leftovers([both], gives_back=True) == 10 + 3
    assert leftovers([both], gives_back=False) == 10 + 3 + 50 + 7
    rows = _stage(activations=90, backward_pass=5)
    assert leftovers([rows], gives_back=True) == 0
    assert leftovers([rows], gives_back=False) == 95


def test_a_step_returns_what_the_stages_before_it_left():
    harvest = _stage(executor_forward_pass=40)
    rows = _stage(activations=20)
    bench = _stage(sampler_forward_pass=6)
    assert leftovers([harvest], gives_back=True) == 40
    assert leftovers([harvest, bench], gives_back=True) == 40
    assert leftovers([harvest, rows, bench], gives_back=True) == 6
    assert leftovers([harvest, rows, bench], gives_back=False) == 40
    assert leftovers([], gives_back=True) == 0


def test_on_a_gpu_weights_lie_there_and_processes_here():
    run = LocalRun((_load(),), _trainer(Lora(4)), _LIMITS, inline=True, device="cuda")
    gpu, host = local_needs(run, 64 * GIB, 24 * GIB)
    assert (gpu.place, host.place) == ("GPU", "memory")
    assert {part.name for part in gpu.parts} >= {"sampler weights", "trainer weights"}
    assert gpu.fits
    assert host.fits
