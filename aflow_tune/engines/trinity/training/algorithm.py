"""Trinity's algorithms on the local trainer.

A Trinity algorithm is a choice of registered functions: policy, KL and entropy loss, advantage,
perhaps a KL penalty in the reward. `TrainStep` turns experiences into samples, computes the inputs
of these functions, and passes the trainer one loss over the whole batch. With a critic (PPO), the
advantages are of whole runs (`ppo.py`), and the trainer's value head is fitted to their returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN
from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import DummyEntropyLossFn
from trinity.algorithm.kl_fn.kl_fn import DummyKLFn
from trinity.common.config import AlgorithmConfig, Config
from trinity.common.experience import Experience, split_dpo_experience_to_single_turn

from aflow_tune.config.critic import policy_passes
from aflow_tune.engines.local.critic import explained_variance
from aflow_tune.engines.local.trainer import LocalTrainer, LossBatch, Sample
from aflow_tune.engines.trinity.training.ppo import Trajectories, share_rewards
from aflow_tune.errors import BadInput

PER_TOKEN = ("advantages", "returns", "teacher_logprobs", "token_level_reward")
"""Experience fields, [R] each, that a registered function may read."""


def _made(registry: Any, name: str, arguments: dict[str, Any] | None) -> Any:
    return registry.get(name)(**(arguments or {}))


def _counts(kl: Any) -> bool:
    return not isinstance(kl, DummyKLFn) and kl.kl_coef != 0


class TrinityLoss:
    """policy loss - entropy loss + KL loss, as Trinity's own trainers combine them."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self.name = algorithm.policy_loss_fn
        given = {"backend": "tinker", **(algorithm.policy_loss_fn_args or {})}
        self.policy = _made(POLICY_LOSS_FN, algorithm.policy_loss_fn, given)
        self.kl = _made(KL_FN, algorithm.kl_loss_fn, algorithm.kl_loss_fn_args)
        self.entropy = _made(
            ENTROPY_LOSS_FN, algorithm.entropy_loss_fn, algorithm.entropy_loss_fn_args
        )
        self.mode = algorithm.loss_agg_mode or "token-mean"
        self.uses_kl = _counts(self.kl)
        self.needs_reference = self.uses_kl or "ref_logprob" in self.policy.select_keys
        self.needs_entropy = (
            not isinstance(self.entropy, DummyEntropyLossFn)
            and getattr(self.entropy, "entropy_coef", 1.0) != 0
        )

    def __call__(self, batch: LossBatch) -> tuple[Tensor, dict[str, float]]:
        """The loss and its metrics. Raises BadInput: the experiences lack an input of the loss."""
        inputs = {"action_mask": batch.action_mask_BR, **batch.extra}
        if batch.old_logprobs_BR is not None:
            inputs["old_logprob"] = batch.old_logprobs_BR
        missing = [key for key in self.policy.select_keys if key not in inputs]
        if missing:
            title, where = "The experiences do not fit the algorithm", "algorithm.policy_loss_fn"
            expected, fix = f"experiences with {', '.join(missing)}", "choose another algorithm"
            raise BadInput.of(title, f"{where}: {self.name}", expected, "some without", fix)
        if "expert_mask" in self.policy.select_keys:
            # The mix losses scale their two means by micro-batches and GPUs; this makes that 1.
            experts = int(inputs["expert_mask"].sum())
            self.policy.use_dynamic_bsz = False
            self.policy.gradient_accumulation = 1
            self.policy.train_batch_size_expert = max(1, experts)
            self.policy.train_batch_size_usual = max(1, len(inputs["expert_mask"]) - experts)
        value, found = self.policy(logprob=batch.logprobs_BR, **inputs)
        metrics = dict(found)
        if self.needs_entropy:
            bonus, found = self.entropy(entropy=batch.entropy_BR, **inputs, loss_agg_mode=self.mode)
            value = value - bonus
            metrics |= found
        if self.uses_kl:
            penalty, found = self.kl.calculate_kl_loss(
                logprob=batch.logprobs_BR,
                ref_logprob=inputs["ref_logprob"],
                response_mask=batch.action_mask_BR,
                loss_agg_mode=self.mode,
                old_logprob=inputs.get("old_logprob"),
            )
            value = value + penalty
            metrics |= found
        return value, {f"actor/{name}": float(number) for name, number in metrics.items()}


class TrainStep:
    """One train step of a Trinity algorithm: experiences in, metrics out. Raises BadInput: when
    called, as `TrinityLoss`."""

    def __init__(self, config: Config, trainer: LocalTrainer) -> None:
        self.algorithm = algorithm = config.algorithm
        kind = ALGORITHM_TYPE.get(algorithm.algorithm_type)
        self.trainer = trainer
        self.uses_critic: bool = kind.use_critic
        self.warmup = config.trainer.critic_warmup if kind.use_critic else 0
        self.passes = policy_passes(config)
        self.loss = TrinityLoss(algorithm)
        self.advantage = self.penalty = None
        self.needs_reference = self.loss.needs_reference
        if kind.compute_advantage_in_trainer:
            arguments = algorithm.advantage_fn_args
            self.advantage = _made(ADVANTAGE_FN, algorithm.advantage_fn, arguments)
            self.penalty = _made(KL_FN, algorithm.kl_penalty_fn, algorithm.kl_penalty_fn_args)
            self.needs_reference |= _counts(self.penalty)
        if self.needs_reference:
            trainer.keep_reference()

    def __call__(self, exps: list[Experience]) -> dict[str, float]:
        """Make one step on all of `exps`; returns the metrics."""
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        of_explorer = hasattr(self.advantage, "process")
        if self.advantage is not None and of_explorer:
            # A group advantage with `process` takes experiences, not a DataProto.
            exps, found = self.advantage.process(exps)
            metrics |= {f"advantage/{k}": float(v) for k, v in found.items()}
        groups = _grouped(exps)
        flat = [exp for group in groups for exp in group]
        by_group = [[to_sample(exp) for exp in group] for group in groups]
        samples = [sample for group in by_group for sample in group]
        if self.algorithm.algorithm_type == "dpo":
            for number, pair in enumerate(by_group):
                for sample in pair:
                    sample.run = number  # a micro-batch never splits a run
        if not self.algorithm.bypass_old_logprobs:
            for sample, old_R in zip(samples, self.trainer.logprobs(samples), strict=True):
                sample.logprobs_R = old_R
        if self.needs_reference:
            since = time.perf_counter()
            reference = self.trainer.logprobs(samples, reference=True)
            for sample, ref_R in zip(samples, reference, strict=True):
                sample.extra["ref_logprob"] = ref_R
            metrics["time/reference"] = time.perf_counter() - since
        beside = None
        if self.uses_critic:
            found, beside = self._values(flat, samples)
            metrics |= found
        elif self.advantage is not None and not of_explorer:
            metrics |= self._advantages(flat, samples)
        metrics |= _data_metrics(flat, samples)
        passes = self.passes if self.trainer.step_count >= self.warmup else 0
        metrics |= self.trainer.step(by_group, self.loss, passes=passes, beside=beside)
        metrics["time/step"] = metrics["perf/time_per_step"] = time.perf_counter() - started
        return metrics

    def _values(
        self, exps: list[Experience], samples: list[Sample]
    ) -> tuple[dict[str, float], Callable[[], dict[str, float]]]:
        """Set `values`, `advantages` and `returns` of `samples` by the value head as it is; returns
        the metrics, and the head's update on them."""
        head = self.trainer.critic
        assert head is not None
        since = time.perf_counter()
        parts = self.trainer.hidden(samples)
        hidden_MH = torch.cat(parts)
        with torch.no_grad():
            values_M = head(hidden_MH)
        columns = [sample.scored_columns() for sample in samples]
        for sample, at, found in zip(
            samples, columns, values_M.cpu().split([len(part) for part in parts]), strict=True
        ):
            sample.extra["values"] = torch.zeros(len(sample.action_mask_R))
            sample.extra["values"][at] = found
        del parts
        metrics = {"time/values": time.perf_counter() - since}
        metrics |= self._advantages(exps, samples)
        steps = [sample.extra["returns"][at] for sample, at in zip(samples, columns, strict=True)]
        returns_M = torch.cat(steps).to(values_M.device)
        explained = explained_variance(values_M, returns_M)
        if explained is not None:
            metrics["critic/vf_explained_var"] = explained
        return metrics, lambda: head.fit(hidden_MH, returns_M, values_M)

    def _advantages(self, exps: list[Experience], samples: list[Sample]) -> dict[str, float]:
        """Advantages that Trinity computes in the trainer, on verl's DataProto with the response
        columns only, or with a critic the steps of runs. Sets `advantages` and `returns` of
        `samples`; returns the metrics."""
        from verl import DataProto

        advantage: Any = self.advantage
        penalty: Any = self.penalty
        runs = [exp.eid.rid if _has_task(exp) else ("row", row) for row, exp in enumerate(exps)]
        if self.uses_critic:
            share_rewards(exps, runs, samples)
        batch = self.trainer.pad(samples)
        valid_BR = torch.zeros_like(batch.action_mask_BR)
        for row, sample in zip(valid_BR, samples, strict=True):
            row[: len(sample.action_mask_R)] = True
        tensors = {
            "responses": torch.zeros_like(valid_BR, dtype=torch.long),
            "attention_mask": valid_BR.long(),
            "response_mask": batch.action_mask_BR,
            "token_level_scores": batch.extra["token_level_scores"],
        }
        renamed = {"ref_logprob": "ref_log_prob", "teacher_logprobs": "teacher_logprobs"}
        tensors |= {new: batch.extra[old] for old, new in renamed.items() if old in batch.extra}
        if batch.old_logprobs_BR is not None:
            tensors["old_log_probs"] = batch.old_logprobs_BR
        tasks = [exp.eid.tid for exp in exps]
        joined = Trajectories(runs, batch.action_mask_BR) if self.uses_critic else None
        if joined is not None:
            scores_PS = joined.credit(tensors["token_level_scores"])
            tensors = {name: joined.join(columns) for name, columns in tensors.items()}
            tensors |= {"token_level_scores": scores_PS, "response_mask": joined.mask_PS}
            tensors["values"] = joined.join(batch.extra["values"])
            tasks = [tasks[row] for row in joined.first]
        proto = DataProto.from_single_dict(
            {name: tensor.cpu() for name, tensor in tensors.items()}
            | {"uid": np.array(tasks, dtype=object)}
        )
        proto, penalty_metrics = penalty.apply_kl_penalty_to_reward(proto)
        proto, advantage_metrics = advantage(proto)
        for name in ("advantages", "returns"):
            columns_BR = proto.batch[name]
            if joined is not None:
                columns_BR = joined.split(columns_BR.to(joined.mask_PS.device)).cpu()
            for row, sample in enumerate(samples):
                sample.extra[name] = columns_BR[row, : len(sample.action_mask_R)].clone()
        found = penalty_metrics | advantage_metrics
        return {f"advantage/{name}": float(number) for name, number in found.items()}


def to_sample(exp: Experience) -> Sample:
    """The trainer's sample; `token_level_scores`: own, or the reward on the last response token."""
    width = len(exp.action_mask)
    extra: dict[str, Tensor] = {
        name: torch.as_tensor(value, dtype=torch.float32)
        for name in PER_TOKEN
        if (value := getattr(exp, name, None)) is not None
    }
    token_reward = extra.pop("token_level_reward", None)
    if token_reward is None and exp.reward is not None and width:
        token_reward = torch.zeros(width)
        token_reward[-1] = float(exp.reward)
    if token_reward is not None:
        extra["token_level_scores"] = token_reward
    for custom in exp.custom_fields:
        value = torch.tensor(exp.info[custom.source_field], dtype=custom.data_type)
        extra[custom.destination_field] = value
    return Sample(
        tokens_T=exp.tokens.long(),
        prompt_length=exp.prompt_length,
        action_mask_R=exp.action_mask.bool(),
        logprobs_R=None if exp.logprobs is None else exp.logprobs.float(),
        extra=extra,
        run=exp.eid.rid if _has_task(exp) else None,
    )


def _has_task(exp: Experience) -> bool:
    """Whether `exp` has a task; experiences of a data set (SFT, experts) have none."""
    return exp.eid.batch != "" or exp.eid.task != ""


def _grouped(exps: Sequence[Experience]) -> list[list[Experience]]:
    """Groups by task in an order independent of arrival, then experiences without; DPO: by pair."""
    if exps[0].experience_type == "dpo":
        return [split_dpo_experience_to_single_turn([exp]) for exp in exps]

    def key(exp: Experience) -> tuple[Any, ...]:
        # Sort numbers by value, before names.
        ids = (exp.eid.batch, exp.eid.task)
        order = [(0, it, "") if isinstance(it, int) else (1, 0, str(it)) for it in ids]
        return (*order, exp.eid.run, exp.eid.step)

    groups: dict[Hashable, list[Experience]] = {}
    for exp in sorted(filter(_has_task, exps), key=key):
        groups.setdefault(exp.eid.tid, []).append(exp)
    return list(groups.values()) + [[exp] for exp in exps if not _has_task(exp)]


def _data_metrics(exps: Sequence[Experience], samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, advantages and lengths of a batch, named as by Trinity's trainers."""
    rewards = torch.tensor([float(exp.reward) for exp in exps if exp.reward is not None])
    columns: dict[str, Tensor] = {
        "prompt_length": torch.tensor([float(s.prompt_length) for s in samples]),
        "response_length": torch.tensor([float(len(s.action_mask_R)) for s in samples]),
        "critic/score": rewards,
        "critic/rewards": rewards,
    }
    for name in ("advantages", "returns", "values"):
        if all(name in sample.extra for sample in samples):
            columns[f"critic/{name}"] = torch.cat(
                [sample.extra[name][sample.action_mask_R] for sample in samples]
            )
    metrics = {"perf/total_num_tokens": float(sum(len(s.tokens_T) for s in samples))}
    for name, values in columns.items():
        for kind in ("mean", "max", "min") if values.numel() else ():
            metrics[f"{name}/{kind}"] = float(getattr(values, kind)())
    return metrics
