"""What a harvest has tried so far, kept on disk line by line.

A harvest costs calls of models, so nothing that was answered or executed is done twice: the
file is read when the same harvest begins again. A trial holds for the settings that it was made
with only; whoever opens a journal gives those of other settings a file of their own.

Not kept here: what failed for reasons that pass, such as a server that did not answer.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from aflow_tune.files import append_line, as_line, drop_torn_line


class TrialEnding(StrEnum):
    """What became of a graph on one problem. The value is its word in files."""

    REFUSED = "refused"
    """The check refused it; it was not run."""
    FAILED = "failed"
    """It did not run to an answer as it was written."""
    UNSCORED = "unscored"
    """Its answer could not be scored, which says nothing about it."""
    SCORED = "scored"


@dataclass(frozen=True)
class Trial:
    """One graph on one problem."""

    problem: str
    """The problem's key."""
    text: str
    """The graph in its canonical form; of a refused one the text as it came."""
    ending: TrialEnding
    reason: str = ""
    refusals: tuple[str, ...] = ()
    """Words of what was refused, each once."""
    structure: str | None = None
    score: float | None = None
    """From 0 to 1, of an ending SCORED."""
    reward: float | None = None
    """The five-part reward of a clean run in the hybrid form."""
    answer: str = ""
    model_calls: int = 0
    tokens: int = 0
    usd: float | None = 0.0
    """US dollars; None where a price is not known."""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What was tried."""
        return self.problem, text_key(self.text)

    @classmethod
    def of_json(cls, entry: dict[str, Any]) -> Trial:
        """Raises ValueError or TypeError where it is none."""
        known = {item.name for item in fields(cls)}
        values = {name: value for name, value in entry.items() if name in known}
        values["ending"] = TrialEnding(values["ending"])
        values["refusals"] = tuple(values.get("refusals", ()))
        return cls(**values)


@dataclass(frozen=True)
class Lesson:
    """One answer of the teacher."""

    question: str
    """Key of what was asked (`harvest.question_key`)."""
    number: int
    """Which of the tries it is, from 0."""
    text: str
    tokens: int = 0
    usd: float | None = 0.0

    @property
    def key(self) -> tuple[str, str]:
        """What was asked."""
        return self.question, str(self.number)

    @classmethod
    def of_json(cls, entry: dict[str, Any]) -> Lesson:
        """Raises ValueError or TypeError where it is none."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in entry.items() if name in known})


def text_key(text: str) -> str:
    """Short name of a graph's text."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


E = TypeVar("E", Trial, Lesson)


class Journal(Generic[E]):
    """The entries of one kind, by key, in a file that grows.

    One process at a time; the caller holds the folder.
    """

    def __init__(self, path: Path, kind: type[E]) -> None:
        self.path = path
        self.kind: type[E] = kind
        self.entries: dict[tuple[str, str], E] = {}
        if path.exists():
            self._read()

    def add(self, entry: E) -> None:
        """Keep an entry, on disk first.

        Raises:
            OSError: it could not be written.
        """
        append_line(self.path, as_line(asdict(entry)))
        self.entries[entry.key] = entry

    def _read(self) -> None:
        drop_torn_line(self.path)
        for line in self.path.read_bytes().splitlines():
            try:
                held = json.loads(line)
                if not isinstance(held, dict):
                    continue
                entry = self.kind.of_json(held)
            except (ValueError, TypeError, KeyError):
                continue  # damaged, or of another version: it is tried again
            self.entries[entry.key] = entry
