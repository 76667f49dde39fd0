"""The time that our adapter adds to a model call, against a bare OpenAI client.

    python benchmarks/adapter_overhead.py [--calls 400] [--tokens 64]

A scripted server in a process of its own answers at once with a fixed reply of `--tokens`
tokens, with token ids and logprobs. In the same process, in turn: the bare
`openai.AsyncOpenAI` client, the same client under AgentScope's chat model, and a workflow in
Trinity's run loop under our adapter, which calls AgentScope's chat model. All send the same
request, one call after the other and sixteen at a time. Prints medians over rounds; the target
is at most 1 ms of wall time a call more than the bare client. On a busy machine only the CPU
time is meaningful.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from fixed_server import policy_answer, serve_fixed

TARGET_MS = 1.0
MESSAGES = [
    {"role": "system", "content": "You solve small problems. " * 8},
    {"role": "user", "content": "What is 3 + 4? Think, then answer in one tag."},
]


def serve(port_to: Connection, tokens: int) -> None:
    """Answer every request with the same bytes."""
    serve_fixed(port_to, policy_answer(tokens))


Cost = tuple[float, float]
"""Milliseconds a call: wall time, CPU time of this process."""


async def measure(port: int, calls: int, rounds: int) -> dict[tuple[int, str], list[Cost]]:
    """The cost by number of callers and kind of client, one value a round."""
    import openai

    from aflow_tune.engines.trinity.rollout.adapter import WorkflowAdapter
    from aflow_tune.models.chat_model import chat_model

    # isort: split
    # After the lines above, which install the stand-in for vLLM that Trinity needs.
    from trinity.common.config import GenerationConfig, InferenceModelConfig
    from trinity.common.models.model import ModelWrapper
    from trinity.common.workflows.workflow import Task

    url = f"http://127.0.0.1:{port}"
    config = InferenceModelConfig(
        model_path="scripted", engine_type="external", enable_openai_api=True, enable_history=True
    )
    wrapper = ModelWrapper(config=config, api_address=url)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY")
    client.model_path = "scripted"  # type: ignore[attr-defined]
    arguments: dict[str, Any] = {
        "temperature": 1.0,
        "top_p": 1.0,
        "max_tokens": 64,
        "logprobs": True,
        "top_logprobs": 0,
        "extra_body": {"return_token_ids": True},
    }
    under_agentscope = chat_model(client, arguments)

    async def bare(count: int) -> None:
        for _ in range(count):
            await client.chat.completions.create(model="scripted", messages=MESSAGES, **arguments)

    async def agentscope(count: int) -> None:
        for _ in range(count):
            await under_agentscope(MESSAGES)

    async def adapter(count: int) -> None:
        async def workflow(task: dict, model: Any) -> float:
            for _ in range(count):
                await model(MESSAGES)
            return 1.0

        task = Task(
            raw_task={"question": "3 + 4"},
            rollout_args=GenerationConfig(temperature=1.0, top_p=1.0, max_tokens=64, logprobs=0),
            workflow_args={"workflow_func": workflow, "run_timeout": 300.0, "seed": 0},
        )
        run = WorkflowAdapter(task=task, model=wrapper.clone_with_isolated_history())
        experiences = await run.run_async()
        if len(experiences) != count:
            raise RuntimeError(f"{len(experiences)} of {count} calls were recorded")

    async def timed(kind: Callable[[int], Awaitable[None]], callers: int) -> Cost:
        share = calls // callers
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(kind(share) for _ in range(callers)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return wall / (share * callers) * 1000, cpu / (share * callers) * 1000

    found: dict[tuple[int, str], list[Cost]] = {}
    for callers in (1, 16):
        for number in range(rounds + 1):
            for kind in (bare, agentscope, adapter):
                cost = await timed(kind, callers)
                if number:  # the first round opens connections
                    found.setdefault((callers, kind.__name__), []).append(cost)
    return found


def main() -> None:
    """Run and print the table; exit code 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=400, help="calls a round and kind")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a reply")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    port_from, port_to = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(port_to, options.tokens), daemon=True)
    server.start()
    try:
        found = asyncio.run(measure(port_from.recv(), options.calls, options.rounds))
    finally:
        server.terminate()
    print(
        f"{'callers':>7}  {'client':<11} {'ms a call':>9} {'added':>7} {'ratio':>6} {'CPU ms':>7}"
    )
    added = []
    for (callers, kind), costs in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*costs, strict=True))
        base = statistics.median(cost[0] for cost in found[callers, "bare"])
        added.append(wall - base)
        row = f"{callers:>7}  {kind:<11} {wall:9.2f} {added[-1]:+7.2f} {wall / base:6.2f}"
        print(f"{row} {cpu:7.2f}")
    worst = max(added)
    print(f"added at most {worst:.2f} ms a call (target: {TARGET_MS:g} ms)")
    raise SystemExit(int(worst > TARGET_MS))


if __name__ == "__main__":
    main()
