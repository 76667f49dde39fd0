"""The parent's side of a graph's calls: checks each one, makes it, counts it, within limits.

A message comes from code that anybody may have written, so it is believed in nothing: the
operator must exist, the arguments must fit its signature and be plain data of bounded size, the
number of calls is bounded. Wrong arguments are answered with an error, as a call in the same
process would be; a message that our own side of the channel can never send ends the run.

The `Meter` stands between the operators and the models, so nothing that a graph does passes it:
each call of a model takes its place before it begins, also where many begin at once. A limit
that is passed ends the run, and stays passed for everything that the run still tries. Tokens are
known after a call, not before. A call begins if the tokens spent, the most that the calls in
flight may use, and the most that it may use itself stay within the limit; else it waits for those
in flight, and alone it begins while anything is left. So the limit is passed by one call at most,
which ends the run. Where an endpoint reports no tokens, every three bytes of text count as one.

Models, operators and keys are here and only here. Not covered: what an operator does with its
arguments; how messages travel (`run.py`); the run's budget in money, which stands in front of
every model (`aflow_tune.models`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from aflow_tune.context import caller
from aflow_tune.errors import BudgetReached
from aflow_tune.models.types import Ask, Message, ModelClient, ModelError, Reply
from aflow_tune.operators import OPERATORS, READ_OUTCOMES, Operator
from aflow_tune.operators.prompts import MAIN, apart, use_instruction
from aflow_tune.sandbox.types import SandboxUnavailable

MODEL_CALLER = "llm"  # caller of a graph's direct calls of its model
MAX_DEPTH = 20  # of lists and objects inside each other
MAX_INSTANCES = 200  # different operators that one run may build
BYTES_A_TOKEN = 3  # of text whose tokens nobody counted
COMPLETION_TOKENS = 1024  # held back for an answer whose length nothing limits
_INSTANCE = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_KEYS = {
    "operator": {"id", "call", "operator", "instance", "model", "options", "args", "kwargs"},
    "model": {"id", "call", "model", "prompt", "system"},
}
"""Of a message, by its kind of call."""


class TooManyCalls(Exception):
    """The graph made more calls, or spent more tokens, than it may."""


class ForgedMessage(Exception):
    """A message that our side of the channel cannot have sent."""


FATAL = (ForgedMessage, TooManyCalls, BudgetReached, SandboxUnavailable)
"""What ends the run instead of being an answer to the call."""


@dataclass(frozen=True)
class GraphLimits:
    """What one run of a graph may use."""

    seconds: float = 180.0
    """Wall-clock time, calls of models included."""
    cpu_seconds: float = 30.0
    """Processor time of the graph's own code, where it runs in the sandbox."""
    calls: int = 100
    """Calls of operators and of the model that the graph may make."""
    concurrent: int = 32
    """Of them at the same time; more wait."""
    argument_chars: int = 500_000
    """Characters of all the texts in one call's arguments."""
    memory_mb: int = 256
    model_calls: int | None = None
    """Calls of models that operators may make, failed ones included. None: no limit."""
    tokens: int | None = None
    """Prompt and completion tokens of all models together. None: no limit."""
    call_prompt_tokens: int | None = None
    """Of the prompt of one call: by its length before, as reported after. None: no limit."""
    call_completion_tokens: int | None = None
    """Handed to every call as its `max_tokens`. None: the models' own."""
    retries: int | None = None
    """How often an operator asks again for an answer that it cannot read, where the graph does
    not say; where it says more, this. None: as the operators and the graph say."""


@dataclass
class Spent:
    """What calls of models have cost. `cost` is in US dollars, None once a price was unknown."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0

    def add(self, reply: Reply) -> None:
        """Count one answer of a model."""
        self.calls += 1
        if reply.usage is not None:
            self.prompt_tokens += reply.usage.prompt_tokens
            self.completion_tokens += reply.usage.completion_tokens
        if self.cost is not None:
            self.cost = None if reply.cost is None else self.cost + reply.cost


class Meter:
    """Counts the model calls of one run against its limits. Used on one event loop."""

    def __init__(self, limits: GraphLimits) -> None:
        self.limits = limits
        self.spent = Spent()
        self.passed = ""
        """Which limit was passed; empty while none was."""
        self._begun = 0
        self._tokens = 0
        self._held: dict[object, int] = {}
        self._ended = asyncio.Event()
        """Set, and replaced, each time that a call in flight has ended."""

    def check(self, passed: str = "") -> None:
        """Raises `TooManyCalls` once a limit was passed. `passed`: says which one is now."""
        self.passed = self.passed or passed
        if self.passed:
            raise TooManyCalls(self.passed)

    async def ask(
        self, client: ModelClient, messages: Sequence[Message], settings: dict[str, Any]
    ) -> Reply:
        """One call of a model, within the limits.

        Raises:
            TooManyCalls: it would pass them, or has.
        """
        limits, most = self.limits, self.limits.tokens
        self.check()
        if limits.model_calls is not None and self._begun >= limits.model_calls:
            self.check(f"more than {limits.model_calls} calls of models (limit model_calls)")
        self._begun += 1
        self._check_prompt(-(-_bytes_of(messages) // 4), "about ")
        if (cap := limits.call_completion_tokens) is not None:
            settings["max_tokens"] = min(cap, settings.get("max_tokens") or cap)
        passed, worst = f"more than {most} tokens of models (limit tokens)", 0
        if most is not None:
            ask = Ask(messages=messages, schema=settings.get("schema"))
            worst = ask.most_prompt_tokens() + (settings.get("max_tokens") or COMPLETION_TOKENS)
            while self._held and self._tokens + sum(self._held.values()) + worst > most:
                await self._ended.wait()
                self.check()
            if self._tokens >= most:
                self.check(passed)
        self._held[token := object()] = worst
        try:
            reply = await client.complete(messages, **settings)
            if (usage := reply.usage) is not None:
                self._tokens += usage.prompt_tokens + usage.completion_tokens
            else:
                text = _bytes_of(messages) + len(reply.text.encode(errors="replace"))
                self._tokens += -(-text // BYTES_A_TOKEN)
        finally:
            self._held.pop(token)
            self._ended.set()
            self._ended = asyncio.Event()
        if most is not None and self._tokens > most:
            self.check(passed)
        self.spent.add(reply)
        if usage is not None:
            self._check_prompt(usage.prompt_tokens, "")
        return reply

    def _check_prompt(self, tokens: int, about: str) -> None:
        most = self.limits.call_prompt_tokens
        if most is not None and tokens > most:
            self.check(
                f"a prompt of {about}{tokens} tokens, more than the {most} that one call may have "
                "(limit call_prompt_tokens)"
            )


def _bytes_of(messages: Sequence[Message]) -> int:
    contents = [message.get("content") for message in messages]
    texts = [content if isinstance(content, str) else repr(content) for content in contents]
    return sum(len(text.encode(errors="replace")) for text in texts)


class _Metered:
    """A model client behind a run's meter. `spent` also adds up what its calls cost."""

    def __init__(self, client: ModelClient, meter: Meter, spent: Spent) -> None:
        self._client, self._meter, self._spent = client, meter, spent
        self.role, self.model = client.role, client.model

    async def complete(self, messages: Sequence[Message], **settings: Any) -> Reply:
        """As the client's. TooManyCalls: the run may not make this call."""
        reply = await self._meter.ask(self._client, messages, settings)
        self._spent.add(reply)
        return reply


@dataclass
class Broker:
    """Serves the calls of one run.

    `clients` holds a model for each role, 'policy' among them; `roles` says by instance,
    operator or model name which role other than 'policy' is used. `prompts` gives the prompts
    of an operator by operator name, instance and both; `instructions` those of instances,
    and of an operator's instances without their own: an operator gets them as its argument
    `instruction` where its call has one and the graph leaves it empty, else in front of its prompt.
    """

    clients: Mapping[str, ModelClient]
    roles: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, Any] = field(default_factory=dict)
    operators: Mapping[str, type[Operator]] = field(default_factory=lambda: OPERATORS)
    limits: GraphLimits = field(default_factory=GraphLimits)
    instructions: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    answered: int = 0
    """Calls that gave a result."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed calls, by their operator's outcome or the name of their exception."""
    built: bool = False
    """Whether the graph's side has said that the workflow was constructed."""

    def __post_init__(self) -> None:
        self.meter = Meter(self.limits)
        self._turns = asyncio.Semaphore(self.limits.concurrent)
        self._seen: set[int] = set()
        self._instances: set[str] = set()

    def note_built(self) -> None:
        """The workflow was constructed."""
        self.built = True

    def check(self, message: Any) -> None:
        """Whether a message from the channel is one of ours.

        Raises:
            ForgedMessage: it is not.
            TooManyCalls: it is one too many.
        """
        if not isinstance(message, dict):
            raise ForgedMessage(f"a message that is no object but {type(message).__name__}")
        number = message.get("id")
        if type(number) is not int or number < 1 or number in self._seen:
            raise ForgedMessage(f"a call with the number {number!r:.40}")
        self._seen.add(number)
        if set(message) != _KEYS.get(str(message.get("call"))):
            raise ForgedMessage(f"a call of the form {sorted(map(str, message))!r:.120}")
        self.count()

    def count(self) -> None:
        """Count a call. Raises `TooManyCalls`."""
        self.calls += 1
        if self.calls > self.limits.calls:
            self.meter.check(f"more than {self.limits.calls} calls (limit calls)")

    async def serve(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Make a call that `check` has let through.

        Returns:
            `{"result", "usage"}`, or `{"error": [kind, text], "usage"}`.

        Raises:
            ForgedMessage: an argument that our side cannot have sent.
            TooManyCalls: too many different operators, or a limit of the models' is passed.
            BudgetReached: the run's budget does not allow it.
            SandboxUnavailable: an operator has to run a program and may not.
        """
        spent = Spent()
        try:
            check_size(message, self.limits.argument_chars)
            async with self._turns:
                serve = self._ask if message["call"] == "model" else self._operate
                result = await serve(message, spent)
            self.meter.check()  # an operator may have caught it
        except FATAL:
            raise
        except Exception as error:
            self.meter.check()
            kind = error.failure.value if isinstance(error, ModelError) else type(error).__name__
            self.failures[kind] += 1
            return {"error": [type(error).__name__, str(error)[:2000]], "usage": asdict(spent)}
        self.answered += 1
        return {"result": result, "usage": asdict(spent)}

    async def _ask(self, message: Mapping[str, Any], spent: Spent) -> Any:
        prompt, system = message["prompt"], message["system"]
        if not isinstance(prompt, str) or not isinstance(system, str | None):
            raise TypeError(f"a prompt is a text, not {type(prompt).__name__}")
        client = self._client([MODEL_CALLER, _name(message["model"])], spent)
        messages = [{"role": "system", "content": system}] if system else []
        with caller(MODEL_CALLER):
            return (await client.complete([*messages, {"role": "user", "content": prompt}])).text

    async def _operate(self, message: Mapping[str, Any], spent: Spent) -> Any:
        name, instance = _name(message["operator"]), _name(message["instance"])
        options, args, kwargs = message["options"], message["args"], message["kwargs"]
        if not (isinstance(options, dict) and isinstance(args, list) and isinstance(kwargs, dict)):
            raise ForgedMessage("options or arguments that are no object, or no list")
        kind = self.operators.get(name)
        if kind is None:
            raise ForgedMessage(f"a call of the unknown operator {name!r}")
        if not _INSTANCE.fullmatch(instance):
            raise ForgedMessage(f"an operator named {instance!r:.80}")
        self._instances.add(instance)
        if len(self._instances) > MAX_INSTANCES:
            raise TooManyCalls(f"more than {MAX_INSTANCES} different operators")
        client = self._client([instance, name, _name(message["model"])], spent)
        if reserved := {"llm", "name", "prompts"} & set(options):
            raise TypeError(f"operator.{name} does not take {', '.join(sorted(reserved))} here")
        keys = (name, instance, f"{name}.{instance}")
        given = [self.prompts[key] for key in keys if key in self.prompts]
        prompts = given[-1] if given else None
        if len(given) > 1:
            texts = ({MAIN: item} if isinstance(item, str) else item for item in given)
            prompts = {key: text for item in texts for key, text in item.items()}
        operator = kind(client, name=instance, prompts=prompts, **options)
        if (most := self.limits.retries) is not None:
            operator.retries = min(operator.retries, most) if "retries" in options else most
        arguments = bind(kind, args, kwargs)
        instruction = self.instructions.get(instance, self.instructions.get(name, ""))
        if "instruction" in arguments.signature.parameters:
            if not arguments.arguments.get("instruction"):
                arguments.arguments["instruction"] = apart(instruction)
            instruction = ""
        with use_instruction(name, instance, instruction):
            result = await operator(*arguments.args, **arguments.kwargs)
        if result.outcome not in READ_OUTCOMES:
            self.failures[result.outcome.value] += 1
        return dict(result)

    def _client(self, names: Sequence[str], spent: Spent) -> ModelClient:
        """The model of the first name that has a role; the last is the graph's own name for it."""
        role = next((self.roles[name] for name in names if name in self.roles), names[-1])
        if role not in self.clients:
            raise LookupError(
                f"the graph asks for the model {role!r}: give it a role under graph.models"
            )
        return _Metered(self.clients[role], self.meter, spent)


def bind(
    kind: type[Operator], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Arguments of a call held against the operator's signature.

    Some of AFlow's templates give operators a `mode` that ours do without: it is dropped.

    Raises:
        TypeError: they do not fit.
    """
    signature = _signature_of(kind.__call__)
    takes_any = any(item.kind is item.VAR_KEYWORD for item in signature.parameters.values())
    named = dict(kwargs)
    if "mode" not in signature.parameters and not takes_any:
        named.pop("mode", None)
    return signature.bind(*args, **named)


@functools.lru_cache(maxsize=256)
def _signature_of(call: Callable[..., Any]) -> inspect.Signature:
    """Of an operator's call, without self."""
    signature = inspect.signature(call)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ForgedMessage(f"a name that is {value!r:.40}")
    return value


def check_size(value: Any, most: int) -> None:
    """Plain data of at most `most` characters in all its texts.

    Raises:
        ForgedMessage: it is nested too deeply.
        ValueError: it is too large, or holds a number that is not finite.
    """
    total = 0
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ForgedMessage("data nested too deeply")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"a number that is {item}")
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, list):
            total += len(item)
            pending += [(part, depth + 1) for part in item]
        elif isinstance(item, dict):
            pending += [(part, depth + 1) for pair in item.items() for part in pair]
        if total > most:
            raise ValueError(f"more than {most} characters of text")
