"""`aflow-tune estimate`: from a configuration to what its training steps will need.

Every stage of a chain is estimated as a run of its own. Settings are prepared as for a run, without
asking a cluster. What does not fit is estimated again with a few other settings, one at a time.
Nothing is trained, except with `--measure`: two steps in a temporary folder, for their metrics.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch

from aflow_tune.config.critic import uses_critic
from aflow_tune.config.engine import choose_engine
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.stages import parts_of
from aflow_tune.config.validate import functions_of
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.estimate.gpus import gpu_needs, gpus_of
from aflow_tune.estimate.local import local_needs
from aflow_tune.estimate.needs import Change, Estimate, Need, fits
from aflow_tune.estimate.quantities import (
    Earlier,
    EstimateOptions,
    Lengths,
    lengths_of,
    limits_of,
    step_quantities,
)
from aflow_tune.estimate.rehearsal import rehearse
from aflow_tune.estimate.shapes import NamedModel, named_model

MEASURED_STEPS = 2
"""The mean of their metrics is used, though the first step includes warm-up."""
_CGROUP = Path("/sys/fs/cgroup")
_LORA = "[{lora_rank: 16, lora_alpha: 32}]"


def estimate(
    path: str | Path, overrides: Sequence[str] = (), options: EstimateOptions | None = None
) -> list[Estimate]:
    """An estimate of the run, or of each stage of a chain.

    Raises:
        BadInput: the configuration cannot train, or a part of it cannot be estimated.
        RunFailed: the short run of `measure` failed.
    """
    options = options or EstimateOptions()
    config = load_config(path, overrides)
    parts, faults = parts_of(config)
    if faults:
        raise BadInput(f"The stages of {path} do not fit together.", faults)
    measured = _measured(path, overrides, parts) if options.measure else None
    found: list[Estimate] = []
    for number in range(len(parts)):
        found.append(_estimate(config, number, options, measured))
    return found


def _estimate(
    whole: AflowConfig, number: int, options: EstimateOptions, measured: Earlier | None
) -> Estimate:
    """Estimate stage `number` of a configuration; a single run is stage 0."""
    (name, config), notes = parts_of(whole)[0][number], []
    workflow, judge = functions_of(whole)
    where = config.positions.where
    if config.model.tinker.enable:
        raise BadInput.of(
            "There is no memory of yours to estimate.",
            where("model.tinker.enable"),
            "engines of your own",
            "Tinker's service, which samples and trains elsewhere",
            "model.tinker.enable=false estimates the same on GPUs of your own",
        )
    if config.engine == "trinity":
        # Whether it can run on this machine is for `doctor` to say.
        config.prepared.engine = ("trinity", "as configured")
        if cluster := gpus_of(config, options.gpus):
            total, each = cluster
            whole_nodes = total % each == 0
            config.cluster.node_num = total // each if whole_nodes else 1
            config.cluster.gpu_per_node = each if whole_nodes else total
        if options.gpus == 1 and config.mode == "both":
            config.mode = "colocate"
            notes.append("mode: both needs two GPUs: this is what mode: colocate would need of one")
    prepare(config, Purpose.ESTIMATE, workflow=workflow)
    names = {"model.model_path": config.model.model_path}
    for at, auxiliary in enumerate(config.explorer.auxiliary_models):
        names[f"explorer.auxiliary_models.{at}.model_path"] = str(auxiliary.model_path)
    if config.engine != "local" and uses_critic(config):
        names["model.critic_model_path"] = config.model.critic_model_path
    models = tuple(named_model(path, where(key)) for key, path in names.items())
    earlier = measured or Earlier.of(Path(config.checkpoint_job_dir))
    rolls_out, seen = config.mode in ("both", "colocate"), None
    if rolls_out and options.rehearse and options.calls is None and options.prompt_tokens is None:
        seen = rehearse(config, workflow, judge, {model.name: model.folder for model in models})
    if isinstance(seen, str):
        notes.append(f"the workflow was not rehearsed: {seen}")
        seen = None
    lengths = lengths_of(config, workflow, options, earlier, seen)
    needs, gpus = _needs(config, models, lengths, options)
    shape = models[0].shape
    model = f"{models[0].name}, {shape.parameters / 1e9:.2f} B parameters"
    if config.engine != "local" and gpus_of(config, options.gpus) is None:
        notes.append("one GPU for the trainer: give --gpus, or cluster.node_num and gpu_per_node")
    found = Estimate(name, config.engine, model, needs, notes=notes)
    if rolls_out:
        found.quantities = step_quantities(config, lengths, options, earlier, gpus)
    if found.fits is False:
        found.changes = [*_changes(config, models, lengths, options, needs)]
    return found


def _needs(
    config: AflowConfig,
    models: Sequence[NamedModel],
    lengths: Lengths,
    options: EstimateOptions,
) -> tuple[list[Need], int]:
    """Memory by role, and the number of GPUs that the step occupies."""
    limit = options.gpu_memory
    planned = "cuda" if limit and config.local.device in ("auto", "cuda") else None
    if limit is None and torch.cuda.is_available():
        limit = float(torch.cuda.get_device_properties(0).total_memory)
    if config.engine != "local":
        gpus = gpus_of(config, options.gpus)
        return gpu_needs(config, models, lengths, gpus, limit, options.memory)
    here = memory_here() if options.memory is None else options.memory
    return local_needs(config, models, lengths, planned, here, limit)


def memory_here(cgroup: Path = _CGROUP) -> float:
    """Bytes of memory that a new process can have here: free, and within the limit of the cgroup
    (v2). The cgroup's use is counted without inactive file pages, which the kernel reclaims."""
    free = float(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = float((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = max(0.0, used - float(stat.get("inactive_file", 0)))
        return free if limit == "max" else min(free, float(limit) - used)
    except (OSError, ValueError):
        return free


def _changes(
    config: AflowConfig,
    models: Sequence[NamedModel],
    lengths: Lengths,
    options: EstimateOptions,
    now: Sequence[Need],
) -> Iterator[Change]:
    """Single settings each of which makes everything fit."""
    from trinity.common.config import LoRAConfig

    fullest = max(now, key=lambda need: need.size / need.limit if need.limit else 0.0)
    adapter = [LoRAConfig(lora_rank=16, lora_alpha=32)]
    for key, value, cost in (
        ("inline", True, "no Ray: one process does everything in turns"),
        ("local.micro_batch_tokens", 256, "more, smaller passes: a little slower"),
        ("local.max_batch", 4, "fewer sequences at once: slower"),
        ("local.dtype", "bf16", "less exact sums"),
        ("local.load_in", "4bit", "rounded base weights: slower, and a little less exact"),
        ("trainer.max_token_len_per_gpu", limits_of(config)[2], "more, smaller passes"),
        ("trainer.offload_policy", True, "states in the machine's memory: slower steps"),
        ("explorer.rollout_model.gpu_memory_utilization", 0.95, "less room for others"),
        ("model.lora_configs", adapter, "an adapter instead of the full weights"),
    ):
        changed = copy.deepcopy(config)
        *parents, last = key.split(".")
        setattr(functools.reduce(getattr, parents, changed), last, value)
        with contextlib.suppress(BadInput):
            then = _needs(changed, models, lengths, options)[0]
            if fits(then) is True:
                same = [n for n in then if (n.role, n.place) == (fullest.role, fullest.place)]
                size, shown = (same or then)[0].size, _LORA if value is adapter else value
                yield Change({key: shown}, fullest.size - size, size, cost)


# -- a short run ---------------------------------------------------------------------------


def _measured(
    path: str | Path, overrides: Sequence[str], parts: Sequence[tuple[str, AflowConfig]]
) -> Earlier:
    """Run two steps and read their metrics. BadInput: not one run of `mode: both`, engine local."""
    engine, mode = choose_engine(parts[0][1])[0], parts[0][1].mode
    if engine != "local" or len(parts) > 1 or mode != "both":
        raise BadInput.of(
            "Only a run on the local engine can be measured.",
            "--measure",
            "one run of `mode: both` on the local engine",
            f"engine {engine}, mode {mode}, {len(parts)} stage(s)",
            "leave --measure out; give --tokens-per-second, or measure a run of one stage",
        )
    with tempfile.TemporaryDirectory(prefix="aflow-measure-") as folder:
        short = [
            f"checkpoint_root_dir={folder}",
            "cluster.ray_address=local",  # on this machine, whatever Ray is configured
            f"buffer.total_steps={MEASURED_STEPS}",
            "trainer.total_steps=null",
            "buffer.explorer_input.eval_tasksets=[]",
            "explorer.eval_on_startup=false",
            "trainer.save_hf_checkpoint=never",
            f"trainer.save_interval={MEASURED_STEPS}",
        ]
        command = [sys.executable, "-m", "aflow_tune.cli", "run", str(path), *overrides, *short]
        print(f"measuring {MEASURED_STEPS} steps ...", file=sys.stderr, flush=True)
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
            raise RunFailed(f"the short run exited with {done.returncode}:\n{last}")
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        place = f"{MEASURED_STEPS} steps measured on this machine just now"
        return Earlier.of(metrics.parent, place)
