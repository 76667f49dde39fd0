"""The parent's side of a graph's calls: checks each one, makes it, counts it.

A message comes from code that anybody may have written, so it is believed in nothing: the
operator must exist, the arguments must fit its signature and be plain data of bounded size, the
number of calls is bounded. Wrong arguments are answered with an error, as a call in the same
process would be; a message that our own side of the channel can never send ends the run.

An instance's instruction (`Graph.instructions`) is given to its operator here: as the argument
`instruction` where its call has one and the graph leaves it empty, else in front of its prompt.

Models, operators and keys are here and only here. Not covered: what an operator does with its
arguments, which is its room's concern; how messages travel (`run.py`); what the models of a run
may use (`limits.py`).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.context import caller
from aflow_tune.errors import BudgetReached
from aflow_tune.graph.limits import GraphLimits, Meter, Metered, Spent, TooManyCalls
from aflow_tune.models.types import ModelClient, ModelError
from aflow_tune.operators import OPERATORS, READ_OUTCOMES, Operator
from aflow_tune.operators.prompts import MAIN, apart, use_instruction
from aflow_tune.sandbox.types import SandboxUnavailable

MODEL_CALLER = "llm"
"""Caller of a graph's direct calls of its model."""
MAX_DEPTH = 20
"""Of lists and objects inside each other."""
MAX_INSTANCES = 200
"""Different operators that one run may build."""
_INSTANCE = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_OPERATOR_KEYS = {"id", "call", "operator", "instance", "model", "options", "args", "kwargs"}
_MODEL_KEYS = {"id", "call", "model", "prompt", "system"}


class ForgedMessage(Exception):
    """A message that our side of the channel cannot have sent."""


FATAL = (ForgedMessage, TooManyCalls, BudgetReached, SandboxUnavailable)
"""What ends the run instead of being an answer to the call."""


@dataclass
class Broker:
    """Serves the calls of one run.

    `clients` holds a model for each role, 'policy' among them; `roles` says by instance,
    operator or model name which role other than 'policy' is used. `prompts` gives the prompts
    of an operator by operator name, instance and both; `instructions` those of instances,
    and of an operator's instances without their own.
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
        self._meter = Meter(self.limits)
        self._turns = asyncio.Semaphore(self.limits.concurrent)
        self._seen: set[int] = set()
        self._instances: set[str] = set()

    @property
    def spent(self) -> Spent:
        """What the models of the run have cost so far."""
        return self._meter.spent

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
        expected = {"operator": _OPERATOR_KEYS, "model": _MODEL_KEYS}.get(str(message.get("call")))
        if expected is None or set(message) != expected:
            raise ForgedMessage(f"a call of the form {sorted(map(str, message))!r:.120}")
        self.count()

    def count(self) -> None:
        """Count a call. Raises `TooManyCalls`."""
        self.calls += 1
        if self.calls > self.limits.calls:
            self._meter.stop(f"more than {self.limits.calls} calls (limit calls)")

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
        purse = Spent()
        try:
            check_size(message, self.limits.argument_chars)
            async with self._turns:
                if message["call"] == "model":
                    result: Any = await self._ask(message, purse)
                else:
                    result = await self._operate(message, purse)
            self._meter.check()  # an operator may have caught it
        except FATAL:
            raise
        except Exception as error:
            self._meter.check()
            kind = error.failure.value if isinstance(error, ModelError) else type(error).__name__
            self.failures[kind] += 1
            return {"error": [type(error).__name__, str(error)[:2000]], "usage": purse.to_json()}
        self.answered += 1
        return {"result": result, "usage": purse.to_json()}

    async def _ask(self, message: Mapping[str, Any], purse: Spent) -> str:
        prompt, system = message["prompt"], message["system"]
        if not isinstance(prompt, str) or not isinstance(system, str | None):
            raise TypeError(f"a prompt is a text, not {type(prompt).__name__}")
        client = self._client([MODEL_CALLER, _name(message["model"])], purse)
        messages = [{"role": "user", "content": prompt}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        with caller(MODEL_CALLER):
            return (await client.complete(messages)).text

    async def _operate(self, message: Mapping[str, Any], purse: Spent) -> Any:
        name, instance = _name(message["operator"]), _name(message["instance"])
        options, args, kwargs = message["options"], message["args"], message["kwargs"]
        if not isinstance(options, dict) or not isinstance(args, list):
            raise ForgedMessage("options that are no object, or arguments that are no list")
        if not isinstance(kwargs, dict):
            raise ForgedMessage("named arguments that are no object")
        kind = self.operators.get(name)
        if kind is None:
            raise ForgedMessage(f"a call of the unknown operator {name!r}")
        if not _INSTANCE.fullmatch(instance):
            raise ForgedMessage(f"an operator named {instance!r:.80}")
        self._instances.add(instance)
        if len(self._instances) > MAX_INSTANCES:
            raise TooManyCalls(f"more than {MAX_INSTANCES} different operators")
        client = self._client([instance, name, _name(message["model"])], purse)
        operator = self._build(kind, client, name, instance, options)
        arguments = bind(kind, args, kwargs)
        instruction = self.instructions.get(instance, self.instructions.get(name, ""))
        if "instruction" in arguments.signature.parameters:
            if not arguments.arguments.get("instruction"):
                arguments.arguments["instruction"] = apart(instruction)
            instruction = ""
        with use_instruction(name, instance, instruction):
            result = await operator(*arguments.args, **arguments.kwargs)
        check_plain(result)
        if result.outcome not in READ_OUTCOMES:
            self.failures[result.outcome.value] += 1
        return dict(result)

    def _build(
        self,
        kind: type[Operator],
        client: ModelClient,
        name: str,
        instance: str,
        options: Mapping[str, Any],
    ) -> Operator:
        reserved = {"llm", "name", "prompts"} & set(options)
        if reserved:
            raise TypeError(f"operator.{name} does not take {', '.join(sorted(reserved))} here")
        keys = (name, instance, f"{name}.{instance}")
        given = [self.prompts[key] for key in keys if key in self.prompts]
        prompts = given[-1] if given else None
        if len(given) > 1:
            prompts = {key: text for texts in given for key, text in _as_mapping(texts).items()}
        operator = kind(client, name=instance, prompts=prompts, **options)
        if self.limits.retries is not None:
            most = self.limits.retries
            operator.retries = min(operator.retries, most) if "retries" in options else most
        return operator

    def _client(self, names: Sequence[str], purse: Spent) -> ModelClient:
        """The model of the first name that has a role; the last is the graph's own name for it."""
        role = next((self.roles[name] for name in names if name in self.roles), None)
        if role is None:
            role = names[-1] if names[-1] in self.clients else None
        if role is None:
            raise LookupError(
                f"the graph asks for the model {names[-1]!r}: give it a role under graph.models"
            )
        return Metered(self.clients[role], self._meter, purse)


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


def _as_mapping(texts: Any) -> Mapping[str, str]:
    return {MAIN: texts} if isinstance(texts, str) else texts


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


def check_plain(value: Any) -> None:
    """Whether what an operator returned can travel to the graph.

    Raises:
        TypeError: it holds more than texts, numbers, lists and objects.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError("an operator's result has a key that is no text")
            check_plain(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_plain(item)
    elif not isinstance(value, (str, int, float, bool, type(None))):
        raise TypeError(f"an operator's result holds a {type(value).__name__}")
