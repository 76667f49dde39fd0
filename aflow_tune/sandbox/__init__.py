"""Running programs that a model wrote, where they can hurt nobody.

`run_program` runs one and says how it ended, `open_channel` runs one and talks with it, `detect`
says which backend there is. What each covers, and what not: docs/sandbox.md.
"""

from aflow_tune.sandbox.backends import Detection
from aflow_tune.sandbox.policy import use_policy
from aflow_tune.sandbox.running import (
    Channel,
    ProgramEnded,
    detect,
    open_channel,
    run_program,
    run_program_sync,
)
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
