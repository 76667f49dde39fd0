"""What the sampler asks of a model: rows of sequences that are extended one token at a time.

Two implementations: `llama.LlamaDecoder`, lean and fast for the Llama family, and
`generic.GenericDecoder`, Hugging Face's own forward for every other causal LM.
`make_decoder` picks one, and checks the lean one against Hugging Face's forward first.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aflow_tune.engines.local.lora_spec import LoraSpec

log = logging.getLogger(__name__)


class Decoder(Protocol):
    """Rows 0..B-1 are the active sequences. All methods run on the sampler's thread."""

    computed_tokens: int
    """Prompt tokens that went through the model."""
    shared_tokens: int
    """Prompt tokens whose keys and values were copied instead."""

    def add(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Append one row a prompt; returns the logits after each prompt, [N, V]."""
        ...

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every row; returns the logits after it, [B, V]."""
        ...

    def drop(self, rows: set[int]) -> list[int]:
        """Remove rows; returns for each remaining row the row that it was before."""
        ...

    def score(self, token_ids: Sequence[int], temperature: float) -> list[float]:
        """Teacher-forced log-probabilities of tokens 1..T-1; active rows are not touched."""
        ...

    def load(self, state: Mapping[str, Tensor], lora: LoraSpec | None) -> None:
        """Change the weights: an adapter state, or parameters by their names. No active rows.

        Raises:
            BadInput: a name or shape that the model does not have; nothing was changed.
        """
        ...

    def reset(self) -> None:
        """Drop all rows and every stored prefix."""
        ...


def make_decoder(model: PreTrainedModel) -> Decoder:
    """The fastest decoder that computes what `model` computes."""
    from aflow_tune.engines.local.generic import GenericDecoder
    from aflow_tune.engines.local.llama import LlamaDecoder, supports

    if not supports(model):
        return GenericDecoder(model)
    fast = LlamaDecoder(model)
    if _agrees(fast, model):
        return fast
    log.warning("the lean decoder disagrees with %s; using its own forward", type(model).__name__)
    return GenericDecoder(model)


def logprobs_of(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets, fp32 [T]."""
    scaled_TV = logits_TV.float() / temperature
    chosen_T = scaled_TV.gather(-1, targets_T[:, None])[:, 0]
    return chosen_T - torch.logsumexp(scaled_TV, dim=-1)


@torch.inference_mode()
def _agrees(decoder: Decoder, model: PreTrainedModel) -> bool:
    """Whether both give the same log-probabilities on a short probe.

    Catches configurations that look like Llama but compute something else. The tolerance is
    the rounding of the number format over a few dozen layers, far below a wrong formula.
    """
    vocabulary = model.config.get_text_config().vocab_size
    probe = [(7 + 31 * i) % vocabulary for i in range(8)]
    ids = torch.tensor([probe], device=model.device)
    logits_TV = model(input_ids=ids, use_cache=False).logits[0]
    expected_T = logprobs_of(logits_TV[:-1], ids[0, 1:], 1.0)
    found_T = torch.tensor(decoder.score(probe, 1.0))
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.5
    return bool((expected_T.cpu() - found_T).abs().max() < tolerance)
