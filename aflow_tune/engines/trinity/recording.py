"""The chat model that a workflow gets: AgentScope's class over a client that records.

Each call is noted when it starts, with its caller, and keeps its own experience, so that
attribution and order are right under `asyncio.gather`. The real client lives in the runner's
event loop and keeps its connections; calls are handed to it from the run's own loop.
Structured output goes through the same recorded call.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from agentscope.model import ChatModelBase, TrinityChatModel
from openai.lib._parsing._completions import (
    parse_chat_completion,
    type_to_response_format_param,
)
from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper

from aflow_tune.context import CallNote, RunContext

Create = Callable[..., Any]


with warnings.catch_warnings():
    # AgentScope calls the class deprecated; it is the one that workflows are annotated with.
    warnings.simplefilter("ignore", DeprecationWarning)

    class _ChatModel(TrinityChatModel):
        pass


class RunChatModel(_ChatModel):
    """AgentScope's model class without its constructor, which opens a connection pool."""

    def __init__(self, model_name: str, client: Any, generate_kwargs: dict[str, Any]) -> None:
        ChatModelBase.__init__(self, model_name, False)
        self.client = client
        self.reasoning_effort = None
        self.stream_tool_parsing = True
        self.generate_kwargs = generate_kwargs
        self._structured_output_fallback = False


@dataclass
class RecordedCall:
    """One model call: its note, what was asked, and an experience for each choice."""

    note: CallNote
    messages: list[dict[str, Any]]
    experiences: list[Experience] = field(default_factory=list)
    truncated: bool = False


class RunRecorder:
    """Everything that one run asked the model that is being tuned.

    Made in the event loop in which the client works.

    Args:
        model: Trinity's wrapper with a history of this run's own.
        context: the run's notes.
        seed_of: seed of the call with this index.
    """

    def __init__(
        self, model: ModelWrapper, context: RunContext, seed_of: Callable[[int], int]
    ) -> None:
        self._model = model
        self._client = model.get_openai_async_client()
        self._context = context
        self._seed_of = seed_of
        self.loop = asyncio.get_running_loop()
        self.calls: list[RecordedCall] = []
        self.closed = False

    def client(self) -> Any:
        """An object with the client's `chat.completions`, for use in the run's own loop."""
        return _client_like(self._client, self._create)

    def recorded(self) -> list[RecordedCall]:
        """Calls that were answered, in the order in which they started."""
        answered = [call for call in self.calls if call.experiences]
        return sorted(answered, key=lambda call: call.note.index)

    async def _create(self, **kwargs: Any) -> Any:
        """Runs in the run's loop, where the context variables are the caller's."""
        if self.closed:
            raise RuntimeError("this run is over; its model takes no more calls")
        if kwargs.get("stream"):
            raise ValueError("a model that is being tuned cannot stream: pass stream=False")
        call = RecordedCall(self._context.note_call(), list(kwargs.get("messages", ())))
        self.calls.append(call)
        kwargs.setdefault("seed", self._seed_of(call.note.index))
        return await _in_loop(self.loop, lambda: self._ask(call, kwargs))

    async def _ask(self, call: RecordedCall, kwargs: dict[str, Any]) -> Any:
        """Runs in the runner's loop.

        Trinity's client appends the answer's experiences to the wrapper's history and returns
        without giving up control in between: the last ones are this call's.
        """
        response = await self._client.chat.completions.create(**kwargs)
        count = len(response.choices)
        call.experiences = self._model.history[-count:]
        del self._model.history[-count:]
        call.truncated = any(choice.finish_reason == "length" for choice in response.choices)
        return response



def chat_model(
    model_path: str, client: Any, generate_kwargs: dict[str, Any]
) -> TrinityChatModel:
    """The model object that user code receives."""
    return RunChatModel(model_path, client, generate_kwargs)


def shared_client(client: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """A client of `loop`, usable from the loops of the runs; nothing is recorded."""

    async def create(**kwargs: Any) -> Any:
        return await _in_loop(loop, lambda: client.chat.completions.create(**kwargs))

    return _client_like(client, create)


def state_hash(task: Any, caller: str, messages: list[dict[str, Any]]) -> str:
    """GiGPO's anchor state: task, caller and input, with white space and case normalised."""
    text = json.dumps([task, caller, messages], sort_keys=True, default=str)
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()[:16]


async def _in_loop(loop: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> Any:
    async def call() -> Any:
        return await make()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))


def _client_like(client: Any, create: Create) -> Any:
    async def parse(*, response_format: Any, **kwargs: Any) -> Any:
        response = await create(
            response_format=type_to_response_format_param(response_format), **kwargs
        )
        return parse_chat_completion(
            response_format=response_format,
            input_tools=kwargs.get("tools", ()),
            chat_completion=response,
        )

    completions = SimpleNamespace(create=create, parse=parse)
    return SimpleNamespace(
        chat=SimpleNamespace(completions=completions), model_path=client.model_path
    )
