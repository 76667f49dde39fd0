"""The local sampler as a Trinity rollout model: one Ray actor that owns the sampler and its
OpenAI-compatible server.

The server listens on loopback, or on the node's own address with a token of its own where the
Ray has several nodes. Workflows reach it over HTTP exactly as they would reach vLLM; Trinity's
Explorer reaches it through the `InferenceModel` methods. Weights come from Trinity's
Synchronizer by memory.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from trinity.common.config import InferenceModelConfig
from trinity.common.constants import SyncMethod
from trinity.common.experience import Experience
from trinity.common.models.model import BaseInferenceModel

from aflow_tune.cluster.ray_for_run import spans_nodes
from aflow_tune.engines.local.sampler import SamplingParams
from aflow_tune.errors import RunFailed

if TYPE_CHECKING:
    from aflow_tune.engines.trinity.rollout.sampler_host import SamplerHost


class LocalRolloutModel(BaseInferenceModel):
    """Trinity's contract of a rollout model over our sampler."""

    def __init__(self, config: InferenceModelConfig) -> None:
        super().__init__(config)
        self._host: SamplerHost | None = None
        self._token: str | None = None

    async def prepare(self) -> None:
        """Load the model and start the server; called once by the allocator."""
        from aflow_tune.engines.trinity.rollout.sampler_host import SamplerHost

        host = "127.0.0.1"
        if spans_nodes():  # runners of other nodes ask it: by its own address, with its token
            host, self._token = ray.util.get_node_ip_address(), secrets.token_urlsafe(32)
        self._host = await asyncio.to_thread(
            SamplerHost.from_model_config, self.config, host, self._token
        )
        self.tokenizer = self._host.tokenizer
        self._prepared = True

    @property
    def host(self) -> SamplerHost:
        """The sampler with its server.

        Raises:
            RunFailed: `prepare()` was not awaited yet.
        """
        if self._host is None:
            raise RunFailed("the local rollout model was used before prepare()")
        return self._host

    def get_api_server_url(self) -> str | None:
        return self.host.url

    def get_api_key(self) -> str:
        """What callers of the server send; it is nowhere but in the memory of this run."""
        return self._token or str(super().get_api_key())

    def get_model_version(self) -> int:
        return self.host.sampler.version

    async def sync_model_weights(
        self, model_version: int, method: SyncMethod, timeout: float = 1200
    ) -> int:
        """Take the trainer's weights from the Synchronizer.

        Raises:
            RunFailed: the method is not `memory`, the only one of the local engine.
        """
        if method != SyncMethod.MEMORY:
            raise RunFailed(f"the local engine syncs by memory, not by {method.value}")
        synchronizer = ray.get_actor("synchronizer", namespace=self.config.ray_namespace)
        state, version = await synchronizer.get_model_state_dict.remote()
        if state is not None:
            await asyncio.to_thread(self.host.sampler.update_weights, state, version)
        return version

    async def generate(self, prompt: str, **kwargs: Any) -> Sequence[Experience]:
        """Complete a text prompt; one experience a sequence."""
        token_ids = self.host.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return await self._generate_ids(token_ids, prompt, kwargs)

    async def chat(self, messages: list[dict], **kwargs: Any) -> Sequence[Experience]:
        """Complete a conversation through the chat template; one experience a sequence."""
        prompt = self.apply_chat_template(self.host.tokenizer, messages)
        return await self.generate(prompt, **kwargs)

    async def logprobs(
        self, token_ids: list[int], temperature: float | None = None, **_: Any
    ) -> torch.Tensor:
        """Teacher-forced log-probabilities of tokens 1..T-1, shape (T-1,), fp32."""
        scale = temperature if temperature is not None else (self.config.temperature or 1.0)
        values = await asyncio.to_thread(self.host.sampler.token_logprobs, token_ids, scale)
        return torch.tensor(values, dtype=torch.float32)

    async def served_logprobs(self, tokens: list[int], temperature: float) -> list[float]:
        """Log-probabilities of tokens 1..T-1, by the sampler behind the server."""
        return await asyncio.to_thread(self.host.sampler.token_logprobs, tokens, temperature)

    def sampler_stats(self) -> dict[str, float]:
        """Totals of the sampler since its start."""
        return self.host.sampler.stats()

    async def shutdown(self) -> None:
        if self._host is not None:
            await asyncio.to_thread(self._host.close)
            self._host = None

    async def _generate_ids(
        self, token_ids: list[int], prompt: str, kwargs: dict[str, Any]
    ) -> list[Experience]:
        params = SamplingParams(
            max_tokens=kwargs.get("max_tokens") or self.config.max_response_tokens or 512,
            n=kwargs.get("n", 1),
            temperature=kwargs.get("temperature", self.config.temperature or 1.0),
            top_p=kwargs.get("top_p", 1.0) or 1.0,
            top_k=max(kwargs.get("top_k", 0) or 0, 0),
            seed=kwargs.get("seed"),
        )
        completions = await self.host.sampler.submit(token_ids, params)
        return [
            Experience(
                tokens=torch.tensor(token_ids + completion.token_ids, dtype=torch.int32),
                logprobs=torch.tensor(completion.logprobs, dtype=torch.float32),
                prompt_length=len(token_ids),
                prompt_text=prompt,
                response_text=completion.text,
            )
            for completion in completions
        ]
