"""SymPy's parsers, made safe and made to work. For child processes: they change its modules.

`parse_expr` turns a text into Python and evaluates it, so an answer such as
`__import__('os').system(...)` would run: here only plain mathematics is evaluated. `parse_latex`
refuses every ANTLR runtime but 4.11, and Trinity's OmegaConf pins 4.9: only the serialised form of
its tables changed in between, which `latex_parser` reads with the 4.9 runtime.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.keyword, ast.Starred),
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Tuple, ast.List, ast.Set),
    *(ast.Dict, ast.Subscript, ast.Slice, ast.IfExp),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
# What SymPy's tokenizer itself writes with a text in it.
_TAKE_TEXT = {"Symbol", "Function", "Float", "Integer", "Rational"}
# Names that read texts as code, write files or start programs.
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
    """Raises Refused: it is more than a mathematical expression; SyntaxError: it is no Python."""
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
        if not isinstance(code, str):  # compiled from the text of `evaluate=False`
            raise Refused("an expression that is not to be evaluated")
        check_expression(code)
        return evaluate(code, local_dict, global_dict)

    sympy_parser.eval_expr = guarded


def evaluate_literal(text: str, *_: Any) -> Any:
    """In the place of `eval`: literals, and arithmetic of numbers. Raises Refused: the text is more
    than that."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES) or isinstance(node, (ast.Call, ast.Name)):
            raise Refused(f"{type(node).__name__} in a literal")
    return eval(compile(tree, "<literal>", "eval"), {"__builtins__": {}})


_TABLES_VERSION = 4


@functools.cache
def latex_parser() -> Callable[[str], Any]:
    """A function from LaTeX to a SymPy expression that raises what `parse_latex` raises."""
    if version("antlr4-python3-runtime").startswith("4.9."):
        _read_new_tables()
    from sympy.parsing.latex import _parse_latex_antlr

    _parse_latex_antlr.version = lambda _: "4.11"

    def parse(text: str) -> Any:
        # The runtime prints that its version is not the generated code's.
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
            found = self.readInt()
            if found != _TABLES_VERSION:
                raise ValueError(f"parser tables of version {found}, not {_TABLES_VERSION}")

        def checkUUID(self) -> None:
            self.uuid = old.BASE_SERIALIZED_UUID

    # The generated modules take the name from the package when they are imported.
    antlr4.ATNDeserializer = TableReader
