"""What tokens cost: the maintained list of the package genai-prices, with YAML prices on top.

The list is data that the package brings along; nothing is fetched. Whose prices apply is
decided by the address that is called, never guessed from a model's name alone: the same name
behind somebody's own server has no listed price. A price that is not known is None, never 0;
a model costs nothing only where the configuration says so.

Not covered: batch discounts, service tiers, images and audio, and what an account has agreed
on with its vendor (write that under `prices:`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

from aflow_tune.config import PriceSettings
from aflow_tune.models.types import Usage


class Price(Protocol):
    """Turns tokens into US dollars."""

    def cost(self, usage: Usage) -> float:
        """US dollars."""
        ...


@dataclass(frozen=True)
class FixedPrice:
    """US dollars for a million tokens; `cached_input` None is the same as `input`."""

    input: float
    output: float
    cached_input: float | None = None

    def cost(self, usage: Usage) -> float:
        """US dollars."""
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        parts = (
            (usage.prompt_tokens - cached) * self.input
            + cached * (self.input if self.cached_input is None else self.cached_input)
            + usage.completion_tokens * self.output
        )
        return parts / 1e6


@dataclass(frozen=True)
class ListedPrice:
    """A price of the list, with its tiers by prompt length and the dates it changed at."""

    provider: str | None
    address: str | None
    model: str

    def cost(self, usage: Usage) -> float:
        """US dollars.

        Raises:
            LookupError: the list does not know the model; `listed_price` has checked that.
        """
        from genai_prices import Usage as ListUsage

        provider, model = _find(self.provider, self.address, self.model)
        tokens = ListUsage(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cache_read_tokens=min(usage.cached_tokens, usage.prompt_tokens),
        )
        return float(model.calc_price(tokens, provider).total_price)


def price_of(
    provider: str, base_url: str | None, model: str, given: PriceSettings | None = None
) -> Price | None:
    """The price of `model`: as given, else as listed, else None, which means unknown.

    Args:
        provider: 'openai' or 'anthropic'; whose list applies where `base_url` is None.
        base_url: the address that is called.
        given: prices of the configuration; `settings.check_models` has checked them.
    """
    if given is not None and given.input is not None and given.output is not None:
        return FixedPrice(given.input, given.output, given.cached_input)
    price = ListedPrice(None if base_url else provider, base_url, model)
    try:
        _find(price.provider, price.address, price.model)
        price.cost(Usage(1, 1))
    except (LookupError, ValueError):
        return None
    return price


@functools.lru_cache(maxsize=256)
def _find(provider_id: str | None, address: str | None, name: str) -> tuple[Any, Any]:
    from datetime import UTC, datetime

    from genai_prices.data_snapshot import get_snapshot

    provider, model = get_snapshot().find_provider_model(name, None, provider_id, address)
    prices = model.get_prices(datetime.now(tz=UTC))
    if prices.input_mtok is None or prices.output_mtok is None:
        raise LookupError(f"the list has no price for tokens of {name}")
    return provider, model
