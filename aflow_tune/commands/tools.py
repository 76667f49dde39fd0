"""`aflow-tune tools`: index a catalogue of tools, search it, train a retriever, measure it.

Parses options and prints; `aflow_tune.retrieval` reads, trains, ranks and measures.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import COUNT, add_command, checked, option, print_json
from aflow_tune.errors import BadInput, ExitCode, Interrupted

if TYPE_CHECKING:
    from aflow_tune.retrieval.measures import Measured

_FORMS = """\
a catalogue is JSON lines, a JSON list, or an object from names to descriptions. A tool is
  {"name": ..., "description": ..., "parameters": {JSON schema}}      also as OpenAI's `tools`,
BFCL, xLAM, SAGE's tool_catalog.jsonl, Seal-Tools, plugin manifests, or rows with a list `tools`.
"""

_PAIRS = """\
pairs are rows (JSON lines, JSON, CSV, Parquet) with a query and the names of its tools:
  {"query": "What is the weather in Paris?", "tools": ["get_weather"]}
also Query,Tool (MetaTool), SAGE's tool_selection and dialogues (--split train), Seal-Tools' calls.
"""

_INDEX = f"""\
Read a catalogue and write a folder that `search`, `eval` and the operator RetrieveTools take.
It ranks by BM25, or, with --retriever, by what `tools train` trained on another catalogue or an
older one: new tools need no training.

{_FORMS}"""

_SEARCH = """\
Print the tools that fit a query, the best first, with their scores.
"""

_TRAIN = f"""\
Train a retriever on queries with their tools, and write it with the catalogue's index. It starts
from the token embeddings of a model, the policy for one, and takes seconds to minutes on a
processor. Tools without a query take no part; they are found by what the others taught.

--hold-out 0.2 leaves out a fifth of the tools with all of their queries, and a fifth of the other
queries. `tools eval OUTPUT PAIRS` then measures on these: it never asks what training saw.

{_FORMS}
{_PAIRS}"""

_EVAL = f"""\
Measure how well the tools of queries are found: hit@1, recall@k and nDCG@10 with 95% intervals over
resampled queries. Columns: BM25; the model's embeddings untrained; what was trained, and its
difference from BM25. Rows: tools that training saw, and tools that it did not; `both` are
queries with tools of either kind. Queries that training saw are left out.

{_PAIRS}"""

_TRAIN_EXAMPLES = """\
examples:
  aflow-tune tools train tools.jsonl pairs.jsonl --output found --hold-out 0.2
  aflow-tune tools eval found pairs.jsonl
  aflow-tune tools train tool_catalog.jsonl tool_selection.jsonl --split train --output found
  aflow-tune tools search found "book a table for two" -k 3

exit codes: 0 done, 2 bad input, 3 interrupted: nothing was written.
"""

_EVERY = 0.5
"""Seconds between two lines of progress."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tools",
        help="find the right tools among many: index, search, train, eval",
        description="Find the right tools among many. See docs/tools.md.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    verb = add_command(actions, "index", _index, "write an index of a catalogue", _INDEX)
    option(verb, "catalogue CATALOGUE", "the tools", type=Path)
    option(verb, "--output DIR", "a new folder", type=Path, required=True)
    option(verb, "--retriever DIR", "rank as this trained index does", type=Path)
    verb = add_command(actions, "search", _search, "print the tools that fit a query", _SEARCH)
    option(verb, "index INDEX", "a folder of `index` or `train`", type=Path)
    option(verb, "query QUERY", "what is to be done")
    option(verb, "-k K", "how many (5)", **COUNT, default=5)
    option(verb, "--json", "print them as a chat request takes them")
    text = "train a retriever on queries and their tools"
    verb = add_command(actions, "train", _train, text, _TRAIN, _TRAIN_EXAMPLES)
    option(verb, "catalogue CATALOGUE", "the tools", type=Path)
    option(verb, "pairs PAIRS", "queries with their tools", type=Path)
    option(verb, "--output DIR", "a new folder", type=Path, required=True)
    text = "whose token embeddings: a folder or hub id (smollm2-135m)"
    option(verb, "--model MODEL", text, default="smollm2-135m")
    option(verb, "--epochs N", "times over the pairs (4)", **COUNT, default=4)
    share = checked("from 0 to 0.5", lambda number: 0 <= number <= 0.5, float, "{} {}")
    option(verb, "--hold-out SHARE", "of tools and queries (0)", **share, default=0.0)
    option(verb, "--split NAME", "only rows whose `split` is this", default="")
    option(verb, "--seed SEED", "of the order and what is held out (0)", type=int, default=0)
    text = "measure an index on queries and their tools"
    verb = add_command(actions, "eval", _eval, text, _EVAL)
    option(verb, "index INDEX", "a folder of `index` or `train`", type=Path)
    option(verb, "pairs PAIRS", "queries with their tools", type=Path)
    option(verb, "-k K", "of recall (5)", **COUNT, default=5)
    option(verb, "--split NAME", "only rows whose `split` is this", default="")
    option(verb, "--json", "print the numbers as JSON")


def _index(options: argparse.Namespace) -> int:
    from aflow_tune.data.catalogue import read_catalogue
    from aflow_tune.retrieval.index import ToolIndex

    _new(options.output)
    tools = read_catalogue(options.catalogue)
    made = ToolIndex(tools)
    if options.retriever is not None:
        found = ToolIndex.load(options.retriever)
        made = ToolIndex(tools, found.encoder, found.share, found.trained)
        if found.encoder is None:
            where, expected = f"--retriever {options.retriever}", "an index that was trained"
            cure = "name a folder of `aflow-tune tools train`, or leave it out"
            raise BadInput.of("There is no retriever.", where, expected, "BM25 alone", cure)
    made.save(options.output)
    way = "BM25" if made.encoder is None else f"what {options.retriever} learned"
    print(f"{options.output}: {len(tools)} tools, ranked by {way}")
    return ExitCode.DONE


def _search(options: argparse.Namespace) -> int:
    from aflow_tune.retrieval.index import ToolIndex

    found = ToolIndex.load(options.index).search(options.query, options.k)
    if options.json:
        print_json([tool.to_openai() for tool, _ in found])
        return ExitCode.DONE
    width = max(len(tool.name) for tool, _ in found)
    for tool, score in found:
        line = " ".join(tool.description.split())
        print(
            f"{score:7.3f}  {tool.name:<{width}}  {line if len(line) < 100 else line[:97] + '...'}"
        )
    return ExitCode.DONE


def _train(options: argparse.Namespace) -> int:
    from aflow_tune.data.catalogue import read_asked, read_catalogue

    _new(options.output)
    tools = read_catalogue(options.catalogue)
    asked = read_asked(options.pairs, (tool.name for tool in tools), options.split)

    from aflow_tune.engines.local.models import resolve_model
    from aflow_tune.retrieval.encoder import Encoder
    from aflow_tune.retrieval.measures import held_out
    from aflow_tune.retrieval.training import Schedule, fit

    used, tested, unseen = held_out(asked, options.hold_out, options.seed)
    if len(used) < 2:
        expected, found = "2 queries or more to train on", str(len(used))
        cure = "add queries, or a smaller --hold-out"
        raise BadInput.of(
            "There is too little to train on.", str(options.pairs), expected, found, cure
        )
    seen = {name for one in used for name in one.tools}
    print(f"training on {len(used)} queries for {len(seen)} of {len(tools)} tools", flush=True)
    if tested or unseen:
        print(
            f"held out: {len(tested)} queries for them, {len(unseen)} for other tools", flush=True
        )
    last = began = time.monotonic()
    first = 0.0

    def say(step: int, steps: int, loss: float) -> None:
        nonlocal last, first
        live, now = sys.stdout.isatty(), time.monotonic()
        first = first or now
        if now - last > (_EVERY if live else 10 * _EVERY) or step == steps:
            last = now
            left = (now - first) / max(1, step - 1) * (steps - step)
            line = f"step {step} of {steps}, loss {loss:.3f}, {left:.0f} s left"
            print(f"\r{line}   " if live else line, end="" if live else "\n", flush=True)

    try:
        texts = [*(tool.text for tool in tools), *(one.query for one in used)]
        untrained = Encoder.of_model(resolve_model(options.model), texts)
        plan, seed = Schedule(epochs=options.epochs), options.seed
        index = fit(untrained, tools, used, model=options.model, seed=seed, schedule=plan, say=say)
        index.save(options.output)
    except KeyboardInterrupt:
        raise Interrupted("training was stopped: nothing was written") from None
    seconds = f"trained in {time.monotonic() - began:.0f} s"
    print(
        f"{options.output}: {len(tools)} tools, {seconds}, BM25 counts {index.share:g} of a score"
    )
    if tested or unseen:
        print(f"measure it: aflow-tune tools eval {options.output} {options.pairs}")
    return ExitCode.DONE


def _eval(options: argparse.Namespace) -> int:
    from aflow_tune.data.catalogue import read_asked
    from aflow_tune.engines.local.models import is_cached, resolve_model
    from aflow_tune.retrieval.index import ToolIndex
    from aflow_tune.retrieval.measures import measure

    index = ToolIndex.load(options.index)
    asked = read_asked(options.pairs, (tool.name for tool in index.tools), options.split)
    model = index.trained.model
    there = bool(model) and is_cached(model)
    if model and not there:
        print(f"no column `untrained`: the model {model} is not on this machine", file=sys.stderr)
    found = measure(index, asked, options.k, resolve_model(model) if there else None)
    if not found.groups:
        expected = "queries that training has not seen"
        cure = "name other queries, or train with --hold-out 0.2"
        title = "There is nothing to measure."
        raise BadInput.of(title, str(options.pairs), expected, f"{len(asked)} that it saw", cure)
    if options.json:
        groups = {name: group.to_json() for name, group in found.groups.items()}
        print_json({"left_out": found.left_out, "groups": groups})
    else:
        _print(found)
    return ExitCode.DONE


def _print(found: Measured) -> None:
    """A table for each kind of query."""
    for kind, group in found.groups.items():
        print(f"{kind}: {group.count} queries")
        for measure, columns in group.means.items():
            cells = [f"{column} {one.text()}" for column, one in columns.items()]
            over = group.over_baseline[measure].get("trained")
            cells += [] if over is None else [f"over BM25 {over.text()}"]
            print(f"  {measure:<10} " + "   ".join(cells))
    if found.left_out:
        print(f"left out: {found.left_out} queries that training saw")


def _new(output: Path) -> None:
    if output.exists():
        expected, cure = "a folder that is not there yet", "another --output, or remove it"
        raise BadInput.of("Nothing was written.", f"--output {output}", expected, "one", cure)
