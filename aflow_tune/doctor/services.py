"""Checks over the network: keys at the endpoints of models, files on the hub.

Keys are never shown. Each endpoint is asked for its list of models; one at a `base_url` that takes
the key is asked again without it. From the hub only metadata is fetched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from aflow_tune.doctor.lines import Line, fault, line_of, note, ok
from aflow_tune.models.clients import make_client
from aflow_tune.models.settings import check_models, key_variable
from aflow_tune.sections import ModelSettings

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig
    from aflow_tune.models.http_client import Listing

SECONDS = 6.0


def check_keys(config: AflowConfig, *, ask: bool = True) -> list[Line]:
    """Lines about the keys of every role of `models`, and of Trinity's own services. `ask`: contact
    the endpoints; otherwise only the environment is checked."""
    lines, endpoints = [], dict[tuple[object, ...], dict[str, ModelSettings]]()
    for role, settings in config.models.items():
        faults = check_models({role: settings})
        # Faults of the other settings are shown under `config`.
        lines += [
            line_of("keys", replace(found, where=config.positions.where(found.where)))
            for found in faults
            if found.where.startswith((f"models.{role}.api_key_env", f"models.{role}.headers_env"))
        ]
        if not faults and settings.model is not None:
            headers = tuple(sorted(settings.headers_env.items()))
            endpoint = (settings.provider, settings.base_url, settings.api_key_env, headers)
            endpoints.setdefault(endpoint, {})[role] = settings

    async def ask_all() -> list[list[Line]]:
        return await asyncio.gather(*(_ask(roles) for roles in endpoints.values()))

    if ask:
        lines += [line for told in asyncio.run(ask_all()) for line in told]
    else:
        for roles in endpoints.values():
            lines.append(note("keys", f"{_who(roles)}: {_key(roles)}; not asked (--offline)"))
    external, named = config.model.external_model, []
    if config.model.tinker.enable:
        named.append(("model.tinker", "TINKER_API_KEY"))
    if external.enable:
        variables = (external.api_key_env, external.base_url_env)
        named += [("model.external_model", str(variable)) for variable in variables]
    for setting, variable in named:
        told = f"{setting}: {variable} is"
        if os.environ.get(variable, "").strip():
            lines.append(ok("keys", f"{told} set"))
        else:
            lines.append(fault("keys", f"{told} not set", f"export {variable}=...", given=True))
    return lines or [ok("keys", "none needed: no model behind an API")]


async def _ask(roles: Mapping[str, ModelSettings]) -> list[Line]:
    role, settings = next(iter(roles.items()))
    listing, where = await _listing(settings, role)
    who, key, variable = f"{_who(roles)}: {where}", _key(roles), key_variable(settings)
    if listing.access == "refused":
        cure = f"export {variable or 'NAME'}=..., the variable of models.{role}.api_key_env"
        return [fault("keys", f"{who} refuses {key} ({listing.reason})", cure, given=True)]
    if listing.access == "unreachable":
        cure = f"start the server, or correct models.{role}.base_url; or look at your network"
        return [fault("keys", f"{who} does not answer ({listing.reason})", cure)]
    open_to_all, granted = False, listing.access == "granted"
    if granted and variable is not None and settings.base_url is not None:
        anybody = replace(settings, api_key_env=None, headers_env={})
        open_to_all = (await _listing(anybody, role))[0].access == "granted"
    lines = [ok("keys", f"{who} takes {key}")]
    if open_to_all or not granted:
        why = "its list of models is open" if open_to_all else listing.reason
        lines = [note("keys", f"{who} answers; {key} was not proved ({why})")]
    for name, own in roles.items():
        if listing.models and own.model not in listing.models:
            cure = f"check models.{name}.model; an alias may still be taken"
            lines.append(note("keys", f"{name}: {where} does not list {own.model!r}", cure))
    return lines


async def _listing(settings: ModelSettings, role: str) -> tuple[Listing, str]:
    client = make_client(settings, role)
    try:
        return await client.list_models(SECONDS), settings.base_url or client.address
    finally:
        await client.close()


def _who(roles: Mapping[str, ModelSettings]) -> str:
    return ", ".join(f"{role} ({settings.model})" for role, settings in roles.items())


def _key(roles: Mapping[str, ModelSettings]) -> str:
    variable = key_variable(next(iter(roles.values())))
    return "no key" if variable is None else f"the key in {variable}"


def check_hub(check: str, name: str, kind: str, *, ask: bool = True) -> list[Line]:
    """Whether `name` can be fetched from the hub at the start of the run. `kind`: 'model' or
    'dataset'. `ask`: contact the hub."""
    fetch = f"hf download {name} --repo-type {kind}"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        found = f"{name}: not on this machine, and HF_HUB_OFFLINE forbids to fetch it"
        return [fault(check, found, f"HF_HUB_OFFLINE=0 {fetch}")]
    if not ask:
        found = f"{name}: not on this machine; the hub was not asked (--offline)"
        return [note(check, found, fetch)]
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        told = api.repo_info(name, repo_type=kind, timeout=SECONDS, files_metadata=True)
        if getattr(told, "gated", False):  # its metadata is public, its files may not be
            api.auth_check(name, repo_type=kind)
    except GatedRepoError:
        cure = f"accept its terms at {api.endpoint}/{name}, then `hf auth login`"
        return [fault(check, f"{name}: the hub asks for consent first", cure, given=True)]
    except RepositoryNotFoundError:
        cure = "check the name; for a private one `hf auth login`"
        return [fault(check, f"{name}: the hub knows no such {kind}", cure, given=True)]
    except Exception as error:  # exception types differ between versions of the hub's client
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        found = f"{name}: not on this machine, and {api.endpoint} does not answer ({reason})"
        return [fault(check, found, f"`{fetch}` where the hub can be reached; or set HF_ENDPOINT")]
    sizes = [file.size for file in told.siblings or [] if file.size is not None]
    amount = f" ({sum(sizes) / 1e9:.3g} GB)" if sizes else ""
    return [ok(check, f"{name}: on the hub{amount}; fetched at the start")]
