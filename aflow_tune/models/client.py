"""What all our clients share: defaults, cache, books, and the words for how a call ended.

A subclass says how one question is answered (`_answer`). Everything that counts, limits or
notes the call happens here, so that no kind of model can be forgotten by a budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aflow_tune.errors import BudgetReached
from aflow_tune.models.ask import Ask
from aflow_tune.models.cache import current_cache
from aflow_tune.models.ledger import CANCELLED, Call, current_ledger
from aflow_tune.models.prices import Price
from aflow_tune.models.types import Message, ModelError, Reply

BUDGET_REACHED = "budget_reached"
RAISED = "raised"
"""The failure of a call that ended in an exception of somebody else's."""


class BaseClient:
    """A `ModelClient` with its books kept.

    Args:
        role: what its usage is counted under.
        model: the model's name.
        price: None: the price of its role, if the ledger has one; else unknown.
    """

    def __init__(self, role: str, model: str, price: Price | None = None) -> None:
        self.role, self.model, self.price = role, model, price

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        schema: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """One answer; see `types.ModelClient`.

        Raises:
            ModelError: no answer after all retries.
            BudgetReached: the run's budget does not allow the call.
            BadInput: the question is none, this client cannot pass it on, or the price is not
                known where the budget limits money.
        """
        ask = self._with_defaults(
            Ask(
                messages=messages,
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                stop=stop,
                seed=seed,
                schema=schema,
                tools=tools,
            )
        )
        ask.check()
        call = current_ledger().call(self.role, self.model, self.price)
        cache, endpoint = current_cache(), self._endpoint()
        entry = None if cache is None or endpoint is None else cache.entry(endpoint, ask)
        if entry is not None:
            cached = entry.read()
            if cached is not None:
                call.answered_from_cache(cached.usage)
                return replace(cached, cost=call.cost, seconds=0.0, from_cache=True)
        reply = await self._booked(ask, call)
        if entry is not None:
            entry.write(reply)
        return reply

    async def _booked(self, ask: Ask, call: Call) -> Reply:
        failure: str | None = RAISED
        call.start()
        try:
            reply = await self._answer(ask, call)
            failure = None
        except ModelError as error:
            failure = error.failure.value
            raise
        except BudgetReached:
            failure = BUDGET_REACHED
            raise
        except asyncio.CancelledError:
            failure = CANCELLED
            raise
        finally:
            call.end(failure)
        cost = None if call.usage is None and self.price is None else call.cost
        return replace(reply, usage=call.usage, cost=cost, seconds=call.seconds)

    def _with_defaults(self, ask: Ask) -> Ask:
        """The question with what the client's configuration says where it says nothing."""
        return ask

    def _endpoint(self) -> Mapping[str, Any] | None:
        """What answers, for the cache's key. None: its answers cannot be cached."""
        return None

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        """Ask the model; usage, cost and seconds of the reply are filled in by the caller."""
        raise NotImplementedError
