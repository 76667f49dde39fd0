"""What is asked over the network: the endpoints of models about their keys, the hub about files.

Keys are never shown; each endpoint is asked once, for its list of models, whatever number of roles
use it. Of the hub nothing is fetched but descriptions, and being offline by choice
(`HF_HUB_OFFLINE`) is told apart from a hub that does not answer, and that from a name or a right
that is missing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from aflow_tune.doctor.lines import Line, fault, line_of, note, ok, size
from aflow_tune.models.settings import check_models, key_variable, make_client
from aflow_tune.sections import ModelSettings

SECONDS = 6.0


def check_keys(
    models: Mapping[str, ModelSettings],
    *,
    ask: bool = True,
    where: Callable[[str], str] = str,
) -> list[Line]:
    """Lines about every role of `models`.

    Args:
        ask: False: only whether the variables are set.
        where: from a key of the configuration to its place in the file.
    """
    lines, endpoints = [], dict[tuple[object, ...], dict[str, ModelSettings]]()
    for role, settings in models.items():
        faults = check_models({role: settings})
        # What is wrong with the other settings is told with the configuration.
        lines += [
            line_of("keys", replace(found, where=where(found.where)))
            for found in faults
            if found.where.startswith((f"models.{role}.api_key_env", f"models.{role}.headers_env"))
        ]
        if faults or settings.model is None:
            continue
        headers = tuple(sorted(settings.headers_env.items()))
        endpoint = (settings.provider, settings.base_url, settings.api_key_env, headers)
        endpoints.setdefault(endpoint, {})[role] = settings
    if not ask:
        return [*lines, *(_not_asked(roles) for roles in endpoints.values())]
    return [*lines, *asyncio.run(_ask_all(list(endpoints.values())))]


def check_variables(named: Mapping[str, Iterable[str]]) -> list[Line]:
    """Whether the environment variables that other settings read are set, by the setting."""
    lines = []
    for setting, variables in named.items():
        for variable in variables:
            if os.environ.get(variable, "").strip():
                lines.append(ok("keys", f"{setting}: {variable} is set"))
            else:
                text = f"{setting}: {variable} is not set"
                lines.append(fault("keys", text, f"export {variable}=...", given=True))
    return lines


def _not_asked(roles: Mapping[str, ModelSettings]) -> Line:
    settings = next(iter(roles.values()))
    return note("keys", f"{_who(roles)}: {_key(settings)}; not asked (--offline)")


async def _ask_all(endpoints: list[dict[str, ModelSettings]]) -> list[Line]:
    answers = await asyncio.gather(*(_ask(roles) for roles in endpoints))
    return [line for lines in answers for line in lines]


async def _ask(roles: Mapping[str, ModelSettings]) -> list[Line]:
    from aflow_tune.models.listing import Access, list_models

    role, settings = next(iter(roles.items()))
    client = make_client(settings, role)
    try:
        listing = await list_models(client, SECONDS)
    finally:
        await client.close()
    variable = key_variable(settings)
    where = settings.base_url or client.address
    who = f"{_who(roles)}: {where}"
    if listing.access is Access.REFUSED:
        cure = f"export {variable}=...  # a key that this endpoint knows"
        if variable is None:
            cure = f"models: {{{role}: {{api_key_env: NAME}}}}, and export NAME=..."
        found = f"{who} refuses {_key(settings)} ({listing.reason})"
        return [fault("keys", found, cure, given=True)]
    if listing.access is Access.UNREACHABLE:
        cure = f"start the server, or correct models.{role}.base_url"
        if settings.base_url is None:
            cure = f"curl -I {where}  # a proxy, a firewall or no network at all"
        return [fault("keys", f"{who} does not answer ({listing.reason})", cure)]
    if listing.access is Access.UNKNOWN:
        return [note("keys", f"{who} answers; {_key(settings)} was not proved ({listing.reason})")]
    lines = [ok("keys", f"{who} takes {_key(settings)}")]
    if variable is not None and settings.base_url is not None and await _is_open(settings, role):
        text = f"{who} answers; {_key(settings)} was not proved (its list of models is open)"
        lines = [note("keys", text)]
    for name, own in roles.items():
        if listing.models and own.model not in listing.models:
            cure = f"check models.{name}.model; an alias may still be taken"
            lines.append(note("keys", f"{name}: {where} does not list {own.model!r}", cure))
    return lines


async def _is_open(settings: ModelSettings, role: str) -> bool:
    """Whether the endpoint lists its models for anybody, so that the list proves no key."""
    from aflow_tune.models.listing import Access, list_models

    client = make_client(replace(settings, api_key_env=None, headers_env={}), role)
    try:
        return (await list_models(client, SECONDS)).access is Access.GRANTED
    finally:
        await client.close()


def _who(roles: Mapping[str, ModelSettings]) -> str:
    return ", ".join(f"{role} ({settings.model})" for role, settings in roles.items())


def _key(settings: ModelSettings) -> str:
    variable = key_variable(settings)
    return "no key" if variable is None else f"the key in {variable}"


@dataclass(frozen=True)
class OnHub:
    """A repository that is there. `bytes` of its files; None: not told."""

    bytes: int | None
    parameters: int | None = None


def check_hub(
    check: str, name: str, kind: str, *, ask: bool = True
) -> tuple[list[Line], OnHub | None]:
    """Whether `name` can be fetched at the start of the run.

    Args:
        kind: 'model' or 'dataset'.
        ask: False: the network is not to be used.
    """
    fetch = f"hf download {name}" + (" --repo-type dataset" if kind == "dataset" else "")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        found = f"{name}: not on this machine, and HF_HUB_OFFLINE forbids to fetch it"
        return [fault(check, found, f"HF_HUB_OFFLINE=0 {fetch}")], None
    if not ask:
        found = f"{name}: not on this machine; the hub was not asked (--offline)"
        return [note(check, found, fetch)], None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        if kind == "dataset":
            told = api.dataset_info(name, timeout=SECONDS, files_metadata=True)
        else:
            told = api.model_info(name, timeout=SECONDS, files_metadata=True)
        if getattr(told, "gated", False):  # everybody may read about it, not everybody fetch it
            api.auth_check(name, repo_type=kind)
    except GatedRepoError:
        cure = f"accept its terms at {api.endpoint}/{name}, then `hf auth login`"
        return [fault(check, f"{name}: the hub asks for consent first", cure, given=True)], None
    except RepositoryNotFoundError:
        cure = "check the name; for a private one `hf auth login`"
        return [fault(check, f"{name}: the hub knows no such {kind}", cure, given=True)], None
    except (HfHubHTTPError, OSError, TimeoutError) as error:
        return [_unreachable(check, name, api.endpoint, error, fetch)], None
    except Exception as error:
        # The transport's own classes, which differ with the version of the hub's client.
        if not type(error).__module__.startswith(("httpx", "requests", "urllib3")):
            raise
        return [_unreachable(check, name, api.endpoint, error, fetch)], None
    sizes = [file.size for file in told.siblings or [] if file.size is not None]
    total = sum(sizes) if sizes else None
    amount = f" ({size(total)})" if total else ""
    weights = getattr(told, "safetensors", None)
    parameters = getattr(weights, "total", None)
    line = ok(check, f"{name}: on the hub{amount}; fetched at the start")
    return [line], OnHub(total, parameters)


def _unreachable(check: str, name: str, hub: str, error: Exception, fetch: str) -> Line:
    reason = " ".join(str(error).split())[:160] or type(error).__name__
    cure = f"`{fetch}` where the hub can be reached, then name the folder; or set HF_ENDPOINT"
    return fault(check, f"{name}: not on this machine, and {hub} does not answer ({reason})", cure)
