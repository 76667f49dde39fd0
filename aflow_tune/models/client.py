"""The base of all clients, a scripted client, and clients over models that a workflow was given.

`BaseClient` counts, limits and caches calls; a subclass implements one request. An AgentScope chat
model is called as it is, with its own records, retries and limits. The tuned model learns only from
calls that are sampled as configured, so arguments that are None are not passed on. Models of
AgentScope 2 other than the tuned one get `Msg` objects. An AFlow-style llm takes a prompt only.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.models.cache import current_cache, read_entry, write_entry
from aflow_tune.models.prices import Price
from aflow_tune.models.spend import Call, current_spend
from aflow_tune.models.types import (
    ANSWER_TOOL,
    Ask,
    BadReply,
    Message,
    ModelClient,
    ModelError,
    ModelFailure,
    Reply,
    Usage,
    answer_tool,
    model_error,
    read_blocks,
    response_format,
    text_of,
)


class BaseClient:
    """A `ModelClient` whose calls are counted under `role`. `price` None: the run's price for the
    role, if it has one; else unknown."""

    def __init__(self, role: str, model: str, price: Price | None = None) -> None:
        self.role, self.model, self.price = role, model, price

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        """One answer, see `types.ModelClient`. Also raises BadInput: the messages are malformed,
        this client cannot pass an argument on, or a limit on money needs an unknown price."""
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
        """The request with the client's configuration filled in."""
        return ask

    def _endpoint(self) -> Mapping[str, Any] | None:
        """Identifies the model in cache keys. None: its answers must not be cached."""
        return None

    def _most_tokens(self, ask: Ask) -> int | None:
        """The limit on the tokens of the answer; None if there is none."""
        return ask.max_tokens

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        """Ask the model within `async with call`, and settle the call with the reply's usage. The
        caller fills in usage, cost and seconds of the reply."""
        raise NotImplementedError


class ScriptedModel(BaseClient):
    """A `ModelClient` for tests. It answers from a list of texts, replies and errors to raise, in
    order; or from a function of the messages, plain or async. `asked` lists all requests."""

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


def as_client(model: Any, role: str = "policy", price: Price | None = None) -> ModelClient:
    """A client over `model`: a client (returned as it is), an AgentScope chat model such as the one
    that a tuned workflow gets, or an AFlow-style llm, `await llm(prompt) -> str`. `role`, `price`:
    see `BaseClient`. Raises BadInput: it is none of these.
    """
    if inspect.iscoroutinefunction(getattr(model, "complete", None)) and hasattr(model, "role"):
        client: ModelClient = model
        return client
    agentscope = sys.modules.get("agentscope.model")  # no import of AgentScope
    if agentscope is not None and isinstance(model, agentscope.ChatModelBase):
        return AgentScopeClient(model, role, price)
    call = model if inspect.isroutine(model) else getattr(type(model), "__call__", None)  # noqa: B004
    if not isinstance(model, type) and inspect.iscoroutinefunction(call):
        return AflowLlmClient(model, role, price)
    expected = "a client of aflow_tune.models, an AgentScope chat model, or an async llm(prompt)"
    found = f"{type(model).__module__}.{type(model).__qualname__}"
    fix = "pass `make_client(ModelSettings(model=...))`, or the model your workflow gets"
    raise BadInput.of("This cannot be used as a model.", "model", expected, found, fix)


class _Adapter(BaseClient):
    """A client over `inner`, whose failures become `ModelError`. Subclasses define `_ask`."""

    inner: Any
    key = ""
    _ask: Callable[[Ask, dict[str, Any], Call], Awaitable[Reply]]

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        sampling = {name: getattr(ask, name) for name in ("temperature", "top_p", "max_tokens")}
        sampling["stop"] = list(ask.stop) or None
        given = {name: value for name, value in sampling.items() if value is not None}
        try:
            return await self._ask(ask, given, call)
        except Exception as error:
            failure = model_error(error, self.model, [self.key])
            if failure is None:
                raise
        # Not in the handler: an SDK's exception holds the request, so do not chain it.
        raise failure


class AgentScopeClient(_Adapter):
    """A `ModelClient` over an AgentScope chat model."""

    def __init__(self, model: Any, role: str = "policy", price: Price | None = None) -> None:
        self._second = hasattr(model, "credential")  # a model of AgentScope 2
        name = getattr(model, "model" if self._second else "model_name", type(model).__name__)
        super().__init__(role, str(name), price)
        self.inner = model
        kinds = {kind.__name__ for kind in type(model).__mro__}
        self._takes = kinds & {"OpenAIChatModel", "DashScopeChatModel"}
        self._wants_msgs = self._second and "TrinityChatModel" not in kinds
        key = getattr(getattr(model, "client", None), "api_key", "")
        self.key = key if isinstance(key, str) and len(key) > 6 else ""

    async def _ask(self, ask: Ask, given: dict[str, Any], call: Call) -> Reply:
        options = self._options(ask, given)
        messages: list[Any] = [{"content": None, **message} for message in ask.messages]
        if self._wants_msgs:
            messages = list(map(_as_msg, messages))
        async with call:
            response = await self.inner(messages, **options)
            if hasattr(type(response), "__aiter__"):
                parts = [part async for part in response]
                response = parts[-1] if parts else None  # it holds the whole text
            if self._second and getattr(response, "finished_reason", None) == "interrupted":
                raise asyncio.CancelledError  # which AgentScope 2 makes an answer of
            told = getattr(response, "usage", None)
            used = getattr(told, "input_tokens", None), getattr(told, "output_tokens", None)
            known = all(isinstance(count, int) for count in used)
            call.settle(Usage(*used) if known else None)  # type: ignore[arg-type]
            blocks = getattr(response, "content", None)
            if not isinstance(blocks, list | tuple):
                raise BadReply(f"the model returned no blocks but {response!r:.200}")
            text, calls = read_blocks(list(map(dict, blocks)), ask.schema)
            reason = "tool_calls" if calls else "stop"
            return Reply(text=text, model=self.model, finish_reason=reason, tool_calls=calls)

    def _options(self, ask: Ask, given: dict[str, Any]) -> dict[str, Any]:
        """The model's keyword arguments. Raises BadInput: its class may not take sampling ones."""
        if given and not self._takes:
            title, where = "This model cannot be asked so.", type(self.inner).__name__
            told = "a class that takes OpenAI's arguments", ", ".join(given)
            raise BadInput.of(title, where, *told, "set them when the model is built")
        options = dict(given)
        if ask.seed is not None and self._takes:
            options["seed"] = ask.seed
        tools = [dict(tool) for tool in ask.tools]
        if ask.schema is not None and "OpenAIChatModel" in self._takes:
            options["response_format"] = response_format(ask.schema)
        elif ask.schema is not None:
            tools.append(answer_tool(ask.schema))
            options["tool_choice"] = ANSWER_TOOL if len(tools) == 1 else "required"
            if self._second:
                from agentscope.tool import ToolChoice

                options["tool_choice"] = ToolChoice(mode=options["tool_choice"])
        return {**options, "tools": tools} if tools else options

    def _most_tokens(self, ask: Ask) -> int | None:
        if ask.max_tokens is not None:
            return ask.max_tokens
        own = getattr(self.inner, "parameters", self.inner)  # where AgentScope 2 has it
        if self._second and getattr(own, "max_tokens", None) is not None:
            return own.max_tokens
        configured = getattr(self.inner, "generate_kwargs", None) or {}
        limit = configured.get("max_completion_tokens", configured.get("max_tokens"))
        return limit if isinstance(limit, int) else getattr(own, "max_tokens", None)


def _as_msg(message: Mapping[str, Any]) -> Any:
    """A message in OpenAI's form as a `Msg` of AgentScope 2. Raises BadInput: it is not text."""
    from agentscope.message import Msg

    role, content = message["role"], message.get("content")
    if not isinstance(content, str | None) and any(part["type"] != "text" for part in content):
        found = ", ".join(sorted({str(part["type"]) for part in content}))
        title, fix = "This message cannot be passed on.", "ask the model yourself, with a `Msg`"
        raise BadInput.of(title, f"the {role}'s message", "text", found, fix)
    if role == "tool":
        result = {"type": "tool_result", "id": message["tool_call_id"], "state": "success"}
        result |= {"name": message.get("name", "tool"), "output": text_of(content)}
        return Msg(name="assistant", role="assistant", content=[result])
    blocks = [{"type": "text", "text": text_of(content)}] if content else []
    for one in message.get("tool_calls") or ():
        function = one["function"]
        call = {"type": "tool_call", "id": one["id"], "name": function["name"]}
        blocks.append({**call, "input": function["arguments"]})
    role = "system" if role == "developer" else role
    return Msg(name=message.get("name", role), role=role, content=blocks)


class AflowLlmClient(_Adapter):
    """A `ModelClient` over `await llm(prompt) -> str`."""

    def __init__(self, llm: Any, role: str = "executor", price: Price | None = None) -> None:
        name = getattr(getattr(llm, "config", None), "model", None)
        super().__init__(role, name if isinstance(name, str) else type(llm).__name__, price)
        self.inner = llm

    async def _ask(self, ask: Ask, given: dict[str, Any], call: Call) -> Reply:
        if given or ask.tools:
            title, where = "An AFlow llm cannot be asked this.", ", ".join(given) or "tools"
            raise BadInput.of(title, where, "a prompt only", where, "leave it out")
        parts = [f"{m['role']}: {text_of(m.get('content'))}" for m in ask.messages]
        if len(parts) == 1:
            parts = [text_of(ask.messages[0].get("content"))]
        if ask.schema is not None:
            schema = json.dumps(dict(ask.schema), ensure_ascii=False)
            parts.append(f"Answer with JSON that follows this schema, and nothing else:\n{schema}")
        async with call:
            text = await self.inner("\n\n".join(parts))
            call.settle(None)
            if not isinstance(text, str):
                raise BadReply(f"the llm returned no text but {text!r:.200}")
            return Reply(text=text, model=self.model)
