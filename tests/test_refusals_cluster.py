"""What `engine: trinity` refuses: quantised loading a backend cannot do, two roles on one GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import NO_WEIGHTS

from aflow_tune.config.validate import ValidationReport, validate
from aflow_tune.errors import Fault

ROOT = Path(__file__).parents[1]
CLUSTER = "cluster.ray_address=10.0.0.1:6379"
NO_ADAPTER = "model.lora_configs=null"


def check(*overrides: str, recipe: str = "graph_qwen7b") -> ValidationReport:
    return validate(ROOT / "configs" / f"{recipe}.yaml", [CLUSTER, *overrides])


@pytest.mark.parametrize(
    "key",
    [
        "model.override_config.quantization_config",
        "model.load_in_4bit",
        "actor.fsdp_config.load_in_8bit",
    ],
)
def test_the_trainer_cannot_be_quantised(key: str) -> None:
    report = check(f"trainer.trainer_config.{key}=true")
    (fault,) = report.faults
    assert key.rpartition(".")[2] in fault.found
    assert "verl" in fault.expected
    assert "model_dtype: bfloat16" in fault.cure


def test_training_for_a_quantised_deployment_is_not_quantised_loading() -> None:
    assert not check("trainer.trainer_config.actor.fsdp_config.qat={enable: true}").faults


@pytest.mark.parametrize("kind", ["bitsandbytes", "fp8"])
def test_a_quantised_sampler_needs_a_base_that_stays(kind: str) -> None:
    asked = f"explorer.rollout_model.extra_engine_args={{quantization: {kind}}}"
    with_adapter = check(asked)
    assert not with_adapter.faults
    assert any(kind in warning and "probabilities" in warning for warning in with_adapter.warnings)
    (fault,) = check(asked, NO_ADAPTER).faults
    assert kind in fault.found
    assert "lora_configs" in fault.cure


def test_a_quantised_model_is_for_evaluation_only(tmp_path: Path) -> None:
    settings = {"quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes(NO_WEIGHTS)
    for name in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_text("{}")
    model = f"model.model_path={tmp_path}"
    (fault,) = check(model).faults
    assert "bitsandbytes" in fault.found
    assert not check(model, recipe="serve").faults


def test_an_auxiliary_model_has_to_be_whole_and_may_be_quantised(tmp_path: Path) -> None:
    auxiliary = f"explorer.auxiliary_models=[{{name: judge, model_path: {tmp_path}}}]"

    def refused() -> Fault:
        (fault,) = check(auxiliary, "cluster.gpu_per_node=3").faults
        assert "auxiliary_models" in fault.where
        return fault

    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    assert refused().expected == "weights (*.safetensors)"
    (tmp_path / "model.safetensors").write_bytes(NO_WEIGHTS[:-1])
    assert refused().expected == "whole files of weights"
    (tmp_path / "model.safetensors").write_bytes(NO_WEIGHTS)
    assert refused().expected == "a tokenizer"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "explorer.auxiliary_models.0.chat_template" in refused().cure
    (tmp_path / "chat_template.jinja").write_text("{}")
    assert not check(auxiliary, "cluster.gpu_per_node=3").faults


def test_both_roles_on_one_gpu_is_colocate() -> None:
    (fault,) = check("cluster.gpu_per_node=1").faults
    assert fault.cure == "mode: colocate"


@pytest.mark.parametrize(
    "asked",
    [
        "explorer.rollout_model.extra_engine_args={quantization: fp8}",
        "trainer.trainer_config={model: {load_in_4bit: true}}",
    ],
)
def test_the_local_engine_quantises_nothing(asked: str) -> None:
    report = validate(ROOT / "configs" / "quickstart.yaml", [asked, "engine=local"])
    (fault,) = report.faults
    assert "plain" in fault.expected
    assert fault.found in ("quantization: fp8", "load_in_4bit: True")
    assert not validate(ROOT / "configs" / "quickstart.yaml", ["engine=local"]).faults


def test_a_rank_that_vllm_has_no_room_for_is_refused() -> None:
    """It would end the run when the sampler starts."""
    (fault,) = check("model.lora_configs=[{lora_rank: 513}]").faults
    assert "lora_rank" in fault.where
    assert not check("model.lora_configs=[{lora_rank: 512}]").faults
