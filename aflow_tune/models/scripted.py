"""A model that answers from a script: for tests and dry runs, with the books kept as for any.

Its replies cost what they say and nothing is made up: a plain text has no usage, and no price
is known unless one is given.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

from aflow_tune.models.ask import Ask
from aflow_tune.models.client import BaseClient
from aflow_tune.models.ledger import Call
from aflow_tune.models.prices import Price
from aflow_tune.models.types import Message, ModelError, ModelFailure, Reply

Scripted = str | Reply | BaseException
"""A text, a whole reply, or an error to raise."""


class ScriptedModel(BaseClient):
    """A `ModelClient` that answers from a list, in order, or from a function of the messages.

    Args:
        replies: the list; or a function, plain or async, that returns one for the messages.
        price: turns the usage of whole replies into money.

    `asked` holds every question, in the order in which they came.
    """

    def __init__(
        self,
        replies: Sequence[Scripted] | Callable[[Sequence[Message]], Any],
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
        with self._lock:
            number = len(self.asked)
            self.asked.append(ask)
        prompt_tokens = 0 if call.ledger.budget is None else ask.most_prompt_tokens()
        async with call.attempt(prompt_tokens, ask.max_tokens) as attempt:
            said: Any
            if callable(self._replies):
                said = self._replies(ask.messages)
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
            attempt.settle(reply.usage)
            return reply
