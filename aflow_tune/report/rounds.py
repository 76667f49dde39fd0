"""Continual learning over rounds: what each round's model scores on every round's task set.

R[i][j] is the mean held-out score on task set j after round i, both from 0; round i learned what
task set i asks for. With T rounds:

    backward transfer   mean over i < T - 1 of R[T-1][i] - R[i][i]     (Lopez-Paz and Ranzato,
    final mean          mean over i of R[T-1][i]                        arXiv:1706.08840)
    forgetting          mean over i < T - 1 of max over l < T - 1 of R[l][i] - R[T-1][i]
                        (Chaudhry et al., arXiv:1801.10112)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aflow_tune.errors import BadInput, Fault
from aflow_tune.report.evaluation import scores_of
from aflow_tune.report.statistics import mean

Matrix = Sequence[Sequence[float]]


def backward_transfer(scores: Matrix) -> float | None:
    """What earlier rounds gained (lost, below 0) by later ones; None for a single round."""
    changes = [scores[-1][i] - scores[i][i] for i in range(len(scores) - 1)]
    return mean(changes) if changes else None


def forgetting(scores: Matrix) -> float | None:
    """How far earlier rounds are from their best; None for a single round."""
    lost = [max(row[i] for row in scores[:-1]) - scores[-1][i] for i, _ in enumerate(scores[:-1])]
    return mean(lost) if lost else None


def final_mean(scores: Matrix) -> float:
    """The last model's mean score over the task sets of all rounds."""
    return mean(list(scores[-1][: len(scores)]))


@dataclass(frozen=True)
class Rounds:
    """The matrix R of `names` (rounds) and `tasksets`; a row is a round."""

    names: tuple[str, ...]
    tasksets: tuple[str, ...]
    scores: tuple[tuple[float, ...], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": self.names,
            "tasksets": self.tasksets,
            "scores": self.scores,
            "backward_transfer": backward_transfer(self.scores),
            "forgetting": forgetting(self.scores),
            "final_mean": final_mean(self.scores),
        }

    def render(self) -> str:
        """The matrix and the three figures, as text."""
        first = max(map(len, ("backward transfer", *self.names)))
        widths = [max(7, len(name)) for name in self.tasksets]
        rows = [("", *self.tasksets)]
        rows += [
            (name, *(f"{score:.3f}" for score in row))
            for name, row in zip(self.names, self.scores, strict=True)
        ]
        lines = [
            "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]).rstrip()
            for row in rows
        ]
        for label in ("backward transfer", "forgetting", "final mean"):
            value = self.to_json()[label.replace(" ", "_")]
            lines.append(f"{label.ljust(first)}  {'-' if value is None else f'{value:+.3f}'}")
        return "\n".join(lines)


def read_rounds(folders: Sequence[Path], tasksets: Sequence[str] = ()) -> Rounds:
    """The rounds in these run folders, in their order: of each its last evaluations. `tasksets`:
    that of each round; empty: as the last run's configuration lists them. Raises BadInput: a round
    was not evaluated on one of them, or there are fewer than rounds."""
    faults, rows = [], []
    names = list(tasksets) or _listed(folders[-1])
    if len(names) < len(folders):
        found = ", ".join(names) or "none"
        expected = f"a held-out task set for each of {len(folders)} rounds"
        fix = "--tasks A,B,C, or name fewer run folders"
        raise BadInput.of("The rounds have no task sets.", "--tasks", expected, found, fix)
    for folder in folders:
        last: dict[str, float] = {}
        with contextlib.suppress(ValueError):  # damaged records: no score
            for _, of in sorted(scores_of(folder).items()):
                last |= of
        rows.append(tuple(last.get(name, float("nan")) for name in names))
        if missing := [name for name in names if name not in last]:
            fix = "list all task sets under `eval_tasksets` in every round"
            expected = f"a whole held-out evaluation on {', '.join(missing)}"
            faults.append(Fault(str(folder), expected, ", ".join(last) or "none", fix))
    if faults:
        raise BadInput("These rounds cannot be compared.", faults)
    rounds = tuple(folder.resolve().name for folder in folders)
    return Rounds(rounds, tuple(names), tuple(rows))


def _listed(run_dir: Path) -> list[str]:
    """The held-out task sets of a run, in the order of its configuration."""
    try:
        content = yaml.safe_load((run_dir / "resolved.yaml").read_text(encoding="utf-8"))
        return [one["name"] for one in content["buffer"]["explorer_input"]["eval_tasksets"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return []
