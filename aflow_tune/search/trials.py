"""One trial: a workflow run on one problem in the sandbox, and scored.

What the workflow did wrong scores 0; what it cannot be blamed for, such as a server that is down,
is not scored at all, and never counts as wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aflow_tune.context import RolloutContext
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.run import GraphEnding, GraphRun
from aflow_tune.graph.workflow import GraphFailed, GraphWorkflow
from aflow_tune.models.types import ModelError, ModelFailure
from aflow_tune.scoring.rewards import Unscored
from aflow_tune.search.pool import Trial
from aflow_tune.trace import POLICY, ModelCall, Trace
from aflow_tune.writer.results import BLAMELESS

MAX_TEXT = 300
"""Most characters of a reason or an answer in the pool."""


async def run_trial(
    workflow: GraphWorkflow,
    graph: Graph,
    row: Mapping[str, Any],
    model: Any,
    rewards: Any = None,
    *,
    local: bool = False,
) -> Trial:
    """Run a graph, with the settings of `workflow`, on a row. Failures are in the trial.
    `rewards`: the run's `sections.RewardsSection`, for scores that read it; `local`: whether
    `model` is one of this machine, which costs nothing.

    Raises:
        BudgetReached: a limit of the run is reached.
        SandboxUnavailable: no sandbox can be started on this machine.
        BadInput: the row has no problem, or none that the graph takes.
    """
    trace, started, run = Trace(), time.monotonic(), None
    score, ending, reason = None, "scored", ""
    with RolloutContext(rewards=rewards).activate(), trace.activate():
        asked = replace(workflow, graph=graph)
        try:
            run = await asked.answer(row, model)
            score = float(await asked.score_of(row, run))
            if run.ok and not run.answered:
                score, ending, reason = 0.0, "failed", "it answered without any operator's result"
            elif not 0 <= score <= 1:
                score, ending, reason = None, "unscored", f"the score {score} is not in [0, 1]"
        except GraphFailed as error:
            run = error.run
            blame = _blameless(run, trace)
            score, ending = (None, "unscored") if blame else (0.0, "failed")
            reason = blame or str(error)
        except Unscored as error:
            ending, reason = "unscored", str(error)
        except ModelError as error:
            passing = error.failure is not ModelFailure.REFUSED
            score, ending = (None, "unscored") if passing else (0.0, "failed")
            reason = str(error)
    if run is not None and run.ending is GraphEnding.NO_ANSWER:
        ending = "failed"
    calls = trace.of(ModelCall)
    costs = [0.0 if local and call.role == POLICY else call.cost for call in calls]
    priced = all(cost is not None for cost in costs)
    return Trial(
        score,
        ending,
        reason[:MAX_TEXT],
        len(calls),
        sum((call.prompt_tokens or 0) + (call.completion_tokens or 0) for call in calls),
        sum(cost or 0.0 for cost in costs) if priced else None,
        time.monotonic() - started,
        "" if run is None else run.text[:MAX_TEXT],
    )


def _blameless(run: GraphRun, trace: Trace) -> str:
    """Why a failed execution is not the workflow's fault; empty if it is."""
    failed = sorted(BLAMELESS & {*run.failures})
    if failed:
        return f"calls of the model failed ({', '.join(failed)})"
    cut_off = [call for call in trace.of(ModelCall) if call.failure == "cancelled"]
    if run.ending is GraphEnding.TIMED_OUT and cut_off:
        return "a call of the model was not answered in time"
    return ""
