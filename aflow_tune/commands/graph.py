"""`aflow-tune graph`: look at an operator graph, draw it, write it as a round of AFlow.

Runs nothing of the graph.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import add_command, option, write_text
from aflow_tune.errors import BadInput, ExitCode

if TYPE_CHECKING:
    from aflow_tune.graph.draw import Measured

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
    verb = add_command(
        verbs,
        "show",
        _show,
        help="operators, prompts, edges and faults",
        description="List operators, prompts, edges and faults. Exit code 2 if it has faults.",
    )
    option(verb, "path PATH", "the graph's folder", type=Path)
    verb = add_command(
        verbs,
        "draw",
        _draw,
        help="as a Mermaid text or an SVG picture",
        description="Draw the graph: what feeds what, and what repeats. Prints Mermaid unless "
        "--svg is given.",
    )
    option(verb, "path PATH", "the graph's folder", type=Path)
    option(verb, "--svg FILE", "write an SVG picture there", type=Path)
    option(
        verb,
        "--run FOLDER",
        "write into it what the newest evaluation of this run folder counted: calls, tokens, "
        "share of the reward, failures",
        type=Path,
    )
    option(verb, "--mermaid", "print Mermaid, also beside --svg")
    verb = add_command(
        verbs,
        "export",
        _export,
        help="write it as a round_N folder that AFlow runs",
        description="Write the graph as a round of AFlow. An existing graph is never overwritten.",
    )
    option(verb, "path PATH", "the graph's folder", type=Path)
    option(
        verb,
        "--round FOLDER",
        "where to, such as workspace/GSM8K/workflows/round_21",
        type=Path,
        required=True,
    )
    option(verb, "--dataset NAME", "if the folder's path does not say it")


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
    """Numbers by caller, from the newest evaluation of every task set of a run."""
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
        raise BadInput.of(
            "There are no numbers to draw.",
            str(run_dir),
            "a run folder with evaluations",
            "no evaluation" if run_dir.is_dir() else "no such folder",
            "name the folder that the run printed as its run folder",
        )
    return measure(traces_of(records))


def _export(options: argparse.Namespace) -> int:
    from aflow_tune.graph.graph import load_graph
    from aflow_tune.graph.save import save_round

    saved = save_round(load_graph(options.path), options.round, dataset=options.dataset)
    print(*saved.files, *(f"note: {note}" for note in saved.notes), sep="\n")
    if saved.only_here:
        print(
            f"\nAFlow will not use the prompts of {', '.join(saved.only_here)}: operators that it "
            "gives prompts from its own template, or that the code never calls by name."
        )
    return ExitCode.DONE
