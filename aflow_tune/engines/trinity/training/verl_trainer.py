"""Trinity's trainer actor on verl, with what 0.6.0 leaves out.

- **Removal of padding where flash-attn is not installed.** Trinity's trainer takes the padding out
  of every batch before it goes to verl, whatever `trainer.use_remove_padding` says, by functions
  that verl imports from flash-attn: without that package the first step of training ends with
  ModuleNotFoundError. flash-attn has to be compiled, and is not in our GPU set. transformers has
  the same functions in plain torch. The model itself is another matter: it attends with flash-attn
  unless told otherwise (`adaptations.adapt_cluster` does that with `use_remove_padding: false`).
- **Whole pairs in DPO** (`pair_loss.py`).
- **An error that is told.** Upstream logs what a step raised and ends as if all were well.
- **Its half of the sync check**: after every step, what the new weights say of the fixed text.
"""

from __future__ import annotations

from typing import Any

import torch
from trinity.common.config import Config
from trinity.common.experience import EID, Experience
from trinity.trainer.trainer import Trainer

from aflow_tune.config.engine import removes_padding
from aflow_tune.engines.trinity.training.pair_loss import keep_pairs
from aflow_tune.engines.trinity.training.sync_check import (
    forget,
    is_checked,
    probe_tokens,
    publish,
)


class VerlTrainer(Trainer):
    """Trinity's; see the module's docstring for what it adds."""

    def __init__(self, config: Config) -> None:
        provide_unpadding()
        super().__init__(config)
        self._error: Exception | None = None
        if config.algorithm.algorithm_type == "dpo" and config.trainer.trainer_type == "verl":
            keep_pairs(self.engine, config.buffer.train_batch_size)

    async def prepare(self) -> None:
        await super().prepare()
        self._publish()

    async def train_step(self, exps: list[Experience]) -> dict[str, float]:
        try:
            metrics: dict[str, float] = await super().train_step(exps)
            self._publish()
        except Exception as error:
            self._error = error
            raise
        return metrics

    async def train(self) -> str:
        """As upstream's; raises what a step raised, once the last checkpoint is saved."""
        name: str = await super().train()
        if self._error is not None:
            raise self._error
        return name

    async def shutdown(self) -> None:
        await super().shutdown()
        forget(self.config.ray_namespace)

    def _publish(self) -> None:
        config = self.config
        if is_checked(config):
            tokens = probe_tokens(self.engine.tokenizer, config.model.max_model_len)
            logprobs = verl_logprobs(self.engine, tokens, config.model.temperature)
            publish(config.ray_namespace, self.train_step_num, tokens, logprobs)


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
