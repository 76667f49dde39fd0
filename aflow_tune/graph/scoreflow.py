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

from aflow_tune.graph.shape import Edit, Function, edited, parse

_PROBLEM = "problem=self.problem"
_CODE = f"{_PROBLEM}, entry_point=self.entry_point"
_FEEDBACK = "Check every step of the solution, and correct what is wrong."
_REVISE = f"{_PROBLEM}, solution=pre_solution, feedback={_FEEDBACK!r}"
_CUSTOM = "input=self.problem, instruction=instruction"
_STANDS = {
    "Custom": ("Custom", ", instruction=''", _CUSTOM, "response"),
    "AnswerGenerate": ("AnswerGenerate", "", "input=self.problem", "answer"),
    "Programmer": ("Programmer", ", analysis='None'", f"{_PROBLEM}, analysis=analysis", "output"),
    "ScEnsemble": ("ScEnsemble", ", solutions", f"solutions=solutions, {_PROBLEM}", "response"),
    "Review": ("Revise", ", pre_solution", _REVISE, "solution"),
    "CustomCodeGenerate": (
        "CustomCodeGenerate", ", instruction=''", f"{_CODE}, instruction=instruction", "response"
    ),
    "Test": (
        "Test", ", solution, test_loop=3", f"{_CODE}, solution=solution, test_loop=test_loop",
        "solution",
    ),
}  # fmt: skip
"""By ScoreFlow's operator: ours, what its method takes and gives the operator, the result's key."""
_GIVEN = {"config": "llm_config", "problem": "''", "create": "create_llm_instance"}
"""The constructor's arguments under AFlow's names. The problem is not known there."""


def translated(source: str) -> str:
    """A workflow of ScoreFlow's in AFlow's form; any other text as it is."""
    tree, _ = parse(source, "graph")
    body = [] if tree is None else tree.body
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "Workflow"]
    workflow = classes[0] if classes else None
    methods = {n.name: n for n in getattr(workflow, "body", ()) if isinstance(n, Function)}
    init = methods.get("__init__")
    taken = [item.arg for item in init.args.args[1:3]] if init is not None else []
    if workflow is None or init is None or taken != ["config", "problem"]:
        return source
    if "run_workflow" not in methods:
        return source
    edits: list[Edit] = [
        (node, "pass")
        for node in body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "ScoreFlow" in ast.unparse(node)
    ]
    edits += [(init.args.args[1], "name, llm_config"), (init.args.args[2], "dataset")]
    if "__call__" in methods:  # its time, which the run keeps
        edits.append((methods["__call__"], "pass"))
    added, of_code = [], False
    for statement in init.body:
        built = _built(statement)
        if built is None:
            edits += [
                (node, _GIVEN[node.id])
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
                if node.id in _GIVEN
            ]
            continue
        target, call, kind, model = built
        operator, takes, given, key = _STANDS[kind]
        of_code |= "entry_point" in given
        edits += [(target, f"self.{target.attr}_operator"), (call, f"operator.{operator}({model})")]
        added.append(
            f"    async def {target.attr}(self{takes}):\n"
            f"        result = await self.{target.attr}_operator({given})\n"
            f'        return result["{key}"]\n'
        )
    entry, kept = ("", "")
    if of_code:
        entry, kept = ", entry_point", "        self.entry_point = entry_point\n"
    added.append(
        f"    async def __call__(self, problem{entry}):\n        self.problem = problem\n{kept}"
        "        return await self.run_workflow()\n"
    )
    lines = edited(source, edits, keep_lines=True).encode().splitlines(keepends=True)
    end = min(workflow.end_lineno or 0, len(lines))
    gap = b"\n" if lines[end - 1].endswith(b"\n") else b"\n\n"
    methods_text = "\n".join(added).replace("    ", " " * workflow.body[0].col_offset)
    return b"".join([*lines[:end], gap, methods_text.encode(), *lines[end:]]).decode()


def _built(statement: ast.stmt) -> tuple[ast.Attribute, ast.Call, str, str] | None:
    """Of `self.custom = operator.Custom(self.config, self.problem)` target, call, kind, model."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    target, call = statement.targets[0], statement.value
    kind = ast.unparse(call.func).removeprefix("operator.")
    models = [*call.args[:1], *(word.value for word in call.keywords if word.arg == "llm")]
    if not isinstance(target, ast.Attribute) or kind not in _STANDS or not models:
        return None
    return target, call, kind, ast.unparse(models[0])
