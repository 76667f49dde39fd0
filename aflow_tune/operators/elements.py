"""Old name, until the writer's room takes it from `reading.py`."""

from aflow_tune.operators.reading import elements as elements
