"""The stand-in for vLLM is small, honest, and absent where vLLM is installed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from aflow_tune import config as vllm_stub


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("without_vllm")
def test_trinity_imports_and_the_names_say_what_is_missing() -> None:
    vllm_stub.stand_in_for_vllm()
    import trinity.common.models.mm_utils as mm_utils

    with pytest.raises(ImportError, match="needs vLLM"):
        mm_utils.ModelConfig(model="x")
    assert not vllm_stub.vllm_installed()


@pytest.mark.usefixtures("without_vllm")
def test_a_real_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("vllm")
    monkeypatch.setitem(sys.modules, "vllm", real)
    vllm_stub.stand_in_for_vllm()
    assert sys.modules["vllm"] is real
    assert vllm_stub.vllm_installed()
