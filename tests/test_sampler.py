"""The sampler against Hugging Face's own forward, and against rough treatment."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from pathlib import Path

import pytest
import torch

from aflow_tune.engines.local.decoder import GenericDecoder, make_decoder
from aflow_tune.engines.local.llama import Groups, LlamaDecoder, groups_of
from aflow_tune.engines.local.models import load_model, load_tokenizer
from aflow_tune.engines.local.sampler import RowRule, Sampler, SamplingParams, draw, invert
from aflow_tune.engines.local.weights import LoraSpec
from aflow_tune.errors import BadInput, RunFailed

CPU = torch.device("cpu")
SPEC = LoraSpec(rank=2, alpha=4.0)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def reference_logprobs(model, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Teacher-forced log-probabilities by Hugging Face's forward, [T-1]."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def worst_difference(model, prompt_ids, completion, temperature: float = 1.0) -> float:
    expected = reference_logprobs(model, prompt_ids + completion.token_ids, temperature)
    found = torch.tensor(completion.logprobs)
    return (expected[len(prompt_ids) - 1 :] - found).abs().max().item()


LLAMA_LIKE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
              "num_hidden_layers": 2, "intermediate_size": 64}  # fmt: skip
PLAIN = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
ARCHITECTURES = {
    "qwen2": (LlamaDecoder, LLAMA_LIKE),
    "qwen3": (LlamaDecoder, {**LLAMA_LIKE, "head_dim": 16}),
    "gemma": (GenericDecoder, {**LLAMA_LIKE, "head_dim": 8}),
    "gpt_neox": (GenericDecoder, PLAIN),
    "opt": (GenericDecoder, {**PLAIN, "word_embed_proj_dim": 32, "ffn_dim": 64}),
    "gpt2": (GenericDecoder, {"n_embd": 32, "n_head": 4, "n_layer": 2}),
}
"""Tiny models of other architectures, and the decoder that serves them."""


def architecture(name: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, vocab_size=259, eos_token_id=258, **ARCHITECTURES[name][1])
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0, 0.2)
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path):
    return load_model(tiny_model_dir, torch.float32, CPU)


@pytest.fixture
def make_sampler(tiny_model_dir: Path):
    """Builds samplers on fresh weights and closes them."""
    built: list[Sampler] = []
    tokenizer = load_tokenizer(tiny_model_dir)

    def make(model=None, **options) -> Sampler:
        model = model or load_model(tiny_model_dir, torch.float32, CPU)
        built.append(Sampler(model, tokenizer, **{"max_batch": 8, "max_model_len": 256, **options}))
        return built[-1]

    yield make
    for sampler in built:
        sampler.close()


def test_invert_picks_the_token_that_the_uniform_falls_into() -> None:
    weights = torch.zeros(6, 600)
    weights[:, [3, 255, 256, 599]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    uniforms = torch.tensor([0.0, 0.0999, 0.1001, 0.31, 0.61, 0.99999994])
    for scale in (1, 7):  # unnormalised weights mean the same distribution
        assert invert(weights * scale, uniforms).tolist() == [3, 3, 255, 256, 599, 599]


def test_draws_follow_the_distribution_and_report_its_log() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    uniforms = (torch.arange(4096) + 0.5) / 4096
    tokens, logprobs, _ = draw(probabilities.log().expand(4096, 4), None, uniforms, {})
    assert Counter(tokens.tolist()) == {0: 2048, 1: 1024, 2: 512, 3: 512}
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], rtol=0, atol=1e-6)
    # A token that is allowed alone is drawn though its probability underflows fp32.
    rule = RowRule(banned=torch.tensor([True, False]))
    tokens, logprobs, _ = draw(torch.tensor([[300.0, 0.0]]), None, torch.tensor([0.5]), {0: rule})
    assert (tokens.tolist(), logprobs.item()) == ([1], -300.0)


@pytest.mark.parametrize(
    ("rule", "possible"),
    [
        (RowRule(top_k=2), {0, 1}),
        (RowRule(top_p=0.5), {0}),
        (RowRule(top_p=0.51), {0, 1}),
        (RowRule(top_k=1, banned=torch.tensor([True, False, False, False])), {1}),
        (RowRule(greedy=True), {0}),
        (RowRule(greedy=True, banned=torch.tensor([True, True, False, False])), {2}),
    ],
)
def test_rules_restrict_what_is_drawn_but_not_what_is_reported(rule, possible) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log().expand(200, 4)
    uniforms = (torch.arange(200) + 0.5) / 200
    tokens, logprobs, _ = draw(logits, None, uniforms, dict.fromkeys(range(200), rule))
    assert set(tokens.tolist()) == possible
    torch.testing.assert_close(logprobs, logits[0][tokens], rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_exact_for_mixed_lengths_and_shared_prompts(
    make_sampler, model, temperature
) -> None:
    sampler = make_sampler()
    long = prompt(60)
    prompts = [prompt(5), prompt(20), long, long, long[:40] + prompt(9), prompt(1)]
    params = [
        SamplingParams(max_tokens=10 + 3 * i, n=2, seed=i, temperature=temperature)
        for i in range(len(prompts))
    ]
    for ids, drawn in zip(prompts, sampler.generate(prompts, params), strict=True):
        assert len(drawn) == 2
        assert max(worst_difference(model, ids, it, temperature) for it in drawn) < 2e-5
    assert sampler.stats()["shared_tokens"] > 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_sampled_exactly(make_sampler, name) -> None:
    model = architecture(name)
    sampler = make_sampler(model, max_batch=3)
    assert isinstance(sampler.decoder, ARCHITECTURES[name][0])
    prompts = [prompt(12), prompt(5), prompt(12), prompt(30)]
    params = [SamplingParams(max_tokens=6 + 4 * i, seed=i) for i in range(4)]
    for ids, drawn in zip(prompts, sampler.generate(prompts, params), strict=True):
        assert worst_difference(model, ids, drawn[0]) < 2e-5
    found = torch.tensor(sampler.token_logprobs(prompts[3]))
    torch.testing.assert_close(found, reference_logprobs(model, prompts[3]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_begin_alike_are_attended_together_and_exactly(make_sampler, dtype) -> None:
    """Rows of two long prompts end at different times, and one of a third joins on the way."""
    prompts = [prompt(200), prompt(200)[:30] + prompt(180), prompt(200)[:150] + prompt(20)]
    counts = [14, 12, 1]
    rows = [ids for ids, count in zip(prompts, counts, strict=True) for _ in range(count)]
    found = groups_of(rows)
    assert found is not None
    assert found.columns == 150
    assert sorted(found.sizes) == [12, 15]
    assert all(rows[row][:150] == rows[leader][:150] for row, leader in pairs(found))
    assert groups_of(rows[:3]) is None  # too few to be worth it
    model = architecture("qwen3").to(dtype)
    sampler = make_sampler(copy.deepcopy(model), max_batch=26)
    params = [
        SamplingParams(max_tokens=4 + 9 * i, n=n, seed=i) for i, n in enumerate(reversed(counts))
    ]
    close = 2e-5 if dtype == torch.float32 else 0.3
    for ids, drawn in zip(prompts[::-1], sampler.generate(prompts[::-1], params), strict=True):
        assert max(worst_difference(model, ids, it) for it in drawn) < close


def pairs(groups: Groups) -> list[tuple[int, int]]:
    """Each row with the one that its group is read from."""
    leaders = [
        leader
        for leader, size in zip(groups.leaders, groups.sizes, strict=True)
        for _ in range(size)
    ]
    return list(zip(groups.order, leaders, strict=True))


def test_a_llama_that_computes_something_else_falls_back(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir, torch.float32, CPU)
    model.model.norm.register_forward_hook(lambda _m, _i, out: out * 1.5)
    assert isinstance(make_decoder(model), GenericDecoder)


def test_a_seed_fixes_the_tokens_in_any_company(make_sampler) -> None:
    sampler = make_sampler()
    wanted = SamplingParams(max_tokens=20, n=2, seed=11)
    alone = sampler.generate([prompt(30)], [wanted])[0]
    crowd = [prompt(10 + i, 7) for i in range(9)]
    others = [SamplingParams(max_tokens=25, seed=3)] * 9
    busy = sampler.generate([*crowd, prompt(30)], [*others, wanted])[-1]
    assert [c.token_ids for c in alone] == [c.token_ids for c in busy]
    assert alone[0].token_ids != alone[1].token_ids
    # Sequence i of a request draws with seed + i.
    shifted = sampler.generate([prompt(30)], [SamplingParams(max_tokens=20, seed=12)])[0]
    assert shifted[0].token_ids == alone[1].token_ids


def test_deterministic_is_bit_equal_whatever_else_runs(make_sampler) -> None:
    sampler = make_sampler(deterministic=True)
    wanted = SamplingParams(max_tokens=20, n=3, seed=5)
    alone = sampler.generate([prompt(30)], [wanted])
    crowd = [prompt(30)[:20] + prompt(10 + i) for i in range(6)]
    others = [SamplingParams(max_tokens=30, n=2, seed=i) for i in range(6)]
    first = sampler.generate([prompt(30), *crowd], [wanted, *others])
    last = sampler.generate([*crowd[::-1], prompt(30)], [*others[::-1], wanted])
    assert alone[0] == first[0] == last[-1]
    assert first[1:] == last[-2::-1]


def test_stop_string_across_tokens_cuts_the_text_and_keeps_the_tokens(make_sampler) -> None:
    sampler = make_sampler()
    options = {"max_tokens": 30, "seed": 2, "grammar": 'start: "one two three four"'}
    full = sampler.generate([prompt(8)], [SamplingParams(**options)])[0][0]
    assert (full.text, full.finish_reason) == ("one two three four", "stop")
    stopped = SamplingParams(**options, stop=("e t", "o th"))
    cut = sampler.generate([prompt(8)], [stopped])[0][0]
    assert (cut.text, cut.finish_reason) == ("on", "stop")
    assert sampler.vocabulary.text(cut.token_ids) == "one t"
    assert len(cut.logprobs) == 5


def test_end_of_sequence_and_ignore_eos(make_sampler, tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir, torch.float32, CPU)
    sampler = make_sampler(model)
    with torch.no_grad():  # scaled so that the end of sequence is near certain
        hidden = model.model(torch.tensor([prompt(8)])).last_hidden_state[0, -1]
        row = hidden / hidden.norm() * 20
    head = torch.cat([model.lm_head.weight[:258], row[None]])
    sampler.update_weights({"lm_head.weight": head}, version=1)
    greedy = {"temperature": 0.0, "max_tokens": 6}
    eos, no_eos = (
        sampler.generate([prompt(8)], [SamplingParams(**greedy, ignore_eos=ignored)])[0][0]
        for ignored in (False, True)
    )
    assert (eos.token_ids, eos.text, eos.finish_reason) == ([258], "", "stop")
    assert eos.logprobs[0] > -0.1
    assert (len(no_eos.token_ids), no_eos.token_ids[0]) == (6, 258)
    assert no_eos.finish_reason == "length"


def test_an_engine_error_reaches_everyone_and_the_sampler_goes_on(
    make_sampler, monkeypatch
) -> None:
    sampler = make_sampler(max_batch=2)
    step = sampler.decoder.step
    calls = iter(range(1000))

    def failing(tokens):
        if next(calls) == 2:
            raise MemoryError("no room")
        return step(tokens)

    monkeypatch.setattr(sampler.decoder, "step", failing)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with pytest.raises(RunFailed, match="no room") as caught:
        sampler.generate([prompt(5 + i) for i in range(6)], [params] * 6)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert len(sampler.generate([prompt(5)], [params])[0][0].token_ids) == 8


def adapter(model, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, module in model.named_modules():
        if name.endswith(("_proj", "query_key_value", "c_attn")):
            rows, columns = module.weight.shape
            if type(module).__name__ == "Conv1D":
                rows, columns = columns, rows
            state[f"lora.{name}.A"] = torch.randn(2, columns, generator=generator) * 0.3
            state[f"lora.{name}.B"] = torch.randn(rows, 2, generator=generator) * 0.3
    return state


def merged_reference(model, state):
    """The same model with scaling B A added to its weights, as LoRA defines it."""
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in merged.named_modules():
            if f"lora.{name}.A" in state:
                delta = 2.0 * state[f"lora.{name}.B"] @ state[f"lora.{name}.A"]
                module.weight += delta.T if type(module).__name__ == "Conv1D" else delta
    return merged


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_adapters_replace_each_other_without_drift(make_sampler, tiny_model_dir, name) -> None:
    llama = name == "llama"
    model = load_model(tiny_model_dir, torch.float32, CPU) if llama else architecture(name)
    pristine = copy.deepcopy(model)
    sampler = make_sampler(model, lora=SPEC)
    params = SamplingParams(max_tokens=20, seed=4)
    untouched = sampler.generate([prompt(30)], [params])
    state = adapter(pristine, 9)
    for version in range(1, 4):
        sampler.update_weights(adapter(pristine, version), version)
    sampler.update_weights(state, 4)
    changed = sampler.generate([prompt(30)], [params])[0][0]
    assert worst_difference(merged_reference(pristine, state), prompt(30), changed) < 2e-5
    assert worst_difference(pristine, prompt(30), changed) > 0.01
    nothing = {key: torch.zeros_like(value) for key, value in state.items()}
    sampler.update_weights(nothing, 5)
    assert sampler.generate([prompt(30)], [params]) == untouched
    assert sampler.version == 5


def test_samplers_of_one_process_take_turns(make_sampler) -> None:
    one, other = make_sampler(), make_sampler()

    async def race() -> bool:
        asked = [
            asyncio.ensure_future(sampler.submit(prompt(8), SamplingParams(count, ignore_eos=True)))
            for sampler, count in ((one, 200), (other, 2))
        ]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*asked)
        return asked[1] in done

    assert asyncio.run(race())


def test_an_update_waits_for_earlier_requests_and_precedes_later_ones(make_sampler, model) -> None:
    sampler = make_sampler(max_batch=2, lora=SPEC)
    state = adapter(model, 1)
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)

    async def scenario():
        earlier = [asyncio.ensure_future(sampler.submit(prompt(20 + i), params)) for i in range(5)]
        await asyncio.sleep(0)  # they are in line
        sampler.update_weights(state, 1)
        later = await sampler.submit(prompt(20), params)
        return [(await task)[0] for task in earlier], later[0]

    earlier, later = asyncio.run(scenario())
    for i, completion in enumerate(earlier):
        assert worst_difference(model, prompt(20 + i), completion) < 2e-5
    assert worst_difference(merged_reference(model, state), prompt(20), later) < 2e-5


UP = "lora.model.layers.0.mlp.up_proj"


def test_an_update_that_does_not_fit_changes_nothing(make_sampler) -> None:
    sampler = make_sampler(lora=SPEC, deterministic=True)
    params = SamplingParams(max_tokens=10, seed=4)
    before = sampler.generate([prompt(30)], [params])
    for state, word in (
        ({f"{UP}.A": torch.zeros(2, 64)}, "up_proj"),
        ({f"{UP}.A": torch.zeros(2, 63), f"{UP}.B": torch.zeros(128, 2)}, r"\(2, 64\)"),
        ({"model.norm.weight": torch.zeros(64), "norm": torch.zeros(3)}, "no such parameter"),
    ):
        with pytest.raises(BadInput, match=word):
            sampler.update_weights(state, 1)
    assert sampler.version == 0
    assert sampler.generate([prompt(30)], [params]) == before


def test_closing_fails_what_is_waiting_and_what_comes_later(make_sampler) -> None:
    sampler = make_sampler(max_batch=1)
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    async def ask():
        asked = [asyncio.ensure_future(sampler.submit(prompt(5, i), params)) for i in range(4)]
        await asyncio.sleep(0)
        await asyncio.to_thread(sampler.close)
        return await asyncio.gather(*asked, return_exceptions=True)

    assert isinstance(asyncio.run(ask())[-1], RunFailed)
    with pytest.raises(RunFailed):
        sampler.generate([prompt(5)], [params])


def test_a_cancelled_request_gives_its_place_to_the_next(make_sampler) -> None:
    sampler = make_sampler(max_batch=1)
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    async def ask():
        left = [asyncio.ensure_future(sampler.submit(prompt(5, i), params)) for i in range(20)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        return await sampler.submit(prompt(6), SamplingParams(max_tokens=3, ignore_eos=True))

    assert len(asyncio.run(ask())[0].token_ids) == 3
    assert sampler.stats()["generated_tokens"] < 20 * 200
