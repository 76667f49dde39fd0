"""All rules that refuse a configuration or warn about it, in one table: `RULES`.

A rule yields `Fault`s, and strings, which are warnings; the table states the purposes, modes and
engine that it applies to. All faults are reported together; rules marked `together` run only if the
others found none. What Trinity's own validators refuse with a clear message is left to them.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from aflow_tune.config.accounting import check_spend
from aflow_tune.config.critic import check_critic, is_read
from aflow_tune.config.engine import check_devices
from aflow_tune.config.file_rules import (
    check_data,
    check_experiences,
    check_harvest,
    check_model,
    check_paths,
    check_search,
    check_writer,
)
from aflow_tune.config.names import BATCH_FILES, SHORT_NAMES, WORKFLOW_GIGPO
from aflow_tune.config.schema import nearest
from aflow_tune.config.settings import AflowConfig, value_of, words
from aflow_tune.config.tasksets import (
    FROM_DATA,
    WITHOUT_TASKS,
    catalogue_of,
    check_mix,
    experience_buffer,
    is_file,
    total_steps,
    training_rows,
    user_tasksets,
)
from aflow_tune.data.checks import Findings
from aflow_tune.data.dialogues import TASK_TYPES
from aflow_tune.data.fields import most_calls
from aflow_tune.data.mix import SUM_TOLERANCE
from aflow_tune.data.replay import read_buffer
from aflow_tune.engines.local.models import pick_device
from aflow_tune.errors import BadInput, Fault
from aflow_tune.scoring.rewards import reward_faults
from aflow_tune.sections import display

ADAPTER = "aflow_tune.engines.trinity.rollout.adapter.WorkflowAdapter"
MONITOR = "aflow_tune.engines.trinity.training.monitor.RunMonitor"
MOST_CALLS = 64
"""Assumed upper bound of model calls per rollout if the function's source does not give one."""


class Purpose(Enum):
    """What a configuration is prepared for."""

    RUN = "a run, which begins now"
    CHECK = "a run, of which nothing is started"
    ESTIMATE = "a run, of whose model only the sizes are read"
    EVALUATE = "an evaluation on the held-out task sets"
    HARVEST = "a harvest outside of a run: the model that will be tuned need not be here"
    SEARCH = "a search over workflows, which only reads the model that will be tuned"
    ASK = "answers of the model to problems that come later"


RUNS = (Purpose.RUN, Purpose.CHECK, Purpose.ESTIMATE)
_WITH_ROLLOUTS = ("both", "explore", "colocate")


class Case(NamedTuple):
    """A configuration and how it will be used; the fields are arguments of `prepare`."""

    config: AflowConfig
    purpose: Purpose
    workflow: Callable[..., Any] | None
    judge: Callable[..., Any] | None
    local_model: bool


Found = Iterable[Fault | str]


class Rule(NamedTuple):
    """One line of the table. `engine`, `modes`: None for all."""

    check: Callable[[Case], Found]
    purposes: Sequence[Purpose] = RUNS
    modes: Sequence[str] | None = None
    engine: str | None = None
    together: bool = False
    """Whether to run only if no rule without this mark found a fault."""


def check_settings(case: Case, faults: Sequence[Fault] = ()) -> Findings:
    """Apply the rules to a case: faults, with `faults` added, and warnings."""
    found, config = Findings(), case.config
    for together in (False, True):
        for rule in RULES:
            if (
                rule.together is together
                and case.purpose in rule.purposes
                and config.mode in (rule.modes or [config.mode])
                and config.engine == (rule.engine or config.engine)
            ):
                items = list(rule.check(case))
                found.faults += [item for item in items if isinstance(item, Fault)]
                found.warnings += [item for item in items if isinstance(item, str)]
        if found.faults:
            break
    found.faults += faults
    # Several rules may report the same place; keep the first.
    found.faults = list({fault.where: fault for fault in reversed(found.faults)}.values())[::-1]
    return found


# --- Single settings: choices, ranges, registered names -----------------------------------------

_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("both", "explore", "train", "bench", "harvest", "pairs", "serve", "colocate"),
    "explorer.concurrent_mode": ("asynchronous", "sequential", "multi-threading"),
    "trainer.trainer_type": ("verl", "tinker"),
    "trainer.save_hf_checkpoint": ("last", "always", "never"),
    "algorithm.loss_agg_mode": words(
        "token-mean seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm"
    ),
    "algorithm.optimizer.lr_scheduler_type": ("constant", "linear", "cosine"),
}

_Value = tuple[str, Callable[[Any], bool], str, str]
"""A key, a test of its value, the test in words, and a valid value."""

_AT_LEAST = {
    1: words(
        """
        algorithm.repeat_times buffer.batch_size buffer.total_epochs buffer.total_steps
        trainer.total_steps explorer.eval_interval explorer.runner_per_model explorer.max_timeout
        explorer.rollout_model.engine_num explorer.max_repeat_times_per_runner
        synchronizer.sync_interval synchronizer.sync_timeout local.threads local.max_batch
        local.micro_batch_tokens quick_eval replay.capacity
        """
    ),
    0: words(
        """
        buffer.train_batch_size trainer.save_interval trainer.max_checkpoints_to_keep
        checkpoints.keep_best explorer.max_retry_times synchronizer.sync_offset report.transcripts
        trainer.critic_warmup
        """
    ),
}
"""Keys by the least value allowed; null is accepted where the schema allows it."""
_RANGES: tuple[_Value, ...] = (
    ("algorithm.optimizer.lr", lambda v: 0 < v < math.inf, "a number above 0", "1e-5"),
    ("algorithm.optimizer.weight_decay", lambda v: 0 <= v < math.inf, "0 or more", "0.01"),
    ("algorithm.optimizer.min_lr_ratio", lambda v: 0 <= v <= 1, "between 0 and 1", "0.01"),
    ("algorithm.optimizer.lr_warmup_steps_ratio", lambda v: 0 <= v < 1, "from 0 to below 1", "0.0"),
    (
        "algorithm.optimizer.betas",
        lambda v: len(v) == 2 and all(0 <= beta < 1 for beta in v),
        "two numbers from 0 to below 1",
        "[0.9, 0.999]",
    ),
    ("trainer.grad_clip", lambda v: 0 <= v < math.inf, "0 (off) or more", "1.0"),
    ("model.temperature", lambda v: 0 < v < math.inf, "above 0: greedy runs are all alike", "1.0"),
    ("model.top_p", lambda v: 0 < v <= 1, "above 0, at most 1", "1.0"),
    ("rollout.run_timeout", lambda v: 0 < v < math.inf, "seconds above 0", "300.0"),
    ("rollout.max_failed_fraction", lambda v: 0 < v <= 1, "above 0, at most 1", "1.0"),
    ("report.score", lambda v: bool(v.strip()), "'reward' or the name of a metric", "reward"),
    (
        "coreset.size",
        lambda v: v is None or 0 < v < 1 or (v >= 1 and v == int(v)),
        "a share of the rows above 0 and below 1, or how many",
        "0.25",
    ),
    ("coreset.seed", lambda v: v is None or 0 <= v < 2**32, "from 0 to 4294967295", "0"),
    ("replay.ratio", lambda v: 0 <= v < 1, "the share of old rows, from 0 to below 1", "0.1"),
    ("seed", lambda v: 0 <= v < 2**32, "from 0 to 4294967295", "0"),
    ("name", lambda v: bool(v.strip()), "a name for the run folder", "first_run"),
)

_BUFFER = "buffer.trainer_input.experience_buffer"
_LOCAL_MODES = ("both", "train", "bench", "harvest", "pairs")
_ADAMS = ("adam", "adamw")
_LOCAL_VALUES: tuple[_Value, ...] = (
    ("mode", lambda v: v in _LOCAL_MODES, f"one of {', '.join(_LOCAL_MODES)}", "both"),
    ("synchronizer.sync_style", lambda v: v.value != "fully_async", "taking turns", "fixed"),
    ("explorer.concurrent_mode", lambda v: v != "multi-threading", "coroutines", "asynchronous"),
    ("explorer.over_rollout.ratio", lambda v: not v, "0: whole batches only", "0.0"),
    ("explorer.over_rollout.return_partial_tasks", lambda v: not v, "whole groups only", "false"),
    ("explorer.rollout_model.engine_type", lambda v: v.startswith("vllm"), "the default", "vllm"),
    ("model.repetition_penalty", lambda v: v == 1, "1.0, as probabilities are trained", "1.0"),
    ("model.rope_scaling", lambda v: v is None, "null: set it in config.json", "null"),
    ("model.rope_theta", lambda v: v is None, "null: set it in config.json", "null"),
    ("data_processor.task_pipeline", lambda v: v is None, "prepared data", "null"),
    ("algorithm.enable_router_replay", lambda v: not v, "false", "false"),
    ("algorithm.rollout_correction", lambda v: v is None, "null: both engines agree", "null"),
    (f"{_BUFFER}.replay_buffer.enable", lambda v: not v, "false: own rollouts only", "false"),
    ("algorithm.optimizer.optimizer_type", lambda v: v in _ADAMS, " or ".join(_ADAMS), "adam"),
)
"""Settings with values that the local engine lacks: ignoring these would change training."""


def _values(config: AflowConfig, table: Iterable[_Value], engine: str = "") -> Found:
    for key, good, expected, example in table:
        if not good(value_of(config, key)):
            yield config.wrong(key, expected + engine, f"{key.rpartition('.')[2]}: {example}")


def _single_values(case: Case) -> Found:
    yield from _values(case.config, _RANGES)
    for least, keys in _AT_LEAST.items():
        for key in keys:
            value = value_of(case.config, key)
            if value is not None and value < least:
                yield case.config.wrong(key, f"{least} or more", f"{key.rpartition('.')[2]}: 8")
    for key, choices in _CHOICES.items():
        value = value_of(case.config, key)
        if value is not None and value not in choices:
            yield _unknown_name(case.config, key, value, choices)


def _unknown_name(config: AflowConfig, key: str, value: str, words: Iterable[str]) -> Fault:
    words = sorted(set(words))
    fix = f"{key.rpartition('.')[2]}: {nearest(str(value), words, 0.5) or words[0]}"
    return config.fault(key, "one of " + ", ".join(words), repr(value), fix)


def _registered(case: Case) -> Found:
    """Check names in Trinity's registries, dotted paths of classes, arguments of functions."""
    from trinity import algorithm as known

    config, algorithm = case.config, case.config.algorithm
    functions = {
        "advantage_fn": known.ADVANTAGE_FN,
        "policy_loss_fn": known.POLICY_LOSS_FN,
        "kl_loss_fn": known.KL_FN,
        "kl_penalty_fn": known.KL_FN,
        "entropy_loss_fn": known.ENTROPY_LOSS_FN,
    }
    named: dict[str, Any] = {
        "algorithm.algorithm_type": known.ALGORITHM_TYPE,
        "algorithm.sample_strategy": known.SAMPLE_STRATEGY,
        **{f"algorithm.{name}": registry for name, registry in functions.items()},
    }
    for number, _ in enumerate(config.data_processor.experience_pipeline.operators):
        from trinity.buffer.operators import EXPERIENCE_OPERATORS

        key = f"data_processor.experience_pipeline.operators.{number}.name"
        named[key] = EXPERIENCE_OPERATORS
    places = [place for place, _, _ in user_tasksets(config)]
    if experience_buffer(config) is not None:
        places.append("buffer.trainer_input.experience_buffer")
    for place in places:
        for name in ("data_selector", "task_selector"):
            key = f"{place}.{name}.selector_type"
            if value_of(config, key) not in (None, "sequential"):
                from trinity.buffer.selector import SELECTORS  # takes a second

                named[key] = SELECTORS
    for key, registry in named.items():
        value, names = value_of(config, key), [*registry._default_mapping, *registry.modules]
        names += SHORT_NAMES.get(key.rpartition(".")[2], ())
        if value is None or value in names:
            continue
        try:
            if "." not in value or registry.get(value) is None:
                yield _unknown_name(config, key, value, names)
        except (ImportError, AttributeError, KeyError) as error:
            yield config.fault(key, "package.module.Class", f"{value}: {error}", "correct the path")
    try:  # unknown names are reported above
        usual = known.ALGORITHM_TYPE.get(algorithm.algorithm_type).default_config()
        for name, registry in functions.items():
            arguments = getattr(algorithm, f"{name}_args") or {}
            function = getattr(algorithm, name) or usual.get(name) or "none"
            taken = inspect.signature(registry.get(function)).parameters if arguments else {}
            if any(item.kind is item.VAR_KEYWORD for item in taken.values()):
                continue
            for given in arguments:
                if given not in taken or given == "backend":
                    key = f"algorithm.{name}_args.{given}"
                    expected = f"an argument of {function}: {', '.join(taken) or 'it has none'}"
                    yield config.fault(key, expected, f"`{given}`", "name one of these")
    except (ImportError, AttributeError, KeyError, ValueError, TypeError):
        return


def _needs(case: Case) -> Found:
    """Check switches, algorithm against mode, rewards, monitor, system prompt."""
    config, mode = case.config, case.config.mode
    for name in ("enable_history", "enable_openai_api"):
        key = f"explorer.rollout_model.{name}"
        if config.positions.given(key) and not value_of(config, key):
            yield config.wrong(key, "true: training needs what it records", f"{name}: true")
    of_data, from_data = mode == "train", config.algorithm.algorithm_type in FROM_DATA
    buffer = experience_buffer(config)
    if buffer is not None and buffer.storage_type == BATCH_FILES:
        if from_data:
            expected = "one that learns from rewards: batch_files hold recorded rollouts"
            yield config.wrong("algorithm.algorithm_type", expected, "multi_step_grpo")
        if not config.algorithm.bypass_old_logprobs:
            expected = "true: the log-probabilities of the policy that sampled are in the files"
            yield config.wrong("algorithm.bypass_old_logprobs", expected, "remove it")
    elif of_data != from_data and (
        (of_data and config.engine == "local") or (from_data and mode in _WITH_ROLLOUTS)
    ):
        expected = f"{' or '.join(FROM_DATA)}, which learn from a data set, with `mode: train` only"
        fix = "mode: train with algorithm_type: sft, or mode: both with multi_step_grpo"
        yield config.wrong("algorithm.algorithm_type", expected, fix)
    for fault in reward_faults(config.rewards):
        yield replace(fault, where=config.positions.where(fault.where))
    kind, key = config.monitor.monitor_type, "monitor.monitor_type"
    known = ("tensorboard", "wandb", "mlflow", "swanlab")
    if "." not in kind and kind not in known:
        yield _unknown_name(config, key, kind, known)
    if case.workflow is None or config.rollout.system_prompt is not None:
        return
    asked = inspect.signature(case.workflow).parameters.get("system_prompt")
    if asked is not None and asked.default is asked.empty and asked.annotation in (str, "str"):
        expected = "a text: the workflow function takes `system_prompt` and has no default for it"
        yield config.fault("rollout.system_prompt", expected, "nothing", "system_prompt: ...")


def _something_to_prefer(case: Case) -> Found:
    if case.config.algorithm.repeat_times < 2:
        expected = "2 or more answers to each task, of which one can be better"
        yield case.config.wrong("algorithm.repeat_times", expected, "repeat_times: 4")


def _something_to_evaluate(case: Case) -> Found:
    if not case.config.buffer.explorer_input.eval_tasksets:
        key = "buffer.explorer_input.eval_tasksets"
        fix = "eval_tasksets: [{name: held_out, path: test.jsonl}]"
        yield case.config.fault(key, "at least one held-out task set to evaluate on", "none", fix)


def _tasksets(case: Case) -> Found:
    config, inputs = case.config, case.config.buffer.explorer_input
    if inputs.taskset and inputs.tasksets:
        key, fix = "buffer.explorer_input.tasksets", "move `taskset` into the list `tasksets`"
        yield config.fault(key, "either `taskset` or `tasksets`", "both", fix)
    if not inputs.taskset and not inputs.tasksets and config.mode not in WITHOUT_TASKS:
        key, fix = "buffer.explorer_input.taskset", "taskset: {name: train, path: train.jsonl}"
        yield config.fault(key, "a task set to train on", "none", fix)
    names: set[str] = set()
    ours = (None, "", ADAPTER, "agentscope_workflow_adapter", "agentscope_workflow_adapter_v1")
    typed = [f"buffer.explorer_input.default_{name}workflow_type" for name in ("", "eval_")]
    for key, taskset, held_out in user_tasksets(config):
        if not is_file(taskset) and str(taskset.storage_type).lower() != "sql":
            yield config.wrong(f"{key}.storage_type", "file or sql", "storage_type: file")
        else:
            yield from check_paths(config, key, taskset)
        if held_out and taskset.repeat_times < 1:
            yield config.wrong(f"{key}.repeat_times", "1 or more", "repeat_times: 1")
        repeated = held_out and taskset.name and taskset.name in names
        if repeated or "/" in taskset.name or taskset.name in (".", ".."):
            yield config.wrong(f"{key}.name", "an own name, without slashes", "name: held_out_2")
        names.add(taskset.name)
        typed += [f"{key}.default_workflow_type", f"{key}.format.workflow_key"]
    for key in typed:
        if value_of(config, key) not in ours:
            yield config.wrong(key, "our adapter, which is set by itself", "remove the line")


def _rows(case: Case) -> Found:
    """Check paths and rows of the task sets. For runs `check_data` is called after `prepare`."""
    for key, taskset, _ in user_tasksets(case.config):
        yield from check_paths(case.config, key, taskset)
    harvest = case.purpose is Purpose.HARVEST
    found = check_data(case.config, case.workflow, case.judge, harvest=harvest)
    yield from found.faults
    yield from found.warnings


_ASK = {"coreset": "size", "replay": "buffer"}
"""Sections about the rows of a data set, and the key without which they ask for nothing."""


def _rows_to_learn(case: Case) -> Found:
    """Check `coreset` and `replay`: where they can be used, and that there are rows for them."""
    config, buffer = case.config, experience_buffer(case.config)
    for name, key in _ASK.items():
        place, section = f"{name}.{key}", getattr(config, name)
        asked = getattr(section, key) is not None
        if config.mode in _WITH_ROLLOUTS and section != type(section)():
            expected = "nothing: only `mode: train` learns from the rows of a data set"
            yield config.wrong(place, expected, f"remove `{name}`, or give it to a stage")
        elif not asked and section != type(section)():
            fix = {"coreset": "size: 0.25", "replay": "buffer: runs/replay.jsonl"}[name]
            yield config.fault(place, f"`{key}`, without which nothing is done", "none", fix)
        elif asked and config.engine != "local":
            yield config.wrong(place, "nothing (engine: trinity)", f"engine: local, or no `{name}`")
        elif asked and buffer is not None and buffer.storage_type == BATCH_FILES:
            yield config.wrong(place, "nothing: batch_files are read whole", f"remove `{name}`")
    path = config.replay.buffer
    if path is not None and config.mode == "train":
        yield from _buffer(config, Path(path).expanduser())


def _buffer(config: AflowConfig, path: Path) -> Found:
    if path.is_dir() or path.suffix != ".jsonl":
        fix = "buffer: runs/replay.jsonl"
        yield config.wrong("replay.buffer", "a file, .jsonl, which is made if need be", fix)
        return
    try:
        read_buffer(path)
    except BadInput as error:
        yield from error.faults


def _lengths(case: Case) -> Found:
    config, model = case.config, case.config.model
    names = ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    total, prompt, response = (getattr(model, name) for name in names)
    small = [name for name in names if (value := getattr(model, name)) is not None and value < 1]
    for name in small:
        yield config.wrong(f"model.{name}", "1 or more tokens", f"{name}: 512")
    if small:
        return
    if total is None and (prompt is None or response is None):
        key, expected = "model.max_model_len", "the tokens of prompt and response together"
        yield config.fault(key, expected, "not set", "max_model_len: 2048")
        return
    total = prompt + response if total is None else total
    left = total - (total // 2 if response is None else response)
    if (left if prompt is None else prompt) <= 1 or (response and prompt and prompt > left):
        name = names[2] if response is not None else names[0]
        name = names[1] if prompt is not None else name
        expected = f"a prompt of 2 tokens or more and a response, at most {total} together"
        fix = f"max_response_tokens: {max(1, total // 2)}, or raise max_model_len"
        found = f"prompt: {prompt or left}, response: {response}"
        yield config.fault(f"model.{name}", expected, found, fix)


_BY_GROUP = words(
    """
    grpo grpo_verl step_wise_grpo gigpo rloo opmd opmd_verl asymre asymre_verl rec clipb clipv
    reinforce reinforceplusplus
    """
)
"""Advantage functions that compare the rollouts of one task, and so need at least two."""


def _advantage(case: Case) -> Found:
    """Check the group size, and where the advantage is computed; Trinity asserts it only later."""
    from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE

    config, algorithm = case.config, case.config.algorithm
    kind = ALGORITHM_TYPE.get(algorithm.algorithm_type)
    usual, own = kind.default_config(), algorithm.advantage_fn
    by_group = (own or usual.get("advantage_fn")) in (*_BY_GROUP, WORKFLOW_GIGPO)
    if by_group and algorithm.repeat_times < 2:
        expected = f"2 or more: {algorithm.algorithm_type} compares the rollouts of one task"
        fix = f"repeat_times: {max(8, usual.get('repeat_times', 8))}"
        yield config.wrong("algorithm.repeat_times", expected, fix)
    in_trainer = kind.compute_advantage_in_trainer
    if own and ADVANTAGE_FN.get(own).compute_in_trainer() != in_trainer:
        expected = f"one that is computed {'in' if in_trainer else 'before'} the trainer"
        fix = f"remove it: {algorithm.algorithm_type} brings its own"
        yield config.wrong("algorithm.advantage_fn", expected, fix)


def _batches(case: Case) -> Found:
    config, size = case.config, case.config.buffer.train_batch_size
    rows, tasks = training_rows(config), config.buffer.batch_size
    if rows and tasks > rows and not config.mix:  # a mix has no end
        expected = f"at most the {rows} rows of the training data"
        yield config.wrong("buffer.batch_size", expected, f"batch_size: {rows}")
    rollouts, key = tasks * config.algorithm.repeat_times, "buffer.train_batch_size"
    known = most_calls(case.workflow) if case.workflow is not None else None
    most = rollouts * (known if known is not None else MOST_CALLS)
    interval = config.synchronizer.sync_interval
    # Between two syncs the trainer takes `interval` batches, and the explorer goes on for as
    # many steps, plus its lead, before it waits.
    if size * interval > most * (interval + config.synchronizer.sync_offset):
        expected = f"at most {most}, the calls of {rollouts} rollouts: else it never fills"
        fix = f"remove train_batch_size, or set it to {most if known else rollouts}"
        yield config.wrong(key, expected, fix)
    elif size > rollouts and known is None:
        where, calls = config.positions.where(key), math.ceil(size / rollouts)
        yield f"{where}: fills only if a rollout makes {calls} calls or more on average"


def _evaluation(case: Case) -> Found:
    config, key = case.config, "explorer.eval_interval"
    steps, interval = total_steps(config), config.explorer.eval_interval
    given, where = config.positions.given, config.positions.where
    own = given(key) and not config.positions.inherited(key)
    if own and steps is not None and interval > steps and config.mode in ("both", "colocate"):
        fix = f"eval_interval: {max(1, steps // 4)}"
        yield config.wrong(key, f"at most {steps}, the steps of this run", fix)
    if steps == 0 and config.mode not in ("train", "serve"):
        expected = "at least one step: no more than rows x epochs"
        yield config.wrong("buffer.batch_size", expected, "lower it, or raise buffer.total_epochs")
    if not config.buffer.explorer_input.eval_tasksets and config.mode == "both":
        yield "no `buffer.explorer_input.eval_tasksets`: there will be no held-out score"
    warmup, save = "algorithm.optimizer.lr_warmup_steps", config.trainer.save_interval
    if steps and value_of(config, warmup) >= steps:
        yield f"{where(warmup)}: the run ends within the warm-up, after {steps} steps"
    key = "checkpoints.keep_best"
    keeping, saving = given(key) and config.checkpoints.keep_best, given("trainer.save_interval")
    if config.engine == "trinity":
        if config.quick_eval is not None:
            yield f"{where('quick_eval')}: read by `engine: local` only"
        if keeping:
            yield f"{where(key)}: verl keeps the newest only; `engine: local` the best too"
    elif keeping and saving and save and interval % save:
        told = f"let trainer.save_interval ({save}) divide explorer.eval_interval ({interval})"
        yield f"{where(key)}: only a step that is saved and evaluated can be the best: {told}"


# --- The local engine ----------------------------------------------------------------------------

_NEEDS_MORE = ("mix", "mix_chord", "on_policy_distill", "jsd")
"""Algorithms that need expert data or a teacher's logprobs beside the rollouts."""


def _local_settings(case: Case) -> Found:
    import torch

    config, adapters = case.config, case.config.model.lora_configs
    if config.algorithm.algorithm_type in _NEEDS_MORE and config.mode == "both":
        expected = "an algorithm that needs rollouts only"
        fix = "algorithm_type: multi_step_grpo, or engine: trinity"
        yield config.wrong("algorithm.algorithm_type", expected, fix)
    yield from _values(config, _LOCAL_VALUES, " (engine: local)")
    if adapters is not None and len(adapters) != 1:
        fix, found = "lora_configs: [{lora_rank: 16, lora_alpha: 32}]", f"{len(adapters)} adapters"
        yield config.fault("model.lora_configs", "one adapter, or null: all weights", found, fix)
    elif adapters:
        key, adapter = "model.lora_configs.0", adapters[0]
        for name in ("lora_rank", "lora_alpha"):
            if getattr(adapter, name) < 1:
                yield config.wrong(f"{key}.{name}", "1 or more", f"{name}: 16")
        for name in ("path", "exclude_modules"):
            if getattr(adapter, name) and not adapter.is_dummy:
                expected = "nothing: the local engine begins with a new adapter"
                yield config.wrong(f"{key}.{name}", expected, "merge the old one into the model")
    if config.deterministic:
        key = "explorer.max_repeat_times_per_runner"
        if value_of(config, key) is not None:
            yield config.wrong(key, "null with `deterministic: true`", "remove it")
        if config.local.dtype in ("bf16", "bfloat16"):
            yield config.wrong("local.dtype", "fp32 with `deterministic: true`", "dtype: fp32")
    device = config.local.device
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device, True):
        yield config.fault("local.device", f"a machine with {device}", "none", "device: auto")


def _quantised(case: Case) -> Found:
    """Refuse `local.load_in` where the base cannot be quantised, or all weights are trained."""
    from aflow_tune.engines.local.quantised import NEEDS_ADAPTER, obstacles

    config, key = case.config, "local.load_in"
    if config.local.load_in is None or not case.local_model:
        return
    told = f"load_in: {config.local.load_in}"
    if config.engine == "trinity" and case.purpose in RUNS:
        expected = "engine: local: verl 0.8 has no quantised trainer"
        fix = "engine: local, or remove it (docs/recipes.md says what vLLM can quantise)"
        yield config.fault(key, expected, f"{told} with engine: trinity", fix)
        return
    trains = case.purpose in RUNS and config.mode in ("both", "train")
    if trains and not config.model.lora_configs:
        fix = "model.lora_configs: [{lora_rank: 16, lora_alpha: 32}], or remove it"
        yield config.fault(key, NEEDS_ADAPTER, f"{told} and model.lora_configs: null", fix)
    if case.purpose is Purpose.ESTIMATE:  # the run may be for another machine
        return
    try:
        device = pick_device(config.local.device).type
    except BadInput:  # `_local_settings` reports the device
        return
    for expected, found, fix in obstacles(device):
        yield config.fault(key, expected, found, fix)


def _local_sampling(case: Case) -> Found:
    """Training rollouts must be sampled from the distribution whose gradient is computed."""
    config = case.config
    if config.mode == "pairs":  # of which another stage learns, without their probabilities
        return
    for place, _, held_out in user_tasksets(config):
        for name, default in (("top_p", 1.0), ("top_k", -1)):
            key = f"{place}.rollout_args.{name}"
            unset = name == "top_k" and not config.positions.given(key)
            if unset or value_of(config, key) is None:
                key = f"model.{name}"
            value = value_of(config, key)
            if not held_out and (value != 1 if name == "top_p" else value > 0):
                expected = f"{default}: training takes the gradient of the whole distribution"
                yield config.wrong(key, expected, f"{name}: {default}, or another in held-out sets")


_GPU_KEYS = words(
    """
    cluster.node_num cluster.gpu_per_node explorer.rollout_model.*_parallel_size
    explorer.rollout_model.gpu_memory_utilization explorer.rollout_model.enforce_eager
    explorer.rollout_model.enable_prefix_caching explorer.rollout_model.enable_chunked_prefill
    explorer.rollout_model.use_v1 explorer.rollout_model.dtype explorer.rollout_model.seed
    explorer.rollout_model.reasoning_parser explorer.rollout_model.extra_engine_args*
    algorithm.optimizer.clip_grad model.fully_sharded_loras model.max_cpu_loras
    trainer.trainer_type trainer.trainer_strategy trainer.use_dynamic_bsz
    trainer.use_remove_padding trainer.balance_batch trainer.critic_warmup
    trainer.max_token_len_per_gpu trainer.ulysses_sequence_parallel_size
    trainer.fix_actor_microbatch_loss_scale trainer.*offload* trainer.megatron*
    trainer.trainer_config* trainer.save_strategy synchronizer.sync_timeout
    """
)


def _unread(case: Case) -> Found:
    """Warn of settings that only vLLM and verl read: the local engine ignores them."""
    positions = case.config.positions
    places = {*positions.lines, *positions.overrides, *positions.arguments}
    unread = sorted(
        key
        for key in places
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in _GPU_KEYS)
        and not is_read(case.config, key)
        and not any(other.startswith(key + ".") for other in places)
    )
    if unread:
        yield f"not read by the local engine: {', '.join(display(key) for key in unread)}"


# --- Trinity's own engines -----------------------------------------------------------------------
# vLLM can quantise the sampler's weights when it loads them, which helps only with LoRA, where the
# base model is frozen: otherwise 16-bit weights arrive after each step. verl 0.8.0 cannot quantise.

_SAMPLER = "explorer.rollout_model.extra_engine_args"
_QUANTISING = re.compile(
    r"(explorer\.rollout_model\.extra_engine_args|trainer\.trainer_config)\."
    r"(?!.*\bqat\b)(.*\.)?(quantization|load_in_[48]bit|bnb_)\w*"
)
"""Keys that ask for quantised weights. `qat` is excluded: it computes in 16 bits."""


def _precision_and_gpus(case: Case) -> Found:
    """Refuse sampler and trainer on one GPU, and quantisation that would silently be ignored."""
    config, local = case.config, case.config.engine == "local"
    one_gpu = config.cluster.node_num == config.cluster.gpu_per_node == 1
    if not local and config.mode == "both" and one_gpu:
        yield config.fault("mode", "two GPUs or more", "both, on one GPU", "mode: colocate")
    if config.model.tinker.enable:
        return
    asked: dict[str, Any] = {}
    for key, value in config.flatten().items():
        found = _QUANTISING.match(key)
        if found and value not in (None, False):
            asked.setdefault(found[0], value)
    adapter = not local and config.model.lora_configs is not None
    for key, value in asked.items():
        if adapter and key.startswith(_SAMPLER):
            continue
        told = f"{key.rpartition('.')[2]}: {value}"
        expected = "weights of 16 or 32 bits: trained ones are not quantised (docs/recipes.md)"
        fix = "train an adapter with local.load_in: 4bit" if local else "train an adapter on vLLM"
        yield config.fault(key, expected, told, f"remove it, or {fix}")


def _dialogues(case: Case) -> Found:
    """Check the section `dialogues`."""
    config, section = case.config, case.config.dialogues
    if section.candidates < 1:
        yield config.wrong("dialogues.candidates", "1 or more tools", "candidates: 4")
    if section.catalogue is not None:
        try:
            catalogue_of(config)
        except BadInput as error:
            yield from error.faults
    weights, key = section.task_weights, "dialogues.task_weights"
    for kind in weights.keys() - set(TASK_TYPES):
        yield _unknown_name(config, f"{key}.{kind}", kind, TASK_TYPES)
    shares = [weights[kind] for kind in weights]
    if weights and (min(shares) < 0 or abs(sum(shares) - 1) > SUM_TOLERANCE):
        yield config.wrong(key, "shares of 0 or more, together 1", "selection: 0.5, planning: 0.5")


def _search(case: Case) -> Found:
    """Check the section `search`, before a search or where a file that has one is checked."""
    if case.purpose is Purpose.SEARCH or case.config.positions.given("search"):
        yield from check_search(case.config)


def _samples_policy(config: AflowConfig) -> bool:
    """Whether a search needs the model under `model`."""
    return config.search.executor is None or "policy" in config.search.propose


_OF_DATA = (Purpose.EVALUATE, Purpose.HARVEST, Purpose.SEARCH)
_ON_GPUS = ("both", "train", "colocate")

RULES: tuple[Rule, ...] = (
    Rule(_single_values),
    Rule(_registered),
    Rule(_needs),
    Rule(_something_to_evaluate, (*RUNS, Purpose.EVALUATE), modes=("bench",)),
    Rule(_something_to_prefer, modes=("pairs",)),
    Rule(lambda case: check_experiences(case.config), modes=("train",)),
    Rule(_rows_to_learn),
    Rule(_tasksets),
    Rule(lambda case: check_harvest(case.config), (Purpose.HARVEST,)),
    Rule(_search, (Purpose.SEARCH, Purpose.CHECK)),
    Rule(_dialogues),
    Rule(lambda case: check_mix(case.config), (*RUNS, Purpose.HARVEST)),
    Rule(_rows, _OF_DATA),
    Rule(lambda case: check_spend(case.config, tuned=case.local_model), (*RUNS, *_OF_DATA)),
    Rule(lambda case: check_devices(case.config)),
    Rule(_lengths),
    Rule(
        lambda case: (
            check_model(case.config, whole=case.purpose is not Purpose.ESTIMATE)
            if case.local_model
            else ()
        ),
        (*RUNS, Purpose.EVALUATE, Purpose.ASK),
    ),
    Rule(lambda case: check_model(case.config, policy=False), (Purpose.HARVEST,)),
    Rule(
        lambda case: check_model(case.config, policy=_samples_policy(case.config)),
        (Purpose.SEARCH,),
    ),
    Rule(lambda case: check_writer(case.config, case.workflow)),
    Rule(lambda case: check_harvest(case.config), modes=("harvest",)),
    Rule(_local_settings, engine="local"),
    Rule(lambda case: check_critic(case.config), modes=("both", "train", "colocate")),
    Rule(_local_sampling, engine="local"),
    Rule(_quantised, (*RUNS, Purpose.EVALUATE, Purpose.ASK)),
    Rule(_precision_and_gpus, engine="local"),
    Rule(_unread, engine="local"),
    Rule(_precision_and_gpus, modes=_ON_GPUS, engine="trinity"),
    Rule(_advantage, modes=_WITH_ROLLOUTS, together=True),
    Rule(_batches, modes=_WITH_ROLLOUTS, together=True),
    Rule(_evaluation, together=True),
)
