"""Prices of tokens: the list of the package genai-prices; prices in the YAML override it.

Nothing is fetched. The address that is called decides whose prices apply. An address that the list
does not know counts as a proxy of the vendor that has a model of that name (`stands_in` names it),
unless it is on this machine or a private network. An unknown price is None, never 0. Not covered:
discounts, service tiers, images and audio.
"""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from aflow_tune.models.types import Usage
from aflow_tune.sections import ModelSettings, PriceSettings

_PRIVATE_ENDINGS = (".localhost", ".local", ".internal", ".lan", ".home", ".corp", ".intranet")


class Price(Protocol):
    def cost(self, usage: Usage) -> float: ...  # US dollars


@dataclass(frozen=True)
class FixedPrice:
    """US dollars per million tokens; `cached_input` None means the same as `input`."""

    input: float
    output: float
    cached_input: float | None = None

    def cost(self, usage: Usage) -> float:
        cached = min(usage.cached_tokens, usage.prompt_tokens)
        of_cached = self.input if self.cached_input is None else self.cached_input
        prompt = (usage.prompt_tokens - cached) * self.input + cached * of_cached
        return (prompt + usage.completion_tokens * self.output) / 1e6


@dataclass(frozen=True)
class ListedPrice:
    """A price of the list, with its tiers by prompt length and its changes over time."""

    provider: str | None
    address: str | None
    model: str

    def cost(self, usage: Usage) -> float:
        """US dollars of one call. Raises LookupError: not in the list, which `price_of` checks."""
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
    """The price of `model` at `base_url` (None: the provider's own address): as `given`, else as
    listed, else None: unknown."""
    if given is not None and given.input is not None and given.output is not None:
        return FixedPrice(given.input, given.output, given.cached_input)
    if given is not None and given.listed is not None:
        candidates = _by_name(given.listed)
    elif base_url is None:
        candidates = [ListedPrice(provider, None, model)]
    else:
        proxied = [] if _is_own(base_url) else _by_name(model)
        candidates = [ListedPrice(None, base_url, model), *proxied]
    for price in candidates:
        try:
            price.cost(Usage(1, 1))
        except (LookupError, ValueError):
            continue
        return price
    return None


def stands_in(model: ModelSettings) -> str | None:
    """The listed model, `VENDOR/MODEL`, whose price is used for an unknown address; else None."""
    price = price_of(model.provider, model.base_url, model.model or "", model.prices)
    named = model.prices is not None and model.prices.listed is not None
    if not isinstance(price, ListedPrice) or price.address or not model.base_url or named:
        return None
    vendor, found = _find(price.provider, price.address, price.model)
    return f"{vendor.id}/{found.id}"


def _by_name(model: str) -> list[ListedPrice]:
    """Listed models of this name; proxies may prefix the vendor, as in openai/gpt-4o-mini."""
    vendor, _, name = model.partition("/")
    return [*([ListedPrice(vendor, None, name)] if name else []), ListedPrice(None, None, model)]


def _is_own(base_url: str) -> bool:
    host = urlsplit(base_url).hostname or ""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        return "." not in host or host.endswith(_PRIVATE_ENDINGS)


@functools.lru_cache(maxsize=256)
def _find(provider_id: str | None, address: str | None, name: str) -> tuple[Any, Any]:
    from datetime import UTC, datetime

    from genai_prices.data_snapshot import get_snapshot

    provider, model = get_snapshot().find_provider_model(name, None, provider_id, address)
    prices = model.get_prices(datetime.now(tz=UTC))
    if prices.input_mtok is None or prices.output_mtok is None:
        raise LookupError(f"the list has no price for tokens of {name}")
    return provider, model
