"""Which of the workflows that a policy wrote in a run are worth keeping.

Policies seldom write the same text twice, but they repeat themselves in structure: so workflows
are compared by structure and type of problem, over all their uses in training and in
evaluations. A structure's worth is its mean reward there; those with few uses are left out,
because one lucky use says little. Of each structure the text stays that was rewarded best.

Nothing is written here, and nothing is run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.report.evaluation import load_evaluations
from aflow_tune.report.records import read_rollouts
from aflow_tune.report.statistics import mean
from aflow_tune.report.writer import KEPT, WriterRun, read_run
from aflow_tune.writer.types import Level

Text = tuple[str, tuple[tuple[str, str], ...]]
"""Code, and prompts by instance in order: what a workflow is, as a key."""


@dataclass(frozen=True)
class Use:
    """One run of a valid workflow: its whole text, and what the record tells of it."""

    code: str
    prompts: Mapping[str, str]
    run: WriterRun

    @property
    def text(self) -> Text:
        """The workflow as a key."""
        return self.code, tuple(sorted(self.prompts.items()))


@dataclass(frozen=True)
class Best:
    """The best text of one structure for one type of problem."""

    code: str
    prompts: Mapping[str, str]
    structure: str
    problem_type: str
    uses: int
    """Runs of this structure for this type."""
    reward: float
    """Mean over those uses."""
    score: float | None
    """Mean over the uses that were scored, in [0, 1]."""
    clean: float
    """Share of the uses in which it answered as it was written."""
    usd: float | None
    """Mean cost of a use. None: the price of one is not known."""
    tokens: float | None
    """Mean of prompt and completion tokens of a use, of the models that ran it."""
    text_uses: int
    """Runs of this very text."""
    text_reward: float
    """Mean over those."""
    instances: Mapping[str, int] = field(default_factory=dict)
    """Call sites by operator."""

    def to_json(self) -> dict[str, Any]:
        """All but the texts, as plain data."""
        return {
            "problem_type": self.problem_type,
            "structure": self.structure,
            "operators": dict(self.instances),
            "uses": self.uses,
            "reward": self.reward,
            "score": self.score,
            "clean": self.clean,
            "usd": self.usd,
            "tokens": self.tokens,
            "text_uses": self.text_uses,
            "text_reward": self.text_reward,
        }


def uses_in(run_dir: Path) -> Iterator[Use]:
    """Every rewarded run of a valid workflow in a run folder, evaluations included: the run's own,
    and those of `aflow-tune eval`, whose folder may also stand for a run's.

    Raises:
        ValueError: the evaluation records are damaged; file and line are named.
    """
    for rollout in read_rollouts(run_dir):
        task = (f"step {rollout.step}", rollout.task)
        yield from _use(rollout.kept, rollout.step, task, rollout.reward)
    columns = [*run_dir.glob("eval/columns/*"), *run_dir.glob("columns/*")]
    for folder in [run_dir, *sorted(columns)]:
        for name, steps in load_evaluations(folder).items():
            for step, evaluation in steps.items():
                for record in evaluation.records:
                    yield from _use(record.kept, step, (name, record.item), record.reward)


def best_of(uses: Iterable[Use], *, least_uses: int, top: int) -> list[Best]:
    """The best workflow of each structure and type of problem, best first.

    Args:
        least_uses: structures with fewer uses are left out.
        top: how many at most.
    """
    groups: dict[tuple[str, str], list[Use]] = defaultdict(list)
    for use in uses:
        groups[use.run.structure or "", use.run.problem_type].append(use)
    found = [
        best
        for (structure, kind), of_group in groups.items()
        if structure and len(of_group) >= least_uses
        if (best := _best(structure, kind, of_group)) is not None
    ]
    found.sort(key=lambda best: (-best.reward, -best.uses, best.problem_type, best.structure))
    return found[:top]


def _use(
    kept: Mapping[str, Any], step: int, task: tuple[str, int], reward: float | None
) -> Iterator[Use]:
    run = read_run(kept, step, task, reward)
    if run is None or not run.valid or run.reward is None:
        return
    raw = kept[KEPT]  # `run` has texts for showing, which are cut
    code, prompts = raw.get("code"), raw.get("prompts") or {}
    if not isinstance(code, str) or not isinstance(prompts, Mapping):
        return
    if all(isinstance(name, str) and isinstance(text, str) for name, text in prompts.items()):
        yield Use(code, dict(prompts), run)


def _best(structure: str, kind: str, uses: list[Use]) -> Best | None:
    """None if no text of the structure ever answered as it was written."""
    by_text: dict[Text, list[Use]] = defaultdict(list)
    for use in uses:
        by_text[use.text].append(use)
    sound = [of_text for of_text in by_text.values() if any(use.run.clean for use in of_text)]
    if not sound:
        return None
    chosen = max(sound, key=lambda of_text: (_reward(of_text), len(of_text), -len(of_text[0].code)))
    first = chosen[0]
    return Best(
        code=first.code,
        prompts=first.prompts,
        structure=structure,
        problem_type=kind,
        uses=len(uses),
        reward=_reward(uses),
        score=_mean([use.run.score for use in uses], some=True),
        clean=mean([float(use.run.level == Level.CLEAN) for use in uses]),
        usd=_mean([use.run.usd for use in uses]),
        tokens=_mean([use.run.tokens for use in uses]),
        text_uses=len(chosen),
        text_reward=_reward(chosen),
        instances=dict(first.run.operators),
    )


def _reward(uses: list[Use]) -> float:
    return mean([use.run.reward for use in uses if use.run.reward is not None])


def _mean(values: Iterable[float | None], *, some: bool = False) -> float | None:
    """The mean; None where a value is not known, or, with `some`, where none is."""
    listed = list(values)
    known = [value for value in listed if value is not None]
    return mean(known) if known and (some or len(known) == len(listed)) else None
