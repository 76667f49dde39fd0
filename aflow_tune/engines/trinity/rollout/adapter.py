"""Our Trinity workflow: runs the user's function and turns what it did into experiences.

Trinity loads `WorkflowAdapter` by its dotted path and creates one instance for each run. A
run that fails, in whichever way, is data: it returns one marked placeholder experience, so
that Trinity neither drops the group nor runs it again, and `RunFilter` takes it out before
advantages are computed. What such a run had asked the model is not trained.

Left to others: recording calls (`recording.py`), threads and time-outs (`run_thread.py`),
what counts as a reward or a failure (`outcome.py`), what a record tells of a run
(`run_summary.py`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task, Workflow

from aflow_tune.cluster.sent_function import received
from aflow_tune.context import RunContext
from aflow_tune.engines.trinity.info_keys import (
    CALLER_KEY,
    FAILURE_KEY,
    STATE_KEY,
    STEP_REWARD_KEY,
    TRACE_KEY,
)
from aflow_tune.engines.trinity.rollout.outcome import Outcome, as_metrics, as_reward, failed
from aflow_tune.engines.trinity.rollout.recording import (
    RecordedCall,
    RunRecorder,
    auxiliary_chat_models,
    recording_client,
)
from aflow_tune.engines.trinity.rollout.run_summary import (
    call_summaries,
    final_answer,
    operator_summaries,
    response_length,
    transcript_entry,
)
from aflow_tune.engines.trinity.rollout.run_thread import RunThread
from aflow_tune.models.books import Books
from aflow_tune.models.cache import ResponseCache
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.report.records import MAX_REASON, EvalRecord, Rollout, append_record, append_rollout
from aflow_tune.sandbox.policy import use_policy
from aflow_tune.shipping.arrival import settle
from aflow_tune.trace import Trace
from aflow_tune.types import Failure

DEFAULT_MAX_TOKENS = 4096
DEFAULT_RUN_TIMEOUT = 300.0

_said: set[str] = set()
"""Warnings that this process has given; each is given once, not once a run."""


class WorkflowAdapter(Workflow):
    """Gives the function a recording model, a time-out and a thread of its own.

    `task.workflow_args` holds: `workflow_func`, `judge_func`, `run_timeout` (seconds), `seed`,
    `system_prompt`, `books` (the run's models and budget), `run_dir` (for what
    workflows keep of training runs), and for evaluation
    `eval_dir`, `score`, `transcripts` (how many items of a task set keep theirs) and `first_run`
    (the number of the first run that is made from this task object; 0 if left out).

    What the run noted in its trace becomes metrics of the run beside the workflow's own.

    Step rewards: a call that was given one keeps it; if any was, the last call of the run
    without one gets the returned reward, as Trinity's GiGPO does for runs that have none.
    """

    is_async: bool = True
    can_repeat: bool = False
    can_reset: bool = False

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.arguments: dict[str, Any] = task.workflow_args
        if not callable(self.arguments.get("workflow_func")):
            raise ValueError("workflow_args.workflow_func holds no workflow function")
        # Trinity creates the runs of a task in order, from one task object, and tells them
        # nothing about it. A retry works on a fresh copy, which counts from zero again.
        runs = task.__dict__.setdefault("_aflow_runs", itertools.count())
        self.run_index: int = next(runs) + int(self.arguments.get("first_run", 0))
        self.seed = self._run_seed()
        self._books: Books | None = self.arguments.get("books")
        self._trace = Trace()
        self._response: Any = None

    async def run_async(self) -> list[Experience]:
        """One run of the workflow: an experience a call, or one placeholder."""
        context = RunContext(rewards=self.arguments.get("rewards"))
        started = time.monotonic()
        recorder = RunRecorder(
            await recording_client(self.model),
            context,
            task_id=f"{self.task.batch_id}/{self.task.task_id}",
            seed=self.seed,
            generate_kwargs=self._generate_kwargs(),
        )
        try:
            with (
                use_policy(self.arguments.get("sandbox", "auto")),
                use_prompts(self.arguments.get("prompts", {})),
                self._cached_answers(),
            ):
                outcome = await self._outcome(context, recorder)
        finally:
            calls = recorder.close()
        spent = self._books.reached() if self._books else None
        if spent is not None:  # whatever the workflow made of it
            outcome = replace(outcome, failure=Failure.BUDGET_REACHED, detail=spent)
        trained = [call for call in calls if not call.off_policy]
        if outcome.failure is None and not calls:
            outcome = Outcome(
                failure=Failure.NO_CALL, detail="the workflow made no call to its model"
            )
        elif outcome.failure is None and not trained and not self.task.is_eval:
            outcome = Outcome(
                failure=Failure.NO_CALL,
                detail=(
                    "the workflow made no call that can be trained: each of its calls sets "
                    "temperature, top_p, top_k, min_p, a penalty or logit_bias, and the trainer "
                    "cannot reproduce their probabilities. Leave them to the configuration "
                    "(model.temperature)."
                ),
            )
        if self.task.is_eval:
            self._keep_record(outcome, context, calls, time.monotonic() - started)
            trained = calls
        elif context.kept:
            self._keep_rollout(outcome, context)
        if outcome.failure is not None or outcome.reward is None:
            return [_placeholder(outcome)]
        experiences = _experiences(trained, outcome.reward)
        experiences[-1].metrics = _metrics(outcome, calls, len(calls) - len(trained))
        if len(trained) < len(calls):
            self._say_once(
                "off policy",
                "Calls that change temperature, top_p or another sampling argument are answered "
                "but not trained: see the metric untrained_calls.",
            )
        return experiences

    async def _outcome(self, context: RunContext, recorder: RunRecorder) -> Outcome:
        run = RunThread(lambda: self._call_user(context, recorder))
        try:
            reward, metrics = await run.result(
                float(self.arguments.get("run_timeout", DEFAULT_RUN_TIMEOUT))
            )
        except Exception as error:
            return replace(failed(error), metrics=self._trace.metrics())
        own = {**context.metrics, **metrics}
        return Outcome(reward=reward, metrics={**own, **self._trace.metrics(), **own})

    def _cached_answers(self) -> contextlib.AbstractContextManager[Any]:
        """Answers of other models that evaluations keep: each repetition has its own."""
        folder = self.arguments.get("cache")
        if folder is None or not self.task.is_eval:
            return contextlib.nullcontext()
        return ResponseCache(folder).activate(sample=self.run_index)

    async def _call_user(
        self, context: RunContext, recorder: RunRecorder
    ) -> tuple[float, dict[str, float]]:
        """Workflow and judge; runs in the run's own thread and loop."""
        function = settle(received(self.arguments["workflow_func"]))
        judge = settle(received(self.arguments.get("judge_func")))
        offered = {
            "auxiliary_models": auxiliary_chat_models(
                self.auxiliary_model_wrappers or (), self.auxiliary_models or (), recorder.loop
            ),
            "logger": self.logger,
            "system_prompt": self.arguments.get("system_prompt"),
        }
        books = self._books.open() if self._books else contextlib.nullcontext()
        with context.activate(), self._trace.activate(), books:
            output = await function(
                **_wanted(function, offered), task=self._raw_task(), model=recorder.chat_model()
            )
            who = "the workflow"
            if not _is_output(output):
                if judge is not None:
                    raise TypeError(
                        "a judge function scores the response of a WorkflowOutput, but the "
                        f"workflow returned {type(output).__name__}"
                    )
                return as_reward(output, who), {}
            self._response = output.response
            metrics = as_metrics(output.metrics, who)
            value = output.reward
            if judge is not None:
                who = "the judge"
                verdict = await judge(
                    **_wanted(judge, offered), task=self._raw_task(), response=output.response
                )
                value = getattr(verdict, "reward", verdict)
                metrics.update(as_metrics(getattr(verdict, "metrics", None), who))
            return as_reward(value, who), metrics

    def _raw_task(self) -> dict[str, Any]:
        """The row, copied: what one run changes in it must not reach the others."""
        return copy.deepcopy(dict(self.task.raw_task or {}))

    def _generate_kwargs(self) -> dict[str, Any]:
        rollout, model = self.task.rollout_args, self.model.generate_kwargs
        kwargs: dict[str, Any] = {
            "temperature": _first(rollout.temperature, model.get("temperature")),
            "top_p": _first(rollout.top_p, model.get("top_p")),
            "max_tokens": rollout.max_tokens or model.get("max_tokens") or DEFAULT_MAX_TOKENS,
            "logprobs": True,
            "top_logprobs": rollout.logprobs,
        }
        if rollout.top_k and rollout.top_k > 0:
            kwargs["extra_body"] = {"top_k": rollout.top_k}
        return {name: value for name, value in kwargs.items() if value is not None}

    def _run_seed(self) -> str:
        """Root of the seeds of this run's calls, the same whenever the run is repeated.

        Evaluations leave the step out, and count items by their rows: before and after, and a
        sample of the rows, see the same random numbers, so that their difference is due to the
        weights.
        """
        task = self.task
        batch, number = task.batch_id, task.task_id
        if task.is_eval:
            batch = str(task.batch_id).partition("/")[2]
            number = task.index.get("index", number)
        seed = f"{self.arguments.get('seed', 0)}|{batch}|{number}|{self.run_index}"
        if task.repeat_times and task.rollout_args.n < task.repeat_times:
            # Trinity shared the runs of this task out to several runners
            # (`max_repeat_times_per_runner`), and each counts from zero: equal seeds would make
            # equal runs, so these are not reproducible.
            seed += f"|{task.__dict__.setdefault('_aflow_salt', uuid.uuid4().hex)}"
        return seed

    def _keep_record(
        self, outcome: Outcome, context: RunContext, calls: list[RecordedCall], seconds: float
    ) -> None:
        """Append the evaluation record; a disk that is full must not cost the run."""
        directory = self.arguments.get("eval_dir")
        if not directory:
            return
        name = self.arguments.get("score") or "reward"
        score = None if outcome.failure else outcome.score(name)
        if score is None and outcome.failure is None:
            self._say_once(
                f"score {name}",
                f"report.score is {name!r}, but the workflow did not record it (it recorded "
                f"{sorted(outcome.metrics)}): the evaluation has no score.",
            )
        step, _, taskset = str(self.task.batch_id).partition("/")
        item = int(self.task.index.get("index", self.task.task_id))
        wanted = item < int(self.arguments.get("transcripts") or 0)
        record = EvalRecord(
            step=int(step),
            taskset=taskset,
            item=item,
            run=self.run_index,
            score=score,
            reward=outcome.reward,
            failure=outcome.failure.value if outcome.failure else None,
            reason=outcome.detail[-MAX_REASON:],
            metrics=dict(outcome.metrics),
            transcript=[transcript_entry(call) for call in calls] if wanted else [],
            seconds=round(seconds, 3),
            calls=call_summaries(context, calls),
            operators=operator_summaries(self._trace),
            answer=final_answer(self._response, calls),
            kept=dict(context.kept),
        )
        try:
            append_record(Path(directory), record)
        except OSError as error:
            self._say_once(
                "records", f"Evaluation records cannot be written, the report lacks them: {error}"
            )

    def _keep_rollout(self, outcome: Outcome, context: RunContext) -> None:
        """Append what the workflow kept of a training run; a full disk must not cost the run."""
        directory = self.arguments.get("run_dir")
        if not directory:
            return
        rollout = Rollout(
            step=int(self.task.batch_id),
            task=int(self.task.task_id),
            run=self.run_index,
            reward=outcome.reward,
            failure=outcome.failure.value if outcome.failure else None,
            kept=dict(context.kept),
        )
        try:
            append_rollout(Path(directory), rollout)
        except OSError as error:
            self._say_once("rollouts", f"Rollouts cannot be kept, the report lacks them: {error}")

    def _say_once(self, topic: str, message: str) -> None:
        if topic not in _said:
            _said.add(topic)
            self.logger.error(message)


def _experiences(calls: list[RecordedCall], reward: float) -> list[Experience]:
    """One experience for each choice of each call; `eid.step` counts the calls."""
    experiences = []
    any_step_reward = any(call.note.step_reward is not None for call in calls)
    for step, call in enumerate(calls):
        step_reward = call.note.step_reward
        if step_reward is None and any_step_reward and step == len(calls) - 1:
            step_reward = reward
        for choice, experience in enumerate(call.experiences):
            experience.eid.step = step
            experience.reward = reward
            experience.info[CALLER_KEY] = call.note.caller
            experience.info[STATE_KEY] = call.state
            if step_reward is not None and choice == 0:  # it was earned once
                experience.info[STEP_REWARD_KEY] = step_reward
            experiences.append(experience)
    return experiences


def _metrics(outcome: Outcome, calls: list[RecordedCall], untrained: int) -> dict[str, float]:
    """A run's metrics; on its last experience they reach Trinity's curves."""
    answers = [experience for call in calls for experience in call.experiences]
    return {
        **outcome.metrics,
        "reward": float(outcome.reward or 0.0),
        "calls": float(len(calls)),
        "untrained_calls": float(untrained),
        "response_tokens": float(sum(response_length(answer) for answer in answers)),
        "response_truncated": float(sum(answer.truncate_status is not None for answer in answers)),
    }


def _placeholder(outcome: Outcome) -> Experience:
    """Stands for a failed run until `RunFilter` has counted it; carries no trainable token."""
    kind = (outcome.failure or Failure.RETURNED_NONE).value
    return Experience(
        tokens=torch.zeros(2, dtype=torch.int32),
        prompt_length=1,
        logprobs=torch.zeros(1),
        action_mask=torch.zeros(1, dtype=torch.bool),
        reward=0.0,
        info={FAILURE_KEY: kind, TRACE_KEY: outcome.detail},
        metrics={f"failure/{kind}:sum": 1.0},
    )


def _wanted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the optional arguments that the function's signature asks for.

    What a partial has bound by name keeps the value it has there, and what is not configured
    (None) leaves the function's own default in place.
    """
    bound = function.keywords if isinstance(function, functools.partial) else {}
    parameters = inspect.signature(function).parameters
    return {
        name: value
        for name, value in offered.items()
        if name in parameters
        and name not in bound
        and (value is not None or parameters[name].default is inspect.Parameter.empty)
    }


def _is_output(value: Any) -> bool:
    """A `WorkflowOutput`, ours or AgentScope's, recognised by its fields."""
    return all(hasattr(value, name) for name in ("reward", "response", "metrics"))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
