"""A linear layer for inference whose weight is laid out once for the CPU's matrix kernels.

`torch.nn.functional.linear` leaves the weight in row-major order, which oneDNN (or MKL, for
fp32) must rearrange on every call; with the few dozen rows of a decode step that costs more
than the product. Here the weight is rearranged when it is set. The same kernels also apply
the activation, the gate's product or the residual sum while the result is still in registers.

The packed kernels are the ones that torch.compile emits for frozen weights. Where they are
missing (another device or dtype, a torch build without oneDNN) plain torch functions do the
same arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_ROWS_HINT = 32
"""Row count that the packed layout is chosen for; other counts run with it as well."""


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class PackedLinear:
    """y_NO = x_NI W' + b for a frozen W, with fused element-wise tails."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.packed = _can_pack(weight_OI)
        self.bias_O = bias_O
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _ROWS_HINT)
            if self.packed
            else weight_OI
        )

    def __call__(self, x_NI: Tensor) -> Tensor:
        """x W' + b."""
        if not self.packed:
            return F.linear(x_NI, self.weight, self.bias_O)
        return torch.ops.mkldnn._linear_pointwise(x_NI, self.weight, self.bias_O, "none", [], "")

    def silu(self, x_NI: Tensor) -> Tensor:
        """silu(x W' + b)."""
        if not self.packed:
            return F.silu(F.linear(x_NI, self.weight, self.bias_O))
        return torch.ops.mkldnn._linear_pointwise(x_NI, self.weight, self.bias_O, "swish", [], "")

    def times(self, x_NI: Tensor, factor_NO: Tensor) -> Tensor:
        """(x W' + b) * factor."""
        return self._with(x_NI, factor_NO, "mul")

    def plus(self, x_NI: Tensor, term_NO: Tensor) -> Tensor:
        """x W' + b + term."""
        return self._with(x_NI, term_NO, "add")

    def _with(self, x_NI: Tensor, other_NO: Tensor, operation: str) -> Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x_NI, other_NO, self.weight, self.bias_O, operation
            )
        y_NO = F.linear(x_NI, self.weight, self.bias_O)
        return y_NO.mul_(other_NO) if operation == "mul" else y_NO.add_(other_NO)
