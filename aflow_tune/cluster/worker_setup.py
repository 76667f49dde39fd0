"""What every worker of a run does before anything else: get the user's code, then the keys.

Ray calls `set_up` in each worker process (`worker_process_setup_hook`). Importing this module
also installs the stand-in for a missing vLLM, as everything of this room does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import Any

from aflow_tune.cluster import keys
from aflow_tune.quick_start import import_quickly
from aflow_tune.shipping.arrival import arrive, conflicts

HOOK = f"{__name__}.set_up"


def set_up() -> None:
    """Called by Ray at the start of each worker."""
    import_quickly()
    arrive()
    keys.take_keys()


def tell(needs: list[str], mark: str) -> dict[str, Any]:
    """What is there on this node: our version, which packages are missing, which of the user's
    modules have a name that was taken, whether it sees a file. Here, since this module imports
    nothing heavy."""
    return {
        "version": importlib.metadata.version("aflow-tune"),
        "missing": [name for name in needs if importlib.util.find_spec(name) is None],
        "conflicts": conflicts(),
        "sees": os.path.exists(mark),
    }
