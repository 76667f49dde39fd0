"""Building and calling operators, and calling the model: what a graph pays for.

An operator is built as it will be built when the graph runs, with the options that the source
gives, so that it says itself what is wrong with them. Its call is held against its signature by
the rule of the run (`aflow_tune.graph.broker.bind`), and what it may cost is its own figure
(`Operator.most_calls`).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aflow_tune.errors import BadInput
from aflow_tune.graph.broker import bind
from aflow_tune.models.client import ScriptedModel
from aflow_tune.operators import Operator
from aflow_tune.writer.following.values import (
    PLAIN,
    TEXT,
    Broken,
    Handle,
    Model,
    Number,
    Obj,
    OperatorClass,
    Plain,
    Result,
    Text,
    Value,
    joined,
)
from aflow_tune.writer.following.walking import Walking
from aflow_tune.writer.refusals import did_you_mean, listed, shown
from aflow_tune.writer.types import RefusalKind

RESERVED = ("prompts", "llm")


@dataclass
class Given:
    """The arguments of a call. `open`: there may be more, from `*` or `**`."""

    values: list[Value]
    named: dict[str, Value]
    open: bool = False

    def all(self) -> list[Value]:
        return [*self.values, *self.named.values()]

    def at(self, place: int, name: str = "") -> Value | None:
        """An argument by place or name."""
        if place < len(self.values):
            return self.values[place]
        return self.named.get(name)


@dataclass
class Using(Walking):
    """The calls that cost something."""

    _facts: dict[str, Facts] = field(default_factory=dict)

    def build(self, node: ast.Call, kind: OperatorClass, given: Given) -> Value:
        """`operator.Custom(self.llm)`."""
        name = kind.operator
        example = f"operator.{name}(self.llm)"
        first = given.at(0, "llm")
        if given.open or first is None:
            return self.refuse(
                RefusalKind.ARGUMENTS, f"{name} is built with the model; write {example}", node
            )
        if not any(isinstance(atom, (Model, Broken, Plain)) for atom in first):
            return self.refuse(
                RefusalKind.ARGUMENTS,
                f"{name} is built with the model first, not with {shown(_argument(node))}; "
                f"write {example}",
                node,
            )
        if len(given.values) > 2:
            return self.refuse(
                RefusalKind.ARGUMENTS, f"options of {name} are given by name, as in {example}", node
            )
        words = {word.arg: word for word in node.keywords if word.arg not in ("llm", "name")}
        if "prompts" in words:
            return self.refuse(
                RefusalKind.ARGUMENTS,
                f"{name} takes no prompts here; write its instruction under `prompts`",
                words["prompts"].value,
            )
        options: dict[str, Any] = {}
        for option, word in words.items():
            known, value = self._constant(word.value)
            if not known or option is None:
                return self.refuse(
                    RefusalKind.ARGUMENTS,
                    f"the option {option} of {name} is a value of its own, not "
                    f"{shown(word.value)}; write it out",
                    word.value,
                )
            options[option] = value
        problem = _problem_of(self.operators[name], name, options) if options else ""
        if problem:
            return self.refuse(RefusalKind.ARGUMENTS, f"{name} cannot be built: {problem}", node)
        numbers = tuple((key, value) for key, value in options.items() if type(value) is int)
        return frozenset({Handle(self._instance(node, name), name, numbers)})

    def _instance(self, node: ast.Call, name: str) -> str:
        for built in self.shape.operators:
            if (built.line, built.column) == (node.lineno, node.col_offset):
                return built.instance
        return name.lower()

    def _constant(self, node: ast.expr) -> tuple[bool, Any]:
        """Whether an expression is one value, and which."""
        try:
            return True, ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pass
        atoms = [atom for atom in self.value(node) if isinstance(atom, Number)]
        if len(atoms) == 1 and atoms[0].most is not None and atoms[0].most == atoms[0].least:
            return True, atoms[0].most
        return False, None

    def use(self, node: ast.Call, handle: Handle, given: Given) -> Value:
        """A call of an operator; gives what is to be awaited."""
        kind = self.operators[handle.operator]
        who = f"{handle.instance} ({handle.operator})" if handle.instance else handle.operator
        settings: dict[str, Any] = {}
        chosen: frozenset[str] = frozenset()
        if given.open:
            self.refuse(
                RefusalKind.ARGUMENTS,
                f"{who} is called with arguments that cannot be seen; write them out: "
                f"{self.facts(handle.operator).signature}",
                node,
            )
        else:
            settings, chosen = self._bound(node, who, handle.operator, given)
        self.spend(node, handle.operator, self._most(kind, handle, settings))
        result: Value = frozenset({Result(handle.operator, chosen)})
        return self.new(node, Obj("pending", None, result), handle.instance)

    def _bound(
        self, node: ast.Call, who: str, operator: str, given: Given
    ) -> tuple[dict[str, Any], frozenset[str]]:
        """The arguments held against the signature; what is known of them, by name, and whose
        results are in its lists."""
        facts = self.facts(operator)
        values = [self.settled(value, node) for value in given.all()]
        positional = values[: len(given.values)]
        named = dict(zip(given.named, values[len(given.values) :], strict=True))
        try:
            bound = bind(self.operators[operator], positional, named)
        except TypeError as error:
            problem = facts.misfit(list(named)) or str(error)
            message = f"{who} is called as {facts.signature}: {problem}"
            self.refuse(RefusalKind.ARGUMENTS, message, node)
            return {}, frozenset()
        places: list[ast.expr] = [*node.args, *(word.value for word in node.keywords)]
        known: dict[str, Any] = {}
        results: set[str] = set()
        for name, value in bound.arguments.items():
            if not isinstance(value, frozenset):  # what *args or **kwargs took up
                continue
            known[name] = _number(value)
            same = len(places) == len(values)
            found = [place for place, one in zip(places, values, strict=False) if one is value]
            if value and name in facts.lists:
                place = found[0] if same and found else node
                results |= self._fits_list(place, f"{name} of {who}", value)
        return known, frozenset(results)

    def _fits_list(self, place: ast.expr, what: str, value: Value) -> set[str]:
        """Whether a list is given where the operator wants one; operators whose whole results are
        in it."""
        if all(isinstance(atom, (Text, Result)) for atom in value):
            message = f"{what} is a list of texts; write [{shown(place)}]"
            self.refuse(RefusalKind.ARGUMENTS, message, place)
            return set()
        inner = frozenset(atom for _, obj in self.here.objects(value) for atom in obj.items)
        if inner:
            self.settled(inner, place)
        return {atom.operator for atom in inner if isinstance(atom, Result)}

    def keys_of(self, result: Result) -> list[str]:
        """The keys of an operator's result."""
        return list(self.facts(result.operator).keys)

    def size_of(self, result: Result) -> int | None:
        """How many keys a result has at most; None where the graph may put more into it."""
        return None if self.writes_keys else len(self.keys_of(result))

    def facts(self, operator: str) -> Facts:
        """What is known of an operator."""
        if operator not in self._facts:
            self._facts[operator] = Facts(self.operators[operator])
        return self._facts[operator]

    def _most(self, kind: type[Operator], handle: Handle, settings: dict[str, Any]) -> int:
        options = dict(handle.options)
        given = options.pop("retries", self.limits.retries)
        retries = min(given, self.limits.retries) if isinstance(given, int) else 0
        try:
            most = kind.most_calls(retries=retries, **{**options, **settings})
        except Exception:  # a user's operator that does not take what it is told
            most = Operator.most_calls(retries=retries)
        return max(0, most) if isinstance(most, int) else 1 + retries

    def ask_model(self, node: ast.Call, given: Given) -> Value:
        """`await self.llm(prompt)`."""
        asked = isinstance(node.func, ast.Attribute) and node.func.attr == "aask"
        unknown = [name for name in given.named if name != "prompt"]
        wrong = not given.all() or (not asked and (len(given.all()) > 1 or unknown))
        if not given.open and wrong:
            message = "the model is called with one text: await self.llm(text)"
            self.refuse(RefusalKind.ARGUMENTS, message, node)
        for value in given.all():
            self.settled(value, node)
        self.spend(node, "llm", 1)
        return self.new(node, Obj("pending", None, TEXT), "llm")

    def build_model(self, node: ast.Call, given: Given) -> Value:
        """`create_llm_instance(llm_config)`."""
        first = given.at(0)
        if first and all(isinstance(atom, Text) for atom in first):
            return self.refuse(
                RefusalKind.ARGUMENTS,
                "a graph has one model; write create_llm_instance(llm_config)",
                node,
            )
        return frozenset({Model()})

    def keys_of_results(self, node: ast.AST, owner: Value, key: object) -> list[Value]:
        """`result["response"]`: what stands there, by each operator that the result may be of.

        A key that one of them returns is not refused: which of them it is may be known elsewhere.
        """
        results = [atom for atom in owner if isinstance(atom, Result)]
        if not results or not isinstance(key, str) or key in self.written_keys:
            return [PLAIN] if results else []
        found = [
            joined(keys[key], frozenset(Result(operator) for operator in sorted(result.of)))
            for result in results
            if key in (keys := self.facts(result.operator).keys)
        ]
        if found or len(results) < len(owner):
            return found or [PLAIN]
        keys_there = self.keys_of(results[0])
        message = (
            f"{results[0].operator} returns {listed(keys_there)}, not {key!r:.60}"
            f"{did_you_mean(key, keys_there)}"
        )
        return [self.refuse(RefusalKind.UNKNOWN_NAME, message, node)]


def _argument(node: ast.Call) -> ast.AST:
    llm = [word.value for word in node.keywords if word.arg == "llm"]
    return node.args[0] if node.args else (llm[0] if llm else node)


def _number(value: Value) -> int | None:
    atoms = list(value)
    return atoms[0].most if len(atoms) == 1 and isinstance(atoms[0], Number) else None


class Facts:
    """What following a graph needs to know of an operator, looked up once."""

    def __init__(self, kind: type[Operator]) -> None:
        fields = {field.name: field.kind.value for field in kind.fields}
        parameters = list(inspect.signature(kind.__call__).parameters.values())[1:]
        self.keys: dict[str, Value] = {
            key: TEXT if fields.get(key) in ("text", "code", "choice") else PLAIN
            for key in (kind.returns or fields)
        }
        """Of its result, with what stands there."""
        self.lists = {
            item.name
            for item in parameters
            if str(item.annotation).casefold().startswith(("list", "sequence", "typing.list"))
        }
        """Parameters that take lists."""
        self.names = [item.name for item in parameters if item.name != "mode"]
        shown_ones = [_shown_parameter(item) for item in parameters if item.name in self.names]
        self.signature = f"({', '.join(shown_ones)})"
        self.takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters)

    def misfit(self, named: list[str]) -> str:
        """Which of these names is no argument; empty where all are."""
        unknown = [name for name in named if name not in (*self.names, "mode")]
        if not unknown or self.takes_any:
            return ""
        return f"it has no argument `{unknown[0]}`{did_you_mean(unknown[0], self.names)}"


def _shown_parameter(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r:.40}"
    return f"{stars}{parameter.name}{default}"


def _problem_of(kind: type[Operator], name: str, options: Mapping[str, Any]) -> str:
    """What an operator says about its options; empty where it takes them."""
    if any(option in RESERVED for option in options):
        return f"{listed(option for option in options if option in RESERVED)} is not given here"
    try:
        kind(ScriptedModel([]), name="checked", **options)
    except BadInput as error:
        fault = error.faults[0] if error.faults else None
        return f"expected {fault.expected}, found {fault.found}" if fault else str(error)
    except Exception as error:  # also whatever a user's operator raises
        return f"{str(error) or type(error).__name__:.200}".replace("Operator.__init__()", name)
    return ""
