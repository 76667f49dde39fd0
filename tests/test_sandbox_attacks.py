"""Hostile programs, behind each backend. What counts is what they did to the machine outside."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sandbox_outside import (
    BACKENDS,
    Watcher,
    alive,
    below,
    commands,
    eventually,
    memory_of,
    need,
    newly_below,
    open_folder,
    run,
    written_by,
)

from aflow_tune.sandbox import Ending

PROJECT = Path(__file__).parents[1]

TRY = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *arguments):
    try:
        return function(*arguments)
    except BaseException as error:
        return error
"""


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return need(request.param)


@pytest.fixture
def outside() -> Iterator[Path]:
    with open_folder() as folder:
        yield folder


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user as the parent."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_it_reads_no_file_of_ours(backend: str, outside: Path) -> None:
    token = secrets.token_hex(16)
    (outside / "secret").write_text(token)
    os.environ["AFLOW_TUNE_TEST_TOKEN"] = token
    program = """
import glob, subprocess
places = sys.stdin.read().split("\\n")
places += ["/etc/shadow", "/etc/passwd", "/etc/ssh/sshd_config", "/proc/1/environ"]
places += glob.glob("/proc/*/environ") + glob.glob("/home/*/*") + glob.glob("/root/.*")
os.symlink(places[0], "link")
places += ["link", "../" * 20 + places[0]]
places += ["/proc/self/root" + places[0], "/proc/1/root" + places[0]]
places += [f"/proc/self/fd/{n}" for n in range(3, 50)] + [f"/dev/fd/{n}" for n in range(3, 50)]
for place in places:
    text = attempt(lambda: open(place, "rb").read(100_000))
    if isinstance(text, bytes):
        print(place, text)
    buffer = ctypes.create_string_buffer(1000)
    number = libc.open(place.encode(), os.O_RDONLY)
    if number >= 0 and libc.read(number, buffer, 1000) > 0:
        print(place, buffer.value)
print(attempt(subprocess.run, ["cat", *places[:3]], 0, None, None))
print(os.environ)
print(attempt(os.listdir, "/root"), attempt(os.listdir, "/home"), attempt(os.listdir, places[1]))
print("end")
"""
    try:
        told = [str(outside / "secret"), str(PROJECT), str(PROJECT / "pyproject.toml")]
        ended = run(backend, TRY + program, "\n".join([*told, f"/proc/{os.getpid()}/environ"]))
    finally:
        del os.environ["AFLOW_TUNE_TEST_TOKEN"]
    assert ended.stdout.endswith("end\n"), ended.stderr
    assert token not in ended.stdout + ended.stderr
    assert "build-backend" not in ended.stdout
    assert "root:" not in ended.stdout
    assert "aflow_tune" not in ended.stdout.replace(str(PROJECT), "")


def test_it_changes_nothing_outside(backend: str, outside: Path) -> None:
    kept = outside / "kept"
    kept.write_text("as it was")
    kept.chmod(0o666)
    before = kept.stat()
    program = """
outside = sys.stdin.read()
kept = outside + "/kept"
attempt(lambda: open(kept, "w").write("changed"))
attempt(lambda: open(kept, "a").write("changed"))
for call in (
    (os.truncate, kept, 0), (os.unlink, kept), (os.rename, kept, outside + "/moved"),
    (os.chmod, kept, 0o777), (os.utime, kept, (1, 1)), (os.link, kept, outside + "/linked"),
    (os.symlink, kept, outside + "/symlinked"), (os.mkdir, outside + "/made"),
    (os.mkfifo, outside + "/fifo"), (os.setxattr, kept, "user.mark", b"1"),
    (os.chown, kept, os.getuid(), os.getgid()), (os.rmdir, outside), (os.rename, outside, "/tmp/o"),
):
    attempt(*call)
libc.open(kept.encode(), os.O_WRONLY | os.O_TRUNC)
libc.open(kept.encode(), os.O_RDONLY | os.O_TRUNC)
libc.open((outside + "/raw").encode(), os.O_WRONLY | os.O_CREAT, 0o666)
libc.truncate(kept.encode(), 0)
os.chdir("/tmp") if os.access("/tmp", os.W_OK) else None
attempt(os.symlink, outside, "way")
attempt(lambda: open("way/through", "w").close())
attempt(os.system, f"echo changed > {kept}; touch {outside}/shell")
for place in ("/usr/bin/planted", "/usr/lib/planted", "/planted", "/etc/planted", "/dev/planted",
              "/proc/planted", "/var/tmp/planted", "/dev/shm/" + outside.split("/")[-1]):
    attempt(lambda: open(place, "w").close())
for name in ("core_pattern", "hostname"):
    attempt(lambda: open("/proc/sys/kernel/" + name, "w").write("planted"))
attempt(lambda: open("/proc/sysrq-trigger", "w").write("h"))
"""
    hostname = socket.gethostname()
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    assert run(backend, TRY + program, str(outside)).ok
    after = kept.stat()
    assert kept.read_text() == "as it was"
    assert os.listdir(outside) == ["kept"]
    assert os.listxattr(kept) == []
    for name in ("st_mode", "st_uid", "st_gid", "st_mtime_ns", "st_nlink"):
        assert getattr(after, name) == getattr(before, name)
    assert not (Path("/dev/shm") / outside.name).exists()
    for place in ("/usr/bin", "/usr/lib", "/", "/etc", "/dev", "/var/tmp"):
        assert not (Path(place) / "planted").exists()
    assert socket.gethostname() == hostname
    assert Path("/proc/sys/kernel/core_pattern").read_text() == pattern


def test_it_reaches_no_socket(backend: str, outside: Path) -> None:
    reached: list[str] = []
    abstract = "\0" + secrets.token_hex(8)
    listeners: list[tuple[str, socket.socket]] = []
    for name, family, kind, address in (
        ("tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        ("udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        ("path", socket.AF_UNIX, socket.SOCK_DGRAM, str(outside / "socket")),
        ("abstract", socket.AF_UNIX, socket.SOCK_DGRAM, abstract),
    ):
        listener = socket.socket(family, kind)
        listener.bind(address)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        listener.settimeout(0.2)
        listeners.append((name, listener))
    os.chmod(outside / "socket", 0o777)
    program = """
import socket, subprocess, struct
tcp, udp, path, abstract = sys.stdin.read().split("\\n")
def send(family, kind, address):
    end = socket.socket(family, kind)
    end.connect(address)
    end.send(b"hello")
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", int(tcp))),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", int(udp))),
    (socket.AF_UNIX, socket.SOCK_DGRAM, path),
    (socket.AF_UNIX, socket.SOCK_DGRAM, "\\0" + abstract),
):
    attempt(send, family, kind, address)
    number = libc.socket(int(family), int(kind), 0)
    if number >= 0 and family == socket.AF_INET:
        raw = struct.pack("=HH4s8x", 2, socket.htons(address[1]), socket.inet_aton("127.0.0.1"))
        libc.connect(number, raw, len(raw))
        libc.send(number, b"hello", 5, 0)
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
    pair = attempt(socket.socketpair, socket.AF_UNIX, kind)
    if isinstance(pair, tuple):
        attempt(pair[0].sendto, b"hello", path)
        attempt(pair[0].sendto, b"hello", "\\0" + abstract)
        pair[1].close()
        attempt(pair[0].connect, path)
        attempt(pair[0].send, b"hello")
attempt(socket.create_server, ("127.0.0.1", 0))
print(type(attempt(socket.getaddrinfo, "example.com", 80)))
attempt(subprocess.run, ["bash", "-c", f"echo hello > /dev/tcp/127.0.0.1/{tcp}"])
print("end")
"""
    ports = [str(listener.getsockname()[1]) for _, listener in listeners[:2]]
    ended = run(backend, TRY + program, "\n".join([*ports, str(outside / "socket"), abstract[1:]]))
    for name, listener in listeners:
        with contextlib.closing(listener), contextlib.suppress(TimeoutError):
            listener.accept() if name == "tcp" else listener.recv(10)
            reached.append(name)
    assert ended.stdout.endswith("end\n"), ended.stderr
    assert "gaierror" in ended.stdout
    assert reached == []


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True:\n    os.fork()",
        "import os, time\nfor _ in range(10**9):\n    try:\n        os.fork() or os.setsid()\n"
        "    except OSError:\n        pass",
        "import os\nos.system(':(){ :|:& };:')\nimport time\ntime.sleep(60)",
        "import threading, time\nwhile True:\n"
        "    threading.Thread(target=time.sleep, args=(60,)).start()",
    ],
)
def test_fork_bombs_stay_small_and_end(backend: str, program: str) -> None:
    with Watcher(newly_below(lambda _: 1)) as watcher:
        ended = run(backend, program, seconds=2, processes=16)
    assert ended.ending is not Ending.FINISHED
    # Beside the program's own: the supervisor, bubblewrap's, and sandboxes that are to wait.
    assert watcher.most <= 16 + 20


GROW = """
blocks = []
while True:
    blocks.append(bytearray(b"x") * 4_000_000)
"""
MEMORY_BOMBS = {
    "one process": GROW,
    "many below half each": """
import os, time
for _ in range(4):
    os.fork()
x = bytearray(b"x") * 100_000_000
time.sleep(120)
""",
    "behind first threads that ended": """
import ctypes, os, threading, time
for _ in range(4):
    os.fork()
def grow():
    time.sleep(0.2)
    x = bytearray(b"x") * 100_000_000
    time.sleep(120)
threading.Thread(target=grow).start()
ctypes.CDLL(None).syscall(60, 0)
""",
    "shared and handed on": """
import mmap, os
while True:
    m = mmap.mmap(-1, 20_000_000)
    m.write(b"x" * 20_000_000)
    if os.fork():
        import time; time.sleep(120)
""",
    "memfd": """
import os
while True:
    fd = os.memfd_create("x")
    os.write(fd, b"x" * 20_000_000)
""",
    "shared memory": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
kept = []
while True:
    number = libc.shmget(0, 20_000_000, 0o1600)
    if number < 0:
        raise OSError(ctypes.get_errno())
    place = libc.shmat(number, None, 0)
    ctypes.memset(place, 1, 20_000_000)
    libc.shmdt(ctypes.c_void_p(place))
""",
}


@pytest.mark.parametrize("name", MEMORY_BOMBS)
def test_memory_bombs_are_held(backend: str, name: str) -> None:
    with Watcher(newly_below(memory_of)) as watcher:
        ended = run(backend, MEMORY_BOMBS[name], memory_mb=256, processes=40, seconds=60)
    assert ended.ending in (Ending.OUT_OF_MEMORY, Ending.FAILED)
    if name not in ("memfd", "shared memory"):  # which are refused from the start
        assert ended.ending is Ending.OUT_OF_MEMORY
        assert "memory_mb" in ended.limits_hit
    # Sixteen processes that nobody holds take 1700 MB or more, and on a busy machine who looks
    # at them has to wait for a core.
    assert watcher.most < 256 * 5


DISK_BOMBS = {
    "one file": "f = open('big', 'wb')\nwhile True:\n    f.write(b'x' * 1_000_000)",
    "without a name": """
import os, time
kept = []
try:
    while True:
        kept.append(open("big", "wb"))
        os.unlink("big")
        kept[-1].write(b"x" * 5_000_000)
        kept[-1].flush()
except OSError:  # who looks may have to wait for a core
    time.sleep(3)
    raise
""",
    "mapped without a name": """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
while True:
    fd = os.open("big", os.O_RDWR | os.O_CREAT)
    os.unlink("big")
    os.write(fd, b"x" * 5_000_000)
    libc.mmap(None, 4096, 1, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
""",
    "mapped behind many other mappings": """
import ctypes, mmap, os
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
for n in range(1000):
    libc.mmap(0x100000000 + n * 8192, 4096, 1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
n = 0
while True:
    n += 1
    fd = os.open("big", os.O_RDWR | os.O_CREAT)
    os.unlink("big")
    os.write(fd, b"x" * 5_000_000)
    libc.mmap(0x7ffe00000000 + n * 8192, 4096, 1, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
""",
    "behind a first thread that ended": """
import ctypes, os, threading, time
kept = []
def write():
    time.sleep(0.2)
    try:
        while True:
            kept.append(os.open("big", os.O_RDWR | os.O_CREAT))
            os.unlink("big")
            os.write(kept[-1], b"x" * 5_000_000)
    except OSError:  # behind bubblewrap, where a full disk is noted and no more
        time.sleep(3)
        os._exit(1)
threading.Thread(target=write).start()
ctypes.CDLL(None).syscall(60, 0)
""",
    "names": """
n = 0
while True:
    n += 1
    open(f"{n}", "w").close()
""",
}


@pytest.mark.parametrize("name", DISK_BOMBS)
def test_disk_bombs_are_held_and_leave_nothing(backend: str, name: str) -> None:
    mark = secrets.token_hex(8)
    told = f"import os\nopen({mark!r}, 'w').close()\nprint(os.getcwd(), flush=True)\n"
    with Watcher(newly_below(written_by)) as watcher:
        ended = run(backend, told + DISK_BOMBS[name], disk_mb=32, seconds=300)
    assert ended.ending is Ending.FAILED
    assert ended.limits_hit == ("disk_mb",)
    assert watcher.most < 3000  # MB; who holds it may have to wait for a core
    folder = Path(ended.stdout.strip())
    # Behind bubblewrap it is a /tmp of its own; ours has many others' files.
    left = folder / mark if backend == "bubblewrap" else folder
    assert folder.is_absolute()
    assert eventually(lambda: not left.exists())


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_ends_the_program(backend: str, stream: str) -> None:
    program = f"import sys\nwhile True:\n    sys.{stream}.write('x' * 65536)"
    ended = run(backend, program, output_kb=100)
    assert (ended.ending, ended.limits_hit) == (Ending.TOO_MUCH_OUTPUT, ("output_kb",))
    assert getattr(ended, stream) == "x" * 100 * 1024
    child = "import subprocess, time\nsubprocess.Popen(['/usr/bin/yes'])\ntime.sleep(60)"
    assert run(backend, child, output_kb=100).ending is Ending.TOO_MUCH_OUTPUT


def test_it_neither_traces_nor_signals_others(
    backend: str, victim: subprocess.Popen[bytes]
) -> None:
    received: list[int] = []
    old = {
        number: signal.signal(number, lambda n, _: received.append(n))
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGIO)
    }
    program = """
import fcntl, resource, signal
targets = [int(word) for word in sys.stdin.read().split()] + [os.getppid()]
for pid in targets:
    for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        libc.ptrace(request, pid, 0, 0)
    size = 64
    class Part(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
    buffer = ctypes.create_string_buffer(size)
    part = Part(ctypes.addressof(buffer), size)
    libc.process_vm_readv(pid, ctypes.byref(part), 1, ctypes.byref(part), 1, 0)
    attempt(lambda: open(f"/proc/{pid}/mem", "r+b").read(1))
    attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
    attempt(os.sched_setaffinity, pid, {0})
    attempt(resource.prlimit, pid, resource.RLIMIT_NOFILE, (3, 3))
    read, write = os.pipe()
    attempt(fcntl.fcntl, read, fcntl.F_SETOWN, pid)
    attempt(fcntl.fcntl, read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(write, b"x")
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL, signal.SIGSTOP):
        attempt(os.kill, pid, number)
        attempt(os.killpg, pid, number)
        libc.syscall(62, pid, int(number))
        libc.syscall(200, pid, int(number))
    descriptor = attempt(os.pidfd_open, pid)
    if isinstance(descriptor, int):
        attempt(signal.pidfd_send_signal, descriptor, signal.SIGKILL)
attempt(os.kill, -1, signal.SIGTERM)
attempt(os.kill, -1, signal.SIGKILL)
"""

    def about_victim() -> tuple[Any, ...]:
        process = psutil.Process(victim.pid)
        limits = process.rlimit(psutil.RLIMIT_NOFILE)
        return process.nice(), process.cpu_affinity(), limits, psutil.Process().nice()

    before = about_victim()
    try:
        run(backend, TRY + program, f"{os.getpid()} {victim.pid}")
        time.sleep(0.1)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert received == []
    assert victim.poll() is None
    about = Path(f"/proc/{victim.pid}/status")
    assert "TracerPid:\t0" in about.read_text()
    # On a busy machine it may only be about to sleep; one that was stopped stays so.
    assert eventually(lambda: "State:\tS" in about.read_text())
    assert about_victim() == before


LEAVERS = {
    "twice forked, own session": """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/usr/bin/sleep", ["sleep", "{mark}"])
    os._exit(0)
os._exit(0)
""",
    "deaf to signals": """
import os, signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
if os.fork() == 0:
    os.setsid()
    os.execv("/usr/bin/sleep", ["sleep", "{mark}"])
""",
    "without its streams": """
import os
if os.fork() == 0:
    os.closerange(0, 100)
    os.setsid()
    os.execv("/usr/bin/sleep", ["sleep", "{mark}"])
""",
}


@pytest.mark.parametrize("name", [*LEAVERS, "its time"])
def test_nothing_outlives_the_program(backend: str, name: str) -> None:
    mark = f"12{secrets.randbelow(10**9)}.5"
    program = LEAVERS.get(name, LEAVERS["deaf to signals"] + "\nwhile True: pass")
    ended = run(backend, program.replace("{mark}", mark), seconds=60 if name in LEAVERS else 1)
    assert ended.ending is (Ending.FINISHED if name in LEAVERS else Ending.TIMED_OUT)
    assert not [command for command in commands() if mark in command]


def test_no_namespaces_no_mounts_no_rights(backend: str) -> None:
    mark = secrets.token_hex(6)
    program = """
import time
libc.prctl(15, sys.stdin.read().encode(), 0, 0, 0)  # PR_SET_NAME
NEW = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000
for flags in (NEW, 0x10000000, 0x00020000, 0x40000000):
    libc.syscall(56, flags | 17, 0, 0, 0, 0) == 0 and time.sleep(3)
    libc.syscall(435, (ctypes.c_uint64 * 8)(flags), 64) == 0 and time.sleep(3)
    libc.unshare(flags)
libc.setns(0, 0)
libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
libc.umount2(b"/tmp", 2)
libc.chroot(b"/tmp")
attempt(os.setuid, 0)
attempt(os.setgid, 0)
attempt(os.seteuid, 0)
time.sleep(5)
"""
    names = ("user", "mnt", "net", "pid", "ipc", "uts")
    mine = {name: os.readlink(f"/proc/self/ns/{name}") for name in names}
    spaces: set[tuple[str, ...]] = set()
    rights: set[str] = set()
    users: set[str] = set()
    filters: set[tuple[str, str]] = set()

    def look() -> float:
        for process in below():
            here = Path(f"/proc/{process.pid}")
            with contextlib.suppress(OSError):
                if (here / "comm").read_text().strip() != mark:
                    continue
                lines = (here / "status").read_text().splitlines()
                about = dict(line.split(":\t", 1) for line in lines)
                spaces.add(tuple(os.readlink(here / "ns" / name) for name in names))
                rights.update(about[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"))
                users.update(about["Uid"].split() + about["Gid"].split())
                users.update(about["Groups"].split() if os.geteuid() == 0 else ())
                filters.add((about["Seccomp"], about["NoNewPrivs"]))
        return 0.0

    with Watcher(look):
        run(backend, TRY + program, mark)
    assert rights == {"0" * 16}
    assert "0" not in users
    assert filters == {("2", "1")}
    assert len(spaces) == 1
    seen = dict(zip(names, next(iter(spaces)), strict=True))
    if backend == "bubblewrap":
        assert not [name for name in names if seen[name] == mine[name]]
    elif os.geteuid() != 0:  # root may run it in a view of its own of the machine (staging.py)
        assert seen == mine


def test_it_inherits_no_descriptor(backend: str) -> None:
    program = """
import os
for n in range(1024):
    try:
        os.fstat(n)
        print(n)
    except OSError:
        pass
for n in range(3, 1024):
    try:
        os.write(n, b"ended 0 itself none\\n")
        print("wrote to", n)
    except OSError:
        pass
"""
    assert run(backend, program).stdout.split() == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("program", "ending", "code"),
    [
        ("import sys; sys.exit(0)", Ending.FINISHED, 0),
        ("import os; os._exit(0)", Ending.FINISHED, 0),
        ("raise SystemExit(7)", Ending.FAILED, 7),
        ("import os; os.abort()", Ending.FAILED, -6),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Ending.FAILED, -9),
        ("import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)", None, None),
        ("import os\nos.closerange(0, 1024)\nwhile True: pass", None, None),
    ],
)
def test_how_it_ended_is_what_it_did(
    backend: str, program: str, ending: Ending | None, code: int | None
) -> None:
    ended = run(backend, program, seconds=60 if ending else 2)
    assert (ended.ending, ended.exit_code) == (ending or Ending.TIMED_OUT, code)


def test_the_supervisor_cannot_be_reached(backend: str) -> None:
    """Through /proc or by a signal a program could forge its report, or outlive its time."""
    program = """
import resource, signal
pid = os.getppid()
for name in ("mem", "environ", "maps", "fd/0", "exe"):
    got = attempt(lambda: open(f"/proc/{pid}/{name}", "rb").read(10))
    if isinstance(got, bytes) and got:
        print("read", name)
print(attempt(os.listdir, f"/proc/{pid}/fd"))
attempt(os.kill, pid, signal.SIGSTOP)
attempt(os.kill, pid, signal.SIGKILL)
attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1))
while True:
    pass
"""
    ended = run(backend, TRY + program, seconds=2)
    assert ended.ending is Ending.TIMED_OUT
    assert "read" not in ended.stdout


def test_programs_share_nothing(backend: str) -> None:
    program = """
import os, sys, builtins
print(sorted(os.listdir("."))), print(getattr(builtins, "mark", None)), print(os.getpid())
builtins.mark = sys.mark = 1
open("mark", "w").close()
"""
    for _ in range(4):
        listing, mark, _ = run(backend, program).stdout.splitlines()
        assert (listing, mark) == ("['main.py']", "None")


def test_all_ends_with_a_parent_that_is_killed(backend: str) -> None:
    """Although a fork of it lives on and holds all that it had open."""
    mark = f"12{secrets.randbelow(10**9)}.5"
    program = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/usr/bin/sleep", ["sleep", "{mark}"])
    os._exit(0)
time.sleep(600)
"""
    code = f"""
import os, threading, time
from aflow_tune.sandbox import run_program_sync, Limits
for _ in range(2):
    run_program_sync("print(1)", policy={backend!r})
long = dict(policy={backend!r}, limits=Limits(seconds=600))
threading.Thread(target=run_program_sync, args=({program!r},), kwargs=long).start()
input()
fork = os.fork()
if fork == 0:
    time.sleep(600)
    os._exit(0)
print(fork, flush=True)
time.sleep(600)
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    words = [sys.executable, "-c", code]
    parent = subprocess.Popen(words, cwd=PROJECT, text=True, **pipes)  # type: ignore[call-overload]
    assert eventually(lambda: f"sleep {mark}" in commands())
    parent.stdin.write("now\n")
    parent.stdin.flush()
    fork = int(parent.stdout.readline())
    descendants = psutil.Process(parent.pid).children(recursive=True)
    sandboxed = [process for process in descendants if process.pid != fork]
    assert sandboxed
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    try:
        assert eventually(lambda: f"sleep {mark}" not in commands())
        assert eventually(lambda: not [process for process in sandboxed if alive(process)])
    finally:
        os.kill(fork, signal.SIGKILL)
