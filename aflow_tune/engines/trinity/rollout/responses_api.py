"""OpenAI's Responses API in terms of chat completions: requests, responses, events of a stream.

Function tools and text, in all forms of `input`; a built-in tool of OpenAI's, an image or a stored
prompt is refused by name. Earlier reasoning is left out: a model's thoughts stand in its text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_TEXT = ("input_text", "output_text", "text", "refusal")
_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature"),
    *("top_p", "text", "reasoning", "truncation", "user", "store"),
)
_SAME = ("temperature", "top_p", "top_logprobs", "seed", "top_k", "min_p", "logit_bias")


def as_chat(body: Mapping[str, Any], before: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The request as one for a chat completion. `before`: the messages that it continues, without
    instructions. Raises ValueError: what a model of one's own cannot do, or a malformed item."""
    for name in ("prompt", "conversation", "background"):
        if body.get(name):
            raise ValueError(f"{name} is not supported: send input")
    chat: dict[str, Any] = {name: body[name] for name in _SAME if body.get(name) is not None}
    chat["messages"] = [*before, *_messages(body.get("input"))]
    if instructions := body.get("instructions"):
        chat["messages"].insert(0, {"role": "system", "content": instructions})
    if tools := body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in tools]
    choice = body.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        named = [
            tool.get("name") for tool in choice.get("tools") or () if isinstance(tool, Mapping)
        ]
        chat["tools"] = [it for it in chat.get("tools", ()) if it["function"].get("name") in named]
        choice = choice.get("mode", "auto")
    elif isinstance(choice, Mapping):
        if choice.get("type", "function") != "function":
            raise ValueError(f"tool_choice: the type {choice['type']!r} is not supported")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    limit, form = body.get("max_output_tokens"), _object(_object(body, "text"), "format")
    if form.get("type") == "json_schema":
        schema = {key: form[key] for key in ("name", "schema", "strict") if key in form}
        form = {"type": "json_schema", "json_schema": schema}
    more = {"tool_choice": choice, "max_tokens": limit, "response_format": form or None}
    more["parallel_tool_calls"] = body.get("parallel_tool_calls")
    if body.get("top_logprobs") or "message.output_text.logprobs" in (body.get("include") or ()):
        more["logprobs"] = True
    return chat | {name: value for name, value in more.items() if value is not None}


def _object(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: an object is needed, not {value!r:.80}")
    return value


def _tool(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    if kind != "function":
        raise ValueError(f"a tool of the type {kind!r} is not supported: only functions")
    keys = ("name", "description", "parameters", "strict")
    function = {key: tool[key] for key in keys if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError("input: a text, or a list of items that is not empty")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        kind = item.get("type") or "message" if isinstance(item, Mapping) else None
        if kind == "message":
            messages.append(
                {"role": item.get("role"), "content": _text(item.get("content"), number)}
            )
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            # Text and calls of one answer are one message, as they were drawn.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append({**result, "content": _text(item.get("output"), number)})
        elif kind != "reasoning":
            raise ValueError(f"input[{number}]: an item of the type {kind!r} is not supported")
    return messages


def _text(content: Any, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT:
            raise ValueError(f"input[{number}]: content of the type {kind!r} is not supported")
        parts.append(part.get("text") or part.get("refusal") or "")
    return "".join(parts)


def as_response(body: Mapping[str, Any], answered: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion as the response to `body`; of several choices, the first."""
    choice, usage = answered["choices"][0], answered.get("usage")
    message, cut = choice["message"], choice["finish_reason"] == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if message.get("content") or not message.get("tool_calls"):
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        text: dict[str, Any] = {
            "type": "output_text",
            "text": message.get("content") or "",
            "annotations": [],
        }
        text["logprobs"] = logprobs
        output.append(_item("message", "msg", status, role="assistant", content=[text]))
    for call in message.get("tool_calls") or ():
        function = {"call_id": call["id"], **call["function"]}
        output.append(_item("function_call", "fc", "completed", **function))
    response = {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": answered["model"],
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        **{name: body.get(name) for name in _ECHOED},
    }
    if usage:
        read, drawn = usage["prompt_tokens"], usage["completion_tokens"]
        response["usage"] = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + drawn,
        }
    return response


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _item(kind: str, short: str, status: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": _id(short), "status": status, **fields}


def events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream that ends with `response`."""
    number = -1

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(response["output"]):
        where: dict[str, Any] = {"output_index": index}
        of_item = {**where, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            started = {**item, "status": "in_progress", "content": []}
            yield event("output_item.added", item=started, **where)
            at = {**of_item, "content_index": 0}
            yield event("content_part.added", part={**part, "text": ""}, **at)
            yield event("output_text.delta", delta=part["text"], logprobs=[], **at)
            yield event("output_text.done", text=part["text"], logprobs=[], **at)
            yield event("content_part.done", part=part, **at)
        else:
            started = {**item, "status": "in_progress", "arguments": ""}
            yield event("output_item.added", item=started, **where)
            arguments = item["arguments"]
            yield event("function_call_arguments.delta", delta=arguments, **of_item)
            named = {"name": item["name"], "arguments": arguments, **of_item}
            yield event("function_call_arguments.done", **named)
        yield event("output_item.done", item=item, **where)
    yield event(str(response["status"]), response=response)
