"""A cache of model replies, for evaluation: the same request to the same model is sent once.

An entry is a file named by a digest of the endpoint, the request, the sample of the evaluation, and
how often the request was made before in that sample (an ensemble must get different answers). It
holds a reply, never a request or key. Not cached are models whose answers may change under one
name: the tuned model, AgentScope's models, AFlow-style llms, and servers on this machine unless
`weights` identifies their weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.context import within
from aflow_tune.files import write_whole
from aflow_tune.models.redaction import scrub
from aflow_tune.models.types import Ask, Reply, Usage

_FORMAT = 1  # part of every key; increase it when the meaning of entries changes


class ResponseCache:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @contextlib.contextmanager
    def activate(self, sample: int | str = 0, weights: str = "") -> Iterator[CacheUse]:
        """Let the calls of this context use this cache. Each `sample` of an evaluation has its own
        entries; `weights`: a digest of the weights of local servers."""
        with within(_current, CacheUse(self.folder, str(sample), weights)) as use:
            yield use


@dataclass
class CacheUse:
    """The cache within one sample; counts how often each request was made there."""

    folder: Path
    sample: str
    weights: str
    _asked: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def entry(self, endpoint: Mapping[str, Any], ask: Ask) -> Path | None:
        """The file for the answer to `ask`; None if it must not be cached."""
        if not self.weights and _is_local(endpoint.get("base_url")):
            return None
        who = json.dumps(dict(endpoint), sort_keys=True, default=repr)
        question = "\n".join([str(_FORMAT), who, self.weights, self.sample, ask.identity()])
        with self._lock:
            before = self._asked[question]
            self._asked[question] += 1
        digest = hashlib.sha256(f"{question}\n{before}".encode(errors="replace")).hexdigest()
        return self.folder / digest[:2] / f"{digest}.json"


def read_entry(path: Path) -> Reply | None:
    """The cached reply; None if it is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
        body = content["reply"]
        if content["key"] != path.stem:
            return None
        usage = None if body["usage"] is None else Usage(**body["usage"])
        return Reply(**{**body, "usage": usage, "tool_calls": tuple(body["tool_calls"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_entry(path: Path, reply: Reply) -> None:
    """Store the reply. Errors of the disk are ignored: then there is no entry."""
    body = {name: getattr(reply, name) for name in ("text", "model", "finish_reason")}
    body["usage"] = None if reply.usage is None else vars(reply.usage)
    body["tool_calls"] = [dict(call) for call in reply.tool_calls]
    text = json.dumps({"key": path.stem, "reply": body})
    if scrub(text) == text:  # a server may repeat a key in its answer
        with contextlib.suppress(OSError):
            write_whole(path, text)


_current: ContextVar[CacheUse | None] = ContextVar("aflow_tune_response_cache", default=None)


def current_cache() -> CacheUse | None:
    return _current.get()


def _is_local(base_url: str | None) -> bool:
    """Whether an address is on this machine, where one name may serve different weights."""
    host = urllib.parse.urlsplit(base_url or "").hostname or ""
    return host.endswith("localhost") or host.startswith("127.") or host in ("::1", "::", "0.0.0.0")
