"""A model's base weights plus, optionally, one LoRA adapter, kept separate until a caller merges
them; a quantised layer gets its part of the adapter instead. Does not import PEFT, which takes
seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aflow_tune.engines.local.quantised import Adapter, QuantisedLinear, quantised_layers
from aflow_tune.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFIX = "lora."


@dataclass(frozen=True)
class LoraSpec:
    """The shape of an adapter. `target_modules` as PEFT takes them: 'all-linear' (all but the
    output head), a regular expression, or names."""

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...] = "all-linear"

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class Weights:
    """Base parameters of `model` and the current adapter."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.adapter: Mapping[str, Tensor] = {}
        self.scaling = 0.0
        self.quantised: dict[str, QuantisedLinear] = {}

    def load(self, state: Mapping[str, Tensor], lora: LoraSpec | None) -> None:
        """Load an adapter state (`lora.<module path>.A` and `.B`), or parameters by name into the
        model. BadInput, changing nothing: wrong names or shapes, or an adapter without `lora`."""
        adapter = {key: value for key, value in state.items() if key.startswith(_PREFIX)}
        if adapter and (lora is None or len(adapter) < len(state)):
            raise BadInput("The weight update is an adapter, mixed or without the sampler's lora=")
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        if adapter:
            # A [rank, in] and B [out, rank] of each linear layer that has both.
            shapes, modules = {}, dict(self.model.named_modules())
            for key, A_RI in adapter.items():
                path = key[len(_PREFIX) : -2]
                paired = key.endswith(".A") and f"{_PREFIX}{path}.B" in adapter
                widths = _widths(modules.get(path)) if paired else None
                if widths is not None:
                    out_width, in_width = widths
                    shapes[key] = (A_RI.shape[0], in_width)
                    shapes[f"{_PREFIX}{path}.B"] = (out_width, A_RI.shape[0])
        for name, value in state.items():
            if shapes.get(name) != tuple(value.shape):
                expected = f"shape {shapes[name]}" if name in shapes else "no such parameter"
                title = "The weight update does not fit the sampler's model"
                found, fix = f"shape {tuple(value.shape)}", "use one model and lora for both"
                raise BadInput.of(title, name, expected, found, fix)
        self.adapter, self.scaling = adapter, lora.scaling if lora is not None else 0.0
        self.quantised = dict(quantised_layers(self.model))
        for path, layer in self.quantised.items():
            pair = [adapter.get(f"{_PREFIX}{path}.{name}") for name in "AB"]
            A, B = (it if it is None else it.to(self.model.device, layer.dtype) for it in pair)
            layer.adapter = None if A is None or B is None else Adapter(A, B, self.scaling)
        if not adapter:
            with torch.no_grad():
                for name, value in state.items():
                    parameters[name].copy_(value)

    def effective(self, path: str) -> Tensor:
        """The weight [out, in] of the linear layer at `path`, adapter included."""
        weight: Tensor = self.model.get_submodule(path).weight
        return self.merged(path, weight)

    def merged(self, path: str, base: Tensor) -> Tensor:
        """`base` + scaling B A of the current adapter, in the layout and dtype of `base`: summed in
        fp32, rounded once; `base` itself if the layer has no adapter."""
        A_RI = self.adapter.get(f"{_PREFIX}{path}.A")
        if A_RI is None:
            return base
        B_OR = self.adapter[f"{_PREFIX}{path}.B"]
        delta_OI = self.scaling * (B_OR.float() @ A_RI.float()).to(base.device)
        if _is_transposed(self.model.get_submodule(path)):
            delta_OI = delta_OI.T
        return (base.float() + delta_OI).to(base.dtype)

    def bias(self, path: str) -> Tensor | None:
        bias: Tensor | None = self.model.get_submodule(path).bias
        return bias

    def adapted_paths(self) -> list[str]:
        """The layers whose weight has to be merged: adapted, and not quantised."""
        paths = [key[len(_PREFIX) : -2] for key in self.adapter if key.endswith(".A")]
        return [path for path in paths if path not in self.quantised]


def _widths(module: torch.nn.Module | None) -> tuple[int, int] | None:
    """Outputs and inputs of a layer; None if it is no linear one."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features, module.in_features
    weight = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    out_width, in_width = reversed(weight.shape) if _is_transposed(module) else weight.shape
    return out_width, in_width


def _is_transposed(module: torch.nn.Module) -> bool:
    """Whether the layer stores its weight as [in, out]: GPT-2's Conv1D."""
    return type(module).__name__ == "Conv1D"
