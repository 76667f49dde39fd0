"""How the trainer takes experiences from the buffer: one explorer step at a time.

Trinity's default strategy counts experiences, that is model calls. With workflows of several
calls, or with runs that failed, the count of a step is not known beforehand: too large a
`train_batch_size` waits for ever, too small a one splits runs and lets the queue grow. The
last operator of the pipeline stamps the number of a step's experiences on each of them; this
strategy reads one experience, then exactly the rest of its step.
"""

from __future__ import annotations

from typing import Any

from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy
from trinity.algorithm.sample_strategy.utils import representative_sample
from trinity.common.experience import Experience

from aflow_tune.engines.trinity.info_keys import STEP_SIZE_KEY


class WholeStepSampleStrategy(DefaultSampleStrategy):
    """Every train step consumes the experiences of exactly one explorer step."""

    async def sample(
        self, step: int, **kwargs: Any
    ) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """Read the next explorer step.

        Raises:
            StopAsyncIteration: the explorer closed the buffer and it is empty.
        """
        metrics: dict[str, float] = {}
        experiences = await self.exp_buffer.read(batch_size=1)
        remaining = int(experiences[0].info[STEP_SIZE_KEY]) - 1
        if remaining > 0:
            experiences += await self.exp_buffer.read(batch_size=remaining)
        self.set_model_version_metric(experiences, metrics)
        return experiences, metrics, representative_sample(experiences)
