"""`aflow-tune estimate`: from a configuration to what its steps will need. Starts nothing.

Every stage of a chain is a run of its own and is estimated as such. Settings are prepared as for
a run, without asking a cluster; `engine: trinity` can be estimated on a machine without a GPU.
The arithmetic is `estimate/`'s; lengths are `estimate_lengths.py`'s; the two engines are read by
`estimate_local.py` and `estimate_cluster.py`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.stages import parts_of
from aflow_tune.config.validate import functions_of
from aflow_tune.engines.local.models import can_give_back
from aflow_tune.engines.local.packing import Sample
from aflow_tune.errors import BadInput, Fault
from aflow_tune.estimate.estimate_changes import changes_to_fit
from aflow_tune.estimate.estimate_cluster import (
    Cluster,
    cluster_of,
    engines_of,
    parameters_text,
    trainer_of,
)
from aflow_tune.estimate.estimate_lengths import (
    Earlier,
    Given,
    lengths_of,
    speed_of,
)
from aflow_tune.estimate.estimate_local import LocalModels, local_run
from aflow_tune.estimate.estimate_models import NamedModel, named_model
from aflow_tune.estimate.estimate_rows import rows_of_a_step
from aflow_tune.estimate.local import leftovers, local_needs
from aflow_tune.estimate.rollout import engine_need
from aflow_tune.estimate.step import RoleUse, step_dollars, step_seconds, step_tokens
from aflow_tune.estimate.training import trainer_needs
from aflow_tune.estimate.types import GIB, Estimate, Known, Need, Number, Part
from aflow_tune.models.prices import price_of
from aflow_tune.models.types import Usage
from aflow_tune.sections import ModelSettings

Function = Callable[..., Any]
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class EstimateOptions:
    """What the command line adds to the configuration. Memory in bytes."""

    given: Given = field(default_factory=Given)
    gpu_memory: float | None = None
    gpus: int | None = None
    memory: float | None = None
    usd_per_gpu_hour: float | None = None
    rehearse: bool = True
    measure: bool = False
    changes: bool = True


def estimate(
    path: str | Path, overrides: Sequence[str] = (), options: EstimateOptions | None = None
) -> list[Estimate]:
    """An estimate of the run, or of each stage.

    Raises:
        BadInput: the configuration cannot train, or something of it cannot be estimated; every
            fault is listed.
    """
    options = options or EstimateOptions()
    config = load_config(path, overrides)
    parts, faults = parts_of(config)
    if faults:
        raise BadInput(f"The stages of {path} do not fit together.", faults)
    workflow, judge = functions_of(config)
    measured = _measured(path, overrides, options, parts)
    found: list[Estimate] = []
    for number, (name, part) in enumerate(parts):
        notes = _settle(part, options, workflow)
        kept = _leftovers(part, found)
        stage = _Stage(name, part, workflow, judge, options, measured.get(number), kept)
        stage.notes = [*notes, *stage.notes]
        one = stage.estimate()
        if options.changes and one.fits is False:
            whole = functools.partial(_whole, path, overrides, options, number, kept)
            one.changes = changes_to_fit(stage.config, one, stage.again, whole)
        found.append(one)
    return found


def _leftovers(config: AflowConfig, before: Sequence[Estimate]) -> float:
    """Bytes that malloc still holds of the stages that ran in the same process before.

    Behind Ray every stage has processes of its own.
    """
    if config.engine != "local" or not config.inline:
        return 0.0
    return leftovers([stage.needs for stage in before], can_give_back())


def _whole(
    path: str | Path,
    overrides: Sequence[str],
    options: EstimateOptions,
    number: int,
    kept: float,
    items: Sequence[str],
) -> Estimate:
    """The estimate of stage `number` with more overrides, from the file on."""
    config = load_config(path, [*overrides, *items])
    name, part = parts_of(config)[0][number]
    workflow, judge = functions_of(config)
    _settle(part, options, workflow)
    return _Stage(name, part, workflow, judge, options, None, kept).estimate()


def _measured(
    path: str | Path,
    overrides: Sequence[str],
    options: EstimateOptions,
    parts: Sequence[tuple[str, AflowConfig]],
) -> dict[int, Earlier]:
    if not options.measure:
        return {}
    from aflow_tune.estimate.calibration import calibrate

    return calibrate(path, overrides, parts)


def _settle(config: AflowConfig, options: EstimateOptions, workflow: Function | None) -> list[str]:
    """Prepare a part, away from any cluster; what is to be said of it."""
    notes: list[str] = []
    if config.model.tinker.enable:
        cure = "model.tinker.enable=false estimates the same on GPUs of your own"
        found = "Tinker's service, which samples and trains elsewhere"
        place = config.positions.where("model.tinker.enable")
        raise BadInput(
            "There is no memory of yours to estimate.",
            [Fault(place, "engines of your own", found, cure)],
        )
    if config.engine == "trinity":
        # Whether it can run on this machine is the doctor's question, not this one.
        config.prepared.engine = ("trinity", "as configured")
        cluster = cluster_of(config, options.gpus)
        if cluster is not None:
            whole = cluster.gpus % cluster.per_node == 0
            config.cluster.node_num = cluster.gpus // cluster.per_node if whole else 1
            config.cluster.gpu_per_node = cluster.per_node if whole else cluster.gpus
            if options.gpus == 1 and config.mode == "both":
                config.mode = "colocate"
                notes.append(
                    "mode: both needs a GPU for the sampler and one for the trainer: on --gpus 1 "
                    "this is what mode: colocate would need"
                )
    prepare(config, Purpose.ESTIMATE, workflow=workflow)
    return notes


class _Stage:
    """One prepared run: what is known of it, and its estimate."""

    def __init__(
        self,
        name: str,
        config: AflowConfig,
        workflow: Function | None,
        judge: Function | None,
        options: EstimateOptions,
        measured: Earlier | None,
        kept: float,
    ) -> None:
        self.name = name
        self.config = config
        self.options = options
        self.kept = kept
        where = config.positions.where
        self.policy = named_model(config.model.model_path, where("model.model_path"))
        self.auxiliary = tuple(
            named_model(
                str(model.model_path), where(f"explorer.auxiliary_models.{number}.model_path")
            )
            for number, model in enumerate(config.explorer.auxiliary_models)
        )
        self.notes: list[str] = []
        self.earlier = measured or Earlier.of(Path(config.checkpoint_job_dir))
        self.rehearsal = self._rehearsal(workflow, judge)
        self.lengths = lengths_of(config, workflow, options.given, self.earlier, self.rehearsal)
        self.rows = self._rows()

    def _rows(self) -> list[list[Sample]] | None:
        """What a step of `mode: train` is given; None elsewhere, and where it is not known."""
        given, config = self.options.given, self.config
        said = given.prompt_tokens is not None or given.response_tokens is not None
        if config.mode != "train" or config.engine != "local" or said:
            return None
        found = rows_of_a_step(config, self.policy.folder)
        if isinstance(found, str):
            self.notes.append(f"the rows were not read: {found}; each may be as long as the limits")
            return None
        return found

    def _rehearsal(self, workflow: Function | None, judge: Function | None) -> Any:
        given, config = self.options.given, self.config
        said = (given.calls, given.prompt_tokens)
        if not self.options.rehearse or any(item is not None for item in said):
            return None
        from aflow_tune.estimate.rehearsal import can_rehearse, rehearse

        reason = can_rehearse(config)
        folders = {model.name: model.folder for model in (self.policy, *self.auxiliary)}
        if reason is None and None in folders.values():
            reason = (
                "a model's tokenizer is not on this machine; until it is, prompts count as long as "
                "their limit (--prompt-tokens N: a nearer estimate)"
            )
        if reason is None and workflow is not None:
            known = {name: folder for name, folder in folders.items() if folder is not None}
            found = rehearse(config, workflow, judge, known)
            if not isinstance(found, str):
                return found
            reason = found
        if config.mode in ("both", "colocate"):
            self.notes.append(f"the workflow was not rehearsed: {reason}")
        return None

    def estimate(self) -> Estimate:
        """Memory, tokens, time and money."""
        config, options = self.config, self.options
        needs, gpus = self._needs(config)
        model = f"{self.policy.name}, {parameters_text(self.policy.shape)}"
        found = Estimate(self.name, config.engine, model, needs, notes=list(self.notes))
        if self.earlier.peak is not None:
            gib = self.earlier.peak / GIB
            found.notes.append(f"the two measured steps took {gib:.2f} GiB, without evaluations")
        if config.mode in ("both", "colocate"):
            tasks, repeats = config.buffer.batch_size, config.algorithm.repeat_times
            tokens = step_tokens(tasks, repeats, self.lengths)
            seconds = step_seconds(tokens, speed_of(options.given, self.earlier))
            roles = list(self._roles(config, tokens["runs"]))
            found.quantities = {
                "calls of a run": self.lengths.calls,
                "tokens of a prompt": self.lengths.prompt,
                "tokens of a response": self.lengths.response,
                **tokens,
                **seconds,
                **step_dollars(seconds["seconds"], gpus, options.usd_per_gpu_hour, roles),
            }
        return found

    def again(self, changed: Callable[[AflowConfig], None]) -> Estimate:
        """The memory with some settings of the prepared configuration changed."""
        config = copy.deepcopy(self.config)
        changed(config)
        needs, _ = self._needs(config)
        return Estimate(self.name, config.engine, "", needs)

    def _needs(self, config: AflowConfig) -> tuple[list[Need], int]:
        """The needs, and the GPUs that are paid for."""
        if config.engine == "local":
            return self._local(config)
        return self._cluster(config)

    def _local(self, config: AflowConfig) -> tuple[list[Need], int]:
        options = self.options
        planned = "cuda" if options.gpu_memory and config.local.device in ("auto", "cuda") else None
        models = LocalModels(self.policy, self.auxiliary)
        run = local_run(
            config, models, self.lengths, self.rehearsal, rows=self.rows, device=planned
        )
        gpu = options.gpu_memory
        if gpu is None and run.device == "cuda":
            import torch

            gpu = float(torch.cuda.get_device_properties(0).total_memory)
        here = options.memory if options.memory is not None else memory_here()
        needs = local_needs(run, here, gpu)
        if self.kept:
            part = Part("kept from the stages before", self.kept, "by malloc's arenas")
            needs = [
                replace(need, parts=(*need.parts, part)) if need.place == "memory" else need
                for need in needs
            ]
        return needs, 0 if run.device == "cpu" else 1

    def _cluster(self, config: AflowConfig) -> tuple[list[Need], int]:
        options = self.options
        limit = options.gpu_memory or _gpu_here()
        engines = engines_of(config)
        by_path = {model.name: model for model in (self.policy, *self.auxiliary)}
        rollout_gpus = sum(settings.gpus for _, settings in engines)
        cluster = cluster_of(config, options.gpus)
        if cluster is None:
            cluster = Cluster(rollout_gpus + 1, rollout_gpus + 1)
            note = "one GPU for the trainer: give --gpus, or cluster.node_num and gpu_per_node"
            if note not in self.notes:
                self.notes.append(note)
        trainer = trainer_of(config, self.policy, cluster, rollout_gpus, self.lengths)
        needs = []
        if trainer is not None:
            needs += trainer_needs(self.policy.shape, trainer, limit, options.memory)
        for path, settings in engines:
            needs.append(engine_need(_model(by_path, path, self.policy).shape, settings, limit))
        if config.mode == "colocate":
            needs = _together(needs, limit)
        return needs, cluster.gpus

    def _roles(self, config: AflowConfig, runs: Number) -> list[RoleUse]:
        """What a step asks of each model behind an API, as far as that is known."""
        found = []
        for role, model in config.models.items():
            if role == "policy" or not model.model:
                continue
            found.append(self._role(config, role, model, runs))
        return found

    def _role(self, config: AflowConfig, role: str, model: ModelSettings, runs: Number) -> RoleUse:
        name = model.role or role
        spent = self.earlier.mean(f"rollout/cost/{name}/mean")
        if spent is not None and runs.value is not None:
            total = Number(runs.value, Known.MEASURED)
            return RoleUse(name, total, spent, f"US dollars of a run: {self.earlier.place}")
        price = price_of(model.provider, model.base_url, model.model or "", model.prices)
        if price is None:
            why = f"no price of {model.model}: give models.{role}.prices"
            return RoleUse(name, runs, None, why)
        free = price.cost(Usage(1_000_000, 1_000_000)) == 0
        if free:
            return RoleUse(name, runs, 0.0, "it costs nothing")
        bounded = config.writer.executor == role and model.max_tokens
        if bounded and config.writer.max_usd is not None:
            why = "the limit writer.max_usd of a run"
            return RoleUse(name, Number(runs.value, Known.BOUND), config.writer.max_usd, why)
        million = price.cost(Usage(1_000_000, 0)), price.cost(Usage(0, 1_000_000))
        why = (
            f"calls and lengths are not known before a run; a million tokens cost "
            f"${million[0]:.2f} in, ${million[1]:.2f} out"
        )
        return RoleUse(name, runs, None, why)


def _model(models: dict[str, NamedModel], path: str, default: NamedModel) -> NamedModel:
    return models.get(path, default)


def _together(needs: list[Need], limit: float | None) -> list[Need]:
    """Trinity's colocate mode: engine and trainer share one GPU, so their needs add up."""
    gpu = [need for need in needs if need.place == "GPU"]
    parts = tuple(part for need in gpu for part in need.parts)
    refusal = next((need.refusal for need in gpu if need.refusal), None)
    notes = tuple(note for need in gpu for note in need.notes)
    one = Need(
        "rollout and trainer, colocated", "GPU", parts, limit=limit, refusal=refusal, notes=notes
    )
    return [one, *(need for need in needs if need.place != "GPU")]


def memory_here(cgroup: Path = _CGROUP) -> float:
    """Bytes of memory that a new process can have here: free, and allowed by the cgroup.

    Args:
        cgroup: the folder of its limits (cgroup v2). Pages of files that were read and are not in
            use count as used there, and are given up when memory is asked for.
    """
    free = float(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = float((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = max(0.0, used - float(stat.get("inactive_file", 0)))
        return free if limit == "max" else min(free, float(limit) - used)
    except (OSError, ValueError):
        return free


def _gpu_here() -> float | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory)
