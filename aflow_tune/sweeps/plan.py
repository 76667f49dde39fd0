"""The checked plan of a sweep: its search space, its folder, the settings of its trials.

The code of `aflow-tune validate` checks, before anything is started, the configuration, every value
alone, and every combination of a small grid. Values drawn at random are checked when they are drawn
(`Plan.refusal`).

Settings that decide a score are kept in `settings.json`; a command that resumes must have the same.

The search space gives, for each key of the configuration, a list of values or a range:

    algorithm.repeat_times=4,8,16            these values
    model.temperature=0.6..1.0               any number between
    algorithm.optimizer.lr=log:1e-6..1e-4    any number between, evenly by its logarithm
    buffer.batch_size=int:2..16              any whole number between (log:int: by its logarithm)

A YAML file has the same as `key: [values]` or `key: range`. Values are kept as text and reach the
run as `key=text`, so only the configuration parses them.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from aflow_tune.config.changes import is_free, masked
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.stages import chain_folder, parts_of
from aflow_tune.config.tasksets import user_tasksets
from aflow_tune.config.validate import validate
from aflow_tune.errors import BadInput, Fault
from aflow_tune.files import write_json
from aflow_tune.sections import canonical, display
from aflow_tune.sweeps import Request

MOST_COMBINATIONS = 10_000  # of a grid, which is held in memory as a list
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"((?:log:|int:)*)({_NUMBER})\.\.({_NUMBER})")
_KEY = re.compile(r"[A-Za-z_][\w\-]*(?:[.\[][\w\-.\[\]]*)?")
_EXAMPLE = "--space algorithm.optimizer.lr=log:1e-6..1e-4 --space algorithm.repeat_times=4,8"
_TITLE = "The space of the sweep cannot be read."


@dataclass(frozen=True)
class Axis:
    """One key of the search space. `where`: its place on the command line or in a file."""

    key: str
    where: str
    distribution: CategoricalDistribution | FloatDistribution | IntDistribution

    @property
    def choices(self) -> tuple[str, ...]:
        return getattr(self.distribution, "choices", ())

    @property
    def log(self) -> bool:
        return bool(getattr(self.distribution, "log", False))

    @property
    def values(self) -> tuple[str, ...] | range | None:
        """Every value; None for a range of real numbers."""
        if isinstance(self.distribution, IntDistribution):
            return range(self.distribution.low, self.distribution.high + 1)
        return self.choices or None

    @property
    def probes(self) -> tuple[str, ...]:
        """The values that are checked beforehand: all of a list, both ends of a range."""
        if isinstance(self.distribution, CategoricalDistribution):
            return self.choices
        return self.text(self.distribution.low), self.text(self.distribution.high)

    def text(self, value: Any) -> str:
        """A value of the study as text for `key=`."""
        return value if isinstance(value, str) else repr(value)

    def told(self) -> str:
        """The values or range in the syntax of `--space`."""
        if self.choices:
            return ",".join(self.choices)
        whole = isinstance(self.distribution, IntDistribution)
        return "log:" * self.log + "int:" * whole + "..".join(self.probes)


def settings_of(values: Mapping[str, str]) -> list[str]:
    return [f"{key}={text}" for key, text in values.items()]


def grid(axes: Sequence[Axis], seed: int) -> list[dict[str, str]]:
    """All combinations, shuffled by `seed`. BadInput: there are more than `MOST_COMBINATIONS`, or a
    range of real numbers."""
    title = "There is no grid of this space."
    for axis in axes:
        if axis.values is None:
            expected = "values that can be counted, for --sampler grid"
            cure = f"list them: {axis.key}={','.join(axis.probes)}, or --sampler tpe"
            raise BadInput.of(title, axis.where, expected, "a range of numbers", cure)
    values = [axis.values or () for axis in axes]
    if (count := math.prod(map(len, values))) > MOST_COMBINATIONS:
        expected = f"at most {MOST_COMBINATIONS} combinations"
        raise BadInput.of(title, "--sampler grid", expected, str(count), "--sampler tpe or random")
    found = [
        {axis.key: axis.text(value) for axis, value in zip(axes, combination, strict=True)}
        for combination in itertools.product(*values)
    ]
    random.Random(seed).shuffle(found)
    return found


def parse_space(items: Sequence[str]) -> tuple[Axis, ...]:
    """The axes that `--space` names. BadInput: with every item that cannot be read."""
    axes: dict[str, Axis] = {}
    faults: list[Fault] = []
    for item in items:
        where = f"--space {item}"
        try:
            for key, place, said in _lines(item, where):
                try:
                    axis = _axis(key, place, said)
                except BadInput as error:
                    faults += error.faults
                    continue
                if (first := axes.setdefault(canonical(axis.key), axis)) is not axis:
                    cure = "put all its values into one of them"
                    faults.append(Fault(place, "every key once", f"also {first.where}", cure))
        except BadInput as error:
            faults += error.faults
    if not axes and not faults:
        faults.append(Fault("--space", "what to try", "nothing", _EXAMPLE))
    if faults:
        raise BadInput(_TITLE, faults)
    return tuple(axes.values())


def _lines(item: str, where: str) -> Iterator[tuple[str, str, str | list[str]]]:
    """(key, where, a range or a list of texts), of `key=...` or of each entry of a YAML file."""
    key, equals, text = item.partition("=")
    if equals:
        yield key.strip(), where, text
        return
    expected = "key=values, or a YAML file with `key: [values]` lines"
    path = Path(item)
    try:
        source = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(source, Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _unreadable(where, expected, str(error).splitlines()[0]) from None
    if not isinstance(node, yaml.MappingNode):
        raise _unreadable(where, expected, "something else")
    for name, value in node.value:
        place = f"{path}:{name.start_mark.line + 1}: {name.value}"
        said: str | list[str] = str(value.value) if isinstance(value, yaml.ScalarNode) else []
        if isinstance(value, yaml.SequenceNode):
            said = _as_written(source, value)
        yield str(name.value), place, said


def _as_written(source: str, node: yaml.Node) -> list[str]:
    return [source[item.start_mark.index : item.end_mark.index].strip() for item in node.value]


def _axis(key: str, where: str, said: str | list[str]) -> Axis:
    if not _KEY.fullmatch(key):
        raise _unreadable(where, "key=values", f"the key {key!r}")
    key = display(canonical(key))
    if isinstance(said, str):
        text = said.strip()
        if found := _RANGE.fullmatch(text):
            kinds, low, high = found.groups()
            log = "log:" in kinds
            try:
                drawn: Any = (
                    IntDistribution(int(low), int(high), log=log)
                    if "int:" in kinds
                    else FloatDistribution(float(low), float(high), log=log)
                )
                if drawn.single():
                    raise ValueError("one value only")
            except ValueError as error:
                expected = "LOW..HIGH with LOW below HIGH, above 0 for log:, whole for int:"
                raise _unreadable(where, expected, f"{text}: {error}") from None
            return Axis(key, where, drawn)
        # Split at commas outside of quotes and brackets.
        source = f"[{text}]"
        try:
            said = _as_written(source, yaml.compose(source, Loader=yaml.SafeLoader))
        except yaml.YAMLError as error:
            raise _unreadable(where, "values in YAML", " ".join(str(error).split())) from None
    values = {float(one) if re.fullmatch(_NUMBER, one) else one for one in said}
    if len(said) < 2 or len(values) < len(said):
        expected = "two values or more, each once, or a range such as log:1e-6..1e-4 or int:2..16"
        raise _unreadable(where, expected, ", ".join(said) or "none")
    return Axis(key, where, CategoricalDistribution(tuple(said)))


def _unreadable(where: str, expected: str, found: str) -> BadInput:
    return BadInput.of(_TITLE, where, expected, found, _EXAMPLE)


STUDY_FILE = "study.sqlite"
SETTINGS_FILE = "settings.json"
ENDING = "-sweep"
DEFAULT_TRIALS = 20
MOST_CHECKED = 64  # combinations of a grid beforehand; those of a larger grid when they start
_OWN_KEYS = frozenset(
    ("project", "group", "name", "checkpoint_root_dir", "continue_from_checkpoint", "stages")
)
"""Set by the sweep itself: its folders, and resuming."""
_DECIDE_HERE = (
    "budget.",
    "buffer.total_epochs",
    "buffer.total_steps",
    "explorer.eval_interval",
    "quick_eval",
    "report.score",
    "trainer.total_steps",
)
"""Settings that may change when a run is resumed, but decide its score."""
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*")


@dataclass(frozen=True)
class Plan:
    """A sweep that passed all checks. `trials`: their number. `first_report`: about the training
    step of a trial's first evaluation after step 0."""

    request: Request
    config: AflowConfig
    axes: tuple[Axis, ...]
    trials: int
    folder: Path
    first_report: int

    @property
    def seeds(self) -> list[int | None]:
        return list(self.request.seeds) or [None]

    def run_name(self, number: int, seed: int | None) -> str:
        name = f"{self.config.name}-{number:03d}"
        return name if seed is None else f"{name}-seed{seed}"

    def settings(self, number: int, seed: int | None, values: dict[str, str]) -> list[str]:
        group = f"{self.config.group}/{self.folder.name}".lstrip("/")
        settings = [*self.request.overrides, *settings_of(values)]
        settings += [] if seed is None else [f"seed={seed}"]
        for key, text in (("group", group), ("name", self.run_name(number, seed))):
            # Quoted, so that YAML reads it as text whatever it looks like.
            settings.append(f"{key}={text if _PLAIN.fullmatch(text) else json.dumps(text)}")
        return [*settings, "continue_from_checkpoint=true"]

    def refusal(self, number: int, values: dict[str, str]) -> BadInput | None:
        """Why a run would refuse a trial's settings; None: they are valid."""
        faults = validate(self.request.config, self.settings(number, self.seeds[0], values)).faults
        return BadInput("The configuration refuses these values.", faults) if faults else None


def make_plan(request: Request, say: Callable[[str], None] = print) -> Plan:
    """Check everything that can be checked; starts nothing. BadInput: lists the faults."""
    axes = parse_space(request.space)
    set_beside = [setting.partition("=")[0].strip() for setting in request.overrides]
    set_beside += ["seed"] if request.seeds else []
    faults = []
    for axis in axes:
        key = canonical(axis.key)
        if key in _OWN_KEYS or key in map(canonical, set_beside):
            expected = "a key that decides what is learned, and is not set beside it or by --seeds"
            faults.append(Fault(axis.where, expected, key, "leave it out"))
    trials, combinations = request.trials or DEFAULT_TRIALS, []
    if request.sampler == "grid":
        combinations = grid(axes, request.seed)[: request.trials]
        trials = len(combinations)
    report = validate(request.config, request.overrides)
    if report.config is None or report.faults:
        raise BadInput(f"The configuration {request.config} is refused as it is.", report.faults)
    # `validate` has filled in defaults; folder and comparison need the settings as written.
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
        say("warning: with `quick_eval` only --objective last compares trials on the same tasks")
    return Plan(request, config, axes, trials, folder, first_report)


def check_same(plan: Plan) -> None:
    """Write the sweep's settings into its folder; if its study exists, compare with those that it
    was made with. BadInput: with every setting that differs, or the file cannot be read."""
    now, path = _decisive(plan), plan.folder / SETTINGS_FILE
    if not path.exists() or not (plan.folder / STUDY_FILE).exists():
        write_json(path, now)
        return
    try:
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        title, cure = "The settings of this sweep cannot be read.", "give another `name=`"
        raise BadInput.of(title, str(path), "settings in JSON", str(error), cure) from None
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
    """What all commands of one sweep must have in common: every setting and argument that decides
    what is learned and how it is scored, except the swept settings."""
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


def _refused_values(
    request: Request,
    axes: Sequence[Axis],
    combinations: Sequence[dict[str, str]],
    say: Callable[[str], None],
) -> list[Fault]:
    """Faults of single values; if there are none, of the combinations of a small grid."""

    def refused(values: dict[str, str]) -> list[Fault]:
        return validate(request.config, [*request.overrides, *settings_of(values)]).faults

    say(f"checking {sum(len(axis.probes) for axis in axes)} values with the configuration")
    faults: dict[tuple[str, ...], Fault] = {}
    for axis in axes:
        for text in axis.probes:
            for fault in refused({axis.key: text}):
                where = f"{axis.where}: with {axis.key}={text}"
                if not fault.where.startswith("command line: "):
                    where += f": {fault.where}"
                told = (axis.key, fault.expected, fault.found, fault.cure)
                faults.setdefault(told, replace(fault, where=where))
    if faults or len(axes) < 2 or not 0 < len(combinations) <= MOST_CHECKED:
        return [*faults.values()]
    say(f"checking {len(combinations)} combinations")
    return [
        replace(fault, where=f"--space {' '.join(settings_of(values))}: {fault.where}")
        for values in combinations
        for fault in refused(values)
    ]
