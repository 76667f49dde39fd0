"""A search trains its policy: the learner, and the client that keeps what it sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from project import write_project

from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.config.settings import value_of
from aflow_tune.engines.local.packed_model import Sample
from aflow_tune.engines.local.trainer import LocalTrainer, TrainerSettings
from aflow_tune.engines.local.weights import LoraSpec
from aflow_tune.errors import BadInput, Interrupted
from aflow_tune.evaluation.evaluating import LocalModels
from aflow_tune.evaluation.trained import make_ready
from aflow_tune.models.types import ModelError
from aflow_tune.running.learning import Learned, Learner, Recorded, Row, teaching
from aflow_tune.runs.folder import checkpoints
from aflow_tune.trace import POLICY

GOOD, BAD = list(b"abc"), list(b"xyz")
PROMPT = list(b"say: ")


def search_config(root: Path, model: Path, *overrides: str) -> AflowConfig:
    usual = ["inline=true", "deterministic=true", "algorithm.optimizer.lr=0.01", *overrides]
    return load_config(write_project(root, model), usual)


def logprobs(model: Path, answers: Sequence[list[int]], weights: Path | None = None) -> list[Any]:
    """Log-probabilities of answers to PROMPT."""
    trainer = LocalTrainer(model, TrainerSettings(lora=LoraSpec(4, 8.0)))
    if weights is not None:
        trainer.load(weights)
    mask = torch.ones(3, dtype=torch.bool)
    samples = [Sample(torch.tensor(PROMPT + it), len(PROMPT), mask) for it in answers]
    return trainer.logprobs(samples)


def rows_of(model: Path, version: int = 0, group: str = "g") -> list[Row]:
    """A group of four: good answers with +1, bad ones with -1, sampled by the untrained policy."""
    answers = [GOOD, BAD, GOOD[::-1], BAD[::-1]]
    return [
        Row(
            group=f"{group}{version}",
            anchor="p",
            tokens=tuple(PROMPT + answer),
            prompt_length=len(PROMPT),
            logprobs=tuple(found.tolist()),
            reward=1.0 if number % 2 == 0 else -1.0,
            version=version,
        )
        for number, (answer, found) in enumerate(
            zip(answers, logprobs(model, answers), strict=True)
        )
    ]


def same(one: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    first, second = (load_file(path / "weights.safetensors") for path in (one, other))
    return all(bool((first[name] == second[name]).all()) for name in first)


def test_rows_that_cannot_teach_are_counted() -> None:
    row = Row("a", "p", (1, 2), 1, (-1.0,), 1.0, 5)
    rows = [row, replace(row, reward=0.0), replace(row, group="lone")]
    rows += [replace(row, group="equal")] * 3
    rows += [replace(row, group="old", version=4), replace(row, group="old", reward=0.0)]
    kept, left_out = teaching(rows, 8)
    assert kept == [*rows[:2], *rows[-2:]]  # four versions old is not too old
    assert left_out == {"alone in their group": 1, "of groups with equal rewards": 3}
    kept, left_out = teaching(rows, 9)
    assert kept == rows[:2]
    assert left_out["of policies more than 4 versions ago"] == 2  # the younger one, too


def test_good_answers_become_likelier_and_a_stop_changes_nothing(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = search_config(tmp_path, tiny_model_dir)
    whole = Learner(config, tmp_path / "whole")
    assert (whole.version, whole.weights) == (0, None)
    lone = replace(rows_of(tiny_model_dir)[0], group="lone")
    assert whole.train([lone]) == Learned(None, 0, 0, {"alone in their group": 1})
    batches = [rows_of(tiny_model_dir, version) for version in range(3)]
    for version, rows in enumerate(batches):
        learned = whole.train([*rows, lone])
        assert (learned.version, learned.trained) == (version + 1, 4)
        assert learned.left_out == {"alone in their group": 1}
    assert "4 rows; left out: 1 alone in their group" in capsys.readouterr().out
    assert learned.weights == whole.weights == tmp_path / "whole" / "trained" / "global_step_3"
    before, after = (
        [float(it.sum()) for it in logprobs(tiny_model_dir, [GOOD, BAD], weights)]
        for weights in (None, learned.weights)
    )
    assert after[0] > before[0] + 0.1
    assert after[1] < before[1] - 0.1

    parts = Learner(config, tmp_path / "parts")
    for number, rows in enumerate(batches):
        with pytest.raises(Interrupted):
            parts.train(rows, lambda: True)
        assert parts.version == number
        parts = Learner(search_config(tmp_path, tiny_model_dir), tmp_path / "parts")
        assert parts.train([*rows, lone]).version == number + 1
    assert same(parts.weights, whole.weights)
    # A search that was killed before it took note of the result asks once more.
    assert parts.train(batches[-1]) == Learned(parts.weights, 3, 4, {})
    assert [point.step for point in checkpoints(parts.run_dir)] == [1, 2, 3]


def test_the_search_decides_the_algorithm_and_its_steps(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    chosen = ["algorithm.advantage_fn=grpo", "algorithm.policy_loss_fn=gspo", "seed=7"]
    chosen += ["budget.wall_seconds=0", "trainer.save_interval=5"]
    config = search_config(tmp_path, tiny_model_dir, *chosen)
    prepare(config, Purpose.ASK)
    learner = Learner(config, tmp_path / "search")
    assert learner.train(rows_of(tiny_model_dir)).version == 1
    resolved = load_config(learner.run_dir / "resolved.yaml")
    for key, value in {
        "mode": "train",
        "seed": 7,
        "algorithm.advantage_fn": "grpo",
        "algorithm.policy_loss_fn": "gspo",
        "trainer.save_interval": 1,
    }.items():
        assert value_of(resolved, key) == value
    cosine = "algorithm.optimizer.lr_scheduler_type=cosine"
    with pytest.raises(BadInput, match="not known before"):
        Learner(search_config(tmp_path, tiny_model_dir, cosine), tmp_path / "search")


def test_what_the_policy_sampled_is_what_the_trainer_scores(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """The recorded log-probabilities are those of the trainer, at the temperature of both."""
    config = search_config(tmp_path, tiny_model_dir, "model.temperature=0.7")
    make_ready(config)
    learner = Learner(config, tmp_path / "search")
    messages = [{"role": "user", "content": "say"}]

    async def ask(weights: Path | None, version: int) -> Any:
        async with LocalModels() as models:
            policy = Recorded(await models.take(config, weights), version)
            assert policy.role == POLICY
            asked = [policy.ask(messages, seed=seed) for seed in range(4)]
            greedy = await policy.complete(messages, temperature=0.0, max_tokens=3)
            with pytest.raises(ModelError):
                await policy.ask([{"role": "user", "content": "long " * 400}])
            return await asyncio.gather(*asked), greedy

    found, greedy = asyncio.run(ask(None, 0))
    assert greedy.usage.completion_tokens == 3
    settings = TrainerSettings(lora=LoraSpec(4, 8.0), temperature=0.7)
    for reply, answer in found:
        count = len(answer.tokens) - answer.prompt_length
        assert count == len(answer.logprobs) == reply.usage.completion_tokens
        assert answer.prompt_length == reply.usage.prompt_tokens
        mask = torch.ones(count, dtype=torch.bool)
        sample = Sample(torch.tensor(answer.tokens), answer.prompt_length, mask)
        (scored,) = LocalTrainer(tiny_model_dir, settings).logprobs([sample])
        assert answer.logprobs == pytest.approx(scored.tolist(), abs=1e-4)
    rows = [
        answer.row(group="g", anchor="p", reward=float(number))
        for number, (_, answer) in enumerate(found)
    ]
    learned = learner.train(rows)
    (_, answer), *_ = asyncio.run(ask(learned.weights, learned.version))[0]
    assert answer.version == 1
    assert answer.logprobs != found[0][1].logprobs
