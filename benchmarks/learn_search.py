"""Does a search find a better workflow, and does a policy that learns help it? Three seeds.

    python benchmarks/learn_search.py                   seeds 0, 1, 2: about an hour and a half
    python benchmarks/learn_search.py --seeds 0 --json search.json

`configs/search.yaml` from one plain call, with 600 rollouts each, by who proposes changes: typed
edits; these and the policy; the policy alone, which chooses among edits by their number. The policy
learns from what its proposals were worth, or does not (`--no-train`). `equal tokens` repeats the
search with edits and the policy, which may spend as many tokens as the one with edits only did,
those of the policy included. Compared is what each returns, on the same held-out problems, with
paired 95% intervals; with the seed workflow, and with what edits alone have found.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from learn import run_command

from aflow_tune.report.evaluation import Paired, pair

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "search.yaml"
EDITS, BOTH, EQUAL = "edits", "edits, policy", "edits, policy: equal tokens"
ARMS = {
    EDITS: ["--propose", "edits"],
    BOTH: ["--propose", "edits", "policy"],
    EQUAL: ["--propose", "edits", "policy"],
    "edits, policy: untrained": ["--propose", "edits", "policy", "--no-train"],
    "policy": ["--propose", "policy"],
    "policy: untrained": ["--propose", "policy", "--no-train"],
}


@dataclass
class Outcome:
    """One search. `worth`: mean gains of the policy's raced proposals, first and second half."""

    seed: int
    arm: str
    winner: list[float]
    start: list[float]
    rollouts: int
    tokens: int
    asked: int
    refused: int
    steps: int
    worth: list[float | None]
    why: str
    seconds: float
    gigabytes: float
    best: str

    def over_start(self) -> Paired:
        return paired(self.start, self.winner)


def paired(before: list[float], after: list[float]) -> Paired:
    found = pair(dict(enumerate(before)), dict(enumerate(after)))
    assert found is not None
    return found


def searched(seed: int, arm: str, root: Path, tokens: int | None) -> Outcome:
    """Run one search. Raises as `run_command`."""
    flags, started = list(ARMS[arm]), time.time()
    flags += [] if tokens is None else ["--budget", f"tokens={tokens}"]
    folder, peak = run_command(CONFIG, seed, root, flags, "search")
    (path,) = folder.glob("*/*/search/search.json")
    record: dict[str, Any] = json.loads(path.read_text())
    ((columns),) = (one["columns"] for one in record["comparison"].values())
    told = record["proposers"].get("policy", {"proposed": 0, "refused": 0})
    (tree,) = record["trees"]
    edges = [edge for edge in tree["edges"] if edge["proposer"] == "policy"]
    gains = [edge["gain"] for edge in edges if edge["gain"] is not None]
    halves = gains[: len(gains) // 2], gains[len(gains) // 2 :]
    return Outcome(
        seed=seed,
        arm=arm,
        winner=columns["winner"]["scores"],
        start=columns["seed"]["scores"],
        rollouts=record["spent"]["rollouts"],
        tokens=record["spent"]["tokens"],
        asked=told["proposed"],
        refused=told["refused"],
        steps=max((step["version"] for step in record["trained"]), default=0),
        worth=[fmean(half) if half else None for half in halves],
        why=record["why"],
        seconds=time.time() - started,
        gigabytes=peak / 1e9,
        best=tree["workflows"][tree["winner"]]["structure"],
    )


def line(one: Outcome, edits: Outcome) -> str:
    """A row of the table."""
    start, beside = one.over_start(), paired(edits.winner, one.winner)
    worth = " / ".join("" if value is None else f"{value:+.3f}" for value in one.worth)
    cells = [
        str(one.seed),
        one.arm,
        f"{start.mean_before:.3f} to {start.mean_after:.3f}",
        f"{start.difference.low:+.3f} to {start.difference.high:+.3f}",
        "" if one is edits else f"{beside.difference.low:+.3f} to {beside.difference.high:+.3f}",
        f"{one.rollouts}, {one.tokens // 1000}k",
        f"{one.asked}, {one.refused} refused" if one.asked else "",
        f"{one.steps}; {worth}" if one.asked else "",
        f"{one.seconds:.0f} s, {one.gigabytes:.1f} GB",
    ]
    return f"| {' | '.join(cells)} |"


HEADS = (
    "seed", "proposers", "right: start to winner", "95% interval", "winner less that of edits",
    "rollouts, tokens", "policy asked", "steps; worth, first / second half", "whole command",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--root", type=Path, default=Path("runs/learn_search"))
    parser.add_argument("--json", type=Path, help="write every number here as well")
    options = parser.parse_args()
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    every: list[Outcome] = []
    for seed in options.seeds:
        edits = searched(seed, EDITS, options.root, None)
        for arm in (EDITS, *(one for one in options.arms if one != EDITS)):
            tokens = edits.tokens if arm == EQUAL else None
            found = edits if arm == EDITS else searched(seed, arm, options.root, tokens)
            every.append(found)
            print(line(found, edits), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in every], indent=1) + "\n")
    won = [o for o in every if o.arm == EDITS and (o.over_start().difference.low or 0) > 0]
    much = [o for o in won if o.over_start().difference.mean >= 0.15]
    print(f"\n15 points over the start, interval above zero: {len(much)} of {len(options.seeds)}")


if __name__ == "__main__":
    main()
