"""The sync check: what it lets pass, what it stops, and a sync that is broken on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from project import run_dir, write_project

from aflow_tune.cli import main
from aflow_tune.engines.local.sampler import Sampler
from aflow_tune.engines.trinity.training.sync_check import MISMATCH, SyncCheck
from aflow_tune.errors import RunFailed

BASE = [-1.0, -2.0, -3.0, -4.0]


def shifted(by: float) -> list[float]:
    return [value + by for value in BASE]


@pytest.mark.parametrize("sixteen_bit", [False, True])
def test_a_sampler_that_follows_passes_however_far_the_trainer_goes(sixteen_bit: bool) -> None:
    check = SyncCheck(sixteen_bit)
    rounding = check.floor
    for version in range(6):
        drift = 0.3 * version
        found = check.compare(version, shifted(drift + rounding), shifted(drift))
        assert found == pytest.approx(rounding)


@pytest.mark.parametrize("sixteen_bit", [False, True])
def test_a_sampler_that_stays_is_told_once_the_trainer_has_moved(sixteen_bit: bool) -> None:
    check = SyncCheck(sixteen_bit)
    check.compare(0, BASE, BASE)
    check.compare(1, BASE, shifted(check.least / 2))  # a first step of warm-up
    check.compare(2, BASE, [BASE[0] - 8 * check.least, *BASE[1:]])  # one of four tokens
    with pytest.raises(RunFailed, match="does not have the trainer's weights"):
        check.compare(3, BASE, shifted(2 * check.least))


def test_a_sampler_that_stops_following_is_told() -> None:
    check = SyncCheck(sixteen_bit=True)
    check.compare(0, BASE, BASE)
    check.compare(1, shifted(0.01), shifted(0.01))
    with pytest.raises(RunFailed, match="does not have the trainer's weights"):
        check.compare(2, shifted(0.01), shifted(0.02))


def test_what_rounding_is_is_measured_on_equal_weights() -> None:
    """Kernels that differ by 0.04 from the start may differ by 0.1 later, by 0.5 not."""
    check = SyncCheck(sixteen_bit=False)
    check.compare(0, shifted(0.04), BASE)
    check.compare(1, shifted(0.3), shifted(0.2))
    with pytest.raises(RunFailed, match="disagree"):
        check.compare(2, shifted(0.9), shifted(0.4))


def test_after_three_updates_that_were_followed_it_is_only_recorded() -> None:
    check = SyncCheck(sixteen_bit=False)
    for version in range(4):
        check.compare(version, shifted(0.1 * version), shifted(0.1 * version))
    assert check.compare(4, shifted(9.0), BASE) == pytest.approx(9.0)


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return write_project(tmp_path, tiny_model_dir, steps=2)


def test_each_sync_of_a_run_is_checked_and_drawn(project: Path) -> None:
    assert main([str(project), "--inline"]) == 0
    folder = run_dir(project.parent)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {
        line["step"]: line["metrics"][MISMATCH] for line in lines if MISMATCH in line["metrics"]
    }
    assert found.keys() >= {1, 2}
    assert max(found.values()) < 1e-4
    assert "Sampler against trainer" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("broken", "told"),
    [("nothing arrives", "does not have the trainer's weights"), ("noise arrives", "disagree")],
)
def test_a_broken_sync_ends_the_run(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    broken: str,
    told: str,
) -> None:
    update = Sampler.update_weights

    def breaking(self: Sampler, state: dict[str, torch.Tensor], version: int) -> None:
        if broken == "noise arrives":
            noisy = {name: tensor + torch.randn_like(tensor) for name, tensor in state.items()}
            update(self, noisy, version)
        else:
            self.version = version

    monkeypatch.setattr(Sampler, "update_weights", breaking)
    assert main([str(project), "--inline"]) == 1
    assert told in capsys.readouterr().err
