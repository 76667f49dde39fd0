"""`aflow-tune init FOLDER`: a small project that validates, runs and passes its test."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from aflow_tune.errors import BadInput

WORKFLOW = '''"""A workflow of two calls: draft an answer, then check it. Make it yours."""

from __future__ import annotations

import re
from typing import Dict

from agentscope.model import TrinityChatModel

from aflow_tune import caller, record_metrics, workflow


@workflow
async def answer_and_check(task: Dict, model: TrinityChatModel) -> float:
    """Reward: 1 if the last number of the checked answer is right, else 0."""
    with caller("draft"):
        draft = await ask(model, task["question"])
    with caller("check"):
        final = await ask(model, f"{task['question']} Someone says {draft}. The right number is")
    numbers = re.findall(r"-?\\d+", final)
    correct = bool(numbers) and int(numbers[-1]) == task["answer"]
    record_metrics(correct=correct)
    return float(correct)


async def ask(model: TrinityChatModel, question: str) -> str:
    """One call; the text of its answer."""
    response = await model([{"role": "user", "content": question}])
    return "".join(block["text"] for block in response.content if block["type"] == "text")
'''

CONFIG = """\
# Tune with: aflow-tune config.yaml      Check with: aflow-tune validate config.yaml
project: my-project
name: first-run
checkpoint_root_dir: runs

workflow: workflow.py:answer_and_check
report:
  score: correct                 # the metric that counts as held-out score

model:
  model_path: smollm2-135m       # or a Hugging Face folder or id
  max_prompt_tokens: 200
  max_response_tokens: 24
  max_model_len: 256
  temperature: 1.0
  lora_configs:
    - lora_rank: 16
      lora_alpha: 32

algorithm:
  algorithm_type: multi_step_grpo
  repeat_times: 8                # runs of each task
  optimizer:
    lr: 5.0e-4

buffer:
  batch_size: 4                  # tasks a step
  total_steps: 10
  explorer_input:
    taskset:
      name: train
      path: train.jsonl
    eval_tasksets:
      - name: held_out
        path: held_out.jsonl

explorer:
  eval_interval: 10
"""

TEST = '''"""The workflow with a scripted model: no server, no weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from workflow import answer_and_check


class Scripted:
    """Answers each call with the next reply."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)

    async def __call__(self, messages: list[dict]) -> SimpleNamespace:
        return SimpleNamespace(content=[{"type": "text", "text": self.replies.pop(0)}])


def test_a_right_answer_earns_one_and_a_wrong_one_nothing() -> None:
    task = {"question": "What is 3 + 4?", "answer": 7}
    assert asyncio.run(answer_and_check(task, Scripted("7", "7"))) == 1.0
    assert asyncio.run(answer_and_check(task, Scripted("7", "8"))) == 0.0
    assert asyncio.run(answer_and_check(task, Scripted("7", "no idea"))) == 0.0
'''

README = """\
# A workflow to tune

| file | what it is |
|---|---|
| `workflow.py` | the workflow: an async function that calls the model and returns a reward |
| `config.yaml` | model, algorithm, data; the keys are Trinity's, with a few sections of our own |
| `train.jsonl`, `held_out.jsonl` | the tasks, one a line; no question is in both |
| `test_workflow.py` | calls the workflow with a scripted model |

```
pytest                              # the workflow does what you think
aflow-tune validate config.yaml     # checks function, configuration and data; starts nothing
aflow-tune config.yaml              # trains; results are under runs/
```

Override any key on the command line: `aflow-tune config.yaml buffer.total_steps=20`.
"""


def _rows(numbers: Iterable[int]) -> str:
    rows = ({"question": f"What is {n} + {n + 1}?", "answer": 2 * n + 1} for n in numbers)
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_project(folder: Path) -> list[Path]:
    """Write the files that are not there yet; returns those written.

    Raises:
        BadInput: `folder` cannot be a folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        title, expected = "The project cannot be written there.", "a folder, or a free name"
        raise BadInput.of(title, str(folder), expected, str(error), "name another folder") from None
    files = {
        "workflow.py": WORKFLOW,
        "config.yaml": CONFIG,
        "test_workflow.py": TEST,
        "README.md": README,
        # Every third sum is held out, so that both sets are equally hard.
        "train.jsonl": _rows(n for n in range(1, 61) if n % 3),
        "held_out.jsonl": _rows(range(3, 61, 3)),
    }
    written = []
    for name, text in files.items():
        path = folder / name
        if not path.exists():
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written
