"""A small project on disk for tests that run the whole thing: workflow, data, configuration."""

from __future__ import annotations

import json
from pathlib import Path

WORKFLOW = """
from typing import Dict

from aflow_tune import TrinityChatModel, caller, record_metrics, text_of


async def two_calls(task: Dict, model: TrinityChatModel) -> float:
    with caller("first"):
        first = await model([{"role": "user", "content": task["question"]}])
    text = text_of(first.content)
    with caller("second"):
        second = await model([{"role": "user", "content": task["question"] + text[:8]}])
    text += text_of(second.content)
    share = sum(c.isalpha() for c in text) / max(1, len(text))
    record_metrics(letters=share)
    return share
"""

HELD = "import asyncio\nfrom pathlib import Path\n" + WORKFLOW.replace(
    '    with caller("first"):',
    '    while Path(__file__).with_name("held").exists():\n'
    "        await asyncio.sleep(0.05)\n"
    '    with caller("first"):',
)
"""Does not go on while there is a file `held` beside it: a link, so while that is what it names."""
CONFIG = """
project: tests
name: tiny
checkpoint_root_dir: {root}/runs
workflow: {root}/flow.py:two_calls
seed: 3
local: {{dtype: float32, threads: 1, max_batch: 16}}
report: {{score: letters, transcripts: 2}}
rollout: {{run_timeout: 300}}
algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 4
  optimizer: {{lr: 0.003}}
model:
  model_path: {model}
  max_prompt_tokens: 200
  max_response_tokens: 8
  max_model_len: 256
  lora_configs: [{{lora_rank: 4, lora_alpha: 8}}]
buffer:
  batch_size: 2
  total_steps: {steps}
  explorer_input:
    taskset: {{name: train, path: {root}/train.jsonl}}
    eval_tasksets: [{{name: held_out, path: {root}/held_out.jsonl}}]
trainer: {{save_interval: 1}}
explorer: {{eval_interval: 2}}
"""


def write_project(root: Path, model: Path, steps: int = 2, workflow: str = WORKFLOW) -> Path:
    """Write the project into `root`; returns the configuration's path."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "flow.py").write_text(workflow)
    for name, numbers in (("train", range(12)), ("held_out", range(100, 104))):
        rows = [json.dumps({"question": f"What is {n}?", "answer": str(n)}) for n in numbers]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    config = root / "config.yaml"
    config.write_text(CONFIG.format(root=root, model=model, steps=steps))
    return config


def run_dir(root: Path) -> Path:
    """The run folder of the project in `root`."""
    return root / "runs" / "tests" / "tiny"
