"""An AFlow-style llm as a client: something awaitable that turns one prompt into one text.

It takes no arguments and tells no usage, so sampling arguments and tools are refused rather
than dropped; a JSON schema is written into the prompt. `seed`, which promises nothing anywhere,
is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.ask import Ask, text_of
from aflow_tune.models.client import BaseClient
from aflow_tune.models.failures import BadReply, Problem, problem_of
from aflow_tune.models.ledger import Call
from aflow_tune.models.prices import Price
from aflow_tune.models.types import Message, Reply


class AflowLlmClient(BaseClient):
    """A `ModelClient` over `await llm(prompt) -> str`."""

    def __init__(self, llm: Any, role: str = "executor", price: Price | None = None) -> None:
        name = getattr(getattr(llm, "config", None), "model", None)
        super().__init__(role, name if isinstance(name, str) else type(llm).__name__, price)
        self.inner = llm

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        prompt = _prompt(ask)
        prompt_tokens = 0 if call.ledger.budget is None else ask.most_prompt_tokens()
        async with call.attempt(prompt_tokens, None) as attempt:
            problem: Problem | None = None
            try:
                text = await self.inner(prompt)
                attempt.settle(None)
                if not isinstance(text, str):
                    raise BadReply(f"the llm returned no text but {text!r:.200}")
                return Reply(text=text, model=self.model)
            except Exception as error:
                problem = problem_of(error)
                if problem is None:
                    raise
            raise problem.error(self.model, 1)


def _prompt(ask: Ask) -> str:
    asked = {
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "max_tokens": ask.max_tokens,
        "stop": list(ask.stop) or None,
        "tools": list(ask.tools) or None,
    }
    faults = [
        Fault(name, "nothing: an AFlow llm takes a prompt only", f"{value!r:.80}", "leave it out")
        for name, value in asked.items()
        if value is not None
    ]
    if faults:
        raise BadInput("An AFlow llm cannot be asked this.", faults)
    prompt = joined(ask.messages)
    if ask.schema is None:
        return prompt
    schema = json.dumps(dict(ask.schema), ensure_ascii=False)
    return f"{prompt}\n\nAnswer with JSON that follows this schema, and nothing else:\n{schema}"


def joined(messages: Sequence[Message]) -> str:
    """A conversation as one prompt; a single message is its text alone."""
    if len(messages) == 1:
        return text_of(messages[0].get("content"))
    return "\n\n".join(f"{m['role']}: {text_of(m.get('content'))}" for m in messages)
