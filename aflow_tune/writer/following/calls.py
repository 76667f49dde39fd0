"""What a call in a written graph does, by what is called.

Of Python's functions those in `python_functions.py` have a rule of their own. Of all others the
result may hold whatever they were given.
"""

from __future__ import annotations

import ast

from aflow_tune.writer.following.functions import Functions
from aflow_tune.writer.following.python_functions import SPECIAL, copied
from aflow_tune.writer.following.using import Given
from aflow_tune.writer.following.values import (
    BROKEN,
    NONE,
    NOTHING,
    NUMBER,
    PLAIN,
    TEXT,
    Atom,
    Broken,
    Config,
    Function,
    Handle,
    Method,
    Model,
    Module,
    Named,
    Obj,
    OperatorClass,
    Plain,
    Prompts,
    Result,
    Self,
    State,
    Value,
    joined,
    most,
)
from aflow_tune.writer.following.walking import Cost
from aflow_tune.writer.refusals import Refusals, shown
from aflow_tune.writer.types import RefusalKind

_CALLABLE = (Function, Handle, Model, Named, OperatorClass, Method)
_TEXTS = frozenset(
    {"str", "repr", "format", "chr", "json.dumps", "traceback.format_exc", "html.escape",
     "html.unescape", "re.sub", "re.escape", "input", "ascii"}
)  # fmt: skip
_SAME_LENGTH = {
    **dict.fromkeys(
        ("list", "tuple", "sorted", "reversed", "set", "frozenset", "copy.copy", "copy.deepcopy",
         "collections.deque", "collections.Counter", "collections.OrderedDict",
         "itertools.compress", "itertools.accumulate"), 0
    ),
    **dict.fromkeys(
        ("filter", "itertools.dropwhile", "itertools.takewhile", "itertools.filterfalse",
         "heapq.nlargest", "heapq.nsmallest"), 1
    ),
}  # fmt: skip
"""Functions that give at most as many items as they get, with the place of these."""
_CALLING = frozenset({"map", "filter", "sorted", "min", "max", "itertools.starmap"})

PYTHON_LOGGER, AFLOW_LOGGER = "logging.Logger", "log.logger"
_LOGGING = ("logging.", AFLOW_LOGGER)
_MAKING_LOGGERS = ("Logger", "getChild", "StreamHandler", "NullHandler", "Formatter")
_WRITES_FILES = ("filename", "handlers", "stream")


class Calls(Functions):
    """The calls of a graph."""

    def call(self, node: ast.Call) -> Value:
        """What a call gives."""
        callee = self.value(node.func)
        given = self.given(node)
        targets = [atom for atom in callee if isinstance(atom, _CALLABLE)]
        if Broken() in callee or not callee:
            return BROKEN
        if not targets or Plain() in callee:
            return self._not_callable(node, callee)
        results: list[Value] = []
        found: list[Refusals] = []
        everything = self.refusals
        ends: list[tuple[State, Cost]] = []
        state, cost = self.here, self.cost
        for number_, target in enumerate(sorted(targets, key=_order)):
            self.state = state.copy() if number_ + 1 < len(targets) else state
            self.cost = cost
            if len(targets) > 1:
                self.refusals = Refusals()
                found.append(self.refusals)
            results.append(self._call_one(node, target, given))
            ends += self.ends()
        self.refusals = everything
        if all(one.any() for one in found):  # which it is may be known where it fits one of them
            for one in found:
                everything.take(one)
        self.meet(ends)
        return joined(*results)

    def given(self, node: ast.Call) -> Given:
        """The arguments of a call."""
        values: list[Value] = []
        named: dict[str, Value] = {}
        unseen = False
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                inner = self.value(argument.value)
                elements = self.here.elements_of(inner)
                if elements is not None:
                    values += elements
                else:
                    unseen = True
                    values.append(self.new(argument, self._spread(inner, argument), "*"))
            else:
                values.append(self.value(argument))
        for word in node.keywords:
            value = self.value(word.value)
            if word.arg is not None:
                named[word.arg] = value
                continue
            objects = [obj for _, obj in self.here.objects(value)]
            known = objects[0] if len(objects) == 1 == len(value) else Obj("dict")
            if known.names is not None and known.elements is not None:
                named |= dict(zip(known.names, known.elements, strict=True))
            else:
                unseen = True
                values.append(value)
        return Given(values, named, unseen)

    def _spread(self, value: Value, node: ast.AST) -> Obj:
        """What stands behind a `*`, as one argument of the kind 'spread'."""
        turns, items = self.run_over(value, node)
        return Obj("spread", turns, items)

    def _call_one(self, node: ast.Call, target: Atom, given: Given) -> Value:
        if isinstance(target, Handle):
            return self.use(node, target, given)
        if isinstance(target, OperatorClass):
            return self.build(node, target, given)
        if isinstance(target, Model):
            return self.ask_model(node, given)
        if isinstance(target, Function):
            return self.function(node, target, given)
        if isinstance(target, Named):
            return self.named_function(node, target.name, given)
        assert isinstance(target, Method)
        return self.method(node, target.owner, target.name, given)

    def _not_callable(self, node: ast.Call, callee: Value) -> Value:
        if any(isinstance(atom, (Module, Plain, Self, Prompts, Config)) for atom in callee):
            what = "is not known to be a function"
        elif any(isinstance(atom, Result) for atom in callee):
            what = "is a result, not an operator"
        else:
            what = "is no function"
        message = (
            f"`{shown(node.func)}` {what}; a graph calls operators, its own functions and Python's"
        )
        return self.refuse(RefusalKind.NOT_ALLOWED, message, node)

    # Python's functions

    def named_function(self, node: ast.Call, name: str, given: Given) -> Value:
        """A function or class of Python, or of what AFlow's modules offer."""
        everything = joined(NOTHING, *given.all())
        functions = frozenset(atom for atom in everything if isinstance(atom, Function))
        called = functions | frozenset(atom for atom in everything if isinstance(atom, Handle))
        self.let_go_methods(given.all())
        if name.startswith(_LOGGING):
            return self._log(node, name, given)
        special = SPECIAL.get(name)
        if special is not None:
            if functions and name not in ("min", "max"):
                self.apply(node, functions, [self.anything(given.all())], None)
            return special(self, node, given)
        values = [self.settled(value, node) for value in given.all()]
        data = [value for value in given.values if not value & called]
        if called and name in _CALLING:
            turns = most(self.run_over(item, node)[0] for item in data) if data else None
            items = [self.run_over(item, node)[1] for item in data]
            made = self.apply(node, called, items, turns)
            if name in ("map", "itertools.starmap"):
                return self.new(node, Obj("lazy", turns, made, over=joined(NOTHING, *data)))
        elif functions:
            self.apply(node, functions, [self.anything(values)], None)
        if name in _TEXTS:
            return TEXT
        if name in _SAME_LENGTH and "initial" not in given.named:
            place = _SAME_LENGTH[name]
            return copied(self, node, given.at(place) or NOTHING, name)
        if name.partition(".")[0] in ("math", "cmath", "statistics", "time"):
            return NUMBER
        if name.startswith("re."):
            return joined(PLAIN, NONE)
        return self.anything(values)

    def _log(self, node: ast.Call, name: str, given: Given) -> Value:
        """`logging.info(...)`, `logger.addHandler(...)`: nothing of what it is given is kept."""
        for value in given.all():
            self.no_calls_in(value, node)
        if name == "logging.basicConfig" and (
            given.open or given.values or not given.named.keys().isdisjoint(_WRITES_FILES)
        ):
            message = "a log of a graph goes nowhere; write logging.basicConfig(level=logging.INFO)"
            return self.refuse(RefusalKind.NOT_ALLOWED, message, node)
        made = name.startswith(AFLOW_LOGGER) or name.endswith(_MAKING_LOGGERS)
        if not made:
            return PLAIN
        return frozenset({Named(AFLOW_LOGGER if name.startswith("log.") else PYTHON_LOGGER)})


def _order(atom: Atom) -> str:
    if isinstance(atom, Function):
        return f"f{getattr(atom.node, 'lineno', 0)}:{atom.node.col_offset}"
    return repr(atom) if not isinstance(atom, Method) else f"m{atom.name}"
