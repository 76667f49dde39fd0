"""What a written workflow earns: the five parts, and the room that is kept for clean runs.

The parts are those of `scoring/five_part.py`, computed on what running the workflow spent: calls
of the executor and other frozen models, over all attempts and turns. The policy's own tokens are
no part of it: they are the same kind of cost for every workflow, and their length is what the
trainer's own settings bound.

The part `format` is the answer's form (five_part's) times the form of the writing:

    hybrid 1, repaired 0.75, code alone 0.5, unreadable 0; less a tenth of that for each refusal,
    at most nine; code that is no Python counts as nine refusals.

With `span` = highest - lowest and `sum` the weighted mean of the known parts:

    clean run                  lowest + span * (0.1 + 0.9 * sum)
    1: default prompts         lowest + span * (0.06 + 0.02 * sum)
    2: simpler workflow        lowest + span * (0.03 + 0.02 * sum)
    3: default workflow        lowest + span * 0.02 * form of the writing

So a fallback earns less than the worst clean run, and a deeper one less than a shallower one.
The answer of the default workflow is not the policy's doing: rewarding it would make noise of
groups in which every run ended there, so only how near the writing came to a workflow counts.

The total depends on an answer's text through its score, its form and its repetition only: what an
answer says about rewards is text like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aflow_tune.scoring.five_part import Usage, five_part
from aflow_tune.scoring.rewards import WEIGHTS, weighted
from aflow_tune.sections import FivePartSection
from aflow_tune.writer.types import Level, Refusal, RefusalKind, WrittenForm

CLEAN_FLOOR = 0.1
"""Share of the span that every clean run earns, and no fallback."""
FALLBACK_STEP = 0.03
"""Share of the span between the lowest rewards of two neighbouring levels."""
FALLBACK_SPAN = 0.02
"""Share of the span within one level; below FALLBACK_STEP, so that levels do not touch."""
FORM_WORTH = {WrittenForm.HYBRID: 1.0, WrittenForm.REPAIRED: 0.75, WrittenForm.CODE: 0.5}
REFUSAL_COST = 0.1
MOST_REFUSALS = 9
"""More refusals cost no more: there is always something left to lose by writing nothing."""
_NO_CODE = frozenset({RefusalKind.SYNTAX, RefusalKind.UNREADABLE})


@dataclass(frozen=True)
class WriterReward:
    """The reward, and its parts in [0, 1] by name; None for a part that is not known."""

    total: float
    parts: Mapping[str, float | None]

    def metrics(self) -> dict[str, float]:
        """Each known part under `five_part/NAME`."""
        return {f"five_part/{name}": v for name, v in self.parts.items() if v is not None}


def writer_reward(
    score: float,
    answer: str,
    usage: Usage,
    *,
    level: Level,
    form: WrittenForm | None,
    refusals: Sequence[Refusal] = (),
    settings: FivePartSection | None = None,
    answer_form: str = r"\S",
) -> WriterReward:
    """The reward of one run.

    Args:
        score: of the delivered answer, in [0, 1].
        usage: of the executor and the other frozen models.
        level: which workflow gave the answer.
        form: how the workflow was read; None where nothing could be read.
        answer_form: a regular expression that a well-formed answer contains.

    Raises:
        Unscored: no part with a weight above 0 is known.
    """
    chosen = settings or FivePartSection()
    writing = writing_form(form, refusals)
    parts = dict(five_part(score, answer, usage, chosen, answer_form).parts)
    parts["format"] = (parts["format"] or 0.0) * writing
    weights = {name: getattr(chosen, name) for name in WEIGHTS["five_part"]}
    share = _share(level, weighted(parts, weights), writing)
    return WriterReward(chosen.lowest + (chosen.highest - chosen.lowest) * share, parts)


def writing_form(form: WrittenForm | None, refusals: Sequence[Refusal] = ()) -> float:
    """How well the policy kept to the form, in [0, 1]: the table in this module's description."""
    if form is None:
        return 0.0
    count = min(len(refusals), MOST_REFUSALS)
    if any(refusal.kind in _NO_CODE for refusal in refusals):
        count = MOST_REFUSALS
    return FORM_WORTH[form] * (1.0 - REFUSAL_COST * count)


def _share(level: Level, total: float, writing: float) -> float:
    """The share of the span that a run earns."""
    if level is Level.CLEAN:
        return CLEAN_FLOOR + (1.0 - CLEAN_FLOOR) * total
    within = writing if level is Level.DEFAULT_WORKFLOW else total
    return FALLBACK_STEP * (Level.DEFAULT_WORKFLOW - level) + FALLBACK_SPAN * within
