"""Trinity's configuration class with our sections, and how one is read from YAML.

`AflowConfig` is Trinity's `Config` (the YAML is Trinity's) plus `AflowSections`. Reading
reports every fault of the file and of the command line at once; what the settings mean
together is left to `validators.py`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from trinity.common.config import Config

from aflow_tune.config import cpu_set
from aflow_tune.config.agentscope_args import apply_agentscope_args
from aflow_tune.config.changes import base_of
from aflow_tune.config.schema_walk import SchemaWalk, fields_of, strip_optional, suggest
from aflow_tune.config.stages import StageSection, check_stages, merge_stages
from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.redaction import masked
from aflow_tune.operators.aflow_prompts import PRESET, with_preset
from aflow_tune.sandbox.policy import of_setting
from aflow_tune.sections import AflowSections, KeyPositions, canonical, display

__all__ = ["AflowConfig", "apply_agentscope_args", "load_config", "read_config"]

# OmegaConf's own loader, so that a value is read here exactly as the merge will read it.
_Loader = get_yaml_loader()


@dataclass
class AflowConfig(Config, AflowSections):
    """Trinity's `Config` with our sections at the top level.

    Attributes that start with an underscore are no settings: they say where the settings came
    from and what was found about them, and are left out of `flatten()` and of saved files.
    """

    stages: list[StageSection] = field(default_factory=list)
    """Several runs, one after the other; see `stages.py`."""

    @property
    def positions(self) -> KeyPositions:
        """Where each key was written."""
        found: KeyPositions = self.__dict__.setdefault("_positions", KeyPositions())
        return found

    @property
    def warnings(self) -> list[str]:
        """What `check_and_update` found doubtful but did not refuse."""
        found: list[str] = self.__dict__.setdefault("_warnings", [])
        return found

    @property
    def command(self) -> dict[str, Any] | None:
        """What starts this run again (`RunState.command`); None for a call of `tune()`."""
        found: dict[str, Any] | None = self.__dict__.get("_command")
        return found

    def note_command(
        self, path: str | Path, overrides: Sequence[str], inline: bool | None = None
    ) -> None:
        """Keep the command that began the run; of settings that hold secrets only the names."""
        pairs = [(item, *item.partition("=")[::2]) for item in overrides]
        secret = [key for _, key, value in pairs if masked(key, value) != value]
        self.__dict__["_command"] = {
            "config": os.path.abspath(path),
            "overrides": [item for item, key, _ in pairs if key not in secret],
            "secret": secret,
            "inline": inline,
            "cwd": os.getcwd(),
            "renamed": not self.continue_from_checkpoint,
        }

    @property
    def account_folder(self) -> str:
        """The folder whose books this run writes into: its own, or that of its whole chain."""
        return str(self.__dict__.get("_account_folder", self.checkpoint_job_dir))

    def check_and_update(self) -> AflowConfig:
        """Settle the engine, refuse what cannot train, fill in the rest. Starts nothing.

        Raises:
            BadInput: with every fault.
        """
        from aflow_tune.config.validators import prepare

        prepare(self)
        return self

    def get_envs(self) -> dict[str, str]:
        """Trinity's environment for workers, without keys: Ray logs it and shows it."""
        external = self.model.external_model
        held = {external.api_key_env, external.base_url_env} if external.enable else set()
        envs = {name: text for name, text in super().get_envs().items() if name not in held}
        on_cpu = self.engine == "trinity" and cpu_set.in_use()
        return {**cpu_set.ENVIRONMENT, **envs} if on_cpu else envs

    def flatten(self) -> dict[str, Any]:
        """Every setting by its dotted key path; enum members as their values."""
        private = {key: value for key, value in vars(self).items() if key.startswith("_")}
        for key in private:
            del self.__dict__[key]
        try:
            return super().flatten()
        finally:
            self.__dict__.update(private)

    def __getstate__(self) -> dict[str, Any]:
        """What travels: all but the rows that were read for checking, and the Ray that was found
        here."""
        here = ("_tables", "_ray")
        return {key: value for key, value in vars(self).items() if key not in here}


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> AflowConfig:
    """Read a YAML file and `key=value` overrides into a configuration object.

    Args:
        path: the file; None for defaults only.
        overrides: OmegaConf dotlist items; they win over the file.

    Raises:
        BadInput: the file cannot be read, or keys or values are wrong; every fault is listed.
    """
    config, faults = read_config(path, overrides)
    if faults:
        raise BadInput(f"The configuration {path or 'given'} has {_count(faults)}.", faults)
    return config


def read_config(
    path: str | Path | None, overrides: Sequence[str] = ()
) -> tuple[AflowConfig, list[Fault]]:
    """`load_config` that returns its faults beside what could be read in spite of them.

    Raises:
        BadInput: the file is missing or is no YAML, so that nothing could be read.
    """
    positions = KeyPositions()
    if path:
        positions.file, positions.base = str(path), base_of(Path(path))
    content, faults = _read_yaml(Path(path), positions) if path else ({}, [])
    for item in overrides:
        faults += _override(content, item, positions)
    merged = OmegaConf.merge(OmegaConf.structured(AflowConfig), OmegaConf.create(content))
    for key, text in list(positions.raw.items()):
        fault = _interpolation_fault(merged, key, text, positions)
        if fault:
            faults.append(fault)
            _cut(content, key)
    faults += check_stages(content, positions)
    merge_stages(content)
    merged = OmegaConf.merge(OmegaConf.structured(AflowConfig), OmegaConf.create(content))
    try:
        config: AflowConfig = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = canonical(error.full_key or "")
        found = str(error).splitlines()[0]
        where = positions.where(key)
        raise BadInput(
            "The configuration does not fit together.",
            [*faults, Fault(where, "a value that fits the schema", found, "correct this value")],
        ) from error
    config.__dict__["_positions"] = positions
    try:
        config.sandbox = of_setting(config.sandbox)
    except BadInput as error:
        faults += [
            replace(fault, where=positions.where(canonical(fault.where))) for fault in error.faults
        ]
        config.sandbox = "auto"
    if PRESET in config.prompts:
        try:
            file = positions.beside(str(config.prompts[PRESET]))
            config.prompts = with_preset(config.prompts, file)
        except BadInput as error:
            where = positions.where(f"prompts.{PRESET}")
            faults += [replace(fault, where=f"{where}: {fault.where}") for fault in error.faults]
            del config.prompts[PRESET]
    return config, sorted(faults, key=_in_reading_order)


def _read_yaml(path: Path, positions: KeyPositions) -> tuple[dict[str, Any], list[Fault]]:
    text = _read_text(path)
    loader = None
    try:
        loader = _Loader(text)  # refuses control characters
        node = loader.get_single_node()
        if node is None:
            raise _unreadable(path, "settings in YAML", "an empty file", "write the settings")
        walk = SchemaWalk(
            AflowConfig,
            positions,
            lambda key, at: f"{path}:{at.start_mark.line + 1}: {display(key)}".removesuffix(": "),
        )
        if not isinstance(node, yaml.MappingNode):
            raise _unreadable(
                f"{path}:{node.start_mark.line + 1}",
                "`key: value` lines at the top level",
                f"a {node.id}",
                "begin with `workflow: path/file.py:function`, `model:`, `buffer:` ...",
            )
        walk.check(node, AflowConfig, "")
        return loader.construct_document(node), walk.faults
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = " ".join(part for part in (error.context, error.problem) if part)
        cure = "check quotes, brackets and indentation there; indent with spaces, never tabs"
        raise _unreadable(f"{path}{line}", "YAML", problem, cure) from error
    except yaml.YAMLError as error:
        cure = "save the file as plain UTF-8 text"
        raise _unreadable(path, "YAML", str(error).splitlines()[0], cure) from error
    except RecursionError:
        found = "hundreds of brackets or levels inside each other"
        raise _unreadable(path, "YAML for people", found, "nest it less") from None
    finally:
        if loader is not None:
            loader.dispose()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path()
        names = [item.name for item in folder.iterdir() if item.suffix in (".yaml", ".yml")]
        close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4)
        cure = "check the path" + (f"; there is {', '.join(close)}" if close else "")
        raise _unreadable(path, "a YAML file", "no such file", cure) from None
    except IsADirectoryError:
        raise _unreadable(path, "a YAML file", "a folder", "name the file in it") from None
    except UnicodeDecodeError as error:
        found = f"bytes that are not UTF-8 ({error.reason} at byte {error.start})"
        raise _unreadable(path, "text in UTF-8", found, "save the file as UTF-8") from None
    except OSError as error:
        found = error.strerror or str(error)
        raise _unreadable(path, "a readable file", found, "check its rights") from None


def _unreadable(where: object, expected: str, found: str, cure: str) -> BadInput:
    return BadInput("The configuration cannot be read.", [Fault(str(where), expected, found, cure)])


def _override(content: dict[str, Any], item: str, positions: KeyPositions) -> list[Fault]:
    """Check one `key=value` and put it into `content`."""
    name, equals, text = item.partition("=")
    name = name.strip()
    where = f"command line: {name}{equals}{masked(name, text)}"
    if not equals or not re.fullmatch(r"[\w.\-]+(\[\d+\][\w.\-\[\]]*)?", name) or name[0] in "-.":
        cure = "write key=value, such as buffer.total_steps=20; quote it for the shell"
        return [Fault(where, "key=value", repr(item), cure)]
    key = canonical(name)
    expected = _type_at(key)
    if isinstance(expected, Fault):
        return [Fault(where, expected.expected, expected.found, expected.cure)]
    kind, choices = expected
    loader = None
    try:
        loader = _Loader(text)  # refuses control characters
        node = loader.get_single_node() or yaml.ScalarNode("tag:yaml.org,2002:null", "")
        scratch = KeyPositions()
        walk = SchemaWalk(AflowConfig, scratch, lambda *_: where)
        good = walk.check(node, kind, key)
        if good and choices:
            good = walk.check_choice(node, choices, key)
        value = loader.construct_document(node) if good else None
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        return [Fault(where, f"a value in YAML for `{name}`", str(problem), "quote the value")]
    except RecursionError:
        found = "hundreds of brackets inside each other"
        return [Fault(where, f"a value in YAML for `{name}`", found, "nest it less")]
    finally:
        if loader is not None:
            loader.dispose()
    positions.overrides[key] = item
    positions.raw.update(scratch.raw)
    if walk.faults:
        return walk.faults
    problem = _put(content, key.split("."), value)
    if problem:
        return [Fault(where, "a list item that the file has", problem, "set the whole list")]
    return []


def _type_at(key: str) -> tuple[Any, tuple[str, ...]] | Fault:
    """Type and choices of a key path of the schema, or why there is none."""
    kind: Any = AflowConfig
    choices: tuple[str, ...] = ()
    done: list[str] = []
    for part in key.split("."):
        kind, _ = strip_optional(kind)
        if hasattr(kind, "__dataclass_fields__"):
            known = fields_of(kind)
            path = ".".join([*done, part])
            if part not in known:
                expected, cure = suggest(AflowConfig, ".".join(done), part, known)
                return Fault("", expected, f"`{display(path)}`, which is no setting", cure)
            kind, choices = known[part]
        else:
            origin = getattr(kind, "__origin__", kind)
            arguments = getattr(kind, "__args__", ())
            if origin not in (list, dict) and kind is not Any:
                found = f"`{part}` below it"
                return Fault("", f"`{'.'.join(done)}` is a single value", found, "remove the rest")
            if origin is list and not part.isdigit():
                found = f"`{part}` where the number of an item belongs"
                return Fault("", f"`{'.'.join(done)}` is a list", found, f"{'.'.join(done)}[0]...")
            kind, choices = (arguments[-1] if arguments else Any), ()
        done.append(part)
    return kind, choices


def _put(content: Any, parts: list[str], value: Any) -> str | None:
    """Set a nested item, making mappings on the way. Returns what stood in the way."""
    at = content
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        if isinstance(at, list):
            if not part.isdigit() or int(part) > len(at):
                return f"item {part} of a list of {len(at)}"
            if int(part) == len(at):
                at.append({})
            if last:
                at[int(part)] = value
            else:
                at = at[int(part)]
        elif last:
            at[part] = value
        else:
            if at.get(part) is None or isinstance(at[part], str):
                at[part] = [] if parts[position + 1].isdigit() else {}
            at = at[part]
    return None


def _cut(content: Any, key: str) -> None:
    *parents, last = key.split(".")
    at = content
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at.get(part, {})
    if isinstance(at, dict):
        at.pop(last, None)
    else:
        at[int(last)] = None


def _interpolation_fault(merged: Any, key: str, text: str, positions: KeyPositions) -> Fault | None:
    try:
        OmegaConf.select(merged, display(key), throw_on_missing=True)
    except OmegaConfBaseException as error:
        problem = str(error).splitlines()[0]
    else:
        return None
    missing = re.search(r"oc\.env:\s*([A-Za-z_]\w*)\s*\}", text)
    if "nvironment variable" in problem and missing:
        name = missing.group(1)
        cure = f"export {name}=... or give a default: ${{oc.env:{name},default}}"
        return Fault(positions.where(key), f"the environment variable {name}", "not set", cure)
    cure = "use ${oc.env:NAME,default} or the full path of another key: ${model.model_path}"
    return Fault(positions.where(key), f"a value that resolves: {text}", problem, cure)


def _in_reading_order(fault: Fault) -> tuple[bool, int]:
    line = re.search(r":(\d+)(:|$)", fault.where)
    return fault.where.startswith("command line"), int(line.group(1)) if line else 0


def _count(faults: Sequence[Fault]) -> str:
    return "one fault" if len(faults) == 1 else f"{len(faults)} faults"
