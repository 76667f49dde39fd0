"""One graph on one problem: checked, executed and scored as the policy's own graphs are.

The same workflow function does it that training runs, with the graph in the place of the
policy's answer, so that what is harvested is judged by the very rules that will be trained on.
Only what the check refuses is not run: its fallback would cost calls and could be no pair.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from aflow_tune.context import RolloutContext
from aflow_tune.errors import AflowTuneError
from aflow_tune.graph.run import GraphEnding
from aflow_tune.harvest.harvest import Problem, Untried
from aflow_tune.harvest.trials import Trial, TrialEnding
from aflow_tune.models.types import Message, Reply
from aflow_tune.scoring.rewards import Unscored
from aflow_tune.sections import RewardsSection
from aflow_tune.trace import POLICY, Trace
from aflow_tune.writer.check import check_written
from aflow_tune.writer.types import Level
from aflow_tune.writer.workflow import CALLER, ExecutorFailed, WriterWorkflow

MAX_REASON = 300
MAX_ANSWER = 200


class Recited:
    """A policy that writes one given text. It costs nothing and stands in no books."""

    role = POLICY
    model = "harvest"

    def __init__(self, text: str) -> None:
        self._text = text

    async def complete(self, messages: Sequence[Message], **_: Any) -> Reply:
        """The text, whatever is asked."""
        return Reply(self._text, self.model, cost=0.0)


class Trying:
    """Tries graphs with a configured writer.

    Args:
        workflow: whose operators, limits, executor and scoring apply.
        auxiliary_models: by name, as the workflow takes them.
        rewards: the run's section.
        seconds: that one trial may take, scoring included.
    """

    def __init__(
        self,
        workflow: WriterWorkflow,
        auxiliary_models: Mapping[str, Any] | None = None,
        rewards: RewardsSection | None = None,
        seconds: float = 300.0,
    ) -> None:
        self._workflow = dataclasses.replace(workflow, turns=1, fallbacks=False)
        self._auxiliary = dict(auxiliary_models or {})
        self._rewards = rewards
        self._seconds = seconds

    async def __call__(self, problem: Problem, text: str) -> Trial:
        """The trial.

        Raises:
            Untried: the frozen models did not answer, or not in time.
            BudgetReached, SandboxUnavailable, BadInput: as the workflow.
        """
        workflow = self._workflow
        verdict = check_written(
            text,
            operators=workflow.operators,
            problem_type=problem.problem_type,
            limits=workflow.check,
        )
        if not verdict.ok:
            kinds = dict.fromkeys(refusal.kind.value for refusal in verdict.refusals)
            reason = str(verdict.refusals[0]) if verdict.refusals else ""
            return Trial(
                problem.key,
                text,
                TrialEnding.REFUSED,
                reason=reason[:MAX_REASON],
                refusals=tuple(kinds),
            )
        context = RolloutContext(rewards=self._rewards)
        reward, unscored = None, ""
        try:
            async with asyncio.timeout(self._seconds):
                with context.activate(), Trace().activate():
                    row, policy = dict(problem.row), Recited(text)
                    reward = await workflow(row, policy, self._auxiliary)
        except ExecutorFailed as error:
            raise Untried(str(error).partition(";")[0][:MAX_REASON]) from None
        except Unscored as error:
            unscored = str(error)
        except TimeoutError:
            unscored = f"no result in {self._seconds:g} s"
        except AflowTuneError:
            raise
        except Exception as error:  # of a scorer of the user's
            unscored = f"{type(error).__name__}: {error}"
        kept = context.kept.get(CALLER, {})
        if kept.get("outcome") == GraphEnding.TIMED_OUT:
            raise Untried(
                f"the graph had no answer in time (writer.timeout: {workflow.seconds:g} s): a "
                "slow executor, or too much at once (local.max_batch)"
            )
        return _trial(problem, text, kept, reward, unscored)


def _trial(
    problem: Problem, text: str, kept: Mapping[str, Any], reward: float | None, unscored: str
) -> Trial:
    """The trial that the workflow's record tells of."""
    clean = kept.get("level") == Level.CLEAN and kept.get("ending") == GraphEnding.ANSWERED
    if kept and not clean:
        ending, reason = TrialEnding.FAILED, str(kept["reason"])
    elif unscored or reward is None:
        ending, reason = TrialEnding.UNSCORED, unscored
    else:
        ending, reason = TrialEnding.SCORED, ""
    scored = ending is TrialEnding.SCORED
    return Trial(
        problem.key,
        text,
        ending,
        reason=reason[:MAX_REASON],
        structure=kept.get("structure"),
        score=float(kept["score"]) if scored else None,
        reward=reward if scored else None,
        answer=str(kept.get("answer") or "")[:MAX_ANSWER],
        model_calls=int(kept.get("calls") or 0),
        tokens=int(kept.get("tokens") or 0),
        usd=kept.get("usd", 0.0),
        seconds=float(kept.get("seconds") or 0.0),
    )
