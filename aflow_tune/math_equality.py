"""Whether two mathematical answers are equal, decided by math-verify in a process of its own.

math-verify bounds its time with signals, which only a main thread has, and workflow functions
run in other threads; without that bound an answer such as `9^{9^{9^{9}}}` computes for ever,
inside one machine instruction's worth of Python that no thread can interrupt. So the question
goes to a child process, one a process, started at the first question and ended by the end of
its input. The kernel ends the child that uses too much processor time; the next question
starts another.

Left to others: finding the answer in a text (rewards), and what an undecided answer costs.
Not covered: Windows, which has neither the timer nor the memory limit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
from typing import Any

CPU_SECONDS = 3
"""Processor time for one question."""
MEMORY_BYTES = 4 << 30
"""Address space of the child."""


class Undecided(RuntimeError):
    """The comparison took too much time or memory: the answer is neither right nor wrong."""


@functools.lru_cache(maxsize=4096)
def equal_answers(answer: str, truth: str) -> bool:
    """Whether `answer` equals `truth`: as text without spaces, or by math-verify.

    Both are LaTeX without delimiters, or plain text. What cannot be read as mathematics is
    compared as text. May be called from any thread; a question waits for the one before.

    Raises:
        Undecided: the comparison exceeded `CPU_SECONDS` or `MEMORY_BYTES`.
    """
    if "".join(answer.split()) == "".join(truth.split()):
        return True
    return _CHILD.ask(answer, truth)


class _Child:
    """The process that compares, and the lock that gives it one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, answer: str, truth: str) -> bool:
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            reply = ""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps([answer, truth]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            if not reply:
                self._process = None
                process.kill()
                process.communicate()
        if not reply:
            raise Undecided(
                f"math-verify found no verdict within {CPU_SECONDS} s of processor time and "
                f"{MEMORY_BYTES >> 30} GB: {answer[:200]!r} against {truth[:200]!r}"
            )
        return bool(json.loads(reply))

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            # By its file: the child needs math-verify and nothing else of the parent's.
            # -P keeps this folder, with its types.py, off the child's module path.
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            # Ctrl-C is for the parent, which closes our input when it ends.
            start_new_session=True,
        )
        return self._process


_CHILD = _Child()


def _serve() -> None:
    """Answer questions, one JSON line each, until the input ends."""
    import resource
    import signal

    from math_verify import LatexExtractionConfig, parse, verify

    replies, sys.stdout = sys.stdout, sys.stderr
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    reading = LatexExtractionConfig(boxed_match_priority=0)

    def expression(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", extraction_config=[reading], parsing_timeout=None)

    for line in sys.stdin:
        answer, truth = json.loads(line)
        # The signal's default action ends the process wherever it is, in C code too.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        equal = verify(expression(truth), expression(answer), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(bool(equal)), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
