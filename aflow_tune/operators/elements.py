"""Elements like `<answer>...</answer>` in a reply that is no XML document.

A model writes around, between and into its elements whatever it likes, so there is no tree:
each field's tags are paired on their own. Rules, for one name:

- case and attributes do not matter; tags in CDATA sections and in closed fenced blocks are text;
- elements inside an element of the same name belong to its content;
- of several elements the last that is not empty counts, and one outside of all other fields'
  elements before one inside;
- without a closing tag the content goes to the next tag of any field, or to the end; without
  an opening one it begins at the tag before, or at the start.

Every step is linear in the reply, and what it holds too much of is looked at from the end.
"""

from __future__ import annotations

import bisect
import html
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from aflow_tune.operators.python_code import fenced_blocks

MAX_ATTRIBUTES = 300
"""Characters between a tag's name and its `>`."""
MAX_TAGS = 4_000
"""Of more tags in a reply the last ones are looked at."""
MAX_LOOKED_AT = 50
"""Elements of one name, from the last one back."""
_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|#\d{1,7}|#x[0-9a-fA-F]{1,6});")
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
Span = tuple[int, int]


@dataclass(frozen=True)
class Element:
    """The content of a field's element, and whether the element had to be repaired."""

    content: str
    repaired: bool


@dataclass(frozen=True)
class _Tag:
    name: str
    closes: bool
    start: int
    end: int
    as_asked: bool


@dataclass
class _Found:
    """What the tags of one name amount to; spans are of contents."""

    closed: list[Span] = field(default_factory=list)
    open_at: list[int] = field(default_factory=list)
    stray: list[int] = field(default_factory=list)
    as_asked: bool = True


def elements(text: str, names: Sequence[str], through_fences: bool = False) -> dict[str, Element]:
    """The element of each name that has one. `through_fences`: fenced blocks are no obstacle."""
    spans = list(_cdata_spans(text))
    if not through_fences:
        spans += [(block.start, block.end) for block in fenced_blocks(text) if block.closed]
    opaque = _merged(spans)
    tags = [tag for tag in _tags(text, names) if not _inside(tag.start, opaque)]
    found = {name: _pair([tag for tag in tags if tag.name == name]) for name in names}
    result = {}
    for name in names:
        chosen = _choose(text, name, found, tags)
        if chosen is not None:
            result[name] = chosen
    return result


def unescaped(content: str) -> str:
    """XML's entities replaced, where the content is escaped throughout."""
    if "<" in content or content.count("&") != len(_ENTITY.findall(content)):
        return content
    return _ENTITY.sub(lambda match: html.unescape(match[0]), content)


def _tags(text: str, names: Sequence[str]) -> Iterator[_Tag]:
    known = {name.casefold(): name for name in names}
    pattern = re.compile(
        rf"<(/?)[ \t]{{0,3}}({'|'.join(map(re.escape, names))})(?=[\s/>])", re.IGNORECASE
    )
    for match in deque(pattern.finditer(text), MAX_TAGS):
        end = text.find(">", match.end(), match.end() + MAX_ATTRIBUTES)
        if end < 0 or "<" in text[match.end() : end]:
            continue
        name = known[match[2].casefold()]
        as_asked = match[2] == name
        if match[1] or text[end - 1] != "/":
            yield _Tag(name, bool(match[1]), match.start(), end + 1, as_asked)
        else:  # <name/>: opened and closed at once
            yield _Tag(name, False, match.start(), end + 1, as_asked)
            yield _Tag(name, True, end + 1, end + 1, as_asked)


def _pair(tags: Sequence[_Tag]) -> _Found:
    found = _Found(as_asked=all(tag.as_asked for tag in tags))
    for tag in tags:
        if not tag.closes:
            found.open_at.append(tag.end)
        elif found.open_at:
            start = found.open_at.pop()
            while found.closed and found.closed[-1][0] > start:
                found.closed.pop()
            found.closed.append((start, tag.start))
        else:
            found.stray.append(tag.start)
    return found


def _choose(text: str, name: str, found: dict[str, _Found], tags: Sequence[_Tag]) -> Element | None:
    own = found[name]
    if own.closed:
        last = own.closed[: -MAX_LOOKED_AT - 1 : -1]
        full = [span for span in last if text[span[0] : span[1]].strip()]
        others = [other.closed for key, other in found.items() if key != name]
        free = [span for span in full if not any(_inside(span[0], other) for other in others)]
        start, end = (free or full or last)[0]
        return _element(text[start:end], name, repaired=not own.as_asked)
    starts = [tag.start for tag in tags]
    ends = sorted(tag.end for tag in tags)
    for start in own.open_at[: -MAX_LOOKED_AT - 1 : -1]:
        after = bisect.bisect_left(starts, start)
        content = text[start : starts[after] if after < len(starts) else len(text)]
        if content.strip():
            return _element(content, name, repaired=True)
    for stop in own.stray[: -MAX_LOOKED_AT - 1 : -1]:
        before = bisect.bisect_right(ends, stop)
        content = text[ends[before - 1] if before else 0 : stop]
        if content.strip():
            return _element(content, name, repaired=True)
    return Element("", True) if own.open_at or own.stray else None


def _element(content: str, name: str, repaired: bool) -> Element:
    content = content.strip()
    if _CDATA in content:
        content = _without_cdata(content).strip("\n")
    opening, closing = f"<{name}>", f"</{name}>"
    if content.startswith(opening) and content.endswith(closing):
        inner = content[len(opening) : -len(closing)].strip()
        if inner and opening not in inner and closing not in inner:
            return Element(inner, True)
    return Element(content, repaired)


def _cdata_spans(text: str) -> Iterator[Span]:
    start = text.find(_CDATA)
    while start >= 0:
        end = text.find(_CDATA_END, start)
        if end < 0:
            return
        yield start, end + len(_CDATA_END)
        start = text.find(_CDATA, end)


def _without_cdata(content: str) -> str:
    parts, at = [], 0
    for start, end in _cdata_spans(content):
        parts += [content[at:start], content[start + len(_CDATA) : end - len(_CDATA_END)]]
        at = end
    return "".join([*parts, content[at:]])


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Sorted, overlapping ones joined."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _inside(place: int, spans: Sequence[Span]) -> bool:
    """Whether a place lies in one of spans that are sorted and do not overlap."""
    index = bisect.bisect_right(spans, (place, float("inf"))) - 1
    return index >= 0 and spans[index][0] <= place < spans[index][1]
