"""Every Trinity algorithm without a critic on the local trainer; the hand-computed example."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE
from trinity.common.config import Config, ExperienceBufferConfig
from trinity.common.config_validator import AlgorithmConfigValidator
from trinity.common.experience import (
    EID,
    CustomField,
    Experience,
    split_dpo_experience_to_single_turn,
)

from aflow_tune.config.names import spell_out
from aflow_tune.engines.local.trainer import LocalTrainer, Schedule, TrainerSettings
from aflow_tune.engines.local.weights import LoraSpec
from aflow_tune.engines.trinity.training.algorithm import TrainStep, TrinityLoss, to_sample
from aflow_tune.engines.trinity.training.pair_loss import PairLoss
from aflow_tune.errors import BadInput

IN_EXPLORER = ["grpo", "multi_step_grpo", "gigpo", "opmd", "topr", "cispo", "gspo", "sapo", "rec"]
IN_EXPLORER += ["dapo", "asymre", "sppo", "raft"]
IN_TRAINER = ["rloo", "reinforceplusplus", "grpo_verl", "on_policy_distill", "jsd"]
WITH_EXPERTS = ["mix", "mix_chord"]
FROM_DATA = ["sft", "cpt", "dpo"]


def make_config(kind: str, **algorithm: object) -> Config:
    """A Trinity configuration whose algorithm section is validated, nothing else."""
    config = Config()
    config.mode = "train" if kind in FROM_DATA else "both"
    config.buffer.trainer_input.experience_buffer = ExperienceBufferConfig(path="unused")
    config.algorithm.algorithm_type = kind
    for name, value in algorithm.items():
        setattr(config.algorithm, name, value)
    spell_out(config)  # type: ignore[arg-type]
    AlgorithmConfigValidator().validate(config)
    return config


def make_trainer(folder: Path, rate: float = 1e-3, **settings: object) -> LocalTrainer:
    given = {"lora": LoraSpec(4, 8.0), "micro_batch_tokens": 64, **settings}
    return LocalTrainer(folder, TrainerSettings(schedule=Schedule(peak=rate), **given))  # type: ignore


def rollouts(trainer: LocalTrainer, *, tasks: int = 2, runs: int = 3) -> list[Experience]:
    """On-policy-looking experiences of two-step runs, rewards 0, 1, 2, ... within a task."""
    generator = torch.Generator().manual_seed(3)
    exps = []
    for task in range(tasks):
        prompt = torch.randint(0, 256, (8,), generator=generator)
        for run in range(runs):
            for step in range(2):
                response = torch.randint(0, 256, (5 + run,), generator=generator)
                exps.append(
                    Experience(
                        eid=EID(batch=1, task=task, run=run, step=step),
                        tokens=torch.cat([prompt, response]).int(),
                        prompt_length=8,
                        reward=float(run),
                        logprobs=torch.zeros(5 + run),
                        teacher_logprobs=torch.full((5 + run,), -2.0),
                        info={"env_state_hash": f"{task}-{step}"},
                    )
                )
    for exp, logprobs in zip(exps, trainer.logprobs([to_sample(exp) for exp in exps]), strict=True):
        exp.logprobs = logprobs
    return exps


def with_advantages(config: Config, exps: list[Experience]) -> list[Experience]:
    function = ADVANTAGE_FN.get(config.algorithm.advantage_fn)(**config.algorithm.advantage_fn_args)
    return function.process(exps)[0]


def with_experts(exps: list[Experience], step: int) -> list[Experience]:
    fields = [CustomField("is_expert", "expert_mask", torch.bool)]
    fields.append(CustomField("step", "step", torch.int32))
    scored = {"prompt_length": 6, "reward": 0.0}
    experts = [
        Experience(tokens=torch.arange(10 + k, 24 + k), logprobs=torch.zeros(8), **scored)
        for k in range(2)
    ]
    for exp in experts:
        exp.advantages = torch.zeros(8)
    for exp in exps + experts:
        exp.info |= {"is_expert": exp in experts, "step": step}
        exp.custom_fields = fields
    return exps + experts


def data_rows(kind: str) -> list[Experience]:
    if kind == "dpo":
        return [
            Experience(
                tokens=torch.arange(5) + k,
                chosen=torch.arange(50, 54) + k,
                rejected=torch.arange(80, 86) + k,
            )
            for k in range(3)
        ]
    return [
        Experience(tokens=torch.arange(k, k + 12), prompt_length=1 if kind == "cpt" else 5)
        for k in range(4)
    ]


@pytest.mark.parametrize("kind", IN_EXPLORER + IN_TRAINER + WITH_EXPERTS + FROM_DATA)
def test_two_steps_change_the_weights_and_stay_finite(kind: str, tiny_model_dir: Path) -> None:
    config = make_config(kind)
    trainer = make_trainer(tiny_model_dir)
    train = TrainStep(config, trainer)
    before = trainer.weights()
    exps = rollouts(trainer)
    for step in (1, 2):
        if kind in FROM_DATA:
            batch = data_rows(kind)
        elif kind in WITH_EXPERTS:
            batch = with_experts(with_advantages(config, exps), step)
        elif kind in IN_TRAINER or kind == "raft":
            batch = exps
        else:
            batch = with_advantages(config, exps)
        metrics = train(batch)
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert metrics["actor/grad_norm"] > 0
    after = trainer.weights()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert trainer.step_count == 2
    assert trainer.skipped_steps == 0


def test_every_algorithm_of_trinity_is_covered() -> None:
    tested = {*IN_EXPLORER, *IN_TRAINER, *WITH_EXPERTS, *FROM_DATA, "ppo"}
    assert set(ALGORITHM_TYPE._default_mapping) == tested


def test_experiences_without_advantages_are_refused_by_name(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir)
    with pytest.raises(BadInput, match="advantages"):
        TrainStep(make_config("grpo"), trainer)(rollouts(trainer))


def test_the_hand_computed_example(tiny_model_dir: Path) -> None:
    """Three runs of two steps with rewards 1, 0, 0.5.

    mean 1/2, sample std sqrt((1/4 + 1/4 + 0) / 2) = 1/2, so the advantages of both steps are
    1, -1 and 0 (up to the 1e-6 beside the std). On-policy the loss is -mean of the advantages
    over tokens: -(8 * 1 + 10 * -1 + 12 * 0) / 30 = 1 / 15 with 4, 5 and 6 tokens a step.
    """
    config = make_config("multi_step_grpo", kl_loss_fn="none")
    trainer = make_trainer(tiny_model_dir, rate=1e-3)
    generator = torch.Generator().manual_seed(0)
    exps = [
        Experience(
            eid=EID(batch=1, task=0, run=run, step=step),
            tokens=torch.randint(0, 256, (6 + 4 + run,), generator=generator),
            prompt_length=6,
            reward=(1.0, 0.0, 0.5)[run] if step == 1 else 0.0,
            logprobs=torch.zeros(4 + run),
        )
        for run in range(3)
        for step in range(2)
    ]
    samples = [to_sample(exp) for exp in exps]
    before = trainer.logprobs(samples)
    for exp, logprobs in zip(exps, before, strict=True):
        exp.logprobs = logprobs
    with_advantages(config, exps)
    for exp in exps:
        expected = (1.0, -1.0, 0.0)[exp.eid.run] * 0.5 / (0.5 + 1e-6)
        assert torch.allclose(
            exp.advantages, torch.full((4 + exp.eid.run,), expected), atol=1e-6, rtol=0
        )
    metrics = TrainStep(config, trainer)(exps)
    assert metrics["actor/pg_loss"] == pytest.approx(1 / 15, abs=1e-5)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    moved = [
        float((new - old).sum()) for new, old in zip(trainer.logprobs(samples), before, strict=True)
    ]
    assert moved[0] + moved[1] > 1e-3
    assert moved[2] + moved[3] < -1e-3


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("grpo", "token-mean"),
        ("grpo", "seq-mean-token-sum"),
        ("grpo", "seq-mean-token-mean"),
        ("grpo", "seq-mean-token-sum-norm"),
        ("gspo", "seq-mean-token-mean"),
        ("mix_chord", "seq-mean-token-mean"),
        ("dpo", "token-mean"),
    ],
)
def test_the_update_does_not_depend_on_the_micro_batch(
    kind: str, mode: str, tiny_model_dir: Path
) -> None:
    coefficients = {"entropy_coef": 0.05}, {"kl_coef": 0.1}
    config = make_config(
        kind,
        loss_agg_mode=mode,
        entropy_loss_fn_args=coefficients[0],
        kl_loss_fn_args=coefficients[1],
    )
    states, metrics = [], []
    for tokens in (1, 40, 100_000):
        # A large eps makes Adam linear in the gradient: rounding is not blown up to signs.
        trainer = make_trainer(tiny_model_dir, rate=1.0, micro_batch_tokens=tokens, eps=1.0)
        train = TrainStep(config, trainer)
        for step in (1, 2):  # the reference only differs from the policy in the second
            exps = data_rows(kind) if kind == "dpo" else rollouts(trainer)
            if kind != "dpo":
                exps = with_advantages(config, exps)
            last = train(with_experts(exps, step) if kind in WITH_EXPERTS else exps)
        states.append(trainer.weights())
        metrics.append(last)
    for state, found in zip(states[1:], metrics[1:], strict=True):
        for name, tensor in states[0].items():
            assert torch.allclose(tensor, state[name], atol=2e-6, rtol=0), name
        for name in ("final_loss", "kl_loss", "entropy_loss", "grad_norm"):
            expected = pytest.approx(metrics[0][f"actor/{name}"], rel=1e-4, abs=1e-7)
            assert found[f"actor/{name}"] == expected, name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (0.598139, 0.744397)),  # beta 0.1, unless it is set
        ({"beta": 0.1, "label_smoothing": 0.1}, (0.618139, 0.734397)),
        ({"beta": 0.5}, (0.313262, 0.974077)),
        ({"loss_type": "hinge"}, (0.8, 1.1)),
        # From means over 4 tokens: margins 0.5 and -0.25.
        ({"loss_type": "ipo"}, (20.25, 27.5625)),
    ],
)
@pytest.mark.parametrize("tokens", [1, 24, 100_000])
def test_dpo_is_the_mean_over_its_pairs(
    arguments: dict[str, float], expected: tuple[float, ...], tokens: int, tiny_model_dir: Path
) -> None:
    """Margins 2 and -1, by hand: -log sigmoid(beta m), and with smoothing e of the other side."""
    given = {"policy_loss_fn_args": arguments} if arguments else {}
    config = make_config("dpo", kl_loss_fn_args={"kl_coef": 0.0}, **given)
    trainer = make_trainer(tiny_model_dir, micro_batch_tokens=tokens)
    groups = []
    for exp, margin in zip(data_rows("dpo"), (2.0, -1.0), strict=False):
        pair = [to_sample(one) for one in split_dpo_experience_to_single_turn([exp])]
        for sample, now, more in zip(pair, trainer.logprobs(pair), (margin, 0.0), strict=True):
            sample.extra["ref_logprob"] = now - more / len(now) * sample.action_mask_R
        groups.append(pair)
    for number, pair in enumerate(groups):
        for sample in pair:
            sample.run = number
    moved = trainer.step(groups, TrinityLoss(config.algorithm))
    assert moved["actor/final_loss"] == pytest.approx(sum(expected) / 2, abs=2e-6)


def test_dpo_may_also_learn_the_chosen_answer() -> None:
    """Ratios -1 and -2, so m = 1: -log sigmoid(0.1) = 0.644397; -log p of the chosen answer is 3
    over 2 tokens, so 1.5, of which alpha = 2 adds 3."""
    logprob = torch.tensor([[-1.0, -2.0, 9.0], [-1.0, -1.0, -3.0]])
    reference = torch.tensor([[-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    loss, _ = PairLoss(beta=0.1, rpo_alpha=2.0)(logprob, mask, ref_logprob=reference)
    assert float(loss) == pytest.approx(3.644397, abs=1e-6)


@pytest.mark.parametrize("kind", ["rloo", "reinforceplusplus"])
def test_advantages_in_the_trainer(kind: str, tiny_model_dir: Path) -> None:
    """Rewards 0, 1, 2. rloo: A_i = r_i - mean of the others = -1.5, 0, 1.5. reinforceplusplus:
    returns are the reward on every token, whitened over 5 + 6 + 7 tokens."""
    trainer = make_trainer(tiny_model_dir)
    exps = [exp for exp in rollouts(trainer, tasks=1) if exp.eid.step == 0]
    samples = [to_sample(exp) for exp in exps]
    TrainStep(make_config(kind), trainer)._advantages(exps, samples)
    found = torch.cat([sample.extra["advantages"] for sample in samples])
    expected = torch.tensor([-1.5] * 5 + [0.0] * 6 + [1.5] * 7)
    if kind == "reinforceplusplus":
        returns = torch.tensor([0.0] * 5 + [1.0] * 6 + [2.0] * 7)
        expected = (returns - returns.mean()) / returns.std()
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("lora", [LoraSpec(4, 8.0), None])
def test_the_kl_loss_is_measured_against_the_first_weights(tiny_model_dir: Path, lora) -> None:
    config = make_config("grpo", kl_loss_fn_args={"kl_coef": 0.5})
    trainer = make_trainer(tiny_model_dir, lora=lora)
    train = TrainStep(config, trainer)
    exps = with_advantages(config, rollouts(trainer))
    samples = [to_sample(exp) for exp in exps]
    start = trainer.logprobs(samples)
    assert train(exps)["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)
    now = trainer.logprobs(samples)
    k2 = torch.cat([(a - b) ** 2 / 2 for a, b in zip(now, start, strict=True)]).mean()
    assert k2 > 0
    assert train(exps)["actor/kl_loss"] == pytest.approx(float(k2), rel=1e-3)
