"""What a dry run loads: a tiny random model, and a sampler that says what it is told.

The model has the tokenizer and the chat template of the one that it stands for, if that is on this
machine. Nothing is fetched. A request may carry its answer under `ANSWER_FIELD`; one without is
answered with plain words, or with the smallest example of the JSON or the tool call that it asks
for, cut at `max_tokens` and at stop strings. Log-probabilities are those that the model gives these
very tokens, so that a trainer with the same weights finds a ratio of 1.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aflow_tune.engines.local.models import BUNDLED, cache_dir
from aflow_tune.engines.local.protocol import ChatRequest, NamedToolChoice
from aflow_tune.engines.local.sampler import Sampler
from aflow_tune.engines.local.sampling import (
    Completion,
    SamplingParams,
    before_stop,
    logprobs_of,
    prompt_faults,
)
from aflow_tune.engines.local.server import SamplerServer
from aflow_tune.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ (message['content'] or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The chat template if there is no other."""


@dataclass(frozen=True)
class StandInTokenizer:
    """A tokenizer, in words where it is from, and whether it is the model's own."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    own: bool


def tokenizer_for(name: str) -> StandInTokenizer:
    """The tokenizer of the model `name` if it is on this machine, else SmolLM2's if that is,
    else one of single bytes that is made here."""
    for candidate in (name, *BUNDLED):
        found = _load(candidate)
        if found is not None:
            return StandInTokenizer(found, f"the tokenizer of {candidate}", candidate == name)
    return StandInTokenizer(byte_tokenizer(), "a tokenizer of single bytes", False)


def write_stand_in(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> int:
    """Save a tiny random model with this tokenizer into `folder`; returns its parameters. Equal
    seeds write equal weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    highest = max(tokenizer.get_vocab().values(), default=0)
    config = LlamaConfig(
        vocab_size=max(highest + 1, len(tokenizer)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**20,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _load(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model; None if none of it loads without a download."""
    from transformers import AutoTokenizer

    folder = cache_dir() / name if name in BUNDLED else Path(name).expanduser()
    try:
        # Without the last argument it would ask on the terminal whether to run a folder's code.
        tokenizer = AutoTokenizer.from_pretrained(
            folder if folder.is_dir() else name, local_files_only=True, trust_remote_code=False
        )
    except Exception:
        # None at all, damaged, or of a class that is not installed: a dozen unrelated errors.
        return None
    # Without its files transformers may make a tokenizer of a few special tokens and no words.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        return None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def byte_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerBase:
    """256 byte tokens (id = rank in the byte alphabet) and three special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend: Any = Tokenizer(
        models.BPE(vocab={character: rank for rank, character in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


_DEEPEST = 12
"""References may go round in a circle; what is deeper than this becomes null."""


def example_of(schema: Mapping[str, Any]) -> Any:
    """The smallest value that fits a JSON schema, with required properties only. Covers what
    pydantic writes, but no `pattern`, `format` or conditions between fields."""

    def example(part: Any, depth: int = 0) -> Any:
        if not isinstance(part, Mapping) or depth > _DEEPEST:
            return None
        if "$ref" in part:
            found: Any = schema
            for name in str(part["$ref"]).removeprefix("#").strip("/").split("/"):
                if name:
                    found = found.get(name) if isinstance(found, Mapping) else None
            return example(found, depth + 1)
        for key in ("const", "default"):
            if key in part:
                return part[key]
        if "enum" in part:
            return part["enum"][0]
        if parts := part.get("allOf"):
            merged = [example(one, depth + 1) for one in parts]
            if all(isinstance(one, dict) for one in merged):
                return {key: value for one in merged for key, value in one.items()}
            return merged[0]
        if choices := part.get("anyOf") or part.get("oneOf"):
            return example(choices[0], depth + 1)
        kind = part.get("type", "object" if "properties" in part else "string")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            properties = part.get("properties") or {}
            required = part.get("required", ())
            return {name: example(properties.get(name, {}), depth + 1) for name in required}
        if kind == "array":
            items = list(part.get("prefixItems") or ())
            items += [part.get("items", {})] * (int(part.get("minItems", 0)) - len(items))
            return [example(item, depth + 1) for item in items]
        if kind in ("integer", "number"):  # zero, or the bound that is nearest to it
            step = 1 if kind == "integer" else 0.5
            low = part.get("minimum", part.get("exclusiveMinimum", -math.inf) + step)
            high = part.get("maximum", part.get("exclusiveMaximum", math.inf) - step)
            value = min(max(0, low), high)
            return int(value) if kind == "integer" else value
        if kind in ("boolean", "null"):
            return False if kind == "boolean" else None
        text = "words".ljust(int(part.get("minLength", 0)), ".")
        return text[: int(part.get("maxLength", len(text)))]

    return example(schema)


ANSWER_FIELD = "aflow_scripted_answer"
"""Key of a request's body (`extra_body`): the text to answer with."""

_WORDS = (
    "the answer to this question follows from what was given first one puts together what "
    "belongs together then one takes away what does not and the rest is looked at once more"
)

_answer: ContextVar[str | None] = ContextVar("aflow_scripted_answer", default=None)


def plain_words(key: str) -> str:
    """A sentence of 12 to 32 plain words that answers nothing; equal keys give equal sentences."""
    words, draw = _WORDS.split(), random.Random(key)
    start, count = draw.randrange(len(words)), draw.randint(12, 32)
    return " ".join(words[(start + n) % len(words)] for n in range(count)).capitalize() + "."


class ScriptedSampler(Sampler):
    """A `Sampler` whose completions are given instead of drawn. `scored`: whether they carry the
    model's log-probabilities; else 0, for stand-ins of models that are not trained."""

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
        said = plain_words(f"{len(prompt_ids)}|{params.seed}|{number}") if text is None else text
        # Up to the end of its first stop string.
        stops = [(said.find(stop), len(stop)) for stop in params.stop if stop in said]
        if stops:
            said = said[: sum(min(stops))]
        encoded: Any = self.vocabulary.tokenizer(said, add_special_tokens=False)
        ids: list[int] = list(encoded["input_ids"])
        if text is None:
            ids = ids[: max(1, limit - 1)]  # words of ours are as many as fit
        end: Any = self.vocabulary.tokenizer.eos_token_id
        if not stops and end is not None:
            ids.append(end)
        whole = 0 < len(ids) <= limit
        ids = ids[:limit] or [prompt_ids[-1]]
        logprobs = [0.0] * len(ids)
        if self.scored:
            temperature = params.temperature or 1.0
            logprobs = await asyncio.to_thread(self._scores, prompt_ids, ids, temperature)
        shown = before_stop(self.vocabulary.text(ids), params.stop)
        tops = [{token: value} for token, value in zip(ids, logprobs, strict=True)]
        reason = "stop" if whole else "length"
        return Completion(ids, logprobs, shown, reason, tops if params.top_logprobs else None)

    def _scores(self, prompt_ids: list[int], ids: list[int], temperature: float) -> list[float]:
        """Log-probabilities of `ids` after the prompt, fp32; blocks."""
        if self.version > 0:
            return self.token_logprobs([*prompt_ids, *ids], temperature)[len(prompt_ids) - 1 :]
        # The first weights: the model itself computes the logits of the answer alone. With a
        # vocabulary of 150,000 those of a long prompt would take seconds.

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
