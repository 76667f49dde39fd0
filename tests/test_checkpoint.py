"""Checkpoints: bit-equal continuation, damage that is noticed, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_local_trainer import PolicyGradient, batch, make, same

from aflow_tune.engines.local import checkpoint
from aflow_tune.engines.local.checkpoint import (
    CheckpointError,
    read_checkpoint,
    verify_checkpoint,
    write_atomically,
    write_checkpoint,
)
from aflow_tune.engines.local.trainer import Schedule
from aflow_tune.engines.local.weights import LoraSpec


@pytest.mark.parametrize(
    ("lora", "dtype"),
    [(LoraSpec(4, 8.0), torch.float32), (None, torch.float32), (None, torch.bfloat16)],
)
def test_a_loaded_trainer_continues_bit_for_bit(
    lora: LoraSpec | None, dtype: torch.dtype, tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = {"lora": lora, "dtype": dtype, "schedule": Schedule("cosine", 1e-2, 1, 6)}
    straight = make(tiny_model_dir, **settings)
    groups = batch(straight)
    for _ in range(2):
        straight.step(groups, PolicyGradient())
    straight.save(tmp_path / "step_2", {"tasks_read": 7})
    drawn = torch.rand(3)

    resumed = make(tiny_model_dir, **settings)
    assert resumed.load(tmp_path / "step_2") == {"tasks_read": 7}
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.step_count == 2
    assert same(straight, resumed)
    for _ in range(2):
        first = straight.step(groups, PolicyGradient())
        second = resumed.step(groups, PolicyGradient())
        assert first["actor/lr"] == second["actor/lr"]
        assert first["actor/grad_norm"] == second["actor/grad_norm"]
    assert same(straight, resumed)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    target = tmp_path / "point"
    tensors = {"weights": {"w": torch.arange(6.0).view(2, 3)}, "rng": {"cpu": torch.ones(4)}}
    write_checkpoint(target, tensors, {"step": 3})
    return target


def test_every_kind_of_damage_is_named(saved: Path) -> None:
    weights = saved / "weights.safetensors"
    intact = weights.read_bytes()
    flipped = bytearray(intact)
    flipped[-1] ^= 1
    weights.write_bytes(bytes(flipped))
    with pytest.raises(CheckpointError, match=r"weights\.safetensors.*SHA-256"):
        verify_checkpoint(saved)
    weights.write_bytes(intact[:-4])
    with pytest.raises(CheckpointError, match="bytes, expected"):
        verify_checkpoint(saved)
    weights.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        verify_checkpoint(saved)
    weights.write_bytes(intact)
    verify_checkpoint(saved)
    (saved / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="unreadable"):
        verify_checkpoint(saved)
    (saved / "manifest.json").write_text(json.dumps({"format": 99, "files": {}}))
    with pytest.raises(CheckpointError, match="format 99"):
        verify_checkpoint(saved)
    (saved / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        verify_checkpoint(saved)


def test_weights_of_another_model_are_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="first 'v'"):
        read_checkpoint(saved, expected_weights={"v": torch.zeros(2, 3)})
    with pytest.raises(CheckpointError, match=r"\(2, 3\), expected \(3, 3\)"):
        read_checkpoint(saved, expected_weights={"w": torch.zeros(3, 3)})


def test_a_failed_write_leaves_what_was_there(saved: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "weights.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(saved, half)
    assert read_checkpoint(saved)[1] == {"step": 3}
    with pytest.raises(KeyboardInterrupt):
        write_atomically(saved.parent / "new", half)
    assert [path.name for path in saved.parent.iterdir()] == ["point"]


def test_a_checkpoint_is_never_visible_before_its_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "point"
    seen = []
    fsync = checkpoint._fsync

    def watch(path: Path) -> None:
        seen.append((path.name, target.exists()))
        fsync(path)

    monkeypatch.setattr(checkpoint, "_fsync", watch)
    write_checkpoint(target, {"weights": {"w": torch.ones(2)}}, {})
    assert {name for name, there in seen if not there} >= {"weights.safetensors", "manifest.json"}
    # Only the parent folder is synced after the rename, to make the rename itself durable.
    assert [name for name, there in seen if there] == [tmp_path.name]
