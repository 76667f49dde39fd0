"""What was said on the same held-out items before and after, made fit for a page.

What a model wrote is hostile until shown otherwise: any shape, any length, any character. Here
it becomes plain text whose characters all show; escaping is the template's matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aflow_tune.report.evaluation import Comparison
from aflow_tune.report.records import EvalRecord

MOST_PAIRS = 8
MOST_CHARACTERS = 4000
_REORDERING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}


@dataclass(frozen=True)
class Message:
    """One message of a prompt."""

    role: str
    text: str


@dataclass(frozen=True)
class Call:
    """One model call. `earlier` holds the messages before the last, which is `asked`."""

    caller: str
    earlier: list[Message]
    asked: Message | None
    response: str
    tokens: int | None


@dataclass(frozen=True)
class Side:
    """One run on one item; `score` is None where it failed, and `failure` says how."""

    step: int
    score: float | None
    failure: str | None
    calls: list[Call]


@dataclass(frozen=True)
class TranscriptPair:
    """The same item before and after."""

    item: int
    before: Side
    after: Side


def pairs(comparison: Comparison, most: int = MOST_PAIRS) -> list[TranscriptPair]:
    """The first items, by their place in the data set, that both sides kept a transcript of.

    Chosen by place and never by result, so that they are a fair sample.
    """
    after = {(record.item, record.run): record for record in comparison.after.records}
    found = []
    for record in comparison.before.records:
        other = after.get((record.item, record.run))
        if other is not None and record.transcript and other.transcript:
            found.append(TranscriptPair(record.item, _side(record), _side(other)))
    return found[:most]


def plain_text(value: Any) -> str:
    """Any content of a message as text: parts joined, unprintable characters made visible."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(text for part in value if (text := plain_text(part)))
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), str):
            return plain_text(value["text"])
        value = json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(map(_visible, str(value)))
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[... {left_out:,} characters left out ...]\n{text[-half:]}"
    return text


def _side(record: EvalRecord) -> Side:
    calls = [_call(call) for call in record.transcript if isinstance(call, Mapping)]
    return Side(record.step, record.score, record.failure, calls)


def _call(call: Mapping[str, Any]) -> Call:
    raw = call.get("messages")
    messages = [_message(message) for message in raw] if isinstance(raw, list) else []
    tokens = call.get("tokens")
    return Call(
        caller=plain_text(call.get("caller")) or "call",
        earlier=messages[:-1],
        asked=messages[-1] if messages else None,
        response=plain_text(call.get("response")),
        tokens=tokens if isinstance(tokens, int) else None,
    )


def _message(message: Any) -> Message:
    if not isinstance(message, Mapping):
        return Message("?", plain_text(message))
    parts = [plain_text(message.get("content"))]
    tool_calls = message.get("tool_calls")
    for tool_call in tool_calls if isinstance(tool_calls, list) else []:
        function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
        if isinstance(function, Mapping):
            parts.append(
                f"{plain_text(function.get('name'))}({plain_text(function.get('arguments'))})"
            )
    return Message(plain_text(message.get("role")) or "?", "\n".join(filter(None, parts)))


def _visible(character: str) -> str:
    code = ord(character)
    if character in "\n\t":
        return character
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's pictures of control characters
    if code == 0x7F:
        return "\u2421"
    if 0x80 <= code < 0xA0 or code in _REORDERING or 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"
    return character
