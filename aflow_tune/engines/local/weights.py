"""The sampler's weights: a pristine model plus, perhaps, one adapter.

`Weights` checks an update as a whole before it changes anything, and answers with the weight
that a layer has now. The adapter is never added to the model's own tensors, so any number of
updates leaves the base untouched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aflow_tune.errors import BadInput, Fault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from aflow_tune.engines.local.lora_spec import LoraSpec

_PREFIX = "lora."


class Weights:
    """Base parameters of `model` and the current adapter."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.adapter: Mapping[str, Tensor] = {}
        self.scaling = 0.0

    def load(self, state: Mapping[str, Tensor], lora: LoraSpec | None) -> None:
        """Take an adapter state (`lora.<module path>.A` and `.B`) or full parameters by name.

        Raises:
            BadInput: names or shapes that the model does not have, or an adapter without a
                `LoraSpec`; nothing was changed.
        """
        adapter = {key: value for key, value in state.items() if key.startswith(_PREFIX)}
        if adapter and (lora is None or len(adapter) < len(state)):
            raise BadInput(
                "The weight update mixes an adapter with full parameters"
                if lora
                else "The weight update is an adapter, but the sampler was built without lora="
            )
        faults = self._adapter_faults(adapter) if adapter else self._full_faults(state)
        if faults:
            raise BadInput("The weight update does not fit the sampler's model", faults)
        if adapter:
            assert lora is not None
            self.adapter, self.scaling = adapter, lora.scaling
            return
        self.adapter = {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in state.items():
                parameters[name].copy_(value)

    def effective(self, path: str) -> Tensor:
        """The weight [out, in] of the linear layer at `path`, adapter included.

        The sum is made in fp32 and rounded once to the model's number format.
        """
        weight: Tensor = self.model.get_submodule(path).weight
        return self.merged(path, weight) if f"{_PREFIX}{path}.A" in self.adapter else weight

    def merged(self, path: str, base: Tensor) -> Tensor:
        """`base` + scaling B A of the current adapter, in the layout that `base` has."""
        A_RI = self.adapter.get(f"{_PREFIX}{path}.A")
        if A_RI is None:
            return base
        B_OR = self.adapter[f"{_PREFIX}{path}.B"]
        delta_OI = self.scaling * (B_OR.float() @ A_RI.float()).to(base.device)
        if type(self.model.get_submodule(path)).__name__ == "Conv1D":
            delta_OI = delta_OI.T
        return (base.float() + delta_OI).to(base.dtype)

    def bias(self, path: str) -> Tensor | None:
        """The bias of the linear layer at `path`."""
        bias: Tensor | None = self.model.get_submodule(path).bias
        return bias

    def adapted_paths(self) -> list[str]:
        """Module paths that the current adapter changes."""
        return [key[len(_PREFIX) : -2] for key in self.adapter if key.endswith(".A")]

    def _adapter_faults(self, adapter: Mapping[str, Tensor]) -> list[Fault]:
        linears = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2
        }
        faults = []
        for key, value in adapter.items():
            path, part = key[len(_PREFIX) : -2], key[-2:]
            other = adapter.get(f"{_PREFIX}{path}{'.B' if part == '.A' else '.A'}")
            if path not in linears or part not in (".A", ".B") or other is None:
                faults.append(_fault(key, "the A and B of a linear layer of the model", "neither"))
                continue
            out_width, in_width = _linear_shape(linears[path])
            rank = value.shape[0] if part == ".A" else value.shape[1]
            expected = (rank, in_width) if part == ".A" else (out_width, rank)
            if tuple(value.shape) != expected or rank != other.shape[0 if part == ".B" else 1]:
                faults.append(_fault(key, f"shape {expected}", f"shape {tuple(value.shape)}"))
        return faults

    def _full_faults(self, state: Mapping[str, Tensor]) -> list[Fault]:
        shapes = {
            name: tuple(p.shape) for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        faults = []
        for name, value in state.items():
            if name not in shapes:
                faults.append(_fault(name, "a parameter of the model", "no such parameter"))
            elif shapes[name] != tuple(value.shape):
                faults.append(_fault(name, f"shape {shapes[name]}", f"shape {tuple(value.shape)}"))
        return faults


def _linear_shape(module: torch.nn.Module) -> tuple[int, int]:
    """(out, in) of a linear layer; GPT-2's Conv1D stores its weight the other way round."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    return (columns, rows) if type(module).__name__ == "Conv1D" else (rows, columns)


def _fault(where: str, expected: str, found: str) -> Fault:
    return Fault(where, expected, found, "build sampler and trainer from the same model and lora")
