"""Landlock: how the program's process confines itself before the program starts.

Sent to the sandbox as `_inside.py` is. Landlock (kernel documentation: userspace-api/landlock)
leaves only the file rights of the rules, for this process and its children, irrevocably.
"""

from __future__ import annotations

import ctypes
import os
import struct

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RULE_PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
ALL_FILE_RIGHTS = (1 << 15) - 1  # of version 3, the first that covers truncation
IOCTL_DEV = 1 << 15
TCP_RIGHTS = 0b11
SCOPES = 0b11  # abstract sockets and signals stay inside the sandbox
OF_PLAIN_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV

MEANINGS = {
    "list": READ_DIR,
    "read": EXECUTE | READ_FILE | READ_DIR,
    "device": READ_FILE | WRITE_FILE | TRUNCATE,
    "all": ALL_FILE_RIGHTS & ~(1 << 6 | 1 << 11),
}
"""The rights of each kind of rule. 'all' leaves out making character and block devices."""


def version() -> int:
    """The kernel's Landlock version; 0 without Landlock."""
    return max(0, ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def confine(rules: list[tuple[str, str]], filter_program: bytes) -> None:
    """Confine this process and its later children. Raises OSError: the kernel refused a step."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long

    def call(*arguments: object, function: object = libc.syscall) -> int:
        result = function(*arguments)  # type: ignore[operator]
        if result < 0:
            raise OSError(ctypes.get_errno(), f"system call {arguments[0]}")
        return int(result)

    call(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, function=libc.prctl)
    offered = version()
    handled = ALL_FILE_RIGHTS | (IOCTL_DEV if offered >= 5 else 0)
    attributes = struct.pack(
        "=QQQ", handled, TCP_RIGHTS if offered >= 4 else 0, SCOPES if offered >= 6 else 0
    )
    size = 24 if offered >= 6 else 16 if offered >= 4 else 8
    ruleset = call(CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(size), 0)
    for meaning, path in rules:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        rights = MEANINGS[meaning] & handled
        if not os.path.isdir(path):
            rights &= OF_PLAIN_FILES
        if rights:
            rule = struct.pack("=Qi", rights, place)
            call(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
        os.close(place)
    call(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]

    text = ctypes.create_string_buffer(filter_program, len(filter_program))
    program = Program(len(filter_program) // 8, ctypes.cast(text, ctypes.c_void_p))
    mode = SECCOMP_MODE_FILTER
    call(PR_SET_SECCOMP, mode, ctypes.byref(program), 0, 0, function=libc.prctl)
