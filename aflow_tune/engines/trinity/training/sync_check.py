"""Checks that the sampler has the trainer's weights: both score one fixed text after each sync.

Otherwise a sync that does nothing goes unnoticed: rollouts continue with the base model.
`MISMATCH` is the mean absolute difference of the text's token logprobs. The rounding level is
measured before the first step, when both have the same weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from trinity.common.config import Config

from aflow_tune.errors import RunFailed

MOST_TOKENS = 48
CHECKED_UPDATES = 3
"""After the sampler has followed this many updates, the mismatch is only recorded."""

_TEXT = (
    "The workflow asks the model twice: first for a draft, then for a check of it. "
    "What is 17 + 25? <answer>42</answer> def add(a, b): return a + b"
)
_TABLE = b"aflow-tune-sync"


def is_checked(config: Config) -> bool:
    """Whether the run has both an explorer and a trainer actor to compare. The local engine counts:
    its configuration uses the names `vllm` and `verl`."""
    kinds = config.explorer.rollout_model.engine_type, config.trainer.trainer_type
    return config.mode in ("both", "colocate") and kinds == ("vllm", "verl")


def probe_tokens(tokenizer: Any, max_model_len: int) -> list[int]:
    """Token ids of the fixed text, at most `MOST_TOKENS` and fewer than `max_model_len`."""
    ids: list[int] = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    return ids[: min(MOST_TOKENS, max_model_len - 1)]


class SyncCheck:
    """Compares one sampler with the trainer, version by version. `sixteen_bit`: at least one of
    them computes in 16 bits or less."""

    def __init__(self, sixteen_bit: bool) -> None:
        # Mean differences: always rounding below `floor`, never above `limit`; if the trainer moved
        # by more than `least`, a sampler with its weights cannot return the same numbers.
        self.floor, self.limit, self.least = (
            (5e-3, 0.5, 1e-3) if sixteen_bit else (1e-5, 0.05, 3e-5)
        )
        self.followed = 0
        self._at_first: float | None = None
        # (sampler, trainer) logprobs when the sampler's last changed.
        self._changed: tuple[list[float], list[float]] = [], []
        self._last: list[float] = []

    def compare(self, version: int, sampler: Sequence[float], trainer: Sequence[float]) -> float:
        """The mismatch of `version`, from the logprobs of tokens 1..T-1 by either side. Raises
        RunFailed, until the sampler has followed `CHECKED_UPDATES` updates: the sampler did not
        change although the trainer did, or they differ by more than rounding."""
        sampler, trainer = list(sampler), list(trainer)
        mismatch = _distance(sampler, trainer)

        def disagreeing(rounding: float) -> RunFailed:
            return RunFailed(
                f"sampler and trainer disagree: at version {version} their log-probabilities of a "
                f"fixed text differ by {mismatch:.3g} in the mean, where {rounding:.3g} is "
                f"rounding. {_WHAT_TO_DO}"
            )

        if self._at_first is None:
            if not mismatch <= self.limit:
                raise disagreeing(self.limit)
            self._at_first, self._last = mismatch, trainer
        rounding = max(self._at_first, self.floor)
        before, then = self._changed
        if self.followed < CHECKED_UPDATES:
            moved = _distance(trainer, then)
            # Bit-equal sampler logprobs are plausible only if most of the trainer's are, too.
            most = 2 * sum(a != b for a, b in zip(trainer, then, strict=False)) > len(trainer)
            if sampler == before and most and moved > self.least:
                raise RunFailed(
                    f"the sampler does not have the trainer's weights: at version {version} its "
                    "log-probabilities of a fixed text are those of before, while the trainer's "
                    f"have moved by {moved:.3g} in the mean. {_WHAT_TO_DO}"
                )
            if not mismatch <= max(4 * self._at_first, 20 * self.floor):
                raise disagreeing(rounding)
        if sampler != before:
            self._changed = sampler, trainer
        self.followed += _distance(trainer, self._last) > 3 * rounding
        self._last = trainer
        return mismatch


_WHAT_TO_DO = (
    "Look for errors of the sync in the run's log folder, try another synchronizer.sync_method, "
    "compare the versions of vllm, verl and peft with docs/engines.md (`aflow-tune doctor`)."
)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean absolute difference; infinite if the lengths differ or are 0."""
    if len(one) != len(other) or not one:
        return float("inf")
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def publish(namespace: str, version: int, tokens: list[int], logprobs: list[float]) -> None:
    """Publish the trainer's tokens and logprobs of `version` to the explorer, in Ray's KV store."""
    content = json.dumps({"tokens": tokens, "logprobs": logprobs})
    _internal_kv_put(f"{namespace}:{version}".encode(), content.encode(), namespace=_TABLE)


def published(namespace: str, version: int, timeout: float) -> tuple[list[int], list[float]]:
    """Wait for and remove what was published of `version`. RunFailed after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    key = f"{namespace}:{version}".encode()
    while not (content := _internal_kv_get(key, namespace=_TABLE)):
        if time.monotonic() > deadline:
            raise RunFailed(
                f"the trainer did not score the text of the sync check with version {version} "
                f"within {timeout:.0f} s (synchronizer.sync_timeout)"
            )
        time.sleep(0.1)
    _internal_kv_del(key, namespace=_TABLE)
    found = json.loads(content)
    return found["tokens"], found["logprobs"]


def forget(namespace: str) -> None:
    """Remove what was published but not read: the cluster may be shared."""
    _internal_kv_del(f"{namespace}:".encode(), del_by_prefix=True, namespace=_TABLE)
