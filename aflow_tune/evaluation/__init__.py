"""Evaluation: measuring workflows and models on held-out tasks, and comparing them."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
