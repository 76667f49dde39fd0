"""Rules about the content of files that a configuration names: models, rows, templates, runs.

No model is loaded, nothing is fetched or tokenised: `engines/trinity/readers.py` finds rows that
are too long when it tokenises them.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity.common.config import ExperienceBufferConfig, FormatConfig, TasksetConfig
from trinity.common.constants import PromptType

from aflow_tune.config.names import BATCH_FILES, by_anchors
from aflow_tune.config.schema import nearest
from aflow_tune.config.settings import AflowConfig
from aflow_tune.config.tasksets import (
    FROM_DATA,
    catalogue_of,
    experience_buffer,
    fields_of_mix,
    is_file,
    locate,
    looks_local,
    read_taskset,
    total_steps,
    user_tasksets,
)
from aflow_tune.data.checks import Findings, check_fields, check_overlap, check_rows
from aflow_tune.data.coreset import count_of
from aflow_tune.data.dialogues import Unfit, as_dialogue, as_pair, learnable
from aflow_tune.data.fields import FieldRead, task_reads
from aflow_tune.data.leaks import shared_dialogues
from aflow_tune.data.rows import Table
from aflow_tune.engines.local.models import BUNDLED, cache_dir, damage_of, is_cached
from aflow_tune.errors import BadInput, Fault
from aflow_tune.sections import PROPOSERS, WriterSection
from aflow_tune.shipping import travelled
from aflow_tune.trace import POLICY
from aflow_tune.writer.types import PROBLEM_TYPES

if TYPE_CHECKING:
    from aflow_tune.writer.templates import Template

Function = Callable[..., Any]
Found = Iterable[Fault | str]


def check_paths(
    config: AflowConfig, key: str, taskset: TasksetConfig | ExperienceBufferConfig
) -> Iterator[Fault]:
    """The fault of a task set's path under which nothing can be read."""
    expected = "a .jsonl, .json, .csv or .parquet file, a folder of them, or a hub id"
    if not taskset.path:
        yield config.fault(f"{key}.path", expected, "none", "path: data/train.jsonl")
    elif (found := locate(config, taskset)).fault is not None:
        of_split = found.kind == "folder" and found.fix.startswith("split:")
        place = f"{key}.split" if of_split else f"{key}.path"
        yield config.fault(place, expected, found.fault, found.fix)


def check_data(
    config: AflowConfig,
    workflow: Function | None = None,
    judge: Function | None = None,
    *,
    harvest: bool = False,
) -> Findings:
    """Check the rows of every task set: readable, with the fields that the functions read, no leaks
    into held-out rows. A `harvest` drops unusable and leaking rows later: not reported here."""
    found = Findings()
    reads: list[FieldRead] = []
    for function in filter(None, (workflow, judge)):
        reads += [*task_reads(function), *getattr(function, "reads", ())]
    of_mix = fields_of_mix(config)
    row_faults = None if harvest else getattr(workflow, "row_faults", None)
    training: list[Table] = []
    held_out: list[Table] = []
    for _, taskset, is_held_out in user_tasksets(config):
        table = _checked_table(config, taskset, found)
        if table is None:
            continue
        rows = zip(table.rows, table.places, strict=True)
        needs = not is_held_out and "benchmark" in of_mix  # the mix adds it to rows without
        strange = (  # rows that a writer cannot pose or score
            replace(fault, where=f"{place}: {fault.where}")
            for row, place in rows
            if row_faults is not None and (not needs or row.get("benchmark"))
            for fault in row_faults(row)
        )
        faults = list(itertools.islice(strange, 3))
        found.faults += faults
        if not faults:
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
    _check_experience_rows(config, found, held_out)
    return found


def _checked_table(
    config: AflowConfig, taskset: TasksetConfig | ExperienceBufferConfig, found: Findings
) -> Table | None:
    """The rows of a task set; None if they are not on disk or one is faulty. Adds to `found`."""
    if not taskset.path:
        return None
    if warning := locate(config, taskset).warning:
        found.warnings.append(warning)
    table = read_taskset(config, taskset)
    if table is None:
        return None
    rows = check_rows(table)
    found.add(rows)
    return None if rows.faults else table


# The data set of `mode: train`: `sft` takes dialogues of any known form with a message of the
# assistant, or a `prompt` and a `response`; `dpo` a prompt with a `chosen` and a `rejected`
# response; `cpt` text.

KEY = "buffer.trainer_input.experience_buffer"


def check_experiences(config: AflowConfig) -> Iterator[Fault]:
    """Faults of the data set of `mode: train`: missing, or too small for one batch."""
    buffer = experience_buffer(config)
    if buffer is None or not buffer.path:
        fix = f"{KEY}: {{path: data/sft.jsonl, storage_type: file}}"
        yield config.fault(f"{KEY}.path", "the data set to learn from", "none", fix)
        return
    there = False
    if buffer.storage_type == BATCH_FILES:
        if next(config.positions.beside(buffer.path).glob("*.jsonl"), None) is None:
            expected = "a folder with the batches of a search, .jsonl files"
            yield config.wrong(f"{KEY}.path", expected, "check the path")
    elif not is_file(buffer) and config.engine == "local":
        key = f"{KEY}.storage_type"
        yield config.wrong(key, "file (engine: local)", "storage_type: file")
    elif not awaited(config):
        missing = list(check_paths(config, KEY, buffer))
        yield from missing
        there = not missing
    if config.algorithm.algorithm_type == "cpt" and buffer.format.prompt_type.value != "plaintext":
        fix = "prompt_type: plaintext, with prompt_key: text"
        yield config.wrong(f"{KEY}.format.prompt_type", "plaintext: cpt reads text", fix)
    size, key = config.buffer.train_batch_size, "buffer.train_batch_size"
    table = read_taskset(config, buffer) if there else None
    rows = table.total if table is not None and not table.faults else 0
    if rows and (part := config.coreset.size) is not None:
        if part > rows:
            yield config.wrong("coreset.size", f"at most {rows} rows, or a share", "size: 0.25")
        rows = min(rows, count_of(part, rows))
    if size < 1 or (rows and (size > rows or total_steps(config) == 0)):
        expected = "the rows of the data set that one step takes, not more than it has"
        fix = f"train_batch_size: {rows or 16}, or raise buffer.total_epochs"
        yield config.wrong(key, expected, fix)
    key = "trainer.save_interval"
    if config.positions.given(key) and config.trainer.save_interval == 0:
        # For these algorithms Trinity synchronises weights whenever it saves.
        yield config.wrong(key, "1 or more with `mode: train`", "save_interval: 10")


def awaited(config: AflowConfig) -> bool:
    """Whether an earlier stage has yet to write the data set."""
    buffer, path = experience_buffer(config), config.prepared.awaited
    return path is not None and buffer is not None and locate(config, buffer).kind == "missing"


def _check_experience_rows(config: AflowConfig, found: Findings, tables: Sequence[Table]) -> None:
    """Add faults of rows that are unreadable, or lack what the algorithm learns from; and warnings
    about dialogues that the held-out `tables` share with them."""
    buffer, kind = experience_buffer(config), config.algorithm.algorithm_type
    if buffer is None or awaited(config):
        return
    table = _checked_table(config, buffer, found)
    if table is None or kind not in FROM_DATA:
        return
    dialogues = config.dialogues
    try:
        tools = catalogue_of(config)
    except BadInput as error:
        found.faults += error.faults
        return
    read = functools.partial(as_dialogue, catalogue=tools, candidates=dialogues.candidates)
    problems = [
        Fault(place, *problem)
        for row, place in zip(table.rows, table.places, strict=True)
        if (problem := _row_problem(kind, buffer.format, row, read)) is not None
    ]
    found.faults += problems[:5]
    for held_out in () if problems else tables:
        if shared := shared_dialogues([table], held_out, tools):
            found.warnings += [f"{held_out.source}: {line}" for line in shared.lines()]


_TEXTS = {
    "sft": ("prompt_key", "system_prompt_key", "response_key"),
    "dpo": ("prompt_key", "system_prompt_key", "chosen_key", "rejected_key"),
    "cpt": ("prompt_key",),
}
"""Settings of `format` that name the texts learned from, by algorithm."""


def _row_problem(
    kind: str, form: FormatConfig, row: Mapping[str, Any], read: Callable[..., Any]
) -> tuple[str, str, str] | None:
    """Expected, found and fix for a row that cannot be learned from; None if it can, or if the run
    leaves it out and says so. `read`: `as_dialogue` with its catalogue."""
    if form.prompt_type is PromptType.MESSAGES and kind != "cpt":
        fix = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        fix = f'"messages": {fix}; see docs/agents.md for other forms'
        if near := nearest(str(form.messages_key), row, 0.5):
            fix = f"{KEY}.format.messages_key: {near}"
        if form.prompt_key in row and not isinstance(row[form.prompt_key], list):
            fix = f"{KEY}.format.prompt_type: plaintext"
        try:
            if kind == "dpo":
                as_pair(row, keys=(form.messages_key, form.chosen_key, form.rejected_key))
            elif not learnable(read(row, key=form.messages_key)):
                expected = "a message of the assistant: it is what is learned"
                return expected, "none", "add the answer, or remove the row"
        except Unfit:
            return None
        except ValueError as error:
            return "a pair of answers" if kind == "dpo" else "a dialogue", str(error), fix
        return None
    for setting in _TEXTS[kind]:
        if (key := getattr(form, setting)) is None:
            continue
        if key not in row:
            fix = f"{KEY}.format.{setting}: {nearest(str(key), row, 0.5) or 'COLUMN'}"
            return f"a field {key!r} (format.{setting})", ", ".join(map(repr, row)), fix
        if not isinstance(row[key], str) or not row[key].strip():
            short = f"{row[key]!r:.80}"
            return f"a text under {key!r}", short, "write the text, or remove the row"
    return None


_FROZEN = ("bench", "pairs", "serve", "explore")
"""Modes that train nothing."""
_TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tokenization_*.py")


def check_model(config: AflowConfig, *, whole: bool = True, policy: bool = True) -> Found:
    """Check the policy's model, the auxiliary ones, and a critic's. Without `whole`, only
    config.json: no weights will be loaded. Without `policy`, only auxiliary models that run written
    workflows."""
    model, auxiliary = config.model, config.explorer.auxiliary_models
    if model.tinker.enable or model.external_model.enable:
        return
    graphs = {config.writer.executor, *config.writer.models.values()}
    if not policy and not graphs & {item.name for item in auxiliary}:
        return
    own = model.custom_chat_template or model.chat_template_path
    template = bool(own or config.explorer.rollout_model.chat_template)
    named: list[tuple[str, Any, bool]] = [("model", model, template)] if policy else []
    for number, item in enumerate(auxiliary):
        named.append((f"explorer.auxiliary_models.{number}", item, bool(item.chat_template)))
    paths = [(f"{key}.model_path", item.model_path or "", chat) for key, item, chat in named]
    if policy and config.engine == "trinity" and model.critic_model_path:
        paths.append(("model.critic_model_path", model.critic_model_path, True))
    for place, name, has_template in paths:
        where, key = config.positions.where(place), place.rpartition(".")[0]
        folder, bundled = Path(name).expanduser(), name in BUNDLED
        if bundled and whole:
            yield from (Fault(where, *damage) for damage in _damaged(cache_dir() / name))
        if not bundled and (folder / "config.json").is_file():
            for problem in _folder_problems(folder, key, whole, has_template):
                yield Fault(where, *problem)
            quantised = (_read(folder / "config.json") or {}).get("quantization_config")
            if key == "model" and quantised and config.mode not in _FROZEN:
                kind = quantised.get("quant_method", "quantised")
                fix = "name the model in 16 bits; docs/recipes.md says what can be quantised"
                yield Fault(where, "weights in 16 or 32 bits, to train them", kind, fix)
            continue
        expected = f"a model folder, a hub id, or one of {', '.join(BUNDLED)}"
        close = None if bundled else nearest(name, BUNDLED, 0.85)
        if folder.exists() and not bundled and name.strip():
            fix = "name the folder that holds config.json and the weights"
            yield Fault(where, expected, "no config.json in it", fix)
        elif not bundled and (close or not name.strip() or looks_local(config, name)):
            found = f"{name}: no such folder" if name.strip() else "nothing"
            setting = place.rpartition(".")[2]
            yield Fault(where, expected, found, f"{setting}: {close or next(iter(BUNDLED))}")
        elif not is_cached(name):
            yield f"model {name}: not on this machine yet; it is fetched once at the start"
    path = model.chat_template_path
    if path and not Path(path).expanduser().is_file():
        yield config.wrong("model.chat_template_path", "a template file", "check the path")


def _folder_problems(
    folder: Path, key: str, whole: bool, has_template: bool
) -> Iterator[tuple[str, str, str]]:
    """What a model folder lacks to be loaded: expected, found, cure."""
    again = "save model and tokenizer again with save_pretrained, into one folder"
    settings, tokenizer = _read(folder / "config.json"), _read(folder / "tokenizer_config.json")
    if settings is None:
        yield "a readable config.json", "no JSON object", again
        return
    if not whole:
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = settings.get("model_type")
    unknown = kind not in CONFIG_MAPPING if kind else not settings
    if unknown and not settings.get("auto_map"):  # nor does it bring its own code
        expected = "a config.json whose model_type the installed transformers knows"
        yield expected, repr(kind) if kind else "no model_type", again
    weights = ("*.safetensors", "*.bin", "*.safetensors.index.json")
    if not any(next(folder.glob(pattern), None) for pattern in weights):
        yield "weights (*.safetensors)", "none in the folder", again
    elif absent := missing_shards(folder):
        yield "every file of weights that its index names", f"no {absent[0]}", "fetch it again"
    yield from _damaged(folder)
    names = ("tokenizer.json", "tokenizer_config.json")
    torn = [name for name in names if (folder / name).is_file() and _read(folder / name) is None]
    templates = ("chat_template.jinja", "chat_template.json")
    classless = tokenizer is not None and "tokenizer_class" not in tokenizer
    if not classless and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZERS):
        yield "a tokenizer", "none in the folder", again
    elif torn:
        yield "a tokenizer that can be read", f"{torn[0]}: no JSON object", again
    elif not (
        has_template
        or (tokenizer or {}).get("chat_template")
        or any((folder / name).is_file() for name in templates)
    ):
        setting = "chat_template_path" if key == "model" else "chat_template"
        fix = f"use the model's Instruct version, or set {key}.{setting}"
        yield "a chat template", "none in the folder", fix


def missing_shards(folder: Path) -> list[str]:
    """The weight files that the index in `folder` names but that are missing."""
    index = (_read(folder / "model.safetensors.index.json") or {}).get("weight_map")
    names = set(index.values()) if isinstance(index, dict) else set()
    if (folder / "model.safetensors").is_file():  # one file: the index is not read
        return []
    return sorted(str(name) for name in names if not (folder / str(name)).is_file())


def _damaged(folder: Path) -> Iterator[tuple[str, str, str]]:
    for damage in filter(None, map(damage_of, sorted(folder.glob("*.safetensors")))):
        yield "whole files of weights", damage, f"remove {folder}, fetch it again"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def check_writer(config: AflowConfig, workflow: Function | None = None) -> Found:
    """Check `writer`: keys that nothing reads, algorithm against turns, contradicting limits."""
    section, where = config.writer, config.positions.where
    if not section.executor:
        if section != WriterSection():
            expected = "a role that runs the workflows: without it the section is not read"
            yield config.fault("writer.executor", expected, "nothing", "executor: ROLE")
        return
    kind, turns = config.algorithm.algorithm_type, section.turns
    anchored = by_anchors(config.algorithm)
    stepwise = anchored or kind in ("multi_step_grpo", "gigpo")
    stepwise |= kind == "ppo" and config.engine == "local"
    if turns > 1 and config.mode == "both" and not stepwise:
        better = "use multi_step_grpo or gigpo"
        yield f"{where('writer.turns')}: {kind} takes each turn for a run of its own; {better}"
    if turns == 1 and config.mode == "both" and anchored:
        key = where("algorithm.algorithm_type")
        yield f"{key}: with one turn all calls are made in one state, and gigpo adds nothing"
    room = config.model.max_prompt_tokens or config.model.max_model_len
    messages = getattr(workflow, "messages", None)
    if messages is not None and room is not None:
        asked = messages("", section.problem_type or PROBLEM_TYPES[0])
        tokens = len(asked[0]["content"]) // 4  # about four characters per token
        if tokens > room:
            key = where("model.max_prompt_tokens")
            yield f"{key}: the policy's prompt has about {tokens} tokens, the model takes {room}"
    needed, limit = turns * section.timeout, config.rollout.run_timeout
    if needed > limit:
        key = where("rollout.run_timeout")
        yield f"{key}: {limit:g} s, but writer.turns x writer.timeout is {needed:g} s"


def check_harvest(config: AflowConfig) -> Iterator[Fault]:
    """Faults of the section `harvest`, and of the other settings that a harvest needs."""
    from aflow_tune.harvest.candidates import SOURCES

    section, inputs = config.harvest, config.buffer.explorer_input
    known = [name for name in config.models if name != POLICY]
    key = "buffer.explorer_input.taskset"
    for place, there, expected, fix in (
        ("writer.executor", config.writer.executor, "the model that runs the graphs", "NAME"),
        ("harvest.sources", section.sources, f"some of {', '.join(SOURCES)}", "[templates]"),
        (key, inputs.taskset or inputs.tasksets, "a task set to take problems from", "{path: ..}"),
    ):
        if not there:
            yield config.fault(place, expected, "none", f"{place.rpartition('.')[2]}: {fix}")
    for number, source in enumerate(section.sources):
        if source not in SOURCES:
            fix = f"did you mean {nearest(source, SOURCES, 0.5) or SOURCES[0]}?"
            yield config.wrong(f"harvest.sources.{number}", f"one of {', '.join(SOURCES)}", fix)
    if "templates" in section.sources:
        try:
            templates_of(config)
        except BadInput as error:
            yield from error.faults
    if "teacher" in section.sources and section.teacher not in known:
        expected = f"a role of `models:` ({', '.join(known) or 'none is there'})"
        yield config.wrong("harvest.teacher", expected, "teacher: ROLE, and models: {ROLE: ...}")
    if "runs" in section.sources:
        if not section.runs:
            fix = "runs: [checkpoints/PROJECT/NAME]"
            yield config.fault("harvest.runs", "run folders of the writer", "none", fix)
        for number, folder in enumerate(run_folders(config)):
            if not any(folder.glob("rollouts/step_*.jsonl")):
                key = f"harvest.runs.{number}"
                yield config.wrong(key, "a run folder with rollouts", "name that of a training run")
    for name in ("teacher_tries", "per_problem", "limit"):
        if (count := getattr(section, name)) is not None and count < 1:
            yield config.wrong(f"harvest.{name}", "1 or more", f"{name}: 1")
    for name in ("min_score", "per_structure"):
        if (share := getattr(section, name)) is not None and not 0 < share <= 1:
            yield config.wrong(f"harvest.{name}", "above 0, at most 1", f"{name}: 1")


def check_search(config: AflowConfig) -> Iterator[Fault]:
    """Faults of the section `search`, and of the other settings that a search needs."""
    section, inputs = config.search, config.buffer.explorer_input
    frozen = [name for name in config.models if name != POLICY]
    frozen += [str(model.name) for model in config.explorer.auxiliary_models]
    training = [taskset for _, taskset, held_out in user_tasksets(config) if not held_out]
    if not training:
        fix = "taskset: {path: data/train.jsonl}"
        key = "buffer.explorer_input.taskset"
        yield config.fault(key, "a task set to take problems from", "none", fix)
    if not inputs.eval_tasksets:
        key, fix = "buffer.explorer_input.eval_tasksets", "eval_tasksets: [{path: held_out.jsonl}]"
        yield config.fault(key, "held-out problems to compare the winner on", "none", fix)
    if section.executor is not None and section.executor not in frozen:
        expected = f"a frozen model: a role of `models:` or an auxiliary model ({frozen})"
        yield config.wrong("search.executor", expected, "executor: ROLE, or leave it out")
    for number, name in enumerate(section.propose):
        if name not in PROPOSERS:
            fix = f"did you mean {nearest(name, PROPOSERS, 0.5) or PROPOSERS[0]}?"
            yield config.wrong(f"search.propose.{number}", f"one of {', '.join(PROPOSERS)}", fix)
    if not section.propose:
        yield config.wrong("search.propose", f"some of {', '.join(PROPOSERS)}", "propose: [edits]")
    if "teacher" in section.propose and section.teacher not in config.models:
        expected = f"a role of `models:` ({', '.join(config.models) or 'none is there'})"
        yield config.wrong("search.teacher", expected, "teacher: ROLE, and models: {ROLE: ...}")
    for name in ("rounds", "rollouts", "tokens", "patience", "problems", "children"):
        if (count := getattr(section, name)) is not None and count < 1:
            yield config.wrong(f"search.{name}", "1 or more", f"{name}: 12")
    for name in ("final_problems", "train_every"):
        if getattr(section, name) < 0:
            yield config.wrong(f"search.{name}", "0 or more", f"{name}: 2")
    if section.usd is not None and not 0 < section.usd < math.inf:
        yield config.wrong("search.usd", "US dollars above 0", "usd: 2")
    if config.judge:
        fix = "graph: {benchmark: NAME} or graph: {score: path/file.py:function}"
        yield config.fault("judge", "a benchmark or a score function", config.judge, fix)
    # A race needs the seed's scores first, and three proposals after it are the least.
    trees = max(1, len(section.tasksets))
    least = (section.problems + 3 * min(6, section.problems)) * trees
    if section.rollouts is not None and 1 <= section.rollouts < least:
        left = section.rollouts // trees - section.problems
        each = " of each task set" if trees > 1 else ""
        buys = f"the seed{each} on {section.problems} problems and {max(0, left) // 6} proposals"
        buys = f"less than the seed's own problems{each}" if left < 0 else buys
        expected = f"{least} or more: the seed on {section.problems} problems and three proposals"
        expected += each
        found = f"{section.rollouts}, which buys {buys}"
        fix = f"rollouts: {max(600, least)}, or fewer search.problems"
        yield config.fault("search.rollouts", expected, found, fix)
    names = {str(taskset.name) for taskset in training}
    held_out = {str(taskset.name) for taskset in inputs.eval_tasksets}
    for name, one in section.tasksets.items():
        if name not in names:
            key, expected = f"search.tasksets.{name}", f"a training task set: {sorted(names)}"
            yield config.fault(key, expected, repr(name), "name it so, or correct the name")
        if one.held_out is not None and one.held_out not in held_out:
            key = f"search.tasksets.{name}.held_out"
            yield config.wrong(key, f"a held-out task set: {sorted(held_out)}", "correct the name")


def run_folders(config: AflowConfig) -> list[Path]:
    """The folders of `harvest.runs`, relative to the current folder or else `positions.base`."""
    return [config.positions.beside(name) for name in config.harvest.runs]


def templates_of(config: AflowConfig) -> list[Template]:
    """The templates of the folder `harvest.templates`, or the shipped ones.

    Raises BadInput: with every file of the folder that is no template."""
    from aflow_tune.harvest.candidates import read_templates
    from aflow_tune.writer.templates import TEMPLATES

    name = config.harvest.templates
    if name is None:
        return list(TEMPLATES.values())
    where = config.positions.where("harvest.templates")
    return read_templates(config.positions.beside(travelled(name)), where)
