"""Which wall this process uses: tried in order, proved, remembered.

A wall counts as found when a sandbox behind it has started and was seen to stand: bubblewrap's
from outside, at every start (`process.py`); Landlock's by a program that tries what it must not
be able to do, once, and every later start refuses to run its program if a step fails.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from aflow_tune.sandbox import _confine, packages, seccomp, staging, walls
from aflow_tune.sandbox.job import Job, WallFailed, code_of
from aflow_tune.sandbox.process import Sandbox
from aflow_tune.sandbox.types import Level, Limits, SandboxUnavailable

OLDEST_LANDLOCK = 3
"""The first version that covers truncation; Linux 6.2."""


class Home(Protocol):
    """Who starts sandboxes (`engine.py`), as far as finding a wall needs it."""

    async def first(self, level: Level) -> Sandbox:
        """A new sandbox. WallFailed: its wall does not stand."""

    def keep(self, sandbox: Sandbox) -> None:
        """Take back one that has run nothing."""


@dataclass(frozen=True)
class Detection:
    """The wall found, and for each wall that was tried what there is to say about it."""

    level: Level | None
    reasons: dict[str, str]

    @property
    def why(self) -> str:
        """In one line."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())


class Levels:
    """The answer for one process. Its methods run on the engine's loop."""

    def __init__(self) -> None:
        self._found: dict[str, Detection] = {}
        self._lock = asyncio.Lock()
        self._staged: dict[tuple[str, ...], int | None] = {}
        """Views of the machine (`staging.py`), by the packages in them."""
        self._numbers = itertools.count()
        self._warned = False

    async def choose(self, policy: str, home: Home) -> Level:
        """The level for a policy. SandboxUnavailable: there is none."""
        found = await self.detect(policy, home)
        if found.level is None:
            raise SandboxUnavailable(unavailable(policy, found))
        if found.level is Level.UNSAFE_SUBPROCESS and not self._warned:
            self._warned = True
            print(unsafe_warning(), file=sys.stderr, flush=True)
        return found.level

    async def detect(self, policy: str, home: Home) -> Detection:
        """As `choose`, with reasons instead of a refusal."""
        async with self._lock:
            if policy not in self._found:
                self._found[policy] = await self._detect(policy, home)
            return self._found[policy]

    async def _detect(self, policy: str, home: Home) -> Detection:
        reasons: dict[str, str] = {}
        if policy == Level.UNSAFE_SUBPROCESS:
            return Detection(Level.UNSAFE_SUBPROCESS, {policy: "asked for; there is no wall"})
        order = (Level.BUBBLEWRAP, Level.LANDLOCK) if policy == "auto" else (Level(policy),)
        for level in order:
            try:
                self._preconditions(level)
                await self._prove(level, home)
            except (WallFailed, OSError) as error:
                reasons[level.value] = str(error)
            else:
                reasons[level.value] = "a sandbox was started and its wall seen to stand"
                return Detection(level, reasons)
        return Detection(None, reasons)

    def _preconditions(self, level: Level) -> None:
        if not seccomp.supported():
            raise WallFailed("needs Linux on x86-64 or AArch64")
        if level is Level.BUBBLEWRAP and walls.find_tool("bwrap") is None:
            raise WallFailed("bwrap is not installed")
        if level is Level.LANDLOCK and (version := _confine.version()) < OLDEST_LANDLOCK:
            raise WallFailed(
                f"the kernel offers Landlock version {version}, version {OLDEST_LANDLOCK} "
                "(Linux 6.2) is needed"
            )
        if os.geteuid() == 0 and not walls.is_mapped(walls.NOBODY):
            raise WallFailed("root of a namespace without other users: nobody to run programs as")
        self._view(())

    def _view(self, folders: tuple[str, ...]) -> int | None:
        """A view in which the program's user reaches the interpreter and these."""
        if folders not in self._staged:
            try:
                needed = staging.needs_staging(folders)
                self._staged[folders] = staging.stage(folders) if needed else None
            except staging.StagingFailed as error:
                raise WallFailed(
                    f"as root, programs run as an unprivileged user, who cannot reach the "
                    f"interpreter{' or a package' if folders else ''}: {error}"
                ) from error
        return self._staged[folders]

    async def _prove(self, level: Level, home: Home) -> None:
        sandbox = await home.first(level)
        if level is Level.BUBBLEWRAP:
            home.keep(sandbox)
            return
        try:
            await _attack(sandbox)
        finally:
            await sandbox.close()
            sandbox.channel.close()

    def launch(self, level: Level, disk_mb: int, names: tuple[str, ...] = ()) -> walls.Launch:
        """How to start a sandbox of a level that was found, or is being tried.

        Args:
            names: packages that its program may import.

        Raises:
            BadInput: one is not there.
            WallFailed: one cannot be reached.
        """
        found = packages.find(names)
        if level is Level.BUBBLEWRAP:
            return walls.bubblewrap(disk_mb, self._view(found.folders), found)
        # A name that nobody can guess; the sandbox makes it, and fails if it is there.
        folder = f"{os.path.realpath(tempfile.gettempdir())}/aflow-tune-{secrets.token_hex(12)}"
        if level is Level.UNSAFE_SUBPROCESS:
            return walls.unsafe(folder, found)
        version = _confine.version()
        number = next(self._numbers)
        view = self._view(found.folders)
        return walls.landlock(folder, number, code_of("_confine"), version, view, found)


_PROBE = """
import os, socket, sys
secret, target, parent = sys.stdin.read().split("\\n")
done = []
def attempt(name, function):
    try:
        function()
        done.append(name)
    except OSError:
        pass
attempt("read", lambda: open(secret).read())
attempt("write", lambda: open(target, "w").close())
attempt("signal", lambda: os.kill(int(parent), 0))
attempt("socket", lambda: socket.socket())
attempt("environment", lambda: open(f"/proc/{parent}/environ", "rb").read())
print(" ".join(done) or "contained")
"""


async def _attack(sandbox: Sandbox) -> None:
    """A program that tries to get out. WallFailed: something of it worked."""
    with tempfile.TemporaryDirectory(prefix="aflow-tune-probe-") as name:
        os.chmod(name, 0o777)
        secret, target = Path(name) / "secret", Path(name) / "target"
        secret.write_text("not for you")
        stdin = f"{secret}\n{target}\n{os.getpid()}"
        execution = await sandbox.run(Job(_PROBE, stdin, Limits(), {}, False))
        if target.exists():
            raise WallFailed("a program behind it wrote outside of its folder")
    if execution.stdout != "contained\n":
        reason = execution.stdout.strip() or execution.stderr.strip()[-200:]
        raise WallFailed(f"a program behind it could do this or failed: {reason}")


def unavailable(policy: str, found: Detection) -> str:
    """What to tell when there is no wall."""
    reasons = "\n".join(f"    {name}: {reason}" for name, reason in found.reasons.items())
    cure = f"install bubblewrap: {walls.INSTALL}"
    if walls.find_tool("bwrap") is not None:
        cure = (
            "allow user namespaces to bwrap (sysctl user.max_user_namespaces above 0; on Ubuntu "
            "24.04 and later an AppArmor profile for bwrap), or use a kernel with Landlock (6.2)"
        )
    if sys.platform != "linux":
        cure = "use a Linux machine or container, where it can be built"
    return (
        f"no sandbox can be built here (sandbox: {policy}), so the program was not run\n{reasons}\n"
        f"    do:       {cure}\n"
        "              or, only for code that you trust as your own, set "
        "`sandbox: unsafe_subprocess`"
    )


def unsafe_warning() -> str:
    """What a plain subprocess does not protect from."""
    lines = "\n".join(f"  - {line}" for line in walls.DOES_NOT_COVER[Level.UNSAFE_SUBPROCESS])
    return (
        "aflow-tune: sandbox: unsafe_subprocess: programs that a model wrote run without a wall, "
        f"with your rights. Not protected:\n{lines}"
    )
