"""Which Ray a run uses: the one that is named, one that runs here, or one of its own.

    cluster.ray_address     an address, `local` (start one), or `auto` (there must be one)
    RAY_ADDRESS             the same, if the setting is `auto` or missing; submitted jobs have it
    neither                 one that `ray start` or `aflow-tune cluster up` started here, else one
                            that we start on loopback and that ends with the command

A token (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token) is used if there is one. Ray 2.60
does that by itself only for `auto`.

Also the temporary folder of a Ray that we start. Ray unpacks code into world-writable folders, so
ours are below a folder with mode 0700. Run as a program, this module makes that folder and prints
the argument for `ray start --temp-dir`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault

_KEY = "cluster.ray_address"
_ANSWER_SECONDS = 5.0
_GREET_SECONDS = 20.0  # about as long as Ray retries to reach a head
_SILENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
_WANTS_TOKEN = ("UNAUTHENTICATED", "PERMISSION_DENIED")


@dataclass(frozen=True)
class FoundRay:
    """A running Ray, and how it was found (for messages)."""

    address: str
    source: str


Config = Any  # an `AflowConfig`; this module may not import `config`


def find_ray(config: Config) -> FoundRay | None:
    """The running Ray that this configuration uses; None: the run starts its own. The first answer
    is cached. BadInput: a malformed address, or `auto` while no Ray runs here."""
    if config.inline:
        return None
    if not config.prepared.ray_looked_for:
        given = config.positions.given(_KEY)
        where, address = config.positions.where(_KEY), config.cluster.ray_address if given else ""
        config.prepared.ray, config.prepared.ray_looked_for = look_for(address, where), True
    found: FoundRay | None = config.prepared.ray
    return found


def use_own(config: Config) -> None:
    """Make a run of this configuration start its own Ray, whatever is named or runs here."""
    config.prepared.ray, config.prepared.ray_looked_for = None, True


def uses_ray(config: Config, engine: str | None = None) -> bool:
    """Whether a run of this configuration uses Ray. On the local engine only modes that train on
    rollouts do. `engine`: the chosen one; None: `config.engine`, of which `auto` counts as
    Trinity's."""
    if config.inline or config.mode == "harvest":
        return False
    return (engine or config.engine) != "local" or config.mode not in ("train", "bench", "pairs")


def check_address(config: Config, engine: str | None = None) -> Iterator[Fault]:
    """Faults of the address of the Ray that a run would join, or of the folder of its own Ray,
    which this makes. `engine`: see `uses_ray`."""
    try:
        if uses_ray(config, engine) and find_ray(config) is None:
            make_ray_base()
    except BadInput as error:
        yield from error.faults


def look_for(address: str = "", where: str = "") -> FoundRay | None:
    """The Ray to join for `address`: HOST:PORT, `local`, `auto` or '' (RAY_ADDRESS wins over these
    two); None: none. `where`: the place of the setting, for messages. BadInput: as `find_ray`."""
    if address in ("", "auto") and (of_environment := os.environ.get("RAY_ADDRESS", "").strip()):
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
        cure = "`aflow-tune cluster up`, or name its address; without the setting a run starts one"
        expected = "a Ray that runs on this machine"
        raise BadInput.of("There is no Ray to use.", where, expected, "none", cure)
    return None


def running_here() -> str | None:
    """The address of the cluster that this user started on this machine, if it answers. Clusters of
    other users are ignored: they could read what a run sends."""
    from ray._private.utils import get_ray_address_file, read_ray_address

    # Ray's own folder, then that of `aflow-tune cluster up`.
    for folder in (os.path.dirname(get_ray_address_file(None)), str(ray_base() / "ray")):
        address: str | None = None
        with contextlib.suppress(OSError):  # another user's, not readable
            if os.stat(get_ray_address_file(folder)).st_uid == os.getuid():
                address = read_ray_address(folder)
        if address and answers(address):
            return address
    return None


def use_token() -> bool:
    """Make this process and its children send the token if there is one; returns whether they do.
    RAY_AUTH_MODE, if set, decides instead."""
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    return bool(maybe_enable_token_auth_if_token_available(warn_if_disabled=False))


def greet(found: FoundRay) -> None:
    """Check, before it is joined, that this Ray answers and accepts our token: Ray itself would
    retry for minutes. BadInput: it wants another token, or does not answer in 20 s."""
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
    """Restore the signal handlers after the block: joining Ray replaces them. Does nothing outside
    of the main thread, where Ray sets none."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            for number, handler in handlers.items():
                signal.signal(number, handler)


_REFUSED = (  # pattern of Ray's message, what was expected, what to do
    (
        "Failed to merge",
        "a job whose own runtime_env leaves ours room",
        "take what a run sets (`py_modules`, `pip`, the hook, `env_vars`) out of the job's "
        "runtime_env, or export RAY_OVERRIDE_JOB_RUNTIME_ENV=1",
    ),
    (
        "oken|nauthenticated|uthentication",
        "a token that the cluster takes",
        "copy the cluster's ~/.ray/auth_token here, or export RAY_AUTH_TOKEN=...; for a cluster "
        "without tokens RAY_AUTH_MODE=disabled",
    ),
    (
        "",
        "a running Ray",
        "check that it runs (`ray status`), or start one with `aflow-tune cluster up`; "
        "`cluster.ray_address=local` starts one for this run alone",
    ),
)


def refused_connection(found: FoundRay, error: Exception) -> BadInput:
    text = " ".join(str(error).split())
    said, expected, cure = next(row for row in _REFUSED if re.search(row[0], text))
    if said == "Failed to merge":  # the message shows both environments, secrets included
        text = "the job that this command runs in has set what the run has to set"
    expected, title = f"{expected} at {found.address}", "The Ray that was found cannot be used."
    return BadInput.of(title, found.source, expected, text[:600] or type(error).__name__, cure)


def _check(address: str, where: str) -> None:
    host, _, port = address.rpartition(":")
    if re.fullmatch(r"[^@/]+", host) and port.isdigit():
        return
    found, cure = repr(address.rpartition("@")[2]), "HOST:6379, `auto`, or `local`"
    if address.startswith("http"):
        cure = f"{cure}; to a dashboard: `aflow-tune submit CONFIG --address URL`"
    title = "This is no address of a Ray that a run can join."  # `found` leaves out a password
    raise BadInput.of(title, where, "HOST:PORT of a Ray head node, `auto` or `local`", found, cure)


def answers(address: str) -> bool:
    """Whether a Ray head answers at `address`. Asks without the token: another program may have
    taken the port."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel

    with_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    told = _asked(address, init_grpc_channel if with_tls else grpc.insecure_channel)
    return told == "OK" or told in _WANTS_TOKEN


def _asked(address: str, open_channel: Callable[..., Any]) -> str:
    """The name of the gRPC status with which the head answers CheckAlive."""
    import grpc

    with open_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        # No serialisers: the empty request is empty bytes.
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            ask(b"", timeout=_ANSWER_SECONDS)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/dash_TaskEventsHead"
_PATH_BYTES = 107
"""The longest socket path that Ray opens below RAY_TMPDIR, and the system's limit in bytes."""
_PLAIN = re.compile(r"[\w/.,+=@~-]+", re.ASCII)
_UNMAPPED = 65534  # the owner shown for users that a user namespace does not map


def ray_base() -> Path:
    """The RAY_TMPDIR of a Ray that we start; it need not exist yet. $RAY_TMPDIR, $TMPDIR or /tmp if
    no other user may enter it; otherwise `ray-UID` in there; `/tmp/ray-UID` if that path is too
    long for sockets or has characters that Ray does not accept."""
    base = Path(os.path.abspath(Path(_told()[1]).expanduser()))
    own = f"ray-{os.getuid()}"
    closed = not os.path.exists(base) or open_to_others(base) is None
    chosen = base if closed else base / own
    fits = len(os.fsencode(chosen)) + len(_SOCKET) <= _PATH_BYTES and _PLAIN.fullmatch(str(chosen))
    return chosen if fits else Path("/tmp", own)


def make_ray_base() -> Path:
    """Make the folder of `ray_base` if it is missing, and return it. BadInput: it cannot be made or
    written to, or other users could change its content."""
    base = ray_base()
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(base)
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if ours and open_to_others(base):  # made by a shell, or by an earlier Ray
            base.chmod(0o700)
        problem = open_to_others(base)
        if problem is None and not os.access(base, os.W_OK | os.X_OK):
            problem = f"nothing can be written into {base}"
    except OSError as error:
        problem = f"{base}: {error.strerror}"
    if problem is None:
        return base
    where = "=".join(filter(None, _told()))
    expected = "a folder for Ray's files that no other user can change"
    cure = "export RAY_TMPDIR=FOLDER, a short path of a folder of yours with mode 0700"
    raise BadInput.of("Ray has no place for its files.", where, expected, problem, cure)


def open_to_others(folder: str | Path) -> str | None:
    """How another user of this machine could change the content of a folder; None: in no way. Some
    folder of the path must keep others out, and nobody else may be able to replace one above it."""
    folder, trusted = Path(os.path.abspath(folder)), {0, os.getuid()}
    with contextlib.suppress(OSError), open("/proc/self/uid_map", encoding="ascii") as file:
        if file.read().split() != ["0", "0", str(2**32 - 1)]:
            trusted.add(_UNMAPPED)
    for path in (*reversed(folder.parents), folder):
        found = os.lstat(path)
        if found.st_uid not in trusted:
            return f"{path} belongs to another user"
        if stat.S_ISLNK(found.st_mode):
            return open_to_others(path.parent / os.readlink(path) / folder.relative_to(path))
        if not found.st_mode & 0o011:
            return None
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return f"other users may write into {path}"
    return f"other users may enter {folder}"


def _told() -> tuple[str, str]:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if told := os.environ.get(name):
            return name, told
    return "", "/tmp"


if __name__ == "__main__":
    try:
        print(make_ray_base() / "ray")
    except BadInput as refused:
        sys.exit(str(refused))
