"""What runs inside a sandbox: a supervisor, and in a child of it the program.

This file is never imported there: its compiled code is sent over the control socket to an
interpreter that was started with nothing but a line to receive it (`process.py`), so it may use
built-in modules only and nothing of this package. Behind bubblewrap the supervisor is process 1
of its own process namespace; behind Landlock and in a plain subprocess it adopts the orphans of
the tree. It watches time, memory, processes and disk, and says how the program ended. It is
inside the wall as well, so the parent believes it no more than it must: every limit that the
parent can see from outside, it keeps itself too.

The conversation: setup, `ready`, job, `started` or `refused ...`, `ended ...`. Setup and job come
as marshal with a length before it; what goes back are lines of ASCII.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _sitebuiltins
import _socket
import builtins
import ctypes
import marshal
import os
import resource
import select
import sys
import time
from typing import Any, NoReturn

POLL_SECONDS = 0.01
DISK_EVERY = 3
"""Polls between two looks at the disk, which may take longer."""
MOST_FILES = 20_000
MB = 1 << 20
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
TOLD, CHANNEL = 200, 3
"""File descriptors in the child: where it tells that the wall stands, and the channel."""


def main(control: _socket.socket, channel: int) -> None:
    """Be a supervisor. In the child this returns, after which the interpreter ends."""
    setup = receive(control)
    if setup is None:
        return
    folder = setup["folder"]
    if setup["wall"] != "bubblewrap":
        os.mkdir(folder, 0o700)
        if setup["uid"] is not None:
            os.chown(folder, setup["uid"], setup["uid"])
        if sys.platform == "linux":
            call_prctl(PR_SET_CHILD_SUBREAPER, 1)
    control.sendall(b"ready\n")
    job = receive(control)
    if job is None:
        leave(setup)
    if setup["wall"] == "bubblewrap":
        # Nobody inside may look into process 1 or change it through /proc.
        call_prctl(PR_SET_DUMPABLE, 0)
    stdin_read, stdin_write = os.pipe()
    told_read, told_write = os.pipe()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(stdin_write, False)
    _signal.set_wakeup_fd(wake_write)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        try:
            prepare(setup, job, stdin_read, channel, told_write)
        except BaseException as error:
            os.write(TOLD, f"{type(error).__name__}: {error}".encode("ascii", "replace")[:500])
            os._exit(125)
        os.close(TOLD)
        run(job)
        return
    for descriptor in (stdin_read, told_write, channel, 1, 2):
        os.close(descriptor)
    refusal = b""
    while piece := os.read(told_read, 1000):
        refusal += piece
    if refusal:
        control.sendall(b"refused " + refusal.replace(b"\n", b" ") + b"\n")
        leave(setup)
    control.sendall(b"started\n")
    watch = Watch(setup, job, child)
    reason = watch.until_it_ends(control, wake_read, stdin_write)
    if setup["wall"] == "bubblewrap":
        if reason:
            kill(-1)
    else:
        kill_descendants(child)
    code = "none" if watch.status is None else os.waitstatus_to_exitcode(watch.status)
    hits = ",".join(sorted(watch.hits)) or "none"
    with Ignored():  # the parent may be gone
        control.sendall(f"ended {code} {reason or 'itself'} {hits}\n".encode())
    leave(setup)


class Ignored:
    """`contextlib.suppress(OSError)`; that module would bring many others into the program."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, OSError)


def receive(control: _socket.socket) -> Any:
    """The parent's next message, or None where the parent has gone."""
    head = control.recv(4, _socket.MSG_WAITALL)
    if len(head) < 4:
        return None
    length = int.from_bytes(head, "big")
    body = control.recv(length, _socket.MSG_WAITALL)
    return marshal.loads(body) if len(body) == length else None


def leave(setup: dict[str, Any]) -> NoReturn:
    """End, and leave no folder behind. The end of process 1 ends everything inside."""
    if setup["wall"] == "bubblewrap":
        os._exit(0)
    remove = 'rm -rf "$1" 2>/dev/null || { chmod -R u+rwX "$1"; rm -rf "$1"; }'
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.execv("/bin/sh", ["sh", "-c", remove, "sh", setup["folder"]])


class Watch:
    """Watches the tree of one program from the supervisor."""

    def __init__(self, setup: dict[str, Any], job: dict[str, Any], child: int) -> None:
        self.private = setup["wall"] == "bubblewrap"
        self.folder = setup["folder"]
        self.limits = job["limits"]
        self.stdin = memoryview(job["stdin"])
        self.child = child
        self.status: int | None = None
        self.hits: set[str] = set()
        self.can_see = os.path.isdir("/proc/self/task")
        self.page = os.sysconf("SC_PAGE_SIZE")

    def until_it_ends(self, control: _socket.socket, wake: int, stdin: int) -> str:
        """Returns why it had to be ended, or '' where the program ended by itself."""
        poller = select.poll()
        poller.register(control.fileno(), select.POLLIN)
        poller.register(wake, select.POLLIN)
        if self.stdin:
            poller.register(stdin, select.POLLOUT)
        else:
            os.close(stdin)
        end = time.monotonic() + self.limits["seconds"]
        ticks = 0
        next_look = 0.0
        while True:
            wait = min(POLL_SECONDS, max(0.0, end - time.monotonic()))
            for descriptor, _ in poller.poll(wait * 1000 + 1):
                if descriptor == wake:
                    os.read(wake, 4096)
                elif descriptor == stdin:
                    self._feed(poller, stdin)
                else:
                    return "parent"
            self._reap()
            if self.status is not None:
                self._look_at_disk()
                return ""
            now = time.monotonic()
            if now >= end:
                self.hits.add("seconds")
                return "seconds"
            if self.can_see and now >= next_look:
                next_look = now + POLL_SECONDS
                ticks += 1
                reason = self._look()
                if not reason and ticks % DISK_EVERY == 0:
                    reason = self._look_at_disk()
                if reason:
                    self.hits.add(reason)
                    return reason

    def _feed(self, poller: select.poll, stdin: int) -> None:
        try:
            self.stdin = self.stdin[os.write(stdin, self.stdin[:65536]) :]
        except BlockingIOError:
            return
        except OSError:  # the program does not read it
            self.stdin = self.stdin[:0]
        if not self.stdin:
            poller.unregister(stdin)
            os.close(stdin)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = status

    def _pids(self) -> list[int]:
        if self.private:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return descendants()

    def _look(self) -> str:
        """'memory_mb' or 'processes' where the tree has too much of it."""
        pids = self._pids()
        resident, tasks = 0, 0
        for pid in pids:
            try:
                resident += int(read(f"/proc/{pid}/statm").split()[1]) * self.page
                tasks += len(os.listdir(f"/proc/{pid}/task"))
            except (OSError, IndexError):
                continue
        if tasks >= self.limits["processes"]:
            self.hits.add("processes")
        if not self.private and tasks > self.limits["processes"] + 1:
            return "processes"
        bound = self.limits["memory_mb"] * MB
        if resident <= bound:
            return ""
        # Pages that several processes share were counted for each of them.
        shares = sum(proportional(pid, self.page) for pid in pids)
        return "memory_mb" if shares > bound else ""

    def _look_at_disk(self) -> str:
        """'disk_mb' where the tree wrote too much; a private file system only notes that."""
        bound = self.limits["disk_mb"] * MB
        if self.private:
            room = os.statvfs("/tmp")
            if room.f_bavail == 0:
                self.hits.add("disk_mb")
            # The size of such a file system bounds what is in files, not how many there are.
            return "disk_mb" if room.f_files - room.f_ffree > MOST_FILES else ""
        if not self.can_see:
            return ""
        used, files = folder_size(self.folder)
        used += unlinked_size(self._pids(), bound)
        return "disk_mb" if used > bound or files > MOST_FILES else ""


def read(path: str) -> bytes:
    """A small file of /proc."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 65536)
    finally:
        os.close(descriptor)


def proportional(pid: int, page: int) -> int:
    """Bytes of memory of a process, shared pages divided among those who share them."""
    try:
        for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(read(f"/proc/{pid}/statm").split()[1]) * page
    except (OSError, IndexError):
        return 0


def descendants() -> list[int]:
    """Every process below this one."""
    if not os.path.isdir("/proc/self/task"):
        return []
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        pid = pending.pop()
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                below = [int(word) for word in read(f"/proc/{pid}/task/{task}/children").split()]
                found += below
                pending += below
        except OSError:
            continue
    return found


def kill(pid: int) -> None:
    with Ignored():
        os.kill(pid, _signal.SIGKILL)


def kill_descendants(child: int) -> None:
    """Kill until there is none. Orphans come here, so having no child is having none below."""
    while True:
        for pid in descendants():
            kill(pid)
        with Ignored():
            os.killpg(child, _signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def folder_size(folder: str) -> tuple[int, int]:
    """Bytes on disk below a folder, and how many entries; stops where there are too many."""
    used, files = 0, 0
    pending = [folder]
    while pending and files <= MOST_FILES:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    files += 1
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:
            continue
    return used, files


def unlinked_size(pids: list[int], at_most: int) -> int:
    """Bytes of files that have no name any more but are still open or mapped somewhere."""
    sizes: dict[tuple[int, int], int] = {}
    mapped = 0
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                about = os.stat(f"/proc/{pid}/fd/{name}")
                if about.st_nlink == 0:
                    sizes[about.st_dev, about.st_ino] = about.st_blocks * 512
            for line in read(f"/proc/{pid}/maps").splitlines():
                # "/dev/zero" is how shared anonymous memory is shown; memory counts it.
                if line.endswith(b" (deleted)") and b" /dev/zero" not in line:
                    words = line.split()
                    major, minor = (int(part, 16) for part in words[3].split(b":"))
                    if (os.makedev(major, minor), int(words[4])) not in sizes:
                        mapped = at_most + 1  # only its descriptor would have told its size
        except (OSError, ValueError, IndexError):
            continue
    return sum(sizes.values()) + mapped


def call_prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def prepare(
    setup: dict[str, Any], job: dict[str, Any], stdin: int, channel: int, told: int
) -> None:
    """In the child: descriptors, limits, the inner wall, the program's files."""
    os.dup2(told, TOLD)
    os.dup2(channel, TOLD + 1)
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    os.setsid()
    os.dup2(stdin, 0)
    os.closerange(3, TOLD)
    if job["channel"]:
        os.dup2(TOLD + 1, CHANNEL)
    os.closerange(TOLD + 1, os.sysconf("SC_OPEN_MAX"))
    os.umask(0o077)
    if setup["wall"] == "bubblewrap":
        call_prctl(PR_SET_DUMPABLE, 1)
    else:
        make_killable()
    if setup["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[setup["uid"]] * 3)
        os.setresuid(*[setup["uid"]] * 3)
    if sys.platform == "linux" and setup["wall"] != "bubblewrap":
        call_prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
        call_prctl(PR_SET_DUMPABLE, 1)
    set_limits(setup, job["limits"])
    os.chdir(setup["folder"])
    if setup["confine"] is not None:
        scope: dict[str, Any] = {"__name__": "confine"}
        exec(setup["confine"], scope)
        scope["confine"](setup["rules"], setup["filter"])
    for name, text in job["files"].items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(text)


def make_killable() -> None:
    """Where memory runs out, the kernel ends the program rather than whoever started it."""
    with Ignored(), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def set_limits(setup: dict[str, Any], limits: dict[str, Any]) -> None:
    cpu = limits["cpu_seconds"]
    processes = limits["processes"] + 1
    if setup["wall"] != "bubblewrap" and setup["uid"] is None:
        # Without a user namespace or a user of its own, the kernel counts all of this user's.
        processes += tasks_of(os.getuid())
    wanted = {
        # The supervisor ends the tree at memory_mb that is used; this bounds what is mapped,
        # and an interpreter maps much that it never uses.
        "RLIMIT_AS": (limits["memory_mb"] + 64) * MB,
        "RLIMIT_FSIZE": limits["disk_mb"] * MB,
        "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_NPROC": processes,
        # Too small for a core file, and the value for which the kernel starts no core handler.
        "RLIMIT_CORE": 1,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
        "RLIMIT_CPU": cpu,
    }
    for name, value in wanted.items():
        kind = getattr(resource, name, None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        more = value + 1 if name == "RLIMIT_CPU" else value
        try:
            if hard != resource.RLIM_INFINITY:
                value, more = min(value, hard), min(more, hard)
            resource.setrlimit(kind, (value, more))
        except (OSError, ValueError):
            if setup["wall"] != "unsafe_subprocess":
                raise


def tasks_of(uid: int) -> int:
    """How many threads a user has on this machine."""
    if not os.path.isdir("/proc/self/task"):
        return 4096
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def run(job: dict[str, Any]) -> None:
    """In the child: the program, as `python main.py` would run it."""
    path = os.path.join(os.getcwd(), "main.py")
    # What `site` adds; it was left out because it looks for packages all over the machine.
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    builtins.help = _sitebuiltins._Helper()
    kind = type(sys)
    if job["channel"]:
        module = sys.modules["aflow_channel"] = kind("aflow_channel")
        exec(job["channel"], module.__dict__)
    program = kind("__main__")
    program.__dict__.update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = program
    sys.argv[:] = [path]
    sys.path.insert(0, os.getcwd())
    try:
        with open(path, "rb") as file:
            text = file.read()
        exec(compile(text, path, "exec", dont_inherit=True), program.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace else None
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None
