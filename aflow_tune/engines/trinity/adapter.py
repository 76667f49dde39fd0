"""Our Trinity workflow: runs the user's function and turns what it did into experiences.

Trinity loads `WorkflowAdapter` by its dotted path and creates one instance for each run. A
run that fails, in whichever way, is data: it returns one marked placeholder experience, so
that Trinity neither drops the group nor runs it again, and `RunFilter` takes it out before
advantages are computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import numbers
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trinity.common.experience import EID, Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task, Workflow

from aflow_tune.context import RunContext
from aflow_tune.engines.trinity.recording import (
    RecordedCall,
    RunRecorder,
    chat_model,
    shared_client,
    state_hash,
)
from aflow_tune.engines.trinity.run_thread import Blocked, RunThread, TimedOut
from aflow_tune.report.records import EvalRecord, append_record
from aflow_tune.types import Failure

FAILURE_KEY = "aflow/failure"
"""Key of `Experience.info` that marks a placeholder; the value is a `Failure`."""
TRACE_KEY = "aflow/traceback"
CALLER_KEY = "caller"

DEFAULT_MAX_TOKENS = 4096


class _Failed(Exception):
    def __init__(self, kind: Failure, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass
class _Outcome:
    """What a run came to: a reward with metrics, or a failure with its detail."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    detail: str = ""


class WorkflowAdapter(Workflow):
    """Gives the function a recording model, a time-out and a place of its own.

    `task.workflow_args` holds: `workflow_func`, `judge_func`, `run_timeout` (seconds), `seed`,
    `system_prompt`, and for evaluation `eval_dir`, `score` and `transcripts`.
    """

    is_async: bool = True

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.arguments: dict[str, Any] = task.workflow_args
        # Trinity creates the runs of a task in order and tells them nothing about it.
        self.run_index: int = task.__dict__.get("_aflow_runs", 0)
        task.__dict__["_aflow_runs"] = self.run_index + 1

    async def run_async(self) -> list[Experience]:
        """One run of the workflow; its experiences, or one placeholder."""
        context = RunContext()
        recorder = RunRecorder(self.model, context, self._seed)
        started = time.monotonic()
        outcome = await self._outcome(context, recorder)
        recorder.closed = True
        calls = recorder.recorded()
        if outcome.failure is None and not calls:
            outcome = _Outcome(failure=Failure.NO_CALL, detail="the workflow called no model")
        if self.task.is_eval:
            self._write_record(outcome, calls, time.monotonic() - started)
        if outcome.failure is not None:
            return [_placeholder(outcome)]
        return self._experiences(outcome, calls)

    async def _outcome(self, context: RunContext, recorder: RunRecorder) -> _Outcome:
        try:
            thread = RunThread(lambda: self._call_user(context, recorder))
            reward, metrics = await thread.result(float(self.arguments["run_timeout"]))
        except _Failed as failed:
            return _Outcome(failure=failed.kind, detail=str(failed))
        except TimedOut as error:
            return _Outcome(failure=Failure.TIMED_OUT, detail=str(error))
        except Blocked as error:
            return _Outcome(failure=Failure.BLOCKED_LOOP, detail=str(error))
        except Exception as error:
            detail = "".join(traceback.format_exception(error)).rstrip()
            return _Outcome(failure=Failure.RAISED, detail=detail)
        return _Outcome(reward=reward, metrics={**context.metrics, **metrics})

    async def _call_user(
        self, context: RunContext, recorder: RunRecorder
    ) -> tuple[float, dict[str, float]]:
        """Workflow and judge; runs in the run's own thread and loop."""
        auxiliary = self._auxiliary_models(recorder)
        offered = {
            "auxiliary_models": auxiliary,
            "logger": self.logger,
            "system_prompt": self.arguments.get("system_prompt"),
        }
        with context.activate():
            function = self.arguments["workflow_func"]
            model = chat_model(self.model.model_path, recorder.client(), self._generate_kwargs())
            output = await function(
                **_wanted(function, offered), task=dict(self.task.raw_task or {}), model=model
            )
            metrics: dict[str, float] = {}
            if _is_output(output):
                metrics.update(output.metrics or {})
                value = output.reward
                judge = self.arguments.get("judge_func")
                if judge is not None:
                    verdict = await judge(
                        **_wanted(judge, offered),
                        task=dict(self.task.raw_task or {}),
                        response=output.response,
                    )
                    metrics.update(verdict.metrics or {})
                    value = verdict.reward
            else:
                value = output
            return _as_reward(value), {name: float(number) for name, number in metrics.items()}

    def _generate_kwargs(self) -> dict[str, Any]:
        rollout = self.task.rollout_args
        return {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "max_tokens": rollout.max_tokens or DEFAULT_MAX_TOKENS,
            "logprobs": True,
            "top_logprobs": rollout.logprobs,
        }

    def _auxiliary_models(self, recorder: RunRecorder) -> dict[str, Any]:
        models = {}
        for wrapper, client in zip(
            self.auxiliary_model_wrappers or (), self.auxiliary_models or (), strict=True
        ):
            shared = shared_client(client, recorder.loop)
            models[wrapper.config.name] = chat_model(
                client.model_path, shared, dict(wrapper.generate_kwargs)
            )
        return models

    def _seed(self, call_index: int) -> int:
        """A seed of its own for each call, the same in every repetition of this run."""
        task = self.task
        name = f"{self.arguments['seed']}/{task.batch_id}/{task.task_id}/{self.run_index}"
        digest = hashlib.sha256(f"{name}/{call_index}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1

    def _experiences(self, outcome: _Outcome, calls: list[RecordedCall]) -> list[Experience]:
        experiences = []
        task_id = f"{self.task.batch_id}/{self.task.task_id}"
        for step, call in enumerate(calls):
            note = call.note
            for experience in call.experiences:
                experience.eid.step = step
                experience.reward = outcome.reward
                experience.info[CALLER_KEY] = note.caller
                experience.info["env_state_hash"] = note.state_key or state_hash(
                    task_id, note.caller, call.messages
                )
                if note.step_reward is not None:
                    experience.info["step_reward"] = note.step_reward
                experiences.append(experience)
        tokens = sum(int(experience.action_mask.sum()) for experience in experiences)
        experiences[-1].metrics = {
            **outcome.metrics,
            "reward": float(outcome.reward or 0.0),
            "calls": float(len(calls)),
            "response_tokens": float(tokens),
            "truncated": float(sum(call.truncated for call in calls)),
        }
        return experiences

    def _write_record(
        self, outcome: _Outcome, calls: list[RecordedCall], seconds: float
    ) -> None:
        directory = self.arguments.get("eval_dir")
        if not directory:
            return
        step, _, taskset = str(self.task.batch_id).partition("/")
        item = int(self.task.index.get("index", self.task.task_id))
        wanted = item < int(self.arguments.get("transcripts", 0))
        append_record(
            Path(directory),
            EvalRecord(
                step=int(step),
                taskset=taskset,
                item=item,
                run=self.run_index,
                score=self._score(outcome),
                reward=outcome.reward,
                failure=outcome.failure.value if outcome.failure else None,
                metrics=outcome.metrics,
                transcript=[_transcript(call) for call in calls] if wanted else [],
                seconds=round(seconds, 3),
            ),
        )

    def _score(self, outcome: _Outcome) -> float | None:
        if outcome.failure is not None:
            return None
        name = self.arguments.get("score", "reward")
        return outcome.reward if name == "reward" else outcome.metrics.get(name)


def _wanted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the optional arguments that the function's signature asks for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in offered.items() if name in parameters}


def _is_output(value: Any) -> bool:
    """A `WorkflowOutput`, ours or AgentScope's, recognised by its fields."""
    return all(hasattr(value, name) for name in ("reward", "response", "metrics"))


def _as_reward(value: Any) -> float:
    """The reward as a finite float.

    Raises:
        _Failed: None, not a number, or not finite.
    """
    if value is None:
        raise _Failed(Failure.RETURNED_NONE, "the workflow returned None as its reward")
    if hasattr(value, "item"):  # a scalar of numpy or torch
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            value = value.item()
    if not isinstance(value, numbers.Real):
        raise _Failed(
            Failure.NOT_A_NUMBER, f"the workflow returned {type(value).__name__}: {value!r:.200}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise _Failed(Failure.NOT_FINITE, f"the workflow returned {number}")
    return number


def _placeholder(outcome: _Outcome) -> Experience:
    """Stands for a failed run until `RunFilter` has counted it; carries no trainable token."""
    assert outcome.failure is not None
    return Experience(
        eid=EID(),
        tokens=torch.zeros(2, dtype=torch.int32),
        prompt_length=1,
        logprobs=torch.zeros(1),
        action_mask=torch.zeros(1, dtype=torch.bool),
        reward=0.0,
        info={FAILURE_KEY: outcome.failure.value, TRACE_KEY: outcome.detail},
        metrics={f"failure/{outcome.failure.value}:sum": 1.0},
    )


def _transcript(call: RecordedCall) -> dict[str, Any]:
    first = call.experiences[0]
    return {
        "caller": call.note.caller,
        "messages": call.messages,
        "response": first.response_text or "",
        "tokens": int(len(first.tokens) - first.prompt_length),
    }
