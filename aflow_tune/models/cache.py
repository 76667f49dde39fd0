"""A cache of answers, for evaluation: the same question to the same model is asked once.

An entry is a file named by a digest of who answers, the question with its arguments, the sample of
the evaluation, and how often the question was asked before in that sample (an ensemble must get
different answers). It holds an answer, never a request or key. Models whose answers change under
one name are not cached: those being tuned, AgentScope's, and servers of this machine, unless
`weights` says which weights answer.
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

_FORMAT = 1  # part of every key: raised when entries change their meaning


class ResponseCache:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @contextlib.contextmanager
    def activate(self, sample: int | str = 0, weights: str = "") -> Iterator[CacheUse]:
        """Let the calls of this context use this cache. Each `sample` of an evaluation has answers
        of its own; `weights`: a digest of what local servers serve."""
        with within(_current, CacheUse(self.folder, str(sample), weights)) as use:
            yield use


@dataclass
class CacheUse:
    """The cache within one sample, which knows what was asked there before."""

    folder: Path
    sample: str
    weights: str
    _asked: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def entry(self, endpoint: Mapping[str, Any], ask: Ask) -> Path | None:
        """The file of the answer to `ask`, named by its key; None where it must not be cached."""
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
    """The answer; None where there is none that can be trusted."""
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
    """Keep the answer. A full or read-only disk costs the entry, not the evaluation."""
    body = {name: getattr(reply, name) for name in ("text", "model", "finish_reason")}
    body["usage"] = None if reply.usage is None else vars(reply.usage)
    body["tool_calls"] = [dict(call) for call in reply.tool_calls]
    text = json.dumps({"key": path.stem, "reply": body})
    if scrub(text) == text:  # else a server repeated a key in its answer
        with contextlib.suppress(OSError):
            write_whole(path, text)


_current: ContextVar[CacheUse | None] = ContextVar("aflow_tune_response_cache", default=None)


def current_cache() -> CacheUse | None:
    return _current.get()


def _is_local(base_url: str | None) -> bool:
    """Whether an address is this machine's, where the same name may serve other weights."""
    host = urllib.parse.urlsplit(base_url or "").hostname or ""
    return host.endswith("localhost") or host.startswith("127.") or host in ("::1", "::", "0.0.0.0")
