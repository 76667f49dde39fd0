"""Scoring short textual answers, HotpotQA's and DROP's: token F1, published and strict.

published (benchmarks/hotpotqa.py and drop.py of the public AFlow code): F1 of the tokens after
SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single spaces. DROP splits
answer and reference at `|` and takes the best pair.

strict is built from the same F1 and differs where that can be gamed or is unjust:

- 'yes', 'no' and 'noanswer' count only alone (hotpot_evaluate_v1.py, Yang et al. 2018);
- numbers must be the reference's, none missing and none more (the number rule of DROP's own
  metric, Dua et al. 2019, in both directions), and keep their decimal point and sign;
- a choice ('Paris or London') counts only where the reference is one;
- every part of an answer split at `|` must be good: the score is the worst part's;
- an answer equal to the reference as written scores 1 even where normalisation leaves nothing.
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
_NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))")


def normalised(text: str) -> str:
    """SQuAD's normalisation of an answer (Rajpurkar et al. 2016, evaluate-v1.1.py)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def token_f1(answer: str, reference: str) -> float:
    """F1 of the normalised tokens as multisets, in [0, 1]; 0 where nothing is shared."""
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
    """F1 against the one reference by the strict rule.

    Raises:
        CannotScore: the reference is empty.
    """
    if not reference.strip():
        raise CannotScore("an empty reference")
    return _strict(answer, reference)


def drop_published(answer: str, references: str) -> Score:
    """The best F1 of a part of the answer against a reference; both are split at `|`.

    Raises:
        CannotScore: there is no reference.
    """
    parts = answer.split("|")
    return _score(max(token_f1(part, ref) for ref in split(references) for part in parts))


def drop_strict(answer: str, references: str) -> Score:
    """The worst part's best F1 by the strict rule.

    Raises:
        CannotScore: there is no reference.
    """
    expected = split(references)
    parts = [part for part in answer.split("|") if part.strip()]
    if not parts:
        return wrong("an empty answer")
    best = [max((_strict(part, ref) for ref in expected), key=_value) for part in parts]
    return min(best, key=_value)


def split(references: str) -> list[str]:
    """The references of a DROP row that are not blank.

    Raises:
        CannotScore: there is none.
    """
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
    return _score(token_f1(answer, reference))


def _numbers(text: str) -> set[float]:
    return {float(found.replace(",", "")) for found in _NUMBER.findall(text) if found}


def _score(f1: float) -> Score:
    return Score(f1, "" if f1 == 1 else "no shared words" if f1 == 0 else "partly shared words")


def _value(score: Score) -> float:
    return score.value or 0.0
