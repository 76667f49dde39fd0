"""A run that sees its own devices only: claimed, and hidden from it all others.

CUDA reads `CUDA_VISIBLE_DEVICES` once, when it is first used in a process, so this comes before
anything may look for CUDA. What the process starts (Ray, its workers) inherits it. Whole GPUs are
given by number, in the order of the bus, because vLLM reads numbers only; instances of divided
ones have no number and are given by UUID, and where any GPU is divided so are the whole ones,
since CUDA then numbers differently.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aflow_tune.errors import BadInput, Fault
from aflow_tune.gpus.choosing import Chosen, choose
from aflow_tune.gpus.claims import Claims
from aflow_tune.gpus.devices import Device


@contextlib.contextmanager
def isolated(
    value: Any, count: int | None, *, run: str, protected: Iterable[int], where: str
) -> Iterator[Chosen]:
    """Claim devices and let this process and what it starts see no others, for the block.

    Args:
        value, count, where: as for `choosing.choose`.
        run: what others are told about who holds them.
        protected: processes that others' `gpus free` leaves alone meanwhile.

    Raises:
        BadInput: not to be had, or too late: CUDA is in use in this process.
    """
    if _cuda_is_in_use():
        raise BadInput(
            "GPUs cannot be chosen any more.",
            [
                Fault(
                    where,
                    "a process that has not used CUDA yet",
                    "CUDA was used in this process before",
                    "start Python anew (a notebook: restart its kernel), and call tune() first",
                )
            ],
        )
    claims = Claims(run, protected)
    try:
        chosen = choose(value, count, claims, where)
        with _environment(visible_to_cuda(chosen)):
            yield chosen
    finally:
        # What this process itself holds on a device stays there until it ends, and so do claims.
        if not _cuda_is_in_use():
            claims.release()


def visible_to_cuda(chosen: Chosen) -> dict[str, str]:
    """The environment in which the chosen devices are cuda:0, cuda:1 and so on."""
    names = [str(d.uuid) if chosen.by_uuid else str(d.index) for d in chosen.devices]
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(names),
        # PyTorch then asks NVML whether there is a GPU, and CUDA stays unused in this process.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }


def mapping_lines(devices: Sequence[Device]) -> list[str]:
    """Which physical device is which for the run."""
    return [
        f"GPU {device.label} ({device.name}, {device.uuid}) is cuda:{number} of this run"
        for number, device in enumerate(devices)
    ]


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        if not _cuda_is_in_use():
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _cuda_is_in_use() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())
