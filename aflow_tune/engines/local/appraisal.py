"""What a policy makes of rows before it learns from them, by one forward pass over each: its loss,
and where the row lies among its hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aflow_tune.engines.local.packed_model import Sample, TokenTrie, micro_batches
from aflow_tune.engines.local.trainer import LocalTrainer


@torch.no_grad()
def appraise(trainer: LocalTrainer, rows: Sequence[Sequence[Sample]]) -> tuple[Tensor, Tensor]:
    """Mean loss per learned token, fp32 [N], nan for a row without one; and the mean of the last
    hidden states over the row's tokens before its last learned one, fp32 [N, H]; on the CPU. A row
    is one sample, or several (the two answers of a pair), whose tokens count alike."""
    samples = [sample for row in rows for sample in row]
    policy, each = trainer.policy, [[number] for number in range(len(samples))]
    scores_of: dict[int, Tensor] = {}
    states_of: dict[int, Tensor] = {}
    seen: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        seen.append(output.last_hidden_state[0])

    hook = trainer.base.base_model.register_forward_hook(keep)
    try:
        for indices in micro_batches(samples, each, trainer.settings.micro_batch_tokens):
            for part in [indices] if policy.packed else [[number] for number in indices]:
                seen.clear()
                width = max(len(samples[number].action_mask_R) for number in part)
                scores_BR, _ = policy.scores([samples[number] for number in part], width)
                trie = TokenTrie()  # numbers the tokens as `pack` does
                for number, scores_R in zip(part, scores_BR, strict=True):
                    if nodes := trie.add(samples[number].path()):
                        scores_of[number] = scores_R[samples[number].scored_columns()].cpu()
                        states_of[number] = seen[0][nodes].float().sum(0).cpu() / len(nodes)
    finally:
        hook.remove()
    empty, numbers = torch.empty(0), iter(range(len(samples)))
    nowhere = torch.zeros(trainer.base.config.get_text_config().hidden_size)
    losses, points = [], []
    for row in rows:
        own = [next(numbers) for _ in row]
        losses.append(-torch.cat([scores_of.get(number, empty) for number in own]).mean())
        points.append(torch.stack([states_of.get(number, nowhere) for number in own]).mean(0))
    return torch.stack(losses), torch.stack(points)
