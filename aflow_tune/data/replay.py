"""The rehearsal buffer: rows that earlier runs learned from, in one JSONL file that runs share.

    {"round": "tools/first", "kind": "sft", "row": {"messages": [...]}}      a line

A round is what one finished run learned from, under the run's name; its kind is the algorithm, and
only rows of one kind are rehearsed together. `join` adds a round under a lock, in a file that takes
the old one's place at once: a killed process changes nothing. Rows are equal by content, and one
that is there already is not added: joining twice is joining once.

A buffer of limited capacity gives each round an even part. Which rows of a round stay is decided by
a hash of their content (the lowest: a uniform sample, whatever was added before and how often).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from aflow_tune.errors import BadInput, Fault
from aflow_tune.files import as_line, write_whole

_MOST_FAULTS = 5
Row = Mapping[str, Any]


class Kept(NamedTuple):
    """One row of the buffer; `place`: file and line."""

    round: str
    kind: str
    row: Row
    place: str = ""


def read_buffer(path: Path) -> list[Kept]:
    """The rows of a buffer, oldest round first; none if there is no file. Raises BadInput: it
    cannot be read, or a line is no row of a buffer."""
    found, faults = list[Kept](), list[Fault]()
    cure = "name another file in `replay.buffer`, or remove this line"
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        faults, lines = [Fault(str(path), "a file of rehearsed rows", str(error), cure)], []
    for number, line in enumerate(lines, 1):
        place, entry = f"{path}:{number}", None
        try:
            entry = json.loads(line)
            kept = Kept(str(entry["round"]), str(entry["kind"]), dict(entry["row"]), place)
            found.append(kept)
        except (ValueError, TypeError, KeyError):
            expected = 'a line {"round": NAME, "kind": "sft", "row": {...}}'
            faults.append(Fault(place, expected, f"{line:.60}", cure))
    if faults:
        raise BadInput("The rehearsal buffer cannot be read.", faults[:_MOST_FAULTS])
    return found


def digest(row: Row) -> str:
    """What rows of equal content share."""
    return hashlib.sha256(json.dumps(row, sort_keys=True, default=str).encode()).hexdigest()


def quotas(sizes: Mapping[str, int], capacity: int) -> dict[str, int]:
    """How many rows each round keeps: even parts; what a small round leaves goes to the others."""
    found: dict[str, int] = {}
    for number, name in enumerate(sorted(sizes, key=lambda name: (sizes[name], name))):
        found[name] = min(sizes[name], capacity // (len(sizes) - number))
        capacity -= found[name]
    return found


def join(path: Path, name: str, kind: str, rows: Iterable[Row], capacity: int | None) -> list[Kept]:
    """Add the rows of the round `name`; returns what the buffer then holds. Safe beside other
    processes that join. Raises BadInput as `read_buffer`; OSError: the buffer is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read_buffer(path)
        all_of = {(kept.kind, digest(kept.row)): kept for kept in before}
        for row in rows:
            all_of.setdefault((kind, digest(row)), Kept(name, kind, row))
        if capacity is not None:
            keys = defaultdict[str, list[tuple[str, str]]](list)
            for key, kept in all_of.items():
                keys[kept.round].append(key)
            parts = quotas({of: len(found) for of, found in keys.items()}, capacity)
            staying = {
                key
                for of, found in keys.items()
                for key in sorted(found, key=lambda key: key[1])[: parts[of]]
            }
            all_of = {key: kept for key, kept in all_of.items() if key in staying}
        after = list(all_of.values())
        if after != before:
            lines = [as_line({"round": k.round, "kind": k.kind, "row": k.row}) for k in after]
            write_whole(path, b"".join(lines))
        return after


def eligible(
    buffer: Iterable[Kept], kind: str, own: Iterable[Row], rounds: Iterable[str] = ()
) -> list[Kept]:
    """The rows of a buffer that a run may rehearse: of its kind, of one of `rounds` (names, or
    their last parts; none: of any), and not among its `own`. Raises BadInput: no such round."""
    of_kind = [kept for kept in buffer if kept.kind == kind]
    known = Counter(kept.round for kept in of_kind)
    wanted = set(known)
    if rounds and known:
        wanted = set()
        for asked in rounds:
            found = {name for name in known if f"/{name}".endswith(f"/{asked.strip('/')}")}
            if not found:
                title, fix = "There is no such round to rehearse.", "name one of these"
                raise BadInput.of(title, "replay.from", ", ".join(known), repr(asked), fix)
            wanted |= found
    mine = set(map(digest, own))
    return [kept for kept in of_kind if kept.round in wanted and digest(kept.row) not in mine]


def old_rows(batch: int, size: int, ratio: float, rows: int, seed: int) -> list[int]:
    """Which of `rows` old rows are in batch `batch` (from 0) of `size` rows. After any number of
    batches their count is the exact share, rounded down; none comes again before all have come."""
    share = Fraction(str(ratio)) * size
    positions = range(math.floor(batch * share), math.floor((batch + 1) * share)) if rows else ()
    return [_pass(seed, at // rows, rows)[at % rows] for at in positions]


@lru_cache(maxsize=4)
def _pass(seed: int, turn: int, rows: int) -> list[int]:
    return random.Random(f"replay/{seed}/{turn}").sample(range(rows), rows)
