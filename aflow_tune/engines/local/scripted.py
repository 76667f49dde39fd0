"""The model of a dry run: tiny and random, with a sampler that returns scripted responses.

The model has the tokenizer and chat template of the one that it replaces, if that is on this
machine; nothing is downloaded. A request carries its response under `ANSWER_FIELD`; else it gets
plain words, or the smallest JSON or tool call that it asks for. `max_tokens` and stop strings
apply. Log-probabilities are the model's own, so that a trainer finds a ratio of 1.
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
from aflow_tune.engines.local.sampler import (
    Completion,
    Sampler,
    SamplingParams,
    before_stop,
    prompt_faults,
)
from aflow_tune.engines.local.server import ChatRequest, SamplerServer
from aflow_tune.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ (message['content'] or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class StandInTokenizer:
    """A tokenizer, a description of its source, and whether it is the model's own."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    own: bool


def tokenizer_for(name: str) -> StandInTokenizer:
    """The tokenizer of the model `name` if it is on this machine, else SmolLM2's if that is, else
    `byte_tokenizer`. Never downloads."""
    from transformers import AutoTokenizer

    for candidate in (name, *BUNDLED):
        folder = cache_dir() / candidate if candidate in BUNDLED else Path(candidate).expanduser()
        place = folder if folder.is_dir() else candidate
        try:
            # The last argument prevents a prompt on the terminal about running the folder's code.
            found = AutoTokenizer.from_pretrained(
                place, local_files_only=True, trust_remote_code=False
            )
        except Exception:
            continue  # missing, damaged, or of a class that is not installed: many error types
        # If files are missing, transformers may return a tokenizer of special tokens only.
        if len(found) > len(found.all_special_tokens):
            if found.pad_token is None:
                found.pad_token = found.eos_token
            return StandInTokenizer(found, f"the tokenizer of {candidate}", candidate == name)
    return StandInTokenizer(byte_tokenizer(), "a tokenizer of single bytes", False)


def write_stand_in(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> int:
    """Save a tiny random model with this tokenizer into `folder`; returns its number of parameters.
    Equal seeds give equal weights."""
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


def example_of(schema: Mapping[str, Any]) -> Any:
    """The smallest value that fits a JSON schema, with required properties only. Covers what
    pydantic writes, but no `pattern`, `format` or conditions between fields."""
    named = {**schema.get("definitions", {}), **schema.get("$defs", {})}

    def example(part: Any, depth: int = 0) -> Any:
        if not isinstance(part, Mapping) or depth > 12:  # references may be circular
            return None
        if "$ref" in part:
            return example(named.get(part["$ref"].rpartition("/")[2]), depth + 1)
        for key in ("const", "default"):
            if key in part:
                return part[key]
        if "enum" in part:
            return part["enum"][0]
        if choices := part.get("anyOf") or part.get("oneOf") or part.get("allOf"):
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
        if kind in ("integer", "number"):  # zero, or the bound nearest to it
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
"""Key in a request's body (`extra_body`) of the text to respond with."""

_WORDS = (
    "the answer to this question follows from what was given first one puts together what "
    "belongs together then one takes away what does not and the rest is looked at once more"
)

_answer: ContextVar[str | None] = ContextVar("aflow_scripted_answer", default=None)


def plain_words(key: str) -> str:
    """A meaningless sentence of 12 to 32 words; equal keys give equal sentences."""
    words, draw = _WORDS.split(), random.Random(key)
    start, count = draw.randrange(len(words)), draw.randint(12, 32)
    return " ".join(words[(start + n) % len(words)] for n in range(count)).capitalize() + "."


class ScriptedSampler(Sampler):
    """A `Sampler` whose completions are scripted, not drawn. `scored`: with the model's
    log-probabilities; else with 0, for replacements of models that are not trained."""

    def __init__(self, *args: Any, scored: bool = True, **settings: Any) -> None:
        self.scored = scored
        super().__init__(*args, **settings)

    async def submit(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        text = _answer.get()
        params.validate()
        if faults := prompt_faults(prompt_ids, self.max_model_len):
            raise BadInput("The prompt cannot be completed", faults)
        if text is None and params.json_schema is not None:
            text = json.dumps(example_of(params.json_schema), ensure_ascii=False)
        return [await self._completion(prompt_ids, params, text, i) for i in range(params.n)]

    async def _completion(
        self, prompt_ids: list[int], params: SamplingParams, text: str | None, number: int
    ) -> Completion:
        limit = min(params.max_tokens, self.max_model_len - len(prompt_ids))
        said = plain_words(f"{len(prompt_ids)}|{params.seed}|{number}") if text is None else text
        # Cut after the first stop string.
        stops = [(said.find(stop), len(stop)) for stop in params.stop if stop in said]
        if stops:
            said = said[: sum(min(stops))]
        encoded: Any = self.vocabulary.tokenizer(said, add_special_tokens=False)
        ids: list[int] = list(encoded["input_ids"])
        if text is None:
            ids = ids[: max(1, limit - 1)]  # cut generated words, leaving room for the end token
        end: Any = self.vocabulary.tokenizer.eos_token_id
        if not stops and end is not None:
            ids.append(end)
        whole = 0 < len(ids) <= limit
        ids = ids[:limit] or [prompt_ids[-1]]
        logprobs = [0.0] * len(ids)
        if self.scored:
            tokens, first = [*prompt_ids, *ids], len(prompt_ids)
            logprobs = await asyncio.to_thread(
                self.token_logprobs, tokens, params.temperature or 1.0, first
            )
        shown = before_stop(self.vocabulary.text(ids), params.stop)
        tops = [{token: value} for token, value in zip(ids, logprobs, strict=True)]
        reason = "stop" if whole else "length"
        return Completion(ids, logprobs, shown, reason, tops if params.top_logprobs else None)


class ScriptedServer(SamplerServer):
    """A `SamplerServer` that passes the scripted response of a request to its `ScriptedSampler`, or
    else the smallest call of the tool that the request forces."""

    def _render(self, chat: ChatRequest) -> list[int]:
        text = (chat.model_extra or {}).get(ANSWER_FIELD)
        if not isinstance(text, str) and (forced := chat.forced_tools()):
            function = forced[0]["function"]
            arguments = example_of(function.get("parameters") or {"type": "object"})
            call = {"name": function["name"], "arguments": arguments}
            text = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        # The task that samples starts after this, in a copy of this context.
        _answer.set(text if isinstance(text, str) else None)
        return super()._render(chat)
