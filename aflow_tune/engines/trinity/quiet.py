"""Keeps the logs of libraries off the user's terminal and in the run's log file.

Trinity's loggers write to standard output. In the command's own process they are replaced by
one that writes to `<run folder>/log/driver.log` once the folder is known, and to nothing
before. Workers keep Trinity's loggers: Ray does not forward their output, and their files
are in the same folder.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(filename)s:%(lineno)d %(message)s"
_LIBRARIES = ("agentscope", "datasets", "httpx", "openai", "ray", "transformers", "uvicorn")

logger = logging.getLogger("trinity")


def quiet() -> None:
    """Send nothing of the libraries to the terminal. Call before Trinity is imported."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # AgentScope's agents print what they say; a run has dozens of them at once.
    os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
    warnings.filterwarnings("ignore", module=r"(agentscope|datasets|pydantic|ray|transformers)\b")
    import trinity.utils.log as trinity_log

    logger.propagate = False
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    trinity_log._ray_logger = logger


def log_to(folder: Path) -> Path:
    """Write the libraries' logs of this process to `folder/driver.log` from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "driver.log"
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.handlers = [handler]
        library.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    return path
