"""The parts of `benchmarks/runner_scaling.py`: its verdict and its sampler."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from runner_scaling import Measured, busy, judged
from thread_sampler import ThreadSampler, table


def row(runners: int, rate: float, share: float = 0.3) -> Measured:
    """A measurement on a machine of which `share` was busy."""
    seconds = share * 10.0 * (os.cpu_count() or 1)
    return Measured(runners, [rate], window_seconds=10.0, machine_seconds=seconds)


def test_the_rate_is_the_median_of_the_rounds() -> None:
    assert Measured(1, [3.0, 1.0, 2.5]).rate == 2.5


def test_how_busy_the_processors_were_is_whichever_is_more() -> None:
    cores = len(os.sched_getaffinity(0))
    ours = Measured(1, [1.0], 10.0, 10, machine_seconds=0.0)
    ours.cpu_seconds |= {"runner": 2.0 * cores, "ray": 3.0 * cores}
    assert busy(ours) == pytest.approx(0.5)
    assert busy(row(1, 1.0, 0.7)) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("rows", "missed", "words"),
    [
        ([row(1, 1.6), row(2, 3.2), row(16, 25.6)], False, "busy: met"),
        # 0.9 x 16 x 1.6 = 23.04
        ([row(1, 1.6), row(2, 3.2), row(16, 23.1)], False, "busy: met"),
        ([row(1, 1.6), row(2, 3.2), row(16, 23.0)], True, "missed with [16] runners"),
        ([row(1, 1.6), row(2, 2.0), row(16, 20.0)], True, "missed with [2, 16] runners"),
        ([row(1, 1.6), row(16, 12.8, 0.95)], False, "not judged, since the processors were busier"),
        ([row(1, 1.6), row(16, 25.6), row(32, 30.0)], False, "busy: met"),
        ([row(1, 1.6), row(2, 3.2)], False, "met as far as measured (2 runners)"),
        ([row(1, 1.6, 0.95), row(2, 3.2)], True, "no verdict: the processors"),
        ([row(32, 51.2)], True, "no verdict: the target is about 16 runners"),
    ],
)
def test_the_verdict(rows: list[Measured], missed: bool, words: str) -> None:
    found, text = judged(rows)
    assert found is missed
    assert words in text


def _burn(seconds: float) -> None:
    while time.thread_time() < seconds:
        _busy()


def _busy() -> int:
    return sum(number * number for number in range(500))


def _rest(until: threading.Event) -> None:
    until.wait()


def _rests(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == "wait"


def test_the_sampler_counts_threads_that_work_and_not_those_that_wait() -> None:
    until = threading.Event()
    resting = threading.Thread(target=_rest, args=(until,))
    burning = threading.Thread(target=_burn, args=(0.5,))
    switch = sys.getswitchinterval()
    resting.start()
    while not _rests(resting):
        time.sleep(0.01)
    sampler = ThreadSampler(0.002)
    sampler.start()
    burning.start()
    burning.join()
    profile = sampler.stop()
    until.set()
    resting.join()
    assert sys.getswitchinterval() == switch
    assert profile["cpu_seconds"] > 0.45  # half a second of processor time was burnt
    assert profile["counted"] >= 5
    shares = {name.rpartition(" ")[2]: share for name, share in _cumulative(profile).items()}
    assert shares["_burn"] > 0.9
    assert 0.5 < shares["_busy"] <= shares["_burn"]
    assert "_rest" not in shares
    assert any("tests/test_runner_scaling.py:" in line for line in table(profile))


def _cumulative(profile: dict) -> dict[str, float]:
    return {function["name"]: function["cumulative"] for function in profile["functions"]}
