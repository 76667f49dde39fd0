"""verl's removal of padding where flash-attn is not installed.

Trinity's trainer takes the padding out of every batch before it goes to verl, whatever
`trainer.use_remove_padding` says, by functions that verl imports from flash-attn: without that
package the first step of training ends with ModuleNotFoundError. flash-attn has to be compiled,
and is not in our GPU set. transformers has the same functions in plain torch.

The model itself is another matter: it attends with flash-attn unless told otherwise
(`adaptations.adapt_cluster` does that with `use_remove_padding: false`).
"""

from __future__ import annotations

from typing import Any

from trinity.common.config import Config
from trinity.trainer.trainer import Trainer

from aflow_tune.engines.trinity.settings.engine_choice import removes_padding


class UnpaddingTrainer(Trainer):
    """Trinity's, on nodes with and without flash-attn."""

    def __init__(self, config: Config) -> None:
        provide_unpadding()
        super().__init__(config)


def provide_unpadding() -> None:
    """Let verl in this process take padding out; changes nothing where flash-attn is there."""
    if removes_padding():
        return
    from transformers import modeling_flash_attention_utils as plain
    from verl.utils import attention_utils

    # In the order in which verl unpacks them; the third, `rearrange`, is of einops and unused.
    functions: Any = (plain._index_first_axis, plain._pad_input, None, plain._unpad_input)
    attention_utils._get_attention_functions = lambda: functions
