"""What was trained, put to use: asked problems, served over HTTP, exported.

Asking one problem is `engines/trinity/inference/inferring.py`; here are the forms in which that is
offered and what of a run is written out for other tools.
"""
