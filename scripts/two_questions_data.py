"""The tasks of the recipe in which a small policy writes workflows: sums, capitals, and pairs.

A question asks for the value of an expression, for the capital of a country, or for two such
things in either order: six kinds. The executor, a frozen SmolLM2-135M, can write a program for an
expression and knows these capitals if shown how to answer. It can do neither task in the other's
way, nor a pair in one call, so each kind needs a graph of its own.

The countries are those whose capital the model completes from two examples (50 of 80 that were
tried), so that the policy learns to write workflows and not geography. The 15 countries and all
expressions of the held-out rows appear in no training row.

    python scripts/two_questions_data.py workflows/data/two_questions      writes the files
"""

from __future__ import annotations

import random
import sys
from itertools import zip_longest
from pathlib import Path

from three_terms_data import write_rows

SEED = 20
ROWS = {"train": 40, "held_out": 18}
"""Rows of each kind; fewer capitals if there are not so many countries."""
HELD_OUT_COUNTRIES = 15
JOINT = " and what is "
_KINDS = {
    "sum": ("math", "s"),
    "capital": ("qa", "c"),
    "two_sums": ("math", "ss"),
    "two_capitals": ("qa", "cc"),
    "sum_capital": ("math", "sc"),
    "capital_sum": ("qa", "cs"),
}
"""Problem type of each kind, and its parts: s an expression, c a capital."""
_CAPITALS = {
    **{"France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid"},
    **{"Portugal": "Lisbon", "Greece": "Athens", "Egypt": "Cairo", "Japan": "Tokyo"},
    **{"China": "Beijing", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana"},
    **{"Kenya": "Nairobi", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki"},
    **{"Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest"},
    **{"Ireland": "Dublin", "Russia": "Moscow", "Iran": "Tehran", "Iraq": "Baghdad"},
    **{"Syria": "Damascus", "Israel": "Jerusalem", "Thailand": "Bangkok", "Vietnam": "Hanoi"},
    **{"Cambodia": "Phnom Penh", "Indonesia": "Jakarta", "Philippines": "Manila"},
    **{"Venezuela": "Caracas", "Ecuador": "Quito", "Argentina": "Buenos Aires"},
    **{"Tunisia": "Tunis", "Libya": "Tripoli", "Sudan": "Khartoum", "Ethiopia": "Addis Ababa"},
    **{"Ghana": "Accra", "Senegal": "Dakar", "Uganda": "Kampala", "Rwanda": "Kigali"},
    **{"Zambia": "Lusaka", "Belgium": "Brussels", "Switzerland": "Bern", "Bulgaria": "Sofia"},
    **{"Romania": "Bucharest", "Serbia": "Belgrade", "Estonia": "Tallinn", "Qatar": "Doha"},
}

Row = dict[str, object]


def two_questions() -> dict[str, list[Row]]:
    """The rows of 'train' and 'held_out', each shuffled with a fixed seed; in 'train' the kinds
    then take turns, so that every step of six tasks learns from all of them.

    A row has `question` ('What is 61 - 5 and what is the capital of Peru?'), `answer`
    ('56 Lima'), `problem_type` and `kind`.
    """
    draw = random.Random(SEED)
    countries = sorted(_CAPITALS)
    draw.shuffle(countries)
    split = {
        "held_out": countries[:HELD_OUT_COUNTRIES],
        "train": countries[HELD_OUT_COUNTRIES:],
    }
    asked: set[str] = set()
    rows: dict[str, list[Row]] = {}
    for name, own in split.items():
        rows[name] = [
            row for kind in _KINDS for row in _of_kind(kind, own, ROWS[name], asked, draw)
        ]
        draw.shuffle(rows[name])
    of_kind = [[row for row in rows["train"] if row["kind"] == kind] for kind in _KINDS]
    rows["train"] = [row for turn in zip_longest(*of_kind) for row in turn if row]
    return rows


def _of_kind(
    kind: str, countries: list[str], count: int, asked: set[str], draw: random.Random
) -> list[Row]:
    problem_type, parts = _KINDS[kind]
    rows: list[Row] = []
    if parts == "c":
        count = min(count, len(countries))
    while len(rows) < count:
        chosen = iter(draw.sample(countries, 2))
        pairs = [
            _expression(asked, draw) if part == "s" else _capital(next(chosen)) for part in parts
        ]
        question = "What is " + JOINT.join(thing for thing, _ in pairs) + "?"
        if question in asked:
            continue
        asked.add(question)
        answer = " ".join(value for _, value in pairs)
        rows.append(
            {"question": question, "answer": answer, "problem_type": problem_type, "kind": kind}
        )
    return rows


def _capital(country: str) -> tuple[str, str]:
    return f"the capital of {country}", _CAPITALS[country]


def _expression(asked: set[str], draw: random.Random) -> tuple[str, str]:
    """An expression that was not used yet, and its value."""
    while True:
        a, b, c = draw.randint(12, 99), draw.randint(12, 99), draw.randint(2, 99)
        first, second = draw.choice("+-*"), draw.choice("+-")
        text = f"{a} {first} {b} {second} {c}"
        if text not in asked:
            asked.add(text)
            value = {"+": a + b, "-": a - b, "*": a * b}[first]
            return text, str(value + c if second == "+" else value - c)


if __name__ == "__main__":
    for name, rows in two_questions().items():
        write_rows(Path(sys.argv[1]) / f"{name}.jsonl", rows)
