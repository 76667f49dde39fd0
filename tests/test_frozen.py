"""What users see, held against what was written down: `tests/frozen/`.

`AFLOW_TUNE_FREEZE=1 pytest tests/test_frozen.py` writes the expectations anew; the difference that
`git diff` then shows is what users will notice. Inputs (`project.yaml`, `cases.yaml`,
`graphs.jsonl`, `writer_data/`) are written by hand and stay. Everything goes through the command
line, but for what is imported under "internal" below.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

# Internal: adapt these lines where modules move.
import aflow_tune.config  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.cli import main
from aflow_tune.config.changes import save_resolved
from aflow_tune.config.load import AflowConfig
from aflow_tune.tuning import validate_config

ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).parent / "frozen"
WRITE = bool(os.environ.get("AFLOW_TUNE_FREEZE"))
PROJECT: dict[str, str] = yaml.safe_load((FROZEN / "project.yaml").read_text())
CASES: dict[str, dict[str, Any]] = yaml.safe_load((FROZEN / "cases.yaml").read_text())
GRAPHS = [json.loads(line) for line in (FROZEN / "graphs.jsonl").read_text().splitlines()]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
NOT_REPEATABLE = re.compile(r"time|second|memory|throughput|per_s\b|mfu|utili[sz]ation|bytes|_mb\b")
"""Metrics that are other ones in each run: of them only the names are kept."""
UNSAFE = "not_allowed"
"""The kind of refusal of what a written graph may not contain."""
Run = typing.Callable[..., tuple[int, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder on a machine without GPUs, keys and downloaded models."""
    monkeypatch.chdir(tmp_path)
    for name in ("RAY_ADDRESS", "TRINITY_CHECKPOINT_ROOT_DIR", "TRINITY_MODEL_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {
        "AFLOW_TUNE_CACHE": str(tmp_path / "cache"),
        "COLUMNS": "100",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "not-a-key",
        "WRITER_DATA": str(FROZEN / "writer_data"),
    }.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line; returns its exit code, and what it printed without machine paths."""

    def run(*words: object) -> tuple[int, str]:
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return int(code), normal("".join(capsys.readouterr()), here)

    return run


def normal(text: str, folder: Path) -> str:
    """A text without the paths of this machine and the modules that our classes are in."""
    for path, name in ((folder, "<tmp>"), (ROOT, "<repo>"), (Path.home(), "<home>")):
        text = text.replace(str(path), name)
    text = re.sub(r"<repo>/aflow_tune/[\w/]+\.py:\d+", "<ours>", text)
    return re.sub(r"\baflow_tune(?:\.[a-z_]\w*)+\.(\w+)", r"aflow_tune:\1", text)


def frozen(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept in a file, which is written first where that is asked for."""
    path = FROZEN / f"{name}.json"
    if WRITE:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def write_project(folder: Path, files: Mapping[str, str | None]) -> None:
    """Write the project of `project.yaml`, with other files in the place of some of its own."""
    for name, text in {**PROJECT, **files}.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested settings by their dotted key."""
    if value and isinstance(value, dict):
        for name, item in value.items():
            yield from flat(item, f"{key}.{name}".lstrip("."))
    elif value and isinstance(value, list):
        for number, item in enumerate(value):
            yield from flat(item, f"{key}[{number}]")
    else:
        yield key, value


# --- the command line ------------------------------------------------------------------------


def test_help_of_every_command(run: Run) -> None:
    found: dict[str, list[str]] = {}
    waiting = [""]
    while waiting:
        words = waiting.pop(0)
        code, text = run(*words.split(), "--help")
        assert code == 0, words
        found[f"aflow-tune {words}".strip()] = text.splitlines()
        listed = re.search(r"^(?:commands|actions):\n(?:.*\n)??((?:    .*\n)+)", text, re.M)
        if listed:
            waiting += [f"{words} {name}" for name in re.findall(r"^ {4}(\S+)", listed[1], re.M)]
    assert len(found) > 20
    assert found == frozen("help", found)


def faults_of(text: str) -> list[str]:
    """The places of the faults that a command told."""
    return re.findall(r"^\d+\. (.*)\n    expected:", text, re.M)


@pytest.mark.slow
def test_verdicts_and_places(run: Run, here: Path) -> None:
    """Broken settings, functions, data and command lines: exit code, then each fault's place."""
    found: dict[str, list[Any]] = {}
    for number, (name, case) in enumerate(CASES.items()):
        folder = here / str(number)
        folder.mkdir()
        files, settings = dict(case.get("files", {})), case.get("set", [])
        if "add" in case:
            files["config.yaml"] = PROJECT["config.yaml"] + case["add"]
        if "flow" in case:
            files["flow.py"] = PROJECT["signatures.py"] + case["flow"]
            settings = settings or ["workflow=flow.py:f"]
        write_project(folder, files)
        for file, pairs in case.get("replace", {}).items():
            for old, new in pairs.items():
                text = (folder / file).read_text()
                assert old in text, f"{name}: {old}"
                (folder / file).write_text(text.replace(old, new))
        os.chdir(folder)
        code, text = run(*case.get("run", ("validate", "config.yaml", *settings)))
        found[name] = [code, *(place.replace(f"<tmp>/{number}", ".") for place in faults_of(text))]
    assert found == frozen("verdicts", found)


# --- settings --------------------------------------------------------------------------------


@pytest.mark.slow
def test_resolved_settings_of_every_shipped_configuration(here: Path) -> None:
    """Kept as the values that most of them have, and for each one what differs from those."""
    found: dict[str, dict[str, Any]] = {}
    for path in CONFIGS:
        cluster = "\nengine: trinity" in path.read_text()
        report = validate_config(path, ["cluster.ray_address=10.0.0.1:6379"] if cluster else [])
        assert not report.faults, report.render()
        for name, part in report.stages or [("", report)]:
            file = here / "resolved.yaml"
            save_resolved(part.config, part.changes, file)
            text = normal(file.read_text(), here)
            changed = re.findall(r"^# (\S+): .* -> ", text, re.M)
            found[f"{path.stem}/{name}".rstrip("/")] = {
                **dict(flat(yaml.safe_load(text))),
                "changed": sorted(changed),
            }
    assert found == unfolded(frozen("resolved", folded(found)))


def folded(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    keys = sorted({key for settings in found.values() for key in settings})
    texts = {
        name: {key: json.dumps(settings.get(key, "<absent>")) for key in keys}
        for name, settings in found.items()
    }
    most = {key: Counter(own[key] for own in texts.values()).most_common(1)[0][0] for key in keys}
    rest = {
        name: {key: json.loads(text) for key, text in own.items() if text != most[key]}
        for name, own in texts.items()
    }
    return {"most": {key: json.loads(text) for key, text in most.items()}, **rest}


def unfolded(kept: dict[str, Any]) -> dict[str, Any]:
    most = kept.pop("most")
    return {
        name: {key: value for key, value in {**most, **own}.items() if value != "<absent>"}
        for name, own in kept.items()
    }


def own_keys(section: type, key: str = "") -> Iterator[tuple[str, Any]]:
    """The settings that this package adds to Trinity's: key, then type, default and choices."""
    hints = typing.get_type_hints(section)
    upstream = {
        name
        for base in section.__mro__
        if not base.__module__.startswith("aflow_tune")
        for name in getattr(base, "__dataclass_fields__", ())
    }
    for item in dataclasses.fields(section):
        if item.name in upstream:
            continue
        path, kind = f"{key}{item.name}", hints[item.name]
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        below = [part for part in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(part)]
        if not dataclasses.is_dataclass(default):
            shown = re.sub(r"[\w.]+\.(\w+)", r"\1", getattr(kind, "__name__", "") or "")
            shown = shown if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
            shown = re.sub(r"\b[a-z_]\w*\.(?=\w)", "", shown)
            yield path, [shown, default, *item.metadata.get("choices", ())]
        dot = "." if below and kind in below else ".<name>." if "dict" in str(kind) else "[]."
        dot = "." if type(None) in typing.get_args(kind) else dot
        for part in below:
            yield from own_keys(part, f"{path}{dot}")


def test_keys_and_defaults_of_our_own_settings() -> None:
    found = dict(own_keys(AflowConfig))
    assert len(found) > 80
    assert found == frozen("keys", found)


# --- written graphs --------------------------------------------------------------------------


@pytest.mark.slow
def test_verdicts_on_written_graphs(run: Run, here: Path) -> None:
    found: dict[str, str] = {}
    for graph in GRAPHS:
        parts = graph["text"] if isinstance(graph["text"], list) else [graph["text"]]
        text = "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)
        if "prompts" in graph:
            text = json.dumps({"prompts": graph["prompts"], "graph_code": text})
        file = here / ("graph.py" if "prompts" not in graph else "written.json")
        file.write_text(text)
        found[graph["name"]] = verdict(run, file, *graph.get("flags", ()))
        file.unlink()
    for path in sorted((ROOT / "workflows" / "graphs").glob("*/graph.py")):
        found[f"shipped: {path.parent.name}"] = verdict(run, path.parent)
    before = json.loads((FROZEN / "graphs.json").read_text())  # holds when it is written anew, too
    unsafe = [name for name, told in before.items() if UNSAFE in told]
    assert not [name for name in unsafe if found.get(name) == "accepted"]
    assert found == frozen("graphs", found)


def verdict(run: Run, *words: object) -> str:
    code, text = run("check-graph", *words, "--json")
    told = json.loads(text)
    assert told["ok"] == (code == 0)
    refusals = [f"{refusal['kind']}:{refusal['line']}" for refusal in told["refusals"]]
    return "accepted" if told["ok"] else " ".join(refusals)


# --- a run -----------------------------------------------------------------------------------


def test_a_small_inline_run(run: Run, here: Path, tiny_model_dir: Path) -> None:
    """Exit codes, files, the keys in them, names and numbers of metrics, and the weights."""
    write_project(here, {})
    words = ("config.yaml", "--inline", f"model.model_path={tiny_model_dir}")
    codes = [run(*words)[0], run(*words)[0], run(*words, "seed=4")[0]]
    codes.append(run(*words, "buffer.total_steps=3")[0])
    folder = here / "runs" / "frozen" / "tiny"
    names = [name_of(path, folder) for path in sorted(folder.rglob("*"))]
    shapes: dict[str, Any] = {}
    for path in sorted(folder.rglob("*.json*")):
        if "export" not in path.parts and not path.is_symlink() and path.is_file():
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            for line in lines:
                merge(shapes.setdefault(name_of(path, folder), {}), json.loads(line))
    metrics, numbers = metrics_of(folder)
    found = {
        "exit codes": codes,
        "files": sorted(set(names)),
        **{f"keys of {name}": dict(sorted(keys.items())) for name, keys in shapes.items()},
        **{f"metrics of {role}": kept for role, kept in metrics.items()},
        "numbers": numbers,
        "adapter": weights_of(folder / "export" / "adapter" / "adapter_model.safetensors"),
    }
    kept = frozen("run", found)
    for key in ("numbers", "adapter"):
        expected, told = dict(flat(kept.pop(key))), dict(flat(found.pop(key)))
        assert told == pytest.approx(expected, rel=1e-4, abs=5e-6), key
    assert found == kept


def name_of(path: Path, folder: Path) -> str:
    """A path in the run folder; steps and what names this machine and moment left out."""
    name = re.sub(r"tfevents\..*", "tfevents.*", str(path.relative_to(folder)))
    name = re.sub(r"step_\d+", "step_N", name)
    return f"{name}/" if path.is_dir() and not path.is_symlink() else name


def merge(keys: dict[str, str], value: Any) -> None:
    """Add the keys of one JSON value with the types of what they hold, two levels deep."""
    for item in value if isinstance(value, list) else [value]:
        for path, leaf in two_levels(item):
            told = set(keys.get(path, "").split("|")) - {""} | {type(leaf).__name__}
            keys[path] = "|".join(sorted(told))


def two_levels(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    many = isinstance(value, dict) and any(re.search(r"[./\d]", name) for name in value)
    if isinstance(value, dict) and value and not many and depth < 3:
        for name, item in value.items():
            yield from two_levels(item, f"{key}.{name}".lstrip("."), depth + 1)
    elif isinstance(value, list) and value and depth < 3:
        for item in value:
            yield from two_levels(item, f"{key}[]", depth + 1)
    else:
        yield key, value


def metrics_of(folder: Path) -> tuple[dict[str, list[str]], dict[str, dict[str, float]]]:
    """Names by role, and the repeatable numbers by role and step to six digits."""
    names: dict[str, set[str]] = {}
    numbers: dict[str, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        names.setdefault(entry["role"], set()).update(entry["metrics"])
        kept = {
            name: float(f"{value:.6g}")
            for name, value in sorted(entry["metrics"].items())
            if not NOT_REPEATABLE.search(name) and isinstance(value, (int, float))
        }
        numbers.setdefault(f"{entry['role']} {entry['step']}", {}).update(kept)
    return {role: sorted(told) for role, told in names.items()}, numbers


def weights_of(path: Path) -> dict[str, list[float]]:
    """Of each tensor its sizes, and its sum of squares, which no processor changes much."""
    from safetensors.torch import load_file

    return {
        name: [*tensor.shape, float(f"{tensor.double().square().sum().item():.4g}")]
        for name, tensor in sorted(load_file(path).items())
    }
