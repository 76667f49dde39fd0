"""What following a written graph keeps track of: where it is, what it has spent, what it refused.

The base of the three files that follow a graph: `calls.py` (what a call does), `expressions.py`
and `bound.py` (statements, loops and the whole). A path is followed with a state and a cost;
where paths part, each is followed, and where they meet, the states are joined and the larger
cost is kept.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from aflow_tune.graph.shape import Shape
from aflow_tune.operators import Operator
from aflow_tune.writer.following.values import BROKEN, Key, Obj, Ref, State, Value
from aflow_tune.writer.names import Scope, Scopes
from aflow_tune.writer.refusals import Refusals, shown
from aflow_tune.writer.types import CheckLimits, RefusalKind

MAX_STEPS = 20_000
"""Expressions and statements that are followed. A graph that takes more is refused."""
MAX_STACK = 12
"""Functions inside each other."""
SELF = "self"
"""The scope of the workflow's attributes."""


class TooLarge(Exception):
    """The graph takes more steps to follow than it may."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Calls of operators and direct calls of the model, and what these ask of models at worst."""

    calls: int = 0
    model_calls: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.calls + other.calls, self.model_calls + other.model_calls)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.calls - other.calls, self.model_calls - other.model_calls)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.calls * times, self.model_calls * times)

    def or_more(self, other: Cost) -> Cost:
        """The larger of both figures."""
        return Cost(max(self.calls, other.calls), max(self.model_calls, other.model_calls))


FREE = Cost()
End = tuple[State, Cost]


@dataclass
class Returned:
    """How one function ended, on one of its paths."""

    value: Value
    state: State
    cost: Cost


@dataclass
class Walking:
    """One walk through a graph."""

    shape: Shape
    operators: Mapping[str, type[Operator]]
    """Those that the graph may use."""
    prompts: Mapping[str, str]
    limits: CheckLimits
    refusals: Refusals
    scopes: Scopes
    functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    """Methods of the workflow."""
    attributes: set[str] = field(default_factory=set)
    """What is assigned on self anywhere, and in the class."""
    fixed: set[str] = field(default_factory=set)
    """Attributes that only the constructor or the class sets, at one place."""
    written_keys: set[str] = field(default_factory=set)
    """Keys that the graph itself puts into objects."""
    writes_keys: bool = False
    """Whether it puts anything under a key, one that is written out or not."""
    state: State | None = field(default_factory=State)
    """None: this place is not reached."""
    cost: Cost = FREE
    peak: Cost = FREE
    """The largest cost of any path so far, those that have ended included."""
    spenders: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    """Model calls by place and name of the operator, over all paths."""
    unbounded: bool = False
    scope: Scope | None = None
    stack: list[ast.AST] = field(default_factory=list)
    path: tuple[object, ...] = ()
    """The calls of graph functions that led here."""
    breaks: list[End] = field(default_factory=list)
    continues: list[End] = field(default_factory=list)
    returns: list[Returned] = field(default_factory=list)
    entered: set[ast.AST] = field(default_factory=set)
    steps: int = 0
    loops: int = 0
    running: list[Key] = field(default_factory=list)
    """Variables that hold what the loops here run over."""
    valueless: dict[ast.Name, bool] = field(default_factory=dict)
    """Names that were read, and whether none of the paths so far had given them a value."""
    made_by: dict[object, ast.AST] = field(default_factory=dict)
    """Calls that give something to wait for, by their place."""
    used_prompts: set[str] = field(default_factory=set)
    """Names under `prompts` that the code reads."""
    own_prompts: set[str] = field(default_factory=set)
    """Names that the code itself puts into `self.prompts`."""
    any_prompt: bool = False
    """Whether it puts names there that cannot be seen."""

    def step(self) -> None:
        """Count a step. Raises `TooLarge`."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooLarge

    def spend(self, node: ast.AST, name: str, model_calls: int) -> None:
        """Count one call."""
        self.cost += Cost(1, model_calls)
        self.peak = self.peak.or_more(self.cost)
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", -1) + 1, name)
        self.spenders[place] += model_calls

    def begin_part(self) -> tuple[Cost, Cost, Counter[tuple[int, int, str]]]:
        """Begin a part that may be counted several times: see `end_part`."""
        part = (self.cost, self.peak, self.spenders.copy())
        self.peak = self.cost
        return part

    def end_part(
        self, part: tuple[Cost, Cost, Counter[tuple[int, int, str]]], times: int = 1
    ) -> Cost:
        """Count what was spent since `begin_part` so many times; gives what this added."""
        since, peak, spent = part
        used = self.peak - since
        more = used * (times - 1)
        if more != FREE:
            self.cost += more
            for place, calls in (self.spenders - spent).items():
                self.spenders[place] += calls * (times - 1)
        self.peak = peak.or_more(self.peak + more)
        return more

    def refuse(self, kind: RefusalKind, message: str, node: ast.AST) -> Value:
        """Refuse something; gives the value about which nothing more is said."""
        self.refusals.add(kind, message, node)
        return BROKEN

    @property
    def here(self) -> State:
        """The state, where a place is reached."""
        if self.state is None:
            self.state = State()
        return self.state

    def new(self, node: ast.AST, obj: Obj, tag: object = "") -> Value:
        """A new object, made at this node on this path of calls."""
        place = (getattr(node, "lineno", 0), getattr(node, "col_offset", 0), type(node).__name__)
        if obj.kind == "pending":
            self.made_by[place] = node
        return self.here.new((self.path, place, tag), obj)

    def key(self, name: str) -> Key | None:
        """Where a name of the current scope is kept."""
        assert self.scope is not None
        owner = self.scopes.owner(self.scope, name)
        return None if owner is None else (owner, name)

    # Something pending: a call that was not awaited

    def pending_in(self, value: Value, *kinds: str) -> Iterator[tuple[Ref, Obj]]:
        for ref, obj in self.here.objects(value):
            if obj.kind in (kinds or ("pending", "task")):
                yield ref, obj

    def settled(self, value: Value, node: ast.AST) -> Value:
        """A value that is used as data: a call that nobody awaited is none."""
        pending = [ref for ref, _ in self.pending_in(value)]
        if not pending:
            return value
        rest = value - set(pending)
        if rest:
            return rest
        for ref in pending:
            call = self.made_by.get(ref.site[1], node)
            text = shown(call.func) if isinstance(call, ast.Call) else "this call"
            message = f"`{text}(...)` is not awaited; write `await {text}(...)`"
            self.refusals.add(RefusalKind.ARGUMENTS, message, call)
        return BROKEN

    # Paths that part and meet

    def meet(self, ends: list[End]) -> None:
        """Go on where some paths meet; nowhere, where there is none."""
        if not ends:
            self.state = None
            return
        state, cost = ends[0][0], ends[0][1]
        for other, more in ends[1:]:
            state.join(other)
            cost = cost.or_more(more)
        self.state, self.cost = state, cost

    def ends(self) -> list[End]:
        """This path as an end, if it is reached."""
        return [] if self.state is None else [(self.state, self.cost)]

    # What the files that follow add

    def value(self, node: ast.expr) -> Value:
        """What an expression may be; what it spends is counted."""
        raise NotImplementedError

    def attribute(self, node: ast.Attribute) -> Value:
        """`value.name`."""
        raise NotImplementedError

    def attribute_if_there(self, value: Value, name: str) -> Value:
        """`getattr(value, name, default)`: what is there, without a refusal."""
        raise NotImplementedError

    def prompt_named(self, node: ast.AST, name: str, text: str) -> Value:
        """The text under a name of `prompts`."""
        raise NotImplementedError

    def apply(self, node: ast.AST, callee: Value, items: list[Value], turns: int | None) -> Value:
        """Let one of Python's functions call the graph's own, so many times."""
        raise NotImplementedError

    def follow(
        self, node: ast.AST, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    ) -> Value:
        """The value of a function's body; its parameters are set."""
        raise NotImplementedError
