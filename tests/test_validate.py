"""Preparing and validating: refusals with their cure, what is filled in, no traces left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_project import write_rows
from tiny import NO_WEIGHTS

import aflow_tune.engines.trinity  # noqa: F401  (the stand-in for vLLM)
from aflow_tune.config.changes import fingerprint_of, save_resolved
from aflow_tune.config.engine import choose_engine
from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import prepare
from aflow_tune.config.tasksets import ROWS_READER, materialise_tasksets
from aflow_tune.config.validate import ValidationReport, validate
from aflow_tune.engines.trinity.training.run_state import changed_keys
from aflow_tune.errors import BadInput, Fault
from aflow_tune.runs.folder import new_state

WORKFLOW = '''\
"""A workflow of two calls."""

from typing import Dict

from aflow_tune import TrinityChatModel


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
        rows = [{"question": f"What is {n}?", "answer": str(n)} for n in numbers]
        write_rows(tmp_path / f"{name}.jsonl", rows)
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
    (taskset,) = config.buffer.explorer_input.tasksets
    adapter = "aflow_tune.engines.trinity.rollout.adapter.WorkflowAdapter"
    assert taskset.default_workflow_type == adapter
    assert (taskset.name, taskset.repeat_times, taskset.is_eval) == ("train", 4, False)
    assert config.algorithm.sample_strategy.endswith("WholeStepSampleStrategy")
    assert config.data_processor.experience_pipeline.operators[0].name.endswith("RunFilter")
    assert config.trainer.save_interval == 2  # a tenth of 20 steps
    assert config.explorer.eval_interval == 20  # Trinity's 100 would never be reached
    batch = changes["buffer.train_batch_size"]
    assert (batch.before, batch.after, batch.why) == (0, 8, "batch_size x repeat_times")


def test_the_resolved_file_is_a_fixed_point(project: Path) -> None:
    config = load(project, "explorer.max_timeout=100", "deterministic=true")
    changes = prepare(config)
    assert (config.rollout.run_timeout, config.explorer.max_timeout) == (100.0, 160)
    assert config.local.dtype == "fp32"
    assert prepare(config) == changes
    save_resolved(config, changes, project / "resolved.yaml")
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


REFUSED = """
    algorithm.repeat_times=0 algorithm.algorithm_type=mix algorithm.algorithm_type=jsd
    algorithm.advantage_fn=grpoo algorithm.loss_agg_mode=mean
    algorithm.kl_loss_fn_args.clip_range=0.2 algorithm.entropy_loss_fn_args.kl_coef=0.2
    algorithm.optimizer.lr=0 algorithm.optimizer.lr=-1e-5 algorithm.optimizer.betas=[0.9]
    algorithm.optimizer.optimizer_type=sgd buffer.batch_size=13 explorer.eval_interval=0
    explorer.over_rollout.ratio=0.2 explorer.rollout_model.enable_history=false
    explorer.rollout_model.enable_openai_api=false synchronizer.sync_interval=0
    model.max_response_tokens=256 model.max_response_tokens=0 model.max_prompt_tokens=1
    model.temperature=0 model.top_p=0.9 model.top_k=20 model.repetition_penalty=1.1
    mode=trian rollout.max_failed_fraction=1.5
"""


def test_settings_that_cannot_train(project: Path) -> None:
    for override in REFUSED.split():
        ((where, fault),) = refused(project, override).items()
        assert where == override
        assert all((fault.expected, fault.found, fault.cure)), override


def test_train_batch_size_that_calls_can_fill(project: Path) -> None:
    async def one_call(task: dict, model: Any) -> float:
        await model([task["question"]])
        return 1.0

    prepare(load(project, "buffer.train_batch_size=8"), workflow=one_call)
    with pytest.raises(BadInput, match="at most 8"):
        prepare(load(project, "buffer.train_batch_size=9"), workflow=one_call)
    prepare(load(project, "buffer.train_batch_size=9"))


def test_one_temperature_for_sampling_and_training(project: Path) -> None:
    key = "buffer.explorer_input.taskset.rollout_args.temperature"
    config = load(project, f"{key}=0.7")
    prepare(config)
    assert config.model.temperature == 0.7
    assert list(refused(project, f"{key}=0.7", "model.temperature=1.0")) == [f"{key}=0.7"]


def test_files_become_folders_that_trinity_reads(project: Path) -> None:
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
    data = project / "data"  # of a folder the part that is asked for
    data.mkdir()
    (project / "train.jsonl").rename(data / "train.jsonl")
    key = "buffer.explorer_input.taskset"
    config = load(project, f"{key}.path={data}", f"{key}.split=train[:5]")
    prepare(config)
    materialise_tasksets(config)
    (taskset,) = config.buffer.explorer_input.tasksets
    assert len(TaskFileReader(taskset.to_storage_config())) == 5
    (project / "held_out.jsonl").rename(data / "test-0.jsonl")
    held_out = "buffer.explorer_input.eval_tasksets.0"
    paths = (f"{key}.path={data}", f"{held_out}.path={data}")
    assert prepare(load(project, *paths, f"{held_out}.split=test"))
    assert list(refused(project, *paths, f"{held_out}.split=x")) == [f"{held_out}.split=x"]


def test_a_sound_configuration_is_valid_and_leaves_no_trace(project: Path) -> None:
    before = sorted(project.rglob("*"))
    report = validate(project / "config.yaml")
    assert report.faults == []
    assert "valid; nothing was started" in report.render()
    assert "engine: local (no CUDA device" in report.render()
    after = [path for path in sorted(project.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before


# --- engine: trinity -------------------------------------------------------------------------

CONFIGS = Path(__file__).parents[1] / "configs"
GRAPH = "graph_qwen7b"
SAMPLER = "explorer.rollout_model.extra_engine_args"


def check(recipe: str, *overrides: str) -> ValidationReport:
    address = "cluster.ray_address=10.0.0.1:6379"
    return validate(CONFIGS / f"{recipe}.yaml", [address, *overrides])


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (["trainer.trainer_config.actor.fsdp_config.load_in_8bit=true"], "load_in_8bit"),
        (["trainer.trainer_config.actor.fsdp_config.qat={enable: true}"], ""),
        ([f"{SAMPLER}={{quantization: fp8}}"], ""),  # beside an adapter
        ([f"{SAMPLER}={{quantization: fp8}}", "model.lora_configs=null"], "fp8"),
        ([f"{SAMPLER}={{quantization: fp8}}", "engine=local"], "fp8"),
        (["cluster.gpu_per_node=1"], "one GPU"),
    ],
)
def test_what_trinitys_engines_cannot_do(asked: list[str], found: str) -> None:
    faults = check("quickstart" if "engine=local" in asked else GRAPH, *asked).faults
    assert len(faults) == bool(found)
    assert all(found in fault.found for fault in faults)


def test_a_quantised_model_can_be_served_and_not_trained(project: Path) -> None:
    folder = project / "model"
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    model = f"model.model_path={folder}"
    (fault,) = check(GRAPH, model).faults
    assert "awq" in fault.found
    assert not check("serve", model).faults


def test_what_the_local_engine_does_not_read_is_told(project: Path) -> None:
    given = ("trainer.ulysses_sequence_parallel_size=1", "cluster.gpu_per_node=1", "seed=1")
    config = load(project, *given)
    prepare(config)
    (told,) = [text for text in config.warnings if "not read" in text]
    assert "trainer.ulysses_sequence_parallel_size" in told
    assert "cluster.gpu_per_node" in told
    assert "seed" not in told


ON_TRINITY = ("engine=trinity", "cluster.ray_address=10.0.0.1:6379")


@pytest.mark.parametrize(
    ("setting", "more"),
    [
        ("buffer.train_batch_size=24", ()),
        ("algorithm.optimizer.lr_warmup_steps=50", ()),
        ("checkpoints.keep_best=2", ("trainer.save_interval=3", "explorer.eval_interval=2")),
        ("checkpoints.keep_best=2", ON_TRINITY),
        ("quick_eval=2", ON_TRINITY),
    ],
)
def test_a_setting_without_its_effect_is_told(
    project: Path, setting: str, more: tuple[str, ...]
) -> None:
    looping = "    while not first:\n        first = await model([])\n    second ="
    (project / "flow.py").write_text(WORKFLOW.replace("    second =", looping))
    report = validate(project / "config.yaml", ["buffer.total_steps=6", setting, *more])
    assert not report.faults
    assert [text for text in report.warnings if setting.partition("=")[0] in text]
