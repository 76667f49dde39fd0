"""Runs in the sandbox, apart from the solution: a benchmark's tests, and the verdict.

The tests see the solution only as functions whose calls travel over the channel, plain values,
and objects that stayed there. Never imported by the project.
"""

import ast
import builtins
import types
from typing import Any

import aflow_channel
import aflow_values


class SolutionEnded(BaseException):
    """The solution's process ended, or a call tried to end it: no test may catch that."""


class Forged(BaseException):
    """The solution's process sent what no call results in: no test may catch that either."""


class CannotTell(BaseException):
    """The tests want what cannot be had across two processes: says nothing about the solution."""


class Remote:
    """Something that stayed in the solution's process: it can be called and asked.

    Only for what tells the solution nothing of the tests' expectations: were it asked whether
    it equals something, contains or starts with it, it could always say yes.
    """

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
"""What tests may ask plain values; of an object that only looks like one it proves nothing."""


class Solution:
    """The other process, as the tests may use it."""

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
        crossing = aflow_values.Crossing(self.keep, self.find)
        try:
            message = crossing.send((args, kwargs))
        except Exception as error:
            raise CannotTell(f"an argument: {error}") from None
        aflow_channel.send([self.turn, operation, remote._number, message])
        reply = aflow_channel.receive()
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
    """Counts each assert that is reached."""

    def visit_Assert(self, node: ast.Assert) -> list:
        count = ast.parse("__aflow_reached__()").body[0]
        return [ast.copy_location(count, node), node]


def run(solution: Solution, entry_point: str, tests: str, helpers: str) -> dict:
    """The verdict: whether it passed, and why not. Passed is None where it says nothing."""
    reached = []
    tree = ast.parse(tests)
    plain = is_plain(tree, entry_point)
    code = compile(ast.fix_missing_locations(CountAsserts().visit(tree)), "tests.py", "exec")
    space: dict = {**aflow_values.PRESET, "__name__": "tests"}
    space["__aflow_reached__"] = lambda: reached.append(1)
    exec(compile(helpers, "helpers.py", "exec"), space)
    try:
        function = solution.ask("attribute", solution.module, entry_point)
        if not callable(function):
            return verdict(False, f"the program defines no function {entry_point}")
        offer(solution, tree, space)
        space["candidate"] = space[entry_point] = function
        exec(code, space)
        check = space.get("check")
        if isinstance(check, types.FunctionType):
            check(*([function] if check.__code__.co_argcount else []))
    except CannotTell as error:
        return verdict(None, f"passes beside its tests, which cannot do without it: {error}")
    except SolutionEnded as error:
        wanted = {"SystemExit", "BaseException"} & named(tree)
        return verdict(None if wanted else False, f"a call ended the program: {error}")
    except Forged as error:
        return verdict(False, f"a call gave no value: {error}"[:500])
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:500]
        if plain and not solution.odd:  # then what passed together passes apart, or cheats
            return verdict(False, reason)
        return verdict(None, f"it passes only in one process with its tests: {reason}")
    if not solution.calls or not reached:
        return verdict(None, "the tests called or asserted nothing")
    # An exception that passed although the tests name none of its classes.
    known = named(tree) - {"Exception", "BaseException", "object"}
    swallowed = [names[0] for names in solution.raised if not known & set(names)]
    if swallowed:
        return verdict(False, f"a call raised {swallowed[0]}, which no test names")
    return verdict(True, "")


def verdict(passed: Any, reason: str) -> dict:
    return {"passed": passed, "reason": reason}


def offer(solution: Solution, tree: ast.AST, space: dict) -> None:
    """Names that the tests use and only the solution defines."""
    wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in wanted - space.keys() - vars(builtins).keys() - {"candidate"}:
        try:
            space[name] = solution.ask("attribute", solution.module, name)
        except Exception:
            continue


def is_plain(tree: ast.AST, entry_point: str) -> bool:
    """Whether these are calls with literals whose results are compared, and nothing else.

    Then two processes and one give the same, but for what a solution does to its tests.
    """
    ours = {entry_point, "candidate"}
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            allowed = id(node) in called if node.id in ours else node.id in PURE
            if not allowed:
                return False
        elif isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id == "math"):
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


def main() -> None:
    texts = []
    for name in ("tests.py", "helpers.py"):
        with open(name, encoding="utf-8", errors="surrogatepass") as file:
            texts.append(file.read())
    entry_point = aflow_channel.receive()
    solution = Solution()
    try:
        found = run(solution, entry_point, *texts)
    except BaseException as error:  # after a call, what the solution sent made it fail
        passed = False if solution.calls else None
        found = verdict(passed, f"the grader failed: {type(error).__name__}: {error}")
    aflow_channel.send({"verdict": found})


if __name__ == "__main__":
    main()
