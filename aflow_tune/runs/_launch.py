"""`_launch.py PARENT_PID COMMAND...`: execs the command, set to get SIGTERM when its parent dies.
The signal survives exec. It is set here and not in a `preexec_fn`, which can deadlock in a process
with threads. Linux only; elsewhere the command just runs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != int(parent):  # it died before the call above
        sys.exit(128 + signal.SIGTERM)
os.execv(command[0], command)
