"""Which engine runs: ours on this machine, or Trinity's vLLM and verl on GPUs.

Looks without importing what is heavy: whether a package is there is asked of the import
system, and PyTorch, which Trinity's own configuration already needs, is asked for CUDA. Only
flash-attn is imported, where it is installed: without that it cannot be told from a broken one.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from aflow_tune.config import cpu_set, vllm_stub
from aflow_tune.errors import BadInput, Fault
from aflow_tune.find_ray import find_ray

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig


def choose_engine(config: AflowConfig) -> tuple[str, str]:
    """The engine and the reason for it. A prepared configuration keeps its engine.

    Returns:
        ('local' or 'trinity', reason in words).

    Raises:
        BadInput: `engine: trinity` where it cannot run, `engine: local` with a remote service.
    """
    kept: tuple[str, str] | None = config.__dict__.get("_engine")
    if kept is not None:
        return kept
    remote = _remote_service(config)
    if config.engine == "local":
        if remote:
            raise _refused(config, "local", f"`{remote}` is enabled", "engine: trinity")
        return "local", "as configured"
    if remote:
        return "trinity", f"`{remote}` is enabled, which samples and trains elsewhere"
    missing = _missing(config)
    if config.engine == "trinity":
        if missing and find_ray(config) is None:
            cure = "engine: local, or name the cluster with cluster.ray_address"
            if config.inline:
                cure += " and set inline: false"
            raise _refused(config, "trinity", "; ".join(missing), cure)
        where = " on processors, without a GPU" if cpu_set.in_use() else ""
        return "trinity", f"as configured{where}"
    if missing:
        return "local", "; ".join(missing)
    return "trinity", "CUDA, vLLM and verl are there"


def _remote_service(config: AflowConfig) -> str | None:
    if config.model.tinker.enable:
        return "model.tinker.enable"
    if config.model.external_model.enable:
        return "model.external_model.enable"
    return None


def _missing(config: AflowConfig) -> list[str]:
    """What Trinity's own engines would need and this machine does not have."""
    import torch

    missing = []
    if not torch.cuda.is_available() and not (config.engine == "trinity" and cpu_set.in_use()):
        missing.append("no CUDA device")
    if not vllm_stub.installed():
        missing.append("vLLM is not installed")
    if importlib.util.find_spec("verl") is None:
        missing.append("verl is not installed")
    elif config.trainer.use_remove_padding and not removes_padding():
        missing.append(
            "flash_attn is not installed (needed unless `trainer.use_remove_padding: false`)"
        )
    return missing


def removes_padding() -> bool:
    """Whether flash-attn's functions that take padding out are there.

    Asked of the module itself: other packages bring a `flash_attn` without it, and one that was
    built for another PyTorch cannot be imported.
    """
    try:
        return importlib.util.find_spec("flash_attn.bert_padding") is not None
    except ImportError:  # of the package `flash_attn`, which this imports
        return False


def _refused(config: AflowConfig, engine: str, found: str, cure: str) -> BadInput:
    where = config.positions.where("engine")
    return BadInput(
        f"`engine: {engine}` cannot run this configuration here.",
        [Fault(where, f"what `engine: {engine}` needs", found, cure)],
    )
