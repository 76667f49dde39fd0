"""`aflow-tune run --dry-run`: one step of a configuration with a scripted tiny model as the policy.

Everything from the rows to the optimiser step is that of a run, except the policy, a tiny random
model with scripted answers (`script.py`) and the real model's tokenizer where that is on this
machine, and models behind an API, unless `--call-apis`. `engine: trinity` uses the local engines.

Everything is written into a temporary folder; the run's own folder is neither read nor created. A
Ray is started for the dry run; a running one is not joined.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trinity.common.constants import SyncStyle

from aflow_tune.config.accounting import spend_of
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import COUNTING_STRATEGIES, Purpose, prepare
from aflow_tune.config.quiet import end_log, log_to
from aflow_tune.config.stages import parts_of
from aflow_tune.config.tasksets import materialise_tasksets, total_steps, user_tasksets
from aflow_tune.config.validate import functions_of
from aflow_tune.dry_run.script import (
    ADAPTER,
    BAD,
    GOOD,
    SCRIPT_KEY,
    TRUTH,
    TRUTH_FIELDS,
    WORDS,
    PlayedRun,
    Script,
    read_answers,
    read_runs,
)
from aflow_tune.engines.local.models import load_model
from aflow_tune.engines.local.scripted import (
    CHATML,
    ScriptedSampler,
    ScriptedServer,
    tokenizer_for,
    write_stand_in,
)
from aflow_tune.errors import AflowTuneError, BadInput, Interrupted
from aflow_tune.find_ray import use_own
from aflow_tune.models.prices import price_of
from aflow_tune.models.types import Usage
from aflow_tune.report.metrics import read_metrics
from aflow_tune.report.quantities import GRADIENT_NORM, GROUP_HEALTH, LOSS
from aflow_tune.running.run import Run
from aflow_tune.sections import BudgetSection, ModelSettings, PriceSettings

MOST_RUNS = 256
"""A step of more rollouts than this is played with fewer tasks, so that a dry run stays short."""
LONGEST_RUN = 60.0
"""Seconds that a rollout may take when every model answers at once."""
WIDER = 8
"""Factor on all length limits when another tokenizer than the model's counts the tokens."""
_MOST_TEXT = 8000
_SHORT = 1000
_ELSEWHERE: dict[str, Any] = {
    "explorer.concurrent_mode": "asynchronous",
    "explorer.over_rollout.ratio": 0.0,
    "explorer.over_rollout.return_partial_tasks": False,
    "explorer.rollout_model.engine_type": "vllm",
    "explorer.rollout_model.extra_engine_args": {},
    "explorer.rollout_model.tool_call_parser": "hermes",
    "model.repetition_penalty": 1.0,
    "model.top_p": 1.0,
    "model.top_k": -1,
    "model.rope_scaling": None,
    "model.rope_theta": None,
    "data_processor.task_pipeline": None,
    "algorithm.enable_router_replay": False,
    "algorithm.rollout_correction": None,
    "algorithm.optimizer.optimizer_type": "adam",
    "synchronizer.sync_style": SyncStyle.FIXED,
}
"""Settings that only Trinity's own engines have, and the values that replace them."""
_COUNT = "experience_pipeline/experience_count"
_LONE = "experience_pipeline/group/lone_runs"
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_STEP = {
    "loss": LOSS,
    "gradient_norm": GRADIENT_NORM,
    "advantage_min": ("critic/advantages/min",),
    "advantage_mean": ("critic/advantages/mean",),
    "advantage_max": ("critic/advantages/max",),
    "train_tokens": ("perf/train_tokens",),
    "skipped": ("actor/skipped_steps",),
}
"""Short names of the trainer's metrics of the optimiser step, each with its possible keys."""


@dataclass(frozen=True)
class DryRunOptions:
    """What the command line adds to the configuration. `tasks` None: a whole step, but no more than
    `MOST_RUNS` rollouts. `stage` None: the first one that trains on rollouts."""

    answers: Path | None = None
    call_apis: bool = False
    tasks: int | None = None
    stage: str | None = None
    inline: bool = False


class DryRun(Run):
    script: Script

    def play(self, phase: Callable[[str], None], stop: Callable[[], bool]) -> int:
        """Run the step; returns the step reached, 1 or 0. Raises whatever the engine raises."""
        log_to(self.run_dir / "log")
        materialise_tasksets(self.config)
        self.target = self.config.trainer.total_steps = 1
        self.spend = spend_of(self.config)
        self.spend.start()
        self._inject()
        return self._engine(phase, stop)

    def _inject(self) -> None:
        for taskset in self.config.buffer.explorer_input.tasksets:
            taskset.default_workflow_type = ADAPTER
            taskset.workflow_args[SCRIPT_KEY] = self.script
        super()._inject()
        explorer = self.config.explorer
        for model in (explorer.rollout_model, *explorer.auxiliary_models):
            model.extra_engine_args["scripted"] = True


def dry_run(
    path: Path,
    overrides: list[str],
    options: DryRunOptions,
    phase: Callable[[str], None],
    stop: Callable[[], bool],
) -> DryRunResult:
    """Play one step of the configuration at `path`; the result holds what engines and code raised.

    Raises:
        BadInput: configuration, function, data or answers were refused; no rollout was made.
        Interrupted: `stop` returned True.
    """
    started = time.monotonic()
    whole = load_config(path, overrides)
    stage, planned = _chosen(whole, options.stage)
    temporary = tempfile.TemporaryDirectory(prefix="aflow-dry-run-", ignore_cleanup_errors=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(temporary))
        stack.callback(end_log)
        phase("checking")
        scene = _Scene(whole, planned, options, folder, stack)
        run, failure, reached = scene.run, None, 0
        try:
            reached = run.play(phase, stop)
        except Interrupted:
            raise
        except AflowTuneError as error:
            if isinstance(error, BadInput) and not read_runs(run.run_dir):
                raise  # e.g. functions that cannot be sent, unreadable rows
            failure = str(error)
        except Exception as error:
            # A dry run exists to show what an engine or user code raises.
            failure = "".join(traceback.format_exception(error))[-_MOST_TEXT:].rstrip()
        if stop() and not reached:
            raise Interrupted("stopped; a dry run leaves nothing behind")
        if failure is None and not reached:
            failure = run.spend.reached() or "the trainer ended before its first step"
        lines = [line.metrics for line in read_metrics(run.run_dir) if line.step == 1]
        metrics = {name: value for line in lines for name, value in line.items()}
        result = DryRunResult(scene.plan(stage), read_runs(run.run_dir), metrics, failure=failure)
        if failure is None and not result.trained:
            result.failure = "the gradient of the step was not finite: the step changed nothing"
        result.real, result.stood_in = scene.real(result.trained), scene.stood_in()
        doubts = _doubts(as_json(result), result.trained, options)
        result.warnings = [*scene.warnings, *doubts]
        result.seconds = time.monotonic() - started
        return result


def _chosen(whole: AflowConfig, stage: str | None) -> tuple[str, AflowConfig]:
    """The name and configuration of the stage to play; the name of a single run is ''.

    Raises:
        BadInput: there is no such stage, or none that trains on rollouts.
    """
    parts, faults = parts_of(whole)
    if faults:
        raise BadInput("The stages do not fit together.", faults)
    for name, part in parts:
        if part.mode in ("both", "colocate") and stage in (None, name):
            return name, part
    modes = "; ".join(f"{name} mode: {part.mode}".strip() for name, part in parts)
    where = "--stage" if stage else whole.positions.where("mode")
    expected = "a run or a stage of mode: both, or none named"
    title = "A dry run plays a run that trains on rollouts of a workflow."
    raise BadInput.of(title, where, expected, f"{stage or ''} {modes}", "name such a stage")


def _doubts(facts: Mapping[str, Any], trained: bool, options: DryRunOptions) -> Iterator[str]:
    """Warnings that the results give reason for."""
    kinds = facts["answers"]["by_kind"]
    if options.answers is not None and kinds and not {GOOD, BAD} & kinds.keys():
        yield f"no row that was played has a line in {options.answers}"
    means = {kind: found["reward"] for kind, found in kinds.items() if found["reward"] is not None}
    good = [means[kind] for kind in (GOOD, TRUTH) if kind in means]
    bad = [means[kind] for kind in (BAD, WORDS) if kind in means]
    if good and bad and max(good) <= max(bad) + 1e-9:
        yield (
            "the reward does not tell good answers from bad ones here. Where the workflow wants "
            "them in another form than they were given, --answers gives them in that form"
        )
    if trained and facts["groups"].get("mixed") == 0:
        yield "no group has two different rewards: such a step teaches nothing"


class _Scene:
    """The set-up of a dry run: a tiny model in `folder`, and servers that end with `stack`.

    `planned` is the configuration as given, `run` a run of its shrunken copy.

    Raises:
        BadInput: either was refused.
    """

    def __init__(
        self,
        whole: AflowConfig,
        planned: AflowConfig,
        options: DryRunOptions,
        folder: Path,
        stack: contextlib.ExitStack,
    ) -> None:
        self.planned, self.options, self.stack = planned, options, stack
        self.policy = planned.model.model_path
        self.tokens = tokenizer_for(self.policy)
        self.model = folder / "model"
        self.parameters = write_stand_in(self.model, self.tokens.tokenizer)
        self.apis = {role: model for role, model in planned.models.items() if model.model}
        if not options.call_apis and self.apis:
            whole.models = planned.models = api_stand_ins(planned.models, self._serve)
        played = copy.deepcopy(planned)
        workflow, judge = functions_of(whole)
        script = self._script()
        if planned.engine == "trinity":
            planned.prepared.engine = ("trinity", "as configured")
            # A model's folder on the cluster need not exist on this machine.
            for model in (planned.model, *planned.explorer.auxiliary_models):
                named = Path(str(model.model_path)).expanduser()
                if named.is_absolute() and not named.exists():
                    model.model_path = str(self.model)
        prepare(planned, Purpose.CHECK, workflow=workflow)
        self.trinity = planned.engine == "trinity"
        most = max(1, MOST_RUNS // planned.algorithm.repeat_times)
        self.tasks = min(planned.buffer.batch_size, options.tasks or most)
        self.left_out = [*self._shrink(played, folder)]
        self.run = DryRun(played, workflow, judge)
        self.run.script = script
        try:
            self.run.prepare()
        except BadInput as error:
            if self.trinity:
                error.title = f"The local engines cannot play this configuration. {error.title}"
            raise
        # Warnings about the shrunken configuration alone do not concern the user.
        own = [text for text in self.run.warnings if text not in played.warnings]
        self.warnings = [*dict.fromkeys([*planned.warnings, *own])]

    def _script(self) -> Script:
        planned, path = self.planned, self.options.answers
        named = (planned.graph.benchmark, planned.writer.benchmark, planned.rewards.benchmark)
        training = [item for item in user_tasksets(planned) if not item[2]]
        fields: tuple[str, ...] = TRUTH_FIELDS
        for key, taskset, _ in training:
            if planned.positions.given(f"{key}.format.response_key"):
                fields = (taskset.format.response_key, *fields)
        answers = {} if path is None else read_answers(path, numbered=len(training) == 1)
        return Script(answers, next(filter(None, named), None), fields, str(path or ""))

    def _serve(self, name: str) -> str:
        import torch

        tokenizer = copy.deepcopy(self.tokens.tokenizer)
        tokenizer.chat_template = CHATML  # accepts any roles in any order, as APIs do
        model = load_model(self.model, torch.float32, torch.device("cpu"))
        sampler = ScriptedSampler(model, tokenizer, scored=False, max_model_len=2**20, threads=1)
        self.stack.callback(sampler.close)
        server = ScriptedServer(sampler, tokenizer, name)
        address = server.start()
        self.stack.callback(server.stop)
        return f"{address}/v1"

    def _shrink(self, config: AflowConfig, folder: Path) -> Iterator[str]:
        """Shrink a configuration before it is prepared: one step of fewer tasks on a tiny model.
        What decides a rollout and its loss stays: rows, workflow, judge, rewards, group size,
        algorithm, advantage, operators. Yields the settings that are left out, as text."""
        model, buffer, explorer = config.model, config.buffer, config.explorer
        if self.trinity:
            yield from _without_trinitys(config)
        config.engine, config.mode = "local", "both"
        config.local.device, config.local.dtype = "cpu", "fp32"
        config.inline = config.inline or self.options.inline
        # Nodes of a cluster could reach neither the temporary folder nor the servers.
        use_own(config)
        # All output goes below `folder`; trackers that report elsewhere are left out.
        config.checkpoint_root_dir, config.continue_from_checkpoint = str(folder / "runs"), True
        config.prepared.account_folder = config.physical_gpus = None
        config.trainer.save_hf_checkpoint = "never"
        monitor, pipeline = config.monitor, config.data_processor.experience_pipeline
        if monitor.monitor_type != "tensorboard":
            yield f"monitor {monitor.monitor_type}"
        monitor.monitor_type, monitor.monitor_args = "tensorboard", None
        monitor.enable_ray_timeline = False
        pipeline.save_input, pipeline.input_save_path = False, None
        if buffer.trainer_input.experience_buffer is not None:
            yield "buffer.trainer_input.experience_buffer (a queue in memory takes its place)"
            buffer.trainer_input.experience_buffer = None
        for named in (model, *explorer.auxiliary_models):
            named.model_path, named.trust_remote_code = str(self.model), False
        explorer.rollout_model.model_path = None  # it gets that of `model`
        if not self.tokens.own:
            owners: list[Any] = [model, explorer.rollout_model, *explorer.auxiliary_models]
            owners += [item[1].rollout_args for item in user_tasksets(config)]
            names = ("max_model_len", "max_prompt_tokens", "max_response_tokens", "max_tokens")
            for owner, name in itertools.product(owners, names):
                if (value := getattr(owner, name, None)) is not None:
                    setattr(owner, name, value * WIDER)
        for adapter in model.lora_configs or []:
            if adapter.target_modules != "all-linear":
                yield f"target_modules: {adapter.target_modules}"
            adapter.target_modules = "all-linear"
        buffer.batch_size, buffer.train_batch_size = self.tasks, 0
        buffer.total_steps, config.trainer.total_steps = 1, None
        if config.algorithm.sample_strategy in COUNTING_STRATEGIES:
            config.algorithm.sample_strategy = config.algorithm.sample_strategy_args = None
        explorer.eval_on_startup, explorer.eval_interval = False, 1
        explorer.max_repeat_times_per_runner = None
        buffer.explorer_input.eval_tasksets, config.quick_eval = [], None
        if not self.options.call_apis:
            config.budget = BudgetSection()
            config.rollout.run_timeout = min(config.rollout.run_timeout, LONGEST_RUN)

    # -- what it was -----------------------------------------------------------------------

    def plan(self, stage: str) -> dict[str, Any]:
        """The plan of the prepared configuration, by the names that `--json` prints.

        `tasks`: of a step; `played`: how many of them. `counts_calls`: the trainer waits for
        `train_batch_size` calls (Trinity's default sample strategy), not for whole steps. The
        explorer makes `explorer_rounds` steps, then waits for trainer step `trainer_steps`.
        """
        planned = self.planned
        algorithm, sync, model = planned.algorithm, planned.synchronizer, planned.model
        fixed = sync.sync_style.value == "fixed"
        rounds = (sync.explorer_sync_interval or sync.sync_interval) + sync.sync_offset
        return {
            "model": self.policy,
            "engine": planned.engine,
            "algorithm": algorithm.algorithm_type,
            "tasks": planned.buffer.batch_size,
            "played": self.tasks,
            "repeats": algorithm.repeat_times,
            "steps": total_steps(planned),
            "train_batch_size": planned.buffer.train_batch_size,
            "counts_calls": (algorithm.sample_strategy or "default") in COUNTING_STRATEGIES,
            "explorer_rounds": rounds if fixed else None,
            "trainer_steps": sync.trainer_sync_interval or sync.sync_interval if fixed else 1,
            "max_prompt": model.max_prompt_tokens,
            "max_response": model.max_response_tokens,
            "max_length": model.max_model_len,
            "own_tokens": self.tokens.own,
            "stage": stage,
        }

    def real(self, trained: bool) -> list[str]:
        played, called = self.run.config, self.apis if self.options.call_apis else {}
        where = "in one process, without Ray" if played.inline else "as actors of a Ray of its own"
        pipeline = [item.name for item in played.data_processor.experience_pipeline.operators]
        return [
            "rows, workflow function, judge and rewards, and whatever these call on their own",
            f"adapter, recorded calls, experience pipeline, buffer and trainer, {where}",
            f"operators {', '.join(name.rpartition('.')[2] for name in pipeline)}; advantage "
            f"{played.algorithm.advantage_fn}; loss {played.algorithm.policy_loss_fn}",
            *["one optimiser step, and its weights handed to the sampler"] * trained,
            *(f"{_named(role, model)}: called" for role, model in called.items()),
        ]

    def stood_in(self) -> list[str]:
        own = "" if self.tokens.own else ", since its own is not on this machine"
        auxiliary = self.planned.explorer.auxiliary_models
        apis = {} if self.options.call_apis else self.apis
        return [
            f"{self.policy}: a random Llama of {self.parameters:,} parameters with "
            f"{self.tokens.source}{own}; what it says is scripted",
            *(f"{m.name or 'one'} (auxiliary model): plain words" for m in auxiliary),
            *(f"{_named(r, m)}: plain words; --call-apis would call it" for r, m in apis.items()),
            *["vLLM and verl: the local sampler and trainer, on this machine's CPU"] * self.trinity,
            *[f"left out: {'; '.join(self.left_out)}"] * bool(self.left_out),
            "no evaluation on held-out rows, no export; checkpoints are thrown away",
        ]


def _named(role: str, model: Any) -> str:
    return f"{role} ({model.model} at {model.base_url or f'the address of {model.provider}'})"


def _without_trinitys(config: AflowConfig) -> Iterator[str]:
    """Reset what only Trinity's vLLM and verl have; yields the settings that were given."""
    for key, value in _ELSEWHERE.items():
        *parents, name = key.split(".")
        owner: Any = config
        for part in parents:
            owner = getattr(owner, part)
        found = getattr(owner, name)
        if found != value:
            if config.positions.given(key):
                yield f"{key}: {getattr(found, 'value', found)}"
            setattr(owner, name, copy.copy(value))
    inputs = config.buffer.explorer_input
    for taskset in filter(None, [inputs.taskset, *inputs.tasksets]):
        taskset.rollout_args.top_p, taskset.rollout_args.top_k = None, -1
    config.model.tinker.enable = config.model.external_model.enable = False
    for auxiliary in config.explorer.auxiliary_models:
        auxiliary.engine_type, auxiliary.tool_call_parser = "vllm", "hermes"
        auxiliary.extra_engine_args = {}
    for adapter in config.model.lora_configs or []:
        adapter.path = adapter.exclude_modules = None


def api_stand_ins(
    models: Mapping[str, ModelSettings], serve: Callable[[str], str]
) -> dict[str, ModelSettings]:
    """The same models behind servers on this machine, with their own prices and without keys.

    Args:
        serve: starts a server for the named model and returns its address.
    """
    found = dict(models)
    for role, model in models.items():
        if model.model is None:
            continue
        prices = model.prices
        if prices is None and (price := price_of(model.provider, model.base_url, model.model)):
            # Listed prices may rise with the length of the prompt: take those of a short one.
            read, written = price.cost(Usage(_SHORT, 0)), price.cost(Usage(0, _SHORT))
            prices = PriceSettings(read * 1_000_000 / _SHORT, written * 1_000_000 / _SHORT)
        found[role] = replace(
            model,
            provider="openai",
            base_url=serve(model.model),
            api_key_env=None,
            headers_env={},
            prices=prices,
        )
    return found


# -- what it showed ----------------------------------------------------------------------


@dataclass
class DryRunResult:
    """The outcome of a dry run. `failure`: why no step was trained, else None. `plan`: from
    `_Scene.plan`. `metrics`: what explorer and trainer logged for the step."""

    plan: dict[str, Any]
    runs: list[PlayedRun]
    metrics: dict[str, float]
    seconds: float = 0.0
    real: list[str] = field(default_factory=list)
    stood_in: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def trained(self) -> bool:
        return self.failure is None and any(name in self.metrics for name in GRADIENT_NORM)

    @property
    def fill(self) -> dict[str, Any]:
        return fill_of(self.plan, self.metrics.get(_COUNT, 0.0))

    @property
    def good(self) -> bool:
        """Whether a step was trained and a whole run's batch would fill: exit code 0."""
        return self.trained and bool(self.fill["fills"])


def fill_of(plan: Mapping[str, Any], played: float) -> dict[str, Any]:
    """Whether the trainer's batch fills, given the experiences that the played tasks produced.

    Returns:
        `experiences` of a whole step, `wanted` by a train step (None: it takes all), whether the
        batch `fills`, and the same in `words`.
    """
    whole, wanted = played * plan["tasks"] / plan["played"], plan["train_batch_size"]
    rounds, steps, fills = plan["explorer_rounds"], plan["trainer_steps"], True
    if not played:
        wanted, fills, words = None, False, "nothing was left to train on"
    elif not plan["counts_calls"]:
        wanted = None
        words = f"each step trains on all {whole:g} experiences of its {plan['tasks']} tasks"
    else:
        words = f"a step leaves {whole:g} experiences, train_batch_size is {wanted}: "
        if rounds is not None and rounds * whole < steps * wanted:
            fills = False
            words += (
                f"it never fills, and both sides wait (the explorer stops for new weights after "
                f"{rounds * whole:g} experiences, the trainer needs {steps * wanted}); set "
                f"buffer.train_batch_size to at most {int(rounds * whole // steps)}"
            )
        elif whole < wanted:
            words += f"it takes {wanted / whole:.3g} steps to fill"
        else:
            words += f"{whole / wanted:.3g} train steps a step of the explorer"
    return {"experiences": whole, "wanted": wanted, "fills": fills, "words": words}


def as_json(result: DryRunResult) -> dict[str, Any]:
    """Everything as plain data. Token sums are of the trained calls, scaled to a whole step; the
    longest are of the calls that were played.

    groups: `mixed`, `all best` and `all worst` are the run filter's own counts. In a `failed` group
    no rollout succeeded; in a `lone` one only one did, which is not trained on.
    """
    plan, metrics, runs = result.plan, result.metrics, result.runs
    calls = [call for run in runs if run.failure is None for call in run.calls]
    scale, tokens = plan["tasks"] / plan["played"], {}
    if calls:
        sums = {key: sum(call[key] for call in calls) * scale for key in calls[0]}
        tokens = sums | {
            "calls": len(calls) * scale,
            "longest_prompt": max(call["prompt"] for call in calls),
            "longest_response": max(call["response"] for call in calls),
            "longest": max(call["prompt"] + call["response"] for call in calls),
        }
    kinds: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(run.kind for run in runs):
        rewards = [run.reward for run in runs if run.kind == kind]
        known = [reward for reward in rewards if reward is not None]
        mean = statistics.fmean(known) if known else None
        kinds[kind] = {
            "runs": len(rewards),
            "failed": sum(run.failure is not None for run in runs if run.kind == kind),
            "reward": mean,
        }
    values = [run.reward for run in runs if run.reward is not None]
    spread: dict[str, float] | None = None
    if values:
        middle = {"mean": statistics.fmean(values), "median": statistics.median(values)}
        spread = {"count": len(values), "least": min(values), **middle, "greatest": max(values)}
    alive = len({run.task for run in runs if run.failure is None})
    lone = round(metrics.get(_LONE, 0.0))
    groups = {"failed": len({run.task for run in runs}) - alive, "lone": lone}
    for name, key in GROUP_HEALTH.items():
        if key in metrics:
            groups[name] = round(metrics[key] * (alive - lone))
    step = {name: [metrics[key] for key in keys if key in metrics] for name, keys in _STEP.items()}
    first = next((run for run in runs if run.failure is not None), None)
    frames = _PLACE.findall(first.detail) if first else []  # the innermost frame is the place
    place = "{}:{} ({})".format(*frames[-1]) if frames else None
    failure = result.failure
    if failure is None:
        filled = f"the batch does not fill: {result.fill['words']}"
        failure = filled if result.trained else "no optimiser step was made"
    return {
        "ok": result.good,
        "failure": None if result.good else failure,
        "seconds": result.seconds,
        "plan": plan,
        "answers": {
            "sources": dict(Counter(run.source for run in runs)),
            "by_kind": kinds,
        },
        "rewards": spread,
        "groups": groups,
        "batch": result.fill,
        "tokens": tokens,
        "step": {name: values[0] for name, values in step.items() if values},
        "failed_runs": dict(Counter(run.failure for run in runs if run.failure)),
        "first_failure": first and asdict(first) | {"place": place},
        "real": result.real,
        "stood_in": result.stood_in,
        "warnings": result.warnings,
    }


def render(result: DryRunResult) -> str:
    """The result as text, the verdict last."""
    facts = as_json(result)
    plan, held, first, rewards = (facts[k] for k in ("plan", "tokens", "first_failure", "rewards"))

    def listed(values: Mapping[str, Any]) -> str:
        numbers = {name.replace("_", " "): value for name, value in values.items()}
        return ", ".join(
            f"{name} {'none' if value is None else format(value, '.6g')}"
            for name, value in numbers.items()
        )

    limits = {name: plan[name] for name in ("max_prompt", "max_response", "max_length")}
    sources, kinds = facts["answers"].values()
    lines = [
        f"Dry run of one step of {plan['model']} ({plan['algorithm']}, engine {plan['engine']}): "
        f"{plan['played']} of {plan['tasks']} tasks x {plan['repeats']} runs; sums are scaled to "
        "the step. The answers are scripted: nothing here is what the model would do.",
        "",
        f"answers: {listed(sources)}",
        *(f"  {kind}: {listed(of)}" for kind, of in kinds.items()),
        f"rewards: {listed(rewards or {})}",
        f"groups of {plan['repeats']} runs: {listed(facts['groups'])}",
        f"batch: {facts['batch']['words']}",
        f"steps of the run: {plan['steps'] or 'not known: the rows are not on this machine'}",
        f"a step holds: {listed(held)}",
        f"  limits: {listed(limits)}",
        f"the optimiser step on the tiny model: {listed(facts['step'])}",
    ]
    if not plan["own_tokens"]:
        lines.append("tokens are counted by another tokenizer, and limits were widened for it")
    if first:
        lines += [
            "",
            f"failed runs: {listed(facts['failed_runs'])}. The first (row {first['item']}, run "
            f"{first['run']}, answers {first['kind']}) at {first['place']}:",
            *(f"  {line}" for line in first["detail"].splitlines()),
        ]
    for key in ("real", "stood_in", "warnings"):
        if facts[key]:
            lines += ["", f"{key.replace('_', ' ')}:", *(f"  - {item}" for item in facts[key])]
    verdict = "a batch was filled and one optimiser step was made"
    if not result.good:
        shown = first["detail"] if first else ""
        reason = facts["failure"]
        if shown and shown in reason:
            reason = reason.partition(shown)[0] + "  (above)"  # it is not shown twice
        verdict = f"FAILED: {reason}"
    return "\n".join([*lines, "", f"dry run ({result.seconds:.0f} s): {verdict}"])
