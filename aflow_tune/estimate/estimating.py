"""`aflow-tune estimate`: from a configuration to what its steps will need. Starts nothing.

Every stage of a chain is a run of its own and is estimated as such. Settings are prepared as for
a run, without asking a cluster; `engine: trinity` can be estimated on a machine without a GPU.

What does not fit is estimated again with other settings: first each setting alone with its mildest
value that is enough; if none is, all of them together, without those that are not needed. A change
is shown only after the whole configuration was read again with it.

`--measure` runs the command itself for two steps in a folder that is removed: its metrics say what
an estimate cannot know, its process tree how much memory it took.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from aflow_tune.config.engine import choose_engine
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.stages import parts_of
from aflow_tune.config.validate import functions_of
from aflow_tune.errors import BadInput, RunFailed
from aflow_tune.estimate.gpus import gpu_needs, gpus_of
from aflow_tune.estimate.local import local_needs
from aflow_tune.estimate.needs import GIB, Change, Estimate, Need, setting
from aflow_tune.estimate.quantities import (
    Earlier,
    EstimateOptions,
    lengths_of,
    limits_of,
    step_quantities,
)
from aflow_tune.estimate.rehearsal import Seen, read_rows, rehearse
from aflow_tune.estimate.shapes import named_model

MEASURED_STEPS = 2
"""The first step also warms up; of a metric the mean of both counts."""
_MEASURED_EVERY = 0.5
_CGROUP = Path("/sys/fs/cgroup")
_SHOWN = 3
_LORA = "[{lora_rank: 16, lora_alpha: 32}]"


def estimate(
    path: str | Path, overrides: Sequence[str] = (), options: EstimateOptions | None = None
) -> list[Estimate]:
    """An estimate of the run, or of each stage.

    Raises:
        BadInput: the configuration cannot train, or something of it cannot be estimated; every
            fault is listed.
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
        stage = _Stage(config, number, options, measured)
        one = stage.estimate()
        if options.changes and one.fits is False:
            one.changes = list(itertools.islice(_changes(path, overrides, stage, one), _SHOWN))
        found.append(one)
    return found


class _Stage:
    """One run, or one stage of a chain: prepared, and what is known of its lengths."""

    def __init__(
        self,
        whole: AflowConfig,
        number: int,
        options: EstimateOptions,
        measured: Earlier | None = None,
    ) -> None:
        self.name, self.config = parts_of(whole)[0][number]
        self.number, self.options = number, options
        self.notes: list[str] = []
        workflow, judge = functions_of(whole)
        self._prepare(workflow)
        config, where = self.config, self.config.positions.where
        names = {"model.model_path": config.model.model_path}
        for at, model in enumerate(config.explorer.auxiliary_models):
            names[f"explorer.auxiliary_models.{at}.model_path"] = str(model.model_path)
        self.models = tuple(named_model(name, where(key)) for key, name in names.items())
        self.policy = self.models[0]
        self.earlier = measured or Earlier.of(Path(config.checkpoint_job_dir))
        seen = self._seen(workflow, judge)
        self.lengths = lengths_of(config, workflow, options, self.earlier, seen)

    def _prepare(self, workflow: Any) -> None:
        """As for a run, but away from any cluster."""
        config, gpus = self.config, self.options.gpus
        if config.model.tinker.enable:
            raise BadInput.of(
                "There is no memory of yours to estimate.",
                config.positions.where("model.tinker.enable"),
                "engines of your own",
                "Tinker's service, which samples and trains elsewhere",
                "model.tinker.enable=false estimates the same on GPUs of your own",
            )
        if config.engine == "trinity":
            # Whether it can run on this machine is the doctor's question.
            config.prepared.engine = ("trinity", "as configured")
            if cluster := gpus_of(config, gpus):
                total, each = cluster
                whole = total % each == 0
                config.cluster.node_num = total // each if whole else 1
                config.cluster.gpu_per_node = each if whole else total
            if gpus == 1 and config.mode == "both":
                config.mode = "colocate"
                self.notes.append(
                    "mode: both needs a GPU for the sampler and one for the trainer: on --gpus 1 "
                    "this is what mode: colocate would need"
                )
        prepare(config, Purpose.ESTIMATE, workflow=workflow)

    def _seen(self, workflow: Any, judge: Any) -> Seen | None:
        """What a rehearsal shows, or of `mode: train` its rows; None where it is not known."""
        given, config = self.options, self.config
        found: Seen | str | None = None
        note = "the workflow was not rehearsed: {}"
        if config.mode in ("both", "colocate"):
            if given.rehearse and given.calls is None and given.prompt_tokens is None:
                folders = {model.name: model.folder for model in self.models}
                found = rehearse(config, workflow, judge, folders)
        elif config.mode == "train" and config.engine == "local":
            note = "the rows were not read: {}; each may be as long as the limits"
            if given.prompt_tokens is None and given.response_tokens is None:
                found = read_rows(config, self.policy.folder)
        if isinstance(found, str):
            self.notes.append(note.format(found))
            return None
        return found

    def estimate(self) -> Estimate:
        config, options, earlier = self.config, self.options, self.earlier
        needs, gpus = self.needs(config)
        shape = self.policy.shape
        model = f"{self.policy.name}, {shape.parameters / 1e9:.2f} B parameters"
        if shape.active_parameters != shape.parameters:
            model += f", {shape.active_parameters / 1e9:.2f} B of them for each token"
        found = Estimate(self.name, config.engine, model, needs, notes=[*self.notes])
        if config.engine != "local" and gpus_of(config, options.gpus) is None:
            note = "one GPU for the trainer: give --gpus, or cluster.node_num and gpu_per_node"
            found.notes.append(note)
        if earlier.peak is not None:
            gib = earlier.peak / GIB
            found.notes.append(f"the two measured steps took {gib:.2f} GiB, without evaluations")
        if config.mode in ("both", "colocate"):
            found.quantities = step_quantities(config, self.lengths, options, earlier, gpus)
        return found

    def fits_with(self, settings: Mapping[str, Any]) -> bool:
        """Whether the memory is enough with some settings of the prepared configuration changed."""
        config = copy.deepcopy(self.config)
        for key, value in settings.items():
            _put(config, key, value)
        try:
            return Estimate("", config.engine, "", self.needs(config)[0]).fits is True
        except BadInput:
            return False

    def needs(self, config: AflowConfig) -> tuple[list[Need], int]:
        """The memory, and the GPUs that are paid for."""
        options, limit = self.options, self.options.gpu_memory
        planned = "cuda" if limit and config.local.device in ("auto", "cuda") else None
        if limit is None and torch.cuda.is_available():
            limit = float(torch.cuda.get_device_properties(0).total_memory)
        if config.engine != "local":
            gpus = gpus_of(config, options.gpus)
            return gpu_needs(config, self.models, self.lengths, gpus, limit, options.memory)
        here = memory_here() if options.memory is None else options.memory
        return local_needs(config, self.models, self.lengths, planned, here, limit)


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


# -- what to change ------------------------------------------------------------------------


def _changes(
    path: str | Path, overrides: Sequence[str], stage: _Stage, now: Estimate
) -> Iterator[Change]:
    """Changes that make it fit: settings alone, or where none is enough alone, together."""
    candidates = [*_candidates(stage.config)]
    found: list[tuple[dict[str, Any], str]] = []
    for key, values, cost in candidates:
        enough = next((value for value in values if stage.fits_with({key: value})), None)
        if enough is not None:
            found.append(({key: enough}, cost))
    together = {key: values[-1] for key, values, _ in candidates if values}
    if not found and stage.fits_with(together):
        # All of them as far as they go, then each as mildly as it may be, or not at all.
        for key, values, _ in candidates:
            rest = {name: value for name, value in together.items() if name != key}
            milder = [rest, *({**rest, key: value} for value in values)]
            together = next(s for s in [*milder, together] if stage.fits_with(s))
        costs = [cost for key, _, cost in candidates if key in together]
        found.append((together, "; ".join(dict.fromkeys(costs))))
    for items, cost in found:
        settings = [setting(key, value) for key, value in items.items()]
        try:
            again = load_config(path, [*overrides, *settings])
            then = _Stage(again, stage.number, stage.options).estimate()
        except BadInput:
            continue
        if then.fits is True:
            place = (now.fullest.role, now.fullest.place)
            same = [need for need in then.needs if (need.role, need.place) == place]
            size = (same or then.needs)[0].size
            yield Change(items, now.fullest.size - size, size, cost)


def _candidates(config: AflowConfig) -> Iterator[tuple[str, Sequence[Any], str]]:
    """Settings with values from mild to harsh, and what is lost by them."""
    smaller = "more, smaller passes: a little slower"
    if config.engine == "local":
        local = config.local
        if not config.inline and config.mode == "both":
            cost = "no Ray: one process does everything in turns, with the same results"
            yield "inline", (True,), cost
        yield "local.micro_batch_tokens", _halves(local.micro_batch_tokens, 64), smaller
        yield "local.max_batch", _halves(local.max_batch, 4), "fewer sequences at once: slower"
        if local.dtype in ("fp32", "float32", "auto") and not config.deterministic:
            yield "local.dtype", ("bf16",), "less exact sums"
    else:
        trainer, model = config.trainer, config.explorer.rollout_model
        longest = limits_of(config)[2]
        passes = _halves(trainer.max_token_len_per_gpu or 2 * longest, longest)
        yield "trainer.max_token_len_per_gpu", passes, smaller
        if model.gpu_memory_utilization < 0.95:
            cost = "less room for whatever else is on the GPU"
            yield "explorer.rollout_model.gpu_memory_utilization", (0.95,), cost
        parallel = [size for size in (2, 4, 8) if size > model.tensor_parallel_size]
        cost = "engines of several GPUs, which the trainer no longer has"
        yield "explorer.rollout_model.tensor_parallel_size", parallel, cost
        if trainer.trainer_strategy == "fsdp2" and not trainer.offload_policy:
            cost = "states in the machine's memory: slower steps"
            yield "trainer.offload_policy", (True,), cost
    if not config.model.lora_configs:
        yield "model.lora_configs", (_LORA,), "an adapter instead of the full weights"


def _halves(value: int, least: int) -> list[int]:
    """Half of it, a quarter, and so on, while not below `least`."""
    halves = (value // 2**power for power in itertools.count(1))
    return [*itertools.takewhile(lambda half: half >= max(1, least), halves)]


def _put(config: AflowConfig, key: str, value: Any) -> None:
    if key == "model.lora_configs":
        from trinity.common.config import LoRAConfig

        value = [LoRAConfig(lora_rank=16, lora_alpha=32)]
    *parents, last = key.split(".")
    at: Any = config
    for name in parents:
        at = getattr(at, name)
    setattr(at, last, value)


# -- a short run ---------------------------------------------------------------------------


def _measured(
    path: str | Path, overrides: Sequence[str], parts: Sequence[tuple[str, AflowConfig]]
) -> Earlier:
    """What two steps of the run say. Only for the local engine: what a GPU cluster does has to be
    measured there."""
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
            "cluster.ray_address=local",  # the memory of another Ray is not in our process tree
            f"buffer.total_steps={MEASURED_STEPS}",
            "trainer.total_steps=null",
            "buffer.explorer_input.eval_tasksets=[]",
            "explorer.eval_on_startup=false",
            "trainer.save_hf_checkpoint=never",
            f"trainer.save_interval={MEASURED_STEPS}",
        ]
        command = [sys.executable, "-m", "aflow_tune.cli", "run", str(path), *overrides, *short]
        print(f"measuring {MEASURED_STEPS} steps ...", file=sys.stderr, flush=True)
        code, peak, output = run_measured(command, Path(folder))
        if code:
            last = "\n".join(output.splitlines()[-20:])
            raise RunFailed(f"the short run exited with {code}:\n{last}")
        (metrics,) = Path(folder).rglob("metrics.jsonl")
        place = f"{MEASURED_STEPS} steps measured on this machine just now"
        earlier = Earlier.of(metrics.parent, place)
    earlier.peak = peak
    return earlier


def run_measured(command: Sequence[str], folder: Path) -> tuple[int, float, str]:
    """Run a command; its exit code, the largest memory of its process tree in bytes, and what it
    printed. Shared pages are divided among their sharers where that is known (Linux)."""
    peak = 0.0
    with (folder / "output.txt").open("w+", errors="replace") as output:
        process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                total = 0.0
                for one in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        full = one.memory_full_info()
                        total += getattr(full, "pss", full.uss)
                peak = max(peak, total)
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(_MEASURED_EVERY)
        finally:
            if process.poll() is None:
                process.terminate()  # its own handler saves and takes its Ray down
                process.wait()
        output.seek(0)
        return process.returncode, peak, output.read()
