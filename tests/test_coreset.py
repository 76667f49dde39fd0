"""The coreset of a data set: chosen once, before training, by the policy's loss and states."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_project import data_dir, pair, trainer_metrics, write_data_project

from aflow_tune.data.coreset import choose, count_of, k_centre
from aflow_tune.engines.local.appraisal import appraise
from aflow_tune.engines.local.packed_model import Sample
from aflow_tune.engines.local.trainer import LocalTrainer, TrainerSettings
from aflow_tune.errors import BadInput
from aflow_tune.tuning import run_config, validate_config

ANSWERS = ["a" * length for length in (3, 5, 8, 12, 17, 23, 30, 38)]
"""Of different lengths, so that what was learned can be told by its mean length."""


def _rows() -> list[dict[str, Any]]:
    return [pair(f"number {n}", answer) for n, answer in enumerate(ANSWERS)]


def test_centres_by_hand() -> None:
    line = np.array([[0.0], [1.0], [10.0]])
    assert k_centre(line, 2, [0]) == [0, 2]
    assert k_centre(line, 3, [1]) == [1, 2, 0]
    assert k_centre(np.array([[0.0], [0.0], [5.0], [0.0]]), 4, [1]) == [1, 2, 0, 3]
    # 3 and 4 to the right: (0, 0), then (3, 4) at 5; (2, 0) is 2 from the first, (3, 3) is 1 away
    assert k_centre(np.array([[0, 0], [2, 0], [3, 4], [3, 3]]), 3, [0]) == [0, 2, 1]


def test_strategies_by_hand() -> None:
    losses, points = np.array([5, 4, 0, 1, 3, math.nan]), np.array([[0], [1], [2], [10], [11], [5]])
    given = {"losses_N": losses, "points_NH": points}
    assert choose("loss_topk", 3, 6, 0, **given) == [0, 1, 4]
    assert choose("loss_topk", 6, 6, 0, **given) == [0, 1, 2, 3, 4, 5]
    # The half by loss: 0 and 1, at 0 and 1. The farthest from these is 4 (at 11), then 5 (at 5).
    assert choose("hybrid", 4, 6, 0, **given) == [0, 1, 4, 5]
    assert choose("hybrid", 3, 6, 0, **given) == [0, 1, 4]
    assert {0, 4} <= set(choose("diversity", 4, 6, 1, **given))  # the ends, wherever it begins
    draws = {tuple(choose("random", 3, 6, seed)) for seed in range(20)}
    assert len(draws) > 5
    assert choose("random", 3, 6, 7) == choose("random", 3, 6, 7)
    assert [count_of(size, 10) for size in (0.25, 0.01, 0.99, 3, 1)] == [2, 1, 10, 3, 1]


def test_loss_and_states_are_the_models_own(tiny_model_dir: Path) -> None:
    """Against the model's own forward pass, one sequence at a time."""
    trainer = LocalTrainer(tiny_model_dir, TrainerSettings(micro_batch_tokens=40))
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 256, (length,), generator=draw) for length in (9, 14, 30, 12)]
    ids[1][:6] = ids[0][:6]  # a prefix that two samples share
    masks = [torch.ones(len(one) - 4, dtype=torch.bool) for one in ids]
    masks[2][::2] = False
    samples = [Sample(one, 4, mask) for one, mask in zip(ids, masks, strict=True)]
    rows = [[samples[0], samples[1]], [samples[2]], [samples[3]], [samples[3]]]
    losses, states = appraise(trainer, rows)

    expected: list[tuple[list[float], torch.Tensor]] = []
    for one, mask in zip(ids, masks, strict=True):
        with torch.no_grad():
            out = trainer.base(one[None], output_hidden_states=True)
        logp = out.logits[0].log_softmax(-1)
        learned = [at for at in range(4, len(one)) if mask[at - 4]]
        of_tokens = [-float(logp[at - 1, one[at]]) for at in learned]
        expected.append((of_tokens, out.hidden_states[-1][0, : learned[-1]].mean(0)))
    together = expected[0][0] + expected[1][0]
    means = [sum(of) / len(of) for of in (together, expected[2][0], expected[3][0])]
    assert losses.tolist() == pytest.approx([*means, means[-1]], abs=1e-4)
    both = (expected[0][1] + expected[1][1]) / 2
    for found, wanted in zip(states, (both, expected[2][1], expected[3][1]), strict=False):
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_a_run_learns_from_its_coreset_and_keeps_to_it(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_data_project(tmp_path, tiny_model_dir, _rows())
    overrides = ["coreset.size=0.5", "coreset.strategy=loss_topk", "trainer.save_interval=1"]
    assert run_config(config, [*overrides, "buffer.total_steps=2"]).steps_done == 2
    path, run_dir = data_dir(tmp_path) / "coreset.json", data_dir(tmp_path)
    record = json.loads(path.read_text())
    chosen = [one["row"] for one in record["rows"]]
    assert [one["place"] for one in record["rows"]] == [
        f"{tmp_path / 'rows.jsonl'}:{number + 1}" for number in chosen
    ]

    # The four rows with the highest loss, by the base model's own forward pass.
    losses = _losses(tiny_model_dir, _rows())
    assert chosen == sorted(sorted(range(8), key=lambda n: -losses[n])[:4])
    assert [one["loss"] for one in record["rows"]] == pytest.approx(
        [losses[number] for number in chosen], abs=1e-3
    )
    # A step takes all four: one token a byte, and the end token.
    length = sum(len(ANSWERS[number]) + 1 for number in chosen) / 4
    metrics = trainer_metrics(run_dir)
    assert [metrics[step]["response_length/mean"] for step in (1, 2)] == [length, length]
    told = capsys.readouterr().out
    assert "coreset: 4 of 8 rows by loss_topk, mean loss per learned token" in told
    assert "4 of 8 rows by loss_topk" in (run_dir / "report.html").read_text()

    # The weights are others by now; the choice is not made again.
    before = path.read_bytes()
    assert run_config(config, [*overrides, "buffer.total_steps=3"]).steps_done == 3
    assert path.read_bytes() == before
    assert trainer_metrics(run_dir)[3]["response_length/mean"] == length
    path.unlink()
    with pytest.raises(BadInput, match="cannot be resumed"):
        run_config(config, [*overrides, "buffer.total_steps=4"])


def _losses(model: Path, rows: list[dict[str, Any]]) -> list[float]:
    """The mean loss of each row's answer, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    net, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), []
    for row in rows:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        prompt = tokenizer.apply_chat_template(
            row["messages"][:-1], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text.rstrip("\n"), return_tensors="pt")["input_ids"]  # to the end token
        labels = ids.clone()
        labels[0, : len(tokenizer(prompt)["input_ids"])] = -100
        with torch.no_grad():
            found.append(float(net(ids, labels=labels).loss))
    return found


def test_pairs_have_a_coreset_too(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": f"question {n}"}],
            "chosen": [{"role": "assistant", "content": "b" * (n + 2)}],
            "rejected": [{"role": "assistant", "content": "c" * (2 * n + 3)}],
        }
        for n in range(6)
    ]
    config = write_data_project(tmp_path, tiny_model_dir, rows, kind="dpo", steps=1)
    run_config(config, ["coreset.size=4", "buffer.total_steps=null"])  # 4 rows make one step
    record = json.loads((data_dir(tmp_path) / "coreset.json").read_text())
    assert len(record["rows"]) == 4
    assert all(one["loss"] > 0 for one in record["rows"])
    assert sorted(trainer_metrics(data_dir(tmp_path))) == [1]


@pytest.mark.parametrize(
    ("override", "place", "told"),
    [
        ("coreset.size=0", "coreset.size", "a share of the rows above 0"),
        ("coreset.size=2.5", "coreset.size", "or how many"),
        ("coreset.strategy=hardest", "coreset.strategy", "hybrid, loss_topk, diversity, random"),
        ("coreset.strategy=random", "coreset.size", "`size`, without which nothing is done"),
        ("coreset.size=99", "coreset.size", "at most 8 rows"),
        ("coreset.size=2", "buffer.train_batch_size", "not more than it has"),
        (
            "engine=trinity cluster.ray_address=10.0.0.1:6379 coreset.size=4",
            "coreset.size",
            "engine: local, or no `coreset`",
        ),
        ("replay.ratio=0.2", "replay.buffer", "`buffer`, without which nothing is done"),
        ("replay.ratio=1 replay.buffer=a.jsonl", "replay.ratio", "from 0 to below 1"),
        ("replay.capacity=0 replay.buffer=a.jsonl", "replay.capacity", "1 or more"),
        ("replay.buffer=a.txt", "replay.buffer", "a file, .jsonl"),
        ("replay.from=first replay.buffer=a.jsonl", "replay.from", "a list"),
        ("mode=both coreset.size=4", "coreset.size", "only `mode: train`"),
        ("mode=both replay.buffer=a.jsonl", "replay.buffer", "only `mode: train`"),
    ],
)
def test_settings_that_cannot_be_met_are_refused_with_their_place(
    tmp_path: Path, tiny_model_dir: Path, override: str, place: str, told: str
) -> None:
    config = write_data_project(tmp_path, tiny_model_dir, _rows())
    found = validate_config(config, override.split()).faults
    texts = [str(fault) for fault in found if place in fault.where or place in str(fault)]
    assert any(told in text for text in texts), [str(fault) for fault in found]
