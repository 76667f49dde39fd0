"""The trainer's update: hand-checked numbers, invariance, determinism, bad gradients."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from aflow_tune.engines.local.models import load_model, load_tokenizer
from aflow_tune.engines.local.sampler import Sampler, SamplingParams
from aflow_tune.engines.local.trainer import (
    LocalTrainer,
    LossBatch,
    Sample,
    Schedule,
    TrainerSettings,
)
from aflow_tune.engines.local.weights import LoraSpec


class PolicyGradient:
    """-mean over tokens of advantage * ratio, the on-policy GRPO loss without clipping."""

    needs_entropy = False
    per_group = False

    def __call__(self, batch: LossBatch) -> tuple[Tensor, dict[str, float]]:
        assert batch.old_logprobs_BR is not None
        ratio = (batch.logprobs_BR - batch.old_logprobs_BR).exp()
        mask = batch.action_mask_BR
        loss = -(ratio * batch.extra["advantages"] * mask).sum() / mask.sum()
        return loss, {"actor/pg_loss": float(loss.detach())}


class Poisoned(PolicyGradient):
    def __call__(self, batch: LossBatch) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = super().__call__(batch)
        return loss * float("nan"), metrics


def make(folder: Path, rate: float = 1e-2, **settings: object) -> LocalTrainer:
    options: dict[str, object] = {
        "lora": LoraSpec(4, 8.0),
        "schedule": Schedule(peak=rate),
        "micro_batch_tokens": 60,
    }
    return LocalTrainer(folder, TrainerSettings(**(options | settings)))  # type: ignore[arg-type]


def batch(trainer: LocalTrainer) -> list[list[Sample]]:
    generator = torch.Generator().manual_seed(5)
    groups = []
    for _ in range(2):
        prompt = torch.randint(0, 256, (10,), generator=generator)
        groups.append(
            [
                Sample(
                    torch.cat([prompt, torch.randint(0, 256, (n,), generator=generator)]),
                    10,
                    torch.ones(n, dtype=torch.bool),
                    extra={"advantages": torch.full((n,), advantage)},
                )
                for n, advantage in ((4, 1.0), (7, -1.0), (12, 0.5))
            ]
        )
    samples = [sample for group in groups for sample in group]
    for sample, logprobs in zip(samples, trainer.logprobs(samples), strict=True):
        sample.logprobs_R = logprobs
    return groups


def same(first: LocalTrainer, second: LocalTrainer) -> bool:
    a, b = first.weights(), second.weights()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_one_full_weight_step_equals_torch_by_hand(tiny_model_dir: Path) -> None:
    """AdamW on the plain model's own loss, clipped, against one step of the trainer."""
    trainer = make(tiny_model_dir, lora=None, grad_clip=0.05)
    groups = batch(trainer)
    metrics = trainer.step(groups, PolicyGradient())

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    total, count = torch.zeros(()), 0
    for sample in (sample for group in groups for sample in group):
        logits = model(input_ids=sample.tokens_T[None]).logits[0, 9:-1]
        logprobs = logits.log_softmax(-1).gather(1, sample.tokens_T[10:, None])[:, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        total = total - (ratio * sample.extra["advantages"]).sum()
        count += len(logprobs)
    loss = total / count
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert metrics["actor/final_loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    expected = {name: param.grad for name, param in model.named_parameters()}
    # Adam's first moment after one step is (1 - beta1) times the clipped gradient.
    for name, master in trainer._masters.items():
        moment = trainer.optimizer.state[master]["exp_avg"]
        assert torch.allclose(moment, 0.1 * expected[name], atol=1e-7, rtol=1e-3), name


def test_equal_seeds_give_equal_bits(tiny_model_dir: Path) -> None:
    first, second, other = (make(tiny_model_dir, seed=seed) for seed in (0, 0, 1))
    groups = batch(first)
    for trainer in (first, second, other):
        for _ in range(2):
            trainer.step(groups, PolicyGradient())
    assert same(first, second)
    assert not same(first, other)


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model_dir: Path) -> None:
    trainer, untouched = make(tiny_model_dir), make(tiny_model_dir)
    groups = batch(trainer)
    metrics = trainer.step(groups, Poisoned())
    assert same(trainer, untouched)
    assert metrics["actor/skipped_steps"] == 1.0
    assert trainer.step_count == 1
    trainer.step(groups, PolicyGradient())
    assert trainer.skipped_steps == 1
    assert not same(trainer, untouched)
    assert all(torch.isfinite(tensor).all() for tensor in trainer.weights().values())


@pytest.mark.parametrize("lora", [LoraSpec(4, 8.0), None])
def test_the_reference_stays_frozen(tiny_model_dir: Path, lora: LoraSpec | None) -> None:
    trainer = make(tiny_model_dir, lora=lora)
    groups = batch(trainer)
    samples = [sample for group in groups for sample in group]
    start = trainer.logprobs(samples)
    for _ in range(2):
        trainer.step(groups, PolicyGradient())
    reference = trainer.logprobs(samples, reference=True)
    now = trainer.logprobs(samples)
    assert all(torch.equal(a, b) for a, b in zip(start, reference, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(start, now, strict=True))


def test_a_bf16_full_weight_run_keeps_small_updates(tiny_model_dir: Path) -> None:
    """1e-5 a step is below half a bf16 ulp of most weights; the fp32 masters add it up."""
    trainer = make(tiny_model_dir, rate=1e-5, lora=None, dtype=torch.bfloat16)
    groups = batch(trainer)
    start = {name: master.clone() for name, master in trainer._masters.items()}
    for _ in range(3):
        trainer.step(groups, PolicyGradient())
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (trainer._masters[name] - start[name]).abs()
    assert float(moved.median()) > 5e-6
    weights = dict(trainer.base.named_parameters())
    assert weights[name].dtype == torch.bfloat16
    assert torch.equal(weights[name], trainer._masters[name].bfloat16())


def test_an_empty_batch_is_refused_and_a_silent_one_is_not(tiny_model_dir: Path) -> None:
    trainer = make(tiny_model_dir)
    with pytest.raises(ValueError, match="without samples"):
        trainer.step([], PolicyGradient())
    groups = batch(trainer)
    for sample in (sample for group in groups for sample in group):
        sample.action_mask_R = torch.zeros_like(sample.action_mask_R)
    before = trainer.weights()
    assert trainer.step(groups, PolicyGradient())["actor/grad_norm"] == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.weights().items())


def test_sampler_and_trainer_give_the_same_log_probabilities(tiny_model_dir: Path) -> None:
    """Before and after an update of the adapter reached the sampler, at temperature 0.8."""
    trainer = make(tiny_model_dir, temperature=0.8)
    sampler = Sampler(
        load_model(tiny_model_dir, torch.float32, torch.device("cpu")),
        load_tokenizer(tiny_model_dir),
        max_model_len=128,
        lora=LoraSpec(4, 8.0),
    )
    params = SamplingParams(max_tokens=20, n=3, temperature=0.8, seed=1)
    prompts = [list(range(10, 30)), list(range(40, 45))]
    try:
        for version in (1, 2):
            groups = []
            for prompt, completions in zip(
                prompts, sampler.generate(prompts, [params] * 2), strict=True
            ):
                groups.append(
                    [
                        Sample(
                            torch.tensor(prompt + completion.token_ids),
                            len(prompt),
                            torch.ones(len(completion.token_ids), dtype=torch.bool),
                            torch.tensor(completion.logprobs),
                            {"advantages": torch.full((len(completion.token_ids),), float(i - 1))},
                        )
                        for i, completion in enumerate(completions)
                    ]
                )
            samples = [sample for group in groups for sample in group]
            for sample, ours in zip(samples, trainer.logprobs(samples), strict=True):
                assert sample.logprobs_R is not None
                assert torch.allclose(ours, sample.logprobs_R, atol=1e-4, rtol=0)
            trainer.step(groups, PolicyGradient())
            sampler.update_weights(trainer.weights(), version)
    finally:
        sampler.close()


def factors(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.factor(i) for i in range(steps)]


def test_constant_with_warmup() -> None:
    assert factors(Schedule("constant", 1.0, warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Schedule("constant"), 2) == [1, 1]


def test_linear_falls_to_its_floor() -> None:
    schedule = Schedule("linear", 2.0, warmup_steps=2, total_steps=6, floor=0.2)
    # After the warm-up p = 0, 1/4, 2/4, 3/4, 1: 0.2 + 0.8 (1 - p).
    assert factors(schedule, 7) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert schedule.factor(100) == pytest.approx(0.2)
    assert schedule.rate(3) == pytest.approx(1.6)


def test_cosine_is_half_way_in_the_middle() -> None:
    schedule = Schedule("cosine", 1.0, total_steps=4)
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert factors(schedule, 5) == pytest.approx([1.0, quarter, 0.5, 1 - quarter, 0.0])
    floored = Schedule("cosine", 1.0, total_steps=4, floor=0.1)
    assert floored.factor(2) == pytest.approx(0.1 + 0.9 * 0.5)
