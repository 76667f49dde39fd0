"""Models behind OpenAI's chat-completions API, on OpenAI's SDK.

That is OpenAI itself and whatever speaks its protocol: vLLM, Ollama, gateways, and the local
sampler, whose server gives its address when it starts:

    url = SamplerServer(sampler, tokenizer, "policy").start()
    client = OpenAIClient(ModelSettings(model="policy", base_url=f"{url}/v1"), "policy")

One answer a call, never streamed. `seed` is passed on; most servers do their best with it.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from aflow_tune.models.ask import Ask, response_format, text_of, tool_call
from aflow_tune.models.failures import BadReply
from aflow_tune.models.http_client import HttpClient, count_of
from aflow_tune.models.types import Reply, Usage

_NO_TEXT = ("length", "content_filter")
"""Reasons to finish with which a reply may have no content at all."""


class OpenAIClient(HttpClient):
    """A `ModelClient` for an OpenAI-compatible endpoint."""

    address = "https://api.openai.com/v1"
    path = "/chat/completions"
    models_path = "/models"

    def _make_sdk(self, **options: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**options)

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in ask.messages],
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "seed": ask.seed,
            self._limit_name(): ask.max_tokens,
            "stop": list(ask.stop) or None,
            "tools": [dict(tool) for tool in ask.tools] or None,
        }
        if ask.schema is not None:
            body["response_format"] = response_format(ask.schema)
        return {name: value for name, value in body.items() if value is not None}

    def _limit_name(self) -> str:
        """OpenAI's newer models refuse the old name; other servers may not know the new one."""
        host = urllib.parse.urlsplit(self.settings.base_url or self.address).hostname or ""
        own = host == "openai.com" or host.endswith(".openai.com")
        return "max_completion_tokens" if own else "max_tokens"

    def _reply(self, ask: Ask, content: Mapping[str, Any]) -> Reply:
        choices = content.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            raise BadReply(f"the reply has no choices: {dict(content)!r:.200}")
        message = choices[0].get("message")
        if not isinstance(message, Mapping):
            raise BadReply(f"the reply's choice has no message: {choices[0]!r:.200}")
        reason = choices[0].get("finish_reason")
        calls = _tool_calls(message.get("tool_calls"))
        said = message.get("content")
        if said is None and isinstance(message.get("refusal"), str):
            said, reason = message["refusal"], "content_filter"
        if said is None and not calls and reason not in _NO_TEXT:
            raise BadReply(f"the reply's message has no content: {dict(message)!r:.200}")
        if said is not None and not isinstance(said, str | list):
            raise BadReply(f"the reply's content is no text: {said!r:.200}")
        model = content.get("model")
        return Reply(
            text=text_of(said),
            model=model if isinstance(model, str) else self.model,
            finish_reason=reason if isinstance(reason, str) else "stop",
            tool_calls=calls,
        )

    def _usage(self, content: Mapping[str, Any]) -> Usage | None:
        told = content.get("usage")
        if not isinstance(told, Mapping):
            return None
        prompt = count_of(told.get("prompt_tokens"))
        completion = count_of(told.get("completion_tokens"))
        if prompt is None or completion is None:
            return None
        details = told.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return Usage(prompt, completion, count_of(cached) or 0)


def _tool_calls(told: Any) -> tuple[Mapping[str, Any], ...]:
    if told is None:
        return ()
    if not isinstance(told, Sequence) or isinstance(told, str):
        raise BadReply(f"the reply's tool calls are no list: {told!r:.200}")
    calls = []
    for number, call in enumerate(told):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadReply(f"the reply's tool call has no name: {call!r:.200}")
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str):
            raise BadReply(f"the arguments of a tool call are no text: {arguments!r:.200}")
        calls.append(
            tool_call(str(call.get("id") or f"call_{number}"), function["name"], arguments)
        )
    return tuple(calls)
