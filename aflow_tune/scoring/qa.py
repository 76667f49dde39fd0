"""Scores short textual answers (HotpotQA, DROP) by token F1, published and strict.

docs/scoring.md describes both rules, and why hedging does not pay by the strict one. There the
numbers must be exactly the reference's: the number rule of DROP's metric (Dua et al. 2019) in both
directions; 'yes', 'no' and 'noanswer' count only alone (hotpot_evaluate_v1.py, Yang et al. 2018).
"""

from __future__ import annotations

import re
import string
from collections import Counter

from aflow_tune.scoring.types import RIGHT, CannotScore, Score, wrong

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}
_CHOICE = re.compile(r"\b(?:or|either)\b", re.IGNORECASE)
# `no` does not match before a number: No. 2 is a number.
_DENIAL = re.compile(
    r"\b(?:not|never|neither|nor|none|nobody|nothing|cannot|without|except|excluding|unlike|but"
    r"|instead|rather|\w+n['\u2019]t|no(?!\.?\s*\d))\b",
    re.IGNORECASE,
)
# Not the comma of 40,000 or the point of D. J. or 1.5; a hyphen only between spaces.
_BETWEEN = re.compile(
    r"(?<!\d),|,(?!\d)|[;/|\\(){}\[\]&+<>=\u2013\u2014\u2192\u2022\n]|\s[-~*]\s|[!?](?=\s)"
    r"|(?<=[^\W\d_]{4})\.(?=\s)|\b(?:and|or|nor|vs|versus|alternatively|otherwise|else|plus|also)\b",
    re.IGNORECASE,
)
_NAMES_NOTHING = {
    *("and", "or", "at", "by", "for", "from", "in", "of", "on", "s", "to", "with", "as"),
    *("is", "was", "were", "are", "be", "been", "it", "its"),
}
_NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))")


def normalised(text: str) -> str:
    """SQuAD's normalisation of an answer (Rajpurkar et al. 2016, evaluate-v1.1.py)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(answer: str, reference: str) -> float:
    """F1 of the normalised tokens as multisets, in [0, 1]; 0 if they share none."""
    given, expected = normalised(answer).split(), normalised(reference).split()
    shared = sum((Counter(given) & Counter(expected)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(given), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def hotpotqa_published(answer: str, reference: str) -> Score:
    """F1 against the one reference."""
    return _score(token_f1(answer, reference))


def hotpotqa_strict(answer: str, reference: str) -> Score:
    """The strict score against the one reference. Raises CannotScore: the reference is empty."""
    if not reference.strip():
        raise CannotScore("an empty reference")
    return _strict(answer, reference)


def drop_published(answer: str, references: str) -> Score:
    """The best F1 of any part and any reference, split at `|`. Raises CannotScore: no reference."""
    parts = answer.split("|")
    return _score(max(token_f1(part, ref) for ref in split(references) for part in parts))


def drop_strict(answer: str, references: str) -> Score:
    """The worst part's score, each against its own reference; the better of two ways to split."""
    expected = split(references)
    whole = [part for part in answer.split("|") if part.strip()]
    if not whole:
        return wrong("an empty answer")
    pieces = _pieces(answer)
    ways = (whole, pieces) if len(pieces) > 1 else (whole,)
    return max((_parts(parts, expected) for parts in ways), key=_value)


def _parts(parts: list[str], references: list[str]) -> Score:
    """The lowest score of the parts, each against the best reference that is still free."""
    left, worst = list(references), RIGHT
    for part in parts:
        if not left:
            return wrong("more answers than there are")
        best = max(left, key=lambda reference: _value(_strict(part, reference)))
        worst = min(worst, _strict(part, best), key=_value)
        left.remove(best)
    return worst


def split(references: str) -> list[str]:
    """The references of a DROP row that are not blank. Raises CannotScore: all are blank."""
    found = [part for part in references.split("|") if part.strip()]
    if not found:
        raise CannotScore("an empty reference")
    return found


def _strict(answer: str, reference: str) -> Score:
    if answer.strip() == reference.strip():
        return RIGHT
    given, expected = normalised(answer), normalised(reference)
    if given != expected and (expected in _CLOSED or given in _CLOSED):
        return wrong(f"{reference!r} was wanted and nothing else")
    if _numbers(answer) != _numbers(reference):
        return wrong("the numbers differ from the reference's")
    if _CHOICE.search(answer) and not _CHOICE.search(reference):
        return wrong("a choice of candidates")
    if bool(_DENIAL.search(answer)) != bool(_DENIAL.search(reference)):
        return wrong("denied, or not denied as the reference is")
    f1 = token_f1(answer, reference)
    if all(token.isdigit() for token in expected.split()):
        return _score(f1)
    naming, wanted = _naming(answer), _naming(reference)
    pieces, left = _pieces(answer), wanted.copy()
    if len(pieces) > len(_pieces(reference)):
        for piece in pieces:  # a repeated one finds nothing left to share
            if not (shared := _naming(piece) & left):
                return wrong("a list of candidates")
            left -= shared
    # Precision of the words that name something, times the F1 of the shared words alone.
    both = (naming & wanted).total()
    recall = both / wanted.total() if both else 0.0
    return _score(min(f1, both / naming.total() * 2 * recall / (1 + recall) if both else 0.0))


def _pieces(text: str) -> list[str]:
    """The parts between commas, brackets, 'and' and the like that name something."""
    return [part for part in _BETWEEN.split(text) if set(normalised(part).split()) - _NAMES_NOTHING]


def _naming(text: str) -> Counter[str]:
    """The tokens that name something; all tokens if none does."""
    tokens = normalised(text).split()
    return Counter([token for token in tokens if token not in _NAMES_NOTHING] or tokens)


def _numbers(text: str) -> set[float]:
    return {float(found.replace(",", "")) for found in _NUMBER.findall(text) if found}


def _score(f1: float) -> Score:
    return Score(f1, "" if f1 == 1 else "no shared words" if f1 == 0 else "partly shared words")


def _value(score: Score) -> float:
    return score.value or 0.0
