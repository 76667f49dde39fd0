"""A base in 4 or 8 bits: formats by hand, sampler against trainer, training, export, refusals."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from project import run_dir, write_project
from test_local_trainer import PolicyGradient, batch, same
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from aflow_tune.config.validate import validate
from aflow_tune.engines.local.decoder import Decoder, GenericDecoder, make_decoder
from aflow_tune.engines.local.llama import LlamaDecoder
from aflow_tune.engines.local.models import load_model
from aflow_tune.engines.local.quantised import QuantisedLinear, obstacles, quantised_layers
from aflow_tune.engines.local.trainer import LocalTrainer, Sample, Schedule, TrainerSettings
from aflow_tune.engines.local.weights import LoraSpec
from aflow_tune.errors import BadInput
from aflow_tune.estimate.local import quantised_bytes
from aflow_tune.estimate.shapes import shape_of
from aflow_tune.tuning import run_config

pytest.importorskip("bitsandbytes", reason="needs the extra: pip install 'aflow-tune[quantised]'")

CPU = torch.device("cpu")
KINDS = ("4bit", "8bit")
LORA = LoraSpec(4, 8.0)


def make(folder: Path, load_in: str | None, lora: LoraSpec | None = LORA) -> LocalTrainer:
    settings = TrainerSettings(
        lora=lora, schedule=Schedule(peak=1e-2), micro_batch_tokens=60, load_in=load_in
    )
    return LocalTrainer(folder, settings)


def held(trainer: LocalTrainer) -> dict[str, Tensor]:
    """Copies of everything that is held and not trained."""
    every = {**dict(trainer.base.named_parameters()), **dict(trainer.base.named_buffers())}
    return {name: it.detach().clone() for name, it in every.items() if "lora_" not in name}


@torch.inference_mode()
def drawn(decoder: Decoder, tokens: list[int]) -> list[float]:
    """Log-probabilities of tokens 20 and 21 as drawing computes them: after a prompt, a step."""
    decoder.reset()
    logits = [decoder.add([tokens[:20]]), decoder.step(torch.tensor([tokens[20]]))]
    return [float(it.log_softmax(-1)[0, tokens[20 + i]]) for i, it in enumerate(logits)]


def test_formats_by_hand() -> None:
    """NF4 knows 16 values between -1 and 1, among them 0, 0.0796, 0.1609, -0.5251 and 1, of the
    largest of 64 weights (arXiv:2305.14314, appendix E); int8 127 steps of the largest of a row."""
    linear = nn.Linear(64, 2)
    row = torch.zeros(64)
    row[:5] = torch.tensor([2.0, 0.1, 0.3, -1.2, 0.06])
    linear.weight.data = torch.stack([row, row / 4])
    nf4 = QuantisedLinear(linear, "4bit", CPU)
    near = torch.tensor([2.0, 0.159161, 0.321860, -1.050146, 0.0])
    assert torch.allclose(nf4.weight[:, :5], torch.stack([near, near / 4]), atol=1e-5)
    assert nf4.held_bytes() == 2 * 64 // 2 + 2 * 4

    row[0] = 127 / 64
    linear.weight.data = torch.stack([row, row / 4])
    int8 = QuantisedLinear(linear, "8bit", CPU)
    near = torch.tensor([127.0, 6, 19, -77, 4]) / 64
    assert torch.allclose(int8.weight[:, :5], torch.stack([near, near / 4]), atol=1e-6)
    assert int8.held_bytes() == 2 * 64 + 2 * 4
    x = torch.randn(3, 64, requires_grad=True)
    int8(x).square().sum().backward()
    y = x.detach() @ int8.weight.T + linear.bias
    assert x.grad is not None
    assert torch.allclose(x.grad, 2 * y @ int8.weight, atol=1e-5)


def test_the_layers_are_quantised_and_nothing_else(tiny_model_dir: Path) -> None:
    plain = load_model(tiny_model_dir, torch.bfloat16, CPU)
    for kind in KINDS:
        model = load_model(tiny_model_dir, torch.bfloat16, CPU, kind)
        layers = dict(quantised_layers(model))
        wanted = {n for n, m in plain.model.named_modules(prefix="model") if type(m) is nn.Linear}
        assert layers.keys() == wanted
        assert len(wanted) == 2 * 7
        kept = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, kept[name]), name
        # What an estimate counts: these, and one weight while a product is made of it.
        rest = sum(parameter.numel() for parameter in model.parameters())
        together = sum(layer.held_bytes() for layer in layers.values()) + 2 * (rest + 64 * 128)
        assert quantised_bytes(shape_of(plain.config), 2, kind) == together
        assert isinstance(make_decoder(model), LlamaDecoder)


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_and_trainer_give_the_same_log_probabilities(
    tiny_model_dir: Path, kind: str
) -> None:
    """By both decoders, before and after an update; an unquantised model gives others."""
    trainer = make(tiny_model_dir, kind)
    models = [load_model(tiny_model_dir, torch.float32, CPU, kind) for _ in range(2)]
    decoders: list[Decoder] = [LlamaDecoder(models[0]), GenericDecoder(models[1])]
    tokens = [(7 * i * i + 3) % 256 for i in range(40)]
    sample = Sample(torch.tensor(tokens), 1, torch.ones(39, dtype=torch.bool))
    found = []
    for _ in range(2):
        (expected,) = trainer.logprobs([sample])
        for decoder in decoders:
            assert torch.allclose(torch.tensor(decoder.score(tokens, 1.0)), expected, atol=1e-4)
            assert drawn(decoder, tokens) == pytest.approx(expected[19:21].tolist(), abs=1e-4)
        found.append(expected)
        trainer.step(batch(trainer), PolicyGradient())
        for decoder in decoders:
            decoder.load(trainer.weights(), LORA)
    (plain,) = make(tiny_model_dir, None).logprobs([sample])
    assert (found[0] - plain).abs().mean() > (0.05 if kind == "4bit" else 1e-3)
    assert (found[0] - found[1]).abs().mean() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_rounded_model_and_trains_the_adapter_only(
    tmp_path: Path, tiny_model_dir: Path, kind: str
) -> None:
    trainer = make(tiny_model_dir, kind)
    rounded = LlamaForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    for path, layer in quantised_layers(load_model(tiny_model_dir, torch.float32, CPU, kind)):
        rounded.get_submodule(path).weight.data = layer.weight
    rounded.save_pretrained(tmp_path / "rounded")
    reference = make(tmp_path / "rounded", None)
    before, adapter = held(trainer), trainer.weights()
    ours = trainer.step(batch(trainer), PolicyGradient())
    theirs = reference.step(batch(reference), PolicyGradient())
    for name in ("actor/final_loss", "actor/grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6)
    after = held(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    changed = [name for name, it in trainer.weights().items() if not torch.equal(it, adapter[name])]
    assert len(changed) == 2 * 14
    for name in trainer._masters:
        moments = [it.optimizer.state[it._masters[name]]["exp_avg"] for it in (trainer, reference)]
        assert torch.allclose(*moments, atol=1e-7, rtol=1e-3), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_bit_equal(tmp_path: Path, tiny_model_dir: Path, kind: str) -> None:
    straight = make(tiny_model_dir, kind)
    groups = batch(straight)
    straight.step(groups, PolicyGradient())
    straight.save(tmp_path / "step")
    straight.step(groups, PolicyGradient())
    resumed = make(tiny_model_dir, kind)
    resumed.load(tmp_path / "step")
    resumed.step(groups, PolicyGradient())
    assert same(straight, resumed)


def test_the_export_is_the_unquantised_base_and_the_adapter(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    trainer = make(tiny_model_dir, "4bit")
    for _ in range(2):
        trainer.step(batch(trainer), PolicyGradient())
    trainer.export_merged(tmp_path / "merged")
    trainer.export_peft(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    state = trainer.weights()
    for name, weight in base.state_dict().items():
        A, B = (state.get(f"lora.{name.removesuffix('.weight')}.{it}") for it in "AB")
        expected = weight if A is None or B is None else weight + LORA.scaling * (B @ A)
        assert torch.equal(merged[name], expected), name
    ids = torch.arange(30)[None]
    by_peft = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
    by_merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    assert torch.allclose(by_peft, by_merged, atol=1e-4)


@pytest.mark.slow
def test_a_run_learns_on_four_bits(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Rollouts, updates, sync check, an evaluation with the same weights, and the export."""
    config = write_project(tmp_path, tiny_model_dir)
    assert run_config(config, ["local.load_in=4bit"], inline=True).steps_done == 2
    logged = [json.loads(line) for line in (run_dir(tmp_path) / "metrics.jsonl").open()]
    mismatch = [
        it["metrics"]["rollout/mismatch"] for it in logged if "rollout/mismatch" in it["metrics"]
    ]
    assert len(mismatch) >= 2
    assert max(mismatch) < 1e-4
    merged = AutoModelForCausalLM.from_pretrained(run_dir(tmp_path) / "export" / "merged")
    assert not list(quantised_layers(merged))
    with pytest.raises(BadInput) as caught:
        run_config(config, ["local.load_in=8bit", "buffer.total_steps=3"], inline=True)
    assert [fault.where for fault in caught.value.faults] == ["local.load_in"]


def test_what_cannot_be_quantised_is_refused(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_project(tmp_path, tiny_model_dir)

    def refused(*overrides: str) -> tuple[str, str]:
        (fault,) = validate(config, list(overrides)).faults
        assert "local.load_in" in fault.where
        return fault.expected, fault.found

    asked = "local.load_in=4bit"
    report = validate(config, [asked])
    assert not report.faults
    assert report.engine is not None
    assert report.engine[0] == "local"
    assert "4bit, 8bit" in refused("local.load_in=3bit")[0]
    assert "cannot be trained" in refused(asked, "model.lora_configs=null")[0]
    assert not validate(config, [asked, "model.lora_configs=null", "mode=bench"]).faults
    on_verl = ("engine=trinity", "inline=false", "cluster.ray_address=10.0.0.1:6379")
    assert "verl 0.8 has no quantised trainer" in refused(asked, *on_verl)[0]
    with pytest.raises(BadInput, match="cannot be trained themselves"):
        make(tiny_model_dir, "4bit", lora=None)

    assert [found for _, found, _ in obstacles("mps")] == ["mps, on which it was never tried"]
    with monkeypatch.context() as on_old:
        on_old.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert "AVX2" in refused(asked)[0]
        assert not list(obstacles("cuda"))
    there = importlib.util.find_spec
    with monkeypatch.context() as without:
        without.setattr(
            importlib.util,
            "find_spec",
            lambda name, *a: None if name[:4] == "bits" else there(name, *a),
        )
        assert "bitsandbytes" in refused(asked)[0]
        with pytest.raises(BadInput, match=r"aflow-tune\[quantised\]"):
            load_model(tiny_model_dir, torch.float32, CPU, "4bit")
