"""Our versions of Trinity's explorer, trainer and rollouts, and the loops that drive them."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
