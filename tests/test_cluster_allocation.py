"""What the colocated recipes reserve, in a Ray of one logical GPU, until CUDA is needed.

verl's manager makes the trainer's reservation, our allocator the sampler's; both must be granted
side by side on the only GPU. Without the repair of `mode: colocate` the second one never is.
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

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all recipes
ROOT = Path(__file__).parents[1]
RECIPES = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if "\nmode: colocate" in path.read_text()
]


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
@pytest.mark.parametrize("name", [path.stem for path in RECIPES])
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
