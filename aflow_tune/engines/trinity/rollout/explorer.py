"""Trinity's Explorer for both engines, with the sync check.

`CheckedExplorer` verifies after every sync that its samplers have the trainer's weights
(`training/sync_check.py`). On the local engine one asynchronous process serves all slots of the
scheduler. On both engines an error ends the run instead of only being logged, an evaluation uses
the weights of its step, the final weights are evaluated, too, and the data position is saved with
each step, so that a run can resume from any checkpoint.
"""

from __future__ import annotations

import asyncio
import gc
import os
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from trinity.buffer.operators.experience_operator import ensure_v1_operator
from trinity.common.config import Config, InferenceModelConfig
from trinity.common.constants import RunningStatus
from trinity.common.models.allocator import Allocator, BundleResult
from trinity.common.models.model import ModelWrapper
from trinity.explorer.explorer import Explorer
from trinity.explorer.rollout_coordinator import RolloutCoordinator
from trinity.explorer.scheduler import RunnerWrapper, Scheduler, TaskWrapper
from trinity.explorer.workflow_runner import Status, WorkflowRunner

from aflow_tune.config.accounting import stop_at_limit
from aflow_tune.config.engine import computes_in_16_bits, sampling_speed
from aflow_tune.config.tasksets import quick_tasksets
from aflow_tune.engines.trinity.rollout.operators import StepStamp
from aflow_tune.engines.trinity.rollout.recording import load_agentscope
from aflow_tune.engines.trinity.rollout.rollout_model import LocalRolloutModel
from aflow_tune.engines.trinity.training.run_state import (
    forget_evaluation,
    is_evaluated,
    save_taskset_state,
)
from aflow_tune.engines.trinity.training.sync_check import SyncCheck, is_checked, published
from aflow_tune.errors import BudgetReached, RunFailed
from aflow_tune.report.quantities import MISMATCH

MAX_CONCURRENCY = 1000  # calls that one asynchronous actor serves at once (Ray's own default)
SILENT_SECONDS = 60.0  # a runner process that does not respond for this long counts as dead
ONE_GPU_MODE = "colocate"
CPUS = 5
"""CPUs of `colocate`: three that verl reserves with a GPU, one for the sampler, one for others."""
_LAST_SECONDS, _FREE_SECONDS, _POLL_SECONDS = 30.0, 60.0, 0.5


class CheckedExplorer(Explorer):
    def __init__(self, config: Config, sixteen_bit: bool) -> None:
        super().__init__(config)
        self.model_version: int = -1
        engines = config.explorer.rollout_model.engine_num
        self._checks = [SyncCheck(sixteen_bit) for _ in range(engines)]
        self._checked = -1
        self._failure: Exception | None = None

    async def explore_step(self) -> bool:
        if self._failure is not None:  # a fully asynchronous run's watcher task only logs it
            raise self._failure
        return bool(await super().explore_step())

    async def _pull_latest_weights(self) -> None:
        await super()._pull_latest_weights()
        await self._check_sync()

    async def _nccl_weights_update(self) -> None:
        await super()._nccl_weights_update()
        await self._check_sync()

    async def _check_sync(self) -> None:
        """Compare samplers and trainer on the version that was just synced, once. Raises RunFailed
        as `SyncCheck.compare`, or if the trainer or a sampler does not respond."""
        version, config = self.model_version, self.config
        if version <= self._checked or not is_checked(config):
            return
        self._checked = version
        timeout = float(config.synchronizer.sync_timeout)
        try:
            asked = config.ray_namespace, version, timeout
            tokens, trainer = await asyncio.to_thread(published, *asked)
            actors: list[Any] = [wrapper.model for wrapper in self.models]
            heat = config.model.temperature
            scores = await asyncio.gather(
                *(it.served_logprobs.remote(tokens, heat) for it in actors)
            )
            pairs = zip(self._checks, scores, strict=True)
            mismatch = max(check.compare(version, score, trainer) for check, score in pairs)
        except Exception as error:
            self._failure = error
            raise
        if self.monitor is not None:
            self.monitor.log({MISMATCH: mismatch}, step=version)


class LocalAllocator(Allocator):
    async def create_engine(
        self, config: InferenceModelConfig, role: str, engine_id: int
    ) -> ModelWrapper:
        name = self.get_actor_name(role, engine_id, 0)
        engine_config = replace(deepcopy(config), engine_id=engine_id, ray_actor_name=name)
        bundle = self.bundle_result.actor_bundle_map[name]
        place = PlacementGroupSchedulingStrategy(self.pg, placement_group_bundle_index=bundle)
        options = _options(config, name=name, scheduling_strategy=place)
        actor = ray.remote(LocalRolloutModel).options(**options).remote(config=engine_config)
        await actor.prepare.remote()
        engine_config.api_key = await actor.get_api_key.remote()
        url = await actor.get_api_server_url.remote()
        wrapper = ModelWrapper(models=[actor], config=engine_config, api_address=url)
        await wrapper.prepare()
        return wrapper


def _options(config: Any, **more: Any) -> dict[str, Any]:
    return {"namespace": config.ray_namespace, "max_concurrency": MAX_CONCURRENCY, **more}


class LocalRunner(WorkflowRunner):
    """Trinity's runner, which also gets the API keys of the models' servers. The models may start
    after it: it looks for them in `prepare`."""

    def __init__(self, *settings: Any) -> None:
        self._settings = settings

    async def prepare(self) -> None:
        super().__init__(*self._settings)
        load_agentscope()
        # Fewer collections, and none of imported modules: garbage collection stops the rollouts.
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000)
        for wrapper in (self.model_wrapper, *self.auxiliary_model_wrappers):
            wrapper._api_key = await wrapper.model.get_api_key.remote()
        await super().prepare()


class SharedRunner(RunnerWrapper):
    """A scheduler slot; all slots share one process."""

    runner: Any

    def __init__(self, *args: Any, scheduler: SharedScheduler, **kwargs: Any) -> None:
        self._scheduler = scheduler
        super().__init__(*args, **kwargs)

    def _create_runner(self) -> Any:
        return self._scheduler.process

    async def run_with_retry(
        self, task: TaskWrapper, repeat_times: int, *args: Any, **kwargs: Any
    ) -> tuple[Status, bytes, int, float]:
        """Upstream's, but a task whose process died runs again in a new one, with the same seeds,
        at most `retry_times`. The metric `process_died:sum` counts that."""
        died = 0
        while True:
            try:
                if died:
                    await self._scheduler.replace_process(self.runner)
                self.runner = self._scheduler.process
                result = await super().run_with_retry(task, repeat_times, *args, **kwargs)
                if result[0].ok or await _lives(self.runner):
                    break
            except RayError as error:
                status = Status(0, repeat_times, metrics=[], message=str(error))
                result = status, b"", self.runner_id, 0.0
            died += 1
            told = f"the process that runs workflows died (batch {task.batch_id}, {died} in a row)"
            if died > self.retry_times:
                self._scheduler.given_up = (
                    f"{told}: killed, out of memory, or ended by what a workflow calls (os._exit, "
                    "a crash in C code); the run's log folder has what it printed"
                )
                break
            self.logger.warning(f"{told}; task {task.task.task_id} runs again in a new one")
        if died:
            result[0].metrics.append({"process_died:sum": float(died)})
        return result

    async def restart_runner(self) -> None:
        """Replace the process only if dead: it is shared. Upstream kills it with a failed task."""
        if not await _lives(self.runner):
            await self._scheduler.replace_process(self.runner)


async def _lives(actor: Any) -> bool:
    try:
        await asyncio.wait_for(actor.__ray_ready__.remote(), SILENT_SECONDS)
    except (RayActorError, TimeoutError):
        return False
    return True


class SharedScheduler(Scheduler):
    """Runs all workflows in one process. If it dies, the first slot that notices starts a new one.
    `given_up`: why no more are started."""

    kind: type[LocalRunner] = LocalRunner

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.process: Any = None
        self.given_up = ""
        self._turn = asyncio.Lock()
        self._next: Any = self._new_process()  # it imports while the models start

    def _new_process(self) -> Any:
        auxiliary = [0] * len(self.config.explorer.auxiliary_models)
        options = _options(self.config, num_cpus=0)
        return ray.remote(self.kind).options(**options).remote(self.config, 0, auxiliary, 0)

    async def replace_process(self, old: Any) -> None:
        """Replace the process `old` (None: start the first), unless another slot already has."""
        async with self._turn:
            if self.process is not old:
                return
            actor, self._next = self._next or self._new_process(), None
            await actor.prepare.remote()
            self.process = actor
        if old is not None:
            ray.kill(old)

    async def _create_runner(self, runner_id: int) -> None:
        await self.replace_process(None)
        self.runners[runner_id] = SharedRunner(runner_id, 0, [], self.config, scheduler=self)
        self.idle_runners.add(runner_id)

    async def drain_batch_payload_results(
        self, batch_id: int | str
    ) -> tuple[list[Status], list[bytes]]:
        if self.given_up:
            raise RunFailed(self.given_up)
        return await super().drain_batch_payload_results(batch_id)


class LocalCoordinator(RolloutCoordinator):
    experience_pipeline: Any

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scheduler = SharedScheduler(config)

    async def prepare(self) -> None:
        await super().prepare()
        await self._require_scheduler().start()

    async def _init_experience_pipeline(self) -> None:
        await super()._init_experience_pipeline()
        # After the advantages, which the pipeline adds itself.
        self.experience_pipeline.operators.append(ensure_v1_operator(StepStamp()))

    async def close_pipeline(self) -> None:
        """Close the experience buffer: readers stop when it is empty."""
        await self.experience_pipeline.close()
        self.experience_pipeline = None

    @classmethod
    def get_actor(cls, config: Config) -> Any:
        return ray.remote(cls).options(namespace=config.ray_namespace).remote(config)


class LocalExplorer(CheckedExplorer):
    """See the module's docstring for what differs."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, computes_in_16_bits(config))
        self.run_dir = Path(config.checkpoint_job_dir)
        self.model_allocator = LocalAllocator(config.explorer)
        self._stop_requested = False
        self._last_evaluated = -1
        self.explore_start_time: float | None = None
        self.monitor: Any

    def request_stop(self) -> None:
        """Let `explore()` finish its current step and return."""
        self._stop_requested = True

    async def prepare(self) -> None:
        """Start models and runners, beside each other. Unlike upstream, does not evaluate:
        `explore()` does."""
        self.rollout_coordinator = LocalCoordinator.get_actor(self.config)
        self.models, self.auxiliary_models = await self.model_allocator.create_all_models()
        await self.rollout_coordinator.prepare.remote()
        await self.synchronizer.set_explorer_status.remote(RunningStatus.RUNNING)

    async def explore(self) -> str:
        """Roll out, wait for the trainer's weights, evaluate, until the tasks are used up or
        `request_stop`. Raises what a step raised."""
        spent: BudgetReached | None = None
        try:
            step, startup = self.explore_step_num, self.config.explorer.eval_on_startup
            tasksets = [it.name for it in self.config.buffer.explorer_input.eval_tasksets]
            due = self.need_eval() if step else startup
            # A resumed run may have been killed while it evaluated the checkpoint's weights.
            if due and not is_evaluated(self.run_dir, step, tasksets):
                await self._evaluate()
            while not self._stop_requested and await self.explore_step():
                if await self.need_sync():
                    await self.sync_weight()
                if self.need_eval():
                    await self.finish_current_steps()
                    await self._evaluate()
            await self.finish_current_steps()
        except BudgetReached as error:
            spent = error
        await self.synchronizer.set_explorer_status.remote(
            RunningStatus.STOPPED, old_status=RunningStatus.RUNNING
        )
        # Closing the experience buffer tells the trainer that nothing more will come.
        await self.rollout_coordinator.close_pipeline.remote()
        if spent is not None:
            raise spent
        return self.config.explorer.name

    async def evaluate_last(self, version: int) -> None:
        """Sync to the trainer's last step and evaluate, unless that was done."""
        if self._last_evaluated >= version:
            return
        if self.model_version < version:
            method = self.sync_method
            sync = [it.sync_model_weights(version, method, timeout=600) for it in self.models]
            await asyncio.gather(*sync)
            self.model_version = version
            await self._check_sync()
        self.explore_step_num = version
        await self._evaluate()

    async def explore_step(self) -> bool:
        """Submit one batch of tasks; False when the task set is used up."""
        try:
            tasks = await self.taskset.read()
        except StopAsyncIteration:
            return False
        self.explore_step_num += 1
        save_taskset_state(self.run_dir, self.explore_step_num, self.taskset.state_dict())
        self.explore_start_time = self.explore_start_time or time.time()
        submit, step = self.rollout_coordinator.submit_batch.remote, self.explore_step_num
        await submit(batch_id=step, tasks=tasks, batch_type="train", min_wait_num=self.min_wait_num)
        return True

    async def _finish_explore_step(self, step: int) -> None:
        model: Any = self.models[0].model
        before = await model.sampler_stats.remote()
        await super()._finish_explore_step(step)
        speed = sampling_speed(before, await model.sampler_stats.remote())
        if self.monitor is not None and speed:
            self.monitor.log(speed, step=step)

    async def _finish_eval_step(self, step: int | None = None, prefix: str = "eval") -> None:
        """As upstream's, but raises BudgetReached, and logs nothing, if the budget ran out."""
        monitor: Any = self.monitor

        def log(metrics: dict[str, Any], step: int) -> None:
            stop_at_limit(self.config)
            monitor.log(metrics, step)

        self.monitor = SimpleNamespace(log=log)
        try:
            await super()._finish_eval_step(step, prefix)
        finally:
            self.monitor = monitor

    async def _evaluate(self) -> None:
        """Evaluate the current weights on the held-out task sets and wait for the result."""
        step, inputs = self.explore_step_num, self.config.buffer.explorer_input
        whole = inputs.eval_tasksets
        for taskset in whole:
            forget_evaluation(taskset, step)
        inputs.eval_tasksets = quick_tasksets(self.config, step)
        try:
            await self.eval()
        finally:
            inputs.eval_tasksets = whole
        await self._finish_eval_step(step=step)
        self._last_evaluated = step


class VllmExplorer(CheckedExplorer):
    """Trinity's explorer over `VllmSampler`s."""

    def __init__(self, config: Config) -> None:
        from trinity.common.models import vllm_model

        from aflow_tune.engines.trinity.rollout.vllm_sampler import VllmSampler

        # Trinity's allocator looks up the class of its actors in that module, in this process.
        vllm_model.vLLMRolloutModel = VllmSampler
        super().__init__(config, _computes_in_16_bits(config))

    async def explore(self) -> str:
        """Roll out, sync, evaluate, until the tasks are used up. Raises what a step raised."""
        while await self.explore_step():
            if await self.need_sync():
                await self.sync_weight()
            if self.need_eval():
                await self.finish_current_steps()
                await self.eval()
                await self._finish_eval_step(step=self.explore_step_num)
        return str(self.config.explorer.name)

    async def explore_step(self) -> bool:
        went_on = await super().explore_step()
        if went_on:
            state, folder = self.taskset.state_dict(), Path(self.config.checkpoint_job_dir)
            save_taskset_state(folder, self.explore_step_num, state)
        return went_on

    async def _pull_latest_weights(self) -> None:
        """As upstream's, but also waits for the final weights: the trainer reports that it stopped,
        which ends upstream's wait, shortly before it publishes its last checkpoint."""
        before, deadline = self.model_version, time.monotonic() + _LAST_SECONDS
        await super()._pull_latest_weights()
        while self._is_last() and self.model_version == before and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
            if await self.synchronizer.get_latest_model_version.remote() > before:
                await super()._pull_latest_weights()

    def need_eval(self) -> bool:
        return self._is_last() or super().need_eval()

    def _is_last(self) -> bool:
        return bool(self.explore_step_num == self.config.trainer.total_steps)


def _computes_in_16_bits(config: Config) -> bool:
    """Whether sampler or trainer computes in 16 bits. verl's autocast does by default, and verl
    always sends full weights in bf16."""
    if config.explorer.rollout_model.dtype != "float32" or config.model.lora_configs is None:
        return True
    settings: Any = config.trainer.trainer_config or {}
    settings = settings.get("actor_rollout_ref") or settings
    for name in ("actor", "fsdp_config", "mixed_precision"):
        settings = settings.get(name) or {}
    return settings.get("param_dtype", "bf16") not in ("fp32", "float32")


class OneGpuAllocator(Allocator):
    """For a sampler on the trainer's GPU (`mode: colocate`; Trinity's own waits forever, its issue
    602): reserves a CPU of that node and no GPU; `share_the_gpu` names the sampler's GPU."""

    def allocate_bundles(self) -> BundleResult:
        result = super().allocate_bundles()
        node = next(it for it in ray.nodes() if it["Alive"] and it["Resources"].get("GPU"))
        for bundle in result.bundles:
            bundle.pop("GPU")
            # Every node has 1 unit of a resource named after it: this only pins the placement.
            bundle[f"node:{node['NodeManagerAddress']}"] = 0.001
        return result

    async def create_engine(
        self, config: InferenceModelConfig, role: str, engine_id: int
    ) -> ModelWrapper:
        return await super().create_engine(replace(config, gpu_per_engine=0), role, engine_id)


class OneGpuExplorer(VllmExplorer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.model_allocator = OneGpuAllocator(config.explorer)


def share_the_gpu(config: Config) -> None:
    """Set the sampler's GPU to the one that the trainer will get. Ray must be connected. Raises
    RunFailed: the cluster has too few CPUs, not exactly one GPU, or the GPU is in use."""
    resources = ray.cluster_resources()
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    if gpus != 1 or cpus < CPUS:
        raise RunFailed(
            f"`mode: colocate` needs a Ray cluster with one GPU and {CPUS} processors, not "
            f"{gpus:g} and {cpus:g}. Use `mode: both` on two GPUs, let the run see one "
            "(`physical_gpus: [0]`), or name in cluster.ray_address what this starts: "
            f"`CUDA_VISIBLE_DEVICES=0 ray start --head --num-gpus=1 --num-cpus={CPUS}`"
        )
    on_gpu = ray.remote(num_gpus=1, num_cpus=0, max_retries=0)
    reference = on_gpu(lambda: os.environ.get("CUDA_VISIBLE_DEVICES", "")).remote()
    if not ray.wait([reference], timeout=_FREE_SECONDS)[0]:
        ray.cancel(reference, force=True)
        held = f"the GPU of the Ray cluster is in use after {_FREE_SECONDS:.0f} s"
        raise RunFailed(f"{held}: another run holds it (see `ray status`)")
    config.explorer.rollout_model.cuda_visible_devices = ray.get(reference)
    deadline = time.monotonic() + _FREE_SECONDS
    # verl checks available resources once and fails if the GPU is not released yet.
    while ray.available_resources().get("GPU", 0) < 1 and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
