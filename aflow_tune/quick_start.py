"""A process that imports much, without looking for garbage in it."""

import gc
import threading

SECONDS = 20.0


def import_quickly() -> None:
    """Collect no garbage for the first seconds of this process.

    Modules make a million objects that stay. Looking through them again and again while they are
    made is a quarter of the time of importing Trinity and torch.
    """
    gc.disable()
    timer = threading.Timer(SECONDS, gc.enable)
    timer.daemon = True
    timer.start()
