"""`aflow-tune estimate`: memory by role, tokens, time and money of a run, before it starts."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
