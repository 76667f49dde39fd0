"""A model's base weights plus, optionally, one LoRA adapter, kept separate until a caller merges
them. Does not import PEFT, which takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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
                weight = getattr(modules.get(path), "weight", None)
                paired = key.endswith(".A") and f"{_PREFIX}{path}.B" in adapter
                if paired and isinstance(weight, Tensor) and weight.dim() == 2:
                    out_width, in_width = weight.shape
                    if _is_transposed(modules[path]):
                        out_width, in_width = in_width, out_width
                    shapes[key] = (A_RI.shape[0], in_width)
                    shapes[f"{_PREFIX}{path}.B"] = (out_width, A_RI.shape[0])
        for name, value in state.items():
            if shapes.get(name) != tuple(value.shape):
                expected = f"shape {shapes[name]}" if name in shapes else "no such parameter"
                title = "The weight update does not fit the sampler's model"
                found, fix = f"shape {tuple(value.shape)}", "use one model and lora for both"
                raise BadInput.of(title, name, expected, found, fix)
        self.adapter, self.scaling = adapter, lora.scaling if lora is not None else 0.0
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
        return [key[len(_PREFIX) : -2] for key in self.adapter if key.endswith(".A")]


def _is_transposed(module: torch.nn.Module) -> bool:
    """Whether the layer stores its weight as [in, out]: GPT-2's Conv1D."""
    return type(module).__name__ == "Conv1D"
