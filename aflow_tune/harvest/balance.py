"""Which of the graphs that solved their problems become training pairs.

Of each problem the cheapest and simplest wins, that is the one with the highest reward. Left at
that, one graph would win nearly everywhere, and the policy would learn to recite it. So a cap
on each structure's share moves problems to another graph that solved them too, those first for
which it costs the least reward; what is still too much is dropped, the lowest rewards first.

Pure: what solved what is decided by running it (`harvest.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Solved:
    """A graph that solved a problem, by keys; `reward` compares the graphs of one problem."""

    problem: str
    structure: str
    text: str
    reward: float


@dataclass(frozen=True)
class Chosen:
    """The pairs that are kept, in the order of their problems, and what the cap did."""

    pairs: tuple[Solved, ...]
    dropped: int
    """Pairs left out because their structure had its share."""
    share: float | None
    """The cap in force: the asked one, or the lowest that so few structures can keep."""


def choose(
    solved: Sequence[Solved], *, per_problem: int = 1, per_structure: float | None = None, seed: int
) -> Chosen:
    """The pairs to train on.

    Args:
        solved: in the order of the problems.
        per_problem: most pairs of one problem, each of another structure.
        per_structure: most of one structure among all pairs, as a share above 0. With fewer than
            1 / share structures it cannot be kept: then all get equal shares.
        seed: decides between equal rewards.
    """
    order = {problem: at for at, problem in enumerate(dict.fromkeys(s.problem for s in solved))}
    best = _best_of_each(solved, seed)
    kept = {
        problem: list(of_problem.values())[:per_problem] for problem, of_problem in best.items()
    }
    share = None
    dropped = 0
    if per_structure is not None and solved:
        share = max(per_structure, 1 / len({item.structure for item in solved}))
        _move(kept, best, share)
        dropped = _trim(kept, share, seed)
    pairs = [item for problem in sorted(kept, key=order.__getitem__) for item in kept[problem]]
    return Chosen(tuple(pairs), dropped, share)


def _best_of_each(solved: Sequence[Solved], seed: int) -> dict[str, dict[str, Solved]]:
    """By problem, the best graph of each structure, best structure first."""
    best: dict[str, dict[str, Solved]] = defaultdict(dict)
    for item in sorted(solved, key=lambda item: (-item.reward, _drawn(item, seed))):
        best[item.problem].setdefault(item.structure, item)
    return dict(best)


def _move(kept: dict[str, list[Solved]], best: dict[str, dict[str, Solved]], share: float) -> None:
    """Give problems of crowded structures to others with room, at the least loss of reward."""
    most = _most(share, sum(map(len, kept.values())))
    counts = Counter(item.structure for items in kept.values() for item in items)
    for crowded in [name for name, count in counts.most_common() if count > most]:
        moves = sorted(
            (item.reward - other.reward, problem, other.structure)
            for problem, items in kept.items()
            for item in items
            if item.structure == crowded
            for other in best[problem].values()
            if other.structure not in {held.structure for held in items}
        )
        for _, problem, target in moves:
            if counts[crowded] <= most:
                break
            held = {item.structure for item in kept[problem]}
            if counts[target] >= most or crowded not in held or target in held:
                continue
            kept[problem] = [
                best[problem][target] if item.structure == crowded else item
                for item in kept[problem]
            ]
            counts[crowded] -= 1
            counts[target] += 1


def _trim(kept: dict[str, list[Solved]], share: float, seed: int) -> int:
    """Drop what is above the share of all that then remain; returns how many."""
    by_structure: dict[str, list[Solved]] = defaultdict(list)
    for items in kept.values():
        for item in items:
            by_structure[item.structure].append(item)
    counts = [len(items) for items in by_structure.values()]
    # With at most `most` of each, so many remain; the share of `most` in it falls as it grows.
    most = max(
        (
            most
            for most in range(1, max(counts) + 1)
            if most <= _most(share, sum(min(count, most) for count in counts))
        ),
        default=1,
    )
    dropped = 0
    for items in by_structure.values():
        items.sort(key=lambda item: (-item.reward, _drawn(item, seed)))
        for item in items[most:]:
            kept[item.problem].remove(item)
            dropped += 1
    return dropped


def _most(share: float, total: int) -> int:
    return math.floor(share * total + 1e-9)


def _drawn(item: Solved, seed: int) -> bytes:
    """An order by chance that is the same whenever the harvest is repeated."""
    text = f"{seed}|{item.problem}|{item.text}"
    return hashlib.sha256(text.encode(errors="replace")).digest()
