"""The hybrid form: every way in which a policy's reply brings a workflow, and damage to it."""

from __future__ import annotations

import contextlib
import json
import random

import pytest
from written_samples import PLAIN, workflow

from aflow_tune.writer.form import (
    CODE,
    PROMPTS,
    Unreadable,
    as_text,
    read_with_refusals,
    read_written,
)
from aflow_tune.writer.types import RefusalKind, WrittenForm

GRAPH = workflow(
    'r = await self.solve(input=problem + "\\n", instruction=\'Be "exact". \')\n'
    'return r["response"], 0.0'
)
TEXTS = {"solve": 'Reply as {"a": 1}:\n', "pick": "Ünïcode, 42 %"}
WHOLE = as_text(TEXTS, GRAPH)
PARTS = {PROMPTS: TEXTS, CODE: GRAPH}


@pytest.mark.parametrize(
    "text",
    [
        *(f"\n{WHOLE}\n", f"```json\n{WHOLE}\n```", f"```\n{WHOLE}\n```", "\ufeff" + WHOLE),
        f'<think>first {{"prompts": 1}}, then class Workflow</think>\n{WHOLE}',
        json.dumps(PARTS, indent=2),
    ],
)
def test_as_it_should_be(text: str) -> None:
    written = read_written(text)
    assert (written.code, dict(written.prompts)) == (GRAPH, TEXTS)
    assert (written.form, written.notes) == (WrittenForm.HYBRID, ())


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (f"Here it is: {WHOLE}\nDo you like it?", "among other text"),
        (f"First {{a}} idea.\n```json\n{WHOLE}\n```\nDone.", "among other text"),
        (WHOLE[:-1] + ",}", "mended"),
        (WHOLE[:-1], "mended"),
        (WHOLE[:-2], "mended"),
        (WHOLE.replace("\\n    ", "\n    "), "among other text"),
        (repr(PARTS), "mended"),
        (f'{{"prompts": {json.dumps(TEXTS)}, "graph_code": """{GRAPH}"""}}', "not escaped"),
        (f"{{'prompts': {json.dumps(TEXTS)}, 'graph_code': '''{GRAPH}'''", "not escaped"),
        (f'{{"prompts": {json.dumps(TEXTS)}, "graph_code": "{GRAPH}"}}', "not escaped"),
        (f'{{"graph_code": "{GRAPH}", "prompts": {json.dumps(TEXTS)}}}', "not escaped"),
        (f"{{\n// texts\n{WHOLE[1:-1]}, # done\n/* no more */}}", "mended"),
        (f"{{ # texts\n{WHOLE[1:]}", "mended"),
        (f'{WHOLE[:-1]}, "ok": True, "more": None}}', "mended"),
        (json.dumps({"workflow": PARTS}), "inside another"),
        (json.dumps([PARTS]), "inside another"),
        (json.dumps({"Prompts": TEXTS, "graphCode": GRAPH}), "the keys are"),
        (json.dumps({PROMPTS: TEXTS, "code": GRAPH}), "the keys are"),
        (json.dumps({"workflow": GRAPH, "prompts": TEXTS}), "the keys are"),
        (json.dumps({PROMPTS: TEXTS, "code": "see graph", "Graph": GRAPH}), "the keys are"),
        (f'{{"prompts": {json.dumps(TEXTS)}, "code": """{GRAPH}"""}}', "not escaped"),
        (f'{{"workflow": "{GRAPH}", "prompts": {json.dumps(TEXTS)}}}', "not escaped"),
        (json.dumps({PROMPTS: TEXTS, CODE: GRAPH.splitlines()}), "list of lines"),
        (json.dumps({PROMPTS: TEXTS, CODE: f"```python\n{GRAPH}```"}), "fence of its own"),
        (json.dumps({PROMPTS: TEXTS, CODE: json.dumps(GRAPH)[1:-1]}), "escaped twice"),
        (
            f"```json\n{json.dumps({PROMPTS: TEXTS})}\n```\n```python\n{GRAPH}```",
            "beside the object",
        ),
    ],
)
def test_small_damage_is_mended_and_noted(text: str, note: str) -> None:
    written = read_written(text)
    assert written.code.strip() == GRAPH.strip()
    texts = {name: text.rstrip() for name, text in written.prompts.items()}
    assert texts == {name: text.rstrip() for name, text in TEXTS.items()}
    assert written.form is WrittenForm.REPAIRED
    assert any(note in one for one in written.notes), written.notes


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (PLAIN, PLAIN),
        (f"```python\n{PLAIN}```", PLAIN),
        (f"Sure, here it is:\n{PLAIN}", PLAIN),
        (f"<think>hm</think>\n```py\n{PLAIN}\n```\nThat is all.", PLAIN),
        (f"Sure\nimport re\n{PLAIN}", f"import re\n{PLAIN}"),
        ("Sure:\n```python\nclass Workflow:\n    def (\n```", "class Workflow:\n    def ("),
        (f'SAYS = {{"code": "def class"}}\n{PLAIN}', f'SAYS = {{"code": "def class"}}\n{PLAIN}'),
        ("```\ndef other():\n    pass\n```\n```python\nclass Workflow:\n    pass\n```", None),
    ],
)
def test_code_alone(text: str, code: str | None) -> None:
    written = read_written(text)
    assert written.form is WrittenForm.CODE
    assert dict(written.prompts) == {}
    assert written.code.strip() == (code or "class Workflow:\n    pass").strip()


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("", RefusalKind.UNREADABLE, "empty"),
        ("I cannot do that.", RefusalKind.UNREADABLE, "neither"),
        ('{"prompts": {}}', RefusalKind.UNREADABLE, "holds no `graph_code`"),
        ('{"prompts": {}, "graph_code": 3}', RefusalKind.UNREADABLE, "holds no `graph_code`"),
        ('{"prompts": {}, "graph_code": ""}', RefusalKind.UNREADABLE, "holds no `graph_code`"),
        ("[1, 2]", RefusalKind.UNREADABLE, "neither"),
        ("x" * 200_001, RefusalKind.TOO_LARGE, "200,001 characters"),
    ],
)
def test_nothing_to_read(text: str, kind: RefusalKind, said: str) -> None:
    with pytest.raises(Unreadable) as error:
        read_written(text)
    assert error.value.refusal.kind is kind
    assert said in error.value.refusal.message


def test_prompts_that_are_no_texts_are_refused_and_the_rest_kept() -> None:
    given = {"solve": "ok", "pick": {"main": "x"}, "review": 3}
    written, refusals = read_with_refusals(json.dumps({PROMPTS: given, CODE: PLAIN}))
    assert dict(written.prompts) == {"solve": "ok"}
    assert [refusal.kind for refusal in refusals] == [RefusalKind.PROMPT] * 2
    for wrong in ([1], "x", True):
        written, refusals = read_with_refusals(json.dumps({PROMPTS: wrong, CODE: PLAIN}))
        assert written.code == PLAIN
        assert refusals[0].kind is RefusalKind.PROMPT


def test_hostile_texts_are_read_or_refused_and_never_raise_otherwise() -> None:
    pieces = ['{"prompts"', ':{"', '"graph_code"', ': "', '"""', "'''", "```json\n", "```", "\n"]
    pieces += ["class Workflow:\n", "<think>", "</think>", "\\", "\\u12", "}", "]", "{", "[", ","]
    chance = random.Random(0)
    for _ in range(400):
        text = "".join(chance.choices(pieces, k=chance.randint(1, 60)))
        with contextlib.suppress(Unreadable):
            read_with_refusals(text)
    for piece in pieces:
        text = piece * (200_000 // len(piece))
        with contextlib.suppress(Unreadable):
            read_with_refusals(text)
