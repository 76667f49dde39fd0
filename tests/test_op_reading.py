"""Reading fields out of replies: every shape that models give them, and hostile ones."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from aflow_tune.operators.fields import Field, Form, Kind, forms_for, schema_of
from aflow_tune.operators.python_code import program_in
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", [Form.XML, Form.JSON])
def test_every_shape_gives_what_was_written_in_it(shape: str, form: Form) -> None:
    for thought, answer in CONTENTS:
        as_json = json.dumps({"thought": thought, "answer": answer}, ensure_ascii=False)
        reply = shape.format(thought, answer, as_json)
        assert values(reply, form=form) == {"thought": thought, "answer": answer}, reply


AS_ASKED = {
    Form.XML: {0, 1, 3, 4, 10, 11, 12, 13, 15},
    Form.JSON: {16},
}
"""Numbers of the shapes that are in the form that was asked for, whatever stands around it."""


@pytest.mark.parametrize("form", [Form.XML, Form.JSON])
def test_what_is_not_as_asked_counts_as_repaired(form: Form) -> None:
    for number, shape in enumerate(SHAPES):
        reading = read_reply(shape.format("a", "b", '{"thought": "a", "answer": "b"}'), PAIR, form)
        assert reading.repaired is (number not in AS_ASKED[form]), shape


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


def test_what_cannot_be_read_is_named_and_gets_no_value() -> None:
    assert faults("") == "the reply is empty"
    assert faults(" \n\t") == "the reply is empty"
    assert faults("I do not know.") == "there is no answer"
    assert faults("<answer></answer>") == "answer is empty"
    assert faults("<answer/>") == "answer is empty"
    assert faults('{"answer": null}') == "there is no answer"
    reading = read_reply("<thought>half</thought>", PAIR, Form.XML)
    assert dict(reading.values) == {"thought": "half"}
    assert reading.faults == ("there is no answer",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", True),
        ("False", False),
        ("**True**.", True),
        ("Yes, the solution is right", True),
        ("no - step 3 is off", False),
        ("1", True),
        ("incorrect", False),
        ("not true", None),
        ("True or False", None),
        ("maybe", None),
        ("", None),
    ],
)
def test_truth_values(text: str, expected: bool | None) -> None:
    field = (Field("review_result", Kind.BOOL),)
    reading = read_reply(f"<review_result>{text}</review_result>", field, Form.XML)
    assert reading.values.get("review_result") is expected
    assert bool(reading.faults) == (expected is None)


def test_a_json_bool_and_numbers_keep_their_type() -> None:
    fields = (Field("good", Kind.BOOL), Field("count", Kind.INT), Field("answer"))
    reply = '{"good": false, "count": 3, "answer": 42.5}'
    assert values(reply, fields, Form.JSON) == {"good": False, "count": 3, "answer": "42.5"}
    reply = '{"good": "False", "count": "about 3 apples", "answer": ["a", 1]}'
    assert values(reply, fields, Form.JSON) == {"good": False, "count": 3, "answer": '["a", 1]'}
    assert "count" in faults('{"good": true, "count": "3 or 4", "answer": "a"}', fields, Form.JSON)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(C)", "C"),
        ("**AB**", "AB"),
        ("Solution B", "B"),
        ("B: it is right", "B"),
        ("A better one is solution B", "B"),
        ("it must be C then", "C"),
        ("A better one is C", None),
        ("I choose A, as I said: option A", "A"),
        ("Solution A is worse than solution C", None),
        ("A good one", None),
        ("Solution A is best", "A"),
        ("The answer is A", "A"),
        ("Answer: A better one is hard to find", None),
        ("B C", None),
        ("Z", None),
        ("ABC", None),
        ("", None),
    ],
)
def test_choices(text: str, expected: str | None) -> None:
    field = (Field("letter", Kind.CHOICE, choices=("A", "B", "C", "AB")),)
    reading = read_reply(f"<letter>{text}</letter>", field, Form.XML)
    assert reading.values.get("letter") == expected


@pytest.mark.parametrize(
    "reply",
    [
        f"```python\n{PROGRAM}\n```",
        f"Here it is:\n```py\n{PROGRAM}\n```\nIt adds one.",
        f"~~~python\n{PROGRAM}\n~~~",
        f"```\n{PROGRAM}\n```",
        f"````python\n{PROGRAM}\n````",
        f"```python\n{PROGRAM}",
        f"  ```python\n  {PROGRAM.splitlines()[0]}\n  {PROGRAM.splitlines()[1]}\n  ```",
        PROGRAM,
        f"Here:\n{PROGRAM}\nThis adds one to x.",
        f"```python\nimport os\n```\n```python\n{PROGRAM}\n```\n```python\nprint(f(1))\n```",
        f"```bash\npip install x\n```\n```python\n{PROGRAM}\n```",
        f"<response>\n{PROGRAM}\n</response>",
        f"<response>\n```python\n{PROGRAM}\n```\n</response>",
        f"<response><![CDATA[\n{PROGRAM}\n]]></response>",
        json.dumps({"response": PROGRAM}),
        json.dumps({"response": f"```python\n{PROGRAM}\n```"}),
    ],
)
@pytest.mark.parametrize("form", [Form.CODE, Form.XML, Form.JSON])
def test_programs(reply: str, form: Form) -> None:
    assert values(reply, (CODE,), form)["response"].strip() == PROGRAM


def test_of_several_programs_the_last_with_the_entry_point_counts() -> None:
    first, last = "def f():\n    return 1", "def f():\n    return 2"
    reply = f"```python\n{first}\n```\nBetter:\n```python\n{last}\n```\n```python\nprint(f())\n```"
    assert program_in(reply, "f") == (last, False)
    assert program_in(reply) == (f"{last}\n\n\nprint(f())", True)
    assert program_in(f"```js\nlet a\n```\n```python\n{first}\n```", "f") == (first, False)


def fences(*blocks: str) -> str:
    return "Well.\n" + "\n".join(f"```python\n{block}\n```" for block in blocks)


HELPER, MAIN = "def twice(x):\n    return 2 * x", "def f(x):\n    return twice(x) + 1"


@pytest.mark.parametrize(
    ("blocks", "value"),
    [
        ((HELPER, MAIN), 7),
        ((MAIN, HELPER), 7),
        ((HELPER, MAIN, "assert f(3) == 8\nraise SystemExit(f(1))"), 7),
        (
            (
                "import math as m",
                "RATE = 2\nprint('no')",
                "def f(x):\n    return m.floor(RATE * x)",
            ),
            6,
        ),
        (
            (
                "def g(x):\n    return h(x)",
                "def h(x):\n    return -x",
                "def f(x):\n    return g(x)",
            ),
            -3,
        ),
        (("class Box:\n    x = 5", "def f(x):\n    return [Box.x for _ in range(x)][-1]"), 5),
        ((HELPER, "def twice(x):\n    return x", MAIN), 4),
        ((HELPER, "def f(x):\n    twice = 1\n    return twice"), 1),
    ],
)
def test_what_the_program_needs_of_other_blocks_comes_along(
    blocks: tuple[str, ...], value: int
) -> None:
    code = values(fences(*blocks), (CODE,), Form.CODE)["response"]
    space: dict[str, Any] = {}
    exec(code, space)
    assert space["f"](3) == value


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("```python\ndef f(:\n```", "no Python"),
        ("```python\ndef g(): pass\n```", "defines no `f`"),
        ("```js\nfunction f() {}\n```", "no Python"),
        ("f", "defines no `f`"),
        ("```python\n```", "defines no `f`"),
        ("```python\n" + "(" * 5000 + "\n```", "no Python"),
        ("```python\nx = 1\n" + "#" * 200_000 + "\n```", "longer than"),
    ],
)
def test_what_is_no_program_says_why(reply: str, told: str) -> None:
    assert told in faults(reply, (CODE,), Form.CODE)


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


def test_forms_and_schema_of_fields() -> None:
    assert forms_for(PAIR) == (Form.XML, Form.JSON)
    assert forms_for((ANSWER,)) == (Form.XML, Form.JSON, Form.TEXT)
    assert forms_for((CODE,)) == (Form.XML, Form.JSON, Form.CODE)
    schema = schema_of((Field("n", Kind.CHOICE, "which", choices=("A", "B")), ANSWER))
    assert schema["properties"]["n"] == {
        "type": "string",
        "enum": ["A", "B"],
        "description": "which",
    }
    assert schema["required"] == ["n", "answer"]
