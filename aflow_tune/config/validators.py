"""From settings as written to settings as run: `prepare`.

In this order: choose the engine, refuse what cannot train, fill in what was left out, run
Trinity's validators, compare before and after. For the local engine our validators take the
place of those of Trinity's that speak of GPUs, Ray clusters and verl; the others run as they
are. Nothing is started and nothing is fetched here.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from trinity.common import config_validator as upstream
from trinity.common.config import Config
from trinity.common.constants import SyncMethod

from aflow_tune.config import cpu_set
from aflow_tune.config.changes import (
    Change,
    differences,
    render_changes,
    save_resolved,
)
from aflow_tune.config.engine_choice import choose_engine
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.mode_rules import settle_mode
from aflow_tune.config.rules.adaptations import adapt, adapt_cluster, adapt_local
from aflow_tune.config.rules.refusals import refusals
from aflow_tune.config.sampler_settings import give_engine_settings
from aflow_tune.config.tasksets import fill_held_out, materialise_tasksets
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import find_ray, greet, handlers_kept

__all__ = [
    "Change",
    "choose_engine",
    "materialise_tasksets",
    "prepare",
    "render_changes",
    "save_resolved",
]


class LocalClusterValidator(upstream.ConfigValidator):
    """In place of Trinity's: sets the namespace, needs no cluster and no GPU."""

    def validate(self, config: Config) -> None:
        set_namespace(config)
        for model in (config.explorer.rollout_model, *config.explorer.auxiliary_models):
            model.gpu_per_engine, model.nnodes = 0, 1
        cluster = config.cluster
        cluster.node_num, cluster.gpu_per_node, cluster.total_gpu_num = 1, 0, 0
        cluster.rollout_gpu_num = cluster.auxiliary_model_gpu_num = cluster.explorer_gpu_num = 0


class LocalExplorerValidator(upstream.ExplorerConfigValidator):
    """Trinity's, without the adapter that it would load the whole model to write.

    Nor with its limit of one runner a task of a batch: its runners are processes, ours slots.
    """

    def validate(self, config: Config) -> None:
        runners = config.explorer.runner_per_model
        super().validate(config)
        config.explorer.runner_per_model = runners

    def _validate_lora(self, config: Config) -> None:
        config.explorer.rollout_model.enable_lora = config.model.lora_configs is not None


class LocalTrainerValidator(upstream.ConfigValidator):
    """In place of Trinity's: the local trainer reads no verl configuration."""

    def validate(self, config: Config) -> None:
        config.trainer.trust_remote_code = config.model.trust_remote_code


class ModeKeepingValidator(upstream.RayClusterConfigValidator):
    """Trinity's, which makes `colocate` of every mode on a single GPU, even of those that use it
    alone: a data set would then be taken for a queue."""

    def _set_cluster_info(self, config: Config) -> None:
        mode, cluster = config.mode, config.cluster
        found = find_ray(config) if isinstance(config, AflowConfig) else None
        if found is None:  # one of our own is to be started here: nothing to ask yet
            import torch

            cluster.node_num = cluster.node_num or 1
            here = cpu_set.logical_gpus(config) if cpu_set.in_use() else torch.cuda.device_count()
            cluster.gpu_per_node = cluster.gpu_per_node or here
            if (cluster.node_num, cluster.gpu_per_node) == (1, 1):
                config.mode = "colocate"
        else:
            greet(found)
            cluster.ray_address = found.address
            with handlers_kept():
                super()._set_cluster_info(config)
        if mode in ("train", "bench", "serve"):
            config.mode = mode


class OfflineModelValidator(upstream.ModelConfigValidator):
    """For checking without asking Tinker's service which models it has: that takes a key."""

    def _check_tinker(self, config: Config) -> None:
        from trinity.algorithm import ALGORITHM_TYPE

        if ALGORITHM_TYPE.get(config.algorithm.algorithm_type).use_critic:
            raise ValueError("Critic model is not supported when using tinker!")
        for model in (config.explorer.rollout_model, *config.explorer.auxiliary_models):
            model.engine_type = "tinker"
        config.trainer.trainer_type = "tinker"
        if config.synchronizer.sync_method == SyncMethod.NCCL:
            config.synchronizer.sync_method = SyncMethod.CHECKPOINT


class NamespaceOnly(upstream.ConfigValidator):
    """For checking a cluster's configuration away from the cluster: asks Ray nothing."""

    def validate(self, config: Config) -> None:
        set_namespace(config)


def set_namespace(config: Config) -> None:
    """The Ray namespace of a run, as Trinity forms it."""
    if not config.ray_namespace:
        config.ray_namespace = "/".join(
            part for part in (config.project, config.group, config.name) if part
        )


_REPLACED: dict[type, upstream.ConfigValidator | None] = {
    upstream.RayClusterConfigValidator: LocalClusterValidator(),
    upstream.ExplorerConfigValidator: LocalExplorerValidator(),
    upstream.TrainerConfigValidator: LocalTrainerValidator(),
    upstream.GPUMemoryValidator: None,
}
"""What the local engine puts in the place of Trinity's validators; None drops one."""


def prepare(
    config: AflowConfig,
    *,
    workflow_func: Callable[..., Any] | None = None,
    dry: bool = False,
    whole_model: bool = True,
) -> list[Change]:
    """Make `config` ready to run, in place. Idempotent: a second call changes nothing.

    Args:
        workflow_func: the function to tune, where it is known; its source bounds how many
            calls a run makes.
        dry: only check. A cluster is not asked for its size, and what needs it is left out.
        whole_model: the model that is named must be one that can be loaded; False where its
            config.json is enough.

    Returns:
        Every setting that now differs from what the user wrote.

    Raises:
        BadInput: with every fault found. `config.warnings` holds what was only doubtful.
    """
    done: list[Change] | None = config.__dict__.get("_changes")
    if done is not None:
        return done
    settle_mode(config)
    before = config.flatten()
    engine = choose_engine(config)
    config.engine = engine[0]
    found = refusals(config, workflow_func, whole_model=whole_model)
    config.warnings.extend(found.warnings)
    if found.faults:
        raise BadInput("These settings cannot train.", found.faults)
    reasons = {"engine": engine[1]}
    adapt(config, reasons)
    if config.engine == "local":
        adapt_local(config, reasons)
    else:
        adapt_cluster(config, reasons, fetch=not dry)
    with _mode_of_trinity(config):
        for validator in _validators(config, dry):
            run_validator(validator, config)
    if config.mode == "train":  # Trinity leaves the held-out task sets of this mode unread
        for taskset in config.buffer.explorer_input.eval_tasksets:
            fill_held_out(config, taskset)
    config.__dict__["_engine"] = engine
    config.__dict__["_changes"] = differences(before, config.flatten(), reasons)
    changes: list[Change] = config.__dict__["_changes"]
    return changes


def settle_models(config: AflowConfig) -> None:
    """Fill in, in place, what it takes to ask the models of a configuration that is not trained.

    What `prepare` does for a run, without anything that only training needs.
    """
    adapt(config, {})
    with _mode_of_trinity(config):
        for validator in (upstream.ModelConfigValidator(), LocalExplorerValidator()):
            run_validator(validator, config)
    give_engine_settings(config)


@contextlib.contextmanager
def _mode_of_trinity(config: AflowConfig) -> Iterator[None]:
    """Trinity knows no `harvest`: for its validators it is a `bench`, which runs a workflow."""
    mode = config.mode
    config.mode = "bench" if mode == "harvest" else mode
    try:
        yield
    finally:
        if mode == "harvest":
            config.mode = mode


def _validators(config: AflowConfig, dry: bool) -> list[upstream.ConfigValidator]:
    chosen: list[upstream.ConfigValidator] = []
    sized = bool(config.cluster.node_num and config.cluster.gpu_per_node)
    for validator in upstream.validators:
        kind = type(validator)
        if config.engine == "local":
            replacement = _REPLACED.get(kind, validator)
            if replacement is not None:
                chosen.append(replacement)
        elif dry and kind is upstream.ModelConfigValidator:
            chosen.append(OfflineModelValidator())
        elif dry and not sized and kind is upstream.RayClusterConfigValidator:
            chosen.append(NamespaceOnly())
        elif kind is upstream.RayClusterConfigValidator:
            chosen.append(ModeKeepingValidator())
        elif dry and kind is upstream.ExplorerConfigValidator:
            chosen.append(LocalExplorerValidator())
        elif kind is upstream.GPUMemoryValidator and (dry or not sys.stdin.isatty()):
            # It asks a question on the terminal; where nobody answers it would wait for ever.
            continue
        elif (
            dry
            and not (sized or config.model.tinker.enable)
            and (kind is upstream.TrainerConfigValidator)
        ):
            continue
        else:
            chosen.append(validator)
    return chosen


def run_validator(validator: upstream.ConfigValidator, config: AflowConfig) -> None:
    """Let Trinity check and fill in; what it refuses becomes a `BadInput`."""
    try:
        validator.validate(config)
    except (ValueError, AssertionError, RuntimeError, ImportError, OSError) as error:
        if isinstance(error, BadInput):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        root = config.checkpoint_root_dir
        if root and str(getattr(error, "filename", None) or "").startswith(root):
            where, cure = config.positions.where("checkpoint_root_dir"), "choose another folder"
            fault = Fault(where, "a folder that can be made and written", message, cure)
            raise BadInput("The run folder cannot be made.", [fault]) from error
        named = re.search(r"`?((?:[a-z_]+\.)+[a-z_]+)`?", message)
        key = named.group(1) if named else ""
        where = config.positions.where(key) if key in config.flatten() else "configuration"
        raise BadInput(
            "Trinity refuses this configuration.",
            [Fault(where, "settings that fit together", message, "correct the setting named")],
        ) from error
