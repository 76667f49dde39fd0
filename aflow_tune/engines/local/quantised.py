"""The frozen base in 4 or 8 bits, under an adapter: QLoRA (Dettmers et al. 2023, arXiv:2305.14314).

Quantised are the linear layers of the decoder's layers, not embeddings, output head, norms and
biases. 4 bits: NF4, a scale in fp32 for every 64 weights, 4.5 bits a weight. 8 bits: int8, a scale
for every output (LLM.int8's weights, arXiv:2208.07339, without its rounded activations).

bitsandbytes gives the number formats and their kernels. Its layers are not used: they repack
themselves on some processors, and compute differently with a gradient and without one, while
sampler and trainer have to give one text one probability. `QuantisedLinear` makes its weight anew
for every product, forward and backward, in the model's dtype. Sampler and trainer quantise the same
file in the same dtype, so their codes are equal, and add the adapter in the same way (`adapted`),
never merged into rounded weights. What is exported is merged into the unquantised base, which
`checkpoint.write_merged` reads again. Importing this module imports no bitsandbytes.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aflow_tune.errors import BadInput

BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}
"""Bytes of a weight by `local.load_in`; 8 bits: without the 4 bytes of each output's scale."""
_BLOCK = 64
NEEDS_ADAPTER = "an adapter to train: quantised weights cannot be trained themselves"
INSTALL = "pip install 'aflow-tune[quantised]', or remove local.load_in"


def obstacles(device: str) -> Iterator[tuple[str, str, str]]:
    """Why nothing can be quantised on this machine and type of device: expected, found, cure."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield "the package bitsandbytes, which quantises", "not installed", INSTALL
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if device == "cpu" and not (x86 and torch.backends.cpu.get_cpu_capability() != "DEFAULT"):
        found = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        yield "CUDA, or a processor with AVX2", found, "remove local.load_in"
    elif device not in ("cpu", "cuda"):
        fix = "local.device: cpu, or remove local.load_in"
        yield "CUDA, or a processor with AVX2", f"{device}, on which it was never tried", fix


class Adapter(NamedTuple):
    """A [rank, in] and B [out, rank] of a layer; its weight is W + scaling B A."""

    A_RI: Tensor
    B_OR: Tensor
    scaling: float


def adapted(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, adapter: Adapter
) -> tuple[Tensor, Tensor]:
    """x W' + bias + scaling (x A') B', a new tensor, and x A'. The adapter is in the dtype of x."""
    y_NO = nn.functional.linear(x_NI, weight_OI, bias_O)
    u_NR = x_NI @ adapter.A_RI.T
    return y_NO.addmm_(u_NR, adapter.B_OR.T, alpha=adapter.scaling), u_NR


class _Product(torch.autograd.Function):
    """y_NO = x_NI W' + bias, all frozen; makes W again for the gradient in x."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(x_NI, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.weight, None


class QuantisedLinear(nn.Linear):
    """A frozen linear layer that holds codes and scales. `weight` [out, in] is a new tensor, in the
    dtype of the layer that was quantised, at every read. `adapter`: the sampler's, if any; the
    trainer's is around this layer (`lora.FusedLoraLinear`)."""

    def __init__(self, linear: nn.Linear, kind: str, device: torch.device) -> None:
        import bitsandbytes.functional as bnb

        nn.Module.__init__(self)  # nn.Linear's would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.kind, self.dtype = kind, linear.weight.dtype
        self.adapter: Adapter | None = None
        weight_OI = linear.weight.detach().to(device)
        if kind == "4bit":
            codes, state = bnb.quantize_4bit(weight_OI, blocksize=_BLOCK, quant_type="nf4")
            scales = state.absmax
        else:
            codes, scales, _ = bnb.int8_vectorwise_quant(weight_OI.to(torch.float16))
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_parameter("bias", linear.bias)
        self.requires_grad_(False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        codes, scales = self.get_buffer("codes"), self.get_buffer("scales")
        if self.kind == "8bit":
            return codes.float().mul_(scales.mul(1 / 127)[:, None]).to(self.dtype)
        shape = (self.out_features, self.in_features)
        make = torch.ops.bitsandbytes.dequantize_4bit.default
        weight_OI: Tensor = make(codes, scales, _BLOCK, "nf4", shape, self.dtype)
        return weight_OI

    def held_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(held.numel() * held.element_size() for held in self.buffers())

    def forward(self, x: Tensor) -> Tensor:
        x_NI = x.reshape(-1, self.in_features)
        if self.adapter is None:
            y_NO = _Product.apply(x_NI, self)
        else:
            y_NO, _ = adapted(x_NI, self.weight, self.bias, self.adapter)
        return y_NO.view(*x.shape[:-1], self.out_features)


class JoinedProduct:
    """What `llama.PackedLinear` does, by quantised layers: their outputs side by side, [N, O], in
    the order `order_O` if given."""

    def __init__(self, *layers: QuantisedLinear, order_O: Tensor | None = None) -> None:
        self.layers, self.order_O = layers, order_O

    def __call__(self, x_NI: Tensor, activation: str = "none") -> Tensor:
        outputs = [layer(x_NI) for layer in self.layers]
        y_NO = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if self.order_O is not None:
            y_NO = y_NO.index_select(1, self.order_O)
        return nn.functional.silu(y_NO) if activation == "swish" else y_NO

    def combined(self, x_NI: Tensor, operation: str, other_NO: Tensor) -> Tensor:
        y_NO = self(x_NI)
        return y_NO.mul_(other_NO) if operation == "mul" else y_NO.add_(other_NO)


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """The quantised layers of a model with their paths."""
    for path, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            yield path, module


def quantise(model: Any, kind: str, device: torch.device) -> None:
    """Put a `QuantisedLinear` on `device` in the place of every linear layer of the decoder layers
    of a Hugging Face causal LM, one by one: the device never holds the whole model in 16 bits.

    Raises BadInput: this machine cannot, or the layers of the model are no `nn.Linear`."""
    for expected, found, cure in obstacles(device.type):
        raise BadInput.of("The model cannot be quantised", "local.load_in", expected, found, cure)
    depth = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    parents = [module for stack in stacks for module in stack.modules()]
    done = 0
    for parent in parents:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, QuantisedLinear(child, kind, device))
                done += 1
    if not done:
        title, expected = "The model cannot be quantised", "layers that are made of nn.Linear"
        found, fix = type(model).__name__, "remove local.load_in, or use another model"
        raise BadInput.of(title, "local.load_in", expected, found, fix)
    for left in model.parameters():  # as loaded, these keep the whole file mapped
        left.data = left.data.clone()
