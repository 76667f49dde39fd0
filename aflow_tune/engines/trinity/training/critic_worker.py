"""The process of Trinity's critic on verl, for machines without flash-attn.

Trinity 0.6.0 asks flash attention of a critic, whatever the configuration says. This module imports
verl, so it is imported only where a run has a critic.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForTokenClassification as ValueModel
from trinity.trainer.verl import monkey_patch
from trinity.trainer.verl.workers import TrinityCriticWorker


class CriticWorker(TrinityCriticWorker):
    """Trinity's, whose model attends by torch."""

    def __init__(self, config: Any) -> None:
        monkey_patch.load_valuehead_model = _value_model
        super().__init__(config)


def _value_model(
    local_path: str,
    torch_dtype: torch.dtype,
    model_config: Any,
    trust_remote_code: bool,
    use_meta: bool = False,
) -> Any:
    """A model with one value for each token; `use_meta`: without weights, which arrive later."""
    told = {"attn_implementation": "sdpa", "trust_remote_code": trust_remote_code}
    if use_meta:
        return ValueModel.from_config(model_config, dtype=torch_dtype, **told)
    return ValueModel.from_pretrained(local_path, dtype=torch_dtype, config=model_config, **told)
