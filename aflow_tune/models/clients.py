"""Clients: what all of ours share, the scripted one, and the models that a run offers by role.

    from aflow_tune import client_for
    verdict = await client_for("judge").complete([{"role": "user", "content": answer}])

Within a run the `models:` of its YAML answer; in a unit test `use_clients` does. Everything that
counts or limits a call happens in `BaseClient`; a subclass says how one question is answered.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aflow_tune.context import within
from aflow_tune.errors import BadInput
from aflow_tune.models.cache import current_cache, read_entry, write_entry
from aflow_tune.models.prices import Price, price_of
from aflow_tune.models.spend import Call, Spend, current_spend
from aflow_tune.models.types import Ask, Message, ModelClient, ModelError, ModelFailure, Reply
from aflow_tune.sections import BudgetSection, ModelSettings
from aflow_tune.trace import POLICY

if TYPE_CHECKING:
    from aflow_tune.models.http_client import HttpClient


class BaseClient:
    """A `ModelClient` whose calls are counted, under `role`. `price` None: that of the role, if the
    run has one; else unknown."""

    def __init__(self, role: str, model: str, price: Price | None = None) -> None:
        self.role, self.model, self.price = role, model, price

    async def complete(self, messages: Sequence[Message], **options: Any) -> Reply:
        """One answer; arguments as of `types.ModelClient`. Raises as that, and BadInput: the
        messages are malformed, this client cannot pass an argument on, or the price is not known
        where the budget limits money."""
        ask = self._with_defaults(Ask(messages=messages, **options))
        ask.check()
        most = ask.most_prompt_tokens, self._most_tokens(ask)
        call = Call(current_spend(), self.role, self.model, self.price, *most)
        cache, endpoint = current_cache(), self._endpoint()
        entry = None if cache is None or endpoint is None else cache.entry(endpoint, ask)
        if entry is not None and (cached := read_entry(entry)) is not None:
            call.answered_from_cache(cached.usage)
            return replace(cached, cost=call.cost, seconds=0.0, from_cache=True)
        with call.noted():
            reply = await self._answer(ask, call)
        cost = None if call.usage is None and call.price is None else call.cost
        reply = replace(reply, usage=call.usage, cost=cost, seconds=call.seconds)
        if entry is not None:
            write_entry(entry, reply)
        return reply

    def _with_defaults(self, ask: Ask) -> Ask:
        """The question with what the client's configuration says where it says nothing."""
        return ask

    def _endpoint(self) -> Mapping[str, Any] | None:
        """What answers, for the cache's key. None: its answers cannot be cached."""
        return None

    def _most_tokens(self, ask: Ask) -> int | None:
        """The most tokens of the answer; None where there is no bound."""
        return ask.max_tokens

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        """Ask the model inside of `async with call`, and settle that as soon as a reply is there;
        usage, cost and seconds of the reply are filled in by the caller."""
        raise NotImplementedError


class ScriptedModel(BaseClient):
    """A `ModelClient` that answers from a list, in order, or from a function of the messages.

    `replies`: texts (which have no usage), whole replies and errors to raise; or a function, plain
    or async, of the messages. `asked` holds every question, in the order in which they came.
    """

    def __init__(
        self,
        replies: Sequence[str | Reply | BaseException] | Callable[[Sequence[Message]], Any],
        *,
        role: str = "policy",
        model: str = "scripted",
        price: Price | None = None,
    ) -> None:
        super().__init__(role, model, price)
        self.asked: list[Ask] = []
        self._replies = replies if callable(replies) else list(replies)
        self._lock = threading.Lock()

    async def _answer(self, ask: Ask, call: Call) -> Reply:
        async with call:
            with self._lock:
                number = len(self.asked)
                self.asked.append(ask)
            if callable(self._replies):
                said: Any = self._replies(ask.messages)
                if inspect.isawaitable(said):
                    said = await said
            elif number < len(self._replies):
                said = self._replies[number]
            else:
                text = f"the script has {len(self._replies)} replies, this is call {number + 1}"
                raise ModelError(ModelFailure.REFUSED, text)
            if isinstance(said, BaseException):
                raise said
            reply = said if isinstance(said, Reply) else Reply(text=str(said), model=self.model)
            call.settle(reply.usage)
            return reply


_clients: ContextVar[Mapping[str, ModelClient]] = ContextVar("aflow_tune_clients")


def make_client(settings: ModelSettings, role: str = "executor") -> HttpClient:
    """The client that the settings describe. Raises BadInput: the settings are wrong, or the key is
    not in the environment."""
    from aflow_tune.models.http_client import AnthropicClient, OpenAIClient

    kind = AnthropicClient if settings.provider == "anthropic" else OpenAIClient
    return kind(settings, role)


@contextlib.contextmanager
def use_clients(clients: Mapping[str, ModelClient]) -> Iterator[None]:
    """Let `client_for` answer from `clients` in this context and in everything it starts."""
    with within(_clients, clients):
        yield


def client_for(role: str) -> ModelClient:
    """The model that the configuration names `role` under `models:`. Raises BadInput: there is none
    of that name here."""
    clients = _clients.get({})
    if role not in clients:
        title, where = "A workflow asked for a model that is not configured.", f"models.{role}"
        found = f"models for: {', '.join(clients) or 'no role at all'}"
        fix = f"add `models: {{{role}: {{model: NAME, base_url: ADDRESS}}}}`"
        raise BadInput.of(title, where, f"a model under the role {role!r}", found, fix)
    return clients[role]


@dataclass(frozen=True)
class RunSpend:
    """What one run may spend, where that is counted, and the models that it names: small enough to
    travel with every task. Holds names of environment variables, never keys."""

    account: str
    """File of the run's `Spend`, shared by its processes."""
    limits: BudgetSection = field(default_factory=BudgetSection)
    models: Mapping[str, ModelSettings] = field(default_factory=dict)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Count the calls of this context, and let `client_for` find its models."""
        spend, clients = self._shared()
        with spend.activate(), use_clients(clients):
            yield

    def reached(self) -> str | None:
        """The limit that some process of the run met first, or None."""
        with contextlib.closing(Spend(self.limits, self.account)) as spend:
            return spend.reached() if spend.limited else None

    def start(self) -> None:
        """Forget what a killed command had under way, and what this process knows of an earlier
        run with the same file, which may be gone. For the start of a run."""
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
                policy = self.models.get(POLICY, ModelSettings())
                named = policy.provider, policy.base_url, policy.model or ""
                price = price_of(*named, policy.prices)
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
"""By the file and by what a run says. Clients share their limits on concurrency between all
episodes of a process: so a process has one of each."""
