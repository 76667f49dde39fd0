"""Measuring a workflow or a model, and comparing two of them."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
