"""A model of whole words, and tools whose queries share no word with them, for retrieval."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from aflow_tune.retrieval import Asked, Tool

KINDS = 16
_SYLLABLES = ["ba", "de", "fi", "go", "ku", "la", "me", "ni"]
WORDS = ["".join(parts) for parts in itertools.product(_SYLLABLES, repeat=3)]


def described(kind: int) -> list[str]:
    return WORDS[8 * kind : 8 * kind + 2]


def used(kind: int) -> list[str]:
    """Words that queries for a tool are made of: never those of its description."""
    return WORDS[8 * kind + 2 : 8 * kind + 8]


def tools_of_words() -> list[Tool]:
    return [Tool(described(kind)[0], " ".join(described(kind))) for kind in range(KINDS)]


def asked_of() -> list[Asked]:
    """Fifteen queries of two words for each tool."""
    return [
        Asked(" ".join(pair), (described(kind)[0],))
        for kind in range(KINDS)
        for pair in itertools.combinations(used(kind), 2)
    ]


def write_word_model(folder: Path, words: Sequence[str] = WORDS, width: int = 64) -> Path:
    """A folder with a tokenizer of these words (others are dropped) and an embedding of each: rows
    of the identity where there is room, else random unit vectors."""
    folder.mkdir(parents=True)
    vocabulary = {word: number for number, word in enumerate([*words, "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = torch.eye(width)[: len(vocabulary)]
    if len(vocabulary) > width:
        draw = torch.Generator().manual_seed(0)
        rows = torch.nn.functional.normalize(torch.randn(len(vocabulary), width, generator=draw))
    save_file({"model.embed_tokens.weight": rows}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text("{}")
    return folder
