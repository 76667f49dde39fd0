"""The final answer of a run as a short key, so that equal answers can be counted.

What a workflow ends with is mostly reasoning followed by an answer. Where a mark says which
part is the answer (an `<answer>` tag, a `\\boxed{}`), the key is that part; else the whole text.
A key tells whether two answers are the same text, not whether they mean the same.
"""

from __future__ import annotations

import hashlib
import re

MOST_CHARACTERS = 80
"""Longer answers are cut and end with a hash of the whole."""

_LOOKED_AT = 20_000
"""Characters of a response, from its end, in which a mark is looked for."""

_BRACE = re.compile(r"\\boxed\{|[{}]")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def answer_key(text: str) -> str:
    """The key of a response; "" for one that holds nothing but white space."""
    end = text[-_LOOKED_AT:]
    tags = _TAG.findall(end)
    answer = tags[-1] if tags else _last_boxed(end)
    answer = " ".join((text if answer is None else answer).split())
    if len(answer) <= MOST_CHARACTERS:
        return answer
    digest = hashlib.sha256(answer.encode(errors="replace")).hexdigest()[:12]
    return f"{answer[:MOST_CHARACTERS]}... [{digest}]"


def _last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{}` whose braces close, or None; in one pass."""
    opened: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match[0] != "{" else None)
        elif opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[last[0] : last[1]]
