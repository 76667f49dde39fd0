"""The schema of the YAML: a check that finds every fault, with the key that was meant.

OmegaConf makes the real merge; it stops at the first fault and knows no lines. `SchemaWalk` goes
over the YAML's nodes beside the tree of dataclasses, reports unknown keys with the nearest known
one and values of a wrong type, and cuts the faulty parts out of the nodes, so that what remains
can still be merged and checked further. Values with `${...}` are left to OmegaConf.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, Union

import yaml

from aflow_tune.errors import Fault
from aflow_tune.sections import KeyPositions, display

_MERGE = "tag:yaml.org,2002:merge"
_MAY_HOLD_A_KEY = re.compile(r"(key|token|secret|passw\w*|credentials?|authorization)$", re.I)
"""Names under which people write a key into the file, though no such setting is known."""
_TRUTH = ("true", "false", "yes", "no", "on", "off", "y", "n", "1", "0")
_SCALARS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}

_SYNONYMS = """
    algorithm.optimizer.lr: learning_rate
    algorithm.optimizer.lr_warmup_steps: warmup_steps
    algorithm.optimizer.lr_warmup_steps_ratio: warmup_ratio
    algorithm.optimizer.lr_scheduler_type: lr_scheduler
    trainer.grad_clip: max_grad_norm
    algorithm.repeat_times: group_size num_generations rollout_n
    buffer.total_epochs: epochs num_epochs num_train_epochs
    buffer.total_steps: max_steps steps
    trainer.save_interval: save_steps
    explorer.eval_interval: eval_steps
    model.max_response_tokens: max_tokens max_new_tokens max_completion_length
    model.max_prompt_tokens: max_prompt_length
    model.model_path: base_model model_name model_name_or_path
    model.lora_configs: lora lora_config
    model.lora_configs[].lora_rank: lora_r r
    buffer.explorer_input.taskset: dataset train_dataset
    buffer.explorer_input.eval_tasksets: eval_dataset eval_taskset
    workflow: workflow_func
    judge: reward reward_fn judge_func
    rollout.run_timeout: timeout
    checkpoint_root_dir: output_dir
    name: experiment_name
"""
SYNONYMS = {
    name: key
    for key, _, names in (line.strip().partition(":") for line in _SYNONYMS.strip().splitlines())
    for name in names.split()
}
"""What other frameworks call a setting."""


class SchemaWalk:
    """One walk over one document.

    Args:
        schema: the dataclass at the top.
        positions: filled with the line of every key met.
        where: turns a key path and a node into the place shown in a fault.
    """

    def __init__(
        self,
        schema: type,
        positions: KeyPositions,
        where: Callable[[str, yaml.Node], str],
    ) -> None:
        self.schema = schema
        self.positions = positions
        self.where = where
        self.faults: list[Fault] = []
        self._on_path: set[int] = set()

    def check(self, node: yaml.Node, expected: Any, path: str) -> bool:
        """Check a value; False if it must be cut out. Parts of it may have been cut already."""
        if id(node) in self._on_path:
            return self._fault(path, node, "a finite value", "an alias that contains itself")
        self._on_path.add(id(node))
        try:
            return self._check(node, *strip_optional(expected), path)
        finally:
            self._on_path.discard(id(node))

    def _check(self, node: yaml.Node, expected: Any, optional: bool, path: str) -> bool:
        scalar = isinstance(node, yaml.ScalarNode)
        if scalar and "${" in node.value and node.tag.endswith(":str"):
            self.positions.raw[path] = node.value
            return True
        if scalar and node.tag.endswith(":null"):
            good = optional or expected is Any
            return good or self._fault(path, node, describe(expected), "nothing (null)")
        if scalar and node.value == "???":
            return self._fault(path, node, describe(expected), "??? (a value still to fill in)")
        if expected is Any:
            self._note_lines(node, path)
            return True
        origin = typing.get_origin(expected) or expected
        for fits, kind, check in (
            (dataclasses.is_dataclass(expected), yaml.MappingNode, self._check_section),
            (origin is list, yaml.SequenceNode, self._check_list),
            (origin is dict, yaml.MappingNode, self._check_dict),
            (True, yaml.ScalarNode, self._check_scalar),
        ):
            if fits:
                if isinstance(node, kind):
                    return check(node, expected, path)
                fix = "begin each item with `- `, also a single one" if origin is list else None
                return self._fault(path, node, describe(expected), kind_of(node), fix)
        raise AssertionError(expected)

    def _check_section(self, node: yaml.Node, section: Any, path: str) -> bool:
        known = fields_of(section)
        kept: list[tuple[yaml.Node, yaml.Node]] = []
        seen: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for pair in node.value:
            key_node, value = pair
            if key_node.tag == _MERGE:
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(merged, yaml.MappingNode):  # PyYAML refuses others
                        self._check_section(merged, section, path)
                kept.append(pair)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(path, key_node, "a word as key", kind_of(key_node))
                continue
            name = key_node.value
            key = f"{path}.{name}" if path else name
            if name in seen:
                self._duplicate(key, seen[name][0], key_node)
                kept = [earlier for earlier in kept if earlier is not seen[name]]
            if name not in known:
                self._unknown(path, key_node, value, known)
                continue
            self.positions.lines[key] = key_node.start_mark.line + 1
            seen[name] = pair
            field_type, choices = known[name]
            if self.check(value, field_type, key) and self.check_choice(value, choices, key):
                kept.append(pair)
        node.value = kept
        return True

    def _check_list(self, node: yaml.Node, expected: Any, path: str) -> bool:
        item_type = (typing.get_args(expected) or (Any,))[0]
        kept = []
        for index, item in enumerate(node.value):
            key = f"{path}.{index}"
            self.positions.lines[key] = item.start_mark.line + 1
            if self.check(item, item_type, key):
                kept.append(item)
        node.value = kept
        return True

    def _check_dict(self, node: yaml.Node, expected: Any, path: str) -> bool:
        arguments = typing.get_args(expected)
        value_type = arguments[1] if len(arguments) == 2 else Any
        kept: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key_node, value in node.value:
            if key_node.tag == _MERGE:
                kept["<<"] = (key_node, value)
                continue
            key = f"{path}.{key_node.value}"
            if key_node.value in kept:
                self._duplicate(key, kept[key_node.value][0], key_node)
            self.positions.lines[key] = key_node.start_mark.line + 1
            if self.check(value, value_type, key):
                kept[key_node.value] = (key_node, value)
        node.value = list(kept.values())
        return True

    def _check_scalar(self, node: yaml.ScalarNode, expected: Any, path: str) -> bool:
        if isinstance(expected, type) and issubclass(expected, Enum):
            try:  # Trinity's enums also take the names that their values had before
                expected[node.value]
            except KeyError:
                return self.check_choice(node, [member.value for member in expected], path)
            return True
        tag = node.tag.rpartition(":")[2]
        good = {
            bool: tag in ("bool", "int") or node.value.lower() in _TRUTH,
            int: tag == "int" or (tag == "str" and _parses(int, node.value)),
            float: tag in ("int", "float") or (tag == "str" and _parses(float, node.value)),
        }.get(expected, True)
        return good or self._fault(path, node, describe(expected), kind_of(node))

    def check_choice(self, node: yaml.Node, choices: typing.Sequence[str], path: str) -> bool:
        """Whether a value is one of `choices`; of none, any is."""
        value = node.value
        if not choices or node.tag.endswith(":null") or "${" in value or value in choices:
            return True
        fix = f"{path.rpartition('.')[2]}: {nearest(str(value), choices) or choices[0]}"
        return self._fault(path, node, "one of " + ", ".join(choices), kind_of(node), fix)

    def _note_lines(self, node: yaml.Node, path: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key_node, value in node.value:
                if isinstance(key_node, yaml.ScalarNode):
                    key = f"{path}.{key_node.value}"
                    self.positions.lines[key] = key_node.start_mark.line + 1
                    self._note_lines(value, key)
        elif isinstance(node, yaml.ScalarNode) and "${" in node.value:
            self.positions.raw[path] = node.value

    def _duplicate(self, key: str, first: yaml.Node, second: yaml.Node) -> None:
        found = f"`{key.rpartition('.')[2]}` again (first in line {first.start_mark.line + 1})"
        place = self.where(key, second)
        self.faults.append(Fault(place, "every key once", found, "remove one of the two"))

    def _unknown(
        self, parent: str, key_node: yaml.ScalarNode, value: yaml.Node, known: dict[str, Any]
    ) -> None:
        expected, fix = suggest(self.schema, parent, key_node.value, known)
        key = f"{parent}.{key_node.value}" if parent else key_node.value
        kind = kind_of(value)
        if isinstance(value, yaml.ScalarNode) and _MAY_HOLD_A_KEY.search(key_node.value):
            kind = "its value is not shown since it may be a key"
        found = f"`{display(key)}`, which is no setting ({kind})"
        self.faults.append(Fault(self.where(key, key_node), expected, found, fix))

    def _fault(
        self, path: str, node: yaml.Node, expected: str, found: str, fix: str | None = None
    ) -> bool:
        shown = display(path) or "the file"
        fix = fix or f"give `{shown}` {expected}, or remove it to take the default"
        self.faults.append(Fault(self.where(path, node), f"{shown}: {expected}", found, fix))
        return False


def suggest(schema: type, parent: str, name: str, known: dict[str, Any]) -> tuple[str, str]:
    """For an unknown `name` under `parent`: what was expected there, and what to type instead."""
    section = re.sub(r"\.\d+(?=\.|$)", "[]", parent)
    target = elsewhere(name, section, list(known), index(schema))
    if target is None:
        words = ", ".join(sorted(known))
        return f"a key of `{display(parent) or 'the top level'}`: {words}", "remove it"
    home, _, leaf = target.rpartition(".")
    # Sections under names of the user's (`models.judge`) are not in the index.
    kind = describe(known[leaf][0] if home == section else index(schema)[target])
    if "." in name:
        return f"`{target}` ({kind})", f"write `{leaf}:` indented under `{home}:`"
    if home == section:
        meant = display(f"{parent}.{leaf}" if parent else leaf)
        return f"`{leaf}` ({kind})", f"did you mean `{meant}`?"
    level = f"It stands under `{home}:`" if home else "It stands at the top level"
    return f"`{target}` ({kind})", f"did you mean `{target}`? {level}"


@lru_cache(maxsize=64)
def fields_of(section: Any) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Name to type and choices of a dataclass's fields."""
    hints = typing.get_type_hints(section)
    return {
        item.name: (hints[item.name], tuple(item.metadata.get("choices", ())))
        for item in dataclasses.fields(section)
    }


@lru_cache(maxsize=2)
def index(schema: type) -> dict[str, Any]:
    """Every key path of the schema with its type; items of a list are `name[]`."""
    found: dict[str, Any] = {}

    def visit(section: Any, prefix: str) -> None:
        for name, (kind, _) in fields_of(section).items():
            path = f"{prefix}{name}"
            found[path] = kind
            inner, _optional = strip_optional(kind)
            if typing.get_origin(inner) is list:
                inner, path = (typing.get_args(inner) or (Any,))[0], path + "[]"
            if dataclasses.is_dataclass(inner):
                visit(inner, path + ".")

    visit(schema, "")
    return found


def strip_optional(kind: Any) -> tuple[Any, bool]:
    """`Optional[X]` as (X, True), anything else as (itself, False)."""
    if typing.get_origin(kind) in (Union, types.UnionType):
        rest = [argument for argument in typing.get_args(kind) if argument is not type(None)]
        return (rest[0] if len(rest) == 1 else Any), True
    return kind, kind is Any


def describe(kind: Any) -> str:
    """A type in words."""
    kind, optional = strip_optional(kind)
    origin = typing.get_origin(kind) or kind
    if kind is Any:
        return "any value"
    if dataclasses.is_dataclass(kind):
        text = "a section (indented keys below it)"
    elif isinstance(kind, type) and issubclass(kind, Enum):
        text = "one of " + ", ".join(member.value for member in kind)
    elif origin is list:
        inner = (typing.get_args(kind) or (Any,))[0]
        text = "a list of sections" if dataclasses.is_dataclass(inner) else "a list"
    elif origin is dict:
        text = "a mapping (indented keys below it)"
    else:
        text = _SCALARS.get(kind, str(kind))
    return f"{text}, or null" if optional else text


def kind_of(node: yaml.Node) -> str:
    """A value of the YAML in words."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return f"a list of {len(node.value)}"
    tag = node.tag.rpartition(":")[2]
    words = {kind.__name__: text for kind, text in _SCALARS.items()}
    if tag == "null":
        return "nothing (null)"
    shown = node.value if len(node.value) <= 60 else node.value[:57] + "..."
    return f"{shown!r} (text)" if tag == "str" else f"{shown} ({words.get(tag, tag)})"


def _parses(kind: type, text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, or None."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def elsewhere(name: str, parent: str, siblings: list[str], index: Mapping[str, Any]) -> str | None:
    """The key path that an unknown `name` under `parent` stands for, or None.

    In this order: a sibling spelled almost so, or with more behind it; the same name at another
    level (the least deep one); another framework's name; a sibling somewhat like it; a key
    anywhere almost so.
    """
    prefix = f"{parent}." if parent else ""
    bare = name.rpartition(".")[2]
    if prefix + name in index and name != bare:
        return prefix + name
    if close := nearest(name, siblings, 0.8):
        return prefix + close
    longer = [sibling for sibling in siblings if sibling.startswith(f"{name}_")]
    if len(longer) == 1:  # `api_key_env` for `api_key`
        return prefix + longer[0]
    by_leaf: dict[str, list[str]] = {}
    for path in index:
        by_leaf.setdefault(path.rpartition(".")[2], []).append(path)
    if bare in by_leaf:
        return _least_deep(by_leaf[bare], parent)
    if bare.lower() in SYNONYMS and SYNONYMS[bare.lower()] in index:
        return SYNONYMS[bare.lower()]
    if close := nearest(name, siblings):
        return prefix + close
    if close := nearest(bare, by_leaf, 0.8):
        return _least_deep(by_leaf[close], parent)
    return None


def _least_deep(paths: list[str], parent: str) -> str:
    top = parent.partition(".")[0] + "."

    def distance(path: str) -> tuple[int, bool, bool, str]:
        return path.count("."), "[]" in path, not path.startswith(top), path

    return min(paths, key=distance)
