"""A policy that writes workflows and an executor that runs them, both scripted, over real HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripted_server import Reply

GOOD = """\
class Workflow:
    def __init__(self, name, llm_config, dataset):
        self.llm = create_llm_instance(llm_config)
        self.solve = operator.Custom(self.llm)

    async def __call__(self, problem):
        got = await self.solve(input=problem)
        return got["response"], self.llm.get_usage_summary()["total_cost"]
"""
CODE = (
    GOOD.replace("Custom", "CustomCodeGenerate")
    .replace("(self, problem)", "(self, problem, entry_point)")
    .replace("input=problem", "problem=problem, entry_point=entry_point")
)
RAISES = GOOD.replace('got["response"]', 'got["response"].split("|")[7]')
PROMPT = "Work it out & answer <b>briefly</b>."
EVIL = "</script><script>alert(1)</script>"


def written(code: str, prompts: dict[str, str] | None = None) -> str:
    """The hybrid form."""
    return json.dumps({"prompts": {"solve": PROMPT} if prompts is None else prompts,
                       "graph_code": code})  # fmt: skip


def policy(request: dict[str, Any]) -> Reply:
    """What the policy writes, by a word in the problem, which ends what it is asked."""
    problem = request["messages"][-1]["content"].rstrip().splitlines()[-1]
    if "slow" in problem:
        return Reply(written(GOOD), delay=30.0)
    if "rubbish" in problem:
        return Reply(f"I would rather not. {EVIL}")
    if "raises" in problem:
        return Reply(written(RAISES))
    if "refuse" in problem:
        return Reply("no", status=401)
    return Reply(written(CODE if "function" in problem else GOOD))


def executor(request: dict[str, Any]) -> Reply:
    """The executor knows one number and one function."""
    said = json.dumps(request["messages"])
    if "patience" in said:
        return Reply("The answer is 391", delay=60.0)
    if "broken" in said:
        return Reply("overloaded", status=400)
    if "function add" in said:
        return Reply("```python\ndef add(a, b):\n    return a + b\n```")
    answer = f"{EVIL} The answer is 391" if "evil" in said else "The answer is 391"
    if "<answer>" in said:  # an operator asks for fields
        return Reply(f"<thought>easy</thought><answer>{answer}</answer>")
    return Reply(answer)


CONFIG = """
project: tests
name: writer
checkpoint_root_dir: {root}/runs
seed: 3
local: {{dtype: float32, threads: 1, max_batch: 8}}
writer: {{executor: executor, benchmark: gsm8k, timeout: 120, max_calls: 4}}
models:
  executor:
    model: frozen
    base_url: {executor}/v1
    retries: 0
    max_tokens: 64
    prices: {{input: 1.0, output: 2.0}}
rollout: {{run_timeout: 300}}
model:
  model_path: {model}
  max_prompt_tokens: 900
  max_response_tokens: 24
  max_model_len: 1024
  lora_configs: [{{lora_rank: 4, lora_alpha: 8}}]
algorithm: {{algorithm_type: multi_step_grpo, repeat_times: 2}}
buffer:
  batch_size: 2
  total_steps: 2
  explorer_input:
    taskset: {{name: train, path: {root}/train.jsonl}}
    eval_tasksets:
      - {{name: held_out, path: {root}/held_out.jsonl, rollout_args: {{temperature: 0.25}}}}
"""


def write_config(root: Path, executor_url: str, model: Path | str = "nobody/no-such-model") -> Path:
    """A configuration whose task sets are nowhere: asking needs none."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / "writer.yaml"
    path.write_text(CONFIG.format(root=root, executor=executor_url, model=model))
    return path
