"""What is added where vLLM or flash-attn is not installed, and whole DPO pairs on verl."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import attention_utils

from aflow_tune.config.engine import removes_padding
from aflow_tune.engines.trinity.training.pair_loss import PairLoss
from aflow_tune.engines.trinity.training.trainer import provide_unpadding

# isort: split
from trinity.algorithm import POLICY_LOSS_FN
from trinity.trainer.verl.monkey_patch import left_right_2_no_padding

pytestmark = pytest.mark.skipif(removes_padding(), reason="flash-attn is installed")


def batch() -> TensorDict:
    """Two sequences, 'left padding, 5 6 7' and '8 9, right padding'."""
    return TensorDict(
        {
            "input_ids": torch.tensor([[0, 5, 6, 7], [8, 9, 0, 0]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]),
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "position_ids": torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]]),
        },
        batch_size=[2],
    )


def test_ours_takes_the_padding_out_and_the_stock_trainer_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModuleNotFoundError, match="flash_attn"):
        left_right_2_no_padding(batch())
    before: Any = attention_utils._get_attention_functions
    monkeypatch.setattr(attention_utils, "_get_attention_functions", before)  # put back after
    provide_unpadding()
    packed = left_right_2_no_padding(batch())
    assert packed["input_ids"].values().tolist() == [5, 6, 7, 8, 9]
    assert packed["input_ids"].offsets().tolist() == [0, 3, 5]
    assert packed["position_ids"].values().tolist() == [0, 1, 2, 0, 1]


def test_every_pair_keeps_a_dpo_loss_of_its_own() -> None:
    """By hand: margins 2 and -1, beta 0.1: -log sigmoid gives 0.598139 and 0.744397."""
    logprob = torch.tensor([[1.5, 0.5], [0.0, 0.0], [-0.5, 0.0], [0.5, 0.0]])
    reference, mask = torch.zeros(4, 2), torch.ones(4, 2)
    trinitys = POLICY_LOSS_FN.get("dpo")(beta=0.1)
    assert float(trinitys(logprob, reference, mask)[0]) == pytest.approx(0.644397, abs=1e-6)
    ours = POLICY_LOSS_FN.get(f"{PairLoss.__module__}.PairLoss")(backend="verl", beta=0.1, pairs=2)
    assert set(ours.select_keys) == set(trinitys.select_keys)
    whole, metrics = ours(logprob, mask, reference)
    assert float(whole) == pytest.approx(0.671268, abs=1e-6)
    assert metrics["accuracy_mean"] == 0.5
    halves = [ours(logprob[at], mask[at], reference[at])[0] for at in (slice(2), slice(2, 4))]
    assert float(sum(halves)) == pytest.approx(float(whole))  # as verl adds micro-batches up
