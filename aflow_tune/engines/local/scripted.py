"""A sampler that says what it is told, for dry runs: real tokens and probabilities, given words.

Whoever sends a request may put the answer into its body under `ANSWER_FIELD`; a request without
one is answered with plain words, or, where it asks for JSON of a schema, with the smallest
example of it, or, where it forces a tool call (`tool_choice`), with the smallest such call. The
answer becomes tokens of the tokenizer, ends with the end-of-sequence token and
is cut at `max_tokens` and at stop strings, as a drawn one is. Its log-probabilities are those that
the model behind gives these very tokens, so that a trainer with the same weights finds a ratio
of 1, as after a real rollout.

What is said, and why, is the matter of `aflow_tune.dry_run`; HTTP, chat template and the parsing of
tool calls are the real server's.
"""

from __future__ import annotations

import asyncio
import json
import random
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from aflow_tune.engines.local.decoder import logprobs_of
from aflow_tune.engines.local.protocol import ChatRequest, NamedToolChoice
from aflow_tune.engines.local.sampler import Sampler
from aflow_tune.engines.local.sampling import Completion, SamplingParams, prompt_faults
from aflow_tune.engines.local.schema_example import example_of
from aflow_tune.engines.local.server import SamplerServer
from aflow_tune.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ANSWER_FIELD = "aflow_scripted_answer"
"""Key of a request's body (`extra_body` of OpenAI's client): the text to answer with."""

_WORDS = (
    "the answer to this question follows from what was given first one puts together what "
    "belongs together then one takes away what does not and the rest is looked at once more"
)
_FEWEST, _MOST = 12, 32

_answer: ContextVar[str | None] = ContextVar("aflow_scripted_answer", default=None)


def plain_words(key: str) -> str:
    """A sentence of 12 to 32 plain words that answers nothing; equal keys give equal sentences."""
    words, draw = _WORDS.split(), random.Random(key)
    start, count = draw.randrange(len(words)), draw.randint(_FEWEST, _MOST)
    return " ".join(words[(start + n) % len(words)] for n in range(count)).capitalize() + "."


class ScriptedSampler(Sampler):
    """A `Sampler` whose completions are given instead of drawn.

    Args:
        scored: whether completions carry the model's log-probabilities; without, they are 0, for
            stand-ins of models that are not trained.
        settings: those of `Sampler`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        scored: bool = True,
        **settings: Any,
    ) -> None:
        self.scored = scored
        self._model = model
        super().__init__(model, tokenizer, **settings)

    async def submit(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        """Answer one prompt as told; raises what `Sampler.submit` raises."""
        text = _answer.get()
        params.validate()
        if faults := prompt_faults(prompt_ids, self.max_model_len):
            raise BadInput("The prompt cannot be completed", faults)
        if text is None and params.json_schema is not None:
            text = json.dumps(example_of(params.json_schema), ensure_ascii=False)
        return [
            await self._completion(prompt_ids, params, text, number) for number in range(params.n)
        ]

    async def _completion(
        self, prompt_ids: list[int], params: SamplingParams, text: str | None, number: int
    ) -> Completion:
        limit = min(params.max_tokens, self.max_model_len - len(prompt_ids))
        words = plain_words(f"{len(prompt_ids)}|{params.seed}|{number}")
        given = words if text is None else text
        said, stopped = _until_stop(given, params.stop)
        encoded: Any = self.vocabulary.tokenizer(said, add_special_tokens=False)
        ids: list[int] = list(encoded["input_ids"])
        if text is None:
            ids = ids[: max(1, limit - 1)]  # words of ours are as many as fit
        end: Any = self.vocabulary.tokenizer.eos_token_id
        if not stopped and end is not None:
            ids.append(end)
        whole = 0 < len(ids) <= limit
        ids = ids[:limit] or [prompt_ids[-1]]
        logprobs = [0.0] * len(ids)
        if self.scored:
            temperature = params.temperature or 1.0
            logprobs = await asyncio.to_thread(self._scores, prompt_ids, ids, temperature)
        shown = self.vocabulary.text(ids)
        cuts = [at for stop in params.stop if (at := shown.find(stop)) >= 0]
        shown = shown[: min(cuts, default=len(shown))]
        tops = None
        if params.top_logprobs:
            tops = [{token: value} for token, value in zip(ids, logprobs, strict=True)]
        return Completion(ids, logprobs, shown, "stop" if whole else "length", tops)

    def _scores(self, prompt_ids: list[int], ids: list[int], temperature: float) -> list[float]:
        """Log-probabilities of `ids` after the prompt, fp32; blocks.

        As long as the weights are the first ones, the model itself computes the logits of the
        answer alone: with a vocabulary of 150,000 those of a long prompt would take seconds.
        """
        if self.version > 0:
            return self.token_logprobs([*prompt_ids, *ids], temperature)[len(prompt_ids) - 1 :]

        def work() -> list[float]:
            with torch.no_grad():
                tokens = torch.tensor([[*prompt_ids, *ids]], device=self.device)
                kept = len(ids) + 1
                output: Any = self._model(tokens, use_cache=False, logits_to_keep=kept)
                values: list[float] = logprobs_of(
                    output.logits[0, :-1], tokens[0, len(prompt_ids) :], temperature
                ).tolist()
            return values

        return self.run_alone(work)


class ScriptedServer(SamplerServer):
    """A `SamplerServer` that hands the answer of a request's body on to its `ScriptedSampler`."""

    def _render(self, chat: ChatRequest) -> list[int]:
        # The request is answered in a task that is started after this, in a copy of this context.
        given = (chat.model_extra or {}).get(ANSWER_FIELD)
        _answer.set(given if isinstance(given, str) else _forced_call(chat))
        return super()._render(chat)


def _forced_call(chat: ChatRequest) -> str | None:
    """The smallest call of the tool that a request forces; None where it forces none."""
    choice = chat.tool_choice
    if choice in (None, "auto", "none"):
        return None
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    functions = [tool["function"] for tool in chat.offered_tools()]
    chosen = next(one for one in functions if name in (None, one["name"]))  # it was checked
    arguments = example_of(chosen.get("parameters") or {"type": "object"})
    call = json.dumps({"name": chosen["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _until_stop(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text up to the end of its first stop string, and whether there is one."""
    found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    at, length = min(found)
    return text[: at + length], True
