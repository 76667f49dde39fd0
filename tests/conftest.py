"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first: a long one that begins last keeps one worker alone."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def no_ray_of_this_machine() -> Iterator[None]:
    """Runs of the tests start a Ray of their own, whatever Ray their user has running here.

    In a short folder: Ray's sockets are in it, whose paths have 107 bytes.
    """
    held = {name: os.environ.pop(name) for name in ("RAY_ADDRESS",) if name in os.environ}
    before = os.environ.get("RAY_TMPDIR")
    folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="aft-", dir="/tmp")
    yield
    os.environ.update(held)
    if before is None:
        del os.environ["RAY_TMPDIR"]
    else:
        os.environ["RAY_TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder that everybody may use, as /tmp is; Ray is told to use it."""
    with tempfile.TemporaryDirectory("", "aft-", "/tmp", ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o1777)
        monkeypatch.setenv("RAY_TMPDIR", name)
        yield Path(name)


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Commands of the tests heed Ctrl-C, also where a shell started the tests in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def bytecode() -> None:
    """Some machines keep none; each of the suite's thousand processes would compile us anew."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random Llama, its tokenizer and a ChatML template (`tests/tiny.py`)."""
    from tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny_model"))
