"""What a run will need, worked out before it runs: memory by role, tokens, time and money.

Every formula names its source where it stands; what is an allowance and no formula says so and is
one named constant.
"""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
