"""What agents that use tools learn from dialogues: SmolLM2-135M on two cores, by whole commands.

    python benchmarks/learn_agent.py --tools FOLDER chain        SFT; GRPO, DPO and PPO after it
    python benchmarks/learn_agent.py --tools FOLDER needed       whether a tool is needed at all
    python benchmarks/learn_agent.py --tools FOLDER coreset      a quarter of the rows, four ways
    python benchmarks/learn_agent.py --tools FOLDER replay       four rounds, each with new tools

FOLDER has seal-tools/{tool,dev,test_in_domain,test_out_domain}.jsonl (Apache-2.0) and metatool/
{tool_needed.jsonl,plugin_des.json} (MIT). `--seeds 0 1 2`, `--after grpo` (some of chain's
methods), `--out DIR` (what is there is not run again).

chain: Seal-Tools' queries of one call; four tools are offered, the right one among them. Trained on
dev and in-domain queries, tested on out-of-domain ones whose tool is called in no training row.
needed: MetaTool's queries, four tools offered; a fifth of them held out; balanced accuracy.
coreset: as chain, SFT alone, equal steps and rows for each strategy.
replay: first 240 rows of needed, then a quarter of chain's tools a round, in which a tool is always
called: what is forgotten is when to call none.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aflow_tune.agents import (
    AgentSFTConfig,
    AgentTrainingEvaluator,
    CoresetSelector,
    OnlineContinualLearner,
    RLTrainingConfig,
    write_yaml,
)
from aflow_tune.data.catalogue import read_catalogue
from aflow_tune.data.dialogues import as_dialogue

Row = dict[str, Any]
MODEL = "smollm2-135m"
EXPLAINED = "critic/vf_explained_var"
SELECTION, TIMING = "tool_selection_accuracy", "timing_precision"
WHOLE = "end_to_end_success"
SAMPLES = 4  # of each turn, at the temperature of training
SFT: dict[str, Any] = {"learning_rate": 5e-4, "batch_size": 16, "max_response": 112}
AFTER_SFT: dict[str, dict[str, Any]] = {
    "grpo": {"rl_learning_rate": 5e-4, "more": {"buffer": {"total_steps": 16}}},
    "dpo": {"rl_learning_rate": 5e-4, "epochs": 2},
    "ppo": {"rl_learning_rate": 3e-4, "more": {"buffer": {"total_steps": 12}}},
}


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def command(*words: object, done: Path) -> float:
    """Run `aflow-tune` unless `done` exists; returns the seconds."""
    if done.exists():
        return 0.0
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "aflow_tune.cli", *map(str, words)], check=True)
    return time.perf_counter() - started


def train(config: AgentSFTConfig) -> tuple[Path, float]:
    """Run a configuration; returns the folder of the merged model of its last stage."""
    content, folder = config.as_yaml(), Path(config.output)
    content["buffer"]["explorer_input"]["eval_tasksets"] = []  # `measured` evaluates
    stages = content.get("stages")
    merged = folder / (stages[-1]["stage_name"] if stages else "") / "export" / "merged"
    path = write_yaml(content, folder.with_suffix(".yaml"))
    return merged, command(path, "--inline", done=merged / "config.json")


def measured(base: Path | str, models: Sequence[Path], data: Path, out: Path) -> dict[str, Any]:
    """`aflow-tune eval` of models beside a base: eval.json."""
    shared = {"data": data, "output": out, "max_response": SFT["max_response"]}
    path = AgentTrainingEvaluator(AgentSFTConfig(base_model=str(base), **shared)).write()
    words = ["eval", path, "--samples", SAMPLES, "--out", out / "eval"]
    words += ["--checkpoint", *models] if models else []
    command(*words, done=out / "eval" / "eval.json")
    found: dict[str, Any] = json.loads((out / "eval" / "eval.json").read_text())
    return found


def means(result: Mapping[str, Any], measure: str) -> list[float]:
    """A measure of each column, over all task sets."""
    return [
        sum(cell["agents"][measure]["mean"] for cell in column["tasksets"].values())
        / len(column["tasksets"])
        for column in result["columns"]
    ]


def gained(result: Mapping[str, Any], measure: str) -> str:
    """The paired differences of a measure against the base, with their intervals."""
    told = []
    for one in result["comparisons"]:
        paired = one["agents"][measure]["difference"]
        told.append(f"{one['after']} {paired['low']:+.3f} to {paired['high']:+.3f}")
    return "; ".join(told)


def selection_data(tools: Path, out: Path) -> tuple[list[Row], list[Row]]:
    """Training rows and rows of unseen tools, written as a folder of an agent's data. Of the
    tools' parameters names and types are shown: what they mean helps no choice, and is half of the
    tokens."""
    catalogue = {
        tool.name: replace(tool, parameters=bare(tool.parameters))
        for tool in read_catalogue(tools / "seal-tools" / "tool.jsonl")
    }
    files = [
        [as_dialogue(row, catalogue) for row in rows_of(tools / "seal-tools" / f"{name}.jsonl")
         if len(row["calling"]) == 1]
        for name in ("dev", "test_in_domain", "test_out_domain")
    ]  # fmt: skip
    learned = files[0] + files[1]
    seen = {name_of(row) for row in learned}
    held_out = [row for row in files[2] if name_of(row) not in seen]
    write_rows(out / "dialogues.jsonl", learned)
    write_rows(out / "test.jsonl", held_out)
    return learned, held_out


def bare(parameters: Mapping[str, Any]) -> Row:
    """A schema of an object without what is said about its properties."""
    types = {name: {"type": it["type"]} for name, it in parameters["properties"].items()}
    return {"type": "object", "properties": types, "required": parameters.get("required", [])}


def name_of(row: Row) -> str:
    return str(row["messages"][-1]["tool_calls"][0]["function"]["name"])


def chain(tools: Path, out: Path, seed: int, methods: Sequence[str]) -> None:
    data = out / "data"
    learned, held_out = selection_data(tools, data)
    shared = {"data": data, "seed": seed, **SFT}
    sft, seconds = train(AgentSFTConfig(base_model=MODEL, output=out / "runs" / "sft", **shared))
    after: dict[str, tuple[Path, float]] = {}
    for method in methods:
        given = {
            **shared,
            **AFTER_SFT[method],
            "output": out / "runs" / method,
            "methods": (method,),
        }
        after[method] = train(RLTrainingConfig(base_model=str(sft), num_samples=4, **given))
    first = measured(MODEL, [sft], data, out / "from_base")
    second = measured(sft, [path for path, _ in after.values()], data, out / "from_sft")
    base, tuned = means(first, SELECTION)
    print(f"seed {seed}: {len(learned)} rows, tested on {len(held_out)} of unseen tools")
    print(f"  base {base:.3f}, sft {tuned:.3f} ({gained(first, SELECTION)}), {seconds:.0f} s")
    for (method, (_, spent)), value in zip(
        after.items(), means(second, SELECTION)[1:], strict=True
    ):
        print(f"  {method} {value:.3f}, {spent:.0f} s")
    print(f"  against sft: {gained(second, SELECTION)}; whole turns {gained(second, WHOLE)}")
    if "ppo" not in methods:
        return
    metrics = out / "runs" / "ppo" / "metrics.jsonl"
    logged = [json.loads(line)["metrics"] for line in metrics.read_text().splitlines()]
    found = [one[EXPLAINED] for one in logged if EXPLAINED in one]
    late = found[len(found) // 2 :]
    print(f"  ppo's explained variance, second half: {sum(late) / len(late):.3f}")


def needed_rows(tools: Path, seed: int) -> list[Row]:
    """MetaTool's queries in a drawn order, each with four tools, the right one among them if one
    is needed."""
    described = json.loads((tools / "metatool" / "plugin_des.json").read_text(encoding="utf-8"))
    draw = random.Random(f"needed/{seed}")
    rows = rows_of(tools / "metatool" / "tool_needed.jsonl")
    draw.shuffle(rows)
    made = []
    for number, row in enumerate(rows):
        names = [row["tool"]] if row.get("tool") in described else []
        others = [name for name in described if name not in names]
        names = names + draw.sample(others, 4 - len(names))
        draw.shuffle(names)
        answer: Row = {"role": "assistant", "content": "No tool is needed."}
        if row["label"] == "positive":
            if row.get("tool") not in described:
                continue
            function = {"name": row["tool"], "arguments": "{}"}
            answer = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        listed = [{"name": name, "description": described[name]} for name in names]
        messages = [{"role": "user", "content": row["query"]}, answer]
        kind = "selection" if row["label"] == "positive" else "timing"
        made.append({"id": f"{number}", "messages": messages, "tools": listed, "task_type": kind})
    return made


def balanced(column: Mapping[str, Any]) -> float:
    """Mean of the shares of right decisions where a tool is needed and where none is."""
    (cell,) = column["tasksets"].values()
    by_type = [kind[TIMING]["mean"] for kind in cell["agents_by_type"].values()]
    return float(sum(by_type) / len(by_type))


def needed(tools: Path, out: Path, seed: int) -> None:
    made, data = needed_rows(tools, seed), out / "data"
    split = len(made) // 5
    write_rows(data / "test.jsonl", made[:split])
    write_rows(data / "dialogues.jsonl", made[split:])
    sft, seconds = train(
        AgentSFTConfig(base_model=MODEL, data=data, output=out / "runs" / "sft", seed=seed, **SFT)
    )
    base, tuned = map(balanced, measured(MODEL, [sft], data, out / "measured")["columns"])
    print(f"seed {seed}: balanced accuracy base {base:.3f}, sft {tuned:.3f}, {seconds:.0f} s")


def coreset(tools: Path, out: Path, seed: int) -> None:
    data = out / "data"
    learned, _ = selection_data(tools, data)
    steps = len(learned) // 4 * 2 // SFT["batch_size"]
    models = []
    for strategy in ("random", "loss_topk", "diversity", "hybrid"):
        config = AgentSFTConfig(
            base_model=MODEL,
            data=data,
            output=out / "runs" / strategy,
            coreset=CoresetSelector(0.25, strategy),
            seed=seed,
            more={"buffer": {"total_steps": steps}},
            **SFT,
        )
        models.append(train(config)[0])
    result = measured(models[0], models[1:], data, out / "measured")
    names = ("random", "loss_topk", "diversity", "hybrid")
    values = ", ".join(f"{n} {v:.3f}" for n, v in zip(names, means(result, SELECTION), strict=True))
    print(f"seed {seed}: {values}; minus random: {gained(result, SELECTION)}")


def replay(tools: Path, out: Path, seed: int) -> None:
    learned, _ = selection_data(tools, out / "data")
    names = sorted({name_of(row) for row in learned})
    random.Random(f"replay/{seed}").shuffle(names)
    rounds = [needed_rows(tools, seed)[:240]]
    for at in range(3):
        of_round = set(names[at::4])
        rounds.append([row for row in learned if name_of(row) in of_round])
    for at, rows in enumerate(rounds):
        fifth = len(rows) // 5
        write_rows(out / f"round_{at}" / "test.jsonl", rows[:fifth])
        write_rows(out / f"round_{at}" / "dialogues.jsonl", rows[fifth:])
    for ratio in (0.0, 0.3):
        base, folder = MODEL, out / f"ratio_{ratio:g}"
        models: list[Path] = []
        for at in range(4):
            rehearsed = OnlineContinualLearner(folder / "buffer.jsonl", ratio) if ratio else None
            config = AgentSFTConfig(
                base_model=str(base),
                data=out / f"round_{at}",
                output=folder / f"round_{at}",
                epochs=2,
                replay=rehearsed or OnlineContinualLearner(),
                seed=seed,
                **SFT,
            )
            models.append(train(config)[0])
            base = str(models[-1])
        # What a round taught, just after it and at the end of all four.
        pairs = []
        for at, one in enumerate(models[:3]):
            found = measured(one, models[3:], out / f"round_{at}", folder / f"R_{at}")
            pairs.append(
                means(found, SELECTION) if at else [balanced(column) for column in found["columns"]]
            )
        told = ", ".join(f"{after - before:+.3f} from {before:.3f}" for before, after in pairs)
        lost = sum(after - before for before, after in pairs) / 3
        print(f"seed {seed}, replay {ratio:g}: backward transfer {lost:+.3f} (by round {told})")


PARTS: dict[str, Callable[..., None]] = {
    "chain": chain,
    "needed": needed,
    "coreset": coreset,
    "replay": replay,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument(
        "--tools", type=Path, required=True, help="where seal-tools/ and metatool/ are"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--after", choices=AFTER_SFT, nargs="+", default=list(AFTER_SFT))
    parser.add_argument("--out", type=Path, default=Path("runs/learn_agent"))
    options = parser.parse_args()
    more = {"methods": options.after} if options.part == "chain" else {}
    for seed in options.seeds:
        out = options.out.absolute() / options.part / f"seed_{seed}"
        PARTS[options.part](options.tools, out, seed, **more)


if __name__ == "__main__":
    main()
