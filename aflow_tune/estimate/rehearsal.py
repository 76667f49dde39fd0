"""Calls and prompt lengths of rollouts, found by calling the workflow without a model.

Rows, adapter, recording and experiences are those of a run; a stand-in for the sampler answers at
once with plain words up to the response limit. Only workflow functions are rehearsed, and only
without `models:` behind an API, which would cost money.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from trinity.buffer.task_scheduler import get_taskset_scheduler
from trinity.common.experience import Experience

from aflow_tune.config.accounting import spend_of
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.tasksets import (
    locate,
    materialise_tasksets,
    merge_mix,
    user_tasksets,
)
from aflow_tune.engines.local.models import load_tokenizer
from aflow_tune.engines.local.packed_model import TokenTrie
from aflow_tune.engines.local.sampler import Completion, SamplingParams, Vocabulary, prompt_faults
from aflow_tune.engines.local.server import SamplerServer
from aflow_tune.engines.trinity.inline import InlineRollouts
from aflow_tune.engines.trinity.rollout.adapter import adapter_arguments
from aflow_tune.engines.trinity.rollout.operators import FAILURE_KEY
from aflow_tune.engines.trinity.rollout.rollout_model import SamplerHost
from aflow_tune.errors import BadInput
from aflow_tune.find_ray import use_own
from aflow_tune.sections import BudgetSection

MOST_RUNS = 32
"""Rollouts of a rehearsal; those of a larger step are assumed to be like these."""
SECONDS = 20.0
"""Time limit of a rehearsal; a workflow that takes longer waits for something else."""
_WORDS = (
    "The answer to this question follows from the numbers that were given: first one adds what "
    "belongs together, then one takes away what does not, and the rest is shared out evenly. "
)


@dataclass(frozen=True)
class Seen:
    """Means over the rollouts: `calls`, tokens of a `prompt`, and `unshared`: tokens of a rollout's
    prompts that no other shares. `longest_prompt`: in tokens. `how`: the source, as text."""

    how: str
    calls: float
    prompt: float
    longest_prompt: float
    unshared: float


def rehearse(
    config: AflowConfig,
    workflow: Callable[..., Any] | None,
    judge: Callable[..., Any] | None,
    folders: Mapping[str, Path | None],
) -> Seen | str:
    """Run the workflow on a few rows of a prepared configuration; returns text if it cannot.

    Args:
        folders: the folder of each `model_path`'s tokenizer; None: not on this machine.
    """
    training = [taskset for _, taskset, held_out in user_tasksets(config) if not held_out]
    if workflow is None or not config.workflow or config.writer.executor or config.graph.path:
        return "only a workflow function can be"
    if config.models:
        return "the configuration names models behind an API, which would cost money"
    if not all(locate(config, taskset).files for taskset in training):
        return "the training rows are not on this machine, and nothing is fetched"
    if None in folders.values():
        return "a model's tokenizer is not on this machine (--prompt-tokens N: a nearer estimate)"
    try:
        with tempfile.TemporaryDirectory(prefix="aflow-estimate-") as folder:
            work = _rehearse(copy.deepcopy(config), workflow, judge, folders, Path(folder))
            return asyncio.run(asyncio.wait_for(work, SECONDS))
    except TimeoutError:
        return f"it took more than {SECONDS:.0f} s with a model that answers at once"
    except Exception as error:
        # Whatever user code or a reader raises, the estimate goes on with less information.
        return f"{type(error).__name__}: {error}".splitlines()[0]


async def _rehearse(
    config: AflowConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    folders: Mapping[str, Path | None],
    folder: Path,
) -> Seen | str:
    config.mode = "both"  # a stand-in uses no GPU
    use_own(config)  # without looking for a cluster
    config.checkpoint_job_dir = config.prepared.account_folder = str(folder)
    config.buffer.cache_dir = str(folder / "buffer")
    config.budget = BudgetSection()
    config.rollout.run_timeout = min(config.rollout.run_timeout, SECONDS)
    materialise_tasksets(config)
    arguments = adapter_arguments(config, workflow, judge, spend_of(config), folder / "records")
    for taskset in config.buffer.explorer_input.tasksets:
        taskset.workflow_args.update(arguments)
    merge_mix(config, folder)
    repeats = config.algorithm.repeat_times
    rollouts = _Rollouts(config, folders)
    await rollouts.prepare()
    try:
        tasks = await get_taskset_scheduler(explorer_state={}, config=config).read()
        tasks = tasks[: max(1, MOST_RUNS // repeats)]
        results = await rollouts.run_tasks(tasks, 0, repeats)
    finally:
        await rollouts.close()
    payloads = [payload for _, payload in results if payload]
    found = [item for payload in payloads for item in Experience.deserialize_many(payload)]
    good = [item for item in found if FAILURE_KEY not in (item.info or {})]
    runs = len({item.eid.rid for item in good})
    if not runs:
        return "every run failed with a model that answers in plain words"
    prompts, trie = [item.prompt_length for item in good], TokenTrie()
    for item in good:
        trie.add(item.tokens[: item.prompt_length].tolist())
    return Seen(
        f"a rehearsal of {runs} runs without a model",
        len(good) / runs,
        statistics.fmean(prompts),
        max(prompts),
        len(trie) / runs,
    )


class _Rollouts(InlineRollouts):
    """Rollouts of the real workflow on samplers that answer in plain words."""

    def __init__(self, config: AflowConfig, folders: Mapping[str, Path | None]) -> None:
        super().__init__(config)
        self.folders = folders

    async def _host(self, model_config: Any) -> SamplerHost:
        tokenizer = load_tokenizer(cast(Path, self.folders[model_config.model_path]))
        if model_config.chat_template:
            tokenizer.chat_template = model_config.chat_template
        sampler: Any = _StandIn(tokenizer, model_config.max_model_len)
        server = SamplerServer(sampler, tokenizer, model_config.model_path)
        host = SamplerHost(sampler, server, tokenizer, server.start())
        self._hosts.append(host)
        return host


class _StandIn:
    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        settings = SimpleNamespace(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
        settings.get_text_config = lambda: settings
        model = SimpleNamespace(config=settings, generation_config=SimpleNamespace())
        self.vocabulary = Vocabulary(cast(Any, model), tokenizer)
        self.max_model_len = max_model_len
        self.version = 0
        self._words: list[int] = tokenizer(_WORDS, add_special_tokens=False)["input_ids"]
        self._draw = random.Random(0)

    async def submit(self, prompt_ids: list[int], params: SamplingParams) -> list[Completion]:
        faults = prompt_faults(prompt_ids, self.max_model_len)
        if faults:
            raise BadInput("The prompt cannot be completed", faults)
        count = min(params.max_tokens, self.max_model_len - len(prompt_ids))
        found = []
        for _ in range(params.n):
            start = self._draw.randrange(len(self._words))
            ids = list(itertools.islice(itertools.cycle(self._words), start, start + count))
            text = self.vocabulary.text(ids)
            found.append(Completion(ids, [-1.0] * count, text, "length", None))
        return found

    def close(self) -> None:
        """Nothing to free."""
