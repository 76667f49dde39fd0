"""Runs in the sandbox, apart from the solution: a benchmark's tests, and the verdict.

The tests see the solution only as functions whose calls travel over the channel, and plain
values. Never imported by the project.
"""

import ast
import builtins
import importlib
import inspect
import sys
from typing import Any

import aflow_channel
import aflow_values


class SolutionEnded(BaseException):
    """The solution's process ended, or a call tried to end it: no test may catch that."""


class Forged(BaseException):
    """The solution's process sent what no call results in: no test may catch that either."""


class Solution:
    """The other process, as the tests may use it."""

    def __init__(self) -> None:
        self.calls = 0
        self.raised: list = []

    def function(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Any:
            return self.call(name, args, kwargs)

        remote.__name__ = name
        return remote

    def call(self, name: str, args: tuple, kwargs: dict) -> Any:
        self.calls += 1
        sent = [aflow_values.encode(value, refuse) for value in args]
        pairs = [aflow_values.encode(list(pair), refuse) for pair in kwargs.items()]
        aflow_channel.send([self.calls, name, sent, pairs])
        reply = aflow_channel.receive()
        if not isinstance(reply, dict) or reply.get("number") != self.calls:
            raise SolutionEnded("the solution's process ended during a call")
        if "ended" in reply:
            raise SolutionEnded(described(reply["ended"]))
        try:
            error, value = self.result(args, reply)
        except Exception as unusable:
            raise Forged(f"{type(unusable).__name__}: {unusable}") from None
        if error is not None:
            raise error
        return value

    def result(self, args: tuple, reply: dict) -> tuple:
        """What a call raised, or None, and what it returned; `args` are changed in place."""
        for place, changed in dict(reply.get("changed") or {}).items():
            aflow_values.overwrite(args[int(place)], aflow_values.decode(changed, handle))
        if "raised" in reply:
            return self.exception(reply["raised"]), None
        return None, aflow_values.decode(reply.get("value"), handle)

    def exception(self, failure: Any) -> Exception:
        """The nearest builtin exception; the same text."""
        names = [str(name) for name in failure["names"]]
        self.raised.append(names)
        for name in names:
            kind = getattr(builtins, name, None)
            if inspect.isclass(kind) and issubclass(kind, Exception):
                try:
                    return kind(str(failure["message"]))
                except TypeError:  # such as UnicodeDecodeError, which takes five arguments
                    continue
        return Exception(str(failure["message"]))


def refuse(value: Any) -> tuple:
    raise TestsUnusable(f"an argument of type {type(value).__name__} cannot be handed over")


def handle(number: int, kind: str) -> aflow_values.Handle:
    return aflow_values.Handle(number, kind)


class TestsUnusable(BaseException):
    """The tests cannot be run as they are: says nothing about the solution."""


class CountAsserts(ast.NodeTransformer):
    """Counts each assert that is reached."""

    def visit_Assert(self, node: ast.Assert) -> list:
        count = ast.parse("__aflow_reached__()").body[0]
        return [ast.copy_location(count, node), node]


def described(failure: Any) -> str:
    return f"{failure['names'][0]}: {failure['message']}"


def run(solution: Solution, names: dict, entry_point: str, tests: str, helpers: str) -> dict:
    """The verdict: whether it passed, and why not. Passed is None where it says nothing."""
    reached = []
    try:
        tree = CountAsserts().visit(ast.parse(tests))
        code = compile(ast.fix_missing_locations(tree), "tests.py", "exec")
    except SyntaxError as error:
        return {"passed": None, "reason": f"the tests are no Python: {error}"}
    space: dict = {**aflow_values.PRESET, "__name__": "tests"}
    space["__aflow_reached__"] = lambda: reached.append(1)
    try:
        exec(compile(helpers, "helpers.py", "exec"), space)
    except Exception as error:
        return {"passed": None, "reason": f"the helpers fail: {type(error).__name__}: {error}"}
    try:
        if "call" not in names.get(entry_point, {}):
            return {"passed": False, "reason": f"the program defines no function {entry_point}"}
        offer(solution, names, tree, space)
    except BaseException as error:  # of what the solution says that it defines
        return {"passed": False, "reason": f"its names: {type(error).__name__}: {error}"[:500]}
    space["candidate"] = space[entry_point] = solution.function(entry_point)
    try:
        exec(code, space)
        check = space.get("check")
        if callable(check):
            check(*([space[entry_point]] if inspect.signature(check).parameters else []))
    except TestsUnusable as error:
        return {"passed": None, "reason": str(error)}
    except SolutionEnded as error:
        return {"passed": False, "reason": f"a call ended the program: {error}"}
    except Forged as error:
        return {"passed": False, "reason": f"a call gave no value: {error}"[:500]}
    except BaseException as error:
        return {"passed": False, "reason": f"{type(error).__name__}: {error}"[:500]}
    if not solution.calls or not reached:
        return {"passed": None, "reason": "the tests called or asserted nothing"}
    swallowed = unexpected(solution.raised, tree)
    if swallowed:
        return {"passed": False, "reason": f"a call raised {swallowed}, which no test names"}
    return {"passed": True, "reason": ""}


def offer(solution: Solution, names: dict, tree: ast.AST, space: dict) -> None:
    """Names that the tests use and only the solution defines."""
    wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in wanted - space.keys() - vars(builtins).keys() - {"candidate"}:
        found = names.get(name, {})
        if "call" in found:
            space[name] = solution.function(name)
        elif "value" in found:
            space[name] = aflow_values.decode(found["value"], handle)
        elif str(found.get("module")).partition(".")[0] in sys.stdlib_module_names:
            space[name] = importlib.import_module(found["module"])


def unexpected(raised: list, tree: ast.AST) -> str:
    """An exception that passed although the tests name none of its classes; else empty."""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named -= {"Exception", "BaseException", "object"}
    for names in raised:
        if not named & set(names):
            return str(names[0])
    return ""


def main() -> None:
    texts = []
    for name in ("tests.py", "helpers.py"):
        with open(name, encoding="utf-8", errors="surrogatepass") as file:
            texts.append(file.read())
    entry_point, names = aflow_channel.receive()
    solution = Solution()
    try:
        verdict = run(solution, names, entry_point, *texts)
    except BaseException as error:
        verdict = {"passed": None, "reason": f"the grader failed: {type(error).__name__}: {error}"}
        if solution.calls:  # what the solution sent made it fail
            verdict["passed"] = False
    aflow_channel.send({"verdict": verdict, "calls": solution.calls})


if __name__ == "__main__":
    main()
