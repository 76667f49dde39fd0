"""Reads the values of fields from a reply, in the form that was asked for or any other.

    text    the whole reply is the one field
    xml     one element for each field
    json    one object; of several the last that has every required field
    code    the one field is a Python program (rules: `python_code.py`)

The form that was asked for is tried first, then repairs of it, then the other forms, then lines
like `answer: 42`, then, for a single bool, number or choice, the whole reply. The first way that
gives every required field wins. A field that cannot be read gets no value. Time is linear in the
reply: only a bounded number of tags, braces and blocks is examined.
"""

from __future__ import annotations

import bisect
import functools
import html
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aflow_tune.operators.fields import MAX_SHORT_TEXT, Field, Form, Kind, Unreadable
from aflow_tune.operators.python_code import fenced_blocks, program_in

MAX_REPLY_CHARACTERS = 4_000_000  # a longer reply is not read
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Null characters and lone surrogates, which not every consumer of a text accepts."""
Found = Mapping[str, tuple[Any, bool]]
"""By field: the unconverted value, and whether finding it took a repair."""


@dataclass(frozen=True)
class Reading:
    """The values that could be read by field, and the faults of missing required ones."""

    values: Mapping[str, Any]
    faults: tuple[str, ...] = ()
    repaired: bool = False


def read_reply(reply: str, fields: Sequence[Field], form: Form) -> Reading:
    """Read `fields` from a reply to a prompt that asked for `form`."""
    if len(reply) > MAX_REPLY_CHARACTERS:
        return Reading({}, (f"the reply is longer than {MAX_REPLY_CHARACTERS:,} characters",))
    text = _NO_TEXT.sub("\ufffd", reply)
    if not text.strip():
        return Reading({}, ("the reply is empty",))
    best: Reading | None = None
    for number, find in enumerate(_WAYS[form]):
        found = find(text, fields)
        if not found:
            continue
        values: dict[str, Any] = {}
        faults = []
        repaired = text != reply or number > 0
        for field in fields:
            raw, repair = found.get(field.name, (None, False))
            try:
                if raw is not None:
                    values[field.name], converted = field.value_of(raw)
                    repaired |= repair or converted
                elif field.required:
                    faults.append(f"there is no {field.name}")
            except Unreadable as error:
                faults += [f"{field.name} {error}"] if field.required else []
        if not faults:
            return Reading(values, (), repaired)
        if best is None or len(values) > len(best.values):
            best = Reading(values, tuple(faults), repaired)
    return best or Reading({}, tuple(f"there is no {field.name}" for field in _required(fields)))


def _required(fields: Sequence[Field]) -> list[Field]:
    return [field for field in fields if field.required]


def _code(text: str, fields: Sequence[Field]) -> Found:
    required = _required(fields)
    if len(required) != 1 or required[0].kind is not Kind.CODE:
        return {}
    try:
        code, repair = program_in(text, required[0].entry_point)
    except ValueError:
        return {required[0].name: (text, True)}  # `Field.value_of` says what is wrong with it
    return {required[0].name: (code, repair or code.strip() == text.strip())}


def _xml(text: str, fields: Sequence[Field], through_fences: bool = False) -> Found:
    found = elements(text, [field.name for field in fields], through_fences)
    # Entities only inside string literals of a program are literal: `a.replace("&lt;", "")`.
    spoken = {
        field.name
        for field in fields
        if field.kind is Kind.CODE and field.name in found
        if not _ENTITY.search(_QUOTED.sub("", found[field.name].content))
    }
    return {
        name: (content if name in spoken else unescaped(content), repaired)
        for name, (content, repaired) in found.items()
    }


def _json_within(text: str, fields: Sequence[Field]) -> Found:
    candidates = [item for value in objects_in(text) if (item := _object(value, fields))]
    needed = {field.name for field in _required(fields)}
    best = [item for item in candidates if needed <= set(item)] or candidates
    return best[-1] if best else {}


def _json_repaired(text: str, fields: Sequence[Field]) -> Found:
    value = repaired_object(text, [field.name for field in fields])
    if isinstance(value, list):  # text after the object makes it a list
        value = next((item for item in reversed(value) if _object(item, fields)), None)
    return _object(value, fields)


def _object(value: Any, fields: Sequence[Field]) -> Found:
    """The fields in an object, or in the only value of an object without any."""
    if not isinstance(value, dict):
        return {}
    by_name = {str(key).casefold(): (key, item) for key, item in value.items()}
    found = {}
    for field in fields:
        if field.name.casefold() in by_name:
            key, item = by_name[field.name.casefold()]
            found[field.name] = (item, key != field.name)
    if not found and len(value) == 1:
        inner = _object(next(iter(value.values())), fields)
        return {name: (item, True) for name, (item, _) in inner.items()}
    return found


def _labelled(text: str, fields: Sequence[Field]) -> Found:
    """Lines such as `**Answer:** 42`; a value reaches to the next such line."""
    known = {field.name.replace("_", " ").casefold(): field.name for field in fields}
    words = "|".join(re.escape(word).replace(r"\ ", "[ _]") for word in known)
    label = re.compile(
        rf"^[ \t>#*_-]{{0,10}}({words})[ \t]{{0,3}}[*_]{{0,3}}[ \t]{{0,3}}[:=][*_]{{0,3}}",
        re.IGNORECASE | re.MULTILINE,
    )
    marks = [*label.finditer(text)]
    stops = [mark.start() for mark in marks[1:]] + [len(text)]
    found = {}
    for mark, stop in zip(marks, stops, strict=False):
        if content := text[mark.end() : stop].strip():
            found[known[mark[1].replace("_", " ").casefold()]] = (content, True)
    return found


def _nothing_else(text: str, fields: Sequence[Field]) -> Found:
    """The whole short reply, if the only required field is a bool, number or choice."""
    required = _required(fields)
    short = len(required) == 1 and len(text.strip()) <= MAX_SHORT_TEXT
    fits = short and required[0].kind in (Kind.BOOL, Kind.INT, Kind.CHOICE)
    return {required[0].name: (text.strip(), True)} if fits else {}


_Way = Callable[[str, Sequence[Field]], Found]
_FROM_XML: tuple[_Way, ...] = (_xml, functools.partial(_xml, through_fences=True))
_FROM_JSON: tuple[_Way, ...] = (
    lambda text, fields: _object(whole_object(text), fields),
    _json_within,
    _json_repaired,
)
_FROM_REST: tuple[_Way, ...] = (_labelled, _nothing_else)
_WAYS: Mapping[Form, tuple[_Way, ...]] = {
    Form.TEXT: (lambda text, fields: {fields[0].name: (text.strip(), False)},),
    Form.XML: (*_FROM_XML, *_FROM_JSON, _code, *_FROM_REST),
    Form.JSON: (*_FROM_JSON, *_FROM_XML, _code, *_FROM_REST),
    Form.CODE: (_code, *_FROM_XML, *_FROM_JSON),
}

# Elements like `<answer>...</answer>` in a reply that is not an XML document.
#
# There is no tree: each field's tags are paired on their own. Case and attributes are ignored; tags
# in CDATA sections and closed fenced blocks are text; elements inside an element of the same name
# belong to its content. Of several elements the last non-empty one counts, with those outside all
# other fields' elements preferred. Without a closing tag the content extends to the next tag of any
# field or to the end; without an opening one it begins at the previous tag or at the start.

MAX_ATTRIBUTES = 300  # characters between a tag's name and its `>`
MAX_TAGS = 4_000  # tags examined in a reply, from the last
MAX_LOOKED_AT = 50  # elements of one name examined, from the last
_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|#\d{1,7}|#x[0-9a-fA-F]{1,6});")
_QUOTED = re.compile(r"(['\"]).*?\1")
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.DOTALL)
Span = tuple[int, int]


class Element(NamedTuple):
    """The content of a field's element, and whether the element had to be repaired."""

    content: str
    repaired: bool


class _Tag(NamedTuple):
    name: str
    closes: bool
    start: int
    end: int
    as_asked: bool


def elements(text: str, names: Sequence[str], through_fences: bool = False) -> dict[str, Element]:
    """The element of each name that has one. `through_fences`: also inside fenced blocks."""
    spans = [section.span() for section in _cdata(text)]
    if not through_fences:
        spans += [(block.start, block.end) for block in fenced_blocks(text) if block.closed]
    opaque: list[Span] = []  # sorted, overlapping ones joined
    for start, end in sorted(spans):
        if opaque and start <= opaque[-1][1]:
            opaque[-1] = (opaque[-1][0], max(end, opaque[-1][1]))
        else:
            opaque.append((start, end))
    tags = [tag for tag in _tags(text, names) if not _inside(tag.start, opaque)]
    starts, ends = [tag.start for tag in tags], sorted(tag.end for tag in tags)
    paired = {name: _pair([tag for tag in tags if tag.name == name]) for name in names}
    found: dict[str, Element] = {}
    for name, (closed, open_at, stray, as_asked) in paired.items():
        if closed:
            last = closed[: -MAX_LOOKED_AT - 1 : -1]
            full = [span for span in last if text[span[0] : span[1]].strip()]
            others = [spans for key, (spans, *_) in paired.items() if key != name]
            free = [span for span in full if not any(_inside(span[0], other) for other in others)]
            start, end = (free or full or last)[0]
            found[name] = _element(text[start:end], name, repaired=not as_asked)
            continue
        spans = []
        for start in open_at[: -MAX_LOOKED_AT - 1 : -1]:
            after = bisect.bisect_left(starts, start)
            spans.append((start, starts[after] if after < len(starts) else len(text)))
        for stop in stray[: -MAX_LOOKED_AT - 1 : -1]:
            before = bisect.bisect_right(ends, stop)
            spans.append((ends[before - 1] if before else 0, stop))
        contents = (text[start:end] for start, end in spans)
        if spans:
            content = next((content for content in contents if content.strip()), "")
            found[name] = _element(content, name, repaired=True)
    return found


def unescaped(content: str) -> str:
    """The content with XML entities replaced, if it is escaped throughout."""
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
        yield _Tag(name, bool(match[1]), match.start(), end + 1, as_asked)
        if not match[1] and text[end - 1] == "/":  # <name/>: opened and closed at once
            yield _Tag(name, True, end + 1, end + 1, as_asked)


def _pair(tags: Sequence[_Tag]) -> tuple[list[Span], list[int], list[int], bool]:
    """Pair the tags of one name: spans of closed elements' contents, ends of unclosed opening tags,
    starts of unopened closing tags, and whether all tags are spelt as asked."""
    closed: list[Span] = []
    open_at: list[int] = []
    stray: list[int] = []
    for tag in tags:
        if not tag.closes:
            open_at.append(tag.end)
        elif open_at:
            start = open_at.pop()
            while closed and closed[-1][0] > start:
                closed.pop()
            closed.append((start, tag.start))
        else:
            stray.append(tag.start)
    return closed, open_at, stray, all(tag.as_asked for tag in tags)


def _element(content: str, name: str, repaired: bool) -> Element:
    content = content.strip()
    if sections := _cdata(content):
        content = _CDATA.sub(r"\1", content[: sections[-1].end()]) + content[sections[-1].end() :]
        content = content.strip("\n")
    opening, closing = f"<{name}>", f"</{name}>"
    if content.startswith(opening) and content.endswith(closing):
        inner = content[len(opening) : -len(closing)].strip()
        if inner and opening not in inner and closing not in inner:
            return Element(inner, True)
    return Element(content, repaired)


def _cdata(text: str) -> list[re.Match[str]]:
    """The CDATA sections. Searching only up to the last `]]>` keeps it linear."""
    return [*_CDATA.finditer(text, 0, text.rfind("]]>") + 3)]


def _inside(place: int, spans: Sequence[Span]) -> bool:
    """Whether a position lies in one of these sorted, disjoint spans."""
    index = bisect.bisect_right(spans, (place, float("inf"))) - 1
    return index >= 0 and spans[index][0] <= place < spans[index][1]


# JSON objects: the reply itself, objects within it, or one repaired by json_repair. That takes time
# quadratic in quotes and brackets, so it only gets what an object of a few fields can need; on
# adversarial texts within these limits it took at most 0.4 s.

MAX_REPAIRED = 8_000  # characters of an object to be repaired
MAX_REPAIRED_BRACKETS = 20
MAX_REPAIRED_QUOTES = 300
MAX_PLACES = 50  # opening braces tried as the start of an object, half from each end of the reply
_QUOTES = "\"'`\u201c\u201d"


def whole_object(text: str) -> Any:
    """The reply as a JSON value of any type, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def objects_in(text: str) -> Iterator[Any]:
    """Valid objects in the reply, in order, without those nested in others."""
    places = [match.start() for match in re.finditer(r"\{", text)]
    if len(places) > MAX_PLACES:
        places = [*places[: MAX_PLACES // 2], *places[-MAX_PLACES // 2 :]]
    decoder, read_to = json.JSONDecoder(strict=False), 0
    for place in places:
        if place < read_to:
            continue
        try:
            value, read_to = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        yield value


def repaired_object(text: str, names: Sequence[str]) -> Any:
    """What json_repair makes of the last fenced object, else of the text from the first object on.

    An object begins with a brace and one of `names`. None if there is none or it is too large.
    """
    begin = re.compile(
        rf"\{{\s{{0,20}}[{_QUOTES}]?(?:{'|'.join(map(re.escape, names))})[{_QUOTES}]?\s{{0,5}}:",
        re.IGNORECASE,
    )
    fenced = [block.code for block in fenced_blocks(text) if begin.search(block.code)]
    text = fenced[-1] if fenced else text
    start = begin.search(text)
    faulty = text[start.start() : start.start() + MAX_REPAIRED + 1] if start else ""
    brackets = sum(map(faulty.count, "{["))
    quotes = sum(map(faulty.count, _QUOTES))
    too_much = brackets > MAX_REPAIRED_BRACKETS or quotes > MAX_REPAIRED_QUOTES
    if not faulty or len(faulty) > MAX_REPAIRED or too_much:
        return None
    from json_repair import repair_json

    try:
        return repair_json(faulty, return_objects=True, skip_json_loads=True)
    except Exception:  # its own limits, such as on nesting
        return None
