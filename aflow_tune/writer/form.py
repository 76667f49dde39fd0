"""Reads a workflow in the hybrid form from the policy's reply, and writes it canonically.

A workflow is one JSON object `{"prompts": {instance: instruction}, "graph_code": "class
Workflow: ..."}`. In a reply it may be in a fence, after reasoning or among prose, be damaged JSON
(repaired by json_repair), or be Python alone; the reward depends on which (`Written.form`).
Nothing is executed, and what is read is bounded in size.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aflow_tune.graph.shape import constants
from aflow_tune.operators.python_code import fenced_blocks, program_in
from aflow_tune.operators.reading import elements, objects_in, whole_object
from aflow_tune.writer.types import Refusal, RefusalKind, Written, WrittenForm

MAX_TEXT_CHARS = 200_000
"""Of a reply; a longer one is refused."""
MAX_PROMPTS = 64
PROMPTS, CODE = "prompts", "graph_code"
_CODE_KEYS = ("graphcode", "workflowcode", "workflow", "graph", "code")
"""Keys of the code as `_key` normalises them; the first that an object has counts."""
_REPAIRABLE = {"{[": 400, "\"'": 4_000}
"""Most of these characters in a damaged object: json_repair is not linear in them."""
_REPAIRABLE_CHARS = 60_000
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_MEANING = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_MEANING |= {character: character for character in "\"'\\/"}
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_CLASS = re.compile(r"^[ \t]*class[ \t]+\w+", re.MULTILINE)
_CODE_LINE = re.compile(
    r"^[ \t]{0,16}(?:from[ \t]+[\w.]+[ \t]+import\b|import[ \t]+\w|class[ \t]+\w|def[ \t]+\w"
    r"|async[ \t]+def\b|@\w|#|[\"']{3}|\w+[ \t]{0,4}(?::[^=\n]{0,80})?=)",
    re.MULTILINE,
)
_OBJECT = re.compile(
    r"\{\s{0,50}(?:(?:#|//)[^\n]{0,200}\n\s{0,50}|/\*[^*]{0,200}\*/\s{0,50}){0,3}"
    r"[\"'`\u201c]{0,3}(?:prompts|graph[\s_-]?code|workflow|graph|code)",
    re.IGNORECASE,
)
_FORM = f'{{"{PROMPTS}": {{...}}, "{CODE}": "class Workflow: ..."}}'


class Unreadable(ValueError):
    """There is no workflow in a text; `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def as_text(prompts: Mapping[str, str], code: str) -> str:
    """A workflow in the hybrid form, which `read_written` reads back without notes."""
    texts = {_clean(name): _clean(text) for name, text in prompts.items()}
    return json.dumps({PROMPTS: texts, CODE: _clean(code)}, ensure_ascii=False)


def _clean(text: str) -> str:
    """The text without lone surrogates and null characters."""
    return _NO_TEXT.sub("\ufffd", text)


def read_written(text: str) -> Written:
    """The workflow in a reply. Raises `Unreadable` if there is none or the reply is too long."""
    return read_with_refusals(text)[0]


def read_with_refusals(text: str) -> tuple[Written, tuple[Refusal, ...]]:
    """As `read_written`, with the refusals of prompts that were left out."""
    if len(text) > MAX_TEXT_CHARS:
        message = f"the reply has {len(text):,} characters; write at most {MAX_TEXT_CHARS:,}"
        raise Unreadable(Refusal(RefusalKind.TOO_LARGE, message))
    clean = _clean(text.removeprefix("\ufeff"))
    _, _, behind_reasoning = clean.rpartition("</think>")
    for part in filter(None, dict.fromkeys((behind_reasoning.strip(), clean.strip()))):
        found = _object(part) or _tagged(part) or _python(part)
        if found is not None:
            return found.written()
    why = "there is neither a JSON object nor Python with `class Workflow`"
    if not clean.strip():
        why = "the reply is empty"
    elif _OBJECT.search(clean):
        why = f"the JSON object holds no `{CODE}` that can be read"
    raise Unreadable(Refusal(RefusalKind.UNREADABLE, f"{why}; write one JSON object {_FORM}"))


@dataclass
class _Found:
    prompts: Any
    code: str
    form: WrittenForm
    notes: list[str]

    def mended(self, note: str) -> None:
        self.notes.append(note)
        if self.form is WrittenForm.HYBRID:
            self.form = WrittenForm.REPAIRED

    def written(self) -> tuple[Written, tuple[Refusal, ...]]:
        prompts, refusals = self._prompts()
        code = self.code
        blocks = [block for block in fenced_blocks(code) if _CLASS.search(block.code)]
        if blocks and not _CLASS.search(code[: blocks[-1].start]):
            code = blocks[-1].code
            self.mended("the code stood in a fence of its own")
        if "\n" not in code.strip() and "\\n" in code and not is_python(code):
            code = unescaped(code)
            self.mended("the code was escaped twice")
        dedented = textwrap.dedent(code).lstrip("\n") if code[:1] in (" ", "\t", "\n") else code
        if dedented != code.lstrip("\n"):
            self.mended("the code was indented as a whole")
        code = _clean(dedented)
        return Written(code, prompts, self.form, tuple(self.notes)), tuple(refusals)

    def _prompts(self) -> tuple[dict[str, str], list[Refusal]]:
        """The prompts that are texts, and refusals of the others."""
        given = self.prompts
        if given is None:
            if self.form is not WrittenForm.CODE:
                self.mended(f"there is no `{PROMPTS}`")
            return {}, []
        if not isinstance(given, Mapping):
            wrong, given = [f"`{PROMPTS}` is no object from instances to texts"], {}
        else:
            names = [name for name, value in given.items() if not isinstance(value, str)]
            wrong = [f"the prompt of {name!r:.60} is no text" for name in names[:MAX_PROMPTS]]
        texts = [(str(name), text) for name, text in given.items() if isinstance(text, str)]
        if len(given) > MAX_PROMPTS:
            wrong.append(f"there are {len(given)} prompts; write at most {MAX_PROMPTS}")
        if wrong:
            self.notes.append("some of the prompts were left out")
        prompts = {_clean(name): _clean(text) for name, text in texts[:MAX_PROMPTS]}
        return prompts, [Refusal(RefusalKind.PROMPT, message) for message in wrong]


# Finding the workflow in a reply


def _object(text: str) -> _Found | None:
    """Find a JSON object: the whole reply, within text, repaired, or next to its code."""
    blocks = list(fenced_blocks(text)) if text.startswith("```") else []
    fenced = len(blocks) == 1 and (blocks[0].start, blocks[0].end) == (0, len(text))
    if (found := _found_in(whole_object(blocks[0].code if fenced else text))) is not None:
        return found
    for value in reversed(list(objects_in(text))):
        if (found := _found_in(value, "the object stood among other text")) is not None:
            return found
    starts = [match.start() for match in _OBJECT.finditer(text)]
    if not starts:
        return None
    for start in dict.fromkeys((starts[-1], starts[0])):
        found = _found_in(mended(text[start:]), "the JSON was mended")
        if found is not None and _CLASS.search(found.code) and is_python(found.code):
            return found
    cut = (_text_after(text[starts[0] :], key) for key in (CODE, *_CODE_KEYS))
    code, rest = next((pair for pair in cut if pair is not None), ("", ""))
    if rest and _CLASS.search(code) and _CODE_LINE.match(code.lstrip()):
        notes = ["quotes inside the code were not escaped"]
        return _Found(_prompts_in(mended(rest)), code, WrittenForm.REPAIRED, notes)
    beside = None if rest else _python(text)
    values = [*objects_in(text), mended(text[starts[-1] :])]
    prompts = next((item for value in values if (item := _prompts_in(value))), None)
    if beside is None or prompts is None:
        return None
    notes = ["the code stood beside the object"]
    return _Found(prompts, beside.code, WrittenForm.REPAIRED, notes)


def mended(text: str) -> Any:
    """The damaged object that a text begins with, as json_repair reads it; None if it cannot, or
    if it would take long."""
    counts = ((sum(map(text.count, signs)), most) for signs, most in _REPAIRABLE.items())
    if len(text) > _REPAIRABLE_CHARS or any(count > most for count, most in counts):
        return None
    from json_repair import repair_json

    try:
        return repair_json(text, return_objects=True, skip_json_loads=True)
    except Exception:  # its own limits, such as on nesting
        return None


def _text_after(text: str, key: str) -> tuple[str, str] | None:
    """The text under a key if inner quotes are not escaped, and the rest without it. It ends at the
    last quote before the key `prompts`; without one, before a closing brace or the end."""
    places = rf"[\"'`]?{key}[\"'`]?\s{{0,20}}:\s{{0,20}}([\"'`]{{1,3}})"
    found = list(re.finditer(places, text))
    if not found:
        return None
    begin = found[-1]
    quote = begin[1] if len(begin[1]) != 2 else begin[1][0]
    start = begin.start(1) + len(quote)
    behind = text[start:]
    quotes = re.escape(quote)
    ends = list(re.finditer(rf"{quotes}(?=\s{{0,50}},\s{{0,50}}[\"']?prompts)", behind))
    ends = ends or list(re.finditer(rf"{quotes}(?=\s{{0,50}}(?:\}}|$))", behind))
    stop = start + ends[-1].start() if ends else len(text)
    rest = f'{text[: begin.start(1)]}""{text[stop + len(quote) :]}'
    return unescaped(text[start:stop]), rest


def unescaped(code: str) -> str:
    """Code with JSON's escapes resolved, unless it has line breaks already and is Python only if
    they are kept."""

    def meaning(match: re.Match[str]) -> str:
        what = match[1]
        return chr(int(what[1:], 16)) if len(what) == 5 else _MEANING.get(what, match[0])

    read = _ESCAPE.sub(meaning, code)
    return code if "\n" in code and not is_python(read) and is_python(code) else read


def is_python(code: str) -> bool:
    """Whether `code` parses as Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _tagged(text: str) -> _Found | None:
    """Find code and prompts in tags, AFlow's form: `<graph>` with a class, `<prompt>` with Python
    constants or a JSON object."""
    found = elements(text, ["graph", "prompt"], through_fences=True)
    if "graph" not in found or not _CLASS.search(found["graph"].content):
        return None
    written = found["prompt"].content if "prompt" in found else ""
    blocks = list(fenced_blocks(written))
    written = blocks[-1].code if blocks else written
    prompts = whole_object(written)
    if not isinstance(prompts, Mapping):
        prompts = constants(written)
    form = WrittenForm.REPAIRED if prompts else WrittenForm.CODE
    return _Found(prompts or None, found["graph"].content, form, ["the code stood in tags"])


def _python(text: str) -> _Found | None:
    """Find Python alone: a block or the text itself with a class, even if it does not parse."""
    blocks = [block.code for block in fenced_blocks(text) if _CLASS.search(block.code)]
    if not blocks and (not _CLASS.search(text) or text.startswith("{")):
        return None
    first = _CODE_LINE.search(text)  # a single word would parse, too
    from_code_on = text[first.start() :] if first else text
    try:
        code, _ = program_in(text if blocks else from_code_on, "Workflow")
    except ValueError:  # no Python: the check says where
        code = blocks[-1] if blocks else from_code_on
    notes = [] if code == text else ["the code stood among other text"]
    return _Found(None, code, WrittenForm.CODE, notes)


# Reading an object


def _key(name: Any) -> str:
    return re.sub(r"[\s_-]", "", str(name)).casefold()


def _found_in(value: Any, note: str = "") -> _Found | None:
    """The workflow in an object with a code key, or in the only object inside it. `note`: how the
    object was found."""
    inside = note or "the object stood inside another"
    if isinstance(value, list):
        return next((item for part in reversed(value) if (item := _found_in(part, inside))), None)
    if not isinstance(value, Mapping):
        return None
    names = {_key(name): name for name in value}
    code = ""
    for wanted in _CODE_KEYS:  # a key other than `graph_code` only counts with a class
        code = _joined(value[names[wanted]]) if wanted in names else ""
        if wanted in names and (wanted == _key(CODE) or _CLASS.search(code)):
            break
    else:
        inner = [item for item in value.values() if isinstance(item, Mapping)]
        return _found_in(inner[0], inside) if len(inner) == 1 and PROMPTS not in value else None
    if not code.strip():
        return None
    form = WrittenForm.REPAIRED if note else WrittenForm.HYBRID
    found = _Found(_prompts_in(value), code, form, [note] if note else [])
    used = {names[wanted], names.get(PROMPTS, PROMPTS)}
    if used != {PROMPTS, CODE}:
        found.mended(f"the keys are `{PROMPTS}` and `{CODE}`")
    if isinstance(value[names[wanted]], list):
        found.mended("the code was a list of lines")
    return found


def _joined(code: Any) -> str:
    if isinstance(code, list) and all(isinstance(line, str) for line in code):
        return "\n".join(line.rstrip("\n") for line in code)
    return code if isinstance(code, str) else ""


def _prompts_in(value: Any) -> Any:
    if isinstance(value, list):
        return next((item for part in reversed(value) if (item := _prompts_in(part))), None)
    items = value.items() if isinstance(value, Mapping) else ()
    return next((item for name, item in items if _key(name) == PROMPTS), None)
