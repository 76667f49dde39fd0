"""Tool calls as text: the Hermes form `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

Renders a conversation with tools for any chat template, parses calls out of a completion, and
writes the grammar that forces a call. Qwen's and Hermes' templates speak this form already;
for a template that does not know tools the same text is put into the messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from aflow_tune.errors import BadInput, Fault

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: a sampling model can otherwise emit blanks without end."""
_PREAMBLE = (
    "You may call one or more functions to help with the request.\n"
    "Their signatures are inside <tools></tools>:\n<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and arguments as JSON:\n"
    '<tool_call>\n{{"name": <function name>, "arguments": <arguments object>}}\n</tool_call>'
)

Message = dict[str, Any]


def template_messages(
    messages: Sequence[Message], tools: Sequence[Message], *, native: bool
) -> list[Message]:
    """Messages as a chat template takes them.

    Args:
        messages: in OpenAI's form; content may be a list of text parts.
        tools: function tools of the request, possibly none.
        native: whether the template renders tools and tool calls itself.

    Raises:
        BadInput: a message has parts that are not text, or arguments that are not JSON.
    """
    plain = [_plain(message, number) for number, message in enumerate(messages)]
    if native:
        return plain
    told = [_without_tool_fields(message) for message in plain]
    if tools:
        listing = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        preamble = _PREAMBLE.format(tools=listing)
        if told and told[0]["role"] == "system":
            told[0] = {**told[0], "content": f"{told[0]['content']}\n\n{preamble}"}
        else:
            told.insert(0, {"role": "system", "content": preamble})
    return told


def parse_calls(text: str, names: Sequence[str], *, salt: str) -> tuple[str | None, list[Message]]:
    """Split a completion into its remaining text and its tool calls.

    Args:
        text: what the model wrote.
        names: functions that exist; a call of anything else stays text.
        salt: makes the call ids unique; equal text and salt give equal ids.

    Returns:
        The text outside the calls (None when empty) and calls in OpenAI's form. A call that
        is not valid JSON of a known function leaves the whole completion as text.
    """
    calls: list[Message] = []
    for position, match in enumerate(_CALL.finditer(text)):
        try:
            call = json.loads(match[1])
        except json.JSONDecodeError:
            return text, []
        arguments = call.get("arguments", {}) if isinstance(call, dict) else None
        if not isinstance(arguments, dict) or call.get("name") not in names:
            return text, []
        digest = hashlib.sha256(f"{salt}/{position}/{match[1]}".encode()).hexdigest()
        calls.append(
            {
                "id": f"call_{digest[:24]}",
                "type": "function",
                "function": {
                    "name": call["name"],
                    "arguments": json.dumps(arguments, ensure_ascii=False),
                },
            }
        )
    if not calls:
        return text, []
    return _CALL.sub("", text).strip() or None, calls


def forced_call_grammar(tools: Sequence[Message]) -> str:
    """A Lark grammar (llguidance's dialect) of exactly one call of one of `tools`."""
    bodies, names = [], []
    for number, tool in enumerate(tools):
        names.append(f"call_{number}")
        bodies.append(f"call_{number}: %json {json.dumps(_call_schema(tool))}")
    start = f'start: "<tool_call>\\n" ({" | ".join(names)}) "\\n</tool_call>"'
    return "\n".join([start, *bodies])


def _call_schema(tool: Message) -> dict[str, Any]:
    """The JSON schema of one call of `tool`.

    Definitions move to the root, where references look for them. Arguments that the schema
    does not name are left out: an open object lets a weak model invent names without end.
    """
    arguments = dict(tool["function"].get("parameters") or {"type": "object", "properties": {}})
    definitions = {key: arguments.pop(key) for key in ("$defs", "definitions") if key in arguments}
    if not {"allOf", "anyOf", "oneOf", "$ref"} & arguments.keys():
        arguments.setdefault("additionalProperties", False)
    return {
        **definitions,
        "type": "object",
        "properties": {"name": {"const": tool["function"]["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": JSON_STYLE,
    }


def _plain(message: Message, number: int) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        odd = [p.get("type") for p in content if p.get("type") not in ("text", "refusal")]
        if odd:
            raise BadInput(
                "A message cannot be rendered",
                [
                    Fault(
                        where=f"messages[{number}].content",
                        expected="a string or parts of type text",
                        found=f"a part of type {odd[0]}",
                        cure="send text only: the local engine has no vision or audio models",
                    )
                ],
            )
        content = "".join(part.get("text") or part.get("refusal") or "" for part in content)
    result = {**message, "content": content or ""}
    if message.get("tool_calls"):
        result["tool_calls"] = [_with_parsed_arguments(c, number) for c in message["tool_calls"]]
    else:
        result.pop("tool_calls", None)
    return result


def _with_parsed_arguments(call: Message, number: int) -> Message:
    """Templates print arguments as JSON themselves, so they take them as an object."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError as error:
            raise BadInput(
                "A message cannot be rendered",
                [
                    Fault(
                        where=f"messages[{number}].tool_calls",
                        expected="arguments as a JSON object",
                        found=str(error),
                        cure="send the arguments as the model returned them",
                    )
                ],
            ) from error
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _without_tool_fields(message: Message) -> Message:
    """The same message for a template that knows only roles and text."""
    content = message["content"]
    for call in message.get("tool_calls", []):
        written = json.dumps(call["function"], ensure_ascii=False)
        content += f"\n<tool_call>\n{written}\n</tool_call>"
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    return {"role": message["role"], "content": content.lstrip("\n")}
