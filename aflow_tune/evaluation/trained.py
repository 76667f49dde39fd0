"""From a folder to what can be asked: a configuration that is ready, and the weights to load.

A folder is a run (its newest checkpoint), the folder of a chain of stages (its last stage that
trained), a checkpoint `global_step_N`, or an exported adapter or model. The configuration is the
`resolved.yaml` of the run that the folder belongs to, or a file that is named. Nothing of the
task sets is read: whoever asks brings the problem.

Loading the weights is left to `evaluating.LocalModels`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.common.config import GenerationConfig

from aflow_tune.config.load import load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.stages import chain_folder, parts_of
from aflow_tune.engines.local.saved_weights import Kind, kind_of
from aflow_tune.errors import BadInput, Fault
from aflow_tune.runs.folder import STEP_PREFIX, checkpoints, read_stages
from aflow_tune.types import Checkpoint

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

RESOLVED = "resolved.yaml"
EXPORT = "export"
_PLACES = ("checkpoint_root_dir=", "project=", "group=", "name=", "stages")
_SAMPLED_BY = ("temperature", "top_p", "top_k")


@dataclass(frozen=True)
class Found:
    """Weights on disk, and where they come from. `run_dir` is None for a folder of no run."""

    weights: Path
    run_dir: Path | None
    step: int | None = None
    """Of a checkpoint; None for other kinds."""

    @property
    def name(self) -> str:
        """What to call it: the run, and which of its weights."""
        if self.run_dir is None:
            return self.weights.name
        return f"{self.run_dir.name}/{self.weights.relative_to(self.run_dir)}"


def find_weights(folder: Path) -> Found:
    """The weights that a folder means; of a run those of its newest checkpoint.

    Raises:
        BadInput: there are none.
    """
    path = folder.expanduser().resolve()
    if kind_of(path) is not None:
        return Found(path, _run_of(path), _step_of(path))
    run_dir = find_run(path)
    saved = checkpoints(run_dir) if run_dir is not None else []
    if run_dir is None or not saved:
        found = "a folder without weights" if path.is_dir() else "no such folder"
        expected = f"a run folder with checkpoints, a {STEP_PREFIX}N, an adapter or a model"
        cure = "name the folder that training printed as its run folder"
        raise BadInput(
            "There is nothing trained here.", [Fault(str(folder), expected, found, cure)]
        )
    return of_checkpoint(run_dir, saved[-1])


def of_checkpoint(run_dir: Path, checkpoint: Checkpoint) -> Found:
    """A checkpoint of a run."""
    return Found(checkpoint.path, run_dir, checkpoint.step)


def find_run(folder: Path) -> Path | None:
    """The run folder with checkpoints that `folder` is, or, for a chain of stages, holds.

    Of a chain it is the last stage that trained. None where no run has checkpoints.
    """
    if checkpoints(folder):
        return folder
    trained = [inner for inner in stage_folders(folder) if checkpoints(inner)]
    return trained[-1] if trained else None


def stage_folders(folder: Path) -> list[Path]:
    """The run folders of a chain's stages, in their order; empty for any other folder."""
    return [folder / stage["name"] for stage in read_stages(folder)]


def _run_of(weights: Path) -> Path | None:
    """The run folder that a folder with weights lies in."""
    candidates = [weights.parent]
    if weights.parent.name == EXPORT:
        candidates = [weights.parent.parent]
    return next((path for path in candidates if (path / RESOLVED).is_file()), None)


def _step_of(weights: Path) -> int | None:
    match = re.fullmatch(rf"{STEP_PREFIX}(\d+)", weights.name)
    return int(match[1]) if match else None


def config_source(found: Found | None, named: Path | None) -> Path:
    """The configuration to go by: the one that was named, or else that of the run.

    Raises:
        BadInput: there is neither.
    """
    if named is not None:
        return named
    if found is not None and found.run_dir is not None:
        file = found.run_dir / RESOLVED
        if file.is_file():
            return file
    where = "--config" if found is None else str(found.weights)
    expected = f"a configuration: {RESOLVED} of the run that the weights come from"
    found_text = "none was named" if found is None else "weights that lie in no run folder"
    raise BadInput(
        "It is not known how to ask this model.",
        [Fault(where, expected, found_text, "name it: --config my.yaml")],
    )


def load_trained(path: Path, overrides: Sequence[str] = ()) -> AflowConfig:
    """The configuration in a YAML; of a chain of stages that of the last one that trained.

    A stage is taken as it was run, since its model is what the stages before it left; before any
    has trained, as it is written. `overrides` that say where the chain lies are not the stage's.

    Raises:
        BadInput: as `load_config`.
    """
    config = load_config(path, overrides)
    if not config.stages:
        return config
    run_dir = find_run(chain_folder(config))
    if run_dir is not None:
        own = [item for item in overrides if not item.startswith(_PLACES)]
        return load_config(run_dir / RESOLVED, own)
    parts = [part for _, part in parts_of(config)[0] if part.mode in ("both", "train")]
    return parts[-1] if parts else config


def make_ready(
    config: AflowConfig, *, weights: Path | None = None, local_model: bool = True
) -> dict[str, float]:
    """Fill in, in place, what it takes to ask the models of a configuration as it was loaded.

    Args:
        weights: those that will be loaded; a whole model needs no other.
        local_model: False where the policy is behind an endpoint.

    Returns:
        How the policy is sampled: as the first held-out task set says, else as `model` does.

    Raises:
        BadInput: with every fault of the models.
    """
    sets = config.buffer.explorer_input.eval_tasksets
    held_out = sets[0].rollout_args if sets else None
    if weights is not None and kind_of(weights) is Kind.MODEL:
        config.model.model_path = str(weights)
        config.explorer.rollout_model.model_path = str(weights)
    prepare(config, Purpose.ASK, local_model=local_model)
    return _sampling(config, held_out)


def _sampling(config: AflowConfig, given: GenerationConfig | None) -> dict[str, float]:
    settings: dict[str, float] = {}
    for name in _SAMPLED_BY:
        own = getattr(given, name, None)
        value = getattr(config.model, name) if own is None else own
        if value is not None:
            settings[name] = value
    most = getattr(given, "max_tokens", None) or config.model.max_response_tokens
    if most is not None:
        settings["max_tokens"] = most
    return settings
