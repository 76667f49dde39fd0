"""How a program ended, from what the inside reports and what was seen out here.

The report is parsed strictly and wins nothing by lying: a program that ended by itself with
status 0 has finished, and every limit that is kept out here overrides it.
"""

from __future__ import annotations

import re

from aflow_tune.sandbox.types import Ending, Execution, Level, Limits

_ENDINGS = {
    "seconds": Ending.TIMED_OUT,
    "cpu_seconds": Ending.TIMED_OUT,
    "memory_mb": Ending.OUT_OF_MEMORY,
    "output_kb": Ending.TOO_MUCH_OUTPUT,
}
_SIGXCPU = -24


def execution_of(
    report: list[str],
    stopped_for: str | None,
    outputs: tuple[bytes, bytes],
    level: Level,
    seconds: float,
) -> Execution:
    """Put together what is known.

    Args:
        report: words of the inside's last line; none where it had no time to report.
        stopped_for: the limit that was kept out here, or '' where somebody ended it otherwise;
            None where nobody did.
        outputs: of stdout and stderr.
    """
    code, reason, hits = _parse(report)
    stdout, stderr = (output.decode("utf-8", "replace") for output in outputs)
    if stopped_for is not None:
        reason = stopped_for
    if reason == "itself" and code == _SIGXCPU:
        reason = "cpu_seconds"
    if reason == "itself" and code == 1:
        if _LAST_LINE_MEMORY.match(_last_line(stderr)):
            reason = "memory_mb"
        elif _LAST_LINE_DISK.search(_last_line(stderr)):
            hits.add("disk_mb")
    if reason in _KNOWN:
        hits.add(reason)
    well = Ending.FINISHED if (reason, code) == ("itself", 0) else Ending.FAILED
    return Execution(
        ending=_ENDINGS.get(reason, well),
        exit_code=code,
        stdout=stdout,
        stderr=stderr,
        level=level,
        seconds=seconds,
        limits_hit=tuple(sorted(hits)),
    )


_KNOWN = frozenset(Limits.__dataclass_fields__)


def _parse(report: list[str]) -> tuple[int | None, str, set[str]]:
    """(exit code, reason, limits hit); 'lost' where the supervisor ended without a report."""
    if len(report) != 4 or report[0] != "ended":
        return None, "lost", set()
    code = int(report[1]) if re.fullmatch(r"-?\d{1,3}", report[1]) else None
    reason = report[2] if report[2] in _KNOWN | {"itself", "parent"} else "lost"
    return code, reason, set(report[3].split(",")) & _KNOWN


# How a traceback of Python ends where an allocation or a write was refused: MemoryError, and
# EFBIG, ENOSPC, EDQUOT as the kernel numbers them.
_LAST_LINE_MEMORY = re.compile(r"(\w+\.)*MemoryError\b")
_LAST_LINE_DISK = re.compile(r"\[Errno (27|28|122)\]")


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]
