"""What a workflow reports about its rollout: callers, metrics, state keys, rewards of single steps.

Each execution of a workflow has one `RolloutContext` in a context variable. It follows `await`,
tasks and `asyncio.to_thread`; threads of the user's own pool start without it. Outside of a
rollout every function here checks its arguments and records nothing.

The latest model call is kept by scope: the rollout, each `caller` block, and each task that calls a
model are scopes. A call is the latest of its own scope and of all scopes around it, so parallel
branches do not mix.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar, cast

DEFAULT_CALLER = "workflow"

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@contextlib.contextmanager
def within(variable: ContextVar[Any], value: T) -> Iterator[T]:
    """Set a context variable for the block and everything it starts."""
    token = variable.set(value)
    try:
        yield value
    finally:
        # The garbage collector closes an abandoned rollout, perhaps in another context.
        with contextlib.suppress(ValueError):
            variable.reset(token)


@dataclass
class CallNote:
    index: int
    caller: str
    state_key: str | None = None
    step_reward: float | None = None


@dataclass
class _Scope:
    task: asyncio.Task[Any] | None
    outer: _Scope | None = None
    latest: CallNote | None = None


@dataclass
class _NextKey:
    """A state key for one call. Copies of the context share it."""

    key: str
    before: _NextKey | None
    taken: bool = False


@dataclass(frozen=True)
class _Place:
    """Where in a rollout some code runs. Immutable: tasks share it with those they start."""

    rollout: RolloutContext | None = None
    caller: str = DEFAULT_CALLER
    scope: _Scope | None = None
    block_key: str | None = None
    next_key: _NextKey | None = None
    blocks: tuple[_Block, ...] = ()


_place: ContextVar[_Place] = ContextVar("aflow_tune_place", default=_Place())  # noqa: B039


@dataclass
class RolloutContext:
    """Records of one rollout: its model calls in starting order, and what the user reported."""

    calls: list[CallNote] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: Any = None
    """The run's `sections.RewardsSection`, for the rewards of the package. None: the defaults."""
    kept: dict[str, Any] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)
    """Of calls, which may start in several threads."""

    @contextlib.contextmanager
    def activate(self) -> Iterator[RolloutContext]:
        """Make this the rollout of the current context and of everything it starts."""
        with within(_place, _Place(self, scope=_Scope(_current_task()))):
            yield self

    def note_call(self) -> CallNote:
        place = _place.get()
        pending = _pending_key(place)
        if pending is not None:
            pending.taken = True
        key = place.block_key if pending is None else pending.key
        note = CallNote(next(self._numbers), place.caller, key)
        self.calls.append(note)
        scope, task = place.scope, _current_task()
        if scope is None or scope.task is not task:
            scope = _Scope(task, scope)
            _place.set(replace(place, scope=scope))
        while scope is not None:
            scope.latest = note
            scope = scope.outer
        return note


def current_rollout() -> RolloutContext | None:
    """The rollout that the current code runs in; None outside of one."""
    return _place.get().rollout


def current_caller() -> str:
    """The path of open `caller` blocks that the next model call is attributed to."""
    return _place.get().caller


class _Block:
    """A `with` block that also decorates functions; each call opens a block of its own."""

    _token: Token[_Place] | None = None

    def __init__(self, name: str) -> None:
        self.name = _text(f"{type(self).__name__}()", name)

    def _inside(self, place: _Place) -> _Place:
        raise NotImplementedError

    def __enter__(self) -> None:
        if self._token is not None:
            raise RuntimeError("this block is open already: write `with ...(NAME)` each time")
        place = _place.get()
        self._token = _place.set(replace(self._inside(place), blocks=(*place.blocks, self)))

    def __exit__(self, *error: object) -> None:
        token, self._token = self._token, None
        # Skip a block that the end of another has closed, as with interleaved generators.
        if token is not None and any(block is self for block in _place.get().blocks):
            with contextlib.suppress(ValueError):  # closed in another context
                _place.reset(token)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        # The wrappers are pickled by value for workers: they may refer to `self` only.
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"{function.__qualname__} is a generator: use `with` around its calls")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def in_block(*args: P.args, **kwargs: P.kwargs) -> Any:
                with type(self)(self.name):
                    return await function(*args, **kwargs)

            return cast(Callable[P, R], in_block)

        @functools.wraps(function)
        def in_sync_block(*args: P.args, **kwargs: P.kwargs) -> R:
            with type(self)(self.name):
                return function(*args, **kwargs)

        return in_sync_block


class caller(_Block):
    """Attribute the model calls of a block, or of a function, to `name`. Names of nested blocks
    join: `plan/search`. ValueError: the name is not a non-empty string."""

    def _inside(self, place: _Place) -> _Place:
        path = self.name if place.caller == DEFAULT_CALLER else f"{place.caller}/{self.name}"
        outer = place.scope
        scope = None if outer is None else _Scope(_current_task(), outer, outer.latest)
        return replace(place, caller=path, scope=scope)


class state_key(_Block):
    """Name the state that a model call is made in, for GiGPO's anchor groups (arXiv:2505.10978). A
    plain `state_key("door closed")` applies to the next call of this context; as a `with` block or
    decorator it applies to all calls inside. Without it the state is a hash of task, caller and
    normalised input. ValueError: the key is not a non-empty string."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        place = _place.get()
        self._next = _NextKey(key, _pending_key(place))
        if place.rollout is not None:
            _place.set(replace(place, next_key=self._next))

    def _inside(self, place: _Place) -> _Place:
        self._next.taken = True
        return replace(place, block_key=self.name)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        self._next.taken = True
        return super().__call__(function)


def step_reward(value: float) -> None:
    """Set the step reward of the model call that started last in the current task or `caller`
    block, or in a task started from it. ValueError: the value is not a finite number.
    RuntimeError: there is no such call yet."""
    reward = _number("step_reward", value)
    scope = _place.get().scope
    if scope is not None:
        if scope.latest is None:
            raise RuntimeError("step_reward() has no model call to belong to: call it after one")
        scope.latest.step_reward = reward


def open_scope() -> None:
    """From here on in this context `step_reward` means calls that start after this one."""
    place = _place.get()
    if place.scope is not None:
        _place.set(replace(place, scope=_Scope(_current_task(), place.scope)))


def record_metrics(**metrics: float) -> None:
    """Record metrics of this rollout, for training and evaluation curves. A name recorded twice
    keeps its last value. ValueError: a value is not a finite number."""
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    if (rollout := current_rollout()) is not None:
        rollout.metrics.update(numbers)


def keep(name: str, value: Any) -> None:
    """Store plain data about this rollout under `kept` in its record in `rollouts/` (training) or
    `evaluations/`. A name stored twice keeps its last value. ValueError: the name is empty."""
    _text("a name to keep something under", name)
    if (rollout := current_rollout()) is not None:
        rollout.kept[name] = value


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def _pending_key(place: _Place) -> _NextKey | None:
    pending = place.next_key
    while pending is not None and pending.taken:
        pending = pending.before
    return pending


def _text(what: str, value: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} must be a text that is not empty, not {value!r}")
    return value


def _number(name: str, value: float) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, not {value!r:.80}")
    return number
