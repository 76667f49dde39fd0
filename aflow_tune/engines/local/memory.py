"""Memory that was freed goes back to the system.

glibc keeps what a thread freed in that thread's own arena, for the same thread to use again.
Sampler, trainer and executor work in threads of one process one after the other, so each would
hold on to the other's gigabytes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Return freed memory to the system; does nothing where the C library has no `malloc_trim`."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def can_give_back() -> bool:
    """Whether `give_back` does anything here: not on macOS, nor with musl."""
    return _malloc_trim() is not None


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    found: Callable[[int], int] = trim
    return found
