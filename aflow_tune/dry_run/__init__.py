"""`--dry-run`: one scripted step of a whole run on a tiny model, and what it showed."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
