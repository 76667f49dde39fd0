"""The sync check: what it lets pass, what it stops, and a sync that is broken on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from project import write_project

from aflow_tune.cli import main
from aflow_tune.engines.local.sampler import Sampler
from aflow_tune.engines.trinity.training.sync_check import SyncCheck
from aflow_tune.errors import RunFailed

BASE = [-1.0, -2.0, -3.0, -4.0]


def shifted(by: float) -> list[float]:
    return [value + by for value in BASE]


def test_a_sampler_that_follows_passes_however_far_the_trainer_goes() -> None:
    for sixteen_bit in (False, True):
        check = SyncCheck(sixteen_bit)
        for version in range(6):
            drift = 0.3 * version
            found = check.compare(version, shifted(drift + check.floor), shifted(drift))
            assert found == pytest.approx(check.floor)


LEAST = 1e-3
MOVED_ONE_TOKEN = [BASE[0] - 8 * LEAST, *BASE[1:]]


@pytest.mark.parametrize(
    ("sixteen_bit", "passing", "stopped", "word"),
    [
        # It stays: not told after a first step of warm-up, nor after one of four tokens moved.
        (True, [(0, 0), (0, LEAST / 2)], (0, 2 * LEAST), "does not have"),
        # It stops following.
        (True, [(0, 0), (0.01, 0.01)], (0.01, 0.02), "does not have"),
        # Rounding is measured on equal weights: what differs by 0.04 may by 0.1 later, not by 0.5.
        (False, [(0.04, 0), (0.3, 0.2)], (0.9, 0.4), "disagree"),
    ],
)
def test_a_sampler_with_other_weights_is_told(sixteen_bit, passing, stopped, word) -> None:
    check = SyncCheck(sixteen_bit)
    for version, (sampler, trainer) in enumerate(passing):
        check.compare(version, shifted(sampler), shifted(trainer))
    if stopped == (0, 2 * LEAST):
        check.compare(2, BASE, MOVED_ONE_TOKEN)
    with pytest.raises(RunFailed, match=word):
        check.compare(3, shifted(stopped[0]), shifted(stopped[1]))


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path) -> Path:
    return write_project(tmp_path, tiny_model_dir, steps=2)


@pytest.mark.parametrize(
    ("broken", "told"),
    [("nothing arrives", "does not have the trainer's weights"), ("noise arrives", "disagree")],
)
def test_a_broken_sync_ends_the_run(
    project: Path, monkeypatch, capsys, broken: str, told: str
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
