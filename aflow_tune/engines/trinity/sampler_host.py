"""One sampler with its server, built from Trinity's model configuration.

Used by the Ray actor and by the inline run, so that both sample from the same object in the
same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from trinity.common.config import InferenceModelConfig
from trinity.common.models.model import ModelWrapper

from aflow_tune.engines.local.lora import LoraSpec
from aflow_tune.engines.local.models import (
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    resolve_model,
)
from aflow_tune.engines.local.sampler import Sampler
from aflow_tune.engines.local.server import SamplerServer

if TYPE_CHECKING:
    from aflow_tune.engines.trinity.config import AflowConfig


@dataclass
class SamplerHost:
    """A running sampler and the loopback server in front of it."""

    sampler: Sampler
    server: SamplerServer
    tokenizer: Any
    url: str

    @classmethod
    def from_model_config(cls, config: InferenceModelConfig) -> SamplerHost:
        """Load the model named by `config.model_path` and serve it on loopback.

        Our own settings (`local.*`, the LoRA shape) travel in `config.extra_engine_args`,
        Trinity's place for engine-specific arguments.
        """
        engine = config.extra_engine_args
        device = pick_device(engine["device"])
        path = resolve_model(config.model_path)
        if engine["threads"]:
            torch.set_num_threads(engine["threads"])
        tokenizer = load_tokenizer(path)
        if config.chat_template:
            tokenizer.chat_template = config.chat_template
        sampler = Sampler(
            load_model(path, pick_dtype(engine["dtype"], device), device),
            tokenizer,
            max_batch=engine["max_batch"],
            max_model_len=config.max_model_len,
            threads=engine["threads"],
            deterministic=engine["deterministic"],
            lora=LoraSpec(**engine["lora"]) if engine["lora"] else None,
        )
        server = SamplerServer(
            sampler,
            tokenizer,
            config.model_path,
            tool_call_parser=config.tool_call_parser or "hermes",
            frozen=engine["frozen"],
        )
        return cls(sampler, server, tokenizer, server.start())

    def close(self) -> None:
        """Stop the server, then the sampler."""
        self.server.stop()
        self.sampler.close()


class InlineModel(ModelWrapper):
    """Trinity's model wrapper over a sampler of the same process."""

    def __init__(self, host: SamplerHost, config: InferenceModelConfig) -> None:
        super().__init__(models=[host], config=config, api_address=host.url)
        self._host = host

    @property
    def model_version(self) -> int:
        return self._host.sampler.version

    @property
    async def model_version_async(self) -> int:
        return self._host.sampler.version


def give_engine_settings(config: AflowConfig) -> None:
    """Put what `SamplerHost` asks for into the configuration's models."""
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


def sampling_speed(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Tokens drawn per second of the sampler's work between two readings of its totals."""
    seconds = after["busy_seconds"] - before["busy_seconds"]
    if seconds <= 0:
        return {}
    tokens = after["generated_tokens"] - before["generated_tokens"]
    return {"rollout/tokens_per_second": tokens / seconds}
