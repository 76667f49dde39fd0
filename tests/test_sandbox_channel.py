"""A conversation with a program that may not be honest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import Any

import pytest
from sandbox_outside import BACKENDS, eventually, need, runs

from aflow_tune.sandbox import Ending, Limits, ProgramEnded, open_channel
from aflow_tune.sandbox._inside import TOLD
from aflow_tune.trace import ProgramRun, Trace

AMPLE = Limits(seconds=60)
"""For programs that end by themselves, on a busy machine."""


@pytest.fixture(params=[*BACKENDS, "unsafe_subprocess"])
def level(request: pytest.FixtureRequest) -> str:
    return need(request.param)


async def everything(channel: Any) -> list[Any]:
    found = []
    while (message := await channel.receive()) is not None:
        found.append(message)
    return found


def test_values_go_both_ways_in_order(level: str) -> None:
    program = """
import aflow_channel
while (message := aflow_channel.receive()) is not None:
    aflow_channel.send([message, "seen"])
    if message == "last":
        break
print("to stdout")
"""
    values = [1, "ünï\n", {"a": [1.5, None, True]}, "x" * 500_000, "last"]

    async def main() -> None:
        async with open_channel(program, policy=level, limits=AMPLE) as channel:
            with pytest.raises(RuntimeError, match="not ended"):
                channel.execution()
            for value in values:
                await channel.send(value)
                assert await channel.receive() == [value, "seen"]
            assert await channel.receive() is None
            ended = channel.execution()
            assert (ended.ending, ended.stdout) == (Ending.FINISHED, "to stdout\n")
            with pytest.raises(ProgramEnded):
                await channel.send("anyone?")

    with Trace().activate() as trace:
        asyncio.run(main())
    (noted,) = trace.of(ProgramRun)
    assert (noted.level, noted.outcome) == (level, "finished")


@pytest.mark.parametrize("first_free", range(TOLD - 5, TOLD + 2))
def test_the_channel_may_have_any_number_in_the_parent(level: str, first_free: int) -> None:
    """A busy process holds many descriptors; the inside has numbers of its own for some."""
    program = "import aflow_channel\naflow_channel.send(aflow_channel.receive())"

    async def main() -> Any:
        held = [os.open(os.devnull, os.O_RDONLY)]
        try:
            while held[-1] < first_free:
                held.append(os.open(os.devnull, os.O_RDONLY))
            async with open_channel(program, policy=level, limits=AMPLE) as channel:
                await channel.send("hello")
                return await channel.receive()
        finally:
            for descriptor in held:
                os.close(descriptor)

    assert asyncio.run(main()) == "hello"


def test_what_was_sent_before_the_end_arrives(level: str) -> None:
    program = "import aflow_channel, os\nfor n in range(100): aflow_channel.send(n)\nos._exit(3)"

    async def main() -> tuple[list[Any], int | None]:
        async with open_channel(program, policy=level, limits=AMPLE) as channel:
            await asyncio.sleep(0.3)
            return await everything(channel), channel.execution().exit_code

    assert asyncio.run(main()) == (list(range(100)), 3)


@pytest.mark.parametrize(
    ("words", "ending", "hits"),
    [
        ("b'no json\\n'", Ending.FAILED, ()),
        ("b'null\\n'", Ending.FAILED, ()),
        ("b'[' * 100_000 + b'\\n'", Ending.FAILED, ()),
        ("b'9' * 10_000 + b'\\n'", Ending.FAILED, ()),
        ("b'\\xff\\xfe\\n'", Ending.FAILED, ()),
        ("b'x' * 2_000_000", Ending.TOO_MUCH_OUTPUT, ("output_kb",)),
        ("b'\"' + b'x' * 2_000_000 + b'\"\\n'", Ending.TOO_MUCH_OUTPUT, ("output_kb",)),
    ],
)
def test_what_is_no_message_ends_the_program(
    level: str, words: str, ending: Ending, hits: tuple[str, ...]
) -> None:
    program = f"""
import aflow_channel, os, time
aflow_channel.send("first")
data = {words}
while data:
    data = data[os.write(aflow_channel.fd, data):]
time.sleep(600)
"""

    async def main() -> None:
        async with open_channel(program, policy=level, limits=AMPLE) as channel:
            assert await everything(channel) == ["first"]
            ended = channel.execution()
            assert (ended.ending, ended.limits_hit) == (ending, hits)

    asyncio.run(main())


def test_a_program_that_is_not_listened_to_waits(level: str) -> None:
    program = """
import aflow_channel, time
for n in range(100_000):
    aflow_channel.send("x" * 1000)
    print(n, flush=True)
"""

    async def main() -> int:
        limits = Limits(seconds=1)
        async with open_channel(program, policy=level, limits=limits) as channel:

            def ended() -> bool:
                with contextlib.suppress(RuntimeError):
                    return bool(channel.execution())
                return False

            # Its second begins when it could be started; to listen before its end lets it go on.
            assert await asyncio.to_thread(eventually, ended)
            await everything(channel)
            return len(channel.execution().stdout.splitlines())

    # What fits into the socket's buffers, of about 200 KB each way.
    assert asyncio.run(main()) < 1000


def test_leaving_the_block_kills(level: str) -> None:
    mark = f"14{secrets.randbelow(10**9)}.25"
    program = f"""
import aflow_channel, subprocess
subprocess.Popen(["/usr/bin/sleep", "{mark}"])
aflow_channel.send("there")
import time
time.sleep(600)
"""

    async def main() -> bool:
        async with open_channel(program, policy=level, limits=AMPLE) as channel:
            assert await channel.receive() == "there"
            # While a process is being replaced by another program it has no command line.
            assert await asyncio.to_thread(eventually, lambda: runs(mark))
        return runs(mark)

    assert asyncio.run(main()) is False
