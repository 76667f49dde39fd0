"""What to change so that a run fits: the smallest changes, each checked by estimating again.

Every candidate is one setting with values from mild to harsh. First each alone: its mildest value
that makes everything fit. If none is enough alone, they are taken together, in the order of what
they cost, until the run fits. A result is only shown after the whole configuration was read
again with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aflow_tune.errors import BadInput
from aflow_tune.estimate.types import Change, Estimate, Need

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

_SHOWN = 3
_LORA = "[{lora_rank: 16, lora_alpha: 32}]"

Again = Callable[[Callable[["AflowConfig"], None]], Estimate]


@dataclass(frozen=True)
class Candidate:
    """A setting, its values from mild to harsh, and what is lost by them."""

    key: str
    values: tuple[Any, ...]
    cost: str

    def put(self, config: AflowConfig, value: Any) -> None:
        """Set it in a prepared configuration."""
        if self.key == "model.lora_configs":
            from trinity.common.config import LoRAConfig

            config.model.lora_configs = [LoRAConfig(lora_rank=16, lora_alpha=32)]
            return
        *parents, last = self.key.split(".")
        at: Any = config
        for name in parents:
            at = getattr(at, name)
        setattr(at, last, value)


def changes_to_fit(
    config: AflowConfig,
    now: Estimate,
    again: Again,
    whole: Callable[[Sequence[str]], Estimate],
) -> list[Change]:
    """The changes, each of which alone (or, where none is enough, all of one) makes it fit.

    Args:
        now: the estimate that does not fit.
        again: the estimate of the prepared configuration after a change.
        whole: the estimate of the whole configuration with more `key=value`.
    """
    found: list[list[tuple[Candidate, Any]]] = []
    candidates = _candidates(config)
    for candidate in candidates:
        for value in candidate.values:
            if _fits(again, [(candidate, value)]):
                found.append([(candidate, value)])
                break
    if not found:
        found = _together(candidates, again)
    checked = (_checked(steps, now, whole) for steps in found)
    return list(itertools.islice((change for change in checked if change is not None), _SHOWN))


def _together(candidates: Sequence[Candidate], again: Again) -> list[list[tuple[Candidate, Any]]]:
    """All mild values first, then harsher ones, until it fits; then what is not needed goes."""
    depth = max((len(candidate.values) for candidate in candidates), default=0)
    steps: dict[str, tuple[Candidate, Any]] = {}
    for level in range(depth):
        for candidate in candidates:
            if level >= len(candidate.values):
                continue
            steps[candidate.key] = (candidate, candidate.values[level])
            if not _fits(again, list(steps.values())):
                continue
            for key in list(steps):
                rest = [step for other, step in steps.items() if other != key]
                if rest and _fits(again, rest):
                    del steps[key]
            return [list(steps.values())]
    return []


def _fits(again: Again, steps: Sequence[tuple[Candidate, Any]]) -> bool:
    def put(config: AflowConfig) -> None:
        for candidate, value in steps:
            candidate.put(config, value)

    try:
        return again(put).fits is True
    except BadInput:
        return False


def _checked(
    steps: Sequence[tuple[Candidate, Any]],
    now: Estimate,
    whole: Callable[[Sequence[str]], Estimate],
) -> Change | None:
    settings = tuple((candidate.key, value) for candidate, value in steps)
    try:
        then = whole([f"{key}={_text(value)}" for key, value in settings])
    except BadInput:
        return None
    if then.fits is not True:
        return None
    full = now.worst or now.needs[0]
    after = next((need for need in then.needs if _same_place(need, full)), then.needs[0])
    cost = "; ".join(dict.fromkeys(candidate.cost for candidate, _ in steps))
    return Change(settings, full.size - after.size, after.size, cost)


def _same_place(one: Need, other: Need) -> bool:
    """Whether they speak of one role in one place: a trainer has needs of its GPU and of memory."""
    return (one.role, one.place) == (other.role, other.place)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _candidates(config: AflowConfig) -> list[Candidate]:
    return _local(config) if config.engine == "local" else _cluster(config)


def _local(config: AflowConfig) -> list[Candidate]:
    local = config.local
    found = []
    if not config.inline and config.mode == "both":
        cost = "no Ray: one process does everything in turns, with the same results"
        found.append(Candidate("inline", (True,), cost))
    micro = _halves(local.micro_batch_tokens, 64)
    found.append(
        Candidate("local.micro_batch_tokens", micro, "more, smaller passes: a little slower")
    )
    found.append(
        Candidate("local.max_batch", _halves(local.max_batch, 4), "fewer sequences at once: slower")
    )
    if local.dtype in ("fp32", "float32", "auto") and not config.deterministic:
        found.append(Candidate("local.dtype", ("bf16",), "less exact sums"))
    if not config.model.lora_configs:
        cost = "an adapter instead of the full weights"
        found.append(Candidate("model.lora_configs", (_LORA,), cost))
    return found


def _cluster(config: AflowConfig) -> list[Candidate]:
    from aflow_tune.estimate.estimate_lengths import limits_of

    trainer, model = config.trainer, config.explorer.rollout_model
    longest = limits_of(config)[2]
    tokens = trainer.max_token_len_per_gpu or 2 * longest
    found = [
        Candidate(
            "trainer.max_token_len_per_gpu",
            tuple(value for value in _halves(tokens, longest) if value >= longest),
            "more, smaller passes: a little slower",
        ),
    ]
    if model.gpu_memory_utilization < 0.95:
        cost = "less room for whatever else is on the GPU"
        found.append(Candidate("explorer.rollout_model.gpu_memory_utilization", (0.95,), cost))
    parallel = tuple(size for size in (2, 4, 8) if size > model.tensor_parallel_size)
    cost = "engines of several GPUs, which the trainer no longer has"
    found.append(Candidate("explorer.rollout_model.tensor_parallel_size", parallel, cost))
    if trainer.trainer_strategy == "fsdp2" and not trainer.offload_policy:
        cost = "states in the machine's memory: slower steps"
        found.append(Candidate("trainer.offload_policy", (True,), cost))
    if not config.model.lora_configs:
        cost = "an adapter instead of the full weights"
        found.append(Candidate("model.lora_configs", (_LORA,), cost))
    return found


def _halves(value: int, least: int) -> tuple[int, ...]:
    """Half of it, a quarter, and so on, while not below `least`."""
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return tuple(found)
