"""Reading a configuration: keys, types, places, overrides, secrets."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.config.changes import differences, render_changes, save_resolved
from aflow_tune.config.load import apply_agentscope_args, load_config
from aflow_tune.errors import BadInput, Fault

# Keys of the files that AgentScope ships for its tuner (1.0.8 and 1.0.21).
AGENTSCOPE_REACT = """
project: AgentScope-ReAct
name: GSM8K-Qwen3-8B
checkpoint_root_dir: ${oc.env:TRINITY_CHECKPOINT_ROOT_DIR,./checkpoints}
algorithm: {algorithm_type: multi_step_grpo, repeat_times: 8}
model: {model_path: "${oc.env:TRINITY_MODEL_PATH,Qwen/Qwen3-8B}", max_model_len: 24576}
cluster: {node_num: 1, gpu_per_node: 8}
buffer:
  batch_size: 32
  explorer_input:
    taskset: {name: gsm8k, storage_type: file, path: openai/gsm8k, subset_name: main, split: train}
explorer: {rollout_model: {engine_num: 4, enable_history: true, dtype: bfloat16}}
synchronizer: {sync_style: dynamic_by_explorer, sync_method: 'nccl', sync_interval: 2}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def faults(tmp_path: Path, text: str, *overrides: str) -> dict[str, Fault]:
    """The faults by their place without the folder."""
    with pytest.raises(BadInput) as refused:
        load_config(write(tmp_path, text), overrides)
    return {fault.where.replace(f"{tmp_path}/", ""): fault for fault in refused.value.faults}


def test_agentscope_files_load_unchanged(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, AGENTSCOPE_REACT))
    assert config.buffer.explorer_input.taskset.path == "openai/gsm8k"
    assert config.synchronizer.sync_style.value == "explorer_driven"
    assert config.checkpoint_root_dir == "./checkpoints"
    assert (config.engine, config.inline, config.rollout.run_timeout) == ("auto", False, 300.0)


def test_environment_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_MODEL_PATH", "some/model")
    overrides = [
        "buffer.total_steps=20",
        "algorithm.optimizer.lr=1e-5",
        "buffer.explorer_input.eval_tasksets=[{name: a, path: b}]",
        "buffer.explorer_input.eval_tasksets.0.split=test",
        "group=${name}",
    ]
    config = load_config(write(tmp_path, AGENTSCOPE_REACT), overrides)
    assert config.model.model_path == "some/model"
    assert config.buffer.total_steps == 20
    assert config.algorithm.optimizer.lr == 1e-5
    assert config.buffer.explorer_input.eval_tasksets[0].split == "test"
    assert config.group == config.name == "GSM8K-Qwen3-8B"
    where = config.positions.where
    assert where("buffer.total_steps") == "command line: buffer.total_steps=20"
    assert where("buffer.batch_size") == f"{tmp_path}/config.yaml:9: buffer.batch_size"


def test_the_key_that_was_meant(tmp_path: Path) -> None:
    meant = {
        "temperature": "model.temperature",
        "enable_history": "explorer.rollout_model.enable_history",
        "algoritm": "algorithm",
    }
    found = faults(tmp_path, "".join(f"{name}: 1\n" for name in meant))
    for line, (name, key) in enumerate(meant.items(), 1):
        assert f"`{key}`" in found[f"config.yaml:{line}: {name}"].cure


def test_an_override_below_a_number_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "monitor: {monitor_args: {a: 1}}\n")
    with pytest.raises(BadInput) as error:
        load_config(path, ["monitor.monitor_args.a.b=2"])
    assert "monitor_args.a" in error.value.faults[0].where


def test_a_role_that_is_no_name_beside_an_interpolation(tmp_path: Path) -> None:
    assert faults(tmp_path, "name: x\ngroup: ${name}\nmodels: {1: {model: x}}\n")


@pytest.mark.parametrize(
    "text", ["models: {judge: {api_key: SK}}", "OPENAI_API_KEY: SK", "models: {judge: {token: SK}}"]
)
def test_a_key_that_stands_in_the_file_is_not_shown(tmp_path: Path, text: str) -> None:
    found = faults(tmp_path, text.replace("SK", "sk-0123456789"))
    assert list(found)
    assert "sk-0123456789" not in repr(found)


def test_agentscope_arguments_win_and_defaults_do_not() -> None:
    config = load_config(None, ["buffer.batch_size=4"])

    class Algorithm(SimpleNamespace):
        model_fields_set = frozenset({"group_size", "learning_rate"})

    apply_agentscope_args(
        config,
        train_dataset=SimpleNamespace(
            path="d", name="main", split="train", total_epochs=2, total_steps=None
        ),
        eval_dataset=SimpleNamespace(path="e", name=None, split="test"),
        model=SimpleNamespace(model_path="m", max_tokens=64, inference_engine_num=2),
        auxiliary_models={"judge": SimpleNamespace(model_path="j", max_model_len=256)},
        algorithm=Algorithm(
            algorithm_type="multi_step_grpo",
            learning_rate=3e-4,
            group_size=6,
            batch_size=32,
            eval_interval_steps=100,
        ),
        project_name="p",
    )
    taskset = config.buffer.explorer_input.taskset
    assert (taskset.path, taskset.subset_name, taskset.split) == ("d", "main", "train")
    assert config.buffer.explorer_input.eval_tasksets[0].split == "test"
    assert config.buffer.total_epochs == 2
    assert (config.model.model_path, config.model.max_response_tokens) == ("m", 64)
    assert config.explorer.auxiliary_models[0].name == "judge"
    assert (config.algorithm.repeat_times, config.algorithm.optimizer.lr) == (6, 3e-4)
    assert config.buffer.batch_size == 4  # 32 is only the default of AgentScope's class
    assert not config.positions.given("explorer.eval_interval")
    assert config.positions.where("algorithm.repeat_times").startswith("tune(algorithm=...)")
    assert config.project == "p"


def test_secrets_stay_out_of_table_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFLOW_TEST_KEY", "sk-from-env")
    config = load_config(
        write(
            tmp_path,
            """\
name: a
explorer:
  rollout_model: {api_key: sk-in-file}
  env_vars: {HF_TOKEN: hf-in-file, LEVEL: info}
  auxiliary_models: [{model_path: m, api_key: "${oc.env:AFLOW_TEST_KEY}"}]
buffer:
  trainer_input: {experience_buffer: {path: "postgresql://me:pw-in-file@host/db"}}
""",
        )
    )
    before = config.flatten()
    config.explorer.rollout_model.api_key = "sk-new"
    config.explorer.env_vars["X_API_KEY"] = "sk-other"
    changes = differences(before, config.flatten(), {})
    save_resolved(config, changes, tmp_path / "resolved.yaml")
    text = (tmp_path / "resolved.yaml").read_text() + render_changes(changes)
    assert not re.search(r"sk-|hf-in|pw-in", text)
    assert "${oc.env:AFLOW_TEST_KEY}" in text
    assert "info" in text
    assert len(changes) == 2
    again = load_config(tmp_path / "resolved.yaml")
    assert again.explorer.auxiliary_models[0].api_key == "sk-from-env"
