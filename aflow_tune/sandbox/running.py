"""Run one program in the sandbox, from async code or from plain code.

The engine does the work on its own thread; here its result comes back to the caller's loop or
thread, and into the caller's trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aflow_tune.errors import BadInput, Fault
from aflow_tune.sandbox.engine import Engine, engine
from aflow_tune.sandbox.job import Job, WallFailed
from aflow_tune.sandbox.levels import Detection
from aflow_tune.sandbox.policy import meant, parts
from aflow_tune.sandbox.process import Sandbox
from aflow_tune.sandbox.types import Execution, Limits, SandboxUnavailable
from aflow_tune.trace import ProgramRun, note

T = TypeVar("T")


async def run_program(
    source: str,
    *,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
    files: Mapping[str, str] = {},
) -> Execution:
    """Run a Python program behind the strongest wall that the policy allows.

    The program is `main.py` in an empty working folder, run by the interpreter that runs us,
    with the standard library and no package but those of the policy. A cancelled call kills it
    first.

    Args:
        files: texts that lie in the working folder, by relative path.
        policy: one of `Level`, or auto: what the run's configuration says, else the strongest
            wall that can be built. unsafe_subprocess is only taken if asked for. Packages that
            the program may import follow after plus signs: `auto+numpy`.

    Raises:
        SandboxUnavailable: no such wall can be built; the program was not run.
        BadInput: the policy, a limit or a file's name makes no sense.
    """
    job, policy = checked_job(source, stdin, limits, files, channel=False), meant(policy)
    started = time.monotonic()
    execution = await elsewhere(lambda home: _run(home, job, policy))
    note_run(execution, started)
    return execution


def run_program_sync(
    source: str,
    *,
    stdin: str = "",
    limits: Limits = Limits(),  # noqa: B008
    policy: str = "auto",
    files: Mapping[str, str] = {},
) -> Execution:
    """`run_program` for code without an event loop; it may also be called inside one."""
    job, policy = checked_job(source, stdin, limits, files, channel=False), meant(policy)
    started = time.monotonic()
    home = engine()
    future = home.submit(_run(home, job, policy))
    try:
        execution = future.result()
    except BaseException:
        future.cancel()
        raise
    note_run(execution, started)
    return execution


def detect(policy: str = "auto") -> Detection:
    """The wall that programs of this process run behind, proved by starting one; remembered."""
    home, policy = engine(), meant(policy)
    return home.submit(home.levels.detect(parts(policy)[0], home)).result()


async def _run(home: Engine, job: Job, policy: str) -> Execution:
    async with home.running, home.sandbox(policy, job.limits.disk_mb) as sandbox:
        try:
            return await run_in(sandbox, job)
        finally:
            sandbox.channel.close()


async def run_in(sandbox: Sandbox, job: Job) -> Execution:
    """Run a job. SandboxUnavailable: the wall failed before the program started."""
    try:
        return await sandbox.run(job)
    except WallFailed as error:
        raise SandboxUnavailable(
            f"the {sandbox.level.value} wall failed, so the program was not run: {error}"
        ) from error


async def elsewhere(work: Callable[[Engine], Coroutine[Any, Any, T]]) -> T:
    """Await work of the engine's loop. A cancelled caller goes on when the work has ended."""
    home = engine()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    async def tracked() -> T:
        try:
            return await work(home)
        finally:
            with contextlib.suppress(RuntimeError):  # the caller did not wait: its loop is closed
                loop.call_soon_threadsafe(tell)

    future = home.submit(tracked())
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.cancel()
        await asyncio.wait([ended], timeout=15)
        raise


def note_run(execution: Execution, started: float) -> None:
    """Put a run into the current trace."""
    note(
        ProgramRun(
            started=started,
            seconds=execution.seconds,
            level=execution.level.value,
            outcome=execution.ending.value,
            limits_hit=execution.limits_hit,
        )
    )


def checked_job(
    source: str, stdin: str, limits: Limits, files: Mapping[str, str], *, channel: bool
) -> Job:
    """A job whose limits and names make sense. BadInput: all that does not."""
    faults = []
    for name in Limits.__dataclass_fields__:
        value = getattr(limits, name)
        if name == "cpu_seconds" and value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and 0 < value < 1 << 30):
            faults.append(
                Fault(f"limits.{name}", "a number above 0", repr(value), "give a positive number")
            )
    for name in files:
        plain = name and not name.startswith("/") and "\0" not in name and name != "main.py"
        if not plain or posixpath.normpath(name) != name or name.split("/")[0] in ("..", "."):
            faults.append(
                Fault(f"files[{name!r}]", "a relative path, not main.py", repr(name), "rename it")
            )
    size = sum(len(text) for text in (source, *files.values())) / (1 << 20)
    if not faults and size > limits.disk_mb:
        faults.append(
            Fault(
                "files", f"at most limits.disk_mb ({limits.disk_mb})", f"{size:.1f} MB", "shorten"
            )
        )
    if faults:
        raise BadInput("a program cannot be run like that", faults)
    return Job(source, stdin, limits, dict(files), channel)
