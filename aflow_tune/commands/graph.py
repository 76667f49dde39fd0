"""`aflow-tune graph` and `check-graph`: show, draw and export an operator graph; check whether a
graph that a model wrote may run, and what it can cost in the worst case.

No code of a graph is run and no model is called.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import (
    add_command,
    names,
    natural,
    option,
    print_json,
    refuse,
    write_text,
)
from aflow_tune.errors import BadInput, ExitCode, Fault

if TYPE_CHECKING:
    from aflow_tune.graph.draw import Measured
    from aflow_tune.operators import Operator
    from aflow_tune.writer.types import CheckLimits, Verdict

_EPILOG = """\
A graph is a folder with graph.py and prompts.json, or a round_N folder of AFlow. None of these
commands runs its code.

examples:
  aflow-tune graph show workspace/GSM8K/workflows/round_5
  aflow-tune graph draw my_graph --svg my_graph.svg
  aflow-tune graph draw my_graph --svg my_graph.svg --run runs/my_project/my_run
  aflow-tune graph export my_graph --round workspace/GSM8K/workflows/round_21
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "graph",
        help="show, draw or export an operator graph",
        description="Look at an operator graph without running it.",
        epilog=_EPILOG,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    folder = "the graph's folder"
    text = "operators, prompts, edges and faults"
    about = "List operators, prompts, edges and faults. Exit code 2 if it has faults."
    verb = add_command(verbs, "show", _show, text, about)
    option(verb, "path PATH", folder, type=Path)
    about = (
        "Draw the graph: what feeds what, and what repeats. Prints Mermaid unless --svg is given."
    )
    verb = add_command(verbs, "draw", _draw, "as a Mermaid text or an SVG picture", about)
    option(verb, "path PATH", folder, type=Path)
    option(verb, "--svg FILE", "write an SVG picture there", type=Path)
    text = "write into it what the newest evaluation of this run folder counted: calls, tokens, "
    option(verb, "--run FOLDER", f"{text}share of the reward, failures", type=Path)
    option(verb, "--mermaid", "print Mermaid, also beside --svg")
    about = "Write the graph as a round of AFlow. An existing graph is never overwritten."
    text = "write it as a round_N folder that AFlow runs"
    verb = add_command(verbs, "export", _export, text, about)
    option(verb, "path PATH", folder, type=Path)
    text = "where to, such as workspace/GSM8K/workflows/round_21"
    option(verb, "--round FOLDER", text, type=Path, required=True)
    option(verb, "--dataset NAME", "if the folder's path does not say it")
    _add_check_graph(commands)


def _show(options: argparse.Namespace) -> int:
    from aflow_tune.graph.draw import describe
    from aflow_tune.graph.graph import read_graph

    graph = read_graph(options.path)
    print(describe(graph))
    return ExitCode.BAD_INPUT if graph.shape.faults else ExitCode.DONE


def _draw(options: argparse.Namespace) -> int:
    from aflow_tune.graph.draw import to_mermaid, to_svg
    from aflow_tune.graph.graph import read_graph

    graph = read_graph(options.path)
    if not graph.flow.nodes:
        title = f"There is nothing to draw in {options.path}: no call of an operator was found."
        raise BadInput(title, graph.shape.faults)
    measured = None if options.run is None else _measured(options.run)
    if options.svg is not None:
        title = options.path.resolve().name
        write_text(options.svg, to_svg(graph.flow, measured, title=title))
        print(options.svg)
    if options.mermaid or options.svg is None:
        print(to_mermaid(graph.flow, measured), end="")
    return ExitCode.DONE


def _measured(run_dir: Path) -> dict[str, Measured]:
    """Measurements by caller, from the newest evaluation of each task set of a run."""
    from aflow_tune.graph.draw import measure
    from aflow_tune.report.evaluation import load_evaluations
    from aflow_tune.report.records import traces_of

    try:
        evaluations = load_evaluations(run_dir)
    except ValueError as error:
        raise BadInput(str(error)) from error
    newest = [list(steps.values())[-1] for steps in evaluations.values()]
    records = [record for evaluation in newest for record in evaluation.records]
    if not records:
        title, expected = "There are no numbers to draw.", "a run folder with evaluations"
        raise BadInput.of(title, str(run_dir), expected, "no evaluation", "name a run folder")
    return measure(traces_of(records))


def _export(options: argparse.Namespace) -> int:
    from aflow_tune.graph.graph import load_graph
    from aflow_tune.graph.save import save_round

    saved = save_round(load_graph(options.path), options.round, dataset=options.dataset)
    print(*saved.files, *(f"note: {note}" for note in saved.notes), sep="\n")
    if saved.only_here:
        print(f"\nAFlow will not use the prompts of {', '.join(saved.only_here)}")
    return ExitCode.DONE


# -- check_graph -------------------------------------------------------------------------------

_CHECK_EPILOG = """\
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


def _add_check_graph(commands: Any) -> None:
    text = "whether a graph that a model wrote may run, and what it can cost"
    about = (
        "Check a written graph before it runs: its Python, its names, its calls and its cost at "
        "worst. Prints the verdict, the bound and the drawing."
    )
    parser = add_command(commands, "check-graph", _check, text, about, _CHECK_EPILOG)
    option(parser, "file FILE", "JSON, Python, a graph's folder, or -")
    text = "what the workflow will be called with; code brings an entry point"
    option(parser, "--problem-type --type", text, choices=["math", "code", "qa"])
    text = "calls of models that it may make at worst (default: 20)"
    option(parser, "--max-calls N", text, type=natural)
    text = "prompt and completion tokens that it may use at worst (default: no limit)"
    option(parser, "--max-tokens N", text, type=natural)
    text = "only these may be used; file.py:Class adds one of yours (default: all)"
    option(parser, "--operators NAME,...", text, type=names)
    option(parser, "--json", "print one JSON object")


def _check(options: argparse.Namespace) -> int:
    from aflow_tune.writer.check import check_graph_of, check_written
    from aflow_tune.writer.types import CheckLimits, Written

    limits = CheckLimits(tokens=options.max_tokens)
    if options.max_calls is not None:
        limits = replace(limits, model_calls=options.max_calls)
    given = _read(options.file)
    check: Callable[..., Verdict] = check_graph_of if isinstance(given, Written) else check_written
    operators = _operators(options.operators or [])
    verdict = check(given, operators=operators, problem_type=options.problem_type, limits=limits)
    print_json(_as_json(verdict)) if options.json else print(_as_text(verdict, limits))
    return ExitCode.DONE if verdict.ok else ExitCode.BAD_INPUT


def _operators(named: Sequence[str]) -> dict[str, type[Operator]]:
    from aflow_tune.operators import OPERATORS, load_operators
    from aflow_tune.writer.types import did_you_mean, listed

    own = load_operators([name for name in named if ":" in name])
    names = [name for name in named if ":" not in name]
    refuse(
        "These operators are not known.",
        [
            Fault(
                "--operators",
                f"one of {listed(OPERATORS)}, or file.py:Class",
                name,
                did_you_mean(name, OPERATORS).strip(" ()") or "name one of them",
            )
            for name in names
            if name not in OPERATORS
        ],
    )
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
    """A graph's folder as a written workflow, with notes on prompts that are left out."""
    from aflow_tune.graph.graph import read_graph
    from aflow_tune.writer.types import Written, WrittenForm

    graph = read_graph(path)
    code = graph.sources["graph.py"]
    words = set(re.findall(r"\w+", code))
    prompts = {name: text for name, text in graph.shape.constants.items() if name in words}
    prompts |= {name: text for name, text in graph.prompts.items() if isinstance(text, str)}
    left = [name for name in graph.prompts if name not in prompts]
    notes = tuple(f"the prompts of {name} in prompts.json were left out" for name in left)
    return Written(code, prompts, WrittenForm.CODE, notes)


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
    """`_as_json` for people: verdict, worst case, refusals, drawing."""
    from aflow_tune.graph.draw import shortened

    found = _as_json(verdict)

    def listed(values: Mapping[str, Any] | None) -> str:
        pairs = (values or {}).items()
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in pairs) or "none"

    lines = [
        "fine: it may run" if verdict.ok else "refused",
        f"form: {found['form']} {shortened('; '.join(found['notes']), 400)}",
        f"call sites: {shortened(listed(found['operators']), 400)}",
        f"at worst: {listed(found['bound'])}; model calls allowed: {limits.model_calls}",
    ]
    for number, refusal in enumerate(verdict.refusals, 1):
        lines.append(f"{number}. [{refusal.kind.value}] {shortened(str(refusal), 600)}")
    return "\n".join([*lines, "", (found["mermaid"] or "").rstrip()]).rstrip()
