"""What a run does by its `mode`, in one table: `MODES`.

Each kind is a `Run` (`run.py`): it is prepared, takes its folder, works, is proven and reported.
`make_run` gives the kind for a configuration, whether it stands alone or is a stage of a chain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from aflow_tune.config.engine import give_engine_settings
from aflow_tune.config.load import AflowConfig
from aflow_tune.engines.trinity.experience_reader import (
    left_out_warning,
    materialise_experiences,
    open_experiences,
)
from aflow_tune.errors import BadInput, Fault
from aflow_tune.running.bench_run import BenchRun
from aflow_tune.running.run import Run


class DataRun(Run):
    """`mode: train`: learns from a data set."""

    def _target(self) -> int:
        materialise_experiences(self.config)
        self.reader = open_experiences(self.config)
        warning = left_out_warning(self.reader, self.config)
        if warning:
            print(f"warning: {warning}", flush=True)
        rows, size, key = self._rows()
        if size > rows:
            raise BadInput(
                "This run would not train a single step.",
                [
                    Fault(
                        self.config.positions.where(key),
                        f"at most {rows}, the rows that can be learned from",
                        str(size),
                        f"{key}: {rows}",
                    )
                ],
            )
        return super()._target()

    def _rows(self) -> tuple[int, int, str]:
        return len(self.reader), self.config.buffer.train_batch_size, "buffer.train_batch_size"

    def _local(self, phase: Callable[[str], None], stop: Callable[[], bool]) -> int:
        from aflow_tune.running.data_training import DataTraining

        logger = logging.getLogger("trinity")
        run = DataTraining(self.config, self.target, phase, stop, logger, self.reader)
        return asyncio.run(run.run())


class HarvestRun(Run):
    """`mode: harvest`: writes a data set for a later stage; `harvesting.py` says how."""

    def _target(self) -> int:
        return 0

    def _rewind(self) -> None:
        print(f"resuming {self.run_dir}")

    def _inject(self) -> None:
        """The harvest runs graphs itself; only the auxiliary models' samplers need settings."""
        give_engine_settings(self.config)

    def _engine(self, phase: Callable[[str], None], stop: Callable[[], bool]) -> int:
        from aflow_tune.running.harvesting import run_harvest
        from aflow_tune.writer.workflow import WriterWorkflow

        if not isinstance(self.workflow_func, WriterWorkflow):
            where = self.config.positions.where("writer.executor")
            found, cure = "another workflow function", "writer: {executor: NAME}, and no `workflow`"
            raise BadInput(
                "Only written workflows are harvested.",
                [Fault(where, "the writer as the workflow", found, cure)],
            )
        run_harvest(self.config, self.run_dir, stop, phase, self.workflow_func)
        return 0

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        """`run_harvest` raises where the data set is not whole."""


class ServeRun(Run):
    """`mode: serve` of Trinity: its engines answer at one address until they are stopped."""

    def _target(self) -> int:
        return 0

    def _prove(self, reached: int, stopped: bool, spent: bool) -> None:
        """There is no step to reach."""


MODES: Mapping[str, type[Run]] = {
    "both": Run,
    "train": DataRun,
    "bench": BenchRun,
    "harvest": HarvestRun,
    # Trinity's own, on its engines only.
    "colocate": Run,
    "explore": Run,
    "serve": ServeRun,
}


def make_run(
    config: AflowConfig,
    workflow_func: Callable[..., Any] | None,
    judge_func: Callable[..., Any] | None,
) -> Run:
    """The run that `config.mode` asks for; an unknown mode is refused when it is prepared."""
    return MODES.get(config.mode, Run)(config, workflow_func, judge_func)
