"""Fixtures shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama, its tokenizer and a ChatML template (`tests/tiny.py`)."""
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))
