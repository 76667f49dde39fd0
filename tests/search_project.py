"""A project to search in: problem n is 'What is n + 10?', and the executor adds up only if it is
told to think step by step; when it is told to look twice as well, also for every fourth n.
"""

from __future__ import annotations

import re
from pathlib import Path

from faulty_server import Request, Step
from graph_samples import own_form, simple
from harvest_project import rows, write_rows

SEED = simple(
    'answer = await self.custom(input=problem, instruction="")\nreturn answer["response"], 0'
)
CONFIG = """
project: tests
name: searched
checkpoint_root_dir: {root}/runs
seed: 3
inline: true
deterministic: true
graph: {{path: {root}/seed, benchmark: gsm8k, timeout: 120}}
search:
  executor: executor
  operators: [Custom]
  rollouts: 80
  problems: 8
  final_problems: 4
  instructions: {{twice: "Think step by step. Look twice. "}}
model: {{model_path: nobody/no-such-model, max_model_len: 4096, max_response_tokens: 512}}
algorithm: {{algorithm_type: multi_step_grpo, repeat_times: 8}}
models:
  executor:
    {{model: frozen, base_url: {url}, retries: 0, prices: {{input: 1.0, output: 10.0}}}}
buffer:
  explorer_input:
    taskset: {{name: sums, path: {root}/train.jsonl}}
    eval_tasksets: [{{name: held_out, path: {root}/held_out.jsonl}}]
"""


def adds(number: int, request: Request) -> Step:
    """The executor."""
    text = request.body["messages"][-1]["content"]
    asked = re.findall(r"What is (\d+) \+ 10", text)[-1]
    right = int(asked) + 10
    knows = "step by step" in text and (right % 4 or "Look twice" in text)
    return Step(text=f"It is {right if knows else right + 1}")


def write_project(root: Path, url: str) -> Path:
    """The project in `root`; returns the configuration's path. `url`: of the executor's API."""
    write_rows(root / "train.jsonl", rows(range(32)))
    write_rows(root / "held_out.jsonl", rows(range(100, 112)))
    own_form(root / "seed", SEED)
    path = root / "config.yaml"
    path.write_text(CONFIG.format(root=root, url=url))
    return path
