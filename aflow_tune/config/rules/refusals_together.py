"""Rules that look at several settings together; asked once each of them is sound.

What a single setting may be is decided in `refusals.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aflow_tune.config.mode_rules import WITHOUT_TASKS
from aflow_tune.config.tasksets import total_steps, training_rows
from aflow_tune.data.checks import Findings
from aflow_tune.data.fields import most_calls
from aflow_tune.errors import Fault

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

MONITOR = "aflow_tune.engines.trinity.training.monitor.RunMonitor"

MOST_CALLS = 64
"""Calls of one run that are thought possible where the function's source does not tell."""

# Advantages that compare the runs of one task: a group of one has nothing to be compared with.
_BY_GROUP = {
    *("grpo", "grpo_verl", "step_wise_grpo", "gigpo", "rloo", "opmd", "opmd_verl"),
    *("asymre", "asymre_verl", "rec", "clipb", "clipv", "reinforce", "reinforceplusplus"),
}


def check_together(config: AflowConfig, workflow: Callable[..., Any] | None) -> Findings:
    """Everything that settings which are sound by themselves do to each other."""
    found = Findings()
    if config.mode not in (*WITHOUT_TASKS, "harvest"):
        found.faults += _group(config)
        found.faults += _advantage(config)
        found.faults += _batches(config)
        found.add(_train_batch(config, workflow))
    found.add(_evaluation(config))
    found.add(_warmup(config))
    found.add(_best_checkpoints(config))
    kind = config.monitor.monitor_type
    if kind not in ("tensorboard", MONITOR):
        found.warnings.append(
            f"{config.positions.where('monitor.monitor_type')}: with {kind} the live panel and "
            "the report's curves stay empty; only tensorboard writes metrics.jsonl too"
        )
    return found


def _group(config: AflowConfig) -> Iterable[Fault]:
    from trinity.algorithm import ALGORITHM_TYPE

    algorithm = config.algorithm
    kind = ALGORITHM_TYPE.get(algorithm.algorithm_type)
    advantage = algorithm.advantage_fn or kind.default_config().get("advantage_fn")
    if algorithm.repeat_times < 2 and advantage in _BY_GROUP:
        own = max(2, kind.default_config().get("repeat_times", 8))
        yield Fault(
            config.positions.where("algorithm.repeat_times"),
            f"2 or more: {algorithm.algorithm_type} compares the runs of one task",
            f"{algorithm.repeat_times}"
            + ("" if config.positions.given("algorithm.repeat_times") else " (the default)"),
            f"algorithm.repeat_times: {max(own, 8)}",
        )


def _advantage(config: AflowConfig) -> Iterable[Fault]:
    """An advantage function works in the explorer's pipeline or in the trainer, as its type
    of algorithm does; Trinity asserts it once everything was started."""
    from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE

    algorithm = config.algorithm
    if not config.positions.given("algorithm.advantage_fn") or not algorithm.advantage_fn:
        return
    in_trainer = ALGORITHM_TYPE.get(algorithm.algorithm_type).compute_advantage_in_trainer
    if ADVANTAGE_FN.get(algorithm.advantage_fn).compute_in_trainer() != in_trainer:
        place = "in the trainer" if in_trainer else "from whole groups, before the trainer"
        yield Fault(
            config.positions.where("algorithm.advantage_fn"),
            f"one that is computed {place}, as {algorithm.algorithm_type} does",
            repr(algorithm.advantage_fn),
            "remove advantage_fn: the algorithm brings its own",
        )


def _batches(config: AflowConfig) -> Iterable[Fault]:
    rows, size = training_rows(config), config.buffer.batch_size
    if rows is not None and rows and size > rows and not config.mix:  # a mix has no end
        yield Fault(
            config.positions.where("buffer.batch_size"),
            f"at most the {rows} rows of the training data",
            str(size),
            f"batch_size: {rows}",
        )


def _train_batch(config: AflowConfig, workflow: Callable[..., Any] | None) -> Findings:
    found = Findings()
    size = config.buffer.train_batch_size
    runs = config.buffer.batch_size * config.algorithm.repeat_times
    if not size:
        return found
    known = most_calls(workflow) if workflow is not None else None
    most = runs * (known if known is not None else MOST_CALLS)
    interval = config.synchronizer.sync_interval
    # Between two syncs the trainer takes `interval` batches, and the explorer goes on for as
    # many steps, plus its lead, before it waits.
    if size * interval > most * (interval + config.synchronizer.sync_offset):
        calls = f"at most {known} calls" if known is not None else f"even {MOST_CALLS} calls"
        found.faults.append(
            Fault(
                config.positions.where("buffer.train_batch_size"),
                f"at most {most}: {config.buffer.batch_size} tasks x "
                f"{config.algorithm.repeat_times} runs x {calls} a run",
                f"{size}, which never fills, so that training would wait for ever",
                f"remove train_batch_size, or set it to {most if known else runs}",
            )
        )
    elif size > runs and known is None:
        found.warnings.append(
            f"{config.positions.where('buffer.train_batch_size')}: fills only if a run makes "
            f"{math.ceil(size / runs)} calls on average ({runs} runs a step)"
        )
    return found


def _evaluation(config: AflowConfig) -> Findings:
    found = Findings()
    steps, interval = total_steps(config), config.explorer.eval_interval
    key = "explorer.eval_interval"
    given = config.positions.given(key) and not config.positions.inherited(key)
    if given and steps is not None and interval > steps and config.mode in ("both", "colocate"):
        found.faults.append(
            Fault(
                config.positions.where("explorer.eval_interval"),
                f"at most {steps}, the steps of this run",
                f"{interval}, which is never reached",
                f"eval_interval: {max(1, steps // 4)}",
            )
        )
    if steps == 0 and config.mode not in ("train", "serve"):
        found.faults.append(
            Fault(
                config.positions.where("buffer.batch_size"),
                "at least one step",
                f"0 steps: fewer rows x epochs than the batch of {config.buffer.batch_size}",
                "lower buffer.batch_size, add rows, or raise buffer.total_epochs",
            )
        )
    if config.quick_eval is not None and config.engine == "trinity":
        found.warnings.append(
            f"{config.positions.where('quick_eval')}: Trinity's own explorer evaluates on every "
            "held-out row each time; only `engine: local` draws the sample"
        )
    if not config.buffer.explorer_input.eval_tasksets and config.mode == "both":
        found.warnings.append(
            "no `buffer.explorer_input.eval_tasksets`: there will be no held-out score"
        )
    return found


def _best_checkpoints(config: AflowConfig) -> Findings:
    """Whether the best checkpoint is kept as it was asked for."""
    found, key = Findings(), "checkpoints.keep_best"
    save, interval = config.trainer.save_interval, config.explorer.eval_interval
    if not config.positions.given(key) or config.checkpoints.keep_best == 0:
        return found
    where = config.positions.where(key)
    if config.engine == "trinity":
        found.warnings.append(f"{where}: verl keeps the newest only; `engine: local` the best too")
    elif config.positions.given("trainer.save_interval") and save and interval % save:
        found.warnings.append(
            f"{where}: only a step that is both saved and evaluated can be the best: let "
            f"trainer.save_interval ({save}) divide explorer.eval_interval ({interval})"
        )
    return found


def _warmup(config: AflowConfig) -> Findings:
    found = Findings()
    steps, warmup = total_steps(config), config.algorithm.optimizer.lr_warmup_steps
    if steps and warmup >= steps:
        where = config.positions.where("algorithm.optimizer.lr_warmup_steps")
        found.warnings.append(
            f"{where}: {warmup} steps of warm-up in a run of {steps}: the rate never gets to "
            f"{config.algorithm.optimizer.lr}"
        )
    return found
