"""One sampler with its server, built from Trinity's model configuration.

Used by the Ray actor and by the inline run, so that both sample from the same object in the
same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from trinity.common.config import InferenceModelConfig
from trinity.common.models.model import ModelWrapper

from aflow_tune.engines.local.lora_spec import LoraSpec
from aflow_tune.engines.local.models import (
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    resolve_model,
)
from aflow_tune.engines.local.sampler import Sampler
from aflow_tune.engines.local.scripted import ScriptedSampler, ScriptedServer
from aflow_tune.engines.local.server import SamplerServer


@dataclass
class SamplerHost:
    """A running sampler and the server in front of it."""

    sampler: Sampler
    server: SamplerServer
    tokenizer: Any
    url: str

    @classmethod
    def from_model_config(
        cls, config: InferenceModelConfig, host: str = "127.0.0.1", api_key: str | None = None
    ) -> SamplerHost:
        """Load the model named by `config.model_path` and serve it on `host`.

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
        scripted = bool(engine.get("scripted"))  # a dry run
        make_sampler: type[Sampler] = ScriptedSampler if scripted else Sampler
        make_server: type[SamplerServer] = ScriptedServer if scripted else SamplerServer
        sampler = make_sampler(
            load_model(path, pick_dtype(engine["dtype"], device), device),
            tokenizer,
            max_batch=engine["max_batch"],
            max_model_len=config.max_model_len,
            threads=engine["threads"],
            deterministic=engine["deterministic"],
            lora=LoraSpec(**engine["lora"]) if engine["lora"] else None,
        )
        server = make_server(
            sampler,
            tokenizer,
            config.model_path,
            host=host,
            tool_call_parser=config.tool_call_parser or "hermes",
            frozen=engine["frozen"],
            api_key=api_key,
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
