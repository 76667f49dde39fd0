"""A scripted OpenAI-compatible server over real HTTP, and Trinity's parts around it.

`ScriptedServer(answer)` asks `answer(request body)` for a `Reply` (or a plain text) and answers
as a recording server does: with token ids and log-probabilities. A token is a byte of the text,
the last one an end mark; log-probability j of a reply is -(j + 1) / 10.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from aflow_tune import TrinityChatModel
from aflow_tune.context import RolloutContext
from aflow_tune.engines.trinity.inline import InlineRunner
from aflow_tune.engines.trinity.rollout.adapter import WorkflowAdapter
from aflow_tune.engines.trinity.rollout.recording import (
    RecordedCall,
    RolloutRecorder,
    recording_client,
)

# isort: split
# After the line above, which installs the stand-in for vLLM that Trinity needs.
from trinity.common.config import Config, GenerationConfig, InferenceModelConfig
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import Task

END_TOKEN = 256
CONFIGURED = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 64, "logprobs": True}


@dataclass
class Reply:
    """What the server answers: a text, tool calls, an error; after `delay` seconds."""

    text: str = "ok"
    tool_calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    finish_reason: str = "stop"
    status: int = 200
    delay: float = 0.0


class ScriptedServer:
    """Context manager; `url` is its address, `requests` the bodies it got, in order, `keys` the
    authorizations that came with them."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply | str]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        # A connection that is closed while it is reused fails a call.
        options: Any = {"log_level": "error", "lifespan": "off", "timeout_keep_alive": 600}
        config = uvicorn.Config(self._app, port=0, interface="asgi3", **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.url = ""

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.005)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(timeout=10)

    async def _app(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        status, answer = 200, {}
        if scope["path"] == "/v1/chat/completions":
            request = json.loads(body)
            self.requests.append(request)
            self.keys.add(dict(scope["headers"]).get(b"authorization", b"").decode())
            reply = self.answer(request)
            reply = Reply(reply) if isinstance(reply, str) else reply
            if reply.delay:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(receive(), timeout=reply.delay)
                    return  # the client hung up meanwhile
            status, answer = reply.status, completion(request, reply)
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def completion(request: dict[str, Any], reply: Reply) -> dict[str, Any]:
    """The answer's body, with token ids if the request asks for them."""
    if reply.status != 200:
        return {"error": {"message": reply.text, "type": "scripted", "code": reply.status}}
    prompt = list("|".join(str(m.get("content")) for m in request["messages"]).encode()) or [0]
    tokens = [*reply.text.encode(), END_TOKEN]
    scores = [
        {"token": str(token), "logprob": -(j + 1) / 10, "bytes": None, "top_logprobs": []}
        for j, token in enumerate(tokens)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    calls = [{"name": name, "arguments": json.dumps(given)} for name, given in reply.tool_calls]
    if calls:
        first = len(request["messages"])  # each call of a conversation has an id of its own
        message["tool_calls"] = [
            {"id": f"call_{number}", "type": "function", "function": call}
            for number, call in enumerate(calls, first)
        ]
    choice = {"message": message, "finish_reason": reply.finish_reason}
    if request.get("logprobs"):
        choice["logprobs"] = {"content": scores}
    if request.get("return_token_ids"):
        choice["token_ids"] = tokens
    count = request.get("n") or 1
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "prompt_token_ids": prompt if request.get("return_token_ids") else None,
        "choices": [{"index": index, **choice} for index in range(count)],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens) * count,
            "total_tokens": len(prompt) + len(tokens) * count,
        },
    }


class ScriptedModel(ModelWrapper):
    """Trinity's wrapper around a server that no actor stands behind."""

    def __init__(self, url: str, name: str | None = None) -> None:
        told: Any = {"engine_type": "external", "enable_openai_api": True, "enable_history": True}
        told |= {"temperature": 1.0, "top_p": 1.0, "max_response_tokens": 64}
        config = InferenceModelConfig(model_path="scripted", name=name, **told)
        super().__init__(config=config, api_address=url)

    @property
    async def model_version_async(self) -> int:  # type: ignore[override]
        return 0


class ScriptedRunner(InlineRunner):
    """Trinity's run loop without its look-up of actors."""

    def __init__(
        self,
        model: ModelWrapper,
        auxiliary: list[ModelWrapper] | None = None,
        mode: str = "asynchronous",
    ) -> None:
        config: Any = Config()
        config.explorer.rollout_model = model.config
        super().__init__(config, model, auxiliary or [])
        self.concurrent_mode = mode
        self.concurrent_run_fn = getattr(self, f"_{mode}_run")


def make_task(
    workflow_func: Any, *, is_eval: bool = False, batch_id: int | str = 1, **arguments: Any
) -> Task:
    """A task of our adapter on one row."""
    return Task(
        workflow=WorkflowAdapter,
        raw_task={"question": "2 + 2?", "answer": "4"},
        rollout_args=GenerationConfig(temperature=1.0, top_p=1.0, max_tokens=64, logprobs=0),
        workflow_args={"workflow_func": workflow_func, "run_timeout": 60.0, "seed": 7, **arguments},
        is_eval=is_eval,
        batch_id=batch_id,
        task_id=0,
        index={"index": 3},
    )


def record(
    server: ScriptedServer,
    use: Callable[[TrinityChatModel], Awaitable[Any]],
    model: ScriptedModel | None = None,
    seed: str | None = "seed",
    **configured: Any,
) -> tuple[Any, list[RecordedCall]]:
    """Let `use` work with a recorded model; what it returned and the calls."""

    async def main() -> tuple[Any, list[RecordedCall]]:
        context = RolloutContext()
        source = await recording_client(model or ScriptedModel(server.url))
        recorder = RolloutRecorder(source, context, "1/0", seed, {**CONFIGURED, **configured})
        with context.activate():
            result = await use(recorder.chat_model())
        return result, recorder.close()

    return asyncio.run(main())
