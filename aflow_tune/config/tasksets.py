"""Task sets: locates their rows for checks, and lays them out for Trinity's reader; mixes.

Trinity reads a task set of `storage_type: file` with `datasets.load_dataset(path, subset_name,
split)`: a hub id or a folder, never a plain file. We also accept a file: at launch it is linked
into a folder of the run. Files with rows of several sources, or with `messages`, are read by our
`RowsReader`. Checks fetch nothing: they read a hub data set from the local cache or not at all.

A mix (`mix:`) gives each source its share of every training batch. A source is the training task
set of that name, or the rows with `source: NAME`. When the run starts, the task sets are merged
into one, read by `readers.MixReader`; `aflow_tune.data.mix` decides which items a batch holds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from trinity.common.config import DataSelectorConfig, ExperienceBufferConfig, TasksetConfig

from aflow_tune.config.schema import nearest
from aflow_tune.config.settings import AflowConfig
from aflow_tune.data.catalogue import Tool, read_catalogue
from aflow_tune.data.checks import sources
from aflow_tune.data.coreset import count_of
from aflow_tune.data.dialogues import dialogues_of, of_split, with_answers
from aflow_tune.data.mix import DEFAULT_SHARES, KINDS, default_shares, exact_shares, kind_of
from aflow_tune.data.rows import Table, file_format, read_table
from aflow_tune.engines.local.models import BUNDLED
from aflow_tune.errors import Fault
from aflow_tune.files import write_json, write_whole
from aflow_tune.find_ray import find_ray, uses_ray
from aflow_tune.scoring.turns import as_tasks
from aflow_tune.shipping import path_here

FROM_DATA = ("sft", "dpo", "cpt")
"""Algorithms that learn from a data set alone, with `mode: train`."""
WITHOUT_TASKS = ("train", "bench", "serve")
"""Modes that read no training task set."""

ROWS_READER = "aflow_tune.engines.trinity.readers.RowsReader"
MIX_READER = "aflow_tune.engines.trinity.readers.MixReader"
FIXED_SAMPLE = "aflow_tune.engines.trinity.readers.FixedSample"
_SHARED = ("rollout_args", "workflow_args", "reward_fn_args", "format")
"""Settings that must be equal in all task sets of a mix, which are merged into one."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_FILE_SPLIT = "train"
_ROLLOUT_ARGS = ("temperature", "top_p", "top_k", "logprobs")
# The words in file names by which `datasets` recognises splits.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass
class Located:
    """What `taskset.path` refers to. `kind`: file, folder, hub, other or missing."""

    kind: str
    path: Path | None = None
    files: list[Path] = field(default_factory=list)
    fault: str | None = None
    """Why it cannot be read."""
    fix: str = ""
    warning: str | None = None


def user_tasksets(config: AflowConfig) -> list[tuple[str, TasksetConfig, bool]]:
    """(key path, task set, whether held out) of each, before or after Trinity's validators. Those
    of `mode: pairs` are training tasks, wherever they stand."""
    inputs = config.buffer.explorer_input
    found = [("buffer.explorer_input.taskset", inputs.taskset, False)] if inputs.taskset else []
    for number, taskset in enumerate(inputs.tasksets):
        found.append((f"buffer.explorer_input.tasksets.{number}", taskset, False))
    for number, taskset in enumerate(inputs.eval_tasksets):
        key, held_out = f"buffer.explorer_input.eval_tasksets.{number}", config.mode != "pairs"
        found.append((key, taskset, held_out))
    return found


def experience_buffer(config: AflowConfig) -> ExperienceBufferConfig | None:
    """The data set of `mode: train`; None in every other mode."""
    return config.buffer.trainer_input.experience_buffer if config.mode == "train" else None


def catalogue_of(config: AflowConfig) -> dict[str, Tool]:
    """The tools of `dialogues.catalogue` by name; empty without one. Raises BadInput: the file
    cannot be read."""
    if config.dialogues.catalogue is None:
        return {}
    path = config.positions.beside(config.dialogues.catalogue)
    return {tool.name: tool for tool in read_catalogue(path)}


def is_file(taskset: TasksetConfig | ExperienceBufferConfig) -> bool:
    """Whether a task set is read from files or the hub, by Trinity's reader or ours."""
    return taskset.storage_type == ROWS_READER or str(taskset.storage_type).lower() == "file"


def locate(config: AflowConfig, taskset: TasksetConfig | ExperienceBufferConfig) -> Located:
    """Find a task set's files. Relative paths: from the current folder, else the YAML's."""
    name = str(taskset.path or "")
    if not is_file(taskset):
        return Located("other")
    bases = [Path(), *([] if config.positions.base is None else [config.positions.base])]
    own = [base / Path(name).expanduser() for base in bases]
    for path in [path_here(name), *own]:  # in a submitted job it may be a sent copy
        if path.is_file():
            path = Path(os.path.abspath(path))
            if file_format(path) is None:
                fix = "save the rows as .jsonl, .json, .csv or .parquet"
                return Located("file", path, fault="a file of unknown format", fix=fix)
            return Located("file", path, [path])
        if path.is_dir():
            return _locate_folder(Path(os.path.abspath(path)), taskset)
    if not looks_local(config, name) and not file_format(Path(name)):
        return _locate_hub(name, taskset)
    names = [item.name for path in own for item in path.parent.glob("*")]
    near = nearest(Path(name).name, names, 0.5)
    fix = f"check the path; there is {near}" if near else "check the path"
    return Located("missing", fault=f"no such file or folder: {name}", fix=fix)


def looks_local(config: AflowConfig, name: str) -> bool:
    """Whether a name that was not found looks like a local path rather than a hub id."""
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        return True
    first, slash, _ = name.partition("/")
    return bool(slash) and config.positions.beside(first).is_dir()


def read_taskset(
    config: AflowConfig, taskset: TasksetConfig | ExperienceBufferConfig
) -> Table | None:
    """The rows of a task set, read once per configuration; None if they are not on disk."""
    tables, key = config.prepared.tables, _table_key(config, taskset)
    if key not in tables:
        found = locate(config, taskset)
        table, whole = None, reads_dialogues(config)  # whole: what is read is what is tuned on
        if found.files:
            table = read_table(str(taskset.path), found.files, whole=whole)
        if table is not None and not table.faults:
            table = _dialogues(config, taskset, found.files, table)
        tables[key] = table
    return tables[key]


def _is_held_out(config: AflowConfig, taskset: TasksetConfig | ExperienceBufferConfig) -> bool:
    return any(taskset is one for _, one, held_out in user_tasksets(config) if held_out)


def _table_key(
    config: AflowConfig, taskset: TasksetConfig | ExperienceBufferConfig
) -> tuple[str, str, str | None, bool]:
    """Under which `read_taskset` keeps rows: of one file, training and evaluation may read other
    ones."""
    held_out = reads_dialogues(config) and _is_held_out(config, taskset)
    return str(taskset.path), taskset.split, taskset.subset_name, held_out


def reads_dialogues(config: AflowConfig) -> bool:
    """Whether task sets are dialogues of any form, each turn a task."""
    return config.dialogues.as_tasks


def _dialogues(
    config: AflowConfig,
    taskset: TasksetConfig | ExperienceBufferConfig,
    files: list[Path],
    table: Table,
) -> Table:
    """The rows to learn from, or with `reads_dialogues` the turns of a task set's dialogues."""
    if isinstance(taskset, ExperienceBufferConfig):
        return of_split(with_answers(table, files), held_out=False)
    if not reads_dialogues(config):
        return table
    found = dialogues_of(
        with_answers(table, files),
        catalogue_of(config),
        config.dialogues.candidates,
        held_out=_is_held_out(config, taskset),
    )
    tasks, places = [], []
    for row, place in zip(found.rows, found.places, strict=True):
        for task in as_tasks([{**row, "id": row.get("id", place)}]):
            tasks.append(task)
            places.append(place)
    return replace(found, rows=tasks, places=places, total=len(tasks))


def training_rows(config: AflowConfig) -> int | None:
    """The number of rows that are trained on; None if some data are not on disk or faulty."""
    buffer = experience_buffer(config)
    sets: list[TasksetConfig | ExperienceBufferConfig]
    sets = [taskset for _, taskset, held_out in user_tasksets(config) if not held_out]
    if config.mode == "train":
        if buffer is None or not buffer.path:
            return None
        sets = [buffer]
    tables = [read_taskset(config, taskset) for taskset in sets]
    read = [table.total for table in tables if table is not None and not table.faults]
    if len(read) < len(sets):
        return None
    chosen = config.coreset.size if config.mode == "train" else None
    return sum(read) if chosen is None else count_of(chosen, sum(read))


def total_steps(config: AflowConfig) -> int | None:
    """The training steps that the settings amount to; None if the number of rows is unknown."""
    if config.mode in ("bench", "harvest", "pairs"):
        return None
    bounds = [steps for steps in (config.trainer.total_steps, config.buffer.total_steps) if steps]
    if not config.buffer.total_steps:
        rows, size = training_rows(config), config.buffer.batch_size
        size = config.buffer.train_batch_size if config.mode == "train" else size
        if rows is not None and size > 0:
            bounds.append(rows * config.buffer.total_epochs // size)
        elif not bounds:
            return None
    return min(bounds)


def settle_paths(config: AflowConfig) -> None:
    """Make paths of models and data absolute: workers start in other folders."""
    models: list[tuple[Any, str]] = [(config.model, "critic_model_path")]
    models += [(it, "model_path") for it in (config.model, *config.explorer.auxiliary_models)]
    for model, setting in models:
        name = str(getattr(model, setting) or "")
        if name and name not in BUNDLED and Path(name).expanduser().is_dir():
            setattr(model, setting, os.path.abspath(os.path.expanduser(name)))
    if config.dialogues.catalogue is not None:
        found_at = config.positions.beside(config.dialogues.catalogue)
        config.dialogues.catalogue = str(found_at.absolute())
    buffer, tables = experience_buffer(config), config.prepared.tables
    sets: list[TasksetConfig | ExperienceBufferConfig]
    sets = [taskset for _, taskset, _ in user_tasksets(config)]
    for taskset in sets if buffer is None else [*sets, buffer]:
        found = locate(config, taskset)
        key = _table_key(config, taskset)
        if found.path is not None and found.fault is None:
            taskset.path = str(found.path)
            if found.kind == "file":
                taskset.split, taskset.subset_name = _FILE_SPLIT, None
            if key in tables:
                tables[_table_key(config, taskset)] = tables[key]


def materialise_tasksets(config: AflowConfig, run_dir: Path | None = None) -> None:
    """Link the files of every task set into `<run folder>/data/<role>/<name>/`, its new path.

    Call it on a prepared configuration, holding the lock of its run folder (or of `run_dir`). For
    a Ray that others started, copies files: its nodes may see the run folder only."""
    if run_dir is not None:
        config.checkpoint_job_dir = str(run_dir)
    copied = on_cluster(config)
    for _, taskset, held_out in user_tasksets(config):
        source = Path(str(taskset.path))
        role = "held_out" if held_out else "train"
        folder = Path(config.checkpoint_job_dir) / "data" / role / taskset.name
        if not is_file(taskset) or source == folder:
            continue
        found, table, part = locate(config, taskset), read_taskset(config, taskset), ""
        files: list[Path] = []
        on_disk = found.kind in ("file", "folder") and not re.search(r"[\[+]", taskset.split)
        if table is not None and reads_dialogues(config):
            rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.rows)
            shutil.rmtree(folder, ignore_errors=True)
            write_whole(folder / f"{_FILE_SPLIT}.jsonl", rows)
            taskset.storage_type = ROWS_READER
            taskset.path, taskset.split, taskset.subset_name = str(folder), _FILE_SPLIT, None
            continue
        mixed = table is not None and (
            (config.mix and not held_out)
            or len(sources(table)) > 1
            or any("messages" in row for row in table.rows)
        )
        if on_disk and mixed:  # Trinity's table would give each column one type
            taskset.storage_type, files = ROWS_READER, found.files
        elif source.is_file() or (source.is_dir() and "+" not in taskset.split):
            files, part = found.files, "".join(taskset.split.partition("[")[1:])
        if not files:
            continue
        shutil.rmtree(folder, ignore_errors=True)  # links of an earlier start
        link_files(files, folder, copied)
        taskset.path = str(folder)
        taskset.split, taskset.subset_name = _FILE_SPLIT + part, None


def on_cluster(config: AflowConfig) -> bool:
    """Whether the run joins a running Ray, whose nodes may see only the run folder."""
    return uses_ray(config) and find_ray(config) is not None


def fill_held_out(config: AflowConfig, taskset: TasksetConfig) -> None:
    """Fill in what Trinity's `BufferConfigValidator` would, which also makes folders."""
    taskset.is_eval = True
    taskset.batch_size = config.buffer.batch_size
    arguments = taskset.rollout_args
    for name in _ROLLOUT_ARGS:
        if getattr(arguments, name) is None:
            setattr(arguments, name, getattr(config.model, name))
    if arguments.max_tokens is None:
        arguments.max_tokens = config.model.max_response_tokens
    if taskset.format.chat_template is None:
        taskset.format.chat_template = config.model.custom_chat_template


def link_files(files: list[Path], folder: Path, copied: bool = False) -> None:
    """Link, or copy, these files into `folder` as the split `train` of one data set."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(files):
        name = f"{_FILE_SPLIT}-{number:05d}" if len(files) > 1 else _FILE_SPLIT
        suffix = re.search(r"\.\w+(\.gz)?$", file.name.lower())
        assert suffix is not None  # of a file whose format is known
        link = folder / f"{name}{suffix[0].replace('.ndjson', '.jsonl')}"
        temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
        if copied:
            shutil.copyfile(file, temporary)
        else:
            temporary.symlink_to(file)
        temporary.rename(link)


def _locate_folder(path: Path, taskset: TasksetConfig | ExperienceBufferConfig) -> Located:
    within = path / taskset.subset_name if taskset.subset_name else path
    root = within if within.is_dir() else path
    files = sorted(
        file
        for file in root.rglob("*")
        if file.is_file()
        and file_format(file)
        and not any(part.startswith((".", "__")) for part in file.relative_to(root).parts)
    )
    if not files:
        fix = "put train.jsonl (or .json, .csv, .parquet) there, or name the file itself"
        return Located("folder", path, fault="a folder without data files", fix=fix)
    readme = path / "README.md"
    if readme.is_file() and "configs:" in readme.read_text(encoding="utf-8", errors="replace"):
        warning = f"{path}: its README.md decides which files are read; rows are not checked"
        return Located("folder", path, warning=warning)
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(root)) or "", []).append(file)
    if set(by_split) == {""}:
        by_split = {"train": files}
    chosen = by_split.get(re.split(r"[\[+]", taskset.split)[0], [])
    if not chosen:
        there = ", ".join(sorted(name for name in by_split if name)) or "none"
        fix = f"split: {sorted(by_split)[-1]}"
        return Located("folder", path, fault=f"the splits {there}", fix=fix)
    if len({file_format(file) for file in chosen}) > 1:
        fix = "keep one format in the folder, or name one file"
        return Located("folder", path, fault="files of several formats", fix=fix)
    return Located("folder", path, chosen)


def _locate_hub(name: str, taskset: TasksetConfig | ExperienceBufferConfig) -> Located:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    datasets = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()
    prepared = datasets / name.replace("/", "___")
    subset = taskset.subset_name or ""
    arrow = sorted(
        file
        for file in prepared.glob(f"**/*-{taskset.split}*.arrow")
        if not subset or file.relative_to(prepared).parts[0] == subset
    )
    if arrow:  # each cached version has a folder of its own
        newest = max({file.parent for file in arrow}, key=lambda folder: folder.stat().st_mtime)
        return Located("hub", files=[file for file in arrow if file.parent == newest])
    warning = f"data set {name}: read or fetched at the start; its rows are not checked before"
    return Located("hub", warning=warning)


def _split_of(path: Path) -> str | None:
    """The split that `datasets` infers from a file's name or the folders above it."""
    for part in (path.name, *(parent.name for parent in path.parents)):
        words = re.split(r"[^a-z]+", part.lower())
        for split, known in _SPLIT_WORDS.items():
            if set(known) & set(words):
                return split
    return None


# --- Mixes ----------------------------------------------------------------------------------------


def shares_of(config: AflowConfig) -> dict[str, Fraction]:
    """The share of each source of `config.mix`, as written or by the default recipe.

    Raises ValueError: as `exact_shares`, or the recipe has no share for a source."""
    written = {name: source.ratio for name, source in config.mix.items()}
    if any(ratio is not None for ratio in written.values()):
        return exact_shares({name: ratio or 0.0 for name, ratio in written.items()})
    kinds = {name: kind_of(name, source.benchmark) for name, source in config.mix.items()}
    if None in kinds.values():
        raise ValueError("a source without a share is of no kind that the default recipe knows")
    return default_shares({name: str(kind) for name, kind in kinds.items()})


def benchmarks_of(config: AflowConfig) -> dict[str, str]:
    """The benchmark of each source that states one or is named after one."""
    found = {}
    for name, source in config.mix.items():
        own = name if name in KINDS and name not in DEFAULT_SHARES else None
        if benchmark := source.benchmark or own:
            found[name] = benchmark
    return found


def fields_of_mix(config: AflowConfig) -> tuple[str, ...]:
    """The fields that the mix adds to every training row."""
    if not config.mix:
        return ()
    return ("source", "benchmark") if len(benchmarks_of(config)) == len(config.mix) else ("source",)


def merge_mix(config: AflowConfig, run_dir: Path) -> None:
    """Merge the laid-out training task sets into one that is read in the configured shares."""
    if not config.mix:
        return
    inputs = config.buffer.explorer_input
    place = run_dir / "data" / "mix.json"
    keys = ("name", "storage_type", "path", "split", "subset_name")
    content = {
        "seed": config.seed,
        "shares": {name: str(share) for name, share in shares_of(config).items()},
        "benchmarks": benchmarks_of(config),
        "tasksets": [{key: getattr(one, key) for key in keys} for one in inputs.tasksets],
    }
    write_json(place, content)
    merged = {"name": "mix", "storage_type": MIX_READER, "path": str(place)}
    selector = DataSelectorConfig()
    inputs.tasksets = [replace(inputs.tasksets[0], **merged, data_selector=selector)]


def quick_tasksets(config: AflowConfig, step: int) -> list[TasksetConfig]:
    """The held-out task sets to evaluate the weights of `step` on: all rows in the first and last
    evaluation, which are compared; between them the sample of `quick_eval` rows, if set."""
    tasksets = config.buffer.explorer_input.eval_tasksets
    size, last = config.quick_eval, config.trainer.total_steps
    if size is None or step == 0 or (last is not None and step >= last):
        return tasksets
    selector = DataSelectorConfig(FIXED_SAMPLE, seed=config.seed, kwargs={"size": size})
    return [replace(taskset, data_selector=selector) for taskset in tasksets]


def check_mix(config: AflowConfig) -> list[Fault]:
    """Faults of `mix:` and of the task sets that it names."""
    if not config.mix:
        return []
    ratios, faults = {name: source.ratio for name, source in config.mix.items()}, []
    given = any(ratio is not None for ratio in ratios.values())
    for name, ratio in ratios.items():
        if ratio is None and (given or kind_of(name, config.mix[name].benchmark) is None):
            expected = f"a `ratio` for each source, or else a `benchmark` of {', '.join(KINDS)}"
            faults.append(config.fault(f"mix.{name}", expected, "no ratio", "{ratio: 0.5}"))
        elif ratio is not None and not 0 < ratio <= 1:
            faults.append(config.wrong(f"mix.{name}.ratio", "above 0, at most 1", "ratio: 0.4"))
    if given and not faults:
        try:
            shares_of(config)
        except ValueError as error:
            faults.append(config.fault("mix", "ratios that are 1", str(error), "change them"))
    return [*faults, *_check_sources(config)]


def _check_sources(config: AflowConfig) -> Iterable[Fault]:
    """Check that every source has rows, every row a source, and that task sets agree."""
    mix, unread = config.mix, False
    named: Counter[str] = Counter()
    known: list[str] = []
    for key, taskset, held_out in user_tasksets(config):
        if held_out or not taskset.path:
            continue
        name = taskset.name or "train"
        known.append(name)
        if name in mix:
            named[name] += 1
            if named[name] == 2:
                yield config.fault(f"{key}.name", "a name of its own", repr(name), f"{name}_2")
            continue
        table = read_taskset(config, taskset)
        if table is None or table.faults:
            unread = True
            continue
        rows = Counter(str(row.get("source", "no source")) for row in table.rows)
        named.update(rows)
        known += rows
        strange = [f"{source} ({count})" for source, count in rows.items() if source not in mix]
        if strange:
            expected = f"{name!r}, or each `source` of its rows, as a source in `mix`"
            found = "rows of " + ", ".join(strange[:4])
            yield config.fault(f"{key}.name", expected, found, "give it a share")
    for name in mix:
        if not named[name] and not unread:
            expected = f"the name of a training task set, or a `source` of its rows: {known}"
            yield config.fault(f"mix.{name}", expected, repr(name), "correct the name")
    # Settings of single task sets that a mix cannot honour.
    training = [(key, taskset) for key, taskset, held_out in user_tasksets(config) if not held_out]
    for key, taskset in training:
        kind = (taskset.task_selector or taskset.data_selector).selector_type
        if kind not in (None, "sequential"):
            place, expected = f"{key}.data_selector.selector_type", "none: a mix shuffles by itself"
            yield config.fault(place, expected, repr(kind), "remove data_selector")
        if not is_file(taskset):
            yield config.wrong(f"{key}.storage_type", "file", "storage_type: file")
        for name in _SHARED:
            if getattr(taskset, name) != getattr(training[0][1], name):
                expected, found = f"one `{name}` for all of a mix", "another than in the first"
                yield config.fault(f"{key}.{name}", expected, found, "make them equal")
