"""For benchmarks: a server that answers every request with the same bytes, at once or after a
fixed time."""

from __future__ import annotations

import asyncio
import json
from multiprocessing.connection import Connection
from typing import Any


def completion(choice: dict[str, Any], tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a chat completion with one choice of `tokens` tokens."""
    return {
        "id": "fixed",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "finish_reason": "stop", **choice}],
        "usage": {"prompt_tokens": 50, "completion_tokens": tokens, "total_tokens": 50 + tokens},
        **more,
    }


def policy_answer(tokens: int) -> dict[str, Any]:
    """The answer of a policy's server: `tokens` tokens with their ids and logprobs."""
    scores = [{"token": "7", "logprob": -0.5, "bytes": [55], "top_logprobs": []}] * tokens
    choice = {
        "message": {"role": "assistant", "content": "7" * tokens},
        "logprobs": {"content": scores},
        "token_ids": list(range(tokens)),
    }
    return completion(choice, tokens, prompt_token_ids=list(range(50)))


def serve_fixed(port_to: Connection, answer: dict[str, Any], latency: float = 0.0) -> None:
    """Send the port, then answer every request with `answer` as JSON, for ever.

    `latency`: seconds between a request and its answer; requests do not wait for each other.
    """
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    reply = head.encode() + b"\r\n\r\n" + body

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                header = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = header.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                if latency:
                    await asyncio.sleep(latency)
                writer.write(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=2048)
        port_to.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())
