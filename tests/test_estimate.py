"""`aflow-tune estimate`: a tiny project here, data sets and chains, a 7B model for absent GPUs."""

from __future__ import annotations

import json

import pytest
import yaml
from data_project import pair
from project import run_dir, write_project
from test_estimate_memory import QWEN_7B
from tiny import write_tiny_model

from aflow_tune.cli import main
from aflow_tune.estimate.estimating import memory_here
from aflow_tune.report.metrics import append_metrics

GIB = 2**30
SEVEN = 7_615_616_512
"""Parameters of Qwen2.5-7B."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A rehearsal is not given up because the machine is busy."""
    monkeypatch.setattr("aflow_tune.estimate.rehearsal.SECONDS", 300.0)


@pytest.fixture
def project(tmp_path, tiny):
    return write_project(tmp_path, tiny)


def changed(path, change):
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


@pytest.fixture
def seven(tmp_path, project):
    """A GPU configuration of Qwen2.5-7B: its config.json is all there is of the model."""
    model = tmp_path / "qwen"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(QWEN_7B | {"architectures": ["Qwen2ForCausalLM"]})
    )
    lengths = {"max_prompt_tokens": 3072, "max_response_tokens": 1024, "max_model_len": 4096}

    def change(content):
        content["engine"] = "trinity"
        content["explorer"] = {"rollout_model": {"engine_num": 1, "tensor_parallel_size": 1}}
        content["synchronizer"] = {"sync_method": "checkpoint"}
        content["model"] |= {"model_path": str(model), **lengths}

    changed(project, change)
    return project


def run(capsys, *arguments, code=0):
    assert main(["estimate", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def counted(capsys, *arguments):
    found = run(capsys, *arguments)["runs"][0]["quantities"]
    return {name: number["value"] for name, number in found.items()}


def parts(found, role=0, stage=0):
    needs = found["runs"][stage]["needs"]
    return {part["name"]: part["bytes"] for part in needs[role]["parts"]}


# --- lengths, time and money --------------------------------------------------------------


def test_a_local_run_is_rehearsed_and_counted(capsys, project):
    found = run(capsys, project, "inline=true", "--memory", "16GB")
    assert found["fits"] is True
    step = found["runs"][0]["quantities"]
    # 2 tasks x 4 runs x 2 calls, by the rehearsal of the workflow
    assert (step["calls of a run"]["value"], step["calls"]["value"]) == (2, 16)
    assert "rehearsal" in step["calls of a run"]["how"]
    # One token a byte: '<|im_start|>user\n' + 'What is n?' + '<|im_end|>\n<|im_start|>assistant\n'
    first = 1 + len("user\n") + len("What is 5?") + 1 + 1 + 1 + len("assistant\n")
    assert first <= step["tokens of a prompt"]["value"] <= first + 10
    response = step["tokens of a response"]
    assert (response["value"], response["known"]) == (8.0, "upper bound")
    assert (step["seconds"]["value"], step["usd for GPUs"]["value"]) == (None, 0)
    assert not run_dir(project.parent).exists()


def test_what_is_given_wins_and_makes_time_known(capsys, project):
    given = ("--calls", 3, "--prompt-tokens", 100, "--response-tokens", 5)
    speeds = ("--tokens-per-second", 60, "--train-tokens-per-second", 1000)
    step = counted(capsys, project, "--inline", *given, *speeds)
    assert (step["calls"], step["response tokens"]) == (24, 120)
    assert step["train tokens"] == 24 * 105
    assert step["seconds"] == pytest.approx(120 / 60 + 24 * 105 / 1000)


def test_an_earlier_run_of_the_folder_is_read_and_scaled_by_tokens(capsys, project):
    folder = run_dir(project.parent)
    folder.mkdir(parents=True)
    explorer = {"rollout/calls/mean": 2.0, "explorer/time/wait_explore_step": 4.0}
    append_metrics(folder, "explorer", 1, explorer)
    trainer = {"prompt_length/mean": 40.0, "response_length/mean": 6.0}
    trainer |= {"time/step": 2.0, "perf/train_tokens": 736.0}
    append_metrics(folder, "trainer", 1, trainer)
    arguments = (project, "--inline", "--no-rehearsal")
    same = counted(capsys, *arguments)
    assert same["train tokens"] == 2 * 4 * 2 * (40 + 6) == 736
    assert same["seconds"] == 4 + 2
    assert counted(capsys, *arguments, "buffer.batch_size=4")["seconds"] == 2 * (4 + 2)


# --- memory of the local engines ----------------------------------------------------------


def test_what_does_not_fit_says_what_to_change(capsys, project):
    arguments = (project, "--no-rehearsal", "local.micro_batch_tokens=4096", "buffer.batch_size=12")
    whole = run(capsys, *arguments, "--memory", "64GB")["peak_bytes"]["memory"]
    inline = run(capsys, *arguments, "--inline")["peak_bytes"]["memory"]
    assert whole - inline == pytest.approx(2.55e9, rel=0.01)  # Ray's processes
    memory = f"{(whole - 2e9) / GIB:.3f}GB"
    found = run(capsys, *arguments, "--memory", memory, code=1)
    (change,) = [c for c in found["runs"][0]["changes"] if c["settings"] == {"inline": True}]
    assert change["bytes"] == pytest.approx(inline)
    assert main(["estimate", *map(str, arguments), "--memory", memory]) == 1
    text = capsys.readouterr().out
    assert "inline=true" in text
    assert text.rstrip().endswith("does not fit")


def test_an_auxiliary_model_shares_mapped_weights_and_is_not_updated(capsys, project, tiny):
    alone = parts(run(capsys, project, "--inline", "--no-rehearsal"))
    assert "trainer weights" not in alone
    judge = {"name": "judge", "model_path": str(tiny)}
    changed(project, lambda content: content["explorer"].update(auxiliary_models=[judge]))
    found = parts(run(capsys, project, "--inline", "--no-rehearsal"))
    # Weights of the same file are mapped once: there is no 'judge weights'.
    names = ("packed weights", "keys and values", "forward pass", "stored prefixes")
    assert found.keys() - alone.keys() == {f"judge {name}" for name in names}
    # Every linear layer and the head in fp32; the tuned model has its layers twice at an update.
    layers, head = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) * 4, 259 * 64 * 4
    assert found["judge packed weights"] == layers + head
    assert found["sampler packed weights"] == 2 * layers + head


def test_every_stage_of_a_chain_is_estimated(capsys, tmp_path, project):
    (tmp_path / "rows.jsonl").write_text(json.dumps(pair("What is 1?", "One.")) + "\n")
    rows = {"storage_type": "file", "path": str(tmp_path / "rows.jsonl")}
    rows["format"] = {"prompt_type": "messages", "messages_key": "messages"}
    buffer = {"train_batch_size": 1, "total_steps": 1, "explorer_input": {"eval_tasksets": []}}
    buffer["trainer_input"] = {"experience_buffer": rows}
    sft = {"stage_name": "sft", "mode": "train", "algorithm": {"algorithm_type": "sft"}}
    stages = [sft | {"buffer": buffer}, {"stage_name": "grpo", "mode": "both"}]
    changed(project, lambda content: content.update(stages=stages))
    found = run(capsys, project, "--inline", "--no-rehearsal", "--memory", "64GB")
    assert [stage["stage"] for stage in found["runs"]] == ["sft", "grpo"]
    assert "sampler weights" not in parts(found)
    assert {"sampler weights", "activations"} <= parts(found, stage=1).keys()
    totals = [stage["needs"][0]["bytes"] for stage in found["runs"]]
    assert found["peak_bytes"]["memory"] == max(totals)


# --- GPUs ---------------------------------------------------------------------------------


def test_seven_billion_on_two_gpus(capsys, seven):
    known = ("--calls", 1, "--tokens-per-second", 1000, "--train-tokens-per-second", 2000)
    found = run(capsys, seven, "--gpus", 2, "--gpu-memory", "80GB", "--usd-per-gpu-hour", 3, *known)
    assert found["fits"] is True
    trainer, host, rollout = found["runs"][0]["needs"]
    assert (trainer["role"], host["place"], rollout["role"]) == ("trainer", "memory", "rollout")
    # fp32 base, and an adapter of rank 4 in bf16: 28 layers x 4 x (in + out of every linear layer)
    adapter = 28 * 4 * (2 * 7168 + 2 * 4096 + 3 * (3584 + 18944))
    assert parts(found)["policy weights"] == 4 * SEVEN + 2 * adapter
    assert parts(found)["policy optimizer"] == 4 * adapter
    assert parts(found, 2)["weights"] == 2 * SEVEN
    # all weights: 16 bytes a parameter over the trainer's GPUs; offloaded they are in its memory
    four = run(capsys, seven, "model.lora_configs=null", "--gpus", 5, "--no-rehearsal")
    states = {name: size for name, size in parts(four).items() if name.startswith("policy")}
    assert sum(states.values()) == 16 * SEVEN / 4
    assert parts(four)["logits and backward buffers"] == 10 * 8192 * 152064  # Trinity's coefficient
    offload = ("trainer.offload_policy=true", "trainer.trainer_strategy=fsdp2")
    four = run(capsys, seven, "model.lora_configs=null", "--gpus", 5, "--no-rehearsal", *offload)
    assert parts(four, 1)["offloaded states"] == 16 * SEVEN
    # PPO's critic is a second model without an adapter
    ppo = run(capsys, seven, "algorithm.algorithm_type=ppo", "--gpus", 2, "--no-rehearsal")
    assert parts(ppo)["policy optimizer"] == 4 * adapter
    critic = {name: size for name, size in parts(ppo).items() if name.startswith("critic")}
    assert sum(critic.values()) == 16 * SEVEN
    step = found["runs"][0]["quantities"]
    seconds = 8 * 1024 / 1000 + 8 * 4096 / 2000
    assert step["usd"]["value"] == pytest.approx(2 * 3 * seconds / 3600)
    assert run(capsys, seven, "--gpus", 2, "--no-rehearsal")["fits"] is None
    one = run(capsys, seven, "--gpus", 1, "--no-rehearsal")["runs"][0]["needs"][0]
    assert one["role"] == "rollout and trainer, colocated"


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["trainer.trainer_strategy=megatron", "--gpus=2"], "trainer.trainer_strategy"),
        (["explorer.rollout_model.engine_type=sglang", "--gpus=2"], "rollout_model.engine_type"),
        (["model.model_path=Nobody/Nothing-7B", "--gpus=2"], "model.model_path"),
        (["cluster.node_num=1", "cluster.gpu_per_node=1"], "mode: colocate"),
    ],
)
def test_what_is_not_counted_is_refused_with_its_place(capsys, seven, overrides, where):
    assert main(["estimate", str(seven), *overrides, "--no-rehearsal"]) == 2
    assert where in capsys.readouterr().err


def test_memory_that_only_holds_files_is_free(tmp_path):
    assert memory_here(tmp_path / "nothing") > 1_000_000
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 250000\ninactive_file 200000\n")
    # Of 600,000 bytes 200,000 can be given up.
    assert memory_here(tmp_path) == 1_000_000 - 400_000
