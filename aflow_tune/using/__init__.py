"""Uses a trained policy: solves problems with it, serves it over HTTP, exports it.

`inferring.py` solves one problem or a file of them, `server.py` serves over HTTP, `solved.py`
describes results, `export.py` writes weights and workflows for other tools.
"""

import aflow_tune.config  # noqa: F401  (the stand-in for a missing vLLM, before Trinity)
