"""Learning off-policy: workflow GiGPO, truncated importance weights, batches in files."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from data_project import trainer_metrics
from project import run_dir, write_project
from trinity.algorithm import ADVANTAGE_FN, POLICY_LOSS_FN
from trinity.buffer import get_buffer_reader
from trinity.common.config import DataSelectorConfig, StorageConfig
from trinity.common.config_validator import AlgorithmConfigValidator
from trinity.common.experience import EID, Experience

from aflow_tune.config.load import load_config
from aflow_tune.config.names import BATCH_FILES, TRUNCATED_IMPORTANCE, WORKFLOW_GIGPO
from aflow_tune.config.prepare import ANCHOR_RATE, Purpose, prepare
from aflow_tune.engines.local.trainer import LocalTrainer, Schedule, TrainerSettings
from aflow_tune.engines.local.weights import LoraSpec
from aflow_tune.engines.trinity.rollout.operators import STATE_KEY
from aflow_tune.engines.trinity.training.algorithm import TrainStep
from aflow_tune.engines.trinity.training.off_policy import SEARCH_ANCHOR
from aflow_tune.engines.trinity.training.trainer import evened
from aflow_tune.errors import BadInput
from aflow_tune.tuning import run_config, validate_config

LN2 = math.log(2)


def step(task: str, run: int, reward: float, number: int = 0, **info: str) -> Experience:
    """A step of a run: a prompt of two tokens and an answer of two."""
    eid = EID(batch=1, task=task, run=run, step=number)
    tokens, logprobs = torch.tensor([1, 2, 3, 4]), torch.tensor([-1.0, -1.0])
    given = {"tokens": tokens, "prompt_length": 2, "logprobs": logprobs}
    return Experience(eid=eid, reward=reward, info=dict(info), **given)


def advantages(exps: list[Experience], **arguments: Any) -> list[float]:
    """By the function as a run makes it; each is the same on both tokens."""
    found, metrics = ADVANTAGE_FN.get(WORKFLOW_GIGPO)(**arguments).process(exps)
    assert found == exps
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(exp.advantages[0] == exp.advantages[1] for exp in exps)
    return [float(exp.advantages[0]) for exp in exps]


def test_siblings_are_compared_with_each_other() -> None:
    """Gains .3 .1 -.1 of one parent, each alone in its task: A_E is 0, A_S .2 0 -.2. A fourth row
    of another parent is a singleton in both."""
    parents = ["p", "p", "p", "q"]
    gains = [0.3, 0.1, -0.1, 0.7]
    siblings = [
        step(f"task {number}", 0, gain, **{SEARCH_ANCHOR: parent})
        for number, (parent, gain) in enumerate(zip(parents, gains, strict=True))
    ]
    assert advantages(siblings) == pytest.approx([0.2, 0.0, -0.2, 0.0])
    assert advantages(siblings, omega=0.5) == pytest.approx([0.1, 0.0, -0.1, 0.0])
    # The sample's standard deviation of .3 .1 -.1 is .2.
    assert advantages(siblings, fnorm="std") == pytest.approx([1, 0, -1, 0], abs=1e-4)


def test_both_comparisons_are_added() -> None:
    """Task a: rewards 1 and 0, A_E .5 and -.5; task b: 1 and .5, A_E .25 and -.25. Anchor x has the
    first run of each, 1 and 1, A_S 0; anchor y the second, 0 and .5, A_S -.25 and .25."""
    exps = [
        step(task, run, reward, **{SEARCH_ANCHOR: "xy"[run]})
        for task, run, reward in [("a", 0, 1.0), ("a", 1, 0.0), ("b", 0, 1.0), ("b", 1, 0.5)]
    ]
    assert advantages(exps) == pytest.approx([0.5, -0.75, 0.25, 0.0])
    assert advantages(exps, omega=0.0) == pytest.approx([0.5, -0.5, 0.25, -0.25])


def test_calls_are_anchored_by_their_state_without_a_search() -> None:
    """Two runs of two calls, rewards 1 and 0 at the end, gamma .5. First calls share a state:
    returns .5 and 0, A_S .25 and -.25; the second ones differ in it. A_E is .5 and -.5."""
    exps = [
        step("a", run, 1.0 - run, number, **{STATE_KEY: "first" if number == 0 else f"own {run}"})
        for run in range(2)
        for number in range(2)
    ]
    assert advantages(exps, gamma=0.5) == pytest.approx([0.75, 0.5, -0.75, -0.5])
    for exp in exps:  # an anchor of the search wins
        exp.info[SEARCH_ANCHOR] = f"{exp.eid.run} {exp.eid.step}"
    assert advantages(exps, gamma=0.5) == pytest.approx([0.5, 0.5, -0.5, -0.5])


RATIOS = (LN2, -LN2, 2 * LN2)


@pytest.mark.parametrize(
    ("level", "expected"), [("token", (2.0, 0.5, 2.0)), ("sequence", (1.5874,) * 3)]
)
def test_the_weights_by_hand(level: str, expected: Sequence[float]) -> None:
    """Log-ratios ln 2, ln 1/2, ln 4, cap 2; (2 * 1/2 * 4)^(1/3) = 1.5874. A masked token with the
    ratio e^9 changes nothing; the gradient is that of -weight A log pi, mean over three tokens."""
    loss = POLICY_LOSS_FN.get(TRUNCATED_IMPORTANCE)(backend="tinker", level=level)
    old = torch.full((1, 4), -3.0)
    now = (old + torch.tensor([[*RATIOS, 9.0]])).requires_grad_()
    mask = torch.tensor([[True, True, True, False]])
    found = loss.weights(now, old, mask)
    assert found[0].tolist() == pytest.approx([*expected, 0.0], abs=1e-4)
    advantage = torch.full((1, 4), 0.5)
    given = {"old_logprob": old, "action_mask": mask, "advantages": advantage}
    value, metrics = loss(logprob=now, **given)
    value.backward()
    gradient = [-weight * 0.5 / 3 for weight in expected]
    assert now.grad is not None
    assert now.grad[0].tolist() == pytest.approx([*gradient, 0.0], abs=1e-4)
    by_hand = sum(g * (-3 + ratio) for g, ratio in zip(gradient, RATIOS, strict=True))
    assert float(value.detach()) == pytest.approx(by_hand, abs=1e-4)
    assert metrics["importance/truncated"] == pytest.approx(2 / 3 if level == "token" else 0.0)
    assert metrics["importance/mean"] == pytest.approx(sum(expected) / 3, abs=1e-4)
    # A sequence far above the cap is truncated, too, and nothing overflows.
    far = loss.weights(old + 500.0, old, mask)
    assert far[0, :3].tolist() == pytest.approx([2.0] * 3)
    with pytest.raises(ValueError, match="token or sequence"):
        POLICY_LOSS_FN.get(TRUNCATED_IMPORTANCE)(level="word")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_micro_batches_do_not_change_the_update(
    level: str, mode: str, tiny_model_dir: Path
) -> None:
    config = load_config(None)
    config.algorithm.algorithm_type = "multi_step_grpo"
    config.algorithm.policy_loss_fn = TRUNCATED_IMPORTANCE
    config.algorithm.policy_loss_fn_args = {"level": level, "loss_agg_mode": mode}
    config.algorithm.loss_agg_mode = mode
    AlgorithmConfigValidator().validate(config)
    generator = torch.Generator().manual_seed(0)
    states = []
    for tokens in (1, 40, 100_000):
        settings = TrainerSettings(
            lora=LoraSpec(4, 8.0), schedule=Schedule(peak=1.0), eps=1.0, micro_batch_tokens=tokens
        )
        trainer = LocalTrainer(tiny_model_dir, settings)
        generator.manual_seed(0)
        exps = [
            Experience(
                eid=EID(batch=1, task=0, run=run),
                tokens=torch.randint(0, 256, (7 + run,), generator=generator),
                prompt_length=4,
                reward=float(run),
                logprobs=-3 - 3 * torch.rand(3 + run, generator=generator),
            )
            for run in range(3)
        ]
        TrainStep(config, trainer)(ADVANTAGE_FN.get(WORKFLOW_GIGPO)().process(exps)[0])
        states.append(trainer.weights())
    for state in states[1:]:
        for name, tensor in states[0].items():
            assert torch.allclose(tensor, state[name], atol=2e-6, rtol=0), name


# --- In a configuration ---------------------------------------------------------------------------

SHORT = ["algorithm.advantage_fn=workflow_gigpo", "algorithm.policy_loss_fn=truncated_importance"]


def test_the_short_names_serve_any_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = write_project(tmp_path, tiny_model_dir)
    config = load_config(path, [*SHORT, "algorithm.algorithm_type=gigpo"])
    prepare(config, Purpose.CHECK)
    algorithm = config.algorithm
    assert (algorithm.advantage_fn, algorithm.policy_loss_fn) == (
        WORKFLOW_GIGPO,
        TRUNCATED_IMPORTANCE,
    )
    # Trinity would give them the arguments of gigpo's own functions.
    assert algorithm.advantage_fn_args == ADVANTAGE_FN.get(WORKFLOW_GIGPO).default_args()
    assert algorithm.policy_loss_fn_args == POLICY_LOSS_FN.get(TRUNCATED_IMPORTANCE).default_args()
    operators = [it.name for it in config.data_processor.experience_pipeline.operators]
    assert ANCHOR_RATE in operators


def test_a_run_on_rollouts_trains_with_both(tmp_path: Path, tiny_model_dir: Path) -> None:
    path = write_project(tmp_path, tiny_model_dir, steps=1)
    overrides = [*SHORT, "buffer.explorer_input.eval_tasksets=[]", "explorer.eval_interval=1"]
    assert run_config(path, overrides, inline=True).steps_done == 1
    found = trainer_metrics(run_dir(tmp_path))[1]
    # On policy: what was sampled is what is trained.
    assert found["actor/importance/mean"] == pytest.approx(1.0, abs=1e-3)
    assert found["actor/importance/truncated"] == 0.0
    assert found["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("overrides", "where", "told"),
    [
        (["algorithm.advantage_fn=workflow_gigp"], "workflow_gigp", "workflow_gigpo"),
        ([SHORT[0], "algorithm.repeat_times=1"], "repeat_times", "compares the rollouts"),
        ([SHORT[1], "algorithm.policy_loss_fn_args={top: 2}"], "top", "cap"),
    ],
)
def test_they_are_checked_as_trinitys_own(
    overrides: list[str], where: str, told: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    faults = validate_config(write_project(tmp_path, tiny_model_dir), overrides).faults
    assert len(faults) == 1
    assert where in faults[0].where
    assert told in f"{faults[0].expected} {faults[0].cure}"


# --- Batches in files -----------------------------------------------------------------------------

LINE = {"group": "p", "anchor": "x", "run": 0, "tokens": [1, 2, 3], "prompt_length": 1}
LINE |= {"logprobs": [-0.5, -1.0], "reward": 1.0, "policy_version": 2}


def write_lines(folder: Path, name: str, *changes: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(LINE | change) for change in changes]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def batch_reader(folder: Path, **function: Any) -> Any:
    selector = DataSelectorConfig(kwargs=function)
    return get_buffer_reader(
        StorageConfig(storage_type=BATCH_FILES, path=str(folder), data_selector=selector)
    )


def test_a_file_is_a_step_with_advantages_of_the_read(tmp_path: Path) -> None:
    write_lines(tmp_path, "step_1", {}, {"run": 1, "reward": 0.0})
    third = {"run": 2, "reward": -0.5, "anchor": None}
    write_lines(tmp_path, "step_2", {}, {"run": 1, "reward": 0.5}, third)
    reader = batch_reader(tmp_path)
    first, second = asyncio.run(reader.read()), asyncio.run(reader.read(batch_size=1))
    assert (len(first), len(second), len(reader)) == (2, 3, 2)
    # A_E .5 -.5, and A_S the same again; then A_E 2/3 1/6 -5/6 and A_S .25 -.25 0.
    assert [float(exp.advantages[0]) for exp in first] == pytest.approx([1.0, -1.0])
    expected = [2 / 3 + 0.25, 1 / 6 - 0.25, -5 / 6]
    assert [float(exp.advantages[1]) for exp in second] == pytest.approx(expected)
    assert second[0].info == {"model_version": 2, SEARCH_ANCHOR: "x"}
    assert second[0].logprobs.tolist() == [-0.5, -1.0]
    assert reader.state_dict() == {"current_index": 2}
    again = batch_reader(tmp_path, advantage_fn="step_wise_grpo", advantage_fn_args={})
    again.load_state_dict({"current_index": 2})  # after the last comes the first
    found = [float(exp.advantages[0]) for exp in asyncio.run(again.read())]
    assert found == pytest.approx([0.7071, -0.7071], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"logprobs": None}, "no log-probabilities"),
        ({"logprobs": []}, "no log-probabilities"),
        ({"logprobs": [-0.5]}, "1 log-probabilities"),
        ({"logprobs": [-0.5, float("nan")]}, "that is none"),
        ({"logprobs": [0.5, -1.0]}, "that is none"),
        ({"prompt_length": 3}, "a prompt of 3"),
        ({"reward": None}, "NoneType"),
        ({"tokens": None}, "NoneType"),
    ],
)
def test_a_row_without_what_it_takes_is_refused(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    write_lines(tmp_path, "step_1", {}, change)
    with pytest.raises(BadInput) as caught:
        batch_reader(tmp_path)
    (fault,) = caught.value.faults
    assert fault.where == f"{tmp_path / 'step_1.jsonl'}:2"
    assert told in fault.found


def test_a_folder_of_batches_is_checked(tmp_path: Path, tiny_model_dir: Path) -> None:
    buffer = "buffer.trainer_input.experience_buffer"
    overrides = ["mode=train", f"{buffer}.storage_type=batch_files", f"{buffer}.path={tmp_path}/b"]
    overrides += ["buffer.explorer_input.eval_tasksets=[]", *SHORT]
    path = write_project(tmp_path, tiny_model_dir)
    (fault,) = validate_config(path, overrides).faults
    assert "batches of a search" in fault.expected
    write_lines(tmp_path / "b", "step_1", {}, {"run": 1, "reward": 0.0})
    assert not validate_config(path, overrides).faults
    for more, told in (
        ("algorithm.bypass_old_logprobs=false", "in the files"),
        ("algorithm.algorithm_type=sft", "learns from rewards"),
    ):
        (fault,) = validate_config(path, [*overrides, more]).faults
        assert told in fault.expected


def test_verl_gets_as_many_rows_as_it_can_split() -> None:
    exps = [step("a", run, float(run)) for run in range(5)]
    found = evened(exps, 4)
    assert found[:5] == exps
    assert [int(exp.action_mask.sum()) for exp in found] == [2] * 5 + [0] * 3
    assert len(evened(exps, 5)) == 5
    loss = POLICY_LOSS_FN.get(TRUNCATED_IMPORTANCE)(backend="verl")
    assert loss.select_keys == ["old_log_probs", "response_mask", "advantages"]
