"""`aflow-tune harvest`: pairs of a problem and a graph that solves it, for the warm start.

Parses, calls and shows; what is tried and kept is decided below.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import CONFIG, add_command, print_json
from aflow_tune.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

_DESCRIPTION = """\
Collect pairs of a problem and a graph that solves it, from which a policy can learn by supervised
training to write graphs that run. Each graph is checked, executed by the frozen executor and
scored exactly as the policy's own will be; only what solves its problem is kept, the cheapest
first, and no structure of a graph gets more than its share (harvest.per_structure).
"""

_EPILOG = """\
where graphs come from (--source, or harvest.sources in the YAML):
  templates   the shipped workflows that fit the problem's type; harvest.templates: FOLDER for yours
  teacher     the model under harvest.teacher writes them, asked as the policy will be asked
  runs        what earlier training runs wrote best (--runs DIR, or harvest.runs)

The same command goes on where it was stopped: what was answered or executed is not done twice.
Problems that also stand in a held-out task set are dropped.

what it leaves: sft.jsonl and harvest.json in RUN_FOLDER/harvested. Train on it with
  mode: train
  algorithm: {algorithm_type: sft}
  buffer: {trainer_input: {experience_buffer: {path: sft.jsonl, format: {messages_key: messages}}}}
or let one YAML do both: see docs/warm_start.md.

examples:
  aflow-tune harvest writer.yaml                                  the shipped templates
  aflow-tune harvest writer.yaml --source templates teacher --limit 200 budget.usd=5
  aflow-tune harvest writer.yaml --runs checkpoints/flows/first --out pairs.jsonl

exit codes: 0 done, 1 no graph solved a problem, 2 bad input, 3 interrupted, 4 a limit of `budget`
reached; after 3 and 4 the same command goes on.
"""

_OPTIONS = f"""\
{CONFIG.replace("the YAML file", "a YAML with a section `writer`")}\
--source SOURCE many  templates, teacher, runs (default: harvest.sources)
--runs DIR path many  run folders of the writer: the source `runs`, beside the others
--limit N int  so many problems, drawn by `seed`
--out FILE path  where the pairs go
--json  print the counts as JSON
"""
_LINE_SECONDS = 15.0
"""Least time between two progress lines in a log."""


def add_parser(commands: Any) -> None:
    add_command(
        commands,
        "harvest",
        _run,
        _OPTIONS,
        help="collect problems with graphs that solve them, for a supervised warm start",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from aflow_tune.tuning import harvest_config

    console = Console(stderr=options.json)
    with _Progress(console) as progress:
        summary = harvest_config(
            options.config,
            options.overrides,
            sources=options.source or None,
            runs=options.runs,
            limit=options.limit,
            out=options.out,
            phase=progress.say,
        )
    if options.json:
        print_json({**summary.counts, "pairs": str(summary.pairs)})
        return ExitCode.DONE
    print_counts(summary.counts, console)
    console.print(f"pairs:  {summary.pairs}", markup=False, soft_wrap=True)
    return ExitCode.DONE


def print_counts(counts: Mapping[str, Any], console: Console) -> None:
    """The counts of a harvest as two tables: what became of the graphs, and what was kept."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="graphs tried", title_justify="left")
    for name in ("what", "how many", "of these"):
        table.add_column(name, justify="right" if name == "how many" else "left")
    candidates = counts["candidates"]
    rows: list[tuple[str, int, Mapping[str, int] | Sequence[str]]] = [
        ("graphs", sum(candidates.values()), candidates),
        ("refused by the check", counts["refused"], counts["refused_by_kind"]),
        ("failed while they ran", counts["failed"], counts["failed_examples"][:1]),
        ("answered wrongly", counts["wrong"], {}),
        ("could not be scored", counts["unscored"], {}),
        ("not tried to the end", counts["untried"], list(counts["untried_by_reason"])[:1]),
        ("solved their problem", counts["solved"], {"problems": counts["solved_problems"]}),
        ("over a structure's share", counts["dropped_for_balance"], {}),
        ("kept", counts["kept"], counts["kept_by_source"]),
    ]
    for what, count, parts in rows:
        if isinstance(parts, Mapping):
            shown = ", ".join(f"{name} {number}" for name, number in parts.items())
        else:
            shown = "; ".join(parts)
        if count or what in ("graphs", "solved their problem", "kept"):
            table.add_row(what, str(count), escape(shown))
    console.print(table)
    structures = Table(title="kept, by structure", title_justify="left")
    structures.add_column("pairs", justify="right")
    structures.add_column("structure")
    kept = sorted(counts["kept_by_structure"].items(), key=lambda item: -item[1])
    for structure, number in kept:
        structures.add_row(str(number), escape(structure))
    console.print(structures)
    for line in _lines(counts):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _lines(counts: Mapping[str, Any]) -> Iterator[str]:
    """What else is worth a line."""
    problems, solved = counts["problems"], counts["solved_problems"]
    yield f"problems: {problems}, of which {solved} were solved by some graph"
    if counts["leaks"]:
        yield f"dropped before: {counts['leaks']} problems that are held out too"
    if counts["rollouts_of_other_problems"]:
        number = counts["rollouts_of_other_problems"]
        yield f"passed over: {number} rollouts of problems that are not in the training task set"
    if counts["teacher_failures"]:
        shown = ", ".join(f"{kind} {number}" for kind, number in counts["teacher_failures"].items())
        yield f"the teacher did not answer: {shown}; the same command asks again"
    for who in ("executor", "teacher"):
        spent = counts[who]
        if spent["tokens"]:
            cost = "price not known" if spent["usd"] is None else f"${spent['usd']:.4f}"
            yield f"{who}: {spent['tokens']:,} tokens, {cost}"
    share = counts["share_in_force"]
    if counts["dropped_for_balance"] > counts["kept"]:
        yield (
            f"more was dropped than kept, so that no structure exceeds {share:.0%}: add sources, "
            "or raise harvest.per_structure"
        )
    if len(counts["kept_by_structure"]) == 1:
        yield (
            "warning: all pairs have one structure, which a policy will learn by heart: add "
            "sources, or problems of another kind"
        )


class _Progress:
    """Says what is going on: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Any = None
        self._said = 0.0

    def __enter__(self) -> _Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            with contextlib.suppress(Exception):
                self._status.stop()

    def say(self, text: str) -> None:
        """What is going on now."""
        from rich.markup import escape

        counted = text.startswith("harvesting:")
        if self._status is not None and counted:
            self._status.update(escape(text))
        elif not counted or time.monotonic() - self._said > _LINE_SECONDS:
            self._said = time.monotonic()
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
