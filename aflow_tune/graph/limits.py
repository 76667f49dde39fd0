"""Old name, until the writer's room takes it from `broker.py`."""

from aflow_tune.graph.broker import GraphLimits as GraphLimits
