"""The hybrid form: what the policy writes, read from its reply and written in one way.

A workflow is one JSON object `{"prompts": {instance: instruction}, "graph_code": "class
Workflow: ..."}`. A reply may bring it in a fence, after reasoning or among prose, as damaged
JSON, or as Python alone; `Written.form` and `Written.notes` say which, because the reward does
not treat them alike.

Of JSON is mended in one pass: trailing and missing commas at a bracket, raw line breaks in texts,
single, triple or typographic quotes, backslashes that JSON does not know, comments, Python's
True, False and None, brackets and texts that were never closed. The rest is left to json_repair
(`aflow_tune.operators.objects`). Nothing is run here; time is about linear in the reply.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aflow_tune.graph.scoreflow import translated
from aflow_tune.graph.shape import constants
from aflow_tune.operators.python_code import fenced_blocks, program_in
from aflow_tune.operators.reading import elements, objects_in, repaired_object, whole_object
from aflow_tune.writer.types import Refusal, RefusalKind, Written, WrittenForm

_ESCAPES = frozenset('"\\/bfnrt')
_CLOSING = {"{": "}", "[": "]"}
_QUOTES = {'"': '"', "'": "'", "\u201c": "\u201d"}
_HEX = re.compile(r"[0-9A-Fa-f]{4}")
_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_COMMENT = re.compile(r"(?:#|//)[^\n]*|/\*.*?\*/", re.DOTALL)
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_MEANING = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


def mended(text: str) -> Any:
    """The value that a damaged object begins, or None. `text` begins with its brace."""
    try:
        return json.loads(_as_json(text), strict=False)
    except (ValueError, RecursionError):
        return None


def _as_json(text: str) -> str:
    """One object of JSON: the mended text up to the bracket that closes the first one."""
    made: list[str] = []
    opened: list[str] = []
    place = 0
    while place < len(text):
        char = text[place]
        if char in _QUOTES:
            value, place = _text_at(text, place)
            made.append(value)
            continue
        if char in "#/" and (comment := _COMMENT.match(text, place)):
            place = comment.end()
            continue
        if char in "TFN":
            word = next((word for word in _PYTHONS if text.startswith(word, place)), "")
            if word:
                made.append(_PYTHONS[word])
                place += len(word)
                continue
        if char in "{[":
            opened.append(char)
        elif char in "}]":
            if opened and _CLOSING[opened[-1]] == char:
                opened.pop()
            _drop_comma(made)
            made.append(char)
            if not opened:
                return "".join(made)
            place += 1
            continue
        made.append(char)
        place += 1
    _drop_comma(made)
    return "".join(made) + "".join(_CLOSING[bracket] for bracket in reversed(opened))


def _drop_comma(made: list[str]) -> None:
    """Take a comma in front of a closing bracket off again."""
    for number in range(len(made) - 1, -1, -1):
        if made[number] == ",":
            del made[number]
            return
        if not made[number].isspace():
            return


def _text_at(text: str, start: int) -> tuple[str, int]:
    """The text whose opening quote stands at `start`, as JSON, and the place behind it."""
    quote = _QUOTES[text[start]]
    if text.startswith(quote * 3, start):
        stop = text.find(quote * 3, start + 3)
        stop = len(text) if stop < 0 else stop
        return json.dumps(unescaped(text[start + 3 : stop])), min(stop + 3, len(text))
    place = start + 1
    made = ['"']
    while place < len(text) and text[place] != quote:
        char = text[place]
        if char == "\\" and place + 1 < len(text):
            following = text[place + 1]
            known = following in _ESCAPES or (
                following == "u" and _HEX.match(text, place + 2) is not None
            )
            if following in "'\n" and not known:
                made.append(following if following == "'" else "\\\\\n")
            else:
                made.append(char + following if known else f"\\\\{following}")
            place += 2
            continue
        made.append('\\"' if char == '"' else "\\\\" if char == "\\" else char)
        place += 1
    made.append('"')
    return "".join(made), min(place + 1, len(text))


def text_after(text: str, key: str) -> tuple[str, str] | None:
    """The text under a key whose end cannot be told by its quotes, and the rest without it.

    It ends at the last quote in front of a closing brace, of the key `prompts`, or of the end.
    """
    places = rf"[\"'`]?{key}[\"'`]?\s{{0,20}}:\s{{0,20}}([\"'`]{{1,3}})"
    found = list(re.finditer(places, text))
    if not found:
        return None
    begin = found[-1]
    quote = begin[1] if len(begin[1]) != 2 else begin[1][0]
    start = begin.end(1) - (len(begin[1]) - len(quote))
    behind = text[start:]
    quotes = re.escape(quote)
    ends = list(re.finditer(rf"{quotes}(?=\s{{0,50}},\s{{0,50}}[\"']?prompts)", behind))
    ends = ends or list(re.finditer(rf"{quotes}(?=\s{{0,50}}(?:\}}|$))", behind))
    stop = start + ends[-1].start() if ends else len(text)
    rest = f'{text[: begin.start(1)]}""{text[stop + len(quote) :]}'
    return unescaped(text[start:stop]), rest


def unescaped(code: str) -> str:
    """Code as it was meant: with the escapes of JSON read, unless only without that it is Python.

    Code with line breaks of its own may have been written as it is, so that a backslash in it
    is Python's.
    """
    read = _ESCAPE.sub(_meaning, code)
    if "\n" in code and not is_python(read) and is_python(code):
        return code
    return read


def _meaning(match: re.Match[str]) -> str:
    what = match[1]
    if len(what) == 5:
        return chr(int(what[1:], 16))
    if what in _MEANING:
        return _MEANING[what]
    return what if what in "\"'\\/" else match[0]


def is_python(code: str) -> bool:
    """Whether it can be parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


MAX_TEXT_CHARS = 200_000
"""Of a reply. A longer one is not read."""
MAX_PROMPTS = 64
PROMPTS, CODE = "prompts", "graph_code"
_CODE_KEYS = ("graphcode", "workflowcode", "workflow", "graph", "code")
"""Under which the code is found, spelt as `_key` spells; the first that an object has is meant."""

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


class Unreadable(ValueError):
    """There is no workflow in a text. `refusal` says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal)
        self.refusal = refusal

    def __str__(self) -> str:
        return str(self.refusal)


def as_text(prompts: Mapping[str, str], code: str) -> str:
    """A workflow in the hybrid form, as `read_written` reads it without a note."""
    texts = {_clean(name): _clean(text) for name, text in prompts.items()}
    return json.dumps({PROMPTS: texts, CODE: _clean(code)}, ensure_ascii=False)


def _clean(text: str) -> str:
    """The text without what none can hold: lone surrogates, null characters."""
    return _NO_TEXT.sub("\ufffd", text)


def read_written(text: str) -> Written:
    """The workflow in a reply. Prompts that are no texts are left out, with a note.

    Raises:
        Unreadable: there is none, or the reply is too long.
    """
    return read_with_refusals(text)[0]


def read_with_refusals(text: str) -> tuple[Written, tuple[Refusal, ...]]:
    """As `read_written`, and what is refused of its prompts.

    Raises:
        Unreadable: there is none, or the reply is too long.
    """
    if len(text) > MAX_TEXT_CHARS:
        message = f"the reply has {len(text):,} characters; write at most {MAX_TEXT_CHARS:,}"
        raise Unreadable(Refusal(RefusalKind.TOO_LARGE, message))
    clean = _clean(text.removeprefix("\ufeff"))
    for part in _parts(clean):
        found = _object(part) or _tagged(part) or _python(part)
        if found is not None:
            if clean != text.removeprefix("\ufeff"):
                found.notes.append("characters that no text can hold were replaced")
            return found.written()
    raise Unreadable(Refusal(RefusalKind.UNREADABLE, _why_unreadable(clean)))


def _why_unreadable(text: str) -> str:
    form = f'{{"{PROMPTS}": {{...}}, "{CODE}": "class Workflow: ..."}}'
    if not text.strip():
        return f"the reply is empty; write one JSON object {form}"
    if _OBJECT.search(text):
        return f"the JSON object holds no `{CODE}` that can be read; write {form}"
    return f"there is neither a JSON object nor Python with `class Workflow`; write {form}"


def _parts(text: str) -> Iterator[str]:
    """Where to look: what follows the reasoning, then everything."""
    _, ended, answer = text.rpartition("</think>")
    if ended and answer.strip():
        yield answer.strip()
    yield text.strip()


@dataclass
class _Found:
    prompts: Any
    code: str
    form: WrittenForm
    notes: list[str]

    def written(self) -> tuple[Written, tuple[Refusal, ...]]:
        prompts, refusals = self._prompts()
        code = _clean(self._code())
        if (aflow := translated(code)) != code:
            self._mended("ScoreFlow's form was put into AFlow's")
            code = aflow
        return Written(code, prompts, self.form, tuple(self.notes)), refusals

    def _mended(self, note: str) -> None:
        self.notes.append(note)
        if self.form is WrittenForm.HYBRID:
            self.form = WrittenForm.REPAIRED

    def _code(self) -> str:
        code = self.code
        blocks = [block for block in fenced_blocks(code) if _CLASS.search(block.code)]
        if blocks and not _CLASS.search(code[: blocks[-1].start]):
            code = blocks[-1].code
            self._mended("the code stood in a fence of its own")
        if "\n" not in code.strip() and "\\n" in code and not is_python(code):
            code = unescaped(code)
            self._mended("the code was escaped twice")
        if code[:1] in (" ", "\t", "\n"):
            dedented = textwrap.dedent(code).lstrip("\n")
            if dedented != code.lstrip("\n"):
                self._mended("the code was indented as a whole")
            code = dedented
        return code

    def _prompts(self) -> tuple[dict[str, str], tuple[Refusal, ...]]:
        given = self.prompts
        if given is None:
            if self.form is not WrittenForm.CODE:
                self._mended(f"there is no `{PROMPTS}`")
            return {}, ()
        if not isinstance(given, Mapping):
            what = f"`{PROMPTS}` is {_named(given)}; write an object from instances to texts"
            self.notes.append(f"`{PROMPTS}` was left out")
            return {}, (Refusal(RefusalKind.PROMPT, what),)
        prompts: dict[str, str] = {}
        refusals = []
        for name, value in given.items():
            if isinstance(value, str):
                prompts[_clean(str(name))] = _clean(value)
                continue
            what = f"the prompt of {name!r:.60} is {_named(value)}; write its text"
            refusals.append(Refusal(RefusalKind.PROMPT, what))
        if len(given) > MAX_PROMPTS:
            what = f"there are {len(given)} prompts; write at most {MAX_PROMPTS}"
            refusals = [*refusals[:MAX_PROMPTS], Refusal(RefusalKind.PROMPT, what)]
            prompts = dict(list(prompts.items())[:MAX_PROMPTS])
        if len(prompts) < len(given):
            self.notes.append(f"{len(given) - len(prompts)} prompts were left out")
        return prompts, tuple(refusals)


def _named(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else "a text")


def _object(text: str) -> _Found | None:
    """The JSON object of a reply: as it is, among other text, mended."""
    whole = whole_object(_unfenced(text))
    found = _with_code(whole)
    if found is not None:
        form, notes = WrittenForm.HYBRID, []
        if found is not whole:
            form, notes = WrittenForm.REPAIRED, ["the object stood inside another"]
        return _from(found, form, notes)
    inner = [item for value in objects_in(text) if (item := _with_code(value))]
    if inner:
        return _from(inner[-1], WrittenForm.REPAIRED, ["the object stood among other text"])
    starts = [match.start() for match in _OBJECT.finditer(text)]
    for start in dict.fromkeys((*starts[-1:], *starts[:1])):
        found = _with_code(mended(text[start:]))
        if found is not None and _CLASS.search(_code_of(found)):
            return _from(found, WrittenForm.REPAIRED, ["the JSON was mended"])
    if not starts:
        return None
    found_texts = (text_after(text[starts[0] :], key) for key in (CODE, *_CODE_KEYS))
    taken = next((pair for pair in found_texts if pair is not None), None)
    if taken is None:
        return _apart(text, starts)
    code, rest = taken
    if not _CLASS.search(code) or not _CODE_LINE.match(code.lstrip()):
        return None
    prompts = _prompts_in(mended(rest))
    if prompts is None:
        prompts = _prompts_in(repaired_object(rest, [PROMPTS, CODE]))
    return _Found(prompts, code, WrittenForm.REPAIRED, ["quotes inside the code were not escaped"])


def _tagged(text: str) -> _Found | None:
    """Code and prompts in tags, as AFlow's and ScoreFlow's models write them: `<graph>` with a
    class, `<prompt>` with constants in Python or with an object."""
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


def _apart(text: str, starts: list[int]) -> _Found | None:
    """Prompts in an object, and the code beside it."""
    code = _python(text)
    prompts = next((item for value in objects_in(text) if (item := _prompts_in(value))), None)
    if prompts is None:
        prompts = _prompts_in(mended(text[starts[-1] :]))
    if code is None or prompts is None:
        return None
    return _Found(prompts, code.code, WrittenForm.REPAIRED, ["the code stood beside the object"])


def _unfenced(text: str) -> str:
    """The inside of a reply that is one fenced block and nothing else."""
    if not text.startswith("```"):
        return text
    blocks = list(fenced_blocks(text))
    whole = len(blocks) == 1 and blocks[0].start == 0 and blocks[0].end == len(text)
    return blocks[0].code if whole else text


def _key(name: Any) -> str:
    return re.sub(r"[\s_-]", "", str(name)).casefold()


def _with_code(value: Any) -> Mapping[str, Any] | None:
    """The object with the code: the value, or the one object in it."""
    if isinstance(value, list):
        return next((item for part in reversed(value) if (item := _with_code(part))), None)
    if not isinstance(value, Mapping):
        return None
    if _code_key(value) is not None:
        return value if _code_of(value).strip() else None
    inner = [item for item in value.values() if isinstance(item, Mapping)]
    if len(inner) == 1 and PROMPTS not in value:
        return _with_code(inner[0])
    return None


def _code_key(value: Mapping[str, Any]) -> str | None:
    """The key of the code: its own name, or another under which a class stands."""
    for wanted in _CODE_KEYS:
        for name, item in value.items():
            if _key(name) == wanted and (wanted == _key(CODE) or _CLASS.search(_joined(item))):
                return name
    return None


def _code_of(value: Mapping[str, Any]) -> str:
    key = _code_key(value)
    return "" if key is None else _joined(value[key])


def _joined(code: Any) -> str:
    if isinstance(code, list) and all(isinstance(line, str) for line in code):
        return "\n".join(line.rstrip("\n") for line in code)
    return code if isinstance(code, str) else ""


def _prompts_in(value: Any) -> Any:
    if isinstance(value, list):
        return next((item for part in reversed(value) if (item := _prompts_in(part))), None)
    if not isinstance(value, Mapping):
        return None
    return next((item for name, item in value.items() if _key(name) == PROMPTS), None)


def _from(value: Mapping[str, Any], form: WrittenForm, notes: list[str]) -> _Found:
    found = _Found(_prompts_in(value), _code_of(value), form, notes)
    code = _code_key(value)
    used = [name for name in value if name == code or _key(name) == PROMPTS]
    if any(name not in (PROMPTS, CODE) for name in used):
        found._mended(f"the keys are `{PROMPTS}` and `{CODE}`")
    if code is not None and isinstance(value[code], list):
        found._mended("the code was a list of lines")
    other = [str(name) for name in value if name not in used]
    if other:
        shown = ", ".join(f"{name:.40}" for name in other[:5])
        found.notes.append(f"passed over: {shown}")
    return found


def _python(text: str) -> _Found | None:
    """Python alone: a block or the text itself, readable or not, that has a class."""
    among = ["the code stood among other text"]
    blocks = [block.code for block in fenced_blocks(text) if _CLASS.search(block.code)]
    if not blocks and (not _CLASS.search(text) or text.startswith("{")):
        return None
    try:
        code, _ = program_in(text if blocks else _from_code_on(text), "Workflow")
    except ValueError:  # no Python: the check says where
        code = blocks[-1] if blocks else _from_code_on(text)
    return _Found(None, code, WrittenForm.CODE, [] if code == text else among)


def _from_code_on(text: str) -> str:
    """The text from its first line of code on: a word alone would be Python too."""
    first = _CODE_LINE.search(text)
    return text[first.start() :] if first else text
