"""The configuration class: Trinity's `Config` plus `AflowSections`. Its fields are settings;
everything else that is known about a configuration is in its `prepared`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trinity.common.config import Config, ModelConfig, StageConfig

from aflow_tune.config import PROCESSORS, on_processors
from aflow_tune.data.rows import Table
from aflow_tune.errors import Fault
from aflow_tune.find_ray import FoundRay
from aflow_tune.models.redaction import masked
from aflow_tune.sections import AflowSections, CoresetSection, KeyPositions, ReplaySection


@dataclass(frozen=True)
class Change:
    """One setting that differs from what the user wrote. Secrets are masked."""

    key: str
    before: Any
    after: Any
    why: str


@dataclass
class Prepared:
    """What was found out about a configuration; none of it is a setting. It is pickled with the
    configuration, except what was read on this machine (`tables`, `ray`)."""

    positions: KeyPositions = field(default_factory=KeyPositions)
    warnings: list[str] = field(default_factory=list)
    """Doubts that do not refuse the configuration."""
    engine: tuple[str, str] | None = None
    """The engine and the reason for it, once `prepare` has fixed it."""
    changes: list[Change] | None = None
    """Every setting that `prepare` changed; None before."""
    command: dict[str, Any] | None = None
    """The command that restarts this run (`RunState.command`); None for a call of `tune()`."""
    account_folder: str | None = None
    """The folder of the chain of stages whose account this run uses; None: its own."""
    awaited: str | None = None
    """A file that an earlier stage has yet to write."""
    tables: dict[tuple[str, str, str | None, bool], Table | None] = field(default_factory=dict)
    """Rows of task sets read so far, by path, split and subset."""
    ray: FoundRay | None = None
    """The running Ray to join; None: the run starts its own."""
    ray_looked_for: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tables": {}, "ray": None, "ray_looked_for": False}


@dataclass
class StageSection(StageConfig):
    """One item of `stages`: Trinity's fields, `model`, and sections of ours."""

    model: ModelConfig | None = None
    """If it sets `model_path`, the stage starts from there instead of the stage before."""
    coreset: CoresetSection | None = None
    replay: ReplaySection | None = None


@dataclass
class AflowConfig(Config, AflowSections):
    """Trinity's `Config` with our sections at the top level."""

    stages: list[StageSection] = field(default_factory=list)
    """Several runs, one after the other; see `stages.py`."""

    def __post_init__(self) -> None:
        self.prepared: Prepared = Prepared()

    @property
    def positions(self) -> KeyPositions:
        """Where each key was written."""
        return self.prepared.positions

    @property
    def warnings(self) -> list[str]:
        """Doubts that do not refuse the configuration."""
        return self.prepared.warnings

    @property
    def command(self) -> dict[str, Any] | None:
        """The command that restarts this run; None for a call of `tune()`."""
        return self.prepared.command

    @property
    def account_folder(self) -> str:
        """The folder with the account of spend: the run's, or that of its chain of stages."""
        return str(self.prepared.account_folder or self.checkpoint_job_dir)

    def fault(self, key: str, expected: str, found: str, fix: str) -> Fault:
        """A fault of the setting `key`, at the place where it was written."""
        return Fault(self.positions.where(key), expected, found, fix)

    def wrong(self, key: str, expected: str, fix: str) -> Fault:
        """As `fault`, with the value of `key` as what was found."""
        value = value_of(self, key)
        return self.fault(key, expected, repr(getattr(value, "value", value)), fix)

    def note_command(
        self, path: str | Path, overrides: Sequence[str], inline: bool | None = None
    ) -> None:
        """Record the command that starts the run; of overrides with secrets only the keys."""
        pairs = [(item, *item.partition("=")[::2]) for item in overrides]
        secret = [key for _, key, value in pairs if masked(key, value) != value]
        self.prepared.command = {
            "config": os.path.abspath(path),
            "overrides": [item for item, key, _ in pairs if key not in secret],
            "secret": secret,
            "inline": inline,
            "cwd": os.getcwd(),
            "renamed": not self.continue_from_checkpoint,
        }

    def get_envs(self) -> dict[str, str]:
        """Trinity's environment for workers, without API keys: Ray logs and shows it."""
        external = self.model.external_model
        held = {external.api_key_env, external.base_url_env} if external.enable else set()
        envs = {name: text for name, text in super().get_envs().items() if name not in held}
        return {**PROCESSORS, **envs} if self.engine == "trinity" and on_processors() else envs

    def flatten(self) -> dict[str, Any]:
        """Every setting by its dotted key path; enum members by value."""
        found = self.prepared
        del self.prepared
        try:
            return dict(super().flatten())
        finally:
            self.prepared = found


def value_of(config: Any, key: str) -> Any:
    """The value at a dotted key path; None below a missing section or for a mapping's key."""
    for part in key.split("."):
        if isinstance(config, Mapping):
            config = config.get(part)
        else:
            config = config[int(part)] if isinstance(config, list) else getattr(config, part, None)
    return config


def words(text: str) -> tuple[str, ...]:
    """The words of a text: a table of names or key patterns."""
    return tuple(text.split())


def logical_gpus(config: Config) -> int:
    """The logical GPUs that Ray counts when Trinity's engines run on CPUs: one for each engine and
    tensor-parallel rank, and one for the trainer; a single one for `colocate` and `train`."""
    models = (config.explorer.rollout_model, *config.explorer.auxiliary_models)
    engines = sum(model.engine_num * model.tensor_parallel_size for model in models)
    return 1 if config.mode in ("colocate", "train") else engines + (config.mode == "both")
