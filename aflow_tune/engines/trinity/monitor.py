"""Where Trinity's metrics go: TensorBoard, as upstream writes it, and `metrics.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from trinity.common.config import Config
from trinity.utils.monitor import Monitor

from aflow_tune.report.metrics import append_metrics


class RunMonitor(Monitor):
    """Plugs in as `monitor.monitor_type` by its dotted path."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Config) -> None:
        self._writer: SummaryWriter | None = None
        super().__init__(project, name, role, config)
        self._run_dir = Path(config.checkpoint_job_dir)
        self._writer = SummaryWriter(str(Path(config.monitor.cache_dir) / "tensorboard" / role))

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Append one line and the scalars; both are on disk when it returns."""
        append_metrics(self._run_dir, self.role, step, data)
        if self._writer is not None:
            for name, value in data.items():
                if isinstance(value, (int, float)) or hasattr(value, "item"):
                    self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        """Close the TensorBoard file; safe to call twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
