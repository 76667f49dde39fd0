"""Every shipped YAML is valid from any folder, and says what its comments claim."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest
from data_project import write_rows

from aflow_tune.config.load import AflowConfig
from aflow_tune.config.schema import index
from aflow_tune.config.validate import validate

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
CLUSTER = ["cluster.ray_address=10.0.0.1:6379"]
ON_CLUSTER = [path for path in CONFIGS if "\nengine: trinity" in path.read_text()]
TRAINED_THERE = [path for path in ON_CLUSTER if path.stem != "serve"]
MAY_CHANGE = ("checkpoint_root_dir", "engine", "monitor.monitor_type", "model.model_path")
MAY_CHANGE += tuple(f"buffer.explorer_input.*.{name}" for name in ("path", "split", "name"))
"""Keys that are changed without a change of meaning, such as paths made absolute."""
PAGE = (ROOT / "docs" / "training_yaml.md").read_text(encoding="utf-8")


def write_mixed(path: Path, numbers: range) -> None:
    """Rows of the sources of the writer's recipes, as `aflow-tune data prepare` writes them."""
    rows: list[dict[str, str]] = []
    for n in numbers:
        own = {
            "gsm8k": {"question": f"What is {n} + 3?", "answer": f"Add.\n#### {n + 3}"},
            "mbpp": {
                "prompt": f"Write add(x) that adds {n}.",
                "entry_point": "add",
                "code": f"def add(x):\n    return x + {n}",
                "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}",
            },
            "drop": {"context": f"Passage: {n} cats. Question: how many?", "ref_text": str(n)},
        }
        rows += [{"source": name, "benchmark": name, **row} for name, row in own.items()]
    write_rows(path, rows)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not the recipes', with the data and keys that some of them name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("WRITER_DATA", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-key")
    write_mixed(tmp_path / "train.jsonl", range(8))
    write_mixed(tmp_path / "validation.jsonl", range(8, 12))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_is_valid_from_any_folder_and_runs_as_it_is_written(path: Path) -> None:
    report = validate(path, CLUSTER if path in ON_CLUSTER else [])
    assert not report.faults, report.render()
    if path not in ON_CLUSTER:
        return
    assert report.config is not None
    given = report.config.positions.given
    changed = [
        change.key
        for change in report.changes
        if given(change.key) and not any(fnmatch.fnmatch(change.key, key) for key in MAY_CHANGE)
    ]
    assert changed == [], report.render()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("path", TRAINED_THERE, ids=lambda path: path.stem)
def test_verl_takes_what_trinity_makes_of_it(path: Path) -> None:
    """Trinity's own builder and verl's own classes; the model is only read from a GPU on."""
    from trinity.trainer.verl.config import build_verl_config
    from verl.utils.config import omega_conf_to_dataclass

    report = validate(path, CLUSTER)
    config = report.config
    assert config is not None, report.render()
    built = build_verl_config(config)
    actor = omega_conf_to_dataclass(built.actor)
    adapter = config.model.lora_configs
    assert built.model.lora_rank == (adapter[0].lora_rank if adapter else 0)
    assert built.model.override_config.attn_implementation == "sdpa"
    assert not built.model.use_remove_padding
    in_bf16 = "model_dtype: bfloat16" in path.read_text()
    assert actor.engine.model_dtype == ("bfloat16" if in_bf16 else "fp32")
    assert actor.ppo_max_token_len_per_gpu >= config.model.max_model_len
    if adapter:
        assert config.synchronizer.sync_method.value == "checkpoint"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "given",
    [
        "{actor_rollout_ref: {model: {override_config: {attn_implementation: eager}}}}",
    ],
)
def test_attention_is_set_in_the_layout_that_is_used(given: str) -> None:
    from trinity.trainer.verl.config import build_verl_config

    overrides = [*CLUSTER, f"trainer.trainer_config={given}"]
    config = validate(ROOT / "configs" / "two_nodes.yaml", overrides).config
    assert config is not None
    attention = build_verl_config(config).model.override_config.attn_implementation
    assert attention == ("eager" if "eager" in given else "sdpa")


def test_every_key_that_the_page_on_training_names_exists() -> None:
    table = re.findall(r"^\| (?:`|weights).*", PAGE.partition("## Mathematics")[0], re.M)
    assert len(table) == 42
    known = index(AflowConfig)
    for line in table:
        key = ""
        for code in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[2]):
            above, key = key, re.sub(r"\[\d*\]", "[]", code.partition(":")[0].strip())
            if key.startswith("."):  # goes on with the path of the key before it
                key = above.rpartition(".")[0] + key
            path = re.sub(r"\.(trainer_config|extra_engine_args)\..*", r".\1", key)  # free within
            assert path.replace("models.executor", "models") in known, key
