"""`aflow-tune estimate` on real configurations: a tiny one here, a 7B one for GPUs that are not."""

from __future__ import annotations

import json

import pytest
import yaml
from project import run_dir, write_project
from test_estimate_shapes import QWEN_7B
from tiny import write_tiny_model

from aflow_tune.cli import main
from aflow_tune.report.metrics import append_metrics

GIB = 2**30


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


@pytest.fixture
def seven(tmp_path, project):
    """A GPU configuration of Qwen2.5-7B: its config.json is all there is of the model."""
    model = tmp_path / "qwen"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps(QWEN_7B | {"architectures": ["Qwen2ForCausalLM"]})
    )
    content = yaml.safe_load(project.read_text())
    content |= {
        "engine": "trinity",
        "explorer": {"rollout_model": {"engine_num": 1, "tensor_parallel_size": 1}},
    }
    content["model"] |= {
        "model_path": str(model),
        "max_prompt_tokens": 3072,
        "max_response_tokens": 1024,
        "max_model_len": 4096,
    }
    content["synchronizer"] = {"sync_method": "checkpoint"}
    path = tmp_path / "seven.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(capsys, *arguments, code=0):
    assert main(["estimate", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def parts(found, role=0):
    return {part["name"]: part["bytes"] for part in found["runs"][0]["needs"][role]["parts"]}


def test_a_local_run_is_rehearsed_and_counted(capsys, project):
    found = run(capsys, project, "inline=true", "--memory", "16GB")
    assert found["fits"] is True
    counted = found["runs"][0]["quantities"]
    # 2 tasks x 4 runs x 2 calls, by the rehearsal of the workflow
    assert counted["calls of a run"]["value"] == 2
    assert counted["calls"]["value"] == 16
    assert "rehearsal of 8 runs" in counted["calls of a run"]["how"]
    assert counted["tokens of a response"] == {
        "value": 8.0,
        "known": "upper bound",
        "how": "the limit model.max_response_tokens",
    }
    assert counted["seconds"]["value"] is None
    assert "--measure" in counted["seconds"]["how"]
    assert counted["usd for GPUs"]["value"] == 0
    assert not run_dir(project.parent).exists()


def test_prompts_of_a_rehearsal_are_the_real_ones(capsys, project):
    counted = run(capsys, project, "inline=true")["runs"][0]["quantities"]
    # One token a byte: '<|im_start|>user\n' + 'What is n?' + '<|im_end|>\n<|im_start|>assistant\n'
    first = 1 + len("user\n") + len("What is 5?") + 1 + 1 + 1 + len("assistant\n")
    assert first <= counted["tokens of a prompt"]["value"] <= first + 10


def test_without_a_rehearsal_limits_are_bounds(capsys, project):
    found = run(capsys, project, "inline=true", "--no-rehearsal")["runs"][0]
    assert found["quantities"]["tokens of a prompt"]["known"] == "upper bound"
    assert found["quantities"]["tokens of a prompt"]["value"] == 200
    assert found["quantities"]["calls of a run"]["value"] == 2  # seen in the source


def test_answers_that_end_early_leave_room_for_another_task(capsys, project):
    known = ("--prompt-tokens", 20, "--calls", 1, "model.max_response_tokens=100")
    known += ("model.max_model_len=300",)
    for limit, tokens in (
        (1000, 2 * (20 + 4 * 99)),  # both tasks; a response's last token is not computed
        (700, 2 * (20 + 4 * 74)),  # with answers of 75 tokens both, with longer ones one
        (500, 2 * (20 + 4 * 49)),
        (430, 20 + 4 * 99),  # never both
    ):
        bound = f"local.micro_batch_tokens={limit}"
        found = run(capsys, project, "inline=true", *known, bound)["runs"][0]
        (how,) = (p["note"] for p in found["needs"][0]["parts"] if p["name"] == "activations")
        assert how == f"{tokens} tokens at once"


def test_ray_adds_its_processes(capsys, project):
    split = run(capsys, project)["peak_bytes"]["memory"]
    inline = run(capsys, project, "--inline")["peak_bytes"]["memory"]
    assert split - inline == pytest.approx(2.55e9, rel=0.01)


def test_what_is_given_wins_and_makes_time_and_money_known(capsys, project):
    counted = run(
        capsys, project, "--inline", "--calls", 3, "--prompt-tokens", 100, "--response-tokens", 5,
        "--tokens-per-second", 60, "--train-tokens-per-second", 1000,
    )["runs"][0]["quantities"]  # fmt: skip
    assert counted["calls"]["value"] == 24
    assert counted["response tokens"]["value"] == 120
    assert counted["train tokens"]["value"] == 24 * 105
    assert counted["seconds"]["value"] == pytest.approx(120 / 60 + 24 * 105 / 1000)
    assert counted["seconds"]["known"] == "given"


def test_an_earlier_run_of_the_folder_is_read(capsys, project):
    folder = run_dir(project.parent)
    folder.mkdir(parents=True)
    explorer = {"rollout/calls/mean": 2.0, "rollout/tokens_per_second": 50.0}
    explorer["explorer/time/wait_explore_step"] = 4.0
    append_metrics(folder, "explorer", 1, explorer)
    trainer = {"prompt_length/mean": 40.0, "prompt_length/max": 44.0, "response_length/mean": 6.0}
    trainer |= {"response_length/max": 8.0, "time/step": 2.0, "perf/train_tokens": 700.0}
    append_metrics(folder, "trainer", 1, trainer)
    counted = run(capsys, project, "--inline", "--no-rehearsal")["runs"][0]["quantities"]
    assert counted["tokens of a prompt"]["value"] == 40
    assert counted["seconds"] == {
        "value": 6.0,
        "known": "measured",
        "how": f"metrics of {folder}",
    }


def test_a_measured_step_of_other_settings_lends_its_speeds(capsys, project):
    folder = run_dir(project.parent)
    folder.mkdir(parents=True)
    explorer = {"rollout/calls/mean": 2.0, "rollout/tokens_per_second": 50.0}
    explorer["explorer/time/wait_explore_step"] = 4.0
    append_metrics(folder, "explorer", 1, explorer)
    trainer = {"prompt_length/mean": 40.0, "response_length/mean": 6.0}
    trainer |= {"time/step": 2.0, "perf/train_tokens": 736.0}
    append_metrics(folder, "trainer", 1, trainer)
    arguments = (project, "--inline", "--no-rehearsal")
    same = run(capsys, *arguments)["runs"][0]["quantities"]
    assert same["train tokens"]["value"] == 2 * 4 * 2 * (40 + 6) == 736
    assert same["seconds"]["value"] == 4 + 2
    twice = run(capsys, *arguments, "buffer.batch_size=4")["runs"][0]["quantities"]
    # 192 new tokens at 50 a second, 1,472 tokens at 736 / 2 a second.
    assert twice["seconds"]["value"] == pytest.approx(192 / 50 + 1472 / 368)
    assert twice["seconds"]["known"] == "measured"


def test_what_does_not_fit_says_what_to_change(capsys, project):
    arguments = (project, "--no-rehearsal", "local.micro_batch_tokens=4096", "buffer.batch_size=12")
    whole = run(capsys, *arguments, "--memory", "64GB")["peak_bytes"]["memory"]
    found = run(capsys, *arguments, "--memory", f"{(whole - 2e9) / GIB:.3f}GB", code=1)
    (change,) = [c for c in found["runs"][0]["changes"] if c["settings"] == {"inline": True}]
    assert change["saved_bytes"] == pytest.approx(2.55e9, rel=0.01)
    assert change["bytes"] == pytest.approx(whole - change["saved_bytes"])


def test_the_text_names_the_parts_and_the_cure(capsys, project):
    assert main(["estimate", str(project), "--no-rehearsal", "--memory", "3GB"]) == 1
    text = capsys.readouterr().out
    assert "sampler packed weights" in text
    assert "inline=true" in text
    assert text.rstrip().endswith("verdict: does not fit")


def test_seven_billion_on_two_gpus(capsys, seven):
    found = run(capsys, seven, "--gpus", 2, "--gpu-memory", "80GB", "--usd-per-gpu-hour", 3,
                "--calls", 1, "--tokens-per-second", 1000, "--train-tokens-per-second", 2000,
                "--no-rehearsal")  # fmt: skip
    assert found["fits"] is True
    trainer, host, rollout = found["runs"][0]["needs"]
    assert (trainer["role"], host["place"], rollout["role"]) == ("trainer", "memory", "rollout")
    # fp32 base, and an adapter of rank 4 in bf16: 28 layers x 4 x (in + out of every linear layer)
    adapter = 28 * 4 * (2 * 7168 + 2 * 4096 + 3 * (3584 + 18944))
    assert parts(found)["policy weights"] == 4 * 7_615_616_512 + 2 * adapter
    assert parts(found)["policy optimizer"] == 4 * adapter
    assert parts(found, 2)["weights"] == 2 * 7_615_616_512
    counted = found["runs"][0]["quantities"]
    seconds = 8 * 1024 / 1000 + 8 * 4096 / 2000
    assert counted["seconds"]["value"] == pytest.approx(seconds)
    assert counted["usd"]["value"] == pytest.approx(2 * 3 * seconds / 3600)


def test_full_weights_do_not_fit_and_an_adapter_or_offloading_does(capsys, seven):
    found = run(capsys, seven, "model.lora_configs=null", "--gpus", 2, "--gpu-memory", "80GB",
                "--no-rehearsal", code=1)  # fmt: skip
    changed = [tuple(change["settings"]) for change in found["runs"][0]["changes"]]
    assert ("trainer.offload_policy",) in changed
    assert ("model.lora_configs",) in changed


def test_a_change_is_measured_where_it_was_too_full(capsys, seven):
    # The GPU has room for the full weights; the machine has none for the reference policy's.
    found = run(capsys, seven, "model.lora_configs=null", "--gpus", 2, "--gpu-memory", "200GB",
                "--memory", "50GB", "--no-rehearsal", code=1)  # fmt: skip
    weights = 4 * 7_615_616_512
    _, host, _ = found["runs"][0]["needs"]
    assert host["bytes"] == 4 * GIB + 2 * weights
    (change,) = found["runs"][0]["changes"]
    assert change["bytes"] == 4 * GIB + weights
    assert change["saved_bytes"] == weights


def test_more_gpus_divide_the_states(capsys, seven):
    full = (seven, "model.lora_configs=null", "--gpu-memory", "80GB", "--no-rehearsal")
    three = parts(run(capsys, *full, "--gpus", 3, code=1))
    nine = parts(run(capsys, *full, "--gpus", 9))
    assert three["policy optimizer"] == 4 * nine["policy optimizer"] == 4 * 7_615_616_512


def test_padding_is_computed_where_it_is_not_removed(capsys, seven):
    folder = run_dir(seven.parent)
    folder.mkdir(parents=True)
    lengths = {"prompt_length/mean": 300.0, "prompt_length/max": 600.0}
    lengths |= {"response_length/mean": 200.0, "response_length/max": 400.0}
    append_metrics(folder, "trainer", 1, lengths)
    arguments = (seven, "--gpus", 2, "--no-rehearsal", "trainer.max_token_len_per_gpu=4096")
    packed = run(capsys, *arguments)
    assert parts(packed)["logits and backward buffers"] == 10 * 4096 * 152064
    padded = run(capsys, *arguments, "trainer.use_remove_padding=false")
    # Sequences of 500 tokens on average, each padded to 1,000.
    assert parts(padded)["logits and backward buffers"] == 10 * 2 * 4096 * 152064
    (note,) = padded["runs"][0]["needs"][0]["notes"]
    assert "2.0 tokens computed for each that counts" in note
    assert not packed["runs"][0]["needs"][0]["notes"]


def test_padding_is_a_lower_bound_where_lengths_are_limits(capsys, seven):
    found = run(capsys, seven, "--gpus", 2, "--no-rehearsal", "trainer.use_remove_padding=false")[
        "runs"
    ][0]["needs"][0]
    assert "at least 1.0 tokens" in found["notes"][0]


def test_without_gpu_memory_the_verdict_is_open(capsys, seven):
    found = run(capsys, seven, "--gpus", 2, "--no-rehearsal")
    assert found["fits"] is None


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("trainer.trainer_strategy=megatron", "trainer.trainer_strategy"),
        ("explorer.rollout_model.engine_type=sglang", "explorer.rollout_model.engine_type"),
        ("model.model_path=Nobody/Nothing-7B", "model.model_path"),
    ],
)
def test_what_is_not_counted_is_refused_with_its_place(capsys, seven, override, where):
    assert main(["estimate", str(seven), override, "--gpus", "2", "--no-rehearsal"]) == 2
    assert where in capsys.readouterr().err


def test_one_gpu_for_two_roles_is_said_to_be_colocated(capsys, seven):
    (found,) = run(capsys, seven, "--gpus", 1, "--no-rehearsal")["runs"]
    assert found["needs"][0]["role"] == "rollout and trainer, colocated"
    assert any("mode: colocate" in note for note in found["notes"])


def test_a_colocated_run_is_rehearsed(capsys, project):
    (found,) = run(capsys, project, "engine=trinity", "--gpus", 1)["runs"]
    calls = found["quantities"]["calls of a run"]
    assert calls["value"] == 2
    assert "rehearsal" in calls["how"]


def test_one_gpu_in_the_file_is_refused_as_by_a_run(capsys, seven):
    cluster = ("cluster.node_num=1", "cluster.gpu_per_node=1")
    assert main(["estimate", str(seven), *cluster, "--no-rehearsal"]) == 2
    assert "mode: colocate" in capsys.readouterr().err


def test_rows_that_are_not_here_are_not_fetched_for_a_rehearsal(capsys, project):
    content = yaml.safe_load(project.read_text())
    tasks = content["buffer"]["explorer_input"]["taskset"]
    tasks |= {"path": "nobody/no-such-data-set", "split": "train"}
    project.write_text(yaml.safe_dump(content))
    (found,) = run(capsys, project, "--inline")["runs"]
    assert any("rows are not on this machine" in note for note in found["notes"])


@pytest.mark.parametrize("text", ["24 parsecs", "0GB", "-1GB", "", "24", "24B"])
def test_a_size_is_a_size(project, text):
    with pytest.raises(SystemExit):
        main(["estimate", str(project), f"--gpu-memory={text}"])


def test_a_number_without_a_unit_is_asked_back(capsys, project):
    with pytest.raises(SystemExit):
        main(["estimate", str(project), "--gpu-memory", "24"])
    assert "did you mean 24GB?" in capsys.readouterr().err
