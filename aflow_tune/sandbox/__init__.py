"""Runs programs that a model wrote in a sandbox, under limits on time, memory, disk and output.

`run_program` runs one program to its end, `open_channel` runs one and exchanges messages with it,
`detect` says which backend this machine has. docs/sandbox.md lists what each backend covers.
"""

from aflow_tune.sandbox.backends import Detection as Detection
from aflow_tune.sandbox.policy import use_policy as use_policy
from aflow_tune.sandbox.running import Channel as Channel
from aflow_tune.sandbox.running import ProgramEnded as ProgramEnded
from aflow_tune.sandbox.running import detect as detect
from aflow_tune.sandbox.running import open_channel as open_channel
from aflow_tune.sandbox.running import run_program as run_program
from aflow_tune.sandbox.running import run_program_sync as run_program_sync
from aflow_tune.sandbox.types import Ending as Ending
from aflow_tune.sandbox.types import Execution as Execution
from aflow_tune.sandbox.types import Level as Level
from aflow_tune.sandbox.types import Limits as Limits
from aflow_tune.sandbox.types import SandboxUnavailable as SandboxUnavailable
