"""`TrinityChatModel`, the class of the model that a tuned workflow gets, for both AgentScopes.

AgentScope 1 has the class. AgentScope 2 dropped it: there it is AgentScope's own OpenAI model over
the client it is given, so formatting, tools, structured output and parsing stay AgentScope's. What
the client does with a call, such as recording it, is not known here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import agentscope.model

if hasattr(agentscope.model, "TrinityChatModel"):
    from agentscope.model import TrinityChatModel

    @functools.cache
    def _constructed(model_path: str) -> TrinityChatModel:
        """A model to copy: the constructor opens a connection pool."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return TrinityChatModel(SimpleNamespace(model_path=model_path))

    def chat_model(client: Any, generate_kwargs: Mapping[str, Any]) -> TrinityChatModel:
        """AgentScope's model object over `client`, which has a `model_path`. `generate_kwargs`:
        arguments of every call that does not give its own."""
        model = object.__new__(TrinityChatModel)  # its own `__new__` warns that it is deprecated
        model.__dict__.update(_constructed(client.model_path).__dict__)
        model.__dict__.update(client=client, generate_kwargs=dict(generate_kwargs))
        return model

else:
    from agentscope.credential import OpenAICredential
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.model import ChatModelBase, OpenAIChatModel

    class _Formatter(OpenAIChatFormatter):
        """Also takes messages in OpenAI's form, which stay as they are."""

        async def format(self, msgs: Sequence[Any]) -> list[dict[str, Any]]:
            if all(isinstance(message, Mapping) for message in msgs):
                return [dict(message) for message in msgs]
            return await super().format(msgs)

    class TrinityChatModel(OpenAIChatModel):  # type: ignore[no-redef]
        """The tuned model as a chat model of AgentScope 2. As with AgentScope 1 it never streams
        and a call may have messages in OpenAI's form; `parameters` win over `generate_kwargs`."""

        def __init__(self, client: Any, generate_kwargs: Mapping[str, Any] | None = None) -> None:
            self.generate_kwargs = dict(generate_kwargs or {})
            longest = getattr(client, "max_model_len", None) or 128_000
            answer = self.generate_kwargs.get("max_tokens") or 0
            # Not OpenAIChatModel's, which opens a connection pool.
            ChatModelBase.__init__(
                self,
                OpenAICredential(api_key="EMPTY"),
                client.model_path,
                self.Parameters(),
                stream=False,
                max_retries=0,  # the client's
                context_size=longest - answer if longest > answer else longest,
            )
            self.formatter, self.client = _Formatter(), client
            self.client_kwargs: dict[str, Any] = {}
            self.extra_body = None

        async def __call__(
            self, messages: Any, tools: Any = None, tool_choice: Any = None, **own: Any
        ) -> Any:
            # Not ChatModelBase's, which repeats calls and swallows their cancellation.
            return await self._call_api(self.model, messages, tools, tool_choice, **own)

        async def _call_api(
            self,
            model_name: str,
            messages: Any,
            tools: Any = None,
            tool_choice: Any = None,
            **own: Any,
        ) -> Any:
            configured = {
                name: value
                for name, value in self.generate_kwargs.items()
                if getattr(self.parameters, name, None) is None
            }
            given = {**configured, **own}
            configured_body, own_body = (it.get("extra_body") for it in (self.generate_kwargs, own))
            body = {**(configured_body or {}), **(self.extra_body or {}), **(own_body or {})}
            if body:
                given["extra_body"] = body
            return await super()._call_api(model_name, messages, tools, tool_choice, **given)

    chat_model = TrinityChatModel
