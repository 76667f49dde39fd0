"""`aflow-tune runs`: list runs, resume one, delete checkpoints that are not needed."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import (
    COUNT,
    NATURAL,
    REPEATED,
    Parser,
    add_command,
    names,
    option,
    print_json,
    refuse,
)
from aflow_tune.errors import BadInput, ExitCode, Fault

if TYPE_CHECKING:
    from aflow_tune.runs.listing import RunInfo

ROOTS = ("runs", "checkpoints")
"""Default folders of runs: of the recipes, and of configurations that name none."""
_ACTIONS = ("list", "resume", "clean", "rounds")
_LONGEST_ERROR = 300
_DESCRIPTION = """\
List runs: state, step, best held-out score, cost, when something happened last, and where.

states:
  running      a command is at work in the folder
  finished     the target step was reached
  interrupted  Ctrl-C, SIGTERM or a limit of `budget`: resume goes on
  failed       the reason stands below the run: resume goes on
  killed       its process is gone (kill -9, power): resume goes on from the last checkpoint
  elsewhere    started on another machine: going on there, or killed
  waiting      a stage of a chain whose turn has not come
  unreadable   its state file is damaged
"""
_EPILOG = """\
examples:
  aflow-tune runs                              all runs below ./runs and ./checkpoints
  aflow-tune runs list /data/runs --sort score --json
  aflow-tune runs resume runs/aflow-tune/quickstart-seed0
  aflow-tune runs clean --dry-run              what would go, and how many bytes
  aflow-tune runs clean runs/aflow-tune --yes
  aflow-tune runs rounds runs/me/round_1 runs/me/round_2     what a later round forgot

`aflow-tune runs` alone lists; so does `aflow-tune runs DIR`.
"""
_CLEAN = """\
Take away the checkpoints of runs that are neither among the newest nor among the best by
held-out score, with what a kill left half-written. Shows what would go and how many bytes, then
asks. Never touches a run that is going on, export/, or anything that is not ours.
"""
_ROUNDS = """\
What each of several rounds of training scores on the held-out task set of every round, after its
last step, with backward transfer (below 0: what earlier rounds lost), forgetting and final mean.
"""


def arrange(arguments: Sequence[str]) -> list[str]:
    """Insert `list` into the arguments if they name no action."""
    command, *rest = arguments
    named = next((word for word in rest if not word.startswith("-")), None)
    asks_help = any(word in ("-h", "--help") for word in rest)
    if named in _ACTIONS or (named is None and asks_help):
        return list(arguments)
    return [command, "list", *rest]


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "runs",
        help="list runs; resume one; clear away checkpoints that are not needed",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listed = "what runs there are, and what became of them (the word may be left out)"
    verb = add_command(actions, "list", _list, listed, _DESCRIPTION)
    _folders(verb)
    option(verb, "--json", "print JSON and nothing else")
    option(
        verb,
        "--sort",
        "by what; default: changed, latest first",
        choices=["changed", "name", "state", "score", "cost", "step"],
        default="changed",
    )
    option(verb, "--state STATE", "only runs in this state; may be repeated", **REPEATED)
    text = "go on with a run, by its folder"
    about = (
        "Start the command that began a run once more, in the folder it was started in: it goes on "
        "from the last sound checkpoint. More settings may follow."
    )
    verb = add_command(actions, "resume", _resume, text, about)
    option(verb, "folder DIR", "the run folder", type=Path)
    option(verb, "overrides key=value", "settings, such as buffer.total_steps=20", nargs="*")
    clean = "take away checkpoints that are neither newest nor best"
    verb = add_command(actions, "clean", _clean, clean, _CLEAN)
    _folders(verb)
    option(verb, "--keep-last N", "newest (1)", **COUNT, default=1)
    option(verb, "--keep-best N", "best ones (1)", **NATURAL, default=1)
    either = verb.add_mutually_exclusive_group()
    option(either, "--yes", "do not ask")
    option(either, "--dry-run", "only show what would go")
    text = "what rounds of training made of each other: transfer and forgetting"
    verb = add_command(actions, "rounds", _rounds, text, _ROUNDS)
    text = "the run folders in the order of the rounds; a chain stands for its training stages"
    option(verb, "folders DIR", text, type=Path, nargs="+")
    text = "the held-out task set of each round, in order; default: as the last run lists them"
    option(verb, "--tasks A,B,C", text, type=names, default=[])
    option(verb, "--json", "print JSON and nothing else")


def _folders(verb: Parser) -> None:
    text = "run folders, or folders that hold some (default: runs and checkpoints here)"
    option(verb, "folders DIR", text, type=Path, nargs="*")


def _roots(folders: Sequence[Path]) -> list[Path]:
    """The folders to search: those named, else the existing ones of `ROOTS`.

    Raises:
        BadInput: a named folder does not exist.
    """
    if folders:
        cure = "name the folder that holds your runs"
        missing = [str(path) for path in folders if not path.is_dir()]
        faults = [Fault(path, "a folder", "no such folder", cure) for path in missing]
        refuse("There is nowhere to look.", faults)
        return list(folders)
    return [Path(name) for name in ROOTS if Path(name).is_dir()]


def _list(options: argparse.Namespace) -> int:
    from aflow_tune.runs.listing import STATES, describe, find_runs

    for name in options.state:
        if name not in STATES:
            title, cure = "There is no such state.", "--state failed"
            raise BadInput.of(title, "--state", ", ".join(STATES), name, cure)
    found = [describe(path) for path in find_runs(_roots(options.folders))]
    if options.state:
        found = [run for run in found if run.state.value in options.state]
    found.sort(key=lambda run: str(run.path))
    last = math.inf
    orders: dict[str, Callable[[RunInfo], Any]] = {
        "changed": lambda run: -run.changed,
        "name": lambda run: 0,
        "state": lambda run: (run.state.value, -run.changed),
        "score": lambda run: -run.best[1] if run.best else last,
        "cost": lambda run: last if run.usd is None else -run.usd,
        "step": lambda run: -run.step,
    }
    found.sort(key=orders[options.sort])
    if options.json:
        print_json([run.to_json() for run in found])
    elif found:
        _print_table(found)
    else:
        print(f"no runs in {', '.join(map(str, options.folders)) or ' or '.join(ROOTS)}")
    return ExitCode.DONE


def _print_table(found: Sequence[RunInfo]) -> None:
    from aflow_tune.runs.listing import age

    rows = [("state", "step", "best", "cost", "changed", "place", "")]

    def add(run: RunInfo, depth: int) -> None:
        best = f"{run.best[1]:.3f} {run.score} @ {run.best[0]}" if run.best else "-"
        cost = "-" if run.usd is None else f"{'~' if run.about else ''}${run.usd:.2f}"
        steps = f"{run.step}/{run.target}" if run.target else "-"
        place = f"{'  ' * depth}{run.path.name if depth else run.path}"
        changed = f"{age(run.changed)} ago" if run.changed else "-"
        error = "" if run.stages else run.error or ""
        rows.append((run.state.value, steps, best, cost, changed, place, error))
        for stage in run.stages:
            add(stage, depth + 1)

    for run in found:
        add(run, 0)
    for state, steps, best, cost, changed, place, error in rows:
        print(f"{state:<11}  {steps:>9}  {best:<22}  {cost:>8}  {changed:<12}  {place}")
        if error:
            print(f"    {one_line(error)}")


def one_line(error: str) -> str:
    """The first and the last line of an error; the latter is the message of a traceback."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    text = " ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
    return "".join(c if c.isprintable() else "?" for c in text)[:_LONGEST_ERROR]


def _resume(options: argparse.Namespace) -> int:
    from aflow_tune.tuning import resume_run

    resume_run(options.folder, options.overrides)
    return ExitCode.DONE


def _clean(options: argparse.Namespace) -> int:
    from aflow_tune.runs.clean import carry_out, plan
    from aflow_tune.runs.listing import find_runs

    plans = [
        part
        for run in find_runs(_roots(options.folders))
        for part in plan(run, keep_last=options.keep_last, keep_best=options.keep_best)
    ]
    for part in plans:
        if part.untouched is not None:
            print(f"{part.run}: left alone, {part.untouched}")
        elif part.doomed:
            staying = ", ".join(f"{step} ({why})" for step, why in part.staying) or "none"
            print(f"{part.run}: steps that stay: {staying}")
            for item in part.doomed:
                print(f"  {_bytes(item.size):>10}  {item.path.name}: {item.why}")
    if not any(part.doomed for part in plans):
        print("nothing to take away")
        return ExitCode.DONE
    print(f"together {_bytes(sum(part.size for part in plans))}")
    if options.dry_run:
        return ExitCode.DONE
    if not options.yes:
        if not sys.stdin.isatty():
            title, found = "Nothing was taken away.", "no terminal to ask on"
            raise BadInput.of(title, "--yes", "an answer", found, "--yes, or --dry-run to look")
        if input("take these away? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was taken away")
            return ExitCode.DONE
    gone, problems = carry_out(plans)
    print(f"{len(gone)} taken away, {_bytes(sum(item.size for item in gone))} freed")
    for problem in problems:
        print(f"not taken away: {problem}", file=sys.stderr)
    return ExitCode.FAILED if problems else ExitCode.DONE


def _rounds(options: argparse.Namespace) -> int:
    from aflow_tune.report.rounds import read_rounds
    from aflow_tune.runs.folder import read_stages

    folders: list[Path] = []
    for folder in _roots(options.folders):
        stages = [folder / s["name"] for s in read_stages(folder) if s["mode"] in ("train", "both")]
        folders += stages or [folder]
    found = read_rounds(folders, options.tasks)
    if options.json:
        print_json(found.to_json())
    else:
        print(found.render())
    return ExitCode.DONE


def _bytes(count: float) -> str:
    power = min(3, (len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.1f} {('B', 'kB', 'MB', 'GB')[power]}"
