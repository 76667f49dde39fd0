"""What a YAML says, read, checked and made ready: Trinity's schema, and our own sections.

Trinity 0.6.0 imports a few names of vLLM; where it is not installed a stand-in for them is put
in place here, before any module of Trinity is imported.
"""

from aflow_tune.config import vllm_stub

vllm_stub.install()
