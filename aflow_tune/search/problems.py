"""What training problems show without a model: a varied order, kinds, joints, and examples.

Every prefix of `varied` covers the kinds of problems about evenly, so that a race of six problems
rarely misses a kind. `telling_words` separate kinds; `joints` are where one text asks two things.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[a-z_]+|\d+|[^\w\s]")
_JOINTS = (" and ", "; ", "? ", ". ", "\n\n", "\n", ", then ")

MOST_SHOWN = 600
"""Most characters of one example."""


def features(texts: Sequence[str]) -> list[frozenset[str]]:
    """Of each text its words and pairs of words that a twentieth of the texts share; every number
    is the same word."""
    sets = []
    for text in texts:
        words = ["#" if word.isdigit() else word for word in _WORD.findall(text.lower())]
        sets.append({*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))})
    among = Counter(word for own in sets for word in own)
    least = max(2, len(texts) // 20)
    return [frozenset(word for word in own if among[word] >= least) for own in sets]


def _alike(one: frozenset[str], other: frozenset[str]) -> float:
    """The Jaccard similarity of two sets of features."""
    either = len(one | other)
    return len(one & other) / either if either else 1.0


def varied(texts: Sequence[str]) -> list[int]:
    """The places of all texts, each next one the least like those before it; ties keep order."""
    sets = features(texts)
    near, left, order = [0.0] * len(texts), list(range(len(texts))), list[int]()
    while left:
        at = min(left, key=lambda place: (round(near[place], 9), place))
        left.remove(at)
        order.append(at)
        for other in left:
            # Steep, so that the nearest counts most, and yet each repetition of a kind adds up.
            near[other] += _alike(sets[at], sets[other]) ** 8
    return order


def telling_words(texts: Sequence[str], most: int = 6) -> list[str]:
    """Words that a part of the texts holds and the others do not, those nearest to a half first;
    of words that stand in the same texts the longest."""
    holders: dict[str, set[int]] = {}
    for place, text in enumerate(texts):
        for word in set(re.findall(r"[a-z]{3,}", text.lower())):
            holders.setdefault(word, set()).add(place)
    # A router tests for the word as a part of the text.
    parts = {
        word: frozenset(at for at, text in enumerate(texts) if word in text.lower())
        for word in holders
    }
    least = max(2, len(texts) // 10)
    by_texts: dict[frozenset[int], str] = {}
    for word, where in sorted(parts.items(), key=lambda item: (-len(item[0]), item[0])):
        if least <= len(where) <= len(texts) - least:
            by_texts.setdefault(where, word)
    ranked = sorted(by_texts, key=lambda where: (abs(len(where) - len(texts) / 2), by_texts[where]))
    return [by_texts[where] for where in ranked[:most]]


def joints(texts: Sequence[str], most: int = 2) -> list[str]:
    """Texts at which a part of the problems can be cut in two, the most frequent first."""
    counts = Counter(
        joint
        for text in texts
        for joint in _JOINTS
        if all(part.strip() for part in text.partition(joint)[::2])
    )
    return [joint for joint, count in counts.most_common(most) if count >= max(2, len(texts) // 10)]


def examples(pairs: Sequence[tuple[str, str]], draws: int = 2) -> dict[str, str]:
    """Instructions that show solved problems, by a name for each: one, two that are alike, or three
    that are not; `draws` of each, all from the shorter half of the questions."""
    short = sorted(pairs, key=lambda pair: len(pair[0]))[: max(3, len(pairs) // 2)]
    short = [pair for pair in short if len(pair[0]) + len(pair[1]) <= MOST_SHOWN]
    questions = [question for question, _ in short]
    order, sets = varied(questions), features(questions)
    found = {}
    for draw in range(draws):
        first = order[draw : draw + 1]
        near = sorted(order, key=lambda at: -_alike(sets[at], sets[order[draw]])) if first else []
        for name, chosen in (
            ("one example", first),
            ("two alike", near[:2]),
            ("three unlike", order[3 * draw : 3 * draw + 3]),
        ):
            shown = [f"Question: {short[at][0]}\nAnswer: {short[at][1]}" for at in chosen]
            if len(shown) == {"one": 1, "two": 2, "three": 3}[name.split()[0]]:
                found[f"{name}, {draw + 1}"] = "\n".join(shown)
    return found
