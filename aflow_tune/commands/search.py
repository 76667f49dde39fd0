"""`aflow-tune search`: find a workflow that is better than the one that a YAML names.

Parses options and prints results; `aflow_tune.search` decides what is tried and kept.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from aflow_tune.commands.options import (
    REPEATED,
    SEVERAL,
    add_command,
    config_arguments,
    count,
    option,
    print_json,
)
from aflow_tune.errors import BadInput, ExitCode

_DESCRIPTION = """\
Search for a better workflow than the one under `graph` in the YAML. Workflows are changed step by
step, each child is raced against its parent on the same training problems, losers stop early, and
at the end the winner is compared with the workflow that the search began with, and with a single
call, on held-out problems. Everything that a model wrote runs in the sandbox.
"""

_EPILOG = """\
who proposes changes (--propose, or search.propose in the YAML):
  edits     typed changes of the graph, without a model: another operator, a review, a vote,
            an instruction with solved problems, a problem cut in two, a router between two graphs
  policy    the model under `model`, shown the workflow and what it got wrong; every
            search.train_every rounds it is trained on what its proposals were worth (--no-train)
  teacher   the model under search.teacher, behind any API of `models`

The same command goes on where it was stopped: no finished trial is run twice. A search over a pool
that other searches have filled (search.pool) starts from what they found.

what it leaves in RUN_FOLDER/search: best/TASKSET (the winner, for `graph: {path: ...}`),
workspace/ (AFlow's own layout), pool.sqlite, search.json, report.html

examples:
  aflow-tune search configs/search.yaml                         two cores, about five minutes
  aflow-tune search my.yaml --budget rollouts=1200 --rounds 40
  aflow-tune search my.yaml --budget usd=2 --propose edits teacher search.teacher=big
  aflow-tune search my.yaml --select aflow search.race=false    AFlow's own rule, for comparison
  aflow-tune my.yaml graph.path=RUN_FOLDER/search/best/TASKSET   tune the model under the winner

exit codes: 0 done (also when nothing better was found), 1 failed, 2 bad input, 3 interrupted, 4 a
limit of `budget` reached; after 3 and 4 the same command goes on.
"""


def add_parser(commands: Any) -> None:
    text = "find a better workflow: tree search over operator graphs"
    parser = add_command(commands, "search", _run, text, _DESCRIPTION, _EPILOG)
    config_arguments(parser, config="a YAML with a section `graph`, and perhaps `search`")
    option(parser, "--rounds N", "at most so many rounds (search.rounds)", type=count)
    text = "rollouts=N, tokens=N or usd=X: where to stop (search.rollouts, .tokens, .usd)"
    option(parser, "--budget LIMIT", text, **REPEATED)
    choices = ("puct", "aflow", "random")
    option(parser, "--select", "how the next workflow is chosen (search.select)", choices=choices)
    option(parser, "--propose WHO", "edits, policy, teacher (search.propose)", **SEVERAL)
    option(parser, "--no-train", "the policy proposes, but does not learn")
    option(parser, "--inline", "in one process, without Ray")
    option(parser, "--json", "print the record as JSON")


def _run(options: argparse.Namespace) -> int:
    from aflow_tune.report.search import search_summary
    from aflow_tune.tuning import search

    out = sys.stderr if options.json else sys.stdout
    summary = search(
        options.config,
        overrides=[*options.overrides, *_settings(options)],
        inline=True if options.inline else None,
        phase=lambda text: print(text, file=out, flush=True),
    )
    if options.json:
        print_json(summary.record)
    else:
        print(search_summary(summary.folder))
    return ExitCode.DONE


def _settings(options: argparse.Namespace) -> list[str]:
    """The options as settings of the section `search`."""
    found = []
    for limit in options.budget:
        name, _, value = limit.partition("=")
        if name not in ("rollouts", "tokens", "usd") or not value:
            expected = "rollouts=N, tokens=N or usd=X"
            title, fix = "The budget cannot be read.", "--budget rollouts=1200"
            raise BadInput.of(title, "--budget", expected, limit, fix)
        found.append(f"search.{limit}")
        found += ["search.rollouts=null"] if "rollouts" not in "".join(options.budget) else []
    if options.rounds is not None:
        found.append(f"search.rounds={options.rounds}")
    if options.select is not None:
        found.append(f"search.select={options.select}")
    if options.propose:
        found.append(f"search.propose=[{','.join(options.propose)}]")
    if options.no_train:
        found.append("search.train_every=0")
    return found
