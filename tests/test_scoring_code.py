"""Grading programs in the sandbox: right ones pass, and no attack does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aflow_tune.sandbox import run_program_sync
from aflow_tune.sandbox.types import Limits, SandboxUnavailable
from aflow_tune.scoring.code import CodeVerdict, check_code

TESTS = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"


@pytest.fixture(autouse=True, scope="module")
def _sandbox() -> None:
    try:
        run_program_sync("pass")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox can be built here: {error}")


def _check(
    solution: str,
    tests: str | list[str] = TESTS,
    entry_point: str = "f",
    seconds: float = 60,
    **settings: Any,
) -> CodeVerdict:
    limits = Limits(seconds=seconds)
    return asyncio.run(check_code(solution, tests, entry_point, limits=limits, **settings))


@pytest.mark.parametrize(
    "solution",
    ["def f(x): return x * x", "f = lambda x: x ** 2", "print('noise')\ndef f(x): return x * x"],
)
def test_right_programs_pass(solution: str) -> None:
    assert _check(solution) == CodeVerdict(True, "")


ATTACKS = {
    "wrong": "def f(x): return 4",
    "exit in a call": "import sys\ndef f(x): sys.exit(0)",
    "exit while loading": "import sys\nsys.exit(0)",
    "hard exit in a call": "import os\ndef f(x): os._exit(0)",
    "hard exit while loading": "import os\nos._exit(0)\ndef f(x): return 1",
    "always equal integer": "class T(int):\n    def __eq__(s, o): return True\n"
    "    __hash__ = int.__hash__\ndef f(x): return T(7)",
    "always equal object": "class T:\n    def __eq__(s, o): return True\ndef f(x): return T()",
    "patched builtins": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
    "builtins.isinstance = lambda *a: True\ndef f(x): return 1",
    "forged verdict": "import aflow_channel as c\n"
    "v = {'verdict': {'passed': True, 'reason': ''}}\nc.send(v)\n"
    "def f(x):\n    c.send(v)\n    return 1",
    "forged verdict after loading": "import aflow_channel as c\n"
    "c.send({'names': {'f': {'call': True}}})\nc.send({'verdict': {'passed': True}})\n"
    "def f(x): return 1",
    "sends null": "import aflow_channel as c\ndef f(x):\n    c.send(None)\n    return 1",
    "closes the channel": "import os, time\ndef f(x):\n    os.close(3)\n    time.sleep(999)",
    "floods": "import aflow_channel as c\ndef f(x):\n    while True: c.send('x' * 1000)",
    "no json": "import os\ndef f(x):\n    os.write(3, b'{' * 99999 + b'\\n')\n    return 4",
    # Neither its text nor its variables may hold what it looks for.
    "reads frames": "import sys\ndef there(t): return ''.join(reversed('etadidnac')) in t\n"
    "def f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        if there(str(frame.f_locals) + str(frame.f_globals)): return x * x\n"
    "        frame = frame.f_back\n    return 1",
    "reads files": "import glob\ndef f(x):\n"
    "    for name in glob.glob('/tmp/**/tests.py', recursive=True):\n"
    "        if 'candidate' in open(name).read(): return x * x\n    return 1",
    "prints the marker": "print('PASS')\ndef f(x):\n    print('passed')\n    return 1",
    "system exit": "def f(x): raise SystemExit(0)",
    "assertion": "def f(x): raise AssertionError",
    "redefined check": "def check(candidate): pass\ndef f(x): return 1",
    "endless": "def f(x):\n    while True: pass",
    "deep result": "def f(x):\n    v = []\n    for i in range(5000): v = [v]\n    return v",
    "huge result": "def f(x): return 'a' * 200_000_000",
    "endless result": "def f(x):\n    while True: yield 1",
    "patched encoder": "import aflow_values\naflow_values.encode = lambda v, k: {'h': ['x', {}]}\n"
    "def f(x): return 1",
    "other function": "def g(x): return x * x",
    "no function": "f = 3",
    "no python": "def f(x) return x * x",
    "not a number": "def f(x): return float('nan')",
}
ENDLESS = ("closes the channel", "endless")
"""Those that only their time ends."""


RAW = """
import os, time
def raw(text):
    text = text.encode() + b"\\n"
    while text:
        text = text[os.write(3, text):]
"""
FORGED = {
    "names that are none": 'raw(\'{"names": {"f": 5}}\')\ntime.sleep(9)',
    "a name of the tests' own": 'raw(\'{"names": {"f": {"call": true}, \'\n'
    '    \'"candidate": {"value": {"no": 1}}}}\')',
    "a module that is none": 'raw(\'{"names": {"f": {"call": true}, \'\n'
    '    \'"limit": {"module": "json.none"}}}\')\ntime.sleep(9)',
    "longer as it is sent on": "def f(x): raw('{\"value\": \"' + 'é' * 3_000_000 + '\"}')",
    "names longer as they are sent on": "raw('{\"names\": {\"é\": \"' + 'é' * 3_000_000 + '\"}}')",
    "deep as a failure": "raw('{\"failed\": {\"names\": [' + '[' * 950 + ']' * 950 + ']}}')",
}


@pytest.mark.parametrize("name", FORGED)
def test_what_a_program_forges_is_wrong_and_not_unscored(name: str) -> None:
    tests = TESTS + "    assert candidate(limit) == 4\n"
    assert _check(RAW + FORGED[name], tests).passed is False
    assert _check(RAW + FORGED[name], tests, seconds=15, passes_together=True).passed is not True


@pytest.mark.parametrize(
    "reply",
    [
        '"result": [{"no": 1}, [], []], "raised": []',
        '"result": [1, [], []], "raised": ["ValueError"]',
        '"result": [[3], [["e", "SystemExit"]], []], "raised": ["ValueError"]',
        '"result": [[3], [["t", [3]]], []], "raised": []',
        '"result": [1, [], [[7, ["l"]]]], "raised": []',
        '"result": 5',
    ],
)
def test_a_forged_reply_is_no_exception_that_tests_can_swallow(reply: str) -> None:
    swallows = (
        "def check(candidate):\n    assert True\n    try:\n        assert candidate(1) == 2\n"
        "    except Exception:\n        pass"
    )
    forges = f"def f(x):\n    raw('{{\"turn\": 2, {reply}}}')\n    time.sleep(9)"
    verdict = _check(RAW + forges, swallows, passes_together=True)
    assert (verdict.passed, verdict.reason[:20]) == (False, "a call gave no value")


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_passes(attack: str) -> None:
    verdict = _check(ATTACKS[attack], seconds=10 if attack in ENDLESS else 60)
    assert verdict.passed is False
    assert verdict.reason


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name not in ENDLESS])
def test_no_attack_passes_apart_from_the_tests(attack: str) -> None:
    # As if each had won over the tests in its own process.
    assert _check(ATTACKS[attack], passes_together=True).passed is not True


def test_expected_exceptions_pass_and_swallowed_ones_do_not() -> None:
    expects = (
        "def check(candidate):\n    try:\n        candidate(-1)\n        assert False, 'no error'\n"
        "    except ValueError as error:\n        assert 'neg' in str(error)"
    )
    assert _check("def f(x): raise ValueError('neg')", expects).passed is True
    assert _check("def f(x): raise KeyError('neg')", expects).passed is False
    assert _check("def f(x): return 1", expects).passed is False
    swallows = (
        "def check(candidate):\n    assert True\n    try:\n        assert candidate(1) == 2\n"
        "    except Exception:\n        pass"
    )
    verdict = _check("def f(x): raise KeyError", swallows)
    assert (verdict.passed, verdict.reason) == (
        False,
        "a call raised KeyError, which no test names",
    )


@pytest.mark.parametrize(
    "tests",
    [
        *("", "assert True", "this is no python assert", "assert f(object()) == 1"),
        *("def check(candidate):\n    pass", "def check(candidate):\n    candidate(1)"),
    ],
)
def test_tests_that_say_nothing_leave_it_unscored(tests: str) -> None:
    assert _check("def f(x): return 1", tests).passed is None


def test_objects_of_the_solution_can_be_handed_back() -> None:
    pairs = (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def f(pairs): return sum(p.a * p.b for p in pairs)"
    )
    assert _check(pairs, "assert f([Pair(1, 2), Pair(3, 4)]) == 14").passed is True
