"""Checks the section `models` of a configuration, and reads its keys.

A key is in an environment variable, and the configuration holds the variable's name. A value that
is not a name is refused without being shown, and so is an address with a user name or password.
"""

from __future__ import annotations

import math
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.models.prices import price_of
from aflow_tune.sections import ModelSettings, PriceSettings
from aflow_tune.trace import POLICY

_KEY_VARIABLES = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "max_tokens": (1, math.inf),
    "timeout": (1e-3, math.inf),
    "retries": (0, 1000),
    "backoff": (0.0, 600.0),
    "max_concurrency": (1, 100_000),
}


def check_models(models: Mapping[str, ModelSettings]) -> list[Fault]:
    """The faults of the section `models`, missing keys included."""
    faults: list[Fault] = []
    for name, settings in models.items():
        if name == POLICY and settings.model is None:
            faults += _price_faults(settings.prices, f"models.{name}.prices")
        else:
            faults += _faults(settings, f"models.{name}")
    return faults


def credentials(settings: ModelSettings, role: str) -> tuple[str | None, dict[str, str]]:
    """The key (None: none is sent) and the extra headers, from the environment. Raises BadInput:
    the settings are wrong, or a variable is not set."""
    if faults := _faults(settings, f"models.{role}"):
        raise BadInput(f"The model for `{role}` cannot be used.", faults)
    variable = key_variable(settings)
    key = None if variable is None else os.environ[variable].strip()
    headers = {name: os.environ[source].strip() for name, source in settings.headers_env.items()}
    return key, headers


def key_variable(settings: ModelSettings) -> str | None:
    """The name of the variable that holds the key; None: no key is sent."""
    if settings.api_key_env is not None:
        return settings.api_key_env
    # A vendor's key is sent only to the vendor, unless `api_key_env` names it.
    return _KEY_VARIABLES[settings.provider] if settings.base_url is None else None


def _faults(settings: ModelSettings, where: str) -> list[Fault]:
    faults: list[Fault] = []

    def add(name: str, expected: str, found: str, fix: str) -> None:
        faults.append(Fault(f"{where}.{name}", expected, found, fix))

    def check_variable(variable: str, name: str) -> None:
        value = os.environ.get(variable, "").strip()
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", variable):
            found = "something else, not shown since it may be a key"
            fix = "export the value under a name such as MY_API_KEY, and write that name here"
            add(name, "the name of an environment variable", found, fix)
        elif not (value and value.isascii() and value.isprintable()):
            found = "it holds characters that a header cannot carry" if value else "not set"
            add(name, f"the environment variable {variable}", found, f"export {variable}=...")

    if settings.provider not in _KEY_VARIABLES:
        add("provider", "openai or anthropic", repr(settings.provider), "provider: openai")
        return faults
    if not settings.model:
        add("model", "the model's name at the provider", "nothing", "model: NAME")
    if settings.base_url is not None and not _is_address(settings.base_url):
        expected = "an address such as https://host/v1, without user, password or query"
        found = "something else, not shown since it may hold a key"
        add("base_url", expected, found, "give keys by api_key_env or headers_env")
    for name, (low, high) in _RANGES.items():
        value: Any = getattr(settings, name)
        if value is not None and not low <= value <= high:
            add(name, f"a number from {low:g} to {high:g}", str(value), "give such a number")
    if (variable := key_variable(settings)) is not None:
        check_variable(variable, "api_key_env")
    for header, source in settings.headers_env.items():
        if re.fullmatch(r"[A-Za-z0-9-]+", header):
            check_variable(source, f"headers_env.{header}")
        else:
            add("headers_env", "names of HTTP headers", "another name", "letters, digits, `-`")
    return faults + _price_faults(settings.prices, f"{where}.prices")


def _is_address(address: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(address)
        parts.port  # noqa: B018 (ValueError where it is no number)
    except ValueError:
        return False
    secret = "@" in parts.netloc or parts.query or parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not secret


def _price_faults(prices: PriceSettings | None, where: str) -> list[Fault]:
    faults: list[Fault] = []
    if prices is None:
        return faults
    if prices.listed is not None and price_of("openai", None, "", prices) is None:
        expected = "a model of the price list, such as gpt-4o-mini or azure/gpt-4o-mini"
        fix = "name such a model, or give `input` and `output`"
        faults.append(Fault(f"{where}.listed", expected, repr(prices.listed), fix))
    for name in ("input", "output", "cached_input"):
        value = getattr(prices, name)
        missing = value is None and name != "cached_input" and prices.listed is None
        if missing or (value is not None and not 0 <= value < math.inf):
            expected = "US dollars for a million tokens, from 0"
            faults.append(Fault(f"{where}.{name}", expected, str(value), f"{name}: NUMBER"))
    return faults
