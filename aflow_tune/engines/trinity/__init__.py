"""The home of Trinity's explorer, trainer and rollouts, and of what drives them."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
