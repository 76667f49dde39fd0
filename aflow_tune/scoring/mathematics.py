# ruff: noqa: RUF001 (characters that occur in answers)
r"""Scores mathematical answers (MATH) by both rules of docs/scoring.md.

The strict rule normalises the spelling of both sides (`plain_spelling`) and parses each (`read`)
into one value as a text, or a tuple of a kind and its parts: `("list", ...)` in any order;
`("()", a, b)`, `("[)", ...)` and so on, a tuple or an interval; `("union", ...)` of intervals;
`("named", name, reading)` for `x = 5`; `("assigned", named, ...)`, values of several unknowns,
sorted by name; `("same", ...)`, sides of an equation without an unknown, all of which must equal
the value. Values are equal as text without spaces, or by math-verify.

The published rule (benchmarks/math.py of the public AFlow code): equal texts; or numbers within
1e-3; or equal by SymPy after `parse_latex`, or `parse_expr` where that fails. An answer such as
`9^{9^{9^{9}}}` never finishes, so each rule compares in a child process with limits.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from math import isclose
from typing import Any

from aflow_tune.scoring.asked_process import AskedProcess, serve
from aflow_tune.scoring.numbers import boxed_answers, shallow_boxed
from aflow_tune.scoring.types import RIGHT, CannotScore, Score, wrong

Reading = str | tuple[Any, ...]
VERIFY_SECONDS = 3  # processor time for one question to math-verify
_VERIFY = AskedProcess("aflow_tune.scoring.mathematics", "math-verify", VERIFY_SECONDS, "strict")
MAX_ANSWER_CHARACTERS = 400  # a longer box is not a final answer
MAX_BOXES = 20  # more boxes with different texts are several answers
_SENTENCE_END = re.compile(r"(?<!\d)[.!?]\s+")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_CHOICE = r"\b(?:or|either)\b|\\(?:lor|vee)\b|[|]{1,2}(?=\s*[\d\\])"
_OPEN = {
    "a choice of candidates": re.compile(_CHOICE, re.IGNORECASE),
    "two signs": re.compile(r"\\(?:pm|mp)(?![a-zA-Z])"),
}
_RELATION = re.compile(
    r"=|[<>≤≥≈≠]|\\(?:n?eq(?:uiv)?|approx|sim(?:eq)?|cong|leq?|geq?|ne|lt|gt|in|to|iff)(?![a-zA-Z])"
    r"|\\(?:Right|right|Long)\w*arrow"
)
# 3 1/2 and 3 \frac12 do not match: they are one number.
_SIDE_BY_SIDE = re.compile(r"\d\s+-?\d+(?!\s*/|[\d.]*\s*/)")
_BASE = re.compile(r"(?<=\d)_\{?\s*(\w+)")


def final_answer(text: str) -> str:
    """The answer by the published rule: the last box, else the last sentence."""
    boxes = shallow_boxed(text)
    if boxes:
        return boxes[-1].strip()
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]
    return sentences[-1] if sentences else ""


def score_published(answer: str, solution: str) -> Score:
    """1 if the final answers are equal, else 0. Raises as `published_equal`."""
    given, expected = final_answer(answer), final_answer(solution)
    if published_equal(given, expected):
        return RIGHT
    return wrong(f"{_short(given)} is not {_short(expected)}")


def score_strict(answer: str, solution: str) -> Score:
    """1 if the boxed answers equal those of the reference, which may also be a bare answer, else 0.
    Raises CannotScore: the reference is empty; else as `equal_answers`."""
    expected: list[str] = []
    for box in map(plain_spelling, boxed_answers(solution) or [solution]):
        if not any(equal_answers(box, other) for other in expected):
            expected.append(box)
    if not expected[0]:
        raise CannotScore("an empty reference")
    boxes = boxed_answers(answer)
    if not boxes:
        return wrong("no boxed answer")
    if max(map(len, boxes)) > MAX_ANSWER_CHARACTERS:
        return wrong("too long for a final answer")
    boxes = list(dict.fromkeys(boxes))
    if len(boxes) > MAX_BOXES:
        return wrong("several boxed answers that differ")
    given = list(dict.fromkeys(map(plain_spelling, boxes)))
    if len(expected) > 1:
        given = [", ".join(given)]
    for one in given:
        if fault := _fault(one, ", ".join(expected)):
            return wrong(fault if len(given) == 1 else "several boxed answers that differ")
    return RIGHT


def _fault(answer: str, truth: str) -> str:
    """Why an answer differs from the reference, both in plain spelling; empty if it does not."""
    given, expected = read(answer), read(truth)
    if open_choice := _open_choice(answer, given, truth, expected):
        return open_choice
    right = equal_answers(given, expected)
    return "" if right else f"{_short(answer)} is not {_short(truth)}"


def _open_choice(answer: str, given: Reading, truth: str, expected: Reading) -> str:
    """How the answer leaves open what the reference settles; empty if it does not."""
    answer, truth = (_TEXT.sub(r" \1 ", text) for text in (answer, truth))
    if not _is_several(expected):
        for reason, pattern in _OPEN.items():
            if pattern.search(answer) and not pattern.search(truth):
                return reason
        named = (kind_of(given), kind_of(expected)) == ("assigned", "()")  # x=1, y=2 for (1,2)
        if _is_several(given) and not named:
            return "a list of candidates"
    if _SIDE_BY_SIDE.search(answer) and not _SIDE_BY_SIDE.search(truth):
        return "numbers side by side"
    bases = _BASE.findall(answer)
    if bases and bases != _BASE.findall(truth):
        return "another number base"
    if _RELATION.search(_values(given)) and not _RELATION.search(_values(expected)):
        return "a relation where a value is asked for"
    return ""


def _is_several(reading: Reading) -> bool:
    return kind_of(value_of(reading)) in ("list", "union", "assigned")


def _values(reading: Reading) -> str:
    if isinstance(reading, str):
        return reading
    return " ; ".join(map(_values, reading[2 if reading[0] == "named" else 1 :]))


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


# What an answer consists of

_WORD = r"(?:and|or)"
_SEPARATOR = (
    r"[,;]|\\(?:text|textrm|mathrm|mbox)\s*\{\s*,?\s*"
    rf"{_WORD}\s*\}}|(?<![a-zA-Z\\{{]){_WORD}(?![a-zA-Z])|\\(?:lor|vee|land|wedge)(?![a-zA-Z])"
)
_BRACKETS = r"(?P<open>\\begin|\\\{|[(\[{])|(?P<close>\\end|\\\}|[)\]}])"
_GREEK = r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|rho|sigma|tau|omega|Delta|Omega)"
_NAME = re.compile(rf"(?:[a-zA-Z]|{_GREEK}(?![a-zA-Z]))(?:_(?:\w|\{{\w+\}}))?'*(?:\([a-zA-Z]\))?")
_IN = re.compile(r"(?:[^\\,<>=]|\\(?!in(?![a-zA-Z])))*\\in(?![a-zA-Z])")
_OTHER_COMMAND = re.compile(rf"(?!{_GREEK})\\(?!text|math|mbox|angle)[a-zA-Z]+")
_BUILDER = re.compile(
    rf"\s*(?:{_NAME.pattern})\s*(?:\\in(?![a-zA-Z])[^:|]*?)?(?::|\||\\(?:mid|vert)(?![a-zA-Z]))"
)
_TEXT_LIST = re.compile(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}]*[,;][^{}]*)\}")
_INFINITY = "\\infty"
_REALS = ("()", "-" + _INFINITY, _INFINITY)


def read(text: str) -> Reading:
    """The reading of an answer in plain spelling (see the module)."""
    pieces, cuts = _cut(_TEXT_LIST.sub(r" \1 ", text), _SEPARATOR)
    entries = [_entry(piece) for piece in pieces if piece]
    if len(entries) < 2:
        return entries[0] if entries else ""
    ranges = ("union", "()", "(]", "[)", "[]")
    if all(kind_of(entry) == "named" and kind_of(entry[2]) in ranges for entry in entries):
        if all(re.search(r"and|wedge", cut) for cut in cuts):
            return _between(entries) or ("list", *entries)
        return "union", *[value_of(entry) for entry in entries]
    names = [entry[1] for entry in entries if kind_of(entry) == "named"]
    if len(names) == len(entries):
        if len({re.sub(r"_.*|'", "", str(name)) for name in names}) == 1:
            return _flat([value_of(entry) for entry in entries])
        if len(set(names)) == len(names):
            return "assigned", *sorted(entries, key=lambda entry: entry[1].lstrip("\\"))
    return _flat(entries)


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
        return _flat([_entry(one) for one in both])
    return _group(text)


def _group(text: str) -> Reading:
    """The reading of a set, tuple or interval, `\\{1,2\\}` or `(1,2]`; other texts are values."""
    opening = re.match(r"\\\{|[(\[{]", text)
    closing = re.search(r"(?:\\\}|[)\]}])$", text)
    if opening is None or closing is None or closing.start() < opening.end():
        return text
    inside = text[opening.end() : closing.start()]
    depth = 0
    for found in re.finditer(_BRACKETS, inside):
        depth += 1 if found["open"] else -1
        if depth < 0:
            return text
    if depth:
        return text
    if opening[0] == "\\{":
        builder = _BUILDER.match(inside)
        return _flat([read(inside[builder.end() :] if builder else inside)])
    pieces, cuts = _cut(inside, ",")
    if not cuts:
        return text
    if opening[0] == "{":
        return _flat([read(inside)])
    items = map(_entry, pieces)
    unsigned = [item.lstrip("+ ") if isinstance(item, str) else item for item in items]
    return opening[0] + closing[0], *unsigned


def _equation(sides: list[str]) -> Reading:
    """The reading of `x = 5` as a named value, or of sides that must all have one value."""
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides = sides[::-1]
    values = [_entry(side) for side in sides]
    if not re.search(rf"[a-zA-Z]|{_GREEK}", _OTHER_COMMAND.sub("", sides[0])):
        return "same", *values
    value = values[1] if len(values) == 2 else ("same", *values[1:])
    return "named", "".join(sides[0].split()), value


def _inequality(sides: list[str], relations: list[str]) -> Reading | None:
    """The interval of `a < x \\le b`, `x > a`, `a > x`; None if it does not bound one unknown."""
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


def _between(entries: list[Reading]) -> Reading | None:
    """`x > 1 \\text{ and } x < 2` as one interval."""
    low = [entry[2] for entry in entries if entry[2][-1] == _INFINITY]
    high = [entry[2] for entry in entries if entry[2][1] == _REALS[1]]
    if len(entries) != 2 or len(low) != 1 or len(high) != 1 or low == high:
        return None
    return low[0][0][0] + high[0][0][1], low[0][1], high[0][2]


def value_of(entry: Reading) -> Reading:
    """The reading without the name of its unknown, if it has one."""
    return entry[2] if kind_of(entry) == "named" else entry


def _flat(items: list[Reading]) -> Reading:
    flat = [part for item in items for part in (item[1:] if kind_of(item) == "list" else (item,))]
    return flat[0] if len(flat) == 1 else ("list", *flat)


def _cut(text: str, separator: str) -> tuple[list[str], list[str]]:
    """The pieces between separators outside of brackets, and these separators."""
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


# How it is spelled

_COMMANDS = {
    **{"×": r"\times", "⋅": r"\cdot", "·": r"\cdot", "∙": r"\cdot", "÷": r"\div", "∞": r"\infty"},
    **{"≤": r"\le", "⩽": r"\le", "≥": r"\ge", "⩾": r"\ge", "≠": r"\ne", "≈": r"\approx"},
    **{"∪": r"\cup", "∩": r"\cap", "∈": r"\in", "∅": r"\emptyset", "±": r"\pm", "∓": r"\mp"},
    **{"∨": r"\lor", "∧": r"\land", "∠": r"\angle", "…": r"\ldots", "ℝ": r"\mathbb{R}"},
    **{"°": r"^\circ", "º": r"^\circ", "−": "-", "–": "-", "—": "-", "′": "'", "⁄": "/"},
}
_MARKS = {"<super>": "^", "<sub>": "_"}
_FRACTION = r"\\frac\{[^{}]*\}\{[^{}]*\}"
_ROOT = re.compile(
    rf"([√∛])\s*(\d+(?:\.\d+)?|\([^()]*\)|\{{[^{{}}]*\}}|[a-zA-Z]|{_FRACTION}|\\[a-zA-Z]+)"
)
_OVERLINED = re.compile("((?:\\d[\u0304\u0305])+)")

# Commands that only change spacing or size. The second of the two backslashes that end a line of
# a matrix does not begin a command.
_SPACING = re.compile(
    r"(?<!\\)\\(?:[,;:> ]|(?:q?quad|en(?:space|skip)|(?:thin|med|thick)space|hfill"
    r"|neg(?:thin|med|thick)space|displaystyle|textstyle|[bB]igg?[lrm]?)(?![a-zA-Z])"
    r"|(?:left|right|middle)(?![a-zA-Z])\.?|[hm]space\*?\s*\{[^{}]*\})|~|(?<!\\)\$"
)
_THOUSANDS = re.compile(
    r"(?<![\d.,}])[1-9]\d{0,2}(?:(?:,|\{,\}|,\\!|\\[,;:! ]|[ ~\u00a0\u2009\u202f])\d{3})+(?!\d)"
)
_UNIT = r"\\(?:text|mathrm)\s*\{[a-zA-Z\s]*\}(?:\^\{?\d\}?)?"
_SAME = (
    (re.compile(r"\\(?:leq(?:slant|q)?|le)(?![a-zA-Z])|<=|=<"), r"\\le "),
    (re.compile(r"\\(?:geq(?:slant|q)?|ge)(?![a-zA-Z])|>="), r"\\ge "),
    (re.compile(r"\\(?:neq?|not\s*=)(?![a-zA-Z])|!="), r"\\ne "),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\(?:varnothing|emptyset)(?![a-zA-Z])|\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\degree(?![a-zA-Z])"), r"^\\circ "),
    (re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*per\s?cent\s*\}|(?<=\d)\s*per\s?cent\b"), r"\\%"),
    (re.compile(r"(?<!\\)%"), r"\\%"),
    (re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)"), r"\1\\frac{\2}{\3}"),
    (re.compile(rf"\\d?frac\s*\{{\s*{_UNIT}\s*\}}\s*\{{\s*{_UNIT}\s*\}}"), ""),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),  # no thousands separator: a decimal comma
)
_REPEATING = (
    re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))"),
    re.compile(r"(\d*)\.(\d*)((?:\\dot\s*(?:\{\d\}|\d)\d*)?\\dot\s*(?:\{\d\}|\d))"),
    re.compile(r"(\d*)\.()\((\d+)\)"),
    re.compile(r"(\d*)\.(\d*?)(\d+?)\3+(?:\s*\\[lc]?dots(?![a-zA-Z])|\.{3})"),
)


def plain_spelling(text: str) -> str:
    text = _without_unicode(text)
    text = _THOUSANDS.sub(_joined, text)
    text = _SPACING.sub(" ", text.replace("\\!", ""))
    for pattern, spelling in _SAME:
        text = pattern.sub(spelling, text)
    for pattern in _REPEATING:
        text = pattern.sub(_as_fraction, text)
    return " ".join(text.split()).rstrip(".").rstrip()


def _without_unicode(text: str) -> str:
    text = _OVERLINED.sub(lambda found: rf"\overline{{{found[1][::2]}}}", text)
    spelled = []
    for character in text:
        if character.isascii():
            spelled.append(character)
            continue
        tag, _, codes = unicodedata.decomposition(character).partition(" ")
        if character in _COMMANDS:
            command = _COMMANDS[character]
            spelled.append(f"{command} " if command[-1].isalpha() else command)
        elif tag == "<fraction>":
            over, _, under = unicodedata.normalize("NFKC", character).partition("⁄")
            spelled.append(rf"\frac{{{over}}}{{{under}}}" if under else character)
        elif mark := _MARKS.get(tag):
            raised = _without_unicode(chr(int(codes, 16)))
            # Digits that are raised one by one are one exponent.
            before = spelled.pop()[:-1] if spelled[-1:] and spelled[-1][0] == mark else mark + "{"
            spelled.append(f"{before}{raised}}}")
        else:
            plain = unicodedata.normalize("NFKC", character)
            name = unicodedata.name(plain, "") if len(plain) == 1 else ""
            kind, _, letter = name.partition(" LETTER ")
            if kind in ("GREEK SMALL", "GREEK CAPITAL") and letter.isalpha():
                letter = letter.lower() if kind == "GREEK SMALL" else letter.capitalize()
                plain = f"\\{letter} "
            spelled.append(plain)

    def root(found: re.Match[str]) -> str:
        inside = found[2][1:-1] if found[2][0] in "({" else found[2]
        return rf"\sqrt{'' if found[1] == '√' else '[3]'}{{{inside}}}"

    return _ROOT.sub(root, "".join(spelled))


def _joined(found: re.Match[str]) -> str:
    """A number without its thousands separators; `(100,200)` stays two numbers."""
    text, start = found.string, found.start()
    bare = re.fullmatch(r"[\d,]+", found[0])
    opened = sum(text.count(one, 0, start) for one in "([{")
    closed = sum(text.count(one, 0, start) for one in ")]}")
    return found[0] if bare and opened > closed else re.sub(r"\D", "", found[0])


def _as_fraction(found: re.Match[str]) -> str:
    whole, fixed = found[1] or "0", found[2]
    repeated = re.sub(r"\D", "", next(group for group in found.groups()[2:] if group))
    over = int(whole + fixed + repeated) - int(whole + fixed)
    value = Fraction(over, (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# Whether two answers are equal


@functools.lru_cache(maxsize=4096)
def equal_answers(answer: Reading, truth: Reading) -> bool:
    """Whether `answer` equals `truth`, as text without spaces or by math-verify. Both are texts
    without delimiters, or results of `read`. Raises Undecided: the comparison took more than
    `VERIFY_SECONDS`, or its process died; QuestionFailed: math-verify raised an exception."""
    if answer == truth or _letters(answer) == _letters(truth):
        return True
    return bool(_VERIFY.ask(answer, truth))


def kind_of(reading: Reading) -> str:
    return "" if isinstance(reading, str) else reading[0]


def _letters(text: Reading) -> Reading:
    return "".join(text.split()) if isinstance(text, str) else text


def _serve_strict() -> None:
    from math_verify import LatexExtractionConfig, parse, verify

    reading = LatexExtractionConfig(boxed_match_priority=0)

    @functools.lru_cache(maxsize=64)
    def expression(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", extraction_config=[reading], parsing_timeout=None)

    def same_value(answer: str, truth: str) -> bool:
        if _letters(answer) == _letters(truth):
            return True
        if ("\\infty" in answer) != ("\\infty" in truth):
            return False  # whether SymPy takes 22 oo - 42 for 0 depends on hash order
        return bool(verify(expression(truth), expression(answer), timeout_seconds=None))

    def equal(answer: Reading, truth: Reading) -> bool:
        if isinstance(answer, str) and isinstance(truth, str):
            # A percent sign may be omitted or applied: 12% equals 12 and 0.12.
            stripped = [text.strip() for text in (answer, truth)]
            bare = [text.removesuffix("\\%").rstrip() for text in stripped]
            signed = [text != left for text, left in zip(stripped, bare, strict=True)]
            same = same_value(*bare)
            if same or signed[0] == signed[1]:
                return same
            part, whole = bare if signed[0] else reversed(bare)
            return same_value(f"\\frac{{{part}}}{{100}}", whole)
        kinds = kind_of(answer), kind_of(truth)
        if kinds == ("named", "named") and answer[1] != truth[1]:
            sides = [answer[2], truth[2]]
            equations = [f"{one[1]} = {one[2]}" for one in (answer, truth)]
            return all(isinstance(side, str) for side in sides) and same_value(*equations)
        if "named" in kinds:  # a value without a name matches any name
            return equal(*(one[2] if kind_of(one) == "named" else one for one in (answer, truth)))
        if kinds[0] == "same":
            return all(equal(side, truth) for side in answer[1:])
        if kinds[1] == "same":
            return equal(answer, truth[-1])
        if "assigned" in kinds:
            return set(kinds) <= {"assigned", "list", "()"} and in_order(answer[1:], truth[1:])
        if kinds[0] != kinds[1]:
            return False
        if kinds[0] in ("list", "union"):  # in any order
            return covers(answer, truth) and covers(truth, answer)
        return in_order(answer[1:], truth[1:])

    def in_order(answer: Sequence[Reading], truth: Sequence[Reading]) -> bool:
        return len(answer) == len(truth) and all(map(equal, answer, truth))

    def covers(answer: Reading, truth: Reading) -> bool:
        return all(any(equal(one, other) for other in truth[1:]) for one in answer[1:])

    serve(equal)


TOLERANCE = 1e-3
SYMPY_SECONDS = 10  # processor time for one comparison; the public rule has no limit
_SYMPY = AskedProcess("aflow_tune.scoring.mathematics", "SymPy", SYMPY_SECONDS, "published")


@functools.lru_cache(maxsize=4096)
def published_equal(answer: str, truth: str) -> bool:
    """Whether `answer` equals `truth`. Raises Undecided: it took more than `SYMPY_SECONDS`."""
    if answer == truth:
        return True
    given, expected = as_number(answer), as_number(truth)
    if given is not None and expected is not None:
        return isclose(given, expected, abs_tol=TOLERANCE)
    return bool(_SYMPY.ask(answer, truth))


def as_number(text: str) -> float | None:
    """The number, commas removed, divided by 100 if it ends with `%`; None if it is not one."""
    text = text.replace(",", "")
    percent = text.endswith("%")
    try:
        return float(text[:-1].removesuffix("\\")) / 100 if percent else float(text)
    except ValueError:
        return None


def _serve_published() -> None:
    from sympy import N, simplify
    from sympy.parsing.sympy_parser import parse_expr

    from aflow_tune.scoring.asked_process import guard_sympy, latex_parser

    guard_sympy()
    parsers = (latex_parser(), parse_expr)

    def expression(text: str) -> Any:
        for parse in parsers:
            with contextlib.suppress(Exception):
                return parse(text)
        return text

    def equal(answer: str, truth: str) -> bool:
        left, right = expression(answer), expression(truth)
        with contextlib.suppress(Exception):
            if simplify(left - right) == 0:
                return True
        with contextlib.suppress(Exception):
            return isclose(N(left), N(right), abs_tol=TOLERANCE)
        return False

    serve(equal)


if __name__ == "__main__":
    {"strict": _serve_strict, "published": _serve_published}[sys.argv[2]]()
