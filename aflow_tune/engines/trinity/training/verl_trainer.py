"""Trinity's trainer actor on verl, with what 0.6.0 leaves out.

- **Removal of padding without flash-attn**, which Trinity always needs and our GPU set lacks:
  transformers has the same functions in plain torch.
- **Whole pairs in DPO.** Trinity's loss sums the log-probabilities of a whole micro-batch before
  it compares chosen and rejected: margins of 2 and -1 with beta 0.1 give 0.644397, where the mean
  over the pairs is 0.671268 (Rafailov et al. 2023, equation 7). And verl cuts batches anywhere.
- **An error that is told.** Upstream logs what a step raised and ends as if all were well.
- **Its half of the sync check.**
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trinity.algorithm.policy_loss_fn.dpo_loss import DPOLossFn
from trinity.common.config import Config
from trinity.common.experience import EID, Experience

from aflow_tune.config.engine import removes_padding
from aflow_tune.engines.trinity.training.sync_check import is_checked, probe_tokens
from aflow_tune.engines.trinity.training.trainer import PublishingTrainer


class VerlTrainer(PublishingTrainer):
    """See the module's docstring for what it adds."""

    def __init__(self, config: Config) -> None:
        provide_unpadding()
        super().__init__(config)
        self._error: Exception | None = None
        if config.algorithm.algorithm_type == "dpo" and config.trainer.trainer_type == "verl":
            keep_pairs(self.engine, config.buffer.train_batch_size)

    async def train_step(self, exps: list[Experience]) -> dict[str, float]:
        try:
            return await super().train_step(exps)
        except Exception as error:
            self._error = error
            raise

    async def train(self) -> str:
        """As upstream's; raises what a step raised, once the last checkpoint is saved."""
        name: str = await super().train()
        if self._error is not None:
            raise self._error
        return name

    async def probe(self) -> tuple[list[int], list[float]] | None:
        if not is_checked(self.config):
            return None
        model = self.config.model
        tokens = probe_tokens(self.engine.tokenizer, model.max_model_len)
        return tokens, verl_logprobs(self.engine, tokens, model.temperature)


def verl_logprobs(engine: Any, tokens: list[int], temperature: float) -> list[float]:
    """Log-probabilities of tokens 1..T-1 under the weights of Trinity's `VERLTrainer`."""
    from trinity.trainer.verl.monkey_patch import left_right_2_no_padding
    from trinity.trainer.verl.utils import to_data_proto
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import no_padding_2_padding

    # Each of verl's data-parallel workers gets an equal share of a batch: one copy.
    copies = [
        Experience(eid=EID(task=str(i)), tokens=torch.tensor(tokens), prompt_length=1)
        for i in range(engine._get_dp_size())
    ]
    batch = to_data_proto(copies, engine.tokenizer.pad_token_id, engine.empty_model, engine.logger)
    data = left_right_2_no_padding(batch.to_tensordict())
    tensordict_utils.assign_non_tensor(
        data, calculate_entropy=False, compute_loss=False, temperature=temperature
    )
    output = engine.actor_rollout_wg.compute_log_prob(data)
    scores = no_padding_2_padding(tensordict_utils.get(output, "log_probs"), data)
    found: list[float] = scores[0, : len(tokens) - 1].float().tolist()
    return found


def provide_unpadding() -> None:
    """Let verl in this process take padding out; changes nothing where flash-attn is there."""
    if removes_padding():
        return
    from transformers import modeling_flash_attention_utils as plain
    from verl.utils import attention_utils

    # In the order in which verl unpacks them; the third, `rearrange`, is of einops and unused.
    functions: Any = (plain._index_first_axis, plain._pad_input, None, plain._unpad_input)
    attention_utils._get_attention_functions = lambda: functions


class PairLoss(DPOLossFn):
    """Trinity's DPO loss of each pair, summed and divided by `pairs`, those of the whole mini-batch
    of one worker (None: of the call): verl adds the gradients of micro-batches up."""

    def __init__(
        self,
        backend: str = "verl",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        pairs: int | None = None,
    ) -> None:
        super().__init__(backend, beta, label_smoothing)
        self.pairs = pairs

    def __call__(
        self, logprob: Tensor, ref_logprob: Tensor, action_mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, float]]:
        """Rows 2i and 2i + 1 are chosen and rejected of pair i; all shapes are [2P, R]."""
        results = [
            super(PairLoss, self).__call__(logprob[at], ref_logprob[at], action_mask[at])
            for at in (slice(i, i + 2) for i in range(0, len(logprob), 2))
        ]
        losses, metrics = zip(*results, strict=True)
        total = torch.stack(losses).sum() / (self.pairs or len(losses))
        means = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
        return total, means


def keep_pairs(engine: Any, pairs: int) -> None:
    """Let Trinity's `VERLTrainer` train on whole pairs, `pairs` of them a step. To be called before
    `engine.prepare()`, which hands the loss to the workers."""
    algorithm = engine.algorithm_config
    if algorithm.policy_loss_fn == "dpo":
        algorithm.policy_loss_fn = f"{PairLoss.__module__}.{PairLoss.__qualname__}"
        algorithm.policy_loss_fn_args["pairs"] = pairs // engine._get_dp_size()
    engine.config.actor.ppo_mini_batch_size = 2 * pairs  # verl counts sequences
    update = engine._update_actor

    def update_pairs(batch: Any, metrics: dict[str, Any]) -> Any:
        batch.meta_info["force_group_size"] = 2
        return update(batch, metrics)

    engine._update_actor = update_pairs
