"""What a machine has for a run, looked at before one is started.

A check is a function that returns lines; a line says what was found, whether that is fine, and
if not, the command that puts it right. This room holds the checks of the machine itself
(Python, versions, GPUs, sandbox, disk, the hub, keys) and runs checks side by side. Checks that
need a configuration or Ray are in `doctor.py` and `ray_check.py`; `commands/doctor.py` prints.

`clashes.py` is used at every start as well: importing it, and this package, costs nothing.
"""
