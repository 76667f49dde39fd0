"""Where an operator's prompts come from, and how their placeholders are filled.

The shipped texts are in `prompts.yaml`. Each prompt is taken from the first of these that has it:
the instance (`Op(llm, prompts=...)`, also for a graph's prompts), the run's prompts by instance
(`prompts: {Review.strict: ...}`), the run's prompts by operator, the operator itself.

A value is a mapping from the names of the operator's prompts to texts, or one text for an operator
that has one prompt (or for its prompt `main`). A placeholder is `{name}`; `{{name}}` is the literal
text `{name}`; every other brace is text, so JSON and code need no escapes.

A graph may also have an *instruction* for an instance (`use_instruction`): a text without
placeholders, put in front of the operator's main prompt. One that has every placeholder that the
prompt needs replaces the whole prompt.
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
FORM = "form"  # placeholder for the description of the answer's form, allowed in every prompt
NO_FORM = "no_form"
"""Empty placeholder: marks a prompt that describes the answer's form itself."""
FORMS = "forms"
"""The key of the sentences that ask for a form; a run may replace them too."""
APART = "\n\n"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
_ONE_BRACE = re.compile(r"\{(\w+)\}")
_run: ContextVar[Mapping[str, Texts] | None] = ContextVar("aflow_tune_prompts", default=None)
_instruction: ContextVar[tuple[str, str, str]] = ContextVar(
    "aflow_tune_instruction", default=("", "", "")
)


@dataclass(frozen=True)
class Prompt:
    """A prompt of an operator: the placeholders that its text must have and may have.

    `text`: None: it is in `prompts.yaml`, under the operator's name.
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
    """Set a context variable in the current context and in tasks started from it."""
    token = variable.set(value)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # closed by the garbage collector, in another context
            variable.reset(token)


def use_prompts(prompts: Mapping[str, Texts]) -> contextlib.AbstractContextManager[None]:
    """Make these the run's prompts in the current context and in tasks started from it.

    An inner block's entry for an operator or instance replaces an outer one's. A text is checked
    when it is used; `check_prompts` checks all of them in advance.
    """
    return use(_run, {**(_run.get() or {}), **prompts})


def use_instruction(
    operator: str, instance: str, text: str
) -> contextlib.AbstractContextManager[None]:
    """Put this text, if any, in front of the main prompt of one instance, in this context."""
    return use(_instruction, (operator, instance, text))


@functools.cache
def shipped() -> Mapping[str, Mapping[str, str]]:
    """The texts of `prompts.yaml`, by operator and prompt."""
    import yaml

    text = resources.files(__package__).joinpath("prompts.yaml").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, str]] = yaml.safe_load(text)
    return loaded


def own_text(operator: str, name: str, prompt: Prompt) -> str:
    """The operator's own text of a prompt."""
    return shipped()[operator][name] if prompt.text is None else prompt.text


def text_of(
    operator: str,
    instance: str,
    name: str,
    slots: Mapping[str, Prompt],
    given: Mapping[str, str],
) -> str:
    """The text of one prompt, by the precedence in the module docstring.

    Args:
        slots: the operator's prompts.
        given: the instance's texts, already checked. `BadInput`: a text of the run does not fit.
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
    """An instruction that an input directly follows: with a blank line at its end."""
    ends = not instruction.strip() or instruction[-1].isspace()
    return instruction if ends else f"{instruction}{APART}"


def form_text(name: str, values: Mapping[str, Any]) -> str:
    """One of the sentences about a form (`FORM_PROMPTS`), filled in."""
    return fill(text_of(FORMS, "", name, FORM_PROMPTS, {}), values)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with its placeholders replaced; those without a value stay."""

    def one(match: re.Match[str]) -> str:
        literal, name = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        return str(values[name]) if name in values else match[0]

    return _PLACEHOLDER.sub(one, template)


def placeholders(template: str) -> set[str]:
    """The names of the placeholders in a template."""
    return {match[2] for match in _PLACEHOLDER.finditer(template) if match[2] is not None}


def checked(
    prompts: Texts | None, slots: Mapping[str, Prompt], where: str
) -> tuple[dict[str, str], list[Fault]]:
    """A user's texts for an operator by prompt name, and their faults."""
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
