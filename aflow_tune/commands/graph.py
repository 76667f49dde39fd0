"""`aflow-tune graph` and `check-graph`: show, draw and export an operator graph, and measure what
each of its parts is worth; check whether a graph that a model wrote may run, and what it can cost
in the worst case.

But for `graph ablate` no code of a graph is run and no model is called.
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
    COUNT,
    add_command,
    config_arguments,
    names,
    natural,
    option,
    paced,
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
A graph is a folder with graph.py and prompts.json, or a round_N folder of AFlow. Only `ablate` runs
its code.

examples:
  aflow-tune graph show workspace/GSM8K/workflows/round_5
  aflow-tune graph draw my_graph --svg my_graph.svg
  aflow-tune graph draw my_graph --svg my_graph.svg --run runs/my_project/my_run
  aflow-tune graph export my_graph --round workspace/GSM8K/workflows/round_21
  aflow-tune graph ablate my_graph my.yaml --limit 50
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "graph",
        help="show, draw, export or ablate an operator graph",
        description="Look at an operator graph, and find out which of its operators it needs.",
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
    _add_ablate(verbs, folder)
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


# -- ablate ------------------------------------------------------------------------------------

_ABLATE = """\
Which operator earns its calls? Run the graph on the held-out task sets of a configuration, and then
without each of its operators in turn: its input takes the place of its result. Both are compared
problem by problem, on the same problems and with the same random numbers, and so are their calls,
tokens and cost. Nothing is trained, and the graph's files stay as they are.
"""

_ABLATE_EPILOG = """\
CONFIG brings the held-out task sets, how answers are scored and the limits (its section `graph`,
but for `path`), and the models. The graph's own model is the one under `model`, untrained, or the
one that --executor names.

An operator earns its calls if the whole graph scores higher than the one without it and the 95%
interval of the difference excludes zero; below 30 problems an exact sign test has to agree. Two
operators that do the same hide each other: take one out, and run this again on what is left.

An operator whose result nothing can stand for, or without which the graph may not run, is listed
as one that cannot be removed. --prompts takes out texts: each instruction of instructions.json,
each constant of prompt.py, each prompt of an operator that replaces the shipped one.

The same command goes on where it was stopped, and runs nothing twice.

examples:
  aflow-tune graph ablate my_graph my.yaml
  aflow-tune graph ablate workspace/GSM8K/workflows/round_5 my.yaml --limit 100
  aflow-tune graph ablate my_graph my.yaml --executor gpt budget.usd=2
  aflow-tune graph ablate my_graph my.yaml --prompts --json

what it prints (of 40 problems):
  part   kind    without  whole - without            calls saved  tokens saved  verdict
  solve  Custom  0.050    +0.700 (+0.551 to +0.849)  1.0          212           earns its calls
  check  Custom  0.775    -0.025 (-0.076 to +0.026)  1.0          640           no difference seen

exit codes: 0 measured, 1 no problem could be scored, 2 bad input, or nothing can be removed, 3
interrupted, 4 a limit of budget reached; after 3 and 4 the same command goes on.
"""


def _add_ablate(verbs: Any, folder: str) -> None:
    text = "measure it without each of its operators: which one earns its calls"
    verb = add_command(verbs, "ablate", _ablate, text, _ABLATE, _ABLATE_EPILOG)
    option(verb, "path PATH", folder, type=Path)
    config_arguments(verb, config="a YAML with held-out task sets and a section `graph`")
    option(verb, "--prompts", "take out instructions and prompts in place of operators")
    option(verb, "--limit N", "only the first N problems of each task set", **COUNT)
    text = "a role of `models` or an auxiliary model that answers as the graph's model"
    option(verb, "--executor NAME", text)
    option(verb, "--json", "print the result as JSON")


def _ablate(options: argparse.Namespace) -> int:
    from aflow_tune.tuning import ablate_config

    summary = ablate_config(
        options.path,
        options.config,
        options.overrides,
        prompts=options.prompts,
        limit=options.limit,
        executor=options.executor,
        phase=paced("ablating:", sys.stderr if options.json else sys.stdout),
    )
    found = summary.to_json()
    print_json(found) if options.json else print(_ablated(found))
    return ExitCode.DONE


def _ablated(found: Mapping[str, Any]) -> str:
    """What `graph ablate` found, as text."""
    low, high = found["score"]["low"], found["score"]["high"]
    bounds = "" if low is None else f" ({low:.3f} to {high:.3f})"
    cost = "" if not found["usd"] else f", {found['usd']:.4f} US dollars"
    lines = [
        "",
        f"whole graph: {found['score']['mean']:.3f}{bounds} on {found['problems']} problems; "
        f"a problem takes {found['calls']:.1f} calls, {found['tokens']:.0f} tokens{cost}",
    ]
    if found["failed"]:
        lines.append(f"it gave no answer to {found['failed']} of them: {found['first_failure']}")
    if found["unscored"]:
        lines.append(f"problems that could not be scored, and are left out: {found['unscored']}")
    priced = any(part["usd_saved"] for part in found["parts"])
    head = ["part", "kind", "without", "whole - without", "calls saved", "tokens saved"]
    rows = [[*head, *(["dollars saved"] if priced else []), "verdict"]]
    for part in found["parts"]:
        if not part["removable"]:
            rows.append([part["name"], part["kind"], f"cannot be removed: {part['why']}"])
            continue
        if part["difference"] is None:
            rows.append([part["name"], part["kind"], f"{part['verdict']}: {part['why']}"])
            continue
        change = f"{part['difference']:+.3f}"
        if part["low"] is not None:
            change += f" ({part['low']:+.3f} to {part['high']:+.3f})"
        usd = part["usd_saved"]
        verdict = part["verdict"] + (f": {part['why']}" if part["why"] else "")
        money = ["unknown" if usd is None else f"{usd:.5f}"] if priced else []
        saved = [f"{part['calls_saved']:.1f}", f"{part['tokens_saved']:.0f}", *money]
        score = f"{part['score_without']:.3f}"
        rows.append([part["name"], part["kind"], score, change, *saved, verdict])
    whole = len(rows[0])
    widths = [
        max(len(row[at]) for row in rows if len(row) == whole or at < 2) for at in range(whole - 1)
    ]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells[: len(row) - 1], row[-1]]))
    return "\n".join(lines)


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
