"""Rules about what the files hold that a configuration names: models, rows, templates, runs.

Small files of models are read, and rows as far as `data/rows.py` reads them for checking; nothing
is loaded, fetched or tokenised. Rows of a data set that are too long are found where they are
tokenised (`engines/trinity/readers.py`), those of a harvest when it begins.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trinity.common.config import ExperienceBufferConfig, FormatConfig, TasksetConfig
from trinity.common.constants import PromptType

from aflow_tune.config.mixes import fields_of_mix
from aflow_tune.config.schema import nearest
from aflow_tune.config.settings import AflowConfig
from aflow_tune.config.tasksets import (
    FROM_DATA,
    experience_buffer,
    is_file,
    locate,
    looks_local,
    read_taskset,
    total_steps,
    user_tasksets,
)
from aflow_tune.data.checks import Findings, check_fields, check_overlap, check_rows
from aflow_tune.data.fields import FieldRead, task_reads
from aflow_tune.data.rows import Table
from aflow_tune.engines.local.models import BUNDLED, cache_dir, damage_of, is_cached
from aflow_tune.errors import BadInput, Fault
from aflow_tune.harvest.candidates import SOURCES, read_templates
from aflow_tune.sections import WriterSection
from aflow_tune.shipping import travelled
from aflow_tune.trace import POLICY
from aflow_tune.writer.templates import TEMPLATES, Template
from aflow_tune.writer.types import PROBLEM_TYPES

Function = Callable[..., Any]
Found = Iterable[Fault | str]

# --- Rows of task sets ----------------------------------------------------------------------------

_SHOWN = 3
"""Rows that a writer cannot ask about, of which places are told."""


def check_paths(
    config: AflowConfig, key: str, taskset: TasksetConfig | ExperienceBufferConfig
) -> Iterator[Fault]:
    """Whether anything can be read under the path of a task set."""
    if not taskset.path:
        fix = "path: data/train.jsonl (a file, a folder of data files, or a hub id)"
        yield config.fault(f"{key}.path", "a path", "none", fix)
        return
    found = locate(config, taskset)
    if found.fault is not None:
        of_split = found.kind == "folder" and found.fix.startswith("split:")
        expected = "a .jsonl, .json, .csv or .parquet file, a folder of them, or a hub id"
        expected = f"files of the split {taskset.split!r}" if of_split else expected
        place = f"{key}.split" if of_split else f"{key}.path"
        yield config.fault(place, expected, found.fault, found.fix)


def check_data(
    config: AflowConfig,
    workflow: Function | None = None,
    judge: Function | None = None,
    *,
    harvest: bool = False,
) -> Findings:
    """Check the rows of every task set: readable, with the fields read, no leaks.

    Paths under which nothing can be read are left to `check_paths`.

    Args:
        harvest: whether rows that cannot be asked about, or are held out too, are left out later.
    """
    found = Findings()
    reads: list[FieldRead] = []
    for function in filter(None, (workflow, judge)):
        reads += [*task_reads(function), *getattr(function, "reads", ())]
    of_mix = fields_of_mix(config)
    training: list[Table] = []
    held_out: list[Table] = []
    for _, taskset, is_held_out in user_tasksets(config):
        table = _table(config, taskset, found) if taskset.path else None
        if table is None:
            continue
        rows = check_rows(table)
        if not harvest:
            rows.faults += _writer_rows(workflow, table, () if is_held_out else of_mix)
        found.add(rows)
        if not rows.faults:
            (held_out if is_held_out else training).append(table)
    ungiven = [read for read in reads if read.name not in of_mix]
    together = [training] if config.mix and training else [[table] for table in training]
    checks = [(ungiven, tables) for tables in together]
    checks += [] if harvest else [(reads, [table]) for table in held_out]
    for asked, tables in checks:
        fields = check_fields(asked, *tables)
        reported = {fault.where for fault in found.faults}
        found.faults += [fault for fault in fields.faults if fault.where not in reported]
        found.warnings += [text for text in fields.warnings if text not in found.warnings]
    if not harvest:
        found.add(check_overlap(training, held_out))
    _check_experience_rows(config, found)
    return found


def _table(
    config: AflowConfig, taskset: TasksetConfig | ExperienceBufferConfig, found: Findings
) -> Table | None:
    warning = locate(config, taskset).warning
    found.warnings += [warning] if warning else []
    return read_taskset(config, taskset)


def _writer_rows(
    workflow: Function | None, table: Table, given: Collection[str]
) -> Iterator[Fault]:
    """Rows that a writer cannot ask about or score: the first few, with their places.

    Args:
        given: fields that every row gets later, from a mix.
    """
    row_faults = getattr(workflow, "row_faults", None)
    shown = 0
    for row, place in zip(table.rows, table.places, strict=True):
        if row_faults is None or shown >= _SHOWN:
            return
        if "benchmark" not in given or row.get("benchmark"):
            for fault in row_faults(row):
                yield replace(fault, where=f"{place}: {fault.where}")
                shown += 1


# --- The data set of `mode: train` ----------------------------------------------------------------
# The keys are Trinity's (`buffer.trainer_input.experience_buffer` and its `format`), and so is the
# meaning: `sft` takes `messages` that end with the assistant's turn, or a `prompt` and a
# `response`; `dpo` a prompt with a `chosen` and a `rejected` answer; `cpt` plain text.

KEY = "buffer.trainer_input.experience_buffer"
_MOST_FAULTS = 5


def check_experiences(config: AflowConfig) -> Iterator[Fault]:
    """Faults of the settings: no data set, one that is not there, batches that it cannot fill."""
    buffer = experience_buffer(config)
    if buffer is None or not buffer.path:
        fix = f"{KEY}: {{path: data/sft.jsonl, storage_type: file}}"
        yield config.fault(f"{KEY}.path", "the data set to learn from", "none", fix)
        return
    faults: list[Fault] = []
    if not is_file(buffer) and config.engine == "local":
        found, fix = repr(buffer.storage_type), "storage_type: file"
        faults.append(config.fault(f"{KEY}.storage_type", "file (engine: local)", found, fix))
    elif not awaited(config):
        faults += check_paths(config, KEY, buffer)
    prompt_type, key = buffer.format.prompt_type.value, f"{KEY}.format.prompt_type"
    if config.algorithm.algorithm_type == "cpt" and prompt_type != "plaintext":
        fix = "prompt_type: plaintext, with prompt_key: text"
        faults.append(config.fault(key, "plaintext: cpt reads text", repr(prompt_type), fix))
    size, key = config.buffer.train_batch_size, "buffer.train_batch_size"
    if size < 1:
        expected = "the rows of the data set that one step takes (`mode: train`)"
        faults.append(config.fault(key, expected, str(size), "train_batch_size: 16"))
    elif not faults and not awaited(config):
        table = read_taskset(config, buffer)
        rows = table.total if table is not None and not table.faults else 0
        if rows and (size > rows or total_steps(config) == 0):
            expected = f"at most the {rows} rows of the data set, and at least one step"
            fix = f"train_batch_size: {rows}, or raise buffer.total_epochs"
            faults.append(config.fault(key, expected, str(size), fix))
    yield from faults
    key = "trainer.save_interval"
    if config.positions.given(key) and config.trainer.save_interval == 0:
        # Trinity synchronises these algorithms as often as it saves.
        yield config.fault(key, "1 or more with `mode: train`", "0", "save_interval: 10")


def awaited(config: AflowConfig) -> bool:
    """Whether an earlier stage is still to write the data set."""
    buffer, path = experience_buffer(config), config.prepared.awaited
    return path is not None and buffer is not None and locate(config, buffer).kind == "missing"


def _check_experience_rows(config: AflowConfig, found: Findings) -> None:
    """Rows that are unreadable, or lack what the algorithm learns from: with file and line."""
    buffer, kind = experience_buffer(config), config.algorithm.algorithm_type
    if buffer is None or not buffer.path or awaited(config):
        return
    table = _table(config, buffer, found)
    if table is None:
        return
    rows = check_rows(table)
    found.add(rows)
    if rows.faults or kind not in FROM_DATA:
        return
    problems = [
        Fault(place, *problem)
        for row, place in zip(table.rows, table.places, strict=True)
        if (problem := _row_problem(kind, buffer.format, row)) is not None
    ]
    found.faults += problems[:_MOST_FAULTS]
    if len(problems) > _MOST_FAULTS:
        text = f"{table.source}: {len(problems)} of {len(table.rows)} rows are faulty"
        found.warnings.append(text)


_LEARNED = {
    ("sft", True): ("messages_key",),
    ("sft", False): ("prompt_key", "system_prompt_key", "response_key"),
    ("dpo", True): ("messages_key", "chosen_key", "rejected_key"),
    ("dpo", False): ("prompt_key", "system_prompt_key", "chosen_key", "rejected_key"),
    ("cpt", False): ("prompt_key",),
}
"""Settings of `format` that name the fields learned from, by algorithm and whether the fields are
lists of messages."""


def _row_problem(
    kind: str, form: FormatConfig, row: Mapping[str, Any]
) -> tuple[str, str, str] | None:
    """What is expected of a row that cannot be learned from, what was found, and what to do."""
    chat = form.prompt_type is PromptType.MESSAGES and kind != "cpt"
    for setting in _LEARNED[kind, chat]:
        key = getattr(form, setting)
        if key is None and not chat:
            continue
        if key not in row:
            close = nearest(key, row, 0.5) or (next(iter(row)) if len(row) == 1 else "COLUMN")
            fix = f"{KEY}.format.{setting}: {close}"
            return f"a field {key!r} (format.{setting})", ", ".join(map(repr, row)), fix
        value = row[key]
        if not chat:
            if not isinstance(value, str) or not value.strip():
                return f"a text under {key!r}", _short(value), "write the text, or remove the row"
            continue
        messages = value
        if isinstance(value, str):
            with contextlib.suppress(json.JSONDecodeError):
                messages = json.loads(value)
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            expected = f"a list of messages under {key!r}, each with `role` and `content`"
            fix = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
            return expected, _short(value), fix
        last = messages[-1]["role"]
        if last != "assistant" and (kind == "sft" or setting != "messages_key"):
            expected = f"the assistant's message at the end of {key!r}: it is what is learned"
            return expected, f"{last!r} at the end", "add the answer, or remove the row"
    return None


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (isinstance(message.get("content"), (str, list)) or bool(message.get("tool_calls")))
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- Models: there, whole, with a chat template ---------------------------------------------------

_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tokenization_*.py")
"""Any of these holds a vocabulary, or makes one."""


@dataclass(frozen=True)
class _Named:
    """A model that the configuration names."""

    key: str
    """Of the settings that hold its `model_path`."""
    path: str
    length: int | None
    trained: bool
    has_template: bool
    """The configuration gives a chat template of its own."""


def check_model(config: AflowConfig, *, whole: bool = True, policy: bool = True) -> Found:
    """The policy's model and the auxiliary ones.

    Args:
        whole: ask for weights, tokenizer and chat template too. False where only the sizes in
            config.json are read.
        policy: False where only auxiliary models that run written workflows will be loaded.
    """
    model, auxiliary = config.model, config.explorer.auxiliary_models
    if model.tinker.enable or model.external_model.enable:
        return
    graphs = {config.writer.executor, *config.writer.models.values()}
    if not policy and not graphs & {item.name for item in auxiliary}:
        return
    trained = config.mode not in ("bench", "serve", "explore")
    given = model.custom_chat_template or model.chat_template_path
    given = bool(given or config.explorer.rollout_model.chat_template)
    named = [_Named("model", model.model_path, model.max_model_len, trained, given)]
    for number, item in enumerate(auxiliary):
        key, given = f"explorer.auxiliary_models.{number}", bool(item.chat_template)
        named.append(_Named(key, item.model_path or "", item.max_model_len, False, given))
    for item in named if policy else named[1:]:
        where = config.positions.where(f"{item.key}.model_path")
        folder = Path(item.path).expanduser()
        yield from _check_name(config, where, item.path, folder)
        if whole and item.path in BUNDLED:
            kept = cache_dir() / item.path
            yield from _damaged(kept, where, f"rm -r {kept}: it is then fetched again")
        elif item.path and (folder / "config.json").is_file():
            yield from _check_folder(config, item, folder, whole)
    template = model.chat_template_path
    if template and not Path(template).expanduser().is_file():
        key = "model.chat_template_path"
        yield config.fault(key, "a template file", "no such file", "check the path")


def _check_name(config: AflowConfig, where: str, name: str, folder: Path) -> Found:
    expected = f"a model folder, a hub id, or one of {', '.join(BUNDLED)}"
    bundled = name in BUNDLED
    if not name.strip():
        yield Fault(where, expected, "nothing", f"model_path: {next(iter(BUNDLED))}")
    elif folder.exists() and not bundled:
        if not (folder / "config.json").is_file():
            fix = "name the folder that holds config.json and the weights"
            yield Fault(where, expected, "no config.json in it", fix)
    elif not bundled and (close := nearest(name, BUNDLED, 0.85)):
        yield Fault(where, expected, repr(name), f"model_path: {close}")
    elif not bundled and looks_local(config, name):
        yield Fault(where, expected, f"{name}: no such folder", "check the path")
    elif not is_cached(name):
        into = f" (into {cache_dir()})" if bundled else " from the hub"
        yield f"model {name}: not on this machine yet; it is fetched once at the start{into}"


def _check_folder(config: AflowConfig, named: _Named, folder: Path, whole: bool) -> Found:
    where = config.positions.where(f"{named.key}.model_path")
    settings = _read(folder / "config.json")
    if settings is None:
        fix = "save the model again with save_pretrained"
        yield Fault(where, "a readable config.json", "no JSON object", fix)
        return
    if settings.get("quantization_config") and named.trained:
        kind = settings["quantization_config"].get("quant_method", "quantised")
        fix = "name the model in 16 bits; docs/recipes.md says what can be quantised while loading"
        expected = "weights in 16 or 32 bits: the trainer cannot hold quantised ones"
        yield Fault(where, expected, f"{folder}: {kind}", fix)
    if whole:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        kind = settings.get("model_type")
        wrong = kind not in CONFIG_MAPPING if kind else not settings
        if wrong and not settings.get("auto_map"):  # no code of its own either
            expected = "a config.json whose model_type the installed transformers knows"
            fix = "save the model again with save_pretrained, or check model_type"
            yield Fault(where, expected, repr(kind) if kind else "no model_type", fix)
        yield from _check_files(folder, where, named)
    longest, asked = settings.get("max_position_embeddings"), named.length
    if isinstance(longest, int) and asked and asked > longest and not settings.get("rope_scaling"):
        place = config.positions.where(f"{named.key}.max_model_len")
        yield f"{place}: {asked} tokens, but the model was made for {longest}"


def missing_shards(folder: Path) -> list[str]:
    """The files of weights that the index in `folder` names and that are not there."""
    index = (_read(folder / "model.safetensors.index.json") or {}).get("weight_map")
    names = set(index.values()) if isinstance(index, dict) else set()
    if (folder / "model.safetensors").is_file():  # all in one: nobody reads the index
        return []
    return sorted(str(name) for name in names if not (folder / str(name)).is_file())


def _damaged(folder: Path, where: str, fix: str) -> Found:
    for damage in filter(None, map(damage_of, sorted(folder.glob("*.safetensors")))):
        yield Fault(where, "whole files of weights", damage, fix)


def _check_files(folder: Path, where: str, named: _Named) -> Found:
    """What a folder with a config.json lacks for being loaded."""
    weights = ("*.safetensors", "*.bin", "*.safetensors.index.json")
    if not any(next(folder.glob(pattern), None) for pattern in weights):
        fix = "save model and tokenizer into one folder"
        yield Fault(where, "weights (*.safetensors)", "none in the folder", fix)
    elif absent := missing_shards(folder):
        found = f"{len(absent)} of them are not in the folder, {absent[0]} among them"
        fix = "fetch the model again: a download was cut off"
        yield Fault(where, "every file of weights that its index names", found, fix)
    yield from _damaged(folder, where, "fetch or save the model again: it was cut off")
    tokenizer = _read(folder / "tokenizer_config.json")
    fix = "save the tokenizer beside the model with save_pretrained"
    names = ("tokenizer.json", "tokenizer_config.json")
    torn = [name for name in names if (folder / name).is_file() and _read(folder / name) is None]
    named_only = tokenizer is None or "tokenizer_class" in tokenizer
    if named_only and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):
        yield Fault(where, "a tokenizer", "none in the folder", fix)
    elif torn:
        yield Fault(where, "a tokenizer that can be read", f"{torn[0]}: no JSON object", fix)
    elif not (
        named.has_template
        or (tokenizer or {}).get("chat_template")
        or (folder / "chat_template.jinja").is_file()
        or (folder / "chat_template.json").is_file()
    ):
        setting = "chat_template_path" if named.key == "model" else "chat_template"
        fix = f"use the model's Instruct version, or set {named.key}.{setting}"
        yield Fault(where, "a chat template", "none in the folder", fix)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


# --- The writer, and the harvest of its graphs ----------------------------------------------------
# The sections themselves are checked in `writer/workflow.py`, which knows no whole configuration.

_OVER_TURNS = ("multi_step_grpo", "gigpo")
"""Algorithms whose advantage compares rollouts of several calls."""
_CHARS_A_TOKEN = 4
"""Of English and code, about; only for a warning."""


def check_writer(config: AflowConfig, workflow: Function | None = None) -> Found:
    """Keys that nothing reads, an algorithm that does not fit the turns, limits that contradict."""
    section, where = config.writer, config.positions.where
    if not section.executor:
        if section != WriterSection():
            expected = "a role that runs the workflows: without it the section is not read"
            fix = "writer: {executor: executor}, or remove the section"
            yield config.fault("writer.executor", expected, "nothing", fix)
        return
    kind = config.algorithm.algorithm_type
    if section.turns > 1 and config.mode == "both" and kind not in _OVER_TURNS:
        yield (
            f"{where('writer.turns')}: {kind} takes each turn for a run of its own; "
            f"use {' or '.join(_OVER_TURNS)}"
        )
    if section.turns == 1 and config.mode == "both" and kind == "gigpo":
        yield (
            f"{where('algorithm.algorithm_type')}: with one turn all calls of a task are made in "
            "one state, and gigpo adds nothing: set writer.turns, or use multi_step_grpo"
        )
    room = config.model.max_prompt_tokens or config.model.max_model_len
    messages = getattr(workflow, "messages", None)
    if messages is not None and room is not None:
        asked = messages("", section.problem_type or PROBLEM_TYPES[0])
        tokens = len(asked[0]["content"]) // _CHARS_A_TOKEN
        if tokens > room:
            yield (
                f"{where('model.max_prompt_tokens')}: the policy's prompt alone has "
                f"about {tokens} tokens, the model takes {room}: allow fewer operators "
                "(writer.operators), shorten writer.prompt, or raise it"
            )
    needed, limit = section.turns * section.timeout, config.rollout.run_timeout
    if needed > limit:
        yield (
            f"{where('rollout.run_timeout')}: a run is given up after {limit:g} s, but "
            f"writer.turns x writer.timeout is {needed:g} s: raise it, or lower writer.timeout"
        )


def check_harvest(config: AflowConfig) -> Found:
    """Every fault of the section `harvest`, and of what else a harvest needs."""
    section, inputs = config.harvest, config.buffer.explorer_input
    if not config.writer.executor:
        fix = "writer: {executor: NAME}, a role of `models` or a name of auxiliary_models"
        yield config.fault("writer.executor", "the model that runs the graphs", "none", fix)
    if not section.sources:
        expected = f"at least one of {', '.join(SOURCES)}"
        yield config.fault("harvest.sources", expected, "none", "sources: [templates]")
    for number, source in enumerate(section.sources):
        if source not in SOURCES:
            fix = f"did you mean {nearest(source, SOURCES, 0.5) or SOURCES[0]}?"
            expected = f"one of {', '.join(SOURCES)}"
            yield config.fault(f"harvest.sources.{number}", expected, repr(source), fix)
    if "templates" in section.sources:
        try:
            templates_of(config)
        except BadInput as error:
            yield from error.faults
    if "teacher" in section.sources:
        known = [name for name in config.models if name != POLICY]
        if section.teacher not in known:
            expected = f"a role of `models:` ({', '.join(known) or 'none is there'})"
            close = nearest(section.teacher or "", known, 0.5) or (known or ["NAME"])[0]
            fix = f"teacher: {close}, with models: {{{close}: {{model: ...}}}}"
            yield config.fault("harvest.teacher", expected, repr(section.teacher), fix)
    if "runs" in section.sources:
        if not section.runs:
            fix = "runs: [checkpoints/PROJECT/NAME]"
            yield config.fault("harvest.runs", "run folders of the writer", "none", fix)
        for number, folder in enumerate(run_folders(config)):
            if not any(folder.glob("rollouts/step_*.jsonl")):
                expected, found = "a run folder with rollouts", f"{section.runs[number]}: none"
                fix = "name the folder of a training run, which has a folder `rollouts`"
                yield config.fault(f"harvest.runs.{number}", expected, found, fix)
    for name, least, most in (
        ("teacher_tries", 1, math.inf),
        ("per_problem", 1, math.inf),
        ("limit", 1, math.inf),
        ("min_score", 0, 1),
        ("per_structure", 0, 1),
    ):
        value = getattr(section, name)
        if value is not None and not (least <= value <= most and value > 0):
            expected = "1 or more" if least else "above 0, at most 1"
            yield config.fault(f"harvest.{name}", expected, str(value), f"{name}: 1")
    if not inputs.taskset and not inputs.tasksets:
        fix = "add below buffer.explorer_input: taskset: {name: train, path: data/train.jsonl}"
        expected, key = "a training task set to take problems from", "buffer.explorer_input.taskset"
        yield config.fault(key, expected, "none", fix)


def run_folders(config: AflowConfig) -> list[Path]:
    """The folders of `harvest.runs`: relative to here, or else to `positions.base`."""
    return [config.positions.beside(name) for name in config.harvest.runs]


def templates_of(config: AflowConfig) -> list[Template]:
    """The templates that are tried: those of the user's folder, or the shipped ones.

    Raises:
        BadInput: with every file of the folder that is no template.
    """
    name = config.harvest.templates
    if name is None:
        return list(TEMPLATES.values())
    where = config.positions.where("harvest.templates")
    return read_templates(config.positions.beside(travelled(name)), where)
