"""Every GPU recipe fits the hardware that its first lines name, by `aflow-tune estimate`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_configs import CLUSTER, ON_CLUSTER, ROOT, write_mixed
from test_estimate_memory import QWEN_7B

from aflow_tune.errors import BadInput
from aflow_tune.estimate.estimating import estimate
from aflow_tune.estimate.needs import GIB, Estimate
from aflow_tune.estimate.quantities import EstimateOptions

QWEN_1_5B = QWEN_7B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN_3B = QWEN_1_5B | {
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
"""The config.json of each model, as published."""
TRAINER, BOTH = "trainer", "rollout and trainer, colocated"
RECIPES: dict[str, tuple[dict[str, Any], int, str, float]] = {
    "async_styles": (QWEN3_8B, 80, TRAINER, 57),
    "gpu_24gb": (QWEN_1_5B, 24, BOTH, 14),
    "gpu_40gb": (QWEN_3B, 40, BOTH, 23),
    "gpu_80gb": (QWEN_7B, 80, BOTH, 47),
    "graph_qwen7b": (QWEN_7B, 80, TRAINER, 27),
    "react_gsm8k_qwen": (QWEN3_8B, 80, TRAINER, 57),
    "serve": (QWEN_1_5B, 24, "rollout", 21.6),
    "two_nodes": (QWEN_7B, 80, TRAINER, 39),
    "writer_auxiliary": (QWEN_7B, 80, TRAINER, 19),
    "writer_qwen7b": (QWEN_7B, 80, TRAINER, 40),
    "writer_single_gpu": (QWEN_7B, 80, "sampler and trainer", 68),
}
"""The model that a recipe names, the GB of each GPU, and the GiB that it gives a role there."""


@pytest.fixture
def estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Estimates a recipe with its model's config.json, and nothing else of the model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WRITER_DATA", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-key")
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path / "checkpoints"))
    write_mixed(tmp_path / "train.jsonl", range(8))
    write_mixed(tmp_path / "validation.jsonl", range(8, 12))

    def run(name: str, *overrides: str) -> Estimate:
        settings, size, _, _ = RECIPES[name]
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(settings))
        monkeypatch.setenv("TRINITY_MODEL_PATH", str(model))
        if name == "writer_auxiliary":
            monkeypatch.setenv("EXECUTOR_MODEL", str(model))
        path = ROOT / "configs" / f"{name}.yaml"
        options = EstimateOptions(gpu_memory=size * GIB, memory=256 * GIB, rehearse=False)
        cluster = CLUSTER if path in ON_CLUSTER else []
        (found,) = estimate(path, [*cluster, *overrides], options)
        return found

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_the_gpus_that_it_names_with_the_memory_that_it_says(
    name: str, estimated: Any
) -> None:
    _, size, role, said = RECIPES[name]
    text = (ROOT / "configs" / f"{name}.yaml").read_text().partition("\n\n")[0]
    head = " ".join(text.replace("#", " ").split())
    assert f"of {size} GB" in head
    assert re.search(rf"(?<![\d.]){said:g}(?![\d.]*\d)", head)
    found = estimated(name)
    assert found.fits is True, [(need.role, need.size / GIB) for need in found.needs]
    (need,) = [need for need in found.needs if (need.role, need.place) == (role, "GPU")]
    assert need.size / GIB == pytest.approx(said, abs=1)


def test_every_recipe_for_gpus_is_here_but_one_that_trains_elsewhere() -> None:
    named = {path.stem for path in ON_CLUSTER} | {"writer_single_gpu"}
    assert set(RECIPES) == named - {"trinity_cpu"}
    with pytest.raises(BadInput) as caught:
        estimate(ROOT / "configs" / "tinker.yaml")
    (fault,) = caught.value.faults
    assert "model.tinker.enable" in fault.where
