"""The sampler's interface to a model: a batch of sequences, extended one token at a time.

`llama.LlamaDecoder` is the fast decoder for Llama-like models; `GenericDecoder` uses Hugging Face's
forward, for every other causal LM with ordinary key-value caches.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from aflow_tune.engines.local.llama import LlamaDecoder, logprobs_of, supports
from aflow_tune.engines.local.weights import Weights
from aflow_tune.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aflow_tune.engines.local.weights import LoraSpec


log = logging.getLogger(__name__)


class Decoder(Protocol):
    """Rows 0..B-1 are the active sequences. All methods run on the sampler's thread. Totals of
    prompt tokens: `computed_tokens` by the model, `shared_tokens` copied from cached prefixes."""

    computed_tokens: int
    shared_tokens: int

    def add(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Append one row per prompt; returns the logits after each prompt, [N, V]."""

    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to every row; returns the logits after it, [B, V]."""

    def drop(self, rows: set[int]) -> list[int]:
        """Remove rows; returns the old index of each remaining row."""

    def score(self, token_ids: Sequence[int], temperature: float, first: int = 1) -> list[float]:
        """Teacher-forced log-probabilities of tokens first..T-1; active rows are not touched."""

    def load(self, state: Mapping[str, Tensor], lora: LoraSpec | None) -> None:
        """Load an adapter state, or parameters by name; there must be no active rows. Raises
        BadInput: a name or shape that the model does not have; nothing is changed."""

    def reset(self) -> None:
        """Remove all rows and stored prefixes."""


@torch.inference_mode()
def make_decoder(model: PreTrainedModel) -> Decoder:
    """`LlamaDecoder` if it supports `model`, else `GenericDecoder`. The first is compared with
    Hugging Face's forward: some configurations look like Llama and compute something else."""
    if not supports(model):
        return GenericDecoder(model)
    lean = LlamaDecoder(model)
    vocabulary = model.config.get_text_config().vocab_size
    probe = [(7 + 31 * i) % vocabulary for i in range(8)]
    expected_T = torch.tensor(GenericDecoder(model).score(probe, 1.0))
    found_T = torch.tensor(lean.score(probe, 1.0))
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.5
    if bool((expected_T - found_T).abs().max() < tolerance):
        return lean
    log.warning("the lean decoder disagrees with %s; using its own forward", type(model).__name__)
    return GenericDecoder(model)


class GenericDecoder:
    """`Decoder` over `model.forward`: rows are padded on the left; equal prompts of a call are
    computed once. Adapters are merged into the model's own weights, from copies of the base."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.weights = Weights(model)
        self.base: dict[str, Tensor] = {}
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.computed_tokens = 0
        self.shared_tokens = 0
        self.reset()

    def reset(self) -> None:
        self.lengths: list[int] = []
        self.layers: list[tuple[Tensor, Tensor]] = []

    def load(self, state: Mapping[str, Tensor], lora: LoraSpec | None) -> None:
        self.weights.load(state, lora)
        self.reset()
        with torch.no_grad():
            for path in self.weights.adapted_paths():
                weight: Any = self.model.get_submodule(path).weight
                self.base.setdefault(path, weight.detach().clone())
            for path, base in self.base.items():
                weight = self.model.get_submodule(path).weight
                weight.copy_(self.weights.merged(path, base))

    def add(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        distinct: dict[tuple[int, ...], int] = {}
        places = [distinct.setdefault(tuple(p), len(distinct)) for p in prompts]
        lengths = [len(prompt) for prompt in distinct]
        width = max(lengths)
        ids = torch.zeros(len(distinct), width, dtype=torch.long)
        for row, prompt in enumerate(distinct):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
        logits, layers = self._forward(ids.to(self.model.device), lengths, None)
        repeat = torch.tensor(places, device=self.model.device)
        layers = [(k[repeat], v[repeat]) for k, v in layers]
        if self.lengths:
            columns = max(width, self.layers[0][0].shape[2])

            def stacked(held: Tensor, added: Tensor) -> Tensor:
                parts = (held, added)
                return torch.cat([F.pad(it, (0, 0, columns - it.shape[2], 0)) for it in parts])

            pairs = zip(self.layers, layers, strict=True)
            layers = [(stacked(k0, k1), stacked(v0, v1)) for (k0, v0), (k1, v1) in pairs]
        self.layers = layers
        self.lengths += [len(prompt) for prompt in prompts]
        self.computed_tokens += sum(lengths)
        self.shared_tokens += sum(len(prompt) for prompt in prompts) - sum(lengths)
        return logits[repeat]

    def step(self, tokens_B: Tensor) -> Tensor:
        self.lengths = [length + 1 for length in self.lengths]
        logits, self.layers = self._forward(tokens_B[:, None], self.lengths, self.layers)
        return logits

    def drop(self, rows: set[int]) -> list[int]:
        order = [row for row in range(len(self.lengths)) if row not in rows]
        self.lengths = [self.lengths[row] for row in order]
        if not order:
            self.layers = []
            return order
        index = torch.tensor(order, device=self.model.device)
        used = max(self.lengths)
        self.layers = [(k[index, :, -used:], v[index, :, -used:]) for k, v in self.layers]
        return order

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int], temperature: float, first: int = 1) -> list[float]:
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        logits_TV = self.model(input_ids=ids[:, :-1], use_cache=False).logits[0, first - 1 :]
        values: list[float] = logprobs_of(logits_TV, ids[0, first:], temperature).tolist()
        return values

    def _forward(
        self, ids_BN: Tensor, lengths: list[int], layers: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits after the last column, [B, V], and the cache per layer, [B, heads, columns, dim].
        `lengths` counts each row's tokens without padding, new ones included."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        cache = DynamicCache()
        for number, (k, v) in enumerate(layers or []):
            cache.update(k, v, number)
        columns = ids_BN.shape[1] + (layers[0][0].shape[2] if layers else 0)
        pads_B1 = columns - torch.tensor(lengths, device=ids_BN.device)[:, None]
        column_1L = torch.arange(columns, device=ids_BN.device)[None]
        inputs: dict[str, Any] = {
            "input_ids": ids_BN,
            "attention_mask": (column_1L >= pads_B1).long(),
            "past_key_values": cache,
            "use_cache": True,
        }
        if self.takes_positions:
            positions_BL = (column_1L - pads_B1).clamp_(min=0)
            inputs["position_ids"] = positions_BL[:, -ids_BN.shape[1] :]
        logits = self.model(**inputs).logits[:, -1]
        made: list[Any] = cache.layers
        odd = {type(layer).__name__ for layer in made if type(layer) is not DynamicLayer}
        if odd or not made:
            title, wanted = "This model cannot be sampled", "a causal LM with ordinary caches"
            found = f"cache layers of type {', '.join(sorted(odd)) or 'unknown'}"
            fix = "use another model, or engine: trinity on a GPU machine"
            raise BadInput.of(title, "model.model_path", wanted, found, fix)
        return logits, [(layer.keys, layer.values) for layer in made]
