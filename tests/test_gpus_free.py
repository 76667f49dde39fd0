"""Freeing a GPU: real processes, of several users, and whom a signal ever reaches."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
from fake_nvml import GIB, Gpu, Library
from gpu_machine import (
    COUNTING,
    OTHER_UID,
    Children,
    alive,
    children,
    ignoring_sigterm,
    machine,
    needs_root,
    was_killed,
)

from aflow_tune.cli import main
from aflow_tune.errors import BadInput
from aflow_tune.gpus import processes
from aflow_tune.gpus.claims import Claims
from aflow_tune.gpus.freeing import Freed, end, free
from aflow_tune.gpus.processes import Guard, look

__all__ = ["children", "machine"]

Machine = Callable[..., Library]


def asked(*devices: str, pids: tuple[int, ...] = (), yes: bool = True, **more: object) -> Freed:
    options: dict[str, object] = {"grace": 60.0, "confirm": lambda count: yes, **more}
    return free(devices, pids, **options)  # type: ignore[arg-type]


def on_gpu(*children: subprocess.Popen[str]) -> Gpu:
    return Gpu(compute=[(child.pid, GIB) for child in children])


def test_ones_own_process_on_a_named_device_gets_sigterm(
    machine: Machine, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, elsewhere = children.start(), children.start()
    machine([on_gpu(mine), on_gpu(elsewhere)])
    freed = asked("0")
    assert freed.outcomes == {mine.pid: "ended"}
    assert freed.whole
    assert was_killed(mine, signal.SIGTERM)
    assert alive(elsewhere)
    shown = capsys.readouterr().out
    assert shown.index(f"{mine.pid}") < shown.index("SIGTERM sent")
    assert str(elsewhere.pid) not in shown


@needs_root
def test_another_users_process_is_never_signalled(
    machine: Machine, children: Children, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root could: every way of naming it, with --yes."""
    log = tmp_path / "signals"
    theirs = children.start(COUNTING.format(path=str(log)), uid=OTHER_UID)
    mine = children.start()
    machine([on_gpu(theirs, mine)])
    assert main(["gpus", "free", "0", "--pid", str(theirs.pid), "--yes"]) == 2
    assert main(["gpus", "free", "--pid", str(mine.pid), "--pid", str(theirs.pid), "--yes"]) == 2
    told = capsys.readouterr().err
    assert f"--pid {theirs.pid}" in told
    assert f"it is of user {OTHER_UID}, not of root" in told
    assert alive(mine)  # one refused name refuses all
    assert main(["gpus", "free", "0", "--yes", "--grace", "0.2"]) == 1  # it is not free now
    assert was_killed(mine, signal.SIGTERM)
    assert f"it is of user {OTHER_UID}" in capsys.readouterr().out
    assert alive(theirs)
    assert log.read_text() == ""


@needs_root
def test_under_sudo_ones_own_are_those_of_who_typed_it(
    machine: Machine, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed, of_root = children.start(uid=OTHER_UID), children.start()
    machine([on_gpu(typed, of_root)])
    monkeypatch.setenv("SUDO_UID", str(OTHER_UID))
    freed = asked("0")
    assert freed.outcomes == {typed.pid: "ended"}
    assert set(freed.spared) == {of_root.pid}
    assert was_killed(typed, signal.SIGTERM)
    assert alive(of_root)
    assert os.getresuid() == (0, 0, 0)
    monkeypatch.setenv("SUDO_UID", "root")
    with pytest.raises(BadInput, match="Nobody can tell"):
        asked("0")
    assert alive(of_root)


@needs_root
def test_the_kernel_refuses_as_well_under_sudo(
    machine: Machine, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were our own check wrong, the signal would be sent with that user's rights only."""
    of_root = children.start()
    machine([on_gpu(of_root)])
    monkeypatch.setenv("SUDO_UID", str(OTHER_UID))
    monkeypatch.setattr(Guard, "refusals", lambda self, processes: {})
    assert asked("0").outcomes == {of_root.pid: "left alone: the kernel refuses"}
    assert alive(of_root)


@needs_root
def test_any_of_the_user_ids_of_another_is_enough(children: Children) -> None:
    """A process that could get its rights back, such as a setuid program."""
    child = children.start(f"os.setresuid(0, {OTHER_UID}, 0)")
    seen = look(child.pid)
    assert seen is not None
    assert seen.uids == (0, OTHER_UID, 0)
    guard = Guard(0)
    assert guard.refusals([(child.pid, seen)]) == {
        child.pid: f"it is of user {OTHER_UID}, not of root"
    }


def test_a_protected_process_its_children_and_its_ancestors_stay(
    machine: Machine, children: Children
) -> None:
    family = children.start(
        "import subprocess, sys\n"
        'code = \'import subprocess, sys, time; c = subprocess.Popen(["sleep", "600"]); \'\n'
        "code += 'print(c.pid, flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "grandchild = int(child.stdout.readline())\n"
        "open('/proc/self/comm', 'w').write(f'{child.pid}')\n"
    )
    child_pid = int(Path(f"/proc/{family.pid}/comm").read_text())
    grandchild = next(p for p, parent in processes.parents().items() if parent == child_pid)
    alone = children.start()
    pids = [family.pid, child_pid, grandchild, alone.pid]
    machine([Gpu(compute=[(pid, GIB) for pid in pids])])
    try:
        freed = asked("0", protect=[child_pid])
        assert freed.spared == {
            family.pid: "a protected process descends from it",
            child_pid: "it is protected",
            grandchild: "it descends from a protected process",
        }
        assert freed.outcomes == {alone.pid: "ended"}
        assert all(look(pid) is not None for pid in pids[:3])
        assert alive(family)
        for pid in pids[:3]:
            with pytest.raises(BadInput, match="nothing was signalled"):
                asked(pids=(pid,), protect=[child_pid])
    finally:
        for pid in (child_pid, grandchild):
            os.kill(pid, signal.SIGKILL)


def test_protected_pids_of_a_yaml(
    machine: Machine, children: Children, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, other = children.start(), children.start()
    machine([on_gpu(kept, other)])
    config = tmp_path / "c.yaml"
    config.write_text(f"name: x\nprotected_pids:\n  - {kept.pid}\n")
    assert main(["gpus", "free", "0", "--config", str(config), "--yes"]) == 1
    assert alive(kept)
    assert was_killed(other, signal.SIGTERM)
    config.write_text("name: x\nprotected_pids: [0]\n")
    assert main(["gpus", "free", "0", "--config", str(config), "--yes"]) == 2
    assert f"{config}:2: protected_pids" in capsys.readouterr().err
    config.write_text("name: x\nprotected_pid: [1]\n")  # a typing error must not unprotect
    assert main(["gpus", "free", "0", "--config", str(config), "--yes"]) == 2
    assert "did you mean `protected_pids`" in capsys.readouterr().err
    assert alive(kept)


@pytest.mark.parametrize("flag", ["--json", "--monitor", "--log=x.jsonl"])
def test_flags_of_showing_are_refused_where_something_is_ended(
    flag: str, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine([Gpu(0)])
    assert main(["gpus", flag, "free", "0", "--yes"]) == 2
    assert f"{flag.partition('=')[0]}, of showing" in capsys.readouterr().err


def test_neither_this_command_nor_what_runs_it(machine: Machine) -> None:
    machine([Gpu(compute=[(os.getpid(), GIB), (os.getppid(), GIB), (1, GIB)])])
    freed = asked("0")
    assert freed.outcomes == {}
    assert set(freed.spared.values()) == {"it is this command, or runs it"}
    assert not freed.whole


@pytest.mark.parametrize("answer", ["", "y\n", "no\n", "yes please\n", "\n"])
def test_nothing_happens_without_the_whole_word(
    machine: Machine,
    children: Children,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
) -> None:
    mine = children.start()
    machine([on_gpu(mine)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert main(["gpus", "free", "0"]) == 1
    assert alive(mine)


def test_a_typed_yes(
    machine: Machine,
    children: Children,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = children.start()
    machine([on_gpu(mine)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    assert main(["gpus", "free", "GPU-0000"]) == 0
    assert was_killed(mine, signal.SIGTERM)
    shown = capsys.readouterr().out
    assert shown.index(sys.executable) < shown.index("Type yes:") < shown.index("SIGTERM")


def test_sigkill_comes_after_the_grace_and_only_to_who_needs_it(
    machine: Machine, children: Children
) -> None:
    stubborn, obedient = children.start(ignoring_sigterm), children.start()
    machine([on_gpu(stubborn, obedient)])

    def say(text: str) -> None:
        if text.startswith("SIGTERM sent"):
            obedient.wait(60)  # the grace begins when it has ended, however busy the machine is

    freed = asked("0", grace=0.3, say=say)
    assert freed.outcomes == {stubborn.pid: "killed", obedient.pid: "ended"}
    assert freed.whole
    assert was_killed(stubborn, signal.SIGKILL)
    assert was_killed(obedient, signal.SIGTERM)


def test_a_zombie_counts_as_ended(machine: Machine, children: Children) -> None:
    zombie = children.start(sleep=False)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    seen = look(zombie.pid)
    assert seen is not None
    assert seen.ended
    machine([on_gpu(zombie)])
    assert asked("0").outcomes == {zombie.pid: "ended"}
    assert asked(pids=(zombie.pid,)).whole


@needs_root
def test_who_changes_user_between_show_and_yes_is_left_alone(
    machine: Machine, children: Children
) -> None:
    mine = children.start(
        f"signal.signal(signal.SIGUSR1, lambda n, f: (os.setresuid(*[{OTHER_UID}] * 3), "
        r"os.write(1, b'changed\n')))"
    )
    machine([on_gpu(mine)])

    def confirm(count: int) -> bool:
        mine.send_signal(signal.SIGUSR1)
        assert mine.stdout is not None
        assert mine.stdout.readline() == "changed\n"
        return True

    freed = asked("0", confirm=confirm)
    assert freed.outcomes == {mine.pid: f"left alone: it is of user {OTHER_UID}, not of root"}
    assert not freed.whole
    assert alive(mine)


def test_who_becomes_protected_between_sigterm_and_sigkill_is_left_alone(
    machine: Machine, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check comes before each signal, not once."""
    stubborn = children.start(ignoring_sigterm)
    machine([on_gpu(stubborn)])
    seen = look(stubborn.pid)
    assert seen is not None
    real, calls = Guard.refusals, []

    def refusals(self: Guard, processes: object) -> dict[int, str]:
        calls.append(1)
        later = replace(self, protected=frozenset({stubborn.pid})) if len(calls) > 1 else self
        return real(later, processes)  # type: ignore[arg-type]

    monkeypatch.setattr(Guard, "refusals", refusals)
    outcome = end([seen], Guard(os.getuid()), 0.2, lambda text: None)
    assert outcome == {stubborn.pid: "left alone: it is protected"}
    assert alive(stubborn)


def test_a_process_that_the_driver_does_not_list_is_not_ended(
    machine: Machine, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, other = children.start(), children.start()
    machine([on_gpu(mine), on_gpu(other)])
    elsewhere = children.start()
    assert main(["gpus", "free", "--pid", str(elsewhere.pid), "--yes"]) == 2
    assert "the driver does not list it there" in capsys.readouterr().err
    assert main(["gpus", "free", "0", "--pid", str(other.pid), "--yes"]) == 2
    assert all(alive(child) for child in (mine, other, elsewhere))


def test_what_cannot_be_seen_from_a_container_is_left_alone(machine: Machine) -> None:
    there = 2**22 + 17  # no process here has so high a number
    machine([Gpu(compute=[(there, GIB)])])
    freed = asked("0")
    assert freed.outcomes == {}
    assert "cannot be seen from here" in freed.spared[there]


def test_a_host_number_that_means_another_process_here(
    machine: Machine, children: Children, tmp_path: Path
) -> None:
    """With a real driver, whoever computes has one of its device files open."""
    mine = children.start()
    machine([on_gpu(mine)])
    (tmp_path / "nvidiactl").touch()
    freed = asked("0")
    assert freed.outcomes == {}
    assert freed.spared[mine.pid].startswith("it has no GPU open")
    assert alive(mine)


@needs_root
def test_root_in_another_container_may_be_anybody(machine: Machine, children: Children) -> None:
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", sys.executable, "-I", "-S", "-c", "input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        inner = None
        while inner is None and outer.poll() is None:
            inner = next((p for p, up in processes.parents().items() if up == outer.pid), None)
        if inner is None:
            pytest.skip("no process number space of its own can be made here")
        seen = look(inner)
        assert seen is not None
        assert seen.in_container
        machine([Gpu(compute=[(inner, GIB)])])
        assert asked("0").spared == {inner: "root in another container may be anybody"}
        assert look(inner) is not None
    finally:
        outer.communicate("")


@pytest.mark.parametrize("pid", [0, -1, 1])
def test_numbers_that_mean_many_processes_are_refused(pid: int) -> None:
    assert main(["gpus", "free", f"--pid={pid}", "--yes"]) == 2
    assert main(["gpus", "free", "0", f"--protect={pid}", "--yes"]) == 2


def test_a_device_that_is_not_there(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine([Gpu()])
    assert main(["gpus", "free", "3", "1:0", "--yes"]) == 2
    told = capsys.readouterr().err
    assert "1. 3\n" in told
    assert "2. 1:0\n" in told
    assert "a GPU of this machine: 0" in told
    assert main(["gpus", "free", "--yes"]) == 2
    assert main(["gpus", "free", "0", "--grace", "-1", "--yes"]) == 2


def test_processes_that_the_driver_hides_are_told(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    forbidden = dict.fromkeys(
        (
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetComputeRunningProcesses_v2",
        ),
        pynvml.NVML_ERROR_NO_PERMISSION,
    )
    machine([Gpu(refuse=forbidden)])
    freed = asked("0")
    assert not freed.whole
    assert "its processes are unknown: Insufficient Permissions" in capsys.readouterr().out


@pytest.mark.parametrize("stdin", [None, b"\xff\n", b"ye\xffs\n"])
def test_an_answer_that_cannot_be_read_is_no_yes(
    machine: Machine, children: Children, monkeypatch: pytest.MonkeyPatch, stdin: bytes | None
) -> None:
    """Python has no stdin at all where the shell closed it (`<&-`)."""
    mine = children.start()
    machine([on_gpu(mine)])
    opened = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", opened)
    assert main(["gpus", "free", "0"]) == 1
    assert alive(mine)


def test_a_protected_thread_protects_its_process(machine: Machine, children: Children) -> None:
    """`htop` shows the numbers of threads among those of processes."""
    child = children.start(
        "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()"
    )
    threads = [int(name) for name in os.listdir(f"/proc/{child.pid}/task")]
    thread = next(number for number in threads if number != child.pid)
    machine([on_gpu(child)])
    assert asked("0", protect=[thread]).spared == {child.pid: "it is protected"}
    assert alive(child)


@needs_root
def test_a_named_device_with_others_beside_the_named_process_is_not_free(
    machine: Machine, children: Children
) -> None:
    mine, theirs = children.start(), children.start(uid=OTHER_UID)
    machine([on_gpu(mine, theirs), on_gpu()])
    freed = asked("0", pids=(mine.pid,))
    assert freed.outcomes == {mine.pid: "ended"}
    assert freed.spared == {theirs.pid: "it was not named"}
    assert not freed.whole
    assert alive(theirs)


def test_instances_whose_processes_are_hidden_are_not_free(machine: Machine) -> None:
    hidden = dict.fromkeys(
        (f"nvmlDeviceGetComputeRunningProcesses_v{n}" for n in (2, 3)),
        pynvml.NVML_ERROR_NO_PERMISSION,
    )
    machine([Gpu(instances=[Gpu(), Gpu(refuse=hidden)], refuse=hidden)])
    assert asked("0").unknown == ("0",)
    assert asked("0:0").whole


@pytest.mark.parametrize(
    "fails", ["nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"]
)
def test_instances_that_cannot_be_counted_are_not_none(
    machine: Machine, children: Children, fails: str
) -> None:
    refuse = dict.fromkeys(
        (f"nvmlDeviceGetComputeRunningProcesses_v{n}" for n in (2, 3)),
        pynvml.NVML_ERROR_NO_PERMISSION,
    )
    part = on_gpu(children.start())
    machine([Gpu(instances=[part], refuse={**refuse, fails: pynvml.NVML_ERROR_UNKNOWN})])
    freed = asked("0")
    assert freed.unknown == ("0",)
    assert not freed.whole


def test_a_list_that_fails_hides_processes_and_one_that_is_not_offered_does_not(
    machine: Machine,
) -> None:
    names = [f"nvmlDeviceGetGraphicsRunningProcesses_v{n}" for n in (2, 3)]
    machine([Gpu(refuse=dict.fromkeys(names, pynvml.NVML_ERROR_UNKNOWN))])
    assert asked("0").unknown == ("0",)
    machine([Gpu(refuse=dict.fromkeys(names, pynvml.NVML_ERROR_NOT_SUPPORTED))])
    assert asked("0").whole


def test_what_a_run_protects_counts_also_when_its_gpu_is_lost(
    machine: Machine, children: Children
) -> None:
    protected = children.start()
    run = Claims("p/a", [protected.pid])
    assert run.take("GPU-00000001-test")
    lost = {"nvmlDeviceGetHandleByIndex_v2": pynvml.NVML_ERROR_GPU_IS_LOST}
    machine([on_gpu(protected), Gpu(refuse=lost)])
    assert asked("0").spared == {protected.pid: "it is protected"}
    assert alive(protected)
    run.release()


def test_a_device_is_not_free_while_what_was_ended_is_started_again(
    machine: Machine, children: Children
) -> None:
    first, second = children.start(), children.start()
    library = machine([on_gpu(first)])

    def say(text: str) -> None:
        if text.startswith("SIGTERM"):
            library.gpus[0].compute = [(second.pid, GIB)]

    freed = asked("0", say=say)
    assert freed.outcomes == {first.pid: "ended"}
    assert freed.spared == {second.pid: "it came meanwhile"}
    assert not freed.whole
    assert alive(second)


@pytest.mark.parametrize("grace", ["1e12", "1e300"])
def test_a_grace_that_no_wait_can_hold_is_refused(
    machine: Machine, children: Children, grace: str
) -> None:
    stubborn = children.start(ignoring_sigterm)
    machine([on_gpu(stubborn)])
    assert main(["gpus", "free", "0", "--yes", "--grace", grace]) == 2
    assert alive(stubborn)


def test_another_process_under_the_same_number_is_not_signalled(children: Children) -> None:
    child = children.start()
    seen = look(child.pid)
    assert seen is not None
    before = replace(seen, since=seen.since - 1)
    assert end([before], Guard(os.getuid()), 0.2, lambda text: None) == {child.pid: "ended"}
    assert alive(child)
