"""Executes runs in all modes, and chains of stages, from the folder's lock to a verified result."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
