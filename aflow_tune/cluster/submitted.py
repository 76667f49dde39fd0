"""Inside a submitted job: what the client sent, and its keys.

The shipment of the user's code holds a payload beside it: the configuration as it was read, and
the functions. The job asks for keys by printing its public key (`sealed.py`).
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aflow_tune.cluster.sealed import Receiver
from aflow_tune.errors import RunFailed
from aflow_tune.shipping.arrival import arrive

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

PAYLOAD, NAMES = "job.pickle", "keys.txt"
"""Files beside the code: the run, and the names of its keys."""
WANTED = "aflow-tune: send the keys sealed for "
ENDED = "aflow-tune: ended with exit code "
PYTHON_VARIABLE = "AFLOW_TUNE_PYTHON"
"""Environment variable of a node: the interpreter of jobs, where `python` is another one."""
_KEYS_SECONDS = 120.0

Function = Callable[..., Any]


@dataclass
class Payload:
    """A run as it travels."""

    config: AflowConfig
    functions: tuple[Function | None, Function | None]

    def to_bytes(self) -> bytes:
        """For functions that `ship.trace_run` has taken."""
        from ray import cloudpickle

        content: bytes = cloudpickle.dumps(self)
        return content


def package_of(public: str) -> tuple[str, str]:
    """Protocol and name under which the keys for a public key are uploaded."""
    return "gcs", f"_aflow_tune_keys_{public[:32]}.zip"


def open_payload() -> Payload:
    """What the client sent, with its keys put into this process's environment.

    Raises:
        RunFailed: this is no submitted job, or the keys did not come.
    """
    arrival = arrive()
    if arrival is None or arrival.base is None:
        raise RunFailed("this is no job that `aflow-tune submit` sent")
    # Keys first: the user's modules may read them when they are imported, which unpickling does.
    names = (arrival.base.parent / NAMES).read_text(encoding="utf-8").split()
    if names:
        os.environ.update(receive_keys())
    payload: Payload = pickle.loads((arrival.base.parent / PAYLOAD).read_bytes())
    return payload


def receive_keys() -> dict[str, str]:
    """Ask the client for keys and wait for them; what came is deleted from the cluster."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # made in Cython

    receiver = Receiver()
    protocol, name = package_of(receiver.public)
    uri = f"{protocol}://{name}".encode()
    client = GcsClient(address=os.environ["RAY_ADDRESS"])
    print(f"{WANTED}{receiver.public}", flush=True)
    deadline = time.monotonic() + _KEYS_SECONDS
    while time.monotonic() < deadline:
        sealed = client.internal_kv_get(uri, None)
        if sealed:
            client.internal_kv_del(uri, False, None)
            return receiver.open(sealed)
        time.sleep(0.2)
    raise RunFailed("the client did not send the keys; was it ended right after the submission?")
