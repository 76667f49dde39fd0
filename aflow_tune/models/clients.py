"""Makes clients from settings, and offers a run's models by role.

    from aflow_tune import client_for
    verdict = await client_for("judge").complete([{"role": "user", "content": answer}])

Within a run `client_for` reads `models:` of its YAML; a unit test sets them by `use_clients`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from aflow_tune.context import within
from aflow_tune.errors import BadInput
from aflow_tune.models.prices import price_of
from aflow_tune.models.spend import Spend
from aflow_tune.models.types import ModelClient
from aflow_tune.sections import BudgetSection, ModelSettings
from aflow_tune.trace import POLICY

if TYPE_CHECKING:
    from aflow_tune.models.http_client import HttpClient

_clients: ContextVar[Mapping[str, ModelClient]] = ContextVar("aflow_tune_clients")


def make_client(settings: ModelSettings, role: str = "executor") -> HttpClient:
    """The client that the settings describe. Raises BadInput: they are wrong, or a key missing."""
    from aflow_tune.models.http_client import AnthropicClient, HttpClient

    kind = AnthropicClient if settings.provider == "anthropic" else HttpClient
    return kind(settings, role)


@contextlib.contextmanager
def use_clients(clients: Mapping[str, ModelClient]) -> Iterator[None]:
    """Let `client_for` look in `clients`, in this context and everything it starts."""
    with within(_clients, clients):
        yield


def client_for(role: str) -> ModelClient:
    """The model that `models:` configures under `role`. Raises BadInput: there is none."""
    clients = _clients.get({})
    if role not in clients:
        title, where = "A workflow asked for a model that is not configured.", f"models.{role}"
        found = f"models for: {', '.join(clients) or 'no role at all'}"
        fix = f"add `models: {{{role}: {{model: NAME, base_url: ADDRESS}}}}`"
        raise BadInput.of(title, where, f"a model under the role {role!r}", found, fix)
    return clients[role]


@dataclass(frozen=True)
class RunSpend:
    """The budget of one run, the file that counts its spend, and its models. Sent with every task;
    holds names of environment variables, never keys."""

    account: str
    """The file of the run's `Spend`, shared by its processes."""
    limits: BudgetSection = field(default_factory=BudgetSection)
    models: Mapping[str, ModelSettings] = field(default_factory=dict)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Count this context's calls on the run, and let `client_for` find its models."""
        spend, clients = self._shared()
        with spend.activate(), use_clients(clients):
            yield

    def reached(self) -> str | None:
        """The first limit that a process of the run reached, or None."""
        with contextlib.closing(Spend(self.limits, self.account)) as spend:
            return spend.reached() if spend.limited else None

    def start(self) -> None:
        """At the start of a run: drop the reservations of a killed command, and the clients that
        this process made for an earlier run with the same file."""
        with _lock:
            for key in [key for key in _made if key[0] == self.account]:
                del _made[key]
        with contextlib.closing(Spend(self.limits, self.account)) as spend:
            if spend.limited:
                spend.forget_calls()

    def _shared(self) -> tuple[Spend, Mapping[str, ModelClient]]:
        models = {name: asdict(settings) for name, settings in self.models.items()}
        key = self.account, repr((asdict(self.limits), models))
        with _lock:
            if key not in _made:
                tuned = self.models.get(POLICY, ModelSettings())
                price = price_of(tuned.provider, tuned.base_url, tuned.model or "", tuned.prices)
                clients = {
                    name: make_client(settings, settings.role or name)
                    for name, settings in self.models.items()
                    if settings.model is not None and name != POLICY
                }
                prices = {} if price is None else {POLICY: price}
                _made[key] = Spend(self.limits, self.account, prices), clients
            return _made[key]


_lock = threading.Lock()
_made: dict[tuple[str, str], tuple[Spend, Mapping[str, ModelClient]]] = {}
"""By account and settings: all rollouts of a process share the clients' concurrency limits."""
