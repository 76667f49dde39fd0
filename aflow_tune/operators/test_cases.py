"""The public tests that the operator Test may use: asserts on `candidate`, by entry point.

These are tests that a solver may see, such as AFlow's `humaneval_public_test.jsonl`. The tests
that an answer is scored by must never be among them: a workflow that sees those learns the
answers, so nothing here reads a task's `test` by itself.

A file may hold several rows for one entry point, of different problems (HumanEval has six such
names). The row whose calls stand in the problem's text is taken; where that does not tell them
apart there are no tests for it, rather than those of another problem.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aflow_tune.errors import BadInput, Fault

_EXPECTED = '{"entry_point": NAME, "test": [ASSERT, ...]}'


@dataclass(frozen=True)
class TestCases:
    """Sets of asserts by entry point. `of` finds those of one problem."""

    __test__ = False  # for pytest: no test class

    sets: Mapping[str, Sequence[tuple[str, ...]]] = field(default_factory=dict)

    @classmethod
    def of_rows(cls, rows: Iterable[Any], where: str = "test cases") -> TestCases:
        """From rows with `entry_point` and `test`, a list of asserts or one text.

        Raises:
            BadInput: with every faulty row.
        """
        sets: dict[str, list[tuple[str, ...]]] = {}
        faults = []
        for number, row in enumerate(rows, 1):
            entry_point = row.get("entry_point") if isinstance(row, Mapping) else None
            tests = row.get("test") if isinstance(row, Mapping) else None
            tests = [tests] if isinstance(tests, str) else tests
            good = isinstance(tests, list) and all(isinstance(test, str) for test in tests)
            if not isinstance(entry_point, str) or not good:
                cure = "correct the row, or leave it out"
                faults.append(Fault(f"{where}:{number}", _EXPECTED, f"{row!r:.120}", cure))
                continue
            kept = tuple(test for test in tests or () if test.strip())
            if kept and kept not in sets.setdefault(entry_point, []):
                sets[entry_point].append(kept)
        if faults:
            raise BadInput("These are no test cases.", faults)
        return cls(sets)

    @classmethod
    def load(cls, path: str | Path) -> TestCases:
        """From a JSONL file.

        Raises:
            BadInput: it cannot be read, or holds something else.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            cure = "name a JSONL file in UTF-8"
            fault = Fault(str(path), "a file with test cases", str(error), cure)
            raise BadInput("The test cases cannot be read.", [fault]) from None
        return cls.of_rows([_row(line) for line in lines if line.strip()], str(path))

    def of(self, entry_point: str, problem: str = "") -> tuple[tuple[str, ...], str]:
        """The asserts for an entry point of a problem, and where there are none, why."""
        sets = self.sets.get(entry_point, ())
        if not sets:
            return (), f"there are no tests for {entry_point!r}"
        if len(sets) == 1:
            return tuple(sets[0]), ""
        squeezed = "".join(problem.split())
        shown = [sum(call in squeezed for call in _calls(tests, entry_point)) for tests in sets]
        best = max(shown)
        if best and shown.count(best) == 1:
            return tuple(sets[shown.index(best)]), ""
        return (), f"{len(sets)} problems have tests for {entry_point!r}, and the text fits no one"


@contextlib.contextmanager
def use_test_cases(cases: TestCases) -> Iterator[TestCases]:
    """Let Test operators of this context, and of what it starts, use these."""
    token = _cases.set(cases)
    try:
        yield cases
    finally:
        with contextlib.suppress(ValueError):  # closed by the collector, in another context
            _cases.reset(token)


_cases: ContextVar[TestCases | None] = ContextVar("aflow_tune_test_cases", default=None)


def current_test_cases() -> TestCases:
    """Those of the context; without any, none for any entry point."""
    return _cases.get() or TestCases()


def telling(test: str) -> str:
    """The assert with a message of its own: its text, and the value that was not expected.

    What is no single assert, or has a message, stays as it is.
    """
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return test
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert) or tree.body[0].msg:
        return test
    condition = tree.body[0].test
    shown = ast.unparse(tree.body[0])
    shown = shown if len(shown) <= 300 else shown[:297] + "..."
    if not isinstance(condition, ast.Compare) or len(condition.ops) != 1:
        return f"assert {ast.unparse(condition)}, {shown!r}"
    # The call is made once: a second one could print, or give something else.
    left = ast.unparse(condition.left)
    condition.left = ast.Name("got_", ast.Load())
    message = f'{shown!r} + " -- but the left side is " + repr(got_)[:200]'
    return f"got_ = {left}\nassert {ast.unparse(condition)}, {message}"


def _row(line: str) -> Any:
    """The row of a line; of a faulty one its text, which `of_rows` refuses with its number."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line


def _calls(tests: Sequence[str], entry_point: str) -> set[str]:
    """The calls in asserts as the problem's text may show them, without spaces."""
    found = set()
    for test in tests:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            for node in ast.walk(ast.parse(test)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    if node.func.id not in ("candidate", entry_point):
                        continue
                    text = ast.get_source_segment(test, node) or ""
                    arguments = "".join(text.partition("(")[2].split())
                    found.add(f"{entry_point}({arguments}")
    return found
