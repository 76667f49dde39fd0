"""Which AgentScope is installed, for tests that are about one of them."""

from __future__ import annotations

import importlib.metadata

import pytest

SECOND = not importlib.metadata.version("agentscope").startswith("1.")
only_first = pytest.mark.skipif(SECOND, reason="about AgentScope 1")
only_second = pytest.mark.skipif(not SECOND, reason="about AgentScope 2")
