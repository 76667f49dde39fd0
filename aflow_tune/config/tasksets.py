"""Where a task set's rows are: found on disk for checking, laid out for Trinity's reader.

Trinity reads a task set of `storage_type: file` with `datasets.load_dataset(path, subset_name,
split)`: a hub id or a folder, never a plain file. We also take a file: at launch it is linked
into a folder of the run under the name that makes it the split. Files whose rows are of several
sources, and those of a mix, are read by our `RowsReader`. Looking fetches nothing; a hub data
set is read from the local cache or not at all.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from trinity.common.config import ExperienceBufferConfig, TasksetConfig

from aflow_tune.config.settings import AflowConfig
from aflow_tune.data.checks import sources
from aflow_tune.data.rows import Table, file_format, read_table
from aflow_tune.engines.local.models import BUNDLED
from aflow_tune.find_ray import find_ray, uses_ray
from aflow_tune.shipping import arrived

FROM_DATA = ("sft", "dpo", "cpt")
"""Algorithms that learn from a data set alone, which `mode: train` reads."""
WITHOUT_TASKS = ("train", "bench", "serve")
"""Modes that read no training task set."""

ROWS_READER = "aflow_tune.engines.trinity.readers.RowsReader"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_FILE_SPLIT = "train"
_ROLLOUT_ARGS = ("temperature", "top_p", "top_k", "logprobs")
# The words by which `datasets` tells splits apart in the names of a folder's files.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}


@dataclass
class Located:
    """What `taskset.path` stands for. `kind`: file, folder, hub, other or missing."""

    kind: str
    path: Path | None = None
    files: list[Path] = field(default_factory=list)
    fault: str | None = None
    """Why it cannot be read; what was found."""
    fix: str = ""
    warning: str | None = None


def user_tasksets(config: AflowConfig) -> list[tuple[str, TasksetConfig, bool]]:
    """(key path, task set, held out) of every task set, before or after Trinity's validators."""
    inputs = config.buffer.explorer_input
    found = [("buffer.explorer_input.taskset", inputs.taskset, False)] if inputs.taskset else []
    for number, taskset in enumerate(inputs.tasksets):
        found.append((f"buffer.explorer_input.tasksets.{number}", taskset, False))
    for number, taskset in enumerate(inputs.eval_tasksets):
        found.append((f"buffer.explorer_input.eval_tasksets.{number}", taskset, True))
    return found


def experience_buffer(config: AflowConfig) -> ExperienceBufferConfig | None:
    """The data that `mode: train` learns from; None in every other mode."""
    return config.buffer.trainer_input.experience_buffer if config.mode == "train" else None


def is_file(taskset: TasksetConfig | ExperienceBufferConfig) -> bool:
    """Whether a task set is read from files, by Trinity's reader or by ours."""
    return taskset.storage_type == ROWS_READER or str(taskset.storage_type).lower() == "file"


def locate(config: AflowConfig, taskset: TasksetConfig | ExperienceBufferConfig) -> Located:
    """Find a task set's files. Relative paths: from here, else from the YAML's folder."""
    name = str(taskset.path or "")
    if not is_file(taskset):
        return Located("other")
    arrival = arrived()  # in a submitted job a path may have travelled
    moved = None if arrival is None else arrival.relocated(os.path.expanduser(name))
    own = [base / Path(name).expanduser() for base in _bases(config)]
    for path in own if moved is None else [Path(moved), *own]:
        if path.is_file():
            return _locate_file(Path(os.path.abspath(path)))
        if path.is_dir():
            return _locate_folder(Path(os.path.abspath(path)), taskset)
    if not looks_local(config, name) and not file_format(Path(name)):
        return _locate_hub(name, taskset)
    near: list[str] = []
    for base in _bases(config):
        folder = (base / Path(name).expanduser()).parent
        names = [item.name for item in folder.iterdir()] if folder.is_dir() else []
        near += difflib.get_close_matches(Path(name).name, names, n=2, cutoff=0.5)
    fix = f"check the path; there is {', '.join(dict.fromkeys(near))}" if near else "check the path"
    return Located("missing", fault=f"no such file or folder: {name}", fix=fix)


def looks_local(config: AflowConfig, name: str) -> bool:
    """Whether a name under which nothing was found means a place on this machine, no hub id."""
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        return True
    first, slash, _ = name.partition("/")
    return bool(slash) and any((base / first).is_dir() for base in _bases(config))


def read_taskset(
    config: AflowConfig, taskset: TasksetConfig | ExperienceBufferConfig
) -> Table | None:
    """The rows of a task set, read once per configuration; None where none are on disk."""
    tables = config.prepared.tables
    key = (str(taskset.path), taskset.split)
    if key not in tables:
        found = locate(config, taskset)
        tables[key] = read_table(str(taskset.path), found.files) if found.files else None
    return tables[key]


def training_rows(config: AflowConfig) -> int | None:
    """Rows of all training data together; None if not all are on disk."""
    buffer = experience_buffer(config)
    sets: list[TasksetConfig | ExperienceBufferConfig]
    sets = [taskset for _, taskset, held_out in user_tasksets(config) if not held_out]
    if config.mode == "train":
        if buffer is None or not buffer.path:
            return None
        sets = [buffer]
    total = 0
    for taskset in sets:
        table = read_taskset(config, taskset)
        if table is None or table.faults:
            return None
        total += table.total
    return total


def total_steps(config: AflowConfig) -> int | None:
    """The training steps that the settings come to; None if the rows are not known."""
    if config.mode in ("bench", "harvest"):
        return None
    bounds = [steps for steps in (config.trainer.total_steps, config.buffer.total_steps) if steps]
    if not config.buffer.total_steps:
        rows, size = training_rows(config), rows_a_step(config)
        if rows is not None and size > 0:
            bounds.append(rows * config.buffer.total_epochs // size)
        elif not bounds:
            return None
    return min(bounds)


def rows_a_step(config: AflowConfig) -> int:
    """Rows of the training data that one step takes."""
    return config.buffer.train_batch_size if config.mode == "train" else config.buffer.batch_size


def settle_paths(config: AflowConfig) -> None:
    """Make the paths of files and folders absolute: workers start in other folders."""
    for model in (config.model, *config.explorer.auxiliary_models):
        name = str(model.model_path or "")
        if name and name not in BUNDLED and Path(name).expanduser().is_dir():
            model.model_path = os.path.abspath(os.path.expanduser(name))
    buffer, tables = experience_buffer(config), config.prepared.tables
    sets: list[TasksetConfig | ExperienceBufferConfig]
    sets = [taskset for _, taskset, _ in user_tasksets(config)]
    for taskset in sets if buffer is None else [*sets, buffer]:
        found, key = locate(config, taskset), (str(taskset.path), taskset.split)
        if found.path is not None and found.fault is None:
            taskset.path = str(found.path)
            if found.kind == "file":
                taskset.split, taskset.subset_name = _FILE_SPLIT, None
            if key in tables:
                tables[(taskset.path, taskset.split)] = tables[key]


def materialise_tasksets(config: AflowConfig, run_dir: Path | None = None) -> None:
    """Link every task set that is a plain file into `<run folder>/data/<name>/train.<suffix>`.

    To be called on a prepared configuration whose run folder is held; `run_dir`, where it is
    given, becomes its run folder. The paths of the task sets become those folders. A folder is
    linked as well, without the files of its other splits. For a Ray that others started files
    are copied: its nodes see the run folder, but perhaps not what it would link to.
    """
    if run_dir is not None:
        config.checkpoint_job_dir = str(run_dir)
    copied = on_cluster(config)
    for _, taskset, held_out in user_tasksets(config):
        source = Path(str(taskset.path))
        role = "held_out" if held_out else "train"
        folder = Path(config.checkpoint_job_dir) / "data" / role / taskset.name
        if not is_file(taskset) or source == folder:
            continue
        files, part = _own_files(config, taskset, held_out), ""
        if files:
            taskset.storage_type = ROWS_READER
        elif source.is_file():
            files = [source]
        elif source.is_dir() and "+" not in taskset.split:
            # On every Ray alike, so that a run may go on on another one.
            files = locate(config, taskset).files
            part = "".join(taskset.split.partition("[")[1:])
        if not files:
            continue
        shutil.rmtree(folder, ignore_errors=True)  # links of an earlier start
        link_files(files, folder, copied)
        taskset.path = str(folder)
        taskset.split, taskset.subset_name = _FILE_SPLIT + part, None


def on_cluster(config: AflowConfig) -> bool:
    """Whether the run is on a Ray that others started, whose nodes may see only the run folder."""
    return uses_ray(config) and find_ray(config) is not None


def fill_held_out(config: AflowConfig, taskset: TasksetConfig) -> None:
    """What Trinity's `BufferConfigValidator` fills into a held-out task set, where that is not
    asked: it would also make folders and want training data."""
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
    """Make `folder` hold these files, or copies, as the split `train` of one data set."""
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


def _own_files(config: AflowConfig, taskset: TasksetConfig, held_out: bool) -> list[Path]:
    """The files of a task set whose rows have to be read as they are; empty for any other."""
    found, table = locate(config, taskset), read_taskset(config, taskset)
    if table is None or found.kind not in ("file", "folder") or re.search(r"[\[+]", taskset.split):
        return []
    return found.files if (config.mix and not held_out) or len(sources(table)) > 1 else []


def _bases(config: AflowConfig) -> list[Path]:
    base = config.positions.base
    return [Path()] if base is None else [Path(), base]


def _locate_file(path: Path) -> Located:
    if file_format(path) is None:
        fix = "save the rows as .jsonl, .json, .csv or .parquet"
        return Located("file", path, fault=f"a file of unknown format: {path.name}", fix=fix)
    return Located("file", path, [path])


def _locate_folder(path: Path, taskset: TasksetConfig | ExperienceBufferConfig) -> Located:
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        fix = "save it with to_json or to_parquet instead of save_to_disk"
        return Located("folder", path, fault="a folder written by `save_to_disk`", fix=fix)
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
    if arrow:
        return Located("hub", files=arrow)
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    cached = (hub / f"datasets--{name.replace('/', '--')}").is_dir() or prepared.is_dir()
    state = "cached" if cached else "not on this machine, to be fetched from the hub at the start"
    return Located("hub", warning=f"data set {name}: {state}; its rows are not checked before")


def _split_of(path: Path) -> str | None:
    """The split that `datasets` sees in a file's name or in the folders above it."""
    for part in (path.name, *(parent.name for parent in path.parents)):
        words = re.split(r"[^a-z]+", part.lower())
        for split, known in _SPLIT_WORDS.items():
            if set(known) & set(words):
                return split
    return None
