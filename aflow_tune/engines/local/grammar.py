"""Constrained text: JSON of a schema, or a Lark grammar, by masking tokens.

A thin layer over llguidance, which decides which tokens may come next. Its tokenizer view is
built on first use, because it takes about a second.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aflow_tune.engines.local.sampling import SamplingParams
from aflow_tune.engines.local.tools import JSON_STYLE
from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase


class GrammarCompiler:
    """Turns the constraint of a request into matchers for one tokenizer and vocabulary."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, eos: set[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = eos
        self._view: Any = None

    def matcher(self, params: SamplingParams) -> Matcher | None:
        """A fresh matcher for one sequence, or None when the request is unconstrained.

        Raises:
            BadInput: the schema or grammar is not one that llguidance can follow.
        """
        if params.json_schema is None and params.grammar is None:
            return None
        import llguidance
        import llguidance.hf

        if self._view is None:
            self._view = llguidance.hf.from_tokenizer(
                self._tokenizer,
                n_vocab=self._vocabulary,
                eos_token=sorted(self._eos),
            )
        if params.json_schema is not None:
            field, source = "json_schema", json.dumps(params.json_schema)
            grammar = llguidance.LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE)
        else:
            assert params.grammar is not None
            field, source = "grammar", params.grammar
            grammar = llguidance.LLMatcher.grammar_from_lark(source)
        inner = llguidance.LLMatcher(self._view, grammar, log_level=0)
        if inner.is_error():
            raise BadInput(
                "The output format cannot be enforced",
                [
                    Fault(
                        where=field,
                        expected="a schema or grammar that llguidance supports",
                        found=inner.get_error().splitlines()[0],
                        cure="simplify the schema; unsupported keywords are named above",
                    )
                ],
            )
        return Matcher(inner)


class Matcher:
    """How far one sequence is in its grammar."""

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner

    def banned(self) -> Tensor:
        """Tokens that must not come next: boolean over the vocabulary."""
        bias = torch.frombuffer(bytearray(self._inner.compute_logit_bias()), dtype=torch.uint8)
        return bias == 0

    def take(self, token: int) -> None:
        """Go on by one drawn token."""
        self._inner.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether the text is finished: nothing but the end of sequence can follow."""
        return self._inner.is_stopped()
