"""The time that our OpenAI client adds to a call, against the bare SDK, and memory under load.

    python benchmarks/client_overhead.py [--calls 400] [--tokens 64] [--rounds 7]

A scripted server in a process of its own answers at once with a fixed reply. First, 1,000 calls at
once on 1,000 connections: failures, seconds, and the process's peak memory before and after.

Then, in turn: the bare `openai.AsyncOpenAI`; our client on top of it, which adds the hand-over to
the HTTP loop, parsing of the reply, the spend and the trace; and ours under a money budget that is
shared through a file. All send the same request, one after the other and sixteen at a time. Prints
medians over rounds of wall and CPU time a call, and ratios to the bare SDK; last, the time of a
call of the scripted model, which is all overhead. On a busy machine only CPU time is meaningful.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fixed_server import completion, serve_fixed

MESSAGES = [
    {"role": "system", "content": "You solve small problems. " * 8},
    {"role": "user", "content": "What is 3 + 4? Think, then answer in one tag."},
]
Cost = tuple[float, float]
"""Milliseconds a call: wall time, CPU time of this process."""


def serve(port_to: Connection, tokens: int) -> None:
    """Answer every request with the same bytes."""
    message = {"role": "assistant", "content": "7 " * tokens}
    serve_fixed(port_to, completion({"message": message}, tokens))


async def timed(call: Callable[[], Awaitable[Any]], calls: int, at_once: int) -> Cost:
    """The mean cost of a call, `at_once` callers calling one after the other."""

    async def caller() -> None:
        for _ in range(calls // at_once):
            await call()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(caller() for _ in range(at_once)))
    scale = 1000 / (calls // at_once * at_once)
    return (time.perf_counter() - wall) * scale, (time.process_time() - cpu) * scale


async def compare(port: int, options: argparse.Namespace, folder: Path) -> None:
    import openai

    from aflow_tune.models import ScriptedModel, Spend, make_client
    from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings
    from aflow_tune.trace import Trace

    url = f"http://127.0.0.1:{port}/v1"
    sdk = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    prices = PriceSettings(input=1.0, output=10.0)
    ours = make_client(ModelSettings(model="scripted", base_url=url, prices=prices))
    counted = Spend()
    limited = Spend(BudgetSection(usd=1e6, calls=10**9), folder / "account.sqlite")
    scripted = ScriptedModel(lambda _: "7")

    async def bare() -> Any:
        return await sdk.chat.completions.create(
            model="scripted",
            messages=MESSAGES,  # type: ignore[arg-type]
            temperature=1.0,
            max_tokens=64,
        )

    def under(spend: Spend, client: Any) -> Callable[[], Awaitable[Any]]:
        async def call() -> Any:
            with spend.activate(), Trace().activate():
                return await client.complete(MESSAGES, temperature=1.0, max_tokens=64)

        return call

    kinds = {
        "bare SDK": bare,
        "our client": under(counted, ours),
        "our client, shared budget": under(limited, ours),
    }
    for at_once in (1, 16):
        costs: dict[str, list[Cost]] = {name: [] for name in kinds}
        for number in range(options.rounds + 1):
            for name, call in kinds.items():
                cost = await timed(call, options.calls, at_once)
                if number:  # the first round warms up
                    costs[name].append(cost)
        print(f"{at_once} at a time, {options.calls} calls, {options.rounds} rounds, ms a call:")
        middles = {
            name: tuple(statistics.median(part) for part in zip(*found, strict=True))
            for name, found in costs.items()
        }
        base = middles["bare SDK"]
        for name, (wall, cpu) in middles.items():
            ratio = f"{wall / base[0]:.2f}x wall, {cpu / base[1]:.2f}x CPU"
            print(f"  {name:26} wall {wall:6.3f}  CPU {cpu:6.3f}  {ratio}")
    wall, cpu = await timed(under(counted, scripted), options.calls * 10, 1)
    print(f"  {'scripted model':26} wall {wall:6.3f}  CPU {cpu:6.3f}")
    await sdk.close()
    await ours.close()


async def load(port: int, count: int) -> None:
    """`count` calls at once, each on a connection of its own."""
    from aflow_tune.models import make_client
    from aflow_tune.sections import ModelSettings

    url = f"http://127.0.0.1:{port}/v1"
    client = make_client(ModelSettings(model="m", base_url=url, max_concurrency=count))
    await client.complete(MESSAGES)
    before, started = _peak_mb(), time.perf_counter()
    calls = (client.complete(MESSAGES) for _ in range(count))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    failed = sum(isinstance(outcome, BaseException) for outcome in outcomes)
    seconds = time.perf_counter() - started
    print(
        f"{count} calls at once: {failed} failed, {seconds:.2f} s, "
        f"peak memory {before:.0f} -> {_peak_mb():.0f} MB"
    )


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=400, help="calls of each kind a round")
    parser.add_argument("--tokens", type=int, default=64, help="words of the reply")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    port_from, port_to = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(port_to, options.tokens), daemon=True
    )
    server.start()
    port = port_from.recv()
    try:
        asyncio.run(load(port, 1000))
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(compare(port, options, Path(folder)))
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
