"""`aflow-tune CONFIG` with its dry run, `aflow-tune validate` and `aflow-tune init`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import add_command, config_arguments, count, option, refuse
from aflow_tune.errors import BadInput, ExitCode, Fault

_TEMPLATES = Path(__file__).with_name("project")
_EPILOG = """\
dry run:
  aflow-tune run --dry-run my.yaml                        one step, scripted; no GPU, no model
  aflow-tune run --dry-run my.yaml --answers answers.jsonl
  aflow-tune run --dry-run gpu.yaml --inline --json       one process, without Ray

  Plays one training step through your rows, workflow, rewards, the adapter, Ray workers, buffer and
  advantages, with an optimiser step on a tiny random model. What the policy says is scripted: in
  each group even runs say what the row gives as its answer, odd ones plain words. --answers FILE
  says it better, a JSON line for an item:

    {"item": 0, "good": "<answer>13</answer>", "bad": "no idea"}
    {"item": "*", "good": "<answer>{answer}</answer>"}          {answer}: the row's own field

  No number is what the model would do. Exit code 0: a batch was filled and a step was made;
  1: not, and the first traceback is shown; 2: refused, nothing was started. docs/dry_run.md
"""


def add_parser(commands: Any) -> None:
    settings = "settings that win over the file, such as buffer.total_steps=20"
    text = "tune a workflow (the word may be left out)"
    about = (
        "Tune the workflow of a configuration, with an evaluation before and after. The same "
        "command resumes an interrupted run."
    )
    parser = add_command(commands, "run", _run, text, about, _EPILOG)
    config_arguments(parser, settings=settings)
    option(
        parser, "--inline", "one process without Ray: starts faster, half the memory, same results"
    )
    group = parser.add_argument_group("a dry run")
    text = "play one step by a script on a tiny random model; no GPU, nothing is kept"
    option(group, "--dry-run", text)
    option(group, "--answers FILE", "what a good and a bad policy would say", type=Path)
    text = "call the models behind APIs, which costs money; else plain words stand in for them"
    option(group, "--call-apis", text)
    text = "tasks to play (a whole step, up to 256 runs); sums are scaled to the step"
    option(group, "--tasks N", text, type=count)
    option(group, "--stage NAME", "the stage to play (the first that can be)")
    option(group, "--json", "print JSON and nothing else")
    text = "check configuration, function and data set without starting anything"
    about = (
        "Check a configuration, its workflow function and its data sets. Starts nothing and "
        "fetches nothing. Every fault is printed with its place and its cure."
    )
    parser = add_command(commands, "validate", _validate, text, about)
    config_arguments(parser, settings=settings)
    text = "write a small new project: workflow, YAML, data, test"
    about = "Write a small project to start from. Existing files are never overwritten."
    parser = add_command(commands, "init", _init, text, about)
    option(parser, "folder folder", "where to write it; made if missing", type=Path)
    option(parser, "--search", "to search for a better workflow: a graph of one call, and a score")


def _run(options: argparse.Namespace) -> int:
    if options.dry_run:
        return _dry_run(options)
    faults = [
        Fault(f"command line: {name}", "--dry-run beside it", "a real run", f"--dry-run {name}")
        for name in ("--answers", "--call-apis", "--tasks", "--stage", "--json")
        if getattr(options, name[2:].replace("-", "_"))
    ]
    refuse("These options are those of a dry run.", faults)
    from aflow_tune.tuning import run_config

    run_config(options.config, options.overrides, inline=True if options.inline else None)
    return ExitCode.DONE


def _dry_run(options: argparse.Namespace) -> int:
    from aflow_tune.tuning import with_stop

    def tell(text: str) -> None:
        print(f"dry run: {text} ...", flush=True)

    def work(stop: Callable[[], bool]) -> tuple[str, bool]:
        from aflow_tune.dry_run.dry_run import DryRunOptions, as_json, dry_run, render

        given = options.answers, options.call_apis, options.tasks, options.stage, options.inline
        found = dry_run(options.config, list(options.overrides), DryRunOptions(*given), tell, stop)
        return json.dumps(as_json(found)) if options.json else render(found), found.good

    with contextlib.redirect_stdout(sys.stderr):  # the workflow may print
        text, good = with_stop(work)
    print(text)
    return ExitCode.DONE if good else ExitCode.FAILED


def _validate(options: argparse.Namespace) -> int:
    from aflow_tune.tuning import validate_config

    report = validate_config(options.config, options.overrides)
    print(report.render())
    return ExitCode.BAD_INPUT if report.faults else ExitCode.DONE


def _init(options: argparse.Namespace) -> int:
    written = write_project(options.folder, search=options.search)
    if not written:
        raise BadInput(f"nothing was written to {options.folder}: every file is there already")
    print(*written, sep="\n")
    verb = "search" if options.search else "validate"
    print(f"\nnext: aflow-tune {verb} {options.folder / 'config.yaml'}")
    return ExitCode.DONE


def write_project(folder: Path, *, search: bool = False) -> list[Path]:
    """Write the missing files of a small project into `folder`; returns those written.

    Raises:
        BadInput: `folder` is, or lies below, a file.
    """
    files = _to_search() if search else _to_tune()
    try:
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        title, expected = "The project cannot be written there.", "a folder, or a free name"
        raise BadInput.of(title, str(folder), expected, str(error), "name another folder") from None
    written = [folder / name for name in files if not (folder / name).exists()]
    for path in written:
        path.write_text(files[str(path.relative_to(folder))], encoding="utf-8")
    return written


def _to_tune() -> dict[str, str]:
    """The files by name: from `project/`, Python with the suffix `.txt`; the rows are made here."""
    names = ("workflow.py.txt", "config.yaml", "test_workflow.py.txt", "README.md")
    files = {name.removesuffix(".txt"): (_TEMPLATES / name).read_text("utf-8") for name in names}
    # Every third sum is held out: both sets are equally hard.
    rows = [{"question": f"What is {n} + {n + 1}?", "answer": 2 * n + 1} for n in range(1, 61)]
    lines = [json.dumps(row) + "\n" for row in rows]
    files["held_out.jsonl"] = "".join(lines[2::3])
    files["train.jsonl"] = "".join(line for n, line in enumerate(lines, 1) if n % 3)
    return files


def _to_search() -> dict[str, str]:
    """The same from `configs/search.yaml` and what it names, in the wheel or beside us."""
    home = Path(__file__).parents[1] / "shipped"
    home = home if home.exists() else Path(__file__).parents[2]
    places = {
        "graph/graph.py": "workflows/graphs/plain/graph.py",
        "score.py": "workflows/graphs/two_questions/score.py",
        "train.jsonl": "workflows/data/two_questions/train.jsonl",
        "held_out.jsonl": "workflows/data/two_questions/held_out.jsonl",
    }
    config = (home / "configs" / "search.yaml").read_text("utf-8")
    for name, path in places.items():
        config = config.replace(
            f"../{path.removesuffix('/graph.py')}", name.removesuffix("/graph.py")
        )
    config = config.replace("configs/search.yaml", "config.yaml").replace(
        "aflow-tune/", "my-project/"
    )
    config = config.replace("project: aflow-tune", "project: my-project")
    files = {name: (home / path).read_text("utf-8") for name, path in places.items()}
    readme = (_TEMPLATES / "README_search.md").read_text("utf-8")
    return {"config.yaml": config, **files, "README.md": readme}
