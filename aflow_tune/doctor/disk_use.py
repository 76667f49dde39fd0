"""How much a run will write: checkpoints that are kept, exports, each from the model's shapes.

An estimate for `doctor`, from the shapes in the headers of the model's safetensors files. The
local engine writes fp32 weights and two moments of Adam for what is trained
(`engines/local/trainer.py`, `save`), at the end the adapter and the merged model. Trinity's verl
writes the same for what is trained and the weights of the whole model beside.

Not covered: logs, traces, evaluation records, the object store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aflow_tune.config.tasksets import total_steps
from aflow_tune.engines.local.models import header_of

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

STATE_BYTES = 12
"""Of one trained number in a checkpoint: fp32, and Adam's two moments in fp32."""
_WHOLE_BYTES = 4
_EXPORT_BYTES = 4
"""Of one number of the merged model, at most."""
_OUTSIDE_LORA = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


@dataclass(frozen=True)
class Shapes:
    """What a model consists of. `linear`: (name, rows, columns) of each two-dimensional weight."""

    parameters: int
    bytes: int
    linear: tuple[tuple[str, int, int], ...] = ()


def shapes_of(folder: Path) -> Shapes | None:
    """The shapes in a folder's safetensors files; None where there are none that can be read."""
    parameters, total = 0, 0
    linear: list[tuple[str, int, int]] = []
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        header = header_of(file)
        if header is None:
            return None
        total += file.stat().st_size
        for name, tensor in header.items():
            shape = tensor.get("shape") if name != "__metadata__" else None
            if shape is None:
                continue
            parameters += math.prod(shape)
            if len(shape) == 2 and name.endswith(".weight"):
                linear.append((name, shape[0], shape[1]))
    return Shapes(parameters, total, tuple(linear)) if files else None


def trained_parameters(config: AflowConfig, shapes: Shapes) -> int:
    """Numbers that are trained: all, or those of the LoRA adapter."""
    if not config.model.lora_configs:
        return shapes.parameters
    lora = config.model.lora_configs[0]
    targets = lora.target_modules
    names = [targets] if isinstance(targets, str) else list(targets)
    found = 0
    for name, rows, columns in shapes.linear:
        module = name.split(".")[-2] if "." in name else name
        every = names == ["all-linear"] and module not in _OUTSIDE_LORA
        if every or module in names:
            found += lora.lora_rank * (rows + columns)
    return found


def will_write(config: AflowConfig, shapes: Shapes) -> float:
    """Bytes that the run folder of a prepared configuration will hold at most."""
    if config.mode in ("bench", "harvest", "explore", "serve"):
        return 0.0
    trained = trained_parameters(config, shapes)
    whole = not config.model.lora_configs
    checkpoint = STATE_BYTES * trained
    if config.engine == "trinity" and not whole:
        checkpoint += _WHOLE_BYTES * shapes.parameters
    export = _EXPORT_BYTES * (shapes.parameters + (0 if whole else trained))
    return float(checkpoint * (checkpoints_kept(config) + 1) + export)


def checkpoints_kept(config: AflowConfig) -> int:
    """Checkpoints that lie there at the end. One more is written before the oldest goes."""
    steps, interval = total_steps(config), config.trainer.save_interval
    saves = math.ceil(steps / interval) if steps and interval else 1
    keep = config.trainer.max_checkpoints_to_keep
    if keep and config.engine == "local" and config.buffer.explorer_input.eval_tasksets:
        best = config.checkpoints.keep_best
        keep += best + (1 if best else 0)  # the newest, the best, and one not yet evaluated
    return min(saves, keep) if keep else saves
