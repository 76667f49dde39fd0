"""A search trains its policy: `Recorded` asks it and keeps what it sampled, `Learner` trains on it.

    policy = Recorded(await models.take(config, learner.weights), learner.version)
    reply, answer = await policy.ask(messages, seed=1)
    rows.append(answer.row(group="round 3", anchor=parent, reward=gain))
    learned = await asyncio.to_thread(learner.train, rows, stop)

All training of a search is one run of `mode: train`, in `<folder>/trained`; its step k learns from
`<folder>/batches/step_k.jsonl` and makes policy version k. Both are on the disk before the next
step begins, so a killed search goes on with the same calls: the rows of the last finished step are
not trained on again, and a batch whose step was not finished is written anew. Choosing which rows
of the pool to learn from, and what an answer is worth, is left to the search.
"""

from __future__ import annotations

import copy
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trinity.common.config import ExperienceBufferConfig

from aflow_tune.config.names import BATCH_FILES, TRUNCATED_IMPORTANCE, WORKFLOW_GIGPO
from aflow_tune.config.quiet import log_to
from aflow_tune.config.settings import AflowConfig, Prepared, words
from aflow_tune.engines.local.checkpoint import Kind, kind_of
from aflow_tune.engines.trinity.rollout.recording import recording_client
from aflow_tune.engines.trinity.rollout.rollout_model import InlineModel
from aflow_tune.engines.trinity.training.run_state import trinity_step
from aflow_tune.errors import AlreadyFinished, BadInput
from aflow_tune.files import write_whole
from aflow_tune.models.spend import Call, current_spend
from aflow_tune.models.types import (
    Ask,
    Message,
    Reply,
    Usage,
    model_error,
    response_format,
)
from aflow_tune.running.run import DataRun
from aflow_tune.runs.folder import checkpoint_path, checkpoints
from aflow_tune.sections import KeyPositions
from aflow_tune.trace import POLICY

STALEST = 4
"""Rows of a policy more than this many versions old are left out."""
_SHARED = words("algorithm cluster deterministic engine inline local log model runtime_env trainer")
"""Sections of the search's configuration that its training has, too."""
_BUFFER = "buffer.trainer_input.experience_buffer"


@dataclass(frozen=True)
class Row:
    """One answer of the policy and what it was worth. `group`: what its reward is compared with;
    `anchor`: the state that it was given in, such as the parent in the search tree; `logprobs`: of
    `tokens[prompt_length:]` when they were sampled, by the policy of `version` (0: untrained)."""

    group: str
    anchor: str
    tokens: tuple[int, ...]
    prompt_length: int
    logprobs: tuple[float, ...]
    reward: float
    version: int


@dataclass(frozen=True)
class Answer:
    """What the policy sampled for one prompt; the fields are those of `Row`."""

    tokens: tuple[int, ...]
    prompt_length: int
    logprobs: tuple[float, ...]
    version: int

    def row(self, *, group: str, anchor: str, reward: float) -> Row:
        return Row(group=group, anchor=anchor, reward=reward, **vars(self))


@dataclass(frozen=True)
class Learned:
    """The policy after `Learner.train`. `weights`: None if nothing was ever trained; `trained`: how
    many rows its last step learned from; `left_out`: how many rows did not take part, by reason."""

    weights: Path | None
    version: int
    trained: int
    left_out: Mapping[str, int]


class Learner:
    """Trains a policy on whole groups of rows, one step a call.

    Args:
        config: the search's, as loaded or as prepared for anything but a run. Its sections `model`,
            `algorithm`, `trainer`, `local` and those about engine and cluster hold here, too; the
            algorithm is multi_step_grpo with `workflow_gigpo` and `truncated_importance` where it
            does not say otherwise. Its budget and limits in time do not: the search stops us.
        folder: of the search, for `batches/` and `trained/`.
        seed: of the first weights of an adapter; None: that of `config`.

    Raises BadInput: the learning rate depends on the number of steps, which a search does not know.
    """

    def __init__(self, config: AflowConfig, folder: Path, *, seed: int | None = None) -> None:
        self.config, self.folder = config, folder.absolute()
        self.seed = config.seed if seed is None else seed
        self.run_dir, self.batches = self.folder / "trained", self.folder / "batches"
        optimizer, key = config.algorithm.optimizer, "algorithm.optimizer."
        faults = []
        for name, good, fix in (
            ("lr_scheduler_type", "constant", "constant"),
            ("lr_warmup_steps_ratio", 0.0, "lr_warmup_steps: 2"),
        ):
            if getattr(optimizer, name) != good and config.positions.given(key + name):
                expected = f"{good}: how many steps a search will train is not known before"
                faults.append(config.wrong(key + name, expected, fix))
        if faults:
            raise BadInput("A search cannot train its policy so.", faults)

    @property
    def version(self) -> int:
        """The steps that the policy has been trained; 0: not at all."""
        saved = checkpoints(self.run_dir)
        ours = [point.step for point in saved if kind_of(point.path) is Kind.CHECKPOINT]
        return max(ours, default=trinity_step(self.run_dir))

    @property
    def weights(self) -> Path | None:
        """The weights of `version`, for `LocalModels.take`; None before the first step."""
        if not self.version:
            return None
        saved = checkpoint_path(self.run_dir, self.version)
        adapter, model = saved / "actor" / "lora_adapter", saved / "actor" / "huggingface"
        return next((path for path in (saved, adapter, model) if kind_of(path)), saved)

    def train(self, rows: Sequence[Row], stop: Callable[[], bool] = lambda: False) -> Learned:
        """Train one step on the groups of `rows` that can teach something, and print how many rows
        cannot. Blocks, and must not be called in an event loop. The same rows as in the last call
        are not trained on again; without any that can teach, nothing happens.

        Raises:
            Interrupted: `stop()` became true; the same call goes on.
            RunFailed, BadInput: as a training run.
        """
        done = self.version
        kept, left_out = teaching(rows, done - 1)
        again = self._batch(done)
        if not (done and again.exists() and again.read_text(encoding="utf-8") == _lines(kept)):
            kept, left_out = teaching(rows, done)
            if kept:
                write_whole(self._batch(done + 1), _lines(kept))
                self._run(done + 1, stop)
        told = [f"{count} {why}" for why, count in left_out.items()]
        learned = f"learned from {len(kept)} rows" if self.version > done else "nothing new"
        left = f"; left out: {', '.join(told)}" if told else ""
        print(f"policy version {self.version}: {learned}{left}")
        return Learned(self.weights, self.version, len(kept), left_out)

    def _batch(self, step: int) -> Path:
        return self.batches / f"step_{step:06d}.jsonl"

    def _run(self, steps: int, stop: Callable[[], bool]) -> None:
        """Train until step `steps`."""
        run = _Steps(self._config(steps), None, None)
        run.prepare()
        try:
            with run.claimed():
                run.execute(stop)
        except AlreadyFinished:
            pass
        finally:
            log_to(self.folder / "log")  # the search's own again

    def _config(self, steps: int) -> AflowConfig:
        """The configuration of the run. Between two calls only the number of steps may differ."""
        theirs, config = self.config, AflowConfig()
        for name in _SHARED:
            setattr(config, name, copy.deepcopy(getattr(theirs, name)))
        positions = KeyPositions(theirs.positions.file, theirs.positions.base)
        for kind in ("lines", "overrides", "arguments", "raw"):
            found = getattr(theirs.positions, kind).items()
            shared = {key: place for key, place in found if key.partition(".")[0] in _SHARED}
            getattr(positions, kind).update(shared)
        positions.arguments[f"{_BUFFER}.storage_type"] = "the search"
        config.prepared = Prepared(positions=positions)
        config.mode, config.seed = "train", self.seed
        config.checkpoint_root_dir, config.project = str(self.folder), ""
        config.group, config.name = "", self.run_dir.name
        config.ray_namespace = "/".join([theirs.project, theirs.group, theirs.name, config.name])
        algorithm, trainer, given = config.algorithm, config.trainer, positions.given
        for name, usual in (
            ("algorithm_type", "multi_step_grpo"),
            ("advantage_fn", WORKFLOW_GIGPO),
            ("policy_loss_fn", TRUNCATED_IMPORTANCE),
        ):
            if not given(f"algorithm.{name}"):
                setattr(algorithm, name, usual)
        algorithm.repeat_times = max(2, algorithm.repeat_times)
        algorithm.optimizer.lr_scheduler_type = "constant"
        algorithm.optimizer.lr_warmup_steps_ratio = 0.0
        trainer.save_interval, trainer.total_steps = 1, None
        if not given("trainer.save_hf_checkpoint") and config.model.lora_configs:
            trainer.save_hf_checkpoint = "never"
        config.buffer.total_steps = steps
        config.buffer.trainer_input.experience_buffer = ExperienceBufferConfig(
            name="experiences", storage_type=BATCH_FILES, path=str(self.batches)
        )
        return config


class _Steps(DataRun):
    """The training of a search, without a report after each of its steps."""

    def _report(self) -> None:
        return None


def teaching(rows: Sequence[Row], version: int) -> tuple[list[Row], dict[str, int]]:
    """The rows of whole groups that can teach the policy of `version` something; and how many
    others there are, by reason. A group with one row that is too old is left out whole, since its
    mean would be another."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    kept: list[Row] = []
    left_out: Counter[str] = Counter()
    for group in groups.values():
        if min(row.version for row in group) < version - STALEST:
            left_out[f"of policies more than {STALEST} versions ago"] += len(group)
        elif len(group) < 2:
            left_out["alone in their group"] += len(group)
        elif len({row.reward for row in group}) < 2:
            left_out["of groups with equal rewards"] += len(group)
        else:
            kept += group
    return kept, dict(left_out)


def _lines(rows: Sequence[Row]) -> str:
    """The rows as `BatchFiles` reads them; `run` numbers those of a group."""
    runs: Counter[str] = Counter()
    lines = []
    for row in rows:
        content = asdict(row)
        content |= {"run": runs[row.group], "policy_version": content.pop("version")}
        runs[row.group] += 1
        lines.append(json.dumps(content) + "\n")
    return "".join(lines)


class Recorded:
    """The policy as a model client that keeps what it sampled. `model`: of `LocalModels.take`, with
    the weights of `version`; take a new one after each training."""

    role = POLICY

    def __init__(self, model: InlineModel, version: int) -> None:
        self.model, self.version = str(model.config.model_path), version
        self._wrapper = model

    def prompt_tokens(self, messages: Sequence[Message]) -> int:
        """The tokens of a prompt, with the chat template around it."""
        return self._wrapper.prompt_tokens(messages)

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        seed: int | None = None,
        max_tokens: int | None = None,
    ) -> tuple[Reply, Answer]:
        """An answer with the configured sampling, and its record to learn from. Raises as
        `complete`."""
        return await self._asked(Ask(messages=messages, seed=seed, max_tokens=max_tokens))

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        schema: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Reply:
        """As `ModelClient.complete`; nothing is kept, since other sampling cannot be learned from.
        Raises ModelError, BudgetReached."""
        given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
        ask = Ask(messages=messages, stop=stop, schema=schema, tools=tools, **given)  # type: ignore[arg-type]
        return (await self._asked(ask))[0]

    async def _asked(self, ask: Ask) -> tuple[Reply, Answer]:
        ask.check()
        source = await recording_client(self._wrapper)
        kwargs = {**self._wrapper.generate_kwargs, "messages": [*map(dict, ask.messages)]}
        for name in ("temperature", "top_p", "max_tokens", "seed", "stop", "tools"):
            if (value := getattr(ask, name)) not in (None, ()):
                kwargs[name] = value
        if ask.schema is not None:
            kwargs["response_format"] = response_format(ask.schema)
        longest, spend = kwargs.get("max_tokens"), current_spend()
        call = Call(spend, POLICY, self.model, None, ask.most_prompt_tokens, longest)
        with call.noted():
            async with call:
                try:
                    create = source.client.chat.completions.create
                    response = await create(model=source.client.model_path, logprobs=True, **kwargs)
                except Exception as error:
                    if (failed := model_error(error, self.model)) is None:
                        raise
                    raise failed from error
                # No await since Trinity's client appended it: the last one is of this call.
                recorded = source.wrapper.history[-1]
                source.wrapper.history.clear()
                told = response.usage
                usage = told and Usage(told.prompt_tokens, told.completion_tokens)
                call.settle(usage)
        choice = response.choices[0]
        reply = Reply(
            text=choice.message.content or "",
            model=self.model,
            usage=usage,
            cost=call.cost,
            finish_reason=choice.finish_reason or "stop",
            tool_calls=tuple(tool.model_dump() for tool in choice.message.tool_calls or ()),
            seconds=call.seconds,
        )
        tokens, logprobs = recorded.tokens.tolist(), recorded.logprobs.tolist()
        answer = Answer(tuple(tokens), recorded.prompt_length, tuple(logprobs), self.version)
        return reply, answer
