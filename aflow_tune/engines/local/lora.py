"""LoRA adapters for the trainer: injection, the exchanged state format, a fused forward pass.

PEFT injects, names, saves and loads the adapter. `FusedLoraLinear` makes it fast on few cores:
y = x W' + s (x A') B' in one autograd node that treats W as frozen and computes in the dtype of x.

The adapter state that trainer and sampler exchange is a flat dict of fp32 CPU tensors,
`lora.<module path>.A` [rank, in] and `lora.<module path>.B` [out, rank], module paths as in
the base model; the weight it stands for is W + scaling B A (Hu et al. 2021, arXiv:2106.09685).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLoraLinear
from torch import Tensor, nn

from aflow_tune.engines.local.quantised import Adapter, adapted
from aflow_tune.engines.local.weights import LoraSpec

ADAPTER = "default"


class _FusedLora(torch.autograd.Function):
    """y_NO = x_NI W' + bias + s (x A') B', with W and bias of `base` frozen. Keeps no W: that of a
    quantised layer is made again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, base: nn.Linear, A_RI: Tensor, B_OR: Tensor, scaling: float
    ) -> Tensor:
        A, B = A_RI.to(x_NI.dtype), B_OR.to(x_NI.dtype)
        y_NO, u_NR = adapted(x_NI, base.weight, base.bias, Adapter(A, B, scaling))
        ctx.save_for_backward(x_NI, A, B, u_NR)
        ctx.base, ctx.scaling, ctx.master_dtype = base, scaling, A_RI.dtype
        return y_NO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy_NO,) = grads
        x_NI, A, B, u_NR = ctx.saved_tensors
        v_NR = dy_NO @ B
        dx_NI = None
        if ctx.needs_input_grad[0]:
            dx_NI = dy_NO @ ctx.base.weight
            dx_NI.addmm_(v_NR, A, alpha=ctx.scaling)
        dA = (v_NR.T @ x_NI).to(ctx.master_dtype).mul_(ctx.scaling)
        dB = (u_NR.T @ dy_NO).T.to(ctx.master_dtype).mul_(ctx.scaling)
        return dx_NI, None, dA, dB, None


class FusedLoraLinear(PeftLoraLinear):
    """PEFT's LoRA layer with a fused pass for what we train: one plain adapter, no dropout, not
    merged, on a frozen `nn.Linear`, quantised or not. Any other case uses PEFT's forward."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base = self.get_base_layer()
        plain = (
            self.active_adapters == [ADAPTER]
            and not (args or kwargs or self.disable_adapters or self.merged or self.lora_variant)
            and isinstance(self.lora_dropout[ADAPTER], nn.Identity)
            and not any(param.requires_grad for param in base.parameters())
        )
        if not plain:
            return super().forward(x, *args, **kwargs)
        y_NO = _FusedLora.apply(
            x.reshape(-1, x.shape[-1]),
            base,
            self.lora_A[ADAPTER].weight,
            self.lora_B[ADAPTER].weight,
            self.scaling[ADAPTER],
        )
        return y_NO.view(*x.shape[:-1], -1)


def inject(model: nn.Module, spec: LoraSpec, *, seed: int) -> PeftModel:
    """Freeze `model` and inject fp32 adapters (A random by `seed`, B zero)."""
    targets = spec.target_modules
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: FusedLoraLinear})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config, adapter_name=ADAPTER)


def adapter_layers(model: PeftModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """For every adapted layer, GPT-2's Conv1D included: module path in the base model, and its live
    parameters A [rank, in] and B [out, rank]."""
    for name, module in model.get_base_model().named_modules():
        weights = getattr(module, "lora_A", None)
        if isinstance(weights, nn.ModuleDict) and ADAPTER in weights:
            yield name, weights[ADAPTER].weight, module.lora_B[ADAPTER].weight  # type: ignore


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """The adapter as fp32 CPU copies: `lora.<module path>.A` and `.B`."""
    state: dict[str, Tensor] = {}
    for name, A_RI, B_OR in adapter_layers(model):
        state[f"lora.{name}.A"] = A_RI.detach().to("cpu", torch.float32, copy=True)
        state[f"lora.{name}.B"] = B_OR.detach().to("cpu", torch.float32, copy=True)
    return state


def load_adapter_state(model: PeftModel, state: Mapping[str, Tensor]) -> None:
    """Copy an `adapter_state` into `model`. Raises KeyError: a layer is missing in `state`."""
    with torch.no_grad():
        for name, A_RI, B_OR in adapter_layers(model):
            A_RI.copy_(state[f"lora.{name}.A"])
            B_OR.copy_(state[f"lora.{name}.B"])
