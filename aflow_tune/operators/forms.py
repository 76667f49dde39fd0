"""How fields are asked for: the sentences after a prompt, and the messages of another attempt.

The sentences themselves are prompts (`forms:` in `prompts.yaml`); here they get their fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aflow_tune.operators.fields import Field, Kind
from aflow_tune.operators.prompts import FORM, NO_FORM, fill, form_text, placeholders
from aflow_tune.operators.reading import Form

MAX_SHOWN_REPLY = 4_000
"""Characters of a reply that go back to the model when it is asked again."""
MAX_SHOWN_CHOICES = 30


def described(fields: Sequence[Field], form: Form) -> str:
    """What is said about the answer's form; empty where the whole reply is the answer."""
    if form is Form.TEXT:
        return ""
    if form is Form.XML:
        lines = [f"<{field.name}>{_meaning(field, form)}</{field.name}>" for field in fields]
    elif form is Form.JSON:
        lines = [f'"{field.name}": {_meaning(field, form)}' for field in fields]
    else:
        lines = [_meaning(field, form) for field in fields]
    return form_text(form.value, {"fields": "\n".join(lines)})


def prompt_with_form(template: str, values: Mapping[str, object], form: str) -> str:
    """A prompt filled in, with the description of the form in its place or at the end."""
    text = fill(template, {**values, FORM: form, NO_FORM: ""})
    if form and not placeholders(template) & {FORM, NO_FORM}:
        text = f"{text}\n\n{form}"
    return text


def again(prompt: str, reply: str, fault: str) -> list[dict[str, str]]:
    """The messages that ask once more, with the reply that could not be read."""
    if len(reply) > MAX_SHOWN_REPLY:
        half = MAX_SHOWN_REPLY // 2
        reply = f"{reply[:half]}\n[...]\n{reply[-half:]}"
    # Endpoints refuse lone surrogates and empty messages.
    shown = reply.encode(errors="replace").decode().replace("\0", "\ufffd")
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": shown if shown.strip() else "(an empty reply)"},
        {"role": "user", "content": form_text("again", {"fault": fault})},
    ]


def _meaning(field: Field, form: Form) -> str:
    what = _type(field)
    if form is Form.CODE:  # the sentence around it says that it is Python
        what = ""
    if field.entry_point:
        what += f"{', ' if what else ''}defines `{field.entry_point}`"
    if not field.description:
        return what or "the program"
    return f"{field.description} ({what})" if what else field.description


def _type(field: Field) -> str:
    if field.kind is Kind.CHOICE:
        shown = list(field.choices[:MAX_SHOWN_CHOICES])
        if len(field.choices) > MAX_SHOWN_CHOICES:
            shown.append(f"and so on to {field.choices[-1]}")
        return "one of " + ", ".join(shown)
    return _TYPES[field.kind]


_TYPES = {
    Kind.TEXT: "",
    Kind.BOOL: "true or false",
    Kind.INT: "a whole number",
    Kind.CODE: "a Python program",
}
