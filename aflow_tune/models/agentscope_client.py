"""AgentScope's chat models as clients, above all the one that a tuned workflow is given.

Calls go through the model itself, so what records, counts or traces there goes on doing so. The
model being tuned is trained only on calls that are sampled as configured: arguments that are
None are therefore not passed at all. A JSON schema travels as `response_format` where the model
speaks OpenAI's API, which records such a call like any other, and as a tool elsewhere.

Left to the model: retries, time-outs and concurrency, which its own SDK does. Its answers are
not cached: its weights change under one name.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.ask import (
    ANSWER_TOOL,
    Ask,
    answer_text,
    answer_tool,
    response_format,
    tool_call,
)
from aflow_tune.models.client import BaseClient
from aflow_tune.models.failures import BadReply, Problem, problem_of
from aflow_tune.models.ledger import Attempt, Call
from aflow_tune.models.prices import Price
from aflow_tune.models.types import Reply, Usage

_NAMES: dict[str, dict[str, str | None]] = {
    "OpenAIChatModel": {},
    "DashScopeChatModel": {},
    "AnthropicChatModel": {"stop": "stop_sequences", "seed": None},
    "GeminiChatModel": {"max_tokens": "max_output_tokens", "stop": "stop_sequences"},
}
"""What a class calls our arguments; None: it has no such thing, and the argument may be lost."""


class AgentScopeClient(BaseClient):
    """A `ModelClient` over an AgentScope chat model."""

    def __init__(self, model: Any, role: str = "policy", price: Price | None = None) -> None:
        super().__init__(role, str(getattr(model, "model_name", type(model).__name__)), price)
        self.inner = model
        kinds = [kind.__name__ for kind in type(model).__mro__]
        self._kind = next((name for name in kinds if name in _NAMES), kinds[0])

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        options = self._options(ask)
        budget = call.ledger.budget
        prompt_tokens = 0 if budget is None else ask.most_prompt_tokens()
        async with call.attempt(prompt_tokens, self._most_tokens(ask)) as attempt:
            problem: Problem | None = None
            messages = [{"content": None, **message} for message in ask.messages]
            try:
                left = None if budget is None else budget.seconds_left()
                async with asyncio.timeout(left):
                    response = await self.inner(messages, **options)
                    if hasattr(type(response), "__aiter__"):
                        response = await _last(response)
                return self._reply(ask, response, attempt)
            except Exception as error:
                problem = problem_of(error, [self._key()])
                if problem is None:
                    raise
            if budget is not None and budget.seconds_left() == 0.0:
                raise budget.out_of_time()
            raise problem.error(self.model, 1)

    def _options(self, ask: Ask) -> dict[str, Any]:
        """The arguments of the call; only those that were asked for.

        Raises:
            BadInput: this class of AgentScope's cannot pass one of them on.
        """
        given = {
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "max_tokens": ask.max_tokens,
            "stop": list(ask.stop) or None,
            "seed": ask.seed,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        names = _NAMES.get(self._kind)
        if asked and names is None:
            where = f"{self._kind}: {', '.join(asked)}"
            cure = "set them when the model is built (generate_kwargs or options)"
            fault = Fault(where, "arguments that this class takes", "sampling arguments", cure)
            raise BadInput("This model cannot be asked so.", [fault])
        renamed = {(names or {}).get(name, name): value for name, value in asked.items()}
        options: dict[str, Any] = {
            name: value for name, value in renamed.items() if name is not None
        }
        tools = [dict(tool) for tool in ask.tools]
        if ask.schema is not None:
            if self._kind == "OpenAIChatModel":
                options["response_format"] = response_format(ask.schema)
            else:
                tools.append(answer_tool(ask.schema))
                options["tool_choice"] = ANSWER_TOOL if len(tools) == 1 else "required"
        if tools:
            options["tools"] = tools
        return options

    def _most_tokens(self, ask: Ask) -> int | None:
        if ask.max_tokens is not None:
            return ask.max_tokens
        configured = getattr(self.inner, "generate_kwargs", None) or {}
        limit = configured.get("max_completion_tokens", configured.get("max_tokens"))
        return limit if isinstance(limit, int) else getattr(self.inner, "max_tokens", None)

    def _reply(self, ask: Ask, response: Any, attempt: Attempt) -> Reply:
        attempt.settle(_usage(getattr(response, "usage", None)))
        blocks = getattr(response, "content", None)
        if not isinstance(blocks, list | tuple):
            raise BadReply(f"the model returned no blocks but {response!r:.200}")
        texts: list[str] = []
        calls: list[Mapping[str, Any]] = []
        for block in blocks:
            kind = block.get("type")
            if kind == "text":
                texts.append(block.get("text") or "")
            elif kind == "tool_use":
                arguments = block.get("input") or {}
                if ask.schema is not None and block.get("name") == ANSWER_TOOL:
                    texts, calls = [answer_text(ask.schema, arguments)], []
                    break
                told = json.dumps(arguments, ensure_ascii=False)
                calls.append(tool_call(str(block.get("id")), str(block.get("name")), told))
        return Reply(
            text="".join(texts),
            model=self.model,
            finish_reason="tool_calls" if calls else "stop",
            tool_calls=tuple(calls),
        )

    def _key(self) -> str:
        key = getattr(getattr(self.inner, "client", None), "api_key", "")
        return key if isinstance(key, str) and len(key) > 6 else ""


def is_agentscope_model(model: Any) -> bool:
    """Whether this is one of AgentScope's chat models. Imports nothing."""
    base = sys.modules.get("agentscope.model._model_base")
    return base is not None and isinstance(model, base.ChatModelBase)


async def _last(stream: Any) -> Any:
    """The last part of a stream: each holds all that was said so far."""
    last = None
    async for part in stream:
        last = part
    if last is None:
        raise BadReply("the model's stream was empty")
    return last


def _usage(told: Any) -> Usage | None:
    prompt, completion = getattr(told, "input_tokens", None), getattr(told, "output_tokens", None)
    if not isinstance(prompt, int) or not isinstance(completion, int):
        return None
    return Usage(prompt, completion)
