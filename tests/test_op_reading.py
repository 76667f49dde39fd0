"""Reading fields out of replies: every shape that models give them, and hostile ones."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from aflow_tune.operators.fields import Field, Form, Kind
from aflow_tune.operators.reading import MAX_REPAIRED, MAX_REPLY_CHARACTERS, read_reply

THOUGHT = Field("thought", required=False)
ANSWER = Field("answer")
PAIR = (THOUGHT, ANSWER)
CODE = Field("response", Kind.CODE, entry_point="f")
PROGRAM = "def f(x):\n    return x + 1"


def values(reply: str, fields: tuple[Field, ...] = PAIR, form: Form = Form.XML) -> dict:
    reading = read_reply(reply, fields, form)
    assert not reading.faults, reading.faults
    return dict(reading.values)


def faults(reply: str, fields: tuple[Field, ...] = PAIR, form: Form = Form.XML) -> str:
    return "; ".join(read_reply(reply, fields, form).faults)


SHAPES = [
    "<thought>{0}</thought>\n<answer>{1}</answer>",
    "<answer>{1}</answer>\n<thought>{0}</thought>",
    "<ANSWER>{1}</ANSWER><Thought>{0}</Thought>",
    '<thought lang="en">{0}</thought><answer  id = "1">{1}</answer >',
    "Sure! Here it is.\n<thought>{0}</thought> and so <answer>{1}</answer> I hope this helps.",
    "<thought>{0}<answer>{1}",
    "<thought>{0}</thought><answer>{1}",
    "<thought>{0}\n<answer>{1}</answer>",
    "<thought>{0}</thought>\n{1}</answer>",
    "```xml\n<thought>{0}</thought>\n<answer>{1}</answer>\n```",
    "<thought><![CDATA[{0}]]></thought><answer><![CDATA[{1}]]></answer>",
    "<response><thought>{0}</thought><answer>{1}</answer></response>",
    "<thought>Now for <answer> tags.</thought><thought>{0}</thought><answer>{1}</answer>",
    "<answer>a draft</answer>\n<thought>{0}</thought>\n<answer>{1}</answer>",
    "<thought>{0}</thought><answer><answer>{1}</answer></answer>",
    "<thought>{0}</thought><answer>{1}</answer><answer></answer>",
    "{2}",
    "```json\n{2}\n```",
    "Of course:\n{2}\nAnything else?",
    'First {{"thought": "no", "answer": "wrong"}}, but then {2}',
    '{{"properties": {2}}}',
    "**Thought:** {0}\n**Answer:** {1}",
    "thought: {0}\n\nanswer: {1}",
]
CONTENTS = [
    ("because", "42"),
    ("a < b, so {not} this", "x > 3 & y"),
    ("é ß 漢字 🙂", "naïve\nin two lines"),
    ('it\'s "quoted" \\ with backslash', "\\frac{1}{2}"),
    ("100% {form} {0} $1", "{answer}"),
    ("1) one 2) two", "<b>bold</b>"),
]


AS_ASKED = {Form.XML: {0, 1, 3, 4, 10, 11, 12, 13, 15}, Form.JSON: {16}}
"""Numbers of the shapes in the form that was asked for; what is not counts as repaired."""


@pytest.mark.parametrize("number", range(len(SHAPES)))
@pytest.mark.parametrize("form", [Form.XML, Form.JSON])
def test_every_shape_gives_what_was_written_in_it(number: int, form: Form) -> None:
    shape = SHAPES[number]
    reading = read_reply(shape.format("a", "b", '{"thought": "a", "answer": "b"}'), PAIR, form)
    assert reading.repaired is (number not in AS_ASKED[form])
    for thought, answer in CONTENTS:
        as_json = json.dumps({"thought": thought, "answer": answer}, ensure_ascii=False)
        reply = shape.format(thought, answer, as_json)
        assert values(reply, form=form) == {"thought": thought, "answer": answer}, reply


def test_cut_and_shuffled_replies_never_raise_and_never_give_empty_values() -> None:
    drawn = random.Random(7)
    parts = ["<answer>", "</answer>", "<thought>", "</thought>", "{", "}", '"answer"', ":", "42"]
    parts += ["```", "```json\n", "\n", "<![CDATA[", "]]>", "&lt;", "text ", "answer:", "\\", "<"]
    for _ in range(3000):
        reply = "".join(drawn.choices(parts, k=drawn.randint(0, 14)))
        for form in (Form.XML, Form.JSON):
            reading = read_reply(reply, PAIR, form)
            assert bool(reading.faults) == ("answer" not in reading.values), reply
            assert reading.values.get("answer") != "", reply


def test_entities_are_read_where_the_content_is_escaped_throughout() -> None:
    assert values("<answer>a &lt; b &amp;&#38; c</answer>")["answer"] == "a < b && c"
    assert values("<answer>a < b &amp; c</answer>")["answer"] == "a < b &amp; c"
    assert values("<answer>Q&A &amp; more</answer>")["answer"] == "Q&A &amp; more"
    escaped = "<response>def f(a):\n    return a &lt; 1</response>"
    assert values(escaped, (CODE,))["response"] == "def f(a):\n    return a < 1"
    spoken = '<response>def f(a):\n    return a.replace("&lt;", "")</response>'
    assert '"&lt;"' in values(spoken, (CODE,))["response"]


def test_tags_inside_code_and_cdata_are_text() -> None:
    program = 'def f(x):\n    return "<thought>no</thought></answer><answer>7</answer>"'
    reply = f"<thought>see below</thought>\n<answer>\n```python\n{program}\n```\n</answer>"
    assert values(reply) == {"thought": "see below", "answer": f"```python\n{program}\n```"}
    reply = "<thought>t</thought><answer><![CDATA[</answer><answer>7</answer>]]></answer>"
    assert values(reply)["answer"] == "</answer><answer>7</answer>"


TRUTH, LETTER = (
    Field("good", Kind.BOOL),
    Field("letter", Kind.CHOICE, choices=("A", "B", "C", "AB")),
)
ONE_VALUE = [
    (TRUTH, {True: ["true", "**True**.", "Yes, the solution is right", "1"]}),
    (TRUTH, {False: ["False", "no - step 3 is off", "incorrect"]}),
    (TRUTH, {None: ["not true", "True or False", "maybe", ""]}),
    (LETTER, {"B": ["B", "b", "Solution B", "B: it is right", "A better one is solution B"]}),
    (LETTER, {"C": ["(C)", "it must be C then"], "AB": ["**AB**"]}),
    (LETTER, {"A": ["I choose A, as I said: option A", "Solution A is best", "The answer is A"]}),
    (LETTER, {None: ["A better one is C", "Solution A is worse than solution C", "A good one"]}),
    (LETTER, {None: ["Answer: A better one is hard to find", "B C", "Z", "ABC", ""]}),
]


@pytest.mark.parametrize(("field", "texts"), ONE_VALUE)
def test_truth_values_and_choices(field: Field, texts: dict[Any, list[str]]) -> None:
    for expected, given in texts.items():
        for text in given:
            reply = f"<{field.name}>{text}</{field.name}>"
            reading = read_reply(reply, (field,), Form.XML)
            assert reading.values.get(field.name) == expected, text
            assert bool(reading.faults) == (expected is None), text


def test_a_json_bool_and_numbers_keep_their_type() -> None:
    fields = (TRUTH, Field("count", Kind.INT), Field("answer"))
    for reply in (
        '{"good": false, "count": 3, "answer": 42.5}',
        '{"good": "False", "count": "about 3 apples", "answer": "42.5"}',
    ):
        assert values(reply, fields, Form.JSON) == {"good": False, "count": 3, "answer": "42.5"}
    assert "count" in faults('{"good": true, "count": "3 or 4", "answer": "a"}', fields, Form.JSON)


FENCED = f"```python\n{PROGRAM}\n```"
PROGRAMS = [
    FENCED, PROGRAM, f"Here it is:\n```py\n{PROGRAM}\n```\nIt adds one.", f"```\n{PROGRAM}\n```",
    f"~~~python\n{PROGRAM}\n~~~", f"````python\n{PROGRAM}\n````", f"```python\n{PROGRAM}",
    f"  ```python\n  {PROGRAM.splitlines()[0]}\n  {PROGRAM.splitlines()[1]}\n  ```",
    f"Here:\n{PROGRAM}\nThis adds one to x.", f"```bash\npip install x\n```\n{FENCED}",
    f"```python\nimport os\n```\n{FENCED}\n```python\nprint(f(1))\n```",
    f"<response>\n{PROGRAM}\n</response>", f"<response>\n{FENCED}\n</response>",
    f"<response><![CDATA[\n{PROGRAM}\n]]></response>",
    json.dumps({"response": PROGRAM}), json.dumps({"response": FENCED}),
]  # fmt: skip


@pytest.mark.parametrize("reply", PROGRAMS)
@pytest.mark.parametrize("form", [Form.CODE, Form.XML, Form.JSON])
def test_programs(reply: str, form: Form) -> None:
    assert values(reply, (CODE,), form)["response"].strip() == PROGRAM


HELPER, MAIN = "def twice(x):\n    return 2 * x", "def f(x):\n    return twice(x) + 1"
FIRST = "def f(x):\n    return 1"


@pytest.mark.parametrize(
    ("blocks", "value"),
    [
        ((HELPER, MAIN), 7),
        ((MAIN, HELPER), 7),
        ((FIRST, HELPER, MAIN, "assert f(3) == 8\nraise SystemExit(f(1))"), 7),
        (("import math as m", "R = 2\nprint(0)", "def f(x):\n    return m.floor(R * x)"), 6),
        (("def g(x):\n    return h(x)", "def h(x):\n    return -x", "f = lambda x: g(x)"), -3),
        ((HELPER, "def twice(x):\n    return x", MAIN), 4),
        ((HELPER, "def f(x):\n    twice = 1\n    return twice"), 1),
    ],
)
def test_the_last_program_counts_with_what_it_needs_of_other_blocks(
    blocks: tuple[str, ...], value: int
) -> None:
    reply = "Well.\n" + "\n".join(f"```python\n{block}\n```" for block in blocks)
    space: dict[str, Any] = {}
    exec(values(reply, (CODE,), Form.CODE)["response"], space)
    assert space["f"](3) == value


NAMED = [
    (" \n\t", PAIR, "the reply is empty"), ("<thought>half</thought>", PAIR, "there is no answer"),
    ("<answer></answer>", PAIR, "answer is empty"), ("<answer/>", PAIR, "answer is empty"),
    ('{"answer": null}', PAIR, "there is no answer"), ("f", (CODE,), "defines no `f`"),
    ("```python\ndef f(:\n```", (CODE,), "no Python"),
    ("```python\ndef g(): pass\n```", (CODE,), "defines no `f`"),
    ("```python\n" + "(" * 5000 + "\n```", (CODE,), "no Python"),
    ("```python\nx = 1\n" + "#" * 200_000 + "\n```", (CODE,), "longer than"),
]  # fmt: skip


@pytest.mark.parametrize(("reply", "fields", "told"), NAMED)
def test_what_cannot_be_read_is_named(reply: str, fields: tuple[Field, ...], told: str) -> None:
    assert told in faults(reply, fields, Form.CODE if CODE in fields else Form.XML)


HUGE = 2_000_000
HOSTILE = {
    "tags": "<answer>" * (HUGE // 8),
    "closings": "</answer>" * (HUGE // 9),
    "nested": "<answer>" * (HUGE // 17) + "</answer>" * (HUGE // 17),
    "attributes": "<answer " * (HUGE // 8),
    "blanks in a tag": "<answer" + " " * HUGE,
    "angles": "<" * HUGE,
    "ampersands": "<answer>" + "&" * HUGE + "</answer>",
    "cdata": "<![CDATA[" * (HUGE // 9),
    "braces": "{" * HUGE,
    "brackets": '{"answer": ' + "[" * HUGE,
    "objects": '{"answer":' * (HUGE // 10),
    "quotes": '{"answer": "' + '"' * HUGE,
    "backslashes": '{"answer": "' + "\\" * HUGE,
    "fences": "```\n" * (HUGE // 4),
    "backticks": "`" * HUGE,
    "newlines": "\n" * HUGE + "x",
    "labels": "answer:\n" * (HUGE // 8),
    "functions": "def f():\n" * (HUGE // 9),
    "parentheses": "(" * HUGE,
    "surrogates": "\ud800" * HUGE,
    "nulls": "\0" * HUGE,
    "digits": '{"answer": ' + "9" * HUGE + "}",
    "small quotes": "{ { { " + '"' * 5000 + "x" * 2000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_replies_are_read_or_refused_in_bounded_time(name: str) -> None:
    # The time limit of the suite is the test: each of these, with one step that is not linear,
    # takes minutes to hours.
    for fields, form in ((PAIR, Form.XML), (PAIR, Form.JSON), ((CODE,), Form.CODE)):
        reading = read_reply(HOSTILE[name], fields, form)
        for value in reading.values.values():
            value.encode()  # whatever is read can be written down
    too_long = "x" * (MAX_REPLY_CHARACTERS + 1)
    assert "longer than" in faults(too_long)


def test_faulty_json_is_repaired_up_to_a_size() -> None:
    for reply in (
        "{thought: 'x', answer: 'it'}",
        '{"thought": "x", "answer": "it",}',
        '{"thought": "x", "answer": "it"',
        "Here: {'thought': 'x', 'answer': 'it'} done",
        '```json\n{"thought": "x"\n "answer": "it"}\n```',
    ):
        assert values(reply, form=Form.JSON) == {"thought": "x", "answer": "it"}, reply
    for costly in ("{answer: 'it', b: " + "[" * 30, "{answer: 'it', b: " + "'x' " * 200):
        assert faults(costly, (ANSWER,), Form.JSON) == "there is no answer"
    long = "{answer: '" + "x" * MAX_REPAIRED + "'}"
    assert faults(long, (ANSWER,), Form.JSON) == "there is no answer"
