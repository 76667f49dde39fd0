"""`aflow-tune data`: prepare data files, check them for leaks, show what is learned of dialogues.

This module reads the sources; `aflow_tune.data` draws rows from them and defines a leak.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import COUNT, NATURAL, REPEATED, add_command, option, refuse
from aflow_tune.errors import BadInput, ExitCode, Fault

if TYPE_CHECKING:
    from aflow_tune.data.catalogue import Tool
    from aflow_tune.data.prepare import Source
    from aflow_tune.data.rows import Table
    from aflow_tune.engines.local.chat import Rendered
    from aflow_tune.scoring.benchmarks import Benchmark

_PREPARE = """\
Draw train.jsonl, validation.jsonl and test.jsonl from one or more sources, in fixed shares.
No row of one file is the same as one of another, or nearly: see `aflow-tune data check`.
Every row gets the fields `source` and `benchmark`; manifest.json says what came from where.
"""

_PREPARE_EPILOG = """\
where a source comes from:
  --source gsm8k=data/gsm8k.jsonl     a file: .jsonl, .json, .csv, .parquet
  --source gsm8k                      the hub, the benchmark's own data set
  --source gsm8k=hub:train            the same, another split
  --source mine=owner/name:train      any data set of the hub, with its split
  --source reasoning_gym:chain_sum    made by reasoning-gym
A source that is named after a benchmark (gsm8k, math, humaneval, mbpp, hotpotqa, drop) is one of
its rows; for another name say --benchmark NAME=gsm8k.

shares: --ratio for every source, together 1, or for none: then mathematics gets 40%, code 30%
and question answering 30%, and what is missing goes to the others in proportion.

examples:
  aflow-tune data prepare --source gsm8k=g.jsonl --source mbpp=m.jsonl --out data/mixed
  aflow-tune data prepare --source gsm8k --out data --train 500 --validation 50 --test 50
"""

_CHECK = """\
Look for rows of held-out files that also stand in a training file: with equal inputs, or with
inputs that are nearly the same (the sets of their three-word phrases have a Jaccard similarity
of 0.7 or more). Columns that name, answer or describe a row do not count. Each leak is printed
with both places. Dialogues with tools are also compared by dialogue and by scenario, and what
tools both call is told. Exit code 2 if there is a leak, else 0.
"""

_SHOW = """\
Print dialogues as `mode: train` learns them: the tokens of the chat template, the learned ones in
colour (in a file or a pipe: between the marks ⟦ and ⟧). Then how many rows there are of each type
of task, how long they are, and each row that cannot be learned from, with its place and reason.
Forms: OpenAI messages, ShareGPT, Hermes, xLAM, BFCL, Seal-Tools, SAGE; see docs/agents.md.
"""
_CATALOGUE = "a file of tools, for rows that only name theirs"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "data",
        help="prepare training, validation and test files; check and show them",
        description="Prepare data files, check them, or show what is learned of them.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    text = "write train.jsonl, validation.jsonl and test.jsonl from sources"
    verb = add_command(actions, "prepare", _prepare, text, _PREPARE, _PREPARE_EPILOG)
    text = "a source of rows; repeat it for each (see below)"
    option(verb, "--source NAME[=WHERE]", text, **REPEATED, required=True)
    option(verb, "--ratio NAME=SHARE", "a source's share", **REPEATED)
    text = "whose rows a source holds, where its name does not say it"
    option(verb, "--benchmark NAME=BENCHMARK", text, **REPEATED)
    option(verb, "--out DIR", "where to write", type=Path, required=True)
    option(verb, "--train N", "rows (1000)", **COUNT, default=1000)
    option(verb, "--validation N", "rows (100)", **NATURAL, default=100)
    option(verb, "--test N", "rows (100)", **NATURAL, default=100)
    option(verb, "--seed SEED", "which rows are drawn (0)", type=int, default=0)
    option(verb, "--force", "replace files that are there")
    text = "find held-out rows that stand in the training data"
    verb = add_command(actions, "check", _check, text, _CHECK)
    option(verb, "train TRAIN", "the file that is trained on", type=Path)
    option(verb, "test TEST", "held-out files", type=Path, nargs="+")
    option(verb, "--catalogue FILE", _CATALOGUE, type=Path)
    text = "print dialogues as they are learned, with the learned tokens in colour"
    verb = add_command(actions, "show", _show, text, _SHOW)
    option(verb, "file FILE", "dialogues of any known form", type=Path)
    text = "whose chat template renders: a folder, or a name of the hub (smollm2-135m)"
    option(verb, "--model MODEL", text, default="smollm2-135m")
    option(verb, "--rows N", "how many rows are printed (3)", **COUNT, default=3)
    option(verb, "--last-only", "only the last message of the assistant is learned")
    option(verb, "--longest N", "tokens that a row may have: model.max_model_len", **COUNT)
    option(verb, "--catalogue FILE", _CATALOGUE, type=Path)


def _prepare(options: argparse.Namespace) -> int:
    from aflow_tune.data.prepare import SPLITS, draw, write_splits

    sizes = {split: getattr(options, split) for split in SPLITS}
    faults: list[Fault] = []
    named = _pairs("--source", options.source, faults)
    ratios = _pairs("--ratio", options.ratio, faults, named)
    benchmarks = _pairs("--benchmark", options.benchmark, faults, named)
    refuse("The command line does not fit.", faults)
    shares = _shares(named, ratios, benchmarks)
    sources = _read_sources(named, benchmarks, sum(sizes.values()), options.seed)
    drawn = draw(sources, shares, sizes, options.seed)
    written = write_splits(options.out, sources, shares, drawn, options.seed, force=options.force)
    print(*written, sep="\n")
    for source in sources:
        name, share = source.name, float(shares[source.name])
        taken = ", ".join(f"{split} {count}" for split, count in drawn.taken[name].items())
        print(
            f"{name}: {share:.1%}: {taken}, of {len(source.rows)} rows ({drawn.duplicates[name]} "
            f"repeat another one, {drawn.leaking[name]} too near to a held-out one: left out)"
        )
    return ExitCode.DONE


def _check(options: argparse.Namespace) -> int:
    from aflow_tune.data.leaks import leaks_between, shared_dialogues

    training, *held_out = (_read_file(path) for path in (options.train, *options.test))
    total = 0
    catalogue = _catalogue(options.catalogue)
    for table in held_out:
        if shared := shared_dialogues([training], table, catalogue):
            total += len(shared.dialogues) + len(shared.scenarios)
            for line in shared.lines():
                print(f"{table.source}: {line}")
    for table, leaks in leaks_between([training], held_out):
        total += len(leaks)
        for leak, place in leaks:
            kind = "the same as" if leak.exact else f"{leak.similarity:.2f} similar to"
            print(f"{table.places[leak.held_out]}: {kind} {place}")
        equal = sum(leak.exact for leak, _ in leaks)
        print(
            f"{table.source}: {len(leaks)} of {len(table.rows)} rows leak "
            f"({equal} equal, {len(leaks) - equal} nearly)"
        )
    return ExitCode.BAD_INPUT if total else ExitCode.DONE


def _show(options: argparse.Namespace) -> int:
    from aflow_tune.data.dialogues import as_dialogue
    from aflow_tune.engines.local.chat import Renderer
    from aflow_tune.engines.local.models import end_tokens, load_tokenizer, resolve_model

    table, catalogue = _read_file(options.file), _catalogue(options.catalogue)
    model = resolve_model(options.model)
    tokenizer = load_tokenizer(model)
    renderer = Renderer(tokenizer, end_tokens(model))
    marks = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("⟦", "⟧")
    types: Counter[str] = Counter()
    lengths: list[int] = []
    odd: list[str] = []
    learned = 0
    for row, place in zip(table.rows, table.places, strict=True):
        try:
            dialogue = as_dialogue(row, catalogue)
            examples = renderer.examples(
                dialogue["messages"], dialogue["tools"], last_only=options.last_only
            )
        except ValueError as error:
            odd.append(f"{place}: {error}")
            continue
        longest = max((len(it.tokens_T) for it in examples), default=0)
        if not examples or (options.longest and longest > options.longest):
            odd.append(f"{place}: {f'{longest} tokens' if examples else 'no answer to learn'}")
            continue
        count = sum(sum(it.learned_R) for it in examples)
        if len(lengths) < options.rows:
            told = f"{longest} tokens, {count} learned"
            print(f"{place}: {dialogue['task_type']}, {told}")
            print(*(_coloured(it, tokenizer, marks) for it in examples), sep="\n---\n", end="\n\n")
        types[dialogue["task_type"]] += 1
        lengths.append(longest)
        learned += count
    if odd:
        print(f"{len(odd)} of {len(table.rows)} rows cannot be learned from:")
        print(*(f"  {line}" for line in odd), sep="\n")
    if lengths:
        kinds = ", ".join(f"{kind} {count}" for kind, count in types.most_common())
        print(f"{len(lengths)} rows: {kinds}")
        print(f"tokens: {sum(lengths)} in all, {learned} learned, the longest row {max(lengths)}")
    return ExitCode.DONE if lengths else ExitCode.BAD_INPUT


def _coloured(example: Rendered, tokenizer: Any, marks: tuple[str, str]) -> str:
    """The text of an example, its learned runs of tokens between `marks`."""
    parts = [tokenizer.decode(example.tokens_T[: example.prompt_length])]
    at = example.prompt_length
    for mine, run in itertools.groupby(example.learned_R):
        size = len(list(run))
        text = tokenizer.decode(example.tokens_T[at : at + size])
        parts.append(f"{marks[0]}{text}{marks[1]}" if mine else text)
        at += size
    return "".join(parts)


def _catalogue(path: Path | None) -> dict[str, Tool]:
    from aflow_tune.data.catalogue import read_catalogue

    return {tool.name: tool for tool in read_catalogue(path)} if path else {}


def _pairs(
    flag: str, given: Sequence[str], faults: list[Fault], known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """`NAME=VALUE` arguments as a dictionary; without `known` (sources) a value may be missing."""
    found: dict[str, str] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not name or (known is not None and not value) or (equals and not value):
            faults.append(Fault(f"{flag} {item}", "NAME=VALUE", repr(item), f"{flag} gsm8k=..."))
        elif name in found:
            faults.append(Fault(f"{flag} {item}", "every name once", f"{name!r} again", "remove"))
        elif known is not None and name not in known:
            expected = f"the name of a source: {', '.join(known)}"
            faults.append(Fault(f"{flag} {item}", expected, repr(name), f"--source {name}=..."))
        else:
            found[name] = value
    return found


def _shares(
    named: Mapping[str, str], ratios: Mapping[str, str], benchmarks: Mapping[str, str]
) -> dict[str, Fraction]:
    from aflow_tune.data.mix import default_shares, exact_shares, kind_of

    if len(named) == 1 and not ratios:
        return dict.fromkeys(named, Fraction(1))
    where, expected = "--ratio", "shares above 0, together 1, for every source or for none"
    try:
        if ratios:
            return exact_shares({name: float(ratios[name]) for name in named})
        kinds = {name: kind_of(name, benchmarks.get(name)) for name in named}
        where = next((f"--source {name}" for name, kind in kinds.items() if kind is None), "")
        if not where:
            return default_shares({name: str(kind) for name, kind in kinds.items()})
        found = "a kind that is not known; mathematics, code and QA have default shares"
    except (KeyError, ValueError) as error:
        found = str(error)
    cure = " ".join(f"--ratio {name}={1 / len(named):.3g}" for name in named)
    raise BadInput.of("The shares do not fit.", where, expected, found, cure)


def _read_sources(
    named: Mapping[str, str], benchmarks: Mapping[str, str], rows: int, seed: int
) -> list[Source]:
    """Read all sources; at most `rows` rows of each are needed. Reports all faults together."""
    from aflow_tune.data.prepare import Source
    from aflow_tune.scoring.benchmarks import BENCHMARKS, find
    from aflow_tune.scoring.gym import PREFIX

    sources: list[Source] = []
    faults: list[Fault] = []
    for name, where in named.items():
        label = benchmarks.get(name, name)
        try:
            known = name in benchmarks or name in BENCHMARKS or name.startswith(PREFIX)
            benchmark = find(label) if known else None
            found, sha256 = _rows(name, where, benchmark, rows, seed)
            label = benchmark.name if benchmark else label
            sources.append(Source(name, label, found, where, sha256))
        except BadInput as error:
            faults += error.faults
    refuse("The sources cannot be read.", faults)
    return sources


def _rows(
    name: str, where: str, benchmark: Benchmark | None, rows: int, seed: int
) -> tuple[Sequence[Mapping[str, Any]], str | None]:
    """The rows of one source, and the SHA-256 of its file; None if they are not from a file."""
    from aflow_tune.data.rows import file_format
    from aflow_tune.scoring import gym
    from aflow_tune.scoring.rows import HubSource, read_hub

    if benchmark is not None and not where and benchmark.name.startswith(gym.PREFIX):
        # Some rows may be duplicates or too similar: make twice as many as needed.
        return gym.make_rows(benchmark.name.removeprefix(gym.PREFIX), 2 * rows, seed), None
    if not where or where == "hub" or where.startswith("hub:"):
        if benchmark is None:
            where, found = f"--source {name}", "neither, and no benchmark has that name"
            expected, cure = "a file or a data set of the hub", f"--source {name}=FILE.jsonl"
            raise BadInput.of("A source has no rows.", where, expected, found, cure)
        return benchmark.load(split=where.partition(":")[2] or None), None
    path = Path(where).expanduser()
    dataset = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.\[\]:%+-]+))?", where)
    if dataset and not path.exists() and not path.parent.is_dir() and not file_format(path):
        # NAME[:CONFIGURATION]:SPLIT; the split is `train` where none is given
        subset, split = (dataset[2], dataset[3]) if dataset[3] else (None, dataset[2] or "train")
        to_row = benchmark.hub.to_row if benchmark and benchmark.hub else dict
        return read_hub(HubSource(dataset[1], subset, split, to_row)), None
    table = _read_file(path)
    fields = benchmark.fields if benchmark else ()
    expected = f"the fields of {name}: {', '.join(fields)}"
    cure = "add the field, or name the right --benchmark"
    faults = [
        Fault(place, expected, ", ".join(row) or "nothing", cure)
        for row, place in zip(table.rows, table.places, strict=True)
        if any(row.get(field) is None for field in fields)
    ]
    refuse("Rows of another form.", faults[:5])
    return table.rows, hashlib.sha256(path.read_bytes()).hexdigest()


def _read_file(path: Path) -> Table:
    """All rows of a file.

    Raises:
        BadInput: it is missing, of unknown format, faulty or empty.
    """
    from aflow_tune.data.rows import file_format, read_table

    title, expected = "A file cannot be read.", "a file of rows"
    if not path.is_file() or file_format(path) is None:
        found = "a file of unknown format" if path.is_file() else "no such file"
        cure = "name a .jsonl, .json, .csv or .parquet file"
        raise BadInput.of(title, str(path), expected, found, cure)
    table = read_table(str(path), [path], whole=True)
    refuse(title, table.faults)
    if not table.rows:
        raise BadInput.of("A file is empty.", str(path), "rows", "none", "add rows")
    return table
