"""A server that answers to Ray's question whether a head is alive, as the head's own one does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


class _Service(grpc.GenericRpcHandler):
    def __init__(self, method: str, wants_token: bool) -> None:
        self.method, self.wants_token = method, wants_token
        self.metadata: list[Any] = []

    def service(self, handler_call_details: Any) -> Any:
        self.metadata += handler_call_details.invocation_metadata
        if handler_call_details.method != self.method:
            return None  # the caller is told that there is no such method
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: Any) -> bytes:
        if self.wants_token:
            context.abort(
                grpc.StatusCode.UNAUTHENTICATED, "Invalid or missing authentication token"
            )
        return b""


@contextlib.contextmanager
def gcs(method: str = ALIVE, wants_token: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the metadata of all requests so far."""
    service = _Service(method, wants_token)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", service.metadata
    finally:
        server.stop(0).wait()
