"""The parent's side of one sandbox: start it, check that it confines, run one program, end it.

A sandbox is an interpreter that waits for its one program (`_inside.py`). All methods run on the
event loop of `running.py`'s thread. Nothing that comes out is trusted: output is cut at its limit,
reports are parsed strictly, and the time limit is enforced here as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import marshal
import math
import os
import re
import signal
import socket
import subprocess
import time
import weakref
from dataclasses import asdict, dataclass, field
from types import CodeType
from typing import Any

from aflow_tune.sandbox.types import BackendFailed, Ending, Execution, Level, Limits
from aflow_tune.sandbox.view import system_paths


@dataclass(frozen=True)
class Launch:
    """How to start one sandbox: the command before the interpreter, the setup message, descriptors
    to inherit, and the filter whose descriptor replaces FILTER in the command."""

    command: tuple[str, ...]
    environment: dict[str, str]
    setup: dict[str, Any]
    descriptors: tuple[int, ...] = ()
    filter_program: bytes | None = None


FILTER = "<filter>"


@functools.cache
def code_of(name: str) -> CodeType:
    """The compiled code of one of our modules; a name without a dot is of this package."""
    spec = importlib.util.find_spec(name if "." in name else f"aflow_tune.sandbox.{name}")
    code = spec.loader.get_code(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]
    if not isinstance(code, CodeType):
        raise BackendFailed(f"the code of {name} is missing from this installation")
    return code


@dataclass
class Job:
    """One program, its input and its limits."""

    source: str
    stdin: str
    limits: Limits
    files: dict[str, str]
    channel: bool

    def message(self) -> bytes:
        """The job as `_inside.py` receives it."""
        limits = self.limits
        # The default is one second more, so that the wall clock ends the program first.
        cpu = limits.seconds + 1 if limits.cpu_seconds is None else limits.cpu_seconds
        texts = {**self.files, "main.py": self.source, "": self.stdin}
        # A model's text may hold a lone surrogate; then the interpreter rejects the program.
        files = {name: text.encode("utf-8", "surrogatepass") for name, text in texts.items()}
        stdin, channel = files.pop(""), code_of("_channel_inside") if self.channel else None
        told = {**asdict(limits), "cpu_seconds": math.ceil(cpu)}
        return framed({"files": files, "stdin": stdin, "channel": channel, "limits": told})


def framed(message: dict[str, Any]) -> bytes:
    """A message as `_inside.receive` reads it."""
    body = marshal.dumps(message)
    return len(body).to_bytes(4, "big") + body


START_SECONDS, GRACE_SECONDS, END_SECONDS = 20.0, 1.0, 10.0
"""To become ready on a busy machine; for the supervisor to end the program; to exit."""

_STUB = (
    "import sys,_socket,marshal\n"
    "control=_socket.socket(fileno=int(sys.argv[1]))\n"
    "exec(marshal.loads(control.recv(int(sys.argv[3]),_socket.MSG_WAITALL)))\n"
    "main(control,int(sys.argv[2]))"
)
ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Our ends of all sockets. A fork of this process closes its copies; else a sandbox would not
notice that its parent was killed."""
_NAMESPACES = ("user", "pid", "net", "mnt", "ipc", "uts")


@dataclass
class _Output:
    descriptor: int
    limit: int
    data: bytearray = field(default_factory=bytearray)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Sandbox:
    """One sandbox; it runs one program."""

    def __init__(self, level: Level, launch: Launch, preload: str = "") -> None:
        self.level = level
        self._loop = asyncio.get_running_loop()
        self._killed_for: str | None = None
        """The limit for which this side killed it; '' for another reason, None if it did not."""
        self._lines = bytearray()
        self._inner: int | None = None
        self._inner_pid = 0
        code = marshal.dumps(code_of("_inside"))
        setup = {**launch.setup, "preload": None}
        if preload:
            setup |= {"preload": code_of(preload), "channel": code_of("_channel_inside")}
        mine, control = socket.socketpair()
        channel, inside = socket.socketpair()
        ends.update((mine, channel))
        outputs = [os.pipe(), os.pipe()]
        filters: list[int] = []
        try:
            command = list(launch.command)
            if launch.filter_program is not None:
                filters = list(os.pipe())
                os.write(filters[1], launch.filter_program)
                os.close(filters.pop())
                command[command.index(FILTER)] = str(filters[0])
            command += [system_paths().python, "-I", "-S", "-B", "-X", "utf8", "-c", _STUB]
            command += [str(control.fileno()), str(inside.fileno()), str(len(code))]
            passed = (control.fileno(), inside.fileno(), *launch.descriptors, *filters)
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=outputs[0][1],
                stderr=outputs[1][1],
                env=launch.environment,
                cwd="/",
                pass_fds=passed,
                process_group=0,
            )
        except BaseException:
            for end in (mine, channel):
                end.close()
            for read, _ in outputs:
                os.close(read)
            raise
        finally:
            control.close()
            inside.close()
            for descriptor in (*(write for _, write in outputs), *filters):
                os.close(descriptor)
        self.control, self.channel = mine, channel
        self.control.setblocking(False)
        self.channel.setblocking(False)
        self.control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._note_exit)
        self._setup = code + framed(setup)
        # Before the program runs, only error messages of tools arrive.
        self._outputs = [_Output(read, 1 << 16) for read, _ in outputs]
        for output in self._outputs:
            os.set_blocking(output.descriptor, False)
            self._loop.add_reader(output.descriptor, self._read, output)

    async def ready(self) -> None:
        """Wait until it is ready for its program; for bubblewrap, check its confinement from here.
        Raises BackendFailed: it did not start, or does not confine."""
        try:
            async with asyncio.timeout(START_SECONDS):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await self._loop.sock_sendall(self.control, self._setup)
                line = await self._line()
        except TimeoutError:
            raise BackendFailed(f"it was not ready after {START_SECONDS:.0f} seconds") from None
        if line != "ready":
            await self.end()
            said = self._outputs[1].data.decode("utf-8", "replace").strip()
            told = said.splitlines()[-1][:300] if said else "it ended before it was ready"
            raise BackendFailed(told)
        if self.level is Level.BUBBLEWRAP:
            self._look()

    async def run(self, job: Job) -> Execution:
        """Run the program. Raises BackendFailed: it did not start, as confinement failed."""
        for output in self._outputs:
            output.limit = job.limits.output_kb << 10
            output.data.clear()
        started = time.monotonic()
        report: list[str] = []
        try:
            async with asyncio.timeout(START_SECONDS) as deadline:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await self._loop.sock_sendall(self.control, job.message())
                first = await self._line()
                if first.startswith("refused"):
                    raise BackendFailed(first)
                if first == "started":
                    last = self._loop.time() + job.limits.seconds + GRACE_SECONDS
                    deadline.reschedule(last)
                    report = (await self._line()).split()
        except TimeoutError:
            self.stop("seconds")
        seconds = time.monotonic() - started
        if not report or not await self._gone():
            await self.end()
        # Only an unconfined process can still hold the streams open.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                for output in self._outputs:
                    await output.ended.wait()
        return self._execution(report, seconds)

    async def end(self) -> None:
        """Kill every process of it, and wait until they are gone."""
        self._kill()
        if not await self._gone():
            self._process.kill()
            await self._exited.wait()

    async def _gone(self) -> bool:
        """Whether it ends within `END_SECONDS`; waits for that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._exited.wait()
        return self._exited.is_set()

    async def close(self) -> None:
        """`end`, then close the descriptors. The channel is left to its user."""
        try:
            await self.end()
        finally:
            for output in self._outputs:
                self._stop_reading(output)
            self.control.close()
            if self._inner is not None:
                os.close(self._inner)
                self._inner = None

    @property
    def alive(self) -> bool:
        """Whether its process is still running."""
        return not self._exited.is_set() and self._process.poll() is None

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._exited.set()

    def stop(self, limit: str) -> None:
        """Kill the program for exceeding this limit; '': for another reason."""
        if self._killed_for is None:
            self._killed_for = limit
            self._kill()

    def _kill(self) -> None:
        """Start killing all of it; `end` waits for that."""
        if self.level is Level.BUBBLEWRAP:
            if self._inner is not None:
                # The kernel kills a process namespace with its first process.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._inner, signal.SIGKILL)
            elif not self._exited.is_set():
                self._process.kill()
        else:
            # The supervisor then kills every descendant and exits.
            with contextlib.suppress(OSError):
                self.control.shutdown(socket.SHUT_RDWR)

    async def _line(self) -> str:
        """The next line from `_inside.py`; '' if it ended or sent too much."""
        while b"\n" not in self._lines:
            piece = await self._piece()
            self._lines += piece
            if not piece or len(self._lines) > 2000:
                return ""
        line, _, self._lines = self._lines.partition(b"\n")
        return line.decode("ascii", "replace")

    async def _piece(self) -> bytes:
        readable = asyncio.Event()
        self._loop.add_reader(self.control, readable.set)
        try:
            await readable.wait()
            data, ancillary, _, _ = self.control.recvmsg(2000, socket.CMSG_SPACE(12))
        except (BlockingIOError, ConnectionResetError):
            return b""
        finally:
            self._loop.remove_reader(self.control)
        for level, kind, body in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                # Written by the kernel: the sender's pid in our namespace.
                pid = int.from_bytes(body[:4], "little")
                if pid > 0 and self._inner is None:
                    self._inner, self._inner_pid = os.pidfd_open(pid), pid
        return data

    def _look(self) -> None:
        """Check namespaces, ids, capabilities and filter in /proc, which the inside cannot fake."""
        if self._inner is None:
            raise BackendFailed("the kernel does not say which process is inside")
        here = f"/proc/{self._inner_pid}"
        with open(f"{here}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
        wrong = [
            f"{name} namespace is shared"
            for name in _NAMESPACES
            if os.readlink(f"{here}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}")
        ]
        none = {f"Cap{kind}": "0" * 16 for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")}
        wanted = {**none, "Seccomp": "2", "NoNewPrivs": "1"}
        wrong += [f"{k} is {status.get(k)}" for k, v in wanted.items() if status.get(k) != v]
        if "0" in status["Uid"].split():
            wrong.append("it runs as root")
        if wrong:
            raise BackendFailed(", ".join(wrong))

    def _read(self, output: _Output) -> None:
        try:
            piece = os.read(output.descriptor, 1 << 16)
        except BlockingIOError:
            return
        room = output.limit - len(output.data)
        output.data += piece[: max(0, room)]
        if len(piece) > room:
            self.stop("output_kb")
        if not piece:
            self._stop_reading(output)

    def _stop_reading(self, output: _Output) -> None:
        if not output.ended.is_set():
            output.ended.set()
            self._loop.remove_reader(output.descriptor)
            os.close(output.descriptor)

    def _execution(self, report: list[str], seconds: float) -> Execution:
        """The result; `report` holds the words of `_inside.py`'s last line, if there was one."""
        code, reason, hits = None, "lost", set()
        if len(report) == 4 and report[0] == "ended":
            code = int(report[1]) if re.fullmatch(r"-?\d{1,3}", report[1]) else None
            reason = report[2] if report[2] in _KNOWN | {"itself", "parent"} else "lost"
            hits = set(report[3].split(",")) & _KNOWN
        stdout, stderr = (output.data.decode("utf-8", "replace") for output in self._outputs)
        if self._killed_for is not None:
            reason = self._killed_for
        if reason == "itself" and code == -signal.SIGXCPU:
            reason = "cpu_seconds"
        if reason == "itself" and code == 1:
            last = stderr.rstrip().rpartition("\n")[2]
            if _LAST_LINE_MEMORY.match(last):
                reason = "memory_mb"
            elif _LAST_LINE_DISK.search(last):
                hits.add("disk_mb")
        if reason in _KNOWN:
            hits.add(reason)
        well = Ending.FINISHED if (reason, code) == ("itself", 0) else Ending.FAILED
        ending, hit = _ENDINGS.get(reason, well), tuple(sorted(hits))
        return Execution(ending, code, stdout, stderr, self.level, seconds, hit)


_ENDINGS = {
    "seconds": Ending.TIMED_OUT,
    "cpu_seconds": Ending.TIMED_OUT,
    "memory_mb": Ending.OUT_OF_MEMORY,
    "output_kb": Ending.TOO_MUCH_OUTPUT,
}
_KNOWN = frozenset(Limits.__dataclass_fields__)
# The last line of a traceback after a refused allocation or write (EFBIG, ENOSPC, EDQUOT).
_LAST_LINE_MEMORY = re.compile(r"(\w+\.)*MemoryError\b")
_LAST_LINE_DISK = re.compile(r"\[Errno (27|28|122)\]")
