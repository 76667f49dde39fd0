"""The models and the budget of a run, as its workers need them: what the configuration says,
small enough to travel with every task, and the clients and ledger that a process makes of it.

A workflow function asks for the models beside the one it was given by role:

    from aflow_tune import client_for
    verdict = await client_for("judge").complete([{"role": "user", "content": answer}])

Within a run the configuration's `models:` answer; in a unit test `use_clients` does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace

from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.account import Account
from aflow_tune.models.budget import Budget
from aflow_tune.models.ledger import Ledger
from aflow_tune.models.prices import price_of
from aflow_tune.models.settings import make_client
from aflow_tune.models.types import ModelClient
from aflow_tune.sections import BudgetSection, ModelSettings
from aflow_tune.trace import POLICY

_clients: ContextVar[Mapping[str, ModelClient] | None] = ContextVar(
    "aflow_tune_clients", default=None
)


@dataclass(frozen=True)
class Books:
    """What one run may spend, where it is counted, and the models that it names.

    Settings hold names of environment variables, never keys. Wall-clock time is not limited
    here: the run itself stops between two steps, so that a step under way is not lost.
    """

    account: str
    """File of the run's account, shared by its processes."""
    limits: BudgetSection = field(default_factory=BudgetSection)
    models: Mapping[str, ModelSettings] = field(default_factory=dict)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Keep the books of this context here, and let `client_for` find its models."""
        ledger, clients = _open(self)
        with ledger.activate(), use_clients(clients):
            yield

    def reached(self) -> str | None:
        """The limit that some process of the run met first, or None."""
        return Account(self.account).reached() if self.limited else None

    def start(self) -> None:
        """Forget what a killed command had under way, and what this process knows of an earlier
        run with the same account, whose file may be gone. For the start of a run."""
        with _lock:
            for key in [key for key in _made if key[0] == self.account]:
                del _made[key]
        if self.limited:
            Account(self.account).release_all()

    @property
    def limited(self) -> bool:
        """Whether there is a limit on money, tokens or calls."""
        return any(
            limit is not None for limit in (self.limits.usd, self.limits.tokens, self.limits.calls)
        )


@contextlib.contextmanager
def use_clients(clients: Mapping[str, ModelClient]) -> Iterator[None]:
    """Let `client_for` answer from `clients` in this context and in everything it starts."""
    token = _clients.set(clients)
    try:
        yield
    finally:
        # A run that was given up may be closed by the collector, in another context.
        with contextlib.suppress(ValueError):
            _clients.reset(token)


def client_for(role: str) -> ModelClient:
    """The model that the configuration names `role` under `models:`.

    Raises:
        BadInput: there is none of that name here.
    """
    clients = _clients.get() or {}
    if role not in clients:
        raise BadInput(
            "A workflow asked for a model that is not configured.",
            [
                Fault(
                    f"models.{role}",
                    f"a model under the role {role!r}",
                    f"models for: {', '.join(clients) or 'no role at all'}",
                    f"add `models: {{{role}: {{model: NAME, base_url: ADDRESS}}}}`",
                )
            ],
        )
    return clients[role]


_lock = threading.Lock()
_made: dict[tuple[str, str], tuple[Ledger, Mapping[str, ModelClient]]] = {}
"""By the account and by what the books say. Clients share their limits on concurrency between
all runs of a process, and the ledger sums over them: so a process has one of each."""


def _open(books: Books) -> tuple[Ledger, Mapping[str, ModelClient]]:
    models = {name: asdict(settings) for name, settings in books.models.items()}
    key = books.account, repr((asdict(books.limits), models))
    with _lock:
        if key not in _made:
            _made[key] = _make(books)
        return _made[key]


def _make(books: Books) -> tuple[Ledger, Mapping[str, ModelClient]]:
    prices = {}
    policy = books.models.get(POLICY)
    if policy is not None:
        price = price_of(policy.provider, policy.base_url, policy.model or "", policy.prices)
        if price is not None:
            prices[POLICY] = price
    budget = None
    if books.limited:
        budget = Budget(replace(books.limits, wall_seconds=None), Account(books.account))
    clients = {
        name: make_client(settings, settings.role or name)
        for name, settings in books.models.items()
        if settings.model is not None and name != POLICY
    }
    return Ledger(budget=budget, prices=prices), clients
