"""The chat model that a workflow gets: AgentScope's class (`models/chat_model.py`) over a client
that records.

Each call is noted when it starts, with its caller and state, and keeps its own experiences, so
attribution and order are right under `asyncio.gather`. The real client lives in the runner's event
loop; calls are passed to it from the rollout's own loop.

Streaming is refused, because streams carry no token ids. Arguments of a call override the
configuration; a call with other sampling arguments is answered but marked `off_policy`, since the
trainer could not reproduce its log-probabilities.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import itertools
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper

from aflow_tune.context import CallNote, RolloutContext
from aflow_tune.models.spend import Call, current_spend, in_call
from aflow_tune.models.types import Ask, Usage
from aflow_tune.report.records import answer_key
from aflow_tune.trace import POLICY

if TYPE_CHECKING:
    from aflow_tune.models.chat_model import TrinityChatModel

_DISTRIBUTION_KEYS = ["top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"]
_DISTRIBUTION_KEYS += ["repetition_penalty", "logit_bias"]
"""Arguments, besides the temperature, that change the sampling distribution."""
_NO_EFFECT = {"top_k": (0, -1), "top_p": (1, 1.0), "repetition_penalty": (1, 1.0)}
"""Values, besides None, zero and empty ones, that switch such an argument off."""
_RANDOM_IDS = ("id", "tool_call_id")  # random keys of messages, not part of the state
_VARYING = re.compile(
    r"<current-time>.*?</current-time>|(?<=The current time is )\S+(?= \()"  # AgentScope 2
    r"|(?<=ed At: )\d[\d:. -]*\d|(?<=ed At\*\*: )\d[\d:. -]*\d"  # plans of AgentScope 1
    r"|/\S*/tmp\w+/tmp_\w+(?=\.py)"  # its programs
    r"|(?<=/sessions/)[0-9a-f]{32}(?=/)"  # workspaces of AgentScope 2
)
"""Times and random names that AgentScope's own parts write, not part of the state either."""


@dataclass
class RecordedCall:
    """One model call: its note, the messages, and an experience for each choice. `offered`: the
    tools that it was asked with; `tools`: `name` and `arguments` (JSON text) of the first choice's
    calls; `counted`: whether the server reported its token usage."""

    note: CallNote
    messages: list[dict[str, Any]]
    state: str
    off_policy: bool
    offered: list[dict[str, Any]] = field(default_factory=list)
    experiences: list[Experience] = field(default_factory=list)
    tools: list[dict[str, str]] = field(default_factory=list)
    counted: bool = True


class RolloutOver(RuntimeError):
    """A call to the model of a rollout that has ended."""

    def __init__(self) -> None:
        super().__init__("this rollout is over; its model takes no more calls")


@dataclass(eq=False)
class RecordingClient:
    """Trinity's client and the wrapper whose history it appends to."""

    wrapper: ModelWrapper
    client: Any
    keeper: Any = None


class RolloutRecorder:
    """Records all calls of one rollout to the policy. Create it in the event loop of `source`'s
    client. `task_id` must tell tasks apart; `seed`: root of the seeds of its calls, None leaves
    them to the server; `generate_kwargs`: the configured arguments of a call."""

    def __init__(
        self,
        source: RecordingClient,
        context: RolloutContext,
        task_id: str,
        seed: str | None,
        generate_kwargs: Mapping[str, Any],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._wrapper, self._client = source.wrapper, source.client
        self._context, self._task_id, self._seed = context, task_id, seed
        self._asked: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self._generate_kwargs = dict(generate_kwargs)
        self._calls: list[RecordedCall] = []
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._closed = False

    def chat_model(self) -> TrinityChatModel:
        """The model for the user's function; usable in any event loop."""
        client = AnyLoopClient(self._client.model_path, self._wrapper, self._create)
        return _chat_model(client, self._generate_kwargs)

    def close(self) -> list[RecordedCall]:
        """Stop recording and cancel pending calls; returns answered calls in order of start."""
        self._closed = True
        for task in self._in_flight:
            task.cancel()
        answered = [call for call in self._calls if call.experiences]
        return sorted(answered, key=lambda call: call.note.index)

    async def _create(self, **kwargs: Any) -> Any:
        # In the caller's loop, where the context variables are the caller's.
        if kwargs.get("stream"):
            raise ValueError("a model that is being tuned cannot stream: pass stream=False")
        configured = self._generate_kwargs
        same = kwargs.get("max_tokens") in (None, configured.get("max_tokens"))
        if "max_completion_tokens" in kwargs and same:
            kwargs["max_tokens"] = None  # the call's newer name overrides the configured limit
        bodies = (configured.get("extra_body"), kwargs.get("extra_body"))
        if any(bodies):
            kwargs["extra_body"] = {**(bodies[0] or {}), **(bodies[1] or {})}
        kwargs = {"model": self._client.model_path, **configured, **kwargs}
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        kwargs["logprobs"] = True
        note = self._context.note_call()
        messages = list(kwargs["messages"])
        if self._seed is not None and "seed" not in kwargs:
            # By content, not by order: concurrent callers may overtake each other.
            shown = json.dumps(_lasting(messages), sort_keys=True, default=str)
            asked = f"{self._seed}|{note.caller}|{shown}"
            numbered = f"{asked}|{next(self._asked[asked])}"
            digest = hashlib.sha256(numbered.encode(errors="replace")).digest()
            kwargs["seed"] = int.from_bytes(digest[:4], "big") >> 1
        state = (note.caller, messages) if note.state_key is None else ("", note.state_key)
        off_policy = _sampling(kwargs) != _sampling(configured)
        offered = list(kwargs.get("tools") or ())
        call = RecordedCall(note, messages, state_hash(self._task_id, *state), off_policy, offered)
        ask = functools.partial(_in_loop, self.loop, functools.partial(self._ask, call, kwargs))
        if in_call():
            return await ask()
        most = kwargs.get("max_completion_tokens", kwargs.get("max_tokens"))
        longest = None if most is None else most * (kwargs.get("n") or 1)
        prompt = Ask(messages=kwargs["messages"], tools=kwargs.get("tools") or ())
        spend, name = current_spend(), self._client.model_path
        counted = Call(spend, POLICY, name, None, prompt.most_prompt_tokens, longest)
        with counted.noted():
            async with counted:
                response = await ask()
                told = response.usage
                counted.settle(told and Usage(told.prompt_tokens, told.completion_tokens))
            return response

    async def _ask(self, call: RecordedCall, kwargs: dict[str, Any]) -> Any:
        # In the runner's loop.
        if self._closed:
            raise RolloutOver()
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        try:
            response = await self._client.chat.completions.create(**kwargs)
        finally:
            self._in_flight.discard(task)
        # Trinity's client appends the response's experiences to the wrapper's history and returns
        # without an await in between: the last ones belong to this call.
        history, count = self._wrapper.history, len(response.choices)
        call.experiences = history[len(history) - count :]
        history.clear()
        for choice, experience in zip(response.choices, call.experiences, strict=True):
            if choice.finish_reason == "length":
                experience.truncate_status = "response_truncated"
        call.counted = response.usage is not None
        call.tools = [
            {"name": tool.function.name, "arguments": tool.function.arguments}
            for tool in response.choices[0].message.tool_calls or ()
            if tool.type == "function"
        ]
        self._calls.append(call)
        return response


def load_agentscope() -> None:
    """Import what a chat model needs, which takes seconds, before a rollout's time limit starts."""
    importlib.import_module("aflow_tune.models.chat_model")


def _chat_model(client: AnyLoopClient, generate_kwargs: Mapping[str, Any]) -> TrinityChatModel:
    """AgentScope's model over `client`, with `openai_endpoint.openai_client` as a method."""
    from aflow_tune.models.chat_model import chat_model

    def openai_client(**options: Any) -> Any:
        from aflow_tune.engines.trinity.rollout import openai_endpoint

        return openai_endpoint.openai_client(model, **options)

    model = chat_model(client, generate_kwargs)
    model.__dict__["openai_client"] = openai_client
    return model


def auxiliary_chat_models(
    wrappers: Iterable[ModelWrapper], clients: Iterable[Any], loop: asyncio.AbstractEventLoop
) -> dict[str, TrinityChatModel]:
    """Auxiliary models by name, for workflows in any event loop; not recorded. `clients`: one for
    each wrapper, living in `loop`."""

    def shared(model: ModelWrapper, client: Any) -> TrinityChatModel:
        async def ask(kwargs: dict[str, Any]) -> Any:
            response = await client.chat.completions.create(**kwargs)
            model.history.clear()  # filled by Trinity's client if its history is enabled
            return response

        async def create(**kwargs: Any) -> Any:
            kwargs = {name: value for name, value in kwargs.items() if value is not None}
            return await _in_loop(loop, functools.partial(ask, kwargs))

        proxy = AnyLoopClient(client.model_path, model, create)
        return _chat_model(proxy, model.generate_kwargs)

    pairs = zip(wrappers, clients, strict=True)
    return {str(wrapper.config.name): shared(wrapper, client) for wrapper, client in pairs}


def response_length(experience: Experience) -> int:
    return len(experience.tokens) - experience.prompt_length


def call_summaries(context: RolloutContext, calls: list[RecordedCall]) -> list[dict[str, Any]]:
    """The entries of `EvalRecord.calls`: all calls of the rollout, failed ones included."""
    answered = {call.note.index: call for call in calls}
    summaries = []
    for note in list(context.calls):
        summary: dict[str, Any] = {"caller": note.caller, "prompt_tokens": None, "tokens": None}
        call = answered.get(note.index)
        if call is None:
            summary["failed"] = True
        else:
            if call.counted:
                summary["prompt_tokens"] = call.experiences[0].prompt_length
                summary["tokens"] = sum(map(response_length, call.experiences))
            if any(choice.truncate_status is not None for choice in call.experiences):
                summary["truncated"] = True
            if call.tools:
                summary["tools"] = call.tools
        summaries.append(summary)
    return summaries


def final_answer(response: Any, calls: list[RecordedCall]) -> str | None:
    """`answer_key` of the workflow's response, else of the last call's with its tool calls."""
    if callable(getattr(response, "get_text_content", None)):  # a message of AgentScope's
        response = response.get_text_content()
    if isinstance(response, str):
        return answer_key(response)
    if not calls:
        return None
    last = calls[-1]
    tools = [f"{tool['name']}({tool['arguments']})" for tool in last.tools]
    return answer_key("\n".join([last.experiences[0].response_text or "", *tools]))


def transcript_entry(call: RecordedCall) -> dict[str, Any]:
    """One entry of `EvalRecord.transcript`."""
    first, note = call.experiences[0], call.note
    entry: dict[str, Any] = {"caller": note.caller, "messages": call.messages}
    entry |= {"response": first.response_text or "", "tokens": response_length(first)}
    more = {"tools": call.offered or None, "calls": call.tools or None, "reward": note.step_reward}
    more["truncated"] = True if first.truncate_status is not None else None
    return entry | {name: value for name, value in more.items() if value is not None}


def state_hash(task_id: str, caller: str, state: Any) -> str:
    """GiGPO's anchor state: a hash of task, caller and state, ignoring white space, the random ids
    of tool calls and the times and random names that AgentScope writes."""
    text = json.dumps([task_id, caller, _lasting(state, _plain)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class AnyLoopClient:
    """The part of `openai.AsyncOpenAI` that can be recorded: `chat.completions`. For any loop."""

    sampling_names = ("temperature", "seed", *_DISTRIBUTION_KEYS)
    """Arguments by which a call would be sampled otherwise than the configuration says."""

    def __init__(self, model_path: str, wrapper: ModelWrapper, create: Callable[..., Any]) -> None:
        async def parse(*, response_format: Any, **kwargs: Any) -> Any:
            from openai.lib._parsing._completions import (
                parse_chat_completion,
                type_to_response_format_param,
            )

            schema = type_to_response_format_param(response_format)
            response = await create(response_format=schema, **kwargs)
            return parse_chat_completion(
                response_format=response_format,
                input_tools=kwargs.get("tools") or (),
                chat_completion=response,
            )

        self.model_path = model_path
        self.max_model_len = wrapper.config.max_model_len
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=create, parse=parse))


_open: dict[asyncio.AbstractEventLoop, dict[Any, RecordingClient]] = {}


async def recording_client(model: ModelWrapper) -> RecordingClient:
    """The client for `model` in the current loop, closed with it. All rollouts share it: Trinity
    gives each its own wrapper, whose client would take 50 ms to create."""
    of_loop = _open.setdefault(asyncio.get_running_loop(), {})
    key = (id(model.config), model.api_address)  # the wrapper below keeps the config alive
    if key not in of_loop:
        load_agentscope()
        wrapper = model.clone_with_isolated_history()
        of_loop[key] = RecordingClient(wrapper, wrapper.get_openai_async_client())

        async def close_with_loop(client: Any) -> AsyncGenerator[None, None]:
            try:
                yield
            finally:
                _open.pop(asyncio.get_running_loop(), None)
                await client.close()

        # A loop finalises async generators at shutdown, when it can still close connections.
        of_loop[key].keeper = close_with_loop(of_loop[key].client)
        await anext(of_loop[key].keeper)
    return of_loop[key]


async def _in_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> Any:
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), loop))


def _sampling(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that change what is sampled, without those that have no effect."""
    given = {**kwargs, **(kwargs.get("extra_body") or {})}
    temperature = given.get("temperature")
    changed = {name: given[name] for name in _DISTRIBUTION_KEYS if given.get(name)}
    changed = {k: v for k, v in changed.items() if v not in _NO_EFFECT.get(k, ())}
    return {**changed, "temperature": 1.0 if temperature is None else float(temperature)}


def _lasting(value: Any, text: Callable[[str], str] = str) -> Any:
    """`value` without random ids, times and names; `text` is applied to what is left of texts."""
    if isinstance(value, str):
        return text(_VARYING.sub("", value))
    if isinstance(value, Mapping):
        return {key: _lasting(it, text) for key, it in value.items() if key not in _RANDOM_IDS}
    if isinstance(value, list | tuple):
        return [_lasting(item, text) for item in value]
    return value


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())
