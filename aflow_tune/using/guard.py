"""Who may talk to our server, and what every answer of it says to a browser.

A server on loopback can still be reached by every web page that is open on the same machine: a
page can send requests to 127.0.0.1, and a name of its own that resolves there (DNS rebinding)
makes them look like its own. So a request has to carry the address that we listen on as its
`Host`, must not come from another origin, and what starts work has to be JSON, which a foreign
page cannot send without being asked first. Off loopback a token is asked for instead of the
name, because nobody can know what names a machine has.

Not covered: encryption (a proxy's matter), and other users of the same machine, who share its
loopback: give a token there too.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aflow_tune.errors import BadInput, Fault

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MIN_TOKEN_CHARS = 16
OPEN_PATHS = ("/", "/page.css", "/page.js", "/health")
"""What needs no token: the page, which asks for it, and whether the server lives."""

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Guard:
    """An ASGI application in front of `app`, which sees only what may come in.

    `hosts` are the values of `Host` that are let in; None lets in all, which needs a `token`.
    """

    app: App
    hosts: frozenset[str] | None
    token: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with 401 or 403."""
        if scope["type"] != "http":
            return  # no websockets, and nothing to start or stop

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                named = {name for name, _ in message.get("headers", ())}
                own = [
                    (name.encode(), value.encode())
                    for name, value in _HEADERS.items()
                    if name.encode() not in named
                ]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        refused = self._refused(scope)
        if refused is None:
            await self.app(scope, receive, with_headers)
            return
        status, reason = refused
        body = json.dumps({"error": reason}).encode()
        head = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await with_headers({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason of a request that is not let in."""
        headers = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
        of_name: dict[str, list[str]] = {}
        for name, value in headers:
            of_name.setdefault(name.lower(), []).append(value.decode("latin-1"))
        named = of_name.get("host", [])
        host = named[0].strip().lower() if len(named) == 1 else ""
        if not host or (self.hosts is not None and host not in self.hosts):
            return 403, "this server answers to its own address only"
        for origin in of_name.get("origin", []):
            if urlsplit(origin).netloc.lower() != host:
                return 403, "requests of other web pages are not answered"
        if any(site not in ("same-origin", "none") for site in of_name.get("sec-fetch-site", [])):
            return 403, "requests of other web pages are not answered"
        if self.token is not None and scope["path"] not in OPEN_PATHS:
            given = of_name.get("authorization", [""])[0]
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                return 401, "the token is missing or wrong"
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def own_hosts(host: str, port: int) -> frozenset[str] | None:
    """What `Host` may say to a server on `host`; None off loopback, where it may say anything."""
    if not is_loopback(host):
        return None
    own = f"[{host}]" if ":" in host else host
    names = {own.lower(), "127.0.0.1", "localhost", "[::1]"}
    with_port = {f"{name}:{port}" for name in names}
    return frozenset(with_port | names if port == 80 else with_port)


def token_for(host: str, variable: str | None) -> str | None:
    """The token from the environment variable that was named.

    Raises:
        BadInput: off loopback without one, or the variable does not hold one.
    """
    if variable is None:
        if is_loopback(host):
            return None
        raise BadInput(
            "The server would be open to everybody who reaches this machine.",
            [
                Fault(
                    f"--host {host}",
                    "loopback, or a token that callers have to know",
                    "another address without --token-env",
                    "leave --host out, or put a token into a variable and name it: "
                    "--token-env MY_TOKEN",
                )
            ],
        )
    token = os.environ.get(variable, "")
    if len(token) < MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable():
        found = "not set" if not token else f"{len(token)} characters"
        raise BadInput(
            "The server's token cannot be used.",
            [
                Fault(
                    f"--token-env {variable}",
                    f"{MIN_TOKEN_CHARS} or more plain characters in that variable",
                    found,
                    f"export {variable}=$(openssl rand -hex 24)",
                )
            ],
        )
    return token
