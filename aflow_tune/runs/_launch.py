"""`_launch.py PARENT_PID COMMAND...`: becomes the command, after asking for SIGTERM when its parent
is gone. The wish outlives the exec, and is set here rather than between fork and exec, where code
of a process with threads may hang. Linux only; elsewhere the command just runs.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != int(parent):  # it died before it could be noticed
        sys.exit(128 + signal.SIGTERM)
os.execv(command[0], command)
