"""Grades a program, inside the sandbox: each process gets the top of this file and one role's part.

`serve_solution` loads a model's program and calls it on request; `run_tests` has a benchmark's
tests, sees the solution only through those calls, and gives the verdict; `run_together` has both in
one process, as AFlow's public code does. A solution can send nothing but results of calls. Standard
library only.

`Crossing` carries arguments and results as JSON. A container is `[number]`; its contents are sent
once, in a separate list, as `[tag, item, ...]`, so depth is unbounded, and arguments that were
changed in place keep their identity.

    l list  d dict  s set  q deque  C Counter  B bytearray      mutable
    t tuple  z frozenset  I iterator  k, v, n views of a dict   rebuilt from their items
    o object of `_OBJECTS` (class, arguments)  e exception (builtin class, arguments)
    i integer beyond 2**53  f nan, inf  b bytes  T builtin class  m module  h handle: {tag: body}

Subclasses are sent as their base type, so no `__eq__` of the sender's arrives. Anything else stays
with its process and is sent as a handle. `odd` lists the values that do not arrive unchanged.
"""

import ast
import base64
import builtins
import contextlib
import hashlib
import importlib
import math
import re
import sys
import threading
import types
import typing
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

channel: Any = sys.modules.get("aflow_channel")  # None outside of the sandbox


def read(name: str) -> str:
    with open(name, encoding="utf-8", errors="surrogatepass") as file:
        return file.read()


PRESET = {
    **{"math": math, "hashlib": hashlib, "re": re},
    **{name: getattr(typing, name) for name in ("List", "Dict", "Tuple", "Optional", "Any")},
}
"""Names that the public AFlow code provides to programs and tests without an import."""
MAX_ITEMS = 200_000  # in one message; 16 characters of text count as one
MAX_ITERATED = 100_000  # items taken from an iterator
_SAME: tuple = (bool, str, type(None))
_EXACT = 2**53
_MISSING = object()
# The base's own method gives the plain value of a subclass such as an IntEnum.
_PLAIN: tuple = ((int, int.__pos__), (float, float.__pos__), (str, str.__str__))
# A Counter is a dict, so it comes first.
_MUTABLE: dict = {"C": Counter, "d": dict, "l": list, "s": set, "q": deque, "B": bytearray}
_ADD: dict = {
    **{"C": dict.update, "d": dict.update, "s": set.update},
    **{"l": list.extend, "q": deque.extend, "B": bytearray.extend},
}
_BASES: dict = {**_MUTABLE, "t": tuple, "z": frozenset}
_TAGS: dict = {kind: tag for tag, kind in _BASES.items()}
_VIEWS: dict = {type({}.keys()): "k", type({}.values()): "v", type({}.items()): "n"}
_REBUILT: dict = {
    **{"t": tuple, "z": frozenset, "I": iter},
    "k": lambda items: dict.fromkeys(items).keys(),
    "v": lambda items: dict(enumerate(items)).values(),
    "n": lambda items: dict(items).items(),
    "o": lambda items: _object_of(*items),
    "e": lambda items: _builtin(items[0], Exception)(*items[1:]),
}


def _clock(value: Any) -> tuple:
    zone = value.tzinfo and sys.modules["datetime"].timezone(value.utcoffset())
    return value.hour, value.minute, value.second, value.microsecond, zone


_OBJECTS: dict = {
    "builtins.complex": lambda v: (v.real, v.imag),
    "builtins.range": lambda v: (v.start, v.stop, v.step),
    "builtins.slice": lambda v: (v.start, v.stop, v.step),
    "builtins.memoryview": lambda v: (v.tobytes(),),
    "array.array": lambda v: (v.typecode, tuple(v)),
    "decimal.Decimal": lambda v: (str(v),),
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.time": _clock,
    "datetime.datetime": lambda v: (v.year, v.month, v.day, *_clock(v)),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "datetime.timezone": lambda v: (v.utcoffset(None),),
    "uuid.UUID": lambda v: (str(v),),
    "pathlib.PosixPath": lambda v: (str(v),),
    "pathlib.PurePosixPath": lambda v: (str(v),),
}
"""Classes whose objects are rebuilt on the other side, each with its constructor arguments."""


def _object_of(name: str, *given: Any) -> Any:
    module, _, kind = name.partition(".")
    return getattr(_module(module), kind)(*given) if _OBJECTS[name] else None


def _builtin(name: str, base: type = object) -> Any:
    kind = vars(builtins)[name]
    if not issubclass(kind, base):
        raise ValueError(f"{name} is no {base.__name__}")
    return kind


def _module(name: str) -> Any:
    if name.partition(".")[0] not in sys.stdlib_module_names:
        raise ValueError(f"{name} is not of the standard library")
    return importlib.import_module(name)


def _name(kind: type) -> str:
    """The importable name of a class; empty if it has none."""
    there = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    return f"{kind.__module__}.{kind.__name__}" if there else ""


_SCALARS: dict = {
    **{"i": lambda body: int(body, 16), "f": float, "b": base64.b64decode},
    **{"T": _builtin, "m": _module},
}


class Crossing:
    """One side of the exchange of one call. `keep` stores what cannot be sent and returns its
    number and type, or raises; `find` returns the object of such a handle."""

    def __init__(self, keep: Callable[[Any], tuple], find: Callable[[int, str], Any]) -> None:
        self.keep, self.find = keep, find
        self.objects: list = []
        self.numbers: dict[int, int] = {}
        self.odd: list = []
        self.items = 0

    def send(self, value: Any, given: list | tuple = ()) -> list:
        """`value` as a message, with the `given` containers that changed. ValueError: too large."""
        self.items = 0
        sent = len(self.objects)
        packed = self._pack(value)
        changed: list = []
        bodies: list = []
        for number, before in enumerate(given):
            if before[0] in _MUTABLE and (now := self._body(self.objects[number])) != before:
                changed.append([number, now])
        while sent + len(bodies) < len(self.objects):
            bodies.append(self._body(self.objects[sent + len(bodies)]))
        return [packed, bodies, changed]

    def receive(self, message: Any) -> Any:
        """The value of a message; applies changes to containers in place. ValueError: malformed."""
        try:
            packed, bodies, changed = message
            first = len(self.objects)
            for tag, *body in bodies:
                empty: Any = _MISSING
                if tag in _MUTABLE:
                    empty = deque(maxlen=body[0]) if tag == "q" else _MUTABLE[tag]()
                self.objects.append(empty)
            self._bodies, self._first = bodies, first
            # Parts mostly follow their container: going backwards keeps the recursion shallow.
            for number in reversed(range(first, len(self.objects))):
                self.numbers[id(self._object(number))] = number
            for number, body in [*enumerate(bodies, first), *changed]:
                if body[0] in _MUTABLE:
                    self._fill(self.objects[number], body)
            return self._unpack(packed)
        except (TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"not a packed value: {error}") from None

    def _pack(self, value: Any) -> Any:
        kind: Any = type(value)
        text = kind is str or kind is bytes or kind is bytearray
        self.items += 1 + (len(value) // 16 if text else 0)
        if self.items > MAX_ITEMS:
            raise ValueError(f"more than {MAX_ITEMS:,} items")
        if kind in _SAME:
            return value
        if kind is int:
            return value if -_EXACT <= value <= _EXACT else {"i": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"f": repr(value)}
        if kind is bytes:
            return {"b": base64.b64encode(value).decode()}
        if kind is types.ModuleType:
            return {"m": value.__name__}
        if isinstance(value, type) and _name(value).startswith("builtins."):
            return {"T": value.__name__}
        if kind not in _TAGS:
            self.odd.append(value)
            for base, plain in _PLAIN:
                if isinstance(value, base):
                    return self._pack(plain(value))
            if kind.__module__ == "numpy" and hasattr(value, "item") and not value.shape:
                return self._pack(value.item())
            iterates = hasattr(kind, "__next__") and hasattr(kind, "__iter__")
            known = isinstance(value, (*_TAGS, *_VIEWS, Exception)) or _name(kind) in _OBJECTS
            if not (known or iterates):
                return {"h": list(self.keep(value))}
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return [number]

    def _body(self, value: Any) -> list:
        kind = type(value)
        tag = _TAGS.get(kind) or next((t for t, k in _BASES.items() if isinstance(value, k)), "")
        if tag == "B":
            return [tag, self._pack(bytes(value))]
        if tag in ("d", "C"):
            return [tag, *(self._pack(part) for pair in dict.items(value) for part in pair)]
        if tag:
            bound = [value.maxlen] if tag == "q" else []
            return [tag, *bound, *map(self._pack, _BASES[tag].__iter__(value))]
        if kind in _VIEWS:
            return [_VIEWS[kind], *map(self._pack, value)]
        if isinstance(value, Exception):
            near = next(k for k in kind.__mro__ if _name(k).startswith("builtins."))
            given = value.args if near is kind else (str(value),)
            return ["e", near.__name__, *map(self._pack, given)]
        name = _name(kind)
        if name in _OBJECTS:
            return ["o", name, *map(self._pack, _OBJECTS[name](value))]
        items = []
        for item in value:
            items.append(self._pack(item))
            if len(items) > MAX_ITERATED:
                raise ValueError(f"an iterator of more than {MAX_ITERATED:,} items")
        return ["I", *items]

    def _object(self, number: int) -> Any:
        if self.objects[number] is _MISSING:
            tag, *body = self._bodies[number - self._first]
            self.objects[number] = _REBUILT[tag]([self._unpack(item) for item in body])
        return self.objects[number]

    def _fill(self, target: Any, body: list) -> None:
        tag, *items = body
        values: Any = [self._unpack(item) for item in items]
        if tag in ("d", "C"):
            values = zip(values[::2], values[1::2], strict=True)
        elif tag == "q":
            values = values[1:]
        elif tag == "B":
            (values,) = values
        _MUTABLE[tag].clear(target)
        _ADD[tag](target, values)

    def _unpack(self, packed: Any) -> Any:
        if packed is None or isinstance(packed, (bool, int, float, str)):
            return packed
        if isinstance(packed, list):
            (number,) = packed
            return self._object(number)
        ((tag, body),) = packed.items()
        if tag == "h":
            number, kind = body
            return self.find(int(number), str(kind))
        return _SCALARS[tag](body)


# role: serve_solution

kept: list = []
numbers: dict = {}
OPERATIONS: dict = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "attribute": getattr,
    "truth": bool,
}


def keep(value: Any) -> tuple:
    number = numbers.setdefault(id(value), len(kept))
    if number == len(kept):
        kept.append(value)
    return number, type(value).__name__


def find(number: int, _: str) -> Any:
    return kept[number]


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def answer(operation: str, number: int, message: list) -> dict:
    """The reply to an operation on an object that is kept here."""
    crossing = Crossing(keep, find)
    args, kwargs = crossing.receive(message)
    names: list = []
    try:
        value = OPERATIONS[operation](kept[number], *args, **kwargs)
    except Exception as error:
        value, names = error, [kind.__name__ for kind in type(error).__mro__]
    try:
        result = crossing.send(value, message[1])
    except Exception as error:
        return {"stays": described(error)}
    for odd in crossing.odd:
        with contextlib.suppress(Exception):
            if odd == object():
                raise SystemExit(f"a {type(value).__name__} that equals anything")
    return {"result": result, "raised": names, "odd": bool(crossing.odd)}


def serve_solution() -> None:
    module = types.ModuleType("builtins")  # the `__name__` of the public code, which sets none
    module.__dict__.update(PRESET)
    try:
        for name in ("helpers.py", "solution.py"):
            exec(compile(read(name), name, "exec"), module.__dict__)
    except BaseException as error:
        channel.send({"failed": described(error)})
        return
    keep(module)
    channel.send({"loaded": True})
    while (request := channel.receive()) is not None:
        turn, *asked = request
        try:
            reply = answer(*asked)
        except BaseException as error:  # also SystemExit: no call may end the process
            reply = {"ended": described(error)}
        try:
            channel.send({"turn": turn, **reply})
        except Exception as error:
            channel.send({"turn": turn, "ended": described(error)})


# role: run_tests


# BaseException, so that `except Exception` in a test does not catch them.


class SolutionEnded(BaseException):
    """The solution's process ended, or a call tried to end it."""


class Forged(BaseException):
    """The solution's process sent something that no call can return."""


class CannotTell(BaseException):
    """The tests need something that does not work across two processes."""


class Remote:
    """An object that stayed in the solution's process. Tests can call it and read its attributes
    and truth, but not ask whether it equals or contains something: it could always say yes."""

    def __init__(self, solution: "Solution", number: int, kind: str) -> None:
        self._solution, self._number, self._kind = solution, number, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._solution.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise CannotTell(f"{name} of {self!r}")
        value = self._solution.ask("attribute", self, name)
        if isinstance(value, Remote) and name in PLAIN_METHODS:
            raise CannotTell(f"the method {name} of {self!r}")
        return value

    def __bool__(self) -> bool:
        return self._solution.ask("truth", self) is True

    def __repr__(self) -> str:
        return f"<{self._kind}>"


PLAIN_METHODS = {name for kind in (str, bytes, list, dict, set, int, float) for name in dir(kind)}
"""Methods of plain values. A remote object may imitate them, so they prove nothing."""


class Solution:
    """The solution's process, as the tests see it."""

    def __init__(self) -> None:
        self.turn = 0
        self.calls = 0
        self.raised: list = []
        self.odd = False
        self.remotes: dict[int, Remote] = {}
        self.module = self.find(0, "module")

    def find(self, number: int, kind: str) -> Remote:
        return self.remotes.setdefault(number, Remote(self, number, kind))

    def keep(self, value: Any) -> tuple:
        if not isinstance(value, Remote):
            raise TypeError(f"a {type(value).__name__} cannot be handed over")
        return value._number, value._kind

    def ask(self, operation: str, remote: Remote, *args: Any, **kwargs: Any) -> Any:
        self.turn += 1
        self.calls += operation == "call"
        crossing = Crossing(self.keep, self.find)
        try:
            message = crossing.send((args, kwargs))
        except Exception as error:
            raise CannotTell(f"an argument: {error}") from None
        channel.send([self.turn, operation, remote._number, message])
        reply = channel.receive()
        if not isinstance(reply, dict) or reply.get("turn") != self.turn:
            raise SolutionEnded("the solution's process ended during a call")
        if "ended" in reply:
            raise SolutionEnded(str(reply["ended"])[:300])
        if "stays" in reply:
            raise CannotTell(f"a result: {str(reply['stays'])[:300]}")
        try:
            value = crossing.receive(reply["result"])
            names = [str(name) for name in reply["raised"]]
            if names and not isinstance(value, Exception):
                raise TypeError(f"a {type(value).__name__} is not raised")
        except Exception as unusable:
            raise Forged(f"{type(unusable).__name__}: {unusable}") from None
        if operation == "call":
            self.odd = self.odd or bool(crossing.odd) or reply.get("odd") is not False
            self.raised += [names] if names else []
        if names:
            raise value
        return value


class CountAsserts(ast.NodeTransformer):
    """Adds a call before each assert that counts it as reached."""

    def visit_Assert(self, node: ast.Assert) -> list:
        count = ast.parse("__aflow_reached__()").body[0]
        return [ast.copy_location(count, node), node]


def run(solution: Solution, entry_point: str, tests: str, helpers: str) -> tuple:
    """Whether the solution passed (None: undecided), and why not."""
    reached = []
    tree = ast.parse(tests)
    plain = is_plain(tree, entry_point)
    code = compile(ast.fix_missing_locations(CountAsserts().visit(tree)), "tests.py", "exec")
    space: dict = {**PRESET, "__name__": "tests"}
    space["__aflow_reached__"] = lambda: reached.append(1)
    exec(compile(helpers, "helpers.py", "exec"), space)
    try:
        function = solution.ask("attribute", solution.module, entry_point)
        if not callable(function):
            return False, f"the program defines no function {entry_point}"
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for name in used - space.keys() - vars(builtins).keys() - {"candidate"}:
            with contextlib.suppress(Exception):  # a name that only the solution defines
                space[name] = solution.ask("attribute", solution.module, name)
        space["candidate"] = space[entry_point] = function
        exec(code, space)
        check = space.get("check")
        if isinstance(check, types.FunctionType):
            check(*([function] if check.__code__.co_argcount else []))
    except CannotTell as error:
        return None, f"passes only in one process with its tests: {error}"
    except SolutionEnded as error:
        wanted = {"SystemExit", "BaseException"} & named(tree)
        return None if wanted else False, f"a call ended the program: {error}"
    except Forged as error:
        return False, f"a call gave no value: {error}"[:500]
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        if plain and not solution.odd:  # what passed in one process and fails here cheats
            return False, reason
        return None, f"it passes only in one process with its tests: {reason}"
    if not solution.calls or not reached:
        return None, "the tests called or asserted nothing"
    # An exception that the tests swallowed without naming one of its classes.
    known = named(tree) - {"Exception", "BaseException", "object"}
    swallowed = [names[0] for names in solution.raised if not known & set(names)]
    if swallowed:
        return False, f"a call raised {swallowed[0]}, which no test names"
    return True, ""


def is_plain(tree: ast.AST, entry_point: str) -> bool:
    """Whether the tests only compare results of calls with literals. Then two processes give the
    same verdict as one, unless the solution tampers with its tests."""
    ours = {entry_point, "candidate"}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            allowed = id(node) in called if node.id in ours else node.id in PURE
            if not allowed:
                return False
        elif isinstance(node, ast.Attribute):
            if getattr(node.value, "id", "") != "math":
                return False
        elif isinstance(node, ast.Compare):
            same = any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
            if same and not all(isinstance(part, ast.Constant) for part in node.comparators):
                return False
        elif not isinstance(node, PLAIN_SYNTAX):
            return False
    return True


PURE = {
    *("bool", "int", "float", "str", "list", "tuple", "dict", "set", "range", "zip", "round"),
    *("abs", "all", "any", "isinstance", "len", "max", "min", "sorted", "sum", "math"),
}
PLAIN_SYNTAX = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Assert, ast.Assign, ast.Expr),
    *(ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Call, ast.keyword),
    *(ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
    ast.expr_context,
)


def named(tree: ast.AST) -> set:
    """Every name and attribute that the tests mention."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def run_tests() -> None:
    entry_point = channel.receive()
    solution = Solution()
    try:
        found = run(solution, entry_point, read("tests.py"), read("helpers.py"))
    except BaseException as error:  # after a call, the solution's data caused it
        passed = False if solution.calls else None
        found = passed, f"the grader failed: {type(error).__name__}: {error}"
    channel.send({"verdict": found})


# role: run_together


def run_together() -> None:
    token, shared, entry_point, helpers, solution, tests = channel.receive()
    space: dict = dict(PRESET)
    try:
        exec(helpers, space)
    except Exception as error:
        channel.send([token, None, f"the helpers fail: {type(error).__name__}: {error}"])
        return
    faults = ["the program ended the thread that loads it"]

    def judge() -> None:
        try:
            check = loaded(space, shared, entry_point, helpers, solution, tests)
            # From here on, a thread that ends without an error passes, as in the public code.
            faults.clear()
            check()
        except Exception as error:
            faults[:] = [f"{type(error).__name__}: {error}"[:500]]

    # A thread, as in the public code: `signal` does not work and the stack has equal depth.
    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    channel.send([token, not faults, "".join(faults)])


def loaded(
    space: dict, shared: bool, entry_point: str, helpers: str, solution: str, tests: str
) -> Any:
    """The tests as a function without arguments."""
    exec(solution, space)
    if entry_point not in space:
        raise NameError(f"the program defines no function {entry_point}")
    function = space[entry_point]
    if not shared:  # neither may redefine the other's names
        hidden = {*vars(builtins), *PRESET} - {entry_point}
        space = {name: value for name, value in space.items() if name not in hidden}
        space.update(PRESET)
        space[entry_point] = function
        exec(helpers, space)
    own = space.get("check")
    space["candidate"] = function
    exec(tests, space)
    check = space.get("check")
    if check is own or not isinstance(check, types.FunctionType):
        return lambda: None
    return lambda: check(function) if check.__code__.co_argcount else check()
