"""A stand-in for vLLM, for machines where it is not installed.

Trinity 0.6.0 imports five names from vLLM when `trinity.common.models.mm_utils` loads, and
that module is imported by its workflows, Explorer and runner. The names are used only for
images and videos, which the local engine does not serve; without them nothing of Trinity's
explorer imports. The stand-in holds exactly those names and raises if one is used. Where a
real vLLM is installed, `install()` does nothing.
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


class _NotInstalled:
    """Takes the place of a vLLM name; using it says what is missing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError(
            "this needs vLLM (images and videos in prompts), which is not installed; "
            "install the GPU set (docs/engines.md) and use `engine: trinity`"
        )


def installed() -> bool:
    """Whether a real vLLM can be imported in this environment."""
    module = sys.modules.get("vllm")
    if module is not None:
        return not getattr(module, "aflow_tune_stand_in", False)
    return importlib.util.find_spec("vllm") is not None


def install() -> None:
    """Put the stand-in into `sys.modules`, unless vLLM or the stand-in is there already."""
    if "vllm" in sys.modules or installed():
        return
    for name, attributes in _NAMES.items():
        module = ModuleType(name, "Stand-in of aflow-tune for a vLLM that is not installed.")
        module.__path__ = []
        module.__dict__["aflow_tune_stand_in"] = True
        for attribute in attributes:
            setattr(module, attribute, _NotInstalled)
        sys.modules[name] = module
    for name in _NAMES:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
