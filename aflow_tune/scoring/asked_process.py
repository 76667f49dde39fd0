"""A process of ours that answers questions one by one, and can be lost without harm.

For libraries that bound their time with signals, which only a main thread has, or not at all. The
child starts at the first question; the kernel ends it where it uses too much processor time or
memory, and the next question starts another. What runs there is our code on foreign data, never
foreign code. Not covered: Windows, which has neither the timer nor the memory limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY_BYTES = 4 << 30
"""Address space of a child."""
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_ROOT = Path(__file__).resolve().parents[2]


class Undecided(RuntimeError):
    """A question took too much time or memory: the answer is neither right nor wrong."""


class QuestionFailed(RuntimeError):
    """The child raised an exception over a question. Says which."""


class AskedProcess:
    """The parent's end: starts `python -m module`, which calls `serve`, and asks it.

    May be asked from any thread; a question waits for the one before.
    """

    def __init__(self, module: str, what: str, cpu_seconds: float, *words: str) -> None:
        self._command = [module, str(cpu_seconds), *words]
        self._what = what
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, *question: Any) -> Any:
        """The child's answer to `question`; both are JSON.

        Raises:
            Undecided: the child needed too much time or memory and was ended.
            QuestionFailed: the child raised an exception.
        """
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            reply = ""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            if not reply:
                self._process = None
                process.kill()
                process.communicate()
                shown = " against ".join(f"{str(part)[:200]!r}" for part in question)
                raise Undecided(
                    f"{self._what} found no verdict within {self._cpu_seconds:g} s of processor "
                    f"time and {MEMORY_BYTES >> 30} GB: {shown}"
                )
        answer = json.loads(reply)
        if "failure" in answer:
            raise QuestionFailed(f"{self._what}: {answer['failure']}")
        return answer["answer"]

    def _start(self) -> subprocess.Popen[str]:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        paths = [str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            # -P keeps the current folder off the child's module path.
            [sys.executable, "-P", "-m", *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
            # Ctrl-C is for the parent, which closes our input when it ends.
            start_new_session=True,
        )
        return self._process


def serve(answer: Callable[..., Any]) -> None:
    """The child's end: answer questions, one JSON line each, until the input ends."""
    import resource
    import signal

    cpu_seconds = float(sys.argv[1])
    replies, sys.stdout = sys.stdout, sys.stderr
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        question = json.loads(line)
        # The signal's default action ends the process wherever it is, in C code too.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            reply = {"answer": answer(*question)}
        except Exception as error:
            reply = {"failure": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)
