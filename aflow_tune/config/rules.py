"""Every rule that refuses or doubts a configuration, in one table: `RULES`.

A rule yields faults, and texts, which are warnings. The table says for which purposes, modes and
engine it holds. All rules of a case are asked, and all faults are told at once; rules over
several settings only where each single one is sound. Rules about what the named files hold are
in `file_rules.py`, those of a mix in `mixes.py`, of the devices in `engine.py`, of models behind
APIs in `accounting.py`.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from aflow_tune.config.accounting import check_spend
from aflow_tune.config.engine import check_devices
from aflow_tune.config.file_rules import (
    check_data,
    check_experiences,
    check_harvest,
    check_model,
    check_paths,
    check_writer,
)
from aflow_tune.config.mixes import check_mix
from aflow_tune.config.schema import nearest
from aflow_tune.config.settings import AflowConfig, words
from aflow_tune.config.tasksets import (
    FROM_DATA,
    WITHOUT_TASKS,
    experience_buffer,
    is_file,
    total_steps,
    training_rows,
    user_tasksets,
)
from aflow_tune.data.checks import Findings
from aflow_tune.data.fields import most_calls
from aflow_tune.errors import Fault
from aflow_tune.scoring.rewards import reward_faults
from aflow_tune.sections import display

ADAPTER = "aflow_tune.engines.trinity.rollout.adapter.WorkflowAdapter"
MONITOR = "aflow_tune.engines.trinity.training.monitor.RunMonitor"
MOST_CALLS = 64
"""Calls of one rollout that are thought possible where the function's source does not tell."""


class Purpose(Enum):
    """What a configuration is made ready for."""

    RUN = "a run, which begins now"
    CHECK = "a run, of which nothing is started"
    ESTIMATE = "a run, of whose model only the sizes are read"
    EVALUATE = "an evaluation on the held-out task sets"
    HARVEST = "a harvest outside of a run: the model that will be tuned need not be here"
    ASK = "answers of the model to problems that come later"


RUNS = (Purpose.RUN, Purpose.CHECK, Purpose.ESTIMATE)


@dataclass(frozen=True)
class Case:
    """A configuration, what it is to be used for, and the functions where they are known."""

    config: AflowConfig
    purpose: Purpose = Purpose.RUN
    workflow: Callable[..., Any] | None = None
    judge: Callable[..., Any] | None = None
    local_model: bool = True
    """Whether the configured model is going to be loaded."""


Found = Iterable[Fault | str]


class Rule(NamedTuple):
    """One line of the table. `engine` and `modes` None: whatever they are."""

    check: Callable[[Case], Found]
    purposes: Sequence[Purpose] = RUNS
    modes: Sequence[str] | None = None
    engine: str | None = None
    together: bool = False
    """Asked only where no other rule found a fault."""

    def holds(self, case: Case) -> bool:
        """Whether it is asked in this case."""
        modes, engine = self.modes or [case.config.mode], self.engine or case.config.engine
        return (
            case.purpose in self.purposes
            and case.config.mode in modes
            and case.config.engine == engine
        )


def check_settings(case: Case, faults: Sequence[Fault] = ()) -> Findings:
    """What keeps a configuration from its purpose, and what is doubtful about it.

    Args:
        faults: what was found wrong before.
    """
    found = Findings()
    for together in (False, True):
        for rule in RULES:
            if rule.together is together and rule.holds(case):
                for item in rule.check(case):
                    if isinstance(item, Fault):
                        found.faults.append(item)
                    else:
                        found.warnings.append(item)
        if found.faults:
            break
    found.faults += faults
    # Several rules may take offence at one value; the first says it best.
    found.faults = list({fault.where: fault for fault in reversed(found.faults)}.values())[::-1]
    return found


# --- Single settings: choices, ranges, registered names -----------------------------------------

_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("both", "explore", "train", "bench", "harvest", "serve", "colocate"),
    "explorer.concurrent_mode": ("asynchronous", "sequential", "multi-threading"),
    "trainer.trainer_type": ("verl", "tinker"),
    "trainer.save_hf_checkpoint": ("last", "always", "never"),
    "algorithm.loss_agg_mode": words(
        "token-mean seq-mean-token-sum seq-mean-token-mean seq-mean-token-sum-norm"
    ),
    "algorithm.optimizer.lr_scheduler_type": ("constant", "linear", "cosine"),
}

_Value = tuple[str, Callable[[Any], bool], str, str]
"""A key, what its value must fulfil, the same in words, and a value that does."""

_AT_LEAST = {
    1: words(
        """
        algorithm.repeat_times buffer.batch_size buffer.total_epochs buffer.total_steps
        trainer.total_steps explorer.eval_interval explorer.runner_per_model explorer.max_timeout
        explorer.rollout_model.engine_num explorer.max_repeat_times_per_runner
        synchronizer.sync_interval synchronizer.sync_timeout local.threads local.max_batch
        local.micro_batch_tokens quick_eval
        """
    ),
    0: words(
        """
        buffer.train_batch_size trainer.save_interval trainer.max_checkpoints_to_keep
        checkpoints.keep_best explorer.max_retry_times synchronizer.sync_offset report.transcripts
        """
    ),
}
"""Numbers, or null where the schema has it, that may not be less."""
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
    ("seed", lambda v: 0 <= v < 2**32, "from 0 to 4294967295", "0"),
    ("name", lambda v: bool(v.strip()), "a name for the run folder", "first_run"),
)

_LOCAL_MODES = ("both", "train", "bench", "harvest")
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
    (
        "algorithm.optimizer.optimizer_type",
        lambda v: v in ("adam", "adamw"),
        "adam or adamw",
        "adam",
    ),
)
"""Values that would silently change what is learned if the local engine ignored them."""


def value_of(config: Any, key: str) -> Any:
    """The value of a dotted key path of dataclasses."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def _values(config: AflowConfig, table: Sequence[_Value], engine: str = "") -> Found:
    for key, good, expected, example in table:
        value = value_of(config, key)
        if not good(value):
            value = getattr(value, "value", value)
            found, fix = str(value) or "''", f"{key.rpartition('.')[2]}: {example}"
            yield config.fault(key, expected + engine, found, fix)


def _single_values(case: Case) -> Found:
    yield from _values(case.config, _RANGES)
    for least, keys in _AT_LEAST.items():
        for key in keys:
            value = value_of(case.config, key)
            if value is not None and value < least:
                fix = f"{key.rpartition('.')[2]}: 8"
                yield case.config.fault(key, f"{least} or more", str(value), fix)
    for key, choices in _CHOICES.items():
        value = value_of(case.config, key)
        if value is not None and value not in choices:
            yield _unknown_name(case.config, key, value, choices)


def _unknown_name(config: AflowConfig, key: str, value: str, words: Iterable[str]) -> Fault:
    words = sorted(set(words))
    fix = f"{key.rpartition('.')[2]}: {nearest(str(value), words, 0.5) or words[0]}"
    return config.fault(key, "one of " + ", ".join(words), repr(value), fix)


def _registered(case: Case) -> Found:
    """Names that Trinity looks up in its registries, or dotted paths of classes."""
    from trinity.algorithm import ALGORITHM_TYPE, SAMPLE_STRATEGY

    config, algorithm = case.config, case.config.algorithm
    named: list[tuple[str, Any, Any]] = [
        ("algorithm.algorithm_type", algorithm.algorithm_type, ALGORITHM_TYPE),
        ("algorithm.sample_strategy", algorithm.sample_strategy, SAMPLE_STRATEGY),
    ]
    for name, registry in _functions().items():
        named.append((f"algorithm.{name}", getattr(algorithm, name), registry))
    for number, operator in enumerate(config.data_processor.experience_pipeline.operators):
        from trinity.buffer.operators import EXPERIENCE_OPERATORS

        key = f"data_processor.experience_pipeline.operators.{number}.name"
        named.append((key, operator.name, EXPERIENCE_OPERATORS))
    sources: list[tuple[str, Any]] = [(key, taskset) for key, taskset, _ in user_tasksets(config)]
    if (buffer := experience_buffer(config)) is not None:
        sources.append(("buffer.trainer_input.experience_buffer", buffer))
    for key, source in sources:
        for name in ("data_selector", "task_selector"):
            kind = getattr(getattr(source, name, None), "selector_type", None)
            if kind not in (None, "sequential"):  # importing the others takes a second
                from trinity.buffer.selector import SELECTORS

                named.append((f"{key}.{name}.selector_type", kind, SELECTORS))
    for key, value, registry in named:
        known = [*registry._default_mapping, *registry.modules]
        if value is None or value in known:
            continue
        try:
            if "." not in value or registry.get(value) is None:
                yield _unknown_name(config, key, value, known)
        except (ImportError, AttributeError, KeyError) as error:
            fix = "write package.module.ClassName of something that can be imported"
            yield config.fault(key, "the dotted path of a class", f"{value}: {error}", fix)


def _functions() -> dict[str, Any]:
    """The registries of the functions that an algorithm is made of, by their settings."""
    from trinity.algorithm import ADVANTAGE_FN, ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN

    return {
        "advantage_fn": ADVANTAGE_FN,
        "policy_loss_fn": POLICY_LOSS_FN,
        "kl_loss_fn": KL_FN,
        "kl_penalty_fn": KL_FN,
        "entropy_loss_fn": ENTROPY_LOSS_FN,
    }


def _function_arguments(case: Case) -> Found:
    """Arguments of the algorithm's functions that these do not take."""
    from trinity.algorithm import ALGORITHM_TYPE

    algorithm = case.config.algorithm
    for name, registry in _functions().items():
        arguments = getattr(algorithm, f"{name}_args")
        try:  # a name that nothing stands for is told by `_registered`
            usual = ALGORITHM_TYPE.get(algorithm.algorithm_type).default_config()
            function = getattr(algorithm, name) or usual.get(name) or "none"
            known = _parameters(registry.get(function)) if arguments else None
        except (ImportError, AttributeError, KeyError, ValueError):
            continue
        for given in arguments or {}:
            if known is not None and given not in known:
                close = nearest(str(given), known, 0.5)
                fix = f"did you mean `{close}`?" if close else "leave it out"
                expected = f"an argument of {function}: {', '.join(known) or 'it has none'}"
                key = f"algorithm.{name}_args.{given}"
                yield case.config.fault(key, expected, f"`{given}`", fix)


def _parameters(kind: type) -> list[str] | None:
    """What a class is made with, those that it hands on to its bases included; None: anything."""
    names: list[str] = []
    for base in kind.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        named = [item.name for item in parameters if item.kind is not item.VAR_KEYWORD]
        names += [name for name in named if name not in ("self", "backend", *names)]
        if len(named) == len(parameters):
            return names
    return None


# --- What a run needs ---------------------------------------------------------------------------


def _needed_switches(case: Case) -> Found:
    for name in ("enable_history", "enable_openai_api"):
        key = f"explorer.rollout_model.{name}"
        if case.config.positions.given(key) and not value_of(case.config, key):
            expected = "true: recorded calls are trained on, and functions call this API"
            yield case.config.fault(key, expected, "false", f"{name}: true")


def _algorithm_of_mode(case: Case) -> Found:
    config, kind = case.config, case.config.algorithm.algorithm_type
    of_data, key = config.mode == "train", "algorithm.algorithm_type"
    if not of_data and kind in FROM_DATA:
        expected = f"an algorithm that learns from rollouts (mode: {config.mode})"
        fix = "mode: train, or algorithm_type: multi_step_grpo"
        yield config.fault(key, expected, f"{kind!r}, which learns from a data set alone", fix)
    elif of_data and kind not in FROM_DATA and config.engine == "local":
        expected = f"one of {', '.join(FROM_DATA)}: `mode: train` learns from a data set alone"
        fix = "algorithm_type: sft, or mode: both to learn from rollouts"
        yield config.fault(key, expected, repr(kind), fix)


def _tasksets(case: Case) -> Found:
    config, inputs = case.config, case.config.buffer.explorer_input
    if inputs.taskset and inputs.tasksets:
        expected, fix = "either `taskset` or `tasksets`", "move `taskset` into the list `tasksets`"
        yield config.fault("buffer.explorer_input.tasksets", expected, "both", fix)
    if not inputs.taskset and not inputs.tasksets and config.mode not in WITHOUT_TASKS:
        fix = "add below buffer.explorer_input: taskset: {name: train, path: data/train.jsonl}"
        key = "buffer.explorer_input.taskset"
        yield config.fault(key, "a task set to train on", "none", fix)
    names: dict[str, str] = {}
    for key, taskset, held_out in user_tasksets(config):
        if not is_file(taskset) and str(taskset.storage_type).lower() != "sql":
            found, fix = repr(taskset.storage_type), "storage_type: file"
            yield config.fault(f"{key}.storage_type", "file or sql", found, fix)
        else:
            yield from check_paths(config, key, taskset)
        if held_out and taskset.repeat_times < 1:
            found, fix = str(taskset.repeat_times), "repeat_times: 1"
            yield config.fault(f"{key}.repeat_times", "1 or more", found, fix)
        repeated = held_out and taskset.name and taskset.name in names
        if repeated or "/" in taskset.name or taskset.name in (".", ".."):
            expected = "a name of its own, without slashes"
            yield config.fault(f"{key}.name", expected, repr(taskset.name), "name: held_out_2")
        names.setdefault(taskset.name, key)
        if taskset.format.workflow_key:
            expected, fix = "one workflow function for all rows", "remove workflow_key"
            found = repr(taskset.format.workflow_key)
            yield config.fault(f"{key}.format.workflow_key", expected, found, fix)
    ours = (None, "", ADAPTER, "agentscope_workflow_adapter", "agentscope_workflow_adapter_v1")
    typed = [f"{key}.default_workflow_type" for key, *_ in user_tasksets(config)]
    typed += [f"buffer.explorer_input.default_{name}workflow_type" for name in ("", "eval_")]
    flat = config.flatten()
    for key in typed:
        if flat[key] not in ours:
            fix = "remove the line and name your function with `workflow: path/file.py:function`"
            expected = "our adapter, which is set by itself"
            yield config.fault(key, expected, repr(flat[key]), fix)


def _something_to_evaluate(case: Case) -> Found:
    if not case.config.buffer.explorer_input.eval_tasksets:
        key = "buffer.explorer_input.eval_tasksets"
        fix = "buffer: {explorer_input: {eval_tasksets: [{name: held_out, path: test.jsonl}]}}"
        yield case.config.fault(key, "at least one held-out task set to evaluate on", "none", fix)


def _rows(case: Case) -> Found:
    """What the task sets hold. Of a run it is looked at after its settings (`check_data`)."""
    for key, taskset, _ in user_tasksets(case.config):
        yield from check_paths(case.config, key, taskset)
    harvest = case.purpose is Purpose.HARVEST
    found = check_data(case.config, case.workflow, case.judge, harvest=harvest)
    yield from found.faults
    yield from found.warnings


def _rewards(case: Case) -> Found:
    for fault in reward_faults(case.config.rewards):
        yield replace(fault, where=case.config.positions.where(fault.where))


def _lengths(case: Case) -> Found:
    config, model = case.config, case.config.model
    for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens"):
        value = getattr(model, name)
        if value is not None and value < 1:
            yield config.fault(f"model.{name}", "1 or more tokens", str(value), f"{name}: 512")
            return
    total, prompt = model.max_model_len, model.max_prompt_tokens
    response = model.max_response_tokens
    if total is None and (prompt is None or response is None):
        fix = "model: {max_model_len: 2048, max_response_tokens: 512}"
        expected = "the tokens of prompt and response together"
        yield config.fault("model.max_model_len", expected, "not set", fix)
        return
    total = prompt + response if total is None else total
    if prompt is not None and response is not None and prompt + response > total:
        fix = f"max_model_len: {prompt + response}"
        expected, found = f"at most {total} together", f"{prompt} + {response} tokens"
        yield config.fault("model.max_prompt_tokens", expected, found, fix)
        return
    left = total // 2 if response is None else total - response
    if (left if prompt is None else prompt) <= 1:
        name = "max_response_tokens" if response is not None else "max_model_len"
        if config.positions.given("model.max_prompt_tokens"):
            name = "max_prompt_tokens"
        expected = f"room for a prompt of more than one token in max_model_len ({total})"
        fix = f"max_response_tokens: {max(1, total // 2)}, or raise max_model_len"
        yield config.fault(f"model.{name}", expected, str(getattr(model, name)), fix)


def _monitor(case: Case) -> Found:
    kind, key = case.config.monitor.monitor_type, "monitor.monitor_type"
    known = ("tensorboard", "wandb", "mlflow", "swanlab")
    if "." not in kind and kind not in known:
        yield _unknown_name(case.config, key, kind, known)
    elif kind not in ("tensorboard", MONITOR):
        yield (
            f"{case.config.positions.where(key)}: with {kind} the live panel and the report's "
            "curves stay empty; only tensorboard writes metrics.jsonl too"
        )


def _system_prompt(case: Case) -> Found:
    """A function that cannot do without a `system_prompt` needs a configured one."""
    if case.workflow is None or case.config.rollout.system_prompt is not None:
        return
    asked = inspect.signature(case.workflow).parameters.get("system_prompt")
    if asked is not None and asked.default is asked.empty and asked.annotation in (str, "str"):
        yield case.config.fault(
            "rollout.system_prompt",
            "a text: the workflow function takes `system_prompt` and has no default for it",
            "nothing",
            "set `rollout: {system_prompt: ...}`, or give the parameter a default",
        )


# --- Settings that are sound by themselves, together --------------------------------------------

_BY_GROUP = words(
    """
    grpo grpo_verl step_wise_grpo gigpo rloo opmd opmd_verl asymre asymre_verl rec clipb clipv
    reinforce reinforceplusplus
    """
)
"""Advantages that compare the rollouts of one task: one rollout has nothing to compare with."""


def _group(case: Case) -> Found:
    from trinity.algorithm import ALGORITHM_TYPE

    algorithm, key = case.config.algorithm, "algorithm.repeat_times"
    usual = ALGORITHM_TYPE.get(algorithm.algorithm_type).default_config()
    compared = (algorithm.advantage_fn or usual.get("advantage_fn")) in _BY_GROUP
    if compared and algorithm.repeat_times < 2:
        expected = f"2 or more: {algorithm.algorithm_type} compares the rollouts of one task"
        fix = f"{key}: {max(8, usual.get('repeat_times', 8))}"
        yield case.config.fault(key, expected, str(algorithm.repeat_times), fix)


def _advantage(case: Case) -> Found:
    """An advantage function works in the explorer's pipeline or in the trainer, as its type
    of algorithm does; Trinity asserts it once everything was started."""
    from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE

    algorithm, key = case.config.algorithm, "algorithm.advantage_fn"
    if not case.config.positions.given(key) or not algorithm.advantage_fn:
        return
    in_trainer = ALGORITHM_TYPE.get(algorithm.algorithm_type).compute_advantage_in_trainer
    if ADVANTAGE_FN.get(algorithm.advantage_fn).compute_in_trainer() != in_trainer:
        place = "in the trainer" if in_trainer else "from whole groups, before the trainer"
        expected = f"one that is computed {place}, as {algorithm.algorithm_type} does"
        fix = "remove advantage_fn: the algorithm brings its own"
        yield case.config.fault(key, expected, repr(algorithm.advantage_fn), fix)


def _batch(case: Case) -> Found:
    rows, size = training_rows(case.config), case.config.buffer.batch_size
    if rows and size > rows and not case.config.mix:  # a mix has no end
        expected = f"at most the {rows} rows of the training data"
        yield case.config.fault("buffer.batch_size", expected, str(size), f"batch_size: {rows}")


def _train_batch(case: Case) -> Found:
    config, key = case.config, "buffer.train_batch_size"
    size, repeats = config.buffer.train_batch_size, config.algorithm.repeat_times
    rollouts = config.buffer.batch_size * repeats
    if not size:
        return
    known = most_calls(case.workflow) if case.workflow is not None else None
    most = rollouts * (known if known is not None else MOST_CALLS)
    interval = config.synchronizer.sync_interval
    # Between two syncs the trainer takes `interval` batches, and the explorer goes on for as
    # many steps, plus its lead, before it waits.
    if size * interval > most * (interval + config.synchronizer.sync_offset):
        calls = f"at most {known}" if known is not None else f"even {MOST_CALLS}"
        expected = (
            f"at most {most}: {config.buffer.batch_size} tasks x {repeats} rollouts x {calls} calls"
        )
        found = f"{size}, which never fills, so that training would wait for ever"
        fix = f"remove train_batch_size, or set it to {most if known else rollouts}"
        yield config.fault(key, expected, found, fix)
    elif size > rollouts and known is None:
        yield (
            f"{config.positions.where(key)}: fills only if a rollout makes "
            f"{math.ceil(size / rollouts)} calls on average ({rollouts} rollouts a step)"
        )


def _evaluation(case: Case) -> Found:
    config, key = case.config, "explorer.eval_interval"
    steps, interval = total_steps(config), config.explorer.eval_interval
    given = config.positions.given(key) and not config.positions.inherited(key)
    if given and steps is not None and interval > steps and config.mode in ("both", "colocate"):
        expected, fix = f"at most {steps}, the steps of this run", f"{max(1, steps // 4)}"
        yield config.fault(key, expected, str(interval), f"eval_interval: {fix}")
    if steps == 0 and config.mode not in ("train", "serve"):
        found = f"0 steps: fewer rows x epochs than the batch of {config.buffer.batch_size}"
        fix = "lower buffer.batch_size, add rows, or raise buffer.total_epochs"
        yield config.fault("buffer.batch_size", "at least one step", found, fix)
    if config.quick_eval is not None and config.engine == "trinity":
        yield (
            f"{config.positions.where('quick_eval')}: Trinity's own explorer evaluates on every "
            "held-out row each time; only `engine: local` draws the sample"
        )
    if not config.buffer.explorer_input.eval_tasksets and config.mode == "both":
        yield "no `buffer.explorer_input.eval_tasksets`: there will be no held-out score"
    warmup = config.algorithm.optimizer.lr_warmup_steps
    if steps and warmup >= steps:
        yield (
            f"{config.positions.where('algorithm.optimizer.lr_warmup_steps')}: {warmup} steps of "
            f"warm-up in a run of {steps}: the rate never gets to {config.algorithm.optimizer.lr}"
        )


def _best_checkpoints(case: Case) -> Found:
    config, key = case.config, "checkpoints.keep_best"
    save, interval = config.trainer.save_interval, config.explorer.eval_interval
    if not config.positions.given(key) or config.checkpoints.keep_best == 0:
        return
    where = config.positions.where(key)
    if config.engine == "trinity":
        yield f"{where}: verl keeps the newest only; `engine: local` the best too"
    elif config.positions.given("trainer.save_interval") and save and interval % save:
        yield (
            f"{where}: only a step that is both saved and evaluated can be the best: let "
            f"trainer.save_interval ({save}) divide explorer.eval_interval ({interval})"
        )


# --- The local engine ----------------------------------------------------------------------------

_NEEDS_MORE = {
    "mix": "expert data beside the rollouts",
    "mix_chord": "expert data beside the rollouts",
    "on_policy_distill": "a teacher's log-probabilities in every experience",
    "jsd": "a teacher's log-probabilities in every experience",
}
"""Algorithms that read what rollouts of a workflow function do not bring."""

_IGNORED = words(
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
"""Key patterns that only concern GPUs; the local engine does not read them."""


def _local_algorithm(case: Case) -> Found:
    from trinity.algorithm import ALGORITHM_TYPE

    config, key = case.config, "algorithm.algorithm_type"
    kind, expected = config.algorithm.algorithm_type, "an algorithm that needs rollouts only"
    if kind in _NEEDS_MORE:
        fix = "algorithm_type: multi_step_grpo, or engine: trinity"
        yield config.fault(key, expected, f"{kind!r}, which needs {_NEEDS_MORE[kind]}", fix)
        return
    known = kind in ALGORITHM_TYPE._default_mapping or kind in ALGORITHM_TYPE.modules
    if known and ALGORITHM_TYPE.get(kind).use_critic:
        fix = "algorithm_type: multi_step_grpo"
        yield config.fault(key, expected, f"{kind!r}, which needs a critic", fix)


def _local_settings(case: Case) -> Found:
    config = case.config
    yield from _values(config, _LOCAL_VALUES, " (engine: local)")
    buffer = config.buffer.trainer_input.experience_buffer
    if buffer is not None and buffer.replay_buffer and buffer.replay_buffer.enable:
        key = "buffer.trainer_input.experience_buffer.replay_buffer.enable"
        expected = "false: every step trains on its own rollouts (engine: local)"
        yield config.fault(key, expected, "true", "enable: false")


def _local_adapter(case: Case) -> Found:
    config, adapters = case.config, case.config.model.lora_configs
    if adapters is None:
        return
    if len(adapters) != 1:
        expected = "one adapter, or no lora_configs to train the full weights"
        fix = "lora_configs: [{lora_rank: 16, lora_alpha: 32}]"
        yield config.fault("model.lora_configs", expected, f"{len(adapters)} adapters", fix)
        return
    adapter, key = adapters[0], "model.lora_configs.0"
    for name in ("lora_rank", "lora_alpha"):
        if getattr(adapter, name) < 1:
            found = str(getattr(adapter, name))
            yield config.fault(f"{key}.{name}", "1 or more", found, f"{name}: 16")
    for name, fix in (
        ("path", "merge the adapter into the model and train a new one"),
        ("exclude_modules", "name the modules to adapt in target_modules"),
    ):
        if getattr(adapter, name) and not adapter.is_dummy:
            expected = "nothing: the local engine begins with a new adapter"
            yield config.fault(f"{key}.{name}", expected, repr(getattr(adapter, name)), fix)


def _local_sampling(case: Case) -> Found:
    """Training rollouts must be drawn from the distribution whose gradient is taken."""
    config, model = case.config, case.config.model
    whole = model.max_model_len
    for key, taskset, held_out in user_tasksets(config):
        rollout, top_k = taskset.rollout_args, f"{key}.rollout_args.top_k"
        limit = rollout.max_tokens
        if limit is not None and (limit < 1 or (whole is not None and limit >= whole)):
            expected = f"from 1 to less than max_model_len ({whole})"
            fix = "remove it: model.max_response_tokens is used"
            yield config.fault(f"{key}.rollout_args.max_tokens", expected, str(limit), fix)
        own_top_k = rollout.top_k if config.positions.given(top_k) else None
        for name, own, general, default in (
            ("top_p", rollout.top_p, model.top_p, "1.0"),
            ("top_k", own_top_k, model.top_k, "-1"),
        ):
            value = general if own is None else own
            if not held_out and (value != 1 if name == "top_p" else value > 0):
                place = f"model.{name}" if own is None else f"{key}.rollout_args.{name}"
                fix = f"{name}: {default} (a held-out task set may have its own rollout_args)"
                expected = f"{default}: training takes the gradient of the whole distribution"
                yield config.fault(place, expected, str(value), fix)


def _deterministic(case: Case) -> Found:
    import torch

    config, device = case.config, case.config.local.device
    if config.deterministic:
        key, name = "explorer.max_repeat_times_per_runner", "max_repeat_times_per_runner"
        if value_of(config, key) is not None:
            expected = "null with `deterministic: true`: it splits groups by who is free"
            yield config.fault(key, expected, str(value_of(config, key)), f"{name}: null")
        if config.local.dtype in ("bf16", "bfloat16"):
            expected = "fp32 with `deterministic: true`"
            yield config.fault("local.dtype", expected, config.local.dtype, "dtype: fp32")
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device, True):
        yield config.fault("local.device", f"a machine with {device}", "none", "device: auto")


def _unread(case: Case) -> Found:
    positions, buffer = case.config.positions, case.config.buffer
    places = {**positions.lines, **positions.overrides, **positions.arguments}
    unread = sorted(
        key
        for key in places
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in _IGNORED)
        and not any(other.startswith(key + ".") for other in places)
    )
    rollouts = case.config.mode == "both" and case.config.algorithm.sample_strategy is None
    if rollouts and buffer.train_batch_size:  # every step trains on all of its rollouts
        unread.append("buffer.train_batch_size")
    if unread:
        yield f"not read by the local engine: {', '.join(display(key) for key in unread)}"


# --- Trinity's own engines -----------------------------------------------------------------------
# vLLM can quantise the sampler's weights while it loads them (`quantization: fp8` or
# `bitsandbytes`), which is of use only for a base that stays as it is, with LoRA: else 16-bit
# weights arrive after every step. verl 0.8.0 cannot: its FSDP engine loads with a plain
# `from_pretrained` and casts every parameter to one floating-point type.

_SAMPLER = "explorer.rollout_model.extra_engine_args"
_QUANTISING = re.compile(
    r"(explorer\.rollout_model\.extra_engine_args|trainer\.trainer_config)\."
    r"(?!.*\bqat\b)(.*\.)?(quantization|load_in_[48]bit|bnb_)\w*"
)
"""Keys that ask for quantised weights. `qat`, which trains for a quantised deployment, itself
computes in 16 bits."""


def _one_gpu(case: Case) -> Found:
    cluster = case.config.cluster
    if cluster.node_num == cluster.gpu_per_node == 1:
        expected = "a GPU for the sampler and one for the trainer"
        yield case.config.fault("mode", expected, "both, on one GPU", "mode: colocate")


def _quantised(case: Case) -> Found:
    """Weights asked for in 8 or 4 bits that would silently be in 16 or 32."""
    local = case.config.engine == "local"
    if case.config.model.tinker.enable:
        return
    asked: dict[str, Any] = {}
    for key, value in case.config.flatten().items():
        found = _QUANTISING.match(key)
        of_sampler = key.startswith(_SAMPLER)
        if found and value not in (None, False) and (local or not of_sampler):
            asked.setdefault(found[0], value)
    for key, value in asked.items():
        expected = f"plain weights: {'the local engine' if local else 'verl'} cannot quantise them"
        halves = "local.dtype: bf16 halves fp32, or engine: trinity (docs/recipes.md)"
        if not local:
            halves = (
                "trainer.trainer_config: {actor: {fsdp_config: {model_dtype: bfloat16}}} halves"
            )
        found_text = f"{key.rpartition('.')[2]}: {value}"
        yield case.config.fault(key, expected, found_text, f"remove it; {halves}")


def _vllm_quantised(case: Case) -> Found:
    key = f"{_SAMPLER}.quantization"
    kind = case.config.explorer.rollout_model.extra_engine_args.get("quantization")
    if kind is not None and case.config.model.lora_configs is None:
        expected = "16 bits: trained weights arrive so after every step (only LoRA's base stays)"
        fix = "remove it, or train an adapter: model: {lora_configs: [{lora_rank: 16}]}"
        yield case.config.fault(key, expected, repr(kind), fix)
    elif kind is not None:
        yield (
            f"{case.config.positions.where(key)}: the sampler's base is {kind}, the trainer's is "
            "not: they give one answer slightly different probabilities, which the loss sees as "
            "a policy that is a little old"
        )


# --- The table -----------------------------------------------------------------------------------


def _models(case: Case) -> Found:
    whole = case.purpose is not Purpose.ESTIMATE
    return check_model(case.config, whole=whole) if case.local_model else ()


_WITH_MODEL = (*RUNS, Purpose.EVALUATE, Purpose.ASK)
_OF_DATA = (Purpose.EVALUATE, Purpose.HARVEST)
_ON_GPUS = ("both", "train", "colocate")
_WITH_ROLLOUTS = ("both", "explore", "colocate")

RULES: tuple[Rule, ...] = (
    Rule(_single_values),
    Rule(_registered),
    Rule(_function_arguments),
    Rule(_needed_switches),
    Rule(_algorithm_of_mode, modes=(*_WITH_ROLLOUTS, "train")),
    Rule(_something_to_evaluate, (*RUNS, Purpose.EVALUATE), modes=("bench",)),
    Rule(lambda case: check_experiences(case.config), modes=("train",)),
    Rule(_tasksets),
    Rule(lambda case: check_harvest(case.config), (Purpose.HARVEST,)),
    Rule(lambda case: check_mix(case.config), (*RUNS, Purpose.HARVEST)),
    Rule(_rows, _OF_DATA),
    Rule(lambda case: check_spend(case.config, tuned=case.local_model), (*RUNS, *_OF_DATA)),
    Rule(lambda case: check_devices(case.config)),
    Rule(_rewards),
    Rule(_lengths),
    Rule(_monitor),
    Rule(_system_prompt),
    Rule(_models, _WITH_MODEL),
    Rule(lambda case: check_model(case.config, policy=False), (Purpose.HARVEST,)),
    Rule(lambda case: check_writer(case.config, case.workflow)),
    Rule(lambda case: check_harvest(case.config), modes=("harvest",)),
    Rule(_local_algorithm, modes=("both",), engine="local"),
    Rule(_local_settings, engine="local"),
    Rule(_local_adapter, engine="local"),
    Rule(_local_sampling, engine="local"),
    Rule(_deterministic, engine="local"),
    Rule(_quantised, engine="local"),
    Rule(_unread, engine="local"),
    Rule(_one_gpu, modes=("both",), engine="trinity"),
    Rule(_quantised, modes=_ON_GPUS, engine="trinity"),
    Rule(_vllm_quantised, modes=_ON_GPUS, engine="trinity"),
    Rule(_group, modes=_WITH_ROLLOUTS, together=True),
    Rule(_advantage, modes=_WITH_ROLLOUTS, together=True),
    Rule(_batch, modes=_WITH_ROLLOUTS, together=True),
    Rule(_train_batch, modes=_WITH_ROLLOUTS, together=True),
    Rule(_evaluation, together=True),
    Rule(_best_checkpoints, together=True),
)
