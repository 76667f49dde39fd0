"""ScoreFlow's form of a workflow, as AFlow's: `__init__(config, problem)` and `run_workflow()`.

There an operator is built with the problem and gives a text. Here the same code is kept line for
line, with the constructor's arguments in AFlow's form, operators under names of their own, and
methods behind the last line that take the operators' places: `self.custom(instruction=...)` calls
a method that asks the operator about `self.problem` and hands its text back.

Review, which solves anew there, is our Revise. AnswerGenerate gives the answer without the thought,
Programmer the output without the program: what ScoreFlow takes out of them with another call.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from aflow_tune.graph.shape import Function, parse

_FEEDBACK = "Check every step of the solution, and correct what is wrong."


@dataclass(frozen=True)
class _Stand:
    """What stands for one of ScoreFlow's operators."""

    operator: str
    takes: str
    given: str
    key: str


_STANDS = {
    "Custom": _Stand(
        "Custom", "instruction=''", "input=self.problem, instruction=instruction", "response"
    ),
    "AnswerGenerate": _Stand("AnswerGenerate", "", "input=self.problem", "answer"),
    "Programmer": _Stand(
        "Programmer", "analysis='None'", "problem=self.problem, analysis=analysis", "output"
    ),
    "ScEnsemble": _Stand(
        "ScEnsemble", "solutions", "solutions=solutions, problem=self.problem", "response"
    ),
    "Review": _Stand(
        "Revise",
        "pre_solution",
        f"problem=self.problem, solution=pre_solution, feedback={_FEEDBACK!r}",
        "solution",
    ),
    "CustomCodeGenerate": _Stand(
        "CustomCodeGenerate",
        "instruction=''",
        "problem=self.problem, entry_point=self.entry_point, instruction=instruction",
        "response",
    ),
    "Test": _Stand(
        "Test",
        "solution, test_loop=3",
        "problem=self.problem, solution=solution, entry_point=self.entry_point, "
        "test_loop=test_loop",
        "solution",
    ),
}
_OF_CODE = frozenset({"CustomCodeGenerate", "Test"})


def translated(source: str) -> str:
    """A workflow of ScoreFlow's in AFlow's form; any other text as it is."""
    tree, _ = parse(source, "graph")
    classes = [] if tree is None else [n for n in tree.body if isinstance(n, ast.ClassDef)]
    workflow = next((node for node in classes if node.name == "Workflow"), None)
    methods = {item.name: item for item in getattr(workflow, "body", ()) if _is_method(item)}
    init = methods.get("__init__")
    names = [] if init is None else [item.arg for item in init.args.args]
    if tree is None or workflow is None or init is None or "run_workflow" not in methods:
        return source
    if names[1:3] != ["config", "problem"]:
        return source
    edits: list[tuple[ast.AST, str]] = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "ScoreFlow" in ast.unparse(node):
            edits.append((node, "pass"))
    edits += [(init.args.args[1], "name, llm_config"), (init.args.args[2], "dataset")]
    built: dict[str, str] = {}
    for statement in init.body:
        edits += _built(statement, built) or _renamed(statement)
    of_code = bool(_OF_CODE & {*built.values()})
    rest = [
        f"    async def {name}(self{_more(kind)}):\n{_body(name, kind)}"
        for name, kind in built.items()
    ]
    takes = "problem, entry_point" if of_code else "problem"
    rest.append(
        f"    async def __call__(self, {takes}):\n        self.problem = problem\n"
        + ("        self.entry_point = entry_point\n" if of_code else "")
        + "        return await self.run_workflow()\n"
    )
    call = methods.get("__call__")
    if call is not None:  # its time, which the run keeps
        edits.append((call, "pass"))
    lines = _edited(source, edits)
    end = workflow.end_lineno or len(lines)
    indent = " " * workflow.body[0].col_offset
    added = "\n".join(rest).replace("    ", indent)
    gap = "\n" if lines[end - 1].endswith("\n") else "\n\n"
    return "".join([*lines[:end], gap, added, *lines[end:]])


def _is_method(node: ast.stmt) -> bool:
    return isinstance(node, Function)


def _built(statement: ast.stmt, built: dict[str, str]) -> list[tuple[ast.AST, str]]:
    """The edits of `self.custom = operator.Custom(self.config, self.problem)`."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return []
    target, call = statement.targets[0], statement.value
    if not isinstance(target, ast.Attribute) or not isinstance(call.func, ast.Attribute):
        return []
    kind = call.func.attr
    models = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "llm")]
    if ast.unparse(call.func.value) != "operator" or kind not in _STANDS or not models:
        return []
    built[target.attr] = kind
    made = f"operator.{_STANDS[kind].operator}({ast.unparse(models[0])})"
    return [(target, f"self.{target.attr}_operator"), (call, made)]


def _renamed(statement: ast.stmt) -> list[tuple[ast.AST, str]]:
    """The constructor's arguments under AFlow's names. The problem is not known there."""
    given = {"config": "llm_config", "problem": "''", "create": "create_llm_instance"}
    return [
        (node, given[node.id])
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in given
    ]


def _more(kind: str) -> str:
    return f", {_STANDS[kind].takes}" if _STANDS[kind].takes else ""


def _body(name: str, kind: str) -> str:
    stand = _STANDS[kind]
    return (
        f"        result = await self.{name}_operator({stand.given})\n"
        f'        return result["{stand.key}"]\n'
    )


def _edited(source: str, edits: list[tuple[ast.AST, str]]) -> list[str]:
    """The lines with other texts in the places of nodes; the number of lines stays."""
    lines = source.encode().splitlines(keepends=True)
    places = [(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, t) for n, t in edits]  # type: ignore[attr-defined]
    for line, column, end_line, end_column, text in sorted(places, reverse=True):
        before, after = lines[line - 1][:column], lines[end_line - 1][end_column:]
        lines[line - 1 : end_line] = [before + text.encode() + after] + [b"\n"] * (end_line - line)
    return [line.decode() for line in lines]
