"""What is tried: for each key of the configuration a list of values or a range.

    algorithm.repeat_times=4,8,16            these values
    model.temperature=0.6..1.0               any number between
    algorithm.optimizer.lr=log:1e-6..1e-4    any number between, evenly by its logarithm
    buffer.batch_size=int:2..16              any whole number between (log:int: by its logarithm)

A file in YAML says the same, `key: [values]` or `key: range`. Values stay the text that was
written, and reach the run as `key=text`: they are read exactly once, by the configuration. Whether
a key exists and takes a value is not known here (`checks.py`).
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aflow_tune.errors import BadInput, Fault
from aflow_tune.sections import canonical, display

MOST_COMBINATIONS = 10_000
"""Of a grid. More would not be tried anyway, and an order of all of them is kept."""
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"((?:log:|int:)*)({_NUMBER})\.\.({_NUMBER})")
_LIKE_A_RANGE = re.compile(rf"{_NUMBER}(\.\.{_NUMBER})+")
_EXACT = 2**53
"""Above it there are whole numbers that a float cannot hold."""
_KEY = re.compile(r"[A-Za-z_][\w\-]*(?:[.\[][\w\-.\[\]]*)?")
_EXAMPLE = "--space algorithm.optimizer.lr=log:1e-6..1e-4 --space algorithm.repeat_times=4,8"


@dataclass(frozen=True)
class Axis:
    """One key and what is tried for it: `choices`, or a range from `low` to `high`."""

    key: str
    where: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False
    log: bool = False

    @property
    def count(self) -> int | None:
        """How many values there are; None where a range has no end of them."""
        if self.choices:
            return len(self.choices)
        return int(self.high) - int(self.low) + 1 if self.whole else None

    @property
    def values(self) -> tuple[str, ...] | None:
        """Every value, where they can be counted: `count` of them."""
        if self.choices:
            return self.choices
        return tuple(map(str, range(int(self.low), int(self.high) + 1))) if self.whole else None

    @property
    def probes(self) -> tuple[str, ...]:
        """The values that can be looked at beforehand: all of a list, both ends of a range."""
        return self.choices or (self.text(self._end(self.low)), self.text(self._end(self.high)))

    def text(self, value: Any) -> str:
        """A value as it stands behind `key=`."""
        if isinstance(value, str):
            return value
        return repr(int(value) if self.whole else float(value))

    def value(self, text: str) -> Any:
        """A value of `values` as the study keeps it."""
        return text if self.choices else int(text)

    def distribution(self) -> Any:
        """As Optuna has it."""
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        if self.choices:
            return CategoricalDistribution(list(self.choices))
        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def told(self) -> str:
        """In the form that it is written in."""
        if self.choices:
            return ",".join(self.choices)
        kinds = ("log:" if self.log else "") + ("int:" if self.whole else "")
        return f"{kinds}{self._end(self.low)!r}..{self._end(self.high)!r}"

    def _end(self, value: float) -> float | int:
        return int(value) if self.whole else value


def parse_space(items: Sequence[str]) -> tuple[Axis, ...]:
    """The axes that `--space` names, in their order.

    Raises:
        BadInput: with every item that cannot be read, and every key that is named twice.
    """
    axes: list[Axis] = []
    faults: list[Fault] = []
    for item in items:
        key, equals, text = item.partition("=")
        try:
            if equals:
                axes.append(_axis(key.strip(), f"--space {item}", text=text))
            else:
                axes += _from_file(Path(item))
        except BadInput as error:
            faults += error.faults
    seen: dict[str, Axis] = {}
    for axis in axes:
        first = seen.setdefault(canonical(axis.key), axis)
        if first is not axis:
            cure = "put all its values into one of them"
            faults.append(Fault(axis.where, "every key once", f"also {first.where}", cure))
    if not axes and not faults:
        faults.append(Fault("--space", "what to try", "nothing", _EXAMPLE))
    if faults:
        raise BadInput("The space of the sweep cannot be read.", faults)
    return tuple(axes)


def combinations(axes: Sequence[Axis]) -> int | None:
    """How many combinations of values there are; None where a range has no end of them."""
    counts = [axis.count for axis in axes]
    return None if None in counts else math.prod(count or 0 for count in counts)


def combination(axes: Sequence[Axis], number: int) -> dict[str, str]:
    """The combination `number` (from 0) of a grid; the last axis changes fastest."""
    chosen: dict[str, str] = {}
    for axis in reversed(axes):
        values = axis.values or ()
        number, index = divmod(number, len(values))
        chosen[axis.key] = values[index]
    return {axis.key: chosen[axis.key] for axis in axes}


def grid_order(axes: Sequence[Axis], seed: int) -> list[int]:
    """All combinations in the order in which they are tried: shuffled, so that a part of them is
    spread over the whole grid.

    Raises:
        BadInput: a range that cannot be counted, or more than `MOST_COMBINATIONS`.
    """
    faults = [
        Fault(
            axis.where,
            "values that can be counted, for --sampler grid",
            "a range of numbers",
            f"list them: {axis.key}={_sample(axis)}, or --sampler tpe",
        )
        for axis in axes
        if axis.count is None
    ]
    count = combinations(axes)
    if count is not None and count > MOST_COMBINATIONS:
        expected = f"at most {MOST_COMBINATIONS} combinations"
        faults.append(Fault("--sampler grid", expected, str(count), "--sampler tpe or random"))
    if faults:
        raise BadInput("There is no grid of this space.", faults)
    order = list(range(count or 0))
    random.Random(seed).shuffle(order)
    return order


def _sample(axis: Axis) -> str:
    """Three values of a range, for a cure."""
    middle = math.sqrt(axis.low * axis.high) if axis.log else (axis.low + axis.high) / 2
    return ",".join(f"{value:.3g}" for value in (axis.low, middle, axis.high))


def _axis(key: str, where: str, *, text: str = "", choices: Sequence[str] | None = None) -> Axis:
    if not _KEY.fullmatch(key):
        raise _unreadable(where, "key=values", f"the key {key!r}", _EXAMPLE)
    key = display(canonical(key))
    if choices is None:
        text = text.strip()
        if found := _RANGE.fullmatch(text):
            return _range(key, where, *found.groups())
        if text.startswith(("log:", "int:")) or _LIKE_A_RANGE.fullmatch(text):
            raise _unreadable(where, "a range such as log:1e-6..1e-4 or int:2..16", text, _EXAMPLE)
        choices = _split(text, where)
    if len(choices) < 2:
        found_text = f"one value: {choices[0]}" if choices else "none"
        cure = f"give a fixed value as a setting: {key}={choices[0] if choices else '...'}"
        raise _unreadable(where, "two values or more, or a range LOW..HIGH", found_text, cure)
    first: dict[str | float, str] = {}
    for choice in choices:
        value = float(choice) if re.fullmatch(_NUMBER, choice) else choice
        if value in first:
            again = f"{choice} again" + (f", as {first[value]}" if first[value] != choice else "")
            raise _unreadable(where, "every value once", again, "remove it")
        first[value] = choice
    return Axis(key, where, tuple(choices))


def _range(key: str, where: str, kinds: str, low_text: str, high_text: str) -> Axis:
    low, high = float(low_text), float(high_text)
    whole, log, shown = "int:" in kinds, "log:" in kinds, f"{low_text}..{high_text}"
    if low == high:
        cure = f"give a fixed value as a setting: {key}={low_text}"
        raise _unreadable(where, "LOW..HIGH with LOW below HIGH", shown, cure)
    if not low < high < math.inf:
        cure = f"{high_text}..{low_text}" if high < low else "choose a smaller number"
        raise _unreadable(where, "LOW..HIGH with LOW below HIGH", shown, cure)
    if whole and not (low.is_integer() and high.is_integer()):
        raise _unreadable(where, "whole numbers", shown, "int:2..16")
    if whole and max(abs(low), abs(high)) > _EXACT:
        raise _unreadable(where, f"whole numbers up to {_EXACT:,}", shown, "list some of them")
    if log and low <= 0:
        cure = f"begin above 0, such as {high / 100:g}..{high_text}" if high > 0 else "leave log:"
        raise _unreadable(where, "numbers above 0 for log:", low_text, cure)
    return Axis(key, where, low=low, high=high, whole=whole, log=log)


def _split(text: str, where: str) -> list[str]:
    """The parts between commas, as written; commas in quotes and brackets do not count."""
    source = f"[{text}]"
    try:
        node = yaml.compose(source, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise _unreadable(where, "values in YAML", problem, "quote the values") from None
    return _written(source, node)


def _written(source: str, node: yaml.SequenceNode) -> list[str]:
    return [source[item.start_mark.index : item.end_mark.index].strip() for item in node.value]


def _from_file(path: Path) -> list[Axis]:
    expected = "key=values, or a YAML file with `key: [values]`"
    if path.suffix not in (".yaml", ".yml"):
        raise _unreadable(f"--space {path}", expected, str(path), _EXAMPLE)
    try:
        source = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(source, Loader=yaml.SafeLoader)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _unreadable(f"--space {path}", expected, reason, "check the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _unreadable(str(path), "YAML", str(error).splitlines()[0], _EXAMPLE) from None
    if not isinstance(node, yaml.MappingNode):
        raise _unreadable(str(path), "`key: [values]` lines", "something else", _EXAMPLE)
    axes: list[Axis] = []
    faults: list[Fault] = []
    for key, value in node.value:
        where = f"{path}:{key.start_mark.line + 1}: {key.value}"
        try:
            axes.append(_file_axis(source, str(key.value), value, where))
        except BadInput as error:
            faults += error.faults
    if faults:
        raise BadInput("The space of the sweep cannot be read.", faults)
    return axes


def _file_axis(source: str, key: str, value: yaml.Node, where: str) -> Axis:
    if isinstance(value, yaml.ScalarNode):
        return _axis(key, where, text=value.value)
    if isinstance(value, yaml.SequenceNode):
        flow = all(isinstance(i, yaml.ScalarNode) or i.flow_style for i in value.value)
        if flow:
            return _axis(key, where, choices=_written(source, value))
        raise _unreadable(
            where, "lists within the list in brackets", "blocks", "- [q_proj, v_proj]"
        )
    cure = f"write the whole key: `{key}.{_first(value)}: [values]`"
    raise _unreadable(where, "a list of values or a range", "keys below it", cure)


def _first(node: yaml.Node) -> str:
    pairs: Sequence[Any] = node.value if isinstance(node, yaml.MappingNode) else ()
    return str(pairs[0][0].value) if pairs else "..."


def _unreadable(where: str, expected: str, found: str, cure: str) -> BadInput:
    return BadInput("The space of the sweep cannot be read.", [Fault(where, expected, found, cure)])


def settings_of(values: Mapping[str, str]) -> list[str]:
    """Values as settings of a command."""
    return [f"{key}={text}" for key, text in values.items()]
