"""`aflow-tune run --dry-run`: one step of a configuration, played by a script on a tiny model.

Everything between the rows and the optimiser step is what a run has: reader, adapter, workflow,
judge, recorded calls over HTTP, Ray's actors (or one process with `--inline`), experience pipeline,
advantages, buffer, loss, weights handed on. What stands in is the policy: a tiny random model with
its tokenizer, whose answers are scripted (`aflow_tune.dry_run.script`); and models behind an API,
which servers on this machine answer for unless calls were allowed. `engine: trinity` is played on
the local engines.

Everything is written into a temporary folder; the run's own folder is neither read nor made. A
running Ray is left alone, whatever names it: the actors are those of a Ray of the dry run's own.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aflow_tune.config.accounting import spend_of
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import COUNTING_STRATEGIES, Purpose, prepare
from aflow_tune.config.quiet import end_log, log_to
from aflow_tune.config.stages import parts_of
from aflow_tune.config.tasksets import materialise_tasksets, total_steps, user_tasksets
from aflow_tune.config.validate import functions_of
from aflow_tune.dry_run.answers import read_answers
from aflow_tune.dry_run.dry_settings import (
    Small,
    api_stand_ins,
    behind_apis,
    shrink,
)
from aflow_tune.dry_run.numbers import DryRunResult, Plan, by_kind, groups, read_runs
from aflow_tune.dry_run.script import BAD, GOOD, TRUTH, TRUTH_FIELDS, WORDS, Script
from aflow_tune.dry_run.scripted_adapter import SCRIPT_KEY
from aflow_tune.engines.local.models import load_model
from aflow_tune.engines.local.scripted import (
    CHATML,
    ScriptedSampler,
    ScriptedServer,
    StandInTokenizer,
    tokenizer_for,
    write_stand_in,
)
from aflow_tune.errors import AflowTuneError, BadInput, Fault, Interrupted
from aflow_tune.report.metrics import read_metrics
from aflow_tune.running.run import Run

ADAPTER = "aflow_tune.dry_run.scripted_adapter.ScriptedAdapter"
MOST_RUNS = 256
"""A step of more runs is played with fewer tasks, so that a dry run stays short."""
PLAYED_MODES = ("both", "colocate")
_MOST_TEXT = 8000


@dataclass(frozen=True)
class DryRunOptions:
    """What the command line adds to the configuration."""

    answers: Path | None = None
    call_apis: bool = False
    tasks: int | None = None
    """Tasks to play. None: a whole step, as long as it has no more than `MOST_RUNS` runs."""
    stage: str | None = None
    """The stage to play. None: the first one that trains on rollouts."""
    inline: bool = False


class DryRun(Run):
    """One step of a shrunken configuration on the scripted sampler."""

    def __init__(
        self,
        config: AflowConfig,
        workflow_func: Callable[..., Any] | None,
        judge_func: Callable[..., Any] | None,
        script: Script,
    ) -> None:
        super().__init__(config, workflow_func, judge_func)
        self.script = script

    def play(self, phase: Callable[[str], None], stop: Callable[[], bool]) -> int:
        """Make the step; returns the step reached, 1 or 0. Raises what the engine raised."""
        log_to(self.run_dir / "log")
        materialise_tasksets(self.config)
        self.target = self.config.trainer.total_steps = 1
        self.books = spend_of(self.config)
        self.books.start()
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
    with _Scene(whole, planned, options) as scene:
        phase("checking")
        scene.settle()
        run, plan = scene.run, _plan(planned, scene, stage)
        failure, reached = None, 0
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
            failure = run.books.reached() or "the trainer ended before its first step"
        metrics = {
            name: value
            for line in read_metrics(run.run_dir)
            if line.step == 1
            for name, value in line.metrics.items()
        }
        result = DryRunResult(plan, read_runs(run.run_dir), metrics, 0.0, failure=failure)
        if failure is None and not result.trained:
            result.failure = "the gradient of the step was not finite: the step changed nothing"
        result.real, result.stood_in = scene.real(result.trained), scene.stood_in()
        result.warnings = [*scene.warnings, *_doubts(result, options)]
        result.seconds = time.monotonic() - started
        return result


class _Scene:
    """What a dry run is played with: a folder, a tiny model, servers; gone when it is left."""

    def __init__(self, whole: AflowConfig, planned: AflowConfig, options: DryRunOptions) -> None:
        self.whole = whole
        self.planned = planned
        self.options = options
        self.apis = behind_apis(planned)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Scene:
        self.folder = Path(self._stack.enter_context(_folder()))
        return self

    def __exit__(self, *error: object) -> None:
        end_log()
        self._stack.close()

    def settle(self) -> None:
        """Prepare what is planned and what is played of it.

        Raises:
            BadInput: either was refused.
        """
        planned, options = self.planned, self.options
        self.policy = planned.model.model_path
        self.tokens: StandInTokenizer = tokenizer_for(self.policy)
        self.model = self.folder / "model"
        self.parameters = write_stand_in(self.model, self.tokens.tokenizer)
        if not options.call_apis and self.apis:
            models = api_stand_ins(planned.models, self._serve)
            self.whole.models = planned.models = models
        played = copy.deepcopy(planned)
        workflow, judge = functions_of(self.whole)
        self.script = self._script()
        self.trinity = self._plan_run(workflow)
        tasks = planned.buffer.batch_size
        most = max(1, MOST_RUNS // planned.algorithm.repeat_times)
        self.tasks = min(tasks, options.tasks or most)
        small = Small(
            self.folder,
            self.model,
            self.tasks,
            self.tokens.own,
            options.call_apis,
            options.inline,
        )
        self.left_out = shrink(played, small, trinity=self.trinity)
        self.played = played
        self.run = DryRun(played, workflow, judge, self.script)
        try:
            self.run.prepare()
        except BadInput as error:
            if not self.trinity:
                raise
            title = (
                "The local engines, which stand in for Trinity's in a dry run, cannot play this "
                f"configuration. {error.title}"
            )
            raise BadInput(title, error.faults) from error
        own = [text for text in self.run.warnings if text not in played.warnings]
        self.warnings = [*dict.fromkeys([*planned.warnings, *own])]

    def real(self, trained: bool) -> list[str]:
        """What was as in a run; the step only if it was made."""
        played = self.played
        where = "in one process, without Ray" if played.inline else "as actors of a Ray of its own"
        pipeline = [item.name for item in played.data_processor.experience_pipeline.operators]
        operators = ", ".join(name.rpartition(".")[2] for name in pipeline)
        given = self.tokens.own or played.explorer.rollout_model.chat_template
        template = "the chat template" if given else "another tokenizer's chat template"
        found = [
            "rows, workflow function, judge and rewards, and whatever these call on their own",
            f"adapter, runners, experience pipeline, buffer and trainer, {where}",
            f"recorded calls over HTTP with {template} and tool calls",
            f"operators {operators}; advantage {played.algorithm.advantage_fn}; loss "
            f"{played.algorithm.policy_loss_fn}",
        ]
        if trained:
            found.append("one optimiser step, and its weights handed to the sampler")
        if self.options.call_apis:
            found += [f"{_named(role, model)}: called" for role, model in self.apis.items()]
        return found

    def stood_in(self) -> list[str]:
        """What took the place of what."""
        found = [
            f"{self.policy}: a random Llama of {self.parameters:,} parameters with "
            f"{self.tokens.source}"
            + ("" if self.tokens.own else ", since its own is not on this machine"),
            "what it says: the script (above)",
        ]
        for auxiliary in self.planned.explorer.auxiliary_models:
            name = auxiliary.name or "an auxiliary model"
            found.append(f"{name} (auxiliary model): plain words")
        if not self.options.call_apis:
            found += [
                f"{_named(role, model)}: plain words; --call-apis would call it"
                for role, model in self.apis.items()
            ]
        if self.trinity:
            found.append("vLLM and verl: the local sampler and trainer, on this machine's CPU")
        if self.left_out:
            found.append(f"left out: {'; '.join(self.left_out)}")
        found.append("no evaluation on held-out rows, no export; checkpoints are thrown away")
        return found

    def _plan_run(self, workflow: Callable[..., Any] | None) -> bool:
        """Prepare the configuration as it is, away from any cluster; whether it is Trinity's."""
        planned = self.planned
        if planned.engine == "trinity":
            planned.prepared.engine = ("trinity", "as configured")
            # A folder of the cluster's machines need not be here: `doctor` looks for it there.
            for model in (planned.model, *planned.explorer.auxiliary_models):
                folder = Path(str(model.model_path)).expanduser()
                if folder.is_absolute() and not folder.exists():
                    model.model_path = str(self.model)
        prepare(planned, Purpose.CHECK, workflow=workflow)
        return planned.engine == "trinity"

    def _script(self) -> Script:
        planned = self.planned
        named = (
            planned.graph.benchmark,
            planned.writer.benchmark,
            planned.rewards.benchmark,
        )
        benchmark = next((name for name in named if name), None)
        training = [item for item in user_tasksets(planned) if not item[2]]
        fields: tuple[str, ...] = TRUTH_FIELDS
        for key, taskset, _ in training:
            if planned.positions.given(f"{key}.format.response_key"):
                fields = (taskset.format.response_key, *fields)
        if self.options.answers is None:
            return Script(benchmark=benchmark, truth_fields=fields)
        return read_answers(
            self.options.answers,
            benchmark=benchmark,
            truth_fields=fields,
            numbered=len(training) == 1,
        )

    def _serve(self, name: str) -> str:
        """Answer for a model behind an API; returns the address."""
        import torch

        tokenizer = copy.deepcopy(self.tokens.tokenizer)
        tokenizer.chat_template = CHATML  # takes any roles in any order, as APIs do
        sampler = ScriptedSampler(
            load_model(self.model, torch.float32, torch.device("cpu")),
            tokenizer,
            scored=False,
            max_model_len=2**20,
            threads=1,
        )
        self._stack.callback(sampler.close)
        server = ScriptedServer(sampler, tokenizer, name)
        address = server.start()
        self._stack.callback(server.stop)
        return f"{address}/v1"


def _chosen(whole: AflowConfig, stage: str | None) -> tuple[str, AflowConfig]:
    """The run or the stage to play.

    Raises:
        BadInput: there is no such stage, or none that trains on rollouts.
    """
    parts, faults = parts_of(whole)
    if faults:
        raise BadInput("The stages do not fit together.", faults)
    names = [name for name, _ in parts if name]
    if stage is not None and stage not in names:
        expected = f"one of {', '.join(names)}" if names else "nothing: there are no stages"
        raise BadInput(
            "There is no such stage.",
            [Fault("--stage", expected, repr(stage), "name a stage, or leave --stage out")],
        )
    playable = [part for part in parts if part[1].mode in PLAYED_MODES]
    asked = [part for part in playable if stage in (None, part[0])]
    if asked:
        return asked[0]
    modes = ", ".join(dict.fromkeys(part.mode for _, part in parts))
    cure = "name such a stage with --stage" if playable else "aflow-tune validate and doctor"
    raise BadInput(
        "A dry run plays a run that trains on rollouts of a workflow.",
        [Fault(whole.positions.where("mode"), "mode: both", f"mode: {modes}", cure)],
    )


def _plan(planned: AflowConfig, scene: _Scene, stage: str) -> Plan:
    """What the prepared configuration asks for."""
    algorithm, sync = planned.algorithm, planned.synchronizer
    rounds, trainer_steps = None, 1
    if sync.sync_style.value == "fixed":
        rounds = (sync.explorer_sync_interval or sync.sync_interval) + sync.sync_offset
        trainer_steps = sync.trainer_sync_interval or sync.sync_interval
    return Plan(
        model=scene.policy,
        engine=planned.engine,
        algorithm=algorithm.algorithm_type,
        advantage=str(algorithm.advantage_fn),
        loss=str(algorithm.policy_loss_fn),
        tasks=planned.buffer.batch_size,
        played=scene.tasks,
        repeats=algorithm.repeat_times,
        steps=total_steps(planned),
        train_batch_size=planned.buffer.train_batch_size,
        counts_calls=(algorithm.sample_strategy or "default") in COUNTING_STRATEGIES,
        explorer_rounds=rounds,
        trainer_steps=trainer_steps,
        max_prompt=planned.model.max_prompt_tokens,
        max_response=planned.model.max_response_tokens,
        max_length=planned.model.max_model_len,
        own_tokens=scene.tokens.own,
        stage=stage,
    )


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
    found = groups(result)
    if result.trained and found.get("mixed") == 0:
        yield "no group has two different rewards: such a step teaches nothing"


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="aflow-dry-run-", ignore_cleanup_errors=True)


def _named(role: str, model: Any) -> str:
    return f"{role} ({model.model} at {model.base_url or f'the address of {model.provider}'})"
