"""Which written graphs are worth looking at: the most frequent structures, the best, the worst.

A graph is told apart by its code, whatever its prompts: a policy that writes prompts for each
problem writes no text twice. Of graphs that were used only once or twice the mean reward is
mostly luck, so they are looked at only where no graph was used more often.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from aflow_tune.report.graph_drawing import Drawing, draw
from aflow_tune.report.statistics import mean
from aflow_tune.report.writer_records import WriterRecords, WriterRun

FEW_USES = 3
"""A graph is judged from so many uses on."""
MOST_STRUCTURES = 6
MOST_TYPES = 6


@dataclass(frozen=True)
class Structure:
    """One structure of valid graphs, named S1, S2, ... by how frequent it is.

    `operators` tells its operators in words; `example` is the run with the highest reward that
    wrote it, the latest of equals.
    """

    name: str
    key: str
    operators: str
    share: float
    """Of the valid graphs of the newest picture."""
    earlier: float | None
    """The same of the first picture; None where there is none."""
    example: WriterRun
    drawing: Drawing


@dataclass(frozen=True)
class TypeRow:
    """The structures of one problem type's valid graphs."""

    problem_type: str
    graphs: int
    distinct: int
    shares: tuple[float, ...]
    """In the order of the structures shown; what is missing to 1 are others."""
    most: str
    """Name of its most frequent structure; "" if that is not among those shown."""


@dataclass(frozen=True)
class Shown:
    """One graph with the use of it that is shown."""

    title: str
    uses: int
    reward: float
    """Mean over its uses."""
    run: WriterRun
    drawing: Drawing


def structures(records: WriterRecords, most: int = MOST_STRUCTURES) -> list[Structure]:
    """The most frequent structures of the newest picture, each drawn; then those that only
    earlier runs had."""
    every = _valid(records.every)
    overall = Counter(map(_key, every))
    newest, first = (
        Counter(map(_key, _valid(runs))) for runs in (records.latest, records.earliest)
    )
    examples: dict[str, WriterRun] = {}
    for run in every:
        best = examples.get(_key(run))
        if best is None or _reward(run) >= _reward(best):
            examples[_key(run)] = run
    order = sorted(overall, key=lambda key: (-newest[key], -overall[key], key))
    found = []
    for place, key in enumerate(order[:most], 1):
        example = examples[key]
        found.append(
            Structure(
                name=f"S{place}",
                key=key,
                operators=operators_told(example),
                share=newest[key] / newest.total() if newest else 0.0,
                earlier=first[key] / first.total() if first else None,
                example=example,
                drawing=draw(example.code, example.operators, f"structure-{place}"),
            )
        )
    return found


def by_type(runs: Sequence[WriterRun], shown: Sequence[Structure]) -> list[TypeRow]:
    """Which structures the valid graphs of each problem type have; the most frequent types."""
    types: dict[str, Counter[str]] = defaultdict(Counter)
    for run in _valid(runs):
        types[run.problem_type][_key(run)] += 1
    names = {structure.key: structure.name for structure in shown}
    most = sorted(types.items(), key=lambda item: (-item[1].total(), item[0]))[:MOST_TYPES]
    return [
        TypeRow(
            problem_type=name or "not said",
            graphs=counts.total(),
            distinct=len(counts),
            shares=tuple(counts[structure.key] / counts.total() for structure in shown),
            most=names.get(counts.most_common(1)[0][0], ""),
        )
        for name, counts in most
    ]


def best_and_worst(records: WriterRecords) -> list[Shown]:
    """The best and the worst valid graph and the worst refused one, by the mean reward of their
    uses in training (in the newest evaluations where there was no training). What could not even
    be read is shown where nothing else was refused."""
    runs = records.of_steps(records.training) or records.latest
    rewarded = [run for run in runs if run.reward is not None]
    valid = _by_code([run for run in rewarded if run.valid])
    invalid = [run for run in rewarded if not run.valid]
    refused = _by_code([run for run in invalid if run.code] or invalid)
    found = []
    if valid:
        best = max(valid, key=_mean_reward)
        found.append(_shown("Best graph", "best", best, highest=True))
        worst = min(valid, key=_mean_reward)
        if worst is not best:
            found.append(_shown("Worst valid graph", "worst", worst))
    if refused:
        worst = min(refused, key=_mean_reward)
        found.append(_shown("Worst refused graph", "refused", worst))
    return found


def operators_told(run: WriterRun) -> str:
    """The operators of a run's graph in words: `2 Custom, 1 ScEnsemble`."""
    return ", ".join(f"{sites} {name}" for name, sites in run.operators.items()) or "no operator"


def _by_code(runs: Sequence[WriterRun]) -> list[list[WriterRun]]:
    """The uses of each graph, of those used often enough; of all where none is."""
    graphs: dict[str, list[WriterRun]] = defaultdict(list)
    for run in runs:
        graphs[(run.code or run.text).strip()].append(run)
    often = [uses for uses in graphs.values() if len(uses) >= FEW_USES]
    return often or list(graphs.values())


def _mean_reward(uses: Sequence[WriterRun]) -> float:
    return mean([_reward(run) for run in uses])


def _shown(title: str, name: str, uses: Sequence[WriterRun], highest: bool = False) -> Shown:
    """With its most telling use: the one with the highest or the lowest reward, the latest of
    equals."""
    sign = 1 if highest else -1
    run = max(uses, key=lambda run: (sign * _reward(run), run.step))
    drawing = draw(run.code, run.operators, f"{name}-graph")
    return Shown(title, len(uses), _mean_reward(uses), run, drawing)


def _valid(runs: Sequence[WriterRun]) -> list[WriterRun]:
    return [run for run in runs if run.valid and run.structure]


def _key(run: WriterRun) -> str:
    return run.structure or ""


def _reward(run: WriterRun) -> float:
    return run.reward if run.reward is not None else float("-inf")
