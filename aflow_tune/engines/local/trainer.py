"""The local trainer: one optimiser step at a time on the policy, without Ray and without Trinity.

A step takes samples by group (all rollouts of one task) and a loss over the log-probabilities of
the *whole* train batch. Up to rounding, the update does not depend on the split into micro-batches:
the loss is called once per micro-batch on the full [B, R] matrix, in which only the micro-batch's
rows carry a gradient; the others hold placeholders (this step's values if computed, else the
behaviour policy's). If a loss is a sum over sequences divided by something that depends on masks
only, as in all of Trinity's aggregation modes, its gradient does not depend on the placeholders. So
with a loss that couples the rows of one run (DPO's pairs), which a micro-batch never splits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from aflow_tune.engines.local.checkpoint import (
    CheckpointError,
    read_checkpoint,
    write_checkpoint,
    write_merged,
    write_peft,
)
from aflow_tune.engines.local.critic import CriticSettings, ValueHead
from aflow_tune.engines.local.lora import adapter_layers, adapter_state, inject
from aflow_tune.engines.local.models import give_back, load_model
from aflow_tune.engines.local.packed_model import PackedModel, Sample, micro_batches
from aflow_tune.engines.local.quantised import NEEDS_ADAPTER
from aflow_tune.engines.local.weights import LoraSpec
from aflow_tune.errors import BadInput


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule: linear warm-up, then constant, linear or cosine decay to `floor`
    times the peak at `total_steps`; without `total_steps` there is no decay."""

    kind: str = "constant"
    peak: float = 1e-6
    warmup_steps: int = 0
    total_steps: int | None = None
    floor: float = 0.0

    def factor(self, updates_done: int) -> float:
        if updates_done < self.warmup_steps:
            return (updates_done + 1) / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return 1.0
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (updates_done - self.warmup_steps) / span)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        shape = 1.0 - progress if self.kind == "linear" else cosine
        return self.floor + (1.0 - self.floor) * shape

    def rate(self, updates_done: int) -> float:
        return self.peak * self.factor(updates_done)


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of the updates. `lora` None: full weights; `micro_batch_tokens`: packed tokens,
    bound memory and not the update; `grad_clip`: maximum gradient norm, 0 for none; `critic`: of
    the value head, None for none; `load_in`: the base under the adapter in 4bit or 8bit."""

    lora: LoraSpec | None = None
    critic: CriticSettings | None = None
    schedule: Schedule = field(default_factory=Schedule)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    eps: float = 1e-8
    grad_clip: float = 1.0
    micro_batch_tokens: int = 2048
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    load_in: str | None = None


@dataclass(frozen=True)
class LossBatch:
    """The input of a loss: B samples padded to R response columns, fp32, masks boolean. `extra` has
    the samples' own tensors, [B, R] or [B]; `old_logprobs_BR` is None if any sample has none."""

    logprobs_BR: Tensor
    action_mask_BR: Tensor
    old_logprobs_BR: Tensor | None
    entropy_BR: Tensor | None
    extra: dict[str, Tensor]


class LossFn(Protocol):
    """A loss over a train batch; the module's docstring says what it must satisfy. `needs_entropy`:
    fill `entropy_BR`."""

    needs_entropy: bool

    def __call__(self, batch: LossBatch) -> tuple[Tensor, dict[str, float]]:
        """The scalar to minimise, and metrics."""


class LocalTrainer:
    """The policy, its AdamW optimiser and its schedule; with a critic, its value head as well. On
    one machine's CPU the same settings, batches and thread count give bit-equal weights."""

    def __init__(self, model_path: Path | str, settings: TrainerSettings) -> None:
        self.model_path = Path(model_path)
        self.settings = settings
        self.step_count = 0
        self.skipped_steps = 0
        self.torn = False
        """Whether an update was interrupted halfway: the weights belong to no step."""
        if settings.load_in is not None and settings.lora is None:
            title, fix = "The model cannot be trained", "set lora, or load_in=None"
            raise BadInput.of(title, "load_in", NEEDS_ADAPTER, "full weights", fix)
        torch.manual_seed(settings.seed)
        self.base: PreTrainedModel = load_model(
            self.model_path, settings.dtype, settings.device, settings.load_in
        )
        self.base.config.use_cache = False
        self.peft: PeftModel | None = None
        self._reference: PackedModel | None = None
        if settings.lora is not None:
            self.peft = inject(self.base, settings.lora, seed=settings.seed)
        self.policy = PackedModel(self.base, temperature=settings.temperature)
        self.critic: ValueHead | None = None
        if settings.critic is not None:
            size = self.base.config.hidden_size
            self.critic = ValueHead(size, settings.critic, settings.device)
        self._params: dict[str, Tensor] = {}
        if self.peft is None:
            named = self.base.named_parameters()
            self._params = {name: param for name, param in named if param.requires_grad}
        else:
            for name, A_RI, B_OR in adapter_layers(self.peft):
                self._params |= {f"lora.{name}.A": A_RI, f"lora.{name}.B": B_OR}
        # fp32 master weights: Adam in bf16 would lose updates below the weights' last bit.
        self._masters = {
            name: param if param.dtype == torch.float32 else param.detach().float().clone()
            for name, param in self._params.items()
        }
        self.optimizer = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.schedule.rate(0),
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=settings.device.type in ("cpu", "cuda"),
        )

    def step(
        self,
        groups: Sequence[Sequence[Sample]],
        loss: LossFn,
        *,
        passes: int = 1,
        beside: Callable[[], dict[str, float]] | None = None,
    ) -> dict[str, float]:
        """Make one step: `passes` updates on all `groups`, then `beside`, which updates what is
        saved with the policy. Returns the metrics of the last update and of `beside`. If a gradient
        is not finite, the weights stay; that update counts as done and as skipped."""
        started = time.perf_counter()
        kept, metrics = [group for group in groups if group], dict[str, float]()
        for _ in range(passes):
            metrics = self._pass(kept, loss)
            give_back()  # here, after `_pass` has released its tensors
        if beside is not None:
            self.torn = True
            metrics |= beside()
        self.torn = False
        self.step_count += 1
        metrics["time/train_step"] = time.perf_counter() - started
        return metrics

    def _pass(self, groups: Sequence[Sequence[Sample]], loss: LossFn) -> dict[str, float]:
        samples = [sample for group in groups for sample in group]
        batch = self.pad(samples, entropy=loss.needs_entropy)
        self._zero_grad()
        numbers = iter(range(len(samples)))
        whole = [list(itertools.islice(numbers, len(group))) for group in groups]
        batches = micro_batches(samples, whole, self.settings.micro_batch_tokens)
        for indices in batches:
            part = [samples[i] for i in indices]
            width = batch.logprobs_BR.shape[1]
            logprobs, entropy = self.policy.scores(part, width, entropy=loss.needs_entropy)
            self._backward(loss, batch, indices, logprobs, entropy)
        with torch.no_grad():  # metrics over the whole batch, now that all rows are computed
            value, metrics = loss(batch)
        metrics["actor/final_loss"] = float(value)
        metrics |= self._update()
        metrics["perf/train_tokens"] = float(sum(len(sample.tokens_T) for sample in samples))
        metrics["perf/micro_batches"] = float(len(batches))
        return metrics

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[Tensor]:
        """fp32 log-probabilities [R] of each sample's scored tokens (0 elsewhere), on the CPU.
        `reference`: by the reference policy, the model that training started from."""
        groups = [[i] for i in range(len(samples))]
        width = max((len(sample.action_mask_R) for sample in samples), default=0)
        out: list[Tensor] = [torch.empty(0)] * len(samples)
        policy: Any = self.policy
        if reference and self.peft is None:
            self.keep_reference()
            policy = self._reference
        adapted = self.peft.disable_adapter() if reference and self.peft else nullcontext()
        with torch.no_grad(), adapted:
            for indices in micro_batches(samples, groups, self.settings.micro_batch_tokens):
                scores, _ = policy.scores([samples[i] for i in indices], width)
                for row, i in enumerate(indices):
                    out[i] = scores[row, : len(samples[i].action_mask_R)].cpu()
        return out

    def hidden(self, samples: Sequence[Sample]) -> list[Tensor]:
        """fp32 hidden states [M, H] from which each sample's scored tokens are predicted, on the
        trainer's device and without a gradient: what the value head reads."""
        groups = [[i] for i in range(len(samples))]
        out: list[Tensor] = [torch.empty(0)] * len(samples)
        for indices in micro_batches(samples, groups, self.settings.micro_batch_tokens):
            found = self.policy.hidden([samples[i] for i in indices])
            for i, hidden_MH in zip(indices, found, strict=True):
                out[i] = hidden_MH
        return out

    def keep_reference(self) -> None:
        """Load a frozen reference policy for full-weight training; an adapter needs none."""
        if self.peft is None and self._reference is None:
            copy = load_model(self.model_path, self.settings.dtype, self.settings.device)
            self._reference = PackedModel(
                copy.requires_grad_(False), temperature=self.settings.temperature
            )

    def pad(self, samples: Sequence[Sample], *, entropy: bool = False) -> LossBatch:
        """The batch of `samples`, with placeholders (see the module) as log-probabilities."""
        width = max(len(sample.action_mask_R) for sample in samples)
        device = self.settings.device

        def rows(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
            tensors = [tensor.to(device, dtype) for tensor in tensors]
            if tensors[0].ndim == 0:
                return torch.stack(tensors)
            padded = torch.zeros(len(tensors), width, dtype=dtype, device=device)
            for row, tensor in zip(padded, tensors, strict=True):
                row[: len(tensor)] = tensor
            return padded

        mask_BR = torch.zeros(len(samples), width, dtype=torch.bool, device=device)
        for row, sample in zip(mask_BR, samples, strict=True):
            row[sample.scored_columns()] = True
        have_old = all(sample.logprobs_R is not None for sample in samples)
        old_BR = rows((s.logprobs_R for s in samples), torch.float32) if have_old else None  # type: ignore[misc]
        extra = {}
        for name in sorted(set.intersection(*(set(sample.extra) for sample in samples))):
            kind = samples[0].extra[name].dtype
            dtype = torch.float32 if kind.is_floating_point else kind
            extra[name] = rows((sample.extra[name] for sample in samples), dtype)
        # Without a behaviour policy the placeholder is -1.
        first = torch.full(mask_BR.shape, -1.0, device=device) if old_BR is None else old_BR.clone()
        entropy_BR = torch.zeros_like(first) if entropy else None
        return LossBatch(first, mask_BR, old_BR, entropy_BR, extra)

    def _backward(
        self,
        loss: LossFn,
        batch: LossBatch,
        indices: list[int],
        logprobs: Tensor,
        entropy: Tensor | None,
    ) -> None:
        """Accumulate the gradient of the micro-batch `indices`, and fill its rows of `batch`."""
        rows = torch.tensor(indices, device=logprobs.device)
        outputs = {"logprobs_BR": logprobs}
        if entropy is not None:
            outputs["entropy_BR"] = entropy
        leaves: list[Tensor] = []
        changed: dict[str, Any] = {}
        for name, output in outputs.items():
            leaves.append(output.detach().requires_grad_())
            whole: Tensor = getattr(batch, name)
            whole[rows] = output.detach()
            changed[name] = whole.index_put((rows,), leaves[-1])
        value = loss(replace(batch, **changed))[0]
        if not value.requires_grad or not logprobs.requires_grad:
            return
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        used = [(o, g) for o, g in zip(outputs.values(), grads, strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in used], [g for _, g in used])
        # Accumulate gradients of bf16 weights in fp32, in their masters.
        for name, param in self._params.items():
            master = self._masters[name]
            if master is param or param.grad is None:
                continue
            grad = param.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            param.grad = None

    def _zero_grad(self) -> None:
        for param in (*self._params.values(), *self._masters.values()):
            param.grad = None

    def _update(self) -> dict[str, float]:
        rate = self.settings.schedule.rate(self.step_count)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        grads = [p.grad for p in self._masters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        if math.isfinite(norm):
            if self.settings.grad_clip > 0:
                torch.nn.utils.clip_grads_with_norm_(
                    list(self._masters.values()), self.settings.grad_clip, torch.tensor(norm)
                )
            self.torn = True  # until the step is whole
            self.optimizer.step()
            with torch.no_grad():
                for name, param in self._params.items():
                    if self._masters[name] is not param:
                        param.copy_(self._masters[name])
        else:
            self.skipped_steps += 1
        self._zero_grad()
        return {
            "actor/grad_norm": norm,
            "actor/lr": rate,
            "actor/skipped_steps": float(self.skipped_steps),
        }

    def weights(self) -> dict[str, Tensor]:
        """CPU copies for a sampler: the adapter state, or all parameters by name."""
        if self.peft is not None:
            return adapter_state(self.peft)
        return {n: p.detach().to("cpu", copy=True) for n, p in self.base.named_parameters()}

    def save(self, directory: Path | str) -> None:
        """Write the full training state atomically. Raises as `write_atomically`."""
        moments = {
            f"{key}/{name}": value
            for name, master in self._masters.items()
            for key, value in self.optimizer.state.get(master, {}).items()
        }
        rng = {"cpu": torch.get_rng_state()}
        if self.settings.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.settings.device)
        lora = None if self.settings.lora is None else vars(self.settings.lora)
        state: dict[str, Any] = {"step": self.step_count, "skipped_steps": self.skipped_steps}
        state |= {"lora": lora, "extra": {}}
        tensors = {"weights": self._masters, "optimizer": moments, "rng": rng}
        if self.critic is not None:
            tensors["critic"] = self.critic.state()
        write_checkpoint(Path(directory), tensors, state)

    def load(self, directory: Path | str) -> None:
        """Restore what `save` wrote. Raises CheckpointError: damaged, of other weights, or without
        the value head that this trainer has."""
        tensors, state = read_checkpoint(Path(directory), expected_weights=self._masters)
        if self.critic is not None:
            if "critic" not in tensors:
                raise CheckpointError(f"{directory}: holds no value head: not of a run with PPO")
            self.critic.load(tensors["critic"])
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tensors["weights"][name])
                self._params[name].copy_(tensors["weights"][name])
        self.optimizer.state.clear()
        for key, value in tensors["optimizer"].items():
            kind, name = key.split("/", 1)
            device = "cpu" if kind == "step" else self.settings.device
            self.optimizer.state[self._masters[name]][kind] = value.to(device)
        torch.set_rng_state(tensors["rng"]["cpu"])
        if "cuda" in tensors["rng"] and self.settings.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng"]["cuda"], self.settings.device)
        self.step_count = int(state["step"])
        self.skipped_steps = int(state["skipped_steps"])

    def export_peft(self, directory: Path | str) -> None:
        """Write a folder for `PeftModel.from_pretrained`; only if training an adapter."""
        assert self.peft is not None
        write_peft(self.peft, self.model_path, Path(directory))

    def export_merged(self, directory: Path | str) -> None:
        """Write a folder for `AutoModelForCausalLM.from_pretrained`, adapter merged in."""
        write_merged(self.model_path, self.weights(), self.settings.lora, Path(directory))
