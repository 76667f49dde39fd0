"""Compares one turn of an agent, a message with or without tool calls, with the gold one.

    task = as_tasks(dialogues)[0]          # one assistant turn, with the true history before it
    found = measures(answer, task)         # {"tool_selection_accuracy": 1.0, ...}
    reward = turn_reward(found)            # in [0, 1], by `rewards.turns`

A row has `messages` and `tools` as OpenAI writes them; its last assistant message is the gold
answer. A benchmark row may say more under `gold`: `calls` (for each wanted call the acceptable
ones, each with the acceptable values of every argument, as in BFCL's possible answers),
`names_only` (arguments are not compared), `plan` (names of tools in order), `top_k` (names of the
right tools) and `call` (whether to call at all). Without `calls` the wanted calls are those of the
gold message, or else of the plan or of `top_k`. What a text says is not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.scoring.rewards import WEIGHTS, reward_settings, weighted
from aflow_tune.sections import TurnRewardSection

MEASURES = WEIGHTS["turns"]
"""The names of the measures."""
TAGGED_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
"""A call as text, for models whose template does not know tools; the last may be cut off."""
_THOUGHT = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
_IGNORED = re.compile(r"[ ,./\-_*^]")

Values = Mapping[str, Sequence[Any]]
"""The acceptable values of each argument."""


@dataclass(frozen=True)
class Call:
    """A call of a tool; `name` is None if it could not be read."""

    name: str | None
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Gold:
    """What is wanted. `calls`: for each wanted call the acceptable (name, arguments), arguments
    None if they do not count; None if it is unknown which. `bfcl`: values are compared by BFCL's
    rules."""

    called: bool
    calls: tuple[tuple[tuple[str, Values | None], ...], ...] | None
    plan: tuple[str, ...]
    bfcl: bool


def as_tasks(rows: Iterable[Mapping[str, Any]], *, must: bool = False) -> list[dict[str, Any]]:
    """A task for each assistant turn: the row with the messages up to this turn, which is the gold
    answer and whose place is `answer_at`. Of a row whose `gold` says what is wanted, and of a task,
    only the last turn.
    A turn with nothing to answer before it is none. Raises BadInput: `messages` is no list of
    messages with roles; or it `must` have a turn and has none."""
    tasks: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        messages, name = row.get("messages"), row.get("id", f"row {number}")
        if not isinstance(messages, list) or not all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str)
            for message in messages
        ):
            raise _refused(row, "messages", "a list of messages with roles", messages)
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        told = row.get("gold") or {}
        whole = any(told.get(key) is not None for key in ("calls", "plan", "top_k", "call"))
        if whole and (not turns or turns[-1] < len(messages) - 1):
            turns.append(len(messages))  # asked at its end; `gold` alone says what is wanted
        made, before = "answer_at" in row, len(tasks)
        for turn in turns[-1:] if whole or made else turns:
            if any(message["role"] in ("user", "tool") for message in messages[:turn]):
                task = {**row, "messages": messages[: turn + 1], "answer_at": turn}
                tasks.append(task if made else {**task, "id": f"{name}/{turn}"})
        if must and len(tasks) == before:
            expected = "an answer of the assistant after a user's message"
            raise _refused(row, "messages", expected, [one["role"] for one in messages])
    return tasks


def prompt_of(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages before the gold answer, each with a `content`, as AgentScope wants them."""
    return [{"content": "", **message} for message in task["messages"][: _answer_at(task)]]


def tools_of(task: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row's tools, a list or JSON text. Raises BadInput: they are neither."""
    tools = task.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise _refused(task, "tools", "a list of tools, or one as JSON", str(error)) from error
    if not isinstance(tools, list):
        raise _refused(task, "tools", "a list of tools, or one as JSON", tools)
    return tools


def task_type_of(row: Mapping[str, Any]) -> str | None:
    """`task_type` of a row, or of its metadata."""
    metadata = row.get("metadata")
    found = row.get("task_type") or (isinstance(metadata, Mapping) and metadata.get("task_type"))
    return str(found) if found else None


def calls_of(message: Mapping[str, Any]) -> list[Call]:
    """The calls of a message in their order: its `tool_calls`, or else the calls in Hermes tags in
    its text. One whose JSON has no name or no object of arguments has no name."""
    calls = message.get("tool_calls")
    if calls:
        return [_read(call.get("function")) for call in calls]
    found = []
    for match in TAGGED_CALL.finditer(_text(message)):
        try:
            found.append(_read(json.loads(match[1])))
        except (ValueError, RecursionError):
            found.append(Call(None, {}))
    return found


def gold_of(task: Mapping[str, Any]) -> Gold:
    """What a task wants. Raises BadInput: it has neither a gold answer nor `gold`, or they cannot
    be read."""
    gold, at = task.get("gold") or {}, _answer_at(task)
    (message,) = task["messages"][at : at + 1] or [{}]
    if not message and not gold:
        found = task["messages"][-1:]
        raise _refused(task, "messages", "the assistant's answer as the last one", found)
    plan, given, own = tuple(gold.get("plan") or ()), gold.get("calls"), calls_of(message)
    names, counted = plan or gold.get("top_k"), not gold.get("names_only")
    calls: Any
    if given or (given is not None and not gold.get("call")):
        calls = [[(one["name"], one.get("arguments") or {}) for one in any_of] for any_of in given]
    elif names and not (own and counted):
        calls, counted = [[(name, {})] for name in names], False
    elif own or not gold.get("call"):
        if any(call.name is None for call in own):
            raise _refused(task, "messages", "a gold answer whose calls can be read", message)
        calls = [[(c.name, {key: [value] for key, value in c.arguments.items()})] for c in own]
    else:
        calls = None
    if calls is not None:
        calls = tuple(tuple((n, v if counted else None) for n, v in any_of) for any_of in calls)
    called = bool(gold["call"]) if gold.get("call") is not None else bool(calls)
    return Gold(called, calls if called else (), plan if called else (), bool(given))


def measures(answer: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, float]:
    """The measures of an answer, an assistant message, that apply to the task; each in [0, 1].

    With n wanted and m made calls, of which k are paired by name (each call once; exact pairs
    first, then those with most right arguments); a call that cannot be read is made, but unnamed:

    - tool_selection_accuracy: 2 k / (n + m), the F1 of the calls' names. If calls are wanted and it
      is known which.
    - argument_correctness: the mean over the wanted calls of right / counted arguments of its pair,
      0 without one. Counted are the arguments of both sides; not one that is left out, if it may
      be, and not one that is not wanted but has the schema's default (BFCL knows no defaults). 1 if
      none is counted. If calls with arguments are wanted.
    - plan_success_rate: 1 if the plan's tools were called in its order, other calls between them or
      not; else 0. If there is a plan.
    - step_efficiency: min(1, n / m); 0 if m is 0. If calls are wanted and it is known which.
    - timing_precision: 1 if a call was made exactly if one was wanted, and all can be read; else 0.
    - end_to_end_success: 1 if the made calls are the wanted ones, none missing and none more, with
      all arguments right, and in the plan's order; where none is wanted, if none was made and there
      is a text outside of <think>; where it is unknown which, as timing_precision. Else 0.
    """
    gold, made = gold_of(task), calls_of(answer)
    timely = float(bool(made) == gold.called and all(call.name is not None for call in made))
    found = {"timing_precision": timely}
    if not gold.called:
        said = bool(_THOUGHT.sub("", _text(answer)).strip())
        return found | {"end_to_end_success": float(timely and said)}
    if gold.calls is None:
        return found | {"end_to_end_success": timely}
    wanted, steps = len(gold.calls), len(made)
    shares = _paired(made, gold, {} if gold.bfcl else _defaults(task))
    found["tool_selection_accuracy"] = 2 * len(shares) / (wanted + steps)
    found["step_efficiency"] = min(1.0, wanted / steps) if steps else 0.0
    if any(values is not None for any_of in gold.calls for _, values in any_of):
        found["argument_correctness"] = sum(shares) / wanted
    exact = timely and wanted == steps == sum(share == 1 for share in shares)
    if gold.plan:
        names = iter([call.name for call in made])
        found["plan_success_rate"] = float(all(name in names for name in gold.plan))
        exact = exact and found["plan_success_rate"] == 1
    found["end_to_end_success"] = float(exact)
    return {name: found[name] for name in MEASURES if name in found}


def mean_measures(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each measure over the turns that it applies to."""
    applies = {name: [one[name] for one in found if name in one] for name in MEASURES}
    return {name: sum(values) / len(values) for name, values in applies.items() if values}


def turn_reward(found: Mapping[str, float], settings: TurnRewardSection | None = None) -> float:
    """The mean of the measures, weighted by `settings` (None: `rewards.turns` of the rollout); the
    weight of one that does not apply is spread over the others. Raises Unscored: no measure with a
    weight applies."""
    chosen = reward_settings().turns if settings is None else settings
    weights = {name: getattr(chosen, name) for name in MEASURES}
    return weighted({name: found.get(name) for name in MEASURES}, weights)


def _paired(made: Sequence[Call], gold: Gold, defaults: Mapping[str, Any]) -> list[float]:
    """The share of right arguments of each pair of a made and a wanted call: as many exact pairs as
    possible (Kuhn's augmenting paths), then the best of what is left."""
    shares: dict[tuple[int, int], float] = {}
    for i, call in enumerate(made):
        for j, any_of in enumerate(gold.calls or ()):
            fits = [
                _share(call.arguments, values, defaults.get(name, {}), gold.bfcl)
                for name, values in any_of
                if name == call.name
            ]
            if fits:
                shares[i, j] = max(fits)
    taken: dict[int, int] = {}  # wanted call: made call

    def augment(i: int, seen: set[int]) -> bool:
        for (made_call, j), share in shares.items():
            if made_call == i and share == 1 and j not in seen:
                seen.add(j)
                if j not in taken or augment(taken[j], seen):
                    taken[j] = i
                    return True
        return False

    for i in range(len(made)):
        augment(i, set())
    for (i, j), _ in sorted(shares.items(), key=lambda item: -item[1]):
        if j not in taken and i not in taken.values():
            taken[j] = i
    return [shares[i, j] for j, i in taken.items()]


def _share(
    given: Mapping[str, Any], wanted: Values | None, defaults: Mapping[str, Any], bfcl: bool
) -> float:
    if wanted is None:
        return 1.0
    right = counted = 0
    for name in given.keys() | wanted.keys():
        if name not in wanted:
            known = name in defaults and _same(given[name], defaults[name], bfcl=False)
            counted += not known
            continue
        if name not in given:
            # BFCL marks what may be left out by an empty text among its values.
            free = bfcl and "" in wanted[name]
            known = name in defaults and any(_same(defaults[name], v, bfcl) for v in wanted[name])
            counted += not (free or known)
            continue
        counted += 1
        right += any(_same(given[name], value, bfcl) for value in wanted[name])
    return right / counted if counted else 1.0


def _same(given: Any, wanted: Any, bfcl: bool) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true or "1" are not. By BFCL's rules
    (`ast_checker.py`) texts are compared without case, spaces and ,./-_*^ and an object's wanted
    value may list the acceptable values of each key."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, (int, float)) and isinstance(wanted, (int, float)):
        return given == wanted
    if isinstance(given, str) and isinstance(wanted, str):
        return _plain(given) == _plain(wanted) if bfcl else given.strip() == wanted.strip()
    if isinstance(given, list) and isinstance(wanted, list):
        pairs = zip(given, wanted, strict=False)
        return len(given) == len(wanted) and all(_same(a, b, bfcl) for a, b in pairs)
    if isinstance(given, Mapping) and isinstance(wanted, Mapping):
        if given.keys() == wanted.keys() and all(_same(given[k], wanted[k], bfcl) for k in wanted):
            return True
        listed = bfcl and all(isinstance(values, list) for values in wanted.values())
        return (
            listed
            and given.keys() <= wanted.keys()
            and all(
                any(_same(given[key], value, bfcl) for value in values)
                if key in given
                else "" in values
                for key, values in wanted.items()
            )
        )
    return given is None and wanted is None


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


def _defaults(task: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The defaults of arguments in the tools' schemas, by tool."""
    found = {}
    for tool in tools_of(task):
        function = tool.get("function") or {}
        properties = (function.get("parameters") or {}).get("properties") or {}
        found[str(function.get("name"))] = {
            name: schema["default"]
            for name, schema in properties.items()
            if isinstance(schema, Mapping) and schema.get("default") is not None
        }
    return found


def _read(function: Any) -> Call:
    """A call from `{"name", "arguments"}`; arguments may be JSON text, as OpenAI writes them."""
    arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping) or not isinstance(function.get("name"), str):
        return Call(None, {})
    return Call(function["name"], arguments)


def _text(message: Mapping[str, Any]) -> str:
    """The text of a message, whose content is a text, None or a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def _answer_at(task: Mapping[str, Any]) -> int:
    """The place of the gold answer in a task's messages; their number if there is none."""
    last = len(task["messages"]) - 1
    asked = last < 0 or task["messages"][last].get("role") != "assistant"
    return int(task.get("answer_at", last + 1 if asked else last))


def _refused(row: Mapping[str, Any], key: str, expected: str, found: Any) -> BadInput:
    place = f"{row['id']}: {key}" if row.get("id") else key
    fix = "correct or remove this row"
    return BadInput.of("A row cannot be scored.", place, expected, f"{found!r:.200}", fix)
