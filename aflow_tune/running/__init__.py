"""A run from its claim on a folder to its proof: the modes, the stages, in whichever engine."""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
