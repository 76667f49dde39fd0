"""Everything that touches Trinity or Ray lives in this room.

Importing it installs the stand-in for a missing vLLM before any Trinity module loads, in
the command's process and, because every actor class of ours lives here, in every worker.
"""

from aflow_tune.engines.trinity import vllm_stub

vllm_stub.install()
