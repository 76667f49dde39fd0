"""The local sampler with its OpenAI-compatible server, as a model for Trinity.

A run in one process uses a `SamplerHost` through `InlineModel`; a run on Ray through one actor per
model, `LocalRolloutModel`. Workflows call the server over HTTP: on loopback, or on the node's
address with a random API key if the Ray cluster has several nodes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from trinity.common.config import InferenceModelConfig
from trinity.common.constants import SyncMethod
from trinity.common.models.model import BaseInferenceModel, ModelWrapper

from aflow_tune.cluster.ray_for_run import spans_nodes
from aflow_tune.engines.local.compute import COMPUTE
from aflow_tune.engines.local.models import (
    load_model,
    load_tokenizer,
    pick_device,
    pick_dtype,
    resolve_model,
)
from aflow_tune.engines.local.sampler import Sampler
from aflow_tune.engines.local.weights import LoraSpec

if TYPE_CHECKING:
    from aflow_tune.engines.local.server import SamplerServer


@dataclass
class SamplerHost:
    sampler: Sampler
    server: SamplerServer
    tokenizer: Any
    url: str

    @classmethod
    def from_model_config(
        cls, config: InferenceModelConfig, host: str = "127.0.0.1", api_key: str | None = None
    ) -> SamplerHost:
        """Load the model named by `config.model_path` and serve it on `host`; our own settings
        (`local.*`, the LoRA shape) come in `config.extra_engine_args`."""
        # Imported here: every process that gets a handle of the actor imports this module.
        from aflow_tune.engines.local.scripted import ScriptedSampler, ScriptedServer
        from aflow_tune.engines.local.server import SamplerServer

        engine = config.extra_engine_args
        device = pick_device(engine["device"])
        path = resolve_model(config.model_path)
        tokenizer = load_tokenizer(path)
        if config.chat_template:
            tokenizer.chat_template = config.chat_template
        kinds: tuple[type[Sampler], type[SamplerServer]] = (Sampler, SamplerServer)
        if engine.get("scripted"):  # a dry run
            kinds = (ScriptedSampler, ScriptedServer)
        sampler = kinds[0](
            load_model(path, pick_dtype(engine["dtype"], device), device, engine["load_in"]),
            tokenizer,
            max_batch=engine["max_batch"],
            max_model_len=config.max_model_len,
            threads=engine["threads"],
            deterministic=engine["deterministic"],
            lora=LoraSpec(**engine["lora"]) if engine["lora"] else None,
            thread=ThreadPoolExecutor(1, "frozen") if engine["frozen"] else COMPUTE,
        )
        server = kinds[1](
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
        self.server.stop()
        self.sampler.close()


class InlineModel(ModelWrapper):
    """Trinity's model wrapper over a sampler in the same process."""

    def __init__(self, host: SamplerHost, config: InferenceModelConfig) -> None:
        super().__init__(models=[host], config=config, api_address=host.url)
        self._host = host

    def prompt_tokens(self, messages: Sequence[Mapping[str, str]]) -> int:
        """The tokens of a prompt, with the chat template around it."""
        chat = [dict(message) for message in messages]
        text = self._host.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        return len(self._host.tokenizer(text, add_special_tokens=False)["input_ids"])

    @property
    def model_version(self) -> int:
        return self._host.sampler.version

    @property
    async def model_version_async(self) -> int:
        return self._host.sampler.version


class LocalRolloutModel(BaseInferenceModel):
    """Trinity's rollout model over our sampler; workflows call it over HTTP."""

    host: SamplerHost

    def __init__(self, config: InferenceModelConfig) -> None:
        super().__init__(config)
        self._token: str | None = None

    async def prepare(self) -> None:
        address = "127.0.0.1"
        if spans_nodes():  # reachable for runners on other nodes, so it needs a key
            address, self._token = ray.util.get_node_ip_address(), secrets.token_urlsafe(32)
        make = SamplerHost.from_model_config
        self.host = await asyncio.to_thread(make, self.config, address, self._token)
        self.tokenizer = self.host.tokenizer
        self._prepared = True

    def get_api_server_url(self) -> str | None:
        return self.host.url

    def get_api_key(self) -> str:
        return self._token or str(super().get_api_key())

    def get_model_version(self) -> int:
        return self.host.sampler.version

    async def sync_model_weights(
        self, model_version: int, method: SyncMethod, timeout: float = 1200
    ) -> int:
        """Load the newest weights from the Synchronizer's memory; returns their version."""
        synchronizer = ray.get_actor("synchronizer", namespace=self.config.ray_namespace)
        state, version = await synchronizer.get_model_state_dict.remote()
        if state is not None:
            await asyncio.to_thread(self.host.sampler.update_weights, state, version)
        return version

    async def served_logprobs(self, tokens: list[int], temperature: float) -> list[float]:
        """Log-probabilities of tokens 1..T-1 by the sampler."""
        return await asyncio.to_thread(self.host.sampler.token_logprobs, tokens, temperature)

    def sampler_stats(self) -> dict[str, float]:
        return self.host.sampler.stats()

    async def shutdown(self) -> None:
        await asyncio.to_thread(self.host.close)
