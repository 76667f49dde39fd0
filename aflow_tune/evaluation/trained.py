"""From a folder to a usable model: its weights, and a prepared configuration.

A folder is a run (its newest checkpoint), the folder of a chain of stages (its last stage that
trained), a checkpoint `global_step_N`, or an exported adapter or model. The configuration is the
`resolved.yaml` of the run that the folder belongs to, or a named file. Task sets are not read: the
caller brings the problem. `evaluating.LocalModels` loads the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aflow_tune.config.load import load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.stages import chain_folder, parts_of
from aflow_tune.engines.local.checkpoint import Kind, kind_of
from aflow_tune.errors import BadInput
from aflow_tune.runs.folder import STEP_PREFIX, checkpoints, read_stages
from aflow_tune.types import Checkpoint

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

RESOLVED = "resolved.yaml"
_PLACES = ("checkpoint_root_dir=", "project=", "group=", "name=", "stages")


@dataclass(frozen=True)
class Found:
    """Weights on disk, and their run. `run_dir` is None if they are in no run folder."""

    weights: Path
    run_dir: Path | None

    @property
    def name(self) -> str:
        """For display: the run, and the path of the weights in it."""
        if self.run_dir is None:
            return self.weights.name
        return f"{self.run_dir.name}/{self.weights.relative_to(self.run_dir)}"


def find_weights(folder: Path) -> Found:
    """The weights in a folder, of a run the newest. Raises `BadInput` if there are none."""
    path = folder.expanduser().resolve()
    if kind_of(path) is not None:
        above = path.parent.parent if path.parent.name == "export" else path.parent
        return Found(path, above if (above / RESOLVED).is_file() else None)
    run_dir, saved = trained_run(path)
    if run_dir is None:
        raise BadInput.of(
            "There is nothing trained here.",
            str(folder),
            f"a run folder with checkpoints, a {STEP_PREFIX}N, an adapter or a model",
            "a folder without weights" if path.is_dir() else "no such folder",
            "name the folder that training printed as its run folder",
        )
    return Found(saved[-1].path, run_dir)


def trained_run(folder: Path) -> tuple[Path | None, list[Checkpoint]]:
    """The run folder and its checkpoints: `folder` itself, or the last stage of a chain that has
    any; (None, []) if there are none."""
    for run_dir in [folder, *reversed(stage_folders(folder))]:
        saved = checkpoints(run_dir)
        if saved:
            return run_dir, saved
    return None, []


def stage_folders(folder: Path) -> list[Path]:
    """The run folders of a chain's stages, in order; empty for any other folder."""
    return [folder / stage["name"] for stage in read_stages(folder)]


def config_source(found: Found | None, named: Path | None) -> Path:
    """The named configuration, else that of the run. Raises `BadInput` if there is neither."""
    if named is not None:
        return named
    if found is not None and found.run_dir is not None and (found.run_dir / RESOLVED).is_file():
        return found.run_dir / RESOLVED
    raise BadInput.of(
        "It is not known how to ask this model.",
        "--config" if found is None else str(found.weights),
        f"a configuration: {RESOLVED} of the run that the weights come from",
        "none was named" if found is None else "weights that lie in no run folder",
        "name it: --config my.yaml",
    )


def load_trained(path: Path, overrides: Sequence[str] = ()) -> AflowConfig:
    """The configuration in a YAML file. Of a chain of stages: that of the last stage that has
    trained, as it was run; if none has, that of the last one that will, as written."""
    config = load_config(path, overrides)
    if not config.stages:
        return config
    run_dir, _ = trained_run(chain_folder(config))
    if run_dir is not None:
        own = [item for item in overrides if not item.startswith(_PLACES)]
        return load_config(run_dir / RESOLVED, own)
    parts = [part for _, part in parts_of(config)[0] if part.mode in ("both", "train")]
    return parts[-1] if parts else config


def make_ready(
    config: AflowConfig, *, weights: Path | None = None, local_model: bool = True
) -> dict[str, float]:
    """Prepare a loaded configuration, in place, for calling its models; returns the sampling
    settings of the policy: those of the first held-out task set, else of `model`.

    `weights`: those that will be loaded; a whole model replaces the configured one. `local_model`:
    False if the policy is behind an endpoint. Raises `BadInput` with every fault of the models.
    """
    inputs = config.buffer.explorer_input
    held_out = inputs.eval_tasksets[0].rollout_args if inputs.eval_tasksets else None
    if weights is not None and kind_of(weights) is Kind.MODEL:
        config.model.model_path = config.explorer.rollout_model.model_path = str(weights)
    prepare(config, Purpose.ASK, local_model=local_model)
    model = config.model
    usual = {name: getattr(model, name) for name in ("temperature", "top_p", "top_k")}
    usual["max_tokens"] = model.max_response_tokens
    own = {name: getattr(held_out, name, None) for name in usual}
    sampling = {name: usual[name] if own[name] is None else own[name] for name in usual}
    return {name: value for name, value in sampling.items() if value is not None}
