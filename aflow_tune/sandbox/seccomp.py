"""The seccomp filter of both confining backends, assembled here as classic BPF.

It allows by default and refuses what attacks need and programs do not: other processes' memory,
namespaces, mounts, sockets, keys, often exploited kernel interfaces, memory that no limit counts,
and every call newer than this table. A refused call fails with EPERM; clone3 and newer calls fail
with ENOSYS, reads of extended attributes with ENOTSUP; another architecture's calls kill the
process. References: linux/filter.h, Documentation/userspace-api/seccomp_filter.rst.
"""

from __future__ import annotations

import errno
import platform
import re
import struct
from collections.abc import Iterator

# Instruction codes of linux/bpf_common.h.
_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_GREATER = 0x25  # BPF_JMP | BPF_JGT | BPF_K
_JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

# Offsets in struct seccomp_data; arguments are 64 bits wide, the low half first.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_KILL = 0x8000_0000
_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000

ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}  # AUDIT_ARCH_*
_X32_CALLS = 0x3FFF_FFFF
_NEWEST = 462  # larger numbers are newer than this table, on both architectures

_NEW_NAMESPACES = 0x7E02_0000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. Only unshare takes NEWTIME."""
_AF_UNIX = 1
_SOCK_DGRAM = 2  # this bit is also set in SOCK_RAW, but not in SOCK_STREAM or SOCK_SEQPACKET


def _table(text: str) -> dict[str, tuple[int | None, int | None]]:
    """System calls by name: numbers on x86-64 and AArch64, None where the call does not exist."""
    found = {}
    for entry in re.sub(r"#.*", "", text).split(","):
        if entry.strip():
            name, *numbers = entry.split()
            first, second = (None if number == "-" else int(number) for number in numbers)
            found[name] = (first, second)
    return found


CALLS = _table(
    """
    # other processes: their memory, descriptors, limits, scheduling
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,
    process_madvise 440 440, process_mrelease 448 448, pidfd_getfd 438 438, kcmp 312 272,
    migrate_pages 256 238, move_pages 279 239, ioprio_set 251 30, sched_setattr 314 274,
    sched_setparam 142 118, sched_setscheduler 144 119,
    # namespaces, roots and mounts
    unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41,
    chroot 161 51, move_mount 429 429, open_tree 428 428, fsopen 430 430, fsconfig 431 431,
    fsmount 432 432, fspick 433 433, mount_setattr 442 442, statmount 457 457,
    listmount 458 458,
    # files by handle, past every path check
    name_to_handle_at 303 264, open_by_handle_at 304 265,
    # sockets; socketpair is looked at below
    socket 41 198, connect 42 203, bind 49 200, listen 50 201,
    # memory that belongs to no process, so that no limit would count it
    memfd_create 319 279, memfd_secret 447 447, shmget 29 194, semget 64 190, msgget 68 186,
    mq_open 240 180,
    # keys
    add_key 248 217, request_key 249 218, keyctl 250 219,
    # kernel interfaces with a history
    bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425,
    io_uring_enter 426 426, io_uring_register 427 427, io_setup 206 0, io_submit 209 2,
    vmsplice 278 75, fanotify_init 300 262, fanotify_mark 301 263, inotify_add_watch 254 27,
    lookup_dcookie 212 18, modify_ldt 154 -, uselib 134 -,
    # the machine
    kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273,
    delete_module 176 106, create_module 174 -, acct 163 89, quotactl 179 60,
    quotactl_fd 443 443, reboot 169 142, swapon 167 224, swapoff 168 225, sethostname 170 161,
    setdomainname 171 162, settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266,
    adjtimex 159 171, syslog 103 116, vhangup 153 58, iopl 172 -, ioperm 173 -,
    """
)
"""Refused by both backends."""

LANDLOCK_CALLS = _table(
    """
    # Landlock does not look at changes of metadata, and without a mount namespace the files of
    # the machine are in sight; an ordinary user's own would be at the program's mercy.
    chmod 90 -, fchmodat 268 53, fchmodat2 452 452, chown 92 -, lchown 94 -, fchownat 260 54,
    utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5,
    lsetxattr 189 6, removexattr 197 14, lremovexattr 198 15,
    # A descriptor that travels in a message is in no process's table, where usage is read.
    sendmsg 46 211, sendmmsg 307 269,
    """
)
LANDLOCK_READS = _table(
    """
    getxattr 191 8, lgetxattr 192 9, listxattr 194 11, llistxattr 195 12,
    """
)
"""Refused with ENOTSUP, which copying functions read as 'not on this file system'."""

SIGNAL_CALLS = _table(
    """
    kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138,
    rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424,
    """
)
"""Refused under Landlock before version 6, unless the program has a user id of its own."""

# It passes flags in memory, which a filter cannot read; libraries fall back to clone.
_ABSENT = {"clone3": (435, 435)}

_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_PR_SET_DUMPABLE = 4

Test = tuple[int, int, int, bool]
"""Index of the argument, comparison, operand, and whether a match is refused or everything else."""
EXAMINED: dict[str, tuple[tuple[int, int], list[Test]]] = {
    "clone": ((56, 220), [(0, _JUMP_ANY_BIT, _NEW_NAMESPACES, True)]),
    # A datagram socket of a pair can send to any address.
    "socketpair": (
        (53, 199),
        [(0, _JUMP_EQUAL, _AF_UNIX, False), (1, _JUMP_ANY_BIT, _SOCK_DGRAM, True)],
    ),
    "ioctl": (
        (16, 29),
        [
            (1, _JUMP_EQUAL, operation, True)
            for operation in (_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP)
        ],
    ),
    "fcntl": (
        (72, 25),
        [(1, _JUMP_EQUAL, operation, True) for operation in (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX)],
    ),
    # Only for the calling process, which is 0.
    "prlimit64": ((302, 261), [(0, _JUMP_EQUAL, 0, False)]),
    "sched_setaffinity": ((203, 122), [(0, _JUMP_EQUAL, 0, False)]),
    "setpriority": ((141, 140), [(0, _JUMP_EQUAL, 0, False), (1, _JUMP_EQUAL, 0, False)]),
    "personality": ((135, 92), [(0, _JUMP_EQUAL, 0xFFFF_FFFF, False)]),  # a query
    # Landlock only: the supervisor cannot read the open files of an undumpable process.
    "prctl": ((157, 167), [(0, _JUMP_EQUAL, _PR_SET_DUMPABLE, True)]),
}
"""Calls that are decided by arguments. Their low halves suffice: the kernel takes each as an int,
except clone's flags, where the high half changes nothing that matters here."""


def supported() -> bool:
    """Whether there is a filter for this system and architecture."""
    return platform.system() == "Linux" and platform.machine() in ARCHITECTURES


def filter_program(*, landlock: bool = False, refuse_signals: bool = False) -> bytes:
    """The filter for this machine, as `struct sock_filter[]`. `landlock`: also refuse what Landlock
    leaves open. `refuse_signals`: refuse all signals, also those to itself."""
    code = _instructions(platform.machine(), landlock, refuse_signals)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


Instruction = tuple[int, int, int, int]  # code, jump offsets if true and if false, operand


def _instructions(machine: str, landlock: bool, refuse_signals: bool) -> Iterator[Instruction]:
    column = list(ARCHITECTURES).index(machine)
    yield _LOAD, 0, 0, _ARCHITECTURE
    yield _JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]
    yield _return(_KILL)
    yield _LOAD, 0, 0, _NUMBER
    if machine == "x86_64":
        yield _JUMP_GREATER, 0, 1, _X32_CALLS
        yield _return(_KILL)
    yield _JUMP_GREATER, 0, 1, _NEWEST
    yield _return(_ERRNO | errno.ENOSYS)
    yield from _refuse(_ABSENT["clone3"][column], errno.ENOSYS)
    refused = dict(CALLS)
    if landlock:
        refused |= LANDLOCK_CALLS
        for numbers in LANDLOCK_READS.values():
            yield from _refuse(numbers[column], errno.ENOTSUP)
    if refuse_signals:
        refused |= SIGNAL_CALLS
    for numbers in refused.values():
        yield from _refuse(numbers[column], errno.EPERM)
    for name, (pair, tests) in EXAMINED.items():
        body = list(_examine([] if name == "prctl" and not landlock else tests))
        yield _JUMP_EQUAL, 0, len(body), pair[column]
        yield from body
    yield _return(_ALLOW)


def _examine(tests: list[Test]) -> Iterator[Instruction]:
    """The instructions that test one call's arguments; they end with a return."""
    loaded = -1
    for argument, jump, operand, refused in tests:
        if argument != loaded:
            yield _LOAD, 0, 0, _ARGUMENTS + 8 * argument
        loaded = argument
        yield jump, int(not refused), int(refused), operand
        yield _return(_ERRNO | errno.EPERM)
    yield _return(_ALLOW)


def _return(value: int) -> Instruction:
    return _RETURN, 0, 0, value


def _refuse(number: int | None, error: int) -> Iterator[Instruction]:
    if number is not None:
        yield _JUMP_EQUAL, 0, 1, number
        yield _return(_ERRNO | error)
