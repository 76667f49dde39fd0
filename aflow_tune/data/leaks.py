"""Leaks: held-out items that also occur in the training data, exactly or nearly.

The input of a row is its columns without ids, answers and descriptions. Rows are exact duplicates
if their inputs are equal up to case, white space and Unicode form (NFKC). They are near-duplicates
if their sets of `WORDS`-word phrases have a Jaccard similarity (shared / all) of at least `NEAR`;
in a text of forty words that allows two changed words. Phrases in more than `COMMON_SHARE` of the
different texts count as template and are left out. Paraphrases and translations are not found.

The search misses no pair: each similar text shares one of the rarest phrases of the held-out text
(prefix filtering: Chaudhuri, Ganti and Kaushik, "A Primitive Operator for Similarity Joins in Data
Cleaning", ICDE 2006).
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from aflow_tune.data.catalogue import Tool
from aflow_tune.data.dialogues import as_dialogue, called
from aflow_tune.data.rows import Table

NEAR = 0.7
"""Jaccard similarity from which two inputs are near-duplicates."""
WORDS = 3
"""Words in a phrase."""
COMMON_SHARE = 0.05
COMMON_AT_LEAST = 20
"""Phrases in more than `COMMON_SHARE` of the different texts, and in more than this many of them,
are ignored."""

# Words of column names. Columns with `_ANSWERS` are left out only if another column holds the
# question: in number games a "target" may be what is asked.
_MARKS = {"id", "ids", "idx", "index", "uid", "uuid", "guid", "hash", "seed", "split"}
_ASKS = {"question", "problem", "prompt", "query", "instruction", "input", "text", "messages"}
_ANSWERS = {
    *("answer", "answers", "solution", "solutions", "label", "labels", "target", "targets"),
    *("output", "outputs", "response", "completion", "rationale", "reasoning", "explanation"),
    *("metadata", "meta", "difficulty", "level", "score", "reward", "timestamp", "date"),
    *("truth", "gold", "source", "ref", "reference", "references", "cot", "facts", "benchmark"),
    *("test", "tests", "type", "subject", "category", "topic"),
}
_TESTS = {"test", "tests"}
_CODE = {"code"}

# A word; a character of a script without spaces; or an operator, which changes a calculation.
_WORD = re.compile(
    r"[぀-ヿ㐀-鿿가-힣]|[^\W぀-ヿ㐀-鿿가-힣]+|[-+*/=<>^%]",
)


class Leak(NamedTuple):
    """A held-out row that also occurs in the training data; both are row numbers from 0."""

    held_out: int
    trained: int
    similarity: float
    """Jaccard similarity of the inputs; 1.0 for exact duplicates."""
    exact: bool


def fingerprint(row: Mapping[str, Any]) -> bytes:
    """A hash of the row's normalised input; equal for exact duplicates."""
    columns = _inputs(tuple(row))
    if len(columns) == 1:
        text = str(row[columns[0]])
    else:
        text = "\x1f".join(f"{name}={row[name]}" for name in columns)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    text = " ".join(text.casefold().split())
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def input_text(row: Mapping[str, Any]) -> str:
    """The values of the input columns, joined by spaces."""
    return " ".join(str(row[name]) for name in _inputs(tuple(row)))


def find_leaks(
    training: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
    *,
    near: bool = True,
) -> list[Leak]:
    """Held-out rows that duplicate a training row, or with `near` are similar to one, each with the
    most similar training row; in order of the held-out rows."""
    trained: dict[bytes, int] = {}
    for number, row in enumerate(training):
        trained.setdefault(fingerprint(row), number)
    closest: dict[int, Leak] = {}
    for number, row in enumerate(held_out):
        at = trained.get(fingerprint(row))
        if at is not None:
            closest[number] = Leak(number, at, 1.0, exact=True)
    if near:
        rest = [number for number in range(len(held_out)) if number not in closest]
        texts = [input_text(held_out[number]) for number in rest]
        pairs = near_pairs([input_text(row) for row in training], texts)
        for at, number, similarity in pairs:
            known = closest.get(rest[number])
            if known is None or similarity > known.similarity:
                closest[rest[number]] = Leak(rest[number], at, similarity, exact=False)
    return [closest[number] for number in sorted(closest)]


def leaks_between(
    training: Sequence[Table], held_out: Sequence[Table], *, near: bool = True
) -> list[tuple[Table, list[tuple[Leak, str]]]]:
    """`find_leaks` for each held-out table, with the place of the training row."""
    rows = [row for table in training for row in table.rows]
    places = [place for table in training for place in table.places]
    found = [(table, find_leaks(rows, table.rows, near=near)) for table in held_out]
    return [(table, [(leak, places[leak.trained]) for leak in leaks]) for table, leaks in found]


@dataclass
class SharedDialogues:
    """What held-out dialogues share with training: rows with the same dialogue (its id, or all of
    its messages), rows of the same scenario, and rows that call a tool called in training."""

    rows: int
    dialogues: list[str] = field(default_factory=list)
    """Places of rows, as are `scenarios` and `tools`."""
    scenarios: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """A sentence for each kind that is shared."""
        for places, told in (
            (self.dialogues, "are dialogues of the training data"),
            (self.scenarios, "are of a scenario of the training data"),
            (self.tools, "call tools that the training data calls: not a leak, but no new tools"),
        ):
            if places:
                yield f"{len(places)} of {self.rows} rows {told}, such as {places[0]}"


def shared_dialogues(
    training: Sequence[Table], held_out: Table, catalogue: Mapping[str, Tool] | None = None
) -> SharedDialogues | None:
    """What the dialogues of a held-out table share with training; None without dialogues."""

    def marks(row: Mapping[str, Any]) -> tuple[set[str], set[str], set[str]] | None:
        try:
            dialogue = as_dialogue(row, catalogue)
        except ValueError:
            return None
        told = dialogue.get("metadata")
        if not dialogue["tools"] and told is None:
            return None  # no agent's data
        told = told if isinstance(told, Mapping) else {}
        scenario = dialogue.get("scenario") or told.get("scenario") or told.get("scenario_id")
        said = [(it["role"], it["content"], called([it])) for it in dialogue["messages"]]
        same = {json.dumps(said, ensure_ascii=False)}
        same |= {str(row[key]) for key in ("dialog_id", "id") if isinstance(row.get(key), str)}
        tools = set(called(dialogue["messages"]))
        return same, {str(scenario)} if scenario else set(), tools

    known: list[set[Any]] = [set(), set(), set()]
    for table in training:
        for row in table.rows:
            for seen, more in zip(known, marks(row) or ((), (), ()), strict=True):
                seen.update(more)
    found = SharedDialogues(len(held_out.rows))
    dialogues = False
    for row, place in zip(held_out.rows, held_out.places, strict=True):
        of_row = marks(row)
        dialogues |= of_row is not None
        kinds = (found.dialogues, found.scenarios, found.tools)
        for places, seen, own in zip(kinds, known, of_row or ((), (), ()), strict=True):
            if seen.intersection(own):
                places.append(place)
    return found if dialogues else None


def near_pairs(
    left: Sequence[str], right: Sequence[str], threshold: float = NEAR
) -> list[tuple[int, int, float]]:
    """(number in `left`, number in `right`, similarity) of all pairs at or above `threshold`."""
    (left_sets, right_sets), spread = _phrases(left, right)
    holders: dict[int, list[int]] = defaultdict(list)
    for number, phrases in enumerate(right_sets):
        for phrase in _rarest(phrases, spread, threshold):
            holders[phrase].append(number)
    pairs = []
    for number, phrases in enumerate(left_sets):
        candidates = {other for phrase in holders.keys() & phrases for other in holders[phrase]}
        for other in sorted(candidates):
            shared = len(phrases & right_sets[other])
            similarity = shared / (len(phrases) + len(right_sets[other]) - shared)
            if similarity >= threshold:
                pairs.append((number, other, similarity))
    return pairs


def words(text: str) -> list[str]:
    """The words of a text, normalised (NFKC, case-folded)."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    return _WORD.findall(text.casefold())


def _phrases(*groups: Sequence[str]) -> tuple[list[list[set[int]]], Counter[int]]:
    """For each text the hashes of its phrases without template phrases; and the number of different
    texts that contain each phrase."""
    made = []
    spread: Counter[int] = Counter()
    different: set[frozenset[int]] = set()
    for texts in groups:
        sets = []
        for text in texts:
            of_text = words(text)
            last = max(1, len(of_text) - WORDS + 1)
            phrases = {hash(tuple(of_text[at : at + WORDS])) for at in range(last)}
            sets.append(phrases if of_text else set())
            key = frozenset(phrases)
            if key not in different:
                different.add(key)
                spread.update(phrases)
        made.append(sets)
    most = max(COMMON_AT_LEAST, COMMON_SHARE * len(different))
    common = {phrase for phrase, texts in spread.items() if texts > most}
    if common:
        made = [[phrases - common for phrases in sets] for sets in made]
    return made, spread


def _rarest(phrases: set[int], spread: Counter[int], threshold: float) -> list[int]:
    """The rarest phrases, as many as ensure that every similar set has at least one of them."""
    if not phrases:
        return []
    # The tolerance keeps pairs that are exactly at the threshold despite floating point.
    keep = len(phrases) - math.ceil(threshold * len(phrases) - 1e-9) + 1
    return sorted(phrases, key=lambda phrase: (spread[phrase], phrase))[:keep]


@lru_cache(maxsize=256)
def _inputs(columns: tuple[str, ...]) -> list[str]:
    """The input columns, sorted; all columns if none qualifies."""
    parts = {name: set(re.split(r"[^a-z]+", name.lower())) for name in columns}
    kept = [name for name in columns if not parts[name] & _MARKS]
    if any(parts[name] & _ASKS for name in kept):
        # Next to tests, code is the solution; elsewhere the question may be about it.
        answers = _ANSWERS | _CODE if any(parts[name] & _TESTS for name in kept) else _ANSWERS
        kept = [name for name in kept if not parts[name] & answers]
    return sorted(kept or columns)
