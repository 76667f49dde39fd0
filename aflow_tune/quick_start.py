"""Faster imports at the start of a process: no garbage collection meanwhile."""

import gc
import threading

SECONDS = 20.0


def import_quickly() -> None:
    """Turn the garbage collector off for the next `SECONDS` seconds.

    Importing Trinity and torch makes a million objects that stay; traversing them again and again
    takes a quarter of the import time.
    """
    gc.disable()
    timer = threading.Timer(SECONDS, gc.enable)
    timer.daemon = True
    timer.start()
