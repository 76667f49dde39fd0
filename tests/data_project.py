"""A project that learns from a data set, for tests of `mode: train` and of stages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CONFIG = """
project: tests
name: data
checkpoint_root_dir: {root}/runs
mode: train
seed: 3
local: {{dtype: float32, threads: 1, max_batch: 16}}
algorithm:
  algorithm_type: {kind}
  optimizer: {{lr: {lr}}}
model:
  model_path: {model}
  max_prompt_tokens: 200
  max_response_tokens: 56
  max_model_len: 256
buffer:
  train_batch_size: 4
  total_steps: {steps}
  trainer_input:
    experience_buffer:
      path: {root}/rows.jsonl
      storage_type: file
      format: {{prompt_type: messages, messages_key: messages}}
      data_selector: {{selector_type: shuffle, seed: 5}}
trainer: {{save_interval: 4}}
"""


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair(question: str, answer: str) -> dict[str, Any]:
    """A row for sft: a question and the answer to learn."""
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def write_data_project(
    root: Path,
    model: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    kind: str = "sft",
    steps: int = 4,
    lr: float = 0.003,
) -> Path:
    """Write rows and configuration into `root`; returns the configuration's path."""
    root.mkdir(parents=True, exist_ok=True)
    write_rows(root / "rows.jsonl", rows)
    config = root / "config.yaml"
    config.write_text(CONFIG.format(root=root, model=model, kind=kind, steps=steps, lr=lr))
    return config


def data_dir(root: Path) -> Path:
    """The run folder of the project in `root`."""
    return root / "runs" / "tests" / "data"


def trainer_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """What the trainer logged, by step."""
    found: dict[int, dict[str, float]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["role"] == "trainer":
            found.setdefault(entry["step"], {}).update(entry["metrics"])
    return found
