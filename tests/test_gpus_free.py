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

import psutil
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
from aflow_tune.gpus.claims import Claims
from aflow_tune.gpus.freeing import Freed, end, free
from aflow_tune.gpus.processes import Guard, look

__all__ = ["children", "machine"]

Machine = Callable[..., Library]
COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses_v3"
FORBIDDEN = {COMPUTE: pynvml.NVML_ERROR_NO_PERMISSION}


def asked(*devices: str, pids: tuple[int, ...] = (), yes: bool = True, **more: object) -> Freed:
    options: dict[str, object] = {"grace": 60.0, "confirm": lambda count: yes, **more}
    return free(devices, pids, **options)  # type: ignore[arg-type]


def on_gpu(*children: subprocess.Popen[str]) -> Gpu:
    return Gpu(compute=[(child.pid, GIB) for child in children])


def test_ones_own_process_on_a_named_device_gets_sigterm(
    machine: Machine,
    children: Children,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine, elsewhere = children.start(), children.start()
    machine([on_gpu(mine), on_gpu(elsewhere)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n"))
    assert main(["gpus", "free", "GPU-00000000"]) == 0
    assert was_killed(mine, signal.SIGTERM)
    assert alive(elsewhere)
    shown = capsys.readouterr().out
    assert shown.index(str(mine.pid)) < shown.index("Type yes:") < shown.index("SIGTERM sent")
    assert f" {elsewhere.pid}  " not in shown  # bare, its digits may be those of a date
    assert f"\n{elsewhere.pid}: " not in shown


def test_nothing_happens_without_the_whole_word(
    machine: Machine, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = children.start()
    machine([on_gpu(mine)])
    for answer in ("", "y\n", "yes please\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        assert main(["gpus", "free", "0"]) == 1
    monkeypatch.setattr(sys, "stdin", None)  # the shell closed it (`<&-`)
    assert main(["gpus", "free", "0"]) == 1
    assert alive(mine)


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
    assert f"it is of user {OTHER_UID}" in told
    assert alive(mine)  # one refused name refuses all
    assert main(["gpus", "free", "0", "--yes", "--grace", "0.2"]) == 1  # it is not free now
    assert was_killed(mine, signal.SIGTERM)
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
    assert os.getresuid() == (0, 0, 0)
    monkeypatch.setenv("SUDO_UID", "root")
    with pytest.raises(BadInput, match="SUDO_UID"):
        asked("0")
    # Were our own check wrong, the kernel would refuse: the signal is sent with that user's rights.
    monkeypatch.setenv("SUDO_UID", str(OTHER_UID))
    monkeypatch.setattr(Guard, "refusals", lambda self, processes: {})
    assert asked("0").outcomes[of_root.pid] == "left alone: the kernel refuses"
    assert alive(of_root)


@needs_root
def test_any_of_the_user_ids_of_another_is_enough(children: Children) -> None:
    """A process that could get its rights back, such as a setuid program."""
    child = children.start(f"os.setresuid(0, {OTHER_UID}, 0)")
    assert "of user" in Guard(0).refusals([(child.pid, look(child.pid))])[child.pid]


def test_a_protected_process_its_children_and_its_ancestors_stay(
    machine: Machine, children: Children, tmp_path: Path
) -> None:
    code = 'import subprocess, time; subprocess.Popen(["sleep", "600"]); time.sleep(600)'
    family = children.start(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {code!r}])\n"
    )
    below: list[psutil.Process] = []
    while len(below) < 2:
        below = psutil.Process(family.pid).children(recursive=True)
    alone = children.start()
    child, grandchild = (each.pid for each in below)
    pids = [family.pid, child, grandchild, alone.pid]
    machine([Gpu(compute=[(pid, GIB) for pid in pids])])
    config = tmp_path / "c.yaml"
    config.write_text(f"name: x\nprotected_pids: [{child}]\n")
    try:
        assert main(["gpus", "free", "0", "--yes", "--config", str(config)]) == 1
        assert was_killed(alone, signal.SIGTERM)
        freed = asked("0", protect=[child])
        assert set(freed.spared) >= {family.pid, child, grandchild}
        assert all(look(pid) is not None for pid in pids[:3])
        assert alive(family)
        for pid in pids[:3]:
            with pytest.raises(BadInput, match="nothing was signalled"):
                asked(pids=(pid,), protect=[child])
    finally:
        for each in below:
            each.kill()


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


def test_neither_this_command_nor_what_runs_it_nor_what_cannot_be_seen(machine: Machine) -> None:
    there = 2**22 + 17  # no process here has so high a number
    machine([Gpu(compute=[(pid, GIB) for pid in (os.getpid(), os.getppid(), 1, there)])])
    freed = asked("0")
    assert freed.outcomes == {}
    assert set(freed.spared) == {os.getpid(), os.getppid(), 1, there}
    assert not freed.whole


def test_a_host_number_that_means_another_process_here(
    machine: Machine, children: Children, tmp_path: Path
) -> None:
    """With a real driver, whoever computes has one of its device files open."""
    mine = children.start()
    machine([on_gpu(mine)])
    (tmp_path / "nvidiactl").touch()
    assert asked("0").spared[mine.pid].startswith("it has no GPU open")
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
        inner: list[psutil.Process] = []
        while not inner and outer.poll() is None:
            inner = psutil.Process(outer.pid).children()
        if not inner:
            pytest.skip("no process number space of its own can be made here")
        machine([Gpu(compute=[(inner[0].pid, GIB)])])
        assert asked("0").spared == {inner[0].pid: "root in another container may be anybody"}
        assert look(inner[0].pid) is not None
    finally:
        outer.communicate("")


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


@needs_root
def test_who_changes_user_between_show_and_yes_is_left_alone(
    machine: Machine, children: Children
) -> None:
    """The check comes before each signal, not once."""
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
    assert freed.outcomes[mine.pid].startswith(f"left alone: it is of user {OTHER_UID}")
    assert not freed.whole
    assert alive(mine)


def test_another_process_under_the_same_number_is_not_signalled(children: Children) -> None:
    child = children.start()
    seen = look(child.pid)
    assert seen is not None
    before = replace(seen, since=seen.since - 1)
    assert end([before], Guard(os.getuid()), 0.2, lambda text: None) == {child.pid: "ended"}
    assert alive(child)


def test_names_that_are_refused(machine: Machine, children: Children) -> None:
    mine, other, elsewhere = children.start(), children.start(), children.start()
    machine([on_gpu(mine), on_gpu(other)])
    for words in (
        ("--pid", str(elsewhere.pid)),  # the driver does not list it
        ("0", "--pid", str(other.pid)),
        ("3", "1:0"),
        (),
        ("0", "--grace", "-1"),
        ("0", "--grace", "1e300"),
        ("--pid=0",),
        ("--pid=-1",),
        ("0", "--protect=1"),
    ):
        assert main(["gpus", "free", *words, "--yes"]) == 2
    assert main(["gpus", "--json", "free", "0", "--yes"]) == 2
    assert all(alive(child) for child in (mine, other, elsewhere))


@pytest.mark.parametrize(
    ("gpu", "whole"),
    [
        (Gpu(refuse=FORBIDDEN), False),
        (Gpu(refuse={GRAPHICS: pynvml.NVML_ERROR_UNKNOWN}), False),
        (Gpu(refuse={GRAPHICS: pynvml.NVML_ERROR_NOT_SUPPORTED}), True),
        (Gpu(instances=[Gpu(), Gpu()], refuse=FORBIDDEN), True),
        (Gpu(instances=[Gpu(), Gpu(refuse=FORBIDDEN)], refuse=FORBIDDEN), False),
        *(
            (Gpu(instances=[Gpu()], refuse=FORBIDDEN | {name: pynvml.NVML_ERROR_UNKNOWN}), False)
            for name in ("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex")
        ),
    ],
)
def test_a_device_whose_processes_are_hidden_is_not_free(
    machine: Machine, gpu: Gpu, whole: bool
) -> None:
    machine([gpu])
    assert asked("0").whole is whole


def test_a_device_is_not_free_while_others_are_on_it(machine: Machine, children: Children) -> None:
    first, second, third = children.start(), children.start(), children.start()
    library = machine([on_gpu(first, second)])
    freed = asked("0", pids=(first.pid,))
    assert (freed.outcomes, freed.whole) == ({first.pid: "ended"}, False)

    def say(text: str) -> None:  # what was ended is started again
        if text.startswith("SIGTERM"):
            library.gpus[0].compute = [(third.pid, GIB)]

    assert not asked("0", say=say).whole
    assert alive(third)
