"""`aflow-tune score`: score given answers by a benchmark's strict and published rule."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import add_command, option
from aflow_tune.errors import ExitCode

if TYPE_CHECKING:
    from aflow_tune.scoring.benchmarks import Scores

_EPILOG = """\
examples:
  aflow-tune score --benchmark gsm8k --data rows.jsonl --answers answers.jsonl
  aflow-tune score --benchmark humaneval --data rows.jsonl --answers answers.jsonl --json
  aflow-tune score --benchmark mbpp --data rows.jsonl --self-check
  aflow-tune score --benchmark math --answers answers.jsonl       rows from the hub

An answer is one line {"answer": TEXT}, in the order of the rows; for code the whole program.
--json prints {"mean": ..., "strict": [...], "published": [...], "unscored": N}: strict is the
rule that training uses, published the field's own; null where an answer could not be scored,
which is never a 0; mean is of strict over the rows that have a score. docs/scoring.md has both
rules side by side.
"""


def add_parser(commands: Any) -> None:
    text = "score answers by a benchmark's published and strict rule"
    about = (
        "Score answers to a benchmark's rows, wherever they came from. Programs run in the sandbox."
    )
    parser = add_command(commands, "score", _score, text, about, _EPILOG)
    text = "gsm8k, math, humaneval, mbpp, hotpotqa, drop, or reasoning_gym:TASK"
    option(parser, "--benchmark NAME", text, required=True)
    text = "the rows, one object a line; left out: the benchmark's test rows from the hub"
    option(parser, "--data ROWS.jsonl", text, type=Path)
    option(parser, "--split SPLIT", "another split of the hub's data set")
    either = parser.add_mutually_exclusive_group(required=True)
    option(either, "--answers ANSWERS.jsonl", "one answer a row", type=Path)
    option(
        either, "--self-check", "score the rows' own gold answers; exit code 1 unless all score 1.0"
    )
    option(
        parser,
        "--sandbox",
        "what programs run behind; unsafe_subprocess is no wall (default: the strongest)",
        choices=["auto", "bubblewrap", "landlock", "unsafe_subprocess"],
        default="auto",
    )
    option(parser, "--json", "print JSON and nothing else")


def _score(options: argparse.Namespace) -> int:
    import asyncio

    from aflow_tune.scoring.benchmarks import find, read_answers, score_all

    benchmark = find(options.benchmark)
    rows = benchmark.load(options.data, options.split)
    answers = None if options.self_check else read_answers(options.answers, len(rows))
    scores = asyncio.run(score_all(benchmark, rows, answers, policy=options.sandbox))
    if options.json:
        print(json.dumps(scores.to_json()))
    else:
        _print_table(benchmark.name, scores)
    gold = all(score.value == 1 for row in scores.rows for score in row.values())
    return ExitCode.FAILED if options.self_check and not gold else ExitCode.DONE


def _print_table(name: str, scores: Scores) -> None:
    for number, row in enumerate(scores.rows, 1):
        strict, published = row["strict"], row["published"]
        if any(score.value != 1 for score in row.values()):
            values = f"strict {_shown(strict.value)}, published {_shown(published.value)}"
            print(f"row {number}: {values}: {strict.reason or published.reason}")
    known = [value for value in scores.values("published") if value is not None]
    published_mean = sum(known) / len(known) if known else None
    print(
        f"{name}: {len(scores.rows)} answers, mean strict {_shown(scores.mean)}, "
        f"mean published {_shown(published_mean)}, unscored {scores.unscored}"
    )


def _shown(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.3f}"
