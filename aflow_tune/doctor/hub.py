"""What the hub says about a model or data set that is not on this machine.

Nothing is fetched but the description. Being offline by choice (`HF_HUB_OFFLINE`) is told apart
from a hub that does not answer, and that from a name or a right that is missing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from aflow_tune.doctor.lines import Line, fault, note, ok, size

SECONDS = 6.0


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
