"""OpenAI's chat-completions request, as far as the local engine serves it, and its answer.

What OpenAI defines and this engine cannot do is refused by name rather than ignored: an
experiment must not run with a setting that had no effect. Fields that change nothing about
the tokens (`user`, `metadata`, `store`, ...) are accepted and dropped.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from aflow_tune.engines.local.generation import Vocabulary
from aflow_tune.engines.local.sampling import Completion, SamplingParams
from aflow_tune.engines.local.tools import forced_call_grammar, parse_calls
from aflow_tune.errors import BadInput, Fault

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "best_of": (1,),
    "prompt_logprobs": (False, 0),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "prediction": (),
}
"""Fields that are accepted only with a value that has no effect (null always is)."""


class JsonSchema(BaseModel):
    """`response_format.json_schema`."""

    name: str = "response"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(BaseModel):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class FunctionName(BaseModel):
    """The `function` of a named `tool_choice`."""

    name: str


class NamedToolChoice(BaseModel):
    """`tool_choice` naming one function."""

    type: Literal["function"] = "function"
    function: FunctionName


class Function(BaseModel):
    """The `function` of a tool."""

    model_config = ConfigDict(extra="allow")
    name: str
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """One entry of `tools`."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: Function


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False

    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools the model is told about; none with tool_choice 'none'."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or []]

    def check(self) -> None:
        """Raises BadInput with everything that this engine does not serve."""
        faults = [
            Fault(name, "left out", repr(value), f"remove {name}: the local engine lacks it")
            for name, value in (self.model_extra or {}).items()
            if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]
        ]
        for number, message in enumerate(self.messages):
            if not isinstance(message.get("role"), str):
                faults.append(Fault(f"messages[{number}]", "a role", repr(message), "add role"))
        forced = self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice)
        names = [tool.function.name for tool in self.tools or []]
        if forced and not names:
            faults.append(Fault("tool_choice", "tools to choose from", "no tools", "send tools"))
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            if names and name not in names:
                faults.append(Fault("tool_choice", f"one of {names}", name, "name a tool"))
        if self.top_logprobs and not self.logprobs:
            faults.append(Fault("top_logprobs", "logprobs: true", "false", "set logprobs"))
        schema = self.response_format
        if schema is not None and schema.type == "json_schema" and schema.json_schema is None:
            faults.append(
                Fault("response_format", "json_schema.schema", "no schema", "send the schema")
            )
        if faults:
            raise BadInput("The request cannot be served", faults)

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """The request as the sampler takes it; `check` has passed."""
        schema: dict[str, Any] | None = None
        grammar = None
        if self.tool_choice == "required" or isinstance(self.tool_choice, NamedToolChoice):
            grammar = forced_call_grammar(self._callable_tools())
        elif self.response_format is not None and self.response_format.type != "text":
            wanted = self.response_format.json_schema
            schema = wanted.schema_ if wanted is not None else {"type": "object"}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        limit = self.max_completion_tokens
        if limit is None:
            limit = self.max_tokens if self.max_tokens is not None else default_max_tokens
        return SamplingParams(
            max_tokens=limit,
            n=1 if self.n is None else self.n,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            stop=tuple(stop),
            seed=self.seed,
            top_logprobs=self.top_logprobs or 0,
            min_tokens=self.min_tokens or 0,
            ignore_eos=self.ignore_eos,
            json_schema=schema,
            grammar=grammar,
        )

    def _callable_tools(self) -> list[dict[str, Any]]:
        choice = self.tool_choice
        return [
            tool
            for tool in self.offered_tools()
            if not isinstance(choice, NamedToolChoice)
            or tool["function"]["name"] == choice.function.name
        ]


def chat_response(
    request: ChatRequest,
    model: str,
    prompt_ids: list[int],
    completions: Sequence[Completion],
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """The body of the answer. `return_token_ids` adds the tokens of prompt and choices."""
    generated = sum(len(completion.token_ids) for completion in completions)
    body: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _choice(request, index, completion, prompt_ids, vocabulary)
            for index, completion in enumerate(completions)
        ],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": generated,
            "total_tokens": len(prompt_ids) + generated,
        },
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = prompt_ids
    return body


def _choice(
    request: ChatRequest,
    index: int,
    completion: Completion,
    prompt_ids: list[int],
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    text: str | None = completion.text
    calls: list[dict[str, Any]] = []
    if tools := request.offered_tools():
        names = [tool["function"]["name"] for tool in tools]
        salt = f"{prompt_ids}{completion.token_ids}{index}"
        text, calls = parse_calls(completion.text, names, salt=salt)
    reason = completion.finish_reason
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls:
        message["tool_calls"] = calls
        # OpenAI reports 'stop' when the caller itself named the function.
        reason = "stop" if isinstance(request.tool_choice, NamedToolChoice) else "tool_calls"
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "finish_reason": reason,
        "logprobs": None,
    }
    if request.logprobs:
        choice["logprobs"] = {"content": _logprobs(completion, vocabulary), "refusal": None}
    if request.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _logprobs(completion: Completion, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    tops = completion.top_logprobs or [{} for _ in completion.token_ids]
    return [
        {
            **_token(token, logprob, vocabulary),
            "top_logprobs": [_token(t, value, vocabulary) for t, value in top.items()],
        }
        for token, logprob, top in zip(completion.token_ids, completion.logprobs, tops, strict=True)
    ]


def _token(token: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    text = vocabulary.token_text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request body.

    Raises:
        BadInput: it is none.
    """
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise BadInput(f"The body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadInput(f"The body is a JSON {type(body).__name__}, expected an object")
    return body
