"""`aflow-tune data`: prepare training, validation and test files; check two files for leaks.

Reads the sources that the command line names; what is drawn from them, and what a leak is, is
decided in `aflow_tune.data`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.commands.options import refuse, too_small
from aflow_tune.errors import BadInput, ExitCode, Fault

if TYPE_CHECKING:
    from aflow_tune.data.prepare import Drawn, Source
    from aflow_tune.data.rows import Table
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
with both places. Exit code 2 if there is one, else 0.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "data",
        help="prepare training, validation and test files; check them for leaks",
        description="Prepare data files, or check them.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    prepare = actions.add_parser(
        "prepare",
        help="write train.jsonl, validation.jsonl and test.jsonl from sources",
        description=_PREPARE,
        epilog=_PREPARE_EPILOG,
    )
    prepare.add_argument(
        "--source",
        action="append",
        required=True,
        metavar="NAME[=WHERE]",
        help="a source of rows; repeat it for each (see below)",
    )
    prepare.add_argument(
        "--ratio", action="append", default=[], metavar="NAME=SHARE", help="a source's share"
    )
    prepare.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="NAME=BENCHMARK",
        help="whose rows a source holds, where its name does not say it",
    )
    prepare.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    prepare.add_argument("--train", type=int, default=1000, metavar="N", help="rows (1000)")
    prepare.add_argument("--validation", type=int, default=100, metavar="N", help="rows (100)")
    prepare.add_argument("--test", type=int, default=100, metavar="N", help="rows (100)")
    prepare.add_argument("--seed", type=int, default=0, help="which rows are drawn (0)")
    prepare.add_argument("--force", action="store_true", help="replace files that are there")
    prepare.set_defaults(action=_prepare)

    check = actions.add_parser(
        "check",
        help="find held-out rows that stand in the training data",
        description=_CHECK,
    )
    check.add_argument("train", type=Path, metavar="TRAIN", help="the file that is trained on")
    check.add_argument("test", type=Path, nargs="+", metavar="TEST", help="held-out files")
    check.set_defaults(action=_check)


def _prepare(options: argparse.Namespace) -> int:
    from aflow_tune.data.prepare import SPLITS, draw, write_splits

    sizes = {split: getattr(options, split) for split in SPLITS}
    least = {"train": 1}
    faults = too_small(*((f"--{split}", sizes[split], least.get(split, 0)) for split in SPLITS))
    named = _pairs("--source", options.source, faults)
    ratios = _pairs("--ratio", options.ratio, faults, named)
    benchmarks = _pairs("--benchmark", options.benchmark, faults, named)
    refuse("The command line does not fit.", faults)
    shares = _shares(named, ratios, benchmarks)
    sources = _read_sources(named, benchmarks, sum(sizes.values()), options.seed)
    drawn = draw(sources, shares, sizes, options.seed)
    for path in write_splits(
        options.out, sources, shares, drawn, options.seed, force=options.force
    ):
        print(path)
    print(_summary(sources, shares, drawn))
    return ExitCode.DONE


def _check(options: argparse.Namespace) -> int:
    from aflow_tune.data.leaks import leaks_between

    training, *held_out = (_read_file(path) for path in (options.train, *options.test))
    total = 0
    for leaks in leaks_between([training], held_out):
        table = leaks.held_out
        total += len(leaks.found)
        for leak, place in zip(leaks.found, leaks.places, strict=True):
            kind = "the same as" if leak.exact else f"{leak.similarity:.2f} similar to"
            print(f"{table.places[leak.held_out]}: {kind} {place}")
        print(
            f"{table.source}: {len(leaks.found)} of {len(table.rows)} rows leak "
            f"({sum(leak.exact for leak in leaks.found)} equal, "
            f"{sum(not leak.exact for leak in leaks.found)} nearly)"
        )
    return ExitCode.BAD_INPUT if total else ExitCode.DONE


def _pairs(
    flag: str, given: Sequence[str], faults: list[Fault], known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """`NAME=VALUE` arguments as a dictionary; of sources the value may be missing."""
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
    if not ratios:
        kinds = {name: kind_of(name, benchmarks.get(name)) for name in named}
        unknown = [name for name, kind in kinds.items() if kind is None]
        if unknown:
            cure = " ".join(f"--ratio {name}={1 / len(named):.3g}" for name in named)
            expected = "--ratio for each source: the default recipe knows mathematics, code and QA"
            fault = Fault(f"--source {unknown[0]}", expected, "a source of no known kind", cure)
            raise BadInput("The shares are not known.", [fault])
        return default_shares({name: str(kind) for name, kind in kinds.items()})
    missing = [name for name in named if name not in ratios]
    if missing:
        expected = "a share for every source, or for none"
        fault = Fault(f"--source {missing[0]}", expected, "no --ratio", f"--ratio {missing[0]}=0.3")
        raise BadInput("The shares are not known.", [fault])
    try:
        return exact_shares({name: float(ratios[name]) for name in named})
    except ValueError as error:
        given = " ".join(f"{name}={ratio}" for name, ratio in ratios.items())
        fault = Fault("--ratio", "shares above 0, together 1", str(error), f"correct {given}")
        raise BadInput("The shares do not fit.", [fault]) from None


def _read_sources(
    named: Mapping[str, str], benchmarks: Mapping[str, str], rows: int, seed: int
) -> list[Source]:
    """Read every source; the faults of all are reported together.

    Args:
        rows: how many rows one source can be asked for at most.
    """
    from aflow_tune.data.prepare import Source

    sources: list[Source] = []
    faults: list[Fault] = []
    for name, where in named.items():
        try:
            benchmark = _benchmark(name, benchmarks.get(name))
            found, sha256 = _rows(name, where, benchmark, rows, seed)
            label = benchmark.name if benchmark else benchmarks.get(name, name)
            sources.append(Source(name, label, found, where, sha256))
        except BadInput as error:
            faults += error.faults
    if faults:
        raise BadInput("The sources cannot be read.", faults)
    return sources


def _benchmark(name: str, given: str | None) -> Benchmark | None:
    """The benchmark of a source; None for one whose name is none and that was given none."""
    from aflow_tune.scoring.benchmarks import BENCHMARKS, find
    from aflow_tune.scoring.gym import PREFIX

    if given is None and name not in BENCHMARKS and not name.startswith(PREFIX):
        return None
    return find(given or name)


def _rows(
    name: str, where: str, benchmark: Benchmark | None, rows: int, seed: int
) -> tuple[Sequence[Mapping[str, Any]], str | None]:
    """The rows of one source, and the hash of the file that they were read from."""
    from aflow_tune.data.rows import file_format
    from aflow_tune.scoring import gym

    if benchmark is not None and not where and benchmark.name.startswith(gym.PREFIX):
        # Some of what it makes may be equal or too similar: twice as many as can be needed.
        return gym.make_rows(benchmark.name.removeprefix(gym.PREFIX), 2 * rows, seed), None
    if not where or where == "hub" or where.startswith("hub:"):
        if benchmark is None:
            fault = Fault(
                f"--source {name}",
                "a file or a data set of the hub",
                "neither, and no benchmark has that name",
                f"--source {name}=FILE.jsonl",
            )
            raise BadInput("A source has no rows.", [fault])
        return benchmark.load(split=where.partition(":")[2] or None), None
    path = Path(where).expanduser()
    dataset = re.fullmatch(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?(?::([\w.\[\]:%+-]+))?", where)
    if dataset and not path.exists() and not path.parent.is_dir() and not file_format(path):
        return _hub_rows(dataset[1], dataset[2], dataset[3], benchmark), None
    table = _read_file(path)
    if benchmark is not None:
        _require_fields(table, benchmark)
    return table.rows, hashlib.sha256(path.read_bytes()).hexdigest()


def _hub_rows(
    name: str, first: str | None, second: str | None, benchmark: Benchmark | None
) -> list[dict[str, Any]]:
    """Rows of `name[:CONFIGURATION]:SPLIT`; the split is `train` where none is given."""
    from aflow_tune.scoring.rows import HubSource, plain_row, read_hub

    subset, split = (first, second) if second else (None, first or "train")
    to_row = benchmark.hub.to_row if benchmark and benchmark.hub else plain_row
    return read_hub(HubSource(name, subset, split or "train", to_row))


def _read_file(path: Path) -> Table:
    """All rows of a file.

    Raises:
        BadInput: it is missing, of no format that is known, faulty or empty.
    """
    from aflow_tune.data.rows import file_format, read_table

    cure = "name a .jsonl, .json, .csv or .parquet file"
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        raise BadInput("A file cannot be read.", [Fault(str(path), "a file of rows", found, cure)])
    if file_format(path) is None:
        found = f"a file of unknown format: {path.name}"
        raise BadInput("A file cannot be read.", [Fault(str(path), "a file of rows", found, cure)])
    table = read_table(str(path), [path], whole=True)
    if table.faults:
        raise BadInput("A file cannot be read.", table.faults)
    if not table.rows:
        raise BadInput("A file is empty.", [Fault(str(path), "rows", "none", "add rows")])
    return table


def _require_fields(table: Table, benchmark: Benchmark) -> None:
    faults = [
        Fault(
            place,
            f"the fields of {benchmark.name}: {', '.join(benchmark.fields)}",
            f"{', '.join(row) or 'nothing'}",
            "add the field, or name the right --benchmark",
        )
        for row, place in zip(table.rows, table.places, strict=True)
        if any(row.get(name) is None for name in benchmark.fields)
    ]
    if faults:
        raise BadInput("Rows of another form.", faults[:5])


def _summary(sources: Sequence[Source], shares: Mapping[str, Fraction], drawn: Drawn) -> str:
    lines = []
    for source in sources:
        name = source.name
        taken = ", ".join(f"{split} {count}" for split, count in drawn.taken[name].items())
        left = []
        if drawn.duplicates[name]:
            left.append(f"{drawn.duplicates[name]} repeat another one")
        if drawn.leaking[name]:
            left.append(f"{drawn.leaking[name]} nearly the same as a held-out one, left out")
        more = f" ({'; '.join(left)})" if left else ""
        share = float(shares[name])
        lines.append(f"{name}: {share:.1%}: {taken}, of {len(source.rows)} rows{more}")
    return "\n".join(lines)
