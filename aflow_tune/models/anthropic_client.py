"""Models behind Anthropic's messages API, on Anthropic's SDK.

Conversations and tools come in OpenAI's form, as everywhere here, and are translated: system
messages become the system prompt, tool calls and results become content blocks, and a JSON
schema becomes a tool that the model must call. That API has no seed, so `seed` changes nothing
there, and it wants a limit on the answer: `DEFAULT_MAX_TOKENS` where none is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.ask import ANSWER_TOOL, Ask, answer_text, answer_tool, text_of, tool_call
from aflow_tune.models.failures import BadReply
from aflow_tune.models.http_client import HttpClient, count_of
from aflow_tune.models.types import Message, Reply, Usage

DEFAULT_MAX_TOKENS = 4096
_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Anthropic's reasons to finish in OpenAI's words."""


class AnthropicClient(HttpClient):
    """A `ModelClient` for Anthropic's API."""

    address = "https://api.anthropic.com"
    path = "/v1/messages"
    models_path = "/v1/models?limit=1000"

    def _make_sdk(self, **options: Any) -> Any:
        import anthropic

        # Addresses of compatible servers are often given with the version.
        options["base_url"] = options["base_url"].rstrip("/").removesuffix("/v1")
        return anthropic.AsyncAnthropic(open_telemetry=False, **options)

    def _body(self, ask: Ask) -> dict[str, Any]:
        system = "\n\n".join(
            text_of(message.get("content"))
            for message in ask.messages
            if message["role"] in ("system", "developer")
        )
        tools = [_tool(tool) for tool in ask.tools]
        choice = None
        if ask.schema is not None:
            tools.append(_tool(answer_tool(ask.schema)))
            only = len(tools) == 1
            choice = {"type": "tool", "name": ANSWER_TOOL} if only else {"type": "any"}
        limit = DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": limit,
            "messages": turns(ask.messages),
            "system": system or None,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "stop_sequences": list(ask.stop) or None,
            "tools": tools or None,
            "tool_choice": choice,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _reply(self, ask: Ask, content: Mapping[str, Any]) -> Reply:
        blocks = content.get("content")
        if not isinstance(blocks, list):
            raise BadReply(f"the reply has no content: {dict(content)!r:.200}")
        told = content.get("stop_reason")
        reason = _REASONS.get(told, told) if isinstance(told, str) else "stop"
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for block in blocks:
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "text" and isinstance(block.get("text"), str):
                texts.append(block["text"])
            elif kind == "tool_use" and isinstance(block.get("name"), str):
                if ask.schema is not None and block["name"] == ANSWER_TOOL:
                    texts, calls = [answer_text(ask.schema, block.get("input"))], []
                    reason = "stop" if reason == "tool_calls" else reason
                    break
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                identifier = str(block.get("id") or f"call_{len(calls)}")
                calls.append(tool_call(identifier, block["name"], arguments))
            elif kind in (None, "text", "tool_use"):
                raise BadReply(f"a block of the reply cannot be read: {block!r:.200}")
        if not blocks and reason not in ("stop", "length", "content_filter"):
            raise BadReply(f"the reply has no content: {dict(content)!r:.200}")
        model = content.get("model")
        return Reply(
            text="".join(texts),
            model=model if isinstance(model, str) else self.model,
            finish_reason=reason,
            tool_calls=tuple(calls),
        )

    def _usage(self, content: Mapping[str, Any]) -> Usage | None:
        told = content.get("usage")
        if not isinstance(told, Mapping):
            return None
        fresh, completion = count_of(told.get("input_tokens")), count_of(told.get("output_tokens"))
        if fresh is None or completion is None:
            return None
        cached = count_of(told.get("cache_read_input_tokens")) or 0
        written = count_of(told.get("cache_creation_input_tokens")) or 0
        return Usage(fresh + cached + written, completion, cached)


def turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """OpenAI's messages as Anthropic's, without system messages; equal roles are joined.

    Raises:
        BadInput: a role or a part of a message has no counterpart.
    """
    found: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        role = message["role"]
        if role in ("system", "developer"):
            continue
        if role == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message.get("tool_call_id"),
                "content": text_of(message.get("content")),
            }
            role, blocks = "user", [result]
        elif role in ("user", "assistant"):
            blocks = _blocks(message.get("content"), f"messages[{number}]")
            blocks += [_tool_use(call) for call in message.get("tool_calls") or ()]
        else:
            raise _untranslatable(f"messages[{number}].role", repr(role), "user, assistant, tool")
        if found and found[-1]["role"] == role:
            found[-1]["content"] += blocks
        else:
            found.append({"role": role, "content": blocks})
    return found


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    blocks = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text":
            if part["text"]:
                blocks.append({"type": "text", "text": part["text"]})
        elif kind == "image_url":
            blocks.append({"type": "image", "source": _image(part["image_url"]["url"])})
        else:
            raise _untranslatable(f"{where}.content", f"{part!r:.80}", "text, image_url")
    return blocks


def _image(url: str) -> dict[str, str]:
    if url.startswith("data:"):
        kind, _, data = url.removeprefix("data:").partition(";base64,")
        return {"type": "base64", "media_type": kind, "data": data}
    return {"type": "url", "url": url}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    named = {"name": function["name"], "input_schema": dict(parameters)}
    if function.get("description"):
        named["description"] = function["description"]
    return named


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    told = function.get("arguments") or "{}"
    try:
        arguments = json.loads(told)
    except ValueError:
        arguments = told
    # A model may have written arguments that are no object; the API takes nothing else.
    given = arguments if isinstance(arguments, Mapping) else {"value": arguments}
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


def _untranslatable(where: str, found: str, expected: str) -> BadInput:
    cure = "leave it out, or use an OpenAI-compatible endpoint"
    title = "Anthropic's API cannot be asked this."
    return BadInput(title, [Fault(where, f"one of {expected}", found, cure)])
