"""What the GPU recipes reserve, in a Ray of logical GPUs, up to the point where CUDA is needed.

verl's manager makes the trainer's reservation, Trinity's allocator (or ours, on one GPU) the
sampler's; both must be granted side by side. And the repair of `mode: colocate`: without it the
second one never is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from aflow_tune.config.load import AflowConfig, load_config
from aflow_tune.config.prepare import Purpose, prepare
from aflow_tune.engines.trinity.launcher import our_actors
from aflow_tune.engines.trinity.training.trainer import VerlTrainer

# isort: split
from trinity.common.models.allocator import Allocator
from trinity.trainer import trainer

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all recipes
ROOT = Path(__file__).parents[1]
RECIPES = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if "\nengine: trinity" in path.read_text() and path.stem != "trinity_cpu"
]
COLOCATED = [path.stem for path in RECIPES if "\nmode: colocate" in path.read_text()]


def one_gpu_config(tmp_path: Path) -> AflowConfig:
    """By Trinity's validators; colocate, which they make of its settings."""
    overrides = ["cluster.ray_address=10.0.0.1:6379", f"checkpoint_root_dir={tmp_path}"]
    config = load_config(ROOT / "configs" / "gpu_24gb.yaml", overrides)
    prepare(config, Purpose.CHECK)
    return config


def test_trinity_reserves_a_gpu_of_its_own_for_the_sampler(tmp_path: Path) -> None:
    config = one_gpu_config(tmp_path)
    assert Allocator(config.explorer).allocate_bundles().bundles == [{"GPU": 1.0, "CPU": 1}]
    # The size of the group that receives weights; of 0 it could not be made: so this stays.
    assert config.explorer.rollout_model.gpu_per_engine == 1
    assert config.cluster.trainer_gpu_num == 1
    assert config.explorer.rollout_model.gpu_memory_utilization == 0.25


def test_trinitys_launcher_makes_our_trainer_for_the_length_of_a_run(tmp_path: Path) -> None:
    config, stock = one_gpu_config(tmp_path), trainer.Trainer
    config.mode = "both"
    with our_actors(config):
        assert trainer.Trainer is VerlTrainer
    assert trainer.Trainer is stock


@pytest.fixture(scope="module")
def reservations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By recipe, all from one Ray."""
    folder = tmp_path_factory.mktemp("reservations")
    for name in ("train", "validation"):
        row = {"source": "gsm8k", "benchmark": "gsm8k", "question": name, "answer": "#### 1"}
        rows = [
            row,
            {"source": "mbpp", "benchmark": "mbpp", "prompt": name, "entry_point": "f"}
            | {"code": "def f():\n    return 1", "test": "def check(f):\n    assert f() == 1"},
            {"source": "drop", "benchmark": "drop", "context": name, "ref_text": "1"},
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        "WRITER_DATA": str(folder),
        "TRINITY_CHECKPOINT_ROOT_DIR": str(folder / "checkpoints"),
        "OPENAI_API_KEY": "not-a-key",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    # In a folder of its own: it writes down there that it is the Ray of this machine.
    with tempfile.TemporaryDirectory("", "aft-", "/tmp", ignore_cleanup_errors=True) as own:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "allocating.py"), *map(str, RECIPES)],
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment | {"RAY_TMPDIR": own},
        )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {item.pop("recipe"): item for item in found}


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_gets_what_it_reserves_and_leaves_nothing(
    path: Path, reservations: dict[str, dict[str, Any]]
) -> None:
    found, cluster = reservations[path.stem], load_config(path, []).cluster
    assert found["free"] == cluster.node_num * cluster.gpu_per_node
    assert found["sampler"], "the sampler's reservation was never granted"
    assert found["left"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", COLOCATED)
def test_one_gpu_hangs_with_the_stock_allocator_and_starts_with_ours(
    name: str, reservations: dict[str, dict[str, Any]]
) -> None:
    found = reservations[name]
    assert found["trainer"] == [1]
    # A processor of the node with the GPU, and no GPU.
    (bundle,) = found["bundles"]
    (node,) = bundle.keys() - {"CPU"}
    assert node.startswith("node:")
    assert bundle == {"CPU": 1, node: 0.001}
    assert not found["stock_starts"]
    assert found["sampler"]
    assert found["device_of_sampler"] == found["device_of_trainer"] != ""
    # Ours got as far as making the engine, which is the first thing to need vLLM and CUDA.
    assert "vllm" in found["engine_needs"]
