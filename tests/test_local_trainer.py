"""The local trainer: its update by hand-checked numbers, its adapters, exports and checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from aflow_tune.engines.local.checkpoint import (
    CheckpointError,
    read_checkpoint,
    verify_checkpoint,
    write_atomically,
    write_checkpoint,
)
from aflow_tune.engines.local.lora import (
    FusedLoraLinear,
    adapter_layers,
    adapter_state,
    inject,
    load_adapter_state,
)
from aflow_tune.engines.local.models import load_model, load_tokenizer
from aflow_tune.engines.local.sampler import Completion, Sampler, SamplingParams
from aflow_tune.engines.local.trainer import (
    LocalTrainer,
    LossBatch,
    Sample,
    Schedule,
    TrainerSettings,
)
from aflow_tune.engines.local.weights import LoraSpec

QUARTER = 0.5 * (1 + math.cos(math.pi / 4))


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


def test_sampler_and_trainer_give_the_same_log_probabilities(tiny_model_dir: Path) -> None:
    """Before and after an update of the adapter reached the sampler, at temperature 0.8."""
    trainer = make(tiny_model_dir, temperature=0.8)
    model = load_model(tiny_model_dir, torch.float32, torch.device("cpu"))
    tokenizer = load_tokenizer(tiny_model_dir)
    sampler = Sampler(model, tokenizer, max_model_len=128, lora=LoraSpec(4, 8.0))
    params = SamplingParams(max_tokens=20, n=3, temperature=0.8, seed=1)
    prompts = [list(range(10, 30)), list(range(40, 45))]

    def scored(prompt: list[int], completion: Completion, advantage: float) -> Sample:
        count = len(completion.token_ids)
        return Sample(
            torch.tensor(prompt + completion.token_ids),
            len(prompt),
            torch.ones(count, dtype=torch.bool),
            torch.tensor(completion.logprobs),
            {"advantages": torch.full((count,), advantage)},
        )

    try:
        for version in (1, 2):
            drawn = sampler.generate(prompts, [params] * 2)
            groups = [
                [scored(prompt, it, float(i - 1)) for i, it in enumerate(completions)]
                for prompt, completions in zip(prompts, drawn, strict=True)
            ]
            samples = [sample for group in groups for sample in group]
            for sample, ours in zip(samples, trainer.logprobs(samples), strict=True):
                assert sample.logprobs_R is not None
                assert torch.allclose(ours, sample.logprobs_R, atol=1e-4, rtol=0)
            trainer.step(groups, PolicyGradient())
            sampler.update_weights(trainer.weights(), version)
    finally:
        sampler.close()


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (Schedule("constant", 1.0, warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1]),
        (Schedule("constant"), [1, 1]),
        # After the warm-up p = 0, 1/4, 2/4, 3/4, 1: 0.2 + 0.8 (1 - p).
        (Schedule("linear", 2.0, 2, 6, floor=0.2), [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (Schedule("cosine", 1.0, 0, 4), [1.0, QUARTER, 0.5, 1 - QUARTER, 0.0]),
        (Schedule("cosine", 1.0, 0, 4, floor=0.1), [1.0, 0.1 + 0.9 * QUARTER, 0.55]),
    ],
)
def test_schedules(schedule: Schedule, factors: list[float]) -> None:
    found = [schedule.factor(i) for i in range(len(factors))]
    assert found == pytest.approx(factors)
    assert schedule.rate(1) == pytest.approx(schedule.peak * factors[1])


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


def own_logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=sample.tokens_T[None]).logits[0, sample.prompt_length - 1 : -1]
    targets = sample.tokens_T[sample.prompt_length :, None]
    return logits.log_softmax(-1).gather(1, targets)[:, 0]


@pytest.mark.parametrize("lora", [LoraSpec(4, 8.0), None])
def test_exports(tiny_model_dir: Path, tmp_path: Path, lora: LoraSpec | None) -> None:
    trainer = make(tiny_model_dir, lora=lora)
    groups = batch(trainer)
    for _ in range(2):
        trainer.step(groups, PolicyGradient())
    sample = groups[0][2]
    expected = trainer.logprobs([sample])[0]
    trainer.export_merged(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    assert not torch.allclose(own_logprobs(base, sample), expected, atol=1e-2)
    exported = {"merged": AutoModelForCausalLM.from_pretrained(tmp_path / "merged")}
    if lora is not None:
        trainer.export_peft(tmp_path / "adapter")
        exported["adapter"] = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert (config["base_model_name_or_path"], config["r"]) == (str(tiny_model_dir), 4)
    for folder, model in exported.items():
        assert torch.allclose(own_logprobs(model, sample), expected, atol=1e-4)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        assert rendered.startswith("<|im_start|>user")
    # Exporting changes nothing in the trainer.
    assert torch.equal(trainer.logprobs([sample])[0], expected)


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(LoraSpec(4, 8.0), torch.float32), (None, torch.float32), (None, torch.bfloat16)],
)
def test_a_loaded_trainer_continues_bit_for_bit(
    lora: LoraSpec | None, dtype: torch.dtype, tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = {"lora": lora, "dtype": dtype, "schedule": Schedule("cosine", 1e-2, 1, 6)}
    straight = make(tiny_model_dir, **settings)
    groups = batch(straight)
    for _ in range(2):
        straight.step(groups, PolicyGradient())
    straight.save(tmp_path / "step_2")
    drawn = torch.rand(3)

    resumed = make(tiny_model_dir, **settings)
    resumed.load(tmp_path / "step_2")
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.step_count == 2
    assert same(straight, resumed)
    for _ in range(2):
        first = straight.step(groups, PolicyGradient())
        second = resumed.step(groups, PolicyGradient())
        assert first["actor/lr"] == second["actor/lr"]
        assert first["actor/grad_norm"] == second["actor/grad_norm"]
    assert same(straight, resumed)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target = tmp_path / "point"
    tensors = {"weights": {"w": torch.arange(6.0).view(2, 3)}, "rng": {"cpu": torch.ones(4)}}
    write_checkpoint(target, tensors, {"step": 3})
    return target


@pytest.mark.parametrize(
    ("file", "damage", "word"),
    [
        ("weights.safetensors", lambda it: it[:-1] + bytes([it[-1] ^ 1]), "SHA-256"),
        ("weights.safetensors", lambda it: it[:-4], "bytes, expected"),
        ("weights.safetensors", None, "missing"),
        ("manifest.json", lambda _: b"{", "unreadable"),
        ("manifest.json", lambda _: b'{"format": 99, "files": {}}', "format 99"),
        ("manifest.json", None, "not a checkpoint"),
    ],
)
def test_every_kind_of_damage_is_named(saved: Path, file: str, damage, word: str) -> None:
    verify_checkpoint(saved)
    if damage is None:
        (saved / file).unlink()
    else:
        (saved / file).write_bytes(damage((saved / file).read_bytes()))
    with pytest.raises(CheckpointError, match=word):
        verify_checkpoint(saved)


def test_weights_of_another_model_are_refused(saved: Path) -> None:
    for expected, word in (
        ({"v": torch.zeros(2, 3)}, "'v'"),
        ({"w": torch.zeros(3, 3)}, r"\(3, 3\)"),
    ):
        with pytest.raises(CheckpointError, match=word):
            read_checkpoint(saved, expected_weights=expected)


def test_a_failed_write_leaves_what_was_there(saved: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "weights.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    for target in (saved, saved.parent / "new"):
        with pytest.raises(KeyboardInterrupt):
            write_atomically(target, half)
    assert read_checkpoint(saved)[1] == {"step": 3}
    assert [path.name for path in saved.parent.iterdir()] == ["point"]
