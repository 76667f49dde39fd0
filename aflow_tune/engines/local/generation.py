"""One sequence while it is being drawn: what restricts its next token, and when it ends.

Knows tokens and text, not the model: the sampler hands it one token at a time.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from aflow_tune.engines.local.grammar import Matcher
from aflow_tune.engines.local.sampling import Completion, RowRule, SamplingParams, top_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Vocabulary:
    """How token ids become text, and which of them end a sequence."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.size: int = model.config.get_text_config().vocab_size
        self._texts: dict[int, str] = {}
        self.eos: set[int] = set()
        configured = getattr(model.generation_config, "eos_token_id", None)
        for source in (configured, model.config.eos_token_id, tokenizer.eos_token_id):
            if source is not None:
                self.eos.update([source] if isinstance(source, int) else source)
        # numpy, because torch would start a pool of workers for the calling thread and slow
        # the sampler's own down (see `Sampler.run_alone`).
        self.eos_mask_V = torch.from_numpy(np.isin(np.arange(self.size), list(self.eos)))

    def text(self, token_ids: list[int]) -> str:
        """The text of a completion: special tokens are left out."""
        decoded: Any = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return str(decoded)

    def token_text(self, token: int) -> str:
        """One token's text, special tokens included; parts of a character show as U+FFFD."""
        if token not in self._texts:
            self._texts[token] = str(self.tokenizer.decode([token]))
        return self._texts[token]


@dataclass
class Request:
    """One prompt, its parameters, and the sequences drawn from it."""

    prompt: list[int]
    params: SamplingParams
    future: Future[list[Completion]]
    drafts: list[Draft] = field(default_factory=list)

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.future.cancelled()

    def completions(self) -> list[Completion]:
        """All sequences; every one has ended."""
        return [draft.completion() for draft in self.drafts]


class Draft:
    """Sequence `index` of a request."""

    def __init__(
        self,
        request: Request,
        index: int,
        limit: int,
        vocabulary: Vocabulary,
        matcher: Matcher | None,
    ) -> None:
        self.request = request
        self.params = request.params
        self.limit = limit
        self.vocabulary = vocabulary
        self.matcher = matcher
        self.uniforms = request.params.uniforms(index, limit)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        # A token adds at least one byte of text, so a stop string that ends here began at
        # most this many tokens ago; the rest is slack for special tokens in between.
        longest = max((len(s.encode()) for s in self.params.stop), default=0)
        self._window = longest + 8 if longest else 0

    @property
    def uniform(self) -> float:
        """The number that draws the next token."""
        return self.uniforms[len(self.tokens)]

    def rule(self) -> RowRule | None:
        """What restricts the next token, or None when only the temperature matters."""
        p = self.params
        banned: Tensor | None = self.matcher.banned() if self.matcher else None
        if len(self.tokens) < p.min_tokens and banned is None:
            banned = self.vocabulary.eos_mask_V
        greedy = p.temperature == 0
        if banned is None and not greedy and p.top_p == 1 and p.top_k == 0:
            return None
        return RowRule(greedy, p.top_p, p.top_k, banned)

    def take(self, token: int, logprob: float, probs_V: Tensor) -> bool:
        """Append a drawn token; returns whether the sequence has ended."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.params.top_logprobs:
            self.tops.append(top_tokens(probs_V, self.params.top_logprobs))
        if self.matcher is not None:
            self.matcher.take(token)
        ended = len(self.tokens) >= self.params.min_tokens and (
            (token in self.vocabulary.eos and not self.params.ignore_eos)
            or (self.matcher is not None and self.matcher.complete)
            or self._stop_string_reached()
        )
        if ended:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def completion(self) -> Completion:
        """The finished sequence."""
        assert self.finish_reason is not None
        text = self.vocabulary.text(self.tokens)
        if self.params.stop and self.finish_reason == "stop":
            cuts = [at for stop in self.params.stop if (at := text.find(stop)) >= 0]
            text = text[: min(cuts, default=len(text))]
        return Completion(
            token_ids=self.tokens,
            logprobs=self.logprobs,
            text=text,
            finish_reason=self.finish_reason,
            top_logprobs=self.tops if self.params.top_logprobs else None,
        )

    def _stop_string_reached(self) -> bool:
        if not self._window:
            return False
        tail = self.vocabulary.text(self.tokens[-self._window :])
        return any(stop in tail for stop in self.params.stop)
