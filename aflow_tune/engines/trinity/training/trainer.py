"""Trinity's Trainer for both engines, with a train loop that raises when a step fails.

`PublishingTrainer` is the trainer's half of the sync check, for both engines; `LocalTrainEngine`
puts our trainer behind Trinity's `TrainEngineWrapper`; `LocalTrainActor` and `VerlTrainer` are the
actors. PEFT is imported lazily: every process with an actor's handle imports this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
import torch
from trinity.common.config import Config
from trinity.common.constants import RunningStatus
from trinity.common.experience import EID, Experience
from trinity.trainer import trainer as trinity_trainer
from trinity.trainer.trainer import TrainEngineWrapper, Trainer

from aflow_tune.config.critic import critic_settings, uses_critic
from aflow_tune.config.engine import removes_padding
from aflow_tune.config.load import AflowConfig
from aflow_tune.config.names import BATCH_FILES
from aflow_tune.engines.local.compute import COMPUTE
from aflow_tune.engines.local.models import load_tokenizer, pick_device, pick_dtype, resolve_model
from aflow_tune.engines.trinity.training.sync_check import forget, is_checked, probe_tokens, publish
from aflow_tune.runs.clean import kept_in_run
from aflow_tune.runs.folder import checkpoint_path, checkpoints, remove_checkpoint

if TYPE_CHECKING:
    from aflow_tune.engines.local.trainer import LocalTrainer

T = TypeVar("T")


class PublishingTrainer(Trainer):
    """Trinity's Trainer, which publishes the logprobs of the sync check's text under its weights,
    before the first step and after each."""

    async def prepare(self) -> None:
        await super().prepare()
        await self._publish()

    async def train_step(self, exps: list[Experience]) -> dict[str, float]:
        metrics: dict[str, float] = await super().train_step(exps)
        await self._publish()
        return metrics

    async def shutdown(self) -> None:
        await super().shutdown()
        forget(self.config.ray_namespace)

    async def probe(self) -> tuple[list[int], list[float]] | None:
        """The fixed text in tokens, and log-probabilities of tokens 1..T-1; None: no sync check."""
        raise NotImplementedError

    async def _publish(self) -> None:
        scored = await self.probe()
        if scored is not None:
            publish(self.config.ray_namespace, self.train_step_num, *scored)


class LocalTrainEngine(TrainEngineWrapper):
    """Runs our trainer, one step per call, and manages its checkpoints. All torch work happens on
    the thread `COMPUTE`, so that the event loop stays responsive."""

    def __init__(self, config: AflowConfig) -> None:
        self.config = config
        self.run_dir = Path(config.checkpoint_job_dir)
        self._saved_step: int | None = None
        self._tokens: list[int] = []

    async def prepare(self) -> None:
        """Build the trainer and load the latest checkpoint, if there is one."""
        from aflow_tune.engines.trinity.training.algorithm import TrainStep

        self.trainer = await self.compute(lambda: build_trainer(self.config))
        self.train = await self.compute(lambda: TrainStep(self.config, self.trainer))
        existing = checkpoints(self.run_dir)
        if existing:
            await self.compute(lambda: self.trainer.load(existing[-1].path))
            self._saved_step = existing[-1].step

    @property
    def train_step_num(self) -> int:
        return self.trainer.step_count

    async def train_step(self, batch_exps: list[Experience]) -> dict[str, float]:
        return await self.compute(lambda: self.train(batch_exps))

    async def probe(self) -> tuple[list[int], list[float]]:
        """The fixed text of the sync check, and the log-probabilities of its tokens 1..T-1."""
        from aflow_tune.engines.local.packed_model import Sample

        if not self._tokens:
            tokenizer = load_tokenizer(resolve_model(self.config.model.model_path))
            self._tokens = probe_tokens(tokenizer, self.config.model.max_model_len)
        tokens = self._tokens
        sample = Sample(torch.tensor(tokens), 1, torch.ones(len(tokens) - 1, dtype=torch.bool))
        scores = await self.compute(lambda: self.trainer.logprobs([sample]))
        return tokens, scores[0].tolist()

    async def save_checkpoint(
        self, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Write the whole state atomically; `save_as_hf` also exports the model to `export/`."""
        if not self.trainer.torn:  # else the weights are between two steps: save nothing
            await self.compute(lambda: self._save(save_as_hf))

    def _save(self, save_as_hf: bool) -> None:
        step, config = self.train_step_num, self.config
        if self._saved_step != step:
            self.trainer.save(checkpoint_path(self.run_dir, step))
            self._saved_step = step
            saved = [point.step for point in checkpoints(self.run_dir)]
            evaluates = bool(config.buffer.explorer_input.eval_tasksets)
            staying = kept_in_run(
                self.run_dir,
                saved,
                keep_last=config.trainer.max_checkpoints_to_keep,
                keep_best=config.checkpoints.keep_best,
                eval_interval=config.explorer.eval_interval if evaluates else None,
            )
            for old in sorted(set(saved) - set(staying)):
                with contextlib.suppress(OSError):  # a leftover only costs disk space
                    remove_checkpoint(checkpoint_path(self.run_dir, old))
        if save_as_hf:
            if self.trainer.peft is not None:
                self.trainer.export_peft(self.run_dir / "export" / "adapter")
            self.trainer.export_merged(self.run_dir / "export" / "merged")

    async def upload_state_dict(self) -> None:
        """Hand the current weights to Trinity's Synchronizer."""
        weights = await self.compute(self.trainer.weights)
        synchronizer = ray.get_actor("synchronizer", namespace=self.config.ray_namespace)
        await synchronizer.set_model_state_dict.remote(weights, self.train_step_num)

    async def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the local engine syncs by memory")

    sync_weight_nccl = save_state_dict = get_weight_sync_info = _unused
    setup_weight_sync_group = teardown_weight_sync_group = _unused

    def close(self) -> None:
        """Wait for what is under way."""
        COMPUTE.submit(lambda: None).result()

    async def compute(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(COMPUTE, work)


def build_trainer(config: AflowConfig) -> LocalTrainer:
    from aflow_tune.engines.local.trainer import LocalTrainer, Schedule, TrainerSettings
    from aflow_tune.engines.local.weights import LoraSpec

    local, optimizer = config.local, config.algorithm.optimizer
    device = pick_device(local.device)
    if local.threads:
        torch.set_num_threads(local.threads)
    total = config.trainer.total_steps
    warmup = optimizer.lr_warmup_steps
    if warmup < 0:
        warmup = int(optimizer.lr_warmup_steps_ratio * (total or 0))
    lora = config.model.lora_configs[0] if config.model.lora_configs else None
    settings = TrainerSettings(
        lora=LoraSpec(lora.lora_rank, lora.lora_alpha, lora.target_modules) if lora else None,
        schedule=Schedule(
            kind=optimizer.lr_scheduler_type,
            peak=optimizer.lr,
            warmup_steps=warmup,
            total_steps=total,
            floor=optimizer.min_lr_ratio,
        ),
        critic=critic_settings(config),
        betas=(optimizer.betas[0], optimizer.betas[1]),
        weight_decay=optimizer.weight_decay,
        grad_clip=config.trainer.grad_clip,
        micro_batch_tokens=local.micro_batch_tokens,
        temperature=config.model.temperature,
        dtype=torch.float32 if config.deterministic else pick_dtype(local.dtype, device),
        device=device,
        seed=config.seed,
        load_in=local.load_in,
    )
    return LocalTrainer(resolve_model(config.model.model_path), settings)


class LocalTrainActor(PublishingTrainer):
    def __init__(self, config: AflowConfig) -> None:
        # Trinity's constructor gets the engine from a function of its own module. It is replaced
        # during this call only, and only in this actor's process.
        original = trinity_trainer.get_trainer_wrapper
        trinity_trainer.get_trainer_wrapper = LocalTrainEngine
        try:
            super().__init__(config)
        finally:
            trinity_trainer.get_trainer_wrapper = original
        self._stop_requested = False

    async def probe(self) -> tuple[list[int], list[float]]:
        scored: tuple[list[int], list[float]] = await self.engine.probe()
        return scored

    def request_stop(self) -> None:
        """Let `train()` finish its current step, save, and return."""
        self._stop_requested = True

    async def train(self) -> str:
        """Train until the target, the explorer's end, or a request to stop. At the end, also after
        an error, saves the last finished step. Raises what a step raised."""
        try:
            while self.train_step_num < self.total_steps and not self._stop_requested:
                sampling = asyncio.ensure_future(self._sample_data())
                while not (sampling.done() or self._stop_requested):
                    if await self.need_sync():
                        await self.sync_weight()
                    await asyncio.wait([sampling], timeout=0.5)
                if not sampling.done():
                    sampling.cancel()
                    break
                try:
                    experiences, metrics, _ = await sampling
                except StopAsyncIteration:
                    break
                metrics.update(await self.train_step(experiences))
                if await self.need_sync() or self.train_step_num >= self.total_steps:
                    metrics.update(await self.sync_weight())
                # Before the checkpoint: a run resumed from it does not repeat the step.
                self.monitor.log(metrics, self.train_step_num)
                if self.need_save():
                    self.monitor.log(await self.save_checkpoint(), self.train_step_num)
        finally:
            await self.synchronizer.set_trainer_status.remote(RunningStatus.STOPPED)
            if self.train_step_num > 0:
                await self.save_checkpoint(block_until_saved=True)
        return self.config.trainer.name

    async def finish(self) -> int:
        """Export the trained model; returns the step that was reached."""
        if self.train_step_num > 0 and self.config.trainer.save_hf_checkpoint != "never":
            await self.save_checkpoint(block_until_saved=True, save_as_hf=True)
        return self.train_step_num


class VerlTrainer(PublishingTrainer):
    """Trinity's trainer on verl. Raises the error of a step, which upstream only logs before it
    ends as if it had succeeded. Applies for DPO `keep_pairs`, and without flash-attn
    `provide_unpadding` and for PPO `CriticWorker`."""

    def __init__(self, config: Config) -> None:
        if not removes_padding():  # without flash-attn
            provide_unpadding()
            if uses_critic(config):
                from trinity.trainer.verl import trainer as verl_trainer

                from aflow_tune.engines.trinity.training.critic_worker import CriticWorker

                verl_trainer.TrinityCriticWorker = CriticWorker
        super().__init__(config)
        self._error: Exception | None = None
        if config.algorithm.algorithm_type == "dpo" and config.trainer.trainer_type == "verl":
            keep_pairs(self.engine, config.buffer.train_batch_size)

    async def train_step(self, exps: list[Experience]) -> dict[str, float]:
        buffer = self.config.buffer.trainer_input.experience_buffer
        try:
            if self.config.trainer.trainer_type == "verl" and buffer.storage_type == BATCH_FILES:
                exps = evened(exps, self.engine._get_dp_size())
                self.engine.config.actor.ppo_mini_batch_size = len(exps)  # one update a file
            return await super().train_step(exps)
        except Exception as error:
            self._error = error
            raise

    async def train(self) -> str:
        """As upstream's, but raises what a step raised after the last checkpoint is saved."""
        name: str = await super().train()
        if self._error is not None:
            raise self._error
        return name

    async def probe(self) -> tuple[list[int], list[float]] | None:
        if not is_checked(self.config):
            return None
        model = self.config.model
        tokens = probe_tokens(self.engine.tokenizer, model.max_model_len)
        return tokens, verl_logprobs(self.engine, tokens, model.temperature)


def verl_logprobs(engine: Any, tokens: list[int], temperature: float) -> list[float]:
    """Log-probabilities of tokens 1..T-1 under the weights of Trinity's `VERLTrainer`."""
    from trinity.trainer.verl.monkey_patch import left_right_2_no_padding
    from trinity.trainer.verl.utils import to_data_proto
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import no_padding_2_padding

    # verl splits a batch evenly over its data-parallel workers: one copy each.
    copies = [
        Experience(eid=EID(task=str(i)), tokens=torch.tensor(tokens), prompt_length=1)
        for i in range(engine._get_dp_size())
    ]
    batch = to_data_proto(copies, engine.tokenizer.pad_token_id, engine.empty_model, engine.logger)
    data = left_right_2_no_padding(batch.to_tensordict())
    tensordict_utils.assign_non_tensor(
        data, calculate_entropy=False, compute_loss=False, temperature=temperature
    )
    output = engine.actor_rollout_wg.compute_log_prob(data)
    scores = no_padding_2_padding(tensordict_utils.get(output, "log_probs"), data)
    found: list[float] = scores[0, : len(tokens) - 1].float().tolist()
    return found


def provide_unpadding() -> None:
    """Let verl in this process remove padding, which Trinity always needs, by transformers' plain
    torch functions in the place of flash-attn's."""
    from transformers import modeling_flash_attention_utils as plain
    from verl.utils import attention_utils

    # In the order in which verl unpacks them; the third, einops' `rearrange`, is unused.
    functions: Any = (plain._index_first_axis, plain._pad_input, None, plain._unpad_input)
    attention_utils._get_attention_functions = lambda: functions


def evened(exps: list[Experience], workers: int) -> list[Experience]:
    """`exps`, and as many copies of the shortest as verl needs to split them evenly; a copy has
    nothing to learn, since its `action_mask` is empty."""
    shortest = min(exps, key=lambda exp: len(exp.tokens))
    copies = [copy.copy(shortest) for _ in range(-len(exps) % workers)]
    for one in copies:
        one.action_mask = torch.zeros_like(shortest.action_mask)
    return [*exps, *copies]


def keep_pairs(engine: Any, pairs: int) -> None:
    """Make Trinity's `VERLTrainer` train on whole pairs with `PairLoss`, `pairs` per step; call it
    before `engine.prepare()`. verl may split a batch within a pair."""
    algorithm = engine.algorithm_config
    algorithm.policy_loss_fn_args["pairs"] = pairs // engine._get_dp_size()
    engine.config.actor.ppo_mini_batch_size = 2 * pairs  # verl counts sequences
    update = engine._update_actor

    def update_pairs(batch: Any, metrics: dict[str, Any]) -> Any:
        batch.meta_info["force_group_size"] = 2
        return update(batch, metrics)

    engine._update_actor = update_pairs
