"""`aflow_channel`: how a program in the sandbox talks with the process that runs it.

Sent as source into the program's interpreter when the channel is open. One message is one JSON
value on one line; the parent ends a program that sends a longer line than it accepts.
"""

from __future__ import annotations

import json
import os
import threading

# `typing` takes longer to import than a small program runs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

fd = 3  # the socket, for programs that wait for several things at once

_sending, _receiving = threading.Lock(), threading.Lock()
_received = bytearray()


def send(message: Any) -> None:
    """Send a JSON value other than null. OSError: the parent has closed the channel."""
    if message is None:
        raise ValueError("None is no message: it means that there will be none")
    line = memoryview(json.dumps(message).encode() + b"\n")
    with _sending:
        while line:
            line = line[os.write(fd, line) :]


def receive() -> Any:
    """The parent's next message; waits for it. None: there will be none."""
    with _receiving:
        seen = 0
        while (end := _received.find(b"\n", seen)) < 0:
            seen = len(_received)
            piece = os.read(fd, 65536)
            if not piece:
                return None
            _received.extend(piece)
        line = bytes(_received[:end])
        del _received[: end + 1]
    return json.loads(line)
