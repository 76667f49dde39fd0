"""Old names, until the writer's room takes them from `reading.py`."""

from aflow_tune.operators.reading import objects_in as objects_in
from aflow_tune.operators.reading import repaired_object as repaired_object
from aflow_tune.operators.reading import whole_object as whole_object
