"""`aflow-tune infer` and `aflow-tune serve`: use a trained policy, here or over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import (
    COUNT,
    REPEATED,
    Parser,
    add_command,
    checked,
    key_variable,
    option,
    print_json,
    refuse,
    together,
    write_text,
)
from aflow_tune.errors import BadInput, ExitCode, Fault, RunFailed

if TYPE_CHECKING:
    from aflow_tune.using.inferring import Inferer
    from aflow_tune.using.solved import Problem, Solved

_WHAT_IS_A_CHECKPOINT = """\
what DIR may be:
  a run folder (its newest checkpoint; of a chain of stages the last one that trained), a
  checkpoint global_step_N, or export/adapter or export/merged of a run. The configuration is the
  run's resolved.yaml unless --config names another.
"""
_DESCRIPTION = """\
Let the trained policy write a workflow for a problem, and the frozen executor run it. Prints the
workflow with its graph, the verdict of the check, the answer and which workflow gave it, what it
took, and, where the right answer is given, the reward by part.
"""

_EPILOG = f"""\
examples:
  aflow-tune infer --checkpoint runs/my_project/my_run --type math --problem "What is 17 * 23?"
  aflow-tune infer --checkpoint my_run/global_step_40 --type math --problem "..." --truth 391
  aflow-tune infer --checkpoint my_run --type code --problem "Write add(a, b)." \\
    --entry-point add --truth tests.py
  aflow-tune infer --checkpoint my_run --batch problems.jsonl --out results.jsonl

{_WHAT_IS_A_CHECKPOINT}
how --truth is compared:
  math by the strict rule of GSM8K for a number and of MATH for anything else; qa by that of
  HotpotQA; code by running the tests in the file that --truth names (in --batch: the tests
  themselves). docs/scoring.md has the rules.

rows of --batch:
  {{"problem": "...", "type": "math", "truth": "391", "entry_point": null, "id": "any"}}
  With --out the same command goes on where it was stopped.

exit codes: 0 an answer came (of every row), 1 none came, 2 bad input.
"""


def _model_options(parser: Parser) -> None:
    """Add the options that say which model `infer` and `serve` use."""
    option(parser, "--checkpoint DIR", "what was trained (below)", type=Path)
    option(parser, "--config FILE", "the YAML to go by; alone: the base model", type=Path)
    text = (
        "a setting that wins over the file, such as models.executor.base_url=...; may be repeated"
    )
    option(parser, "--set KEY=VALUE", text, **REPEATED, dest="overrides")
    option(parser, "--endpoint URL", "the policy is behind this OpenAI-compatible API")
    option(parser, "--model NAME", "what the endpoint calls the policy")
    key_variable(parser)
    option(
        parser,
        "--temperature T",
        "of the policy; default: as the configuration evaluates held-out tasks",
        **checked("0 or more", lambda value: 0 <= value <= 100, float),
    )


def add_parser(commands: Any) -> None:
    text = "let a trained policy write a workflow for a problem, and run it"
    parser = add_command(commands, "infer", _run, text, _DESCRIPTION, _EPILOG)
    _model_options(parser)
    option(parser, "--problem TEXT", "the problem; - reads it from here")
    option(parser, "--type --problem-type", "of the problem", choices=["math", "code", "qa"])
    option(parser, "--truth --ground-truth TEXT", "the right answer; for code a file of tests")
    option(parser, "--entry-point NAME", "the function to write, for code")
    option(parser, "--samples N", "how often to ask", **COUNT, default=1)
    option(parser, "--batch FILE", "a JSONL file of problems", type=Path)
    option(parser, "--out FILE", "where results of --batch go", type=Path)
    option(parser, "--at-once N", "rows of --batch worked on together", **COUNT, default=8)
    option(parser, "--json", "print the result as JSON")
    option(parser, "--svg FILE", "draw the workflow's graph there", type=Path)
    _add_serve(commands)


def _run(options: argparse.Namespace) -> int:
    faults = []
    alone = {"--problem": options.problem, "--truth": options.truth, "--svg": options.svg}
    alone["--entry-point"] = options.entry_point
    if options.batch is not None:
        for name in (name for name, value in alone.items() if value is not None):
            cure = "remove one of them; rows of --batch have fields of these names"
            faults.append(Fault(name, "either it or --batch", "both", cure))
    else:
        if options.problem is None:
            faults.append(Fault("--problem", "a problem", "none", "--problem ..., or --batch FILE"))
        elif options.type is None:
            faults.append(Fault("--type", "math, code or qa", "none", "--type math"))
        if options.out is not None:
            faults.append(Fault("--out", "--batch FILE beside it", "it alone", "remove it"))
    refuse("Nothing was asked.", faults)
    from aflow_tune.config.quiet import quiet

    quiet()
    problem = None if options.batch else _problem(options)
    inferer = _inferer_of(options)
    return asyncio.run(
        _many(inferer, options) if problem is None else _one(inferer, problem, options)
    )


async def _one(inferer: Inferer, problem: Problem, options: argparse.Namespace) -> int:
    from aflow_tune.using.solved import solved_text

    async with inferer:
        tasks = [inferer.solve(problem, sample) for sample in range(options.samples)]
        try:
            found: list[Solved] = await asyncio.gather(*tasks)
        except TimeoutError:
            limit = f"{inferer.seconds:g} s (rollout.run_timeout)"
            raise RunFailed(f"the problem was not solved within {limit}") from None
    svg = found[0]["workflow"]["svg"]
    if options.svg is not None:
        if svg:
            write_text(options.svg, svg)
        print(options.svg if svg else "there is no graph to draw", file=sys.stderr)
    if options.json:
        print_json(found[0] if options.samples == 1 else found)
    else:
        for number, solved in enumerate(found, 1):
            if options.samples > 1:
                print(f"--- sample {number} of {options.samples}")
            print(solved_text(solved, drawing=options.svg is None), end="")
    return ExitCode.DONE if any(solved["answered"] for solved in found) else ExitCode.FAILED


async def _many(inferer: Inferer, options: argparse.Namespace) -> int:
    from aflow_tune.using.inferring import read_rows, run_batch

    rows = read_rows(options.batch, inferer.make, options.type)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    async with inferer:
        answered = await run_batch(
            inferer,
            rows,
            samples=options.samples,
            at_once=options.at_once,
            out=options.out,
            say=say,
        )
    say(f"{answered} of {len(rows)} rows have an answer")
    return ExitCode.DONE if answered == len(rows) else ExitCode.FAILED


def _problem(options: argparse.Namespace) -> Problem:
    from aflow_tune.using.solved import Problem

    truth = options.truth
    if truth is not None and options.type == "code":
        try:
            truth = Path(truth).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            title, where = "The tests cannot be read.", f"--truth {truth}"
            raise BadInput.of(title, where, "a file of tests", str(error), "name it") from None
    text = sys.stdin.read() if options.problem == "-" else options.problem
    row = {"problem": text, "type": options.type, "truth": truth}
    return Problem.of(row | {"entry_point": options.entry_point}, "the command line")


def _inferer_of(options: argparse.Namespace) -> Inferer:
    """The inferer that the options of `_model_options` describe, not yet entered; prints warnings.

    Raises:
        BadInput: the options do not fit together, or folder or configuration have faults.
    """
    title = "The model cannot be asked."
    if options.checkpoint is None and options.config is None:
        cure, expected = "--checkpoint runs/my_project/my_run", "a folder, or --config FILE"
        raise BadInput.of(title, "--checkpoint", expected, "neither", cure)
    together({"--endpoint": options.endpoint, "--model": options.model}, title)
    import transformers.utils.logging

    from aflow_tune.using.inferring import open_trained

    transformers.utils.logging.disable_progress_bar()
    inferer = open_trained(
        options.checkpoint,
        config=options.config,
        overrides=options.overrides,
        endpoint=options.endpoint,
        served_model=options.model,
        key_variable=options.key_variable,
        temperature=options.temperature,
    )
    for warning in inferer.config.warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return inferer


# -- serve -------------------------------------------------------------------------------

_SERVE = """\
Serve a trained policy with its executor: POST /solve takes a problem as JSON and gives what
`aflow-tune infer --json` prints; the page at / shows problem, graph, calls and cost. Listens on
loopback. Ctrl-C ends it.
"""

_SERVE_EPILOG = f"""\
examples:
  aflow-tune serve --checkpoint runs/my_project/my_run
  curl -s localhost:8080/solve -H 'content-type: application/json' \\
    -d '{{"problem": "What is 17 * 23?", "type": "math"}}'
  export MY_TOKEN=$(openssl rand -hex 24)
  aflow-tune serve --checkpoint my_run --host 0.0.0.0 --token-env MY_TOKEN
    and send: -H "authorization: Bearer $MY_TOKEN"

{_WHAT_IS_A_CHECKPOINT}"""


def _add_serve(commands: Any) -> None:
    text = "offer a trained policy over HTTP on loopback, with a page"
    parser = add_command(commands, "serve", _serve_command, text, _SERVE, _SERVE_EPILOG)
    _model_options(parser)
    port = checked("0 to 65535", lambda number: 0 <= number <= 65535)
    option(parser, "--port N", "0: a free one", **port, default=8080)
    text = "to listen on; any but loopback needs --token-env"
    option(parser, "--host ADDRESS", text, default="127.0.0.1")
    option(parser, "--token-env NAME", "environment variable with the token that callers send")
    text = "problems worked on together; one more is told 429"
    option(parser, "--at-once N", text, **COUNT, default=4)
    option(
        parser,
        "--timeout SECONDS",
        "for one problem; default: rollout.run_timeout of the configuration",
        **checked("seconds above 0", lambda value: 0 < value < float("inf"), float),
    )


def _serve_command(options: argparse.Namespace) -> int:
    from aflow_tune.config.quiet import quiet
    from aflow_tune.using.server import SolveServer, token_for

    token = token_for(options.host, options.token_env)
    quiet()
    inferer = _inferer_of(options)
    inferer.seconds = options.timeout or inferer.seconds
    server = SolveServer(
        inferer,
        inferer.title,
        host=options.host,
        port=options.port,
        at_once=options.at_once,
        seconds=inferer.seconds,
        token=token,
        private=inferer.private,
    )
    address = server.listen()
    print(f"loading {inferer.title}", flush=True)

    async def serve() -> None:
        async with inferer:
            print(f"serving on {address} (Ctrl-C ends it)", flush=True)
            await server.run()

    asyncio.run(serve())
    print("stopped", flush=True)
    return ExitCode.DONE
