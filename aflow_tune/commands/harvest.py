"""`aflow-tune harvest`: collect pairs of a problem and a graph that solves it, for the warm start.

Parses options and prints results; `aflow_tune.harvest` decides what is tried and kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aflow_tune.commands.options import (
    SEVERAL,
    add_command,
    config_arguments,
    option,
    paced,
    print_json,
)
from aflow_tune.errors import ExitCode

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


def add_parser(commands: Any) -> None:
    text = "collect problems with graphs that solve them, for a supervised warm start"
    parser = add_command(commands, "harvest", _run, text, _DESCRIPTION, _EPILOG)
    config_arguments(parser, config="a YAML with a section `writer`")
    option(
        parser, "--source SOURCE", "templates, teacher, runs (default: harvest.sources)", **SEVERAL
    )
    text = "run folders of the writer: the source `runs`, beside the others"
    option(parser, "--runs DIR", text, type=Path, **SEVERAL)
    option(parser, "--limit N", "so many problems, drawn by `seed`", type=int)
    option(parser, "--out FILE", "where the pairs go", type=Path)
    option(parser, "--json", "print the counts as JSON")


def _run(options: argparse.Namespace) -> int:
    from aflow_tune.tuning import harvest_config

    summary = harvest_config(
        options.config,
        options.overrides,
        sources=options.source or None,
        runs=options.runs,
        limit=options.limit,
        out=options.out,
        phase=paced("harvesting:", sys.stderr if options.json else sys.stdout),
    )
    if options.json:
        print_json({**summary.counts, "pairs": str(summary.pairs)})
    else:
        _print_counts(summary.counts)
        print(f"pairs:  {summary.pairs}")
    return ExitCode.DONE


def _print_counts(counts: Mapping[str, Any]) -> None:
    """Print each count on a line, with a warning if one structure dominates."""
    lines = []
    for name, value in counts.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{part} {number}" for part, number in value.items()) or "none"
        lines.append(f"{name.replace('_', ' ')}: {value}")
    structures = counts["kept_by_structure"]
    if counts["dropped_for_balance"] > counts["kept"] or len(structures) == 1:
        lines.append(
            "warning: one structure is most of what solved, and would be learned by heart: add "
            "sources, problems of another kind, or raise harvest.per_structure"
        )
    print(*lines, sep="\n")
