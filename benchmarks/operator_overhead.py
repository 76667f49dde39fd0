"""The time that an operator adds to a model call, and a thousand of them at once.

    python benchmarks/operator_overhead.py [--calls 2000] [--concurrent 1000] [--json]

Overhead: a scripted model is called directly and through each of the operators that make one
call, in turn, in rounds; prints the median over rounds of the difference in milliseconds a call.
Programmer and Test are left out: they run programs, which `sandbox_speed.py` measures. The target
is at most 1 ms.

Concurrency: `--concurrent` calls of AnswerGenerate start at once, through an OpenAI-compatible
client, against a scripted server in a process of its own that answers after 50 to 150 ms. Every
answer must belong to its question. Prints seconds, failures and this process's peak memory; the
targets are no failure and less than 1 GB.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from aflow_tune.models import ModelSettings, ScriptedModel, make_client
from aflow_tune.operators import OPERATORS, AnswerGenerate
from aflow_tune.trace import Trace

TARGET_MS = 1.0
TARGET_MB = 1000
QUESTION = "A farmer has 17 sheep and buys 25 more. How many sheep are there now? " * 4
THOUGHT = "There were 17 and 25 came on top, which makes 17 + 25 = 42 of them. " * 4
SOLUTIONS = [f"{THOUGHT}So it is {number}." for number in (42, 42, 43)]
USES: dict[str, tuple[tuple[Any, ...], str]] = {
    "Custom": ((QUESTION, "Solve it."), THOUGHT),
    "AnswerGenerate": ((QUESTION,), f"<thought>{THOUGHT}</thought>\n<answer>42</answer>"),
    "CustomCodeGenerate": (
        (QUESTION, "sheep", "Write Python."),
        "```python\ndef sheep(had, bought):\n    return had + bought\n```",
    ),
    "ScEnsemble": (
        (SOLUTIONS, QUESTION),
        f"<thought>{THOUGHT}</thought>\n<solution_letter>A</solution_letter>",
    ),
    "Format": ((QUESTION, THOUGHT), "42"),
    "Review": (
        (QUESTION, THOUGHT),
        f"<review_result>True</review_result>\n<feedback>{THOUGHT}</feedback>",
    ),
    "Revise": ((QUESTION, THOUGHT, "Is it?"), f"<solution>{THOUGHT}</solution>"),
}


async def overhead(calls: int, rounds: int) -> dict[str, float]:
    """Milliseconds that an operator adds to a call, by operator."""
    found: dict[str, float] = {}
    for name, (arguments, text) in USES.items():
        model = ScriptedModel(lambda _, text=text: text)
        operator = OPERATORS[name](model)
        await operator(*arguments)
        messages = model.asked[0].messages
        differences = []
        for _ in range(rounds):
            direct = await seconds(partial(model.complete, messages), calls // rounds)
            through = await seconds(partial(operator, *arguments), calls // rounds)
            differences.append(1000 * (through - direct) / (calls // rounds))
            model.asked.clear()
        found[name] = statistics.median(differences)
    return found


async def seconds(call: Callable[[], Awaitable[Any]], count: int) -> float:
    """Wall time of `count` calls, one after the other, with a trace."""
    with Trace().activate():
        started = time.perf_counter()
        for _ in range(count):
            await call()
        return time.perf_counter() - started


def serve(port_to: Connection) -> None:
    """Answer each question with its own number, after 50 to 150 ms."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                header = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = header.partition(b"content-length:")[2].partition(b"\r\n")[0]
                request = json.loads(await reader.readexactly(int(length)))
                number = request["messages"][-1]["content"].partition("#")[2].partition("#")[0]
                await asyncio.sleep(0.05 + int(number) % 100 / 1000)
                body = json.dumps(completion(request["model"], number)).encode()
                head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=4096)
        port_to.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def completion(model: str, number: str) -> dict[str, Any]:
    """A reply that names the question's number."""
    text = f"<thought>{THOUGHT}</thought><answer>{number}</answer>"
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text},
    }
    usage = {"prompt_tokens": 100, "completion_tokens": 100, "total_tokens": 200}
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
        "usage": usage,
    }


async def concurrent(count: int, port: int) -> dict[str, float]:
    """`count` calls at once: seconds, failures, answers to the wrong question, traced events."""
    settings = ModelSettings(
        model="scripted", base_url=f"http://127.0.0.1:{port}/v1", max_concurrency=count
    )
    solve = AnswerGenerate(make_client(settings))
    trace = Trace()
    started = time.perf_counter()
    with trace.activate():
        results = await asyncio.gather(
            *(solve(f"#{number}# {QUESTION}") for number in range(count)), return_exceptions=True
        )
    took = time.perf_counter() - started
    failed = [result for result in results if isinstance(result, BaseException)]
    for error in failed[:3]:
        print(f"failed: {error!r:.200}", file=sys.stderr)
    wrong = sum(
        not isinstance(result, BaseException) and result["answer"] != str(number)
        for number, result in enumerate(results)
    )
    return {"seconds": took, "failed": len(failed), "wrong": wrong, "noted": len(trace.events)}


def main() -> int:
    """Print both tables; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--concurrent", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    added = asyncio.run(overhead(arguments.calls, arguments.rounds))
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(send,), daemon=True)
    server.start()
    try:
        many = asyncio.run(concurrent(arguments.concurrent, receive.recv()))
    finally:
        server.terminate()
        server.join()
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6

    if arguments.json:
        print(json.dumps({"overhead_ms": added, "concurrent": many, "memory_mb": memory}))
    else:
        for name, value in added.items():
            print(f"{name:20} {value:7.3f} ms a call more than the model alone")
        print(
            f"{arguments.concurrent} at once: {many['seconds']:.2f} s, {many['failed']} failed, "
            f"{many['wrong']} wrong, {memory:.0f} MB"
        )
    missed = max(added.values()) > TARGET_MS or memory >= TARGET_MB
    return int(missed or bool(many["failed"] or many["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
