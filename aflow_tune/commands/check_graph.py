"""`aflow-tune check-graph`: whether a written graph may run, and what it can cost at worst.

Runs nothing of the graph and calls no model.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import add_command, names, natural, option, print_json, refuse
from aflow_tune.errors import BadInput, ExitCode, Fault

if TYPE_CHECKING:
    from aflow_tune.operators import Operator
    from aflow_tune.writer.types import CheckLimits, Verdict

_EPILOG = """\
FILE holds what a policy wrote (one JSON object with prompts and graph_code, with or without text
around it), or Python with `class Workflow`. A folder is one with graph.py, such as a round_N of
AFlow; prompt_custom.NAME is then looked up in its prompt.py and prompts.json. - is the standard
input. Nothing of it is run.

A graph is refused for what it may not contain, for names, arguments and prompts that fit nothing,
for loops whose number of turns cannot be told, and for what it could cost at worst: each with its
line and column, and what to write instead (docs/graph_code.md has the grammar).

examples:
  aflow-tune check-graph written.json
  aflow-tune check-graph workspace/GSM8K/workflows/round_5 --problem-type math --max-calls 12
  aflow-tune check-graph graph.py --operators Custom,ScEnsemble --json
  aflow-tune check-graph written.json --operators my_operators.py:Summarise
  some-model | aflow-tune check-graph -

exit codes: 0 the graph may run, 2 it is refused or cannot be read
"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "check-graph",
        _check,
        help="whether a graph that a model wrote may run, and what it can cost",
        description="Check a written graph before it runs: its Python, its names, its calls and "
        "its cost at worst. Prints the verdict, the bound and the drawing.",
        epilog=_EPILOG,
    )
    option(parser, "file FILE", "JSON, Python, a graph's folder, or -")
    option(
        parser,
        "--problem-type --type",
        "what the workflow will be called with; code brings an entry point",
        choices=["math", "code", "qa"],
    )
    option(
        parser,
        "--max-calls N",
        "calls of models that it may make at worst (default: 20)",
        type=natural,
    )
    option(
        parser,
        "--max-tokens N",
        "prompt and completion tokens that it may use at worst (default: no limit)",
        type=natural,
    )
    option(
        parser,
        "--operators NAME,...",
        "only these may be used; file.py:Class adds one of yours (default: all)",
        type=names,
    )
    option(parser, "--json", "print one JSON object")


def _check(options: argparse.Namespace) -> int:
    from aflow_tune.writer.check import check_graph_of, check_written
    from aflow_tune.writer.types import CheckLimits, Written

    limits = CheckLimits(tokens=options.max_tokens)
    if options.max_calls is not None:
        limits = replace(limits, model_calls=options.max_calls)
    given = _read(options.file)
    settings: dict[str, Any] = {
        "operators": _operators(options.operators or []),
        "problem_type": options.problem_type,
        "limits": limits,
    }
    if isinstance(given, Written):
        verdict = check_graph_of(given, **settings)
    else:
        verdict = check_written(given, **settings)
    print_json(_as_json(verdict)) if options.json else print(_as_text(verdict, limits))
    return ExitCode.DONE if verdict.ok else ExitCode.BAD_INPUT


def _operators(named: Sequence[str]) -> dict[str, type[Operator]]:
    """The operators that the graph may use."""
    from aflow_tune.operators import OPERATORS, load_operators
    from aflow_tune.writer.types import did_you_mean, listed

    own = load_operators([name for name in named if ":" in name])
    names = [name for name in named if ":" not in name]
    faults = []
    for name in names:
        if name not in OPERATORS:
            near = did_you_mean(name, OPERATORS).strip(" ()")
            cure = near or "for one of yours name its file: file.py:Class"
            faults.append(Fault("--operators", f"one of {listed(OPERATORS)}", name, cure))
    refuse("These operators are not known.", faults)
    return {name: OPERATORS[name] for name in names or OPERATORS} | own


def _read(file: str) -> Any:
    """The text of FILE, or the workflow of a folder or of a Python file.

    Raises:
        BadInput: it cannot be read.
    """
    from aflow_tune.writer.types import Written, WrittenForm

    if file == "-":
        return sys.stdin.buffer.read().decode("utf-8", errors="replace")
    path = Path(file)
    beside = path.parent if path.name == "graph.py" else path
    if path.is_dir() or any((beside / name).is_file() for name in ("prompt.py", "prompts.json")):
        return _folder(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        title, expected = "There is no graph to check.", "a file in UTF-8, a graph's folder, or -"
        found = getattr(error, "strerror", None) or str(error)
        raise BadInput.of(title, file, expected, found, "name such a file") from None
    return Written(text, form=WrittenForm.CODE) if path.suffix == ".py" else text


def _folder(path: Path) -> Any:
    """A graph's folder as a written workflow: of its prompts those that its code names."""
    from aflow_tune.graph.graph import read_graph
    from aflow_tune.writer.types import Written, WrittenForm

    graph = read_graph(path)
    code = graph.sources["graph.py"]
    words = set(re.findall(r"\w+", code))
    prompts = {name: text for name, text in graph.shape.constants.items() if name in words}
    notes = []
    for name, text in graph.prompts.items():
        if isinstance(text, str):
            prompts[name] = text
        else:
            notes.append(f"the prompts of {name} in prompts.json were left out")
    return Written(code, prompts, WrittenForm.CODE, tuple(notes))


def _as_json(verdict: Verdict) -> dict[str, Any]:
    from aflow_tune.graph.draw import to_mermaid
    from aflow_tune.writer.results import operators_of, structure_of

    written, graph, bound = verdict.written, verdict.graph, verdict.bound
    drawn = graph is not None and bool(graph.flow.nodes)
    return {
        "ok": verdict.ok,
        "form": None if written is None else written.form.value,
        "notes": [] if written is None else list(written.notes),
        "refusals": [refusal.to_json() for refusal in verdict.refusals],
        "bound": None if bound is None else {**asdict(bound), "tokens": bound.tokens},
        "structure": structure_of(graph) if graph is not None and drawn else None,
        "operators": operators_of(graph) if graph is not None else {},
        "mermaid": to_mermaid(graph.flow) if graph is not None and drawn else None,
    }


def _as_text(verdict: Verdict, limits: CheckLimits) -> str:
    from aflow_tune.graph.draw import shortened, to_mermaid
    from aflow_tune.writer.results import operators_of

    written, graph, bound = verdict.written, verdict.graph, verdict.bound
    lines = ["fine: it may run" if verdict.ok else "refused"]
    if written is not None:
        notes = f" ({shortened('; '.join(written.notes), 400)})" if written.notes else ""
        lines.append(f"form: {written.form.value}{notes}")
    if graph is not None:
        used = ", ".join(f"{name} {count}" for name, count in operators_of(graph).items())
        lines.append(f"call sites: {shortened(used, 400) or 'none'}")
    if bound is not None:
        money = "" if bound.usd is None else f", ${bound.usd:.4f}"
        lines.append(
            f"at worst: operator calls {bound.operator_calls:,}, model calls "
            f"{bound.model_calls:,} ({limits.model_calls:,} allowed), {bound.prompt_tokens:,} "
            f"prompt and {bound.completion_tokens:,} completion tokens{money}"
        )
    elif verdict.ok:
        lines.append(
            "at worst: its source does not tell; a run is stopped after "
            f"{limits.model_calls:,} model calls"
        )
    if verdict.refusals:
        lines.append("\nrefusals:")
        lines += [
            f"{number}. [{refusal.kind.value}] {shortened(str(refusal), 600)}"
            for number, refusal in enumerate(verdict.refusals, 1)
        ]
    if graph is not None and graph.flow.nodes:
        lines += ["", to_mermaid(graph.flow).rstrip()]
    return "\n".join(lines)
