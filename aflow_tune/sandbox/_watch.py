"""How the supervisor inside a sandbox watches one program, and how it ends a tree of processes.

Sent to the inside before `_inside.py`, in whose namespace it lies; `_inside.py` says more.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import select
import time

# `typing` takes longer to import than a small program runs.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from typing import Any

POLL_SECONDS = 0.01
DISK_EVERY = 3
"""Polls between two looks at the disk, which may take longer."""
MOST_FILES = 20_000
MB = 1 << 20


class Ignored:
    """`contextlib.suppress(OSError)`; that module would bring many others into the program."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, OSError)


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
                resident += int(read(f"{place_of(pid)}/statm").split()[1]) * self.page
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
    """A file of /proc, which gives no more than a page at a time."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        text = b""
        while piece := os.read(descriptor, 65536):
            text += piece
        return text
    finally:
        os.close(descriptor)


def place_of(pid: int) -> str:
    """Where /proc tells of a process.

    Once its first thread has ended, its own place shows an empty process, whatever the other
    threads go on with; theirs show it as it is.
    """
    place = f"/proc/{pid}"
    with Ignored():
        if read(f"{place}/statm").startswith(b"0 "):
            for task in os.listdir(f"{place}/task"):
                with Ignored():
                    if not read(f"{place}/task/{task}/statm").startswith(b"0 "):
                        return f"{place}/task/{task}"
    return place


def proportional(pid: int, page: int) -> int:
    """Bytes of memory of a process, shared pages divided among those who share them."""
    place = place_of(pid)
    try:
        for line in read(f"{place}/smaps_rollup").splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(read(f"{place}/statm").split()[1]) * page
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
        if not os.path.isdir("/proc/self/task"):  # nothing lists processes (macOS)
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
        place = place_of(pid)
        try:
            for name in os.listdir(f"{place}/fd"):
                # One that was closed meanwhile says nothing about the others.
                with Ignored():
                    about = os.stat(f"{place}/fd/{name}")
                    if about.st_nlink == 0:
                        sizes[about.st_dev, about.st_ino] = about.st_blocks * 512
            for line in read(f"{place}/maps").splitlines():
                # "/dev/zero" is how shared anonymous memory is shown; memory counts it.
                if line.endswith(b" (deleted)") and b" /dev/zero" not in line:
                    words = line.split()
                    major, minor = (int(part, 16) for part in words[3].split(b":"))
                    if (os.makedev(major, minor), int(words[4])) not in sizes:
                        mapped = at_most + 1  # only its descriptor would have told its size
        except (OSError, ValueError, IndexError):
            continue
    return sum(sizes.values()) + mapped
