"""How long checking and compiling written graphs takes.

    python benchmarks/graph_checks.py [--graphs 1000] [--seed 0] [--faulty 0.2]

Reads, checks and compiles graphs of `generated_graphs.py` one after the other in one process, a
share of them with a mistake. Prints the seconds of all, the milliseconds of the slowest, and the
refusals by kind. The graphs are generated before the clock starts. The target is under 5 s.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from generated_graphs import FAULTS, Generator

from aflow_tune.operators import OPERATORS
from aflow_tune.writer.check import check_written
from aflow_tune.writer.form import as_text
from aflow_tune.writer.results import structure_of
from aflow_tune.writer.types import CheckLimits


def written(graphs: int, seed: int, faulty: float) -> list[str]:
    """Graphs in the hybrid form, some of them with a mistake."""
    generator, chance = Generator(seed), random.Random(seed)
    texts = []
    for _ in range(graphs):
        prompts, code = generator.graph()
        if chance.random() < faulty:
            _, old, new = chance.choice(FAULTS)
            code = code.replace(old, new)
        texts.append(as_text(prompts, code))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faulty", type=float, default=0.2)
    options = parser.parse_args()
    texts = written(options.graphs, options.seed, options.faulty)
    limits = CheckLimits(model_calls=20)
    seconds, processor, kinds, verdicts = [], 0.0, Counter[str](), []
    for text in texts:
        started, busy = time.perf_counter(), time.process_time()
        verdict = check_written(text, operators=OPERATORS, limits=limits)
        if verdict.graph is not None:
            compile(verdict.graph.sources["graph.py"], "graph.py", "exec")
        seconds.append(time.perf_counter() - started)
        processor += time.process_time() - busy
        verdicts.append(verdict)
        kinds.update({refusal.kind.value for refusal in verdict.refusals})
    structures = {structure_of(one.graph) for one in verdicts if one.graph is not None}
    lines = sum(len(one.written.code.splitlines()) for one in verdicts if one.written)
    print(
        f"{len(texts)} graphs of {lines / len(texts):.0f} lines, {len(structures)} structures: "
        f"{sum(seconds):.2f} s ({1000 * sum(seconds) / len(texts):.2f} ms each, the slowest "
        f"{1000 * max(seconds):.0f} ms), {processor:.2f} s of processor time"
    )
    print(f"may run: {sum(one.ok for one in verdicts)}; refused for {dict(kinds.most_common())}")


if __name__ == "__main__":
    main()
