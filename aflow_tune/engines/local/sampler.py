"""The sampler: continuous batching of many requests, computed on one thread.

Requests, weight updates and scoring jobs are served in order. Waiting sequences join the running
batch between two decode steps. A weight update is a barrier, so no completion mixes two versions.
`deterministic=True` serves one request at a time from an empty cache; otherwise the other rows of
the batch may change the last bits of a request's logits.

Tokens are drawn by inverse transform sampling from uniforms fixed when the request arrives: up to
those last bits, seed, prompt and weights determine the tokens, whatever else is in the batch.
Log-probabilities are those of softmax(logits / temperature) over the whole vocabulary in fp32;
top-p, top-k and grammars restrict what is drawn, not what is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from aflow_tune.engines.local.compute import COMPUTE
from aflow_tune.engines.local.decoder import Decoder, make_decoder
from aflow_tune.errors import BadInput, Fault, RunFailed

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from aflow_tune.engines.local.weights import LoraSpec

T = TypeVar("T")

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance options that fix the white space: a model could otherwise emit blanks endlessly."""
_BLOCK = 256


@dataclass(frozen=True)
class SamplingParams:
    """One request: `n` sequences from one prompt, of at most `max_tokens` new tokens each including
    the end of sequence. Checked by `validate`."""

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    """Divides the logits. 0: greedy, with log-probabilities at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """Draw among the k likeliest tokens; 0 = all."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; its tokens stay in `token_ids`."""
    seed: int | None = None
    """Sequence i draws from Generator(seed + i); None: a random seed."""
    top_logprobs: int = 0
    """Also report the log-probabilities of this many most likely tokens at every position."""
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
    """One sampled sequence: its tokens including the end of sequence, and for each the fp32 log
    softmax(logits / temperature). `text` has no special tokens and is cut before a stop string."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    """'stop' (end of sequence, stop string, grammar complete) or 'length'."""
    top_logprobs: list[dict[int, float]] | None = None
    """Token id to log-probability of the most likely tokens per position; None unless requested."""


@dataclass
class RowRule:
    """Restrictions on one row's next token beyond the temperature. `banned`: boolean [V], the
    tokens that must not be drawn."""

    greedy: bool = False
    top_p: float = 1.0
    top_k: int = 0
    banned: Tensor | None = None


def draw(
    logits_BV: Tensor, temperatures_B1: Tensor | None, uniforms_B: Tensor, rules: dict[int, RowRule]
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row with uniforms in [0, 1). Returns tokens_B, fp32 log-probabilities_B
    and unrestricted probabilities_BV. `temperatures_B1`: None if all are 1; `rules`: by row."""
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
        # Only drawn because of a restriction: its unrestricted probability underflows to 0.
        exact_V = torch.log_softmax(logits_BV[row].float(), dim=-1)
        logprobs_B[row] = exact_V[tokens_B[row]]
    return tokens_B, logprobs_B, probs_BV


def invert(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Per row, the first token whose cumulative weight exceeds uniform * total, never one of weight
    zero. Sums blocks first, so that only one block per row needs a running sum."""
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
        scaled_V = scaled_V.masked_fill(rule.banned.to(scaled_V.device), -math.inf)
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
    expected, fix = f"1 to {max_model_len - 1} tokens", "shorten it, or raise model.max_model_len"
    return [Fault("prompt", expected, f"{len(prompt_ids)} tokens", fix)]


class Vocabulary:
    """Decoding of token ids, the end-of-sequence ids, and grammar matchers."""

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

    def text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """One token's text, special tokens included; a partial character shows as U+FFFD."""
        if token not in self._texts:
            self._texts[token] = str(self.tokenizer.decode([token]))
        return self._texts[token]

    def matcher(self, params: SamplingParams) -> LLMatcher | None:
        """A matcher of the request's schema or grammar for one sequence, None without either.
        Raises BadInput: llguidance does not support it."""
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
    """Sequence `index` of a request while it is sampled, at most `limit` tokens."""

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
        # A token adds at least one byte of text, so a stop string that ends now began within this
        # many tokens; 8 more for special tokens in between.
        self._window = 8 + max((len(s.encode()) for s in self.params.stop), default=0)

    def rule(self) -> RowRule | None:
        """Restrictions on the next token; None if only the temperature applies."""
        p = self.params
        banned: Tensor | None = None
        if self.matcher is not None:
            bias = bytearray(self.matcher.compute_logit_bias())
            banned = torch.frombuffer(bias, dtype=torch.uint8) == 0
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
        if (
            (token in self.vocabulary.eos and not params.ignore_eos)
            or (self.matcher is not None and self.matcher.is_stopped())
            or any(stop in tail for stop in params.stop)
        ):
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


@dataclass
class _Job:
    """Work that runs while no sequence is active."""

    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class Sampler:
    """Samples completions from a causal LM in evaluation mode, of which it takes ownership.
    `max_batch` sequences are decoded together; `max_model_len`: prompt and completion; `threads`
    None: one per physical core; `lora`: the shape of adapters passed to `update_weights`; `thread`:
    runs one job at a time, among them all torch work of this sampler."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_batch: int = 64,
        max_model_len: int,
        threads: int | None = None,
        deterministic: bool = False,
        lora: LoraSpec | None = None,
        thread: Executor = COMPUTE,
    ) -> None:
        self.threads = threads or psutil.cpu_count(logical=False) or 1
        self.max_batch = max_batch
        self.max_model_len = max_model_len
        self.deterministic = deterministic
        self.lora = lora
        self.version = 0
        self.vocabulary = Vocabulary(model, tokenizer)
        self.device = model.device
        self._queue: deque[Request | _Job] = deque()
        self._waiting: deque[Draft] = deque()
        self._active: list[Draft] = []
        self._logits_BV: Tensor | None = None
        self._thread = thread
        self._lock = threading.Lock()
        self._scheduled = False  # a turn is waiting for the thread, or under way
        self._closing = False
        self._generated = 0
        self._busy = 0.0
        self.decoder = thread.submit(self._make_decoder, model).result()

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[list[Completion]]:
        """`params[i].n` completions for prompt i; blocks. Raises BadInput: a prompt or its
        parameters are invalid; RunFailed: the sampler failed (see its cause) or was closed."""
        requests = [self._request(p, s) for p, s in zip(prompts, params, strict=True)]
        self._enqueue(requests)
        return [request.future.result() for request in requests]

    async def submit(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        """Complete one prompt from any event loop; raises as `generate`. Cancelling the task frees
        its place in the batch at the next step."""
        request = self._request(prompt_ids, params)
        self._enqueue([request])
        return await asyncio.wrap_future(request.future)

    def token_logprobs(
        self, token_ids: list[int], temperature: float = 1.0, first: int = 1
    ) -> list[float]:
        """Teacher-forced log-probabilities of tokens first..T-1, fp32; blocks. RunFailed as in
        `generate`."""
        return self._on_thread(lambda: self.decoder.score(token_ids, temperature, first))

    def update_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Load new weights; blocks until they are in use and `self.version` is `version`. `state`,
        BadInput: as `Weights.load`; RunFailed as `generate`."""

        def load() -> None:
            self.decoder.load(state, self.lora)
            self.version = version

        self._on_thread(load)

    def stats(self) -> dict[str, float]:
        """Totals since the start: tokens, and seconds in which the sampler worked."""
        return {
            "generated_tokens": self._generated,
            "prefilled_tokens": self.decoder.computed_tokens,
            "shared_tokens": self.decoder.shared_tokens,
            "busy_seconds": self._busy,
        }

    def close(self) -> None:
        """Fail pending requests with RunFailed, free the cache."""
        with self._lock:
            self._closing = True
        error = RunFailed("the sampler was closed")
        self._thread.submit(self._fail_all, error).result()

    def _request(self, prompt_ids: list[int], params: SamplingParams) -> Request:
        params.validate()
        faults = prompt_faults(prompt_ids, self.max_model_len)
        size = self.vocabulary.size
        if outside := [t for t in prompt_ids if not 0 <= t < size]:
            fix = "use this model's tokenizer"
            faults.append(Fault("prompt", f"token ids below {size}", str(outside[:5]), fix))
        if faults:
            raise BadInput("The prompt cannot be completed", faults)
        request = Request(list(prompt_ids), params, Future())
        limit = min(params.max_tokens, self.max_model_len - len(prompt_ids))
        request.drafts = [Draft(request, i, limit, self.vocabulary) for i in range(params.n)]
        return request

    def _on_thread(self, work: Callable[[], T]) -> T:
        job = _Job(work)
        self._enqueue([job])
        result: T = job.future.result()
        return result

    def _enqueue(self, items: list[Any]) -> None:
        with self._lock:
            if self._closing:
                raise RunFailed("the sampler is closed")
            self._queue.extend(items)
            self._schedule()

    def _schedule(self) -> None:
        """Ask the thread for a turn if there is work; call with the lock."""
        if not self._scheduled and (self._queue or self._waiting or self._active):
            self._scheduled = True
            self._thread.submit(self._turn)

    @torch.inference_mode()
    def _make_decoder(self, model: PreTrainedModel) -> Decoder:
        torch.set_num_threads(self.threads)
        return make_decoder(model)

    @torch.inference_mode()
    def _turn(self) -> None:
        """Admit waiting work, then decode one token for every active sequence."""
        if self._closing:
            return
        if torch.get_num_threads() != self.threads:  # another sampler's, or the trainer's
            torch.set_num_threads(self.threads)
        start = time.perf_counter()
        try:
            gone = {i for i, d in enumerate(self._active) if d.request.future.cancelled()}
            self._remove(gone)
            self._admit()
            if self._active:
                self._draw()
            if self._active:
                last = [d.tokens[-1] for d in self._active]
                self._logits_BV = self.decoder.step(torch.tensor(last, device=self.device))
        except Exception as error:
            self._fail_all(error)
        self._busy += time.perf_counter() - start
        with self._lock:
            self._scheduled = False
            if not self._closing:
                self._schedule()

    def _admit(self) -> None:
        """Fill the free rows of the batch and prefill the new sequences together."""
        joining: list[Draft] = []
        while len(self._active) + len(joining) < self.max_batch:
            draft = self._next_draft(idle=not (self._active or joining))
            if draft is None:
                break
            joining.append(draft)
        if not joining:
            return
        logits_NV = self.decoder.add([draft.request.prompt for draft in joining])
        held_BV = self._logits_BV if self._active else None
        self._logits_BV = logits_NV if held_BV is None else torch.cat([held_BV, logits_NV])
        self._active += joining

    def _next_draft(self, idle: bool) -> Draft | None:
        """The next sequence in the queue; first runs the jobs before it, which need `idle`."""
        while True:
            while self._waiting:
                draft = self._waiting.popleft()
                if not draft.request.future.cancelled():
                    return draft
            with self._lock:
                if not self._queue:
                    return None
                head = self._queue[0]
                if not idle and (self.deterministic or isinstance(head, _Job)):
                    return None
                self._queue.popleft()
            if isinstance(head, _Job):
                _settle(head.future, head.work)
            else:
                if self.deterministic:
                    self.decoder.reset()
                self._waiting.extend(head.drafts)

    def _draw(self) -> None:
        """Draw a token for every active sequence and remove those that ended."""
        drafts, logits_BV = self._active, self._logits_BV
        assert logits_BV is not None
        temperatures = [d.params.temperature or 1.0 for d in drafts]
        scaled = any(t != 1 for t in temperatures)
        tokens_B, logprobs_B, probs_BV = draw(
            logits_BV,
            torch.tensor(temperatures, device=self.device)[:, None] if scaled else None,
            torch.tensor([d.uniforms[len(d.tokens)] for d in drafts], device=self.device),
            {row: rule for row, d in enumerate(drafts) if (rule := d.rule()) is not None},
        )
        tokens, logprobs = tokens_B.tolist(), logprobs_B.tolist()
        ended = {
            row for row, d in enumerate(drafts) if d.take(tokens[row], logprobs[row], probs_BV[row])
        }
        self._generated += len(drafts)
        self._logits_BV = None
        requests = {id(drafts[row].request): drafts[row].request for row in ended}
        self._remove(ended)
        for request in requests.values():
            if all(draft.finish_reason for draft in request.drafts):
                _settle(request.future, partial(list, map(Draft.completion, request.drafts)))

    def _remove(self, rows: set[int]) -> None:
        if not rows:
            return
        order = self.decoder.drop(rows)
        self._active = [self._active[row] for row in order]
        if self._logits_BV is not None:
            self._logits_BV = self._logits_BV[order]

    def _fail_all(self, error: Exception) -> None:
        """Fail everything that is pending with `error`, and restart from an empty cache."""
        with self._lock:
            queued = list(self._queue)
            self._queue.clear()
        requests = {id(d.request): d.request for d in (*self._active, *self._waiting)}
        self._active, self._logits_BV = [], None
        self._waiting.clear()
        self.decoder.reset()
        if not isinstance(error, BadInput | RunFailed):
            reason = RunFailed(f"the sampler met an error: {type(error).__name__}: {error}")
            reason.__cause__ = error
            error = reason
        for item in (*requests.values(), *queued):
            with contextlib.suppress(InvalidStateError):
                item.future.set_exception(error)


def _settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Set `future` to the result or exception of `work`, unless it was cancelled meanwhile."""
    with contextlib.suppress(InvalidStateError):
        try:
            result = work()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
