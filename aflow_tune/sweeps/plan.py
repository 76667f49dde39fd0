"""A sweep as it was asked for, checked: what is tried, where its folder is, what its trials are.

Everything that could be refused is refused here, before anything is started, by the code that
`aflow-tune validate` uses: the configuration itself, every value of the space alone, and of a
small grid every combination. A random combination cannot be known beforehand; it is checked when
it is drawn (`refusal`).

The second command of a sweep must mean the same as the first, or its trials could not be compared:
what decides a score is kept in `settings.json`, and a difference is refused with both sides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.files import write_json
from aflow_tune.sections import canonical
from aflow_tune.sweeps import STUDY_FILE
from aflow_tune.sweeps.space import (
    Axis,
    combination,
    combinations,
    grid_order,
    parse_space,
    settings_of,
)

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

SETTINGS_FILE = "settings.json"
ENDING = "-sweep"
DEFAULT_TRIALS = 20
MOST_CHECKED = 64
"""Combinations of a grid that are all checked beforehand; of a larger one each when it begins."""
_OWN_KEYS = {
    "project": "it names the sweep's folder",
    "group": "it names the sweep's folder",
    "name": "every trial gets its own",
    "checkpoint_root_dir": "it names the sweep's folder",
    "continue_from_checkpoint": "trials are resumed",
    "stages": "name a setting in a stage: stages[0].algorithm.optimizer.lr",
}
_DECIDE_HERE = (
    "budget.",
    "buffer.total_epochs",
    "buffer.total_steps",
    "explorer.eval_interval",
    "quick_eval",
    "report.score",
    "trainer.total_steps",
)
"""Settings that a run may change when it is resumed, and that decide what its score is."""
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line. `trials` None: all of a grid, else 20."""

    config: Path
    space: Sequence[str]
    overrides: Sequence[str] = ()
    trials: int | None = None
    sampler: str = "tpe"
    seed: int = 0
    seeds: Sequence[int] = ()
    prune: str = "none"
    objective: str = "best"
    parallel: int = 1
    timeout: float | None = None


@dataclass(frozen=True)
class Plan:
    """A sweep that may begin. `trials`: how many there will be."""

    request: Request
    config: AflowConfig
    engine: str
    axes: tuple[Axis, ...]
    trials: int
    folder: Path
    first_report: int
    """The training step of a trial's first evaluation after it began to learn, about."""
    warnings: list[str] = field(default_factory=list)

    @property
    def is_chain(self) -> bool:
        """Whether a trial is a chain of stages."""
        return bool(self.config.stages)

    @property
    def seeds(self) -> list[int | None]:
        """The seeds of a trial's runs; None: the configuration's own."""
        return list(self.request.seeds) or [None]

    def run_name(self, number: int, seed: int | None) -> str:
        """The name of a trial's run, which is also its folder's."""
        name = f"{self.config.name}-{number:03d}"
        return name if seed is None else f"{name}-seed{seed}"

    def settings(self, number: int, seed: int | None, values: dict[str, str]) -> list[str]:
        """The settings with which a trial's run is started, behind those of the command line."""
        group = f"{self.config.group}/{self.folder.name}".lstrip("/")
        return [
            *self.request.overrides,
            *settings_of(values),
            *([] if seed is None else [f"seed={seed}"]),
            _text("group", group),
            _text("name", self.run_name(number, seed)),
            "continue_from_checkpoint=true",
        ]

    def refusal(self, number: int, values: dict[str, str]) -> BadInput | None:
        """Why a trial's settings would be refused by the run itself; None: they are fine."""
        from aflow_tune.config.validate import validate

        faults = validate(self.request.config, self.settings(number, self.seeds[0], values)).faults
        return BadInput("The configuration refuses these values.", faults) if faults else None


def make_plan(request: Request, say: Callable[[str], None] = print) -> Plan:
    """Check everything that can be checked; starts nothing.

    Raises:
        BadInput: with every fault of the space, the configuration, or both together.
    """
    from aflow_tune.config.stages import chain_folder, parts_of
    from aflow_tune.config.tasksets import user_tasksets
    from aflow_tune.config.validate import validate

    axes = parse_space(request.space)
    faults = [fault for axis in axes for fault in _own_key(axis, request)]
    order = grid_order(axes, request.seed) if request.sampler == "grid" else []
    report = validate(request.config, request.overrides)
    if report.config is None or report.faults:
        raise BadInput(f"The configuration {request.config} is refused as it is.", report.faults)
    # Checking has filled a great deal in: the folder and the comparison want it as written.
    config = _as_written(request)
    parts = parts_of(config)[0]
    if not any(held_out for _, part in parts for _, _, held_out in user_tasksets(part)):
        key = "buffer.explorer_input.eval_tasksets"
        found, cure = "none: there would be no score", f"{key}: [{{name: held_out, path: ...}}]"
        faults.append(Fault(config.positions.where(key), "a held-out task set", found, cure))
    if config.stages and request.prune != "none":
        expected = "none, for a chain of stages: steps of different stages are no comparison"
        faults.append(Fault("--prune", expected, request.prune, "--prune none"))
    if not faults:
        faults = _refused_values(request, axes, order, say)
    if faults:
        raise BadInput("The sweep cannot begin.", faults)
    folder = chain_folder(config)
    plan = Plan(
        request,
        config,
        report.engine[0] if report.engine else "local",
        axes,
        _trials(request, axes),
        folder.with_name(f"{folder.name}{ENDING}"),
        max(1, int(report.config.explorer.eval_interval or 1)),
    )
    plan.warnings.extend(_warnings(plan))
    return plan


def check_same(plan: Plan) -> None:
    """Keep the sweep's settings in its folder, or compare with those of an earlier command that
    made its study.

    Raises:
        BadInput: with every setting that differs.
    """
    now = decisive(plan)
    path = plan.folder / SETTINGS_FILE
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError("no object")
    except FileNotFoundError:
        before = None
    except ValueError as error:
        cure = "start again under another `name=`"
        fault = Fault(str(path), "the settings of a sweep, in JSON", str(error), cure)
        raise BadInput("The settings of this sweep cannot be read.", [fault]) from None
    if before is None or not (plan.folder / STUDY_FILE).exists():
        write_json(path, now)
        return
    faults = [
        Fault(
            key,
            f"{before.get(key)!r} (as the sweep in {plan.folder} was started)",
            repr(now.get(key)),
            "set it back to go on, or give the changed sweep another `name=`",
        )
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if faults:
        raise BadInput("This folder belongs to another sweep.", faults)


def decisive(plan: Plan) -> dict[str, Any]:
    """What two commands of one sweep must have in common, as plain JSON values.

    Of the configuration it is every setting that decides what is learned and how it is scored,
    without the swept keys; of the command line all but how long, how many and how many at once.
    """
    from aflow_tune.config.changes import is_free, masked

    request = plan.request
    swept = {canonical(axis.key) for axis in plan.axes}
    return {
        **{
            key: masked(key, value if isinstance(value, int | float | str | None) else str(value))
            for key, value in plan.config.flatten().items()
            if canonical(key) not in swept and (key.startswith(_DECIDE_HERE) or not is_free(key))
        },
        **{f"--space {axis.key}": axis.told() for axis in plan.axes},
        "--sampler": request.sampler,
        "--seed": request.seed,
        "--seeds": ",".join(map(str, request.seeds)),
        "--prune": request.prune,
        "--objective": request.objective,
    }


def _as_written(request: Request) -> AflowConfig:
    from aflow_tune.config.load import load_config

    return load_config(request.config, request.overrides)


def _trials(request: Request, axes: Sequence[Axis]) -> int:
    if request.sampler != "grid":
        return request.trials or DEFAULT_TRIALS
    count = combinations(axes) or 0
    return min(count, request.trials or count)


def _own_key(axis: Axis, request: Request) -> list[Fault]:
    key = canonical(axis.key)
    if key in _OWN_KEYS:
        expected = "a key that decides what is learned"
        return [Fault(axis.where, expected, f"`{key}`: {_OWN_KEYS[key]}", "leave it out")]
    if key == "seed" and request.seeds:
        found = "`seed` beside --seeds, which sets it for every run"
        return [Fault(axis.where, "one of the two", found, "leave one of them out")]
    for setting in request.overrides:
        if canonical(setting.partition("=")[0].strip()) == key:
            cure = "leave one of them out"
            return [Fault(axis.where, "a key that is not set beside it", setting, cure)]
    return []


def _refused_values(
    request: Request, axes: Sequence[Axis], order: Sequence[int], say: Callable[[str], None]
) -> list[Fault]:
    """Faults of the values alone, and of the combinations of a small grid."""
    say(f"checking {sum(len(axis.probes) for axis in axes)} values with the configuration")
    faults: list[Fault] = []
    for axis in axes:
        told: set[tuple[str, str, str]] = set()
        for text in axis.probes:
            for fault in _refused(request, {axis.key: text}):
                said = (fault.expected, fault.found, fault.cure)
                if said not in told:
                    told.add(said)
                    faults.append(_of_value(fault, axis, text))
    if faults or not order or len(axes) < 2:
        return faults
    tried = list(order)[: _trials(request, axes)]
    if len(tried) > MOST_CHECKED:
        return faults
    say(f"checking {len(tried)} combinations")
    for number in tried:
        values = combination(axes, number)
        named = " ".join(settings_of(values))
        for fault in _refused(request, values):
            faults.append(replace(fault, where=f"--space {named}: {fault.where}"))
    return faults


def _refused(request: Request, values: dict[str, str]) -> list[Fault]:
    from aflow_tune.config.validate import validate

    return validate(request.config, [*request.overrides, *settings_of(values)]).faults


def _of_value(fault: Fault, axis: Axis, text: str) -> Fault:
    where = f"{axis.where}: with {axis.key}={text}"
    if not fault.where.startswith("command line: "):
        where += f": {fault.where}"
    cure = fault.cure
    if not axis.choices and not axis.whole and axis.low.is_integer() and axis.high.is_integer():
        cure = f"{axis.key}=int:{axis.low:g}..{axis.high:g} for whole numbers, or: {cure}"
    return replace(fault, where=where, cure=cure)


def _text(key: str, value: str) -> str:
    """A setting that is read as text, whatever it looks like."""
    return f"{key}={value}" if _PLAIN.fullmatch(value) else f"{key}={json.dumps(value)}"


def _warnings(plan: Plan) -> list[str]:
    """What a user should know before the hours are spent."""
    request, found = plan.request, []
    seeds = len(plan.seeds)
    if request.prune != "none" and request.parallel < seeds:
        found.append(
            f"a trial is pruned by the mean over its {seeds} seeds, and they do not all run at "
            f"once: --parallel {seeds} lets pruning save more than the last of them"
        )
    if plan.config.quick_eval and request.objective == "best":
        found.append(
            "with `quick_eval` the last evaluation uses all held-out tasks and others a sample: "
            "--objective last compares trials on the same tasks"
        )
    on_one_gpu = plan.engine == "local" and plan.config.physical_gpus is None
    if request.parallel > 1 and on_one_gpu and plan.config.local.device in ("auto", "cuda"):
        import torch

        if torch.cuda.is_available():
            found.append(
                f"{request.parallel} runs at once would share one GPU: physical_gpus=auto gives "
                "each its own"
            )
    return found
