"""A tiny random model that speaks another model's tokens: what a dry run loads in its place.

Two layers of a Llama, 64 wide, with the tokenizer and the chat template of the model that it
stands for, so that prompts and answers have the lengths that they will have. Where that
tokenizer is not on this machine another one is taken, and the caller is told which: lengths are
then another tokenizer's. Nothing is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aflow_tune.engines.local.models import BUNDLED, cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block, by the names that an adapter's `target_modules` gives them."""

_BYTES = "a tokenizer of single bytes"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' "
    "+ (message['content'] or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The chat template where there is no other."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_LONGEST = 2**20


@dataclass(frozen=True)
class StandInTokenizer:
    """A tokenizer, in words where it is from, and whether it is the model's own."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    own: bool


def tokenizer_for(name: str) -> StandInTokenizer:
    """The tokenizer of the model `name` if it is on this machine, else SmolLM2's if that is,
    else one of single bytes that is made here."""
    own = _load(_folder(name))
    if own is not None:
        return StandInTokenizer(own, f"the tokenizer of {name}", True)
    for bundled in BUNDLED:
        other = _load(_folder(bundled)) if bundled != name else None
        if other is not None:
            return StandInTokenizer(other, f"the tokenizer of {bundled}", False)
    return StandInTokenizer(byte_tokenizer(), _BYTES, False)


def write_stand_in(folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> int:
    """Save a tiny random model with this tokenizer into `folder`; returns its parameters.

    Equal seeds write equal weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    highest = max(tokenizer.get_vocab().values(), default=0)
    config = LlamaConfig(
        vocab_size=max(highest + 1, len(tokenizer)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_LONGEST,
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


def _folder(name: str) -> Path | None:
    """Where the files of a model lie on this machine; None where they do not."""
    if not name.strip():
        return None
    folder = cache_dir() / name if name in BUNDLED else Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name in BUNDLED:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in _FILES:
        try:
            found = try_to_load_from_cache(name, file)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def _load(folder: Path | None) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder; None where there is none that loads without a download."""
    # Without such a file transformers may make a tokenizer of a few special tokens and no words.
    if folder is None or not any((folder / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        # Without the last argument it would ask on the terminal whether to run a folder's code.
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception:
        # Files that are damaged, or of a class that is not installed: a dozen unrelated errors.
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
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
