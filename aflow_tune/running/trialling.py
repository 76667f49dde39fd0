"""What a search and an ablation share: which model answers, what decides a score, when to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from aflow_tune.config.accounting import spend_of
from aflow_tune.engines.local.models import pick_device
from aflow_tune.engines.trinity.rollout.adapter import sampling_of
from aflow_tune.engines.trinity.rollout.trials import RayTrials, TrialRunner, TrialSettings
from aflow_tune.evaluation.evaluating import LocalModels
from aflow_tune.graph.workflow import GraphWorkflow
from aflow_tune.running.harvesting import AT_ONCE_ON_PROCESSOR, digest, source_of
from aflow_tune.search.pool import Trial
from aflow_tune.search.state import WorkflowState
from aflow_tune.trace import POLICY

if TYPE_CHECKING:
    from trinity.common.models.model import ModelWrapper

    from aflow_tune.config.load import AflowConfig

AT_ONCE_ELSEWHERE = 32
"""Rollouts at once where no model of this machine is asked."""
KEPT = "finished rollouts are kept"

T = TypeVar("T")


class Runner(Protocol):
    async def run(
        self, name: str, state: WorkflowState, problem: str, row: Mapping[str, Any]
    ) -> Trial: ...


class Trials:
    """Runs trials, not too many at once. `executor`: the auxiliary model or the role of `models`
    that answers as the graph's model; None: the model under `model`, untrained, unless the graphs
    ask roles only."""

    def __init__(
        self,
        config: AflowConfig,
        workflows: Mapping[str, GraphWorkflow],
        executor: str | None,
        *,
        on_ray: bool = False,
    ) -> None:
        self.config, self.workflows = config, workflows
        self.executor, self.on_ray = executor, on_ray
        auxiliary = [str(model.name) for model in config.explorer.auxiliary_models]
        asked = executor is None and any(map(asks_policy, workflows.values()))
        self.local = asked or executor in auxiliary
        """Whether a model of this machine answers."""

    @contextlib.asynccontextmanager
    async def started(
        self, models: LocalModels, phase: Callable[[str], None]
    ) -> AsyncIterator[None]:
        """Load the model, start the workers, for the block."""
        if self.local:
            phase("loading the executor")
        self._slots = asyncio.Semaphore(self._at_once())
        model = await self._model(models) if self.local and not self.on_ray else None
        settings = self._settings(model)
        self._runner: Runner
        if self.on_ray:
            runner = RayTrials(self.workflows, settings, self._auxiliary() if self.local else None)
            self._runner = runner
            try:
                phase(f"{await runner.start()} workers on Ray run the trials")
                yield
            finally:
                runner.close()
        else:
            self._runner = TrialRunner(self.workflows, settings, model)
            yield

    async def run(
        self, name: str, state: WorkflowState, problem: str, row: Mapping[str, Any]
    ) -> Trial:
        """As `TrialRunner.run`, once a slot is free."""
        async with self._slots:
            return await self._runner.run(name, state, problem, row)

    def fingerprint(self, name: str) -> str:
        """A hash of all that decides a score of the task set beside graph and problem."""
        config, workflow = self.config, self.workflows[name]
        roles = {*workflow.models.values(), str(self.executor)}
        model, inputs = config.explorer.rollout_model, config.buffer.explorer_input
        sizes = ("max_model_len", "max_prompt_tokens", "max_response_tokens", "enable_thinking")
        own = {"benchmark": workflow.benchmark, "problem": workflow.problem}
        as_policy = self.local and self.executor is None
        sampled = as_policy or (self.local and bool(self._auxiliary().temperature))
        return digest(
            {
                "graph": {**asdict(config.graph), "path": None, "prompts": None, **own},
                "executor": self.executor,
                "models": {
                    role: asdict(config.models[role]) for role in sorted(roles & {*config.models})
                },
                "policy": [
                    config.model.model_path,
                    model.chat_template,
                    [getattr(model, size) for size in sizes],
                    asdict(inputs.eval_tasksets[0].rollout_args),
                    *([config.local.load_in] if config.local.load_in else []),
                ]
                if as_policy
                else None,
                "auxiliary": [
                    [one.name, one.model_path, one.chat_template, one.temperature, one.top_p]
                    + [getattr(one, size) for size in sizes]
                    for one in config.explorer.auxiliary_models
                    if one.name in roles
                ],
                "dtype": config.local.dtype if self.local else None,
                "code": [source_of(item) for item in workflow.carries],
                "rewards": asdict(config.rewards),
                "prompts": config.prompts,
                "sandbox": config.sandbox,
                "seed": config.seed if sampled else None,
                "deterministic": config.deterministic,
            }
        )

    async def _model(self, models: LocalModels) -> ModelWrapper:
        if self.executor is None:
            return await models.take(self.config, None)
        for settings in self.config.explorer.auxiliary_models:
            settings.enable_history = True  # what a recorder reads; else only the policy has one
        wrappers = await models.auxiliary(self.config)
        return next(one for one in wrappers if one.config.name == self.executor)

    def _auxiliary(self) -> Any:
        models = self.config.explorer.auxiliary_models
        return next(model for model in models if model.name == self.executor)

    def _settings(self, model: ModelWrapper | None) -> TrialSettings:
        config, sampling = self.config, None
        if model is not None and self.executor is None:
            rollout = config.buffer.explorer_input.eval_tasksets[0].rollout_args
            sampling = sampling_of(rollout, model)
        role = None if self.local else self.executor
        return TrialSettings(config, spend_of(config), role, sampling)

    def _at_once(self) -> int:
        if not self.local:
            return AT_ONCE_ELSEWHERE
        on_gpu = pick_device(self.config.local.device).type == "cuda"
        most = self.config.local.max_batch
        return most if on_gpu else min(most, AT_ONCE_ON_PROCESSOR)


def asks_policy(workflow: GraphWorkflow) -> bool:
    """Whether the graph asks its own model anything, and not only the roles of `graph.models`."""
    roles, shape = workflow.models, workflow.graph.shape
    of_operators = {
        roles.get(instance, roles.get(operator, POLICY))
        for instance, operator in shape.instances.items()
    }
    direct = any(node.operator is None for node in workflow.graph.flow.nodes)
    return direct or POLICY in of_operators or not workflow.clients
