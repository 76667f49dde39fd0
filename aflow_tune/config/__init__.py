"""The configuration: read, check and prepare a YAML with Trinity's schema and our sections.

Importing this package makes Trinity importable without vLLM: Trinity 0.6.0 imports six names of it
for images and videos, for which a stand-in is put into `sys.modules`. requirements/trinity-cpu.txt
installs vLLM's CPU build and a shim, `trinity_on_cpu`, with which Trinity's vLLM worker and verl's
FSDP workers run on CPUs (`on_processors`).
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAMES = {
    "vllm": (),
    "vllm.config": ("ModelConfig",),
    "vllm.entrypoints": (),
    "vllm.entrypoints.chat_utils": (
        "ChatTemplateContentFormat",
        "ConversationMessage",
        "parse_chat_messages",
        "parse_chat_messages_async",
    ),
    "vllm.inputs": ("MultiModalDataDict",),
}

PROCESSORS = {
    "VERL_USE_EXTERNAL_MODULES": "trinity_on_cpu.verl_side",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # sampler and trainer share the CPUs
    "OMP_NUM_THREADS": "1",
}
"""The environment of Trinity's workers when they run on CPUs."""


class _NotInstalled:
    """Replaces a name of vLLM; raises ImportError when used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(
            "this needs vLLM (images and videos in prompts), which is not installed; "
            "install the GPU set (docs/engines.md) and use `engine: trinity`"
        )


def vllm_installed() -> bool:
    """Whether a real vLLM can be imported in this environment."""
    module = sys.modules.get("vllm")
    if module is not None:
        return not getattr(module, "aflow_tune_stand_in", False)
    return importlib.util.find_spec("vllm") is not None


def stand_in_for_vllm() -> None:
    """Put the stand-in into `sys.modules`, unless vLLM or the stand-in is there already."""
    if "vllm" in sys.modules or vllm_installed():
        return
    for name, attributes in _NAMES.items():
        module = ModuleType(name, "Stand-in of aflow-tune for a vLLM that is not installed.")
        module.__path__ = []
        vars(module)["aflow_tune_stand_in"] = True
        for attribute in attributes:
            setattr(module, attribute, _NotInstalled)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def on_processors() -> bool:
    """Whether vLLM and verl would run on CPUs here."""
    if importlib.util.find_spec("trinity_on_cpu") is None:
        return False
    import torch

    return not torch.cuda.is_available()


stand_in_for_vllm()
