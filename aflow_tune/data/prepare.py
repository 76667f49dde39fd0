"""Draws training, validation and test files from several sources, without leaks between them.

Each split takes its share of rows from each source, by largest remainder. Rows with equal inputs
count once over all sources. The test split is drawn first, then validation, then training; a drawn
row that leaks (`leaks.py`) from a split drawn before is replaced. The written files pass the leak
check of `aflow-tune data check`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from aflow_tune.data.leaks import NEAR, WORDS, find_leaks, fingerprint
from aflow_tune.data.mix import apportion
from aflow_tune.data.rows import with_source
from aflow_tune.errors import BadInput, Fault
from aflow_tune.files import as_line, write_whole

SPLITS = ("train", "validation", "test")
MANIFEST = "manifest.json"

Row = dict[str, Any]


@dataclass
class Source:
    """Rows of one origin. `origin`: what the user named; `sha256`: of the file, None if no file."""

    name: str
    benchmark: str
    rows: Sequence[Mapping[str, Any]]
    origin: str = ""
    sha256: str | None = None


@dataclass
class Drawn:
    """The rows of each split, and how many rows of each source were dropped and why."""

    splits: dict[str, list[Row]]
    duplicates: dict[str, int]
    """Source to rows dropped because an earlier row has the same input."""
    leaking: dict[str, int]
    """Source to rows dropped because they are near-duplicates of a row in a split drawn before."""
    taken: dict[str, dict[str, int]] = field(default_factory=dict)
    """Source to split to number of rows."""


def draw(
    sources: Sequence[Source],
    shares: Mapping[str, Fraction],
    sizes: Mapping[str, int],
    seed: int,
) -> Drawn:
    """Draw the splits, with `sizes` rows each. The same sources, shares (by name of source;
    together 1), sizes and seed give the same rows.

    Raises BadInput: a source has too few rows."""
    seen: set[bytes] = set()
    pools: dict[str, list[Row]] = {}
    duplicates: dict[str, int] = {}
    for source in sources:
        pool = pools[source.name] = []
        for row in source.rows:
            mark = fingerprint(row)
            if mark not in seen:
                seen.add(mark)
                pool.append(with_source(row, source.name, source.benchmark))
        duplicates[source.name] = len(source.rows) - len(pool)
        random.Random(f"draw/{seed}/{source.name}").shuffle(pool)
    usable = {name: len(pool) for name, pool in pools.items()}
    quotas = {split: apportion(sizes[split], shares) for split in SPLITS}
    chosen: dict[str, list[Row]] = {split: [] for split in SPLITS}
    leaking = dict.fromkeys(pools, 0)
    short: set[str] = set()
    for split in reversed(SPLITS):
        held_out = [chosen[other] for other in SPLITS[SPLITS.index(split) + 1 :]]
        while True:
            for name, wanted in quotas[split].items():
                missing = wanted - sum(row["source"] == name for row in chosen[split])
                if missing > len(pools[name]):
                    short.add(name)
                chosen[split] += [pools[name].pop() for _ in range(min(missing, len(pools[name])))]
            bad = {leak.held_out for rows in held_out for leak in find_leaks(rows, chosen[split])}
            for number in bad:
                leaking[chosen[split][number]["source"]] += 1
            chosen[split] = [row for n, row in enumerate(chosen[split]) if n not in bad]
            if not bad:
                break
    faults = []
    for name in pools if short else ():
        needed = sum(quotas[split][name] for split in SPLITS)
        free = usable[name] - leaking[name]
        if needed > free:
            fits = Fraction(free, needed)
            fewer = " ".join(f"--{split} {int(sizes[split] * fits)}" for split in SPLITS)
            found = f"{usable[name]} different ones, {leaking[name]} of them near to held-out ones"
            fix = f"{fewer}, a smaller --ratio for it, or more rows"
            faults.append(Fault(f"--source {name}", f"{needed} rows", found, fix))
    if short:
        raise BadInput("There are too few rows.", faults)
    for split, rows in chosen.items():
        random.Random(f"split/{seed}/{split}").shuffle(rows)
    taken = {name: {split: quotas[split][name] for split in SPLITS} for name in pools}
    return Drawn(chosen, duplicates, leaking, taken)


def write_splits(
    folder: Path,
    sources: Sequence[Source],
    shares: Mapping[str, Fraction],
    drawn: Drawn,
    seed: int,
    *,
    force: bool = False,
) -> list[Path]:
    """Write `SPLIT.jsonl` for each split with rows, then `manifest.json`; returns the paths.

    Raises BadInput: files exist and `force` is not set, or they cannot be written."""
    written = {split: b"".join(map(as_line, rows)) for split, rows in drawn.splits.items()}
    content = {f"{split}.jsonl": text for split, text in written.items() if text}
    manifest = {
        "seed": seed,
        "files": {
            name: {"rows": text.count(b"\n"), "sha256": hashlib.sha256(text).hexdigest()}
            for name, text in content.items()
        },
        "sources": [
            {
                "name": source.name,
                "benchmark": source.benchmark,
                "from": source.origin,
                "sha256": source.sha256,
                "share": float(shares[source.name]),
                "rows": len(source.rows),
                "duplicates": drawn.duplicates[source.name],
                "near_duplicates_of_held_out": drawn.leaking[source.name],
                **drawn.taken[source.name],
            }
            for source in sources
        ],
        "near_duplicates": {"similarity": NEAR, "words": WORDS},
    }
    content[MANIFEST] = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
    names = [*(f"{split}.jsonl" for split in SPLITS), MANIFEST]
    there = [folder / name for name in names if (folder / name).exists()]
    if there and not force:
        fix = "--force, or another --out"
        faults = [Fault(str(path), "no file of that name", "a file", fix) for path in there]
        raise BadInput("Nothing was written.", faults)
    try:
        # An interrupted write must not leave the manifest or a split of an earlier draw beside
        # files of this one.
        for path in there:
            path.unlink(missing_ok=True)
        for name, data in content.items():
            write_whole(folder / name, data)
    except OSError as error:
        title, expected = "The files could not be written.", "a folder that can be written"
        raise BadInput.of(title, str(folder), expected, str(error), "another --out") from error
    return [folder / name for name in content]
