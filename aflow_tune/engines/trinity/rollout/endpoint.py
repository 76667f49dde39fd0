"""A model behind any OpenAI-compatible endpoint, with the interface that the adapter expects.

For evaluation only: responses become experiences with the text and the reported lengths, but with
placeholder tokens. The key goes from the environment to OpenAI's client and nowhere else.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import torch
from trinity.common.config import InferenceModelConfig
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper

from aflow_tune.errors import BadInput

RETRIES = 5
"""Retries by OpenAI's client after a rate limit, a server error or a lost connection."""
_CHECK_SECONDS = 20.0


class EndpointModel(ModelWrapper):
    """Trinity's model wrapper over the API at `url` (`/v1` is added if it has no path).
    `config.model_path` is the model's name there; `key_variable`: see `key_for`."""

    def __init__(self, config: InferenceModelConfig, url: str, key_variable: str | None) -> None:
        super().__init__(config=config, api_address=base_url(url))
        self._key_variable = key_variable
        self._client: Any = None
        # Shared by the clones of this model: the server's name for the token limit.
        self._limit_name = ["max_tokens"]

    @property
    def model_version(self) -> int:
        return 0

    @property
    async def model_version_async(self) -> int:
        return 0

    def clone_with_isolated_history(self) -> EndpointModel:
        clone: EndpointModel = super().clone_with_isolated_history()
        clone._client = None
        return clone

    def get_openai_async_client(self) -> Any:
        """OpenAI's client; its responses are appended to this wrapper's history."""
        import openai

        if self._client is not None:
            return self._client
        self._client = client = openai.AsyncOpenAI(
            base_url=self.api_address,
            api_key=key_for(self.api_address or "", self._key_variable),
            max_retries=RETRIES,
        )
        plain: Any = client.chat.completions.create

        async def create(**kwargs: Any) -> Any:
            for name in ("logprobs", "top_logprobs"):  # for training; many endpoints refuse them
                kwargs.pop(name, None)
            limit = kwargs.pop("max_tokens", None)
            name = self._limit_name[0]  # a copy: a concurrent call may change it
            try:
                response = await plain(**kwargs, **({} if limit is None else {name: limit}))
            except openai.BadRequestError as error:
                # OpenAI's newer models accept only this name, older servers only the other.
                newer = "max_completion_tokens"
                if name == newer or newer not in str(error):
                    raise
                self._limit_name[0] = newer
                response = await plain(**kwargs, **({} if limit is None else {newer: limit}))
            self.history.extend(_experiences(response))
            return response

        client.chat.completions.create = create  # type: ignore[method-assign]
        client.model_path = self.config.model_path  # type: ignore[attr-defined]
        return client


def base_url(url: str) -> str:
    return url.rstrip("/") + ("" if urlsplit(url).path.strip("/") else "/v1")


def key_for(url: str, key_variable: str | None) -> str:
    """The key in the environment variable `key_variable`; None: `OPENAI_API_KEY` for OpenAI's own
    host, no key for others. "EMPTY" if there is none."""
    if key_variable is None and urlsplit(url).hostname == "api.openai.com":
        key_variable = "OPENAI_API_KEY"
    return (os.environ.get(key_variable) if key_variable else None) or "EMPTY"


def check_endpoint(url: str, models: list[str], key_variable: str | None) -> None:
    """Ask the endpoint for its models before any task runs; one without a model list passes. Raises
    BadInput: not a URL, no connection, the key is refused, or a model is not served."""
    import openai

    def refused(expected: str, found: str, fix: str, where: str = f"--endpoint {url}") -> BadInput:
        return BadInput.of("The endpoint cannot be used.", where, expected, found, fix)

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise refused("an http or https URL", repr(url), "--endpoint http://127.0.0.1:8000/v1")
    key = key_for(url, key_variable)
    with openai.OpenAI(
        base_url=base_url(url), api_key=key, max_retries=1, timeout=_CHECK_SECONDS
    ) as client:
        try:
            served = [model.id for model in client.models.list().data]
        except openai.APIConnectionError as error:
            found, fix = f"no answer: {error.__cause__ or error}", "start it, or correct the URL"
            raise refused("a server that answers", found, fix) from error
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            found = "no key was sent" if key == "EMPTY" else "the key was refused"
            fix = "export it, and name its variable: --key-variable OPENAI_API_KEY"
            raise refused("a key that the server takes", found, fix) from error
        except (openai.OpenAIError, ValueError, AttributeError, TypeError):
            return
    missing = [name for name in models if name not in served]
    if served and missing:
        where, fix = f"--model {' '.join(missing)}", f"--model {served[0]}"
        found = f"it serves {', '.join(served[:8])}"
        raise refused(f"a model that {url} serves", found, fix, where)


def _experiences(response: Any) -> list[Experience]:
    """One per choice, with placeholder tokens; reported tokens are split evenly over choices."""
    usage, choices = response.usage, response.choices
    prompt = max(1, usage.prompt_tokens if usage else 1)
    drawn = usage.completion_tokens if usage else len(choices)
    # Usage is the total of all choices. An experience needs at least one token.
    count = len(choices)
    lengths = [max(1, drawn // count + (index < drawn % count)) for index in range(count)]
    return [
        Experience(
            tokens=torch.zeros(prompt + length, dtype=torch.int32),
            prompt_length=prompt,
            logprobs=torch.zeros(length),
            response_text=choice.message.content,
        )
        for choice, length in zip(choices, lengths, strict=True)
    ]
