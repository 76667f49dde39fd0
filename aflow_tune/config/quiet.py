"""Keeps the logs of libraries off the user's terminal and in the run's log file.

Trinity's loggers write to standard output. In the command's own process they are replaced by one
that writes to `<run folder>/log/driver.log` once the folder is known, and to nothing before.
Workers keep Trinity's: Ray does not forward their output, and their files are in the same folder.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

from aflow_tune.config.clashes import refuse_clashes
from aflow_tune.errors import disk_fault

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(filename)s:%(lineno)d %(message)s"
_LIBRARIES = ("agentscope", "datasets", "httpx", "openai", "ray", "transformers", "uvicorn")

logger = logging.getLogger("trinity")


def quiet() -> None:
    """Send nothing of the libraries to the terminal. Call before our own import of Trinity.

    Raises BadInput: versions are installed that are known to break, some of them in that import."""
    refuse_clashes()
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
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("trinity."):  # made by an import of Trinity before this
            made = logging.getLogger(name)
            made.handlers.clear()
            made.propagate = True


class _LogFile(logging.FileHandler):
    """A log on a full disk has gaps; logging would print a traceback for each missing line."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is None or disk_fault(error) is None:
            super().handleError(record)


def log_to(folder: Path) -> Path:
    """Write the libraries' logs of this process to `folder/driver.log` from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "driver.log"
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    end_log(handler)
    return path


def end_log(then: logging.Handler | None = None) -> None:
    """Write the libraries' logs nowhere (or to `then`) from now on: the folder of `log_to` goes."""
    handler = then or logging.NullHandler()
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.handlers = [handler]
        library.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
