"""Dialogues with tools in every form in which people keep them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aflow_tune.data.catalogue import Tool
from aflow_tune.data.dialogues import Unfit, as_dialogue, as_pair, task_type

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OPENAI = {"type": "function", "function": WEATHER}
CATALOGUE = {name: Tool(name, "") for name in ("weather", "maps_find_001", "mail_send_002", "x")}


def calls(dialogue: dict[str, Any], at: int = -1) -> list[tuple[str, Any]]:
    made = dialogue["messages"][at].get("tool_calls", [])
    return [(it["function"]["name"], json.loads(it["function"]["arguments"])) for it in made]


def roles(dialogue: dict[str, Any]) -> str:
    return " ".join(message["role"] for message in dialogue["messages"])


def shown(value: Any) -> str:
    return json.dumps(value)


WANTED = [("weather", {"city": "Oslo"})]
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
FORMS: dict[str, dict[str, Any]] = {
    "openai": {
        "messages": [
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": CALL}]},
        ],
        "tools": [OPENAI],
    },
    "openai, as text": {
        "messages": shown(
            [
                {"role": "user", "content": "Oslo?"},
                {"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments":
                    shown(CALL["arguments"])}}]},
            ]
        ),
        "tools": shown([OPENAI]),
    },
    "openai's older calls": {
        "messages": [
            {"role": "user", "content": "Oslo?"},
            {"role": "assistant", "content": "", "function_call": CALL},
        ],
        "functions": [WEATHER],
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "Oslo?"},
            {"from": "function_call", "value": shown(CALL)},
        ],
        "tools": shown([WEATHER]),
    },
    "hermes": {
        "conversations": [
            {"from": "system", "value": f"<tools></tools> has them:<tools>{shown(OPENAI)}</tools>"},
            {"from": "human", "value": "Oslo?"},
            {"from": "gpt", "value": f"<tool_call>\n{shown(CALL)}\n</tool_call>"},
        ]
    },
    "xlam": {
        "id": 7,
        "query": "Oslo?",
        "tools": shown([{"name": "weather", "description": "The weather of a city.",
                         "parameters": {"city": {"type": "str"}}}]),
        "answers": shown([CALL]),
    },
    "bfcl": {
        "id": "simple_0",
        "question": [[{"role": "user", "content": "Oslo?"}]],
        "function": [{**WEATHER, "parameters": {**WEATHER["parameters"], "type": "dict"}}],
        "ground_truth": [{"weather": {"city": ["Oslo", "Oslo, Norway"], "unit": ["", "C"]}}],
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_recognised(form: str) -> None:
    dialogue = as_dialogue(FORMS[form])
    assert roles(dialogue).removeprefix("system ") == "user assistant"
    if form == "hermes":
        assert dialogue["messages"][0]["content"] == "<tools></tools> has them:"
    assert calls(dialogue) == WANTED
    (tool,) = dialogue["tools"]
    assert tool["type"] == "function"
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["parameters"]["properties"]["city"]["type"] == "string"


def test_bfcls_possible_values_are_kept() -> None:
    gold = as_dialogue(FORMS["bfcl"])["gold"]
    values = {"city": ["Oslo", "Oslo, Norway"], "unit": ["", "C"]}
    assert gold["calls"] == [[{"name": "weather", "arguments": values}]]
    several = {**FORMS["bfcl"], "question": [[{"role": "user", "content": "a"}]] * 2}
    with pytest.raises(Unfit, match="several turns"):
        as_dialogue(several)


def test_results_of_tools_follow_their_calls() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "Oslo and Rome?"},
            {"from": "gpt", "value": "Looking.\n"
             + "".join(f"<tool_call>{shown({**CALL, 'arguments': {'city': city}})}</tool_call>"
                       for city in ("Oslo", "Rome"))},
            {"from": "tool", "value": "<tool_response>cold</tool_response>"
                                      "<tool_response>warm</tool_response>"},
            {"from": "gpt", "value": "Cold and warm."},
        ],
        "tools": [OPENAI],
    }  # fmt: skip
    dialogue = as_dialogue(row)
    assert roles(dialogue) == "user assistant tool tool assistant"
    asked = dialogue["messages"][1]
    assert asked["content"] == "Looking."
    ids = [call["id"] for call in asked["tool_calls"]]
    assert [it["tool_call_id"] for it in dialogue["messages"][2:4]] == ids


def test_seal_tools_offers_what_it_calls_among_others() -> None:
    row = {"id": "dev-easy-1", "query": "Oslo?", "calling": [{"api": "weather",
           "parameters": {"city": "Oslo"}, "responses": []}]}  # fmt: skip
    many = CATALOGUE | {f"t{number}": Tool(f"t{number}", "") for number in range(20)}
    first, again = as_dialogue(row, many), as_dialogue(row, many)
    assert calls(first) == WANTED
    names = [tool["function"]["name"] for tool in first["tools"]]
    assert len(set(names)) == 4
    assert "weather" in names
    assert first == again
    with pytest.raises(Unfit, match="'weather', which is not in the catalogue"):
        as_dialogue(row, {"x": Tool("x", "")})


def test_sages_three_files_load_unchanged() -> None:
    dialogue = as_dialogue(
        {
            "dialog_id": "sft_000001",
            "goal": "Find a map and send it",
            "turns": [
                {"role": "user", "content": "A map, please."},
                {"role": "assistant", "content": "I look."},
                {"role": "tool", "content": "maps", "tool_id": "maps_find_001", "result": {"n": 1}},
                {"role": "tool", "content": "mail", "tool_id": "mail_send_002", "result": "sent"},
                {"role": "assistant", "content": "Sent."},
            ],
            "target_tools": ["maps_find_001", "mail_send_002"],
            "metadata": {},
            "split": "train",
        },
        CATALOGUE,
    )
    assert roles(dialogue) == "user assistant tool tool assistant"
    assert calls(dialogue, 1) == [("maps_find_001", {}), ("mail_send_002", {})]
    assert dialogue["messages"][1]["content"] == "I look."
    assert [it["content"] for it in dialogue["messages"][2:4]] == ['{"n": 1}', "sent"]
    assert (dialogue["task_type"], dialogue["split"]) == ("retrieval", "train")

    base = {"sample_id": "s1", "instruction": "A map?", "context": "", "split": "test"}
    base |= {"candidate_tools": ["maps_find_001", "x"], "metadata": {}}
    truths: list[tuple[str, dict[str, Any], list[str]]] = [
        ("tool_selection", {"top_k": ["maps_find_001"], "explanation": "e"}, ["maps_find_001"]),
        ("task_planning", {"plan_steps": [], "tool_sequence": ["x", "maps_find_001"]},
         ["x", "maps_find_001"]),
        ("timing_judgment", {"should_call_tool": False, "direct_answer": "No."}, []),
    ]  # fmt: skip
    found = [
        as_dialogue({**base, "task_type": kind, "ground_truth": truth}, CATALOGUE)
        for kind, truth, _ in truths
    ]
    assert [it["task_type"] for it in found] == ["selection", "planning", "timing"]
    for dialogue, (_, _, names) in zip(found, truths, strict=True):
        assert [name for name, _ in calls(dialogue)] == names
        assert len(dialogue["tools"]) == 2
    assert found[1]["gold"]["plan"] == ["x", "maps_find_001"]
    assert found[2]["gold"]["call"] is False
    assert found[2]["messages"][-1]["content"] == "No."


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "weather",
          "arguments": "{"}}]}]}, "broken JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "other"}}]}],
          "tools": [OPENAI]}, "'other', which is not among the tools"),
        ({"query": "q", "tools": "[", "answers": "[]"}, "tools: broken JSON"),
        ({"conversations": [{"from": "gpt", "value": "<tool_call>{</tool_call>"}]}, "broken JSON"),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_says_why(row: dict[str, Any], told: str) -> None:
    with pytest.raises(Unfit, match=told):
        as_dialogue(row)


@pytest.mark.parametrize(
    "row",
    [
        {}, {"a": 1}, {"messages": 3}, {"messages": [3]}, {"messages": [{"content": "x"}]},
        {"conversations": [{"from": "nobody", "value": "x"}]}, {"turns": [{"role": "x"}]},
        {"instruction": "i", "ground_truth": {"a": 1}}, {"query": "q", "answers": "3"},
        {"question": "q", "function": [], "ground_truth": [3]},
        {"query": "q", "calling": [3]}, {"messages": [{"role": "user", "content": 3}]},
    ],
)  # fmt: skip
def test_a_row_of_no_known_form_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        as_dialogue(row)


@pytest.mark.parametrize(
    ("goal", "tools", "turns", "kind"),
    [
        ("Book a room", ["a", "b", "c"], 2, "planning"),
        ("Book a room", ["a"], 8, "planning"),
        ("Find the cheapest if you can", ["a"], 2, "retrieval"),
        ("Wait until noon", ["a"], 2, "timing"),
        ("Book a room", ["a"], 7, "selection"),
        ("Gift for a friend", ["a"], 2, "selection"),
    ],
)
def test_types_of_tasks(goal: str, tools: list[str], turns: int, kind: str) -> None:
    dialogue: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}] * turns}
    assert task_type(dialogue, goal, tools) == kind
    assert task_type({**dialogue, "metadata": {"task_type": "timing"}}, goal, tools) == "timing"


def test_a_pair_without_a_prompt_takes_what_both_begin_with() -> None:
    user = {"role": "user", "content": "q"}
    row = {side: [user, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    pair = as_pair(row)
    assert pair["messages"] == [user]
    assert (pair["chosen"]["content"], pair["rejected"]["content"]) == ("chosen", "rejected")
    texts = as_pair({"prompt": "q", "chosen": "chosen", "rejected": "rejected"})
    assert texts == pair
    with pytest.raises(ValueError, match="one message of the assistant"):
        as_pair({"messages": [user], "chosen": [user], "rejected": row["rejected"][1:]})
