"""From the section `writer:` of a configuration to a `WriterWorkflow`, with every fault at once.

Here is asked what the section says by itself and beside `models:` and the auxiliary models. What
needs the rest of the configuration (the algorithm, time limits, the rows of the data) is asked in
`config/file_rules.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from aflow_tune.errors import BadInput, Fault
from aflow_tune.graph.workflow import ScoreFunction
from aflow_tune.models.prices import price_of
from aflow_tune.models.settings import check_models
from aflow_tune.models.types import Usage
from aflow_tune.operators import OPERATORS, Operator, TestCases
from aflow_tune.operators.base import MAX_RETRIES
from aflow_tune.scoring import find
from aflow_tune.sections import ModelSettings, WriterSection
from aflow_tune.trace import POLICY
from aflow_tune.writer.prompting import template_faults
from aflow_tune.writer.templates import default_graph
from aflow_tune.writer.types import PROBLEM_TYPES, CheckLimits, ProblemType
from aflow_tune.writer.workflow import TYPE_OF_BENCHMARK, WriterWorkflow

Where = Callable[[str], str]
_MAX_TURNS = 16


@dataclass(frozen=True)
class AuxiliaryModel:
    """What the writer asks of one of `explorer.auxiliary_models`."""

    answer_tokens: int | None = None
    """Most tokens of one answer; None: nothing bounds it."""
    prompt_tokens: int | None = None
    """Most tokens of one prompt; None: not known."""


def writer_from_config(
    section: WriterSection,
    settings: Mapping[str, ModelSettings],
    *,
    auxiliary: Mapping[str, AuxiliaryModel] | None = None,
    operators: Mapping[str, type[Operator]] | None = None,
    score: ScoreFunction | None = None,
    test_cases: Path | None = None,
    prompt: Path | None = None,
    sandbox: str = "auto",
    where: Where = str,
) -> WriterWorkflow:
    """The workflow function that a configuration's `writer:` section describes.

    Args:
        settings: the configuration's `models:`.
        auxiliary: its auxiliary models, by name.
        operators: its `operators:`, loaded; the shipped ones are known besides.
        score: the function that `section.score` names.
        test_cases: the file `section.test_cases`, found.
        prompt: the same for `section.prompt`.
        where: from a key of the configuration to its place, for messages.

    Raises:
        BadInput: with every fault of the section.
    """
    known = {**OPERATORS, **(operators or {})}
    helpers = dict(auxiliary or {})
    faults = [
        *_role_faults(section, settings, helpers, known, where),
        *_operator_faults(section, known, where),
        *_scoring_faults(section, score, where),
        *_number_faults(section, where),
    ]
    roles = [section.executor or "", *section.models.values()]
    faults += _bound_faults(section, settings, helpers, roles, where)
    template, found = _template(prompt, where)
    faults += found
    cases = TestCases()
    if test_cases is not None:
        try:
            cases = TestCases.load(test_cases)
        except BadInput as error:
            faults += error.faults
    if faults:
        raise BadInput("The writer section cannot be used.", faults)
    return WriterWorkflow(
        executor=section.executor or "",
        operators={name: known[name] for name in section.operators or known},
        models=dict(section.models),
        benchmark=section.benchmark,
        score=score,
        problem_type=cast(ProblemType | None, section.problem_type),
        problem=section.problem,
        entry_point=section.entry_point,
        test_cases=cases,
        template=template,
        turns=section.turns,
        check=check_limits(section, settings, helpers),
        seconds=section.timeout,
        sandbox=sandbox,
        limited=tuple(
            role
            for role in dict.fromkeys(roles)
            if _answer_tokens(role, settings, helpers) is not None
        ),
    )


def check_limits(
    section: WriterSection,
    settings: Mapping[str, ModelSettings],
    auxiliary: Mapping[str, AuxiliaryModel],
) -> CheckLimits:
    """What a graph may use at worst: the section's limits, and those of the models' calls."""
    roles = {section.executor or "", *section.models.values()}
    usual = CheckLimits()
    answers = [_answer_tokens(role, settings, auxiliary) for role in roles]
    prompts = [
        auxiliary[role].prompt_tokens if role in auxiliary else usual.call_prompt_tokens
        for role in roles
    ]
    prompt_tokens = max(tokens or usual.call_prompt_tokens for tokens in prompts)
    prices = [_prices(role, settings, prompt_tokens) for role in roles]
    known = [price for price in prices if price is not None]
    whole = len(known) == len(prices)
    return CheckLimits(
        model_calls=section.max_calls,
        tokens=section.max_tokens,
        usd=section.max_usd,
        retries=section.retries,
        call_prompt_tokens=prompt_tokens,
        call_completion_tokens=max(tokens or usual.call_completion_tokens for tokens in answers),
        usd_per_prompt_token=max(price[0] for price in known) if whole else None,
        usd_per_completion_token=max(price[1] for price in known) if whole else None,
    )


def _answer_tokens(
    role: str, settings: Mapping[str, ModelSettings], auxiliary: Mapping[str, AuxiliaryModel]
) -> int | None:
    if role in auxiliary:
        return auxiliary[role].answer_tokens
    return settings[role].max_tokens if role in settings else None


def _prices(
    role: str, settings: Mapping[str, ModelSettings], prompt_tokens: int
) -> tuple[float, float] | None:
    """US dollars for a token of a prompt and of an answer; None where they are not known."""
    model = settings.get(role)
    if model is None or not model.model:
        return None
    price = price_of(model.provider, model.base_url, model.model, model.prices)
    if price is None:
        return None
    prompt = price.cost(Usage(prompt_tokens, 0)) / prompt_tokens
    return prompt, price.cost(Usage(0, 1))


def _role_faults(
    section: WriterSection,
    settings: Mapping[str, ModelSettings],
    auxiliary: Mapping[str, AuxiliaryModel],
    operators: Mapping[str, type[Operator]],
    where: Where,
) -> Iterator[Fault]:
    """Models that nobody has, the tuned one among the frozen, keys that are missing."""
    named = {"writer.executor": section.executor or ""}
    named |= {f"writer.models.{name}": role for name, role in section.models.items()}
    there = [role for role in settings if role != POLICY] + list(auxiliary)
    for key, role in named.items():
        if role == POLICY:
            cure = "name a role of `models:` or of `explorer.auxiliary_models`"
            expected = "a frozen model: the policy writes workflows, it does not run them"
            yield Fault(where(key), expected, role, cure)
        elif role in settings and role in auxiliary:
            found = f"{role}, which is both under `models:` and an auxiliary model"
            yield Fault(where(key), "one model of that name", found, "rename one of them")
        elif role not in there:
            near = difflib.get_close_matches(role, there, 1)
            expected = "a role of `models:`, or the name of an auxiliary model"
            found = f"{role!r}; there is {', '.join(there) or 'none'}"
            cure = f"did you mean {near[0]}?" if near else f"models: {{{role}: {{model: NAME}}}}"
            yield Fault(where(key), expected, found, cure)
    for name in section.models:
        if name not in operators:
            yield _unknown_operator(where(f"writer.models.{name}"), name, operators)
        elif section.operators and name not in section.operators:
            expected = f"an operator that graphs may use: {', '.join(section.operators)}"
            cure = "remove it, or add it to writer.operators"
            yield Fault(where(f"writer.models.{name}"), expected, name, cure)
    used = {role: settings[role] for role in named.values() if role in settings and role != POLICY}
    for fault in check_models(used):
        yield replace(fault, where=where(fault.where))


def _operator_faults(
    section: WriterSection, known: Mapping[str, type[Operator]], where: Where
) -> Iterator[Fault]:
    unknown = [name for name in section.operators if name not in known]
    for name in dict.fromkeys(unknown):
        yield _unknown_operator(where("writer.operators"), name, known)
    if unknown:
        return
    allowed = {name: known[name] for name in section.operators or known}
    types: Sequence[str] = [section.problem_type] if section.problem_type else PROBLEM_TYPES
    if not section.problem_type and (section.benchmark or "").lower() in TYPE_OF_BENCHMARK:
        types = [TYPE_OF_BENCHMARK[(section.benchmark or "").lower()]]
    for kind in types:
        try:
            default_graph(kind, allowed)
        except BadInput as error:
            yield from (replace(fault, where=where("writer.operators")) for fault in error.faults)
            return


def _unknown_operator(where: str, name: str, known: Mapping[str, type[Operator]]) -> Fault:
    near = difflib.get_close_matches(name, known, 1)
    cure = f"did you mean {near[0]}?" if near else "name one of them, or add it to `operators:`"
    return Fault(where, f"one of {', '.join(known)}", name, cure)


def _scoring_faults(
    section: WriterSection, score: ScoreFunction | None, where: Where
) -> Iterator[Fault]:
    """What scores is one thing; it may also be each row's own benchmark, which data tells."""
    if section.benchmark is not None and score is not None:
        expected, cure = "a benchmark or a score function", "remove one of them"
        yield Fault(where("writer.score"), expected, "both", cure)
    if section.benchmark is not None:
        try:
            find(section.benchmark)
        except BadInput as error:
            yield from (replace(fault, where=where("writer.benchmark")) for fault in error.faults)
    if section.problem_type not in (None, *PROBLEM_TYPES):
        expected = " | ".join(PROBLEM_TYPES)
        cure = "problem_type: math"
        yield Fault(where("writer.problem_type"), expected, repr(section.problem_type), cure)


def _number_faults(section: WriterSection, where: Where) -> Iterator[Fault]:
    limits: tuple[tuple[str, float | None, float, float, str], ...] = (
        ("turns", section.turns, 1, _MAX_TURNS, "1"),
        ("max_calls", section.max_calls, 1, math.inf, "20"),
        ("max_tokens", section.max_tokens, 1, math.inf, "20000"),
        ("retries", section.retries, 0, MAX_RETRIES, "0"),
    )
    for name, value, low, high, example in limits:
        if value is not None and not low <= value <= high:
            expected = f"from {low:g} to {high:g}" if high < math.inf else f"{low:g} or more"
            yield Fault(where(f"writer.{name}"), expected, f"{value:g}", f"{name}: {example}")
    for name, amount, example in (
        ("timeout", section.timeout, "180"),
        ("max_usd", section.max_usd, "0.01"),
    ):
        if amount is not None and not 0 < amount < math.inf:
            unit = "seconds" if name == "timeout" else "US dollars"
            expected, cure = f"{unit} above 0", f"{name}: {example}"
            yield Fault(where(f"writer.{name}"), expected, f"{amount:g}", cure)


def _bound_faults(
    section: WriterSection,
    settings: Mapping[str, ModelSettings],
    auxiliary: Mapping[str, AuxiliaryModel],
    roles: Sequence[str],
    where: Where,
) -> Iterator[Fault]:
    """A bound on tokens needs one on an answer, a bound on money needs prices too."""
    limit = "max_usd" if section.max_usd is not None else "max_tokens"
    if section.max_usd is None and section.max_tokens is None:
        return
    for role in dict.fromkeys(roles):
        if role in settings and settings[role].max_tokens is None:
            expected = f"the most tokens of an answer, from which writer.{limit} is counted"
            key = where(f"models.{role}.max_tokens")
            yield Fault(key, expected, "nothing", "max_tokens: 1024")
        if section.max_usd is None:
            continue
        if role in auxiliary:
            expected = f"models with known prices; {role} is an auxiliary model, which has none"
            cure = "use writer.max_tokens instead"
            yield Fault(where("writer.max_usd"), expected, f"{section.max_usd:g}", cure)
        elif role in settings and _prices(role, settings, 1) is None:
            expected = f"a price of {settings[role].model}, for writer.max_usd"
            cure = "prices: {input: 0.15, output: 0.6}, in US dollars for a million tokens"
            yield Fault(where(f"models.{role}.prices"), expected, "no known price", cure)


def _template(path: Path | None, where: Where) -> tuple[str | None, list[Fault]]:
    if path is None:
        return None, []
    key = where("writer.prompt")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = " ".join(str(error).split())
        return None, [Fault(key, "a file of text", found, "name a file with {problem} in it")]
    return text, template_faults(text, key)
