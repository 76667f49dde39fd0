"""Preparing and validating: refusals with their cure, what is filled in, no traces left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_config import AGENTSCOPE_REACT
from tiny import NO_WEIGHTS

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.config.changes import fingerprint_of, render_changes, save_resolved
from aflow_tune.config.engine import choose_engine
from aflow_tune.config.load import AflowConfig, apply_agentscope_args, load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.tasksets import (
    ROWS_READER,
    materialise_tasksets,
    settle_paths,
    total_steps,
)
from aflow_tune.config.validate import validate
from aflow_tune.engines.trinity.training.run_state import changed_keys
from aflow_tune.errors import BadInput, Fault
from aflow_tune.runs.folder import new_state

WORKFLOW = '''\
"""A workflow of two calls."""

from typing import Dict

from agentscope.model import TrinityChatModel


async def two_calls(task: Dict, model: TrinityChatModel) -> float:
    first = await model([{"role": "user", "content": task["question"]}])
    second = await model([{"role": "user", "content": str(first.content)}])
    return float(task["answer"] in str(second.content))
'''
CONFIG = """\
project: tests
name: tiny
checkpoint_root_dir: {root}/runs
workflow: {root}/flow.py:two_calls
algorithm: {{algorithm_type: multi_step_grpo, repeat_times: 4, optimizer: {{lr: 0.001}}}}
model:
  model_path: {model}
  max_response_tokens: 16
  max_model_len: 256
  lora_configs: [{{lora_rank: 4, lora_alpha: 8}}]
buffer:
  batch_size: 2
  total_steps: 20
  explorer_input:
    taskset: {{path: {root}/train.jsonl}}
    eval_tasksets: [{{path: {root}/held_out.jsonl}}]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with workflow, data, a model's small files, and a sound configuration."""
    (tmp_path / "flow.py").write_text(WORKFLOW)
    for name, numbers in (("train", range(12)), ("held_out", range(100, 104))):
        rows = [json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 1024}')
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (model / "model.safetensors").write_bytes(NO_WEIGHTS)
    (tmp_path / "config.yaml").write_text(CONFIG.format(root=tmp_path, model=model))
    return tmp_path


def load(project: Path, *overrides: str) -> AflowConfig:
    return load_config(project / "config.yaml", overrides)


def refused(project: Path, *overrides: str) -> dict[str, Fault]:
    """The faults of a configuration that loads, by key path or override."""
    with pytest.raises(BadInput) as error:
        prepare(load(project, *overrides))
    prefixes = ("command line: ", f"{project}/config.yaml: ")
    return {
        fault.where.removeprefix(prefixes[0]).removeprefix(prefixes[1]): fault
        for fault in error.value.faults
    }


def test_what_is_filled_in_for_the_local_engine(project: Path) -> None:
    config = load(project)
    assert choose_engine(config)[0] == "local"
    changes = {change.key: change for change in prepare(config)}
    rollout = config.explorer.rollout_model
    assert rollout.enable_history
    assert rollout.enable_openai_api
    assert config.explorer.concurrent_mode == "asynchronous"
    assert config.synchronizer.sync_method.value == "memory"
    assert config.synchronizer.sync_style.value == "fixed"
    (taskset,) = config.buffer.explorer_input.tasksets
    adapter = "aflow_tune.engines.trinity.rollout.adapter.WorkflowAdapter"
    assert taskset.default_workflow_type == adapter
    assert config.buffer.explorer_input.eval_tasksets[0].default_workflow_type == adapter
    assert (taskset.name, taskset.repeat_times, taskset.is_eval) == ("train", 4, False)
    assert config.algorithm.sample_strategy.endswith("WholeStepSampleStrategy")
    assert config.data_processor.experience_pipeline.operators[0].name.endswith("RunFilter")
    assert not config.data_processor.experience_pipeline.save_input
    assert config.monitor.monitor_type == "aflow_tune.engines.trinity.training.monitor.RunMonitor"
    assert config.trainer.save_interval == 2  # a tenth of 20 steps
    assert config.explorer.eval_interval == 20  # Trinity's 100 would never be reached
    assert config.model.lora_configs[0].path is None  # no adapter was written for verl
    assert rollout.gpu_per_engine == 0
    for key in ("engine", "explorer.rollout_model.enable_history", "synchronizer.sync_method"):
        assert changes[key].why, key
    batch = changes["buffer.train_batch_size"]
    assert (batch.before, batch.after) == (0, 8)
    assert not [key for key in changes if "namespace" in key or "cache_dir" in key]
    assert "model.max_prompt_tokens" in render_changes(list(changes.values()))


def test_preparing_twice_changes_nothing(project: Path) -> None:
    config = load(project)
    changes = prepare(config)
    flat = config.flatten()
    assert prepare(config) == changes
    assert config.flatten() == flat


def test_the_resolved_file_is_a_fixed_point(project: Path) -> None:
    config = load(project)
    save_resolved(config, prepare(config), project / "resolved.yaml")
    again = load_config(project / "resolved.yaml")
    assert prepare(again) == []
    assert again.flatten() == config.flatten()


def test_what_an_earlier_version_wrote_is_read_with_the_names_of_today(project: Path) -> None:
    config = load(project)
    prepare(config)
    materialise_tasksets(config)
    reader = config.buffer.explorer_input.tasksets[0]
    reader.storage_type = "aflow_tune.engines.trinity.settings.readers.RowsReader"
    save_resolved(config, [], project / "resolved.yaml")
    (again,) = load_config(project / "resolved.yaml").buffer.explorer_input.tasksets
    assert again.storage_type == ROWS_READER
    state = new_state(20, 0, fingerprint_of(config), None)
    reader.storage_type = ROWS_READER
    assert changed_keys(project, state, fingerprint_of(config)) == []
    reader.storage_type = "sql"
    assert len(changed_keys(project, state, fingerprint_of(config))) == 1


def test_agentscope_files_prepare(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(AGENTSCOPE_REACT)
    config = load_config(tmp_path / "config.yaml", [f"checkpoint_root_dir={tmp_path}/runs"])
    prepare(config, Purpose.CHECK)
    assert config.engine == "local"
    assert config.synchronizer.sync_interval == 1
    assert config.model.max_prompt_tokens == 24576 - 16384
    assert any("not on this machine" in warning for warning in config.warnings)


@pytest.mark.parametrize("name", ["enable_history", "enable_openai_api"])
def test_switches_are_set_when_left_out_and_refused_when_off(project: Path, name: str) -> None:
    key = f"explorer.rollout_model.{name}"
    (fault,) = refused(project, f"{key}=false").values()
    assert f"{name}: true" in fault.cure
    config = load(project, f"{key}=true")
    prepare(config)
    assert getattr(config.explorer.rollout_model, name)


@pytest.mark.parametrize(
    ("override", "cure"),
    [
        ("algorithm.repeat_times=0", "repeat_times: 8"),
        ("algorithm.algorithm_type=mix", "engine: trinity"),
        ("algorithm.algorithm_type=jsd", "engine: trinity"),
        ("algorithm.advantage_fn=grpoo", "advantage_fn: grpo"),
        ("algorithm.loss_agg_mode=mean", "loss_agg_mode:"),
        ("algorithm.kl_loss_fn_args.clip_range=0.2", "under `algorithm.policy_loss_fn_args`"),
        ("algorithm.entropy_loss_fn_args.kl_coef=0.2", "under `algorithm.kl_loss_fn_args`"),
        ("algorithm.optimizer.lr=0", "lr: 1e-5"),
        ("algorithm.optimizer.lr=-1e-5", "lr: 1e-5"),
        ("algorithm.optimizer.betas=[0.9]", "betas: [0.9, 0.999]"),
        ("algorithm.optimizer.optimizer_type=sgd", "optimizer_type: adam"),
        ("buffer.batch_size=13", "batch_size: 12"),
        ("explorer.eval_interval=0", "eval_interval: 10"),
        ("explorer.over_rollout.ratio=0.2", "ratio: 0.0"),
        ("synchronizer.sync_interval=0", "sync_interval: 1"),
        ("model.max_response_tokens=256", "max_response_tokens: 128"),
        ("model.max_response_tokens=0", "max_response_tokens: 512"),
        ("model.max_prompt_tokens=1", "raise max_model_len"),
        ("model.temperature=0", "temperature: 1.0"),
        ("model.top_p=0.9", "top_p: 1.0"),
        ("model.top_k=20", "top_k: -1"),
        ("model.repetition_penalty=1.1", "repetition_penalty: 1.0"),
        ("model.lora_configs=[{lora_rank: 0}]", "lora_rank: 16"),
        ("mode=trian", "mode: train"),
        ("rollout.max_failed_fraction=1.5", "max_failed_fraction: 1.0"),
    ],
)
def test_settings_that_cannot_train(project: Path, override: str, cure: str) -> None:
    found = refused(project, override)
    assert len(found) == 1, found
    ((where, fault),) = found.items()
    key = override.partition("=")[0]
    assert override in where or key in where or key.startswith("buffer.explorer_input.taskset")
    assert cure in fault.cure
    assert fault.expected
    assert fault.found


def test_group_of_one_is_allowed_without_a_baseline(project: Path) -> None:
    config = load(project, "algorithm.algorithm_type=raft", "algorithm.repeat_times=1")
    prepare(config)
    assert config.algorithm.policy_loss_fn == "sft"
    assert config.algorithm.advantage_fn == "reinforce"


def test_train_batch_size_that_calls_can_fill(project: Path) -> None:
    async def one_call(task: dict, model: Any) -> float:
        await model([task["question"]])
        return 1.0

    async def agent(task: dict, model: Any) -> float:
        return float(bool(model))

    fits = load(project, "buffer.train_batch_size=8")
    prepare(fits, workflow=one_call)
    with pytest.raises(BadInput, match="at most 8: 2 tasks x 4 runs x at most 1 calls"):
        prepare(load(project, "buffer.train_batch_size=9"), workflow=one_call)
    perhaps = load(project, "buffer.train_batch_size=9")
    prepare(perhaps, workflow=agent)
    assert any("2 calls on average" in warning for warning in perhaps.warnings)


def test_steps_come_from_rows_and_epochs(project: Path) -> None:
    overrides = ("buffer.total_steps=null", "buffer.total_epochs=3", "buffer.batch_size=5")
    assert total_steps(load(project, *overrides)) == 7  # 12 rows x 3 epochs / 5
    assert total_steps(load(project, *overrides, "trainer.total_steps=4")) == 4
    unknown = load(project, *overrides, "buffer.explorer_input.taskset.path=org/data")
    assert total_steps(unknown) is None


def test_one_temperature_for_sampling_and_training(project: Path) -> None:
    key = "buffer.explorer_input.taskset.rollout_args.temperature"
    config = load(project, f"{key}=0.7")
    prepare(config)
    assert config.model.temperature == 0.7
    found = refused(project, f"{key}=0.7", "model.temperature=1.0")
    assert list(found) == [f"{key}=0.7"]


def test_time_outs_are_ordered(project: Path) -> None:
    short = load(project, "explorer.max_timeout=100")
    prepare(short)
    assert (short.rollout.run_timeout, short.explorer.max_timeout) == (100.0, 160)
    long = load(project, "rollout.run_timeout=4000")
    prepare(long)
    assert long.explorer.max_timeout == 4060


def test_deterministic(project: Path) -> None:
    config = load(project, "deterministic=true")
    prepare(config)
    assert config.local.dtype == "fp32"
    found = refused(
        project,
        "deterministic=true",
        "local.dtype=bf16",
        "explorer.max_repeat_times_per_runner=2",
    )
    assert set(found) == {"local.dtype=bf16", "explorer.max_repeat_times_per_runner=2"}


def test_a_file_becomes_a_folder_that_trinity_reads(project: Path) -> None:
    from trinity.buffer.reader.file_reader import TaskFileReader

    config = load(project)
    prepare(config)
    materialise_tasksets(config)
    materialise_tasksets(config)
    (taskset,) = config.buffer.explorer_input.tasksets
    assert taskset.path == f"{project}/runs/tests/tiny/data/train/train"
    reader = TaskFileReader(taskset.to_storage_config())
    assert len(reader) == 12
    (task, _) = reader._read_sync(2)
    assert task.raw_task == {"question": "What is 0?", "answer": "0"}
    (held_out,) = config.buffer.explorer_input.eval_tasksets
    assert len(TaskFileReader(held_out.to_storage_config())) == 4


def test_a_folder_is_linked_like_a_file_with_the_part_that_is_asked_for(project: Path) -> None:
    from trinity.buffer.reader.file_reader import TaskFileReader

    data = project / "data"
    data.mkdir()
    (project / "train.jsonl").rename(data / "train.jsonl")
    key = "buffer.explorer_input.taskset"
    config = load(project, f"{key}.path={data}", f"{key}.split=train[:5]")
    prepare(config)
    materialise_tasksets(config)
    (taskset,) = config.buffer.explorer_input.tasksets
    assert taskset.path == f"{project}/runs/tests/tiny/data/train/train"
    assert taskset.split == "train[:5]"
    assert len(TaskFileReader(taskset.to_storage_config())) == 5


def test_a_model_in_a_folder_is_named_so_that_every_process_finds_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "weights").mkdir()
    config = load_config(None, ["model.model_path=weights"])
    settle_paths(config)
    assert config.model.model_path == f"{project}/weights"
    config = load_config(None, ["model.model_path=Qwen/Qwen2.5-7B"])
    settle_paths(config)
    assert config.model.model_path == "Qwen/Qwen2.5-7B"


def test_folders_by_split(project: Path) -> None:
    data = project / "data"
    data.mkdir()
    (project / "train.jsonl").rename(data / "my_train.jsonl")
    (project / "held_out.jsonl").rename(data / "test-0.jsonl")
    paths = (
        f"buffer.explorer_input.taskset.path={data}",
        f"buffer.explorer_input.eval_tasksets.0.path={data}",
    )
    split = "buffer.explorer_input.eval_tasksets.0.split"
    assert prepare(load(project, *paths, f"{split}=test"))
    found = refused(project, *paths, f"{split}=validation")
    assert list(found) == [f"{split}=validation"]
    assert "test, train" in found[f"{split}=validation"].found


def test_tune_arguments_without_a_file_prepare(project: Path, tmp_path: Path) -> None:
    from types import SimpleNamespace

    config = load_config(None, [f"checkpoint_root_dir={tmp_path}/runs", "buffer.batch_size=4"])
    apply_agentscope_args(
        config,
        train_dataset=SimpleNamespace(path=str(project / "train.jsonl"), name=None, split="train"),
        model=SimpleNamespace(
            model_path=str(project / "model"), max_model_len=256, max_tokens=32, temperature=1.0
        ),
    )
    prepare(config)
    assert config.algorithm.algorithm_type == "multi_step_grpo"
    assert config.algorithm.repeat_times == 8
    assert config.buffer.train_batch_size == 32


def test_a_sound_configuration_is_valid_and_leaves_no_trace(project: Path) -> None:
    before = sorted(project.rglob("*"))
    report = validate(project / "config.yaml")
    assert report.faults == []
    assert "valid; nothing was started" in report.render()
    assert "engine: local (no CUDA device" in report.render()
    after = [path for path in sorted(project.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before


def test_settings_functions_and_data_in_one_report(project: Path) -> None:
    (project / "flow.py").write_text(WORKFLOW.replace("async def", "def").replace("await ", ""))
    (project / "held_out.jsonl").write_text((project / "train.jsonl").read_text())
    report = validate(project / "config.yaml", ["algorithm.repeat_times=1"])
    text = report.render()
    assert len(report.faults) == 3, text
    assert f"{project}/flow.py:8" in text
    assert "12 of 12 items are in both" in text
    assert "algorithm.repeat_times: 8" in text
    assert report.path == f"{project}/config.yaml"


def test_fields_that_the_workflow_reads(project: Path) -> None:
    rows = (project / "train.jsonl").read_text().replace('"answer"', '"anwser"')
    (project / "train.jsonl").write_text(rows)
    report = validate(project / "config.yaml")
    (fault,) = report.faults
    assert fault.where == f"{project}/flow.py:11"
    assert fault.cure == "task['anwser']"


def test_functions_are_looked_for_beside_the_file(project: Path) -> None:
    assert validate(project / "config.yaml", ["workflow=flow.py:two_calls"]).faults == []
    report = validate(project / "config.yaml", ["workflow=flow.py:two_cals"])
    (fault,) = report.faults
    assert fault.where.startswith("command line: workflow=flow.py:two_cals")
    assert "two_calls" in fault.cure


@pytest.mark.parametrize(
    ("parameter", "refused"),
    [
        ("system_prompt: str", True),
        ("system_prompt: str | None", False),
        ("system_prompt: str = 'Be brief.'", False),
    ],
)
def test_a_system_prompt_that_the_function_needs_is_asked_for(
    project: Path, parameter: str, refused: bool
) -> None:
    flow = project / "flow.py"
    flow.write_text(WORKFLOW.replace("TrinityChatModel) ->", f"TrinityChatModel, {parameter}) ->"))
    faults = validate(project / "config.yaml").faults
    wanted = [fault for fault in faults if "rollout.system_prompt" in fault.where]
    assert len(wanted) == refused
    configured = validate(project / "config.yaml", ["rollout.system_prompt=Think."])
    assert configured.faults == []
