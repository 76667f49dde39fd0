"""What is tried: for each key of the configuration a list of values or a range.

    algorithm.repeat_times=4,8,16            these values
    model.temperature=0.6..1.0               any number between
    algorithm.optimizer.lr=log:1e-6..1e-4    any number between, evenly by its logarithm
    buffer.batch_size=int:2..16              any whole number between (log:int: by its logarithm)

A file in YAML says the same, `key: [values]` or `key: range`. Values stay the text that was
written, and reach the run as `key=text`: they are read exactly once, by the configuration, which
also says whether a key exists and takes a value (`plan.py`).
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from aflow_tune.errors import BadInput, Fault
from aflow_tune.sections import canonical, display

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MOST_COMBINATIONS = 10_000
"""Of a grid. More would not be tried anyway, and a list of all of them is kept."""
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"((?:log:|int:)*)({_NUMBER})\.\.({_NUMBER})")
_LIKE_A_RANGE = re.compile(rf"(log:|int:).*|{_NUMBER}(\.\.{_NUMBER})+")
_KEY = re.compile(r"[A-Za-z_][\w\-]*(?:[.\[][\w\-.\[\]]*)?")
_EXAMPLE = "--space algorithm.optimizer.lr=log:1e-6..1e-4 --space algorithm.repeat_times=4,8"
_TITLE = "The space of the sweep cannot be read."


@dataclass(frozen=True)
class Axis:
    """One key and what is tried for it: `choices`, or a range from `low` to `high`. `where` names
    the item of the command line or of a file."""

    key: str
    where: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False

    @property
    def values(self) -> tuple[str, ...] | range | None:
        """Every value; None of a range that cannot be counted."""
        if self.choices:
            return self.choices
        return range(int(self.low), int(self.high) + 1) if self.whole else None

    @property
    def probes(self) -> tuple[str, ...]:
        """The values that can be looked at beforehand: all of a list, both ends of a range."""
        return self.choices or (self.text(self.low), self.text(self.high))

    def text(self, value: Any) -> str:
        """A value of the study as it stands behind `key=`."""
        if isinstance(value, str):
            return value
        return repr(int(value) if self.whole else float(value))

    def distribution(self) -> BaseDistribution:
        """As Optuna has it."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        if self.whole:
            return distributions.IntDistribution(int(self.low), int(self.high), log=self.log)
        return distributions.FloatDistribution(self.low, self.high, log=self.log)

    def told(self) -> str:
        """In the form that it is written in."""
        if self.choices:
            return ",".join(self.choices)
        kinds = ("log:" if self.log else "") + ("int:" if self.whole else "")
        return f"{kinds}{self.text(self.low)}..{self.text(self.high)}"


def settings_of(values: Mapping[str, str]) -> list[str]:
    """Values as settings of a command."""
    return [f"{key}={text}" for key, text in values.items()]


def grid(axes: Sequence[Axis], seed: int) -> list[dict[str, str]]:
    """All combinations in the order in which they are tried: shuffled, so that a part of them is
    spread over the whole grid.

    Raises:
        BadInput: a range that cannot be counted, or more than `MOST_COMBINATIONS`.
    """
    values = [axis.values for axis in axes]
    count = math.prod(len(of) for of in values if of is not None)
    faults = []
    for axis in (axis for axis in axes if axis.values is None):
        middle = math.sqrt(axis.low * axis.high) if axis.log else (axis.low + axis.high) / 2
        sample = ",".join(f"{value:.3g}" for value in (axis.low, middle, axis.high))
        expected = "values that can be counted, for --sampler grid"
        cure = f"list them: {axis.key}={sample}, or --sampler tpe"
        faults.append(Fault(axis.where, expected, "a range of numbers", cure))
    if not faults and count > MOST_COMBINATIONS:
        expected = f"at most {MOST_COMBINATIONS} combinations"
        faults.append(Fault("--sampler grid", expected, str(count), "--sampler tpe or random"))
    if faults:
        raise BadInput("There is no grid of this space.", faults)
    found = [
        {axis.key: axis.text(value) for axis, value in zip(axes, combination, strict=True)}
        for combination in itertools.product(*(of or () for of in values))
    ]
    random.Random(seed).shuffle(found)
    return found


def parse_space(items: Sequence[str]) -> tuple[Axis, ...]:
    """The axes that `--space` names, in their order.

    Raises:
        BadInput: with every item that cannot be read, and every key that is named twice.
    """
    axes: dict[str, Axis] = {}
    faults: list[Fault] = []
    for item in items:
        key, equals, text = item.partition("=")
        where = f"--space {item}"
        try:
            lines = [(key.strip(), where, text)] if equals else [*_of_file(Path(item), where)]
        except BadInput as error:
            faults += error.faults
            continue
        for name, place, said in lines:
            try:
                axis = _axis(name, place, said)
            except BadInput as error:
                faults += error.faults
                continue
            if (first := axes.setdefault(canonical(axis.key), axis)) is not axis:
                cure = "put all its values into one of them"
                faults.append(Fault(place, "every key once", f"also {first.where}", cure))
    if not axes and not faults:
        faults.append(Fault("--space", "what to try", "nothing", _EXAMPLE))
    if faults:
        raise BadInput(_TITLE, faults)
    return tuple(axes.values())


def _of_file(path: Path, where: str) -> Iterator[tuple[str, str, str | list[str]]]:
    """(key, where, a range or the texts of a list) of each line of a YAML file."""
    expected = "key=values, or a YAML file with `key: [values]` lines"
    if path.suffix not in (".yaml", ".yml"):
        raise _unreadable(where, expected, str(path), _EXAMPLE)
    try:
        source = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(source, Loader=yaml.SafeLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise _unreadable(where, expected, str(error).splitlines()[0], "check the file") from None
    if not isinstance(node, yaml.MappingNode):
        raise _unreadable(where, expected, "something else", _EXAMPLE)
    for key, value in node.value:
        place = f"{path}:{key.start_mark.line + 1}: {key.value}"
        if isinstance(value, yaml.ScalarNode):
            yield str(key.value), place, str(value.value)
        elif isinstance(value, yaml.SequenceNode):
            yield str(key.value), place, _as_written(source, value)
        else:
            yield str(key.value), place, []


def _as_written(source: str, node: yaml.Node) -> list[str]:
    return [source[item.start_mark.index : item.end_mark.index].strip() for item in node.value]


def _axis(key: str, where: str, said: str | list[str]) -> Axis:
    if not _KEY.fullmatch(key):
        raise _unreadable(where, "key=values", f"the key {key!r}", _EXAMPLE)
    key = display(canonical(key))
    if isinstance(said, str):
        text = said.strip()
        if found := _RANGE.fullmatch(text):
            return _range(key, where, *found.groups())
        if _LIKE_A_RANGE.fullmatch(text):
            raise _unreadable(where, "a range such as log:1e-6..1e-4 or int:2..16", text, _EXAMPLE)
        # The parts between commas; commas in quotes and brackets do not count.
        source = f"[{text}]"
        try:
            said = _as_written(source, yaml.compose(source, Loader=yaml.SafeLoader))
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or str(error)
            raise _unreadable(where, "values in YAML", problem, "quote the values") from None
    if len(said) < 2:
        cure = f"give a fixed value as a setting: {key}={said[0] if said else '...'}"
        expected = "two values or more, or a range LOW..HIGH, for a key that is written whole"
        raise _unreadable(where, expected, ", ".join(said) or "none", cure)
    values = [float(choice) if re.fullmatch(_NUMBER, choice) else choice for choice in said]
    if len(set(values)) < len(values):
        raise _unreadable(where, "every value once", ", ".join(said), "remove what is there twice")
    return Axis(key, where, tuple(said))


def _range(key: str, where: str, kinds: str, low_text: str, high_text: str) -> Axis:
    low, high, shown = float(low_text), float(high_text), f"{low_text}..{high_text}"
    whole, log = "int:" in kinds, "log:" in kinds
    if not low < high < math.inf:
        raise _unreadable(where, "LOW..HIGH with LOW below HIGH", shown, "turn them round")
    if whole and not (low.is_integer() and high.is_integer()):
        raise _unreadable(where, "whole numbers", shown, "int:2..16")
    if log and low <= 0:
        raise _unreadable(where, "numbers above 0 for log:", low_text, "begin above 0, or no log:")
    return Axis(key, where, low=low, high=high, whole=whole, log=log)


def _unreadable(where: str, expected: str, found: str, cure: str) -> BadInput:
    return BadInput.of(_TITLE, where, expected, found, cure)
