"""Trinity's sampler actor on vLLM, with fixes for Trinity 0.6.0.

- **Adapter.** Trinity's OpenAI server answers requests by the model's name with the base model.
  Here they get the newest adapter, and none at version 0.
- **Prefix cache.** vLLM keys cached prefixes by the adapter's name, which never changes, so the
  cache is cleared after each sync.
- **Ranks without vLLM kernels** are rounded up to the next supported rank.
- **Weight sync by memory** also works on a Ray that the command started.
- **An engine that does not start** says why: vLLM's process prints it, and raises "see above".
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import Any, get_args

import httpx
import ray
from trinity.common.config import InferenceModelConfig
from trinity.common.constants import SyncMethod
from trinity.common.models.vllm_model import vLLMRolloutModel

from aflow_tune.errors import RunFailed

_SERVER_SECONDS = 300.0


class VllmSampler(vLLMRolloutModel):
    """See the module's docstring for what it adds."""

    async_llm: Any

    def __init__(self, config: InferenceModelConfig) -> None:
        if config.enable_lora:
            from vllm.config.lora import MaxLoRARanks

            wanted = config.lora_kwargs["max_lora_rank"]
            ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= wanted]
            config.lora_kwargs["max_lora_rank"] = min(ranks)
        # vLLM's own processes get weights from this Ray (`sync_method: memory`). They are not Ray
        # workers, and without an address they would start a Ray of their own.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        super().__init__(config)

    async def prepare(self) -> None:
        """As Trinity's. RunFailed, with vLLM's own reason: the engine did not start."""
        try:
            await super().prepare()
        except RuntimeError as error:
            printed = Path(os.readlink("/proc/self/fd/2"))  # Ray's file for this process's stderr
            told = f"{_reason(printed) or error}\nWhat it printed: {printed}"
            raise RunFailed(f"vLLM did not start: {told}") from error

    async def run_api_server(self) -> bool:
        engine = self.async_llm
        if self.enable_lora:
            self.async_llm = _WithNewestAdapter(engine, self)
        try:
            started: bool = await super().run_api_server()
            return started
        finally:
            self.async_llm = engine

    async def sync_model_weights(
        self, model_version: int, method: SyncMethod, timeout: float = 1200
    ) -> int:
        version: int = await super().sync_model_weights(model_version, method, timeout)
        if self.enable_lora:
            await self.async_llm.reset_prefix_cache(reset_running_requests=True)
        return version

    async def served_logprobs(self, tokens: list[int], temperature: float) -> list[float]:
        """Log-probabilities of tokens 1..T-1, by the OpenAI server. RunFailed if it fails."""
        body = {"model": self.config.model_path, "prompt": tokens, "max_tokens": 1}
        body |= {"temperature": temperature, "prompt_logprobs": 0}
        url = f"{self.get_api_server_url()}/v1/completions"
        deadline = time.monotonic() + _SERVER_SECONDS
        async with httpx.AsyncClient(timeout=_SERVER_SECONDS, trust_env=False) as client:
            while True:
                try:
                    answer = await client.post(url, json=body)
                    answer.raise_for_status()
                    break
                except httpx.HTTPError as error:
                    # Trinity does not wait until the server is up.
                    starting = isinstance(error, httpx.ConnectError) and not self.async_llm.errored
                    if not starting or time.monotonic() > deadline:
                        told = f"the sampler's server at {url} failed: {error}; see the run's logs"
                        raise RunFailed(told) from error
                    await asyncio.sleep(0.5)
        scores = answer.json()["choices"][0]["prompt_logprobs"][1:]
        return [next(iter(score.values()))["logprob"] for score in scores]


def _reason(printed: Path) -> str | None:
    """The last error that vLLM's processes printed into a file."""
    told = re.findall(
        r"^\((?:EngineCore|Worker).*?\) (\w*(?:Error|Exception): .+)$",
        printed.read_text(encoding="utf-8", errors="replace") if printed.is_file() else "",
        re.MULTILINE,
    )
    return told[-1] if told else None


class _WithNewestAdapter:
    """vLLM's engine as its OpenAI server sees it: a request without an adapter gets the newest."""

    def __init__(self, engine: Any, sampler: VllmSampler) -> None:
        self._engine, self._sampler = engine, sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("lora_request") is None and self._sampler.model_version:
            kwargs["lora_request"] = self._sampler.get_lora_request()
        return self._engine.generate(*args, **kwargs)
