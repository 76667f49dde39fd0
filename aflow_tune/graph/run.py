"""One run of a graph: in the sandbox with a channel to this process, or, if trusted, in it.

In the sandbox the program is `inside.py`, loaded in advance, with the graph's files beside it.
Each call arrives as a message, is served in a task of its own (so that `asyncio.gather` in there
is concurrency out here, and each call keeps its attribution), and is answered by its number.
Whatever the program does, the run ends within its time and its number of calls, and how it ended
is data. The calls themselves are made in `broker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from aflow_tune.graph import inside
from aflow_tune.graph.broker import FATAL, Broker, ForgedMessage, TooManyCalls, check_size
from aflow_tune.sandbox import Channel, ProgramEnded, detect, open_channel
from aflow_tune.sandbox.types import Ending, Execution, Limits, SandboxUnavailable

MAX_ANSWER_CHARS = 500_000
MAX_MESSAGE_KB = 4096  # of one message in JSON: room for `GraphLimits.argument_chars` of any script
PROGRAM = "import aflow_preloaded\naflow_preloaded.main()\n"
"""What runs in the sandbox: `inside.py`, which is loaded there before a graph is to be run."""
LINGER_SECONDS = 1.0  # what a program has to end after its answer; then it is killed
TRUSTED = "trusted"  # the level of a run outside of the sandbox, because the graph is trusted


class GraphEnding(StrEnum):
    """How a run of a graph ended. The value is its word in traces and metrics."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"
    """It returned None or an empty text."""
    RAISED = "raised"
    """The graph's code raised an exception."""
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MANY_CALLS = "too_many_calls"
    """A limit of `GraphLimits` on calls or tokens is passed; the reason names it."""
    DIED = "died"
    """Its process ended without an answer."""
    FORGED = "forged_message"
    """It sent what a graph cannot send: code that works against the channel."""
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"
    """Nothing was run, or an operator could not run its program: there is no sandbox here."""


@dataclass(frozen=True)
class GraphRun:
    """One run: its answer, or why there is none."""

    ending: GraphEnding
    answer: Any = None
    """What the workflow returned, without its cost; plain data."""
    reason: str = ""
    """Of an ending without an answer; names file and line where the graph's code raised."""
    calls: int = 0
    """Calls of operators and of the model that the graph made."""
    answered: int = 0
    """Of them, those that gave a result before the run ended."""
    model_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0
    """US dollars; None if the price of a call is not known."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Failed calls by kind. The graph may have coped with them."""
    level: str = ""
    """The sandbox backend that the graph ran in, or 'trusted'; empty where it was not run."""
    seconds: float = 0.0
    built: bool = False
    """Whether the workflow's constructor came to its end, by the word of the graph's side: code
    that works against the channel may lie about it, but no score or limit depends on it."""

    @property
    def ok(self) -> bool:
        """Whether there is an answer. Not whether it is right."""
        return self.ending is GraphEnding.ANSWERED

    @property
    def text(self) -> str:
        """The answer as text; empty where there is none."""
        return "" if self.answer is None else str(self.answer)

    def with_text(self) -> GraphRun:
        """The same run; one without an answer where that is an operator's whole result or a list.

        Benchmarks score texts, and AFlow fails on anything else: its text as Python would print
        it must not be scored as if it were an answer.
        """
        if not isinstance(self.answer, (dict, list)):
            return self
        found = "a list"
        if isinstance(self.answer, dict):
            found = f"a dict with {', '.join(map(repr, self.answer)) or 'nothing in it'}"
        reason = (
            f"TypeError: the workflow returned {found[:200]}, not the text of its answer; write "
            'for example: return solution["response"], cost'
        )
        return replace(self, ending=GraphEnding.RAISED, answer=None, reason=reason)


async def run_graph(
    label: str,
    sources: Mapping[str, str],
    setup: dict[str, Any],
    broker: Broker,
    policy: str | None,
) -> GraphRun:
    """Run a graph once.

    Args:
        label: how messages name the graph.
        sources: its files by name.
        setup: as `inside.run` takes it.
        policy: of the sandbox, as `aflow_tune.sandbox.run_program` takes it; None: the graph is
            trusted and runs in this process.

    Raises:
        BudgetReached: the run's budget is used up.
    """
    started = time.monotonic()
    try:
        async with asyncio.timeout(broker.limits.seconds):
            if policy is None:
                run = await _trusted(label, sources, setup, broker)
            else:
                run = await _sandboxed(label, sources, setup, broker, policy)
    except TimeoutError:
        run = GraphRun(GraphEnding.TIMED_OUT, reason=f"no answer in {broker.limits.seconds} s")
    except SandboxUnavailable as error:
        run = GraphRun(GraphEnding.SANDBOX_UNAVAILABLE, reason=str(error))
    except TooManyCalls as error:
        run = GraphRun(GraphEnding.TOO_MANY_CALLS, reason=str(error))
    except ForgedMessage as error:
        run = GraphRun(GraphEnding.FORGED, reason=f"{label}: {error}")
    level = TRUSTED if policy is None else run.level
    if not level and run.ending is not GraphEnding.SANDBOX_UNAVAILABLE:
        # It was killed before it could say; the backend that this process uses is known by now.
        found = await asyncio.to_thread(detect, policy or "auto")
        level = found.level.value if found.level is not None else ""
    return replace(
        run,
        calls=broker.calls,
        answered=broker.answered,
        model_calls=broker.meter.spent.calls,
        prompt_tokens=broker.meter.spent.prompt_tokens,
        completion_tokens=broker.meter.spent.completion_tokens,
        cost=broker.meter.spent.cost,
        failures=dict(broker.failures),
        level=level,
        seconds=time.monotonic() - started,
        built=broker.built,
    )


async def _trusted(
    label: str, sources: Mapping[str, str], setup: dict[str, Any], broker: Broker
) -> GraphRun:
    ended: list[BaseException] = []

    async def send(message: dict[str, Any]) -> dict[str, Any]:
        try:
            broker.count()
            return await broker.serve(message)
        except FATAL as error:
            ended.append(error)
            raise

    end = await inside.run(setup, dict(sources), send, broker.note_built)
    if ended:  # the graph may have caught it
        raise ended[0]
    return _ended(label, end)


async def _sandboxed(
    label: str, sources: Mapping[str, str], setup: dict[str, Any], broker: Broker, policy: str
) -> GraphRun:
    limits = Limits(
        seconds=broker.limits.seconds,
        cpu_seconds=min(broker.limits.cpu_seconds, broker.limits.seconds),
        memory_mb=broker.limits.memory_mb,
        output_kb=MAX_MESSAGE_KB,
    )
    async with open_channel(
        PROGRAM, files=dict(sources), limits=limits, policy=policy, preload=inside.__name__
    ) as channel:
        try:
            await channel.send(setup)
        except ValueError as error:
            reason = f"{label}: the problem cannot be handed over: {error}"
            return GraphRun(GraphEnding.RAISED, reason=reason)
        except ProgramEnded:
            pass  # `receive` says how
        end = await _converse(channel, broker)
        execution = None  # where it goes on after its last word, and has to be killed
        with contextlib.suppress(TimeoutError, RuntimeError):
            async with asyncio.timeout(LINGER_SECONDS):
                while await channel.receive() is not None:
                    pass
                execution = channel.execution()
    level = "" if execution is None else execution.level.value
    if end is not None:
        return replace(_ended(label, end), level=level)
    if execution is None:
        raise ForgedMessage("a message that says nothing")
    return replace(_died(execution), level=level)


async def _converse(channel: Channel, broker: Broker) -> dict[str, Any] | None:
    """Serve the program's calls until it says how it ended; None if it never does."""
    serving: set[asyncio.Task[None]] = set()
    fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(message: dict[str, Any]) -> None:
        try:
            reply = await broker.serve(message)
            try:
                await channel.send({"id": message["id"], **reply})
            except (TypeError, ValueError) as error:
                text = f"a result that cannot be handed over: {error}"
                refusal = {"error": [type(error).__name__, text], "usage": reply["usage"]}
                await channel.send({"id": message["id"], **refusal})
        except ProgramEnded:
            return  # `receive` says how
        except Exception as error:
            if not fatal.done():
                fatal.set_exception(error)

    receiving = asyncio.ensure_future(channel.receive())
    try:
        while True:
            await asyncio.wait({receiving, fatal}, return_when=asyncio.FIRST_COMPLETED)
            if fatal.done():
                fatal.result()
            message = receiving.result()
            if message is None:
                return None
            if isinstance(message, dict) and "end" in message:
                return _checked_end(message)
            if message == {"built": True} and not broker.built:
                broker.note_built()
            else:
                broker.check(message)
                task = asyncio.create_task(serve(message))
                serving.add(task)
                task.add_done_callback(serving.discard)
            receiving = asyncio.ensure_future(channel.receive())
    finally:
        open_tasks = [receiving, *serving]
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
        if fatal.done() and not fatal.cancelled():
            fatal.exception()  # it was raised above, or the run had ended before it mattered


def _checked_end(message: dict[str, Any]) -> dict[str, Any]:
    if message["end"] == "answer" and set(message) == {"end", "answer"}:
        try:
            check_size(message["answer"], MAX_ANSWER_CHARS)
        except ValueError as error:
            raise ForgedMessage(f"an answer with {error}") from None
        return message
    words = [message.get(key) for key in ("kind", "text", "place")]
    if message["end"] == "raised" and all(isinstance(word, str) for word in words):
        return message
    raise ForgedMessage("an ending that is neither an answer nor an exception")


def _ended(label: str, end: Mapping[str, Any]) -> GraphRun:
    if end["end"] == "raised":
        where = f"{label}/{end['place']}: " if end["place"] else f"{label}: "
        reason = f"{where}{end['kind']}: {end['text']}"
        return GraphRun(GraphEnding.RAISED, reason=reason[:2000])
    answer = end["answer"]
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        found = "None" if answer is None else "an empty text"
        return GraphRun(GraphEnding.NO_ANSWER, reason=f"{label}: it returned {found}")
    return GraphRun(GraphEnding.ANSWERED, answer)


def _died(execution: Execution) -> GraphRun:
    endings = {
        Ending.TIMED_OUT: GraphEnding.TIMED_OUT,
        Ending.OUT_OF_MEMORY: GraphEnding.OUT_OF_MEMORY,
    }
    last = execution.stderr.strip()[-500:]
    hit = f", limits hit: {', '.join(execution.limits_hit)}" if execution.limits_hit else ""
    reason = f"its process {execution.ending.value} (exit code {execution.exit_code}{hit})"
    ending = endings.get(execution.ending, GraphEnding.DIED)
    return GraphRun(ending, reason=f"{reason}: {last}" if last else reason)
