"""The sampler: many requests, one thread that decodes them all together.

Requests, weight updates and scoring jobs stand in one queue and are served in order. Waiting
sequences join the running batch between two decode steps (continuous batching). A weight update is
a barrier, so no completion mixes two versions.

`deterministic=True` serves one request at a time from an empty cache; otherwise the company that a
request is in may change the last bits of its arithmetic.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
from torch import Tensor

from aflow_tune.engines.local.decoder import Decoder, make_decoder
from aflow_tune.engines.local.sampling import (
    Completion,
    Draft,
    Request,
    SamplingParams,
    Vocabulary,
    draw,
    prompt_faults,
)
from aflow_tune.errors import BadInput, Fault, RunFailed

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from aflow_tune.engines.local.weights import LoraSpec

T = TypeVar("T")


@dataclass
class _Job:
    """Work that needs the decoder to itself: no sequence is being decoded while it runs."""

    work: Callable[[], Any]
    future: Future[Any] = field(default_factory=Future)


class Sampler:
    """Draws completions from a causal LM.

    Args:
        model: in evaluation mode; the sampler owns it from now on.
        max_batch: sequences decoded together; more of them wait their turn.
        max_model_len: tokens of prompt and completion together.
        threads: of torch, for the sampler's thread; None takes the physical cores.
        deterministic: see the module's docstring.
        lora: the shape of the adapter that `update_weights` will bring, if it brings one.
    """

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
        self._wake = threading.Condition()
        self._closing = False
        self._generated = 0
        self._busy = 0.0
        ready: Future[Decoder] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(model, ready), name="sampler", daemon=True
        )
        self._thread.start()
        self.decoder = ready.result()

    def generate(
        self, prompts: list[list[int]], params: list[SamplingParams]
    ) -> list[list[Completion]]:
        """Complete every prompt; blocks. Returns `params[i].n` completions for prompt i. Raises
        BadInput if a prompt or its parameters are refused, RunFailed if the engine failed (its
        error is the cause) or was closed."""
        requests = [self._request(p, s) for p, s in zip(prompts, params, strict=True)]
        self._enqueue(requests)
        try:
            return [request.future.result() for request in requests]
        except BaseException:
            for request in requests:
                request.future.cancel()
            raise

    async def submit(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        """Complete one prompt from any event loop; raises what `generate` raises. Cancelling the
        awaiting task gives the place in the batch free at the next step."""
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
        """Take new weights; blocks until they are in use and `self.version` is `version`. `state`:
        see `Weights.load`, whose BadInput leaves everything unchanged; RunFailed as `generate`."""

        def load() -> None:
            self.decoder.load(state, self.lora)
            self.version = version

        self._on_thread(load)

    def stats(self) -> dict[str, float]:
        """Totals since the start: tokens, and seconds with work to do."""
        return {
            "generated_tokens": self._generated,
            "prefilled_tokens": self.decoder.computed_tokens,
            "shared_tokens": self.decoder.shared_tokens,
            "busy_seconds": self._busy,
        }

    def close(self) -> None:
        """Fail what is still waiting, end the thread, free the cache."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _request(self, prompt_ids: list[int], params: SamplingParams) -> Request:
        params.validate()
        faults = prompt_faults(prompt_ids, self.max_model_len)
        outside = [t for t in prompt_ids if not 0 <= t < self.vocabulary.size]
        if outside:
            expected = f"token ids below {self.vocabulary.size}"
            faults.append(Fault("prompt", expected, str(outside[:5]), "use this model's tokenizer"))
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
        with self._wake:
            if self._closing:
                raise RunFailed("the sampler is closed")
            self._queue.extend(items)
            self._wake.notify()

    @torch.inference_mode()
    def _run(self, model: PreTrainedModel, ready: Future[Decoder]) -> None:
        # All of the sampler's arithmetic happens on this thread: each thread that computes keeps a
        # pool of OpenMP workers, and more of these than cores slow a decode step by half.
        torch.set_num_threads(self.threads)
        _settle(ready, lambda: make_decoder(model))
        if ready.exception() is not None:
            return
        while True:
            with self._wake:
                while not (self._queue or self._waiting or self._active or self._closing):
                    self._wake.wait()
            if self._closing:
                break
            start = time.perf_counter()
            try:
                # Let waiting work in, then make one token for every active sequence.
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
        self._fail_all(RunFailed("the sampler was closed"))

    def _admit(self) -> None:
        """Fill the free places of the batch and prefill what came in, together."""
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
        """The next sequence in line; does the jobs that stand before it."""
        while True:
            while self._waiting:
                draft = self._waiting.popleft()
                if not draft.request.future.cancelled():
                    return draft
            with self._wake:
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
        """Draw a token for every active sequence and take out those that ended."""
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
        """Hand `error` to everyone who waits, and start again from an empty cache."""
        with self._wake:
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
    """Give a waiting caller the result or exception of `work`, unless it left meanwhile."""
    with contextlib.suppress(InvalidStateError):
        try:
            result = work()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
