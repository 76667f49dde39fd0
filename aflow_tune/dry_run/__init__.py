"""`--dry-run`: one scripted step of a configuration on a tiny model, and a report of it."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
