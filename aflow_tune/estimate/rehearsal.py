"""A rehearsal: the workflow on a few training rows, with a stand-in for every local model.

The rows, the adapter, the recording and the experiences are those of a run; only the sampler is
replaced by one that answers at once with plain words, as many as a response may have. So the
number of calls, the prompts and what runs share are real, and nothing is loaded but the
tokenizer. What a trained model would answer, and what a workflow does with good answers, a
rehearsal cannot know.

Only workflow functions are rehearsed, without `models:` behind an API, which would cost money, and
with rows that are on this machine. A client that a workflow or a judge makes by itself cannot be
seen from here: it calls whom it calls.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from trinity.buffer.task_scheduler import get_taskset_scheduler
from trinity.common.experience import Experience

from aflow_tune.config.accounting import spend_of
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.mixes import merge_mix
from aflow_tune.config.tasksets import locate, materialise_tasksets, user_tasksets
from aflow_tune.engines.local.models import load_tokenizer
from aflow_tune.engines.local.packing import Sample
from aflow_tune.engines.local.sampling import Completion, SamplingParams, Vocabulary, prompt_faults
from aflow_tune.engines.local.server import SamplerServer
from aflow_tune.engines.trinity.inline import InlineRollouts
from aflow_tune.engines.trinity.rollout.adapter import adapter_arguments
from aflow_tune.engines.trinity.rollout.operators import FAILURE_KEY
from aflow_tune.engines.trinity.rollout.rollout_model import SamplerHost
from aflow_tune.engines.trinity.training.algorithm import _grouped, to_sample
from aflow_tune.errors import BadInput
from aflow_tune.find_ray import use_own
from aflow_tune.sections import BudgetSection

MOST_RUNS = 32
"""Runs of a rehearsal; the rows of a larger step are taken to be like these."""
SECONDS = 20.0
"""After this a rehearsal is given up: the workflow waits for something."""
_WORDS = (
    "The answer to this question follows from the numbers that were given: first one adds what "
    "belongs together, then one takes away what does not, and the rest is shared out evenly. "
)


@dataclass(frozen=True)
class Rehearsal:
    """What the runs showed. `samples` by task; `calls` of a run and `prompt` tokens on average."""

    samples: tuple[tuple[Sample, ...], ...]
    calls: float
    prompt: float
    longest: int
    """Tokens of the longest prompt."""
    how: str

    def groups(self, response: int) -> list[list[Sample]]:
        """The samples by task, responses cut to `response` tokens."""
        return [[_cut(sample, response) for sample in group] for group in self.samples]


class _StandIn:
    """Answers like a `Sampler`, with words in place of a model's tokens."""

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
        return [self._completion(count) for _ in range(params.n)]

    def _completion(self, count: int) -> Completion:
        start = self._draw.randrange(len(self._words))
        ids = list(itertools.islice(itertools.cycle(self._words), start, start + count))
        return Completion(ids, [-1.0] * count, self.vocabulary.text(ids), "length", None)

    def close(self) -> None:
        """Nothing to free."""


class _Stage(InlineRollouts):
    """Rollouts of the real workflow on stand-ins."""

    def __init__(self, config: AflowConfig, folders: dict[str, Path]) -> None:
        super().__init__(config, lambda _: None)
        self.folders = folders

    async def _host(self, model_config: Any) -> SamplerHost:
        tokenizer = load_tokenizer(self.folders[model_config.model_path])
        if model_config.chat_template:
            tokenizer.chat_template = model_config.chat_template
        sampler: Any = _StandIn(tokenizer, model_config.max_model_len)
        server = SamplerServer(sampler, tokenizer, model_config.model_path)
        host = SamplerHost(sampler, server, tokenizer, server.start())
        self._hosts.append(host)
        return host


def can_rehearse(config: AflowConfig) -> str | None:
    """None, or why the workflow of a prepared configuration is not rehearsed."""
    if config.mode not in ("both", "colocate"):
        return f"mode {config.mode} trains on no rollouts"
    if not config.workflow or config.writer.executor or config.graph.path:
        return "only a workflow function can be"
    if config.models:
        return "the configuration names models behind an API, which would cost money"
    training = [taskset for _, taskset, held_out in user_tasksets(config) if not held_out]
    if not all(locate(config, taskset).files for taskset in training):
        return "the training rows are not on this machine, and nothing is fetched"
    return None


def rehearse(
    config: AflowConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    folders: dict[str, Path],
) -> Rehearsal | str:
    """Run the workflow on a few rows of a prepared configuration; or why that showed nothing.

    Args:
        folders: where the tokenizer of each `model_path` lies.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="aflow-rehearsal-") as folder:
            return asyncio.run(
                asyncio.wait_for(_rehearse(config, workflow, judge, folders, Path(folder)), SECONDS)
            )
    except TimeoutError:
        return f"the workflow took more than {SECONDS:.0f} s with a model that answers at once"
    except Exception as error:
        # Whatever user code or a reader raises here costs knowledge, not the estimate.
        return f"{type(error).__name__}: {error}".splitlines()[0]


async def _rehearse(
    given: AflowConfig,
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    folders: dict[str, Path],
    folder: Path,
) -> Rehearsal | str:
    config = copy.deepcopy(given)
    config.mode = "both"  # on stand-ins, who has which GPU is no question
    use_own(config)  # nor is any cluster asked
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
    rollouts = _Stage(config, folders)
    await rollouts.prepare()
    try:
        tasks = await get_taskset_scheduler(explorer_state={}, config=config).read()
        tasks = tasks[: max(1, MOST_RUNS // repeats)]
        results = await rollouts.run_tasks(tasks, 0, repeats)
    finally:
        await rollouts.close()
    found = [
        experience
        for _, payload in results
        if payload
        for experience in Experience.deserialize_many(payload)
    ]
    good = [item for item in found if FAILURE_KEY not in (item.info or {})]
    runs = len({item.eid.rid for item in good})
    if not runs:
        return "every run failed with a model that answers in plain words"
    groups = tuple(tuple(to_sample(item) for item in group) for group in _grouped(good))
    prompt = sum(item.prompt_length for item in good) / len(good)
    how = f"a rehearsal of {runs} runs without a model"
    longest = max(item.prompt_length for item in good)
    return Rehearsal(groups, len(good) / runs, prompt, longest, how)


def step_groups(config: AflowConfig, rehearsal: Rehearsal, response: int) -> list[list[Sample]]:
    """The samples of a whole step: those of the rehearsal, repeated with other words.

    A repeated task keeps what all rehearsed prompts begin with and gets other tokens after it.
    """
    groups = rehearsal.groups(response)
    common = _common([s.tokens_T[: s.prompt_length].tolist() for g in groups for s in g])
    wanted = config.buffer.batch_size
    copies = math.ceil(wanted / len(groups))
    shifted = [
        [_shift(sample, common, number * 1_000_003) for sample in group]
        for number in range(1, copies)
        for group in groups
    ]
    return (groups + shifted)[:wanted]


def _cut(sample: Sample, response: int) -> Sample:
    length = sample.prompt_length + response
    if len(sample.tokens_T) <= length:
        return sample
    return Sample(
        sample.tokens_T[:length],
        sample.prompt_length,
        sample.action_mask_R[:response],
        run=sample.run,
    )


def _shift(sample: Sample, common: int, by: int) -> Sample:
    tokens = sample.tokens_T.clone()
    tokens[common:] += by
    return Sample(tokens, sample.prompt_length, sample.action_mask_R, run=(by, sample.run))


def _common(prompts: list[list[int]]) -> int:
    """Tokens that all prompts begin with."""
    first, last = min(prompts), max(prompts)
    pairs = zip(first, last, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))
