"""Where this package keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where converted models and notes live: `$AFLOW_TUNE_CACHE`, else `~/.cache/aflow-tune`."""
    configured = os.environ.get("AFLOW_TUNE_CACHE")
    return Path(configured) if configured else Path.home() / ".cache" / "aflow-tune"
