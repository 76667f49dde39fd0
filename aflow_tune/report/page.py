"""Writes HTML pages from the templates in this folder.

Style and charts are inline, there are no scripts, and the page's content security policy forbids
loading or running anything. Content from models and users may have any type, length and characters:
`plain_text` makes it text in which every character is visible, and the templates escape it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from aflow_tune.files import write_whole
from aflow_tune.report.evaluation import Comparison
from aflow_tune.report.records import EvalRecord

MOST_PAIRS = 8
MOST_CHARACTERS = 4000
TONES = {1: "rose", -1: "fell", 0: "unclear"}
"""CSS classes of comparisons, by direction."""
_REORDERING = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}
_SHOWN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **{code: f"\\u{code:04x}" for code in (*range(0x80, 0xA0), *_REORDERING)},
    **{code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)},
}
"""Pictures of control characters; escapes for bidirectional controls and lone surrogates."""


def write_page(path: Path, template: str, **content: Any) -> Path:
    """Write a page atomically; returns its path. Templates also get `plain`, `tones`,
    `transcripts` and `written`: the current time unless `content` has it."""
    import jinja2

    folder = resources.files("aflow_tune.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text("utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {"plain": plain_text, "tones": TONES, "transcripts": transcript_pairs}
    written = time.strftime("%Y-%m-%d %H:%M")
    write_whole(path, environment.get_template(template).render({"written": written, **content}))
    return path


def transcript_pairs(comparison: Comparison) -> list[dict[str, Any]]:
    """The first items with transcripts on both sides, for `side.html.jinja`: chosen by position in
    the data set, never by result, so that they are a fair sample."""

    def side(record: EvalRecord) -> dict[str, Any]:
        calls = [_call(call) for call in record.transcript if isinstance(call, Mapping)]
        told = {name: getattr(record, name) for name in ("step", "score", "failure")}
        return {**told, "calls": calls}

    after = {(record.item, record.run): record for record in comparison.after.records}
    pairs = [(record, after.get((record.item, record.run))) for record in comparison.before.records]
    return [
        {"item": one.item, "before": side(one), "after": side(other)}
        for one, other in pairs
        if other is not None and one.transcript and other.transcript
    ][:MOST_PAIRS]


def plain_text(value: Any) -> str:
    """Any content of a message as text: parts joined, control characters made visible, cut."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(text for part in value if (text := plain_text(part)))
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), str):
            return plain_text(value["text"])
        value = json.dumps(value, ensure_ascii=False, default=str)
    text = str(value).translate(_SHOWN)
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        left_out = len(text) - 2 * half
        text = f"{text[:half]}\n[... {left_out:,} characters left out ...]\n{text[-half:]}"
    return text


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    raw, tokens = call.get("messages"), call.get("tokens")
    messages = [_message(message) for message in raw] if isinstance(raw, list) else []
    return {
        "caller": plain_text(call.get("caller")) or "call",
        "earlier": messages[:-1],
        "asked": messages[-1] if messages else None,
        "response": plain_text(call.get("response")),
        "tokens": tokens if isinstance(tokens, int) else None,
    }


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        return {"role": "?", "text": plain_text(message)}
    parts = [plain_text(message.get("content"))]
    tool_calls = message.get("tool_calls")
    for tool_call in tool_calls if isinstance(tool_calls, list) else []:
        function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
        if isinstance(function, Mapping):
            name, arguments = (plain_text(function.get(key)) for key in ("name", "arguments"))
            parts.append(f"{name}({arguments})")
    role = plain_text(message.get("role")) or "?"
    return {"role": role, "text": "\n".join(filter(None, parts))}
