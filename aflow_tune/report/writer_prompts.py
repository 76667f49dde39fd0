"""How the prompts of a policy changed: those of the first step beside those of the last.

A policy may write another prompt for every problem. Shown is, for each of the most frequent
operator instances, the text that most runs of a step wrote; the first of them where no text was
written twice. Differences are marked by words.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from aflow_tune.report.writer_records import WriterRun

MOST_INSTANCES = 4
MOST_CHARACTERS = 1500
"""Of a prompt that is compared; the rest is cut."""
MOST_WORDS = 300
"""Of a prompt that are compared one by one."""

Mark = Literal["", "del", "ins"]


@dataclass(frozen=True)
class Side:
    """The prompt of one step. `runs` of `of` runs that wrote one for this instance wrote this."""

    step: int
    runs: int
    of: int
    pieces: tuple[tuple[Mark, str], ...]


@dataclass(frozen=True)
class Change:
    """One instance's prompt in the first and in the last step that have one."""

    instance: str
    before: Side
    after: Side

    @property
    def same(self) -> bool:
        return not any(mark for mark, _ in (*self.before.pieces, *self.after.pieces))


def prompt_changes(
    training: Mapping[int, Sequence[WriterRun]], most: int = MOST_INSTANCES
) -> list[Change]:
    """The most frequent instances that were written in at least two steps."""
    used = Counter(name for runs in training.values() for run in runs for name in run.prompts)
    found = []
    for name, _ in used.most_common():
        steps = [
            step for step, runs in sorted(training.items()) if any(name in r.prompts for r in runs)
        ]
        if len(steps) > 1:
            found.append(_change(name, training, steps[0], steps[-1]))
        if len(found) == most:
            break
    return found


def marked(before: str, after: str) -> tuple[list[tuple[Mark, str]], list[tuple[Mark, str]]]:
    """Both texts in pieces: what the second lacks is marked in the first, and the reverse."""
    old, new = _words(before), _words(after)
    first: list[tuple[Mark, str]] = []
    second: list[tuple[Mark, str]] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if b > a:
            first.append(("" if kind == "equal" else "del", "".join(old[a:b])))
        if d > c:
            second.append(("" if kind == "equal" else "ins", "".join(new[c:d])))
    return first, second


def _change(
    name: str, training: Mapping[int, Sequence[WriterRun]], first: int, last: int
) -> Change:
    texts = []
    for step in (first, last):
        counts = Counter(run.prompts[name] for run in training[step] if name in run.prompts)
        text, runs = counts.most_common(1)[0]
        texts.append((step, text[:MOST_CHARACTERS], runs, counts.total()))
    pieces = marked(texts[0][1], texts[1][1])
    before, after = (
        Side(step, runs, of, tuple(found))
        for (step, _, runs, of), found in zip(texts, pieces, strict=True)
    )
    return Change(name, before, after)


def _words(text: str) -> list[str]:
    """Words with the white space behind them, so that joining gives the text again; what is
    behind the last of `MOST_WORDS` is one piece, as the comparison's time is their cube."""
    words = re.findall(r"\s+|\S+\s*", text)
    rest = "".join(words[MOST_WORDS:])
    return [*words[:MOST_WORDS], *([rest] if rest else [])]
