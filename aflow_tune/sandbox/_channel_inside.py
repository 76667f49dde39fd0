"""`aflow_channel`: the module by which a program in the sandbox exchanges messages with its parent.

Its compiled code is sent to the program's interpreter when there is a channel. A message is one
JSON value on one line; the parent kills a program that sends too long a line.
"""

from __future__ import annotations

import json
import os
import threading

# `typing` takes longer to import than a small program runs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

fd = 3  # the socket, for programs that poll it themselves

_sending, _receiving = threading.Lock(), threading.Lock()
_received = bytearray()


def send(message: Any) -> None:
    """Send a JSON value other than null. Raises OSError: the parent closed the channel."""
    if message is None:
        raise ValueError("None is no message: it means that there will be none")
    line = memoryview(json.dumps(message).encode() + b"\n")
    with _sending:
        while line:
            line = line[os.write(fd, line) :]


def receive() -> Any:
    """Wait for the parent's next message; None once the channel is closed."""
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
