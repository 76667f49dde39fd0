"""`mode: train` on the local engine: learn from a data set (`sft`, `dpo`, `cpt`), in one process.

One trainer needs no Ray: with or without `--inline` it runs here. The rows come from Trinity's
reader, so batches, shuffling and epochs are Trinity's (`buffer.train_batch_size`,
`data_selector`, `buffer.total_epochs` or `total_steps`); which tokens are learned is decided by
its formatters: the assistant's last turn, or all of them with `enable_concatenated_multi_turn`.
If there are held-out task sets, the workflow is evaluated before, between and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity.common.experience import Experience

from aflow_tune.config.load import AflowConfig
from aflow_tune.engines.trinity.experience_reader import Experiences
from aflow_tune.engines.trinity.launch.inline import InlineLoop
from aflow_tune.engines.trinity.training.run_state import save_taskset_state


class DataTraining(InlineLoop):
    """Trains on the rows of `reader`; arguments as `InlineLoop`'s."""

    def __init__(
        self,
        config: AflowConfig,
        target: int,
        phase: Callable[[str], None],
        stop: Callable[[], bool],
        logger: Any,
        reader: Experiences,
    ) -> None:
        evaluates = bool(config.buffer.explorer_input.eval_tasksets)
        super().__init__(config, target, phase, stop, logger, rolls_out=evaluates)
        self.reader = reader

    async def _open(self, state: dict[str, Any]) -> None:
        position = state.get("taskset_states")
        if position:
            self.reader.load_state_dict(position[0])

    async def _batch(self, step: int) -> list[Experience] | None:
        try:
            experiences: list[Experience] = await self.reader.read()
        except StopAsyncIteration:
            return None
        save_taskset_state(self.run_dir, step, [self.reader.state_dict()])
        return experiences
