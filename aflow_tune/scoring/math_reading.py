r"""What a mathematical answer consists of: values, lists, tuples, intervals, names of unknowns.

A reading is a text, one value, or a tuple of a kind and what belongs to it:

- `("list", ...)`: in any order: `1, 2`, `\{1,2\}`, `x=1 \text{ or } x=2`, `\pm 2`;
- `("()", a, b)`, `("[)", ...)` and so on: in this order, a tuple or an interval, which are
  written alike; `1 \le x < 2` is one too;
- `("union", ...)` of intervals: `\cup`, inequalities joined by 'or', `x \ne 2`;
- `("named", name, reading)`: `x = 5`, `1 < x < 2`;
- `("assigned", named, ...)`: values of different unknowns, sorted by name: `a=1, b=2`;
- `("same", ...)`: sides of an equation without an unknown: all must be the value asked for.

Whether two readings are equal is asked in `math_equality.py`.
"""

from __future__ import annotations

import re

from aflow_tune.scoring.math_equality import Reading, kind_of

_WORD = r"(?:and|or)"
_LIST = (
    r"[,;]|\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*"
    rf"{_WORD}\s*\}}|(?<![a-zA-Z\\{{]){_WORD}(?![a-zA-Z])|\\(?:lor|vee|land|wedge)(?![a-zA-Z])"
)
_BRACKETS = r"(?P<open>\\begin|\\\{|[(\[{])|(?P<close>\\end|\\\}|[)\]}])"
_GREEK = r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|rho|sigma|tau|omega|Delta|Omega)"
_NAME = re.compile(rf"(?:[a-zA-Z]|{_GREEK}(?![a-zA-Z]))(?:_(?:\w|\{{\w+\}}))?'*(?:\([a-zA-Z]\))?")
_IN = re.compile(r"(?:[^\\,<>=]|\\(?!in(?![a-zA-Z])))*\\in(?![a-zA-Z])")
_COMMAND = re.compile(rf"(?!{_GREEK})\\(?!text|math|mbox|angle)[a-zA-Z]+")
_BUILDER = re.compile(
    rf"\s*(?:{_NAME.pattern})\s*(?:\\in(?![a-zA-Z])[^:|]*?)?(?::|\||\\(?:mid|vert)(?![a-zA-Z]))"
)
_TEXT_LIST = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*[,;][^{}]*)\}")
_INFINITY = "\\infty"
_REALS = ("()", "-" + _INFINITY, _INFINITY)


def read(text: str) -> Reading:
    """The reading of an answer in the spelling of `math_spelling.plain_spelling`."""
    pieces, cuts = _cut(_TEXT_LIST.sub(r" \1 ", text), _LIST)
    entries = [_entry(piece) for piece in pieces if piece]
    if len(entries) < 2:
        return entries[0] if entries else ""
    if all(_is_range(entry) for entry in entries):
        if all(re.search(r"and|wedge", cut) for cut in cuts):
            return _between(entries) or ("list", *entries)
        return "union", *[value_of(entry) for entry in entries]
    names = [entry[1] for entry in entries if kind_of(entry) == "named"]
    if len(names) == len(entries):
        if len({re.sub(r"_.*|'", "", str(name)) for name in names}) == 1:
            return _list([value_of(entry) for entry in entries])
        if len(set(names)) == len(names):
            return "assigned", *sorted(entries, key=lambda entry: entry[1].lstrip("\\"))
    return _list(entries)


def _entry(text: str) -> Reading:
    text = text.strip()
    if found := _IN.match(text):
        return _entry(text[found.end() :])
    if text == "\\mathbb{R}":
        return _REALS
    for cut in (r"\\cup(?![a-zA-Z])", r"<|>|\\(?:le|ge|ne)(?![a-zA-Z])", r"="):
        pieces, cuts = _cut(text, cut)
        if cuts:
            if "cup" in cut:
                return "union", *[value_of(_entry(piece)) for piece in pieces]
            return _equation(pieces) if cut == "=" else _inequality(pieces, cuts) or text
    if re.search(r"\\pm(?![a-zA-Z])", text):
        signs = ("+", "-"), ("-", "+")
        both = [text.replace("\\pm", pm).replace("\\mp", mp).lstrip("+ ") for pm, mp in signs]
        return _list([_entry(one) for one in both])
    return _group(text)


def _group(text: str) -> Reading:
    """A bracketed whole, `\\{1,2\\}` or `(1,2]`; anything else is a value."""
    opening = re.match(r"\\\{|[(\[{]", text)
    closing = re.search(r"(?:\\\}|[)\]}])$", text)
    if opening is None or closing is None or closing.start() < opening.end():
        return text
    inside = text[opening.end() : closing.start()]
    if not _balanced(inside):
        return text
    if opening[0] == "\\{":
        builder = _BUILDER.match(inside)
        return _list([read(inside[builder.end() :] if builder else inside)])
    pieces, cuts = _cut(inside, ",")
    if not cuts:
        return text
    if opening[0] == "{":
        return _list([read(inside)])
    items = [_entry(piece) for piece in pieces]
    return opening[0] + closing[0], *[_unsigned(item) for item in items]


def _equation(sides: list[str]) -> Reading:
    """The value of what its left side names, or sides that have to be the same value."""
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides = sides[::-1]
    values = [_entry(side) for side in sides]
    if not re.search(rf"[a-zA-Z]|{_GREEK}", _COMMAND.sub("", sides[0])):
        return "same", *values
    value = values[1] if len(values) == 2 else ("same", *values[1:])
    return "named", "".join(sides[0].split()), value


def _inequality(sides: list[str], relations: list[str]) -> Reading | None:
    """The interval of `a < x \\le b`, `x > a`, `a > x`; None if it is of no single unknown."""
    if any(relation == "\\ne" for relation in relations):
        if len(sides) != 2 or not _NAME.fullmatch(sides[0]):
            return None
        parts = ("()", _REALS[1], sides[1]), ("()", sides[1], _INFINITY)
        return "named", sides[0], ("union", *parts)
    if len({relation in ("<", "\\le") for relation in relations}) > 1 or len(sides) > 3:
        return None
    if relations[0] in (">", "\\ge"):
        sides, relations = sides[::-1], relations[::-1]
    closed = ["e" in relation for relation in relations]
    if len(sides) == 3:
        low, name, high = sides
        ends = ("[" if closed[0] else "(") + ("]" if closed[1] else ")")
    elif _NAME.fullmatch(sides[0]):
        low, name, high = _REALS[1], *sides
        ends = "(]" if closed[0] else "()"
    else:
        low, name, high = *sides, _INFINITY
        ends = "[)" if closed[0] else "()"
    return ("named", name, (ends, low, high)) if _NAME.fullmatch(name) else None


def _is_range(entry: Reading) -> bool:
    """Whether it was an inequality of one unknown."""
    return kind_of(entry) == "named" and kind_of(entry[2]) in ("union", "()", "(]", "[)", "[]")


def _between(entries: list[Reading]) -> Reading | None:
    """`x > 1 \\text{ and } x < 2` as one interval."""
    low = [entry[2] for entry in entries if entry[2][-1] == _INFINITY]
    high = [entry[2] for entry in entries if entry[2][1] == _REALS[1]]
    if len(entries) != 2 or len(low) != 1 or len(high) != 1 or low == high:
        return None
    return low[0][0][0] + high[0][0][1], low[0][1], high[0][2]


def value_of(entry: Reading) -> Reading:
    """Without the name of the unknown, if it has one."""
    return entry[2] if kind_of(entry) == "named" else entry


def _list(items: list[Reading]) -> Reading:
    """One list without lists inside; one entry stands for itself."""
    flat = [part for item in items for part in (item[1:] if kind_of(item) == "list" else (item,))]
    return flat[0] if len(flat) == 1 else ("list", *flat)


def _unsigned(item: Reading) -> Reading:
    """`+\\infty` is `\\infty`."""
    return item.lstrip("+ ") if isinstance(item, str) else item


def _cut(text: str, separator: str) -> tuple[list[str], list[str]]:
    """The pieces between separators that stand in no brackets, and these separators."""
    pieces, cuts, depth, start = [], [], 0, 0
    for found in re.finditer(rf"(?P<cut>{separator})|{_BRACKETS}", text):
        if found["open"]:
            depth += 1
        elif found["close"]:
            depth -= 1
        elif depth <= 0:
            pieces.append(text[start : found.start()].strip())
            cuts.append(found["cut"])
            start = found.end()
    return [*pieces, text[start:].strip()], cuts


def _balanced(inside: str) -> bool:
    """Whether no bracket closes that was opened outside."""
    depth = 0
    for found in re.finditer(_BRACKETS, inside):
        depth += 1 if found["open"] else -1
        if depth < 0:
            return False
    return depth == 0
