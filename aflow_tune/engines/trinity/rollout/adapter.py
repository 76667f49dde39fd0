"""Our Trinity workflow: runs the user's function and turns what it did into experiences.

Trinity loads `WorkflowAdapter` by its dotted path and makes one instance for each rollout. A
rollout that fails is data: it returns one marked placeholder, so that Trinity neither drops the
group nor runs it again, and `RunFilter` takes it out before advantages are computed. Recording
calls is left to `recording.py`, threads and time-outs to `rollout_thread.py`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import numbers
import os
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task, Workflow

from aflow_tune.cluster.sent_function import received, send
from aflow_tune.context import RolloutContext
from aflow_tune.engines.trinity.rollout.operators import (
    CALLER_KEY,
    FAILURE_KEY,
    STATE_KEY,
    STEP_REWARD_KEY,
    TRACE_KEY,
)
from aflow_tune.engines.trinity.rollout.recording import (
    RecordedCall,
    RolloutRecorder,
    auxiliary_chat_models,
    call_summaries,
    final_answer,
    recording_client,
    response_length,
    transcript_entry,
)
from aflow_tune.engines.trinity.rollout.rollout_thread import (
    Blocked,
    Escaped,
    RolloutThread,
    TimedOut,
)
from aflow_tune.models.cache import ResponseCache
from aflow_tune.models.clients import RunSpend
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.report.records import MAX_REASON, EvalRecord, Rollout, append_record, append_rollout
from aflow_tune.sandbox.policy import use_policy
from aflow_tune.trace import OperatorCall, Trace
from aflow_tune.types import Failure

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

Function = Callable[..., Any]

DEFAULT_MAX_TOKENS = 4096
MAX_DETAIL = 8000
"""Characters of a traceback that are kept, from its end."""
_MACHINERY = tuple(
    os.fspath(Path(__file__).with_name(name)) for name in ("adapter.py", "rollout_thread.py")
)
_NOTHING_TRAINED = (
    "the workflow made no call that can be trained: each of its calls sets temperature, top_p, "
    "top_k, min_p, a penalty or logit_bias, and the trainer cannot reproduce their probabilities. "
    "Leave them to the configuration (model.temperature)."
)

_said: set[str] = set()
"""Warnings that this process has given; each is given once, not once a rollout."""


@dataclass(frozen=True)
class RolloutSettings:
    """What the adapter is told: `task.workflow_args`, which Trinity hands on as a dict."""

    workflow_func: Function
    """The workflow, or how it travels to another process (`cluster/sent_function.py`)."""
    judge_func: Function | None = None
    run_timeout: float = 300.0
    """Seconds that a rollout may take."""
    seed: int = 0
    system_prompt: str | None = None
    rewards: Any = None
    sandbox: str = "auto"
    prompts: Mapping[str, Any] = field(default_factory=dict)
    spend: RunSpend | None = None
    """The run's models and budget."""
    run_dir: str | None = None
    """Gets what workflows keep of training rollouts; None: nothing is kept."""
    eval_dir: str | None = None
    """Gets the records of evaluations; None: none are written."""
    score: str = "reward"
    """What evaluation counts: the reward, or a metric that the workflow records."""
    transcripts: int = 0
    """How many items of a held-out task set keep their transcripts."""
    cache: str | None = None
    """Folder of other models' answers, for evaluations."""
    first_run: int = 0
    """The number of the first rollout that is made from a task object."""

    @classmethod
    def of(cls, workflow_args: Mapping[str, Any]) -> RolloutSettings:
        """The settings of a task; entries of Trinity's or of a YAML's own are passed over.

        Raises:
            ValueError: there is no workflow function.
        """
        if not callable(workflow_args.get("workflow_func")):
            raise ValueError("workflow_args.workflow_func holds no workflow function")
        given = {item.name: workflow_args.get(item.name) for item in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})


def adapter_arguments(
    config: AflowConfig,
    workflow: Function,
    judge: Function | None,
    spend: RunSpend,
    eval_dir: Path,
    run_dir: Path | None = None,
) -> dict[str, Any]:
    """The `workflow_args` of a run or an evaluation: the same wherever a workflow is measured."""
    sent, sent_judge = send(workflow, judge)
    assert sent is not None
    settings = RolloutSettings(
        workflow_func=sent,
        judge_func=sent_judge,
        run_timeout=config.rollout.run_timeout,
        seed=config.seed,
        system_prompt=config.rollout.system_prompt,
        rewards=config.rewards,
        sandbox=config.sandbox,
        prompts=config.prompts,
        spend=spend,
        run_dir=None if run_dir is None else str(run_dir),
        eval_dir=str(eval_dir),
        score=config.report.score,
        transcripts=config.report.transcripts,
    )
    return dict(vars(settings))


class BadReward(Exception):
    """A rollout returned something that is no reward; `kind` says what."""

    def __init__(self, kind: Failure, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Outcome:
    """What a rollout came to. `failure` is None if it succeeded; `detail` says why it did not."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    detail: str = ""


class WorkflowAdapter(Workflow):
    """Gives the function a recording model, a time-out and a thread of its own.

    What the rollout noted in its trace becomes metrics beside the workflow's own. A call that was
    given a step reward keeps it; if any was, the last call without one gets the returned reward,
    as Trinity's GiGPO does for rollouts that have none.
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
        self.settings = RolloutSettings.of(task.workflow_args)
        # Trinity creates the rollouts of a task in order, from one task object, and tells them
        # nothing about it. A retry works on a fresh copy, which counts from zero again.
        count = task.__dict__.setdefault("_aflow_runs", itertools.count())
        self.run_index: int = next(count) + self.settings.first_run
        self.seed = self._rollout_seed()
        self._trace = Trace()
        self._response: Any = None

    async def run_async(self) -> list[Experience]:
        """One rollout: an experience a call, or one placeholder."""
        settings = self.settings
        context = RolloutContext(rewards=settings.rewards)
        started = time.monotonic()
        recorder = RolloutRecorder(
            await recording_client(self.model),
            context,
            task_id=f"{self.task.batch_id}/{self.task.task_id}",
            seed=self.seed,
            generate_kwargs=self._generate_kwargs(),
        )
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(use_policy(settings.sandbox))
                stack.enter_context(use_prompts(settings.prompts))
                if settings.cache is not None and self.task.is_eval:
                    # Each repetition of an evaluation has answers of its own.
                    cache = ResponseCache(settings.cache)
                    stack.enter_context(cache.activate(sample=self.run_index))
                outcome = await self._outcome(context, recorder)
        finally:
            calls = recorder.close()
        trained = [call for call in calls if not call.off_policy]
        outcome = self._checked(outcome, calls, trained)
        if self.task.is_eval:
            self._keep_record(outcome, context, calls, time.monotonic() - started)
            trained = calls
        elif context.kept and settings.run_dir:
            rollout = Rollout(
                step=int(self.task.batch_id),
                task=int(self.task.task_id),
                run=self.run_index,
                reward=outcome.reward,
                failure=outcome.failure.value if outcome.failure else None,
                kept=dict(context.kept),
            )
            self._keep(append_rollout, settings.run_dir, rollout)
        if outcome.failure is not None or outcome.reward is None:
            return [_placeholder(outcome)]
        experiences = _experiences(trained, outcome.reward)
        # On a rollout's last experience its metrics reach Trinity's curves.
        experiences[-1].metrics = _metrics(outcome, calls, len(calls) - len(trained))
        if len(trained) < len(calls):
            self._say_once(
                "off policy",
                "Calls that change temperature, top_p or another sampling argument are answered "
                "but not trained: see the metric untrained_calls.",
            )
        return experiences

    async def _outcome(self, context: RolloutContext, recorder: RolloutRecorder) -> Outcome:
        thread = RolloutThread(lambda: self._call_user(context, recorder))
        try:
            reward, metrics = await thread.result(self.settings.run_timeout)
        except Exception as error:
            return replace(_failed(error), metrics=self._trace.metrics())
        own = {**context.metrics, **metrics}
        return Outcome(reward=reward, metrics={**own, **self._trace.metrics(), **own})

    def _checked(
        self, outcome: Outcome, calls: list[RecordedCall], trained: list[RecordedCall]
    ) -> Outcome:
        """A failure if the budget ended, whatever the workflow made of it, or if no call was made
        that can be learned from."""
        spent = self.settings.spend.reached() if self.settings.spend else None
        if spent is not None:
            return replace(outcome, failure=Failure.BUDGET_REACHED, detail=spent)
        if outcome.failure is not None or trained or (calls and self.task.is_eval):
            return outcome
        detail = _NOTHING_TRAINED if calls else "the workflow made no call to its model"
        return Outcome(failure=Failure.NO_CALL, detail=detail)

    async def _call_user(
        self, context: RolloutContext, recorder: RolloutRecorder
    ) -> tuple[float, dict[str, float]]:
        """Workflow and judge; runs in the rollout's own thread and loop."""
        function = received(self.settings.workflow_func)
        judge = received(self.settings.judge_func)
        offered = {
            "auxiliary_models": auxiliary_chat_models(
                self.auxiliary_model_wrappers or (), self.auxiliary_models or (), recorder.loop
            ),
            "logger": self.logger,
            "system_prompt": self.settings.system_prompt,
        }
        spend = self.settings.spend.open() if self.settings.spend else contextlib.nullcontext()
        with context.activate(), self._trace.activate(), spend:
            output = await function(
                **_wanted(function, offered), task=self._raw_task(), model=recorder.chat_model()
            )
            # A `WorkflowOutput`, ours or AgentScope's, or else the reward itself.
            if not all(hasattr(output, name) for name in ("reward", "response", "metrics")):
                if judge is not None:
                    raise TypeError(
                        "a judge function scores the response of a WorkflowOutput, but the "
                        f"workflow returned {type(output).__name__}"
                    )
                return as_reward(output, "the workflow"), {}
            self._response = output.response
            metrics = as_metrics(output.metrics, "the workflow")
            if judge is None:
                return as_reward(output.reward, "the workflow"), metrics
            verdict = await judge(
                **_wanted(judge, offered), task=self._raw_task(), response=output.response
            )
            metrics |= as_metrics(getattr(verdict, "metrics", None), "the judge")
            return as_reward(getattr(verdict, "reward", verdict), "the judge"), metrics

    def _raw_task(self) -> dict[str, Any]:
        """The row, copied: what one rollout changes in it must not reach the others."""
        return copy.deepcopy(dict(self.task.raw_task or {}))

    def _generate_kwargs(self) -> dict[str, Any]:
        rollout, model = self.task.rollout_args, self.model.generate_kwargs
        given = {"temperature": rollout.temperature, "top_p": rollout.top_p}
        kwargs: dict[str, Any] = {
            **{name: model.get(name) if own is None else own for name, own in given.items()},
            "max_tokens": rollout.max_tokens or model.get("max_tokens") or DEFAULT_MAX_TOKENS,
            "logprobs": True,
            "top_logprobs": rollout.logprobs,
        }
        if rollout.top_k and rollout.top_k > 0:
            kwargs["extra_body"] = {"top_k": rollout.top_k}
        return {name: value for name, value in kwargs.items() if value is not None}

    def _rollout_seed(self) -> str:
        """Root of the seeds of this rollout's calls, the same whenever it is repeated.

        Evaluations leave the step out, and count items by their rows: before and after training,
        and on a sample of the rows, they draw the same random numbers, so that a difference is
        due to the weights.
        """
        task = self.task
        batch, number = task.batch_id, task.task_id
        if task.is_eval:
            batch = str(task.batch_id).partition("/")[2]
            number = task.index.get("index", number)
        seed = f"{self.settings.seed}|{batch}|{number}|{self.run_index}"
        if task.repeat_times and task.rollout_args.n < task.repeat_times:
            # Trinity shared the rollouts of this task out to several runners
            # (`max_repeat_times_per_runner`), and each counts from zero: equal seeds would make
            # equal rollouts, so these are not reproducible.
            seed += f"|{task.__dict__.setdefault('_aflow_salt', uuid.uuid4().hex)}"
        return seed

    def _keep_record(
        self,
        outcome: Outcome,
        context: RolloutContext,
        calls: list[RecordedCall],
        seconds: float,
    ) -> None:
        settings, score = self.settings, None
        if not settings.eval_dir:
            return
        if outcome.failure is None:
            score = {**outcome.metrics, "reward": outcome.reward}.get(settings.score)
            if score is None:
                self._say_once(
                    f"score {settings.score}",
                    f"report.score is {settings.score!r}, but the workflow did not record it (it "
                    f"recorded {sorted(outcome.metrics)}): the evaluation has no score.",
                )
        step, _, taskset = str(self.task.batch_id).partition("/")
        item = int(self.task.index.get("index", self.task.task_id))
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
            transcript=list(map(transcript_entry, calls)) if item < settings.transcripts else [],
            seconds=round(seconds, 3),
            calls=call_summaries(context, calls),
            operators=[
                {key: getattr(use, key) for key in ("operator", "instance", "outcome", "attempts")}
                for use in self._trace.of(OperatorCall)
            ],
            answer=final_answer(self._response, calls),
            kept=dict(context.kept),
        )
        self._keep(append_record, settings.eval_dir, record)

    def _keep(self, append: Callable[[Path, Any], None], folder: str, record: Any) -> None:
        """Append a record; a full disk must not cost the rollout."""
        try:
            append(Path(folder), record)
        except OSError as error:
            self._say_once("records", f"Records cannot be written, the report lacks them: {error}")

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
    """Stands for a failed rollout until `RunFilter` has counted it; has no trainable token."""
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


def _wanted(function: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the optional arguments that the function's signature asks for.

    What a partial has bound by name keeps its value, and what is not configured (None) leaves the
    function's own default in place.
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


def as_reward(value: Any, who: str) -> float:
    """A reward as a finite float. Scalars of numpy and torch are numbers, and so is a bool.

    Raises:
        BadReward: None, not a number, or not finite; `who` is named in the message.
    """
    if value is None:
        raise BadReward(Failure.RETURNED_NONE, f"{who} returned None as the reward")
    number = value
    with contextlib.suppress(AttributeError, RuntimeError, ValueError, TypeError):
        number = value.item()  # numpy and torch, if it is one element
    if not isinstance(number, numbers.Real | Decimal):
        found = f"{who} returned no number but {type(value).__name__}: {value!r:.200}"
        raise BadReward(Failure.NOT_A_NUMBER, found)
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise BadReward(Failure.NOT_FINITE, f"{who} returned {reward} as the reward")
    return reward


def as_metrics(metrics: Mapping[str, Any] | None, who: str) -> dict[str, float]:
    """Metrics of a result object as finite floats.

    Raises:
        ValueError: one is not a finite number.
    """
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[str(name)] = as_reward(value, who)
        except BadReward:
            raise ValueError(
                f"{who} gave the metric {name!r} the value {value!r:.200}, not a finite number"
            ) from None
    return checked


def _failed(error: Exception) -> Outcome:
    if isinstance(error, BadReward):
        return Outcome(failure=error.kind, detail=str(error))
    if isinstance(error, TimedOut):
        # Where the rollout was when its time was up, innermost frame last.
        ours = [i for i, frame in enumerate(error.stack) if frame.filename in _MACHINERY]
        frames = error.stack[ours[-1] + 1 :] if ours else error.stack
        listed = "".join(traceback.StackSummary.from_list(frames[-5:]).format()).rstrip()
        kind = Failure.BLOCKED_LOOP if isinstance(error, Blocked) else Failure.TIMED_OUT
        return Outcome(
            failure=kind, detail=f"{error}; it was at\n{listed}" if frames else str(error)
        )
    raised = error.error if isinstance(error, Escaped) else error
    # The traceback from the user's function on, without the frames that lead to it.
    trace, start = raised.__traceback__, raised.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in _MACHINERY:
            start = trace.tb_next
        trace = trace.tb_next
    lines = traceback.format_exception(type(raised), raised, start or raised.__traceback__)
    return Outcome(failure=Failure.RAISED, detail="".join(lines).rstrip()[-MAX_DETAIL:])
