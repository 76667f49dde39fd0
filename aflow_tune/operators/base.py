"""`Operator`: a model call with a purpose, typed arguments in and typed values out.

A subclass declares its prompts (`asks`) and the fields it wants back (`fields`), and in `run` what
it does with them. This class names the caller (`Review.strict`), asks, reads, asks again a bounded
number of times, and notes one `OperatorCall` in the trace however the call ended. An unreadable
reply gives fallback values; a model without a reply, a missing sandbox and a spent budget raise.
An operator keeps no state of a call: one instance can serve many at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, ClassVar

from aflow_tune.context import caller
from aflow_tune.errors import BadInput, BudgetReached, Fault
from aflow_tune.models import as_client
from aflow_tune.models.types import ModelClient, ModelError
from aflow_tune.operators.fields import Field, Form, described, forms_for, schema_of
from aflow_tune.operators.prompts import (
    FORM,
    MAIN,
    NO_FORM,
    Prompt,
    Texts,
    checked,
    fill,
    form_text,
    placeholders,
    text_of,
)
from aflow_tune.operators.reading import Reading, read_reply
from aflow_tune.sandbox.types import SandboxUnavailable
from aflow_tune.trace import OperatorCall, note

RETRIES = 2  # how often a model is asked again after an unreadable reply
MAX_RETRIES = 10
MAX_REASON = 500  # characters of a reason in the trace
MAX_SHOWN_REPLY = 4_000  # characters of an unreadable reply that the model is shown again
_NAME = re.compile(r"[\w-]{1,80}")
_MODES = {"xml_fill": "xml", "code_fill": "code", "single_fill": "text", "json_fill": "json"}
"""AFlow's names of forms, to ours."""


class Outcome(StrEnum):
    """How one call of an operator ended. The values appear in traces and metrics."""

    ANSWERED = "answered"  # read in the form that was asked for, at the first attempt
    # Read after repairs or after asking again; or some of several votes were lost, or a program had
    # to be corrected before it ran or passed its tests.
    REPAIRED = "repaired"
    UNREADABLE = "unreadable"  # no attempt could be read: values are fallbacks
    PROGRAM_FAILED = "program_failed"  # no program ran to a result
    TESTS_FAILED = "tests_failed"  # the last solution does not pass the tests
    NO_TESTS = "no_tests"  # no tests for this problem were found
    UNDECIDED = "undecided"  # the tests could not be run: the solution may be right or wrong
    # The outcomes below are in the trace only; the call itself raises.
    MODEL_FAILED = "model_failed"  # no reply after the model's retries: `ModelError`
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"  # a program could not be run: `SandboxUnavailable`
    STOPPED = "stopped"  # cancelled, or the run's budget is spent
    RAISED = "raised"  # any other exception: wrong arguments, or a bug in an operator


READ_OUTCOMES = frozenset({Outcome.ANSWERED, Outcome.REPAIRED})
"""The outcomes whose values the model gave."""


class OperatorResult(dict[str, Any]):
    """What an operator returns: a dict with the operator's keys, plus how it was obtained.

    Attributes:
        outcome: see `Outcome`. If it is 'unreadable', values are the operator's fallbacks.
        reason: why the outcome is not 'answered'; may be empty.
        attempts: number of model calls.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        outcome: Outcome | str = Outcome.ANSWERED,
        reason: str = "",
        attempts: int = 0,
    ) -> None:
        super().__init__(values)
        self.outcome = Outcome(outcome)
        self.reason = reason
        self.attempts = attempts

    @property
    def ok(self) -> bool:
        """Whether it holds an answer, correct or not."""
        return self.outcome in READ_OUTCOMES

    def __reduce__(self) -> Any:
        return type(self), (dict(self), self.outcome, self.reason, self.attempts)


class _Use:
    """The state of one call of an operator, shared by the tasks that it starts."""

    def __init__(self) -> None:
        self.attempts = 0
        self.outcomes: list[Outcome] = []
        self.reasons: list[str] = []


_use: ContextVar[_Use | None] = ContextVar("aflow_tune_operator_use", default=None)


class Operator:
    """Base of all operators. Built as `Op(llm)`, called as `await op(...)`.

    A subclass has a docstring, whose first line describes it to policies that write graphs,
    `fields`, `asks`, `returns`, and an async method `run`, whose signature is that of the call.

    Args:
        llm: anything that `aflow_tune.models.as_client` takes.
        name: of the instance, in traces and experiences. None: the class's name in lower case;
            give names to tell two operators of one class apart.
        prompts: the instance's own texts, see `prompts.py`.
        form: a `Form` in which to ask for the fields. None: the operator's.
        retries: how often to ask again after an unreadable reply, from 0 to 10.

    Raises:
        BadInput: with every fault of the arguments.
    """

    fields: ClassVar[tuple[Field, ...]] = ()
    """What `ask` asks for by default."""
    form: ClassVar[Form] = Form.XML
    asks: ClassVar[Mapping[str, Prompt]] = {}
    """Its prompts by name."""
    returns: ClassVar[Mapping[str, str]] = {}
    """Keys of its result, each with a description. Empty: those of the fields."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "__call__" in own:
            raise TypeError(f"{cls.__name__} defines __call__: name it `run`, which __call__ wraps")
        if "run" in own:
            if not inspect.iscoroutinefunction(own["run"]):
                raise TypeError(f"{cls.__name__}.run must be `async def run(self, ...)`")
            cls.__call__ = _call_of(own["run"])  # type: ignore[method-assign, assignment]

    def __init__(
        self,
        llm: Any,
        name: str | None = None,
        prompts: Texts | None = None,
        *,
        form: str | None = None,
        retries: int = RETRIES,
    ) -> None:
        self.name = type(self).__name__.lower() if name is None else name
        self.caller = f"{type(self).__name__}.{self.name}"
        self.retries = retries
        self._prompts, faults = checked(prompts, self.asks, f"{self.caller}: prompts")
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            expected = "letters, digits, _ and -"
            faults.append(Fault(f"{type(self).__name__}: name", expected, repr(name), "rename it"))
        expected = f"a whole number from 0 to {MAX_RETRIES}"
        if type(retries) is not int or not 0 <= retries <= MAX_RETRIES:
            faults.append(
                Fault(f"{self.caller}: retries", expected, f"{retries!r:.80}", "give one")
            )
        allowed = [item.value for item in forms_for(self.fields)]
        self._form = Form(form) if form in allowed else type(self).form
        if form not in (*allowed, None):
            expected = f"one of {', '.join(allowed)}"
            fix = "leave it out for the operator's own form"
            faults.append(Fault(f"{self.caller}: form", expected, repr(form), fix))
        if faults:
            raise BadInput("A prompt does not fit its operator.", faults)
        self.llm: ModelClient = as_client(llm)

    async def __call__(self, *args: Any, **kwargs: Any) -> OperatorResult:
        """Run the operator. Subclasses get their `run`'s signature here.

        Raises:
            ModelError: the model gave no reply.
            SandboxUnavailable: a program could not be run.
            BudgetReached: the run's budget is spent.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `async def run(self, ...)`")

    async def ask(
        self,
        values: Mapping[str, object],
        prompt: str = MAIN,
        *,
        fields: Sequence[Field] | None = None,
        mode: str | None = None,
    ) -> OperatorResult:
        """Ask the model for fields; ask again, up to `retries` times, if a reply is unreadable.

        Args:
            values: of the prompt's placeholders.
            prompt: a key of `asks`.
            fields: None: the operator's own.
            mode: a form for this call, by our name or AFlow's (`xml_fill`); ignored if these
                fields cannot be asked for in it.

        Returns:
            The fields' values; if no attempt could be read, fallbacks for the missing ones.
        """
        use = _use.get() or _Use()
        fields = self.fields if fields is None else fields
        allowed = forms_for(fields)
        wanted = (_MODES.get(mode or "", mode), self._form, allowed[0])
        form = Form(next(item for item in wanted if item in allowed))
        template = text_of(type(self).__name__, self.name, prompt, self.asks, self._prompts)
        asked = described(fields, form)
        text = fill(template, {**values, FORM: asked, NO_FORM: ""})
        if asked and not placeholders(template) & {FORM, NO_FORM}:
            text = f"{text}\n\n{asked}"
        schema = schema_of(fields) if form is Form.JSON else None
        messages: list[dict[str, str]] = [{"role": "user", "content": text}]
        reading, attempt = Reading({}), 0
        while attempt <= self.retries:
            attempt += 1
            use.attempts += 1
            reply = (await self.llm.complete(messages, schema=schema)).text
            reading = read_reply(reply, fields, form)
            if not reading.faults:
                break
            messages = _again(text, reply, "; ".join(reading.faults))
        values_read = {field.name: field.fallback for field in fields} | dict(reading.values)
        reason = "; ".join(reading.faults)
        outcome = Outcome.REPAIRED if reading.repaired or attempt > 1 else Outcome.ANSWERED
        if reading.faults:
            outcome = Outcome.UNREADABLE
        use.outcomes.append(outcome)
        use.reasons += [reason] if reason else []
        return OperatorResult(values_read, outcome, reason, attempt)

    @classmethod
    def most_calls(cls, *, retries: int = RETRIES, **settings: Any) -> int:
        """The most model calls of one call; here, of an operator that asks once. Override it if
        `run` may ask more often.

        Args:
            retries: how often each question is asked again.
            settings: constructor options and call arguments by name; None for an unknown value,
                missing for the default.
        """
        return 1 + retries


def _call_of(run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[OperatorResult]]:
    @functools.wraps(run)
    async def call(self: Operator, *args: Any, **kwargs: Any) -> OperatorResult:
        use, name = _Use(), type(self).__name__
        token = _use.set(use)
        outcome, reason = Outcome.RAISED, ""
        started = time.monotonic()
        with caller(self.caller):
            try:
                result = await run(self, *args, **kwargs)
                if not isinstance(result, OperatorResult):  # its worst outcome counts
                    worst = [Outcome.UNREADABLE, Outcome.REPAIRED, Outcome.ANSWERED]
                    found = next((item for item in worst if item in use.outcomes), worst[-1])
                    said = "" if found is Outcome.ANSWERED else "; ".join(use.reasons)
                    result = OperatorResult(result, found, said)
                result.attempts = use.attempts
                outcome, reason = result.outcome, result.reason
                return result
            except BaseException as error:
                if isinstance(error, ModelError):
                    outcome = Outcome.MODEL_FAILED
                elif isinstance(error, SandboxUnavailable):
                    outcome = Outcome.SANDBOX_UNAVAILABLE
                elif isinstance(error, (BudgetReached, asyncio.CancelledError, GeneratorExit)):
                    outcome = Outcome.STOPPED
                reason = f"{type(error).__name__}: {error}"
                raise
            finally:
                note(
                    OperatorCall(
                        started=started,
                        seconds=time.monotonic() - started,
                        operator=name,
                        instance=self.name,
                        outcome=outcome.value,
                        attempts=use.attempts,
                        reason=reason[:MAX_REASON],
                    )
                )
                # The garbage collector may close an abandoned call in another context.
                with contextlib.suppress(ValueError):
                    _use.reset(token)

    call.__name__ = "__call__"
    call.__qualname__ = call.__qualname__.replace(".run", ".__call__")
    return call


def _again(prompt: str, reply: str, fault: str) -> list[dict[str, str]]:
    """The messages that ask again, with the unreadable reply."""
    if len(reply) > MAX_SHOWN_REPLY:
        half = MAX_SHOWN_REPLY // 2
        reply = f"{reply[:half]}\n[...]\n{reply[-half:]}"
    # Endpoints reject lone surrogates and empty messages.
    shown = reply.encode(errors="replace").decode().replace("\0", "\ufffd")
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": shown if shown.strip() else "(an empty reply)"},
        {"role": "user", "content": form_text("again", {"fault": fault})},
    ]


def whole_number(where: str, value: Any, least: int, most: int) -> None:
    """Raise `BadInput` for anything else: the value may come from a graph that a model wrote."""
    if type(value) is not int or not least <= value <= most:
        expected = f"a whole number from {least} to {most}"
        title = "An operator cannot be built."
        raise BadInput.of(title, where, expected, f"{value!r:.80}", f"give {expected}")
