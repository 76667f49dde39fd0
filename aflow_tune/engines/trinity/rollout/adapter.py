"""Our Trinity workflow: runs the user's function and turns its calls into experiences.

Trinity creates one `WorkflowAdapter` per rollout. A failed rollout does not raise: it returns one
marked placeholder, which `RunFilter` removes. `recording.py` records the calls.

User code may block, so every rollout has its own thread and event loop, and the runner waits for it
with a time limit. A thread inside a C function cannot be stopped: it is abandoned as a daemon and
gets SystemExit when it next executes Python code.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import functools
import inspect
import itertools
import math
import numbers
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from trinity.common.config import GenerationConfig
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task, Workflow

from aflow_tune.cluster.sent_function import received, send
from aflow_tune.context import RolloutContext
from aflow_tune.engines.trinity.rollout import operators, recording
from aflow_tune.engines.trinity.rollout.recording import RecordedCall
from aflow_tune.models.cache import ResponseCache
from aflow_tune.models.clients import RunSpend
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.report.records import MAX_REASON, EvalRecord, Rollout, append_record, append_rollout
from aflow_tune.sandbox.policy import use_policy
from aflow_tune.trace import OperatorCall, Trace
from aflow_tune.types import Failure

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

T = TypeVar("T")
Function = Callable[..., Any]

DEFAULT_MAX_TOKENS = 4096
MAX_DETAIL = 8000  # characters of a traceback that are kept, from its end
GRACE_SECONDS = 1.0  # for a rollout to react to its cancellation; else it counts as blocked
MAX_BLOCKING_CALLS = 32  # concurrent `asyncio.to_thread` calls of one rollout; others wait
_NOTHING_TRAINED = (
    "the workflow made no call that can be trained: each changes temperature, top_p or another "
    "sampling argument. Leave them to the configuration (model.temperature)."
)

_said: set[str] = set()  # topics of which this process has logged an error, once for all rollouts


@dataclass(frozen=True)
class RolloutSettings:
    """The adapter's settings: `task.workflow_args`, which Trinity passes on as a dict."""

    workflow_func: Function
    """The workflow, or its serialised form (`cluster/sent_function.py`)."""
    judge_func: Function | None = None
    run_timeout: float = 300.0  # seconds that a rollout may take
    seed: int = 0
    system_prompt: str | None = None
    rewards: Any = None
    sandbox: str = "auto"
    prompts: Mapping[str, Any] = field(default_factory=dict)
    spend: RunSpend | None = None  # the run's models and budget
    run_dir: str | None = None  # folder for what workflows keep of training rollouts
    eval_dir: str | None = None  # folder for evaluation records
    score: str = "reward"  # the evaluation score: the reward, or a recorded metric
    transcripts: int = 0  # items of a held-out task set whose transcripts are kept
    cache: str | None = None  # folder with cached responses of other models, for evaluations
    first_run: int = 0  # the number of the first rollout created from a task object

    @classmethod
    def of(cls, workflow_args: Mapping[str, Any]) -> RolloutSettings:
        """The settings of a task; other entries of `workflow_args` are ignored."""
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
    """The `workflow_args` of a run or an evaluation."""
    sent, sent_judge = send(workflow, judge)
    return {
        "workflow_func": sent,
        "judge_func": sent_judge,
        "run_timeout": config.rollout.run_timeout,
        "seed": config.seed,
        "system_prompt": config.rollout.system_prompt,
        "rewards": config.rewards,
        "sandbox": config.sandbox,
        "prompts": config.prompts,
        "spend": spend,
        "run_dir": None if run_dir is None else str(run_dir),
        "eval_dir": str(eval_dir),
        "score": config.report.score,
        "transcripts": config.report.transcripts,
    }


class Failed(Exception):
    """A rollout timed out, exited, or returned no usable reward; `kind` says which."""

    def __init__(self, kind: Failure, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Outcome:
    """The result of a rollout. `failure` is None if it succeeded; `detail` says why it failed."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    detail: str = ""


def sampling_of(rollout: GenerationConfig, model: ModelWrapper) -> dict[str, Any]:
    """The arguments of a call in a rollout of a task; what the task leaves open is the model's."""
    given = {"temperature": rollout.temperature, "top_p": rollout.top_p}
    own = model.generate_kwargs
    kwargs: dict[str, Any] = {
        **{name: own.get(name) if value is None else value for name, value in given.items()},
        "max_tokens": rollout.max_tokens or own.get("max_tokens") or DEFAULT_MAX_TOKENS,
        "logprobs": True,
        "top_logprobs": rollout.logprobs,
        "extra_body": {"top_k": rollout.top_k} if (rollout.top_k or 0) > 0 else None,
    }
    return {name: value for name, value in kwargs.items() if value is not None}


class WorkflowAdapter(Workflow):
    """Runs the user's function with a recording model, a time limit and its own thread."""

    is_async: bool = True
    can_repeat: bool = False
    can_reset: bool = False

    def __init__(
        self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.settings = RolloutSettings.of(task.workflow_args)
        # Trinity creates the rollouts of a task in order, from one task object; a retry uses a
        # fresh copy, which counts from zero again.
        count = task.__dict__.setdefault("_aflow_runs", itertools.count())
        self.run_index: int = next(count) + self.settings.first_run
        self.seed = self._rollout_seed()
        self._trace = Trace()
        self._response: Any = None

    async def run_async(self) -> list[Experience]:
        """One rollout: an experience per choice of each trained call, or one placeholder."""
        settings = self.settings
        context = RolloutContext(rewards=settings.rewards)
        started = time.monotonic()
        recorder = recording.RolloutRecorder(
            await recording.recording_client(self.model),
            context,
            task_id=f"{self.task.batch_id}/{self.task.task_id}",
            seed=self.seed,
            generate_kwargs=sampling_of(self.task.rollout_args, self.model),
        )
        cache: Any = contextlib.nullcontext()
        if settings.cache is not None and self.task.is_eval:
            cache = ResponseCache(settings.cache).activate(sample=self.run_index)
        try:
            with use_policy(settings.sandbox), use_prompts(settings.prompts), cache:
                thread = RolloutThread(lambda: self._call_user(context, recorder))
                reward, metrics = await thread.result(settings.run_timeout)
            own = {**context.metrics, **metrics}
            outcome = Outcome(reward=reward, metrics={**own, **self._trace.metrics(), **own})
        except Exception as error:
            outcome = replace(_failed(error), metrics=self._trace.metrics())
        finally:
            calls = recorder.close()
        trained = [call for call in calls if not call.off_policy]
        spent = settings.spend.reached() if settings.spend else None
        if spent is not None:  # even if the workflow caught the error
            outcome = replace(outcome, failure=Failure.BUDGET_REACHED, detail=spent)
        elif outcome.failure is None and not (trained or (calls and self.task.is_eval)):
            detail = _NOTHING_TRAINED if calls else "the workflow made no call to its model"
            outcome = Outcome(failure=Failure.NO_CALL, detail=detail)
        if self.task.is_eval:
            if settings.eval_dir:
                self._keep_record(outcome, context, calls, time.monotonic() - started)
            trained = calls
        elif context.kept and settings.run_dir:
            ids = int(self.task.batch_id), int(self.task.task_id), self.run_index
            failure = outcome.failure.value if outcome.failure else None
            rollout = Rollout(*ids, outcome.reward, failure, dict(context.kept))
            self._keep(append_rollout, settings.run_dir, rollout)
        if outcome.failure is not None or outcome.reward is None:
            return [_placeholder(outcome)]
        experiences = _experiences(trained, outcome.reward)
        # Trinity takes a rollout's metrics from its last experience.
        answers = [experience for call in calls for experience in call.experiences]
        experiences[-1].metrics = {
            **outcome.metrics,
            "reward": outcome.reward,
            "calls": float(len(calls)),
            "untrained_calls": float(len(calls) - len(trained)),
            "response_tokens": float(sum(map(recording.response_length, answers))),
            "response_truncated": float(sum(it.truncate_status is not None for it in answers)),
        }
        return experiences

    async def _call_user(
        self, context: RolloutContext, recorder: recording.RolloutRecorder
    ) -> tuple[float, dict[str, float]]:
        """Call workflow and judge, in the rollout's own thread and loop; reward and metrics."""
        function = received(self.settings.workflow_func)
        judge = received(self.settings.judge_func)
        # A copy: changes that one rollout makes to the row must not reach the others.
        row = copy.deepcopy(dict(self.task.raw_task or {}))
        offered = {
            "auxiliary_models": recording.auxiliary_chat_models(
                self.auxiliary_model_wrappers or (), self.auxiliary_models or (), recorder.loop
            ),
            "logger": self.logger,
            "system_prompt": self.settings.system_prompt,
        }
        spend = self.settings.spend.open() if self.settings.spend else contextlib.nullcontext()
        with context.activate(), self._trace.activate(), spend:
            output = await function(
                **_wanted(function, offered), task=row, model=recorder.chat_model()
            )
            # A `WorkflowOutput`, ours or AgentScope's, or else the reward itself.
            if not all(hasattr(output, name) for name in ("reward", "response", "metrics")):
                if judge is not None:
                    found = type(output).__name__
                    raise TypeError(f"a judge function needs a WorkflowOutput, not {found}")
                return as_reward(output, "the workflow"), {}
            self._response = output.response
            metrics = as_metrics(output.metrics, "the workflow")
            if judge is None:
                return as_reward(output.reward, "the workflow"), metrics
            row = copy.deepcopy(dict(self.task.raw_task or {}))
            verdict = await judge(**_wanted(judge, offered), task=row, response=output.response)
            metrics |= as_metrics(getattr(verdict, "metrics", None), "the judge")
            return as_reward(getattr(verdict, "reward", verdict), "the judge"), metrics

    def _rollout_seed(self) -> str:
        """Root of the seeds of this rollout's calls. In evaluations it depends on the row, not on
        the step: all draw the same random numbers, so differences are due to the weights."""
        task = self.task
        batch, number = task.batch_id, task.task_id
        if task.is_eval:
            batch = str(task.batch_id).partition("/")[2]
            number = task.index.get("index", number)
        seed = f"{self.settings.seed}|{batch}|{number}|{self.run_index}"
        if task.repeat_times and task.rollout_args.n < task.repeat_times:
            # Several runners share the task (`max_repeat_times_per_runner`), each counting from
            # zero: equal seeds would give equal rollouts. The salt costs reproducibility.
            seed += f"|{task.__dict__.setdefault('_aflow_salt', uuid.uuid4().hex)}"
        return seed

    def _keep_record(
        self, outcome: Outcome, context: RolloutContext, calls: list[RecordedCall], seconds: float
    ) -> None:
        settings, score = self.settings, None
        if outcome.failure is None:
            score = {**outcome.metrics, "reward": outcome.reward}.get(settings.score)
            if score is None:
                recorded = f"the workflow recorded {sorted(outcome.metrics)}"
                self._say_once("score", f"no score: report.score {settings.score!r}, {recorded}")
        step, _, taskset = str(self.task.batch_id).partition("/")
        item = int(self.task.index.get("index", self.task.task_id))
        transcript = list(map(recording.transcript_entry, calls))
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
            transcript=transcript if item < settings.transcripts else [],
            seconds=round(seconds, 3),
            calls=recording.call_summaries(context, calls),
            operators=[
                {key: getattr(use, key) for key in ("operator", "instance", "outcome", "attempts")}
                for use in self._trace.of(OperatorCall)
            ],
            answer=recording.final_answer(self._response, calls),
            kept=dict(context.kept),
        )
        self._keep(append_record, str(settings.eval_dir), record)

    def _keep(self, append: Callable[[Path, Any], None], folder: str, record: Any) -> None:
        try:  # a full disk must not cost the rollout
            append(Path(folder), record)
        except OSError as error:
            self._say_once("records", f"Records cannot be written, the report lacks them: {error}")

    def _say_once(self, topic: str, message: str) -> None:
        if topic not in _said:
            _said.add(topic)
            self.logger.error(message)


def _experiences(calls: list[RecordedCall], reward: float) -> list[Experience]:
    """One experience for each choice of each call; `eid.step` numbers the calls. If any call has a
    step reward and the last has none, the last gets the rollout's reward as its step reward."""
    experiences = []
    any_step_reward = any(call.note.step_reward is not None for call in calls)
    for step, call in enumerate(calls):
        step_reward = call.note.step_reward
        if step_reward is None and any_step_reward and step == len(calls) - 1:
            step_reward = reward
        for choice, experience in enumerate(call.experiences):
            experience.eid.step = step
            experience.reward = reward
            experience.info[operators.CALLER_KEY] = call.note.caller
            experience.info[operators.STATE_KEY] = call.state
            if step_reward is not None and choice == 0:  # count it once per call
                experience.info[operators.STEP_REWARD_KEY] = step_reward
            experiences.append(experience)
    return experiences


def _placeholder(outcome: Outcome) -> Experience:
    """A dummy experience for a failed rollout, which `RunFilter` counts and removes."""
    kind = (outcome.failure or Failure.RETURNED_NONE).value
    return Experience(
        tokens=torch.zeros(2, dtype=torch.int32),
        prompt_length=1,
        logprobs=torch.zeros(1),
        action_mask=torch.zeros(1, dtype=torch.bool),
        reward=0.0,
        info={operators.FAILURE_KEY: kind, operators.TRACE_KEY: outcome.detail},
        metrics={f"failure/{kind}:sum": 1.0},
    )


def _wanted(function: Function, offered: Mapping[str, Any]) -> dict[str, Any]:
    """The `offered` arguments that the function has parameters for, except those bound by a partial
    and those that are None where the parameter has a default."""
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
    """`value` as a finite float: a number, bool, Decimal, or one-element numpy array or tensor.
    Raises Failed: None, not a number, or not finite; `who` returned it."""
    if value is None:
        raise Failed(Failure.RETURNED_NONE, f"{who} returned None as the reward")
    number = value
    with contextlib.suppress(AttributeError, RuntimeError, ValueError, TypeError):
        number = value.item()  # numpy and torch, if it is one element
    if not isinstance(number, numbers.Real | Decimal):
        found = f"{who} returned no number but {type(value).__name__}: {value!r:.200}"
        raise Failed(Failure.NOT_A_NUMBER, found)
    try:
        reward = float(number)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise Failed(Failure.NOT_FINITE, f"{who} returned {reward} as the reward")
    return reward


def as_metrics(metrics: Mapping[str, Any] | None, who: str) -> dict[str, float]:
    """Metrics of a result object as finite floats. Raises ValueError: one is not."""
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[str(name)] = as_reward(value, who)
        except Failed:
            told = f"{who} gave the metric {name!r} no finite number: {value!r:.200}"
            raise ValueError(told) from None
    return checked


def _failed(error: Exception) -> Outcome:
    if isinstance(error, Failed):
        return Outcome(failure=error.kind, detail=str(error))
    return Outcome(failure=Failure.RAISED, detail=_traceback(error))


def _traceback(raised: BaseException) -> str:
    """The formatted traceback from the user's function on, cut to its last `MAX_DETAIL`."""
    trace, start = raised.__traceback__, raised.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            start = trace.tb_next
        trace = trace.tb_next
    lines = traceback.format_exception(type(raised), raised, start or raised.__traceback__)
    return "".join(lines).rstrip()[-MAX_DETAIL:]


class RolloutThread(Generic[T]):
    """Runs one coroutine in a new thread: `await RolloutThread(make).result(seconds)`. `make` is
    called in the thread, inside its event loop and a copy of the current context."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        async def body() -> T:
            return await make()

        self._runner_loop = asyncio.get_running_loop()
        self._done: asyncio.Future[T] = self._runner_loop.create_future()
        self._given_up = False
        self._executor = _DaemonExecutor()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(self._executor)
        self._task = self._loop.create_task(body())
        self._thread = threading.Thread(target=self._main, name="rollout", daemon=True)
        self._thread.start()

    async def result(self, seconds: float) -> T:
        """The coroutine's result; raises the `Exception` that it raised. Raises Failed: it exited
        (SystemExit and the like), timed out after `seconds`, or blocks its event loop."""
        try:
            if (await asyncio.wait([self._done], timeout=seconds))[0]:
                return self._done.result()
            overdue = await self._cancel(seconds)
        except asyncio.CancelledError:
            self._abandon()
            raise
        self._abandon()
        raise overdue

    async def _cancel(self, seconds: float) -> Failed:
        answered: asyncio.Future[None] = self._runner_loop.create_future()
        where: list[traceback.FrameSummary] = []

        def cancel() -> None:
            where.extend(_waiting(self._task))
            _call(self._runner_loop, answered.cancel)
            self._task.cancel()

        _call(self._loop, cancel)
        waiting: list[asyncio.Future[Any]] = [answered, self._done]
        await asyncio.wait(waiting, timeout=GRACE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if answered.done() or self._done.done():
            await asyncio.wait([self._done], timeout=GRACE_SECONDS)
            error = self._done.exception() if self._done.done() else None
            # Without an error something answered the cancellation, as AgentScope's agents do.
            stack = traceback.extract_tb(error.__traceback__) if error else where
            kind, detail = Failure.TIMED_OUT, f"not finished after {seconds:g} s"
        else:
            # Keep no frame: it would keep every local variable of the rollout alive.
            stack = traceback.extract_stack(sys._current_frames().get(self._thread.ident or 0))
            kind, detail = Failure.BLOCKED_LOOP, f"its event loop is blocked after {seconds:g} s"
        ours = [i for i, frame in enumerate(stack) if frame.filename == __file__]
        frames = stack[ours[-1] + 1 :] if ours else stack
        listed = "".join(traceback.StackSummary.from_list(frames[-5:]).format()).rstrip()
        return Failed(kind, f"{detail}; it was at\n{listed}" if frames else detail)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._finish(self._loop.run_until_complete(self._task), None)
        except Exception as error:
            self._finish(None, error)
        except BaseException as error:  # e.g. SystemExit, which would end the runner
            told = Failed(Failure.RAISED, _traceback(error))
            self._finish(None, told.with_traceback(error.__traceback__))
        finally:
            try:
                with contextlib.suppress(RuntimeError):  # `_abandon` may stop the loop meanwhile
                    left = asyncio.all_tasks(self._loop)
                    for task in left:
                        task.cancel()
                    if left:
                        waited = asyncio.wait(left, timeout=GRACE_SECONDS)
                        for task in self._loop.run_until_complete(waited)[0]:
                            if not task.cancelled():
                                task.exception()  # retrieved: else asyncio logs it
                    self._loop.run_until_complete(self._loop.shutdown_asyncgens())
                asyncio.set_event_loop(None)
            finally:
                self._loop.close()

    def _finish(self, value: T | None, error: Exception | None) -> None:
        def deliver() -> None:
            if self._given_up or self._done.done():
                return
            if error is None:
                self._done.set_result(value)  # type: ignore[arg-type]
            else:
                self._done.set_exception(error)

        _call(self._runner_loop, deliver)

    def _abandon(self) -> None:
        self._given_up = True
        _call(self._loop, self._loop.stop)
        for thread in [*self._executor.running, self._thread]:
            if thread.is_alive():
                number, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)


def _waiting(task: asyncio.Task[Any]) -> list[traceback.FrameSummary]:
    """Where a suspended task stands: its coroutine, what that awaits, and so on."""
    coroutine: Any = task.get_coro()
    frames: list[traceback.FrameSummary] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames += traceback.extract_stack(frame, limit=1)
        coroutine = coroutine.cr_await
    return frames


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Call `function` in `loop`'s thread; nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


class _DaemonExecutor(ThreadPoolExecutor):
    """The executor of `asyncio.to_thread` in a rollout: a daemon thread per call. Threads of the
    standard executor are joined at exit, so one that hangs would keep the process alive."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)  # never used: `submit` below starts the threads
        self._slots = threading.Semaphore(MAX_BLOCKING_CALLS)
        self.running: set[threading.Thread] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def work() -> None:
            with self._slots:
                if not future.set_running_or_notify_cancel():
                    return
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)
                finally:
                    self.running.discard(thread)

        thread = threading.Thread(target=work, name="rollout", daemon=True)
        self.running.add(thread)
        thread.start()
        return future
