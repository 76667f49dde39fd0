"""`aflow-tune run --dry-run`: one step of a configuration, played by a script on a tiny model.

Everything between the rows and the optimiser step is what a run has: reader, adapter, workflow,
judge, recorded calls over HTTP, Ray's actors (or one process with `--inline`), experience pipeline,
advantages, buffer, loss, weights handed on. What stands in is the policy: a tiny random model with
its tokenizer, whose answers are scripted (`script.py`); and models behind an API, which servers on
this machine answer for unless calls were allowed. `engine: trinity` is played on the local engines.

Everything is written into a temporary folder; the run's own folder is neither read nor made. No
running Ray is joined, whatever names it: the actors are those of a Ray of the dry run's own.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""A step of more runs is played with fewer tasks, so that a dry run stays short."""
LONGEST_RUN = 60.0
"""Seconds that a run of the workflow may take where every model answers at once."""
WIDER = 8
"""By how much lengths grow where another tokenizer than the model's counts them. A token of a
trained tokenizer is rarely longer than so many bytes, each of which another one may count."""
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
"""What only Trinity's own engines have, and what takes its place."""


BINS = 10
_COUNT = "experience_pipeline/experience_count"
_LONE = "experience_pipeline/group/lone_runs"
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_BAR = 40
_GROUPS = ("mixed", "all best", "all worst", "failed", "lone")
_STEP = {
    "loss": LOSS,
    "gradient_norm": GRADIENT_NORM,
    "advantage_min": ("critic/advantages/min",),
    "advantage_mean": ("critic/advantages/mean",),
    "advantage_max": ("critic/advantages/max",),
    "train_tokens": ("perf/train_tokens",),
    "skipped": ("actor/skipped_steps",),
}
"""What the trainer logs of the optimiser step, by short name."""


@dataclass(frozen=True)
class DryRunOptions:
    """What the command line adds to the configuration. `tasks` None: a whole step, as long as it
    has no more than `MOST_RUNS` runs. `stage` None: the first one that trains on rollouts."""

    answers: Path | None = None
    call_apis: bool = False
    tasks: int | None = None
    stage: str | None = None
    inline: bool = False


class DryRun(Run):
    script: Script

    def play(self, phase: Callable[[str], None], stop: Callable[[], bool]) -> int:
        """Make the step; returns the step reached, 1 or 0. Raises what the engine raised."""
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
    """Play one step of the configuration at `path`.

    Raises:
        BadInput: configuration, function, data or answers were refused; nothing was started.
        Interrupted: `stop` said so.
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
                raise  # functions that cannot be sent, rows that cannot be read
            failure = str(error)
        except Exception as error:
            # Whatever an engine or user code raised is what a dry run is there to show.
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
        result.warnings = [*scene.warnings, *_doubts(result, options)]
        result.seconds = time.monotonic() - started
        return result


def _chosen(whole: AflowConfig, stage: str | None) -> tuple[str, AflowConfig]:
    """The run or the stage to play.

    Raises:
        BadInput: there is no such stage, or none that trains on rollouts.
    """
    parts, faults = parts_of(whole)
    if faults:
        raise BadInput("The stages do not fit together.", faults)
    for name, part in parts:
        if part.mode in ("both", "colocate") and stage in (None, name):
            return name, part
    modes = "; ".join(f"{f'stage {name}, ' if name else ''}mode: {p.mode}" for name, p in parts)
    where = "--stage" if stage else whole.positions.where("mode")
    expected = "a run or a stage of mode: both, or none named"
    title = "A dry run plays a run that trains on rollouts of a workflow."
    raise BadInput.of(title, where, expected, f"{stage or ''} {modes}", "name such a stage")


def _doubts(result: DryRunResult, options: DryRunOptions) -> Iterator[str]:
    """What the numbers are a reason to look at."""
    kinds = by_kind(result)
    if options.answers is not None and result.runs and not {GOOD, BAD} & kinds.keys():
        yield f"no row that was played has a line in {options.answers}"
    means = {kind: found["reward"] for kind, found in kinds.items() if found["reward"] is not None}
    good = [means[kind] for kind in (GOOD, TRUTH) if kind in means]
    bad = [means[kind] for kind in (BAD, WORDS) if kind in means]
    if good and bad and math.isclose(max(good), max(bad), abs_tol=1e-9):
        yield (
            "the reward does not tell good answers from bad ones here. Where the workflow wants "
            "them in another form than they were given, --answers gives them in that form"
        )
    elif good and bad and max(good) < max(bad):
        yield "good answers earned less than bad ones"
    if result.trained and groups(result).get("mixed") == 0:
        yield "no group has two different rewards: such a step teaches nothing"


class _Scene:
    """What a dry run is played with: a folder, a tiny model, servers, which end with `stack`.

    `planned` is the configuration as it is, `run` what is played of it.

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
            # A folder of the cluster's machines need not be here: `doctor` looks for it there.
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
        # What is warned of the shrunken configuration alone is not the user's.
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
        tokenizer.chat_template = CHATML  # takes any roles in any order, as APIs do
        model = load_model(self.model, torch.float32, torch.device("cpu"))
        sampler = ScriptedSampler(model, tokenizer, scored=False, max_model_len=2**20, threads=1)
        self.stack.callback(sampler.close)
        server = ScriptedServer(sampler, tokenizer, name)
        address = server.start()
        self.stack.callback(server.stop)
        return f"{address}/v1"

    def _shrink(self, config: AflowConfig, folder: Path) -> Iterator[str]:
        """Make a configuration small, before it is prepared: the same work, a tiny model, nothing
        kept. What decides what a run does stays: rows, workflow, judge, rewards, batch, group,
        algorithm, advantage, operators, lengths. Yields what is left out, in words."""
        model, buffer, explorer = config.model, config.buffer, config.explorer
        if self.trinity:
            yield from _without_trinitys(config)
        config.engine, config.mode = "local", "both"
        config.local.device, config.local.dtype = "cpu", "fp32"
        config.inline = config.inline or self.options.inline
        # The nodes of a cluster would see neither the temporary folder nor the servers.
        use_own(config)
        # Everything that is written goes below `folder`; what reports elsewhere is left out.
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
            owners: list[tuple[Any, str]] = [
                (lengths, name)
                for lengths in (model, explorer.rollout_model, *explorer.auxiliary_models)
                for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
            ]
            owners += [(item[1].rollout_args, "max_tokens") for item in user_tasksets(config)]
            for owner, name in owners:
                if (value := getattr(owner, name)) is not None:
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
        """What the prepared configuration asks for (`DryRunResult.plan`)."""
        planned = self.planned
        algorithm, sync, model = planned.algorithm, planned.synchronizer, planned.model
        rounds, trainer_steps = None, 1
        if sync.sync_style.value == "fixed":
            rounds = (sync.explorer_sync_interval or sync.sync_interval) + sync.sync_offset
            trainer_steps = sync.trainer_sync_interval or sync.sync_interval
        return {
            "model": self.policy,
            "engine": planned.engine,
            "algorithm": algorithm.algorithm_type,
            "advantage": str(algorithm.advantage_fn),
            "loss": str(algorithm.policy_loss_fn),
            "tasks": planned.buffer.batch_size,
            "played": self.tasks,
            "repeats": algorithm.repeat_times,
            "steps": total_steps(planned),
            "train_batch_size": planned.buffer.train_batch_size,
            "counts_calls": (algorithm.sample_strategy or "default") in COUNTING_STRATEGIES,
            "explorer_rounds": rounds,
            "trainer_steps": trainer_steps,
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
        operators = ", ".join(name.rpartition(".")[2] for name in pipeline)
        given = self.tokens.own or played.explorer.rollout_model.chat_template
        template = "the chat template" if given else "another tokenizer's chat template"
        return [
            "rows, workflow function, judge and rewards, and whatever these call on their own",
            f"adapter, runners, experience pipeline, buffer and trainer, {where}",
            f"recorded calls over HTTP with {template} and tool calls",
            f"operators {operators}; advantage {played.algorithm.advantage_fn}; loss "
            f"{played.algorithm.policy_loss_fn}",
            *["one optimiser step, and its weights handed to the sampler"] * trained,
            *(f"{_named(role, model)}: called" for role, model in called.items()),
        ]

    def stood_in(self) -> list[str]:
        own = "" if self.tokens.own else ", since its own is not on this machine"
        auxiliary = self.planned.explorer.auxiliary_models
        apis = {} if self.options.call_apis else self.apis
        return [
            f"{self.policy}: a random Llama of {self.parameters:,} parameters with "
            f"{self.tokens.source}{own}",
            "what it says: the script (above)",
            *(f"{m.name or 'one'} (auxiliary model): plain words" for m in auxiliary),
            *(f"{_named(r, m)}: plain words; --call-apis would call it" for r, m in apis.items()),
            *["vLLM and verl: the local sampler and trainer, on this machine's CPU"] * self.trinity,
            *[f"left out: {'; '.join(self.left_out)}"] * bool(self.left_out),
            "no evaluation on held-out rows, no export; checkpoints are thrown away",
        ]


def _named(role: str, model: Any) -> str:
    return f"{role} ({model.model} at {model.base_url or f'the address of {model.provider}'})"


def _without_trinitys(config: AflowConfig) -> Iterator[str]:
    """Take out what only Trinity's vLLM and verl have; yields what was set."""
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
    """The same models at an address of this machine, with their own prices and without keys.

    Args:
        serve: starts a server for a model of that name, and returns its address.
    """
    found = dict(models)
    for role, model in models.items():
        if model.model is None:
            continue
        prices = model.prices
        if prices is None and (price := price_of(model.provider, model.base_url, model.model)):
            # Listed prices may rise with the length of a prompt: those of a short one are taken.
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
    """A dry run, finished or not. `failure` is None if a step was trained.

    plan: what the configuration asks for, by the names that `--json` prints. `tasks` are those of a
    step, `played` how many of them were played. `counts_calls`: the trainer waits for
    `train_batch_size` calls (Trinity's default sample strategy); else it trains on whole steps.
    `explorer_rounds` steps are explored before the explorer waits for the weights of trainer step
    `trainer_steps`; None where it does not wait.
    """

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
    def good(self) -> bool:
        """Whether a batch fills and a step was made of it: exit code 0."""
        return self.trained and bool(self.fill["fills"])

    @property
    def fill(self) -> dict[str, Any]:
        """How the calls of a step fill the trainer's batch."""
        return fill_of(self.plan, self.metrics.get(_COUNT, 0.0))

    @property
    def first_failure(self) -> PlayedRun | None:
        return next((run for run in self.runs if run.failure is not None), None)


def fill_of(plan: Mapping[str, Any], played: float) -> dict[str, Any]:
    """What becomes of the experiences that the played tasks left for the trainer.

    Returns:
        `experiences` of a whole step against `wanted` of a train step (None: all are taken),
        whether the batch `fills`, and that in `words`.
    """

    def found(experiences: float, wanted: int | None, fills: bool, words: str) -> dict[str, Any]:
        return {"experiences": experiences, "wanted": wanted, "fills": fills, "words": words}

    whole, wanted = played * plan["tasks"] / plan["played"], plan["train_batch_size"]
    if not played:
        return found(0.0, None, False, "nothing was left to train on")
    if not plan["counts_calls"]:
        words = f"each step trains on all {whole:g} experiences of its {plan['tasks']} tasks"
        return found(whole, None, True, words)
    share = f"a step leaves {whole:g} experiences, train_batch_size is {wanted}"
    rounds, steps = plan["explorer_rounds"], plan["trainer_steps"]
    if rounds is not None and rounds * whole < steps * wanted:
        words = (
            f"{share}: it never fills, and both sides wait (the explorer stops for new weights "
            f"after {rounds * whole:g} experiences, the trainer needs {steps * wanted}); set "
            f"buffer.train_batch_size to at most {int(rounds * whole // steps)}"
        )
        return found(whole, wanted, False, words)
    words = f"{whole / wanted:.3g} train steps a step of the explorer"
    if whole < wanted:
        words = f"it takes {wanted / whole:.3g} steps to fill"
    return found(whole, wanted, True, f"{share}: {words}")


def distribution(rewards: Sequence[float]) -> dict[str, Any] | None:
    """Of the rewards of the runs that succeeded; None without rewards.

    Returns:
        `count`, `mean`, `quartiles` (least, first, median, third, greatest; inclusive method) and
        `histogram`: (from, to, runs) of each bin, of which the last includes its end. Up to ten
        different values have a bin each, of width 0.
    """
    if not rewards:
        return None
    least, greatest, counts = min(rewards), max(rewards), Counter(rewards)
    inner = [least] * 3
    if len(rewards) > 1:
        inner = statistics.quantiles(rewards, n=4, method="inclusive")
    histogram = [(value, value, counts[value]) for value in sorted(counts)]
    if len(counts) > BINS:
        width = (greatest - least) / BINS
        bins = Counter(min(BINS - 1, int((reward - least) / width)) for reward in rewards)
        histogram = [(least + n * width, least + (n + 1) * width, bins[n]) for n in range(BINS)]
    return {
        "count": len(rewards),
        "mean": statistics.fmean(rewards),
        "quartiles": (least, *inner, greatest),
        "histogram": histogram,
    }


def groups(result: DryRunResult) -> dict[str, int]:
    """Groups of runs by their rewards: `mixed`, `all best`, `all worst`, `failed` (no run of it
    succeeded) and `lone` (one did, and was taken out). The first three are the run filter's own."""
    tasks = {run.task for run in result.runs}
    alive = len({run.task for run in result.runs if run.failure is None})
    lone = round(result.metrics.get(_LONE, 0.0))
    found = {"failed": len(tasks) - alive, "lone": lone}
    for name, key in GROUP_HEALTH.items():
        if key in result.metrics:
            found[name] = round(result.metrics[key] * (alive - lone))
    return found


def by_kind(result: DryRunResult) -> dict[str, dict[str, Any]]:
    """Runs, failed ones and mean reward of each kind of answers, in the order of first use."""
    found: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(run.kind for run in result.runs):
        runs = [run for run in result.runs if run.kind == kind]
        rewards = [run.reward for run in runs if run.reward is not None]
        found[kind] = {
            "runs": len(runs),
            "failed": sum(run.failure is not None for run in runs),
            "reward": statistics.fmean(rewards) if rewards else None,
        }
    return found


def as_json(result: DryRunResult) -> dict[str, Any]:
    """Everything as plain data. Tokens are of the trained calls of a whole step, the longest ones
    of those that were played."""
    plan, metrics, first = result.plan, result.metrics, result.first_failure
    calls = [call for run in result.runs if run.failure is None for call in run.calls]
    scale, tokens = plan["tasks"] / plan["played"], {}
    if calls:
        tokens = {
            "calls": len(calls) * scale,
            "prompt": sum(call["prompt"] for call in calls) * scale,
            "response": sum(call["response"] for call in calls) * scale,
            "longest_prompt": max(call["prompt"] for call in calls),
            "longest_response": max(call["response"] for call in calls),
            "longest": max(call["prompt"] + call["response"] for call in calls),
            "truncated": sum(call["truncated"] for call in calls) * scale,
        }
    step = {name: [metrics[key] for key in keys if key in metrics] for name, keys in _STEP.items()}
    if first is not None:
        frames = _PLACE.findall(first.detail)  # the innermost one says where
        place = "{}:{} ({})".format(*frames[-1]) if frames else None
    return {
        "ok": result.good,
        "failure": None if result.good else result.failure or verdict(result),
        "seconds": result.seconds,
        "plan": plan,
        "answers": {
            "sources": dict(Counter(run.source for run in result.runs)),
            "by_kind": by_kind(result),
        },
        "rewards": distribution([run.reward for run in result.runs if run.reward is not None]),
        "groups": groups(result),
        "batch": result.fill,
        "tokens": tokens,
        "step": {name: values[0] for name, values in step.items() if values},
        "failed_runs": dict(Counter(run.failure for run in result.runs if run.failure)),
        "first_failure": first and asdict(first) | {"place": place},
        "real": result.real,
        "stood_in": result.stood_in,
        "warnings": result.warnings,
    }


def render(result: DryRunResult) -> str:
    """Everything that is known, the verdict last."""
    facts = as_json(result)
    plan, held, first, spread = (facts[k] for k in ("plan", "tokens", "first_failure", "rewards"))
    tasks, repeats, groups_found = plan["tasks"], plan["repeats"], facts["groups"]
    said = "; ".join(f"{n} runs: {source}" for source, n in facts["answers"]["sources"].items())
    stage = f", stage {plan['stage']}" if plan["stage"] else ""
    lines = [
        f"Dry run of one step ({plan['algorithm']}, engine {plan['engine']}{stage}): "
        f"{plan['played']} of {tasks} tasks x {repeats} runs; sums are scaled to the step.",
        f"The answers are scripted: nothing here is what {plan['model']} would do.",
        f"answers: {said or 'none was asked for'}",
        "",
    ]
    if spread:
        least, low, median, high, greatest = spread["quartiles"]
        lines.append(
            f"rewards of {spread['count']} scripted runs: mean {spread['mean']:.4g}, "
            f"least {least:.4g}, quartiles {low:.4g} / {median:.4g} / {high:.4g}, "
            f"greatest {greatest:.4g}"
        )
        most = max(count for _, _, count in spread["histogram"])
        for start, end, count in spread["histogram"]:
            label = f"{start:.4g}" if start == end else f"{start:.4g} to {end:.4g}"
            lines.append(f"  {label:>20} {count:6d} {'#' * round(_BAR * count / most)}".rstrip())
        for kind, of in facts["answers"]["by_kind"].items():
            mean = "none" if of["reward"] is None else f"{of['reward']:.4g}"
            lines.append(f"  {kind}: {of['runs']} runs, mean reward {mean}, {of['failed']} failed")
        lines.append("")
    listed = ", ".join(f"{groups_found[name]} {name}" for name in _GROUPS if name in groups_found)
    lines += [
        f"groups of {repeats} runs: {listed}",
        f"batch: {result.fill['words']}",
        f"steps of the run: {plan['steps'] or 'not known: the rows are not on this machine'}",
        "",
    ]
    if held:
        limits = [
            f"longest {name} {held[key]:.0f}" + (f" of {plan[limit]}" if plan[limit] else "")
            for name, key, limit in (
                ("prompt", "longest_prompt", "max_prompt"),
                ("response", "longest_response", "max_response"),
                ("together", "longest", "max_length"),
            )
        ]
        lines += [
            f"a step holds {tasks} tasks, {tasks * repeats} runs, {held['calls']:.0f} calls, "
            f"{held['prompt']:.0f} prompt and {held['response']:.0f} response tokens "
            "(responses are as long as the script's)",
            f"  {', '.join(limits)}; {held['truncated']:.0f} responses cut off",
        ]
        if not plan["own_tokens"]:
            note = "counted by another tokenizer than the model's; the limits were widened for it"
            lines.append(f"  {note}")
    if "gradient_norm" in facts["step"]:
        values = (f"{name.replace('_', ' ')} {value:.4g}" for name, value in facts["step"].items())
        lines.append(f"the optimiser step on the tiny model: {', '.join(values)}")
    if first:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(facts["failed_runs"].items()))
        lines += [
            "",
            f"failed runs: {kinds}. The first (row {first['item']}, run {first['run']}, "
            f"answers {first['kind']}){' at ' if first['place'] else ''}{first['place'] or ''}:",
            *(f"  {line}" for line in first["detail"].splitlines()),
        ]
    for title, key in (("real", "real"), ("stood in for", "stood_in"), ("warnings", "warnings")):
        if facts[key]:
            lines += ["", f"{title}:", *(f"  - {item}" for item in facts[key])]
    return "\n".join([*lines, "", verdict(result)])


def verdict(result: DryRunResult) -> str:
    seconds = f"({result.seconds:.0f} s)"
    if result.good:
        return f"dry run: a batch was filled and one optimiser step was made {seconds}"
    if result.failure is not None:
        first, reason = result.first_failure, result.failure
        if first is not None and first.detail and first.detail in reason:
            reason = reason.partition(first.detail)[0] + "  (above)"  # it is not shown twice
    elif not result.trained:
        reason = "no optimiser step was made"
    else:
        reason = f"the batch does not fill: {result.fill['words']}"
    return f"dry run: FAILED {seconds}: {reason}"
