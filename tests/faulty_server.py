"""A model API over real HTTP that fails in every way, on command, one step for each request.

`FaultyServer(steps)` speaks OpenAI's chat completions and Anthropic's messages. A step is a
`Step`; when they are used up, every request is answered well. A function of (number, request)
may stand in place of the list.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

USAGE = (100, 10)
"""Tokens of prompt and completion that a good reply reports."""


@dataclass
class Step:
    """How one request is answered: 'answer'; 'cut' closes before the head, 'cut_body' in the body;
    'drip' sends a byte each 20 ms; 'hang' nothing. `body` replaces the good reply: bytes as they
    are, anything else as JSON. `seconds` is a wait before it."""

    kind: str = "answer"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    text: str = "fine"
    usage: tuple[int, int] | None = USAGE
    seconds: float = 0.0


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


Script = Sequence[Step] | Callable[[int, Request], Step]


class FaultyServer:
    """Context manager; `url` is its address."""

    def __init__(self, steps: Script = ()) -> None:
        self.steps = steps
        self.requests: list[Request] = []
        self.under_way = 0
        self.most_under_way = 0
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=2048), self._loop
        )
        self._server = started.result(60)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(120)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        # A cancellation can be lost where what was waited for arrives at that moment.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.2)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            with contextlib.suppress(ConnectionError):
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await _read(reader)
        number = len(self.requests)
        self.requests.append(request)
        if callable(self.steps):
            step = self.steps(number, request)
        else:
            step = self.steps[number] if number < len(self.steps) else Step()
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        work = asyncio.ensure_future(self._play(step, request, writer))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            return work.done() and work.result()
        finally:
            self.under_way -= 1
            for task in (work, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await task

    async def _play(self, step: Step, request: Request, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(step.seconds)
        if step.kind == "hang":
            await asyncio.Event().wait()
        if step.kind == "cut":
            return False
        body = _body(step, request)
        head = [f"HTTP/1.1 {step.status} Scripted", f"content-length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in step.headers.items()]
        if "content-type" not in step.headers:
            head.append("content-type: application/json")
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n")
        for at in range(len(body) if step.kind == "drip" else 0):
            writer.write(body[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.02)
        rest = {"drip": b"", "cut_body": body[: len(body) // 2]}
        writer.write(rest.get(step.kind, body))
        await writer.drain()
        return step.kind != "cut_body"


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(first.split(" ")[1], headers, json.loads(body or b"{}"))


def _body(step: Step, request: Request) -> bytes:
    if isinstance(step.body, bytes):
        return step.body
    if step.body is not None:
        return json.dumps(step.body).encode()
    if step.status != 200:
        return json.dumps({"error": {"message": "scripted failure", "type": "x"}}).encode()
    make = anthropic_reply if request.path.endswith("/messages") else openai_reply
    return json.dumps(make(step.text, step.usage)).encode()


def openai_reply(text: str | None, usage: tuple[int, int] | None = USAGE, **message: Any) -> Any:
    said = {"role": "assistant", "content": text, **message}
    reply: dict[str, Any] = {"id": "x", "object": "chat.completion", "created": 0}
    reply["model"] = "scripted-1"
    reply["choices"] = [{"index": 0, "finish_reason": "stop", "message": said}]
    if usage is not None:
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        reply["usage"] = dict(zip(names, (*usage, sum(usage)), strict=True))
    return reply


def anthropic_reply(
    text: str | None, usage: tuple[int, int] | None = USAGE, *blocks: Any, reason: str = "end_turn"
) -> Any:
    content = [] if text is None else [{"type": "text", "text": text}]
    reply: dict[str, Any] = {"id": "x", "type": "message", "role": "assistant"}
    reply |= {"model": "scripted-1", "content": [*content, *blocks]}
    reply |= {"stop_reason": reason, "stop_sequence": None}
    if usage is not None:
        reply["usage"] = {"input_tokens": usage[0], "output_tokens": usage[1]}
    return reply
