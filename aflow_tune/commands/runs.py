"""`aflow-tune runs`: a list of runs, going on with one, and making room on the disk."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import refuse, too_small
from aflow_tune.errors import BadInput, ExitCode, Fault

if TYPE_CHECKING:
    from aflow_tune.runs.clean import Plan
    from aflow_tune.runs.listing import RunInfo

ROOTS = ("runs", "checkpoints")
"""Where the recipes, and configurations that say nothing, put their run folders."""
SORTS = ("changed", "name", "state", "score", "cost", "step")
_ACTIONS = ("list", "resume", "clean")
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

`aflow-tune runs` alone lists; so does `aflow-tune runs DIR`.
"""
_CLEAN = """\
Take away the checkpoints of runs that are neither among the newest nor among the best by
held-out score, with what a kill left half-written. Shows what would go and how many bytes, then
asks. Never touches a run that is going on, export/, or anything that is not ours.
"""


def arrange(arguments: Sequence[str]) -> list[str]:
    """The arguments with `list` put in where no action is named."""
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

    listed = actions.add_parser(
        "list",
        help="what runs there are, and what became of them (the word may be left out)",
        description=_DESCRIPTION,
    )
    _add_folders(listed)
    listed.add_argument("--json", action="store_true", help="print JSON and nothing else")
    listed.add_argument(
        "--sort", choices=SORTS, default="changed", help="by what; default: changed, latest first"
    )
    listed.add_argument(
        "--state", action="append", metavar="STATE", help="only runs in this state; may be repeated"
    )
    listed.set_defaults(action=_list)

    resume = actions.add_parser(
        "resume",
        help="go on with a run, by its folder",
        description="Start the command that began a run once more, in the folder it was started "
        "in: it goes on from the last sound checkpoint. More settings may follow.",
    )
    resume.add_argument("folder", type=Path, metavar="DIR", help="the run folder")
    resume.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, such as buffer.total_steps=20"
    )
    resume.set_defaults(action=_resume)

    clean = actions.add_parser(
        "clean",
        help="take away checkpoints that are neither newest nor best",
        description=_CLEAN,
    )
    _add_folders(clean)
    clean.add_argument("--keep-last", type=int, default=1, metavar="N", help="newest (1)")
    clean.add_argument("--keep-best", type=int, default=1, metavar="N", help="best ones (1)")
    how = clean.add_mutually_exclusive_group()
    how.add_argument("--yes", action="store_true", help="do not ask")
    how.add_argument("--dry-run", action="store_true", help="only show what would go")
    clean.set_defaults(action=_clean)


def _add_folders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folders",
        nargs="*",
        type=Path,
        metavar="DIR",
        help=f"run folders, or folders that hold some (default: {' and '.join(ROOTS)} here)",
    )


def _roots(folders: Sequence[Path]) -> list[Path]:
    """The folders to look in.

    Raises:
        BadInput: one that was named is not there, or none of the usual ones is.
    """
    if folders:
        faults = [
            Fault(str(path), "a folder", "no such folder", "name the folder that holds your runs")
            for path in folders
            if not path.is_dir()
        ]
        if faults:
            raise BadInput("There is nowhere to look.", faults)
        return list(folders)
    return [Path(name) for name in ROOTS if Path(name).is_dir()]


def _list(options: argparse.Namespace) -> int:
    from aflow_tune.runs.listing import STATES, describe, find_runs

    for name in options.state or ():
        if name not in STATES:
            expected = ", ".join(STATES)
            raise BadInput(
                "There is no such state.", [Fault("--state", expected, name, "--state failed")]
            )
    found = [describe(path) for path in find_runs(_roots(options.folders))]
    if options.state:
        found = [run for run in found if run.state.value in options.state]
    found.sort(key=_order(options.sort))
    if options.json:
        print(json.dumps([run.to_json() for run in found], indent=1))
    elif found:
        _print_table(found)
    else:
        print(f"no runs in {', '.join(map(str, options.folders)) or ' or '.join(ROOTS)}")
    return ExitCode.DONE


def _order(by: str) -> Any:
    def key(run: RunInfo) -> tuple[Any, ...]:
        name = str(run.path)
        values: dict[str, tuple[Any, ...]] = {
            "changed": (-run.changed, name),
            "name": (name,),
            "state": (run.state.value, -run.changed, name),
            "score": (-run.best[1] if run.best else float("inf"), name),
            "cost": (-run.usd if run.usd is not None else float("inf"), name),
            "step": (-run.step, name),
        }
        return values[by]

    return key


_HEADS = ("state", "step", "best", "cost", "changed", "place")


def _print_table(found: Sequence[RunInfo]) -> None:
    rows: list[tuple[str, ...]] = []
    notes: dict[int, str] = {}
    for run in found:
        _add_rows(run, rows, notes, depth=0)
    widths = [max(len(row[i]) for row in (_HEADS, *rows)) for i in range(len(_HEADS))]
    for number, row in enumerate((_HEADS, *rows), -1):
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())
        if number in notes:
            print(f"    {notes[number]}")


def _add_rows(
    run: RunInfo, rows: list[tuple[str, ...]], notes: dict[int, str], *, depth: int
) -> None:
    from aflow_tune.runs.listing import age

    best = f"{run.best[1]:.3f} {run.score} @ {run.best[0]}" if run.best else "-"
    cost = "-" if run.usd is None else f"{'~' if run.about else ''}${run.usd:.2f}"
    steps = f"{run.step}/{run.target}" if run.target else "-"
    place = f"{'  ' * depth}{run.path.name if depth else run.path}"
    changed = f"{age(run.changed)} ago" if run.changed else "-"
    rows.append((run.state.value, steps, best, cost, changed, place))
    if run.error and not run.stages:
        notes[len(rows) - 1] = one_line(run.error)
    for stage in run.stages:
        _add_rows(stage, rows, notes, depth=depth + 1)


def one_line(error: str) -> str:
    """The first line of an error, and the last one, which in a traceback says why."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    text = lines[0] if len(lines) < 2 else f"{lines[0]} {lines[-1]}"
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= _LONGEST_ERROR else f"{shown[: _LONGEST_ERROR - 3]}..."


def _resume(options: argparse.Namespace) -> int:
    from aflow_tune.tuning import resume_run

    resume_run(options.folder, options.overrides)
    return ExitCode.DONE


def _clean(options: argparse.Namespace) -> int:
    from aflow_tune.runs.clean import carry_out, plan
    from aflow_tune.runs.listing import find_runs

    small = too_small(("--keep-last", options.keep_last, 1), ("--keep-best", options.keep_best, 0))
    refuse("Nothing was taken away.", small)
    plans = [
        part
        for run in find_runs(_roots(options.folders))
        for part in plan(run, keep_last=options.keep_last, keep_best=options.keep_best)
    ]
    _print_plans(plans)
    total = sum(part.size for part in plans)
    if not any(part.doomed for part in plans):
        print("nothing to take away")
        return ExitCode.DONE
    print(f"together {_bytes(total)}")
    if options.dry_run:
        return ExitCode.DONE
    if not options.yes and not _agreed():
        print("nothing was taken away")
        return ExitCode.DONE
    gone, problems = carry_out(plans)
    print(f"{len(gone)} taken away, {_bytes(sum(item.size for item in gone))} freed")
    for problem in problems:
        print(f"not taken away: {problem}", file=sys.stderr)
    return ExitCode.FAILED if problems else ExitCode.DONE


def _print_plans(plans: Sequence[Plan]) -> None:
    for part in plans:
        if part.untouched is not None:
            print(f"{part.run}: left alone, {part.untouched}")
        elif part.doomed:
            staying = ", ".join(f"{step} ({why})" for step, why in part.staying) or "none"
            print(f"{part.run}: steps that stay: {staying}")
            for item in part.doomed:
                print(f"  {_bytes(item.size):>10}  {item.path.name}: {item.why}")


def _agreed() -> bool:
    """Ask on the terminal.

    Raises:
        BadInput: nobody is there to answer.
    """
    if not sys.stdin.isatty():
        fault = Fault("--yes", "an answer", "no terminal to ask on", "--yes, or --dry-run to look")
        raise BadInput("Nothing was taken away.", [fault])
    return input("take these away? [y/N] ").strip().lower() in ("y", "yes")


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
