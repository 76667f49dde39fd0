"""What a workflow may say about the run it is in: who calls, what to measure, step rewards.

One `RunContext` exists per run of a workflow. It travels in a context variable, so it follows
the workflow through `await`, `asyncio.gather`, tasks and `asyncio.to_thread`, and two runs
never see each other; a thread pool of the user's own starts without it. Outside of a run every
function here checks its arguments and does nothing else, so that a workflow can be called from
a plain unit test.

Which call is the latest is kept in scopes: one for the run, one for each `caller` block and one
for each task that calls a model. A call is the latest of its own scope and of those around it,
so parallel branches do not mix, and `asyncio.wait_for`, which runs its argument in a task of
its own, hides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

DEFAULT_CALLER = "workflow"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class CallNote:
    """What the context knows about one model call."""

    index: int
    caller: str
    state_key: str | None = None
    step_reward: float | None = None


@dataclass
class _Scope:
    """A stretch of the run in which 'the latest call' has one meaning."""

    task: asyncio.Task[Any] | None
    outer: _Scope | None = None
    latest: CallNote | None = None


@dataclass
class _NextKey:
    """A state key for one call. Copies of the context share it, so that one call takes it."""

    key: str
    before: _NextKey | None
    taken: bool = False


_caller: ContextVar[str] = ContextVar("aflow_tune_caller", default=DEFAULT_CALLER)
_block_key: ContextVar[str | None] = ContextVar("aflow_tune_block_key", default=None)
_next_key: ContextVar[_NextKey | None] = ContextVar("aflow_tune_next_key", default=None)
_scope: ContextVar[_Scope | None] = ContextVar("aflow_tune_scope", default=None)
_run: ContextVar[RunContext | None] = ContextVar("aflow_tune_run", default=None)
_blocks: ContextVar[tuple[tuple[_Block, contextlib.AbstractContextManager[None]], ...]] = (
    ContextVar("aflow_tune_blocks", default=())
)


@dataclass
class RunContext:
    """The notes of one run: its calls in the order they started, and the user's metrics."""

    calls: list[CallNote] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def activate(self) -> Iterator[RunContext]:
        """Make this the run of the current context and of everything it starts."""
        with (
            _set_to(_run, self),
            _set_to(_scope, _Scope(_current_task())),
            _set_to(_caller, DEFAULT_CALLER),
            _set_to(_block_key, None),
            _set_to(_next_key, None),
        ):
            yield self

    def note_call(self) -> CallNote:
        """Note that a model call starts now, in the current context."""
        note = CallNote(len(self.calls), _caller.get(), _take_state_key())
        self.calls.append(note)
        scope = _scope.get()
        task = _current_task()
        if scope is None or scope.task is not task:
            scope = _Scope(task, scope)
            _scope.set(scope)
        while scope is not None:
            scope.latest = note
            scope = scope.outer
        return note


def current_run() -> RunContext | None:
    """The run that the current code belongs to, or None."""
    return _run.get()


def current_caller() -> str:
    """Who the next model call of this context is attributed to."""
    return _caller.get()


class _Block:
    """A `with` block that also decorates functions, coroutine functions among them.

    A decorated function opens a block of its own for each call, and what a block changed is
    kept in the context rather than in the object, so blocks may be used again and overlap.
    """

    def _open(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError

    def _again(self) -> _Block:
        raise NotImplementedError

    def __enter__(self) -> None:
        block = self._open()
        block.__enter__()
        _blocks.set((*_blocks.get(), (self, block)))

    def __exit__(self, *error: object) -> None:
        blocks = _blocks.get()
        if all(owner is not self for owner, _ in blocks):
            return  # a generator that was closed from another context than it ran in
        owner: _Block | None = None
        while owner is not self:  # above it are those of generators that were left open
            *outer, (owner, block) = blocks
            blocks = tuple(outer)
            block.__exit__(None, None, None)
        _blocks.set(blocks)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        # The wrappers travel to workers by value: they may refer to nothing but `self`.
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator: use `with {type(self).__name__}(...)` "
                "around its calls instead of the decorator"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def in_block(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._again():
                    return await function(*args, **kwargs)

            return cast(Callable[P, R], in_block)

        @functools.wraps(function)
        def in_sync_block(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._again():
                return function(*args, **kwargs)

        return in_sync_block


class caller(_Block):
    """Attribute the model calls of a block, or of a function, to `name`.

    Names of nested blocks join: `with caller("plan"): with caller("search"):` is `plan/search`.

    Raises:
        ValueError: the name is not a text, or is empty.
    """

    def __init__(self, name: str) -> None:
        self.name = _text("a caller's name", name)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        outer = _caller.get()
        path = self.name if outer == DEFAULT_CALLER else f"{outer}/{self.name}"
        with _set_to(_caller, path), _set_to(_scope, _inner_scope()):
            yield

    def _again(self) -> caller:
        return caller(self.name)


class state_key(_Block):
    """Name the state that a model call is made in, for GiGPO's anchor groups.

    A plain `state_key("door closed")` holds for the next call of this context; used as a `with`
    block or decorator it holds for all calls inside. Without it the state is a hash of task,
    caller and normalised input.

    Raises:
        ValueError: the key is not a text, or is empty.
    """

    def __init__(self, key: str) -> None:
        self.key = _text("a state key", key)
        self._next = _NextKey(self.key, _pending_key())
        if _run.get() is not None:
            _next_key.set(self._next)

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        self._next.taken = True
        with _set_to(_block_key, self.key):
            yield

    def _again(self) -> state_key:
        return state_key(self.key)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        self._next.taken = True
        return super().__call__(function)


def step_reward(value: float) -> None:
    """Give the latest model call a reward of its own.

    The latest is the one that started last in the current task or `caller` block, or in a task
    that was started from it.

    Raises:
        ValueError: the value is not a finite number.
        RuntimeError: the run has made no model call yet.
    """
    reward = _number("step_reward", value)
    scope = _scope.get()
    if _run.get() is None or scope is None:
        return
    if scope.latest is None:
        raise RuntimeError("step_reward() has no model call to belong to: call it after one")
    scope.latest.step_reward = reward


def record_metrics(**metrics: float) -> None:
    """Record numbers about this run; they appear in training and evaluation curves.

    A name recorded twice keeps its last value.

    Raises:
        ValueError: a value is not a finite number.
    """
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    run = _run.get()
    if run is not None:
        run.metrics.update(numbers)


T = TypeVar("T")


@contextlib.contextmanager
def _set_to(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Hold `value` for a block.

    Sets the old value back instead of resetting a token: a generator that is closed from
    another context may not use its token there.
    """
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def _inner_scope() -> _Scope | None:
    outer = _scope.get()
    return None if outer is None else _Scope(_current_task(), outer, outer.latest)


def _pending_key() -> _NextKey | None:
    pending = _next_key.get()
    while pending is not None and pending.taken:
        pending = pending.before
    return pending


def _take_state_key() -> str | None:
    pending = _pending_key()
    if pending is None:
        return _block_key.get()
    pending.taken = True
    return pending.key


def _text(what: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} must be a text that is not empty, not {value!r}")
    return value


def _number(name: str, value: float) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, not {value!r:.80}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return number
