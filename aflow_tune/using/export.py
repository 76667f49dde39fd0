"""Exports a run to other tools: its adapter, the merged model, or its best workflows.

Workflows come from the records of the run and are written as rounds of AFlow: `round_1` is the
best, `results.json` beside them has AFlow's columns, `index.json` the other figures. Policies
seldom write the same text twice, so workflows are grouped by structure and type of problem, and
ranked by the mean reward of all uses; of each group the text with the highest mean reward is
written. Existing files are never overwritten.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from aflow_tune.config.load import load_config
from aflow_tune.errors import BadInput
from aflow_tune.evaluation.trained import RESOLVED, Found, config_source, stage_folders, trained_run
from aflow_tune.files import write_json
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.inside import GRAPH_FILE
from aflow_tune.graph.save import AFLOW_NAMES, save_round
from aflow_tune.operators import Operator, load_operators
from aflow_tune.report.evaluation import best_step, load_evaluations
from aflow_tune.report.records import read_rollouts
from aflow_tune.report.statistics import mean
from aflow_tune.report.writer import KEPT, WriterRollout, read_rollout

RESULTS, INDEX = "results.json", "index.json"
DATASETS = {"math": "MATH", "code": "HumanEval", "qa": "HotpotQA"}
"""AFlow's data set for each type of problem, if neither the folder nor the run names one."""


class Written(NamedTuple):
    """The paths that an export wrote, and notes for the user."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()


class Use(NamedTuple):
    """One rollout of a valid workflow: its full code and prompts, and its record."""

    code: str
    prompts: Mapping[str, str]
    rollout: WriterRollout


Best = dict[str, Any]
"""The entry of `index.json` for one structure and type of problem: over its `uses` the means of
`reward`, `score` (of those scored), `usd` and `tokens` of the executor (None: unknown for some
use), and `clean`, the share answered as written; `operators` counts call sites of its best text.
"""


def export_checkpoint(
    run: Path, which: str, what: str, out: Path, *, config: Path | None = None
) -> Written:
    """Write the adapter or the merged model of a checkpoint (last, best by the run's own
    evaluations, or a step) into the new folder `out`.

    Raises:
        BadInput: there is no such checkpoint, `out` exists, the run has no adapter, or the base
            model cannot be found.
        CheckpointError: the checkpoint is damaged.
    """
    from aflow_tune.engines.local.checkpoint import read_weights, write_adapter, write_merged
    from aflow_tune.engines.local.models import resolve_model

    _refuse_existing(out)
    found = _find_checkpoint(run, which)
    name = load_config(config_source(found, config)).model.model_path
    weights, spec = read_weights(found.weights)
    if what == "adapter" and spec is None:
        raise BadInput.of(
            "This run has no adapter.",
            str(found.weights),
            "a run that trained an adapter (model.lora_configs)",
            "full weights",
            "--what merged, which writes the whole model",
        )
    base = resolve_model(name)
    if what == "adapter" and spec is not None:
        write_adapter(base, weights, spec, out)
    else:
        write_merged(base, weights, spec, out)
    return Written((out,), (f"from {found.name}, over the base model {name}",))


def _find_checkpoint(run: Path, which: str) -> Found:
    run_dir, found = trained_run(run.expanduser().resolve())
    if run_dir is None:
        raise _nothing(run, "a run folder with checkpoints", "no checkpoint")
    saved = {checkpoint.step: checkpoint for checkpoint in found}
    step: int | None = max(saved)
    missing = "no such checkpoint"
    if which == "best":
        step, missing = best_step(run_dir, list(saved)), "no checkpoint of the run was evaluated"
    elif which != "last":
        step = int(which) if which.isdigit() and int(which) in saved else None
    if step is None:
        expected = f"last, best, or a step: {', '.join(map(str, saved))}"
        title, where = "There is no such checkpoint.", f"--checkpoint {which}"
        raise BadInput.of(title, where, expected, missing, "--checkpoint last")
    return Found(saved[step].path, run_dir)


def export_workflows(
    run: Path,
    out: Path,
    *,
    top: int,
    least_uses: int,
    dataset: str | None = None,
    config: Path | None = None,
) -> Written:
    """Write the `top` best workflows of a run, or of all stages of a chain, as rounds of AFlow.

    `dataset` None: from the path `DATASET/workflows`, else from `writer.benchmark`, else the usual
    one for the type of problem. `config` replaces the run's own. Raises BadInput: `out` already has
    rounds or lists, the records are damaged, or no structure has `least_uses` uses.
    """
    for there in [out / RESULTS, out / INDEX, *sorted(out.glob("round_*"))]:
        _refuse_existing(there)
    if not run.is_dir():
        raise _nothing(run, "a run folder", "")
    folders = [run, *stage_folders(run)]
    try:
        uses = [use for folder in folders for use in uses_in(folder)]
    except ValueError as error:
        raise BadInput(f"The records of this run cannot be read: {error}") from error
    chosen = best_of(uses, least_uses)[:top]
    if not chosen:
        raise BadInput.of(
            "There is no workflow to export.",
            f"--run {run}",
            f"a structure with {least_uses} or more rewarded rollouts of a valid workflow",
            "none in its rollouts and evaluations",
            "train longer, or ask for fewer: --least-uses 1",
        )
    # The benchmark and the user's own operators are those of the last stage of a chain.
    saved = [folder / RESOLVED for folder in folders if (folder / RESOLVED).is_file()]
    file = config or (saved[-1] if saved else None)
    benchmark: str | None = None
    operators: dict[str, type[Operator]] = {}
    if file is not None:
        settings = load_config(file)
        benchmark = settings.writer.benchmark
        operators = load_operators(settings.operators, settings.positions.base)
    place = out.expanduser().resolve()
    if place.name.startswith("workflows") and place.parent.name.isidentifier():
        dataset = dataset or place.parent.name
    dataset = dataset or AFLOW_NAMES.get(benchmark or "", benchmark)
    paths: list[Path] = []
    notes: list[str] = []
    results, index = [], []
    for text, best in chosen:
        number, kind = len(paths) + 1, best["problem_type"]
        name = f"round_{number}"
        graph = Graph(name, {GRAPH_FILE: text.code}, operators=operators, instructions=text.prompts)
        of_kind = dataset or DATASETS.get(kind, kind)
        try:
            round_ = save_round(graph, out / name, dataset=of_kind, round_number=number)
        except BadInput as error:
            notes.append(f"left out: {best['structure']} ({kind}): {error}")
            continue
        if round_.only_here:
            names = ", ".join(round_.only_here)
            notes.append(f"{name}: AFlow has its own prompts for {names} and will not use these")
        notes += [f"{name}: {note}" for note in round_.notes]
        paths.append(round_.folder)
        usd = best["usd"]
        results.append(
            {
                "round": number,
                "score": best["score"],
                "avg_cost": usd,
                "total_cost": None if usd is None else usd * best["uses"],
                "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
        )
        index.append({"round": number, **best})
    write_json(out / RESULTS, results)
    write_json(out / INDEX, {"run": run.resolve().name, "workflows": index})
    return Written((*paths, out / RESULTS, out / INDEX), tuple(notes))


def uses_in(run_dir: Path) -> Iterator[Use]:
    """Every rewarded rollout of a valid workflow in a run folder, including evaluations of the run
    and of `aflow-tune eval`. Raises ValueError if records are damaged."""
    for rollout in read_rollouts(run_dir):
        task = (f"step {rollout.step}", rollout.task)
        yield from _use(rollout.kept, rollout.step, task, rollout.reward)
    columns = [*run_dir.glob("eval/columns/*"), *run_dir.glob("columns/*")]
    for folder in [run_dir, *sorted(columns)]:
        for name, steps in load_evaluations(folder).items():
            for step, evaluation in steps.items():
                for record in evaluation.records:
                    yield from _use(record.kept, step, (name, record.item), record.reward)


def best_of(uses: Iterable[Use], least_uses: int) -> list[tuple[Use, Best]]:
    """The best text of each structure and type of problem, best structure first. Left out are
    structures with fewer uses, and those that never answered as written."""
    groups: dict[tuple[str, str], list[Use]] = defaultdict(list)
    for use in uses:
        groups[use.rollout.structure or "", use.rollout.problem_type].append(use)
    found = []
    for (structure, kind), of_group in groups.items():
        texts: dict[tuple[Any, ...], list[Use]] = defaultdict(list)
        for use in of_group:
            texts[use.code, tuple(sorted(use.prompts.items()))].append(use)
        sound = [text for text in texts.values() if any(use.rollout.clean for use in text)]
        if not (structure and sound) or len(of_group) < least_uses:
            continue
        chosen = max(sound, key=lambda text: (_reward(text), len(text), -len(text[0].code)))
        every = [use.rollout for use in of_group]
        scores = [rollout.score for rollout in every if rollout.score is not None]
        best = {
            "structure": structure,
            "problem_type": kind,
            "operators": dict(chosen[0].rollout.operators),
            "uses": len(of_group),
            "reward": _reward(of_group),
            "score": mean(scores) if scores else None,
            "clean": mean([float(rollout.clean) for rollout in every]),
            "usd": _mean_if_known([rollout.usd for rollout in every]),
            "tokens": _mean_if_known([rollout.tokens for rollout in every]),
        }
        found.append((chosen[0], best))
    order = ("problem_type", "structure")
    return sorted(found, key=lambda x: (-x[1]["reward"], -x[1]["uses"], *(x[1][k] for k in order)))


def _use(
    kept: Mapping[str, Any], step: int, task: tuple[str, int], reward: float | None
) -> Iterator[Use]:
    rollout = read_rollout(kept, step, task, reward)
    if rollout is None or not rollout.valid or rollout.reward is None:
        return
    raw = kept[KEPT]  # the texts in `rollout` are shortened for display
    code, prompts = raw.get("code"), raw.get("prompts") or {}
    if not isinstance(code, str) or not isinstance(prompts, Mapping):
        return
    if all(isinstance(name, str) and isinstance(text, str) for name, text in prompts.items()):
        yield Use(code, dict(prompts), rollout)


def _reward(uses: Sequence[Use]) -> float:
    return mean([use.rollout.reward for use in uses if use.rollout.reward is not None])


def _mean_if_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _nothing(run: Path, expected: str, found: str) -> BadInput:
    found = found if run.is_dir() else "no such folder"
    cure = "name the folder that training printed as its run folder"
    return BadInput.of("There is nothing to export.", f"--run {run}", expected, found, cure)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        title, cure = "Nothing is written over.", "name another folder: --out NEW"
        raise BadInput.of(title, str(path), "a new name", "it exists", cure)
