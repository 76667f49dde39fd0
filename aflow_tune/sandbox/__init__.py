"""Running programs that a model wrote, where they can hurt nobody.

`run_program` runs one and says how it ended, `open_channel` runs one and talks with it, `detect`
says which wall there is. What each wall covers, and what not: docs/sandbox.md.
"""

from aflow_tune.sandbox.channel import Channel, ProgramEnded, open_channel
from aflow_tune.sandbox.levels import Detection
from aflow_tune.sandbox.policy import use_policy
from aflow_tune.sandbox.running import detect, run_program, run_program_sync
from aflow_tune.sandbox.types import (
    Ending,
    Execution,
    Level,
    Limits,
    SandboxUnavailable,
)

__all__ = [
    "Channel",
    "Detection",
    "Ending",
    "Execution",
    "Level",
    "Limits",
    "ProgramEnded",
    "SandboxUnavailable",
    "detect",
    "open_channel",
    "run_program",
    "run_program_sync",
    "use_policy",
]
