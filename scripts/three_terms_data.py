"""The quickstart's tasks: sums of three one-digit terms, split so that nothing leaks.

Each of the 729 ordered sums 'a + b + c' with terms 1 to 9 occurs once. Sums with the same terms in
another order count as the same question, and whole groups of these are held out, so no held-out
question appears in training in any order of its terms. Not held out are the single additions inside
a question: there are only 81 of 'a + b', and they occur in training questions too. The score
measures new questions, not new additions.

Also written: a few rows of both for a smoke test, worked examples of single additions for SFT, and
pairs of a right and a wrong answer for DPO.

    python scripts/three_terms_data.py workflows/data/three_terms      writes the shipped files
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

SEED = 20
HELD_OUT_AT_LEAST = 128


def normalised(question: str) -> str:
    """The question without white space and with sorted terms: equal for the same question."""
    return "+".join(sorted(question.replace(" ", "").split("+")))


def three_term_sums() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """(training rows, held-out rows), each shuffled once with a fixed seed.

    A row has `question` ('3 + 4 + 5'), `terms` ([3, 4, 5]) and `answer` (12).
    """
    classes: dict[str, list[dict[str, object]]] = {}
    for terms in product(range(1, 10), repeat=3):
        question = " + ".join(map(str, terms))
        row = {"question": question, "terms": list(terms), "answer": sum(terms)}
        classes.setdefault(normalised(question), []).append(row)
    draw = random.Random(SEED)
    names = sorted(classes)
    draw.shuffle(names)
    held_out: list[dict[str, object]] = []
    while len(held_out) < HELD_OUT_AT_LEAST:
        held_out += classes.pop(names.pop())
    train = [row for name in names for row in classes[name]]
    draw.shuffle(train)
    draw.shuffle(held_out)
    return train, held_out


def single_additions() -> list[dict[str, object]]:
    """The additions that the workflow's two calls make: 1 to 18 plus 1 to 9, shuffled.

    A row has `prompt` ('3 + 4'), `response` and `chosen` (the answer in its tag), and `rejected`
    (another number in the tag).
    """
    draw = random.Random(SEED)
    rows: list[dict[str, object]] = []
    for a, b in product(range(1, 19), range(1, 10)):
        right, wrong = f"<answer>{a + b}</answer>", a + b + draw.choice((-2, -1, 1, 2))
        row = {"response": right, "chosen": right, "rejected": f"<answer>{wrong}</answer>"}
        rows.append({"prompt": f"{a} + {b}", **row})
    draw.shuffle(rows)
    return rows


def write_rows(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    train_rows, held_out_rows = three_term_sums()
    write_rows(folder / "train.jsonl", train_rows)
    write_rows(folder / "held_out.jsonl", held_out_rows)
    write_rows(folder / "smoke.jsonl", train_rows[:16])
    write_rows(folder / "smoke_held_out.jsonl", held_out_rows[:8])
    examples = single_additions()
    write_rows(
        folder / "examples.jsonl", ({k: row[k] for k in ("prompt", "response")} for row in examples)
    )
    write_rows(
        folder / "pairs.jsonl",
        ({k: row[k] for k in ("prompt", "chosen", "rejected")} for row in examples),
    )
