"""The types of this package: a written workflow, its refusals, limits, bound and verdict."""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from aflow_tune.graph.graph import Graph

ProblemType = Literal["math", "code", "qa"]
PROBLEM_TYPES: tuple[ProblemType, ...] = ("math", "code", "qa")
MAX_REFUSALS = 50
"""Most refusals kept of one graph."""
MAX_SHOWN = 60
"""Most characters of a piece of source in a message."""


class WrittenForm(StrEnum):
    """How a workflow was read from the policy's reply."""

    HYBRID = "hybrid"  # one JSON object with `prompts` and `graph_code`
    REPAIRED = "repaired"  # the same, after repairing the JSON or finding it in other text
    CODE = "code"  # Python alone: a workflow without prompts of its own


class RefusalKind(StrEnum):
    """Why a graph is refused. The values appear in records and metrics."""

    UNREADABLE = "unreadable"  # neither the JSON object nor Python code was found
    SYNTAX = "syntax"
    SHAPE = "shape"  # not a workflow: no class or `__call__`, wrong parameters or result
    NOT_ALLOWED = "not_allowed"  # Python that a written graph may not contain
    UNKNOWN_OPERATOR = "unknown_operator"
    UNKNOWN_NAME = "unknown_name"
    PROMPT = "prompt"  # a prompt that is missing, for no operator, too long, or no text
    ARGUMENTS = "arguments"  # a call that does not fit the operator's signature
    UNBOUNDED = "unbounded"  # a loop or recursion that never ends
    OVER_BUDGET = "over_budget"
    TOO_LARGE = "too_large"


@dataclass(frozen=True)
class Refusal:
    """One fault of a graph. `message` says what is wrong and what to write instead, for the policy
    to learn from. `line` and `column` in the graph code count from 1; 0: not in the code."""

    kind: RefusalKind
    message: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = f"line {self.line}, column {self.column}: " if self.line else ""
        return place + self.message

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**asdict(self), "kind": self.kind.value}


class Refusals:
    """The refusals of one graph; only the first at each place, as others follow from it."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[Any, ...], Refusal] = {}

    def add(self, kind: RefusalKind, message: str, node: ast.AST | None = None) -> None:
        """Add a refusal at a node of the source, or without a place."""
        line = getattr(node, "lineno", 0)
        self.at(kind, message, line, getattr(node, "col_offset", -1) + 1 if line else 0)

    def at(self, kind: RefusalKind, message: str, line: int, column: int) -> None:
        """Add a refusal at a line and column, both from 1; line 0: without a place."""
        place = (line, column) if line else (0, message)
        self.by_place.setdefault(place, Refusal(kind, message, line, column))

    def in_order(self) -> tuple[Refusal, ...]:
        """The first MAX_REFUSALS: those in the code by place, then the others as they came."""
        found = sorted(self.by_place.values(), key=lambda one: (one.line or math.inf, one.column))
        return tuple(found)[:MAX_REFUSALS]


@dataclass(frozen=True)
class Written:
    """A workflow as the policy wrote it: its code, instructions by operator instance, and `notes`
    on what was repaired while reading it."""

    code: str
    prompts: Mapping[str, str] = field(default_factory=dict)
    form: WrittenForm = WrittenForm.HYBRID
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckLimits:
    """What a graph may use at worst, and one call of a model. `tokens`: prompt and completion
    together; `retries`: how often an operator asks again after an unreadable reply; prices: US
    dollars per token, the highest among the models. None: no limit, or unknown."""

    model_calls: int = 20
    tokens: int | None = None
    usd: float | None = None
    retries: int = 0
    call_prompt_tokens: int = 4096
    call_completion_tokens: int = 1024
    usd_per_prompt_token: float | None = None
    usd_per_completion_token: float | None = None

    @property
    def affordable_calls(self) -> int:
        """Model calls that `usd` pays for at worst; `model_calls` if fewer, or a price is None."""
        prices = (self.usd_per_prompt_token, self.usd_per_completion_token)
        if self.usd is None or prices[0] is None or prices[1] is None:
            return self.model_calls
        each = self.call_prompt_tokens * prices[0] + self.call_completion_tokens * prices[1]
        return min(self.model_calls, int(self.usd / each + 1e-9)) if each else self.model_calls


@dataclass(frozen=True)
class Bound:
    """What a graph can use at worst, including retries of operators. `operator_calls` includes
    direct calls of the model; `usd` is None if a price is unknown."""

    operator_calls: int
    model_calls: int
    prompt_tokens: int
    completion_tokens: int
    usd: float | None

    @property
    def tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Verdict:
    """The result of the check. `written` is None if nothing could be read, `graph` also if the code
    does not parse or is too large, `bound` also if the source determines none."""

    written: Written | None
    graph: Graph | None
    refusals: tuple[Refusal, ...] = ()
    bound: Bound | None = None

    @property
    def ok(self) -> bool:
        """Whether the graph may run as it was written."""
        return self.graph is not None and not self.refusals

    @property
    def code_ok(self) -> bool:
        """Whether its code may run with other prompts."""
        return self.graph is not None and all(
            refusal.kind is RefusalKind.PROMPT for refusal in self.refusals
        )


class Level(IntEnum):
    """Which workflow ran last: the written one, or a fallback (`results.py`)."""

    CLEAN = 0
    DEFAULT_PROMPTS = 1
    SIMPLER = 2
    DEFAULT_WORKFLOW = 3


def shown(node: ast.AST) -> str:
    """The source of a node for a message, at most MAX_SHOWN characters."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "this"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the nearest known name, else ''."""
    near = difflib.get_close_matches(name[:80], [item for item in known if len(item) <= 80], 1)
    return f" (did you mean {near[0]}?)" if near else ""


def listed(names: Iterable[str], most: int = 20) -> str:
    """At most `most` names, joined for a message."""
    all_names = list(names)
    shortened = all_names[:most] + (["..."] if len(all_names) > most else [])
    return ", ".join(shortened) or "nothing"
