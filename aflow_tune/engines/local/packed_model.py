"""Log-probabilities of a micro-batch from any Hugging Face causal LM.

Two shortcuts make a step cheap: the micro-batch as one row of token tries, and an output head
that never keeps logits. Whether a model allows them is not guessed from its class: both are
probed once on a dozen tokens against the model's own plain forward pass. A model that refuses
or disagrees (no position ids, recurrent state, capped logits, attention of its own) runs the
plain way: one unpadded sequence at a time, its own logits.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aflow_tune.engines.local import trie_attention
from aflow_tune.engines.local.packing import PackedRow, Sample, pack
from aflow_tune.engines.local.token_scores import token_scores

logger = logging.getLogger(__name__)

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of a log-probability that counts as rounding in the probe."""


class PackedModel:
    """A causal LM that scores samples. `packed` and `fused_head` say which shortcuts hold."""

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0) -> None:
        self.model = model.eval()
        self.temperature = temperature
        self.device = next(model.parameters()).device
        self._own_attention: str = model.config._attn_implementation or "eager"
        self.packed = self.fused_head = False
        self._probe()

    def scores(
        self, samples: Sequence[Sample], width: int, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """fp32 logprobs_BR of the scored response tokens, and their entropies [B, R] or None.

        `width` is R. Columns that do not count are 0 and carry no gradient.
        """
        parts = [list(samples)] if self.packed else [[sample] for sample in samples]
        index: list[tuple[Tensor, Tensor]] = []
        values: list[Tensor] = []
        entropies: list[Tensor] = []
        first = 0
        for part in parts:
            row = pack(part, self.device)
            if row is not None:
                logprobs_M, entropy_U = self._row(row, entropy)
                index.append((row.row_M + first, row.column_M))
                values.append(logprobs_M)
                if entropy_U is not None:
                    entropies.append(entropy_U[row.node_M])
            first += len(part)
        shape = (len(samples), width)
        if not values:
            zero = torch.zeros(shape, device=self.device)
            return zero, zero.clone() if entropy else None
        where = (torch.cat([r for r, _ in index]), torch.cat([c for _, c in index]))

        def spread(scores: list[Tensor]) -> Tensor:
            return torch.zeros(shape, device=self.device).index_put(where, torch.cat(scores))

        return spread(values), spread(entropies) if entropy else None

    def _row(self, row: PackedRow, entropy: bool) -> tuple[Tensor, Tensor | None]:
        inputs: dict[str, Tensor] = {"input_ids": row.tokens_N[None]}
        if self.packed:
            inputs["position_ids"] = row.positions_N[None]
        with self._attention_of(row) if self.packed else nullcontext():
            if self.fused_head:
                hidden_NH = self.model.base_model(**inputs, use_cache=False).last_hidden_state[0]
                head = self.model.get_output_embeddings()
                return token_scores(
                    hidden_NH.index_select(0, row.scored_U),
                    head.weight,
                    getattr(head, "bias", None),
                    row.node_M,
                    row.target_M,
                    temperature=self.temperature,
                    entropy=entropy,
                )
            logits_NV = self.model(**inputs).logits[0]
        logp_UV = (logits_NV[row.scored_U].float() / self.temperature).log_softmax(-1)
        entropy_U = -(logp_UV.exp() * logp_UV).sum(-1) if entropy else None
        return logp_UV[row.node_M, row.target_M], entropy_U

    @contextmanager
    def _attention_of(self, row: PackedRow) -> Iterator[None]:
        """The model's attention is that of `row`; outside it is the model's own."""
        self.model.set_attn_implementation(trie_attention.NAME)
        try:
            with trie_attention.use_layout(row):
                yield
        finally:
            self.model.set_attn_implementation(self._own_attention)

    @torch.no_grad()
    def _probe(self) -> None:
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        # A shared prefix, a branch, and a sample of its own, longer than the others.
        ids = [(7 * i * i + 3 * i + 1) % vocabulary for i in range(24)]
        samples = [
            Sample(torch.tensor(ids[:n] + ids[a:b]), n, torch.ones(b - a, dtype=torch.bool))
            for n, a, b in ((6, 6, 9), (6, 12, 16), (1, 14, 23))
        ]
        reference, _ = self.scores(samples, 9)

        def agrees(name: str) -> bool:
            try:
                probed, _ = self.scores(samples, 9)
            except Exception as error:
                logger.info("%s is off: %s: %s", name, type(error).__name__, error)
                return False
            difference = float((probed - reference).abs().max())
            if difference <= PROBE_TOLERANCE.get(self.model.dtype, 1e-3):
                return True
            logger.info("%s is off: log-probabilities differ by %.3g", name, difference)
            return False

        self.fused_head = self._has_plain_head()
        self.fused_head = self.fused_head and agrees("the fused output head")
        self.packed = self._takes_layouts()
        self.packed = self.packed and agrees("packing")

    def _has_plain_head(self) -> bool:
        return (
            isinstance(self.model.get_output_embeddings(), nn.Linear)
            and self.model.base_model is not self.model
        )

    def _takes_layouts(self) -> bool:
        takes = inspect.signature(self.model.forward).parameters
        return "position_ids" in takes and bool(
            getattr(self.model, "_supports_attention_backend", False)
        )
