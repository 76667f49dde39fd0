"""Dialogues with tools, from the forms in which people keep them, as OpenAI messages.

`as_dialogue` recognises a row by its keys: OpenAI's `messages`; ShareGPT's `conversations`, with
Hermes' tags or with `function_call` turns; xLAM's `query` and `answers`; BFCL's `question` and
`function`; Seal-Tools' `query` and `calling`; SAGE's dialogues (`turns`) and benchmarks
(`instruction` and `ground_truth`). What it returns:

    {"messages": [...], "tools": [...], "task_type": ..., "id"?, "split"?, "metadata"?, "gold"?}

The last message of the assistant is what a benchmark's row wants; `gold` says what else is right:
`calls` (possible values of arguments), `names_only` (the row names tools without arguments),
`plan` (tools in their order), `call` (whether a tool is called), `top_k` (tools).

Nothing is mended silently: a row that is none of these raises ValueError with what was found;
`Unfit`, a ValueError, if it is one of them but its JSON is broken or it calls a tool that it does
not offer: such rows are left out of training and counted.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aflow_tune.data.catalogue import Tool, tools_of
from aflow_tune.data.rows import Table, read_table
from aflow_tune.errors import Fault

HELD_OUT = ("test", "dev", "validation", "val")
TASK_TYPES = ("selection", "planning", "timing", "retrieval")
SPEAKERS = {"human": "user", "user": "user", "system": "system", "tool": "tool"}
SPEAKERS |= {"gpt": "assistant", "assistant": "assistant", "function_call": "call"}
SPEAKERS |= {"model": "assistant", "bot": "assistant", "observation": "tool"}
SPEAKERS |= {"function_response": "tool", "function": "tool", "ipython": "tool"}
_TASKS = {"tool_selection": "selection", "task_planning": "planning", "timing_judgment": "timing"}
_TASKS |= {kind: kind for kind in TASK_TYPES} | {"tool_retrieval": "retrieval"}
_RETRIEVES = re.compile(r"\b(search|find|retriev)", re.IGNORECASE)
_WAITS = re.compile(r"\b(if|when|wait|check|condition)", re.IGNORECASE)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_(?:response|result)>\s*(.*?)\s*</tool_(?:response|result)>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\s*(.*?)\s*</tools>", re.DOTALL)
_ROLES = {"function": "tool", "ipython": "tool", "observation": "tool", "developer": "system"}
_KEPT = ("split", "metadata", "task_type", "gold", "scenario", "source", "benchmark")

Row = Mapping[str, Any]


class Unfit(ValueError):
    """Why a row of a known form is not learned from."""


Message = dict[str, Any]


def as_dialogue(
    row: Row,
    catalogue: Mapping[str, Tool] | None = None,
    *,
    candidates: int = 4,
    key: str = "messages",
) -> dict[str, Any]:
    """A row of any known form as a dialogue (see the module).

    Args:
        catalogue: tools by name, for rows that only name them.
        candidates: tools offered with a row of Seal-Tools, those called among them; the others are
            drawn from the catalogue by the row's id.
        key: where OpenAI's messages stand.

    Raises ValueError: the row cannot be read.
    """
    known = catalogue or {}
    if row.get(key) is None and isinstance(row.get("messages"), list | str):
        key = "messages"
    if row.get(key) is not None:
        found: dict[str, Any] = {"messages": _openai(_loaded(row[key], key)), "tools": _tools(row)}
    elif row.get("conversations") is not None:
        found = _sharegpt(row)
    elif "turns" in row:
        found = _sage_dialogue(row, known)
    elif "ground_truth" in row and "instruction" in row:
        found = _sage_benchmark(row, known)
    elif "question" in row and ("function" in row or "functions" in row):
        found = _bfcl(row)
    elif "query" in row and "calling" in row:
        found = _seal_tools(row, known, candidates)
    elif "query" in row and "answers" in row:
        found = _xlam(row)
    else:
        raise ValueError(f"a row of no known form: {', '.join(map(str, row)) or 'no keys'}")
    for name in _KEPT:
        if row.get(name) is not None:
            found.setdefault(name, row[name])
    if (label := _first(row, "id", "dialog_id", "sample_id")) is not None:
        found.setdefault("id", str(label))
    _check_calls(found)
    found["task_type"] = task_type(found, str(row.get("goal") or ""), row.get("target_tools"))
    return found


def of_split(table: Table, *, held_out: bool) -> Table:
    """The rows of a split, where rows name theirs under `split`: those of `train`, or else of
    `test` (of `dev` or `validation` without it). Other tables as they are."""
    splits = Counter(str(row["split"]) for row in table.rows if row.get("split") is not None)
    if splits.keys() <= {"train"} and not held_out:
        return table
    named = [name for name in HELD_OUT if name in splits]
    wanted = named[:1] if held_out else ["train"] if named and "train" in splits else []
    if not wanted:
        return table
    kept = [at for at, row in enumerate(table.rows) if row.get("split") in (None, *wanted)]
    others = ", ".join(f"{name} {count}" for name, count in splits.items() if name not in wanted)
    told = [f"{table.source}: rows of other splits: {others}"] if others else []
    return _part(table, kept, told)


def with_answers(table: Table, files: Iterable[Path]) -> Table:
    """BFCL's questions with their `ground_truth`, from `possible_answer/` beside their files."""
    answers: dict[str, Any] = {}
    for file in files:
        beside = file.parent / "possible_answer" / file.name
        if beside.is_file():
            for row in read_table(str(beside), [beside], whole=True).rows:
                answers[str(row.get("id"))] = row.get("ground_truth")
    if not answers:
        return table
    rows = [
        {**row, "ground_truth": answers[str(row.get("id"))]}
        if str(row.get("id")) in answers and "ground_truth" not in row
        else row
        for row in table.rows
    ]
    return replace(table, rows=rows)


def dialogues_of(
    table: Table, catalogue: Mapping[str, Tool], candidates: int, *, held_out: bool
) -> Table:
    """A table of rows of any form as dialogues. Rows that do not fit are in `left_out`, those of no
    known form in `faults`."""
    table = of_split(table, held_out=held_out)
    kept: list[int] = []
    rows: list[dict[str, Any]] = []
    faults, left_out = list(table.faults), []
    for at, (row, place) in enumerate(zip(table.rows, table.places, strict=True)):
        try:
            rows.append(as_dialogue(row, catalogue, candidates=candidates))
            kept.append(at)
        except Unfit as error:
            left_out.append(f"{place}: {error}")
        except ValueError as error:
            expected, fix = "a dialogue of a known form", "see docs/agents.md, or remove this row"
            faults.append(Fault(place, expected, str(error), fix))
    found = _part(table, kept, left_out)
    return replace(found, rows=rows, faults=faults[:5])


def _part(table: Table, kept: Sequence[int], left_out: Sequence[str]) -> Table:
    return replace(
        table,
        rows=[table.rows[at] for at in kept],
        places=[table.places[at] for at in kept],
        total=len(kept),
        left_out=[*table.left_out, *left_out],
    )


def learnable(dialogue: Row) -> bool:
    """Whether the dialogue has a message of the assistant."""
    return any(message["role"] == "assistant" for message in dialogue["messages"])


def as_pair(row: Row, *, keys: Sequence[str] = ("messages", "chosen", "rejected")) -> Row:
    """A row for DPO as `messages` (the prompt), `tools`, and `chosen` and `rejected`, one message
    of the assistant each; they may be texts. What both begin with belongs to the prompt. Raises
    ValueError: it is no pair."""
    key, *sides = keys
    key = next((name for name in (key, "messages", "prompt") if row.get(name) is not None), key)
    prompt = _said(row.get(key) or [], "user")
    answers = [_said(row.get(side), "assistant") for side in sides]
    while all(len(answer) > 1 for answer in answers) and answers[0][0] == answers[1][0]:
        prompt.append(answers[0][0])
        answers = [answer[1:] for answer in answers]
    for side, answer in zip(sides, answers, strict=True):
        if [message["role"] for message in answer] != ["assistant"]:
            roles = ", ".join(message["role"] for message in answer) or "no message"
            raise ValueError(f"{side}: {roles}; it is one message of the assistant")
    if not prompt:
        raise ValueError(
            "a pair without a prompt: chosen and rejected begin with nothing in common"
        )
    found = {"messages": prompt, "tools": _tools(row), "chosen": answers[0][0]}
    found["rejected"] = answers[1][0]
    for side in ("chosen", "rejected"):
        _check_calls({**found, "messages": [*prompt, found[side]]})
    return found


def task_type(dialogue: Row, goal: str = "", targets: Any = None) -> str:
    """`metadata.task_type`; planning with three tools or eight turns; retrieval or timing by words
    of the goal (else of the user's first message); else selection. In this order."""
    metadata = dialogue.get("metadata")
    told = dialogue.get("task_type")
    if isinstance(metadata, Mapping):
        told = metadata.get("task_type") or told
    if told in _TASKS:
        return _TASKS[str(told)]
    messages = dialogue["messages"]
    used = set(targets) if isinstance(targets, list) else set(called(messages))
    if len(used) >= 3 or sum(message["role"] != "system" for message in messages) >= 8:
        return "planning"
    asked = next((it["content"] for it in messages if it["role"] == "user"), "")
    text = goal or str(asked)
    if _RETRIEVES.search(text):
        return "retrieval"
    return "timing" if _WAITS.search(text) else "selection"


def called(messages: Iterable[Row]) -> list[str]:
    """The names of all tools that the assistant calls, in order."""
    return [call["function"]["name"] for it in messages for call in it.get("tool_calls") or ()]


def _said(value: Any, role: str) -> list[Message]:
    """Messages, one message, either as JSON, or a text as a message of `role`."""
    given = value
    if isinstance(value, str):
        with contextlib.suppress(json.JSONDecodeError):
            given = json.loads(value)
    given = [given] if isinstance(given, Mapping) and "role" in given else given
    if isinstance(value, str) and not isinstance(given, list):
        given = [{"role": role, "content": value}]
    return _openai(given)


def _first(row: Row, *keys: str) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _loaded(value: Any, where: str) -> Any:
    """JSON text as its value; a value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise Unfit(f"{where}: broken JSON ({error.msg} at column {error.colno})") from None


def _tools(row: Row, *more: Any) -> list[dict[str, Any]]:
    """What a row offers under `tools`, `functions` or `function`, in OpenAI's form."""
    given: Any = _first(row, "tools", "functions", "function") or next(
        (it for it in more if it), []
    )
    offered = list(tools_of(_loaded(given, "tools"))) if given else []
    return [tool.to_openai() for tool in offered]


def _call(name: Any, arguments: Any, number: int, where: str) -> dict[str, Any]:
    arguments = _loaded(arguments if arguments not in (None, "") else {}, f"{where}: arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}: a call of no tool ({name!r:.40})")
    if not isinstance(arguments, Mapping):
        raise Unfit(f"{where}: arguments that are no JSON object ({arguments!r:.40})")
    written = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": written}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _openai(messages: Any) -> list[Message]:
    """Messages with checked calls; OpenAI's older `function_call` and role `function` become
    calls and results of tools."""
    if not isinstance(messages, list):
        raise ValueError(f"messages: a {type(messages).__name__}, not a list")
    found: list[Message] = []
    for number, given in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
            raise ValueError(f"{where}: no message with a role ({given!r:.60})")
        message = {name: value for name, value in given.items() if value is not None}
        message["role"] = _ROLES.get(message["role"], message["role"])
        calls = message.pop("tool_calls", None) or []
        if old := message.pop("function_call", None):
            calls = [{"function": old}]
        message.setdefault("content", "")
        if not isinstance(message["content"], str | list):
            raise ValueError(f"{where}: content that is no text ({message['content']!r:.60})")
        if not isinstance(calls, list):
            raise ValueError(f"{where}: tool_calls that are no list")
        if calls:
            made: list[dict[str, Any]] = []
            for call in calls:
                inner = call.get("function", call) if isinstance(call, Mapping) else None
                if not isinstance(inner, Mapping):
                    raise ValueError(f"{where}: a call of an unknown form ({call!r:.60})")
                call_id = len(called(found)) + len(made)
                one = _call(inner.get("name"), inner.get("arguments"), call_id, where)
                made.append(one | ({"id": call["id"]} if call.get("id") else {}))
            message["tool_calls"] = made
        found.append(message)
    return found


def _check_calls(dialogue: Row) -> None:
    """Every call is of a tool that the dialogue offers, if it offers any."""
    offered = {tool["function"]["name"] for tool in dialogue["tools"]}
    unknown = [name for name in called(dialogue["messages"]) if offered and name not in offered]
    if unknown:
        raise Unfit(f"a call of {unknown[0]!r}, which is not among the tools of the row")


def _add_calls(messages: list[Message], calls: Iterable[tuple[Any, Any]], text: str = "") -> None:
    """A message of the assistant with calls; a message of its own just before takes them in."""
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": text})
    elif text:
        messages[-1]["content"] = f"{messages[-1]['content']}\n{text}".strip()
    taken = messages[-1].setdefault("tool_calls", [])
    before = len(called(messages))
    where = f"turn {len(messages) - 1}"
    for number, (name, arguments) in enumerate(calls, before):
        taken.append(_call(name, arguments, number, where))


def _sharegpt(row: Row) -> dict[str, Any]:
    """ShareGPT: `from` and `value`; calls as turns of `function_call`, or in Hermes' tags."""
    turns = _loaded(row["conversations"], "conversations")
    if not isinstance(turns, list):
        raise ValueError(f"conversations: a {type(turns).__name__}, not a list")
    messages: list[Message] = []
    in_text: Any = None
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": row["system"]})
    for number, turn in enumerate(turns):
        spoke = turn.get("from", turn.get("role")) if isinstance(turn, Mapping) else None
        role = SPEAKERS.get(str(spoke))
        value = turn.get("value", turn.get("content")) if isinstance(turn, Mapping) else None
        if role is None or value is None:
            raise ValueError(f"conversations[{number}]: a turn of {spoke!r}")
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if role == "call":
            calls = _loaded(value, f"conversations[{number}]")
            calls = calls if isinstance(calls, list) else [calls]
            if not all(isinstance(call, Mapping) for call in calls):
                raise ValueError(f"conversations[{number}]: a call that is no object")
            _add_calls(messages, [(it.get("name"), it.get("arguments")) for it in calls])
        elif role == "assistant" and (tagged := _CALL.findall(text)):
            pairs = []
            for one in tagged:
                call = _loaded(one, f"conversations[{number}]: tool_call")
                if not isinstance(call, Mapping):
                    raise ValueError(f"conversations[{number}]: a call that is no object")
                pairs.append((call.get("name"), call.get("arguments")))
            messages.append({"role": "assistant", "content": _CALL.sub("", text).strip()})
            _add_calls(messages, pairs)
        elif role == "tool":
            results = _RESULT.findall(text) or [text]
            messages += [{"role": "tool", "content": result} for result in results]
        else:
            if role == "system":  # the renderer lists the tools itself
                in_text = next(filter(None, _TOOLS.findall(text)), in_text)
                text = _TOOLS.sub(lambda found: "" if found[1] else found[0], text).strip()
                if not text:
                    continue
            messages.append({"role": role, "content": text})
    offered = _tools(row, _listed(in_text) if in_text else None)
    return {"messages": _numbered(messages), "tools": offered}


def _listed(text: str) -> Any:
    """Tools inside `<tools>`: a JSON list, or one object a line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        lines = [line for line in text.splitlines() if line.strip()]
        return [_loaded(line, "<tools>") for line in lines]


def _numbered(messages: list[Message]) -> list[Message]:
    """Results of tools with the ids of the calls before them, in order."""
    waiting: list[str] = []
    for message in messages:
        waiting = [call["id"] for call in message.get("tool_calls", ())] or waiting
        if message["role"] == "tool" and waiting:
            message.setdefault("tool_call_id", waiting.pop(0))
    return messages


def _answered(query: str, calls: Iterable[tuple[Any, Any]], text: str = "") -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": query}]
    pairs = list(calls)
    if pairs:
        _add_calls(messages, pairs, text)
    elif text:
        messages.append({"role": "assistant", "content": text})
    return messages


def _xlam(row: Row) -> dict[str, Any]:
    calls = _loaded(row["answers"], "answers")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"answers: no list of calls ({row['answers']!r:.60})")
    pairs = [(call.get("name"), call.get("arguments")) for call in calls]
    return {"messages": _answered(str(row["query"]), pairs), "tools": _tools(row)}


def _bfcl(row: Row) -> dict[str, Any]:
    """BFCL: a question of one or more turns; its `ground_truth` (from `possible_answer/`) has each
    call as `{name: {parameter: [possible values]}}`, "" for a parameter that may be left out."""
    question = _loaded(row["question"], "question") if str(row["question"])[:1] == "[" else None
    asked = row["question"] if question is None else question
    if isinstance(asked, list) and asked and isinstance(asked[0], list):
        if len(asked) > 1:
            raise Unfit("a question of several turns, which needs BFCL's own environments")
        asked = asked[0]
    messages = _openai(asked if isinstance(asked, list) else [{"role": "user", "content": asked}])
    tools = _tools(row)
    found: dict[str, Any] = {"messages": messages, "tools": tools}
    truth = _loaded(row.get("ground_truth", row.get("possible_answer")), "ground_truth")
    if truth is None:
        return found
    try:
        wanted = [(name, dict(values)) for call in truth for name, values in call.items()]
        for _, values in wanted:
            values.update({k: v if isinstance(v, list) else [v] for k, v in values.items()})
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"ground_truth: no list of calls ({truth!r:.60})") from None
    firsts = [
        (name, {key: _plain_value(one[0]) for key, one in values.items() if one and one[0] != ""})
        for name, values in wanted
    ]
    if firsts:
        _add_calls(messages, firsts)
    calls = [{"name": name, "arguments": values} for name, values in wanted]
    found["gold"] = {"calls": [[call] for call in calls], "call": bool(calls)}
    return found


def _plain_value(value: Any) -> Any:
    """A value of BFCL's answers: an object has a list of possible values for each key."""
    if isinstance(value, Mapping):
        pairs = {key: it[0] if isinstance(it, list) and it else it for key, it in value.items()}
        return {key: _plain_value(it) for key, it in pairs.items() if it != ""}
    return value


def _seal_tools(row: Row, known: Mapping[str, Tool], candidates: int) -> dict[str, Any]:
    calls = row["calling"]
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"calling: no list of calls ({calls!r:.60})")
    pairs = [(call.get("api"), call.get("parameters")) for call in calls]
    wanted = list(dict.fromkeys(str(name) for name, _ in pairs))
    if known and (missing := [name for name in wanted if name not in known]):
        raise Unfit(f"a call of {missing[0]!r}, which is not in the catalogue")
    draw = random.Random(f"candidates/{row.get('id', row['query'])}")
    others = sorted(known.keys() - set(wanted))
    names = wanted + draw.sample(others, min(len(others), max(0, candidates - len(wanted))))
    draw.shuffle(names)
    offered = [known[name].to_openai() for name in names if name in known]
    return {"messages": _answered(str(row["query"]), pairs), "tools": offered}


def _sage_tool(name: str, known: Mapping[str, Tool]) -> dict[str, Any]:
    return (known.get(name) or Tool(name, "")).to_openai()


def _sage_dialogue(row: Row, known: Mapping[str, Tool]) -> dict[str, Any]:
    """SAGE's dialogue: a turn of a tool is the assistant's call of it and its result. Tools in a
    row are one message with as many calls."""
    turns = _loaded(row["turns"], "turns")
    if not isinstance(turns, list):
        raise ValueError(f"turns: a {type(turns).__name__}, not a list")
    messages: list[Message] = []
    results: list[Message] = []
    named_only = False
    for number, turn in enumerate(turns):
        role = turn.get("role") if isinstance(turn, Mapping) else None
        if role not in ("user", "assistant", "tool", "system"):
            raise ValueError(f"turns[{number}]: the role {role!r}")
        text = str(turn.get("content") or "")
        if role == "tool":
            arguments = _first(turn, "arguments", "parameters")
            named_only |= arguments is None
            name = turn.get("tool_id")
            _add_calls(messages, [(name, arguments)])
            result = turn.get("result", text)
            written = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            results.append({"role": "tool", "content": written})
            continue
        messages, results = messages + results, []
        messages.append({"role": role, "content": text})
    messages += results
    targets = row.get("target_tools") or []
    names = dict.fromkeys([*map(str, targets), *called(messages)])
    found: dict[str, Any] = {"messages": _numbered(messages)}
    found["tools"] = [_sage_tool(name, known) for name in names]
    if named_only:
        found["gold"] = {"names_only": True}
    return found


def _sage_benchmark(row: Row, known: Mapping[str, Tool]) -> dict[str, Any]:
    truth = _loaded(row["ground_truth"], "ground_truth")
    if not isinstance(truth, Mapping):
        raise ValueError(f"ground_truth: a {type(truth).__name__}, not an object")
    context = row.get("context")
    query = str(row["instruction"])
    if context:
        written = context if isinstance(context, str) else json.dumps(context, ensure_ascii=False)
        query = f"{query}\n\n{written}"
    gold: dict[str, Any] = {"names_only": True}
    names: list[str] = []
    text = ""
    if "tool_sequence" in truth or "plan_steps" in truth:
        steps = truth.get("plan_steps") or []
        names = list(truth.get("tool_sequence") or [step.get("tool_id") for step in steps])
        gold["plan"] = names
    elif "should_call_tool" in truth:
        gold["call"] = bool(truth["should_call_tool"])
        offered = row.get("candidate_tools") or []
        if gold["call"]:
            names = offered if len(offered) == 1 else []
        else:
            text = str(truth.get("direct_answer") or "")
    elif "top_k" in truth:
        names = list(truth["top_k"])
        gold["top_k"] = names
    else:
        keys = ", ".join(map(str, truth)) or "nothing"
        raise ValueError(
            f"ground_truth: neither top_k, tool_sequence nor should_call_tool ({keys})"
        )
    candidates = dict.fromkeys([*(row.get("candidate_tools") or []), *names])
    return {
        "messages": _answered(query, [(name, None) for name in names], text),
        "tools": [_sage_tool(str(name), known) for name in candidates],
        "gold": gold,
    }
