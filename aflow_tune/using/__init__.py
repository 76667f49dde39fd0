"""What was trained, put to use: asked problems, served over HTTP, exported.

Asking one problem is `inferring.py`; here are the forms in which that is
offered and what of a run is written out for other tools.
"""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
