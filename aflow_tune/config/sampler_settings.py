"""What a sampler is told, and what its totals say; without loading one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig


def give_engine_settings(config: AflowConfig) -> None:
    """Put what `rollout_model.SamplerHost` asks for into the configuration's models."""
    engine: dict[str, Any] = {
        "device": config.local.device,
        "dtype": "float32" if config.deterministic else config.local.dtype,
        "threads": config.local.threads,
        "max_batch": config.local.max_batch,
        "deterministic": config.deterministic,
        "lora": None,
        "frozen": True,
    }
    for auxiliary in config.explorer.auxiliary_models:
        auxiliary.extra_engine_args = dict(engine)
    lora = config.model.lora_configs[0] if config.model.lora_configs else None
    if lora is not None:
        engine["lora"] = {
            "rank": lora.lora_rank,
            "alpha": lora.lora_alpha,
            "target_modules": lora.target_modules,
        }
    engine["frozen"] = False
    config.explorer.rollout_model.extra_engine_args = engine


def computes_in_16_bits(config: AflowConfig) -> bool:
    """Whether sampler and trainer of the local engine compute in bf16 or fp16."""
    import torch

    from aflow_tune.engines.local.models import pick_device, pick_dtype

    local = config.local
    chosen = pick_dtype(local.dtype, pick_device(local.device))
    return not config.deterministic and chosen != torch.float32


def sampling_speed(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Tokens drawn per second of the sampler's work between two readings of its totals."""
    seconds = after["busy_seconds"] - before["busy_seconds"]
    if seconds <= 0:
        return {}
    tokens = after["generated_tokens"] - before["generated_tokens"]
    return {"rollout/tokens_per_second": tokens / seconds}
