"""Conversations as tokens: what is served is what is learned, on three families of templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aflow_tune.engines.local.chat import Renderer, parse_calls, template_messages
from aflow_tune.engines.local.scripted import byte_tokenizer
from aflow_tune.errors import BadInput

TOOL = {"type": "function", "function": {"name": "meet", "parameters": {"type": "object"}}}

SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = """{%- if tools %}{{- '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}
{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA = """{{- '<|endoftext|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>ipython\n\n' + message.content + '<|im_end|>' }}
{%- else %}
{%- set calls = message.tool_calls or [] %}
{%- if calls | length > 1 %}{{- raise_exception('one tool at once!') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\n\n' }}
{%- if loop.first and tools %}{{- tools | tojson + '\n' }}{%- endif %}
{%- for call in calls %}{{- '{"name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson + '}' }}{%- endfor %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"""
FAMILIES = {"smollm2": SMOLLM2, "qwen": QWEN, "llama": LLAMA}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


DIALOGUE: list[dict[str, Any]] = [
    {"role": "user", "content": "Who is there?"},
    {"role": "assistant", "content": "", "tool_calls": [call("meet", age=3)]},
    {"role": "tool", "content": "Ann"},
    {"role": "assistant", "content": "It is Ann."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still Ann."},
]


def renderer(family: str) -> Renderer:
    return Renderer(byte_tokenizer(FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
def test_learning_sees_the_tokens_of_serving(family: str) -> None:
    """The server renders a prompt, the model draws an answer and its end token: what is learned is
    that answer after that prompt, for every message of the assistant."""
    of = renderer(family)
    (learned,) = of.examples(DIALOGUE, [TOOL])
    drawn = [
        token
        for token, mine in zip(
            learned.tokens_T[learned.prompt_length :], learned.learned_R, strict=True
        )
        if mine
    ]
    wanted: list[int] = []
    for at in (1, 3, 5):
        prompt = of.prompt(DIALOGUE[:at], [TOOL])
        answer = of.answer(DIALOGUE[:at], [TOOL], DIALOGUE[at])
        assert learned.tokens_T[: len(prompt) + len(answer)] == prompt + answer
        assert answer[-1] == of.tokenizer.eos_token_id
        wanted += answer
    assert drawn == wanted
    text = of.tokenizer.decode(drawn)
    assert text.count("<|im_end|>") == 3
    assert "Still Ann." in text
    assert "meet" in text
    assert "Who is there?" not in text
    assert text.count("Ann") == 2
    some = [*DIALOGUE[:3], {**DIALOGUE[3], "weight": 0}, *DIALOGUE[4:]]
    (marked,) = of.examples(some, [TOOL])
    assert marked.tokens_T == learned.tokens_T
    assert sum(marked.learned_R) == len(wanted) - len(of.answer(DIALOGUE[:3], [TOOL], DIALOGUE[3]))
    (last,) = of.examples(DIALOGUE, [TOOL], last_only=True)
    assert last.tokens_T == learned.tokens_T
    assert of.tokenizer.decode(last.tokens_T[last.prompt_length :]) == "Still Ann.<|im_end|>"


def test_lengths_by_hand() -> None:
    """ChatML, one token a byte: `<|im_start|>user\\nq<|im_end|>\\n` 1+5+1+1+1, the assistant's
    beginning 1+10: 20; `ok<|im_end|>` 3."""
    plain = Renderer(byte_tokenizer())
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ok"}]
    (one,) = plain.examples(messages)
    assert (one.prompt_length, one.learned_R) == (20, [True] * 3)


def test_thoughts_that_a_template_drops_later_begin_another_sequence() -> None:
    """Qwen's template shows a thought only after the last question: the first answer is learned
    with its thought, the second after a prompt without it."""
    messages = [dict(message) for message in DIALOGUE]
    messages[3]["reasoning_content"] = "Ann came."
    first, second = renderer("qwen").examples(messages, [TOOL])
    decode = renderer("qwen").tokenizer.decode
    assert "<think>\nAnn came." in decode(first.tokens_T[first.prompt_length :])
    assert "<think>" not in decode(second.tokens_T)
    assert decode(second.tokens_T[second.prompt_length :]) == "Still Ann.<|im_end|>"


def test_a_thought_is_text_where_the_template_knows_none() -> None:
    answer = {"role": "assistant", "content": "Ann", "reasoning_content": "Who?"}
    of = renderer("smollm2")
    assert of.tokenizer.decode(of.answer(DIALOGUE[:1], [], answer)) == (
        "<think>\nWho?\n</think>\nAnn<|im_end|>"
    )


def test_a_template_that_begins_answers_otherwise_is_refused() -> None:
    odd = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + message.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<think>' }}{% endif %}"
    )
    with pytest.raises(BadInput, match="begins as its prompt ends"):
        Renderer(byte_tokenizer(odd)).examples(DIALOGUE[:1] + DIALOGUE[5:])


def call_text(name: str, arguments: dict) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_parsed_in_order_and_the_rest_is_content() -> None:
    text = f"Thinking. {call_text('meet', {'age': 3})}\n{call_text('leave', {})}"
    content, calls = parse_calls(text, ["meet", "leave"], salt="s")
    assert content == "Thinking."
    assert [c["function"] for c in calls] == [
        {"name": "meet", "arguments": '{"age": 3}'},
        {"name": "leave", "arguments": "{}"},
    ]
    assert calls[0]["id"] != calls[1]["id"]
    assert parse_calls(text, ["meet", "leave"], salt="s")[1] == calls
    assert parse_calls(text, ["meet", "leave"], salt="t")[1][0]["id"] != calls[0]["id"]


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        call_text("unknown", {}),
        "<tool_call>{not json}</tool_call>",
        '<tool_call>["meet"]</tool_call>',
        '<tool_call>{"name": "meet", "arguments": 3}</tool_call>',
        '<tool_call>{"name": "meet", "arguments": {"who": "\\ud83d"}}</tool_call>',
    ],
)
def test_what_is_no_valid_call_stays_text(text: str) -> None:
    assert parse_calls(text, ["meet"], salt="") == (text, [])


def test_a_template_without_tools_gets_them_as_text() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "meet", "arguments": '{"age": 3}'}}
        ]},
        {"role": "tool", "tool_call_id": "1", "content": "met"},
    ]  # fmt: skip
    system, assistant, result = template_messages(messages, [TOOL], native=False)
    assert system["content"].startswith("Be kind.\n\n")
    assert '"name": "meet"' in system["content"]
    assert assistant == {"role": "assistant", "content": call_text("meet", {"age": 3})}
    assert result == {"role": "user", "content": "<tool_result>\nmet\n</tool_result>"}
