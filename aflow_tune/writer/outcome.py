"""One turn of the policy: what it wrote, what became of it, and what it is told of that.

The outcome is a class, coarse on purpose: with the graph's structure it is GiGPO's anchor state,
in which different runs of a task have to meet.

What the policy is told holds no score and nothing that the answer was scored by: this module is
given neither. The answer in it is the executor's text, cut; whatever it says, nobody but the
policy reads it as words.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from aflow_tune.operators.objects import whole_object
from aflow_tune.scoring.five_part import Usage
from aflow_tune.writer.execute import Executed
from aflow_tune.writer.prompting import KEEP, Turn
from aflow_tune.writer.structure import structure_of
from aflow_tune.writer.types import Level, Verdict

START = "start"
"""The state before anything was written."""
UNREADABLE, REFUSED, NOT_BUILT = "unreadable", "refused", "not_built"
"""Outcomes beside the endings of a graph's run."""
MAX_ANSWER = 400
"""Characters of an answer that the policy is shown."""
MAX_REASON = 400
MAX_REFUSALS = 8
_MAX_KEEP = 200
_FENCE = re.compile(r"^```\w*\s*|\s*```$")
_STAND_IN = {
    Level.DEFAULT_PROMPTS: "the same graph with plain prompts",
    Level.SIMPLER: "a simpler workflow of the same operators",
    Level.DEFAULT_WORKFLOW: "the default workflow",
}
_ASK = (
    'Reply with a better workflow as one JSON object with "prompts" and "graph_code", or with '
    f"{KEEP} to stay with this one."
)


@dataclass(frozen=True)
class TurnResult:
    """A text of the policy's, its verdict, and the run of it."""

    text: str
    verdict: Verdict
    executed: Executed
    usage: Usage
    """Of this turn: the executor and the other frozen models."""
    model_calls: int
    """Of the same, failed ones included."""

    @functools.cached_property
    def structure(self) -> str | None:
        """Of the written graph; None where its code is no Python."""
        graph = self.verdict.graph
        return None if graph is None else structure_of(graph)

    @property
    def outcome(self) -> str:
        """What became of the graph as it was written: how its run ended, or why it had none."""
        if self.verdict.graph is None:
            return UNREADABLE
        if not self.verdict.ok:
            return REFUSED
        own = self.executed.attempts[0].run
        return own.ending.value if own.built or own.ok else NOT_BUILT

    @property
    def state(self) -> str:
        """The anchor state of the next turn, without the task, which the recorder adds."""
        return f"{self.structure or '-'} / {self.outcome}"

    def told(self) -> Turn:
        """The turn as the policy is shown it before the next one."""
        return Turn(self.text, "\n".join([*self._happened(), _ASK]))

    def _happened(self) -> list[str]:
        run, first = self.executed.run, self.executed.attempts[0]
        if self.executed.level is Level.CLEAN and run.ok:
            return [f"Your workflow ran and answered:\n{_cut(run.text, MAX_ANSWER)}", self._spent()]
        refusals = self.verdict.refusals
        if refusals:
            lines = ["Your workflow was refused before it ran:"]
            lines += [f"- {_cut(str(item), MAX_REASON)}" for item in refusals[:MAX_REFUSALS]]
            if len(refusals) > MAX_REFUSALS:
                lines.append(f"- and {len(refusals) - MAX_REFUSALS} more")
        else:
            lines = [f"Your workflow failed: {_cut(first.why, MAX_REASON)}"]
        stand_in = _STAND_IN.get(self.executed.level, "nothing")
        if run.ok:
            lines.append(
                f"In its place {stand_in} ran, which earns you next to nothing, and answered:\n"
                f"{_cut(run.text, MAX_ANSWER)}"
            )
        else:
            lines.append(f"In its place {stand_in} ran and gave no answer either.")
        return lines

    def _spent(self) -> str:
        calls = f"{self.model_calls} model call{'' if self.model_calls == 1 else 's'}"
        tokens = self.usage.tokens
        return f"It made {calls}" + (f" of {tokens} tokens." if tokens is not None else ".")


def keeps(text: str) -> bool:
    """Whether a reply says to keep the graph: the word KEEP, or the object {"keep": true}."""
    if len(text) > _MAX_KEEP:
        return False
    bare = _FENCE.sub("", text.strip()).strip()
    if bare.strip("\"'`.! \n").upper() == KEEP:
        return True
    found = whole_object(bare)
    return isinstance(found, dict) and found == {"keep": True}


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."
