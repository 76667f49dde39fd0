"""Writes Trinity's metrics to TensorBoard, as upstream does, and to `metrics.jsonl`.

A metric that cannot be written is logged as an error; the run continues.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from trinity.common.config import Config
from trinity.utils.log import get_logger
from trinity.utils.monitor import Monitor

from aflow_tune.report.metrics import append_metrics, scalar


class RunMonitor(Monitor):
    """A `monitor.monitor_type`. Writes to `config.checkpoint_job_dir` and
    `config.monitor.cache_dir`; tables, which hold whole experiences, are not written."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Config) -> None:
        super().__init__(project, name, role, config)
        self._run_dir = Path(config.checkpoint_job_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._writer = SummaryWriter(str(Path(config.monitor.cache_dir) / "tensorboard" / role))

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        try:
            append_metrics(self._run_dir, self.role, step, data)
            for name, value in data.items():
                number = scalar(value)
                if number is not None:
                    self._writer.add_scalar(name, number, step)
            self._writer.flush()
        except OSError as error:
            told = "Metrics cannot be written, curves and report will have gaps: %s"
            get_logger(__name__, in_ray_actor=True).error(told, error)

    def close(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a full disk, logged by `log`
            self._writer.close()
