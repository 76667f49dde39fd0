"""Keeps the logs of libraries off the user's terminal and in the run's log file.

Trinity's loggers write to standard output. In the command's process they are replaced by one that
writes to `<run folder>/log/driver.log` once the folder is known, and nowhere before. Workers keep
Trinity's loggers: Ray does not forward their output, and their files are in the same folder.
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
_LIBRARIES = ("as", "datasets", "httpx", "openai", "ray", "transformers", "uvicorn")
"""Names of their loggers; AgentScope's is `as`."""

logger = logging.getLogger("trinity")


def quiet() -> None:
    """Keep the libraries' output off the terminal. Call before importing Trinity.

    Raises BadInput: installed versions are known to break (`refuse_clashes`)."""
    refuse_clashes()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    # AgentScope's agents print their messages; a run has dozens of agents at once.
    os.environ.setdefault("AGENTSCOPE_DISABLE_CONSOLE_OUTPUT", "true")
    warnings.filterwarnings("ignore", module=r"(agentscope|datasets|pydantic|ray|transformers)\b")
    # It warns of a kernel of the hub that is missing, which nothing here would call.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
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
    """Drops lines if the disk is full; logging would print a traceback for each of them."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is None or disk_fault(error) is None:
            super().handleError(record)


def log_to(folder: Path) -> Path:
    """Write this process's library logs to `folder/driver.log` from now on; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "driver.log"
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    end_log(handler)
    return path


def end_log(then: logging.Handler | None = None) -> None:
    """Close the file of `log_to`; from now on library logs go to `then`, or nowhere."""
    handler = then or logging.NullHandler()
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.handlers = [handler]
        library.propagate = False
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
