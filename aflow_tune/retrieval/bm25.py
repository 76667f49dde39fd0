"""BM25, the ranking by words: the baseline beside every retriever, and its other half.

score(q, d) = sum over the words w of q of idf(w) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|)),
f the times that w stands in d, idf(w) = ln(1 + (N - n + 0.5) / (n + 0.5)) for n of N texts with w
(Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009; the idf that is never below
zero is Lucene's). Words are lower-case runs of letters and digits, without Lucene's English stop
words, plurals cut by Harman's S stemmer (How effective is suffixing?, 1991): on short descriptions
both help a lot. For texts of another language they do next to nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

K1, B = 1.5, 0.75
_WORD = re.compile(r"[^\W_]+")
_STOP = """a an and are as at be but by for if in into is it no not of on or such that the their
then there these they this to was will with"""
_STOP_WORDS = frozenset(_STOP.split())


class BM25:
    """An index over texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        counts = [Counter(_words(text)) for text in texts]
        lengths = np.array([found.total() for found in counts], dtype=np.float64)
        norm_N = K1 * (1 - B + B * lengths / max(lengths.mean(), 1.0))
        places: dict[str, list[tuple[int, int]]] = {}
        for number, found in enumerate(counts):
            for word, times in found.items():
                places.setdefault(word, []).append((number, times))
        self.size = len(texts)
        self._weights: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        for word, held in places.items():
            where, times = np.array(held, dtype=np.int64).T
            idf = np.log1p((self.size - len(held) + 0.5) / (len(held) + 0.5))
            self._weights[word] = where, idf * times * (K1 + 1) / (times + norm_N[where])

    def scores(self, query: str) -> NDArray[np.float64]:
        """The score of each text, [N]; 0 without a common word."""
        found = np.zeros(self.size)
        for word in _words(query):
            if word in self._weights:
                where, weights = self._weights[word]
                found[where] += weights
        return found


def _words(text: str) -> list[str]:
    return [_singular(word) for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]


def _singular(word: str) -> str:
    if len(word) > 3 and word.endswith("s"):
        if word.endswith("ies") and word[-4] not in "ae":
            return word[:-3] + "y"
        if word[-2] not in "us" and not word.endswith(("aes", "ees", "oes")):
            return word[:-1]
    return word
