"""What a run has to give to other tools: its adapter, the merged model, the best workflows.

`adapter` and `merged` come from any checkpoint; the base model is the one that the run's
configuration names. `workflows` come from the records of the run and are written as AFlow keeps
its rounds: `round_1` is the best, `results.json` beside them has AFlow's columns, and
`index.json` says what AFlow has no column for.

Nothing that exists is written over.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.config.load import load_config
from aflow_tune.engines.local.manifest import CheckpointError
from aflow_tune.errors import BadInput, Fault
from aflow_tune.evaluation.trained import (
    RESOLVED,
    Found,
    config_source,
    find_run,
    of_checkpoint,
    stage_folders,
)
from aflow_tune.files import write_json
from aflow_tune.graph import inside
from aflow_tune.graph.graph import Graph
from aflow_tune.graph.save import AFLOW_NAMES, save_round
from aflow_tune.operators import Operator, load_operators
from aflow_tune.report.best import best_step
from aflow_tune.runs.folder import checkpoints
from aflow_tune.using.best import Best, Use, best_of, uses_in

ADAPTER, MERGED, WORKFLOWS = "adapter", "merged", "workflows"
WHAT = (ADAPTER, MERGED, WORKFLOWS)
RESULTS, INDEX = "results.json", "index.json"
DATASETS = {"math": "MATH", "code": "HumanEval", "qa": "HotpotQA"}
"""What AFlow calls a data set of each type, where neither the folder nor the run says it."""


@dataclass(frozen=True)
class Written:
    """What an export wrote, and what is to be known about it."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def find_checkpoint(run: Path, which: str) -> Found:
    """The checkpoint that `which` means: last, best (by the run's own evaluations), or a step.

    Raises:
        BadInput: there is none.
    """
    run_dir = find_run(run.expanduser().resolve())
    if run_dir is None:
        found = "no checkpoint" if run.is_dir() else "no such folder"
        cure = "name the folder that training printed as its run folder"
        fault = Fault(f"--run {run}", "a run folder with checkpoints", found, cure)
        raise BadInput("There is nothing to export.", [fault])
    saved = {checkpoint.step: checkpoint for checkpoint in checkpoints(run_dir)}
    step: int | None = max(saved)
    found = "no such checkpoint"
    if which == "best":
        step = best_step(run_dir, list(saved))
        found = "no checkpoint of the run was evaluated"
    elif which != "last":
        step = int(which) if which.isdigit() and int(which) in saved else None
    if step is None:
        expected = f"last, best, or a step: {', '.join(map(str, saved))}"
        fault = Fault(f"--checkpoint {which}", expected, found, "--checkpoint last")
        raise BadInput("There is no such checkpoint.", [fault])
    return of_checkpoint(run_dir, saved[step])


def export_checkpoint(
    run: Path, which: str, what: str, out: Path, *, config: Path | None = None
) -> Written:
    """`export_weights` of the checkpoint that `which` means, of a run that may be going on.

    Where the run takes the checkpoint away while it is read, `which` is looked up again.

    Raises:
        BadInput, CheckpointError: as `find_checkpoint` and `export_weights`.
    """
    while True:
        found = find_checkpoint(run, which)
        try:
            return export_weights(found, what, out, config=config)
        except CheckpointError:
            if found.weights.is_dir():
                raise


def export_weights(found: Found, what: str, out: Path, *, config: Path | None = None) -> Written:
    """Write the adapter or the merged model of a checkpoint into the new folder `out`.

    Raises:
        BadInput: `out` exists, full weights have no adapter, or the base model cannot be found.
        CheckpointError: the checkpoint is damaged.
    """
    from aflow_tune.engines.local.export import write_adapter, write_merged
    from aflow_tune.engines.local.models import resolve_model
    from aflow_tune.engines.local.saved_weights import read_weights

    _refuse_existing(out)
    name = load_config(config_source(found, config)).model.model_path
    weights, spec = read_weights(found.weights)
    if what == ADAPTER and spec is None:
        expected = "a run that trained an adapter (model.lora_configs)"
        cure = "--what merged, which writes the whole model"
        fault = Fault(str(found.weights), expected, "full weights", cure)
        raise BadInput("This run has no adapter.", [fault])
    base = resolve_model(name)
    if what == ADAPTER and spec is not None:
        write_adapter(base, weights, spec, out)
    else:
        write_merged(base, weights, spec, out)
    return Written((out,), (f"from {found.name}, over the base model {name}",))


def export_workflows(
    run: Path,
    out: Path,
    *,
    top: int,
    least_uses: int,
    dataset: str | None = None,
    config: Path | None = None,
) -> Written:
    """Write the best workflows of a run, or of all stages of a chain, as rounds of AFlow.

    Args:
        out: gets `round_1` ... and the two lists; AFlow looks for it at
            `workspace/DATASET/workflows`.
        dataset: None for the one of that path, of the run's `writer.benchmark`, or a usual one
            for the type of problem.
        config: in place of the run's own, for its benchmark and the user's operators.

    Raises:
        BadInput: `out` holds rounds or lists already, or the run has no such workflow.
    """
    for name in (RESULTS, INDEX):
        _refuse_existing(out / name)
    if out.is_dir():
        for there in sorted(out.glob("round_*")):
            _refuse_existing(there)
    chosen = best_of(_all_uses(run), least_uses=least_uses, top=top)
    if not chosen:
        expected = f"a structure with {least_uses} or more rewarded runs of a valid workflow"
        cure = "train longer, or ask for fewer: --least-uses 1"
        fault = Fault(f"--run {run}", expected, "none in its rollouts and evaluations", cure)
        raise BadInput("There is no workflow to export.", [fault])
    paths: list[Path] = []
    notes: list[str] = []
    results, index = [], []
    benchmark, operators = _configured(run, config)
    named = dataset or _dataset_of_path(out) or AFLOW_NAMES.get(benchmark or "", benchmark)
    for best in chosen:
        number = len(paths) + 1
        graph = Graph(
            f"round_{number}",
            {inside.GRAPH_FILE: best.code},
            operators=operators,
            instructions=best.prompts,
        )
        try:
            saved = save_round(
                graph,
                out / f"round_{number}",
                dataset=named or DATASETS.get(best.problem_type, best.problem_type),
                round_number=number,
            )
        except BadInput as error:
            notes.append(f"left out: {best.structure} ({best.problem_type}): {error}")
            continue
        if saved.only_here:
            names = ", ".join(saved.only_here)
            notes.append(
                f"round_{number}: AFlow will not use the prompts of {names}: operators that it "
                "gives prompts from its own template, or that the code never calls by name"
            )
        notes += [f"round_{number}: {note}" for note in saved.notes]
        paths.append(saved.folder)
        results.append(_result(best, number))
        index.append({"round": number, **best.to_json()})
    write_json(out / RESULTS, results)
    write_json(out / INDEX, {"run": run.resolve().name, "workflows": index})
    return Written((*paths, out / RESULTS, out / INDEX), tuple(notes))


def _result(best: Best, number: int) -> dict[str, Any]:
    """A line of AFlow's results.json. An unknown cost is null, as no number would be true."""
    total = None if best.usd is None else best.usd * best.uses
    return {
        "round": number,
        "score": best.score,
        "avg_cost": best.usd,
        "total_cost": total,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _all_uses(run: Path) -> Sequence[Use]:
    """The uses in a run folder and in those of its stages."""
    if not run.is_dir():
        cure = "name the folder that training printed as its run folder"
        fault = Fault(f"--run {run}", "a run folder", "no such folder", cure)
        raise BadInput("There is nothing to export.", [fault])
    folders = [run, *stage_folders(run)]
    try:
        return [use for folder in folders for use in uses_in(folder)]
    except ValueError as error:
        raise BadInput(f"The records of this run cannot be read: {error}") from error


def _dataset_of_path(out: Path) -> str | None:
    place = out.expanduser().resolve()
    fits = place.name.startswith("workflows") and re.fullmatch(r"[A-Za-z_]\w*", place.parent.name)
    return place.parent.name if fits else None


def _configured(run: Path, named: Path | None) -> tuple[str | None, dict[str, type[Operator]]]:
    """The benchmark and the user's own operators that the configuration of the run, or of the last
    stage of a chain, names; or the one that is named."""
    files = [folder / RESOLVED for folder in [run, *stage_folders(run)]]
    saved = [file for file in files if file.is_file()] if named is None else [named]
    if not saved:
        return None, {}
    config = load_config(saved[-1])
    return config.writer.benchmark, load_operators(config.operators, config.positions.base)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        fault = Fault(str(path), "a new name", "it exists", "name another folder: --out NEW")
        raise BadInput("Nothing is written over.", [fault])
