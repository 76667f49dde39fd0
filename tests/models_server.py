"""A local stand-in for what lists models: OpenAI's, Anthropic's and the hub's protocol, by GET.

A key is good if it is `GOOD`. The hub knows what `HUB` holds.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD = "sk-good-0123456789"
LISTED = ("gpt-small", "claude-small")
HUB: dict[str, dict[str, Any]] = {
    "/api/models/org/there": {
        "id": "org/there",
        "siblings": [{"rfilename": "model.safetensors", "size": 2_000_001_000}],
        "safetensors": {"parameters": {"BF16": 1_000_000_000}, "total": 1_000_000_000},
    },
    "/api/datasets/org/rows": {"id": "org/rows", "siblings": [{"rfilename": "a", "size": 5000}]},
    # As the hub does: everybody may read about it, and only the files are guarded.
    "/api/models/org/gated": {"id": "org/gated", "gated": "manual", "siblings": []},
}


class ModelsServer:
    """Context manager. `url` is its address, `seen` the (path, key) of each request. `status`: of
    every answer, whatever the key; `open_list`: whether models are listed for anybody."""

    def __init__(
        self, status: int | None = None, hang: bool = False, open_list: bool = False
    ) -> None:
        self.open_list = open_list
        self.seen: list[tuple[str, str | None]] = []
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = self.headers
                key = headers.get("x-api-key") or headers.get("authorization", "")[7:] or None
                outer.seen.append((self.path, key))
                if hang:
                    outer.over.wait(30)
                answer, extra = outer._answer(self.path, key, status)
                body = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                for name, value in extra.items():
                    self.send_header(name, value)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, path: str, key: str | None, status: int | None) -> Any:
        if path.startswith("/api/"):
            name = path.partition("?")[0]
            if name in HUB:
                return (200, HUB[name]), {}
            code = "GatedRepo" if "gated" in name else "RepoNotFound"
            return (403 if "gated" in name else 404, {"error": code}), {"X-Error-Code": code}
        if status is not None:
            return (status, {"error": {"message": f"as told, with {key}"}}), {}
        if key != GOOD and not self.open_list:
            return (401, {"error": {"message": f"Incorrect API key provided: {key}"}}), {}
        return (200, {"data": [{"id": name} for name in LISTED], "has_more": False}), {}

    def __enter__(self) -> ModelsServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
