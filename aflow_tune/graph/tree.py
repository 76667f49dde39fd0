"""Old names, until the writer's room takes them from `shape.py`."""

from aflow_tune.graph.shape import children as children
from aflow_tune.graph.shape import levels as levels
from aflow_tune.graph.shape import parameters as parameters
from aflow_tune.graph.shape import walk as walk
