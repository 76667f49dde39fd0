"""A tiny random causal LM with a tokenizer and chat template, made in code: no download.

`write_tiny_model(folder)` saves a 2-layer Llama (hidden 64, 4 heads, 2 key-value heads), a
byte-level tokenizer (one token a byte, id = rank in the byte alphabet) and a ChatML template
that renders tools in the Hermes form. Everything is seeded: two calls write equal weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aflow_tune.engines.local.sampler import Sampler

NO_WEIGHTS = b"\x02" + bytes(7) + b"{}"
"""A whole safetensors file without a tensor, where nothing is loaded."""
CHATML_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n' }}{%- endif %}
{{- '<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message['role'] == 'system') %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message.get('tool_calls') or [] %}
{{- '\\n<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def tiny_tokenizer():
    """A `PreTrainedTokenizerFast` of 256 byte tokens and three special ones (vocabulary 259)."""
    from aflow_tune.engines.local.scripted import byte_tokenizer

    return byte_tokenizer(CHATML_TEMPLATE)


def write_tiny_model(
    folder: Path, *, seed: int = 0, heads: int = 4, says: Sequence[str] = ""
) -> Path:
    """Save model, tokenizer and template into `folder`; return it. `says`: characters and
    other tokens that it answers with, each about as often, nearly always."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048 if says else 1024,
        initializer_range=0.2,
        tie_word_embeddings=not says,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    if says:  # one dimension outweighs all others, and leads to these tokens
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 50.0
            model.lm_head.weight.zero_()
            model.lm_head.weight[tokenizer.convert_tokens_to_ids([*says]), 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def tiny_sampler(folder: Path, max_model_len: int) -> Iterator[Sampler]:
    """A sampler of four places over a tiny model that was written to `folder`, in fp32."""
    import torch

    from aflow_tune.engines.local.models import load_model, load_tokenizer
    from aflow_tune.engines.local.sampler import Sampler

    model = load_model(folder, torch.float32, torch.device("cpu"))
    sampler = Sampler(model, load_tokenizer(folder), max_batch=4, max_model_len=max_model_len)
    try:
        yield sampler
    finally:
        sampler.close()
