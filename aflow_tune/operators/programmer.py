"""Old name, until the writer's room takes it from `programs.py`."""

from aflow_tune.operators.programs import use_libraries as use_libraries
