"""What all clients share, and the scripted one. Everything that counts or limits a call happens in
`BaseClient`; a subclass says how one question is answered."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aflow_tune.models.cache import current_cache, read_entry, write_entry
from aflow_tune.models.prices import Price
from aflow_tune.models.spend import Call, current_spend
from aflow_tune.models.types import Ask, Message, ModelError, ModelFailure, Reply


class BaseClient:
    """A `ModelClient` whose calls are counted, under `role`. `price` None: that of the role, if the
    run has one; else unknown."""

    def __init__(self, role: str, model: str, price: Price | None = None) -> None:
        self.role, self.model, self.price = role, model, price

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        """One answer: `types.ModelClient`. Also raises BadInput: the messages are malformed, this
        client cannot pass an argument on, or a limit on money lacks the price."""
        ask = self._with_defaults(Ask(messages=messages, **options))
        ask.check()
        most = ask.most_prompt_tokens, self._most_tokens(ask)
        call = Call(current_spend(), self.role, self.model, self.price, *most)
        cache, endpoint = current_cache(), self._endpoint()
        entry = None if cache is None or endpoint is None else cache.entry(endpoint, ask)
        if entry is not None and (cached := read_entry(entry)) is not None:
            call.answered_from_cache(cached.usage)
            return replace(cached, cost=call.cost, seconds=0.0, from_cache=True)
        with call.noted():
            reply = await self._answer(ask, call)
        cost = None if call.usage is None and call.price is None else call.cost
        reply = replace(reply, usage=call.usage, cost=cost, seconds=call.seconds)
        if entry is not None:
            write_entry(entry, reply)
        return reply

    def _with_defaults(self, ask: Ask) -> Ask:
        """The question with what the client's configuration says where it says nothing."""
        return ask

    def _endpoint(self) -> Mapping[str, Any] | None:
        """What answers, for the cache's key. None: its answers cannot be cached."""
        return None

    def _most_tokens(self, ask: Ask) -> int | None:
        """The most tokens of the answer; None where there is no bound."""
        return ask.max_tokens

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        """Ask the model inside of `async with call`, and settle that as soon as a reply is there;
        usage, cost and seconds of the reply are filled in by the caller."""
        raise NotImplementedError


class ScriptedModel(BaseClient):
    """A `ModelClient` that answers from a list of texts, replies and errors to raise, in order; or
    from a function of the messages, plain or async. `asked` holds every question, in order."""

    def __init__(
        self,
        replies: Sequence[str | Reply | BaseException] | Callable[[Sequence[Message]], Any],
        *,
        role: str = "policy",
        model: str = "scripted",
        price: Price | None = None,
    ) -> None:
        super().__init__(role, model, price)
        self.asked: list[Ask] = []
        self._replies = replies if callable(replies) else list(replies)
        self._lock = threading.Lock()

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        async with call:
            with self._lock:
                number = len(self.asked)
                self.asked.append(ask)
            if callable(self._replies):
                said: Any = self._replies(ask.messages)
                if inspect.isawaitable(said):
                    said = await said
            elif number < len(self._replies):
                said = self._replies[number]
            else:
                text = f"the script has {len(self._replies)} replies, this is call {number + 1}"
                raise ModelError(ModelFailure.REFUSED, text)
            if isinstance(said, BaseException):
                raise said
            reply = said if isinstance(said, Reply) else Reply(text=str(said), model=self.model)
            call.settle(reply.usage)
            return reply
