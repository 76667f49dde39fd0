"""PPO on the local engine: runs as trajectories, the value head, its checkpoints, refusals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from data_project import trainer_metrics
from project import run_dir, write_project
from safetensors.torch import load_file
from test_algorithm import make_config, make_trainer
from trinity.common.experience import EID, Experience

from aflow_tune import cli
from aflow_tune.config.critic import check_critic
from aflow_tune.config.file_rules import check_model
from aflow_tune.config.load import load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.engines.local.checkpoint import CheckpointError
from aflow_tune.engines.local.critic import CriticSettings, ValueHead, explained_variance
from aflow_tune.engines.local.packed_model import Sample
from aflow_tune.engines.trinity.training.algorithm import TrainStep, to_sample
from aflow_tune.errors import BadInput, Fault
from aflow_tune.tuning import run_config

CPU = torch.device("cpu")
GAMMA, LAM = 0.9, 0.5


def call(step: int, mask: list[int], run: int = 0, reward: float = 1.0, **info: float):
    """A call of a run: a prompt of three tokens, a response with tool results where mask is 0."""
    return Experience(
        eid=EID(batch=1, task=0, run=run, step=step),
        tokens=torch.arange(10, 13 + len(mask)) + 7 * step + 3 * run,
        prompt_length=3,
        action_mask=torch.tensor(mask, dtype=torch.bool),
        reward=reward,
        logprobs=torch.full((len(mask),), -1.0),
        info=dict(info),
    )


def advantages(folder: Path, exps: list[Experience], values: list[list[float]]) -> list[Sample]:
    """The samples, with advantages and returns for these values."""
    arguments = {"gamma": GAMMA, "lam": LAM}
    trainer = make_trainer(folder, critic=CriticSettings())
    step = TrainStep(make_config("ppo", advantage_fn_args=arguments), trainer)
    samples = [to_sample(exp) for exp in exps]
    for sample, of_call in zip(samples, values, strict=True):
        sample.extra["values"] = torch.tensor(of_call)
    step._advantages(exps, samples)
    return samples


@pytest.mark.parametrize(
    ("masks", "values"),
    [
        ([[1, 1, 1]], [[0.2, 0.4, 0.6]]),
        ([[1], [1, 1]], [[0.2], [0.4, 0.6]]),
        # With results of tools between, before and behind; their values are never looked at.
        ([[1, 0, 0, 1], [0, 1, 0]], [[0.2, 9.0, -9.0, 0.4], [9.0, 0.6, 9.0]]),
        ([[1], [0, 0], [1], [1]], [[0.2], [9.0, 9.0], [0.4], [0.6]]),
    ],
)
def test_a_run_is_one_trajectory_of_what_was_sampled(
    masks: list[list[int]], values: list[list[float]], tiny_model_dir: Path
) -> None:
    """Rewards 0, 0, 1 and values .2 .4 .6, by hand: d = .16, .14, .4; A = d + .45 A'; R = A + V.
    Trinity whitens A over the batch: here over it and another run's, -.5 and -.5 + .45 * -.5."""
    exps = [call(number, mask) for number, mask in enumerate(masks)]
    exps.append(call(0, [1, 1], run=1, reward=0.0))
    samples = advantages(tiny_model_dir, exps, [*values, [0.95, 0.5]])

    def at_steps(name: str) -> torch.Tensor:
        return torch.cat([sample.extra[name][sample.action_mask_R] for sample in samples])

    by_hand = torch.tensor([0.304, 0.32, 0.4, -0.5 - 0.225, -0.5])
    returns = torch.tensor([0.504, 0.72, 1.0, 0.225, 0.0])
    assert torch.allclose(at_steps("returns"), returns, atol=1e-6)
    assert torch.allclose(at_steps("returns") - at_steps("values"), by_hand, atol=1e-6)
    whitened = (by_hand - by_hand.mean()) / by_hand.std()
    assert torch.allclose(at_steps("advantages"), whitened, atol=1e-5)
    for sample in samples:  # nothing is learned from what was not sampled
        assert not sample.extra["advantages"][~sample.action_mask_R].any()


def test_rewards_of_single_steps_are_earned_where_they_fall(tiny_model_dir: Path) -> None:
    """Step rewards .5 and 1 on two calls, no values: R2 = 1, R1 = .5 + .45 * 1."""
    exps = [call(0, [1], step_reward=0.5), call(1, [1, 0], step_reward=1.0)]
    samples = advantages(tiny_model_dir, exps, [[0.0], [0.0, 0.0]])
    assert [float(sample.extra["returns"][0]) for sample in samples] == pytest.approx([0.95, 1.0])


def test_kl_is_taken_from_the_reward_of_each_step(tiny_model_dir: Path) -> None:
    """k1 of .5 at each of three steps, coefficient .2, no values, gamma and lam 1: rewards -.1, -.1
    and 1 - .1, returns .7 .8 .9. What stands at the tool's result is no step."""
    penalty = {"kl_penalty_fn": "k1", "kl_penalty_fn_args": {"kl_coef": 0.2}}
    trainer = make_trainer(tiny_model_dir, critic=CriticSettings())
    step = TrainStep(make_config("ppo", **penalty), trainer)
    assert step.needs_reference
    exps = [call(0, [1, 0, 1]), call(1, [1])]
    samples = [to_sample(exp) for exp in exps]
    for sample in samples:
        sample.extra["values"] = torch.zeros(len(sample.action_mask_R))
        sample.extra["ref_logprob"] = torch.full((len(sample.action_mask_R),), -1.5)
    step._advantages(exps, samples)
    returns = torch.cat([sample.extra["returns"][sample.action_mask_R] for sample in samples])
    assert returns.tolist() == pytest.approx([0.7, 0.8, 0.9])


def test_the_value_head_learns_a_known_value() -> None:
    """V = 2 h_0 - h_3 + .5 from its own features, by many steps of 16 passes each."""
    generator = torch.Generator().manual_seed(0)
    head = ValueHead(8, CriticSettings(lr=0.02, weight_decay=0.0), CPU)
    for _ in range(60):
        hidden = torch.randn(64, 8, generator=generator)
        returns = 2 * hidden[:, 0] - hidden[:, 3] + 0.5
        with torch.no_grad():
            old = head(hidden)
        metrics = head.fit(hidden, returns, old)
    state = head.state()
    expected = torch.tensor([2.0, 0, 0, -1.0, 0, 0, 0, 0])
    assert torch.allclose(state["weight"], expected, atol=0.02)
    assert float(state["bias"]) == pytest.approx(0.5, abs=0.02)
    assert metrics["critic/vf_loss"] < 1e-3


def test_the_value_loss_is_clipped() -> None:
    """Values .9 and .1 from .2 and .1 before, returns 1 and 1, range .5: the first may count as .7
    at most, so 1/2 mean(.3^2, .9^2) = .225; its gradient is 0, so that only the second moves."""
    head = ValueHead(2, CriticSettings(passes=1, lr=1e-3, weight_decay=0.0), CPU)
    head.load({"weight": torch.tensor([0.9, 0.1]), "bias": torch.zeros(1)})
    metrics = head.fit(torch.eye(2), torch.ones(2), torch.tensor([0.2, 0.1]))
    assert metrics["critic/vf_loss"] == pytest.approx(0.225)
    assert metrics["critic/vf_clipfrac"] == 0.5
    assert head.state()["weight"].tolist() == pytest.approx([0.9, 0.101])


def test_explained_variance_by_hand() -> None:
    """Returns 0 1 2 3 (variance 1.25), errors 0 0 0 1 (variance .1875): 1 - .1875 / 1.25."""
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(torch.tensor([0.0, 1, 2, 2]), returns) == pytest.approx(0.85)
    assert explained_variance(returns + 5, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones(4)) is None


@pytest.mark.parametrize("packed", [True, False])
def test_values_are_of_the_states_that_tokens_were_sampled_from(
    packed: bool, tiny_model_dir: Path
) -> None:
    """Against transformers' own last hidden states, one sample at a time."""
    trainer = make_trainer(tiny_model_dir)
    trainer.policy.packed = packed
    samples = [to_sample(call(0, [1, 0, 1, 1])), to_sample(call(0, [1, 1], run=1))]
    samples.append(to_sample(call(1, [0, 0])))
    for sample, found in zip(samples, trainer.hidden(samples), strict=True):
        with torch.no_grad():
            states = trainer.base(
                input_ids=sample.tokens_T[None], output_hidden_states=True
            ).hidden_states[-1][0]
        at = [2 + column for column in range(len(sample.action_mask_R))]
        expected = states[at][sample.action_mask_R]
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-4)


def test_passes_and_warm_up_of_the_critic(tiny_model_dir: Path) -> None:
    """In the first step only the critic learns. Then the policy makes three updates on one batch:
    in the last of them it is no longer the policy that sampled."""
    config = make_config("ppo", kl_loss_fn="none")
    config.trainer.critic_warmup = 1
    config.trainer.trainer_config = {"actor": {"ppo_epochs": 3}}
    trainer = make_trainer(tiny_model_dir, rate=1e-2, critic=CriticSettings())
    train = TrainStep(config, trainer)
    exps = [
        call(step, [1, 0, 1], run=run, reward=float(run)) for run in range(3) for step in range(2)
    ]
    for exp, old in zip(exps, trainer.logprobs([to_sample(exp) for exp in exps]), strict=True):
        exp.logprobs = old
    before = trainer.weights()
    first = train(exps)
    assert all(torch.equal(before[name], now) for name, now in trainer.weights().items())
    assert first["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-6)
    second = train(exps)
    assert trainer.step_count == 2
    assert second["critic/vf_explained_var"] > 0
    assert abs(second["actor/ppo_kl"]) > 1e-4
    assert all(math.isfinite(value) for value in second.values())
    (moment,) = {
        float(trainer.optimizer.state[master]["step"]) for master in trainer._masters.values()
    }
    assert moment == 3.0


PPO = ["algorithm.algorithm_type=ppo", "buffer.explorer_input.eval_tasksets=[]"]
PPO += ["explorer.eval_interval=1", "trainer.trainer_config.actor.ppo_epochs=2"]


@pytest.mark.slow
def test_a_run_that_broke_off_within_a_step_ends_bit_equal(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks off when step 2 has moved the policy and not yet the critic: that state is saved
    nowhere, and what resumes from step 1 ends as a run that went through, moments included."""
    options = [*PPO, "deterministic=true"]
    whole, parts = (write_project(tmp_path / name, tiny_model_dir) for name in ("whole", "parts"))
    run_config(whole, options, inline=True)
    fit, calls = ValueHead.fit, []

    def broken(head: ValueHead, *given: torch.Tensor) -> dict[str, float]:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("the power failed")
        return fit(head, *given)

    with monkeypatch.context() as patched:
        patched.setattr(ValueHead, "fit", broken)
        with pytest.raises(RuntimeError, match="the power failed"):
            run_config(parts, options, inline=True)
    assert not (run_dir(tmp_path / "parts") / "global_step_2").exists()
    assert run_config(parts, options, inline=True).steps_done == 2
    folders = [run_dir(tmp_path / name) / "global_step_2" for name in ("whole", "parts")]
    for file in ("weights", "critic", "optimizer", "rng"):
        first, second = (load_file(folder / f"{file}.safetensors") for folder in folders)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first), file
    assert load_file(folders[0] / "critic.safetensors")["weight"].abs().max() > 0
    found = trainer_metrics(run_dir(tmp_path / "whole"))[2]
    assert {"critic/vf_explained_var", "critic/vf_loss", "critic/values/mean"} <= found.keys()


def test_a_checkpoint_without_the_head_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    make_trainer(tiny_model_dir).save(tmp_path / "global_step_1")
    with pytest.raises(CheckpointError, match="no value head"):
        make_trainer(tiny_model_dir, critic=CriticSettings()).load(tmp_path / "global_step_1")


VERL = "trainer.trainer_config"


@pytest.mark.parametrize(
    ("overrides", "where", "told"),
    [
        ([f"{VERL}.critic.optim.lr=3e-4x"], f"{VERL}.critic.optim.lr", "a number above 0"),
        ([f"{VERL}.critic.ppo_epochs=0"], f"{VERL}.critic.ppo_epochs", "1 or more passes"),
        ([f"{VERL}.actor_rollout_ref.actor.ppo_epochs=two"], "actor.ppo_epochs", "1 or more"),
        (["algorithm.advantage_fn_args={gamma: 1.5, lam: 1.0}"], "gamma", "from 0 to 1"),
        (["model.critic_model_path=elsewhere"], "model.critic_model_path", "value head"),
        (["trainer.critic_warmup=2"], "trainer.critic_warmup", "fewer than the 2 steps"),
        (["algorithm.advantage_fn=grpo"], "algorithm.advantage_fn", "in the trainer"),
    ],
)
def test_what_a_critic_cannot_be(
    overrides: list[str], where: str, told: str, tmp_path: Path, tiny_model_dir: Path
) -> None:
    path = write_project(tmp_path, tiny_model_dir)
    with pytest.raises(BadInput) as caught:
        prepare(load_config(path, [*PPO, *overrides]), Purpose.CHECK)
    (fault,) = caught.value.faults
    assert where in fault.where
    assert told in fault.expected


def test_what_is_read_is_not_said_to_be_unread(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_project(tmp_path, tiny_model_dir)
    words = [*PPO, "trainer.critic_warmup=1", f"{VERL}.critic.ppo_epochs=4"]
    assert cli.main(["validate", str(path), *words]) == 0
    assert "not read" not in capsys.readouterr().out
    words = [f"{VERL}.critic.ppo_epochs=4", "trainer.critic_warmup=1"]
    assert cli.main(["validate", str(path), *words]) == 0
    said = capsys.readouterr().out
    assert f"not read by the local engine: trainer.critic_warmup, {VERL}.critic.ppo_epochs" in said


def test_a_critic_on_a_cluster_is_a_model(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = load_config(write_project(tmp_path, tiny_model_dir), PPO)
    config.engine = "trinity"
    (told,) = check_critic(config)
    assert "joins the calls of a run" in str(told)
    assert list(check_model(config)) == []
    config.model.critic_model_path = "./nowhere"
    (fault,) = check_model(config)
    assert isinstance(fault, Fault)
    assert "model.critic_model_path" in fault.where
    assert "no such folder" in fault.found
