"""Runs inside a sandbox: a supervisor, and the program in a child process of it.

`process.py` sends the compiled code over the control socket to a bare interpreter, so this imports
only modules that load quickly. Under bubblewrap the supervisor is process 1 of a process namespace;
else it is the subreaper of the tree. It watches time, memory, processes and disk, and reports how
the program ended. A module of this package (`preload`) may be loaded before the program arrives.

Protocol: setup, `ready`, job, `started` or `refused ...`, `ended ...`. Setup and job arrive as
marshal after a length of 4 bytes, big endian; the replies are lines of ASCII.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]
import _sitebuiltins
import _socket
import builtins
import marshal
import os
import resource
import select
import sys
import time

# `typing` takes longer to import than a small program runs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
NICE = 10
"""Programs get what other processes leave, and 15% of a busy core. At equal priority they slow a
model that samples beside them up to 28 times: at each barrier a thread waits for its core."""
TOLD, CHANNEL = 200, 3
"""Descriptors in the child: the pipe on which it reports that it is confined, and the channel."""
CONFINED = b"confined"


def main(control: _socket.socket, channel: int) -> None:
    """Supervise and exit. Returns only in the child, after the program, or without a setup."""
    os.nice(NICE)
    setup = receive(control)
    if setup is None:
        return
    child = -1
    # The parent may go away at any time; still no process or folder may be left behind.
    with Ignored():
        if setup["backend"] != "bubblewrap":
            os.mkdir(setup["folder"], 0o700)
            if setup["uid"] is not None:
                os.chown(setup["folder"], setup["uid"], setup["uid"])
            call_prctl(PR_SET_CHILD_SUBREAPER, 1)
        if setup["confine"] is not None:
            scope: dict[str, Any] = {"__name__": "confine"}
            exec(setup["confine"], scope)
            setup["confine"] = scope["confine"]
        if setup["preload"] is not None:
            load("aflow_channel", setup["channel"])
            load("aflow_preloaded", setup["preload"])
        control.sendall(b"ready\n")
        job = receive(control)
        if job is not None:
            if setup["backend"] == "bubblewrap":
                # The program must not read or change process 1 through /proc.
                call_prctl(PR_SET_DUMPABLE, 0)
            stdin_read, stdin_write = os.pipe()
            told_read, told_write = os.pipe()
            wake_read, wake_write = os.pipe()
            os.set_blocking(wake_write, False)
            os.set_blocking(stdin_write, False)
            _signal.set_wakeup_fd(wake_write)
            _signal.signal(_signal.SIGCHLD, lambda *_: None)
            child = os.fork()
            if child != 0:
                for descriptor in (stdin_read, told_write, channel, 1, 2):
                    os.close(descriptor)
                watch = Watch(setup, job, child)
                supervise(control, watch, told_read, wake_read, stdin_write)
    if child != 0:
        leave(setup)
    # The channel first: the parent chose its number, which may equal TOLD.
    os.dup2(channel, TOLD + 1)
    os.dup2(told_write, TOLD)
    try:
        prepare(setup, job, stdin_read)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".encode("ascii", "replace")[:500]
        os.write(TOLD, reason.replace(b"\n", b" "))
        os._exit(125)
    os.write(TOLD, CONFINED)
    os.close(TOLD)
    run(job)


def load(name: str, code: CodeType) -> None:
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)


def supervise(control: _socket.socket, watch: Watch, told: int, wake: int, stdin: int) -> None:
    """Wait for the program to end, kill what it left behind, and report."""
    heard = b""
    while piece := os.read(told, 1000):
        heard += piece
    if heard != CONFINED:
        control.sendall(b"refused " + (heard or b"its process ended at once") + b"\n")
        return
    control.sendall(b"started\n")
    reason = watch.until_it_ends(control, wake, stdin)
    if not watch.private:
        kill_descendants()
    elif reason:
        with Ignored():
            os.kill(-1, _signal.SIGKILL)
    code = "none" if watch.status is None else os.waitstatus_to_exitcode(watch.status)
    hits = ",".join(sorted(watch.hits)) or "none"
    control.sendall(f"ended {code} {reason or 'itself'} {hits}\n".encode())


def receive(control: _socket.socket) -> Any:
    """The parent's next message, or None if the parent is gone."""
    with Ignored():
        head = control.recv(4, _socket.MSG_WAITALL)
        length = int.from_bytes(head, "big")
        body = control.recv(length, _socket.MSG_WAITALL)
        if len(head) == 4 and len(body) == length:
            return marshal.loads(body)
    return None


def leave(setup: dict[str, Any]) -> NoReturn:
    """Exit without leaving a process or folder. The kernel kills what process 1 leaves."""
    if setup["backend"] == "bubblewrap":
        os._exit(0)
    kill_descendants()
    remove = 'rm -rf "$1" 2>/dev/null || { chmod -R u+rwX "$1"; rm -rf "$1"; }'
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.execv("/bin/sh", ["sh", "-c", remove, "sh", setup["folder"]])


def call_prctl(option: int, value: int) -> None:
    # Importing `ctypes` itself takes longer than a small program runs.
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "prctl")  # type: ignore
    if _ctypes.call_function(prctl, (option, value, 0, 0, 0)) != 0:
        raise OSError(f"prctl({option}, {value}) failed")


def prepare(setup: dict[str, Any], job: dict[str, Any], stdin: int) -> None:
    """In the child: set up descriptors, limits, confinement and the program's files."""
    _signal.set_wakeup_fd(-1)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    os.setpgid(0, 0)
    os.dup2(stdin, 0)
    os.closerange(3, TOLD)
    if job["channel"]:
        os.dup2(TOLD + 1, CHANNEL)
    os.closerange(TOLD + 1, os.sysconf("SC_OPEN_MAX"))
    os.umask(0o077)
    if setup["backend"] != "bubblewrap":
        # When memory runs out, the kernel kills the program rather than its parent.
        with Ignored(), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    if setup["uid"] is not None:
        os.setgroups([])
        os.setresgid(*[setup["uid"]] * 3)
        os.setresuid(*[setup["uid"]] * 3)
    if setup["backend"] != "bubblewrap":  # both are lost with a change of user
        call_prctl(PR_SET_PDEATHSIG, _signal.SIGKILL)
    call_prctl(PR_SET_DUMPABLE, 1)
    set_limits(setup, job["limits"])
    os.chdir(setup["folder"])
    if setup["confine"] is not None:
        setup["confine"](setup["rules"], setup["filter"])
    if setup["packages"]:
        sys.meta_path.append(Packages(setup["packages"]))
        for name in ("OPENBLAS", "OMP", "MKL"):
            # A thread for each core would exceed the limits on processes and memory.
            os.environ[f"{name}_NUM_THREADS"] = "1"
    for name, text in job["files"].items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(text)


class Packages:
    """Imports the allowed packages by path; the program cannot list the folders they are in."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        import _frozen_importlib_external as external

        file = self.files.get(name)
        if file is None:
            return None
        folder = [os.path.dirname(file)] if file.endswith("/__init__.py") else None
        return external.spec_from_file_location(name, file, submodule_search_locations=folder)


def set_limits(setup: dict[str, Any], limits: dict[str, Any]) -> None:
    processes = limits["processes"] + 1
    if setup["backend"] != "bubblewrap" and setup["uid"] is None:
        # Without a user of its own the kernel counts all processes of this user.
        processes += tasks_of(os.getuid())
    wanted = {
        # The supervisor bounds resident memory; this bounds mapped memory, which is larger.
        "RLIMIT_AS": (limits["memory_mb"] + 64) * MB,
        "RLIMIT_FSIZE": limits["disk_mb"] * MB,
        "RLIMIT_NOFILE": limits["open_files"],
        "RLIMIT_NPROC": processes,
        # Too small for a core file, and the kernel starts no core handler at 1.
        "RLIMIT_CORE": 1,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_SIGPENDING": 256,
        "RLIMIT_CPU": limits["cpu_seconds"],
    }
    for name, value in wanted.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        more = value + 1 if name == "RLIMIT_CPU" else value
        if hard != resource.RLIM_INFINITY:
            value, more = min(value, hard), min(more, hard)
        resource.setrlimit(kind, (value, more))


def tasks_of(uid: int) -> int:
    """The number of threads of a user on this machine."""
    count = 0
    for name in os.listdir("/proc"):
        with Ignored():
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def run(job: dict[str, Any]) -> None:
    """In the child: run the program as `python main.py` would."""
    path = os.path.join(os.getcwd(), "main.py")
    # `site` would add these; it is left out because it searches the machine for packages.
    builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
    builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
    builtins.help = _sitebuiltins._Helper()
    if job["channel"] and "aflow_channel" not in sys.modules:
        load("aflow_channel", job["channel"])
    program = type(sys)("__main__")
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


POLL_SECONDS = 0.01
QUIET_SECONDS = 0.1
"""Between two looks at most, doubled while memory and threads stay as they are: dozens of programs
that wait for a model's answer would else take half a core."""
DISK_EVERY = 3  # looks of `POLL_SECONDS` between two at the disk, which are slower
MOST_FILES = 20_000
MB = 1 << 20


class Ignored:
    """`contextlib.suppress(OSError)`, without importing that module and those it needs."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, OSError)


class Watch:
    """Watches the process tree of one program, from the supervisor."""

    def __init__(self, setup: dict[str, Any], job: dict[str, Any], child: int) -> None:
        self.private = setup["backend"] == "bubblewrap"
        self.folder, self.limits, self.child = setup["folder"], job["limits"], child
        self.stdin = memoryview(job["stdin"])
        self.status: int | None = None
        self.hits: set[str] = set()
        self.seen, self.pause = (0, 0), POLL_SECONDS
        self.page = os.sysconf("SC_PAGE_SIZE")

    def until_it_ends(self, control: _socket.socket, wake: int, stdin: int) -> str:
        """Wait; return why the program has to be killed, or '' if it ended by itself."""
        poller = select.poll()
        poller.register(control.fileno(), select.POLLIN)
        poller.register(wake, select.POLLIN)
        if self.stdin:
            poller.register(stdin, select.POLLOUT)
        else:
            os.close(stdin)
        end = time.monotonic() + self.limits["seconds"]
        ticks, next_look = 0, 0.0
        while True:
            wait = min(end, next_look) - time.monotonic()
            for descriptor, _ in poller.poll(max(0.0, wait) * 1000 + 1):
                if descriptor == wake:
                    os.read(wake, 4096)
                elif descriptor == stdin:
                    self._feed(poller, stdin)
                else:
                    return "parent"
            with Ignored():  # no child is left
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    self.status = ended[1] if ended[0] == self.child else self.status
            if self.status is not None:
                self._look_at_disk()
                return ""
            now = time.monotonic()
            if now >= end:
                self.hits.add("seconds")
                return "seconds"
            if now >= next_look:
                ticks += 1
                reason = self._look()
                if not reason and (ticks % DISK_EVERY == 0 or self.pause > POLL_SECONDS):
                    reason = self._look_at_disk()
                next_look = now + self.pause
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

    def _pids(self) -> list[int]:
        if self.private:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return descendants()

    def _look(self) -> str:
        """'memory_mb' or 'processes' if the tree exceeds that limit, else ''."""
        pids = self._pids()
        resident, tasks = 0, 0
        for pid in pids:
            try:
                resident += int(read(f"{place_of(pid)}/statm").split()[1]) * self.page
                tasks += len(os.listdir(f"/proc/{pid}/task"))
            except (OSError, IndexError):
                continue
        quiet = self.seen == (resident, tasks)
        self.pause = min(2 * self.pause, QUIET_SECONDS) if quiet else POLL_SECONDS
        self.seen = resident, tasks
        if tasks >= self.limits["processes"]:
            self.hits.add("processes")
        if not self.private and tasks > self.limits["processes"] + 1:
            return "processes"
        bound = self.limits["memory_mb"] * MB
        if resident <= bound:
            return ""
        # So far shared pages were counted once for each process.
        shares = sum(proportional(pid, self.page) for pid in pids)
        return "memory_mb" if shares > bound else ""

    def _look_at_disk(self) -> str:
        """'disk_mb' if the tree wrote too much. A full private file system is only recorded."""
        bound = self.limits["disk_mb"] * MB
        if self.private:
            room = os.statvfs("/tmp")
            if room.f_bavail == 0:
                self.hits.add("disk_mb")
            # Its size bounds the bytes in files, but not the number of files.
            return "disk_mb" if room.f_files - room.f_ffree > MOST_FILES else ""
        used, files = folder_size(self.folder)
        used += unlinked_size(self._pids(), bound)
        return "disk_mb" if used > bound or files > MOST_FILES else ""


def read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def place_of(pid: int) -> str:
    """The folder in /proc to read of a process: its own, or that of a live thread if the main
    thread has ended, because /proc/PID then shows no memory."""
    place = f"/proc/{pid}"
    with Ignored():
        if read(f"{place}/statm").startswith(b"0 "):
            for task in os.listdir(f"{place}/task"):
                with Ignored():
                    if not read(f"{place}/task/{task}/statm").startswith(b"0 "):
                        return f"{place}/task/{task}"
    return place


def proportional(pid: int, page: int) -> int:
    """Bytes of memory of a process (PSS; RSS if that cannot be read)."""
    place = place_of(pid)
    with Ignored():
        for line in read(f"{place}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    with Ignored():
        if words := read(f"{place}/statm").split():
            return int(words[1]) * page
    return 0


def descendants() -> list[int]:
    """The ids of all descendants of this process."""
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        pid = pending.pop()
        with Ignored():
            for task in os.listdir(f"/proc/{pid}/task"):
                below = [int(word) for word in read(f"/proc/{pid}/task/{task}/children").split()]
                found += below
                pending += below
    return found


def kill_descendants() -> None:
    """Kill until none is left. Orphans become our children, so no child means no descendant."""
    while True:
        for pid in descendants():
            with Ignored():
                os.kill(pid, _signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def folder_size(folder: str) -> tuple[int, int]:
    """Bytes on disk and number of entries below a folder; stops at too many entries."""
    used, files = 0, 0
    pending = [folder]
    while pending and files <= MOST_FILES:
        with Ignored(), os.scandir(pending.pop()) as entries:
            for entry in entries:
                files += 1
                used += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return used, files


def unlinked_size(pids: list[int], at_most: int) -> int:
    """Bytes of deleted files that are still open; more than `at_most` if one is only mapped."""
    sizes: dict[tuple[int, int], int] = {}
    mapped = 0
    for pid in pids:
        place = place_of(pid)
        try:
            for name in os.listdir(f"{place}/fd"):
                # It may have been closed meanwhile; the others still count.
                with Ignored():
                    about = os.stat(f"{place}/fd/{name}")
                    if about.st_nlink == 0:
                        sizes[about.st_dev, about.st_ino] = about.st_blocks * 512
            for line in read(f"{place}/maps").splitlines():
                # Shared anonymous memory shows as "/dev/zero"; the memory limit counts it.
                if line.endswith(b" (deleted)") and b" /dev/zero" not in line:
                    words = line.split()
                    major, minor = (int(part, 16) for part in words[3].split(b":"))
                    if (os.makedev(major, minor), int(words[4])) not in sizes:
                        mapped = at_most + 1  # its size is unknown without a descriptor
        except (OSError, ValueError, IndexError):
            continue
    return sum(sizes.values()) + mapped
