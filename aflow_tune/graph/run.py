"""One execution of a graph: in the sandbox with a channel to this process, or, if trusted, in it.

In the sandbox the program is `inside.py`, with the graph's files beside it. Each call arrives as a
message, is served in its own task (`asyncio.gather` in the graph is concurrency here) and answered
by number. The execution ends within its limits, and its ending is returned as data. Messages are
untrusted: the operator must exist, the arguments must fit its signature and be plain data of
bounded size. Wrong arguments are answered with an error; a message that `inside.py` never sends
ends the execution. Models, operators and keys exist in this process only.

The `Meter` sits between operators and models and reserves tokens: a call starts if tokens spent,
tokens reserved by calls in flight and its own worst case fit the limit; else it waits for those in
flight, and alone it starts while anything is left. So at most one call overshoots the limit, as
long as none uses more than it reserved; overshooting ends the execution.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from aflow_tune.context import caller
from aflow_tune.errors import BudgetReached
from aflow_tune.graph import inside
from aflow_tune.models.types import Ask, Message, ModelClient, ModelError, Reply
from aflow_tune.operators import OPERATORS, READ_OUTCOMES, Operator
from aflow_tune.operators.prompts import MAIN, apart, use_instruction
from aflow_tune.sandbox import Channel, ProgramEnded, detect, open_channel
from aflow_tune.sandbox.types import Ending, Limits, SandboxUnavailable

MAX_ANSWER_CHARS = 500_000
MAX_MESSAGE_KB = 4096  # of one message in JSON: room for `GraphLimits.argument_chars` of any script
PROGRAM = "import aflow_preloaded\naflow_preloaded.main()\n"
"""Starts `inside.py`, which the sandbox has loaded in advance."""
LINGER_SECONDS = 1.0  # after its answer a program has this long to exit, then it is killed
TRUSTED = "trusted"  # the `GraphRun.level` of a trusted graph, outside the sandbox
MODEL_CALLER = "llm"  # caller of a graph's direct calls of its model
MAX_DEPTH = 20  # of lists and objects inside each other
MAX_INSTANCES = 200  # operator instances that one execution may call
BYTES_A_TOKEN = 3  # for calls without reported usage
COMPLETION_TOKENS = 1024  # reserved for an answer without `max_tokens`; it may be longer
_INSTANCE = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_KEYS = {
    "operator": {"id", "call", "operator", "instance", "model", "options", "args", "kwargs"},
    "model": {"id", "call", "model", "prompt", "system"},
}
"""The keys of a message, by its kind of call."""


class TooManyCalls(Exception):
    """The graph passed a limit of `GraphLimits`, or MAX_INSTANCES."""


class ForgedMessage(Exception):
    """A message that `inside.py` cannot have sent."""


FATAL = (ForgedMessage, TooManyCalls, BudgetReached, SandboxUnavailable)
"""Exceptions that end the execution instead of being reported to the graph."""


@dataclass(frozen=True)
class GraphLimits:
    """What one execution of a graph may use."""

    seconds: float = 180.0  # wall-clock time, calls of models included
    cpu_seconds: float = 30.0  # of the graph's own code, where it runs in the sandbox
    calls: int = 100  # of operators and of the model that the graph may make
    concurrent: int = 32  # of these calls at the same time; more wait
    argument_chars: int = 500_000  # of all texts in the arguments of one call
    memory_mb: int = 256
    # None: no limit.
    model_calls: int | None = None  # by operators and the graph itself, failed ones included
    tokens: int | None = None  # prompt and completion, of all models together
    call_prompt_tokens: int | None = None  # of one call: estimated before, as reported after
    call_completion_tokens: int | None = None  # caps the `max_tokens` of every call
    answer_tokens: int = COMPLETION_TOKENS  # reserved for an answer without `max_tokens`
    retries: int | None = None
    """How often an operator asks again after an unreadable reply: the default where the graph sets
    none, and the most that it may set. None: the graph decides."""


@dataclass
class Spent:
    """Usage of answered model calls. `cost` is in US dollars, None once a price was unknown."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0

    def add(self, reply: Reply) -> None:
        """Count one reply."""
        self.calls += 1
        if reply.usage is not None:
            self.prompt_tokens += reply.usage.prompt_tokens
            self.completion_tokens += reply.usage.completion_tokens
        if self.cost is not None:
            self.cost = None if reply.cost is None else self.cost + reply.cost


class Meter:
    """Counts the model calls of one execution against its limits. For one event loop."""

    def __init__(self, limits: GraphLimits) -> None:
        self.limits = limits
        self.spent = Spent()
        self.passed = ""
        """The limit that was passed; empty until then."""
        self._begun = 0
        self._tokens = 0
        self._held: dict[object, int] = {}
        self._ended = asyncio.Event()
        """Set and replaced whenever a call in flight ends."""

    def check(self, passed: str = "") -> None:
        """Raise `TooManyCalls` if a limit was passed; `passed` names one that just was."""
        self.passed = self.passed or passed
        if self.passed:
            raise TooManyCalls(self.passed)

    async def ask(
        self, client: ModelClient, messages: Sequence[Message], settings: dict[str, Any]
    ) -> Reply:
        """Call a model. Raises `TooManyCalls` if the call would pass a limit, or has passed one."""
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
            worst = ask.most_prompt_tokens() + (settings.get("max_tokens") or limits.answer_tokens)
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
        self.spent.add(reply)
        if most is not None and self._tokens > most:
            self.check(passed)
        if usage is not None:
            self._check_prompt(usage.prompt_tokens, "")
        return reply

    def _check_prompt(self, tokens: int, about: str) -> None:
        most = self.limits.call_prompt_tokens
        if most is not None and tokens > most:
            self.check(f"a prompt of {about}{tokens} tokens (limit call_prompt_tokens: {most})")


def _bytes_of(messages: Sequence[Message]) -> int:
    contents = [message.get("content") for message in messages]
    texts = [content if isinstance(content, str) else repr(content) for content in contents]
    return sum(len(text.encode(errors="replace")) for text in texts)


class _Metered:
    """A model client behind the meter. `spent` counts its calls as well."""

    def __init__(self, client: ModelClient, meter: Meter, spent: Spent) -> None:
        self._client, self._meter, self._spent = client, meter, spent
        self.role, self.model = client.role, client.model

    async def complete(self, messages: Sequence[Message], **settings: Any) -> Reply:
        reply = await self._meter.ask(self._client, messages, settings)
        self._spent.add(reply)
        return reply


@dataclass
class Broker:
    """Serves the calls of one execution.

    `clients`: by role, including 'policy'; `roles`: by instance, operator or model name; `prompts`:
    by operator, instance or `Operator.instance`; `instructions`: see `Graph`.
    """

    clients: Mapping[str, ModelClient]
    roles: Mapping[str, str] = field(default_factory=dict)
    prompts: Mapping[str, Any] = field(default_factory=dict)
    operators: Mapping[str, type[Operator]] = field(default_factory=lambda: OPERATORS)
    limits: GraphLimits = field(default_factory=GraphLimits)
    instructions: Mapping[str, str] = field(default_factory=dict)
    calls: int = 0
    answered: int = 0
    """Calls that returned a result."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed calls by operator outcome, `ModelFailure` or exception name."""
    built: bool = False
    """Whether the program has reported that the workflow was constructed."""

    def __post_init__(self) -> None:
        self.meter = Meter(self.limits)
        self._turns = asyncio.Semaphore(self.limits.concurrent)
        self._seen: set[int] = set()
        self._instances: set[str] = set()

    def check(self, message: Any) -> None:
        """Validate the form of a message and count it. Raises `ForgedMessage`, `TooManyCalls`."""
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
        """Make a checked call. Returns `{"result", "usage"}` or `{"error": [kind, text], "usage"}`;
        raises only the exceptions in `FATAL`."""
        spent = Spent()
        try:
            check_size(message, self.limits.argument_chars)
            async with self._turns:
                serve = self._ask if message["call"] == "model" else self._operate
                result = await serve(message, spent)
            self.meter.check()  # an operator may have caught TooManyCalls
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
        """The model of the first name with a role; the last name is the graph's for its model."""
        role = next((self.roles[name] for name in names if name in self.roles), names[-1])
        if role not in self.clients:
            raise LookupError(
                f"the graph asks for the model {role!r}: give it a role under graph.models"
            )
        return _Metered(self.clients[role], self.meter, spent)


def bind(
    kind: type[Operator], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Bind the arguments of a call to the operator's signature; `TypeError` if they do not fit.

    Some of AFlow's templates pass a `mode` that the operator here does not take: it is dropped.
    """
    signature = inspect.signature(kind.__call__)
    own = list(signature.parameters.values())[1:]
    signature = signature.replace(parameters=own)
    takes_any = any(item.kind is item.VAR_KEYWORD for item in own)
    named = dict(kwargs)
    if "mode" not in signature.parameters and not takes_any:
        named.pop("mode", None)
    return signature.bind(*args, **named)


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ForgedMessage(f"a name that is {value!r:.40}")
    return value


def check_size(value: Any, most: int) -> None:
    """Raise `ForgedMessage` if data is nested too deeply; `ValueError` if it has more than `most`
    characters and list items in total, or a number that is not finite."""
    total, pending = 0, [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ForgedMessage("data nested too deeply")
        if isinstance(item, float) and not math.isfinite(item):
            raise ValueError(f"a number that is {item}")
        total += len(item) if isinstance(item, (str, list)) else 0
        if isinstance(item, (list, dict)):
            parts = item if isinstance(item, list) else [*item, *item.values()]
            pending += [(part, depth + 1) for part in parts]
        if total > most:
            raise ValueError(f"more than {most} characters of text")


class GraphEnding(StrEnum):
    """How an execution of a graph ended. The values appear in traces and metrics."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"  # it returned None or an empty text
    RAISED = "raised"  # by the graph's code
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MANY_CALLS = "too_many_calls"  # or tokens: some limit, which the reason names
    DIED = "died"  # its process ended without an answer
    FORGED = "forged_message"  # it sent a message that `inside.py` cannot send
    SANDBOX_UNAVAILABLE = "sandbox_unavailable"  # for the graph or for an operator's program


@dataclass(frozen=True)
class GraphRun:
    """One execution: its answer, or why there is none."""

    ending: GraphEnding
    answer: Any = None  # what the workflow returned, without its cost; plain data
    reason: str = ""
    """Why there is no answer; names file and line where the graph's code raised."""
    calls: int = 0  # of operators and of the model that the graph made
    answered: int = 0  # of these, those that returned a result in time
    model_calls: int = 0  # answered
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = 0.0  # US dollars; None if the price of a call is not known
    failures: Mapping[str, int] = field(default_factory=dict)
    """Failed calls by kind. The graph may have handled them."""
    level: str = ""
    """The sandbox backend that the graph ran in, or 'trusted'; empty if it did not run."""
    seconds: float = 0.0
    built: bool = False
    """Whether the workflow's constructor returned. Reported from inside the sandbox, so not to be
    trusted: it picks the fallback of a written graph (`writer/results.py`), but no limit."""

    @property
    def ok(self) -> bool:
        """Whether there is an answer, correct or not."""
        return self.ending is GraphEnding.ANSWERED

    @property
    def text(self) -> str:
        """The answer as text; empty if there is none."""
        return "" if self.answer is None else str(self.answer)

    def with_text(self) -> GraphRun:
        """The same, but with the ending RAISED if the answer is an operator's whole result or a
        list: benchmarks score texts, and Python's `repr` of an object is not an answer."""
        if not isinstance(self.answer, (dict, list)):
            return self
        reason = (
            f"TypeError: the workflow returned a {type(self.answer).__name__}, not the text of its "
            f'answer: {self.answer!r:.120}; write for example: return solution["response"], cost'
        )
        return replace(self, ending=GraphEnding.RAISED, answer=None, reason=reason)


async def run_graph(
    label: str,
    sources: Mapping[str, str],
    setup: dict[str, Any],
    broker: Broker,
    policy: str | None,
) -> GraphRun:
    """Execute a graph once. Raises `BudgetReached` if the budget of the run is spent.

    `setup` is that of `inside.run`, plus `files`. `policy` is the sandbox's; None: trusted.
    """
    started = time.monotonic()
    try:
        async with asyncio.timeout(broker.limits.seconds):
            if policy is None:
                run = _ended(label, await _trusted(sources, setup, broker))
            else:
                run = await _sandboxed(label, sources, setup, broker, policy)
    except TimeoutError:
        run = GraphRun(GraphEnding.TIMED_OUT, reason=f"no answer in {broker.limits.seconds} s")
    except SandboxUnavailable as error:
        run = GraphRun(GraphEnding.SANDBOX_UNAVAILABLE, reason=str(error))
    except TooManyCalls as error:
        run = GraphRun(GraphEnding.TOO_MANY_CALLS, reason=str(error))
    except ForgedMessage as error:
        run = GraphRun(GraphEnding.FORGED, reason=f"{label}: {error}")
    level = TRUSTED if policy is None else run.level
    if not level and run.ending is not GraphEnding.SANDBOX_UNAVAILABLE:
        # It was killed before it reported a level; this process has detected its backend by now.
        found = await asyncio.to_thread(detect, policy or "auto")
        level = found.level.value if found.level is not None else ""
    spent = broker.meter.spent
    return replace(
        run,
        calls=broker.calls,
        answered=broker.answered,
        model_calls=spent.calls,
        prompt_tokens=spent.prompt_tokens,
        completion_tokens=spent.completion_tokens,
        cost=spent.cost,
        failures=dict(broker.failures),
        level=level,
        seconds=time.monotonic() - started,
        built=broker.built,
    )


async def _trusted(
    sources: Mapping[str, str], setup: dict[str, Any], broker: Broker
) -> dict[str, Any]:
    ended: list[BaseException] = []

    async def send(message: dict[str, Any]) -> dict[str, Any]:
        try:
            broker.count()
            return await broker.serve(message)
        except FATAL as error:
            ended.append(error)
            raise

    end = await inside.run(setup, dict(sources), send, lambda: setattr(broker, "built", True))
    if ended:  # the graph may have caught the exception
        raise ended[0]
    return end


async def _sandboxed(
    label: str, sources: Mapping[str, str], setup: dict[str, Any], broker: Broker, policy: str
) -> GraphRun:
    limits = Limits(
        seconds=broker.limits.seconds,
        cpu_seconds=min(broker.limits.cpu_seconds, broker.limits.seconds),
        memory_mb=broker.limits.memory_mb,
        output_kb=MAX_MESSAGE_KB,
    )
    async with open_channel(
        PROGRAM, files=dict(sources), limits=limits, policy=policy, preload=inside.__name__
    ) as channel:
        try:
            await channel.send(setup)
        except ValueError as error:
            reason = f"{label}: the problem cannot be handed over: {error}"
            return GraphRun(GraphEnding.RAISED, reason=reason)
        except ProgramEnded:
            pass  # `receive` says how
        end = await _converse(channel, broker)
        execution = None  # stays None if the program does not exit and is killed
        with contextlib.suppress(TimeoutError, RuntimeError):
            async with asyncio.timeout(LINGER_SECONDS):
                while await channel.receive() is not None:
                    pass
                execution = channel.execution()
    level = "" if execution is None else execution.level.value
    if end is not None:
        return replace(_ended(label, end), level=level)
    if execution is None:
        raise ForgedMessage("a message that says nothing")
    endings = {
        Ending.TIMED_OUT: GraphEnding.TIMED_OUT,
        Ending.OUT_OF_MEMORY: GraphEnding.OUT_OF_MEMORY,
    }
    hit = f", limits hit: {', '.join(execution.limits_hit)}" if execution.limits_hit else ""
    reason = f"its process {execution.ending.value} (exit code {execution.exit_code}{hit})"
    reason = ": ".join(filter(None, [reason, execution.stderr.strip()[-500:]]))
    return GraphRun(endings.get(execution.ending, GraphEnding.DIED), reason=reason, level=level)


async def _converse(channel: Channel, broker: Broker) -> dict[str, Any] | None:
    """Serve the program's calls until it reports its end; None if it exits without doing so."""
    serving: set[asyncio.Task[None]] = set()
    fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(message: dict[str, Any]) -> None:
        try:
            reply = await broker.serve(message)
            try:
                await channel.send({"id": message["id"], **reply})
            except (TypeError, ValueError) as error:
                text = f"a result that cannot be handed over: {error}"
                refusal = {"error": [type(error).__name__, text], "usage": reply["usage"]}
                await channel.send({"id": message["id"], **refusal})
        except ProgramEnded:
            return  # `receive` says how
        except Exception as error:
            if not fatal.done():
                fatal.set_exception(error)

    receiving = asyncio.ensure_future(channel.receive())
    try:
        while True:
            await asyncio.wait({receiving, fatal}, return_when=asyncio.FIRST_COMPLETED)
            if fatal.done():
                fatal.result()
            message = receiving.result()
            if message is None:
                return None
            if isinstance(message, dict) and "end" in message:
                return _checked_end(message)
            if message == {"built": True} and not broker.built:
                broker.built = True
            else:
                broker.check(message)
                task = asyncio.create_task(serve(message))
                serving.add(task)
                task.add_done_callback(serving.discard)
            receiving = asyncio.ensure_future(channel.receive())
    finally:
        open_tasks = [receiving, *serving]
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)
        if fatal.done() and not fatal.cancelled():
            fatal.exception()  # mark it as retrieved: it was raised above, or came after the end


def _checked_end(message: dict[str, Any]) -> dict[str, Any]:
    if message["end"] == "answer" and set(message) == {"end", "answer"}:
        try:
            check_size(message["answer"], MAX_ANSWER_CHARS)
        except ValueError as error:
            raise ForgedMessage(f"an answer with {error}") from None
        return message
    words = [message.get(key) for key in ("kind", "text", "place")]
    if message["end"] == "raised" and all(isinstance(word, str) for word in words):
        return message
    raise ForgedMessage("an ending that is neither an answer nor an exception")


def _ended(label: str, end: Mapping[str, Any]) -> GraphRun:
    if end["end"] == "raised":
        where = f"{label}/{end['place']}: " if end["place"] else f"{label}: "
        reason = f"{where}{end['kind']}: {end['text']}"
        return GraphRun(GraphEnding.RAISED, reason=reason[:2000])
    answer = end["answer"]
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        found = "None" if answer is None else "an empty text"
        return GraphRun(GraphEnding.NO_ANSWER, reason=f"{label}: it returned {found}")
    return GraphRun(GraphEnding.ANSWERED, answer)
