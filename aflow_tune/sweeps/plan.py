"""A sweep as it was asked for, checked: what is tried, where its folder is, what its trials are.

Everything that could be refused is refused before anything is started, by the code that
`aflow-tune validate` uses: the configuration, every value alone, and of a small grid every
combination. What is drawn at random is checked when it is drawn (`Plan.refusal`).

What decides a score is kept in `settings.json`: the second command of a sweep must mean the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aflow_tune.config.changes import is_free, masked
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.stages import chain_folder, parts_of
from aflow_tune.config.tasksets import user_tasksets
from aflow_tune.config.validate import validate
from aflow_tune.errors import BadInput, Fault
from aflow_tune.files import write_json
from aflow_tune.sections import canonical
from aflow_tune.sweeps import Request
from aflow_tune.sweeps.space import Axis, grid, parse_space, settings_of

STUDY_FILE = "study.sqlite"
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
class Plan:
    """A sweep that may begin. `trials`: how many there will be. `first_report`: the training step
    of a trial's first evaluation after it began to learn, about."""

    request: Request
    config: AflowConfig
    axes: tuple[Axis, ...]
    trials: int
    folder: Path
    first_report: int

    @property
    def seeds(self) -> list[int | None]:
        """The seeds of a trial's runs; None: the configuration's own."""
        return list(self.request.seeds) or [None]

    def run_name(self, number: int, seed: int | None) -> str:
        """The name of a trial's run, which is also its folder's."""
        name = f"{self.config.name}-{number:03d}"
        return name if seed is None else f"{name}-seed{seed}"

    def settings(self, number: int, seed: int | None, values: dict[str, str]) -> list[str]:
        """The settings with which a trial's run is started."""
        group = f"{self.config.group}/{self.folder.name}".lstrip("/")
        settings = [*self.request.overrides, *settings_of(values)]
        settings += [] if seed is None else [f"seed={seed}"]
        for key, text in (("group", group), ("name", self.run_name(number, seed))):
            # Read as text, whatever it looks like.
            settings.append(f"{key}={text if _PLAIN.fullmatch(text) else json.dumps(text)}")
        return [*settings, "continue_from_checkpoint=true"]

    def refusal(self, number: int, values: dict[str, str]) -> BadInput | None:
        """Why a trial's settings would be refused by the run itself; None: they are fine."""
        faults = validate(self.request.config, self.settings(number, self.seeds[0], values)).faults
        return BadInput("The configuration refuses these values.", faults) if faults else None


def make_plan(request: Request, say: Callable[[str], None] = print) -> Plan:
    """Check everything that can be checked; starts nothing.

    Raises:
        BadInput: with every fault of the space, the configuration, or both together.
    """
    axes = parse_space(request.space)
    faults = [fault for axis in axes for fault in _own_key(axis, request)]
    trials, combinations = request.trials or DEFAULT_TRIALS, []
    if request.sampler == "grid":
        combinations = grid(axes, request.seed)[: request.trials]
        trials = len(combinations)
    report = validate(request.config, request.overrides)
    if report.config is None or report.faults:
        raise BadInput(f"The configuration {request.config} is refused as it is.", report.faults)
    # Checking has filled a great deal in: the folder and the comparison want it as written.
    config = load_config(request.config, request.overrides)
    parts = parts_of(config)[0]
    if not any(held_out for _, part in parts for _, _, held_out in user_tasksets(part)):
        key = "buffer.explorer_input.eval_tasksets"
        found, cure = "none: there would be no score", f"{key}: [{{name: held_out, path: ...}}]"
        faults.append(Fault(config.positions.where(key), "a held-out task set", found, cure))
    if config.stages and request.prune != "none":
        expected = "none, for a chain of stages: steps of different stages are no comparison"
        faults.append(Fault("--prune", expected, request.prune, "--prune none"))
    if not faults:
        faults = _refused_values(request, axes, combinations, say)
    if faults:
        raise BadInput("The sweep cannot begin.", faults)
    folder = chain_folder(config)
    folder = folder.with_name(f"{folder.name}{ENDING}")
    first_report = max(1, int(report.config.explorer.eval_interval or 1))
    if config.quick_eval and request.objective == "best":
        say(
            "warning: with `quick_eval` the last evaluation uses all held-out tasks and others a "
            "sample: --objective last compares trials on the same tasks"
        )
    return Plan(request, config, axes, trials, folder, first_report)


def check_same(plan: Plan) -> None:
    """Keep the sweep's settings in its folder, or compare with those of an earlier command that
    made its study.

    Raises:
        BadInput: with every setting that differs.
    """
    now, path = _decisive(plan), plan.folder / SETTINGS_FILE
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError("no object")
    except FileNotFoundError:
        before = None
    except ValueError as error:
        title, expected = "The settings of this sweep cannot be read.", "settings in JSON"
        cure = "start again under another `name=`"
        raise BadInput.of(title, str(path), expected, str(error), cure) from None
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


def _decisive(plan: Plan) -> dict[str, Any]:
    """What two commands of one sweep must have in common, as plain JSON values.

    Of the configuration it is every setting that decides what is learned and how it is scored,
    without the swept keys; of the command line all but how long, how many and how many at once.
    """
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


def _own_key(axis: Axis, request: Request) -> Iterator[Fault]:
    """What is wrong with sweeping this key beside the other settings."""
    key, leave = canonical(axis.key), "leave one of them out"
    given = (s for s in request.overrides if canonical(s.partition("=")[0].strip()) == key)
    if key in _OWN_KEYS:
        expected = "a key that decides what is learned"
        yield Fault(axis.where, expected, f"`{key}`: {_OWN_KEYS[key]}", "leave it out")
    elif beside := next(given, "--seeds" if key == "seed" and request.seeds else None):
        yield Fault(axis.where, "a key that is not set beside it", beside, leave)


def _refused_values(
    request: Request,
    axes: Sequence[Axis],
    combinations: Sequence[dict[str, str]],
    say: Callable[[str], None],
) -> list[Fault]:
    """Faults of the values alone, and of the combinations of a small grid."""

    def refused(values: dict[str, str]) -> list[Fault]:
        return validate(request.config, [*request.overrides, *settings_of(values)]).faults

    say(f"checking {sum(len(axis.probes) for axis in axes)} values with the configuration")
    faults: dict[tuple[str, ...], Fault] = {}
    for axis in axes:
        for text in axis.probes:
            for fault in refused({axis.key: text}):
                told = (axis.key, fault.expected, fault.found, fault.cure)
                faults.setdefault(told, _of_value(fault, axis, text))
    if faults or len(axes) < 2 or not 0 < len(combinations) <= MOST_CHECKED:
        return [*faults.values()]
    say(f"checking {len(combinations)} combinations")
    return [
        replace(fault, where=f"--space {' '.join(settings_of(values))}: {fault.where}")
        for values in combinations
        for fault in refused(values)
    ]


def _of_value(fault: Fault, axis: Axis, text: str) -> Fault:
    where, cure = f"{axis.where}: with {axis.key}={text}", fault.cure
    if not fault.where.startswith("command line: "):
        where += f": {fault.where}"
    if not axis.choices and not axis.whole and axis.low.is_integer() and axis.high.is_integer():
        cure = f"{axis.key}=int:{axis.low:g}..{axis.high:g} for whole numbers, or: {cure}"
    return replace(fault, where=where, cure=cure)
