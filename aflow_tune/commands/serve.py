"""`aflow-tune serve`: problem in, workflow and answer out, over HTTP on this machine."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from aflow_tune.commands.options import (
    WHAT_IS_A_CHECKPOINT,
    add_command,
    inferer_of,
    model_options,
    option,
    refuse,
    too_small,
)
from aflow_tune.errors import ExitCode, Fault

_DESCRIPTION = """\
Serve a trained policy with its executor: POST /solve takes a problem as JSON and gives what
`aflow-tune infer --json` prints; the page at / shows problem, graph, calls and cost. Listens on
loopback. Ctrl-C ends it.
"""

_EPILOG = f"""\
examples:
  aflow-tune serve --checkpoint runs/my_project/my_run
  curl -s localhost:8080/solve -H 'content-type: application/json' \\
    -d '{{"problem": "What is 17 * 23?", "type": "math"}}'
  export MY_TOKEN=$(openssl rand -hex 24)
  aflow-tune serve --checkpoint my_run --host 0.0.0.0 --token-env MY_TOKEN
    and send: -H "authorization: Bearer $MY_TOKEN"

{WHAT_IS_A_CHECKPOINT}"""


def add_parser(commands: Any) -> None:
    parser = add_command(
        commands,
        "serve",
        _run,
        help="offer a trained policy over HTTP on loopback, with a page",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    model_options(parser)
    option(parser, "--port N", "0: a free one", type=int, default=8080)
    option(
        parser,
        "--host ADDRESS",
        "to listen on; any but loopback needs --token-env",
        default="127.0.0.1",
    )
    option(parser, "--token-env NAME", "environment variable with the token that callers send")
    option(
        parser,
        "--at-once N",
        "problems worked on together; one more is told 429",
        type=int,
        default=4,
    )
    option(
        parser,
        "--timeout SECONDS",
        "for one problem; default: rollout.run_timeout of the configuration",
        type=float,
    )


def _run(options: argparse.Namespace) -> int:
    faults = too_small(("--at-once", options.at_once, 1))
    if not 0 <= options.port <= 65535:
        faults.append(Fault("--port", "0 to 65535", str(options.port), "--port 8080"))
    if options.timeout is not None and not 0 < options.timeout < float("inf"):
        faults.append(Fault("--timeout", "seconds above 0", f"{options.timeout}", "--timeout 300"))
    refuse("Nothing is served.", faults)
    from aflow_tune.config.quiet import quiet
    from aflow_tune.using.server import token_for

    token = token_for(options.host, options.token_env)
    quiet()
    return asyncio.run(_serve(options, token))


async def _serve(options: argparse.Namespace, token: str | None) -> int:
    from aflow_tune.using.server import SolveServer

    inferer = inferer_of(options)
    for warning in inferer.config.warnings:
        print(f"warning: {warning}", flush=True)
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
    async with inferer:
        print(f"serving on {address} (Ctrl-C ends it)", flush=True)
        await server.run()
    print("stopped", flush=True)
    return ExitCode.DONE
