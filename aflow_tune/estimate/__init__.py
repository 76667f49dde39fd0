"""What a run will need, worked out before it runs: memory by role, tokens, time and money."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
