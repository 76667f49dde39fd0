"""Prompts are data: where an operator's texts come from, and how their placeholders are filled.

The shipped texts are in `prompts.yaml`. Of each prompt the first of these wins: the instance's
(`Op(llm, prompts=...)`, which is also how a graph gives them), the run's by instance
(`prompts: {Review.strict: ...}`), the run's by operator, the operator's own.

A value is a mapping from the names of the operator's prompts to texts, or one text for an operator
that has one prompt (or for its prompt `main`). A placeholder is `{name}`; `{{name}}` is the literal
text `{name}`; every other brace is text, so JSON and code need no escapes.

A graph may also have an *instruction* for an instance (`use_instruction`): words without
placeholders in front of the operator's main prompt. One that mentions every placeholder which the
prompt needs is taken as the whole prompt.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar

from aflow_tune.errors import BadInput, Fault

T = TypeVar("T")
Texts = str | Mapping[str, str]  # the prompts of one operator or instance, as users give them
MAIN = "main"
FORM = "form"  # the placeholder for the description of the answer's form. Every prompt may use it.
NO_FORM = "no_form"
"""The placeholder for nothing, of a prompt that describes the answer's form itself."""
FORMS = "forms"
"""Under this name stand the sentences that ask for a form; a run may replace them too."""
APART = "\n\n"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
_ONE_BRACE = re.compile(r"\{(\w+)\}")
_run: ContextVar[Mapping[str, Texts] | None] = ContextVar("aflow_tune_prompts", default=None)
_instruction: ContextVar[tuple[str, str, str]] = ContextVar(
    "aflow_tune_instruction", default=("", "", "")
)


@dataclass(frozen=True)
class Prompt:
    """A prompt of an operator: what its text must and what it may mention.

    `text` is the operator's own; None: it stands in `prompts.yaml` under the operator's name.
    """

    needs: tuple[str, ...] = ()
    may: tuple[str, ...] = ()
    text: str | None = None


FORM_PROMPTS: Mapping[str, Prompt] = {
    "xml": Prompt(needs=("fields",)),
    "json": Prompt(needs=("fields",)),
    "code": Prompt(needs=("fields",)),
    "again": Prompt(needs=("fault",)),
    "candidate": Prompt(needs=("label", "solution")),
}


@contextlib.contextmanager
def use(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A context variable's value, in the current context and in everything it starts."""
    token = variable.set(value)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # closed by the collector, in another context
            variable.reset(token)


def use_prompts(prompts: Mapping[str, Texts]) -> contextlib.AbstractContextManager[None]:
    """Use these prompts in the current context and in everything it starts: the run's.

    An inner block's entry for an operator or instance replaces an outer one's. A text is checked
    when it is used; check all before with `check_prompts`.
    """
    return use(_run, {**(_run.get() or {}), **prompts})


def use_instruction(
    operator: str, instance: str, text: str
) -> contextlib.AbstractContextManager[None]:
    """Put these words, if any, in front of the main prompt of one instance, as `use_prompts`."""
    return use(_instruction, (operator, instance, text))


@functools.cache
def shipped() -> Mapping[str, Mapping[str, str]]:
    """The texts of `prompts.yaml`, by operator and prompt."""
    import yaml

    text = resources.files(__package__).joinpath("prompts.yaml").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, str]] = yaml.safe_load(text)
    return loaded


def own_text(operator: str, name: str, prompt: Prompt) -> str:
    """The text that an operator brings along."""
    return shipped()[operator][name] if prompt.text is None else prompt.text


def text_of(
    operator: str,
    instance: str,
    name: str,
    slots: Mapping[str, Prompt],
    given: Mapping[str, str],
) -> str:
    """The text of one prompt, by the order in this module's description.

    Args:
        slots: the operator's prompts.
        given: the instance's own texts, checked. Those of the run are checked here: `BadInput`.
    """
    text = given.get(name)
    run = _run.get() or {}
    for key in (f"{operator}.{instance}", operator):
        if text is None and key in run:
            texts, faults = checked(run[key], slots, f"prompts.{key}")
            if faults:
                raise BadInput("A prompt does not fit its operator.", faults)
            text = texts.get(name)
    if text is None:
        text = own_text(operator, name, slots[name])
    whose, which, instruction = _instruction.get()
    main = MAIN if MAIN in slots else next(iter(slots), MAIN)
    if (whose, which, name) != (operator, instance, main) or not instruction.strip():
        return text
    return with_instruction(text, instruction, slots[name])


def with_instruction(text: str, instruction: str, prompt: Prompt) -> str:
    """A prompt's text with an instruction in front of it, or replaced by it.

    Braces of an instruction that comes in front are text, not placeholders.
    """
    if prompt.needs and placeholders(instruction) >= set(prompt.needs):
        return instruction
    as_text = _ONE_BRACE.sub(r"{{\1}}", instruction.strip())
    return f"{as_text}\n\n{text}"


def apart(instruction: str) -> str:
    """An instruction as it goes in front of an input that follows straight after it."""
    ends = not instruction.strip() or instruction[-1].isspace()
    return instruction if ends else f"{instruction}{APART}"


def form_text(name: str, values: Mapping[str, Any]) -> str:
    """One of the sentences that ask for a form, filled in."""
    return fill(text_of(FORMS, "", name, FORM_PROMPTS, {}), values)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with its placeholders replaced; values are taken as they are."""

    def one(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        return str(values[name]) if name in values else match[0]

    return _PLACEHOLDER.sub(one, template)


def placeholders(template: str) -> set[str]:
    """The names that a template wants filled in."""
    return {match[2] for match in _PLACEHOLDER.finditer(template) if match[2] is not None}


def checked(
    prompts: Texts | None, slots: Mapping[str, Prompt], where: str
) -> tuple[dict[str, str], list[Fault]]:
    """The texts that a user gave for an operator, by prompt, and what is wrong with them."""
    listed = ", ".join(f"`{name}`" for name in slots)
    if isinstance(prompts, str):
        prompts = {next(iter(slots)) if MAIN not in slots and len(slots) == 1 else MAIN: prompts}
    if not isinstance(prompts, Mapping | None):
        expected = f"a text, or a mapping of {listed} to texts"
        return {}, [Fault(where, expected, f"{prompts!r:.80}", "write `main: ...`")]
    good: dict[str, str] = {}
    faults: list[Fault] = []
    for name, text in (prompts or {}).items():
        place = f"{where}.{name}"
        if name not in slots:
            near = difflib.get_close_matches(str(name), slots, 1)
            fix = f"did you mean `{near[0]}`?" if near else "name one of these"
            faults.append(Fault(place, f"one of the prompts {listed}", str(name), fix))
        elif not isinstance(text, str):
            faults.append(Fault(place, "a text", f"{text!r:.80}", "write the prompt's text"))
        else:
            good[name] = text
            needs, may, found = slots[name].needs, slots[name].may, placeholders(text)
            unknown = sorted(found - {*needs, *may, FORM, NO_FORM})
            problems = [f"`{{{need}}}` is missing" for need in needs if need not in found]
            problems += [f"unknown `{{{name}}}`" for name in unknown]
            if problems:
                expected = f"a text with {', '.join(f'`{{{n}}}`' for n in needs) or 'any words'}"
                expected += f", and if wanted {', '.join(f'`{{{n}}}`' for n in may)}" if may else ""
                fix = "write each placeholder; for braces that are text write them twice, {{name}}"
                faults.append(Fault(place, expected, "; ".join(problems), fix))
    return good, faults
