"""Which Ray a run uses: the one that is named, one that runs here, or one of its own.

    cluster.ray_address     an address, `auto` (there must be one), or `local` (one of our own)
    RAY_ADDRESS             the same, from the environment; a submitted job has it
    neither                 one that `ray start` or `aflow-tune cluster up` started here, or else
                            one of our own on loopback, which ends with the command

A token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token) is used wherever there is one.
Ray 2.60 does that by itself only for `auto`: with an explicit address it would send none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from aflow_tune.errors import BadInput, Fault
from aflow_tune.process_room import check_process_room
from aflow_tune.ray_folder import make_ray_base, ray_folders
from aflow_tune.sections import KeyPositions

_KEY = "cluster.ray_address"
_ANSWER_SECONDS = 5.0
_GREET_SECONDS = 20.0
"""As long as Ray itself asks: a head that is just starting is met."""
_SILENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
_WANTS_TOKEN = ("UNAUTHENTICATED", "PERMISSION_DENIED")
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


@dataclass(frozen=True)
class FoundRay:
    """A running Ray. `source` says in words how it was found."""

    address: str
    source: str


class Asking(Protocol):
    """What is read of a configuration (`AflowConfig`); `prepared` keeps the answer."""

    inline: bool
    engine: str
    mode: Any
    cluster: Any

    @property
    def positions(self) -> KeyPositions: ...
    @property
    def prepared(self) -> Any: ...


def find_ray(config: Asking) -> FoundRay | None:
    """The running Ray that this configuration uses; None: one of its own is to be started.

    The first answer is kept, so that all of one command goes by it.

    Raises:
        BadInput: an address that is none, or `auto` where no Ray runs.
    """
    if config.inline:
        return None
    kept = config.prepared
    if not kept.ray_looked_for:
        kept.ray, kept.ray_looked_for = _look(config), True
    found: FoundRay | None = kept.ray
    return found


def use_own(config: Asking) -> None:
    """Let a run of this configuration start a Ray of its own, whatever is named or runs here."""
    config.prepared.ray, config.prepared.ray_looked_for = None, True


def uses_ray(config: Asking, engine: str | None = None) -> bool:
    """Whether a run of this configuration is on a Ray at all.

    On the local engine only what trains on rollouts is; all else is one process.

    Args:
        engine: the one that was chosen. None: as the settings say; `auto` counts as Trinity's.
    """
    if config.inline or config.mode == "harvest":
        return False
    return (engine or config.engine) != "local" or config.mode not in ("train", "bench")


def check_address(config: Asking, engine: str | None = None) -> Iterator[Fault]:
    """What is wrong with the address of the Ray that a run would join, or what keeps one of its own
    from starting here. `engine`: see `uses_ray`."""
    if uses_ray(config, engine):
        try:
            if find_ray(config) is None:
                yield from check_own()
        except BadInput as error:
            yield from error.faults


def check_own() -> Iterator[Fault]:
    """What keeps a Ray of our own from starting here."""
    try:
        make_ray_base()
    except BadInput as error:
        yield from error.faults
    yield from check_process_room()


def _look(config: Asking) -> FoundRay | None:
    given = config.positions.given(_KEY)
    where, address = config.positions.where(_KEY), config.cluster.ray_address if given else ""
    if address in ("", "auto") and (of_environment := os.environ.get("RAY_ADDRESS")):
        where, address = "RAY_ADDRESS", of_environment
    if address == "local":
        return None
    if address not in ("", "auto"):
        _check(address, where)
        return FoundRay(address, where)
    running = running_here()
    if running is not None:
        return FoundRay(running, "it runs on this machine")
    if address == "auto":
        raise BadInput(
            "There is no Ray to use.",
            [
                Fault(
                    where,
                    "a Ray that runs on this machine",
                    "none",
                    "start one with `aflow-tune cluster up`, name its address, or leave the "
                    "setting out: a Ray for this run alone is then started",
                )
            ],
        )
    return None


def running_here() -> str | None:
    """The address of the Ray that this user started on this machine as a cluster, if it answers.

    Those that other commands started for themselves alone are not among them, nor what another
    user started: whoever runs code there could read what a run hands over.
    """
    from ray._private.utils import get_ray_address_file, read_ray_address

    for folder in ray_folders():
        address: str | None = None
        with contextlib.suppress(OSError):  # another user's, which may not be looked at
            if os.stat(get_ray_address_file(folder)).st_uid == os.getuid():
                address = read_ray_address(folder)
        if address and answers(address):
            return address
    return None


def use_token() -> bool:
    """Let this process and its children send the token that is there; False where none is.

    `RAY_AUTH_MODE` wins, as it does in Ray.
    """
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    return bool(maybe_enable_token_auth_if_token_available(warn_if_disabled=False))


def greet(found: FoundRay) -> None:
    """Use the token that is there, and see that this Ray, which is joined next, takes it.

    Ray itself would say only that it failed to connect, and where something else has the port, or
    nobody, it goes on trying for minutes.

    Raises:
        BadInput: it wants a token, and this process has none or another; or no Ray answers.
    """
    from ray._private.grpc_utils import init_grpc_channel

    use_token()
    deadline = time.monotonic() + _GREET_SECONDS
    while (told := _asked(found.address, init_grpc_channel)) in _SILENT:
        if time.monotonic() > deadline:
            text = f"no Ray answers there within {_GREET_SECONDS:g} s ({told})"
            raise refused_connection(found, ConnectionError(text))
        time.sleep(0.5)
    if told in _WANTS_TOKEN:
        raise refused_connection(found, PermissionError("InvalidAuthToken: none, or another one"))


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Joining Ray replaces signal handlers; after the block they are as before. Only the main
    thread may set them, and only there does Ray."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            for number, handler in handlers.items():
                signal.signal(number, handler)


def refused_connection(found: FoundRay, error: Exception) -> BadInput:
    """What to tell when a Ray that was found cannot be joined."""
    text = " ".join(str(error).split())
    expected, cure = f"a Ray at {found.address} ({found.source})", ""
    if "Failed to merge" in text:  # the message holds both environments, values and all
        expected = "a job whose own runtime_env leaves ours room"
        text = "the job that this command runs in has set what the run has to set"
        cure = (
            "take `py_modules`, `pip`, `worker_process_setup_hook` and what `runtime_env.env_vars` "
            "sets out of the job's runtime_env, or export RAY_OVERRIDE_JOB_RUNTIME_ENV=1"
        )
    elif "ersion mismatch" in text:
        expected = "the same versions of Ray and Python here and on the cluster"
        cure = "use an environment with the cluster's versions, or `aflow-tune submit`"
    elif "oken" in text or "nauthenticated" in text or "uthentication" in text:
        expected = f"a token that {found.address} takes"
        cure = (
            "copy the cluster's ~/.ray/auth_token here, or export RAY_AUTH_TOKEN=... (on the "
            "head node `ray get-auth-token` prints it); for a cluster without tokens "
            "RAY_AUTH_MODE=disabled"
        )
    else:
        cure = (
            "check that it runs (`ray status`), or start one with `aflow-tune cluster up`; "
            "`cluster.ray_address=local` starts one for this run alone"
        )
    return BadInput(
        "The Ray that was found cannot be used.",
        [Fault(found.source, expected, text[:600] or type(error).__name__, cure)],
    )


def _check(address: str, where: str) -> None:
    if address.startswith("ray://"):
        found, cure = "the address of a Ray Client server", "the address without `ray://`"
    elif address.startswith(("http://", "https://")):
        found = "the address of a dashboard"
        scheme, _, rest = address.partition("://")
        shown = f"{scheme}://{rest.rpartition('@')[2]}"  # without a password
        cure = f"`aflow-tune submit CONFIG --address {shown}` runs it there"
    else:
        host, colon, port = address.rpartition(":")
        if colon and host and port.isdigit() and "@" not in address:
            return
        shown = "something with an @, not shown since it may hold a key"
        found = shown if "@" in address else repr(address)
        cure = "HOST:6379, `auto`, or `local`"
    raise BadInput(
        "This is no address of a Ray that a run can join.",
        [Fault(where, "HOST:PORT of a Ray head node, `auto` or `local`", found, cure)],
    )


def answers(address: str) -> bool:
    """Whether Ray's own service answers there, and not whatever else has taken the port.

    It is asked without the token, which is not for whatever else that may be.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel

    with_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    told = _asked(address, init_grpc_channel if with_tls else grpc.insecure_channel)
    return told == "OK" or told in _WANTS_TOKEN


def _asked(address: str, open_channel: Callable[..., Any]) -> str:
    """The name of the gRPC status with which the head answers whether it is alive."""
    import grpc

    with open_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary(_ALIVE)  # no serialisers: the empty request is empty bytes
        try:
            ask(b"", timeout=_ANSWER_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"
