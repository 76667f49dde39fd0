"""What one run of a graph may use, and the meter that holds it to that.

The meter stands between the operators and the models, so nothing that a graph does passes it:
each call of a model takes its place before it begins, also where many begin at once. A limit
that is passed ends the run, and stays passed for everything that the run still tries.

Tokens are known after a call, not before. A call begins if the tokens spent, the most that the
calls in flight may use, and the most that it may use itself stay within the limit; else it
waits for those in flight, and alone it begins while anything is left. So the limit is passed by
one call at most, which ends the run. Where an endpoint reports no tokens, every three bytes of
text count as one.

Left to others: which calls are made (`broker.py`), and the run's budget in money, which stands
in front of every model (`aflow_tune.models.spend`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.models.types import Ask, Message, ModelClient, Reply

BYTES_A_TOKEN = 3
"""Of text whose tokens nobody counted."""
COMPLETION_TOKENS = 1024
"""Held back for an answer whose length nothing limits."""


class TooManyCalls(Exception):
    """The graph made more calls, or spent more tokens, than it may."""


@dataclass(frozen=True)
class GraphLimits:
    """What one run of a graph may use."""

    seconds: float = 180.0
    """Wall-clock time, calls of models included."""
    cpu_seconds: float = 30.0
    """Processor time of the graph's own code, where it runs in the sandbox."""
    calls: int = 100
    """Calls of operators and of the model that the graph may make."""
    concurrent: int = 32
    """Of them at the same time; more wait."""
    argument_chars: int = 500_000
    """Characters of all the texts in one call's arguments."""
    memory_mb: int = 256
    model_calls: int | None = None
    """Calls of models that operators may make, failed ones included. None: no limit."""
    tokens: int | None = None
    """Prompt and completion tokens of all models together. None: no limit."""
    call_prompt_tokens: int | None = None
    """Of the prompt of one call: by its length before, as reported after. None: no limit."""
    call_completion_tokens: int | None = None
    """Handed to every call as its `max_tokens`. None: the models' own."""
    retries: int | None = None
    """How often an operator asks again for an answer that it cannot read, where the graph does
    not say; where it says more, this. None: as the operators and the graph say."""


@dataclass
class Spent:
    """What the calls of a run have cost. `cost` is None once one price was unknown."""

    calls: int = 0
    """Of models."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0

    def add(self, reply: Reply) -> None:
        """Count one answer of a model."""
        self.calls += 1
        if reply.usage is not None:
            self.prompt_tokens += reply.usage.prompt_tokens
            self.completion_tokens += reply.usage.completion_tokens
        if self.cost is not None:
            self.cost = None if reply.cost is None else self.cost + reply.cost

    def to_json(self) -> dict[str, Any]:
        """As `inside.Usage` adds it up."""
        return {
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": self.cost,
        }


class Meter:
    """Counts the model calls of one run against its limits. Used on one event loop."""

    def __init__(self, limits: GraphLimits) -> None:
        self.limits = limits
        self.spent = Spent()
        self.passed = ""
        """Which limit was passed; empty while none was."""
        self._begun = 0
        self._tokens = 0
        self._held: dict[object, int] = {}
        self._ended = asyncio.Event()
        """Set, and replaced, each time that a call in flight has ended."""

    def check(self) -> None:
        """Raises `TooManyCalls` once a limit was passed."""
        if self.passed:
            raise TooManyCalls(self.passed)

    def stop(self, reason: str) -> None:
        """Note that a limit was passed, and raise `TooManyCalls`."""
        self.passed = self.passed or reason
        self.check()

    async def ask(
        self, client: ModelClient, messages: Sequence[Message], settings: dict[str, Any]
    ) -> Reply:
        """One call of a model, within the limits.

        Raises:
            TooManyCalls: it would pass them, or has.
        """
        self.check()
        most_calls, most = self.limits.model_calls, self.limits.tokens
        if most_calls is not None and self._begun >= most_calls:
            self.stop(f"more than {most_calls} calls of models (limit model_calls)")
        self._begun += 1
        self._check_prompt(-(-_bytes_of(messages) // 4), "about ")
        if (cap := self.limits.call_completion_tokens) is not None:
            settings["max_tokens"] = min(cap, settings.get("max_tokens") or cap)
        if most is None:
            reply = await client.complete(messages, **settings)
        else:
            reply = await self._within(most, client, messages, settings)
        self.spent.add(reply)
        if reply.usage is not None:
            self._check_prompt(reply.usage.prompt_tokens, "")
        return reply

    async def _within(
        self, most: int, client: ModelClient, messages: Sequence[Message], settings: dict[str, Any]
    ) -> Reply:
        ask = Ask(messages=messages, schema=settings.get("schema"))
        worst = ask.most_prompt_tokens() + (settings.get("max_tokens") or COMPLETION_TOKENS)
        while self._held and self._tokens + sum(self._held.values()) + worst > most:
            await self._ended.wait()
            self.check()
        self._check_tokens(most, self._tokens >= most)
        self._held[token := object()] = worst
        try:
            reply = await client.complete(messages, **settings)
            if reply.usage is not None:
                self._tokens += reply.usage.prompt_tokens + reply.usage.completion_tokens
            else:
                text = _bytes_of(messages) + len(reply.text.encode(errors="replace"))
                self._tokens += -(-text // BYTES_A_TOKEN)
        finally:
            self._held.pop(token)
            self._ended.set()
            self._ended = asyncio.Event()
        self._check_tokens(most, self._tokens > most)
        return reply

    def _check_tokens(self, most: int, passed: bool) -> None:
        if passed:
            self.stop(f"more than {most} tokens of models (limit tokens)")

    def _check_prompt(self, tokens: int, about: str) -> None:
        most = self.limits.call_prompt_tokens
        if most is not None and tokens > most:
            self.stop(
                f"a prompt of {about}{tokens} tokens, more than the {most} that one call may have "
                "(limit call_prompt_tokens)"
            )


class Metered:
    """A model client behind a run's meter. `purse` also adds up what the calls cost."""

    def __init__(self, client: ModelClient, meter: Meter, purse: Spent) -> None:
        self._client, self._meter, self._purse = client, meter, purse
        self.role, self.model = client.role, client.model

    async def complete(self, messages: Sequence[Message], **settings: Any) -> Reply:
        """As the client's. TooManyCalls: the run may not make this call."""
        reply = await self._meter.ask(self._client, messages, settings)
        self._purse.add(reply)
        return reply


def _bytes_of(messages: Sequence[Message]) -> int:
    return sum(_length(message) for message in messages)


def _length(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    text = content if isinstance(content, str) else repr(content)
    return len(text.encode(errors="replace"))
