"""Trinity's scheduler and runners with our adapter, as in the local engine, but instrumented.

Real: `SharedScheduler` (Trinity's scheduler over slots of one runner actor), Trinity's workflow
runner in that actor, our adapter, AgentScope's chat model, the OpenAI client, Ray. A stand-in: the
rollout model, whose actor only knows the address of a scripted server.

The scheduler records when each task is finished, and checks that all its calls were made: the
adapter returns a failed rollout as data, which would count as a fast one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
import thread_sampler
from ray import cloudpickle
from thread_sampler import ThreadSampler

from aflow_tune.engines.trinity.rollout import explorer as room
from aflow_tune.engines.trinity.rollout.adapter import WorkflowAdapter

# isort: split
# After the lines above, which install the stand-in for vLLM that Trinity needs.
from trinity.common.config import Config, GenerationConfig
from trinity.common.models.allocator import Allocator
from trinity.common.workflows.workflow import Task

NAMESPACE = "runner-scaling"
MESSAGES = [
    {"role": "system", "content": "You solve small problems. " * 8},
    {"role": "user", "content": "What is 3 + 4? Think, then answer in one tag."},
]

# By value, as workers may not be able to import from this folder.
cloudpickle.register_pickle_by_value(thread_sampler)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class ScriptedEngine:
    """The methods of a rollout model's actor that scheduler and runners call; async, as ours."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get_model_version(self) -> int:
        """Always 0: there are no weights."""
        return 0

    async def get_api_server_url(self) -> str:
        """The address of the scripted server."""
        return self._url

    async def get_api_key(self) -> str:
        """Any key: the server accepts all."""
        return "EMPTY"

    async def process_id(self) -> int:
        """To measure its processor time."""
        return os.getpid()


class MeasuredRunner(room.LocalRunner):
    """The local engine's runner, with a profiler."""

    _sampler: ThreadSampler

    async def process_id(self) -> int:
        """To measure its processor time."""
        return os.getpid()

    async def start_sampling(self) -> None:
        """Start to profile the threads of this process."""
        self._sampler = ThreadSampler()
        self._sampler.start()

    async def stop_sampling(self) -> dict[str, Any]:
        """The profile; see `ThreadSampler.stop`."""
        return self._sampler.stop()


class MeasuredScheduler(room.SharedScheduler):
    """The local engine's scheduler, which records when tasks finish.

    Args:
        config: from `config_of`.
        calls: model calls of a rollout, to check that all were made.
    """

    kind = MeasuredRunner

    def __init__(self, config: Config, calls: int) -> None:
        super().__init__(config)
        self._calls = calls
        self.finished: list[float] = []
        """`time.perf_counter()` of each finished task, in order."""
        self.fault = ""
        """The first error; empty if there is none."""

    @property
    def actor(self) -> Any:
        """The runner actor that all slots share."""
        return self.process

    def _emit_task_result(self, task: Any) -> None:
        self.finished.append(time.perf_counter())
        made = sum(metrics.get("calls", 0.0) for metrics in task.metrics)
        expected = self._calls * task.total_runs
        if not self.fault and made != expected:
            self.fault = f"{made:g} of {expected} calls: {task.first_error or task.metrics}"
        super()._emit_task_result(task)


def start_engine(url: str) -> Any:
    """The stand-in for the rollout model, under the name that runners look for."""
    name = Allocator(config_of(1).explorer).get_actor_name("rollout", 0, 0)
    options = {"name": name, "namespace": NAMESPACE, "num_cpus": 0}
    return (
        ray.remote(ScriptedEngine)
        .options(**options, max_concurrency=room.MAX_CONCURRENCY)
        .remote(url)
    )


def config_of(runners: int) -> Config:
    """Trinity's configuration with the settings that scheduler and runners read, as the local
    engine sets them."""
    config = Config(ray_namespace=NAMESPACE)
    config.explorer.runner_per_model = runners
    config.explorer.concurrent_mode = "asynchronous"
    model = config.explorer.rollout_model
    model.model_path = "scripted"
    model.ray_namespace = NAMESPACE
    model.enable_openai_api = model.enable_history = True
    model.temperature = model.top_p = 1.0
    model.max_response_tokens = 64
    return config


def make_tasks(count: int, group: int, calls: int) -> list[Task]:
    """Tasks of `group` rollouts each; a rollout calls the model `calls` times in turn."""
    sampling = GenerationConfig(temperature=1.0, top_p=1.0, max_tokens=64, logprobs=0)
    workflow = asks_in_turn(calls)
    return [
        Task(
            workflow=WorkflowAdapter,
            repeat_times=group,
            raw_task={"question": "3 + 4", "answer": "7"},
            rollout_args=sampling,
            workflow_args={"workflow_func": workflow, "run_timeout": 300.0, "seed": 0},
        )
        for _ in range(count)
    ]


def asks_in_turn(calls: int) -> Callable[..., Any]:
    """A workflow; it is pickled by value, as a user's function is."""
    messages = MESSAGES

    async def workflow(task: dict[str, Any], model: Any) -> float:
        for _ in range(calls):
            await model(messages)
        return 1.0

    return workflow
