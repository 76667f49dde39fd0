"""Trinity's own engines without a GPU, where requirements/trinity-cpu.txt is installed.

That set holds vLLM's CPU build and a shim, `trinity_on_cpu`, which lets Trinity's vLLM worker and
verl's FSDP workers compute on processors. Here stands all that the rest of us needs to know of it:
whether it is in use, the environment of its workers, and how many GPUs Ray has to count. Where
there is a GPU nothing of this applies.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity.common.config import Config

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "trinity_on_cpu.verl_side",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # sampler and trainer share the processors
    "OMP_NUM_THREADS": "1",
}


def in_use() -> bool:
    """Whether vLLM and verl would compute on processors here."""
    if importlib.util.find_spec("trinity_on_cpu") is None:
        return False
    import torch

    return not torch.cuda.is_available()


def logical_gpus(config: Config) -> int:
    """The GPUs that Ray counts on this machine, without there being any: one for each engine of
    the sampler and of auxiliary models, and one for the trainer."""
    models = (config.explorer.rollout_model, *config.explorer.auxiliary_models)
    engines = sum(model.engine_num * model.tensor_parallel_size for model in models)
    return 1 if config.mode in ("colocate", "train") else engines + (config.mode == "both")
