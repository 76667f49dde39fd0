"""What PPO needs of a configuration: its critic, and the passes over a batch.

The keys are Trinity's. On a cluster the critic is a second model (`model.critic_model_path`, unset:
the policy's), trained by verl. The local engine's is a value head on the policy; of
`trainer.trainer_config` it reads `READ`, in verl's flat layout or its older one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trinity.common.config import Config

from aflow_tune.config.settings import AflowConfig, value_of
from aflow_tune.config.tasksets import total_steps
from aflow_tune.errors import Fault

if TYPE_CHECKING:
    from aflow_tune.engines.local.critic import CriticSettings

_KEY, _OLDER = "trainer.trainer_config", "actor_rollout_ref"


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _above(value: Any, least: float = 0.0) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and least < value < math.inf


def _betas(value: Any) -> bool:
    pair = isinstance(value, (list, tuple)) and len(value) == 2
    return pair and all(beta == 0 or (_above(beta) and beta < 1) for beta in value)


_PASSES = "actor.ppo_epochs"
READ: dict[str, tuple[str, Any, Callable[[Any], bool], str]] = {
    _PASSES: ("", 1, _count, "1 or more passes over a batch"),
    "critic.ppo_epochs": ("passes", 16, _count, "1 or more passes over a batch"),
    "critic.optim.lr": ("lr", 3e-4, _above, "a number above 0, written as 3.0e-4"),
    "critic.optim.betas": ("betas", [0.9, 0.999], _betas, "two numbers from 0 to below 1"),
    "critic.optim.weight_decay": (
        "weight_decay",
        0.01,
        lambda value: value == 0 or _above(value),
        "0 or more",
    ),
    "critic.cliprange_value": ("clip_range", 0.5, _above, "a number above 0"),
}
"""Keys below `trainer.trainer_config` that the local engine reads: field of `CriticSettings`, value
if unset, a test of it and the test in words. Values are verl's, but passes and rate: of a whole
model, which hardly move a head that begins at 0 (docs/numbers.md)."""


def verl_settings(settings: Any, *path: str) -> Mapping[str, Any]:
    """A section of `trainer.trainer_config`, in verl's flat form or below actor_rollout_ref."""
    at: Any = settings if isinstance(settings, dict) else {}
    older = at.get(_OLDER)
    at = {**at, **(older if isinstance(older, dict) else {})}
    for name in path:
        at = at.get(name)
        at = at if isinstance(at, dict) else {}
    return at


def _read(config: Config, key: str) -> Any:
    *path, name = key.split(".")
    found = verl_settings(config.trainer.trainer_config, *path).get(name)
    return READ[key][1] if found is None else found


def policy_passes(config: Config) -> int:
    """Updates of the policy on each batch, on the local engine, by any algorithm."""
    return int(_read(config, _PASSES))


def uses_critic(config: Config) -> bool:
    from trinity.algorithm import ALGORITHM_TYPE

    return bool(ALGORITHM_TYPE.get(config.algorithm.algorithm_type).use_critic)


def critic_settings(config: Config) -> CriticSettings | None:
    """Of the local engine's value head; None for an algorithm without a critic."""
    if not uses_critic(config):
        return None
    from aflow_tune.engines.local.critic import CriticSettings

    fields = {field: _read(config, key) for key, (field, *_) in READ.items() if field}
    fields |= {"betas": tuple(fields["betas"]), "grad_clip": config.trainer.grad_clip}
    return CriticSettings(**fields)


def is_read(config: AflowConfig, key: str) -> bool:
    """Whether the local engine reads this key of verl's."""
    short = key.removeprefix(f"{_KEY}.").removeprefix(f"{_OLDER}.")
    if short == _PASSES:
        return True
    return (short in READ or key == "trainer.critic_warmup") and uses_critic(config)


def check_critic(config: AflowConfig) -> Iterator[Fault | str]:
    """Check the settings of a critic, and warn of what they mean on this engine."""
    local, where, path = config.engine == "local", config.positions.where, "model.critic_model_path"
    try:
        critic = uses_critic(config)
    except (ImportError, AttributeError, KeyError, ValueError, TypeError):
        return  # an unknown name, which is reported elsewhere
    for key, (_, _, good, expected) in READ.items() if local else ():
        if (key == _PASSES or critic) and not good(_read(config, key)):
            place = f"{_KEY}.{key}"
            if value_of(config, place) is None:
                place = f"{_KEY}.{_OLDER}.{key}"
            fix = f"{key.rpartition('.')[2]}: {READ[key][1]}"
            yield config.wrong(place, f"{expected} (engine: local)", fix)
    if not critic:
        if config.positions.given(path):
            yield f"{where(path)}: not read, {config.algorithm.algorithm_type} has no critic"
        return
    for name in ("gamma", "lam"):
        value = (config.algorithm.advantage_fn_args or {}).get(name, 1.0)
        if not (value == 0 or (_above(value) and value <= 1)):
            key = f"algorithm.advantage_fn_args.{name}"
            yield config.wrong(key, "from 0 to 1", f"{name}: 1.0")
    steps, warmup = total_steps(config), config.trainer.critic_warmup
    if steps is not None and warmup >= steps > 0:
        expected = f"fewer than the {steps} steps of this run: before them only the critic learns"
        yield config.wrong("trainer.critic_warmup", expected, "critic_warmup: 0")
    own = config.model.critic_model_path
    if local and own and own != config.model.model_path:
        expected = "nothing: the local engine's critic is a value head on the policy itself"
        yield config.wrong(path, expected, "remove it, or engine: trinity")
    if not local:
        key = where("algorithm.algorithm_type")
        yield (
            f"{key}: verl trains all weights of a second model as the critic ({path}), and "
            "Trinity's GAE takes each call for a run of its own, which earns the whole reward; "
            "`engine: local` joins the calls of a run"
        )
