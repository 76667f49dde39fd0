"""Does a trained retriever find tools better than BM25, seen in training or not? Three seeds.

    python benchmarks/learn_retrieval.py --tools FOLDER
    python benchmarks/learn_retrieval.py --tools FOLDER --other CATALOGUE PAIRS QUERIES

FOLDER holds plugin_des.json and all_clean_data.csv of MetaTool (github.com/HowieHwong/MetaTool,
MIT): 199 tools, 20,550 queries. A fifth of the tools, drawn by the seed, is left out of training
with all of their queries, and a fifth of the other queries. Ranked are always all tools. `--other`
trains on PAIRS of another catalogue and asks QUERIES.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aflow_tune.engines.local.models import resolve_model
from aflow_tune.retrieval import Asked, Tool, ToolIndex, read_asked, read_catalogue
from aflow_tune.retrieval.encoder import Encoder
from aflow_tune.retrieval.measures import Group, held_out, measure
from aflow_tune.retrieval.training import fit

NAME = "smollm2-135m"
NDCG, SEEN, UNSEEN = "nDCG@10", "tools seen", "tools unseen"
HEADS = ("seed", "queries of", "nDCG@10: BM25", "untrained", "trained", "trained minus BM25",
         "hit@1: BM25, trained", "share of BM25, training")  # fmt: skip


def line(name: str, kind: str, group: Group, seconds: str) -> str:
    """A row of the table."""
    columns, over = group.means[NDCG], group.over_baseline[NDCG]["trained"]
    hits = [f"{group.means['hit@1'][column].mean:.3f}" for column in ("BM25", "trained")]
    cells = [name, f"{kind} ({group.count})"]
    cells += [columns[column].text() for column in ("BM25", "untrained", "trained")]
    return f"| {' | '.join([*cells, over.text(), ', '.join(hits), seconds])} |"


def trained(
    model: Path, tools: Sequence[Tool], used: Sequence[Asked], seed: int
) -> tuple[ToolIndex, str]:
    """The index, with the share of BM25 and the seconds of training as text."""
    started = time.perf_counter()
    texts = [*(tool.text for tool in tools), *(one.query for one in used)]
    index = fit(Encoder.of_model(model, texts), tools, used, model=NAME, seed=seed)
    return index, f"{index.share:g}, {time.perf_counter() - started:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", type=Path, required=True, help="the folder of MetaTool's files")
    text = "another catalogue, pairs to train on, queries to ask"
    parser.add_argument("--other", type=Path, nargs=3, help=text)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="write every number here as well")
    options = parser.parse_args()
    tools = read_catalogue(options.tools / "plugin_des.json")
    asked = read_asked(options.tools / "all_clean_data.csv", (tool.name for tool in tools))
    model = resolve_model(NAME)
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    every: list[dict[str, Any]] = []
    good = 0
    for seed in options.seeds:
        used, tested, unseen = held_out(asked, 0.2, seed)
        index, told = trained(model, tools, used, seed)
        groups = measure(index, [*tested, *unseen], untrained=model).groups
        for kind in (SEEN, UNSEEN):
            print(line(str(seed), kind, groups[kind], told), flush=True)
        every.append({"seed": seed, **{kind: group.to_json() for kind, group in groups.items()}})
        seen, over = groups[SEEN].means[NDCG]["trained"], groups[UNSEEN].over_baseline[NDCG]
        good += (
            seen.mean >= 0.65 and over["trained"].mean >= 0.05 and (over["trained"].low or 0) > 0
        )
    if options.other:
        catalogue, pairs, queries = options.other
        tools = read_catalogue(catalogue)
        names = [tool.name for tool in tools]
        index, told = trained(model, tools, read_asked(pairs, names), 0)
        for kind, group in measure(
            index, read_asked(queries, names), untrained=model
        ).groups.items():
            print(line(f"0, {len(tools)} other tools", kind, group, told))
            every.append({"other": catalogue.name, kind: group.to_json()})
    if options.json:
        options.json.write_text(json.dumps(every, indent=1) + "\n")
    print(
        f"\n0.65 on tools seen, BM25 + 0.05 on tools unseen: {good} of {len(options.seeds)} seeds"
    )


if __name__ == "__main__":
    main()
