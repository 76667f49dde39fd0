# ruff: noqa: RUF001 (the characters that answers are written with)
r"""One spelling for a mathematical answer, whichever of LaTeX's and Unicode's it was written in.

Spaces of LaTeX become blanks (`12\,\text{cm}`), thousands and decimals plain digits (`1{,}000`),
repeating decimals fractions (`0.1\overline{6}`), and characters such as ½, √, π and ≤ commands.
What the answer consists of is left to `math_reading.py`.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

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

# Commands that only space or size what stands around them. A line of a matrix ends in two
# backslashes, the second of which begins no command.
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
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), "."),  # what is left of them is a decimal comma
)
_DIGIT = r"(?:\{(\d)\}|\s*(\d))"
_REPEATING = (
    re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d))"),
    re.compile(r"(\d*)\.(\d*)((?:\\dot\s*(?:\{\d\}|\d)\d*)?\\dot\s*(?:\{\d\}|\d))"),
    re.compile(r"(\d*)\.()\((\d+)\)"),
    re.compile(r"(\d*)\.(\d*?)(\d+?)\3+(?:\s*\\[lc]?dots(?![a-zA-Z])|\.{3})"),
)


def plain_spelling(text: str) -> str:
    """The answer in the one spelling. Same value, no claim that it can be read."""
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
            # Digits that are raised one by one stand in one exponent.
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
    return _ROOT.sub(_as_root, "".join(spelled))


def _as_root(found: re.Match[str]) -> str:
    index = "" if found[1] == "√" else "[3]"
    inside = found[2]
    return rf"\sqrt{index}{{{inside[1:-1] if inside[0] in '({' else inside}}}"


def _joined(found: re.Match[str]) -> str:
    """A number with thousands apart in one piece; `(100,200)` are two numbers, and stay so."""
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
