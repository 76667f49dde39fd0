"""A child process that answers questions one at a time, under limits on time and memory.

The child starts at the first question. The kernel kills it when one takes too much processor time;
the next question starts another. It runs our code on foreign data, never foreign code: an answer
such as `__import__('os').system(...)` is Python to SymPy's `parse_expr`, so the child lets it
evaluate plain mathematics only (`guard_sympy`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

MEMORY_BYTES = 4 << 30
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_ROOT = Path(__file__).resolve().parents[2]


class Undecided(RuntimeError):
    """The child ran out of time or memory and died: the answer is neither right nor wrong."""


class QuestionFailed(RuntimeError):
    """Answering the question raised an exception in the child, MemoryError among them."""


class AskedProcess:
    """The parent's end. Runs `python -m module`, which has to call `serve`. Thread-safe; questions
    are answered one at a time."""

    def __init__(self, module: str, what: str, cpu_seconds: float, *words: str) -> None:
        self._command = [module, str(cpu_seconds), *words]
        self._what, self._cpu_seconds = what, cpu_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, *question: Any) -> Any:
        """The child's answer to `question`; both are JSON. Raises Undecided: the child died, out of
        time or memory; QuestionFailed: it raised an exception."""
        with self._lock:
            process = self._process or self._start()
            assert process.stdin
            assert process.stdout
            reply = ""
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            if not reply:
                self._process = None
                process.kill()
                process.communicate()
                shown = " against ".join(f"{str(part)[:200]!r}" for part in question)
                bound = f"{self._cpu_seconds:g} s of processor time and {MEMORY_BYTES >> 30} GB"
                raise Undecided(f"{self._what} found no verdict within {bound}: {shown}")
        answer = json.loads(reply)
        if "failure" in answer:
            raise QuestionFailed(f"{self._what}: {answer['failure']}")
        return answer["answer"]

    def _start(self) -> subprocess.Popen[str]:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        paths = [str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", *self._command],  # -P: without the current folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        return self._process


def serve(answer: Callable[..., Any]) -> None:
    """The child's end: answer questions, one per line of JSON, until the input ends."""
    import resource
    import signal

    cpu_seconds = float(sys.argv[1])
    replies, sys.stdout = sys.stdout, sys.stderr
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        question = json.loads(line)
        # The signal's default action kills the process, also within C code.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            reply = {"answer": answer(*question)}
        except Exception as error:
            reply = {"failure": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


# SymPy's parsers, in a child

_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.keyword, ast.Starred),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Tuple, ast.List, ast.Set),
    *(ast.Dict, ast.Subscript, ast.Slice, ast.IfExp),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
# SymPy's tokenizer itself inserts calls of these with a text argument.
_TAKE_TEXT = {"Symbol", "Function", "Float", "Integer", "Rational"}
# Names that evaluate texts, write files or start programs.
_REFUSED = {
    *("S", "sympify", "parse_expr", "lambdify", "source", "preview", "plot", "test", "doctest"),
    *("init_printing", "init_session", "interactive_traversal", "eval", "exec", "open", "compile"),
    *("getattr", "setattr", "delattr", "globals", "locals", "vars", "breakpoint", "print"),
    *("__import__", "__build_class__", "cxxcode", "ccode", "autowrap", "ufuncify", "input", "dir"),
    *("textplot", "pager_print_code", "use", "count_ops", "postorder_traversal"),
}


class Refused(ValueError):
    """The text is not an expression of plain mathematics."""


def check_expression(code: str) -> None:
    """Raises Refused: it is not plain mathematics; SyntaxError: it is not Python."""
    allowed_texts: set[int] = set()
    for node in ast.walk(ast.parse(code.strip(), mode="eval")):
        if not isinstance(node, _NODES):
            raise Refused(f"{type(node).__name__} in an expression")
        if isinstance(node, ast.Name) and (node.id in _REFUSED or "__" in node.id):
            raise Refused(f"the name {node.id}")
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name):
                raise Refused("a call of something without a plain name")
            if node.func.id in _TAKE_TEXT:
                allowed_texts.update(id(argument) for argument in node.args)
        text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
        if text and id(node) not in allowed_texts:
            raise Refused("a text in an expression")


def guard_sympy() -> None:
    """Let this process's `parse_expr` and `sympify` evaluate plain mathematics only."""
    from sympy.parsing import sympy_parser

    evaluate = sympy_parser.eval_expr

    def guarded(code: Any, local_dict: dict[str, Any], global_dict: dict[str, Any]) -> Any:
        if not isinstance(code, str):  # `evaluate=False` passes a compiled AST
            raise Refused("an expression that is not to be evaluated")
        check_expression(code)
        return evaluate(code, local_dict, global_dict)

    sympy_parser.eval_expr = guarded


def evaluate_literal(text: str, *_: Any) -> Any:
    """A stand-in for `eval`: literals and their arithmetic. Raises Refused: anything else."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or isinstance(node, (ast.Call, ast.Name)):
            raise Refused(f"{type(node).__name__} in a literal")
    return eval(compile(tree, "<literal>", "eval"), {"__builtins__": {}})


@functools.cache
def latex_parser() -> Callable[[str], Any]:
    """SymPy's `parse_latex`, which needs ANTLR 4.11, while Trinity's OmegaConf pins 4.9. Only the
    serialised form of the parser's tables differs; with 4.9 it is converted here."""
    if version("antlr4-python3-runtime").startswith("4.9."):
        _read_new_tables()
    from sympy.parsing.latex import _parse_latex_antlr

    _parse_latex_antlr.version = lambda _: "4.11"

    def parse(text: str) -> Any:
        # The runtime prints a warning that its version differs from the generated code's.
        with contextlib.redirect_stdout(io.StringIO()):
            return _parse_latex_antlr.parse_latex(text)

    return parse


def _read_new_tables() -> None:
    """Let the 4.9 runtime read parser tables of ANTLR 4.10 and later."""
    import antlr4
    from antlr4.atn import ATNDeserializer as old

    class TableReader(old.ATNDeserializer):
        def reset(self, data: list[int]) -> None:
            # Where the old form has 0xFFFF for 'none', the new one has -1.
            self.data = [0xFFFF if value < 0 else value for value in data]
            self.pos = 0

        def checkVersion(self) -> None:
            self.readInt()

        def checkUUID(self) -> None:
            self.uuid = old.BASE_SERIALIZED_UUID

    # The generated modules import the name from the package.
    antlr4.ATNDeserializer = TableReader
