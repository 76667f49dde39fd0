"""What a request asks for, how one token is drawn, and a sequence while it is being drawn.

A token is drawn by inverting the cumulative distribution at one uniform number, so a
sequence's whole randomness is a row of uniforms fixed at admission: the same seed, prompt and
weights give the same tokens in whatever company. Log-probabilities are those of
softmax(logits / temperature) over the whole vocabulary in fp32; top-p, top-k and grammar masks
(llguidance's) restrict what is drawn, never what is reported, so a trainer can recompute them.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: a sampling model can otherwise emit blanks without end."""
_BLOCK = 256


@dataclass(frozen=True)
class SamplingParams:
    """One request: `n` sequences from one prompt, of at most `max_tokens` new tokens each, the end
    of sequence included. Checked by `validate`."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    """Divides the logits. 0 takes the likeliest token and reports log-probabilities at 1."""
    top_p: float = 1.0
    top_k: int = 0
    """Draw among the k likeliest tokens; 0 = all."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; the tokens that spell it are kept."""
    seed: int | None = None
    """Sequence i draws from Generator(seed + i); None takes fresh randomness."""
    top_logprobs: int = 0
    """Also report this many likeliest tokens at every position."""
    min_tokens: int = 0
    """No end of sequence and no stop string before this many tokens."""
    ignore_eos: bool = False
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    """A Lark grammar (llguidance's dialect) that the text follows."""

    def validate(self) -> None:
        """Raises BadInput with every value that is out of range."""
        rules = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or more, finite"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("stop", "" not in self.stop, "no empty string"),
            ("top_logprobs", 0 <= self.top_logprobs <= 20, "0 to 20"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens"),
            ("grammar", self.grammar is None or self.json_schema is None, "not with json_schema"),
        ]
        faults = [
            Fault(name, expected, repr(getattr(self, name)), f"change {name}")
            for name, holds, expected in rules
            if not holds
        ]
        if faults:
            raise BadInput("The sampling parameters are out of range", faults)

    def uniforms(self, index: int, count: int) -> list[float]:
        seed = secrets.randbits(63) if self.seed is None else (self.seed + index) % 2**63
        generator = torch.Generator().manual_seed(seed)
        return torch.rand(count, generator=generator).tolist()


@dataclass(frozen=True)
class Completion:
    """One drawn sequence: its tokens, an end of sequence included, and for each the fp32 log
    softmax(logits / temperature). `text` has no special tokens and is cut before a stop string."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    """'stop' (end of sequence, stop string, grammar complete) or 'length'."""
    top_logprobs: list[dict[int, float]] | None = None
    """The likeliest tokens of each position; None unless asked for."""


@dataclass
class RowRule:
    """What restricts one row's next token beyond the temperature. `banned`: boolean over the
    vocabulary, the tokens that must not be drawn."""

    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    banned: Tensor | None = None


def draw(
    logits_BV: Tensor,
    temperatures_B1: Tensor | None,
    uniforms_B: Tensor,
    rules: dict[int, RowRule],
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row: tokens_B, their log-probabilities_B, and probabilities_BV, fp32.

    `temperatures_B1` are positive divisors, or None when all are 1; `uniforms_B` in [0, 1);
    `rules` the rows that are restricted, by row number.
    """
    if temperatures_B1 is not None:
        logits_BV = logits_BV.float() / temperatures_B1
    probs_BV = torch.softmax(logits_BV, dim=-1, dtype=torch.float32)
    weights_BV = probs_BV
    if any(not rule.greedy or rule.banned is not None for rule in rules.values()):
        weights_BV = probs_BV.clone()
        for row, rule in rules.items():
            weights_BV[row] = _restricted(logits_BV[row].float(), rule)
    tokens_B = invert(weights_BV, uniforms_B)
    for row, rule in rules.items():
        if rule.greedy:
            tokens_B[row] = weights_BV[row].argmax()
    logprobs_B = probs_BV.gather(1, tokens_B[:, None])[:, 0].log()
    for row in torch.isinf(logprobs_B).nonzero()[:, 0].tolist():
        # A token that only a restriction made possible: its probability underflows.
        exact_V = torch.log_softmax(logits_BV[row].float(), dim=-1)
        logprobs_B[row] = exact_V[tokens_B[row]]
    return tokens_B, logprobs_B, probs_BV


def invert(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds uniform * total, per row. Sums blocks of the
    vocabulary first, so that only one block per row needs a running sum. A token of weight zero is
    never returned."""
    if short := -weights_BV.shape[1] % _BLOCK:
        weights_BV = F.pad(weights_BV, (0, short))
    blocks_BKW = weights_BV.unflatten(1, (-1, _BLOCK))
    mass_BK = blocks_BKW.sum(-1)
    edges_BK = mass_BK.cumsum(-1)
    target_B1 = uniforms_B[:, None] * edges_BK[:, -1:]
    block_B1 = torch.searchsorted(edges_BK, target_B1, right=True)
    block_B1.clamp_(max=edges_BK.shape[1] - 1)
    before_B1 = edges_BK.gather(1, block_B1) - mass_BK.gather(1, block_B1)
    rows = torch.arange(len(blocks_BKW), device=weights_BV.device)
    block_BW = blocks_BKW[rows, block_B1[:, 0]]
    inner_BW = block_BW.cumsum(-1)
    offset_B1 = torch.searchsorted(inner_BW, target_B1 - before_B1, right=True)
    offset_B1.clamp_(max=_BLOCK - 1)
    # Rounding between the two sums can point past the last token that has any weight.
    empty = block_BW.gather(1, offset_B1) == 0
    tokens_B1 = block_B1 * _BLOCK + offset_B1
    if bool(empty.any()):
        heaviest_B1 = block_BW.argmax(-1, keepdim=True)
        tokens_B1 = torch.where(empty, block_B1 * _BLOCK + heaviest_B1, tokens_B1)
        lost = weights_BV.gather(1, tokens_B1) == 0
        tokens_B1 = torch.where(lost, weights_BV.argmax(-1, keepdim=True), tokens_B1)
    return tokens_B1[:, 0]


def _restricted(scaled_V: Tensor, rule: RowRule) -> Tensor:
    """Probabilities of one row after banning, top-k and top-p (in this order), fp32."""
    if rule.banned is not None:
        scaled_V = scaled_V.masked_fill(rule.banned, -math.inf)
    if 0 < rule.top_k < len(scaled_V):
        kth = scaled_V.topk(rule.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < kth, -math.inf)
    probs_V = torch.softmax(scaled_V, dim=-1)
    if rule.top_p < 1:
        ordered, order = probs_V.sort(descending=True)
        outside = ordered.cumsum(-1) - ordered >= rule.top_p
        probs_V[order[outside]] = 0
    return probs_V


def prompt_faults(prompt_ids: Sequence[int], max_model_len: int) -> list[Fault]:
    """Why a prompt cannot be completed at all."""
    if 0 < len(prompt_ids) < max_model_len:
        return []
    expected = f"1 to fewer than {max_model_len} tokens (max_model_len), to leave room to answer"
    cure = "shorten the prompt or raise model.max_model_len"
    return [Fault("prompt", expected, f"{len(prompt_ids)} tokens", cure)]


class Vocabulary:
    """How token ids become text, which end a sequence, and which may come next in a given form."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.size: int = model.config.get_text_config().vocab_size
        self._texts: dict[int, str] = {}
        self._view: Any = None
        self.eos: set[int] = set()
        configured = getattr(model.generation_config, "eos_token_id", None)
        for source in (configured, model.config.eos_token_id, tokenizer.eos_token_id):
            if source is not None:
                self.eos.update([source] if isinstance(source, int) else source)
        # numpy, because torch would start a pool of workers for the calling thread too.
        self.eos_mask_V = torch.from_numpy(np.isin(np.arange(self.size), list(self.eos)))

    def text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """One token's text, special tokens included; parts of a character show as U+FFFD."""
        if token not in self._texts:
            self._texts[token] = str(self.tokenizer.decode([token]))
        return self._texts[token]

    def matcher(self, params: SamplingParams) -> LLMatcher | None:
        """Follows the form that a request asks for, for one sequence; None without one. BadInput if
        llguidance cannot follow the schema or grammar."""
        if params.json_schema is None and params.grammar is None:
            return None
        import llguidance.hf
        from llguidance import LLMatcher

        if self._view is None:
            self._view = llguidance.hf.from_tokenizer(
                self.tokenizer, n_vocab=self.size, eos_token=sorted(self.eos)
            )
        if params.json_schema is not None:
            source = json.dumps(params.json_schema)
            grammar = LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE)
        else:
            grammar = LLMatcher.grammar_from_lark(str(params.grammar))
        matcher = LLMatcher(self._view, grammar, log_level=0)
        if matcher.is_error():
            title, found = "The output format cannot be enforced", matcher.get_error()
            where = "grammar" if params.json_schema is None else "json_schema"
            raise BadInput.of(
                title, where, "what llguidance supports", found.splitlines()[0], "simplify it"
            )
        return matcher


@dataclass
class Request:
    """One prompt, its parameters, and the sequences drawn from it."""

    prompt: list[int]
    params: SamplingParams
    future: Future[list[Completion]]
    drafts: list[Draft] = field(default_factory=list)


class Draft:
    """Sequence `index` of a request while it is drawn, at most `limit` tokens."""

    def __init__(self, request: Request, index: int, limit: int, vocabulary: Vocabulary) -> None:
        self.request = request
        self.params = request.params
        self.limit = limit
        self.vocabulary = vocabulary
        self.matcher = vocabulary.matcher(request.params)
        self.uniforms = request.params.uniforms(index, limit)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        # A token adds at least one byte of text, so a stop string that ends here began at
        # most this many tokens ago; the rest is slack for special tokens in between.
        self._window = 8 + max((len(s.encode()) for s in self.params.stop), default=0)

    def rule(self) -> RowRule | None:
        """What restricts the next token, or None when only the temperature matters."""
        p = self.params
        banned: Tensor | None = None
        if self.matcher is not None:
            bias = bytearray(self.matcher.compute_logit_bias())
            banned = torch.frombuffer(bias, dtype=torch.uint8) == 0
        elif len(self.tokens) < p.min_tokens:
            banned = self.vocabulary.eos_mask_V
        greedy = p.temperature == 0
        if banned is None and not greedy and p.top_p == 1 and p.top_k == 0:
            return None
        return RowRule(greedy, p.top_p, p.top_k, banned)

    def take(self, token: int, logprob: float, probs_V: Tensor) -> bool:
        """Append a drawn token; returns whether the sequence has ended."""
        params = self.params
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if params.top_logprobs:
            values, indices = probs_V.topk(min(params.top_logprobs, len(probs_V)))
            self.tops.append(dict(zip(indices.tolist(), values.log().tolist(), strict=True)))
        if self.matcher is not None:
            self.matcher.consume_token(token)
        tail = self.vocabulary.text(self.tokens[-self._window :]) if params.stop else ""
        ended = len(self.tokens) >= params.min_tokens and (
            (token in self.vocabulary.eos and not params.ignore_eos)
            or (self.matcher is not None and self.matcher.is_stopped())
            or any(stop in tail for stop in params.stop)
        )
        if ended:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        text = self.vocabulary.text(self.tokens)
        if self.finish_reason == "stop":
            text = before_stop(text, self.params.stop)
        tops = self.tops if self.params.top_logprobs else None
        return Completion(self.tokens, self.logprobs, text, self.finish_reason, tops)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings."""
    cuts = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(cuts, default=len(text))]


def logprobs_of(logits_TV: Tensor, targets_T: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets, fp32 [T]."""
    scaled_TV = logits_TV.float() / temperature
    chosen_T = scaled_TV.gather(-1, targets_T[:, None])[:, 0]
    return chosen_T - torch.logsumexp(scaled_TV, dim=-1)
