"""Makes `search_table.json`: about 500 graphs for the two-questions task, each run on 60 problems.

    python benchmarks/search_table.py            15 to 40 minutes on two cores

The graphs are those that the search's own edits can reach with a few choices: two operators
(Custom, Programmer), three instructions, one joint, two router words; no router of routers, nor one
of two workflows that both split. All are run by the frozen executor of `configs/writer_local.yaml`,
which is that of `configs/search.yaml`, greedily, so that a search can be replayed exactly without a
model: `search_replay.py` does. An edge is one edit: [parent, kind, what, child, word, other]; the
last two, of grafts, are the router's word and the graph for problems without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from aflow_tune.config.load import load_config
from aflow_tune.config.validate import prepare_harvest
from aflow_tune.evaluation.evaluating import LocalModels
from aflow_tune.graph.graph import Graph, load_graph
from aflow_tune.models import as_client
from aflow_tune.models.types import Message, ModelClient, Reply
from aflow_tune.operators import OPERATORS
from aflow_tune.operators.prompts import use_prompts
from aflow_tune.search.edits import Editor, moves
from aflow_tune.search.problems import examples, joints, telling_words
from aflow_tune.search.state import WorkflowState
from aflow_tune.writer.results import structure_of

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("search_table.json")
EACH = 10
"""Problems of each of the six kinds."""
INSTRUCTIONS = ("one example, 1", "two alike, 2", "three unlike, 1")
OF = {name: OPERATORS[name] for name in ("Custom", "Programmer")}
AT_ONCE = 24


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The problems of the table, and the other training rows, from which examples are drawn."""
    path = ROOT / "workflows" / "data" / "two_questions" / "train.jsonl"
    every = [json.loads(line) for line in path.read_text().splitlines()]
    chosen: dict[str, list[dict[str, Any]]] = {}
    for row in every:
        of_kind = chosen.setdefault(row["kind"], [])
        if len(of_kind) < EACH:
            of_kind.append(row)
    taken = [row for of_kind in chosen.values() for row in of_kind]
    return taken, [row for row in every if row not in taken]


def key_of(graph: Graph) -> str:
    return WorkflowState.of("table", graph).key


def enumerate_graphs(
    told: Mapping[str, str], joint: str, words: list[str]
) -> tuple[list[Graph], list[list[Any]]]:
    """Every graph of the table, the seed first, and the edits between them."""
    graphs: dict[str, Graph] = {}
    edges: list[list[Any]] = []

    def add(graph: Graph) -> Graph:
        return graphs.setdefault(key_of(graph), graph)

    seed = add(load_graph(ROOT / "workflows" / "graphs" / "plain"))
    singles = [seed]
    swapped = next(m for m in moves(seed, OF, instructions={}) if m.kind == "swap").graph
    singles.append(add(swapped))
    for base in (seed, swapped):
        for name in INSTRUCTIONS:
            made = Editor(base, OF).instruct(next(iter(base.shape.instances)), told[name])
            singles.append(add(made))  # type: ignore[arg-type]
    cut = [add(Editor(one, OF).split(joint)) for one in singles]  # type: ignore[arg-type]
    grafted = []
    pairs = [(a, b) for a, b in product([*singles, *cut], repeat=2) if a is not b]
    pairs = [(a, b) for a, b in pairs if a in singles or b in singles]
    for (one, other), word in product(pairs, words):
        made = Editor(one, OF).graft(other, word)
        assert made is not None
        grafted.append(add(made))
        edges.append([key_of(one), "graft", f"route {word!r}", key_of(made), word, key_of(other)])
        if one in singles and other in singles:
            add(Editor(made, OF).split(joint))  # type: ignore[arg-type]
    every = list(graphs.values())
    chosen = {name: told[name] for name in INSTRUCTIONS}
    for graph in every:
        for move in moves(graph, OF, instructions=chosen, joints=[joint]):
            child = key_of(move.graph)
            if child in graphs:
                edges.append([key_of(graph), move.kind, move.what, child])
    place = {key: number for number, key in enumerate(graphs)}
    for edge in edges:
        edge[0], edge[3] = place[edge[0]], place[edge[3]]
        if edge[4:]:
            edge[5] = place[edge[5]]
    return every, edges


class Remembering:
    """A greedy model's answers, each asked for once."""

    def __init__(self, client: ModelClient) -> None:
        self.client, self.role, self.model = client, client.role, client.model
        self.answers: dict[str, asyncio.Future[Reply]] = {}

    async def complete(self, messages: list[Message], **settings: Any) -> Reply:
        key = json.dumps([messages, settings], sort_keys=True)
        if key not in self.answers:
            self.answers[key] = asyncio.get_running_loop().create_future()
            self.answers[key].set_result(await self.client.complete(messages, **settings))
        return await self.answers[key]


async def score(graphs: list[Graph], problems: list[dict[str, Any]]) -> list[str]:
    """Of each graph its scores as a text of 0 and 1, in the order of the problems."""
    config = load_config(ROOT / "configs" / "writer_local.yaml")
    writer, _ = prepare_harvest(config)
    slots, done, started = asyncio.Semaphore(AT_ONCE), 0, time.monotonic()
    async with LocalModels() as local, local.auxiliary_chat_models(config) as auxiliary:
        client = Remembering(as_client(auxiliary["executor"]))

        async def one(graph: Graph, row: dict[str, Any]) -> str:
            nonlocal done
            async with slots:
                trusted = replace(graph, trust=True, operators=OF)
                run = await trusted.run(row["question"], model=client)
            done += 1
            if done % 500 == 0:
                seconds = time.monotonic() - started
                print(f"{done} of {len(graphs) * len(problems)}, {seconds:.0f} s", flush=True)
            return str(int(writer.score(row, run.answer)))

        with use_prompts(config.prompts):
            work = [one(graph, row) for graph in graphs for row in problems]
            found = await asyncio.gather(*work)
    size = len(problems)
    return ["".join(found[at : at + size]) for at in range(0, len(found), size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", action="store_true", help="only count the graphs")
    options = parser.parse_args()
    problems, others = rows()
    texts = [row["question"] for row in problems]
    told = examples([(row["question"], row["answer"]) for row in others])
    graphs, edges = enumerate_graphs(told, joints(texts)[0], telling_words(texts)[:2])
    print(f"{len(graphs)} graphs, {len(edges)} edits")
    if options.count:
        return
    scores = asyncio.run(score(graphs, problems))
    table = {
        "problems": texts,
        "graphs": [[structure_of(one), mark] for one, mark in zip(graphs, scores, strict=True)],
        "edges": edges,
    }
    TABLE.write_text(json.dumps(table, separators=(",", ":")).replace("],[", "],\n[") + "\n")
    best = max(mark.count("1") / len(mark) for mark in scores)
    print(f"best {best:.3f}, seed {scores[0].count('1') / len(texts):.3f}")


if __name__ == "__main__":
    main()
