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

from aflow_tune.graph.shape import Function, parse

_PROBLEM = "problem=self.problem"
_ENTRY = "entry_point=self.entry_point"
_FEEDBACK = "Check every step of the solution, and correct what is wrong."
_STANDS = {
    "Custom": (
        "Custom", "instruction=''", "input=self.problem, instruction=instruction", "response"
    ),
    "AnswerGenerate": ("AnswerGenerate", "", "input=self.problem", "answer"),
    "Programmer": ("Programmer", "analysis='None'", f"{_PROBLEM}, analysis=analysis", "output"),
    "ScEnsemble": ("ScEnsemble", "solutions", f"solutions=solutions, {_PROBLEM}", "response"),
    "Review": (
        "Revise", "pre_solution", f"{_PROBLEM}, solution=pre_solution, feedback={_FEEDBACK!r}",
        "solution",
    ),
    "CustomCodeGenerate": (
        "CustomCodeGenerate", "instruction=''", f"{_PROBLEM}, {_ENTRY}, instruction=instruction",
        "response",
    ),
    "Test": (
        "Test", "solution, test_loop=3",
        f"{_PROBLEM}, solution=solution, {_ENTRY}, test_loop=test_loop", "solution",
    ),
}  # fmt: skip
"""By ScoreFlow's operator: ours, what its method takes and gives the operator, the result's key."""
_GIVEN = {"config": "llm_config", "problem": "''", "create": "create_llm_instance"}
"""The constructor's arguments under AFlow's names. The problem is not known there."""
_Edit = tuple[ast.AST, str]


def translated(source: str) -> str:
    """A workflow of ScoreFlow's in AFlow's form; any other text as it is."""
    tree, _ = parse(source, "graph")
    classes = [] if tree is None else [n for n in tree.body if isinstance(n, ast.ClassDef)]
    workflow = next((node for node in classes if node.name == "Workflow"), None)
    methods = {n.name: n for n in getattr(workflow, "body", ()) if isinstance(n, Function)}
    init = methods.get("__init__")
    if tree is None or workflow is None or init is None or "run_workflow" not in methods:
        return source
    if [item.arg for item in init.args.args[1:3]] != ["config", "problem"]:
        return source
    edits: list[_Edit] = [
        (node, "pass")
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "ScoreFlow" in ast.unparse(node)
    ]
    edits += [(init.args.args[1], "name, llm_config"), (init.args.args[2], "dataset")]
    built: dict[str, str] = {}
    for statement in init.body:
        edits += _built(statement, built) or [
            (node, _GIVEN[node.id])
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _GIVEN
        ]
    if "__call__" in methods:  # its time, which the run keeps
        edits.append((methods["__call__"], "pass"))
    of_code = bool({"CustomCodeGenerate", "Test"} & {*built.values()})
    added = [*(_method(name, kind) for name, kind in built.items()), _call(of_code)]
    lines = _edited(source, edits)
    end = workflow.end_lineno or len(lines)
    gap = "\n" if lines[end - 1].endswith("\n") else "\n\n"
    methods_text = "\n".join(added).replace("    ", " " * workflow.body[0].col_offset)
    return "".join([*lines[:end], gap, methods_text, *lines[end:]])


def _built(statement: ast.stmt, built: dict[str, str]) -> list[_Edit]:
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
    made = f"operator.{_STANDS[kind][0]}({ast.unparse(models[0])})"
    return [(target, f"self.{target.attr}_operator"), (call, made)]


def _method(name: str, kind: str) -> str:
    _, takes, given, key = _STANDS[kind]
    return (
        f"    async def {name}(self{', ' if takes else ''}{takes}):\n"
        f"        result = await self.{name}_operator({given})\n"
        f'        return result["{key}"]\n'
    )


def _call(of_code: bool) -> str:
    return (
        f"    async def __call__(self, problem{', entry_point' if of_code else ''}):\n"
        "        self.problem = problem\n"
        + ("        self.entry_point = entry_point\n" if of_code else "")
        + "        return await self.run_workflow()\n"
    )


def _edited(source: str, edits: list[_Edit]) -> list[str]:
    """The lines with other texts in the places of nodes; the number of lines stays."""
    lines = source.encode().splitlines(keepends=True)
    places = [(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, t) for n, t in edits]  # type: ignore[attr-defined]
    for line, column, end_line, end_column, text in sorted(places, reverse=True):
        before, after = lines[line - 1][:column], lines[end_line - 1][end_column:]
        lines[line - 1 : end_line] = [before + text.encode() + after] + [b"\n"] * (end_line - line)
    return [line.decode() for line in lines]
